"""Container operations compile whole, and compile once."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from kd_core import (
    MetaData,
    NonTensorData,
    ShapeMismatch,
    TensorClass,
    TensorDict,
    TensorDictBase,
    UnbatchedTensor,
    cat,
    lazy_stack,
    stack,
)
from kd_core.testing import assert_close

Operation: TypeAlias = Callable[[TensorDict], object]

OPERATIONS: dict[str, Operation] = {
    "construct": lambda td: TensorDict({"x": td["a"] + 1, "n": {"y": td["n", "b"]}}, td.batch_size),
    "get": lambda td: td.get("a", td["n", "b"]) + td["n", "b"].sum(),
    "set": lambda td: td.copy().set("z", td["a"] * 2).set(("n", "q"), td["a"]),
    "set a container of a smaller batch": lambda td: td.copy().set("m", TensorDict({"x": td["a"]})),
    "update": lambda td: td.copy().update({"a": td["a"] * 2, "n": {"b": td["a"]}}),
    "update with a container": lambda td: td.copy().update(td * 2),
    "update_": lambda td: td.clone().update_({"a": td["a"] * 2}),
    "select": lambda td: td.select("a", ("n", "b")),
    "exclude": lambda td: td.exclude("a"),
    "rename": lambda td: td.copy().rename_key_("a", "z"),
    "flatten keys": lambda td: td.flatten_keys(".").unflatten_keys("."),
    "keys": lambda td: [td.get(key) for key in td.keys(True, True)],
    "row": lambda td: td[0],
    "rows": lambda td: td[1:],
    "numbered rows": lambda td: td[torch.tensor([0, 1])],
    "new dimension": lambda td: td[:, None],
    "write rows": lambda td: written(td.clone()),
    "stack": lambda td: stack([td, td + 1], 0),
    "torch.stack": lambda td: torch.stack([td, td + 1], 0),  # type: ignore[list-item]  # torch's stubs take tensors alone
    "cat": lambda td: cat([td, td], 0),
    "lazy stack": lambda td: lazy_stack([td, td], 0)["a"],
    "reshape": lambda td: td.reshape(-1, 1),
    "unsqueeze": lambda td: td.unsqueeze(0).squeeze(0),
    "permute": lambda td: td.unsqueeze(0).permute(1, 0),
    "expand": lambda td: td.expand(2, *td.batch_size),
    "split": lambda td: td.split(2),
    "unbind": lambda td: td.unbind(0),
    "maths": lambda td: ((td + 1) * td - td / 2).abs().sqrt(),
    "maths with a tensor": lambda td: td * torch.arange(td.shape[0]),
    "maths in place": lambda td: td.clone().add_(1),
    "sum": lambda td: td.sum(0),
    "where": lambda td: td.where(td["a"] > 0, 0.0),
    "apply": lambda td: td.apply(lambda leaf: leaf + 1),
    "clone": lambda td: td.clone(),
    "shallow clone": lambda td: td.clone(recurse=False),
    "lock": lambda td: td.clone().lock_().unlock_(),
    "to_dict": lambda td: td.to_dict(),
}
DYNAMIC = (
    *("construct", "get", "set", "update", "select", "rows"),
    *("stack", "cat", "reshape", "maths", "clone", "sum"),
)


def written(td: TensorDict) -> TensorDict:
    td[0] = 1
    return td


def make(batch: int = 3, **others: object) -> TensorDict:
    source = {"a": torch.arange(float(batch)), "n": {"b": torch.ones(batch, 4)}, "word": "x"}
    return TensorDict({**source, **others}, [batch])


def same(compiled: object, eager: object) -> None:
    if isinstance(eager, TensorDictBase):
        assert isinstance(compiled, TensorDictBase)
        assert type(compiled) is type(eager)
        assert_close(compiled, eager)
    elif isinstance(eager, tuple | list):
        assert isinstance(compiled, tuple | list)
        for mine, other in zip(compiled, eager, strict=True):
            same(mine, other)
    elif isinstance(eager, dict):
        assert isinstance(compiled, dict)
        assert_close(compiled, eager)
    elif isinstance(eager, Tensor):
        torch.testing.assert_close(compiled, eager)
    else:
        assert type(compiled) is type(eager)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def compiled(operation: Operation, dynamic: bool | None = None) -> Operation:
    return torch.compile(operation, fullgraph=True, backend="eager", dynamic=dynamic)


def test_operations_compile_without_a_break() -> None:
    def every(td: TensorDict) -> list[object]:
        return [operation(td) for operation in OPERATIONS.values()]

    run = compiled(every)
    same(run(make()), every(make()))
    same(run(make()), every(make()))


@pytest.mark.parametrize("name", DYNAMIC)
def test_the_batch_size_may_be_dynamic(name: str) -> None:
    operation = OPERATIONS[name]
    run = compiled(operation, dynamic=True)
    for batch in (3, 5, 7):
        same(run(make(batch)), operation(make(batch)))


@pytest.mark.parametrize(
    "other",
    [
        make(other=torch.zeros(3)),
        make(other={"q": torch.zeros(3)}),
        make(other="text"),
        make(n={"b": torch.ones(3, 4), "other": torch.zeros(3)}),
    ],
    ids=["leaf", "container", "data", "leaf below"],
)
@pytest.mark.parametrize("first", [True, False], ids=["comes", "goes"])
@pytest.mark.parametrize(
    "operation",
    [
        lambda td: td["a"] * 2 + td["n", "b"].sum(),
        lambda td: td.get("a") * 2,
        lambda td: td.select("a")["a"] * 2,
        lambda td: TensorDict({"x": td["a"] * 2}, td.batch_size),
    ],
    ids=["[]", "get", "select", "construct"],
)
def test_a_key_that_is_not_read_does_not_matter(
    other: TensorDict, first: bool, operation: Operation
) -> None:
    run = compiled(operation)
    for td in (make(), other) if first else (other, make()):
        same(run(td), operation(td))


def test_a_row_taken_without_the_compiler_does_not_matter() -> None:
    td = make(batch=13)
    run = torch.compile(lambda td: td[0], fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            assert_close(run(td), td[0])


def test_gradients_flow_through_a_compiled_step() -> None:
    weight = torch.ones(4, requires_grad=True)

    def loss(td: TensorDict) -> Tensor:
        out = td.set("out", td["n", "b"] * weight)
        return (out["out"] ** 2).sum()

    value = torch.compile(loss, fullgraph=True, backend="aot_eager")(make())
    (grad,) = torch.autograd.grad(value, weight)
    torch.testing.assert_close(grad, torch.full((4,), 6.0))


def test_rows_of_a_mask_take_a_mask_in_one_graph() -> None:
    def chosen(td: TensorDict) -> TensorDict:
        rows = td[torch.arange(td.batch_size[0]) > -1]
        return rows.where(torch.ones(rows.batch_size[:1], dtype=torch.bool), 0.0)

    td = TensorDict({"a": torch.ones(3)}, [3])
    compiled = torch.compile(chosen, backend="eager", fullgraph=True)
    assert torch.equal(compiled(td)["a"], td["a"])


@pytest.mark.parametrize(
    "index", [slice(2), slice(1, None), slice(-1), slice(-2, -1), slice(0, 5, 2), 0, -1], ids=repr
)
def test_rows_of_a_mask_take_slices_and_numbers_in_one_graph(index: slice | int) -> None:
    compiled = torch.compile(lambda td, mask: td[mask][index], backend="eager", fullgraph=True)
    td = TensorDict({"a": torch.arange(4), "n": {"b": torch.ones(4, 2)}}, [4])
    for rows in ([1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 1, 0]):
        mask = torch.tensor(rows) == 1
        assert_close(compiled(td, mask), td[mask][index])


def test_sizes_of_a_result_are_sizes_in_the_graph() -> None:
    def grown(td: TensorDict) -> TensorDict:
        for _ in range(2):
            td = td.expand(2, *td.batch_size)
        return td[: td.batch_size[0]].reshape(td.batch_size)

    td = TensorDict({"a": torch.ones(3)}, [3])
    found = torch.compile(grown, backend="eager", fullgraph=True)(td)
    assert found.batch_size == (2, 2, 3)


def test_rows_of_a_mask_are_expanded_in_one_graph() -> None:
    def expanded(td: TensorDict, mask: Tensor) -> TensorDict:
        rows = td[mask]
        return rows.expand(2, *rows.batch_size)

    compiled = torch.compile(expanded, backend="eager", fullgraph=True)
    td = TensorDict({"a": torch.arange(4), "n": {"b": torch.ones(4, 2)}}, [4])
    for rows in ([1, 0, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]):
        mask = torch.tensor(rows) == 1
        assert_close(compiled(td, mask), expanded(td, mask))


def test_no_rows_and_one_row_come_after_many() -> None:
    def flat(td: TensorDict) -> TensorDict:
        return (td + 1).reshape(-1)

    compiled = torch.compile(flat, backend="eager", fullgraph=True)
    td = TensorDict({"x": torch.zeros(6), "n": {"y": torch.ones(6, 2)}, "w": list("abcdef")}, [6])
    with torch._dynamo.config.patch(error_on_recompile=False):
        for rows in (6, 3, 0, 1):
            found = compiled(td[:rows])
            assert found.batch_size == (rows,)
            assert found["n", "y"].sum() == 4 * rows


def made(**options: object) -> TensorDict:
    """Return a container of the same entries in another state: locked, on a device, with names."""
    td = TensorDict({"a": torch.arange(3.0), "n": {"b": torch.ones(3, 4)}}, [3])
    names, device = options.get("names"), options.get("device")
    if names is not None or device is not None:
        td = TensorDict(td.to_dict(), [3], device, names=names)  # type: ignore[arg-type]  # as given
    return td.lock_() if options.get("lock") else td


STATES: tuple[dict[str, object], ...] = (
    {},
    {"lock": True},
    {"device": "cpu"},
    {"names": ["x"]},
    {"names": ["y"]},
)


def containers(result: object) -> list[TensorDictBase]:
    parts = result if isinstance(result, tuple) else (result,)
    return [part for part in parts if isinstance(part, TensorDictBase)]


def state(td: TensorDictBase) -> tuple[object, ...]:
    return td.batch_size, td.is_locked, td.device, td.names


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    "operation",
    [
        lambda td: TensorDict({"x": td["a"] + 1}, td.batch_size),
        lambda td: TensorDict({"x": td["a"] + 1}, [3]),
        lambda td: (TensorDict({"x": td["a"]}, [3]), td + 1),
        lambda td: (td + 1, TensorDict({"x": td["a"]}, [3])),
        lambda td: TensorDict({"x": td}, [3]) + 1,
        lambda td: td.reshape(3, 1).reshape(3),
        lambda td: td.unsqueeze(0),
        lambda td: torch.stack([td, td]),
        lambda td: td[1:],
        lambda td: td.unsqueeze(0).permute(1, 0),
        lambda td: td.flip(0).unbind(0),
    ],
)
def test_a_result_follows_the_state_of_each_input(operation: Operation, first: int) -> None:
    run = compiled(operation)
    states = (STATES[first], *STATES)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for options in states:
            found, wanted = run(made(**options)), operation(made(**options))
            for one, other in zip(containers(found), containers(wanted), strict=True):
                same(one, other)
                assert state(one) == state(other)


@pytest.mark.parametrize(
    "operation",
    [
        lambda td: td + 1,
        lambda td: td * td,
        lambda td: td[0],
        lambda td: td[1:],
        lambda td: td.reshape(3, 1),
        lambda td: td.sum(0),
        lambda td: cat([td, td]),
        lambda td: td.split(2),
        lambda td: td.clone(),
        lambda td: td.where(td["a"] > 0, 0.0),
        lambda td: TensorDict({"x": td}, td.batch_size) + 1,
    ],
)
@pytest.mark.parametrize("wrap", [NonTensorData, MetaData])
def test_a_value_that_is_not_read_does_not_matter(
    wrap: type[NonTensorData], operation: Operation
) -> None:
    run = compiled(operation)
    for value in ("one", "two", {3}):
        same(run(make(word=wrap(value, [3]))), operation(make(word=wrap(value, [3]))))


@pytest.mark.parametrize("recompiles", [False, True])
def test_rows_that_are_stacked_have_the_value_of_their_call(recompiles: bool) -> None:
    def operation(td: TensorDict) -> TensorDict:
        return stack([td, td])

    run = compiled(operation)
    wrap = NonTensorData if recompiles else MetaData  # data is read: each row has its own
    with torch._dynamo.config.patch(error_on_recompile=not recompiles):
        for value in ("one", "two", {3}):
            same(run(make(word=wrap(value, [3]))), operation(make(word=wrap(value, [3]))))


def test_a_container_is_built_beside_a_global_one_of_its_batch_size() -> None:
    def built(x: Tensor) -> tuple[TensorDict, TensorDict]:
        return TensorDict({"x": x}, [3]), SHARED + 1

    same(compiled(built)(torch.ones(3)), built(torch.ones(3)))  # type: ignore[arg-type]  # of a tensor


SHARED = TensorDict({"a": torch.arange(3.0)}, [3])


def test_sizes_that_do_not_fit_raise_what_they_raise_eagerly() -> None:
    def caught(td: TensorDict) -> Tensor:
        try:
            return td.reshape(2, 2)["a"]
        except ShapeMismatch:
            return td["a"]

    torch.testing.assert_close(compiled(caught)(make()), make()["a"])


@pytest.mark.parametrize(
    "operation",
    [
        lambda td: td.set("x", td["a"] + 1),
        lambda td: td.update({"a": td["a"] + 1, "x": td["a"]}),
        lambda td: td.apply(lambda leaf: leaf + 1),
        lambda td: TensorDict({"x": td}, td.batch_size) + 1,
        lambda td: td.expand(2, *td.batch_size)["n", "b"],
        lambda td: td[td["a"] > 0]["n", "b"],
        lambda td: td.unsqueeze(0),
    ],
)
def test_a_named_dimension_may_have_another_size(operation: Operation) -> None:
    def named(rows: int, name: str | None) -> TensorDict:
        source = {"a": torch.arange(float(rows)), "n": {"b": torch.ones(rows, 2)}}
        return TensorDict(source, [rows], names=[name])

    run = compiled(operation)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for rows, name in ((4, "x"), (6, "x"), (8, "y"), (10, None), (4, "y")):
            same(run(named(rows, name)), operation(named(rows, name)))


def with_own_batch_size(td: TensorDict) -> TensorDict:
    td = td.copy()
    td.batch_size = td.batch_size
    return td


@pytest.mark.parametrize(
    "operation",
    [
        lambda td: TensorDict({"a": td["a"] + 1}, td.batch_size, names=td.names),
        lambda td: TensorDict({"a": td["a"] + 1}, td["a"].shape, names=["z"]),
        lambda td: td.expand(2, *td.batch_size),
        lambda td: td[1:],
        lambda td: torch.stack([td, td[:]]),
        lambda td: torch.cat([td, td[1:]]),
        with_own_batch_size,
    ],
)
def test_a_name_stays_where_a_size_has_changed(operation: Operation) -> None:
    run = compiled(operation)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for rows in (3, 5, 6):
            td = TensorDict({"a": torch.arange(float(rows))}, [rows], names=["x"])
            found, expected = run(td), operation(td)
            same(found, expected)
            assert found.names == expected.names  # type: ignore[attr-defined]  # a container


def test_a_dimension_of_dynamic_size_has_no_name() -> None:
    run = compiled(lambda td: [*td.names, td["a"] + 1], dynamic=True)
    for rows in (3, 5):
        assert run(make(rows))[0] is None  # type: ignore[index]  # a list


class Sample(TensorClass):
    x: Tensor


@pytest.mark.parametrize("kind", [Sample, TensorDict, UnbatchedTensor, NonTensorData])
def test_compiled_code_asks_whether_a_tensor_is_a_container(kind: type) -> None:
    """torch 2.15 refuses a class whose metaclass answers by code of its own."""
    run = compiled(lambda td: td["a"] if isinstance(td["a"], kind) else td["a"] + 1)
    td = make(2)
    assert torch.equal(run(td), td["a"] + 1)  # type: ignore[arg-type]  # a tensor


class Marked(TensorDict):
    """A class whose instances have attributes of their own."""

    mark: object


def marked() -> Marked:
    td = Marked({"a": torch.ones(3), "n": {"b": torch.zeros(3)}}, [3])
    td.mark = ["mine"]
    return td


class Numbered(TensorClass):
    x: Tensor
    number: int
    word: str = "w"


def numbered() -> Numbered:
    return Numbered(x=torch.ones(3), number=3, batch_size=[3])


COPIED: dict[str, Callable[[], Any]] = {
    "dense": lambda: make().set("word", "w").lock_(),
    "own attributes": marked,
    "typed": numbered,
    "lazy": lambda: lazy_stack([make(), make()]),
    "unbatched": lambda: make().set("u", UnbatchedTensor(torch.ones(5))),
}


@pytest.mark.parametrize("name", COPIED)
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_copies_are_made_in_compiled_code(name: str, how: Callable[[Any], Any]) -> None:
    if torch.__version__ < "2.13":
        pytest.skip("dynamo of this version of torch traces no `copy`")
    source = COPIED[name]()
    found: Any = compiled(how)(source)
    expected = how(source)
    same(found, expected)
    assert type(found) is type(expected)
    assert found.is_locked == expected.is_locked
    assert getattr(found, "mark", None) == getattr(expected, "mark", None)
    pairs = zip(found.values(True, True), source.values(True, True), strict=True)
    shared = {mine.data_ptr() == its.data_ptr() for mine, its in pairs if isinstance(mine, Tensor)}
    assert shared == {how is copy.copy} or name == "lazy"  # an entry of a stack is stacked anew


def test_fields_are_replaced_in_compiled_code() -> None:
    def moved(sample: Numbered) -> Numbered:
        return dataclasses.replace(sample, x=sample.x + 1)

    found = torch.compile(moved, backend="eager", fullgraph=True)(numbered())
    assert isinstance(found, Numbered)
    assert (found.x.tolist(), found.number, found.word) == ([2, 2, 2], 3, "w")
    assert found.batch_size == (3,)
