"""The directory form: what is loaded is what was saved."""

import gc
import hashlib
import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.content import assert_same
from tests.core.store.forging import forged_text
from tests.core.store.trees import DTYPES, trees

from kd_core import (
    FormatError,
    InvalidArgument,
    InvalidValue,
    KeyNotFound,
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    TensorDictFuture,
    append_memmap,
    is_memmap_archive,
    lazy_stack,
    pack_memmap,
    refresh_archive_checksums,
    store,
    unpack_memmap,
)
from kd_core._store.manifest import canonical, read


def sample() -> TensorDict:
    return TensorDict({"a": torch.arange(6).view(3, 2), "n": {"b": torch.ones(3)}, "w": "x"}, [3])


@settings(max_examples=40, deadline=None)
@given(td=trees(), full=st.booleans())
def test_a_tree_comes_back_as_it_was(
    td: TensorDictBase, full: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "tree.kd"
    td.save(path)
    loaded = TensorDict.load(path, verify="full" if full else "fast")
    assert_same(loaded, td)
    assert type(loaded) is type(td)
    assert loaded.names == td.names
    assert not loaded.is_locked


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    octets = torch.arange(48, dtype=torch.uint8)
    bits = (octets % 2).bool() if dtype is torch.bool else octets.view(dtype)
    td = TensorDict({"row": bits, "one": bits[0], "none": bits[:0], "odd": bits[::2]})
    td.save(tmp_path / "td")
    for key, leaf in TensorDict.load(tmp_path / "td").items():
        expected = td[key].contiguous()
        assert leaf.dtype is dtype
        assert leaf.shape == expected.shape
        assert leaf.reshape(-1).view(torch.uint8).tolist() == (
            expected.reshape(-1).view(torch.uint8).tolist()
        )


def test_what_is_loaded_is_written_to_alone(tmp_path: Path) -> None:
    path = tmp_path / "td"
    sample().save(path)
    first, second = TensorDict.load(path), TensorDict.load(path)
    first["a"].fill_(-1)
    assert second["a"].tolist() == TensorDict.load(path, verify="full")["a"].tolist()


def test_a_mapping_outlives_its_store(tmp_path: Path) -> None:
    path = tmp_path / "td"
    sample().save(path)
    old = TensorDict.load(path)
    for _ in range(3):
        TensorDict({"other": torch.zeros(5)}).save(path)
    assert_same(old, sample())
    assert list(TensorDict.load(path).keys()) == ["other"]


def test_tensors_that_are_one_stay_one(tmp_path: Path) -> None:
    leaf = torch.arange(1000.0)
    TensorDict({"a": leaf, "n": {"b": leaf}}).save(tmp_path / "td")
    loaded = TensorDict.load(tmp_path / "td")
    assert loaded["a"] is loaded["n", "b"]
    assert sum(file.stat().st_size for file in (tmp_path / "td").glob("seg-*")) < 6000


@pytest.mark.parametrize(
    "leaf",
    [
        torch.arange(3).expand(4, 3),
        torch.arange(12).view(3, 4).t(),
        torch.complex(torch.ones(2), torch.ones(2)).conj(),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["expanded", "transposed", "conjugated", "parameter"],
)
def test_views_are_saved_as_they_look(leaf: torch.Tensor, tmp_path: Path) -> None:
    TensorDict({"a": leaf}).save(tmp_path / "td")
    assert torch.equal(TensorDict.load(tmp_path / "td")["a"], leaf)


def test_ragged_rows_come_back(tmp_path: Path) -> None:
    rows = [torch.arange(3), torch.arange(0), torch.arange(5)]
    td = TensorDict({"a": torch.nested.nested_tensor(rows, layout=torch.jagged)}, [3])
    td.save(tmp_path / "td")
    loaded = TensorDict.load(tmp_path / "td")["a"]
    assert [row.tolist() for row in loaded.unbind()] == [row.tolist() for row in rows]


def test_members_of_a_stack_keep_their_own(tmp_path: Path) -> None:
    stack = lazy_stack([TensorDict({"a": torch.ones(n), "w": str(n)}) for n in (1, 3)])
    stack.save(tmp_path / "td")
    loaded = TensorDictBase.load(tmp_path / "td")
    assert isinstance(loaded, LazyStackedTensorDict)
    assert [row["a"].shape[0] for row in loaded.unbind(0)] == [1, 3]


def test_data_stays_what_it_was(tmp_path: Path) -> None:
    values: list[object] = [
        None,
        True,
        3,
        2.5,
        "x",
        b"\x00",
        (1, [2]),
        {"d": [], "t": ()},
        -0.0,
        10**30,
    ]
    td = TensorDict({str(at): NonTensorData(value) for at, value in enumerate(values)})
    td["unit"] = MetaData("m")
    td.save(tmp_path / "td")
    loaded = TensorDict.load(tmp_path / "td")
    assert [repr(loaded[str(at)]) for at in range(len(values))] == list(map(repr, values))
    unit: object = loaded.get("unit")
    assert isinstance(unit, MetaData)


def test_some_keys_are_loaded(tmp_path: Path) -> None:
    sample().save(tmp_path / "td")
    loaded = TensorDict.load(tmp_path / "td", keys=["a", ("n", "b")])
    assert sorted(loaded.keys(), key=str) == ["a", "n"]
    with pytest.raises(KeyNotFound, match=r"`aa` not found in the file.*Did you mean `a`"):
        TensorDict.load(tmp_path / "td", keys=["aa"])
    with pytest.raises(KeyNotFound, match="goes through `a`"):
        TensorDict.load(tmp_path / "td", keys=[("a", "b")])


def test_loaded_to_a_device(tmp_path: Path) -> None:
    sample().save(tmp_path / "td")
    assert TensorDict.load(tmp_path / "td", device="cpu").device == torch.device("cpu")


def test_keys_are_not_paths(tmp_path: Path) -> None:
    keys = ["", "/etc/x", "../x", "a/b", "\0", "\ud800", "é", "e\u0301", "A", "a", "shape"]
    TensorDict({key: torch.tensor(at) for at, key in enumerate(keys)}).save(tmp_path / "td")
    assert [path.name for path in tmp_path.iterdir()] == ["td"]
    loaded = TensorDict.load(tmp_path / "td")
    assert list(loaded.keys()) == keys


def test_nothing_is_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TensorDict.load(tmp_path / "td")
    (tmp_path / "td").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no container was saved here.*: '.*/td'"):
        TensorDict.load(tmp_path / "td")
    (tmp_path / "td" / "meta.json").touch()
    with pytest.raises(FileNotFoundError, match="reads a directory of tensordict"):
        TensorDict.load(tmp_path / "td")


@pytest.mark.parametrize("act", ["save", "memmap", "memmap_", "memmap_like"])
def test_a_store_may_be_beside_other_files(act: str, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"cat")
    (tmp_path / "a").mkdir()
    for _ in range(2):
        getattr(sample(), act)(tmp_path)
    assert set(TensorDict.load(tmp_path).keys()) == set(sample().keys())
    assert (tmp_path / "cat.png").read_bytes() == b"cat"
    assert (tmp_path / "a").is_dir()


@pytest.mark.parametrize("read", [TensorDict.load, TensorDict.load_memmap])
def test_a_path_goes_on_with_the_keys_of_nested_containers(
    read: Callable[[Path], TensorDict], tmp_path: Path
) -> None:
    td = TensorDict({("train", "5"): TensorDict(x=torch.ones(2), batch_size=[2])}, [])
    td.save(tmp_path / "td")
    assert read(tmp_path / "td" / "train" / "5")["x"].tolist() == [1, 1]
    assert read(tmp_path / "td" / "train")["5", "x"].tolist() == [1, 1]
    for name in ("test", "train/6", "train/5/x", "train/5/x/y"):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "td" / name)
    found = TensorDict.load(tmp_path / "td" / "train", keys=[("5", "x")])
    assert found["5", "x"].tolist() == [1, 1]


def test_what_is_not_a_store_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"")
    (tmp_path / "photos" / "manifest.json").write_text("{}")  # of another program
    with pytest.raises(ValueError, match=r"must not have a `manifest\.json` .* beside `?cat\.png"):
        sample().save(tmp_path / "photos")
    assert (tmp_path / "photos" / "manifest.json").read_text() == "{}"
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match="got a file"):
        sample().save(tmp_path / "file")


