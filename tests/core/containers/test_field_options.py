"""Options of tensor classes: what they do to the values of fields."""

import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from kd_core import (
    FrozenField,
    InvalidArgument,
    InvalidValue,
    Locked,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    TypedTensorDict,
    UnknownField,
    stack,
)


class Inner(TensorClass):
    x: Tensor


class Cast(TensorClass, autocast=True):
    x: Tensor
    n: int
    s: str = "a"
    maybe: float | None = None
    inner: Inner | None = None


def test_autocast_casts_to_the_declared_types() -> None:
    data = Cast([1, 2], torch.tensor(3), 4, 0.5, {"x": torch.ones(1)})  # type: ignore[arg-type]  # they are cast
    assert data.x.tolist() == [1, 2]
    assert (data.n, data.s) == (3, "4")
    assert isinstance(data.maybe, Tensor)  # a number that may be missing is stored as others are
    assert isinstance(data.inner, Inner)  # type: ignore[unreachable]  # types say less than the run
    data.n = 2.9
    assert data.n == 2
    data.update({"n": torch.tensor(5), "x": 7})
    assert (data.n, data.x.item()) == (5, 7)
    assert data.clone().n == 5
    assert stack([data, data]).n == [5, 5]
    with pytest.raises(InvalidArgument, match="field `n` of `Cast` must be of type `int`, got 'x'"):
        data.n = "x"
    with pytest.raises(InvalidArgument, match="field `x` of `Cast` must be a tensor, as the"):
        data.x = "x"
    assert (data.n, data.x.item()) == (5, 7)


class Whole(TensorClass, autocast=True):
    either: NonTensorData | list[int] = field(default=cast("Any", None))
    own: Any = None
    words: list[str] | None = None
    listed: list[str] = field(default=cast("Any", None))
    array: np.ndarray[Any, Any] | None = None
    seen: set[str] | str | None = None
    only: NonTensorData = field(default=cast("Any", None))
    plain: np.ndarray = field(default=cast("Any", None))
    unique: set = field(default=cast("Any", None))  # type: ignore[type-arg]  # as programs write it


@pytest.mark.parametrize("name", list(Whole.__annotations__))
@pytest.mark.parametrize(
    "value", [["a", "b"], ("a", "b"), ["a"], [None, "a"], {"a": 1}, np.array(["a", "b"])]
)
def test_autocast_keeps_what_it_does_not_cast_as_one_value(name: str, value: Any) -> None:
    make: Any = Whole
    made, later = make(**{name: value}, batch_size=[2]), make(batch_size=[2])
    setattr(later, name, value)
    kinds: dict[str, Callable[[Any], Any]] = {
        "plain": lambda it: it if type(it) is dict else np.asarray(it),
        "unique": lambda it: it if type(it) is dict else set(it),
    }
    expected = kinds.get(name, lambda it: it)(value)
    for data in (made, later, made.clone(), torch.cat([made, later]), made[0]):
        found = getattr(data, name)
        assert type(found) is type(expected)
        assert found is expected or np.array_equal(found, expected)
    rows = make(**{name: NonTensorStack("x", "y")}, batch_size=[2])
    assert getattr(rows[1], name) == "y"


def test_autocast_keeps_numbers_in_fields_of_data() -> None:
    make: Any = Whole
    data = make(only=3, plain=torch.ones(3), batch_size=[2])
    assert (data[0].only, type(data.plain)) == (3, np.ndarray)
    assert data[0].plain.tolist() == [1, 1, 1]
    assert make(own=np.ones(2), batch_size=[2])[0].own == 1
    with pytest.raises(InvalidArgument, match="field `plain` of `Whole` must be of type `ndarray`"):
        data.plain = [np.zeros(2), np.zeros(3)]


class Holding(TensorClass, autocast=True):
    inner: Inner = field(default=cast("Any", None))
    maybe: Inner | None = None
    x: Tensor = field(default=cast("Any", None))


