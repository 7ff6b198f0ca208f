"""What is cached between calls is bounded: distinct arguments do not pile up."""

import gc
import tracemalloc
from collections.abc import Callable

import pytest
import torch
from torch.utils import _pytree

from kd_core import TensorDict, cat, lazy_stack, pad, stack
from kd_core import _descriptor as descriptor

X = TensorDict({"a": torch.zeros(1)}, [1])
MANY = TensorDict({f"k{i}": torch.zeros(1) for i in range(40)}, [1])

# What remembers something, called with a number that it has not seen.
REMEMBER: dict[str, Callable[[int], object]] = {
    "batch sizes": lambda i: TensorDict({}, [i]),
    "batch sizes on a device": lambda i: TensorDict({}, [i, 0], device="cpu"),
    "locked batch sizes": lambda i: TensorDict({}, [0, i]).lock_(),
    "fractions": lambda i: MANY * (i + 0.5),
    "reshape": lambda i: TensorDict({}, [i, 2]).reshape(-1),
    "expand": lambda i: X.expand(i, 1),
    "split": lambda i: TensorDict({}, [i]).split(i),
    "index": lambda i: TensorDict({}, [i])[: i - 1],
    "stack": lambda i: stack([TensorDict({}, [i])] * 2),
    "cat": lambda i: cat([TensorDict({}, [i])] * 2),
    "pad": lambda i: pad(TensorDict({}, [i]), [0, i]),
    "lazy stack": lambda i: lazy_stack([TensorDict({}, [i])] * 2),
    "pytree": lambda i: _pytree.tree_structure(TensorDict({f"k{i}": X["a"]}, [1])),
}


ROUND = 2100  # more than the largest of them holds, once the pools of batch sizes are smaller


def peak_of(call: Callable[[int], object], numbers: range) -> int:
    """Return how many bytes, of those that Python has given since, are held at most after calls."""
    gc.collect()
    most = 0
    for number in numbers:
        call(number)
        if number % 50 == 0:
            gc.collect(0)  # when Python does it differs between its versions
            most = max(most, tracemalloc.get_traced_memory()[0])
    return most


@pytest.mark.parametrize("name", REMEMBER)
def test_distinct_arguments_do_not_pile_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptor, "_POOL_LIMIT", 500)
    call, start = REMEMBER[name], 1 + 100_000 * list(REMEMBER).index(name)
    tracemalloc.start()
    try:
        _, second, third = (
            peak_of(call, range(start + number, start + number + ROUND))
            for number in range(0, 3 * ROUND, ROUND)
        )
    finally:
        tracemalloc.stop()
    each = (third - second) / ROUND
    assert each < 60, f"{each:.1f} bytes for each call, where an entry takes 150 or more"


def test_thirty_thousand_batch_sizes_hold_bounded_memory() -> None:
    tracemalloc.start()
    try:
        for rows in range(10_000_000, 10_030_000):
            TensorDict({}, [rows])
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 5_000_000


def test_kinds_are_remembered_by_torch_alone() -> None:
    """A class that is registered as a pytree is kept by torch; nothing is kept for each object."""
    before = len(_pytree.SUPPORTED_NODES)
    for number in range(1000):
        _pytree.tree_map(torch.neg, TensorDict({"a": torch.zeros(number % 7)}))
    assert len(_pytree.SUPPORTED_NODES) == before
