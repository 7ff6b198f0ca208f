"""Tensor classes that are made of other classes."""

import dataclasses
import types
from dataclasses import FrozenInstanceError, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kd_core import (
    InvalidArgument,
    Locked,
    TensorClass,
    TensorDict,
    TensorDictBase,
    from_dataclass,
    is_tensorclass,
    tensorclass,
)


@tensorclass
class Point:
    x: Tensor
    name: str = "p"
    tags: dict[str, int] = field(default_factory=dict)

    def norm(self) -> Tensor:
        return self.x.abs()


@dataclasses.dataclass
class Inner:
    y: Tensor


@dataclasses.dataclass
class Plain:
    x: Tensor
    inner: Inner
    words: list[str] = field(default_factory=lambda: ["a", "b"])


def test_the_decorator_makes_a_container() -> None:
    point = Point(x=-torch.ones(3), batch_size=[3])  # type: ignore[call-arg]  # a keyword of containers
    made = cast("TensorClass", point)
    assert is_tensorclass(Point)
    assert Point.__qualname__ == "Point"
    row: object = made[0]
    assert isinstance(row, Point)
    assert row.norm() == 1
    assert point.name == "p"
    assert tensorclass(Point) is Point


def test_the_decorator_takes_options() -> None:
    @tensorclass(frozen=True, autocast=True)
    class Frozen:
        n: int

    data = Frozen(torch.tensor(2))  # type: ignore[arg-type]  # it is cast
    assert data.n == 2
    with pytest.raises(Locked):
        data.n = 3  # type: ignore[misc]  # wrong on purpose
    with pytest.raises(InvalidArgument, match="`tensorclass` must be a class"):
        tensorclass(3)  # type: ignore[call-overload]  # wrong on purpose


def made(base: Any, name: str, kind: object, default: object, **options: bool) -> Any:
    """Return a class with one more field than its base, as a class statement makes it."""
    body = {"__annotations__": {name: kind}, name: default, "__module__": __name__}
    return types.new_class("Made", (base,) if base else (), options, lambda own: own.update(body))


decorate: Any = tensorclass


@pytest.mark.parametrize("above", [{}, {"autocast": True}, {"nocast": True}, {"tensor_only": True}])
def test_the_options_of_the_decorator_hold_below_a_tensor_class(above: dict[str, bool]) -> None:
    def kinds(base: Any, **options: bool) -> tuple[type, type]:
        cls = decorate(**options)(made(base, "n", int, 1))
        data = cls(x=torch.ones(2), n=3)
        data.n = 4
        return type(data.n), type(cls().n)

    for base in (
        made(TensorClass, "x", Tensor | None, None, **above),
        decorate(**above)(made(None, "x", Tensor | None, None)),
    ):
        assert kinds(base, autocast=True) == (int, int)
        assert kinds(base, nocast=True) == (int, int)
        assert kinds(base) == (Tensor, Tensor)


def test_the_decorator_freezes_below_a_tensor_class() -> None:
    base = decorate(made(None, "x", Tensor, None))
    frozen = decorate(frozen=True, kw_only=True)(made(base, "n", int, 1))
    lower = decorate(made(frozen, "m", int, 1))
    for cls in (frozen, lower):
        data = cls(x=torch.ones(2), n=2)
        assert data.is_locked
        with pytest.raises(FrozenInstanceError):
            data.n = 3
        with pytest.raises(InvalidArgument, match="keywords only"):
            cls(torch.ones(2))
    with pytest.raises(InvalidArgument, match="`autocast`, `nocast` of `Made`"):
        decorate(autocast=True, nocast=True)(made(base, "n", int, 1))


def test_a_dataclass_becomes_a_tensor_class() -> None:
    cls = from_dataclass(Plain)
    assert from_dataclass(Plain) is cls
    assert cast("type", cls).__name__ == "Plain_tc"
    plain = Plain(torch.zeros(2), Inner(torch.ones(2, 3)))
    data = from_dataclass(plain, auto_batch_size=True)
    assert isinstance(data, TensorClass)
    assert type(data) is cls
    assert data.batch_size == (2,)
    assert data.get_non_tensor("words") == ["a", "b"]
    assert data["inner", "y"].shape == (2, 3)
    assert [each.name for each in data.fields()] == ["x", "inner", "words"]
    with pytest.raises(InvalidArgument, match="a dataclass or its instance"):
        from_dataclass(3)


