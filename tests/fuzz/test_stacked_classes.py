"""Random programs on lazy stacks of tensor classes, beside the same on what is stacked at once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from random import Random
from typing import Final, TypeAlias, cast

import torch
from tests.fuzz.conftest import Seeds
from tests.fuzz.data import of_rows
from torch import Tensor
from torch.utils._pytree import tree_map

from kd_core import TensorClass, TensorDictBase, cat, lazy_stack, stack


class Point(TensorClass):
    """A nested class."""

    left: Tensor
    word: str = "w"


class Base(TensorClass):
    """The class that methods are inherited from."""

    x: Tensor
    point: Point
    label: str = "a"
    SCALE = 2

    def total(self) -> Tensor:
        """Return a sum, as methods of users do."""
        return self.x.sum() * self.SCALE + self.point.left.sum()

    @property
    def doubled(self) -> Tensor:
        """Return what a property computes."""
        return self.x * 2

    @classmethod
    def name(cls) -> int:
        """Return what a class method knows."""
        return cls.SCALE


class Sub(Base):
    """A class that adds a field, and asks its base."""

    more: Tensor | None = None

    def total(self) -> Tensor:
        """Return the sum of the base, and one."""
        return super().total() + 1


Step: TypeAlias = Callable[[Base, Random], Base]


def instance(rng: Random, kind: type[Base], rows: int) -> Base:
    """Return an instance with values of its own."""
    value = float(rng.randint(0, 9))
    point = Point(torch.full((rows, 2), value), batch_size=[rows])
    made = kind(torch.arange(rows * 3).reshape(rows, 3) + value, point, batch_size=[rows])
    if isinstance(made, Sub):
        made.more = torch.full((rows,), value)
    return made


def edited(change: Callable[[Base], object]) -> Step:
    """Return a step that edits in place."""

    def step(data: Base, rng: Random) -> Base:
        change(data)
        return data

    return step


def add_to_field(data: Base) -> None:
    data.x = data.x + 1


def set_nested(data: Base) -> None:
    data.point.left = data.point.left * 3


def set_word(data: Base) -> None:
    data.label = "b"


def fill_row(data: Base) -> None:
    data[0] = data[-1].clone()


def locked_read(data: Base) -> None:
    with data.lock_():
        assert data.is_locked
        data.total()


def by_mask(data: Base, rng: Random) -> Base:
    mask = torch.ones(data.batch_size[0], dtype=torch.bool)
    mask[1:] = rng.random() < 0.5
    return data[mask]


STEPS: Final[dict[str, Step]] = {
    "add to a field": edited(add_to_field),
    "set a nested field": edited(set_nested),
    "set a word": edited(set_word),
    "write a row": edited(fill_row),
    "zero": edited(lambda data: data.zero_()),
    "lock": edited(locked_read),
    "update": edited(lambda data: data.update({"x": data.x * 2})),
    "update in place": edited(lambda data: data.update_({"x": data.x * 2})),
    "slice": lambda data, rng: data[rng.choice([slice(0, 1), slice(None), slice(-1, None)])],
    "last dimension": lambda data, rng: data[..., : rng.randint(1, 2)],
    "mask": by_mask,
    "rows": lambda data, rng: data[[0, data.batch_size[0] - 1]],
    "add": lambda data, rng: data + 1,
    "multiply": lambda data, rng: data * data,
    "clone": lambda data, rng: data.clone(),
    "shallow clone": lambda data, rng: data.clone(recurse=False),
    "copy": lambda data, rng: copy.copy(data),
    "deep copy": lambda data, rng: copy.deepcopy(data),
    "pickle": lambda data, rng: pickle.loads(pickle.dumps(data)),
    "apply": lambda data, rng: data.apply(lambda leaf: leaf + 2),
    "cast": lambda data, rng: data.to(rng.choice([torch.float32, torch.float64])),
    "tree": lambda data, rng: cast("Base", tree_map(lambda leaf: leaf, data)),
    "detach": lambda data, rng: data.detach(),
    "like": lambda data, rng: cast("Base", torch.zeros_like(cast("torch.Tensor", data))),
    "transpose": lambda data, rng: data.transpose(0, -1),
    "permute": lambda data, rng: data.permute(*reversed(range(data.batch_dims))),
    "flatten": lambda data, rng: data.reshape(-1, 1),
    "unsqueeze": lambda data, rng: data.unsqueeze(rng.choice([0, -1])),
    "contiguous": lambda data, rng: data.contiguous(),
    "join": lambda data, rng: cat([data, data.clone()], rng.choice([0, -1])),
    "stack": lambda data, rng: stack([data, data.clone()]),
    "chunk": lambda data, rng: data.chunk(2)[0],
    "split": lambda data, rng: data.split(1)[-1],
    "replace": lambda data, rng: data.__replace__(x=data.x - 1),
    "keys": lambda data, rng: data.unflatten_keys("."),
    "gather": lambda data, rng: data.gather(0, torch.zeros(data.batch_size, dtype=torch.long)),
    "where": lambda data, rng: data.where(torch.ones(data.batch_size, dtype=torch.bool), data),
}


def check(lazy: Base, dense: Base, kind: type[Base]) -> None:
    """Compare all that users read of both."""
    assert isinstance(lazy, kind), type(lazy)
    assert type(dense) is kind
    assert lazy.batch_size == dense.batch_size
    assert torch.equal(lazy.x, dense.x)
    assert torch.equal(lazy.doubled, dense.doubled)
    assert isinstance(lazy.point, Point)
    assert torch.equal(lazy.point.left, dense.point.left)
    assert torch.equal(lazy.total(), dense.total())
    assert (lazy.name(), lazy.SCALE) == (dense.name(), dense.SCALE)
    assert [each.name for each in lazy.fields()] == [each.name for each in dense.fields()]
    assert set(of_rows(lazy.label)) == set(of_rows(dense.label))
    assert set(of_rows(lazy.point.word)) == set(of_rows(dense.point.word))
    if isinstance(dense, Sub):
        more, expected = cast("Sub", lazy).more, dense.more
        assert more is expected or (
            more is not None and expected is not None and torch.equal(more, expected)
        )
    if dense.batch_size[0]:
        assert type(lazy[0]) is kind or isinstance(lazy[0], kind)
    assert bool((cast("TensorDictBase", lazy) == dense).all())


def outcome(step: Step, data: Base, again: float) -> Base | Exception:
    """Return what a step makes, or the error that it raises."""
    try:
        return step(data, Random(again))
    except Exception as error:
        return error


def run(rng: Random) -> Iterator[str]:
    """Run one program on both, and yield the name of each step; both must refuse the same."""
    kind, rows, dim = rng.choice([Base, Sub]), rng.randint(1, 3), rng.choice([0, 0, 1, -1])
    members = [instance(rng, kind, rows) for _ in range(rng.randint(1, 3))]
    dense: Base = stack([member.clone() for member in members], dim)
    lazy = cast("Base", lazy_stack(members, dim))
    check(lazy, dense, kind)
    for _ in range(rng.randint(1, 6)):
        name, again = rng.choice(list(STEPS)), rng.random()
        yield name
        expected = outcome(STEPS[name], dense, again)
        found = outcome(STEPS[name], lazy, again)
        if isinstance(expected, Exception):
            assert isinstance(found, Exception), f"{expected!r} of the dense one alone"
            return
        if isinstance(found, Exception):
            raise found
        lazy, dense = found, expected
        check(lazy, dense, kind)


def test_lazy_stacks_of_tensor_classes_are_as_what_is_stacked_at_once(seeds: Seeds) -> None:
    for seed in seeds(80):
        for name in run(Random(seed)):
            print(name)  # shown by pytest when the test fails; the last one failed
            seeds.count("steps")
