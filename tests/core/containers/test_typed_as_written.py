"""Typed containers as users write them: own methods, any names, inheritance, dataclasses."""

import abc
import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from typing import Any, Generic, NotRequired, TypeVar, cast

import pytest
import torch
from torch import Tensor

from kd_core import (
    InvalidArgument,
    TensorClass,
    TensorDict,
    TypedTensorDict,
    UnknownField,
    from_dataclass,
    is_tensorclass,
    lazy_stack,
    stack,
    tensorclass,
)

T = TypeVar("T")
X = torch.arange(3.0)


@tensorclass
class Named:
    data: Tensor
    _cache: Tensor
    nested: str = "n"
    fields: object = None
    schema: Any = None
    spec: Any = None
    keys: Any = None
    shape: Any = None
    device: Any = None
    names: Any = None
    clone: Any = None


def named() -> Any:
    build: Any = Named
    return build(X, X + 1, shape="s", device="d", keys=(1, 2), batch_size=[3])


def test_fields_have_any_name() -> None:
    made = named()
    assert made.data is X
    assert torch.equal(made._cache, X + 1)
    assert (made.shape, made.device, made.keys, made.nested) == ("s", "d", (1, 2), "n")
    assert made.fields is made.clone is made.names is None
    made.clone = X * 2
    copies = (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made)))
    for same in (*copies, made[:], made + 0, stack([made, made])[1], lazy_stack([made])[0]):
        assert type(same) is Named
        assert torch.equal(same.data, X)
        assert torch.equal(same.clone, X * 2)
        assert same.shape in ("s", ["s", "s", "s"])  # one for each row where rows were stacked
    assert stack([made, made]).data.shape == (2, 3)
    assert torch.vmap(lambda row: row.data + row._cache)(made).tolist() == [1, 3, 5]
    assert TensorDict.select(made, "data").keys is None


@tensorclass
class Own:
    x: Tensor
    y: Tensor | None

    def __init__(self, x: Tensor, scale: float = 1.0) -> None:
        self.x = x * scale


class Deep(TensorClass):
    x: Tensor
    y: Tensor | None = None

    def __init__(self, x: Tensor, **named: Any) -> None:
        super().__init__(x=x, **named)  # type: ignore[call-arg]  # known at run time
        self.y = x + 1


def test_an_own_init_makes_the_instance() -> None:
    build: Any = Own
    made = build(X, scale=2)
    assert type(made) is Own
    assert made.x.tolist() == [0, 2, 4]
    assert made.y is None
    assert made.batch_size == ()  # type: ignore[attr-defined]  # known at run time
    rows = build(X, batch_size=[3], lock=True)
    assert rows.batch_size == (3,)
    assert rows.is_locked
    assert rows[1:].x.tolist() == [1, 2]
    deep = Deep(X, batch_size=[3])
    assert deep.y is not None
    assert deep.y.tolist() == [1, 2, 3]
    assert type(stack([deep, deep])[0]) is Deep
    assert Deep.from_dict({"x": X}).y is None


@tensorclass
class Watched:
    x: Tensor
    seen = 0

    def __setattr__(self, name: str, value: Any) -> None:
        type(self).seen += 1
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> str:
        return f"no {name}"

    @property
    def doubled(self) -> Tensor:
        return self.x * 2


class Below(Watched):
    @property
    def doubled(self) -> Tensor:
        return super().doubled + 1


def test_own_attribute_methods_see_fields_alone() -> None:
    build: Any = Watched
    made = build(X, batch_size=[3])
    before = Watched.seen
    moved = (made + 1)[1:]
    assert Watched.seen == before  # how the results are stored is not shown
    moved.x = X[1:]
    assert Watched.seen == before + 1
    assert made.other == "no other"
    assert made.doubled.tolist() == [0, 2, 4]
    below: Any = Below
    assert below(X).doubled.tolist() == [1, 3, 5]


def test_brackets_are_those_of_the_author() -> None:
    @tensorclass
    class Grid:
        x: Tensor

        def __class_getitem__(cls, item: Any) -> tuple[str, Any]:
            return cls.__name__, item

    class Box(TensorClass, Generic[T]):
        x: T

    grid: Any = Grid
    assert grid[1, 2] == ("Grid", (1, 2))
    assert Box[Tensor](X).x is X


