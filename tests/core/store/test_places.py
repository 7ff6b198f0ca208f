"""Which arena a tensor lies in, however many are mapped."""

import gc
import random
from pathlib import Path

import torch

from kd_core import TensorDict
from kd_core._store.mapped_tensor import _LIVE, _STARTS, place_of, record


def test_each_leaf_is_found_in_its_arena(tmp_path: Path) -> None:
    gc.collect()
    others = len(_STARTS)
    row = TensorDict({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int64)})
    arenas = [row.memmap_like(tmp_path / f"{number}") for number in range(12)]
    random.Random(0).shuffle(arenas)
    while arenas:
        for td in arenas:
            path = str(td.saved_path)
            for leaf in (td["a"], td["b"], td["a"][2:], td["b"][1]):
                found = place_of(leaf)
                assert found is not None
                assert found.path == path
                assert found.address <= leaf.data_ptr() < found.address + found.size
        assert place_of(torch.zeros(3)) is None
        assert place_of(td["a"].clone()) is None
        del arenas[: len(arenas) // 2 + 1], td, leaf
        gc.collect()
        assert sorted(_LIVE) == _STARTS
        assert len(_STARTS) == others + len(arenas)


def test_memory_at_an_address_that_another_thread_is_about_to_forget(tmp_path: Path) -> None:
    """It is given back before Python says so; the next arena may lie there already."""
    td = TensorDict({"a": torch.zeros(3)}).memmap_(tmp_path / "arena")
    place = place_of(td["a"])
    assert place is not None
    (start,) = [each for each in _STARTS if each == place.address]
    memory = _LIVE[start][1]()
    assert memory is not None
    known = len(_STARTS)
    record(memory, place.path, "next")  # as if the first were being forgotten
    assert len(_STARTS) == len(_LIVE) == known
    found = place_of(td["a"])
    assert found is not None
    assert found.file == "next"
    del td, memory
    gc.collect()
    assert place_of(torch.zeros(3)) is None
    assert start not in _STARTS
    assert sorted(_LIVE) == _STARTS