@pytest.mark.parametrize("later", [False, True])
def test_autocast_keeps_containers_of_other_keys(later: bool) -> None:
    def hold(name: str, value: object) -> Any:
        make: Any = Holding
        if not later:
            return getattr(make(**{name: value}), name)
        made = make()
        setattr(made, name, value)
        return getattr(made, name)

    fits, other = TensorDict({"x": torch.ones(2)}), TensorDict({"y": torch.ones(2)})
    assert type(hold("inner", fits)) is Inner
    assert type(hold("inner", {"x": torch.ones(2)})) is type(hold("maybe", {"x": 1})) is Inner
    for made in (hold("inner", other), hold("maybe", other), hold("maybe", fits)):
        assert type(made) is TensorDict
    assert hold("maybe", {"y": 1}) == {"y": 1}
    assert hold("x", {"y": 1}) == {"y": 1}
    with pytest.raises(UnknownField):
        hold("inner", {"y": 1})


def test_nocast_keeps_numbers() -> None:
    class Plain(TensorClass, nocast=True):
        x: Tensor
        n: int
        words: list[str]

    data = Plain(torch.zeros(2), 3, ["a", "b"], batch_size=[2])
    assert data.n == 3
    assert isinstance(data.n, int)
    assert data.words == ["a", "b"]
    assert (data[0].n, data[0].words) == (3, "a")  # type: ignore[comparison-overlap]  # types say less than the run


def test_tensor_only_refuses_other_data() -> None:
    class Only(TensorClass, tensor_only=True):
        x: Tensor

    assert Only([1.0, 2.0]).x.tolist() == [1, 2]  # type: ignore[arg-type]  # it is converted
    with pytest.raises(InvalidArgument, match="`x` of `Only` must be a tensor, as the option `t"):
        Only("a")  # type: ignore[arg-type]  # wrong on purpose


def test_checked_refuses_other_types() -> None:
    class Checked(TensorClass, checked=True):
        x: Tensor
        n: int
        words: list[str]

    data = Checked(torch.zeros(2), 3, ["a", "b"], batch_size=[])
    assert data.words == ["a", "b"]
    with pytest.raises(InvalidArgument, match="`x` of `Checked` must be of type `Tensor`, got 'a'"):
        data.x = "a"  # type: ignore[assignment]  # wrong on purpose
    with pytest.raises(InvalidArgument, match="`n` of `Checked` must be of type `int`"):
        Checked(torch.zeros(2), 0.5, [])  # type: ignore[arg-type]  # wrong on purpose


def test_a_frozen_instance_keeps_its_fields() -> None:
    class Frozen(TensorClass, frozen=True):
        x: Tensor
        y: Tensor | None = None

    data = Frozen(torch.zeros(2), batch_size=[2])
    assert data.is_locked
    for one in (data, data + 1):
        with pytest.raises(Locked, match="`x`"):
            one["x"] = one.x * 2
        with pytest.raises(Locked, match="x"):
            one.update({"x": torch.ones(one.shape)})
    for one in (data, data[:1], data.clone(), stack([data, data]), data.clone().lock_()):
        with pytest.raises(FrozenField, match="cannot set `x`: the class is frozen"):
            one.x = torch.ones(one.shape)  # type: ignore[misc]  # wrong on purpose
        with pytest.raises(FrozenField, match="cannot set `y`"):
            one.y = None  # type: ignore[misc]  # as above
        with pytest.raises(FrozenField, match="cannot remove `x`"):
            del one.x
    data.x.add_(1)
    assert data.__replace__(x=data.x * 3).x.tolist() == [3, 3]
    assert data.replace(y=data.x).y is data.x


def test_a_frozen_instance_that_is_not_locked_takes_values_by_key() -> None:
    class Frozen(TensorClass, frozen=True):
        x: Tensor
        y: Tensor | None = None

    data = Frozen(torch.zeros(2), batch_size=[2])
    for one in (data.clone(), data[:], data.unlock_()):
        one.set("y", torch.ones(2)).update({"x": torch.ones(2)})
        assert (one.x.tolist(), one.y) == ([1, 1], one["y"])
        assert one.del_("y").y is None