class Registry:
    found: list[str] = []  # noqa: RUF012  # shared on purpose

    def __init_subclass__(cls, flavour: str = "plain", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.found.append(flavour)

    def area(self) -> float:
        return 1.0


class Shape(TensorClass, abc.ABC):
    side: Tensor

    @abc.abstractmethod
    def area(self) -> Tensor: ...


class Square(Shape, Registry, flavour="sharp", frozen=True):  # type: ignore[misc]  # the point of the test
    def area(self) -> Tensor:  # type: ignore[override]  # the point of the test
        return self.side**2


def test_bases_of_other_kinds_cooperate() -> None:
    assert Registry.found[-1] == "sharp"
    square = Square(X, batch_size=[3])
    assert square.area().tolist() == [0, 1, 4]
    assert isinstance(square[0], Shape)
    with pytest.raises(FrozenInstanceError, match="cannot set `side`: the class is frozen"):
        square.side = X  # type: ignore[misc]  # the point of the test


class Sample(TensorClass):
    x: Tensor
    name: str = "a"
    more: dict[str, Any] = field(default_factory=dict)


def test_it_is_a_dataclass_to_python() -> None:
    made = Sample(X, batch_size=[3], names=["time"])  # type: ignore[call-arg]  # known at run time
    assert dataclasses.is_dataclass(Sample)
    assert dataclasses.is_dataclass(made)
    assert [each.name for each in dataclasses.fields(made)] == ["x", "name", "more"]
    other = dataclasses.replace(made, name="b")
    assert (other.name, other.batch_size, other.names) == ("b", (3,), ["time"])
    assert dataclasses.asdict(made)["name"] == "a"
    assert list(inspect.signature(Sample).parameters)[:3] == ["x", "name", "more"]


def test_dicts_and_tuples_stay_what_they_are() -> None:
    given = {"k": X, "z": "s"}
    made = Sample(X, more=given, batch_size=[3])
    assert made.more is given
    made.more = {"q": 1}
    assert made[0].more == {"q": 1}
    assert made.to_dict() == {"x": X, "name": "a", "more": {"q": 1}}


def test_fields_of_a_plain_dataclass_are_inherited() -> None:
    @dataclasses.dataclass
    class Plain:
        x: Tensor
        tag: str = "t"

    @tensorclass
    class More(Plain):
        y: Tensor | None = None

    build: Any = More
    made = build(X, y=X, batch_size=[3])
    assert (made.tag, made[0].tag, made[0].y) == ("t", "t", 0)
    assert is_tensorclass(from_dataclass(Plain))


def test_none_passes_every_option() -> None:
    class Only(TensorClass, tensor_only=True, skip_post_init_on_rebuild=True):
        x: Tensor
        y: Tensor | None = None

    made = Only(X)
    assert made.y is None
    made.y = X
    made.y = None
    assert made.y is None
    assert list(made.keys()) == ["x"]


class Open(TypedTensorDict):
    x: Tensor
    note: str = "n"
    late: NotRequired[Tensor]  # type: ignore[misc, valid-type]  # the point of the test


def test_one_that_takes_further_keys_is_no_dataclass() -> None:
    assert not dataclasses.is_dataclass(Open)
    made: Any = Open
    assert not dataclasses.is_dataclass(lazy_stack([made(x=X, batch_size=[3])]))


def test_a_frozen_instance_that_is_not_constructed_is_not_locked() -> None:
    class Frozen(TensorClass, frozen=True):
        x: Tensor

    assert Frozen(x=X, batch_size=[3]).is_locked
    for made in (Frozen.from_dict({"x": X}), Frozen.from_tensordict(TensorDict({"x": X}))):
        assert not made.is_locked
        with pytest.raises(FrozenInstanceError):
            made.x = X  # type: ignore[misc]  # the point of the test


def test_a_typed_container_reads_defaults_and_lacks_what_is_not_required() -> None:
    made = Open(x=X, batch_size=[3])  # type: ignore[call-arg]  # `late` need not be there
    assert (made.note, list(made.keys())) == ("n", ["x"])
    with pytest.raises(UnknownField, match="`late` of `Open` is declared, and has no entry"):
        made.late  # noqa: B018  # reading it raises
    made.late = X
    assert made[1].late == 1
    assert type(made.select("late")) is Open


def test_compiled_code_reads_and_sets_fields() -> None:
    class Plain(TensorClass):
        x: Tensor

    def program(x: Tensor) -> Tensor:
        made = Plain(x, batch_size=[3])
        made.x = made.x + 1
        return stack([made, made])[0].x

    assert torch.compile(program, fullgraph=True, backend="eager")(X).tolist() == [1, 2, 3]


class Part(TensorClass):
    y: Tensor


class Cast(TensorClass, autocast=True):
    x: Tensor
    n: int
    part: "Part | None" = None
    later: "Later | None" = None  # type: ignore[name-defined]  # noqa: F821  # of what is not there


@pytest.mark.parametrize(
    "program",
    [
        lambda x: Cast(x, cast(Any, 3.5), Part(x, batch_size=[3])),
        lambda x: Cast(cast(Any, 2.0), True, Part(x)),
        lambda x: Cast.from_dict({"x": x, "n": "4", "part": {"y": x}}),
        lambda x: Cast.from_tensordict(TensorDict({"x": x, "part": TensorDict({"y": x}, [3])})),
    ],
    ids=["values", "numbers", "from_dict", "from_tensordict"],
)
def test_compiled_code_casts_to_what_fields_are_declared_as(
    program: Callable[[Tensor], Cast],
) -> None:
    expected = program(X)
    Cast._kd_declared.hints.clear()  # as in a program that starts
    made = torch.compile(program, fullgraph=True, backend="eager")(X)
    assert type(made.part) is Part
    assert (made.n, type(made.n)) == (expected.n, type(expected.n))
    assert (made == expected).all()


class Word(TensorClass):
    a: Tensor
    b: Tensor
    s: object = "word"


def word() -> Word:
    return Word(torch.ones(3, 2), torch.zeros(3, 2), batch_size=[3, 2])


def test_a_key_that_is_not_a_field_is_caught_as_a_key_and_as_a_field() -> None:
    kinds: tuple[type[Exception], ...] = (KeyError, ValueError, AttributeError)
    for kind in kinds:
        with pytest.raises(kind):
            word()["zz"]
        with pytest.raises(kind):
            word()["n", "c"]
        with pytest.raises(kind):
            word().update_({"zz": torch.ones(3, 2)})
        with pytest.raises(kind):
            word().rename_keys({"zz": "new"})
    with pytest.raises(RuntimeError):
        word().replace({"new": 1})


def test_a_dict_or_tuple_that_is_set_is_kept_as_it_is() -> None:
    data = word().set("s", {"z": 1}).set("a", (1, 2))
    assert [data.s, str(data.get("a"))] == [{"z": 1}, "(1, 2)"]
    assert isinstance(word().update({"a": {"z": torch.ones(3, 2)}}).get("a"), TensorDict)


def test_update_in_place_takes_the_parameter_of_update() -> None:
    data, before = word(), word()
    assert data.update_({"a": before.a * 5}, inplace=True).a[2].tolist() == [5, 5]


def test_gradients_keep_what_is_not_a_tensor() -> None:
    data = word()
    assert data.grad is not None
    assert [data.grad.s, data.grad.get("a")] == ["word", None]
    data.a.requires_grad_()
    torch.autograd.backward(data.a.sum())
    assert data.grad.a.tolist() == torch.ones(3, 2).tolist()


def test_stacks_of_instances_read_what_is_not_a_tensor_as_values() -> None:
    stack = word().to_lazystack()
    assert stack.get("s") == [["word"] * 2] * 3
    assert stack["a"].shape == (3, 2)


def test_text_is_a_column_of_text_in_a_structured_array() -> None:
    td = TensorDict({"a": torch.ones(2)}, [2])
    kinds = []
    for value in ("word", "long " * 3, 3):
        td.set_non_tensor("s", value)
        kinds.append(str(td.to_struct_array().dtype["s"]))
    assert kinds == ["<U10", "<U15", "object"]


def test_padding_in_place_changes_a_typed_container_itself() -> None:
    class Pair(TypedTensorDict):
        a: Tensor

    data = Pair(a=torch.ones(3), batch_size=[3])
    assert data.pad([0, 1], inplace=True) is data
    assert data.a.tolist() == [1, 1, 1, 0]
    assert isinstance(data.select("a", as_tensordict=True), Pair)
    assert not isinstance(data.pad([0, 1], 0.0), Pair)


@pytest.mark.parametrize(
    "compute",
    [
        lambda data: torch.sum(data, 0),
        lambda data: torch.mean(data),
        lambda data: torch.std(data, dim=0),
        lambda data: data.sum(0),
        lambda data: data.any(0),
        lambda data: data.all(0),
    ],
)
def test_functions_of_torch_return_what_the_methods_do(compute: Any) -> None:
    class Pair(TypedTensorDict):
        sum: Any  # has the name of the method

    class Plain(TypedTensorDict):
        a: Tensor

    found = compute(Plain(a=torch.ones(3, 2), batch_size=[3]))
    assert type(found) is TensorDict
    assert list(found.keys()) == ["a"]
    data: Any = Pair(sum=torch.ones(3, 2), batch_size=[3])
    shadowed: object = torch.sum(data, 0)
    assert type(shadowed) is TensorDict
    assert shadowed["sum"].tolist() == [3, 3]
    data = Plain(a=torch.ones(3), batch_size=[3])
    assert isinstance(torch.exp(data), Plain)


def test_a_number_beside_rows_is_kept_as_it_is() -> None:
    class Sample(TensorClass):
        x: Tensor
        k: int = 3
        rate: float | None = None

    build: Any = Sample
    made = build(x=X, batch_size=[3])
    assert (made.k, made.rate) == (3, None)
    made.rate = 0.5
    assert (made[0].k, made[:2].rate) == (3, 0.5)
    assert torch.equal(build(x=X, k=4, batch_size=[]).k, torch.tensor(4))
    with pytest.raises(RuntimeError):  # a tensor must have rows
        build(x=X, k=torch.tensor(4), batch_size=[3])


def test_the_constructor_sets_fields_as_the_author_does() -> None:
    class Sample(TensorClass):
        x: Tensor
        y: Any = None

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value + 1 if isinstance(value, Tensor) else value)

    class Further(Sample):
        z: Any = None

    build: Any = Further
    made = build(x=X, z=X, batch_size=[3])
    assert made.x.tolist() == made.z.tolist() == [1, 2, 3]
    assert made.y is None
    assert made.clone().x.tolist() == [1, 2, 3]
    assert Sample.from_dict({"x": X}, batch_size=[3]).x.tolist() == [0, 1, 2]


