"""Random tensor classes, beside dataclasses with the same fields."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import ModuleType
from typing import TypeAlias, cast

import torch
from tests.fuzz.conftest import Seeds
from torch import Tensor

from kd_core import TensorClass, cat, stack

Maker: TypeAlias = Callable[..., object]
Values: TypeAlias = dict[str, object]
HEAD = """
{future}
import dataclasses
import typing
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import ClassVar, Generic, Literal, Optional, TypeVar, Union

import torch
from torch import Tensor

import kd_core
from kd_core import TensorClass, tensorclass

T = TypeVar("T")
"""
TENSORS = ["Tensor", "torch.Tensor", "Tensor | None", "Optional[Tensor]", "'Tensor'", "object"]
PLAIN = ["str", "str | None", "Literal['u', 'v']", "Union[str, int]", "typing.Any"]
NAMES = ["a", "b", "obs", "label", "x_1", "meta", "args", "data2", "n", "value", "self_"]


@dataclass
class Declared:
    """One field as text, and a value that it may have."""

    name: str
    line: str
    value: object


def random_field(rng: Random, name: str, batch: int, must_default: bool) -> Declared:
    """Declare a field, with or without a default."""
    value: object
    if rng.random() < 0.6:
        kind, value = rng.choice(TENSORS), torch.randint(9, (batch, 2)).float()
        defaults = [
            "None",
            "field(default=None)",
            f"field(default_factory=lambda: torch.ones({batch}))",
        ]
    else:
        kind, value = rng.choice(PLAIN), rng.choice(["u", "v"])
        defaults = ["'u'", "field(default='v')", "field(default_factory=lambda: 'u')"]
    given = ""
    if must_default or rng.random() < 0.3:
        given = f" = {rng.choice(defaults)}"
    elif rng.random() < 0.2:
        given = f" = field({rng.choice(['kw_only=True', 'init=False, default=None'])})"
    return Declared(name, f"{name}: {kind}{given}", value)


def body(rng: Random, names: list[str], batch: int, after_default: bool) -> list[Declared]:
    """Declare the fields of one class; fields after one with a default need one."""
    made: list[Declared] = []
    for name in names:
        field = random_field(rng, name, batch, after_default)
        made.append(field)
        after_default = after_default or (needs_no_value(field))
    return made


def needs_no_value(field: Declared) -> bool:
    return " = " in field.line and "kw_only" not in field.line and "init" not in field.line


def lines_of(fields: list[Declared], rng: Random, number: int) -> str:
    lines = [f"    {field.line}" for field in fields]
    if rng.random() < 0.2:
        lines.insert(rng.randint(0, len(lines)), "    SHARED: ClassVar[int] = 3")
    if rng.random() < 0.15:
        lines.insert(rng.randint(0, len(lines)), "    _: KW_ONLY")
    if rng.random() < 0.2:
        lines.append(f"    def method_{number}(self):\n        return {number}")
    return "\n".join(lines)


@dataclass
class Pair:
    """A tensor class, the dataclass beside it, and values for all fields."""

    ours: type[TensorClass]
    theirs: type
    values: Values
    batch: int


def built(rng: Random, number: int) -> Pair | None:
    """Write two modules that differ in what makes the class; None if a dataclass refuses."""
    batch = rng.choice([1, 3])
    names = rng.sample(NAMES, rng.randint(1, 6))
    cut = rng.randint(1, len(names)) if rng.random() < 0.4 else len(names)
    first = body(rng, names[:cut], batch, False)
    plain = [needs_no_value(field) for field in first]
    second = body(rng, names[cut:], batch, any(plain))
    if second and rng.random() < 0.3:  # redeclare one
        again = random_field(rng, first[0].name, batch, True)
        second.append(again)
    texts = [lines_of(first, rng, 0)] + ([lines_of(second, rng, 1)] if second else [])
    by_decorator, future = rng.random() < 0.3, rng.random() < 0.5
    values = {field.name: field.value for field in [*first, *second]}
    decorator = "@tensorclass" if by_decorator else ""
    try:
        theirs = module_of(texts, f"kd_fuzz_theirs_{number}", future, "@dataclass")
    except TypeError:  # a field without a default follows one with; a tensor class takes it
        return None
    ours = module_of(texts, f"kd_fuzz_ours_{number}", future, decorator)
    return Pair(cast("type[TensorClass]", ours), theirs, values, batch)


def module_of(texts: list[str], name: str, future: bool, decorator: str) -> type:
    """Run the source of the classes in a module, and return the last class."""
    source = HEAD.format(future="from __future__ import annotations" if future else "")
    for i, text in enumerate(texts):
        base = f"(C{i - 1})" if i else ("" if decorator else "(TensorClass)")
        source += f"\n{decorator}\nclass C{i}{base}:\n{text}\n"
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, name, "exec"), vars(module))  # the program is ours
    found: type = vars(module)[f"C{len(texts) - 1}"]
    return found


def random_call(rng: Random, pair: Pair) -> tuple[list[object], Values]:
    """Return arguments for the class, mostly right ones."""
    # By keyword a tensor class takes the fields, too, that it is not to be constructed with.
    names = [field.name for field in dataclasses.fields(pair.theirs) if field.init]
    split = rng.randint(0, len(names)) if rng.random() < 0.5 else 0
    args = [pair.values[name] for name in names[:split]]
    kwargs = {name: pair.values[name] for name in names[split:] if rng.random() < 0.85}
    change = rng.choice(["", "", "", "unknown", "doubled", "extra"])
    if change == "unknown":
        kwargs["nope"] = 1
    if change == "doubled" and split:
        kwargs[names[0]] = pair.values[names[0]]
    if change == "extra":
        args.append("more")
    return args, kwargs


def outcome(maker: Maker, args: list[object], kwargs: Values) -> object | None:
    """Return what is made; None if the arguments are refused."""
    try:
        return maker(*args, **kwargs)
    except TypeError:
        return None


def same(one: object, other: object) -> bool:
    if isinstance(other, Tensor):
        return isinstance(one, Tensor) and torch.equal(one, other)
    return type(one) is type(other) and one == other


def check_fields(ours: TensorClass, theirs: object) -> None:
    """Compare all fields of two instances."""
    for field in dataclasses.fields(theirs):  # type: ignore[arg-type]  # an instance
        expected = getattr(theirs, field.name)
        assert same(getattr(ours, field.name), expected), field.name


def check_calls(rng: Random, pair: Pair) -> TensorClass | None:
    """Construct both alike; return an instance if one was made."""
    made = None
    for _ in range(4):
        args, kwargs = random_call(rng, pair)
        theirs = outcome(pair.theirs, args, kwargs)
        ours = outcome(pair.ours, args, {**kwargs, "batch_size": [pair.batch]})
        assert (ours is None) is (theirs is None), (args, kwargs, ours, theirs)
        if ours is not None:
            assert isinstance(ours, pair.ours)
            check_fields(ours, theirs)
            made = ours
    return made


def check_round_trips(instance: TensorClass, pair: Pair) -> None:
    """Convert an instance to and fro, and compare."""
    kind = pair.ours
    for other in (
        copy.copy(instance),
        copy.deepcopy(instance),
        pickle.loads(pickle.dumps(instance)),
        instance.clone(),
        instance[:],
        kind.from_tensordict(instance.to_tensordict()),
        kind.from_dict(instance.to_dict(), [pair.batch]),
        instance.to(torch.float32),
        cat([instance[:1], instance[1:]]),
        instance.reshape(1, -1)[0],
        instance.__replace__(),
    ):
        assert type(other) is kind
        assert other.batch_size == instance.batch_size
        for field in kind.fields():
            assert same(getattr(other, field.name), getattr(instance, field.name)), field.name
    stacked = stack([instance, instance])
    assert type(stacked) is kind
    assert stacked.batch_size == (2, pair.batch)


def test_a_random_class_is_constructed_as_a_dataclass(seeds: Seeds) -> None:
    for seed in seeds(60):
        rng = Random(seed)
        torch.manual_seed(seed)
        pair = built(rng, seed)
        if pair is None:
            continue
        ours = [field.name for field in pair.ours.fields()]
        assert ours == [field.name for field in dataclasses.fields(pair.theirs)]
        instance = check_calls(rng, pair)
        if instance is not None:
            check_round_trips(instance, pair)
            seeds.count("instances")
        for name in ("kd_fuzz_ours", "kd_fuzz_theirs"):
            del sys.modules[f"{name}_{seed}"]