PLAIN = [
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cuda:1"),
    {1, "a", (2, None)},
    frozenset({1.5}),
    complex(1, math.inf),
    bytearray(b"x"),
    range(1, 9, 2),
    slice(None, 3),
    OrderedDict(b=1, a=[2]),
    {None: 1, True: 2, 1.5: 3, ("a", 1): 4, b"k": 5},
    Path("a/b"),
    date(2020, 2, 29),
    datetime(2020, 2, 29, 1, 2, 3, 4, tzinfo=UTC),
    timedelta(days=-1, microseconds=5),
]


def test_plain_data_of_many_types_comes_back(tmp_path: Path) -> None:
    for place in (tmp_path / "td", tmp_path / "td.safetensors"):
        TensorDict({f"{n}": NonTensorData(value) for n, value in enumerate(PLAIN)}).save(place)
        loaded = TensorDict.load(place, verify="full")
        for number, value in enumerate(PLAIN):
            found: object = loaded[f"{number}"]
            assert type(found) is type(value)
            assert found == value


def test_arrays_of_numpy_come_back(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    arrays = [
        np.arange(6, dtype=">i2").reshape(2, 3)[:, ::2],
        np.array(["word", ""]),
        np.array([b"x"]),
        np.zeros((0, 2)),
        np.array(1 + 2j),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.float16(2),
        np.str_("s"),
        np.bool_(True),
    ]
    td = TensorDict({"x": NonTensorData(arrays), "n": NonTensorData({"k": arrays[0]})})
    td.save(tmp_path / "td")
    loaded = TensorDict.load(tmp_path / "td")
    values: Any = loaded["x"]
    for found, array in zip(values, arrays, strict=True):
        assert type(found) is type(array)
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)
    nested: Any = loaded["n"]
    nested["k"][0, 0] = 5  # not a view of the file
    with pytest.raises(InvalidArgument, match="holds a `ndarray`"):
        TensorDict({"x": NonTensorData(np.array([object()]))}).save(tmp_path / "td")