def test_a_frozen_class_completes_itself_after_construction() -> None:
    class Frozen(TensorClass, frozen=True):
        x: Tensor
        y: Tensor | None = None
        z: Tensor = field(init=False)

        def __post_init__(self) -> None:
            self.set("y", self.x + 1)
            object.__setattr__(self, "z", self.x + 2)

    data = Frozen(torch.zeros(2), batch_size=[2])
    assert (data.is_locked, data["y"].tolist(), data.z.tolist()) == (True, [1, 1], [2, 2])

    class Wrong(Frozen, frozen=True):
        def __post_init__(self) -> None:
            self.y = self.x  # type: ignore[misc]  # wrong on purpose

    with pytest.raises(FrozenField, match="cannot set `y`"):
        Wrong(torch.zeros(2), batch_size=[2])


def test_shadow_allows_names_of_methods() -> None:
    class Shadow(TensorClass, shadow=True):
        values: Tensor  # type: ignore[assignment]  # hides the method
        sum: Tensor  # type: ignore[assignment]  # as above

    data = Shadow(torch.zeros(2), torch.ones(2), batch_size=[2])
    assert data[1:].sum.tolist() == [1]
    assert (data + 1).values.tolist() == [1, 1]
    with pytest.raises(InvalidValue, match="`batch_size`"):
        types.new_class(
            "Bad",
            (TensorClass,),
            {"shadow": True},
            lambda body: body.update({"__annotations__": {"batch_size": Tensor}}),
        )


def test_keywords_only() -> None:
    class Named(TensorClass, kw_only=True):
        x: Tensor

    assert Named(x=torch.zeros(2)).x.shape == (2,)
    with pytest.raises(InvalidArgument, match="`Named` takes keywords only, got 1 positional"):
        Named(torch.zeros(2))  # type: ignore[call-arg, arg-type]  # wrong on purpose


def test_options_come_in_brackets_and_are_inherited() -> None:
    with_options = cast("Mapping[tuple[str, ...], type]", TensorClass)
    base = with_options["frozen", "autocast"]
    assert base is with_options["autocast", "frozen"]
    made = types.new_class(
        "Made", (base,), {}, lambda body: body.update({"__annotations__": {"x": Tensor}})
    )
    data = made(x=[1, 2])
    assert data.x.tolist() == [1, 2]
    with pytest.raises(Locked):
        data.x = torch.zeros(2)

    class More(Cast):
        k: int = 0
        count: ClassVar[int] = 3

    assert More([1], 2, k=torch.tensor(4)).k == 4  # type: ignore[arg-type]  # they are cast


def test_options_are_checked() -> None:
    with pytest.raises(InvalidArgument, match="`frozn` is not a valid option of `Bad`; available"):
        types.new_class("Bad", (TensorClass,), {"frozn": True})
    with pytest.raises(
        InvalidArgument, match=r"options `autocast`.*`nocast` of `Bad` cannot be combined"
    ):
        types.new_class("Bad", (TensorClass,), {"autocast": True, "nocast": True})
    with pytest.raises(UnknownField, match="`y`"):
        Inner.from_tensordict(TensorDict(x=1, y=2))


class Kinds(TensorClass, checked=True):
    x: Tensor
    weight: float | None = None
    note: Tensor | str = ""


