"""Values of rows beside nested lists: staged writes, views of one batch, and threads on rows.

Each row holds a word that is written nowhere else, so a value that is lost, doubled or taken from
another row is seen. The reference is one list for each batch, and for each view the rows that it
sees.
"""

import threading
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from tests.fuzz.conftest import Seeds
from tests.fuzz.test_threads import together

from kd_core import TensorClass, TensorDict, TensorDictBase, cat, lazy_stack, stack

ROWS = 6


class Sample(TensorClass):
    """Rows of a tensor class."""

    w: str
    x: torch.Tensor


class Batch:
    """A container of words with the reference: a list, and what each view sees of it."""

    def __init__(self, rng: Random, count: Callable[[], str]) -> None:
        self.rng, self.count = rng, count
        self.words = [count() for _ in range(ROWS)]
        kind: Any = rng.choice([TensorDict, Sample])
        td = kind.from_dict({"w": list(self.words), "x": torch.zeros(ROWS)}, batch_size=[ROWS])
        self.views: list[tuple[TensorDictBase, list[int]]] = [(td, list(range(ROWS)))]

    def look(self) -> None:
        """Add a view, or a stack of views."""
        td, rows = self.rng.choice(self.views)
        kind = self.rng.randrange(5)
        if kind == 0 and len(rows) > 1:
            at = self.rng.randrange(len(rows) - 1)
            self.views.append((td[at:], rows[at:]))
        elif kind == 1:
            self.views.append((td[::2], rows[::2]))
        elif kind == 2:
            self.views.append((td.reshape(len(rows)), rows))
        elif kind == 3:
            self.views.append((td.select("w", "x"), rows))
        else:
            self.views.append((td.view(len(rows), 1)[:, 0], rows))

    def write(self) -> str:
        """Write rows through a view."""
        td, rows = self.rng.choice(self.views)
        new = [self.count() for _ in rows]
        way = self.rng.choice(sorted(WAYS))
        taken = WAYS[way](self.rng, td, new)
        for at, word in taken.items():
            self.words[rows[at]] = word
        return way

    def check(self, way: str) -> None:
        """Compare all views with the list, and copies of one, which are written then."""
        for td, rows in self.views:
            assert td["w"] == [self.words[row] for row in rows], (way, rows)
        td, rows = self.rng.choice(self.views)
        for copied, found in (
            (td.clone(), 1),
            (td.clone(recurse=False), 1),
            (cat([td, td]), 2),
            (td[torch.arange(len(rows))], 1),
            (stack([td, td])[1], 1),
        ):
            assert copied["w"] == found * [self.words[row] for row in rows]
            copied.update_({"w": [self.count() for _ in range(found * len(rows))]})


def _all(new: list[str]) -> dict[int, str]:
    return dict(enumerate(new))


def _at_slice(rng: Random, td: TensorDictBase, new: list[str]) -> dict[int, str]:
    start = rng.randrange(len(new))
    td[start:] = TensorDict({"w": new[start:]}, [len(new) - start])
    return {at: new[at] for at in range(start, len(new))}


def _at_row(rng: Random, td: TensorDictBase, new: list[str]) -> dict[int, str]:
    at = rng.randrange(len(new))
    td[at] = TensorDict({"w": new[at]})
    return {at: new[at]}


def _at_set(rng: Random, td: TensorDictBase, new: list[str]) -> dict[int, str]:
    at = rng.randrange(len(new))
    td.set_at_("w", new[at], at)
    return {at: new[at]}


def _at_mask(rng: Random, td: TensorDictBase, new: list[str]) -> dict[int, str]:
    mask = torch.tensor([rng.random() < 0.5 for _ in new])
    rows = mask.nonzero().view(-1).tolist()
    if rows:
        td[mask] = TensorDict({"w": [new[at] for at in rows]}, [len(rows)])
    return {at: new[at] for at in rows}


def _at_numbers(rng: Random, td: TensorDictBase, new: list[str]) -> dict[int, str]:
    rows = rng.sample(range(len(new)), rng.randint(1, len(new)))
    td[torch.tensor(rows)] = TensorDict({"w": [new[at] for at in rows]}, [len(rows)])
    return {at: new[at] for at in rows}


def _members(rng: Random, td: TensorDictBase, new: list[str]) -> dict[int, str]:
    """Write to a lazy stack of views of single rows, which are batches of one."""
    rows = [td[at : at + 1] for at in range(len(new))]
    whole = lazy_stack(rows, 0)
    pairs = [[word] for word in new]
    if rng.random() < 0.5:
        whole.set_("w", pairs)
    else:
        whole.update_({"w": pairs})
    assert whole["w"] == pairs
    return _all(new)