@pytest.mark.parametrize(
    "forged",
    [
        {"r": ["torch.dtype", "load"]},
        {"r": ["torch.Size", {"r": ["builtins.range", [0, 10**12]]}]},
        {"r": ["builtins.set", {"r": ["builtins.range", [0, 10**12]]}]},
        {"r": ["builtins.range", {"r": ["builtins.range", [0, 10**12]]}]},
        {"r": ["builtins.bytearray", 10**12]},
        {"r": ["builtins.complex", [1, 2, 3]]},
        {"r": ["collections.OrderedDict", 3]},
        {"r": ["numpy.ndarray", ["O", [1], {"b": "AAAAAAAAAAA="}]]},
        {"r": ["numpy.ndarray", ["<i8", [2], {"b": "AAAAAAAAAAA="}]]},
        {"r": ["numpy.ndarray", ["<i8", [1], 10**12]]},
        {"r": ["torch.Tensor", ["load", [1], {"b": "AAAAAAAAAAA="}]]},
        {"r": ["torch.Tensor", ["int64", [2], {"b": "AAAAAAAAAAA="}]]},
        {"r": ["torch.Tensor", ["int64", [1], 10**12]]},
        {"r": ["torch.Tensor", ["int64", [10**12], {"b": ""}]]},
        {"r": ["datetime.datetime", "no"]},
        {"r": ["os.system", "true"]},
        {"d": [[[1], 2]]},
        {"d": [[{"t": [[1]]}, 2]]},
        {"d": [[1, 2], [True, 3]]},
    ],
)
def test_forged_plain_data_is_refused(forged: object) -> None:
    with pytest.raises(FormatError):
        read(forged)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (object(), "entry `\\('n', 'x'\\)` holds an `object`, which cannot .*register_type"),
        ({object(): 2}, "entry `\\('n', 'x'\\)` holds an `object`"),
        (torch.nn.ReLU, "entry `\\('n', 'x'\\)` holds a `type`"),
        (torch.zeros(2, device="meta"), "entry `\\('n', 'x'\\)` is on the meta device"),
        (torch.zeros(2).to_sparse(), "entry `\\('n', 'x'\\)` must be a dense or jagged tensor"),
        (10**5000, "at most 4000 digits"),
    ],
    ids=["object", "keys", "class", "meta", "sparse", "digits"],
)
def test_what_cannot_be_saved_writes_nothing(value: object, error: str, tmp_path: Path) -> None:
    inner = value if isinstance(value, torch.Tensor) else NonTensorData(value)
    with pytest.raises((TypeError, ValueError), match=error):
        TensorDict({"a": 1.0, "n": {"x": inner}}).save(tmp_path / "td")
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_dict_with_integers_as_keys_comes_back(tmp_path: Path) -> None:
    state = {"state": {0: {"lr": 0.5}, -1: {}, "1": 2, 1: 3}, "param_groups": [{"params": [0, 1]}]}
    TensorDict(state=NonTensorData(state)).save(tmp_path / "td")
    found = TensorDict.load(tmp_path / "td").get_non_tensor("state")
    assert found == state
    assert isinstance(found, dict)
    assert list(found["state"]) == [0, -1, "1", 1]


