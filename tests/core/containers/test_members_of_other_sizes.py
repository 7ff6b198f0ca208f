"""Members of different batch sizes: the stack has the size -1 there and works member by member."""

import copy
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from kd_core import (
    InvalidValue,
    LazyStackedTensorDict,
    Locked,
    OutOfRange,
    ShapeMismatch,
    TensorClass,
    TensorDict,
    TensorDictBase,
    UnbatchedTensor,
    cat,
    lazy_stack,
    maybe_dense_stack,
    stack,
)


def row(length: int, start: float = 0.0) -> TensorDict:
    values = torch.arange(start, start + 2 * length).reshape(length, 2)
    return TensorDict({"a": values, "n": {"b": values[:, 0].clone()}}, [length])


def ragged(*lengths: int, dim: int = 0) -> LazyStackedTensorDict:
    members = [row(length, 100.0 * number) for number, length in enumerate(lengths or (3, 4))]
    return lazy_stack(members, dim)


class Steps(TensorClass):
    a: torch.Tensor


def steps(length: int) -> Steps:
    return Steps(a=torch.ones(length, 2), batch_size=[length])


@pytest.mark.parametrize(
    "make",
    [
        lazy_stack,
        maybe_dense_stack,
        LazyStackedTensorDict.lazy_stack,
        LazyStackedTensorDict.maybe_dense_stack,
        lambda members: LazyStackedTensorDict(*members),
        lambda members: LazyStackedTensorDict(*members, batch_size=[2, -1]),
    ],
)
@pytest.mark.parametrize("new", [row, steps])
def test_every_way_of_stacking_takes_them(
    make: Callable[..., TensorDictBase], new: Callable[[int], TensorDictBase]
) -> None:
    members = [new(3), new(4)]
    made = make(members)
    assert isinstance(made, LazyStackedTensorDict)
    assert made.batch_size == made.shape == torch.Size([2, -1])
    assert (made.ndim, len(made), made.numel(), made.size(1)) == (2, 2, 7, -1)
    assert all(type(size) is int for size in made.batch_size)
    for seen in (list(made), made.unbind(0), [made[0], made[-1]]):
        assert [each is member for each, member in zip(seen, members, strict=True)] == [True, True]
    assert not made.is_empty()


def test_a_tensor_class_keeps_its_fields() -> None:
    made = lazy_stack([steps(3), steps(4)])
    as_class: Any = made
    assert isinstance(as_class, Steps)
    assert isinstance((as_class + 1)[0], Steps)
    assert (as_class + 1)[1].a.shape == (4, 2)
    assert as_class[:, :2].a.shape == (2, 2, 2)
    with pytest.raises(ShapeMismatch, match="entry `a` is ragged"):
        _ = as_class.a


def test_another_stacked_dimension() -> None:
    made = ragged(dim=1)
    assert made.batch_size == (-1, 2)
    assert [each.batch_size for each in made.unbind(1)] == [(3,), (4,)]
    assert made[0].batch_size == (2,)
    assert made[:2].batch_size == (2, 2)
    for call in (len, list, lambda x: x.unbind(0), lambda x: x.reshape(-1)):
        with pytest.raises(ShapeMismatch, match=r"in batch dimension 0 of 2: 3, 4;"):
            call(made)


def test_only_the_dimensions_that_differ_are_open() -> None:
    made = lazy_stack([TensorDict({}, sizes) for sizes in ([3, 5, 2], [4, 5, 1])])
    assert made.batch_size == (2, -1, 5, -1)
    assert lazy_stack([ragged(), ragged()]).batch_size == (2, 2, -1)
    assert lazy_stack([ragged(3, 4), ragged(5, 6)]).batch_size == (2, 2, -1)
    mixed = lazy_stack([ragged(3, 4), ragged(5, 6, 7)])
    assert mixed.batch_size == (2, -1, -1)
    assert mixed.numel() == 25
    assert mixed.reshape(-1).batch_size == (25,)
    with pytest.raises(ShapeMismatch, match=r"as many dimensions, got \(3,\) in member 0"):
        lazy_stack([row(3), row(3).unsqueeze(0)])


