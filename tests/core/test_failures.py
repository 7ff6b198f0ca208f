"""A call that fails half-way leaves the container as it was.

Each call is made to fail at its first allocation, at its second, and so on, until none is left; and
in the function of the caller, at each of its calls. An allocation is an operation of torch that
writes to none of its arguments. What writes in place cannot be undone, so that all allocations have
to come before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import cast

import pytest
import torch
from tests.core.kinds import inner
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kd_core import (
    LazyStackedTensorDict,
    NestedKey,
    TensorClass,
    TensorDict,
    TensorDictBase,
    cat,
    lazy_stack,
    stack,
)


class Sample(TensorClass):
    """The content, declared."""

    a: Tensor
    b: Tensor
    n: TensorDict
    w: object


class Injected(Exception):  # it is no error of the program
    """What is raised instead of running an operation."""


class FailAt(TorchDispatchMode):
    """Raise at an operation that writes to none of its arguments, by its number."""

    def __init__(self, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # by torch
        self.left = number
        self.reached = False

    def __torch_dispatch__(
        self,
        func: object,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        call = cast("torch._ops.OpOverload[..., object]", func)
        if not call._schema.is_mutable:
            self.left -= 1
            if self.left < 0 and not self.reached:
                self.reached = True
                raise Injected
        return call(*args, **(kwargs or {}))


def content() -> dict[str, object]:
    rows = torch.arange(6.0).reshape(2, 3)
    words = [["a", "b", "c"], ["d", "e", "f"]]
    return {
        "a": rows.clone(),
        "b": torch.stack([rows, rows], -1),
        "n": {"x": rows.long(), "w": words},
        "w": words,
    }


def dense() -> TensorDict:
    return TensorDict(content(), [2, 3], names=["time", "env"])


KINDS: dict[str, Callable[[], TensorDictBase]] = {
    "dense": dense,
    "stacked": lambda: lazy_stack(dense().unbind(0)),
    "declared": lambda: Sample.from_dict(content(), [2, 3]),
}


def doubles() -> Mapping[NestedKey, object]:
    return {"b": torch.ones(2, 3, 2).double(), "a": [[1, 2, 3]] * 2, ("n", "x"): torch.ones(2, 3)}


def inside(td: TensorDictBase, make: Callable[[TensorDictBase], TensorDictBase]) -> None:
    """Change entries of a result in a `with` statement."""
    with make(td) as result:
        result["a"] = result["a"] + 1
        result["b"] = result["b"] * 2


MASK, ROWS = torch.tensor([True, False]), torch.tensor([1, 0])
CALLS: dict[str, Callable[[TensorDictBase], object]] = {
    "update": lambda td: td.update(doubles()),
    "update, clone": lambda td: td.update(doubles(), clone=True),
    "update_": lambda td: td.update_(doubles()),
    "update_ of a container": lambda td: td.update_(dense().flip(0)),
    "update_at_": lambda td: td.update_at_({"a": [1.0] * 3, "b": [[1, 2]] * 3}, 0),
    "set": lambda td: td.set(("n", "x"), [[1, 2, 3]] * 2),
    "set_": lambda td: td.set_("a", [[1, 2, 3]] * 2),
    "set_at_": lambda td: td.set_at_("n", 3, (0, ROWS)),
    "a row": lambda td: td.__setitem__(0, dense()[1]),
    "rows by mask": lambda td: td.__setitem__(MASK, dense()[:1]),
    "rows by number": lambda td: td.__setitem__(ROWS, dense()),
    "rows of a dict": lambda td: td.__setitem__(
        1, {"a": [1, 2, 3], "n": {"w": ["x", "y", "z"]}, "w": "u"}
    ),
    "copy_": lambda td: td.copy_(dense().flip(0).double()),
    "stack(out=)": lambda td: stack([dense()[1], dense()[0]], out=td),
    "cat(out=)": lambda td: cat([dense()[1:], dense()[:1]], out=cast("TensorDict", td)),
    "where(out=)": lambda td: dense().where(MASK, dense().flip(0), out=cast("TensorDict", td)),
    "load_state_dict": lambda td: td.load_state_dict(td.clone().state_dict()),
    "batch_size": lambda td: setattr(td, "batch_size", torch.Size([2])),
    "auto_batch_size_": lambda td: td.auto_batch_size_(1),
    "names": lambda td: setattr(td, "names", ["rows", "columns"]),
    "rename_key_": lambda td: td.rename_key_("a", ("n", "z")),
    "apply_": lambda td: td.apply_(lambda leaf: leaf.double() * 2),
    "apply(inplace=True)": lambda td: td.apply(lambda leaf: leaf * 2, inplace=True),
    "add_": lambda td: td.add_(ROWS),
    "clamp_": lambda td: td.clamp_(torch.tensor(1), ROWS.reshape(2, 1)),
    "masked_fill_": lambda td: td.masked_fill_(MASK, 1),
    "flatten_keys(inplace=True)": lambda td: td.flatten_keys(inplace=True),
    "split_keys(inplace=True)": lambda td: td.split_keys(["a", "b"], inplace=True),
    "separates": lambda td: td.separates("a", ("n", "x")),
    "roll(inplace=True)": lambda td: td.roll(1, 0, inplace=True),
    "repeat(inplace=True)": lambda td: td.repeat(2, 1, inplace=True),
    "stack_tensors": lambda td: td.stack_tensors("a", ("n", "x"), out_key="a"),
    "with view": lambda td: inside(td, lambda each: each.view(-1)),
    "with permute": lambda td: inside(td, lambda each: each.permute(1, 0)),
    "with flatten_keys": lambda td: inside(td, lambda each: each.flatten_keys()),
}

WRITTEN_AT_ONCE = {(kind, "with permute") for kind in ("stacked", "stacked last", "ragged")}
"""Results that hold the members of the source: each statement in the block writes into these."""


def state(td: TensorDictBase) -> Iterator[object]:
    """Yield all that a failing call must leave: the very tensors, their values, order, names."""
    yield id(td), td.batch_size, td.names, td.is_locked, td.device
    if isinstance(td, LazyStackedTensorDict):
        for member in td._members:
            yield from state(member)
        return
    for key, entry in cast("dict[str, object]", td._kd_entries).items():
        if isinstance(entry, Tensor):
            yield key, id(entry), entry.data_ptr(), entry.dtype, entry.shape, entry.tolist()
        elif isinstance(entry, TensorDictBase):
            yield key
            yield from state(entry)
        else:
            yield key, repr(entry)


def fails(call: Callable[[TensorDictBase], object], td: TensorDictBase, mode: FailAt) -> bool:
    """Whether a call raises; the error may be explained by another one, or refuse the kind."""
    try:
        with mode:
            call(td)
    except Exception:
        return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_allocation_leaves_the_container(kind: str) -> None:
    tried = 0
    for name, call in CALLS.items():
        if (kind, name) in WRITTEN_AT_ONCE:
            continue
        for number in range(400):
            td = KINDS[kind]()
            before = list(state(td))
            mode = FailAt(number)
            if fails(call, td, mode):
                tried += 1
                assert list(state(td)) == before, (name, number)
            if not mode.reached:
                break
        else:
            pytest.fail(f"{name} does not end")
    assert tried > 200


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "call",
    [
        lambda td, fn: td.apply_(fn),
        lambda td, fn: td.apply(fn, inplace=True),
        lambda td, fn: td.named_apply(lambda key, leaf: fn(leaf), inplace=True),
        lambda td, fn: td.apply(fn, out=td),
        lambda td, fn: td.map(lambda part: part.apply(fn), 0, chunksize=1, out=td),
        lambda td, fn: td.update(Lazily(td, fn)),
        lambda td, fn: td.update_(Lazily(td, fn)),
        lambda td, fn: td.update_at_(Lazily(td, fn), slice(None)),
        lambda td, fn: inside(td, lambda each: each.view(-1).apply_(fn)),
    ],
)
def test_a_failing_function_leaves_the_container(
    kind: str, call: Callable[[TensorDictBase, Callable[[Tensor], Tensor]], object]
) -> None:
    for number in range(3):
        td = KINDS[kind]()
        before = list(state(td))
        calls = iter(range(number))

        def fail(leaf: Tensor, calls: Iterator[int] = calls) -> Tensor:
            if next(calls, None) is None:
                raise Injected
            return leaf * 2

        with pytest.raises(Injected):
            call(td, fail)
        assert list(state(td)) == before


class Lazily(Mapping[str, object]):
    """A mapping that computes its values when they are read."""

    def __init__(self, td: TensorDictBase, fn: Callable[[Tensor], Tensor]) -> None:
        self.td, self.fn = td, fn

    def __getitem__(self, key: str) -> object:
        if key == "n":
            return Lazily(inner(self.td, key), self.fn)
        return self.fn(self.td[key])

    def __iter__(self) -> Iterator[str]:
        return iter(["a", "b", "n"] if "n" in self.td else ["x"])

    def __len__(self) -> int:
        return len(list(iter(self)))