def test_a_newer_format_says_to_upgrade(tmp_path: Path) -> None:
    sample().save(tmp_path / "td")
    manifest = tmp_path / "td" / "manifest.json"
    fields = json.loads(manifest.read_text().partition("\n")[2])

    body = canonical({**fields, "min_reader": 7, "version": 9})
    digest = hashlib.sha256(body).hexdigest()
    manifest.write_bytes(b'{"sha256": "%s"}\n%s' % (digest.encode(), body))
    for act in (lambda: TensorDict.load(tmp_path / "td"), lambda: sample().save(tmp_path / "td")):
        with pytest.raises(FormatError, match=r"needs a reader of version 7.*Upgrade kd-core"):
            act()  # type: ignore[no-untyped-call]  # by torch


def test_a_damaged_store_is_replaced(tmp_path: Path) -> None:
    sample().save(tmp_path / "td")
    (tmp_path / "td" / "manifest.json").write_bytes(b"x")
    sample().save(tmp_path / "td")
    assert_same(TensorDict.load(tmp_path / "td", verify="full"), sample())
    assert len(list((tmp_path / "td").glob("seg-*"))) == 1


def test_many_entries_are_loaded_in_seconds(tmp_path: Path) -> None:
    # Work per entry that grows with their number takes minutes.
    count = 60_000
    TensorDict({f"{n}": torch.tensor(n) for n in range(count)}).save(tmp_path / "td")
    start = time.process_time()
    loaded = TensorDict.load(tmp_path / "td")
    assert time.process_time() - start < 5
    assert loaded["777"] == 777
    assert gc.isenabled()


