"""Containers agree with nested dicts of tensors, whatever is done to them in whatever order."""

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, cast

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor
from torch.utils import _pytree as pytree

from kd_core import (
    InvalidArgument,
    KdError,
    KeyNotFound,
    LazyStackedTensorDict,
    Locked,
    MetaData,
    NonTensorData,
    NonTensorStack,
    ShapeMismatch,
    TensorDict,
    TensorDictBase,
    cat,
    lazy_stack,
    stack,
)

Path: TypeAlias = tuple[str, ...]
Model: TypeAlias = "dict[str, Tensor | str | Words | Model]"
Leaf: TypeAlias = "Tensor | str | Words"

NAMES = ("a", "b", "c")
PATHS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map(tuple)
TRAILING = st.sampled_from([(), (2,), (1, 3)])
NUMBERS = st.integers(0, 30)
MOST_ROWS = 24
VOCABULARY = ("to", "be", "to", "or", "m")
WORDS = st.integers(0, len(VOCABULARY) - 1)
INDICES: tuple[object, ...] = (
    0,
    -1,
    slice(1, None),
    slice(None, None, 2),
    None,
    Ellipsis,
    [0, 0],
    (Ellipsis, 0),
    (None, 0),
    (0, Ellipsis, None),
    (slice(None), slice(0, 1)),
)


@dataclass
class Words:
    """One value for each row: its position in the vocabulary, in which two are equal."""

    rows: Tensor

    def read(self) -> object:
        return _nested(self.rows.tolist())


def _nested(rows: object) -> object:
    return [_nested(row) for row in rows] if isinstance(rows, list) else VOCABULARY[cast(int, rows)]


def leaves(model: Model, path: Path = ()) -> Iterator[tuple[Path, Leaf]]:
    for key, value in model.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def mapped(
    model: Model, fn: Callable[[Tensor], Tensor], rows: Callable[[Tensor], Tensor] = torch.clone
) -> Model:
    """Apply a function to the tensors of a model, and another one to the rows of its words."""
    new: Model = {}
    for key, value in model.items():
        if isinstance(value, dict):
            new[key] = mapped(value, fn, rows)
        elif isinstance(value, Words):
            new[key] = Words(rows(value.rows))
        else:
            new[key] = fn(value) if isinstance(value, Tensor) else value
    return new


def plain(model: Model) -> dict[str, object]:
    """Return a model as nested dicts that a container takes."""
    return {
        key: plain(value) if isinstance(value, dict) else _bare(value)
        for key, value in model.items()
    }


def _bare(value: Leaf) -> object:
    return value.read() if isinstance(value, Words) else value


def of_one_row(model: Model) -> Model:
    """Return what a model without batch dimensions reads as when it was given as bare values."""
    new: Model = {}
    for key, value in model.items():
        one = isinstance(value, str)
        bare = Words(torch.tensor(VOCABULARY.index(cast(str, value)))) if one else value
        new[key] = of_one_row(bare) if isinstance(bare, dict) else bare
    return new


def find(model: Model, path: Path) -> "Leaf | Model | None":
    value: Leaf | Model | None = model
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def goes_through_leaf(model: Model, path: Path) -> bool:
    found = (find(model, path[:depth]) for depth in range(1, len(path)))
    return any(value is not None and not isinstance(value, dict) for value in found)


def plant(model: Model, path: Path, value: "Leaf | Model") -> None:
    for part in path[:-1]:
        model = cast("Model", model.setdefault(part, {}))
    model[path[-1]] = value


def remove(model: Model, path: Path) -> "Leaf | Model":
    for part in path[:-1]:
        model = cast("Model", model[part])
    return model.pop(path[-1])


