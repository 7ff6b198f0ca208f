"""Jagged leaves in random programs move as the rows of plain lists do."""

import random
from collections.abc import Callable
from typing import TypeAlias

import torch
from tests.fuzz.conftest import Seeds
from torch import Tensor

from kd_core import TensorDict, TensorDictBase, cat, lazy_stack

Rows: TypeAlias = list[Tensor]
Step: TypeAlias = Callable[[random.Random, "Both"], "Both"]


class Both:
    """A container with jagged leaves, and its rows as plain lists: of numbers, and of features."""

    def __init__(self, td: TensorDictBase, rows: dict[str, Rows]) -> None:
        self.td, self.rows = td, rows

    @property
    def count(self) -> int:
        return len(self.rows["row"])

    def picked(self, td: TensorDictBase, numbers: list[int]) -> "Both":
        return Both(td, {key: [rows[i] for i in numbers] for key, rows in self.rows.items()})


def made(rng: random.Random) -> Both:
    count = rng.randint(1, 5)
    lengths = [rng.randint(0, 3) for _ in range(count)]
    rows = {
        "a": [torch.rand(n) for n in lengths],
        "b": [torch.rand(n, 2) for n in lengths],
        "row": [torch.tensor(float(i)) for i in range(count)],
    }
    return Both(container(rows), rows)


def container(rows: dict[str, Rows]) -> TensorDict:
    a, b = (torch.nested.nested_tensor(rows[key], layout=torch.jagged) for key in "ab")
    nested = TensorDict({"b": b}, [len(rows["row"])])
    return TensorDict({"a": a, "n": nested, "row": torch.stack(rows["row"])}, [len(rows["row"])])


def agree(both: Both) -> None:
    """Compare the container with the lists, bit by bit."""
    td, rows = both.td, both.rows
    assert td.batch_size == (both.count,)
    found = {"a": td["a"], "b": td["n", "b"], "row": td["row"]}
    for key, leaf in found.items():
        got = list(leaf.unbind(0))
        assert len(got) == both.count
        for one, other in zip(got, rows[key], strict=True):
            assert one.shape == other.shape, (key, one.shape, other.shape)
            assert torch.equal(one, other), key


def index(rng: random.Random, both: Both) -> Both:
    numbers = list(range(both.count))
    kind = rng.choice(["slice", "list", "tensor", "mask", "ellipsis", "negative"])
    if kind == "slice":
        part = slice(rng.choice([None, *numbers]), rng.choice([None, *numbers]), rng.choice([1, 2]))
        return both.picked(both.td[part], numbers[part])
    if kind == "mask":
        mask = [rng.random() < 0.6 for _ in numbers]
        return both.picked(both.td[torch.tensor(mask)], [i for i in numbers if mask[i]])
    chosen = rng.choices(numbers, k=rng.randint(1, 4))
    if kind == "negative":
        return both.picked(both.td[[i - both.count for i in chosen]], chosen)
    if kind == "ellipsis":
        cut = (..., slice(2)) if rng.random() < 0.5 else (slice(2), ...)
        return both.picked(both.td[cut], numbers[:2])
    return both.picked(both.td[chosen if kind == "list" else torch.tensor(chosen)], chosen)


def split(rng: random.Random, both: Both) -> Both:
    size = rng.randint(1, both.count)
    parts = both.td.split(size, rng.choice([0, -1]))
    place = rng.randrange(len(parts))
    numbers = list(range(both.count))[place * size : (place + 1) * size]
    return both.picked(parts[place], numbers)


def split_sizes(rng: random.Random, both: Both) -> Both:
    first = rng.randint(0, both.count)
    parts = both.td.split([first, both.count - first], 0)
    place = rng.randrange(2)
    numbers = list(range(both.count))
    return both.picked(parts[place], numbers[first:] if place else numbers[:first])


def chunk(rng: random.Random, both: Both) -> Both:
    parts = both.td.chunk(rng.randint(1, 3), 0)
    start, place = 0, rng.randrange(len(parts))
    for part in parts[:place]:
        start += part.shape[0]
    return both.picked(parts[place], list(range(start, start + parts[place].shape[0])))


def joined(rng: random.Random, both: Both) -> Both:
    pieces = [list(range(both.count)), [rng.randrange(both.count)]]
    rng.shuffle(pieces)
    return both.picked(cat([both.td[piece] for piece in pieces], 0), [*pieces[0], *pieces[1]])


def dense_again(rng: random.Random, both: Both) -> Both:
    return both.picked(lazy_stack(both.td.unbind(0)).densify(torch.jagged), list(range(both.count)))


def flip(rng: random.Random, both: Both) -> Both:
    return both.picked(both.td.flip(0), list(range(both.count))[::-1])


def roll(rng: random.Random, both: Both) -> Both:
    by = rng.randint(-3, 3)
    return both.picked(both.td.roll(by, 0), [(i - by) % both.count for i in range(both.count)])


def repeat(rng: random.Random, both: Both) -> Both:
    return both.picked(both.td.repeat(2), [*range(both.count)] * 2)


def repeat_each(rng: random.Random, both: Both) -> Both:
    times = [rng.randint(0, 2) for _ in range(both.count)]
    numbers = [i for i, n in enumerate(times) for _ in range(n)]
    if rng.random() < 0.5:
        return both.picked(both.td.repeat_interleave(torch.tensor(times), dim=0), numbers)
    twice = [i for i in range(both.count) for _ in range(2)]
    return both.picked(both.td.repeat_interleave(2, dim=0), twice)


def gather(rng: random.Random, both: Both) -> Both:
    chosen = [rng.randrange(both.count) for _ in range(3)]
    return both.picked(both.td.gather(0, torch.tensor(chosen)), chosen)


def clone(rng: random.Random, both: Both) -> Both:
    return both.picked(both.td.clone(), list(range(both.count)))


def consolidated(rng: random.Random, both: Both) -> Both:
    made = both.td.consolidate()
    assert made.is_consolidated()
    return Both(made, both.rows)


def shared(rng: random.Random, both: Both) -> Both:
    assert both.td.clone().share_memory_().is_shared()
    return both


def stored(rng: random.Random, both: Both) -> Both:
    return Both(type(both.td).from_buffers(*both.td.to_buffers()), both.rows)


def arithmetic(rng: random.Random, both: Both) -> Both:
    rows = {key: [row * 2 + 1 for row in each] for key, each in both.rows.items()}
    return Both(both.td * 2 + 1, rows)


def masked(rng: random.Random, both: Both) -> Both:
    keep = [rng.random() < 0.5 for _ in range(both.count)]
    td = both.td.where(torch.tensor(keep), both.td + 1)
    rows = {
        key: [row if yes else row + 1 for row, yes in zip(each, keep, strict=True)]
        for key, each in both.rows.items()
    }
    return Both(td, rows)


STEPS: tuple[Step, ...] = (
    *(index, split, split_sizes, chunk, joined, dense_again, flip, roll, repeat, repeat_each),
    *(gather, clone, consolidated, shared, stored, arithmetic, masked),
)


def run_program(seed: int, seeds: Seeds) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    both = made(rng)
    history: list[str] = []
    for _ in range(5):
        step = rng.choice(STEPS)
        history.append(step.__name__)
        try:
            both = step(rng, both)
            agree(both)
        except Exception as error:
            error.add_note(f"after {history}")
            raise
        seeds.count("steps")
        if not 0 < both.count <= 12:
            return


def test_jagged_leaves_move_as_their_rows(seeds: Seeds) -> None:
    for seed in seeds(25):
        run_program(seed, seeds)