def test_parameters_that_ask_for_what_is_done_anyway(tmp_path: Path) -> None:
    td = TensorDict({"a": torch.arange(3), "n": {"b": torch.ones(3)}}, [3])
    options = {"num_threads": 2, "robust_key": True, "share_non_tensor": True, "atomic": True}
    assert td.save(tmp_path / "a" / "b", True, return_early=False, **options) is td  # type: ignore[arg-type]  # wrong for the type checker alone
    path = tmp_path / "a" / "b"
    for loaded in (
        TensorDict.load(path, "cpu", num_threads=1, robust_key=None, allow_pickle=False),
        TensorDict.load_memmap(path, device="cpu", non_blocking=False, mode="r"),
        TensorDict.load(path, out=td.clone().zero_()),
        td.clone().zero_().load_(path, robust_key=True),
        td.clone().zero_().load_memmap_(path, True, mode="r"),
        TensorDict.load_memmap(path, num_threads=4),
        td.memmap(tmp_path / "m", True, **options),  # type: ignore[arg-type]  # wrong for the type checker alone
        td.clone().memmap_(tmp_path / "n", **options),  # type: ignore[arg-type]  # wrong for the type checker alone
    ):
        assert (loaded == td).all()
    assert TensorDict.load(path, subpath="n")["b"].tolist() == [1, 1, 1]
    assert TensorDict.load_memmap(path, subpath=("n",)).batch_size == (3,)
    with pytest.raises(ValueError, match=r"`subpath` must be the key of a container .* got `a`"):
        TensorDict.load(path, subpath="a")
    with pytest.raises(ValueError, match="`mode` must be"):
        TensorDict.load(path, mode="w")
    with pytest.raises(ValueError, match="would run code from a file"):
        TensorDict.load(path, allow_pickle=True)
    early = td.memmap(tmp_path / "o", return_early=True, num_threads=2)
    assert isinstance(early, TensorDictFuture)
    assert (early.result() == td).all()


def test_a_name_of_a_file_is_a_file(tmp_path: Path) -> None:
    td = TensorDict({"a": torch.arange(3)}, [3])
    for name in ("model.st", "model.safetensors", "m.tdz"):
        td.save(tmp_path / name)
        assert is_memmap_archive(tmp_path / name)
        assert TensorDict.load(tmp_path / name)["a"].tolist() == [0, 1, 2]
        assert TensorDict.load_memmap(tmp_path / name)["a"].tolist() == [0, 1, 2]
    td.save(tmp_path / "any", archive=True, compression="deflate")
    assert is_memmap_archive(tmp_path / "any")
    td.save(tmp_path / "folder.st", archive=False)
    assert not is_memmap_archive(tmp_path / "folder.st")
    assert not is_memmap_archive(tmp_path / "nothing")
    with pytest.raises(ValueError, match="must be one of"):
        td.save(tmp_path / "x", archive=True, compression="gzip")
    with pytest.raises(ValueError, match="cannot be combined with a directory"):
        td.save(tmp_path / "x", compression="lzma")


def test_directories_and_files_become_one_another(tmp_path: Path) -> None:
    td = TensorDict({"a": torch.arange(3)}, [3])
    td.memmap(tmp_path / "folder")
    packed = pack_memmap(tmp_path / "folder", tmp_path / "packed.tdz", compression="stored")
    assert is_memmap_archive(packed)
    assert unpack_memmap(packed, tmp_path / "other") == tmp_path / "other"
    append_memmap(tmp_path / "other", td)
    append_memmap(tmp_path / "folder", td)
    for name in ("folder", "other"):
        assert TensorDict.load_memmap(tmp_path / name)["a"].tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ValueError, match="`prefix` must be a directory"):
        append_memmap(packed, td)
    data = bytearray(packed.read_bytes())
    data[-8] = 7  # the last element, by something else
    packed.write_bytes(data)
    with pytest.raises(FormatError, match="checksum"):
        TensorDict.load(packed, verify="full")
    assert refresh_archive_checksums(packed) == packed
    assert TensorDict.load(packed, verify="full")["a"].tolist() == [0, 1, 7]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("m.pt", r"`m.pt` has the suffix of torch, and becomes a single file .*`torch.save\(td, "),
        ("m.h5", r"`m.h5` has the suffix of HDF5, and becomes a directory, .*Use `to_h5` for HDF5"),
        ("m.parquet", r"Use `to_parquet` for Parquet, or another suffix: `.safetensors`"),
        ("m.onnx", r"Use `kd_export.save\(module, path\)` for exported modules"),
    ],
)
def test_a_new_name_with_the_suffix_of_another_format_is_noted(
    name: str, says: str, tmp_path: Path
) -> None:
    td = TensorDict({"a": torch.arange(3)}, [3])
    with pytest.warns(UserWarning, match=says) as noted:
        td.save(tmp_path / name)
    assert noted[0].filename == __file__
    td.save(tmp_path / name)  # it is known by now
    assert TensorDict.load(tmp_path / name)["a"].tolist() == [0, 1, 2]


