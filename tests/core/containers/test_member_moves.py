"""Rows of a ragged stack are rearranged without stacking its entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

import pytest
import torch
from tests.core.kinds import inner

from kd_core import (
    LazyStackedTensorDict,
    NonTensorStack,
    ShapeMismatch,
    TensorDict,
    TensorDictBase,
    cat,
    lazy_stack,
    stack,
)

Move: TypeAlias = Callable[[TensorDictBase], TensorDictBase]


def ragged(batch: tuple[int, ...] = (), dim: int = 0) -> LazyStackedTensorDict:
    """Return three members; `a` and `n.b` are ragged, the numbers in `row` tell the rows apart."""
    members = []
    for number in range(3):
        row = torch.arange(torch.Size(batch).numel()).reshape(batch) + 100 * number
        wide = row[..., None].expand(*batch, number + 1)
        names = {"name": f"member {number}", "own": row} if number else {"name": "member 0"}
        members.append(
            TensorDict({"row": row, "a": wide.clone(), "n": {"b": wide}, **names}, batch)
        )
    return lazy_stack(members, dim)


def names_in(td: TensorDictBase) -> object:
    """Return the name of each row in lists, where all are the same, too."""
    return cast("NonTensorStack", td.get("name")).tolist()


MOVES: tuple[Move, ...] = (
    lambda td: td.unsqueeze(0),
    lambda td: td.unsqueeze(-1),
    lambda td: td[None],
    lambda td: td.unsqueeze(0).squeeze(0),
    lambda td: td.permute(*reversed(range(td.ndim))),
    lambda td: td.transpose(0, -1),
    lambda td: td.view(-1),
    lambda td: td.reshape(-1),
    lambda td: td.flatten(),
    lambda td: td.unflatten(0, (1, -1)),
    lambda td: td.atleast_2d(),
    lambda td: td.expand(2, *td.batch_size),
    lambda td: td.repeat(*[2] * td.ndim),
    lambda td: td.repeat_interleave(2, 0),
    lambda td: td.flip(0),
    lambda td: td.roll(1, 0),
    lambda td: td.gather(
        0, torch.arange(2).reshape(-1, *[1] * (td.ndim - 1)).expand(2, *td.batch_size[1:])
    ),
    lambda td: td[torch.tensor([[0, 1], [1, 0]])],
    lambda td: td[torch.ones(td.batch_size, dtype=torch.bool)],
    lambda td: td[True],
    lambda td: stack([td, td], 0),
    lambda td: stack([td, td], -1),
)


@pytest.mark.parametrize("number", range(len(MOVES)))
@pytest.mark.parametrize(("batch", "dim"), [((), 0), ((2,), 0), ((2,), 1), ((2, 2), 1)])
def test_rows_are_where_those_of_a_dense_container_are(
    batch: tuple[int, ...], dim: int, number: int
) -> None:
    rows = ragged(batch, dim)
    moved = MOVES[number](rows)
    dense = MOVES[number](rows.select("row", "name").contiguous())
    assert isinstance(moved, LazyStackedTensorDict)
    assert moved.batch_size == dense.batch_size
    assert torch.equal(moved["row"], dense["row"])
    assert names_in(moved) == names_in(dense)
    assert moved.get_item_shape("a") == (*dense.batch_size, -1)
    for row in moved.reshape(-1).unbind(0):
        number = int(row["row"])
        assert row["a"].tolist() == [number] * (number // 100 + 1)
        assert row["n", "b"].shape == row["a"].shape
        assert ("own" in row) == (number >= 100)


def test_whole_members_stay_members() -> None:
    rows = ragged((2,), 1)
    for moved, dim in ((rows.unsqueeze(0), 2), (rows.transpose(0, 1), 0), (rows.flip(0), 1)):
        assert isinstance(moved, LazyStackedTensorDict)
        assert (moved.stack_dim, len(moved.unbind(dim))) == (dim, 3)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_views_reach_the_members_and_copies_do_not(batch: tuple[int, ...]) -> None:
    for view in (MOVES[0], MOVES[6], MOVES[11]):
        rows = ragged(batch)
        view(rows).zero_()
        assert not any(member["a"].any() for member in rows.unbind(0))
    for copy in (MOVES[12], MOVES[14], MOVES[18]):
        rows = ragged(batch)
        copy(rows).zero_()
        assert any(member["a"].any() for member in rows.unbind(0))


def test_the_result_of_a_locked_stack_can_change() -> None:
    rows = ragged().lock_()
    for move in MOVES:
        moved = move(rows).unlock_()
        if moved is rows:
            rows.lock_()
            continue
        moved["new"] = torch.zeros(moved.batch_size)
    assert "new" not in rows


def test_an_index_of_no_rows_has_the_shapes_of_the_first_member() -> None:
    for none in (ragged()[[]], ragged()[torch.zeros(3, dtype=torch.bool)], ragged()[:0]):
        assert type(none).__name__ == "TensorDict"
        assert list(none.keys()) == ["row", "a", "n", "name"]
        assert (none["a"].shape, none["n", "b"].shape) == ((0, 1), (0, 1))
        assert cast("NonTensorStack", none.get("name")).batch_size == (0,)


def test_names_follow() -> None:
    rows = ragged((2,), 1)
    rows.names = ["env", "agent"]
    assert rows.unsqueeze(0).names == [None, "env", "agent"]
    assert rows.transpose(0, 1).names == ["agent", "env"]
    assert stack([rows, rows], 1).names == ["env", None, "agent"]
    assert rows.view(-1).names == [None]


def test_a_stack_below_a_container_is_rearranged_with_it() -> None:
    td = TensorDict({"agents": ragged((2,), 1), "x": torch.zeros(2)}, [2])
    assert td.unsqueeze(0).nested("agents", LazyStackedTensorDict).batch_size == (1, 2, 3)
    assert td[:, None].nested("agents", LazyStackedTensorDict).batch_size == (2, 1, 3)
    stacked = stack([td, td], 1).nested("agents", LazyStackedTensorDict)
    assert (stacked.batch_size, stacked.stack_dim) == ((2, 2, 3), 2)


REDUCTIONS: tuple[tuple[int, Move], ...] = (
    (0, lambda td: td.sum("feature")),
    (0, lambda td: td.mean("feature", keepdim=True)),
    (1, lambda td: td.quantile(torch.tensor([0.2, 0.5]), "feature")),
    (1, lambda td: td.sum(0)),
    (1, lambda td: td.amax(dim=0, keepdim=True)),
    (0, lambda td: td.std(dim=(1,), correction=0)),
    (1, lambda td: td.max(dim=0).values),
    (1, lambda td: td.max(dim=0).indices),
)


@pytest.mark.parametrize(("dim", "reduce"), REDUCTIONS)
def test_what_does_not_reduce_the_stacked_dimension_reduces_each_member(
    dim: int, reduce: Move
) -> None:
    rows = [TensorDict({"row": torch.rand(2), "a": torch.rand(2, n + 1)}, [2]) for n in range(3)]
    got = reduce(lazy_stack(rows, dim))
    want = reduce(stack([row.select("row") for row in rows], dim))
    assert got.batch_size == want.batch_size
    assert torch.equal(got["row"], want["row"])
    each = got.get_item_shape("a")
    assert each[: got.ndim] == got.batch_size


def test_reductions_over_ragged_entries_stay_errors() -> None:
    reductions: tuple[Move, ...] = (
        lambda td: td.sum(0),
        lambda td: td.cumsum(0),
        lambda td: td.pad([0, 1]),
    )
    for reduce in reductions:
        with pytest.raises(ShapeMismatch, match="`a` is ragged"):
            reduce(ragged())


def test_stacks_that_differ_are_not_stacked() -> None:
    other = ragged()
    other[1].update({"a": torch.zeros(7)})
    with pytest.raises(ShapeMismatch, match=r"entry `a`: its shape is \(7,\) in container 1 and"):
        stack([ragged(), other])
    with pytest.raises(ShapeMismatch, match="is ragged"):
        stack([ragged((3,), 0), ragged((3,), 1)])


def test_a_scope_carries_new_entries_of_a_ragged_stack_back() -> None:
    rows = ragged()
    with rows.unsqueeze(0) as view:
        view["new"] = torch.arange(3)[None]
        view.set_("row", view["row"] + 1)
    assert rows["new"].tolist() == [0, 1, 2]
    assert rows["row"].tolist() == [1, 101, 201]
    assert [leaf.shape for leaf in rows.get("a", as_list=True)] == [(1,), (2,), (3,)]


def test_a_reduction_collects_the_data_of_all_rows() -> None:
    members = []
    for width, words in ((1, ("a", "b")), (2, ("c", "d"))):
        entries = {"x": torch.ones(2, width), "word": NonTensorStack(*words)}
        members.append(TensorDict(entries, [2]))
    assert names_in(lazy_stack(members).sum(1).rename_keys({"word": "name"})) == [
        ["a", "b"],
        ["c", "d"],
    ]


def test_a_lazy_stack_and_others_are_concatenated_member_by_member() -> None:
    def made() -> LazyStackedTensorDict:
        return lazy_stack([TensorDict({"a": torch.arange(2) + i}, [2]) for i in range(2)])

    rows = TensorDict({"a": torch.zeros(3, 2)}, [3, 2])
    both: list[list[TensorDictBase]] = [[made(), rows], [rows, made()]]
    for parts in both:
        joined: TensorDictBase = cat(parts)
        assert isinstance(joined, LazyStackedTensorDict)
        assert joined["a"].tolist() == torch.cat([part["a"] for part in parts]).tolist()
        joined.zero_()
    assert made()["a"].tolist() == [[0, 1], [1, 2]]
    wide: TensorDictBase = cat([made(), TensorDict({"a": torch.ones(2, 3)}, [2, 3])], 1)
    assert isinstance(wide, LazyStackedTensorDict)
    assert [member.batch_size[0] for member in wide.tensordicts] == [5, 5]


def test_a_container_is_contiguous_with_the_stacks_in_it() -> None:
    stack = lazy_stack([TensorDict({"a": torch.zeros(2)}) for _ in range(3)])
    td = TensorDict({"n": {"z": stack}, "z": stack}, [3]).contiguous()
    assert type(inner(td, "z")) is TensorDict
    assert type(inner(td, ("n", "z"))) is TensorDict
