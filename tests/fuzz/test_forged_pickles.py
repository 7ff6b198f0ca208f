"""Forged pickles that `torch.load(weights_only=True)` reads: a clear error, or a sound container.

A pickle of a container is taken apart into the calls that restore it. Some of their arguments are
changed: batch sizes, keys, shapes, dtypes, types, whole calls; state is added, and instances that
no function made. What is loaded all the same must hold together.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from tests.fuzz.conftest import Seeds
from torch import Tensor

from kd_core import (
    FormatError,
    KdError,
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    TensorClass,
    TensorDict,
    TensorDictBase,
    UnbatchedTensor,
    is_non_tensor,
    lazy_stack,
)
from kd_core._containers.dense import restore_dense
from kd_core._containers.lazy_stack import restore_stack
from kd_core._containers.non_tensor import restore_row_of_batch
from kd_core._containers.non_tensor_stack import restore_rows
from kd_core._descriptor import restore_descriptor
from kd_core._leaves.packing import restore_from_bits
from kd_core._nodes import Node
from kd_core._shapes import restore_size
from kd_core._unbatched import restore_unbatched

CALLED: list[object] = []


class Own(TensorDict):
    """A container with attributes of its own, whose constructor must not be called."""

    note: object

    def __init__(self, *args: Any, **options: Any) -> None:
        CALLED.append(args)
        super().__init__(*args, **options)


class Sample(TensorClass):
    """A tensor class whose author's code must not be called."""

    x: Tensor
    y: Tensor | None = None

    def __post_init__(self) -> None:
        CALLED.append(self)


class Call:
    """Pickled as a call, with state for what it returns."""

    def __init__(self, function: object, args: list[object], state: object = None) -> None:
        self.function, self.args, self.state = function, args, state

    def __reduce__(self) -> tuple[Any, ...]:
        state = () if self.state is None else (self.state,)
        return self.function, tuple(self.args), *state


class Made(Call):
    """Pickled as an instance that no function made: `cls.__new__(cls, *args)`."""

    if not TYPE_CHECKING:

        @property
        def __class__(self) -> object:
            """The class that it pretends to be of, which pickle compares."""
            return self.function

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        state = () if self.state is None else (self.state,)
        return __newobj__, (self.function, *self.args), *state


def __newobj__(cls: type, *args: object) -> object:  # pickle knows it by this name
    return cls.__new__(cls, *args)


def taken_apart(value: object) -> object:
    """Return the calls that restore a value, with lists that may be changed."""
    if isinstance(value, dict) and type(value) is dict:
        return {key: taken_apart(each) for key, each in value.items()}
    if type(value) in (list, tuple, torch.Size):
        return [taken_apart(each) for each in cast("list[object]", value)]
    if isinstance(value, Node) or type(value).__name__ in ("LeafOfBits", "NamedSize", "Descriptor"):
        function, args, *state = cast("Any", value.__reduce_ex__(2))
        return Call(function, [taken_apart(each) for each in args], *state)
    return value