def test_an_index_is_one_of_each_member() -> None:
    made = ragged()
    assert made[:, 0]["a"].tolist() == [[0.0, 1.0], [100.0, 101.0]]
    assert made[:, :2]["a"].shape == (2, 2, 2)
    assert made[..., -1]["n", "b"].tolist() == [4.0, 106.0]
    assert made[1, 3]["a"].tolist() == [106.0, 107.0]
    assert [each.batch_size for each in made[[1, 0]]] == [(4,), (3,)]
    assert made[torch.tensor([False, True])].batch_size == (1, 4)
    assert made[None].batch_size == (1, 2, -1)
    assert [part.batch_size for part in made.split(1)] == [(1, 3), (1, 4)]
    assert [part.batch_size for part in ragged(3, 4, 4).chunk(2)] == [(2, -1), (1, 4)]
    with pytest.raises(OutOfRange, match=r"index 3 is out of range .* \(3,\)"):
        made[:, 3]


def test_rows_are_written_through_an_index() -> None:
    made = ragged()
    made[:, 0] = 0
    made[1, 3] = row(1)[0]
    made[0] = row(3, 50.0)
    assert made[0]["a"][0].tolist() == [50.0, 51.0]
    assert made[1]["a"][[0, 3]].tolist() == [[0.0, 0.0], [0.0, 1.0]]
    before = made.clone()
    with pytest.raises(ShapeMismatch):
        made[1] = row(3)
    assert (made == before).all()


def test_entries_are_read_as_ragged_ones() -> None:
    made = ragged()
    nested: Any = made["n"]
    assert nested.batch_size == (2, -1)
    assert nested[0] is made[0]["n"]
    assert [each.shape for each in made.get("a", as_list=True)] == [(3, 2), (4, 2)]
    assert made.get("a", as_padded_tensor=True).shape == (2, 4, 2)
    assert made.get("a", as_nested_tensor=True).is_nested
    for read in (lambda: made["a"], lambda: list(made.items()), made.contiguous, made.to_dict):
        with pytest.raises(ShapeMismatch, match="entry `a` is ragged"):
            read()
    assert "a: ragged, of shapes (3, 2), (4, 2)" in repr(made)


def test_data_of_all_rows() -> None:
    made = ragged()
    made["task"] = "walk"
    made["table"] = UnbatchedTensor(torch.arange(3))
    assert made["task"] == [["walk"] * 3, ["walk"] * 4]
    assert made["table"].tolist() == [0, 1, 2]
    assert made[1]["task"] == "walk"
    made[0]["task"] = "run"
    made[1]["task"] = ["a", "b", "c", "d"]
    assert made["task"] == [["run"] * 3, ["a", "b", "c", "d"]]
    found: Any = made.get("task", as_list=True)
    assert found.tolist() == [["run"] * 3, ["a", "b", "c", "d"]]
    behind = lazy_stack([made[0][None], made[1][None]], 2)
    with pytest.raises(ShapeMismatch, match="entry `task` has values for the rows of members"):
        behind["task"]


def test_values_that_can_be_split_are_stored() -> None:
    made = ragged()
    rows = [torch.ones(3), torch.zeros(4)]
    for layout in (torch.jagged, torch.strided):
        made["new"] = torch.nested.as_nested_tensor(rows, layout=layout)
        assert [each.tolist() for each in made.get("new", as_list=True)] == [[1.0] * 3, [0.0] * 4]
        del made["new"]
    made["n", "listed"] = rows
    made["copy"] = made["n"]
    assert made[1]["copy", "listed"].shape == (4,)
    made.set_("a", made.get("a", as_nested_tensor=True) + 1)
    assert made[0]["a"][0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2),
        torch.zeros(2, 3),
        torch.zeros(2, 4, 1),
        1.0,
        [torch.zeros(3), torch.zeros(3)],
        row(3),
        ragged(3, 5),
        ragged(3, 4, 5),
        {"b": torch.zeros(2)},
    ],
)
def test_other_values_change_nothing(value: object) -> None:
    made = ragged()
    with pytest.raises(ShapeMismatch):
        made["new"] = value
    assert [set(member.keys()) for member in made] == [{"a", "n"}] * 2


def test_the_error_of_a_value_says_what_to_pass() -> None:
    with pytest.raises(ShapeMismatch, match=r"sizes \(3,\), \(4,\). Pass a list with a value for"):
        ragged()["new"] = torch.zeros(2, 3)


