"""Directories of one library are loaded where they are by the other."""

import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

import kd_core
from kd_core import FormatError, TensorDict
from kd_core._switches import set_files_of_tensordict

theirs: Any = pytest.importorskip("tensordict")


def sample(library: Any) -> Any:
    td = library.TensorDict(
        {"a": torch.arange(6.0).view(3, 2), "n": {"b": torch.ones(3, dtype=torch.bool)}, "e": {}},
        [3],
        names=["time"],
    )
    td["s"] = "word"
    td["w"] = library.NonTensorStack({"k": 1}, {"k": [2, None]}, {})
    td["m"] = library.MetaData("m")
    td["l"] = library.lazy_stack([library.TensorDict({"x": torch.ones(n + 1)}) for n in range(3)])
    td["a b/.."] = torch.zeros(3, 0)
    td["%2F"] = torch.ones(3, dtype=torch.bfloat16)
    return td


def stacked(library: Any) -> Any:
    members = [library.TensorDict({"a": torch.ones(2) * n, "s": f"{n}"}, [2]) for n in range(12)]
    made = library.lazy_stack(members, 1)
    made.names = ["row", "member"]
    return made


def nested_tensors(library: Any) -> Any:
    rows = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)])
    return library.TensorDict({"j": rows}, [2])


MAKERS = [sample, stacked, nested_tensors]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("call", ["load", "load_memmap"])
def test_what_tensordict_wrote_is_loaded(
    make: Callable[[Any], Any], call: str, tmp_path: Path
) -> None:
    make(theirs).memmap(tmp_path / "td")
    ours = getattr(TensorDict, call)(tmp_path / "td")
    again = theirs.TensorDict.load_memmap(tmp_path / "td")
    assert described(ours, kd_core) == described(again, theirs)
    assert type(ours).__name__ == type(again).__name__


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("call", ["memmap", "memmap_", "save"])
def test_tensordict_loads_what_is_written_in_its_layout(
    make: Callable[[Any], Any], call: str, tmp_path: Path
) -> None:
    set_files_of_tensordict(True)
    try:
        getattr(make(kd_core), call)(tmp_path / "td")
    finally:
        set_files_of_tensordict(False)
    ours = TensorDict.load_memmap(tmp_path / "td")
    again = theirs.TensorDict.load_memmap(tmp_path / "td")
    assert described(ours, kd_core) == described(again, theirs)


@pytest.mark.parametrize("make", [sample, stacked])
@pytest.mark.parametrize("form", ["archive", "compressed", "consolidated"])
def test_files_of_tensordict_are_loaded(
    make: Callable[[Any], Any], form: str, tmp_path: Path
) -> None:
    path = tmp_path / "td.tdz"
    if form == "consolidated":
        td = make(theirs).exclude("m", "e", "a b/..")  # of which it says other things, or nothing
        td.consolidate(filename=path)
        ours, again = TensorDict.from_consolidated(path), theirs.from_consolidated(path)
    else:
        make(theirs).memmap(
            path, archive=True, compression="deflate" if form == "compressed" else None
        )
        ours, again = TensorDict.load(path), theirs.TensorDict.load_memmap(path)
    assert described(ours, kd_core) == described(again, theirs)


def described(td: Any, library: Any) -> Any:
    """Return the kinds, sizes, names and values of a container, in the order of its keys."""
    if isinstance(td, torch.Tensor):
        rows = td.unbind(0) if td.is_nested else [td]
        return [(row.dtype, tuple(row.shape), row.tolist()) for row in rows]
    if library.is_non_tensor(td):
        return type(td).__name__, tuple(td.batch_size), td.tolist()
    if isinstance(td, library.LazyStackedTensorDict):
        members = [described(member, library) for member in td.unbind(td.stack_dim)]
        return type(td).__name__, td.stack_dim, td.names, members
    entries = [(key, described(td.get(key), library)) for key in sorted(td.keys())]
    return type(td).__name__, tuple(td.batch_size), td.names, td.device, entries


def test_both_write_to_the_same_files(tmp_path: Path) -> None:
    sample(theirs).memmap(tmp_path / "td")
    ours, again = (lib.TensorDict.load_memmap(tmp_path / "td") for lib in (kd_core, theirs))
    ours["a"] += 1
    again["n", "b"][0] = False
    sent = pickle.loads(ForkingPickler.dumps(ours))
    sent["l"][2]["x"].fill_(7)
    for td in (ours, again):
        assert td["a"].sum() == 21
        assert td["n", "b"].tolist() == [False, True, True]
        assert td["l"][2]["x"].tolist() == [7, 7, 7]


def test_data_in_pickles_is_refused(tmp_path: Path) -> None:
    theirs.TensorDict(x=theirs.NonTensorData(object)).memmap(tmp_path / "td")
    with pytest.raises(FormatError, match="holds a pickle"):
        TensorDict.load_memmap(tmp_path / "td")
