"""Writes that take a short way store what the rule says, on containers of all kinds of levels."""

from collections.abc import Callable
from itertools import product
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from kd_core import Locked, ShapeMismatch, TensorDict, TensorDictBase

META: Final = torch.device("meta")
LEVELS: Final[dict[str, Callable[[], TensorDict]]] = {
    "no device": lambda: TensorDict({}, [2]),
    "on the cpu": lambda: TensorDict({}, [2], device="cpu"),
    "on meta": lambda: TensorDict({}, [2], device="meta"),
    "named": lambda: TensorDict({}, [2], names=["n"]),
    "named on the cpu": lambda: TensorDict({}, [2], device="cpu", names=["n"]),
    "no batch": lambda: TensorDict({}),
    "no batch on the cpu": lambda: TensorDict({}, device="cpu"),
    "two dimensions": lambda: TensorDict({}, [2, 3], device="cpu"),
    "empty batch": lambda: TensorDict({}, [0], device="cpu"),
    "locked": lambda: TensorDict({}, [2]).lock_(),
    "locked on the cpu": lambda: TensorDict({}, [2], device="cpu").lock_(),
}
VALUES: Final[dict[str, Callable[[], Tensor]]] = {
    "fits": lambda: torch.rand(2, 3),
    "fits one": lambda: torch.rand(2),
    "too long": lambda: torch.rand(3),
    "a number": lambda: torch.rand(()),
    "empty": lambda: torch.rand(0),
    "on meta": lambda: torch.empty(2, 3, device="meta"),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.rand(1), torch.rand(2)], layout=torch.jagged
    ),
    "a parameter": lambda: torch.nn.Parameter(torch.rand(2, 3)),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "a view": lambda: torch.rand(4, 3)[::2],
}
WRITES: Final[dict[str, tuple[Callable[[TensorDict, Any], object], tuple[str, ...]]]] = {
    "item": (lambda td, value: td.__setitem__("a", value), ("a",)),
    "set": (lambda td, value: td.set("a", value), ("a",)),
    "set below": (lambda td, value: td.set(("n", "a"), value), ("n", "a")),
    "update": (lambda td, value: td.update({"a": value}), ("a",)),
    "update below": (lambda td, value: td.update({"n": {"a": value}}), ("n", "a")),
    "update of a tuple": (lambda td, value: td.update({("n", "a"): value}), ("n", "a")),
}


def levels() -> list[tuple[str, bool]]:
    return [(name, below) for name in LEVELS for below in (False, True)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("name", "below"), levels())
def test_a_tensor_is_stored_as_the_rule_says(name: str, below: bool) -> None:
    for (kind, make), (way, (write, path)) in product(VALUES.items(), WRITES.items()):
        td, value = LEVELS[name](), make()
        if below and not td.is_locked:  # a level that is there already
            td["n"] = td.empty()
        held = dict(td.items())
        fits = tuple(value.shape[: td.batch_dims]) == td.batch_size
        what = f"{kind} by {way}"
        if td.is_locked or not fits:
            with pytest.raises(Locked if td.is_locked else ShapeMismatch):
                write(td, value)
            assert dict(td.items()) == held, what
            continue
        if value.is_meta and td.is_cpu:  # which torch cannot move
            with pytest.raises(NotImplementedError):
                write(td, value)
            assert dict(td.items()) == held, what
            continue
        write(td, value)
        found: Any = td.get(path)
        if td.device is None or td.device == value.device:
            assert found is value, what
        else:
            assert (found.device, found.shape) == (td.device, value.shape), what
        level = td.get(path[:-1]) if path[1:] else td
        assert isinstance(level, TensorDictBase)
        assert (level.batch_size, level.device, level.names) == (td.batch_size, td.device, td.names)


NODES: Final[dict[str, Callable[[TensorDict], TensorDictBase]]] = {
    "empty": lambda td: td.empty(),
    "of the same level": lambda td: TensorDict(
        {"x": torch.rand(*td.batch_size, 1)}, td.batch_size, device=td.device, names=td.names
    ),
    "without a device": lambda td: TensorDict({"x": torch.rand(*td.batch_size, 1)}, td.batch_size),
    "of a longer batch": lambda td: (
        TensorDict({"x": torch.rand(*td.batch_size, 1)}, [*td.shape, 1])
        if td.batch_dims
        else TensorDict({"x": torch.rand(4)}, [4])
    ),
    "of another batch": lambda _: TensorDict({"x": torch.rand(7)}, [7]),
    "nested": lambda td: td.empty().set("y", td.empty()),
    "locked": lambda td: td.empty().lock_(),
}


@pytest.mark.parametrize("name", LEVELS)
def test_a_container_is_stored_as_the_rule_says(name: str) -> None:
    for (kind, make), (way, (write, path)) in product(NODES.items(), WRITES.items()):
        td = LEVELS[name]()
        if td.is_locked:
            with pytest.raises(Locked):
                write(td, make(TensorDict({}, td.batch_size)))
            continue
        node = make(td)
        what = f"{kind} by {way}"
        if tuple(node.batch_size[: td.batch_dims]) != td.batch_size:
            with pytest.raises(ShapeMismatch):
                write(td, node)
            assert not td.keys(), what
            continue
        write(td, node)
        found: Any = td.get(path)
        assert isinstance(found, TensorDictBase)
        assert set(found.keys(True)) == set(node.keys(True)), what
        if td.device is not None:
            assert found.device == td.device, what
            assert all(leaf.device == td.device for leaf in found.values(True, True)), what
        assert found.batch_size[: td.batch_dims] == td.batch_size


@pytest.mark.parametrize("name", [each for each in LEVELS if "locked" not in each])
def test_a_container_does_not_hold_itself(name: str) -> None:
    td = LEVELS[name]()
    td["n"] = td.empty()
    for holder, key in ((td, "a"), (td["n"], "a"), (td, ("n", "b", "c"))):
        assert isinstance(holder, TensorDictBase)
        with pytest.raises(ValueError, match=r"itself|cycle|contain"):
            holder.set(key, td)