def trained() -> tuple[torch.nn.Linear, torch.optim.Adam]:
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("name", ["run.kd", "run.safetensors"])
def test_the_state_of_an_optimizer_is_saved_as_one_value(name: str, tmp_path: Path) -> None:
    net, optimizer = trained()
    state = optimizer.state_dict()
    held = NonTensorData({**state, "shared": [net.weight.detach(), net.weight.detach()]})
    TensorDict({"w": net.weight.detach(), "optimizer": held}).save(tmp_path / name)
    found = TensorDict.load(tmp_path / name).get_non_tensor("optimizer")
    assert isinstance(found, dict)
    assert found["param_groups"] == state["param_groups"]
    assert list(found["state"]) == [0, 1]
    for number, moments in state["state"].items():
        for moment, value in moments.items():
            assert torch.equal(found["state"][number][moment], value)
    assert torch.equal(found.pop("shared")[1], net.weight.detach())
    again = torch.optim.Adam(net.parameters())
    again.load_state_dict(found)
    assert again.param_groups[0]["lr"] == 0.1


def test_a_value_with_tensors_is_in_arenas_and_buffers_too(tmp_path: Path) -> None:
    td = TensorDict({"a": torch.zeros(3), "o": NonTensorData({0: (torch.ones(2), "m")})}, [3])
    like = td.memmap_like(tmp_path / "arena")
    for made in (like, TensorDict.load_memmap(tmp_path / "arena"), td.consolidate()):
        value, unit = made.get_non_tensor("o")[0]  # type: ignore[index]  # of an object
        assert (value.tolist(), unit) == ([1, 1], "m")
    td.save(tmp_path / "rows")
    with pytest.raises(InvalidValue, match="`o` holds one value with tensors for the whole batch"):
        td.append_to(tmp_path / "rows")
    with pytest.raises(InvalidValue, match="cannot be resized"):
        store.resize(tmp_path / "arena", 5)
    rows = TensorDict({"o": NonTensorStack({0: torch.ones(2)}, torch.zeros(0, 3))}, [2])
    rows.save(tmp_path / "x")
    first, second = TensorDict.load(tmp_path / "x")["o"]
    assert first[0].tolist() == [1, 1]
    assert second.shape == (0, 3)
    with pytest.raises(InvalidArgument, match="holds a `Parameter`, which cannot be saved"):
        TensorDict({"o": NonTensorStack(torch.nn.Parameter(torch.ones(2)), {})}, [2]).save(
            tmp_path / "y"
        )


@pytest.mark.parametrize("number", [7, -1, "0", True, None, [0]])
def test_a_forged_number_of_a_tensor_is_refused(number: object, tmp_path: Path) -> None:
    TensorDict({"o": NonTensorData({0: torch.ones(2)})}).save(tmp_path / "td")
    text = (tmp_path / "td" / "manifest.json").read_text().splitlines()[1]
    assert '{"n":0}' in text
    forged_text(tmp_path / "td", text.replace('{"n":0}', f'{{"n":{json.dumps(number)}}}'))
    with pytest.raises(FormatError, match="expected non-tensor data"):
        TensorDict.load(tmp_path / "td")