def test_containers_take_attributes_that_are_not_entries() -> None:
    class Batch(TypedTensorDict):
        x: Tensor

    for td in (TensorDict({"x": X}, [3]), Batch(x=X, batch_size=[3])):
        owner: Any = td
        owner.note = [1]
        assert owner.note == [1]
        assert list(td.keys()) == ["x"]
        assert not hasattr(td.clone(), "note")
        assert not hasattr(td[:2], "note")
        assert pickle.loads(pickle.dumps(owner)).note == [1] if type(td) is TensorDict else True
    stacked: Any = lazy_stack([Batch(x=X, batch_size=[3])])
    assert torch.equal(stacked.x[0], X)


def test_a_deep_copy_is_not_locked() -> None:
    nested = TensorDict({"n": {"x": X}, "s": "a"}, [3]).lock_()
    stacked = lazy_stack([TensorDict({"x": X}, [3]) for _ in range(2)]).lock_()
    for td in (nested, stacked):
        copied = copy.deepcopy(td)
        assert td.is_locked
        copied["y"] = copied["n", "x"] if td is nested else copied["x"]
    inner: Any = copy.deepcopy(nested)["n"]
    assert not inner.is_locked
    assert not copy.deepcopy(stacked)[0].is_locked


def test_options_in_brackets_are_names() -> None:
    class Batch(TypedTensorDict):
        x: Tensor

    make: Any = Batch
    with pytest.raises(ValueError, match="takes names of options, got 1"):
        make[1, 2]