class Oracle(RuleBasedStateMachine):
    """A container, and beside it the nested dict that it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.locked = False

    @initialize(kind=st.sampled_from(["dense", "stacked", "scalar"]))
    def start(self, kind: str) -> None:
        self.batch: tuple[int, ...] = () if kind == "scalar" else (2, 3)
        count = math.prod(self.batch)
        words = Words(torch.arange(count).reshape(self.batch) % len(VOCABULARY))
        inner: Model = {"c": self.fresh((2,)), "word": words, "unit": "m"}
        self.model: Model = {"a": self.fresh(()), "b": inner}
        td = TensorDict(plain(copy.deepcopy(self.model)), self.batch)
        td["b", "unit"] = MetaData("m")  # one value, whatever rows are made
        self.td: TensorDictBase = lazy_stack(td.unbind(0)) if kind == "stacked" else td

    def fresh(self, trailing: tuple[int, ...]) -> Tensor:
        shape = (*self.batch, *trailing)
        self.count += 1
        return torch.arange(float(math.prod(shape))).reshape(shape) + self.count

    def become(self, td: TensorDictBase, model: Model, batch: tuple[int, ...]) -> None:
        """Go on with a result, which may be locked: the contract of each kind says when."""
        self.td, self.model, self.batch, self.locked = td, model, batch, td.is_locked

    def change(self, do: Callable[[], object], done: Callable[[], object]) -> None:
        """Change the structure, or be refused because it is locked."""
        if self.locked:
            with pytest.raises(Locked):
                do()
        else:
            do()
            done()

    def move(
        self, ours: Callable[[TensorDictBase], TensorDictBase], rows: Callable[[Tensor], Tensor]
    ) -> None:
        """Rearrange rows: the model does with row numbers what the container does with rows."""
        numbers = rows(torch.arange(math.prod(self.batch)).reshape(self.batch))
        if numbers.numel() > MOST_ROWS:
            return
        ndim = len(self.batch)

        def take(leaf: Tensor) -> Tensor:
            return leaf.reshape(-1, *leaf.shape[ndim:])[numbers]

        self.become(ours(self.td), mapped(self.model, take, take), tuple(numbers.shape))

    def existing(self, number: int) -> Path:
        """A path that is there, a container's or a leaf's, picked by a number."""
        paths = [
            path[:depth] for path, _ in leaves(self.model) for depth in range(1, 1 + len(path))
        ]
        return paths[number % len(paths)] if paths else ("none",)

    @invariant()
    def it_is_what_it_should_be(self) -> None:
        assert tuple(self.td.batch_size) == self.batch
        assert self.td.is_locked is self.locked
        compare(self.td, self.model, self.batch)


class Keys(Oracle):
    """Changes of keys and of what they hold."""

    @rule(path=PATHS, trailing=TRAILING, data=st.booleans())
    def write(self, path: Path, trailing: tuple[int, ...], data: bool) -> None:
        value = "to" if data else self.fresh(trailing)
        mine: Leaf = value.clone() if isinstance(value, Tensor) else value
        if data and not self.batch:
            mine = Words(torch.tensor(0))  # of the one row, not of a batch
        if goes_through_leaf(self.model, path):
            with pytest.raises(KeyNotFound if not self.locked else KdError):
                self.td[path] = value
        else:
            self.change(lambda: self.td.set(path, value), lambda: plant(self.model, path, mine))

    @rule(path=PATHS, nested=st.booleans())
    def write_what_does_not_fit(self, path: Path, nested: bool) -> None:
        if self.batch:
            value = torch.zeros(self.batch[0] + 1, 7)
            with pytest.raises(KdError):
                self.td[path] = {"a": value} if nested else value

    @rule(path=PATHS, pick=NUMBERS, there=st.booleans())
    def delete(self, path: Path, pick: int, there: bool) -> None:
        path = self.existing(pick) if there else path
        if find(self.model, path) is None:
            with pytest.raises(Locked if self.locked else KeyNotFound):
                del self.td[path]
        else:
            self.change(lambda: self.td.del_(path), lambda: remove(self.model, path))

    @rule(trailing=TRAILING, name=st.sampled_from(NAMES))
    def update(self, trailing: tuple[int, ...], name: str) -> None:
        first, second = self.fresh(trailing), self.fresh(())
        source = {name: first.clone(), "d": {"e": second.clone()}}

        def done() -> None:
            plant(self.model, (name,), first)
            plant(self.model, ("d", "e"), second)

        self.change(lambda: self.td.update(source), done)

    @rule(name=st.sampled_from(NAMES))
    def fail_to_update(self, name: str) -> None:
        if self.batch:
            source = {name: self.fresh(()), "d": {"e": torch.zeros(self.batch[0] + 1)}}
            with pytest.raises((ShapeMismatch, Locked)):
                self.td.update(source)

    @rule(path=PATHS, number=NUMBERS, there=st.booleans())
    def write_in_place(self, path: Path, number: int, there: bool) -> None:
        path = self.existing(number) if there else path
        found = find(self.model, path)
        if isinstance(found, Tensor):
            self.td.set_(path, float(number))
            found.fill_(number)
        elif found is None:
            with pytest.raises(KeyNotFound):
                self.td.set_(path, float(number))

    @rule(number=NUMBERS)
    def update_in_place(self, number: int) -> None:
        source = mapped(self.model, lambda x: torch.full_like(x, number))
        self.td.update_(plain(source))
        self.model = source

    @rule(picks=st.lists(NUMBERS, min_size=1, max_size=4), missing=PATHS)
    def select(self, picks: list[int], missing: Path) -> None:
        found = [path for path in map(self.existing, picks) if find(self.model, path) is not None]
        if find(self.model, missing) is None:
            with pytest.raises(KeyNotFound):
                self.td.select(*found, missing)
        kept: Model = {}
        for path in sorted(found, key=len):
            if not goes_through_leaf(kept, path) and find(kept, path) is None:
                plant(kept, path, copy.deepcopy(cast("Model", find(self.model, path))))
        self.become(self.td.select(*found), kept, self.batch)

    @rule(pick=NUMBERS)
    def exclude(self, pick: int) -> None:
        path = self.existing(pick)
        kept = copy.deepcopy(self.model)
        if find(kept, path) is not None:
            remove(kept, path)
        self.become(self.td.exclude(path), kept, self.batch)

    @rule(pick=NUMBERS, new=PATHS, there=st.booleans())
    def rename(self, pick: int, new: Path, there: bool) -> None:
        old = self.existing(pick) if there else ("none", *new)
        if find(self.model, old) is None:
            with pytest.raises(Locked if self.locked else KeyNotFound):
                self.td.rename_key_(old, new)
        elif old == new[: len(old)] or new == old[: len(new)] or goes_through_leaf(self.model, new):
            return
        else:
            self.change(
                lambda: self.td.rename_key_(old, new),
                lambda: plant(self.model, new, remove(self.model, old)),
            )

    @rule()
    def flatten_and_unflatten(self) -> None:
        flat = self.td.flatten_keys("/")
        expected = dict(leaves(self.model))
        assert set(flat.keys()) == {"/".join(path) for path in expected}
        model: Model = {}
        for path, value in expected.items():
            plant(model, path, value)
        self.become(flat.unflatten_keys("/"), model, self.batch)

    @rule()
    def lock(self) -> None:
        self.td.lock_()
        self.locked = True

    @rule()
    def unlock(self) -> None:
        self.td.unlock_()
        self.locked = False


class Rows(Oracle):
    """Changes of the batch."""

    @rule(index=st.sampled_from(INDICES))
    def index(self, index: object) -> None:
        rows = torch.arange(math.prod(self.batch)).reshape(self.batch)
        try:
            rows[index]  # type: ignore[index]  # any of the above
        except IndexError:
            with pytest.raises(KdError):
                self.td[index]  # type: ignore[call-overload]  # any of the above
        else:
            self.move(lambda td: td[index], lambda x: x[index])  # type: ignore[call-overload, index]  # any index

    @rule(index=st.sampled_from(INDICES), number=NUMBERS)
    def write_rows(self, index: object, number: int) -> None:
        numbers = torch.arange(math.prod(self.batch)).reshape(self.batch)
        try:
            rows = numbers[index].reshape(-1)  # type: ignore[index]  # any index
        except IndexError:
            with pytest.raises(KdError):
                self.td[index] = number
            return
        self.td[index] = number
        ndim = len(self.batch)

        def written(leaf: Tensor) -> Tensor:
            flat = leaf.reshape(-1, *leaf.shape[ndim:]).clone()
            flat[rows] = number
            return flat.reshape(leaf.shape)

        self.model = mapped(self.model, written)

    @rule(index=st.sampled_from(INDICES), pick=NUMBERS, word=WORDS)
    def write_words(self, index: object, pick: int, word: int) -> None:
        path = self.existing(pick)
        found = find(self.model, path)
        if not isinstance(found, Words):
            return
        rows = found.rows.clone()
        try:
            rows[index] = word  # type: ignore[index]  # any index
        except IndexError:
            with pytest.raises(KdError):
                self.td.set_at_(path, VOCABULARY[word], index)  # type: ignore[arg-type]  # any
            return
        try:
            self.td.set_at_(path, VOCABULARY[word], index)  # type: ignore[arg-type]  # any
        except InvalidArgument:
            assert holds_values_of_rows(self.td)
        else:
            plant(self.model, path, Words(rows))

    @rule()
    def reshape(self) -> None:
        self.move(lambda td: td.reshape(-1), lambda x: x.reshape(-1))

    @rule()
    def reverse_dimensions(self) -> None:
        dims = tuple(reversed(range(len(self.batch))))
        self.move(lambda td: td.permute(dims), lambda x: x.permute(dims))

    @rule(dim=st.integers(-1, 0))
    def unsqueeze(self, dim: int) -> None:
        if len(self.batch) < 4:
            self.move(lambda td: td.unsqueeze(dim), lambda x: x.unsqueeze(dim))

    @rule()
    def squeeze(self) -> None:
        self.move(lambda td: td.squeeze(), lambda x: x.squeeze())

    @rule()
    def expand(self) -> None:
        shape = (2, *self.batch)
        self.move(lambda td: td.expand(*shape), lambda x: x.expand(*shape))
        self.become(self.td.clone(), mapped(self.model, torch.clone), self.batch)

    @rule(dim=st.sampled_from([0, -1]))
    def stack_with_itself(self, dim: int) -> None:
        self.move(lambda td: stack([td, td], dim), lambda x: torch.stack([x, x], dim))

    @rule()
    def join_with_itself(self) -> None:
        if self.batch:
            self.move(lambda td: cat([td, td], 0), lambda x: torch.cat([x, x], 0))

    @rule(size=st.integers(1, 2), last=st.booleans())
    def split(self, size: int, last: bool) -> None:
        if self.batch and self.batch[0]:
            at = -1 if last else 0
            self.move(lambda td: td.split(size)[at], lambda x: torch.split(x, size)[at])

    @rule(dim=st.sampled_from([0, -1]))
    def see_rows_as_a_lazy_stack(self, dim: int) -> None:
        if self.batch and self.batch[dim]:
            self.move(lambda td: lazy_stack(td.unbind(dim), dim % td.ndim), lambda x: x)


class Values(Oracle):
    """Calculation and copies."""

    @rule(number=st.integers(1, 3))
    def calculate(self, number: int) -> None:
        result = (self.td + number) * self.td - self.td / 2
        expected = mapped(self.model, lambda x: ((x + number) * x - x / 2) % 97)
        self.become(result.apply(lambda x: x % 97), expected, self.batch)

    @rule(number=NUMBERS)
    def calculate_in_place(self, number: int) -> None:
        self.td.add_(number)
        self.model = mapped(self.model, lambda x: x + number)

    @rule(shallow=st.booleans())
    def clone(self, shallow: bool) -> None:
        self.become(self.td.clone(recurse=not shallow), mapped(self.model, torch.clone), self.batch)

    @rule()
    def go_through_dicts(self) -> None:
        td = TensorDict.from_dict(self.td.clone().to_dict(), self.batch)
        self.become(td, self.model if self.batch else of_one_row(self.model), self.batch)

    @rule(deep=st.booleans())
    def go_through_bytes(self, deep: bool) -> None:
        self.td = copy.deepcopy(self.td) if deep else pickle.loads(pickle.dumps(self.td))
        self.locked = self.locked and not deep

    @rule()
    def go_through_leaves(self) -> None:
        values, spec = pytree.tree_flatten(self.td.clone())
        self.become(pytree.tree_unflatten(values, spec), self.model, self.batch)


class Containers(Keys, Rows, Values):
    """All of them, in any order."""


def holds_values_of_rows(td: TensorDictBase) -> bool:
    """Whether there are values of single rows, which are set and not written in place."""
    members = td.unbind(td.stack_dim) if isinstance(td, LazyStackedTensorDict) else ()
    found: list[object] = [*members, *td.values()]
    if not td.ndim and any(type(entry) is NonTensorData for entry in found):
        return True
    return any(holds_values_of_rows(each) for each in found if isinstance(each, TensorDictBase))


def of_rows(td: TensorDictBase, key: str) -> object:
    """Return the value of each row."""
    found: object = td.get(key)
    assert isinstance(found, (NonTensorData, NonTensorStack))
    return found.tolist()


def flat(values: object) -> list[object]:
    return [one for each in values for one in flat(each)] if isinstance(values, list) else [values]


def compare(td: TensorDictBase, model: Model, batch: tuple[int, ...]) -> None:
    assert set(td.keys()) == model.keys()
    assert tuple(td.batch_size)[: len(batch)] == batch
    for key, expected in model.items():
        found: object = td[key]
        if isinstance(expected, dict):
            assert isinstance(found, TensorDictBase)
            compare(found, expected, batch)
        elif isinstance(expected, Tensor):
            assert isinstance(found, Tensor)
            assert torch.equal(found, expected), key
        elif isinstance(expected, Words):
            # equal values are one for all rows, or one for each: by how they came there
            assert of_rows(td, key) == expected.read(), key
        else:
            assert set(flat(of_rows(td, key))) <= {expected}, key


TestContainers = Containers.TestCase
TestContainers.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
)
