"""Directories of the package tensordict, written here as that package was seen to write them."""

import json
import pickle
import random
import struct
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from shutil import make_archive

import pytest
import torch

from kd_core import (
    FormatError,
    InvalidValue,
    LazyStackedTensorDict,
    MemoryMappedTensor,
    TensorClass,
    TensorDict,
    store,
)
from kd_core.convert import from_tensordict_directory

KIND = "<class 'tensordict._td.TensorDict'>"


def leaf(path: Path, value: torch.Tensor) -> dict[str, object]:
    if value.numel():
        octets = value.reshape(-1).view(torch.uint8)
        path.with_name(f"{path.name}.memmap").write_bytes(bytes(octets.tolist()))
    return {"device": "cpu", "shape": list(value.shape), "dtype": str(value.dtype)}


def folder(path: Path, batch: list[int], kind: str = KIND, **entries: object) -> None:
    path.mkdir(exist_ok=True)
    rows = {
        key: leaf(path / key, value) if isinstance(value, torch.Tensor) else value
        for key, value in entries.items()
    }
    (path / "meta.json").write_text(json.dumps({**rows, "shape": batch, "_type": kind}))


def data(path: Path, kind: str, **fields: object) -> None:
    path.mkdir()
    meta = {"_type": f"<class 'tensordict.tensorclass.{kind}'>", **fields}
    (path / "meta.json").write_text(json.dumps(meta))


def sample(path: Path) -> None:
    node, rows = {"type": "TensorDict"}, {"type": "NonTensorStack"}
    empty = torch.zeros(2, 0)
    folder(path, [2], a=torch.arange(4).view(2, 2), n=node, w=rows, e=empty)
    folder(path / "n", [2], b=torch.ones(2, dtype=torch.bfloat16), s={"type": "NonTensorData"})
    data(path / "n" / "s", "NonTensorData", data="word")
    data(path / "w", "NonTensorStack", data=["p", "q"])


def test_a_directory_is_read_and_saved_anew(tmp_path: Path) -> None:
    sample(tmp_path / "old")
    td = from_tensordict_directory(tmp_path / "old")
    assert td.batch_size == (2,)
    assert td["a"].tolist() == [[0, 1], [2, 3]]
    assert td["n", "b"].dtype is torch.bfloat16
    found: list[object] = [td["n", "s"], td["w"], td["e"].shape]
    assert found == ["word", ["p", "q"], (2, 0)]
    td.save(tmp_path / "new")
    words: object = TensorDict.load(tmp_path / "new", verify="full")["w"]
    assert words == ["p", "q"]


def test_members_of_a_stack_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "stack"
    path.mkdir()
    meta = {"_type": "<class 'tensordict._lazy.LazyStackedTensorDict'>", "stack_dim": 0}
    (path / "meta.json").write_text(json.dumps(meta))
    for number in range(11):
        folder(path / f"{number}", [], x=torch.ones(number + 1))
    stack = from_tensordict_directory(path)
    assert isinstance(stack, LazyStackedTensorDict)
    assert [len(member["x"]) for member in stack.unbind(0)] == list(range(1, 12))


def test_load_reads_a_directory_and_writes_nothing_to_it(tmp_path: Path) -> None:
    path = tmp_path / "old"
    sample(path)
    td = TensorDict.load(path, keys=["a", "n"])
    assert set(td.keys()) == {"a", "n"}
    td["a"].zero_()
    assert TensorDict.load(path)["a"].tolist() == [[0, 1], [2, 3]]
    assert TensorDict.load(path / "n")["b"].tolist() == [1, 1]


def test_writes_to_a_mapped_directory_go_to_its_files(tmp_path: Path) -> None:
    path = tmp_path / "old"
    sample(path)
    td = TensorDict.load_memmap(path)
    assert not td.is_memmap()  # it is not locked: an entry may be replaced
    assert isinstance(td["n", "b"], MemoryMappedTensor)
    td["a"].add_(10)
    assert TensorDict.load_memmap(path, mode="r")["a"].tolist() == [[10, 11], [12, 13]]
    assert TensorDict.load_memmap(path, subpath="n")["b"].tolist() == [1, 1]
    assert TensorDict({}, [2]).load_memmap_(path)["a"].tolist() == [[10, 11], [12, 13]]
    again = pickle.loads(ForkingPickler.dumps(td))
    again["n", "b"].fill_(5)
    assert td["n", "b"].tolist() == [5, 5]


def test_no_rows_are_added_to_a_directory(tmp_path: Path) -> None:
    sample(tmp_path / "old")
    with pytest.raises(InvalidValue, match="to which rows are not added"):
        TensorDict({"a": torch.zeros(1, 2)}, [1]).append_to(tmp_path / "old")
    assert len(TensorDict.load(tmp_path / "old")) == 2
    with pytest.raises(FileNotFoundError, match=r"`TensorDict\.load` reads"):
        store.check(tmp_path / "old")


class Pair(TensorClass):
    x: torch.Tensor
    y: torch.Tensor | None = None