def test_stacks_are_joined_by_their_members() -> None:
    one, other = ragged(), ragged(5, 1)
    joined = cat([one, other])
    assert [each.batch_size[0] for each in joined] == [3, 4, 5, 1]
    assert cat([one, other], 1).batch_size == (2, -1)
    assert stack([one, one]).batch_size == (2, 2, -1)
    assert lazy_stack([one, other], 2).batch_size == (2, -1, 2)
    even = cat([ragged(3, 4), ragged(4, 3)], 1)
    assert even.batch_size == (2, 7)
    assert even["a"].shape == (2, 7, 2)
    with pytest.raises(ShapeMismatch, match="batch sizes must be equal"):
        stack([row(3), row(4)])


def test_rows_of_all_members_are_flattened() -> None:
    made = ragged()
    wanted = torch.cat([member["a"] for member in made])
    for flat in (made.reshape(-1), made.reshape(7), made.flatten(), made.flatten(0, 1)):
        assert flat.batch_size == (7,)
        assert torch.equal(flat["a"], wanted)
    made.reshape(-1)[6]["a"].zero_()
    assert made[1]["a"][3].tolist() == [0.0, 0.0]
    assert made.reshape(made.batch_size).batch_size == (2, -1)
    deep = lazy_stack([TensorDict({"x": torch.zeros(n, 5)}, [n, 5]) for n in (1, 2)])
    assert deep.flatten(0, 1).batch_size == (3, 5)


def test_dense_forms() -> None:
    dense: TensorDictBase = ragged().densify(layout=torch.jagged)
    assert type(dense) is TensorDict
    nested: Any = dense["n"]
    assert dense.batch_size == nested.batch_size == (2,)
    assert dense[1]["a"].shape == (4, 2)
    with pytest.raises(ShapeMismatch, match="entry `a` is ragged"):
        ragged().to_tensordict()
    empty = lazy_stack([TensorDict({}, [3]), TensorDict({}, [4])])
    for make in (empty.contiguous, empty.to_tensordict):
        with pytest.raises(ShapeMismatch, match="batch dimension 1 of 2: 3, 4"):
            make()


def test_reductions_of_other_dimensions() -> None:
    made = ragged()
    assert made.sum(1)["a"].tolist() == [[6.0, 9.0], [412.0, 416.0]]
    assert made.mean("feature").batch_size == (2, -1)
    with pytest.raises(ShapeMismatch, match="batch dimension 1 of 2: 3, 4"):
        made.sum(0)


@pytest.mark.parametrize(
    "call",
    [
        lambda td: td.view(-1),
        lambda td: td.view(2, 3),
        lambda td: td.reshape(7, 1),
        lambda td: td.expand(2, 2, 3),
        lambda td: td.repeat(2, 2),
        lambda td: td.split(2, 1),
        lambda td: td.unbind(1),
        lambda td: td.narrow(1, 0, 2),
        lambda td: td.gather(1, torch.zeros(2, 1, dtype=torch.int64)),
        lambda td: td.unflatten(0, (1, 2)),
        lambda td: td.to_lazystack(1),
        lambda td: td.to_struct_array(),
    ],
)
@pytest.mark.parametrize("keys", [["a", "n"], []])
def test_what_needs_one_size_says_so(
    call: Callable[[LazyStackedTensorDict], object], keys: list[str]
) -> None:
    made = ragged().select(*keys)
    before = made.clone()
    with pytest.raises(ShapeMismatch, match=r"in batch dimension 1 of 2: 3, 4; .* `pad` .* `stack"):
        call(made)
    assert (made == before).all()
    assert made.batch_size == (2, -1)


Move = Callable[[TensorDictBase], TensorDictBase]


