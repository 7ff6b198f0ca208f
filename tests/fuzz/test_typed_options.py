"""Random tensor classes with options, beside plain containers of values converted plainly."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Iterable
from random import Random
from typing import TypeAlias, cast

import torch
from tests.fuzz.conftest import Seeds
from tests.fuzz.declared_options import (
    Kind,
    Refused,
    Shape,
    Values,
    content,
    given_by,
    random_kind,
    random_value,
)

from kd_core import (
    InvalidArgument,
    KdError,
    Locked,
    NonTensorData,
    TensorClass,
    TensorDict,
    TensorDictBase,
    cat,
    lazy_stack,
    stack,
)

Pair: TypeAlias = tuple[TensorClass, TensorDict]
METHODS = TensorClass
"""The methods of instances, which fields may hide."""


def model_of(kind: Kind, given: Values, batch: Shape) -> TensorDict:
    """Build the model of an instance."""
    values = {name: kind.converted(name, value, batch) for name, value in given.items()}
    values = {name: value for name, value in values.items() if kind.open or value is not None}
    try:
        return TensorDict(values, batch)
    except (KdError, RuntimeError, TypeError, ValueError) as error:
        raise Refused from error


def construct(rng: Random, kind: Kind, batch: Shape) -> Pair | None:
    """Construct both alike; None if both refuse."""
    names = [n for n, f in kind.fields.items() if f.init and not f.by_keyword]
    named = [n for n, f in kind.fields.items() if f.init]
    # A class of further keys takes what stands first as their source.
    split = 0 if "kw_only" in kind.options or kind.open else rng.randint(0, len(names))
    args = [random_value(rng, kind, name, batch) for name in names[:split]]
    kwargs = {
        name: random_value(rng, kind, name, batch)
        for name in named
        if name not in names[:split] and (rng.random() < 0.9 or not kind.fields[name].default)
    }
    try:
        given = given_by(kind, args, kwargs)
        if kind.open:  # defaults are read, not stored
            given = {name: given[name] for name in given if name in (*names[:split], *kwargs)}
        model = model_of(kind, given, batch)
    except (Refused, TypeError):
        model = None
    refusal = ""
    try:
        build: Callable[..., TensorClass] = kind.ours
        made = build(*args, **kwargs, batch_size=batch)
    except (KdError, TypeError, ValueError) as error:
        made, refusal = None, repr(error)
    assert (made is None) is (model is None), (refusal, kind, args, kwargs)
    if made is None or model is None:
        return None
    assert type(made) is kind.ours
    return made, model


def check(kind: Kind, ours: TensorClass, model: TensorDict) -> None:
    assert content(ours) == content(model)
    for name in kind.fields:
        if name not in model and kind.open:
            continue
        one: object = getattr(ours, name)
        other: object = TensorDict.__getitem__(model, name) if name in model else None
        plain = isinstance(one, (TensorDictBase, list)) or isinstance(other, list)
        assert plain or type(one) is type(other), name
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other), name  # type: ignore[arg-type]  # wrong for the type checker alone
    assert list(kind.fields) == [each.name for each in kind.ours.fields()]


def with_field(kind: Kind, model: TensorDict, name: str, value: object) -> TensorDict | None:
    """Return the model with another value; None if the class refuses it."""
    made = model.clone(recurse=False)
    try:
        new = kind.converted(name, value, tuple(model.batch_size))
        if new is None and not kind.open:
            return made.exclude(name)
        made.set(name, new)
    except (KdError, RuntimeError, TypeError, ValueError, Refused):
        return None
    return made


def write(rng: Random, kind: Kind, ours: TensorClass, model: TensorDict) -> Pair:
    """Give a field another value, in one of the ways to do so."""
    name = rng.choice(list(kind.fields))
    batch = tuple(model.batch_size)
    value = random_value(rng, kind, name, batch)
    frozen = "frozen" in kind.options
    ways: list[Callable[[], object]] = [
        lambda: setattr(ours, name, value),
        lambda: METHODS.__setitem__(ours, name, value),
        lambda: METHODS.set(ours, name, value),
        lambda: METHODS.update(ours, {name: value}),
        lambda: METHODS.set(ours, (name,), value),
    ]
    after = content(model)
    way = rng.randrange(len(ways))
    if isinstance(model.get(name), TensorDictBase) and way == 3:
        way = 2  # `update` merges containers
    if value is None:
        way = min(way, 2)  # the others store `None` as data
    # A copy is not locked, and takes values by key.
    kept = frozen and (way == 0 or ours.is_locked)
    new = None if kept else with_field(kind, model, name, value)
    try:
        ways[way]()
        done = True
    except Locked:
        assert frozen
        done = False
    except (KdError, TypeError, ValueError):
        done = False
    assert done is (new is not None), (way, name, value, ours)
    if not done:
        assert content(ours) == after, (way, name, value)
    return ours, model if new is None else new


def rows(rng: Random, kind: Kind, ours: TensorClass, model: TensorDict) -> Pair:
    if not model.batch_dims:
        return ours, model
    size = model.batch_size[0]
    index = rng.choice(
        [slice(None), slice(0, size - 1), torch.arange(size), torch.ones(size).bool(), None]
    )
    return ours[index], model[index]


def combined(rng: Random, kind: Kind, ours: TensorClass, model: TensorDict) -> Pair:
    if model.numel() > 30:
        return ours, model
    if model.batch_dims and rng.random() < 0.4:
        return cat([ours, ours]), cat([model, model])
    return stack([ours, ours]), stack([model, model])


def stacked_lazily(rng: Random, kind: Kind, ours: TensorClass, model: TensorDict) -> Pair:
    if model.numel() > 30:
        return ours, model
    made = cast("TensorClass", lazy_stack([ours, METHODS.clone(ours)]))
    assert isinstance(made, kind.ours)
    check(kind, made, stack([model, model]))
    return made.contiguous(), stack([model, model])


def copied(rng: Random, kind: Kind, ours: TensorClass, model: TensorDict) -> Pair:
    ways: list[Callable[[], TensorClass]] = [
        lambda: copy.copy(ours),
        lambda: copy.deepcopy(ours),
        lambda: pickle.loads(pickle.dumps(ours)),
        lambda: METHODS.clone(ours),
        lambda: METHODS.clone(ours, recurse=False),
        lambda: ours.__replace__(),
        lambda: METHODS.to(ours, "cpu"),
        lambda: METHODS.reshape(ours, *model.batch_size),
        lambda: METHODS.apply(ours, lambda leaf: leaf.clone()),
        # `unsqueeze` gives data a value for each row, as the peer does
        lambda: METHODS.reshape(ours, 1, *model.batch_size)[0],
    ]
    way = rng.randrange(len(ways))
    return ways[way](), model


def converted(rng: Random, kind: Kind, ours: TensorClass, model: TensorDict) -> Pair:
    """Convert to and fro; containers in a field that is declared as a class become one."""
    batch = tuple(model.batch_size)
    whole = TensorDict({}, batch)
    for name, declared in kind.fields.items():
        value: object = model.get(name)
        if value is None:
            continue
        if isinstance(value, TensorDictBase):
            plain = value.to_tensordict()
            hints = [each for each in declared.kinds if each != "None"]
            value = kind.rebuilt(plain, batch) if hints == ["Inner"] else plain
        whole.set(name, value)
    # A dict holds rows and numbers as they are, without what wrapped them.
    values = [model.get_non_tensor(key) for key, _ in model.non_tensor_items()]
    wrapped = [each for each in values if not isinstance(each, (str, type(None)))]
    plainly = not wrapped and rng.random() < 0.5
    refused = False
    try:
        entries: Iterable[tuple[str, object]] = whole.items()
        for name, held in entries:
            given = held.data if plainly and isinstance(held, NonTensorData) else held
            kind.converted(name, given, batch)
    except Refused:  # a plain container where a class is declared beside others, or a word
        refused = True
    try:
        if not plainly:
            made = kind.ours.from_tensordict(METHODS.to_tensordict(ours))
        else:
            made = kind.ours.from_dict(METHODS.to_dict(ours), batch)
    except InvalidArgument:
        assert refused
        return ours, model
    assert not refused
    return made, whole


def replaced(rng: Random, kind: Kind, ours: TensorClass, model: TensorDict) -> Pair:
    name = rng.choice(list(kind.fields))
    batch = tuple(model.batch_size)
    value = random_value(rng, kind, name, batch)
    new, before = with_field(kind, model, name, value), content(ours)
    try:
        made = ours.__replace__(**{name: value})
    except (KdError, TypeError, ValueError):
        made = None
    assert (made is None) is (new is None), (name, value, ours)
    assert content(ours) == before
    return (ours, model) if made is None or new is None else (made, new)


def merged(rng: Random, kind: Kind, ours: TensorClass, model: TensorDict) -> Pair:
    """Update with a copy of its own; write a row of it."""
    if "frozen" in kind.options:
        return ours, model
    METHODS.update(ours, METHODS.clone(ours))
    if model.batch_dims and model.batch_size[0] > 1:
        ours[0], model[0] = ours[1], model[1]
    return ours, model


STEPS = [write, write, write, rows, combined, stacked_lazily, copied, converted, replaced, merged]


def test_options_convert_as_plain_code_does(seeds: Seeds) -> None:
    for seed in seeds(60):
        rng = Random(seed)
        torch.manual_seed(seed)
        kind = random_kind(rng, seed)
        if kind is None:
            continue
        batch = rng.choice([(), (3,), (2, 1)])
        pair = None
        for _ in range(4):
            pair = construct(rng, kind, batch) or pair
        for _ in range(6):
            if pair is None:
                break
            check(kind, *pair)
            step = rng.choice(STEPS)
            try:
                pair = step(rng, kind, *pair)
                assert type(pair[0]) is kind.ours
                check(kind, *pair)
            except Exception as error:
                error.add_note(f"in `{step.__name__}` of {kind}")
                raise
            seeds.count(step.__name__)
        for name in ("ours", "theirs"):
            del sys.modules[f"kd_options_{name}_{seed}"]