def places(item: object, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """List every place of a value: what holds it, and its key."""
    held = item.args if isinstance(item, Call) else item
    if isinstance(held, (dict, list)) and all(held is not holder for holder, _ in found):
        for key, each in held.items() if isinstance(held, dict) else enumerate(held):
            found.append((held, key))
            places(each, found)
    return found


KINDS: list[Any] = [
    *(TensorDict, Own, Sample, LazyStackedTensorDict, TensorDictBase, TensorClass),
    *(NonTensorData, MetaData, UnbatchedTensor),
]
FUNCTIONS: list[Callable[..., object]] = [
    *(restore_dense, restore_stack, restore_descriptor, restore_row_of_batch, restore_rows),
    *(restore_unbatched, restore_from_bits, restore_size),
]
PLAIN: list[object] = [
    *(0, 1, 2, 3, -1, 1 << 62, 1 << 63, 1 << 70, 3.0, True, None, "a", "", "uint16", "load"),
    *([], [3], [2, 3], [3.0], [True], ["3"], [-3], {}, {"a": 1}, {3: 4}, b"x", torch.float32),
]


def some_value(rng: Random, whole: object) -> object:
    """Return what stands in a forged place."""
    draw = rng.random()
    if draw < 0.35:
        return rng.choice(PLAIN)
    if draw < 0.5:
        shape = rng.choice([(), (3,), (2, 3), (3, 0), (4,), (1,)])
        return torch.zeros(shape).to(rng.choice([torch.float32, torch.int16, torch.bool]))
    if draw < 0.6:
        return rng.choice([torch.device("cpu"), torch.device("meta"), torch.device("cuda", 3)])
    if draw < 0.7:
        return rng.choice(KINDS)
    if draw < 0.8:
        return Made(
            rng.choice(KINDS), [], rng.choice([None, {"_kd_entries": {}}, (None, {"a": 1})])
        )
    holder, key = rng.choice(places(whole, [([whole], 0)]))
    other = holder[key]
    if draw < 0.9 or not isinstance(other, Call):
        return other
    return Call(rng.choice([*FUNCTIONS, *KINDS]), list(other.args))


def forge(whole: list[object], rng: Random) -> None:
    """Change a few places."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        all_places = places(whole, [])
        if not all_places:
            return
        holder, key = rng.choice(all_places)
        kind, value = rng.random(), holder[key]
        if kind < 0.1:
            del holder[key]
        elif kind < 0.2 and isinstance(holder, list):
            holder.insert(key, some_value(rng, whole))
        elif kind < 0.3 and isinstance(holder, dict):
            holder[rng.choice(["a", "", 3, None, ("a", "b"), "n", b"k"])] = holder.pop(key)
        elif kind < 0.5 and isinstance(value, Call) and value.function is not restore_from_bits:
            entries = {"a": torch.zeros(7), "x": 3}
            states: list[object] = [
                *({"_kd_entries": entries, "_kd_desc": None}, (None, {"_kd_entries": entries})),
                *(
                    (None, {"_kd_desc": None}),
                    (None, {"_members": []}),
                    (None, {"data": 1}),
                    3,
                    {3: 4},
                ),
                *((None, {"_tensor": torch.zeros(5)}), {"note": "x"}, (None, {"_kd_nested": True})),
            ]
            value.state = rng.choice(states)
        else:
            holder[key] = some_value(rng, whole)


def original(rng: Random) -> object:
    """Return a random container of some kind."""
    batch = rng.choice([(), (3,), (2, 3), (0,)])
    td = TensorDict({"a": torch.randn(*batch, 2), "b": torch.zeros(batch).short()}, batch)
    for key in rng.sample(["n", "word", "words", "u", "bits", "stack"], rng.randint(0, 4)):
        if key == "n":
            td["n"] = TensorDict({"c": torch.ones(*batch, 1)}, batch)
        elif key == "word":
            td["word"] = rng.choice([NonTensorData("x", batch), MetaData("x", batch)])
        elif key == "words" and batch == (3,):
            td["words"] = ["x", "y", "z"]
        elif key == "u":
            td["u"] = UnbatchedTensor(torch.ones(5))
        elif key == "bits":
            td["bits"] = torch.zeros(batch).to(torch.uint16)
        elif batch == (3,):
            td["stack"] = lazy_stack([TensorDict({"r": torch.zeros(n)}) for n in (1, 2, 3)])
    kind = rng.random()
    if kind < 0.2:
        own = Own(td, batch)
        own.note = "x"
        return own
    if kind < 0.4:
        return Sample(x=torch.zeros(batch), batch_size=batch)
    if kind < 0.6:
        return lazy_stack([td, td.clone()], rng.choice([0, len(batch)]))
    if kind < 0.8 and batch:
        td.names = ["r", "s"][: len(batch)]
    return td.lock_() if rng.random() < 0.3 else td


def loaded(whole: object) -> object:
    file = io.BytesIO()
    torch.save(whole, file, pickle_protocol=2)
    file.seek(0)
    return torch.load(file, weights_only=True)


def check_sound(value: object, seeds: Seeds, seen: list[object]) -> None:
    """Check that all containers in a value hold together."""
    if isinstance(value, (dict, list, tuple)):
        if all(value is not each for each in seen):  # a pickle may hold a list in itself
            seen.append(value)
            for each in value.values() if isinstance(value, dict) else value:
                check_sound(each, seeds, seen)
    elif isinstance(value, TensorDictBase):
        seeds.count("containers")
        check_entries(value)
        assert repr(value)
        copied = value.clone()
        assert copied.batch_size == value.batch_size
        assert [*copied.keys(True)] == [*value.keys(True)]
        assert pickle.dumps(copied)
        if value.batch_size and value.batch_size[0] and not value.is_locked:
            assert value[0].batch_size == value.batch_size[1:]
    elif is_non_tensor(value) or isinstance(value, UnbatchedTensor):
        assert repr(value)


def check_entries(td: TensorDictBase) -> None:
    batch = td.batch_size
    assert all(type(size) is int or type(size).__name__ == "NamedSize" for size in batch)
    assert all(type(size) is not float for size in TensorDict({}, [3]).batch_size)
    assert td.names == [None] * len(batch) or len(td.names) == len(batch)
    for key in td.keys():  # noqa: SIM118  # a container iterates over rows
        assert type(key) is str
        if isinstance(td, LazyStackedTensorDict):  # whose entries may be ragged
            for member in td.unbind(td.stack_dim):
                check_entries(member)
            return
        value = cast(Any, td.get(key))
        if isinstance(value, (str, list)):  # a field of a tensor class is its value
            continue
        size = value.shape if isinstance(value, Tensor) else value.batch_size
        assert tuple(size[: len(batch)]) == tuple(batch)
        if isinstance(value, TensorDictBase):
            check_entries(value)


def test_a_forged_pickle_is_refused_or_gives_a_sound_container(seeds: Seeds) -> None:
    for seed in seeds(100):
        rng = Random(seed)
        torch.manual_seed(seed)
        whole = [taken_apart(original(rng))]
        check_sound(loaded(whole), seeds, [])
        forge(whole, rng)
        try:
            file = io.BytesIO()
            torch.save(whole, file, pickle_protocol=2)
        except (RecursionError, pickle.PicklingError, TypeError, ValueError, AttributeError):
            continue  # it cannot be written
        CALLED.clear()
        file.seek(0)
        try:
            found = torch.load(file, weights_only=True)
        except (KdError, pickle.UnpicklingError):
            seeds.count("refused")
            assert not CALLED
            continue
        assert not CALLED
        seeds.count("loaded")
        check_sound(found, seeds, [])


@pytest.mark.parametrize("cls", [Sample, Own, TensorDict, LazyStackedTensorDict])
def test_a_pickle_neither_calls_a_class_nor_makes_an_instance(cls: type) -> None:
    CALLED.clear()
    for forged in (Call(cls, [torch.zeros(2)]), Made(cls, []), Made(cls, [torch.zeros(2)])):
        with pytest.raises(FormatError, match="restored by a function"):
            loaded(forged)
    assert not CALLED


def test_attributes_of_a_subclass_are_restored_without_its_constructor() -> None:
    own = Own({"a": torch.zeros(3)}, [3])
    own.note = {"x": 1}
    CALLED.clear()
    found = cast(Any, loaded(own))
    assert (type(found), found.note, found["a"].shape) == (Own, {"x": 1}, (3,))
    assert not CALLED