def test_every_declared_type_is_checked_and_none_only_where_it_is_declared() -> None:
    x = torch.zeros(2)
    assert Kinds(x, 1).weight == 1
    assert Kinds(x, None, x).note is x
    build: Callable[..., Kinds] = Kinds
    for given, text in (
        ({"x": None}, "`x` of `Kinds` must be of type `Tensor`, got None"),
        ({"weight": "a"}, "`weight` of `Kinds` must be of type `float . None`, got 'a'"),
        ({"note": 3}, "`note` of `Kinds` must be of type `Tensor . str`, got 3"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            build(**{"x": x, **given})


class Numbers(TensorClass, checked=True):
    flag: bool = False
    level: int = 0
    weight: float = 0.0
    phase: complex = 0j


def test_a_checked_number_is_of_a_dtype_that_its_type_holds() -> None:
    build: Callable[..., Numbers] = Numbers
    ranks = {"flag": 0, "level": 1, "weight": 2, "phase": 3}
    dtypes = (torch.bool, torch.int16, torch.float16, torch.complex64)
    for name, most in ranks.items():
        for rank, dtype in enumerate(dtypes):
            given = {name: torch.ones(2).to(dtype)}
            if rank <= most:
                assert build(**given)[name].dtype is dtype
            else:
                with pytest.raises(InvalidArgument, match=f"`{name}` of `Numbers` must be of type"):
                    build(**given)
    halves = build(level=torch.tensor([1, 2])) + 0.5  # not a write of a program
    assert halves["level"].tolist() == [1.5, 2.5]


def test_each_declared_type_is_resolved_alone() -> None:
    class Late(TensorClass, autocast=True):
        n: "int"
        inner: "Inner"
        unknown: "Elsewhere"  # type: ignore[name-defined]  # noqa: F821  # wrong on purpose

    class More(TypedTensorDict):
        inner: "Inner"

    data = Late(torch.tensor(3), {"x": torch.ones(1)}, 1)  # type: ignore[arg-type]  # they are cast
    assert (data.n, data.inner.x.item(), data.unknown) == (3, 1.0, 1)
    more = More.from_dict({"inner": {"x": torch.ones(2)}, "free": {"x": torch.zeros(2)}}, [2])
    assert type(more.inner) is Inner
    assert not isinstance(more.get("free"), TensorClass)


class Protocolled(Protocol):
    def method(self) -> None: ...


class Checks(TensorClass, checked=True):
    n: int
    words: list[str]
    free: Any = None
    some: Any | str = None
    protocol: Protocolled | None = None
    meta: dict[str, Tensor] | None = None


def test_types_that_python_cannot_check_take_every_value() -> None:
    data = Checks(1, ["a"], free=3, some=[], protocol=torch.zeros(1))  # type: ignore[arg-type]  # not checked
    assert data.free == 3
    assert isinstance(data.some, Tensor)  # as any list of numbers
    assert data.some.tolist() == []


def test_a_checked_instance_takes_what_it_holds() -> None:
    data = Checks(1, ["a", "b"], meta={"x": torch.ones(1)})
    both = stack([data, data])
    for one in (data, both, both[0]):
        for made in (one.__replace__(), one.clone().update(one), Checks.from_tensordict(one)):
            assert made.to_dict() == one.to_dict()
    with pytest.raises(InvalidArgument, match="`n` of `Checks` must be of type `int`"):
        data["n"] = NonTensorStack("a")
    with pytest.raises(InvalidArgument, match="`words` of `Checks` must be of type `list`"):
        data["words"] = {"x": torch.ones(1)}


def test_what_is_cast_is_checked() -> None:
    class Both(TensorClass, autocast=True, checked=True):
        n: int
        inner: Inner | None = None

    build: Callable[..., Both] = Both
    assert build("3", {"x": torch.ones(1)}).n == 3
    for wrong in ({"n": None}, {"n": 1, "inner": "a"}):
        with pytest.raises(InvalidArgument, match="of `Both` must be of type"):
            build(**wrong)


def test_wrapped_values_are_cast_as_others_are() -> None:
    data = Cast.from_tensordict(TensorDict({"x": torch.zeros(2), "n": "7", "s": "a"}))
    assert data.n == 7
    data["s"] = NonTensorData(5)
    assert data.s == "5"
    rows = stack([data, data])
    rows["n"] = NonTensorStack("1", "2")
    assert rows["n"] == [1, 2]
    with pytest.raises(InvalidArgument, match="`n` of `Cast` must be of type `int`"):
        rows["n"] = NonTensorStack("1", "b")
    assert rows["n"] == [1, 2]


def test_tensor_only_keeps_fields_that_no_row_has_a_value_for() -> None:
    class Only(TypedTensorDict, tensor_only=True):
        a: object
        x: Tensor

    one = Only(a=None, x=torch.zeros(2), batch_size=[2])
    both = stack([one, one])
    again = both.__replace__(x=torch.ones(2, 2))
    assert again["a"] == [[None, None], [None, None]]
    assert torch.equal(again["x"], torch.ones(2, 2))
    again["a"] = torch.zeros(2, 2)
    assert torch.equal(again["a"], torch.zeros(2, 2))


def test_tensor_only_converts_or_refuses_wrapped_values() -> None:
    class Only(TensorClass, tensor_only=True):
        x: Tensor
        later: Tensor | None = field(init=False)

    data = Only.from_tensordict(TensorDict({"x": NonTensorData(3)}))
    assert data.x.item() == 3
    assert data.__replace__().later is None
    with pytest.raises(InvalidArgument, match="`x` of `Only` must be a tensor"):
        Only.from_tensordict(TensorDict({"x": "a"}))


def test_a_replaced_field_is_checked_as_one_that_is_set() -> None:
    class Checked(TensorClass, checked=True):
        obs: Tensor
        note: str | None = "n"

    one = Checked(torch.zeros(2), batch_size=[2])
    with pytest.raises(InvalidArgument, match="`obs` of `Checked` must be of type `Tensor`, got"):
        one.__replace__(obs=None)
    assert one.__replace__(note=None).note is None
    assert one.note == "n"


def test_a_field_that_is_set_later_may_be_without_a_value_again() -> None:
    class Checked(TensorClass, checked=True):
        obs: Tensor
        count: int = field(init=False, default=None)  # type: ignore[assignment]  # until it is set

    one = Checked(torch.zeros(2))
    one.count = 3
    one.count = None  # type: ignore[assignment]  # as above
    assert list(one.keys()) == ["obs"]
    with pytest.raises(InvalidArgument, match="`obs` of `Checked` must be of type `Tensor`, got"):
        one.obs = None  # type: ignore[assignment]  # as above


class Blank(TensorClass):
    pass


class Holds(TensorClass, autocast=True):
    inner: Inner
    blank: Blank | None = None


def test_autocast_leaves_containers_that_a_class_has_no_fields_for() -> None:
    make: Any = Holds
    fits, other = TensorDict({"x": torch.ones(2)}), TensorDict({"b": torch.ones(2)})
    assert type(make(fits).inner) is Inner
    held = make(other, fits)
    assert type(held.inner) is type(held.blank) is TensorDict
    held.blank = other
    assert list(held.keys(True)) == ["inner", ("inner", "b"), "blank", ("blank", "b")]
    with pytest.raises(UnknownField, match="`b` is not a field of `Inner`"):
        make({"b": torch.ones(2)})


def test_autocast_calls_the_declared_collection() -> None:
    class Collections(TensorClass, autocast=True):
        words: list = field(default=cast("Any", None))  # type: ignore[type-arg]  # as programs write it
        table: dict = field(default=cast("Any", None))  # type: ignore[type-arg]  # as above
        perhaps: Tensor | None = None

    make: Any = Collections
    assert make(words=np.array([1, 2])).words == [1, 2]
    assert make(words=range(2)).words == [0, 1]
    assert make(table=[("a", 1)]).table == {"a": 1}
    assert make(perhaps={1, 2}).perhaps == {1, 2}
    for wrong in ({"words": 3}, {"table": [1]}):
        with pytest.raises(TypeError, match="must be of type"):
            make(**wrong)


@pytest.mark.parametrize("option", ["", "autocast", "nocast"])
@pytest.mark.parametrize("value", [OrderedDict(a=1), defaultdict(int, a=1), OrderedDict({1: 2})])
def test_a_field_keeps_a_dict_of_any_class(option: str, value: Any) -> None:
    base: Any = TensorClass
    base = base[option] if option else base
    body = {"__annotations__": {"x": Tensor, "d": Any}, "d": None}
    made: Any = types.new_class("Made", (base,), exec_body=lambda space: space.update(body))
    given = made(x=torch.ones(2), d=value, batch_size=[2])
    later = made(x=torch.ones(2), batch_size=[2])
    later.d = value
    other = made(x=torch.ones(2), batch_size=[2]).set("d", value)
    assert all(each.d is value for each in (given, later, other, given[0]))


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Called(TensorClass, autocast=True):
    colour: Colour = Colour.RED
    path: Path = field(default=cast("Any", None))
    device_name: torch.device = field(default=cast("Any", None))
    raw: bytes = b""
    label: str = ""
    numbers: np.float32 = field(default=cast("Any", None))
    maybe: Colour | None = None


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("colour", "blue", Colour.BLUE),
        ("colour", NonTensorData("blue"), Colour.BLUE),
        ("colour", Colour.BLUE, Colour.BLUE),
        ("colour", {"a": 1}, {"a": 1}),
        ("path", "a/b", Path("a/b")),
        ("device_name", "cpu", torch.device("cpu")),
        ("raw", [1, 2], b"\x01\x02"),
        ("label", torch.tensor(3), "tensor(3)"),
        ("numbers", 0.5, np.float32(0.5)),
        ("maybe", "blue", "blue"),
    ],
)
@pytest.mark.parametrize("batch", [[], [2]])
def test_autocast_calls_the_class_of_a_field(
    name: str, value: object, expected: object, batch: list[int]
) -> None:
    make: Any = Called
    made, later = make(**{name: value}, batch_size=batch), make(batch_size=batch)
    setattr(later, name, value)
    for each in (made, later, made.clone()):
        assert getattr(each, name) == expected
        assert type(getattr(each, name)) is type(expected)
    rows = stack([made, made])
    assert rows[0].get(name) == expected