@pytest.mark.parametrize(
    ("call", "size", "each", "order"),
    [
        (lambda td: td.permute(1, 0), (-1, 2), lambda td: td, [0, 1]),
        (lambda td: td.transpose(0, 1), (-1, 2), lambda td: td, [0, 1]),
        (lambda td: td.movedim(0, -1), (-1, 2), lambda td: td, [0, 1]),
        (lambda td: td.unsqueeze(0), (1, 2, -1), lambda td: td.unsqueeze(0), [0, 1]),
        (lambda td: td.unsqueeze(1), (2, 1, -1), lambda td: td.unsqueeze(0), [0, 1]),
        (lambda td: td.unsqueeze(-1), (2, -1, 1), lambda td: td.unsqueeze(1), [0, 1]),
        (lambda td: td.unsqueeze(-1).squeeze(-1), (2, -1), lambda td: td, [0, 1]),
        (lambda td: td.flip(0), (2, -1), lambda td: td, [1, 0]),
        (lambda td: td.flip(1), (2, -1), lambda td: td.flip(0), [0, 1]),
        (lambda td: td.roll(1, 1), (2, -1), lambda td: td.roll(1, 0), [0, 1]),
        (lambda td: td.repeat_interleave(2, 0), (4, -1), lambda td: td, [0, 0, 1, 1]),
    ],
)
def test_members_that_stay_whole_are_moved(
    call: Move, size: tuple[int, ...], each: Move, order: list[int]
) -> None:
    made = ragged()
    moved = call(made)
    assert isinstance(moved, LazyStackedTensorDict)
    assert moved.batch_size == size
    wanted = [each(made[number]) for number in order]
    for mine, theirs in zip(moved.tensordicts, wanted, strict=True):
        assert mine.batch_size == theirs.batch_size
        assert (mine == theirs).all()


def test_moves_are_views_and_keep_names() -> None:
    made = ragged()
    made.names = ["episode", "time"]
    turned = made.transpose(0, 1)
    assert turned.names == ["time", "episode"]
    turned.zero_()
    assert not made[1]["a"].any()


def test_members_are_added() -> None:
    made = ragged()
    made.append(row(5))
    made.insert(0, row(1))
    made.extend([row(2), row(2)])
    assert [each.batch_size[0] for each in made] == [1, 3, 4, 5, 2, 2]
    assert made.batch_size == (6, -1)
    with pytest.raises(ShapeMismatch, match="added to the lazy stack"):
        made.append(row(3).unsqueeze(0))
    equal = lazy_stack([row(3), row(3)])
    with pytest.raises(ShapeMismatch, match="or make another stack"):
        equal.append(row(4))
    assert equal.batch_size == (2, 3)


def test_a_lock_covers_the_members() -> None:
    made = ragged().lock_()
    assert made[0].is_locked
    assert made.reshape(-1).is_locked
    with pytest.raises(Locked):
        made["new"] = [torch.zeros(3), torch.zeros(4)]
    with pytest.raises(Locked):
        made.append(row(5))
    made.unlock_()["new"] = [torch.zeros(3), torch.zeros(4)]
    assert "new" in made[1]


def test_copies_and_files(tmp_path: Path) -> None:
    made = ragged()
    made.names = ["episode", "time"]
    copies = [pickle.loads(pickle.dumps(made)), copy.deepcopy(made), made.clone(), made.to("cpu")]
    for each in copies:
        assert each.batch_size == (2, -1)
        assert each.names == ["episode", "time"]
        assert (each == made).all()
    made.names = None
    assert made.names == [*made[0].names, None]
    made.memmap(tmp_path / "rows")
    loaded = TensorDict.load_memmap(tmp_path / "rows")
    assert loaded.batch_size == (2, -1)
    assert (loaded == made).all()


def test_sizes_of_other_members_do_not_fit() -> None:
    one, other = ragged(3, 4), ragged(4, 3)
    assert one.batch_size == other.batch_size
    with pytest.raises(ShapeMismatch):
        one + other
    with pytest.raises(ShapeMismatch):
        one.update_(other)
    with pytest.raises(InvalidValue, match="non-negative"):
        TensorDict({}, [2, -1])


def test_a_tensor_lines_up_with_the_stacked_dimension() -> None:
    scaled = ragged() * torch.tensor([2.0, 3.0])
    assert torch.equal(scaled[1]["a"], ragged()[1]["a"] * 3)
    with pytest.raises(ShapeMismatch, match="does not line up"):
        ragged() * torch.ones(2, 3)


def test_a_container_holds_them() -> None:
    held: Any = TensorDict({"rows": ragged(), "y": torch.zeros(2)}, [2])
    assert held[1]["rows"].batch_size == (4,)
    assert [each["rows"].batch_size for each in held.split(1)] == [(1, 3), (1, 4)]
    assert cat([held, held])["rows"].batch_size == (4, -1)
    assert (held + 1).clone()["rows"].batch_size == (2, -1)
    assert held.unsqueeze(0)["rows"].batch_size == (1, 2, -1)
    with pytest.raises(ShapeMismatch, match="batch dimension 1 of 2"):
        held.reshape(1, 2)


