"""What torch makes a view is a lazy stack of views of the members: writes reach them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from tests.core.kinds import inner

from kd_core import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack

View: TypeAlias = Callable[[TensorDictBase], TensorDictBase]

VIEWS: dict[str, View] = {
    "unsqueeze(0)": lambda td: td.unsqueeze(0),
    "unsqueeze(-1)": lambda td: td.unsqueeze(-1),
    "[None]": lambda td: td[None],
    "[:, None]": lambda td: td[:, None],
    "squeeze(0)": lambda td: td.unsqueeze(0).squeeze(0),
    "permute": lambda td: td.permute(1, 0),
    "transpose": lambda td: td.transpose(0, 1),
    "movedim": lambda td: td.movedim(0, 1),
    "view(-1)": lambda td: td.view(-1),
    "view(3, 2)": lambda td: td.view(3, 2),
    "view(2, 3, 1)": lambda td: td.view(2, 3, 1),
    "reshape(1, 2, 3)": lambda td: td.reshape(1, 2, 3),
    "unflatten(0)": lambda td: td.unflatten(0, (2, 1)),
    "unflatten(1)": lambda td: td.unflatten(1, (3, 1)),
    "flatten(1, 1)": lambda td: td.flatten(1, 1),
    "narrow": lambda td: td.narrow(0, 0, 2),
}


def members(dim: int) -> list[TensorDict]:
    shape = (3,) if dim == 0 else (2,)
    count = 2 if dim == 0 else 3
    return [
        TensorDict({"a": torch.zeros(shape), "n": {"x": torch.zeros(*shape, 2)}}, shape)
        for _ in range(count)
    ]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", VIEWS)
def test_writes_through_a_view_reach_the_members(name: str, dim: int) -> None:
    rows = members(dim)
    view = VIEWS[name](lazy_stack(rows, dim))
    assert isinstance(view, LazyStackedTensorDict)
    dense = VIEWS[name](lazy_stack(members(dim), dim).contiguous())
    assert view.batch_size == dense.batch_size
    view.set_("a", torch.ones(view.batch_size))
    view.set_(("n", "x"), torch.full((*view.batch_size, 2), 2.0))
    for row in rows:
        assert row["a"].unique().tolist() == [1.0]
        assert row["n", "x"].unique().tolist() == [2.0]


@pytest.mark.parametrize("name", VIEWS)
def test_a_stack_inside_a_container_is_seen_through_too(name: str) -> None:
    rows = members(0)
    td = TensorDict({"b": torch.zeros(2, 3), "s": lazy_stack(rows)}, [2, 3])
    view = VIEWS[name](td)
    assert isinstance(view["s"], LazyStackedTensorDict)  # type: ignore[unreachable]  # types say less than the run
    view.set_(("s", "a"), torch.ones(view.batch_size))  # type: ignore[unreachable]  # types say less than the run
    assert [row["a"].sum() for row in rows] == [3, 3]


def test_an_entry_of_one_row_is_that_of_the_member() -> None:
    rows = [TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(2))]
    lazy_stack(rows).unsqueeze(0)[0, 0]["a"].fill_(1)
    assert rows[0]["a"].tolist() == [1, 1]
    assert rows[1]["a"].tolist() == [0, 0]


@pytest.mark.parametrize("flatten", [lambda td: td.reshape(-1), lambda td: td.flatten()])
def test_all_rows_in_one_dimension_are_views(flatten: View) -> None:
    rows = members(0)
    flat = flatten(lazy_stack(rows))
    assert isinstance(flat, LazyStackedTensorDict)
    assert flat.batch_size == (6,)
    flat.zero_().add_(1)
    assert rows[0]["a"].sum() == 3


def test_with_keeps_the_storage_of_what_did_not_change() -> None:
    rows = members(0)
    before = [row["n", "x"] for row in rows]
    stack = lazy_stack(rows)
    with stack.transpose(0, 1) as view:
        view["a"] = view["a"] + 1
        view["b"] = torch.arange(6.0).reshape(3, 2)
    assert [row["a"].tolist() for row in rows] == [[1, 1, 1], [1, 1, 1]]
    assert [row["b"].tolist() for row in rows] == [[0, 2, 4], [1, 3, 5]]
    assert all(row["n", "x"] is leaf for row, leaf in zip(rows, before, strict=True))


def test_a_view_of_members_needs_no_strides_that_allow_one() -> None:
    rows = [TensorDict({"a": torch.arange(6.0).reshape(3, 2).t()}, [2, 3]) for _ in range(2)]
    stack = lazy_stack(rows)
    for made in (stack.reshape(2, 6), stack.view(2, 6)):
        assert made["a"].tolist() == stack.contiguous().reshape(2, 6)["a"].tolist()
        made.add_(1)
    assert rows[0]["a"].tolist() == [[2, 4, 6], [3, 5, 7]]


def structure(td: TensorDictBase) -> object:
    """Return the stacked dimension of a lazy stack and the structure of its members."""
    if not isinstance(td, LazyStackedTensorDict):
        return tuple(td.batch_size)
    return td.stack_dim, [structure(member) for member in td.tensordicts]


@pytest.mark.parametrize(
    ("dim", "shape", "structured"),
    [
        (0, (6,), (0, [()] * 6)),
        (1, (6,), (0, [()] * 6)),
        (0, (1, 3, 2), (0, [(0, [(2,)] * 3)])),
        (0, (3, 1, 2), (1, [(0, [(2,)] * 3)])),
        (0, (3, 2, 1), (1, [(0, [(1,)] * 3)] * 2)),
        (1, (2, 1, 3), (1, [(1, [(2,)] * 3)])),
        (1, (2, 3, 1), (1, [(1, [(2,)])] * 3)),
    ],
)
def test_merged_and_parted_dimensions_are_stacked_where_they_are(
    dim: int, shape: tuple[int, ...], structured: object
) -> None:
    members = [TensorDict({"a": torch.arange(2.0) + 2 * i}, [2]) for i in range(3)]
    stack = lazy_stack(members, dim)
    for made in (stack.view(shape), stack.reshape(shape)):
        assert structure(made) == structured
        assert made.batch_size == shape
        assert made["a"].tolist() == stack["a"].reshape(shape).tolist()
    made.add_(10)
    assert members[1]["a"].tolist() == [12, 13]


def test_several_dimensions_that_one_is_parted_into_are_stacked_one_by_one() -> None:
    stack = lazy_stack([TensorDict({"a": float(i)}) for i in range(4)])
    assert structure(stack.view(2, 2, 1)) == (1, [(0, [(0, [()]), (0, [()])])] * 2)
    assert structure(stack.unflatten(0, (2, 1, 2))) == (1, [(0, [(0, [(), ()])] * 2)])
    assert stack.view(2, 2, 1)["a"].flatten().tolist() == [0, 1, 2, 3]
    assert stack.view(4) is stack
    assert stack.view(-1) is not stack
    nested = TensorDict({"z": stack}, [4]).view(2, 2)
    assert structure(inner(nested, "z")) == (0, [(0, [(), ()])] * 2)


def test_flatten_behind_and_before_the_stacked_dimension() -> None:
    members = [TensorDict({"a": torch.arange(6.0).view(2, 3) + i}, [2, 3]) for i in range(2)]
    assert structure(lazy_stack(members).flatten(1, 2)) == (1, [(0, [(), ()])] * 6)
    assert structure(lazy_stack(members, 2).flatten(0, 1)) == (0, [(0, [(), ()])] * 6)
    assert structure(lazy_stack(members, 1).flatten(0, 1)) == (0, [(3,)] * 4)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(2, 3), (1, 2, 3), (4, 2, 3), (5, 4, 2, 3)])
def test_what_is_expanded_is_dense_so_a_storage_made_like_it_is_written(
    shape: tuple[int, ...], dim: int
) -> None:
    rows = members(dim)
    found: Any = lazy_stack(rows, dim).expand(*shape)
    assert found["a"].shape == shape
    for each in (found, found["n"]):
        assert type(each).__name__ == "TensorDict"
    storage: Any = torch.zeros_like(found)
    storage["a"].fill_(1)
    assert storage["a"].unique().tolist() == [1.0]
    assert rows[0]["a"].unique().tolist() == [0.0]


def test_ragged_members_stay_apart_when_they_are_expanded() -> None:
    found = lazy_stack([TensorDict({"a": torch.ones(1, n)}, [1]) for n in (1, 2)]).expand(2, 5)
    assert isinstance(found, LazyStackedTensorDict)
    assert [row["a"].shape for row in found.unbind(0)] == [(5, 1), (5, 2)]


@pytest.mark.parametrize("shape", [(6, 2), (5, 6, 2)])
def test_members_of_other_shapes_stay_members_when_they_are_expanded(
    shape: tuple[int, ...],
) -> None:
    stack = lazy_stack([TensorDict({"a": torch.ones(4)}), TensorDict({"a": torch.ones(3)})])
    grown = stack.expand(*shape)
    assert isinstance(grown, LazyStackedTensorDict)
    assert (grown.batch_size, grown.stack_dim) == (shape, len(shape) - 1)
    assert [member["a"].shape for member in grown.tensordicts] == [
        (*shape[:-1], 4),
        (*shape[:-1], 3),
    ]


def test_rows_of_members_of_other_shapes_are_written_into_what_was_expanded() -> None:
    rows = [TensorDict({"a": torch.ones(5, size)}, [5]) for size in (4, 3)]
    source = lazy_stack(rows, 1)
    storage = source[0].expand(6, 2).clone().zero_()
    storage.update_at_(source, range(5))
    assert storage[4, 1]["a"].tolist() == [1, 1, 1]
    assert storage[5, 0]["a"].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    "view",
    [
        lambda td: td.permute(1, 0, 2),
        lambda td: td.permute(1, 2, 0),
        lambda td: td.transpose(0, 1),
        lambda td: td.swapaxes(1, 0),
        lambda td: td.movedim(0, -1),
        lambda td: torch.transpose(td, 0, 1),
    ],
)
def test_a_view_that_moves_the_stacked_dimension_alone_has_the_members(
    view: View, ragged: bool
) -> None:
    sizes = (3, 4) if ragged else (4, 4, 4)
    rows = [TensorDict({"a": torch.zeros(2, size)}, [2, size]) for size in sizes]
    stack: Any = lazy_stack(rows)
    seen: Any = view(stack)
    assert all(map(operator.is_, seen.tensordicts, rows))
    if not ragged:
        seen["word"] = "w"
        assert "word" in stack
        stack["b"] = torch.ones(3, 2, 4)
        assert "b" in seen
    seen.lock_()
    assert stack.is_locked


def test_other_views_have_members_of_their_own() -> None:
    stack: Any = lazy_stack([TensorDict({"a": torch.zeros(2, 4)}, [2, 4]) for _ in range(3)])
    for seen in (stack.permute(0, 2, 1), stack.transpose(1, 2), stack.unsqueeze(0)):
        assert not any(one is other for one in seen.tensordicts for other in stack.tensordicts)


def test_views_and_reshapes_are_of_the_class_of_the_stack() -> None:
    class Named(LazyStackedTensorDict):
        pass

    stack: Any = Named(*members(0), stack_dim=0)
    stack.note = "n"
    for shape in ((6,), (3, 2), (2, 1, 3), (1, 2, 3)):
        assert type(stack.view(shape)) is Named
        assert stack.view(shape).note == "n"
    assert type(stack.reshape(-1)) is type(stack.flatten(0, 1)) is Named
    assert type(stack.unflatten(0, (2, 1))) is Named


def test_the_only_member_stays_along_its_dimension() -> None:
    alone = lazy_stack([TensorDict({"a": torch.zeros(1)}, [1])])
    around: Any = TensorDict({"s": alone}, [1])
    for td, dim in ((around.unsqueeze(0), 1), (around.unsqueeze(-1), 0), (around[None], 1)):
        assert td["s"].stack_dim == dim
        assert td["s"].batch_size == (1, 1, 1)
    for stack in (alone.transpose(0, 1), alone.permute(1, 0)):
        assert isinstance(stack, LazyStackedTensorDict)
        assert stack.stack_dim == 1
