"""Rows that are appended to a store, and what is refused."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.content import assert_same
from tests.core.store.faults import names_in

from kd_core import (
    FormatError,
    KeySetMismatch,
    LazyStackedTensorDict,
    MetaData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    cat,
    lazy_stack,
    store,
)


def rows(count: int, start: int = 0) -> TensorDict:
    words = [f"w{number}" for number in range(start, start + count)]
    leaf = torch.arange(start, start + count)
    inner = {"b": leaf[:, None].expand(count, 2).float(), "w": NonTensorStack(*words)}
    return TensorDict({"a": leaf, "n": inner if count else {"b": inner["b"]}, "unit": "m"}, [count])


@settings(max_examples=15, deadline=None)
@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=4), compacted=st.booleans())
def test_parts_are_read_as_one(
    counts: list[int], compacted: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("rows")
    parts = [rows(count, start=sum(counts[:at])) for at, count in enumerate(counts)]
    for part in parts:
        part.append_to(path)
    if compacted:
        store.compact(path)
    assert store.inspect(path).parts == (1 if compacted else len(parts))
    assert_same(TensorDict.load(path, verify="full"), cat(parts))
    only = TensorDict.load(path, keys=["a"])
    assert only["a"].tolist() == list(range(sum(counts)))


def test_what_is_there_is_not_touched(tmp_path: Path) -> None:
    rows(2).save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("seg-*")}
    rows(3).append_to(tmp_path)
    after = {path.name: path.read_bytes() for path in tmp_path.glob("seg-*")}
    assert before.items() < after.items()


def test_segments_are_kept_until_the_next_generation(tmp_path: Path) -> None:
    for _ in range(3):
        rows(2).append_to(tmp_path)
    store.compact(tmp_path)
    assert len([name for name in names_in(tmp_path) if name.startswith("seg-")]) == 4
    rows(1).append_to(tmp_path)
    assert len([name for name in names_in(tmp_path) if name.startswith("seg-")]) == 2


def test_ragged_rows_and_stacks_are_appended(tmp_path: Path) -> None:
    def ragged(*sizes: int) -> TensorDict:
        tokens = [torch.arange(size) for size in sizes]
        nested = torch.nested.nested_tensor(tokens, layout=torch.jagged)
        return TensorDict({"tokens": nested}, [len(sizes)])

    ragged(1, 3).append_to(tmp_path / "ragged")
    ragged(2, 0).append_to(tmp_path / "ragged")
    loaded = TensorDict.load(tmp_path / "ragged")["tokens"]
    assert [len(row) for row in loaded.unbind()] == [1, 3, 2, 0]
    for sizes in ((1, 3), (2,)):
        members = [TensorDict({"x": torch.ones(size)}) for size in sizes]
        lazy_stack(members).append_to(tmp_path / "stack")
    stack = TensorDictBase.load(tmp_path / "stack")
    assert isinstance(stack, LazyStackedTensorDict)
    assert [len(member["x"]) for member in stack.unbind(0)] == [1, 3, 2]


@pytest.mark.parametrize(
    ("other", "error", "match"),
    [
        (rows(2).exclude("a"), KeySetMismatch, "`a` only in the store"),
        (rows(2).exclude(("n", "b")), KeySetMismatch, "below key `n`"),
        (rows(2).double(), ValueError, r"`a` must have the dtype of the store, 'int64'"),
        (rows(2).select("a")[0], ValueError, "must have a batch dimension"),
        (rows(2).set("unit", "km"), ValueError, "`unit` holds one value for the whole batch"),
        (rows(4).reshape(2, 2), ValueError, "batch size behind the first dimension"),
        (rows(2).set("a", torch.ones(2, 3).long()), ValueError, "shape behind the first dimension"),
        (
            rows(2).set("a", {}),
            ValueError,
            "`a` must have the kind of the store, 'tensor', got 'td'",
        ),
        (lazy_stack([rows(2)[0]]), ValueError, "the kind of the store, 'td', got"),
    ],
    ids=["less", "less below", "dtype", "no batch", "value", "batch", "shape", "kind", "stack"],
)
def test_rows_that_do_not_fit_are_refused(
    other: TensorDictBase, error: type[Exception], match: str, tmp_path: Path
) -> None:
    rows(3).save(tmp_path)
    before = names_in(tmp_path)
    with pytest.raises(error, match=match):
        other.append_to(tmp_path)
    assert names_in(tmp_path) == before
    assert_same(TensorDict.load(tmp_path, verify="full"), rows(3))


def test_rows_of_a_damaged_manifest_are_not_removed(tmp_path: Path) -> None:
    for _ in range(2):
        rows(2).append_to(tmp_path)
    manifest = tmp_path / "manifest.json"
    good = manifest.read_bytes()
    manifest.write_bytes(good.replace(b'"td"', b'"tD"'))
    before = names_in(tmp_path)
    with pytest.raises(FormatError, match=r"has been changed: its digest .* Restore the file"):
        rows(2).append_to(tmp_path)
    assert names_in(tmp_path) == before
    manifest.write_bytes(good)
    rows(1, start=2).append_to(tmp_path)
    assert TensorDict.load(tmp_path, verify="full")["a"].tolist() == [0, 1, 0, 1, 2]


def test_single_files_are_not_appended_to(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a single file\. Save to a directory"):
        rows(2).append_to(tmp_path / "td.safetensors")
    with pytest.raises(ValueError, match="cannot compact"):
        store.compact(tmp_path / "td.safetensors")


def test_values_of_the_whole_batch_stay_so(tmp_path: Path) -> None:
    td = TensorDict({"unit": MetaData("m"), "x": torch.ones(2)}, [2])
    td.append_to(tmp_path)
    td.append_to(tmp_path)
    assert TensorDict.load(tmp_path)["unit"] == "m"


def test_what_is_under_many_keys_is_joined_once(tmp_path: Path) -> None:
    sizes = [torch.arange(3.0), torch.arange(2.0)]
    plain, ragged = torch.ones(2, 3), torch.nested.nested_tensor(sizes, layout=torch.jagged)
    entries = {"a": plain, "b": plain, "n": {"a": plain}, "own": torch.zeros(2)}
    part = TensorDict({**entries, "r": ragged, "s": ragged, "double": ragged * 2}, [2])
    for _ in range(3):
        part.append_to(tmp_path)
    assert store.inspect(tmp_path).leaves == 3 * 5
    for _ in range(2):
        loaded = TensorDict.load(tmp_path, verify="full")
        assert loaded["a"] is loaded["b"] is loaded["n", "a"]
        assert loaded["r"] is loaded["s"]
        assert loaded["a"].tolist() == [[1] * 3] * 6
        total = loaded["r"] + loaded["double"]  # torch adds what shares its offsets
        assert [row.sum().item() for row in total.unbind()] == [9, 3] * 3
        store.compact(tmp_path)
    assert store.inspect(tmp_path).leaves == 5


def test_rows_under_many_keys_take_the_memory_of_one(tmp_path: Path) -> None:
    leaf = torch.ones(1000, 100)
    part = TensorDict({f"k{number}": leaf for number in range(50)}, [1000])
    for _ in range(2):
        part.append_to(tmp_path)
    loaded = TensorDict.load(tmp_path)
    assert len({value.data_ptr() for value in loaded.values()}) == 1


def test_rows_that_cannot_be_saved_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="holds an `object`"):
        TensorDict({"a": torch.ones(2), "b": MetaData(object())}, [2]).append_to(tmp_path / "td")
    assert not names_in(tmp_path)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_rows_are_appended_from_wherever_they_are(device: str | None, tmp_path: Path) -> None:
    path, td = tmp_path / "td", rows(2)
    other = td.to("cpu") if device is None else td
    (td if device is None else td.to("cpu")).save(path)
    other.append_to(path)
    store.compact(path)
    other.append_to(path)
    found = TensorDict.load(path)
    assert str(found.device) == str(found.nested("n", TensorDict).device) == "cpu"
    assert found["a"].tolist() == [0, 1] * 3


def test_rows_are_appended_to_a_sealed_arena(tmp_path: Path) -> None:
    arena = rows(2).memmap(tmp_path / "td")
    store.seal(tmp_path / "td")
    for part in (rows(1, 2), TensorDict.load(tmp_path / "td")[:1], arena[:1]):
        part.append_to(tmp_path / "td")
    assert TensorDict.load(tmp_path / "td")["a"].tolist() == [0, 1, 2, 0, 0]


def test_parts_are_described_once(tmp_path: Path) -> None:
    for _ in range(30):
        rows(2).append_to(tmp_path / "td")
    text = str(store.inspect(tmp_path / "td"))
    assert "30 parts, of which the first is\n  td [2]\n    a: int64 [2]" in text
    assert len(text.splitlines()) < 10