def test_the_batch_size_is_set() -> None:
    made = ragged()
    made.batch_size = made.batch_size
    assert made.batch_size == (2, -1)
    made.batch_size = [2]
    assert made.batch_size == (2,)
    assert made[0].batch_size == ()


def test_a_loader_stacks_them() -> None:
    rows: Any = [row(n) for n in (3, 4, 2, 2)]
    batches: Any = DataLoader(rows, batch_size=2, collate_fn=lazy_stack)
    assert [batch.batch_size for batch in batches] == [(2, -1), (2, 2)]


# Random programs, beside a list of containers on which each step is done member by member.

Rows = list[TensorDictBase]
Step = Callable[[LazyStackedTensorDict, Rows], tuple[TensorDictBase, Rows]]


def _seen(sizes: set[int]) -> int:
    return sizes.pop() if len(sizes) == 1 else -1


def _check(stacked: TensorDictBase, rows: Rows) -> None:
    assert isinstance(stacked, LazyStackedTensorDict)
    lengths = [member.batch_size[0] for member in rows]
    assert stacked.batch_size == (len(rows), _seen({*lengths}))
    assert stacked.numel() == sum(lengths)
    for mine, theirs in zip(stacked.unbind(0), rows, strict=True):
        assert mine.batch_size == theirs.batch_size
        assert list(mine.keys(True)) == list(theirs.keys(True))
        assert (mine == theirs).all()
    for key in ("a", ("n", "b")):
        if key in rows[0].keys(True):
            wanted = [member[key] for member in rows]
            assert all(map(torch.equal, stacked.get(key, as_list=True), wanted))
            padded = torch.nn.utils.rnn.pad_sequence(wanted, batch_first=True)
            assert torch.equal(stacked.get(key, as_padded_tensor=True), padded)
            assert torch.equal(stacked.reshape(-1)[key], torch.cat(wanted))


def _index(draw: random.Random, rows: Rows) -> Step:
    chosen = [draw.randrange(-len(rows), len(rows)) for _ in range(draw.randint(1, 4))]
    return lambda stacked, rows: (stacked[chosen], [rows[number].clone() for number in chosen])


def _cut(draw: random.Random, rows: Rows) -> Step:
    end = draw.randint(1, max(member.batch_size[0] for member in rows))
    return lambda stacked, rows: (stacked[:, :end], [member[:end] for member in rows])


def _scale(draw: random.Random, rows: Rows) -> Step:
    factors = torch.tensor([float(draw.randint(-2, 2)) for _ in rows])
    return lambda stacked, rows: (
        stacked * factors[:, None],
        [member * factor for member, factor in zip(rows, factors, strict=True)],
    )


def _add_member(draw: random.Random, rows: Rows) -> Step:
    new, at = row(draw.randint(1, 5), 7.0), draw.randint(0, len(rows))
    if "w" in rows[0]:
        new["w"] = torch.ones(new.batch_size)

    def step(stacked: LazyStackedTensorDict, rows: Rows) -> tuple[TensorDictBase, Rows]:
        if stacked.batch_size[1] in (-1, new.batch_size[0]):
            stacked.insert(at, new.clone())
            rows.insert(at, new.clone())
        return stacked, rows

    return step


def _write(draw: random.Random, rows: Rows) -> Step:
    values = [torch.full((member.batch_size[0],), float(draw.randint(0, 9))) for member in rows]

    def step(stacked: LazyStackedTensorDict, rows: Rows) -> tuple[TensorDictBase, Rows]:
        stacked["w"] = [value.clone() for value in values]
        for member, value in zip(rows, values, strict=True):
            member["w"] = value.clone()
        return stacked, rows

    return step


def _fill(draw: random.Random, rows: Rows) -> Step:
    number = draw.randrange(len(rows))

    def step(stacked: LazyStackedTensorDict, rows: Rows) -> tuple[TensorDictBase, Rows]:
        stacked[number] = 5
        stacked[:, 0] = -1
        for each, member in enumerate(rows):
            member[slice(None) if each == number else 0] = 5 if each == number else -1
            member[0] = -1
        return stacked, rows

    return step


