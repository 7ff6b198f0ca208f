"""Which arena a tensor lies in, however many are mapped."""

import gc
import random
from pathlib import Path

import torch

from kd_core import TensorDict
from kd_core._store.mapped_tensor import _LIVE, _STARTS, place_of


def test_each_leaf_is_found_in_its_arena(tmp_path: Path) -> None:
    gc.collect()
    others = len(_STARTS)
    row = TensorDict({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int64)})
    arenas = [row.memmap_like(tmp_path / f"{number}") for number in range(40)]
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
