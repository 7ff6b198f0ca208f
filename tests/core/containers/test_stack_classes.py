"""Lazy stacks of tensor classes: their fields, methods and classes."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import kd_core
from kd_core import (
    LazyStackedTensorDict,
    TensorClass,
    TensorDict,
    TensorDictBase,
    TypedTensorDict,
    is_tensorclass,
    lazy_stack,
    maybe_dense_stack,
)
from kd_core.store import register_class


class Pair(TensorClass):
    left: Tensor
    right: Tensor


class Base(TensorClass):
    x: Tensor
    scale = 3

    def loss(self) -> Tensor:
        return self.x.sum()

    @property
    def doubled(self) -> Tensor:
        return self.x * 2


class Sample(Base):
    pair: Pair
    name: str = "a"

    def loss(self) -> Tensor:
        return super().loss() * 2

    def bump(self) -> Any:
        return type(self)(x=self.x + 1, pair=self.pair, batch_size=self.batch_size)


class Frozen(TensorClass, frozen=True):
    x: Tensor


class Casting(TensorClass, autocast=True):
    x: Tensor
    weight: float = 1.0


class Typed(TypedTensorDict):
    x: Tensor


register_class(Frozen, "tests.stack_classes.Frozen")


def sample(value: float = 1.0, rows: int = 2) -> Sample:
    pair = Pair(torch.zeros(rows), torch.ones(rows), batch_size=[rows])
    return Sample(torch.full((rows,), value), pair, batch_size=[rows])


def stack_of_two() -> Any:
    return lazy_stack([sample(1.0), sample(2.0)])


def test_fields_methods_and_properties_of_the_members_are_those_of_the_stack() -> None:
    stack = stack_of_two()
    dense = kd_core.stack([sample(1.0), sample(2.0)])
    assert torch.equal(stack.x, dense.x)
    assert torch.equal(stack.pair.right, dense.pair.right)
    assert torch.equal(stack.loss(), dense.loss())
    assert torch.equal(stack.doubled, dense.doubled)
    names: list[object] = [stack.name, dense.name]
    assert names == [[["a", "a"], ["a", "a"]]] * 2
    assert stack.scale == 3
    assert [each.name for each in stack.fields()] == ["x", "pair", "name"]


def test_isinstance_answers_for_the_class_of_the_members_and_its_bases() -> None:
    stack = stack_of_two()
    assert all(isinstance(stack, cls) for cls in (Sample, Base, LazyStackedTensorDict))
    assert isinstance(stack.pair, Pair)
    assert not isinstance(stack, Pair)
    assert not isinstance(lazy_stack([TensorDict(x=1.0)]), TensorClass)


def test_a_field_and_a_method_may_be_called_as_what_classes_have() -> None:
    class Registered(TensorClass):
        register: Tensor
        mro: Tensor

    class Registering(TensorClass):
        x: Tensor

        @classmethod
        def register(cls, _: object) -> str:
            return "own"

    stack: Any = lazy_stack(
        [Registered(register=torch.zeros(n), mro=torch.ones(2)) for n in (1, 2)]
    )
    assert isinstance(stack, Registered)
    assert stack.mro.tolist() == [[1, 1], [1, 1]]
    other: Any = lazy_stack([Registering(x=torch.zeros(n)) for n in (1, 2)])
    assert isinstance(other, Registering)
    assert other.register(1) == "own"


def test_threads_that_stack_at_once_get_one_class() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    together = Barrier(8)

    def stacked(member: TensorDictBase) -> tuple[type, bool]:
        together.wait()
        stack = lazy_stack([member, member])
        return type(stack), isinstance(stack, type(member))

    try:
        with ThreadPoolExecutor(8) as pool:
            for _ in range(50):

                class Above(TensorClass):
                    x: Tensor

                class Made(Above):
                    y: Tensor | None = None

                assert len(set(pool.map(stacked, [Made(x=torch.zeros(2))] * 8))) == 1
                assert isinstance(lazy_stack([Made(x=torch.zeros(2))]), Above)
    finally:
        sys.setswitchinterval(interval)


def test_a_field_of_a_stack_is_written_to_the_members() -> None:
    stack = stack_of_two()
    stack.x = torch.zeros(2, 2)
    stack.name = "b"
    assert torch.equal(stack[1].x, torch.zeros(2))
    assert stack[0].name == "b"
    with pytest.raises(AttributeError, match="lable"):
        stack.lable = 1
    with pytest.raises(AttributeError, match="`lable` is not a field of `LazyStackedSample`"):
        stack.lable  # noqa: B018  # it raises


def test_a_ragged_field_names_how_it_is_read() -> None:
    stack: Any = lazy_stack([Base(torch.ones(1)), Base(torch.ones(2))])
    with pytest.raises(ValueError, match=r"ragged.*as_list=True"):
        stack.x  # noqa: B018  # it raises


KEPT: dict[str, Callable[[Any], Any]] = {
    "slice": lambda td: td[:1],
    "indices": lambda td: td[torch.tensor([1, 0])],
    "inner": lambda td: td[:, 0],
    "add": lambda td: td + 1,
    "clone": lambda td: td.clone(),
    "apply": lambda td: td.apply(lambda leaf: leaf * 2),
    "to": lambda td: td.to(torch.float64),
    "reshape": lambda td: td.reshape(-1),
    "contiguous": lambda td: td.contiguous(),
    "stack": lambda td: torch.stack([td, td]),
    "cat": lambda td: torch.cat([td, td]),
    "tree": lambda td: tree_map(lambda leaf: leaf + 1, td),
    "vmap": lambda td: torch.vmap(lambda row: row + 1)(td),
    "deepcopy": copy.deepcopy,
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "replace": lambda td: td.__replace__(x=torch.zeros(2, 2)),
    "bump": lambda td: td.bump(),
    "row": lambda td: td[1],
    "unsqueeze": lambda td: td.unsqueeze(0),
    "split": lambda td: td.split(1)[1],
    "consolidate": lambda td: td.consolidate(),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_an_operation_returns_has_the_fields_and_values_of_the_dense_one(name: str) -> None:
    operation = KEPT[name]
    got, expected = operation(stack_of_two()), operation(kd_core.stack([sample(1.0), sample(2.0)]))
    assert isinstance(got, Sample)
    assert got.batch_size == expected.batch_size
    assert torch.equal(got.x, expected.x)
    assert torch.equal(got.pair.right, expected.pair.right)
    assert torch.equal(got.loss(), expected.loss())


def test_fewer_fields_keep_the_class_of_the_stack() -> None:
    fewer = stack_of_two().select("x")
    assert type(fewer) is type(stack_of_two())
    assert fewer.name is None
    assert type(stack_of_two().flatten_keys()) is LazyStackedTensorDict


def test_members_of_several_classes_share_the_fields_of_their_base_class() -> None:
    mixed: Any = lazy_stack([sample(), Base(torch.zeros(2), batch_size=[2])])
    assert isinstance(mixed, Base)
    assert not isinstance(mixed, Sample)
    assert mixed.loss() == 2
    assert type(mixed.contiguous()) is Base
    plain = TensorDict({"x": torch.zeros(2)}, [2])
    assert type(lazy_stack([sample(), plain])) is LazyStackedTensorDict
    assert type(lazy_stack([sample(), Frozen(torch.zeros(2), batch_size=[2])])) is (
        LazyStackedTensorDict
    )


def test_only_instances_are_added() -> None:
    stack = stack_of_two()
    stack.append(sample(5.0))
    assert stack.x.shape == (3, 2)
    with pytest.raises(TypeError, match=r"must be an instance of `Sample`, got a `TensorDict`"):
        stack.append(TensorDict({"x": torch.zeros(2)}, [2]))
    assert len(stack) == 3


def test_a_frozen_class_refuses_to_set_and_can_replace() -> None:
    stack: Any = lazy_stack([Frozen(torch.zeros(2)), Frozen(torch.ones(2))])
    with pytest.raises(RuntimeError, match="frozen"):
        stack.x = torch.ones(2, 2)
    assert torch.equal(stack.__replace__(x=torch.ones(2, 2)).x, torch.ones(2, 2))


def test_options_of_the_class_convert_what_a_field_of_a_stack_is_set_to() -> None:
    stack: Any = lazy_stack([Casting(torch.zeros(2)), Casting(torch.ones(2))])
    stack.x = [[5.0, 6.0], [7.0, 8.0]]
    stack.weight = 2
    assert torch.equal(stack[1].x, torch.tensor([7.0, 8.0]))
    assert [row.weight for row in stack.unbind(0)] == [2.0, 2.0]
    with pytest.raises(ValueError, match="field `weight` of `Casting` must be of type `float`"):
        stack.weight = "heavy"


def test_a_typed_dict_has_fields_and_further_keys() -> None:
    stack: Any = lazy_stack([Typed(x=torch.zeros(2)) for _ in range(2)])
    stack["more"] = torch.ones(2, 2)
    assert stack.x.shape == (2, 2)
    assert stack["more"].shape == (2, 2)
    assert isinstance(stack.contiguous(), Typed)


def test_stacks_of_stacks_have_the_fields() -> None:
    outer: Any = lazy_stack([stack_of_two(), stack_of_two()])
    assert isinstance(outer, Sample)
    assert outer.x.shape == (2, 2, 2)
    assert isinstance(outer[0], Sample)


def test_a_method_that_is_set_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = stack_of_two()
    monkeypatch.setattr(Base, "scale", 7)
    assert stack.scale == 7


def test_a_stack_is_loaded_with_weights_only() -> None:
    file = io.BytesIO()
    torch.save(stack_of_two(), file)
    file.seek(0)
    assert isinstance(torch.load(file, weights_only=True), Sample)


def test_a_stack_of_a_registered_class_is_mapped_and_saved(tmp_path: Path) -> None:
    stack: Any = lazy_stack([Frozen(torch.zeros(2)), Frozen(torch.ones(2))])
    assert torch.equal(stack.memmap().x, stack.x)
    stack.save(tmp_path / "stack")
    loaded: Any = TensorDict.load(tmp_path / "stack")
    assert torch.equal(loaded.x, stack.x)


def test_maybe_dense_stack_is_lazy_where_rows_differ() -> None:
    ragged: Any = maybe_dense_stack([Base(torch.ones(1)), Base(torch.ones(2))])
    assert all(isinstance(ragged, cls) for cls in (Base, LazyStackedTensorDict))
    assert type(maybe_dense_stack([sample(), sample()])) is Sample


def test_compiled_code_reads_fields_and_makes_stacks() -> None:
    class Local(TensorClass):  # no stack of it was made before
        x: Tensor

    def run(one: Any, other: Any) -> Tensor:
        stack: Any = lazy_stack([one, other])
        assert isinstance(stack, Local)
        return (stack + 1)[:1].x

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    assert torch.equal(
        compiled(Local(torch.ones(2)), Local(torch.ones(2))), torch.full((1, 2), 2.0)
    )


def test_a_stack_that_compiled_code_makes_is_returned() -> None:
    class Local(TensorClass):
        x: Tensor

    def made(x: Tensor) -> Any:
        return lazy_stack([Local(x), Local(x + 1)])

    def stacked(one: Any, other: Any) -> Any:
        return lazy_stack([one, other])

    x = torch.ones(2)
    for run, given in ((made, (x,)), (stacked, (Local(x), Local(x + 1)))):
        found = torch.compile(run, fullgraph=True, backend="eager")(*given)
        assert type(found) is type(stacked(Local(x), Local(x)))
        assert torch.equal(found.x, torch.stack([x, x + 1]))


def test_the_class_of_a_stack_counts_as_a_tensor_class() -> None:
    stack = stack_of_two()
    assert is_tensorclass(stack)
    assert is_tensorclass(type(stack))
    assert not is_tensorclass(lazy_stack([TensorDict()]))
    assert not is_tensorclass(LazyStackedTensorDict)


def test_nested_instances_keep_their_class_in_a_dense_copy() -> None:
    class Outer(TensorClass):
        inner: Pair

    class Named(TensorDict):
        pass

    pair = Pair(torch.zeros(2), torch.ones(2))
    ones: list[TensorDictBase] = [Outer(pair), TensorDict({"inner": pair})]
    for one in ones:
        assert lazy_stack([one, one.clone()]).contiguous().nested("inner", Pair).left.shape == (
            2,
            2,
        )
    named = TensorDict({"inner": Named({"x": torch.ones(2)})})
    assert lazy_stack([named, named.clone()]).contiguous().nested("inner", Named).shape == (2,)


def test_a_stack_sets_attributes_as_the_author_of_the_class_wrote() -> None:
    class Noted(TensorClass):
        x: Tensor

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value + 1 if name == "x" else value)  # type: ignore[operator]  # a tensor

    stack: Any = lazy_stack([Noted(torch.zeros(2)), Noted(torch.zeros(2))])
    stack.x = torch.ones(2, 2)
    assert stack[0].x.tolist() == [2, 2]


class Got(TensorClass, shadow=True):
    get: Tensor  # type: ignore[assignment]  # which is a method of other containers


class GotMore(Got):
    x: Tensor


class Getting:
    def get(self, key: str) -> str:
        return f"my {key}"


class GetsItsWay(Getting, TensorClass):  # type: ignore[misc]  # another `get`
    x: Tensor


def test_a_get_of_a_base_class_is_that_of_stacks() -> None:
    x = torch.ones(2)
    stack = lazy_stack([GotMore(x, x, batch_size=[2]), GotMore(x, x, batch_size=[2])])
    assert torch.equal(cast("Tensor", stack.get), torch.ones(2, 2))
    mine = lazy_stack([GetsItsWay(x, batch_size=[2]), GetsItsWay(x, batch_size=[2])])
    assert mine.get("x") == "my x"