def test_a_frozen_instance_is_a_key_as_a_tensor_is() -> None:
    class Frozen(TensorClass, frozen=True):
        x: Tensor

    class Equal(TensorClass, frozen=True):
        x: Tensor

        def __hash__(self) -> int:  # type: ignore[override]  # as authors do
            return 7

    one, other = Frozen(torch.ones(2)), Frozen(torch.ones(2))
    assert {one: 1, other: 2}[one] == 1
    assert hash(Equal(torch.ones(2))) == 7
    with pytest.raises(TypeError, match="unhashable type"):
        hash(TensorDict({"x": torch.ones(2)}))


def test_a_typed_container_is_made_of_a_mapping_as_a_plain_one() -> None:
    class Batch(TypedTensorDict):
        obs: Tensor
        done: Tensor

    entries = {"obs": torch.ones(2), "n": {"done": torch.ones(2)}}
    for source in (entries, TensorDict(entries, [2])):
        made = Batch(source, batch_size=[2])  # type: ignore[arg-type, call-arg]  # as users write it
        assert type(made) is Batch
        assert made.keys(True, True) == {"obs", ("n", "done")}
        assert made["n", "done"].shape == made.batch_size == (2,)
    assert set(Batch(entries, done=torch.ones(2)).keys()) == {"obs", "n", "done"}  # type: ignore[arg-type]  # as above
    with pytest.raises(InvalidArgument, match="`obs` is given twice"):
        Batch(entries, obs=torch.ones(2))  # type: ignore[arg-type, call-arg, misc]  # as above