def test_autocast_refuses_what_the_class_refuses() -> None:
    make: Any = Called
    with pytest.raises(InvalidArgument, match="field `colour` of `Called` must be of type"):
        make(colour="green")


def _class_of(body: Mapping[str, object], options: dict[str, bool]) -> Any:
    make: Any = type(TensorClass)
    return make("Held", (TensorClass,), dict(body), **options)


@pytest.mark.parametrize("options", [{}, {"autocast": True}, {"frozen": True}])
@pytest.mark.parametrize("hint", [torch.Tensor, Any, float])
@pytest.mark.parametrize("batch", [[], [2]])
def test_a_number_of_numpy_is_kept(options: dict[str, bool], hint: Any, batch: list[int]) -> None:
    body = {"__annotations__": {"y": hint}, "__module__": __name__}
    cls = _class_of(body, options)
    if options.get("autocast") and hint is not Any:
        assert float(cls(y=np.int64(3), batch_size=[]).y) == 3  # it is cast
        return
    for number in (np.int64(3), np.float32(0.5), np.bool_(True), np.complex64(1)):
        assert type(cls(y=number, batch_size=batch).y) is type(number)


def test_a_float64_of_numpy_is_a_float_of_python() -> None:
    class Held(TensorClass):
        y: float

    assert isinstance(Held(y=np.float64(0.5), batch_size=[]).y, torch.Tensor)
    assert Held(y=np.float64(0.5), batch_size=[2]).y == 0.5


@pytest.mark.parametrize("option", ["autocast", "nocast", "tensor_only", "frozen"])
def test_from_dict_nests_dicts_whatever_the_options(option: str) -> None:
    class Inner(TensorClass):
        x: torch.Tensor

    body = {"__annotations__": {"y": torch.Tensor, "i": Inner}, "__module__": __name__}
    cls = _class_of(body, {option: True})
    content = {"x": torch.zeros(2)}
    made = cls.from_dict({"y": content, "i": content}, batch_size=[2])
    assert type(made.get("y")) is TensorDict
    assert type(made.i) is Inner
    assert made.y.batch_size == (2,)