def test_classes_and_names_are_found(tmp_path: Path) -> None:
    kind = f"<class '{__name__}.Pair'>"
    path = tmp_path / "pair"
    path.mkdir()
    (path / "meta.json").write_text(json.dumps({"_type": kind}))
    folder(path / "_tensordict", [2], x=torch.ones(2), _names=["time"])
    pair = TensorDict.load(path)
    assert isinstance(pair, Pair)
    assert pair.names == ["time"]
    assert pair.x.tolist() == [1, 1]
    assert pair.y is None
    (path / "meta.json").write_text(json.dumps({"_type": "<class 'elsewhere.Pair'>"}))
    with pytest.warns(UserWarning, match=r"'elsewhere\.Pair'"):
        assert type(TensorDict.load(path)) is TensorDict


def test_other_files_in_a_directory_are_left_alone(tmp_path: Path) -> None:
    sample(tmp_path / "old")
    (tmp_path / "old" / "storage_metadata.json").write_text("{}")
    (tmp_path / "old" / "stale.memmap").write_bytes(b"x")
    assert len(TensorDict.load(tmp_path / "old")) == 2


def consolidated(path: Path) -> bytes:
    """Write a file as tensordict's `consolidate` was seen to write it; return its bytes."""
    about = {"device": None, "names": ["time"], "batch_size": [2], "is_locked": True}
    level = {"cls": "TensorDict", "non_tensors": {}, "leaves": {}, "cls_metadata": about}
    inner = {**level, "leaves": {"b": ["torch.int16", [2], 16, 24, 4]}}
    tree = {
        **level,
        "leaves": {"a": ["torch.float32", [2, 2], 0, 16, 0]},
        "non_tensors": {"s": ["word", [2], None]},
        "n": inner,
    }
    text = json.dumps(tree).encode()
    octets = struct.pack("<4f2h4x", 1, 2, 3, 4, 5, 6)
    content = octets + text + struct.pack("<Q", len(text))
    path.write_bytes(content)
    return content


def test_a_consolidated_file_is_read(tmp_path: Path) -> None:
    content = consolidated(tmp_path / "td.bin")
    for td in (TensorDict.load(tmp_path / "td.bin"), TensorDict.load_memmap(tmp_path / "td.bin")):
        assert (td.batch_size, td.names, td.is_locked) == ((2,), ["time"], True)
        assert td["a"].tolist() == [[1, 2], [3, 4]]
        assert td["n", "b"].tolist() == [5, 6]
        words: object = td["s"]
        assert words == "word"
        td["a"].zero_()
    assert (tmp_path / "td.bin").read_bytes() == content


def test_an_archive_is_read(tmp_path: Path) -> None:
    sample(tmp_path / "old")
    make_archive(str(tmp_path / "old"), "zip", tmp_path / "old")
    for keys in (None, ["n"]):
        td = TensorDict.load(tmp_path / "old.zip", keys=keys)
        assert td["n", "b"].tolist() == [1, 1]
        assert ("a" in td) == (keys is None)


def test_what_is_changed_in_a_file_is_an_error_or_other_data(tmp_path: Path) -> None:
    whole = consolidated(tmp_path / "td.bin")
    sample(tmp_path / "old")
    make_archive(str(tmp_path / "old"), "zip", tmp_path / "old")
    archive = (tmp_path / "old.zip").read_bytes()
    rng = random.Random(0)
    refused = 0
    for number in range(200):
        content = bytearray(whole if number % 2 else archive)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(content))
            content[place : place + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
        (tmp_path / "forged").write_bytes(content)
        try:
            td = TensorDict.load(tmp_path / "forged")
        except (FormatError, OSError):
            refused += 1
        else:
            assert isinstance(repr(td.clone()), str)
    assert refused > 50


def damaged(path: Path, what: str) -> None:
    match what:
        case "pickle":
            folder(path, [], x={"type": "NonTensorData"})
            data(path / "x", "NonTensorData")
            (path / "x" / "other.pickle").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
        case "short":
            folder(path, [2], a=torch.ones(2))
            (path / "a.memmap").write_bytes(b"x")
        case "dtype":
            folder(path, [], a={"shape": [], "dtype": "torch.load"})
        case "shape":
            folder(path, [], a={"shape": [-1], "dtype": "torch.int64"})
        case "batch":
            folder(path, [3], a=torch.ones(2))
        case "key":
            path.mkdir()
            meta = {"../../x": {"type": "TensorDict"}, "shape": [], "_type": KIND}
            (path / "meta.json").write_text(json.dumps(meta))
        case "file":
            folder(path, [2], a=torch.ones(2))
            (path / "shape.memmap").write_bytes(b"")
        case "class":
            path.mkdir()
            (path / "meta.json").write_text(json.dumps({"_type": "<class '__main__.Data'>"}))
        case "json":
            path.mkdir()
            (path / "meta.json").write_text("[]")
        case "link":
            folder(path.with_name("other"), [])
            folder(path, [], n={"type": "TensorDict"})
            (path / "n").symlink_to(path.with_name("other"))


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("pickle", "holds a pickle, which is not read"),
        ("short", "must have 8 bytes, got 1"),
        ("dtype", "which cannot be read"),
        ("shape", "which is not valid"),
        ("batch", "batch_size"),
        ("key", "which does not exist"),
        ("file", "does not name its dtype"),
        ("class", "which only tensordict can read"),
        ("json", "is not one of tensordict"),
        ("link", "Errno"),
    ],
)
def test_what_cannot_be_trusted_is_refused(what: str, match: str, tmp_path: Path) -> None:
    damaged(tmp_path / "old", what)
    with pytest.raises((FormatError, OSError), match=match):
        from_tensordict_directory(tmp_path / "old")