def _halves(rng: Random, td: TensorDictBase, new: list[str]) -> dict[int, str]:
    """Write two halves of a batch, under two keys, at once."""
    half = len(new) // 2
    if not half:
        return {}
    both = TensorDict({"a": td[:half], "b": td[half : 2 * half]}, [half])
    both.update_({"a": {"w": new[:half]}, "b": {"w": new[half : 2 * half]}})
    return _all(new[: 2 * half])


def _update_at(rng: Random, td: TensorDictBase, new: list[str]) -> dict[int, str]:
    """Write one row, a slice or a few rows of all entries at once."""
    at = rng.randrange(len(new))
    way = rng.randrange(3)
    if way == 0:
        td.update_at_({"w": new[at], "x": torch.ones(())}, at)
        return {at: new[at]}
    rows = list(range(at, len(new))) if way == 1 else rng.sample(range(len(new)), at + 1)
    index = slice(at, None) if way == 1 else torch.tensor(rows)
    td.update_at_({"w": [new[row] for row in rows], "x": torch.ones(len(rows))}, index)
    return {row: new[row] for row in rows}


def _other_dim(rng: Random, td: TensorDictBase, new: list[str]) -> dict[int, str]:
    """Write to a lazy stack along the second dimension, of two halves of the batch."""
    half = len(new) // 2
    if not half:
        return {}
    whole = lazy_stack([td[:half], td[half : 2 * half]], 1)
    pairs = [list(pair) for pair in zip(new[:half], new[half : 2 * half], strict=True)]
    way = rng.randrange(4)
    if way == 0:
        whole.set_("w", pairs)
    elif way == 1:
        whole.update_({"w": pairs})
    elif way == 2:
        whole[:, 1] = TensorDict({"w": new[half : 2 * half]}, [half])
        return {half + at: new[half + at] for at in range(half)}
    else:
        row = rng.randrange(half)
        whole.update_at_({"w": pairs[row], "x": torch.ones(2)}, row)
        return {row: new[row], half + row: new[half + row]}
    assert whole["w"] == pairs
    return _all(new[: 2 * half])


def _refused(rng: Random, td: TensorDictBase, new: list[str]) -> dict[int, str]:
    """Stage values with a tensor that does not fit: nothing is written."""
    try:
        td.update_({"w": new, "x": torch.zeros(len(new) + 5)})
    except ValueError:
        return {}
    raise AssertionError("a tensor of another shape was written")


def _set(rng: Random, td: TensorDictBase, new: list[str]) -> dict[int, str]:
    td.set_("w", new)
    return _all(new)


def _update(rng: Random, td: TensorDictBase, new: list[str]) -> dict[int, str]:
    td.update_({"w": new})
    return _all(new)


def _copy(rng: Random, td: TensorDictBase, new: list[str]) -> dict[int, str]:
    td.copy_(TensorDict({"w": new, "x": torch.ones(len(new))}, [len(new)]))
    return _all(new)


WAYS: dict[str, Callable[[Random, TensorDictBase, list[str]], dict[int, str]]] = {
    "set_": _set,
    "update_": _update,
    "copy_": _copy,
    "slice": _at_slice,
    "row": _at_row,
    "set_at_": _at_set,
    "mask": _at_mask,
    "numbers": _at_numbers,
    "members": _members,
    "halves": _halves,
    "refused": _refused,
    "update_at_": _update_at,
    "other dimension": _other_dim,
}


def test_no_value_of_a_row_is_lost_or_doubled(seeds: Seeds) -> None:
    for seed in seeds(25):
        rng, words = Random(seed), iter(range(10**9))
        batch = Batch(rng, lambda words=words: f"word {next(words)}")  # type: ignore[misc]  # bound in time
        for _ in range(40):
            if rng.random() < 0.2 and len(batch.views) < 8:
                batch.look()
            way = batch.write()
            batch.check(way)
            seeds.count("calls")


def test_threads_on_rows_keep_to_their_rows(seeds: Seeds) -> None:
    for seed in seeds(8):
        rng = Random(seed)
        rows = rng.randint(2, 6)
        td = TensorDict({"w": [f"{row} 0" for row in range(rows)], "x": torch.zeros(rows)}, [rows])
        base: TensorDictBase = td if rng.random() < 0.5 else td.view(rows, 1)[:, 0]

        def job(row: int, td: TensorDictBase = base, way: int = rng.randrange(3)) -> object:
            mine = td[row : row + 1]
            for number in range(60):
                new = f"{row} {number}"
                if way == 0:
                    td[row] = TensorDict({"w": new})
                elif way == 1:
                    mine.set_("w", [new])
                else:
                    td.set_at_("w", new, row)
                found = td["w"]
                owners = [str(word).partition(" ")[0] for word in found]
                if found[row] != new or owners != [str(each) for each in range(len(owners))]:
                    return found
            return None

        assert together([lambda row=row: job(row) for row in range(rows)]) == []  # type: ignore[misc]  # bound in time
        seeds.count("calls", 60 * rows)
        assert threading.active_count() < 50
