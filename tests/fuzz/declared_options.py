"""Random tensor classes with options, and plainly written what the options do to values.

The model of an instance is a plain container of converted values. Nothing here asks a tensor class.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from types import ModuleType
from typing import TypeAlias, cast

import torch
from tests.fuzz.data import of_rows
from torch import Tensor

from kd_core import NonTensorData, NonTensorStack, TensorClass, TensorDict, TensorDictBase

Shape: TypeAlias = tuple[int, ...]
Values: TypeAlias = dict[str, object]
HEAD = """
{future}
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal, Optional, Union

import torch
from torch import Tensor

from kd_core import TensorClass, TypedTensorDict, tensorclass

class Inner(TensorClass{inner}):
    x: Tensor

"""
DATA = {"str": str, "int": int, "float": float, "bool": bool, "complex": complex}
CALLED = {**DATA, "list": list}
CASTS = ["", "", "autocast", "autocast", "nocast", "tensor_only"]
NAMES = ["a", "b", "c", "obs", "meta", "n", "label"]
SHADOWING = ["values", "sum", "view", "get", "names", "shape", "update", "stack", "keys"]


class Refused(Exception):
    """A value that a class must not take."""


@dataclass
class Declared:
    """One field.

    Attributes:
        name: Its name.
        kinds: The names of its types; one that is not known is not checked.
        default: The source of its default; empty if it has none.
        value: The default itself.
        by_keyword: Whether it is given by name alone.
        init: Whether the constructor takes it.
    """

    name: str
    kinds: list[str]
    default: str = ""
    value: object = None
    by_keyword: bool = False
    init: bool = True

    def line(self, rng: Random) -> str:
        hint = " | ".join(self.kinds)
        if self.kinds[1:] == ["None"] and rng.random() < 0.5:
            hint = f"Optional[{self.kinds[0]}]"
        if rng.random() < 0.2:
            hint = f'"{hint}"'
        options = []
        if self.by_keyword:
            options.append("kw_only=True")
        if not self.init:
            options.append("init=False")
        if self.default and (options or rng.random() < 0.3):
            factory = rng.random() < 0.5
            options.append(
                f"default_factory=lambda: {self.default}" if factory else f"default={self.default}"
            )
        if options:
            return f"    {self.name}: {hint} = field({', '.join(options)})"
        return f"    {self.name}: {hint}" + (f" = {self.default}" if self.default else "")


def random_field(rng: Random, name: str) -> Declared:
    kinds = [rng.choice(["Tensor", "Tensor", "Inner", "Any", "list", *DATA])]
    if rng.random() < 0.3:
        kinds.append(rng.choice(["None", "None", "str", "Tensor"]))
    made = Declared(name, list(dict.fromkeys(kinds)))
    if rng.random() < 0.3:
        made.default, made.value = rng.choice(
            [("None", None), ("'u'", "u"), ("3", 3), ("0.5", 0.5)]
        )
    made.by_keyword = rng.random() < 0.15
    made.init = not (made.default and rng.random() < 0.15)
    return made


NUMBERS = {"bool", "int", "float"}


@dataclass
class Kind:
    """A tensor class, a dataclass with its fields, and its options."""

    ours: type[TensorClass]
    theirs: type
    inner: type[TensorClass]
    fields: dict[str, Declared]
    options: set[str] = field(default_factory=set)
    open: bool = False

    def converted(self, name: str, value: object, batch: Shape) -> object:
        """Return what a field holds after it was given a value."""
        plain = value.data if isinstance(value, NonTensorData) else value
        if plain is None and not self.fields[name].init:  # until it is set
            return value
        kinds = self.fields[name].kinds
        hints = [kind for kind in kinds if kind != "None"]
        if "checked" in self.options and "autocast" not in self.options:
            self.check(kinds, value)
        if "autocast" in self.options and len(hints) == 1:
            optional = len(kinds) > 1
            plainly = not optional
            plainly = plainly or (hints[0] == "Inner" and not isinstance(value, TensorDict))
            value = self.cast(hints[0], value, batch) if plainly else value
        if "autocast" in self.options and name in self.fields and hints != ["Inner"]:
            # A list or a dict that is not cast is one value.
            value = NonTensorData(value) if type(value) in (list, dict) else value
        if "autocast" in self.options and "checked" in self.options:
            self.check(kinds, value)
        stored = isinstance(value, (Tensor, Mapping, TensorDictBase, NonTensorData))
        if "nocast" in self.options and not (stored or value is None or isinstance(value, list)):
            return NonTensorData(value)
        rows = flat_rows(plain) if isinstance(plain, NonTensorStack) else [plain]
        if "tensor_only" in self.options and all(row is None for row in rows):
            return value  # wrapped or not, it is no value
        if "tensor_only" in self.options and isinstance(value, (NonTensorData, NonTensorStack)):
            return as_tensor(plain if isinstance(value, NonTensorData) else value.tolist())
        if "tensor_only" in self.options and not stored and value is not None:
            return as_tensor(value)
        converts = self.open or {"autocast", "checked", "nocast", "tensor_only"} & self.options
        if batch and not converts and type(value) in (bool, int, float) and NUMBERS & {*kinds}:
            return NonTensorData(value)  # it has no rows, and is kept as it is
        return value

    def cast(self, hint: str, value: object, batch: Shape) -> object:
        if isinstance(value, NonTensorData):
            value = value.data if hint in CALLED else value
        if isinstance(value, NonTensorStack) and hint in DATA:
            for row in flat_rows(value):  # they are what they were cast to, and are kept
                assert row is None or type(row) is DATA[hint]
            return value
        if value is None or isinstance(value, (NonTensorData, NonTensorStack)):
            return value
        if hint == "Tensor":
            stored = isinstance(value, (Tensor, Mapping, TensorDictBase))
            return value if stored else as_tensor(value)
        is_container = isinstance(value, TensorDictBase)
        if hint in CALLED and not isinstance(value, dict) and (hint in DATA or not is_container):
            number = hint not in {"str", "list"}
            try:
                plain = value.item() if number and isinstance(value, Tensor) else value
                return NonTensorData(CALLED[hint](plain))
            except (TypeError, ValueError, RuntimeError) as error:
                raise Refused from error
        nested = isinstance(value, (dict, TensorDict))
        return self.rebuilt(value, batch) if hint == "Inner" and nested else value

    def rebuilt(self, value: object, batch: Shape) -> TensorClass:
        """Return an instance of the inner class with the content of a container or a dict."""
        if isinstance(value, TensorDict):
            batch = tuple(value.batch_size)
        build: Callable[..., TensorClass] = self.inner
        return build(x=cast("Values", value)["x"], batch_size=batch)

    def check(self, kinds: list[str], value: object) -> None:
        """Refuse a value of another type, unless containers store values of the type so."""
        if "Any" in kinds:
            return
        rows = [value]
        if isinstance(value, NonTensorData):
            rows = [value.data]
        if isinstance(value, NonTensorStack):
            rows = flat_rows(value) if "list" not in kinds else [[]]
        known: dict[str, type] = {
            "Tensor": Tensor,
            "Inner": self.inner,
            "None": type(None),
            "list": list,
            **DATA,
        }
        types = tuple(known[kind] for kind in kinds)
        whole = isinstance(value, Tensor) and "nocast" not in self.options
        for row in rows:
            if isinstance(row, types) or ("float" in kinds and isinstance(row, int)):
                continue
            if isinstance(row, Tensor) and "list" in kinds:
                continue
            if not (whole and isinstance(row, Tensor) and kinds_of(row) & set(kinds)):
                raise Refused


def kinds_of(numbers: Tensor) -> set[str]:
    """Return the types of which the numbers of a tensor are, as type checkers compare them."""
    if numbers.is_complex():
        return {"complex"}
    if numbers.is_floating_point():
        return {"complex", "float"}
    return {"complex", "float", "int"} | ({"bool"} if numbers.dtype is torch.bool else set())


def flat_rows(value: NonTensorStack) -> list[object]:
    rows: list[object] = [value.tolist()]
    for _ in value.batch_size:
        rows = [row for level in rows for row in cast("list[object]", level)]
    return rows


def as_tensor(value: object) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise Refused from error


def random_kind(rng: Random, number: int) -> Kind | None:
    """Write a class with options and a dataclass; None if a dataclass refuses the fields."""
    options = {option for option in ("checked", "frozen", "kw_only") if rng.random() < 0.25}
    options |= {rng.choice(CASTS)} - {""}
    names = rng.sample(NAMES, rng.randint(1, 5))
    if rng.random() < 0.2:
        options.add("shadow")
        names += rng.sample(SHADOWING, 2)
    fields = {name: random_field(rng, name) for name in names}
    lines = [each.line(rng) for each in fields.values()]
    cut = rng.randint(1, len(lines)) if rng.random() < 0.3 else len(lines)
    opens, future = rng.random() < 0.15, rng.random() < 0.5
    keywords = [f"{option}=True" for option in sorted(options)]
    rng.shuffle(keywords)
    split = rng.randint(0, len(keywords)) if cut < len(lines) else len(keywords)
    if "shadow" in options or "kw_only" in options:
        split = len(keywords)
    base = "TypedTensorDict" if opens else "TensorClass"
    form = rng.choice(["base", "brackets", "decorator"]) if not opens else "base"
    first, second = keywords[:split], keywords[split:]
    head, plain = f"class C({', '.join([base, *first])}):", "@dataclass\nclass C:"
    if "kw_only" in options:
        plain = "@dataclass(kw_only=True)\nclass C:"
    if form == "brackets" and first:
        named = ", ".join(f'"{each.partition("=")[0]}"' for each in first)
        head = f"class C({base}[{named}]):"
    if form == "decorator":
        head = f"@tensorclass({', '.join(first)})\nclass C:"
    tail, plain_tail = "", ""
    if cut < len(lines):
        tail = f"class C(C{''.join(', ' + each for each in second)}):"
        plain_tail = plain.replace("C:", "C(C):")
    inner = rng.choice(["", ", autocast=True", ", checked=True"])
    start = HEAD.format(future="from __future__ import annotations" * future, inner=inner)
    try:
        theirs = module_of(start + body(plain, plain_tail, lines, cut), f"theirs_{number}")
    except TypeError:  # a field without a default follows one with; a tensor class takes it
        return None
    module = module_of(start + body(head, tail, lines, cut), f"ours_{number}")
    return Kind(module.C, theirs.C, module.Inner, fields, options, opens)


def body(top: str, bottom: str, lines: list[str], cut: int) -> str:
    """Return the source of a class, or of two of which the second has the lines from `cut` on."""
    return "\n".join([top, *lines[:cut], *([bottom, *lines[cut:]] if bottom else [])])


def module_of(source: str, name: str) -> ModuleType:
    name = f"kd_options_{name}"
    module = sys.modules[name] = ModuleType(name)
    exec(compile(source, name, "exec"), vars(module))  # the program is ours
    return module


def random_value(rng: Random, kind: Kind, name: str, batch: Shape) -> object:
    """Return a value for a field, that fits its type or not."""
    declared = kind.fields.get(name)
    hint = declared.kinds[0] if declared else "Tensor"
    if rng.random() < 0.3:
        hint = rng.choice(["Tensor", "Inner", "list", *DATA, "None"])
    if hint == "None" and "tensor_only" in kind.options:
        hint = "Tensor"
    rows = torch.randint(9, (*batch, 2)).float()
    choices: dict[str, list[object]] = {
        "Tensor": [rows, rows, rows.tolist(), rows.numpy(), rows.long()],
        "Inner": [
            kind.inner(x=rows, batch_size=batch),  # type: ignore[call-arg]  # it has it
            TensorDict({"x": rows}, batch),
        ],
        "list": [["a", "b"], [1, 2], []],
        "str": ["u", "v", NonTensorData("w")],
        "int": [3, torch.tensor(5), "7", 2.5, NonTensorData(4)],
        "float": [0.5, 2, torch.tensor(0.25), "x"],
        "bool": [True, torch.tensor(False)],
        "complex": [1j, 2],
        "Any": [rows, "u", None, 3],
        "None": [None],
    }
    return rng.choice(choices[hint])


def content(td: TensorDictBase) -> Values:
    """Return all that a container holds."""
    found: Values = {" batch": tuple(td.batch_size)}
    items: Iterable[tuple[str, object]] = TensorDictBase.items(td)  # fields may hide it
    for key, value in items:
        if isinstance(value, Tensor):
            found[key] = value.dtype, tuple(value.shape), value.tolist()
        elif isinstance(value, TensorDictBase):
            found[key] = type(value).__name__.removeprefix("LazyStacked"), content(value)
        else:
            read: object = TensorDictBase.__getitem__(td, key)
            words = {repr(each) for each in of_rows(read)}
            found[key] = words if len(words) == 1 else repr(read)  # rows may have been stacked
    return found


def given_by(kind: Kind, args: list[object], kwargs: Values) -> Values:
    """Return the values of all fields as a dataclass takes them."""
    made = kind.theirs(*args, **kwargs)
    return {each.name: getattr(made, each.name) for each in dataclasses.fields(made)}