def test_fields_of_a_dataclass_keep_their_options() -> None:
    @dataclasses.dataclass
    class Both:
        x: Tensor = field(kw_only=True)
        y: Tensor
        z: Tensor = field(init=False)

        def __post_init__(self) -> None:
            self.z = self.x + self.y

    for cls in cast("list[type[Both]]", [from_dataclass(Both), tensorclass(Both)]):
        assert cls(torch.ones(2), x=torch.zeros(2)).z.tolist() == [1, 1]
        assert cls.__match_args__ == ("y",)


def test_a_given_class_is_filled() -> None:
    class Target(TensorClass):
        y: Tensor

    data = from_dataclass(Inner(torch.zeros(2)), dest_cls=Target, batch_size=[2])
    assert isinstance(data, Target)
    assert data.y.shape == (2,)


def test_containers_are_taken_and_fields_replaced() -> None:
    class Target(TensorClass):
        y: Tensor
        s: str = "s"

    source: TensorDictBase = TensorDict({"y": torch.zeros(2), "z": torch.ones(2)}, [2])
    data = Target.from_tensordict(source, {"s": "t"}, safe=False)
    assert data.y is source["y"]
    assert (data.s, data.batch_size) == ("t", (2,))
    other = data.__replace__(s="u")
    assert (other.s, data.s, other.batch_size) == ("u", "t", (2,))


def test_a_dataclass_is_built_as_a_class_that_is_asked_for() -> None:
    @dataclasses.dataclass
    class Plain:
        x: Tensor
        tag: str = "t"

    class Wanted(TensorClass):
        x: Tensor
        tag: str

    given = Plain(torch.zeros(3))
    made: object = TensorDict.from_dataclass(given, as_tensorclass=True, auto_batch_size=True)
    assert is_tensorclass(made)
    assert isinstance(TensorDict.from_dataclass(given, dest_cls=Wanted, batch_size=[3]), Wanted)
    assert isinstance(from_dataclass(given, inplace=True), TensorClass)
    with pytest.raises(InvalidArgument, match="`inplace=True` cannot change the class `Plain`"):
        from_dataclass(Plain, inplace=True)


class Placed(TensorClass):
    x: Tensor
    names: list[str] | None  # type: ignore[assignment]  # which is a property of other containers
    lock: str | None = "closed"


def test_none_is_a_value_of_a_field_with_the_name_of_a_keyword() -> None:
    x = torch.zeros(2)
    placed = Placed(x, names=None, lock=None, batch_size=[2])
    assert placed.get("names") is None
    assert placed.get("lock") is None
    assert Placed(x, names=None, batch_size=[2]).get("lock") == "closed"
    with pytest.raises(InvalidArgument, match="a value for `names`"):
        Placed(x, batch_size=[2])  # type: ignore[call-arg]  # what is lacking


class Sized:
    """A base that does not know the fields of what is made below it."""

    def __init__(self) -> None:
        raise AssertionError("a class with fields has a constructor of its own")

    def total(self) -> float:
        return float(cast("TensorClass", self).sum(reduce=True))


def test_the_constructor_is_not_that_of_a_plain_base() -> None:
    @tensorclass
    class Below(Sized):
        x: Tensor

    class Mixed(Sized, TensorClass):
        x: Tensor

    made: list[Any] = [Below, Mixed]
    for cls in made:
        assert cls(torch.ones(2), batch_size=[2]).total() == 2


def test_what_is_derived_of_a_class_before_it_is_decorated_has_its_fields() -> None:
    class Plain:
        x: Tensor
        name: str = "plain"

        def __init__(self, n: int) -> None:
            self.x = torch.ones(n)
            self.name = "made"

        def __repr__(self) -> str:
            return "its own"

    class Derived(Plain):
        y: Tensor | None = None

    first: Any = tensorclass(Plain)
    below: Any = tensorclass(Derived)
    made = below(3)
    assert (made.x.shape, made.y, made.name, repr(made)) == ((3,), None, "made", "its own")
    assert [each.name for each in dataclasses.fields(below)] == ["x", "name", "y"]
    assert repr(first(2)) == "its own"
    assert cast("Any", tensorclass(Plain))(2).x.shape == (2,)
