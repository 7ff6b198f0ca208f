"""Calls that every container refuses, for a reason that comes after a good value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias, cast

import torch
from tests.core.test_failures import Injected, content, dense, state
from torch import Tensor

from kd_core import (
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    TensorDictBase,
    cat,
    lazy_stack,
    stack,
)

Call: TypeAlias = Callable[[TensorDictBase], object]
MASK, FAR = torch.tensor([True, False]), torch.tensor([0, 9])
B, ROW, BAD = torch.full((2, 3, 2), 7.0), torch.full((3, 2), 7.0), torch.zeros(5)
WRONG = cast("int", "text")  # what a type checker would refuse


def ragged() -> LazyStackedTensorDict:
    """Return a stack with an entry that cannot be stacked."""
    rows = dense().unbind(0)
    for number, row in enumerate(rows):
        row["r"] = torch.zeros(3, number + 1)
    return lazy_stack(rows)


def holds_a_stack() -> TensorDict:
    """Return a container with a stack inside."""
    td = TensorDict({**content(), "n": {}}, [2, 3], names=["time", "env"])
    return td.set("n", lazy_stack(TensorDict({"n": content()["n"]}, [2, 3]).unbind(0)))


def other(**changes: object) -> TensorDict:
    """Return a container of other values, with other entries."""
    td = TensorDict({key: value for key, value in content().items() if key != "b"}, [2, 3])
    return td.update({"b": B.clone(), **changes}).update({"a": torch.ones(2, 3), **changes})


def within(make: Callable[[TensorDictBase], TensorDictBase], *entries: NestedKey) -> Call:
    """Return a call that adds entries to a result in a `with` statement, and then fails."""

    def call(td: TensorDictBase) -> None:
        with make(td) as result:
            for key in entries:
                result[key] = torch.zeros(result.batch_size)
            if len(entries) == 1:
                raise Injected

    return call


def loaded(td: TensorDictBase, assign: bool = False, **changes: object) -> object:
    """Load zeros of the same keys but for the changes; `...` removes one."""
    saved = {**TensorDict(content(), [2, 3]).zero_().state_dict(flatten=False), **changes}
    kept = {key: value for key, value in saved.items() if value is not ...}
    return td.load_state_dict(kept, assign=assign)


REFUSED: dict[str, Call] = {
    "update, shape": lambda td: td.update({"b": B, "a": BAD}),
    "update, nested shape": lambda td: td.update({"b": B, "n": {"x": BAD}}),
    "update, path": lambda td: td.update({"b": B, ("n", "x"): BAD}),
    "update, new levels": lambda td: td.update({("p", "q"): torch.zeros(2, 3), "a": BAD}),
    "update, in place": lambda td: td.update({"b": B, "a": BAD}, inplace=True),
    "update, in place and new": lambda td: td.update({"b": B, "new": BAD}, inplace=True),
    "update_, key": lambda td: td.update_({"b": B, "z": B}),
    "update_, nested key": lambda td: td.update_({"b": B, "n": {"z": B}}),
    "update_, shape": lambda td: td.update_({"b": B, "a": BAD}),
    "update_, dtype": lambda td: td.update_({"b": B, "a": "text"}),
    "update_, words": lambda td: td.update_({"b": B, "w": torch.zeros(2, 3)}),
    "update_, rows of words": lambda td: td.update_({"b": B, "w": ["a"]}),
    "update_, container": lambda td: td.update_(other(z=B)),
    "update_, container of shapes": lambda td: td.update_(other(a=torch.zeros(2, 3, 7))),
    "update_at_, shape": lambda td: td.update_at_({"b": ROW, "a": BAD}, 0),
    "update_at_, key": lambda td: td.update_at_({"b": ROW, "z": 1}, 0),
    "update_at_, index": lambda td: td.update_at_({"b": ROW, "a": 1}, 9),
    "update_at_, numbers": lambda td: td.update_at_({"b": 7, "a": 1}, FAR),
    "update_at_, dtype": lambda td: td.update_at_({"b": ROW, "a": "text"}, 0),
    "set_at_, index": lambda td: td.set_at_("a", 1, 9),
    "set_at_, numbers": lambda td: td.set_at_("a", 7, FAR),
    "set_at_, negative numbers": lambda td: td.set_at_("a", 7, FAR - 9),
    "set_at_, shape": lambda td: td.set_at_("a", BAD, 0),
    "set_at_, key": lambda td: td.set_at_("z", 1, 0),
    "set_at_, level": lambda td: td.set_at_("n", {"x": 1, "z": 1}, 0),
    "row, key": lambda td: td.__setitem__(0, {"b": ROW, "z": 1}),
    "row, shape": lambda td: td.__setitem__(0, {"b": ROW, "a": BAD}),
    "row, nested shape": lambda td: td.__setitem__(0, {"b": ROW, "n": {"x": BAD}}),
    "row, words": lambda td: td.__setitem__(0, {"b": ROW, "w": ["x"]}),
    "row, index": lambda td: td.__setitem__(9, {"b": ROW}),
    "rows, mask": lambda td: td.__setitem__(torch.tensor([True]), {"b": ROW}),
    "rows, numbers": lambda td: td.__setitem__(FAR, {"b": B, "a": 7}),
    "rows, list": lambda td: td.__setitem__([1, 9], {"b": B}),
    "rows, count": lambda td: td.__setitem__(slice(0, 1), other()),
    "stack(out=), shape": lambda td: stack(other(a=torch.zeros(2, 3, 9)).unbind(0), out=td),
    "stack(out=), count": lambda td: stack([other()[0]] * 3, out=td),
    "cat(out=), shape": lambda td: cat([other(a=torch.zeros(2, 3, 9))], out=cast("TensorDict", td)),
    "cat(out=), level": lambda td: cat([other(n=B)], out=cast("TensorDict", td)),
    "batch_size, of one entry": lambda td: setattr(td, "batch_size", torch.Size([2, 3, 2])),
    "batch_size, of none": lambda td: setattr(td, "batch_size", torch.Size([3])),
    "names, too few": lambda td: setattr(td, "names", ["x"]),
    "names, twice": lambda td: setattr(td, "names", ["x", "x"]),
    "names, no strings": lambda td: setattr(td, "names", [1, 2]),
    "rename_key_, missing": lambda td: td.rename_key_("z", "q"),
    "rename_key_, taken": lambda td: td.rename_key_("a", "b", safe=True),
    "rename_key_, below a leaf": lambda td: td.rename_key_("a", ("b", "z")),
    "set, shape": lambda td: td.set("b", BAD),
    "set, below a leaf": lambda td: td.set(("a", "b", "c"), torch.zeros(2, 3)),
    "set, new levels": lambda td: td.set(("p", "q"), BAD),
    "set, itself": lambda td: td.set("self", td),
    "set_, shape": lambda td: td.set_("b", BAD),
    "pop": lambda td: td.pop("z"),
    "del_": lambda td: td.del_(("n", "z")),
    "setdefault": lambda td: td.setdefault("q", BAD),
    "select": lambda td: td.select("a", "z", inplace=True),
    "split_keys": lambda td: td.split_keys(["a", "z"], inplace=True),
    "split_keys, twice": lambda td: td.split_keys(["a"], ["a"], inplace=True),
    "separates": lambda td: td.separates("a", "z"),
    "create_nested": lambda td: td.create_nested(("a", "z")),
    "cat_tensors": lambda td: td.cat_tensors("a", "z", out_key="a"),
    "apply_": lambda td: td.apply_(lambda leaf: leaf * 2 if leaf.ndim == 2 else BAD),
    "add_, keys": lambda td: td.add_(other().exclude("n")),
    "add_, tensor": lambda td: td.add_(torch.zeros(7)),
    "add_, dtype": lambda td: td.add_(0.5 + 1j),
    "add_, leaf": lambda td: td.add_(other(b=torch.zeros(2, 3, 5))),
    "mul_, dtype": lambda td: td.mul_(1j),
    "bitwise_and_": lambda td: td.bitwise_and_(td.clone()),
    "addcmul_": lambda td: td.addcmul_(other().exclude("b"), other()),
    "clamp_": lambda td: td.clamp_(torch.zeros(7)),
    "masked_fill_, mask": lambda td: td.masked_fill_(torch.ones(5).bool(), 1),
    "masked_fill_, dtype": lambda td: td.masked_fill_(MASK, cast("float", 1j)),
    "copy_": lambda td: td.copy_(other(b=torch.zeros(2, 3, 5))),
    "copy_at_": lambda td: td.copy_at_(other(b=torch.zeros(2, 3, 5))[0], 0),
    "fill_": lambda td: td.fill_("z", 1),
    "unflatten_keys": lambda td: td.unflatten_keys("", inplace=True),
    "roll": lambda td: td.roll(1, 5, inplace=True),
    "with view": within(lambda td: td.view(-1), "q"),
    "with permute": within(lambda td: td.permute(1, 0), "q"),
    "with flatten_keys": within(lambda td: td.flatten_keys("."), "q", "a.z"),
    "with unsqueeze": within(lambda td: td.unsqueeze(0), "q", ("a", "z")),
}
"""What a container of the content of `tests.core.test_failures` refuses, whatever its kind."""

LOADED: dict[str, Call] = {
    "key": lambda td: loaded(td, b=...),
    "shape": lambda td: loaded(td, b=BAD),
    "unexpected": lambda td: loaded(td, z=BAD),
    "assigned shape": lambda td: loaded(td, assign=True, b=BAD),
    "level": lambda td: loaded(td, n=WRONG),
}
"""State dicts that do not fit."""

LOCKED: dict[str, Call] = {
    "set": lambda td: td.set("b", B),
    "update": lambda td: td.update({"n": {"x": torch.ones(2, 3)}, "b": B}),
    "update, in place": lambda td: td.update({"b": B, "z": torch.zeros(2, 3)}, inplace=True),
    "rename_key_": lambda td: td.rename_key_("a", "q"),
    "pop": lambda td: td.pop("a"),
    "select": lambda td: td.select("a", inplace=True),
    "flatten_keys": lambda td: td.flatten_keys(inplace=True),
    "split_keys": lambda td: td.split_keys(["a"], inplace=True),
    "roll": lambda td: td.roll(1, 0, inplace=True),
    "consolidate": lambda td: td.consolidate(inplace=True),
    "load_state_dict": lambda td: loaded(td, assign=True),
    "with view": within(lambda td: td.view(-1), "q", "z"),
}
"""What a locked container refuses."""


def grads(td: TensorDictBase) -> Iterator[object]:
    """Yield whether each tensor of a container records gradients."""
    if isinstance(td, LazyStackedTensorDict):
        for member in td._members:
            yield from grads(member)
        return
    for entry in cast("dict[str, object]", td._kd_entries).values():
        if isinstance(entry, TensorDictBase):
            yield from grads(entry)
        elif isinstance(entry, Tensor):
            yield entry.requires_grad


def unharmed(make: Callable[[], TensorDictBase], calls: dict[str, Call]) -> Iterator[str]:
    """Yield the names of calls that raise, after checking that each leaves its container."""
    for name, call in calls.items():
        td = make()
        before = [*state(td), *grads(td)]
        try:
            call(td)
        except Exception:  # each has a class of its own
            yield name
        assert [*state(td), *grads(td)] == before, name
