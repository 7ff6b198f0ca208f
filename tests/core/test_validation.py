"""How deep containers nest: every operation holds as many levels as may be built."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy
import pytest
import torch
from torch.utils import _pytree

from kd_core import (
    InvalidValue,
    KdError,
    LazyStackedTensorDict,
    NonTensorData,
    ShapeMismatch,
    TensorDict,
    UnbatchedTensor,
    cat,
    lazy_stack,
    pad,
    pad_sequence,
    stack,
)
from kd_core._validation import MAX_DEPTH

PATH = ("n",) * MAX_DEPTH
MASK = torch.tensor([True, False])


def deepest() -> TensorDict:
    source: dict[str, object] = {"a": torch.ones(2, 3)}
    for _ in PATH:
        source = {"a": torch.ones(2, 3), "n": source}
    return TensorDict(source, [2])


OPERATIONS: dict[str, Callable[[TensorDict, TensorDict], object]] = {
    "read": lambda td, _: td[(*PATH, "a")],
    "set": lambda td, _: td.set((*PATH, "b"), torch.ones(2)),
    "del": lambda td, _: td.del_((*PATH, "a")),
    "row": lambda td, _: td[0],
    "mask": lambda td, _: td[MASK],
    "write a row": lambda td, other: td.__setitem__(0, other[0]),
    "write rows": lambda td, other: td.__setitem__(MASK, other[MASK]),
    "add": lambda td, other: td + other,
    "add_": lambda td, other: td.add_(other),
    "compare": lambda td, other: (td == other).all(),
    "where": lambda td, other: td.where(MASK, other),
    "clamp": lambda td, _: td.clamp(0, 1),
    "sum": lambda td, _: td.sum(0),
    "sum all": lambda td, _: td.sum(reduce=True),
    "max": lambda td, _: td.max(0),
    "reshape": lambda td, _: td.reshape(1, 2),
    "split": lambda td, _: td.split(1),
    "gather": lambda td, _: td.gather(0, torch.tensor([0])),
    "stack": lambda td, other: stack([td, other]),
    "cat": lambda td, other: cat([td, other]),
    "pad": lambda td, _: pad(td, [1, 0]),
    "pad_sequence": lambda td, _: pad_sequence([td, td[:1]]),
    "update": lambda td, other: td.update(other),
    "lazy stack": lambda td, other: lazy_stack([td, other])[:, 0] + 1,
    "apply": lambda td, other: td.apply(lambda x, y: x + y, other, device="cpu"),
    "named_apply": lambda td, _: td.named_apply(lambda _, x: x, nested_keys=True),
    "clone": lambda td, _: td.clone().clone(recurse=False),
    "deepcopy": lambda td, _: copy.deepcopy(td),
    "pickle": lambda td, _: pickle.loads(pickle.dumps(td)),
    "save": lambda td, _: torch.save(td, io.BytesIO()),
    "repr": lambda td, _: repr(td),
    "keys": lambda td, _: list(td.keys(True, True)),
    "to_dict": lambda td, _: TensorDict.from_dict(td.to_dict(), auto_batch_size=True),
    "flatten_keys": lambda td, _: td.flatten_keys().unflatten_keys(),
    "select": lambda td, _: td.select((*PATH, "a")).exclude((*PATH, "a")),
    "update_": lambda td, other: td.update_(other),
    "copy_": lambda td, other: td.copy_(other),
    "zero_": lambda td, _: td.zero_(),
    "lock": lambda td, _: td.lock_().unlock_(),
    "to": lambda td, _: td.to("cpu", torch.float64),
    "batch_size": lambda td, _: td.auto_batch_size_(),
    "consolidate": lambda td, _: td.consolidate(),
    "state_dict": lambda td, _: td.load_state_dict(td.state_dict()),
    "gradients": lambda td, _: td.requires_grad_().detach(),
    "zeros_like": lambda td, _: torch.zeros_like(td),  # type: ignore[arg-type]  # a container
    "pytree": lambda td, _: _pytree.tree_map(torch.neg, td),
    "vmap": lambda td, _: torch.vmap(lambda x: x + 1)(td),
}


def from_below(frames: int, call: Callable[[], object]) -> object:
    """Call from a stack that is as deep as that of a program."""
    return call() if not frames else from_below(frames - 1, call)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_holds_the_deepest_container(name: str) -> None:
    td, other = deepest(), deepest()
    from_below(150, lambda: OPERATIONS[name](td, other))


def test_lists_of_tensors_of_one_shape_are_stacked() -> None:
    weight = torch.ones(2, requires_grad=True)
    td = TensorDict({"a": [weight, weight * 2], "b": ((torch.zeros(3),), [torch.ones(3)])}, [2])
    assert td["a"].tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert td["a"].requires_grad
    assert td["b"].shape == (2, 1, 3)
    assert TensorDict({"a": [torch.tensor(1), torch.tensor(2)]})["a"].tolist() == [1, 2]
    td.set_("a", [torch.zeros(2), torch.ones(2)])
    td[0] = {"b": [torch.full((3,), 7.0)]}
    assert td["a"].tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert td["b"][0].tolist() == [[7.0, 7.0, 7.0]]


def test_a_tuple_in_a_list_is_one_value() -> None:
    td = TensorDict({"spans": [(1, 2), (3, 4)], "empty": [(), ()]}, [2])
    found: list[object] = [td["spans"], td["empty"]]
    assert found == [[(1, 2), (3, 4)], [(), ()]]
    assert td[1]["spans"] == (3, 4)
    assert TensorDict({"a": ((1, 2), (3, 4))})["a"].tolist() == [[1, 2], [3, 4]]
    pairs = [(torch.ones(2), torch.zeros(2))]
    assert isinstance(TensorDict({"a": pairs}, [1])["a"][0], tuple)


def test_lists_of_tensors_that_cannot_be_stacked() -> None:
    ragged = TensorDict({"a": [torch.ones(1), torch.ones(2)]}, [2])
    assert [row.shape[0] for row in ragged["a"]] == [1, 2]
    with pytest.raises(ShapeMismatch, match=r"must start with \(3,\), got \(2, 4\)"):
        TensorDict({"a": [torch.ones(4), torch.ones(4)]}, [3])
    with pytest.raises(
        InvalidValue, match=r"entry `\('n', 'a'\)` cannot be stacked: .* one device"
    ):
        TensorDict({"n": {"a": [torch.ones(1), torch.ones(1, device="meta")]}})


def test_lists_of_containers_become_stacks() -> None:
    rows = [TensorDict({"a": torch.ones(3), "s": name}) for name in ("x", "y")]
    td = TensorDict({"rows": rows}, [2])
    assert td["rows", "a"].shape == (2, 3)
    assert td["rows", "s"] == ["x", "y"]
    rows[0]["a"] = torch.ones(2)
    lazy = TensorDict({"rows": rows}).nested("rows", LazyStackedTensorDict)
    assert lazy.get_item_shape("a") == (2, -1)
    episodes = [TensorDict({"a": torch.ones(n)}, [n]) for n in (1, 2)]  # of different batch sizes
    assert TensorDict({"episodes": episodes}, [2])["episodes"] == episodes


class Answers:
    """An object that has every attribute that one asks for."""

    def __getattr__(self, name: str) -> object:
        return lambda *args, **options: self


class Alike:
    """An object with the private names of nodes."""

    _tensor = _kd_map_each = _encode = _constant = _positions = _kd_desc = _kd_item = _of_batch = 1


ODD = [Answers(), MagicMock(), Mock(), TensorDict, Alike(), Alike, UnbatchedTensor, NonTensorData]


@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
def test_the_type_says_what_a_node_is(value: Any) -> None:
    td = TensorDict({"v": value, "a": torch.zeros(3)}, [3])
    td["n", "w"] = value
    td.set_non_tensor("x", value).update({"y": value})
    for each in (
        td,
        td + 1,
        td[0],
        td.reshape(3, 1),
        stack([td, td])[0, 0],
        td.to_dict(),
    ):
        for key in ("v", "x", "y"):
            assert each[key] is value
    assert td["n", "w"] is value
    copied = td.clone()  # of data, too
    names = {type(copied[key]).__name__ for key in ("v", "x", "y")}  # a mock has its own class
    assert names == {type(value).__name__}
    wrong = (KdError, TypeError)
    calls: list[Callable[[], object]] = [
        lambda: stack([td, value]),  # type: ignore[type-var]  # known at run time
        lambda: stack([value, value]),  # type: ignore[type-var]  # known at run time
        lambda: lazy_stack([td, value]),  # type: ignore[arg-type]  # wrong for the type checker alone
    ]
    if not isinstance(value, (MagicMock, Answers)):  # which torch takes for numbers and tensors
        calls += [lambda: td[value], lambda: torch.add(td, value), lambda: torch.add(value, td)]  # type: ignore[call-overload]  # known at run time
        calls += [lambda: td.set_("a", value), lambda: td.set_at_("a", value, 0)]
    for call in calls:
        with pytest.raises(wrong):
            call()


def test_empty_lists_are_tensors_as_in_torch() -> None:
    td = TensorDict({"tokens": [[]], "n": {"none": [[[]]]}}, [1])
    assert td["tokens"].shape == (1, 0)
    assert td["n", "none"].shape == (1, 1, 0)
    assert TensorDict(x=[])["x"].dtype is torch.float32
    assert TensorDict({"words": [[], ["a"]]}, [2])["words"] == [[], ["a"]]
    turns = TensorDict(turns=[[], [0.5]])["turns"]  # torch would drop the number
    assert [each.tolist() for each in turns] == [[], [0.5]]
    assert [each.shape for each in TensorDict(turns=[[], [[]]])["turns"]] == [(0,), (1, 0)]
    assert TensorDict({"none": []}, [0])["none"].shape == (0,)
    assert TensorDict({"words": []}, [0, 2])["words"] == []


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        ((), torch.float64, (0,)),
        (((), ()), torch.float64, (2, 0)),
        ([], torch.float32, (0,)),
        ((numpy.float32(1), numpy.float32(2)), torch.float32, (2,)),
        ((numpy.int32(1), 2), torch.int64, (2,)),
    ],
)
def test_a_tuple_has_the_dtype_of_numpy(
    value: object, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    made = TensorDict({"a": value})["a"]
    assert (made.dtype, made.shape) == (dtype, shape)
