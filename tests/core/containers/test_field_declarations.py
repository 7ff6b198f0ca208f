"""What annotations declare: fields, and what is not one."""

import dataclasses
import re
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import KW_ONLY, field
from typing import Any, Generic, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor

from kd_core import InvalidArgument, TensorClass, TensorDict
from kd_core._containers.field_declarations import OWN

T = TypeVar("T")
X = torch.zeros(2)


class Box(TensorClass, Generic[T]):
    item: Tensor
    label: T


class Left(TensorClass, checked=True):
    a: Tensor


class Right(TensorClass):
    b: Tensor


class Both(Left, Right):
    c: Tensor


class Summed(TensorClass, checked=True):
    a: Tensor
    total: Tensor = field(init=False)
    b: Tensor = field(default_factory=lambda: X + 1)

    def __post_init__(self) -> None:
        self.total = self.a + self.b


def test_a_field_may_be_set_after_construction() -> None:
    made = Summed(X, X + 2, batch_size=[2])
    assert made.total.tolist() == [2, 2]
    assert Summed.__match_args__ == ("a", "b")
    assert Summed.from_dict({"a": X, "b": X + 1}, [2]).total.tolist() == [1, 1]
    assert Summed.from_tensordict(made.to_tensordict()).total.tolist() == [2, 2]
    assert made[0].total == 2


def test_a_generic_class_takes_types() -> None:
    class Numbered(Box[int]):
        more: Tensor

    named = Box[str](item=X, label="x", batch_size=[2])
    assert type(named) is Box
    assert named[0].label == "x"
    assert [each.name for each in Numbered.fields()] == ["item", "label", "more"]


def test_all_bases_give_fields_and_options() -> None:
    both = Both(X, X, X)
    assert [each.name for each in Both.fields()] == ["b", "a", "c"]
    with pytest.raises(InvalidArgument, match="`b` of `Both` must be of type `Tensor`"):
        both.set("b", "no tensor")


@pytest.mark.parametrize("kind", [typing.ClassVar[int], "typing.ClassVar[int]", "t.ClassVar[int]"])
def test_a_class_variable_is_not_a_field(kind: object) -> None:
    body = {"__annotations__": {"x": Tensor, "version": kind}, "version": 2}
    made: Any = types.new_class("Made", (TensorClass,), exec_body=lambda space: space.update(body))
    assert [each.name for each in made.fields()] == ["x"]
    assert made.version == 2


def test_fields_after_the_marker_are_given_by_keyword() -> None:
    class Marked(TensorClass):
        x: Tensor
        _: KW_ONLY
        y: Tensor

    assert Marked(X, y=X).y is X
    build: Callable[..., Marked] = Marked
    with pytest.raises(InvalidArgument, match=r"at most 1 .*Pass `y`, `batch_size`, `device` by k"):
        build(X, X)


def test_one_field_is_given_by_keyword() -> None:
    class Marked(TensorClass):
        x: Tensor = field(kw_only=True)
        y: Tensor

    assert Marked(X + 1, x=X).y.sum() == 2


def test_patterns_match_fields_by_position() -> None:
    match Box(X, "x"):
        case Box(item, label):
            assert item is X
            assert label == "x"


def test_an_argument_that_is_not_a_field_is_given_to_post_init() -> None:
    class Made(TensorClass):
        x: Tensor
        size: dataclasses.InitVar[int] = 3
        name: str = "a"
        scaled: Tensor | None = field(init=False)

        def __post_init__(self, size: int) -> None:
            self.scaled = self.x * size

    for made, size in ((Made(X), 3), (Made(X, 5), 5), (Made(X, size=7), 7)):
        assert made.scaled is not None
        assert made.scaled.tolist() == (X * size).tolist()
        assert "size" not in made
    again = Made.from_tensordict(TensorDict({"x": X}, [2]))
    assert again.scaled is not None
    assert again.scaled.tolist() == (X * 3).tolist()


def test_a_class_lists_its_fields_alone_and_replace_keeps_the_batch_size() -> None:
    assert list(Box.__dataclass_fields__) == [each.name for each in dataclasses.fields(Box)]
    box = Box(X, "x", batch_size=[2])
    assert dataclasses.replace(box, label="y").batch_size == (2,)


COMPUTED_LATE = pytest.mark.skipif(
    sys.version_info < (3, 14), reason="older Pythons compute annotations when they build a class"
)


@COMPUTED_LATE
def test_a_field_may_name_its_class_and_what_only_type_checkers_import() -> None:
    class Node(TensorClass, autocast=True):
        value: Tensor
        below: Node | None = None  # noqa: F821  # late
        kind: Missing | None = None  # type: ignore[name-defined]  # noqa: F821  # late

    leaf = Node(value=X, batch_size=[2])
    rows: Any = [1.0, 2.0]
    node = Node(value=rows, below=leaf, kind="root", batch_size=[2])
    assert isinstance(node.below, Node)
    assert node.value.tolist() == rows
    assert node.kind == "root"


def test_what_containers_keep_for_themselves_begins_alike() -> None:
    private = {name for name in dir(TensorClass) if re.match("_[a-z]", name)}
    others = {name for name in private if not name.startswith(OWN)}
    assert others == {"_ipython_key_completions_", "_repr_html_", "_abc_impl"}


def test_a_size_and_a_named_tuple_are_values_of_fields_as_they_are() -> None:
    class Pair(NamedTuple):
        left: int
        right: int

    class Sized(TensorClass):
        x: Tensor
        event: torch.Size
        pair: Pair

    class Cast(TensorClass, autocast=True):
        x: Tensor
        event: torch.Size

    made = Sized(torch.zeros(2, 3), torch.Size([3]), Pair(1, 2), batch_size=[2])
    assert type(made.event) is torch.Size
    assert made[0].pair == Pair(1, 2)
    made.event = torch.Size([4, 4])
    made.set("pair", Pair(3, 4))
    assert (made.event, made.pair, made.batch_size) == ((4, 4), Pair(3, 4), (2,))
    assert type(Cast(torch.zeros(2), torch.Size([5]), batch_size=[2]).event) is torch.Size