def _plain(name: str) -> Callable[[random.Random, Rows], Step]:
    calls: dict[str, Callable[[TensorDictBase], TensorDictBase]] = {
        "clone": lambda td: td.clone(),
        "add": lambda td: td + 1,
        "twice": lambda td: td + td,
        "apply": lambda td: td.apply(torch.neg),
        "in place": lambda td: td.add_(2),
        "detach": lambda td: td.detach(),
        "exclude": lambda td: td.exclude("w"),
        "update": lambda td: td.update(td.clone() * 2),
        "update_": lambda td: td.update_(td.clone() * 2),
        "flat keys": lambda td: td.flatten_keys("/").unflatten_keys("/"),
    }
    call = calls[name]
    return lambda draw, rows: lambda stacked, rows: (call(stacked), [call(each) for each in rows])


def _twice(draw: random.Random, rows: Rows) -> Step:
    return lambda stacked, rows: (
        cat([stacked, stacked]),
        [member.clone() for member in (*rows, *rows)],
    )


STEPS: list[Callable[[random.Random, Rows], Step]] = [
    *(_index, _cut, _scale, _add_member, _write, _fill, _twice),
    *map(_plain, ("clone", "add", "twice", "apply", "in place", "detach", "exclude")),
    *map(_plain, ("update", "update_", "flat keys")),
]


@pytest.mark.parametrize("seed", range(60))
def test_programs_agree_with_a_list_of_members(seed: int) -> None:
    draw = random.Random(seed)
    rows: Rows = [row(draw.randint(1, 5), 10.0 * n) for n in range(draw.randint(2, 4))]
    stacked: TensorDictBase = lazy_stack([member.clone() for member in rows])
    _check(stacked, rows)
    for _ in range(12):
        step = draw.choice(STEPS)(draw, rows)
        assert isinstance(stacked, LazyStackedTensorDict)
        stacked, rows = step(stacked.clone(), [member.clone() for member in rows])
        _check(stacked, rows)
        if len(rows) > 12:
            stacked, rows = stacked[:3], rows[:3]


def test_nested_containers_of_different_batch_sizes_are_read_as_a_stack_of_them() -> None:
    def member(length: int) -> TensorDict:
        return TensorDict(run=row(length, 10.0 * length), deep=TensorDict(run=row(length)))

    outer = lazy_stack([member(3), member(5)])
    run = outer.nested("run", LazyStackedTensorDict)
    assert run.batch_size == (2, -1)
    assert run[..., 0]["a"].tolist() == [[30, 31], [50, 51]]
    assert run[:, -1]["n", "b"].tolist() == [34, 58]
    assert run[1].batch_size == (5,)
    assert outer.nested("deep", LazyStackedTensorDict).batch_size == (2,)
    assert outer.nested(("deep", "run"), LazyStackedTensorDict).batch_size == (2, -1)
    assert lazy_stack([outer, outer]).nested("run", LazyStackedTensorDict).batch_size == (2, 2, -1)
    assert outer.clone().nested("run", LazyStackedTensorDict).batch_size == (2, -1)
    assert outer[:1].nested("run", LazyStackedTensorDict).batch_size == (1, 3)


def test_a_property_of_a_stack_of_instances_reads_nested_containers_of_different_sizes() -> None:
    class Episode(TensorClass):
        run: TensorDict

        @property
        def first(self) -> torch.Tensor:
            return self.run[..., 0]["a"]

    typed: Any = lazy_stack([Episode(run=row(3)), Episode(run=row(5, 10.0))])
    assert typed.first.tolist() == [[0, 1], [10, 11]]


def test_stacks_of_stacks_of_other_sizes_move_their_dimensions() -> None:
    def rows(*sizes: int) -> TensorDictBase:
        return lazy_stack([TensorDict({"a": torch.zeros(size, 2)}, [size]) for size in sizes])

    stack: Any = lazy_stack([rows(2, 3), rows(3, 2), rows(2, 3)])
    for seen, batch in (
        (stack.unsqueeze(-1), (3, 2, -1, 1)),
        (stack.unsqueeze(0), (1, 3, 2, -1)),
        (stack.permute(0, 2, 1), (3, -1, 2)),
        (stack.movedim(0, 1), (2, 3, -1)),
    ):
        assert tuple(seen.batch_size) == batch
    assert stack.permute(0, 2, 1)[1].get("a", as_list=True)[0].shape == (3, 2)
