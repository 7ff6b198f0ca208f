"""Entries that only some members of a lazy stack hold: what keeps them, and what says so."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, TypeAlias, cast

import pytest
import torch

from kd_core import (
    KeySetMismatch,
    LazyStackedTensorDict,
    TensorClass,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)

Row: TypeAlias = dict[object, object]
Step: TypeAlias = Callable[[Any], Any]  # a tensor or a container


def pair(batch: tuple[int, ...] = ()) -> LazyStackedTensorDict:
    """Return two members; only the first holds `b`, and `d` below `n`."""
    first = TensorDict({"a": torch.full(batch, 1), "b": torch.full(batch, 5)}, batch)
    first["n"] = TensorDict({"c": torch.full(batch, 7), "d": torch.full(batch, 8)}, batch)
    second = TensorDict({"a": torch.full(batch, 2), "n": {"c": torch.full(batch, 9)}}, batch)
    return lazy_stack([first, second])


def row_of(td: TensorDictBase) -> Row:
    items = td.items(include_nested=True, leaves_only=True)
    return {
        key: value.item() if torch.is_tensor(value) else value
        for key, value in cast("Iterable[tuple[object, object]]", items)
    }


def rows_in(td: TensorDictBase) -> list[Row]:
    """Return the entries of each row, in the order of the batch."""
    return [row_of(td[position]) for position in product(*map(range, td.batch_size))]


FIRST: Row = {"a": 1, "b": 5, ("n", "c"): 7, ("n", "d"): 8}
SECOND: Row = {"a": 2, ("n", "c"): 9}

MOVES: dict[str, tuple[Callable[[TensorDictBase], TensorDictBase], list[Row]]] = {
    "flip": (lambda td: td.flip(0), [SECOND, FIRST]),
    "torch.flip": (lambda td: cast("Any", torch.flip)(td, (0,)), [SECOND, FIRST]),
    "roll": (lambda td: td.roll(1, 0), [SECOND, FIRST]),
    "gather": (lambda td: td.gather(0, torch.tensor([1, 1, 0])), [SECOND, SECOND, FIRST]),
    "masked_select": (lambda td: td.masked_select(torch.tensor([True, True])), [FIRST, SECOND]),
    "mask": (lambda td: td[torch.tensor([True, True])], [FIRST, SECOND]),
    "one of a mask": (lambda td: td.masked_select(torch.tensor([True, False])), [FIRST]),
    "index": (lambda td: td[[1, 0]], [SECOND, FIRST]),
    "wide index": (lambda td: td[torch.tensor([[1, 0]])], [SECOND, FIRST]),
    "two indices": (
        lambda td: td.unsqueeze(1)[torch.tensor([1, 0]), torch.tensor([0, 0])],
        [SECOND, FIRST],
    ),
    "reshape": (lambda td: td.reshape(2, 1), [FIRST, SECOND]),
    "below a container": (
        lambda td: cast("TensorDictBase", TensorDict({"s": td}, [2]).flip(0)["s"]),
        [SECOND, FIRST],
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_moves_rows_keeps_the_entries_of_each(name: str) -> None:
    move, expected = MOVES[name]
    assert rows_in(move(pair())) == expected


def test_a_copy_of_moved_rows_does_not_reach_the_members() -> None:
    stacked = pair()
    moved = stacked.flip(0)
    moved[1]["b"].zero_()
    assert stacked[0]["b"].item() == 5


def test_no_row_has_the_common_entries() -> None:
    none = pair().masked_select(torch.tensor([False, False]))
    assert none.batch_size == (0,)
    assert set(none.keys(True, True)) == {"a", ("n", "c")}


def test_a_reduction_of_the_rows_of_members_keeps_their_entries() -> None:
    stacked = pair((3,))
    assert rows_in(stacked.sum(1)) == [
        {"a": 3, "b": 15, ("n", "c"): 21, ("n", "d"): 24},
        {"a": 6, ("n", "c"): 27},
    ]
    assert set(stacked.sum(0).keys(True, True)) == {"a", ("n", "c")}  # a sum joins rows


def random_stack(pick: random.Random) -> LazyStackedTensorDict:
    """Return members with an entry `id` each, and others by chance."""
    batch = pick.choice([(), (2,), (2, 3), (1,)])
    members = []
    for number in range(pick.randint(1, 4)):
        numbers = torch.arange(100 * number, 100 * number + torch.Size(batch).numel())
        numbers = numbers.reshape(batch)
        member = TensorDict({"id": numbers}, batch)
        for key in ("b", ("n", "c"), ("n", "m", "d"), "name"):
            if pick.random() < 0.6:
                member[key] = f"of {number}" if key == "name" else numbers + 1
        members.append(member)
    return lazy_stack(members, pick.randint(0, len(batch)))


def random_step(pick: random.Random, shape: tuple[int, ...]) -> Step:
    """Return something that moves rows of a tensor, or of a container, of this batch size."""
    dim = pick.randrange(len(shape))
    size = shape[dim]
    some = torch.tensor([pick.randrange(size) for _ in range(pick.randint(1, 3))])
    whole = torch.tensor([pick.random() < 0.7 for _ in range(torch.Size(shape).numel())])
    whole[pick.randrange(len(whole))] = True  # what takes no row takes no entries
    wide = some.reshape(*[-1 if at == dim else 1 for at in range(len(shape))])
    wide = wide.expand(*[-1 if at == dim else n for at, n in enumerate(shape)])
    several = [torch.tensor([pick.randrange(n) for _ in range(3)]) for n in shape]
    before = (slice(None),) * dim
    steps: list[Step] = [
        lambda x: x.flip(dim),
        lambda x: x.roll(1, dim),
        lambda x: x.gather(dim, wide),
        lambda x: x.index_select(dim, some),
        lambda x: x.masked_select(whole.reshape(shape)),
        lambda x: x[whole.reshape(shape)],
        lambda x: x[(*before, some)],
        lambda x: x[(*before, some.reshape(1, -1))],
        lambda x: x[tuple(several)],
        lambda x: x[some] if dim == 0 else x.transpose(0, dim),
        lambda x: x.reshape(-1),
        lambda x: x.unsqueeze(dim),
        lambda x: x.squeeze(dim) if x.ndim > 1 else x,
        lambda x: x.repeat_interleave(2, dim),
        lambda x: torch.cat([x, x.flip(dim)], dim),
        lambda x: torch.stack([x, x.clone()], dim),
        lambda x: torch.cat(x.split(1, dim), dim),
        lambda x: x.clone(),
    ]
    return pick.choice(steps)


@pytest.mark.parametrize("seed", range(40))
def test_random_moves_are_those_of_a_list_of_rows(seed: int) -> None:
    pick = random.Random(seed)
    td: TensorDictBase = random_stack(pick)
    rows = rows_in(td)
    numbers = torch.arange(len(rows)).reshape(td.batch_size)
    for _ in range(4):
        step: Step = random_step(pick, tuple(numbers.shape))
        td, numbers = step(td), step(numbers)
        assert td.batch_size == numbers.shape
        assert rows_in(td) == [rows[number] for number in numbers.reshape(-1).tolist()]
        if numbers.numel() > 300:
            break


CONVERSIONS: dict[str, Callable[[TensorDictBase], object]] = {
    "to_json": lambda td: td.to_json(),
    "to_json, joined lines": lambda td: td.to_json(lines=True, separator="."),
    "to_csv": lambda td: td.to_csv(),
    "to_pandas": lambda td: td.to_pandas(),
    "to_arrow": lambda td: td.to_arrow(),
    "to_parquet": lambda td: td.to_parquet("rows.parquet"),
    "to_h5": lambda td: td.to_h5("rows.h5"),
    "to_zarr": lambda td: td.to_zarr("rows.zarr"),
    "to_mds": lambda td: td.to_mds(out="shards"),
    "pack": lambda td: td.pack(),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_what_would_lose_entries_of_some_members_names_them(name: str) -> None:
    with pytest.raises(KeySetMismatch, match=r"them: `b`, `\('n', 'd'\)`\. Leave"):
        CONVERSIONS[name](pair())
    below = TensorDict({"s": pair()}, [2])
    with pytest.raises(KeySetMismatch, match="'s', 'b'"):
        CONVERSIONS[name](below)


def test_conversions_take_what_is_left_after_exclude() -> None:
    common = pair().exclude("b", ("n", "d"))
    assert (common.to_csv() or "").split() == ["a,n.c", "1,7", "2,9"]
    assert common.pack()[0].tolist() == [[1, 7], [2, 9]]


def test_lines_of_json_have_the_entries_of_their_row() -> None:
    text = pair().to_json(lines=True)
    assert text == '{"a": 1, "b": 5, "n": {"c": 7, "d": 8}}\n{"a": 2, "n": {"c": 9}}\n'


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("below", [True, False])
def test_a_state_dict_has_the_entries_of_each_member(flatten: bool, below: bool) -> None:
    stacked, other = pair(), pair().zero_()
    source = TensorDict({"s": stacked}, [2]) if below else stacked
    target = TensorDict({"s": other}, [2]) if below else other
    target.load_state_dict(source.state_dict(flatten=flatten))
    loaded = target["s"] if below else target
    assert rows_in(cast("TensorDictBase", loaded)) == [FIRST, SECOND]


class Seen(TensorClass):
    x: torch.Tensor
    camera: torch.Tensor | None = None


def test_a_field_that_some_members_hold_is_read_as_the_list_of_theirs() -> None:
    rows = [Seen(x=torch.zeros(2), camera=torch.ones(3)), Seen(x=torch.zeros(2))]
    camera = cast("list[object]", cast("Seen", lazy_stack(rows)).camera)
    assert camera[0] is rows[0].camera
    assert camera[1:] == [None]
    with pytest.raises(KeyError, match="in 1 of 2 members"):
        lazy_stack(rows)["camera"]


def test_a_field_that_no_member_holds_is_none() -> None:
    assert cast("Seen", lazy_stack([Seen(x=torch.zeros(2))] * 2)).camera is None


def test_a_field_that_some_members_hold_is_cleared_in_all() -> None:
    rows = [Seen(x=torch.zeros(2), camera=torch.ones(3)), Seen(x=torch.zeros(2))]
    seen = cast("Seen", lazy_stack(rows))
    seen.camera = None
    assert seen.camera is None
    assert rows[0].camera is None


@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([[0, 1], [1, 0]]),
        torch.tensor([[True, False], [True, True]]),
        ([0, 1], [0, 0]),
        ([1, 0], slice(None)),
        (slice(None), [0, 1]),
    ],
)
def test_rows_are_written_with_the_entries_that_they_have(index: Any) -> None:
    stack: Any = lazy_stack([pair().clone(), pair().clone()])
    stack[index] = stack[index].apply(lambda leaf: leaf + 10)
    read = [[row_of(row) for row in rows] for rows in (stack[0], stack[1])]
    written = torch.zeros(2, 2, dtype=torch.int64)
    written[index] = 10
    for at, row in product(range(2), range(2)):
        before = cast("dict[object, int]", row_of(pair()[row]))
        plus = int(written[at, row])
        assert read[at][row] == {key: value + plus for key, value in before.items()}
