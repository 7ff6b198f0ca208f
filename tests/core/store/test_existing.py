"""What each writer does where something is: it replaces it, or says so and writes nothing."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from kd_core import AlreadyExists, InvalidValue, KdError, TensorClass, TensorDict, lazy_stack, store


class Writer(NamedTuple):
    """A method that writes a file or a directory, and the package that it needs."""

    name: str
    write: Callable[[TensorDict, Path, bool], object]
    needs: str = "torch"
    single: bool = True


WRITERS = (
    Writer("save.kd", lambda td, path, ok: td.save(path, exist_ok=ok), single=False),
    Writer("save.safetensors", lambda td, path, ok: td.save(path, exist_ok=ok)),
    Writer("dumps.st", lambda td, path, ok: td.dumps(path, exist_ok=ok)),
    Writer("memmap.arena", lambda td, path, ok: td.memmap(path, exist_ok=ok), single=False),
    Writer("memmap.tdz", lambda td, path, ok: td.memmap(path, exist_ok=ok)),
    Writer(
        "memmap_.arena", lambda td, path, ok: td.clone().memmap_(path, exist_ok=ok), single=False
    ),
    Writer(
        "like.arena",
        lambda td, path, ok: td.memmap_like(path, exist_ok=ok, overwrite=ok),
        single=False,
    ),
    Writer("one.bin", lambda td, path, ok: td.consolidate(path, exist_ok=ok)),
    Writer("td.json", lambda td, path, ok: td.to_json(path, exist_ok=ok)),
    Writer("td.csv", lambda td, path, ok: td.to_csv(path, exist_ok=ok)),
    Writer("td.parquet", lambda td, path, ok: td.to_parquet(path, exist_ok=ok), "pyarrow"),
    Writer("td.h5", lambda td, path, ok: td.to_h5(path, exist_ok=ok), "h5py"),
    Writer("td.zarr", lambda td, path, ok: td.to_zarr(path, exist_ok=ok), "zarr", single=False),
)


def sample(value: float = 1.0) -> TensorDict:
    return TensorDict({"a": torch.full((3,), value)}, [3])


@pytest.mark.parametrize("writer", WRITERS, ids=[writer.name for writer in WRITERS])
def test_each_writer_replaces_or_refuses(writer: Writer, tmp_path: Path) -> None:
    if not find_spec(writer.needs):
        pytest.skip(f"{writer.needs} is not installed")
    path = tmp_path / writer.name
    writer.write(sample(), path, False)  # nothing is there
    before = {each: each.read_bytes() for each in [path, *path.rglob("*")] if each.is_file()}
    with pytest.raises(AlreadyExists, match=r"exists already.*exist_ok=True"):
        writer.write(sample(2.0), path, False)
    assert before == {each: each.read_bytes() for each in before}
    writer.write(sample(2.0), path, True)
    foreign = tmp_path / f"other-{writer.name}"
    foreign.write_text("notes") if writer.single else foreign.mkdir()
    if writer.single:
        with pytest.raises(FileExistsError):
            writer.write(sample(), foreign, False)
        assert foreign.read_text() == "notes"
    else:
        writer.write(sample(), foreign, False)  # an empty directory holds nothing


class Point(TensorClass):
    x: torch.Tensor


store.register_class(Point, "tests.existing.Point")


def test_an_arena_is_opened_or_created_and_grows(tmp_path: Path) -> None:
    path = tmp_path / "rows.arena"
    row = TensorDict({"a": torch.zeros((), dtype=torch.bfloat16), "n": {"b": torch.zeros(2)}})
    for start in range(2):  # a program that is started twice
        rows = row.expand(4).memmap_like(path)
        assert rows["n", "b"].sum() == 2 * start
        rows["n", "b"][start] = 1
    store.resize(path, 6)
    with pytest.raises(InvalidValue, match="resized"):  # it would write to the rows of before
        rows["n", "b"].fill_(7)
    with pytest.raises(InvalidValue, match="resized"):
        rows.update_(rows.clone())
    row.apply(torch.ones_like).expand(2).contiguous().append_to(path)
    found = TensorDict.load_memmap(path)
    assert found["a"].tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert found["n", "b"].sum() == 8
    found["a"][0] = 1  # it is an arena still
    assert TensorDict.load_memmap(path)["a"][0] == 1
    store.resize(path, 1)
    assert TensorDict.load_memmap(path)["n", "b"].tolist() == [[1, 1]]
    assert len([each for each in path.iterdir() if each.name.startswith("arena")]) <= 2
    store.resize(path, 0)
    assert TensorDict.load_memmap(path)["n", "b"].shape == (0, 2)


def test_rows_that_are_appended_to_an_arena_side_by_side_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "rows.arena"
    TensorDict({"a": [0]}, [1]).memmap(path)

    def append(number: int) -> None:
        TensorDict({"a": [number, number]}, [2]).append_to(path)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append, range(1, 9)))
    expected = [0, *(number for number in range(1, 9) for _ in range(2))]
    assert sorted(TensorDict.load_memmap(path)["a"].tolist()) == expected


def test_an_arena_of_a_class_with_data_grows(tmp_path: Path) -> None:
    path = tmp_path / "points.arena"
    Point(x=torch.arange(2.0), batch_size=[2]).memmap(path)
    store.resize(path, 3)
    found = TensorDict.load_memmap(path)
    assert isinstance(found, Point)
    assert found.x.tolist() == [0, 1, 0]
    sample().set_non_tensor("unit", "m").memmap(path)
    store.resize(path, 4)
    assert TensorDict.load_memmap(path)["unit"] == "m"


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (TensorDict({"a": torch.zeros(2)}), "no batch"),
        (TensorDict({"a": ["x", "y"]}, [2]), "not all values"),
        (lazy_stack([TensorDict({"a": 1.0})] * 2), "not all values"),
    ],
)
def test_rows_that_are_not_of_tensors_are_not_resized(
    made: TensorDict, why: str, tmp_path: Path
) -> None:
    made.memmap(tmp_path / "td")
    with pytest.raises(InvalidValue, match=why):
        store.resize(tmp_path / "td", 5)
    with pytest.raises(InvalidValue, match="negative"):
        store.resize(tmp_path / "td", -1)
    with pytest.raises(InvalidValue):
        (made if made.batch_size else made.expand(2)).append_to(tmp_path / "td")


def test_rows_that_do_not_fit_leave_an_arena_as_it_is(tmp_path: Path) -> None:
    sample().memmap(tmp_path / "td")
    for other in (sample().rename_key_("a", "b"), sample().double(), sample()[0]):
        with pytest.raises(KdError):
            other.append_to(tmp_path / "td")
    assert TensorDict.load_memmap(tmp_path / "td")["a"].tolist() == [1, 1, 1]
