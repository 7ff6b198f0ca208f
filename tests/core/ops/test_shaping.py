"""Batch dimensions are rearranged as those of a tensor of shape `batch_size`."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from tests.core.rows import assert_rows, container, lazy_container, numbers

from kd_core import (
    InvalidArgument,
    InvalidValue,
    Locked,
    NonTensorData,
    NonTensorStack,
    OutOfRange,
    ShapeMismatch,
    TensorDict,
    TensorDictBase,
)

CASES: list[tuple[str, tuple[Any, ...]]] = [
    ("view", (6,)),
    ("view", (-1,)),
    ("view", ((3, 2),)),
    ("view", (3, -1, 1)),
    ("reshape", (6,)),
    ("reshape", ([2, -1],)),
    ("reshape", (torch.Size([6, 1]),)),
    ("view_as", (torch.zeros(6, 1),)),
    ("reshape_as", (torch.zeros(3, 2),)),
    ("flatten", ()),
    ("flatten", (0, 1)),
    ("flatten", (-2, -1)),
    ("flatten", (1, 1)),
    ("unflatten", (2, (3, 1))),
    ("unflatten", (-1, [-1, 1])),
    ("squeeze", ()),
    ("squeeze", (1,)),
    ("squeeze", (0,)),
    ("squeeze", (-2,)),
    ("squeeze", ((0, 1),)),
    ("unsqueeze", (0,)),
    ("unsqueeze", (2,)),
    ("unsqueeze", (-1,)),
    ("unsqueeze", (-4,)),
    ("permute", (2, 0, 1)),
    ("permute", ((-1, 1, 0),)),
    ("transpose", (0, 2)),
    ("transpose", (-1, -2)),
    ("swapaxes", (0, 2)),
    ("swapdims", (1, 0)),
    ("movedim", (0, 2)),
    ("movedim", ((0, 1), (-1, 0))),
    ("moveaxis", (2, 0)),
    ("expand", (2, 4, 3)),
    ("expand", (5, -1, 4, -1)),
    ("expand", ((2, 1, 3),)),
    ("expand_as", (torch.zeros(7, 2, 1, 3),)),
    ("repeat", (2, 1, 3)),
    ("repeat", (2, 1, 1, 0)),
    ("tile", (2,)),
    ("tile", (2, 1, 1, 2)),
    ("repeat_interleave", (2,)),
    ("repeat_interleave", (3, 2)),
    ("repeat_interleave", (torch.tensor([1, 0, 2]), -1)),
    ("repeat_interleave", (torch.tensor(2), 0)),
    ("roll", (1,)),
    ("roll", (-1, 2)),
    ("roll", ((1, 2), (0, -1))),
    ("flip", (0,)),
    ("flip", (0, -1)),
    ("flip", ((2,),)),
]
NAMES = [f"{name}-{number}" for number, (name, _) in enumerate(CASES)]


@pytest.mark.parametrize(("name", "args"), CASES, ids=NAMES)
@pytest.mark.parametrize("make", [container, lazy_container])
def test_rows_move_as_on_a_tensor_of_row_numbers(
    make: Callable[[], TensorDictBase], name: str, args: tuple[Any, ...]
) -> None:
    got = getattr(make(), name)(*args)
    assert_rows(got, container(), getattr(numbers(), name)(*args))


@pytest.mark.parametrize(("name", "args"), dict(CASES).items(), ids=dict(CASES))
def test_it_compiles_as_one_graph(name: str, args: tuple[Any, ...]) -> None:
    td = TensorDict({"a": torch.rand(2, 1, 3, 4), "b": {"c": torch.rand(2, 1, 3)}}, (2, 1, 3))
    torch._dynamo.reset()
    compiled = torch.compile(lambda td: getattr(td, name)(*args), fullgraph=True, backend="eager")
    got, expected = compiled(td), getattr(td, name)(*args)
    assert got.batch_size == expected.batch_size
    torch.testing.assert_close(got.to_dict(), expected.to_dict())


@pytest.mark.parametrize("name", ["view", "reshape"])
def test_a_dynamic_batch_compiles_once(name: str) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    run = torch.compile(
        lambda td: getattr(td, name)(-1, 2).unsqueeze(0),
        fullgraph=True,
        dynamic=True,
        backend=backend,
    )
    for size in (4, 6, 10):
        td = TensorDict({"a": torch.rand(size, 3)}, [size])
        assert run(td).batch_size == (1, size // 2, 2)
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ["view", "reshape"])
def test_compiled_code_takes_one_size_that_is_computed(name: str) -> None:
    torch._dynamo.reset()
    run = torch.compile(
        lambda td: getattr(td, name)(td.batch_size[0] * 2),
        fullgraph=True,
        dynamic=True,
        backend="eager",
    )
    for size in (4, 6, 10):
        td = TensorDict({"a": torch.rand(size, 2, 3)}, [size, 2])
        assert run(td).batch_size == (size * 2,)


@pytest.mark.parametrize("name", ["view", "reshape"])
def test_compiled_code_reshapes_leaves_without_dimensions(name: str) -> None:
    torch._dynamo.reset()
    run = torch.compile(lambda td: getattr(td, name)(()), fullgraph=True, backend="eager")
    got = run(TensorDict({"a": torch.zeros(1), "b": torch.zeros(1, 2)}, [1]))
    assert got.batch_size == ()
    assert got["a"].shape == ()
    assert got["b"].shape == (2,)


@pytest.mark.parametrize(
    ("name", "args"),
    [case for case in CASES if case[0] in ("view", "squeeze", "permute", "expand", "movedim")],
)
def test_views_share_memory(name: str, args: tuple[Any, ...]) -> None:
    td = container()
    got = getattr(td, name)(*args)
    for key in ("bare", "row", ("nested", "deep", "row"), ("inner", "wide")):
        assert got[key].untyped_storage().data_ptr() == td[key].untyped_storage().data_ptr()


def test_a_locked_container_gives_locked_views() -> None:
    td = container().lock_()
    got = td.reshape(6)
    with pytest.raises(Locked, match="set `new`"):
        got["new"] = torch.zeros(6)
    got.unlock_()["new"] = torch.zeros(6)
    assert "new" in got
    assert "new" not in td
    assert all(part.is_locked for part in (*td.split(1), *td.chunk(2), td.narrow(0, 0, 1)))
    assert not any(row.is_locked for row in (*td.unbind(0), td[0], td[:1]))


def test_what_changes_nothing_gives_the_container_itself() -> None:
    td = TensorDict({"a": torch.zeros(3, 2, 4)}, [3, 2])
    for same in (
        td.view(3, 2),
        td.view(-1, 2),
        td.reshape((3, 2)),
        td.squeeze(),
        td.squeeze(0),
        td.permute(0, -1),
        td.transpose(1, 1),
        td.movedim(0, 0),
        td.swapaxes(0, -2),
        td.atleast_2d(),
    ):
        assert same is td
    with td.view(3, 2) as viewed:
        viewed["b"] = torch.ones(3, 2)
    assert "b" in td
    assert not td.is_locked
    moves = torch.compile(lambda x: (x.squeeze(), x.permute(0, 1)), backend="eager")
    assert all(each is td for each in moves(td))


def test_gradients_flow_through_views() -> None:
    weight = torch.ones(2, 3, requires_grad=True)
    expanded = TensorDict({"a": weight}, [2]).unsqueeze(0).expand(4, -1)["a"]
    (grad,) = torch.autograd.grad(expanded.sum(), weight)
    torch.testing.assert_close(grad, torch.full((2, 3), 4.0))


def test_reshape_copies_where_no_view_is_possible() -> None:
    td = TensorDict({"a": torch.arange(6).reshape(2, 3).T}, [3, 2])
    assert td.reshape(6)["a"].tolist() == [0, 3, 1, 4, 2, 5]
    with pytest.raises(
        InvalidValue, match=r"not allow a view of batch_size \(3, 2\) as \(6,\).*`reshape`"
    ):
        td.view(6)


@pytest.mark.parametrize("batch", [(0,), (0, 3), (3, 0)])
def test_batches_without_rows_keep_trailing_sizes(batch: tuple[int, ...]) -> None:
    td = container(batch)
    assert_rows(td.reshape(0, 5), td, numbers(batch).reshape(0, 5))
    assert_rows(td.flatten(), td, numbers(batch).flatten())
    assert_rows(td.unsqueeze(-1), td, numbers(batch).unsqueeze(-1))


def test_without_batch_dimensions() -> None:
    td = TensorDict({"a": torch.ones(3), "s": torch.tensor(2.0)})
    assert td.reshape(1, 1)["a"].shape == (1, 1, 3)
    assert td.reshape(()).batch_size == ()
    assert td.flatten()["s"].shape == (1,)
    assert td.expand(2)["a"].shape == (2, 3)
    assert td.expand(())["s"].shape == ()
    assert td.repeat(2)["a"].shape == (2, 3)
    assert td.squeeze().batch_size == ()
    assert td.permute(()).batch_size == ()


def test_an_empty_container_has_its_batch_reshaped() -> None:
    assert TensorDict({}, [4, 6]).reshape(-1, 3).batch_size == (8, 3)


ERRORS: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("view", (4,), ShapeMismatch, r"sizes \(4,\) do not fit batch_size \(2, 1, 3\)"),
    ("reshape", (4, -1), ShapeMismatch, r"sizes \(4, -1\) do not fit"),
    ("reshape", (-1, -1), InvalidValue, "at most one -1"),
    ("reshape", (-2, 3), InvalidValue, "must be non-negative"),
    ("reshape", ("a",), InvalidArgument, "expected an integer, got"),
    ("view", (1.5,), InvalidArgument, "got 1.5 of type `float`"),
    ("view_as", ({},), InvalidArgument, "a container or a tensor"),
    ("flatten", (2, 0), InvalidValue, "Exchange them"),
    ("flatten", (0, 3), OutOfRange, "dimension 3 is out of range"),
    ("unflatten", (2, (2, 2)), ShapeMismatch, r"do not fit dimension 2 of batch_size"),
    ("squeeze", (3,), OutOfRange, "between -3 and 2"),
    ("unsqueeze", (5,), OutOfRange, "dimension 5 is out of range"),
    ("permute", (0, 1), InvalidValue, "each of the 3 batch dimensions once"),
    ("permute", (0, 0, 1), InvalidValue, "dimensions must be distinct"),
    ("permute", (0, 1, 3), OutOfRange, "Use `apply`"),
    ("transpose", (0, 3), OutOfRange, "dimension 3"),
    ("movedim", ((0, 1), 2), InvalidValue, "as many destinations as sources"),
    ("expand", (3, 1, 3), ShapeMismatch, "cannot be expanded"),
    ("expand", (3,), ShapeMismatch, "cannot be expanded"),
    ("expand", (-1, 2, 1, 3), ShapeMismatch, "cannot be expanded"),
    ("repeat", (2, 2), InvalidValue, "`tile` takes fewer"),
    ("repeat", (2, 2, -1), InvalidValue, "counts must be non-negative"),
    ("repeat_interleave", (-1, 0), InvalidValue, "must be non-negative"),
    ("repeat_interleave", (torch.ones(5).long(), 0), ShapeMismatch, "each of the 2 rows"),
    ("roll", ((1, 2), (0,)), InvalidValue, "one shift for each dimension"),
    ("flip", (7,), OutOfRange, "dimension 7"),
]


@pytest.mark.parametrize(("name", "args", "error", "message"), ERRORS)
def test_bad_arguments_say_what_was_expected(
    name: str, args: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        getattr(container(), name)(*args)


def test_dimensions_by_keyword() -> None:
    td = TensorDict({"a": torch.zeros(2, 3)}, [2, 3])
    assert td.permute(dims=(1, 0)).batch_size == (3, 2)
    with pytest.raises(InvalidArgument, match="got it by position and by keyword"):
        td.permute(1, 0, dims=(1, 0))


def test_a_shape_by_keyword() -> None:
    td = TensorDict({"a": torch.zeros(2, 3)}, [2, 3])
    assert td.reshape(shape=(3, -1)).batch_size == (3, 2)
    with pytest.raises(InvalidArgument, match="`shape` once, got it by position and by keyword"):
        td.reshape(6, shape=(6,))


def test_shifts_of_a_repeated_dimension_add_up() -> None:
    td = TensorDict({"a": torch.arange(4)}, [4])
    assert torch.equal(td.roll((1, 2), (0, 0))["a"], td["a"].roll((1, 2), (0, 0)))


@pytest.mark.parametrize("rows", [0, 2])
def test_an_output_size_is_the_sum_of_the_repeats(rows: int) -> None:
    td, counts = TensorDict({"a": torch.zeros(rows)}, [rows]), torch.ones(rows, dtype=torch.int64)
    assert td.repeat_interleave(counts, 0, output_size=rows).batch_size == (rows,)
    with pytest.raises(InvalidValue, match="`output_size` must be the sum of `repeats`"):
        td.repeat_interleave(counts, 0, output_size=rows + 1)


@pytest.mark.parametrize("shape", [(-1,), (2, -1), (-1, 2)])
def test_empty_leaves_are_reshaped_inside_of_vmap(shape: tuple[int, ...]) -> None:
    td = TensorDict({"a": torch.zeros(3, 4, 0), "b": torch.rand(3, 4, 2)}, [3, 4])
    out = torch.vmap(lambda each: each.reshape(*shape))(td)
    expected = torch.empty(3, 4).reshape(3, *shape).shape
    assert out.batch_size == expected
    assert out["a"].shape == (*expected, 0)


@pytest.mark.parametrize("name", ["permute", "repeat", "tile", "flip"])
def test_numbers_of_dimensions_are_missing_for_a_batch_of_none_only(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"`{name}` expected .* got no argument"):
        getattr(TensorDict({"a": torch.zeros(1)}, [1]), name)()
    assert getattr(TensorDict({"a": torch.zeros(1)}), name)().batch_size == ()


@pytest.mark.parametrize("name", ["view", "reshape"])
def test_the_sizes_of_a_batch_of_none_are_none(name: str) -> None:
    before = TensorDict({"a": torch.zeros(2)})
    after = getattr(before.reshape(-1), name)(*before.batch_size)
    assert (after.batch_size, after["a"].shape) == ((), (2,))


def test_leaves_without_rows_are_reshaped_under_vmap() -> None:
    td = TensorDict({"a": torch.zeros(0, 2), "b": torch.zeros(0, 2, 3)}, [0])
    assert torch.vmap(lambda part: part.reshape(-1))(td).batch_size == (0, 1)


def test_view_reads_the_bytes_as_another_dtype() -> None:
    td = TensorDict({"a": torch.ones(2, 3), "n": {"b": torch.ones(2)}}, [2])
    got = td.view(torch.int32)
    assert got["a"].dtype is torch.int32
    assert got["n", "b"].data_ptr() == td["n", "b"].data_ptr()
    with pytest.raises(InvalidValue, match=r"entry `a` of torch.float32 cannot be viewed as"):
        td.view(torch.float64)
    with pytest.raises(InvalidValue, match="the last batch dimension would change"):
        TensorDict({"b": torch.ones(2)}, [2]).view(torch.int16)


def test_view_takes_its_size_by_keyword() -> None:
    assert container().view(size=(-1,)).batch_size == (6,)
    with pytest.raises(InvalidArgument, match="expected `size` once"):
        container().view(-1, size=(6,))


def test_dims_are_passed_by_keyword() -> None:
    td = TensorDict({"a": torch.arange(6).reshape(2, 3)}, [2, 3])
    by_torch: object = torch.flip(cast("torch.Tensor", td), dims=[0])
    for flipped in (td.flip(dims=[0]), cast("TensorDict", by_torch)):
        assert flipped["a"].tolist() == [[3, 4, 5], [0, 1, 2]]
    assert td.tile(dims=(2, 1)).batch_size == (4, 3)
    with pytest.raises(InvalidArgument, match="expected `dims` once"):
        td.flip(0, dims=0)


def test_sizes_are_taken_by_keyword() -> None:
    td = TensorDict({"a": torch.arange(6).view(2, 3)}, [2])
    assert td.reshape(size=[1, 2]).batch_size == td.reshape(shape=[1, 2]).batch_size == (1, 2)
    assert td.expand(size=[3, -1]).batch_size == (3, 2)
    for call in (td.reshape, td.expand):
        with pytest.raises(InvalidArgument, match="expected `size` once"):
            call(2, size=[2])


def test_reshape_in_place() -> None:
    td = TensorDict({"a": torch.arange(6).view(2, 3)}, [2])
    assert td.reshape(1, 2, inplace=True) is td
    assert td.batch_size == (1, 2)
    assert td["a"].shape == (1, 2, 3)
    with pytest.raises(Locked):
        td.lock_().reshape(2, inplace=True)
    assert td.batch_size == (1, 2)


def test_a_view_as_a_dtype_takes_a_batch_size() -> None:
    td = TensorDict({"a": torch.zeros(3, 2)}, [3, 2])
    assert td.view(torch.int32, batch_size=[3]).batch_size == (3,)
    assert td.view(6, batch_size=[7]).batch_size == (6,)


def test_without_a_batch_rows_are_those_of_a_0_dim_tensor() -> None:
    td = TensorDict({"a": torch.arange(3)})
    assert td.repeat_interleave(2, dim=0)["a"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert td.roll(1)["a"].tolist() == [0, 1, 2]
    assert td.roll(1)["a"] is not td["a"]
    with pytest.raises(IndexError):
        td.repeat_interleave(2, dim=1)


def test_one_value_stays_one_where_it_is_broadcast() -> None:
    td = TensorDict({"a": torch.ones(2), "s": "word"}, [2])
    one: object = td.broadcast_to((3, 2)).get("s")
    rows: object = td.expand(3, 2).get("s")
    assert isinstance(one, NonTensorData)
    assert isinstance(rows, NonTensorStack)
    assert td.broadcast_to((3, 2))[1, 0]["s"] == "word"
