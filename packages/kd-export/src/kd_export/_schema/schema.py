"""What an artefact says about itself: keys, shapes, dtypes, axes, state, steps, test vectors.

Pure data with a JSON form, the same in every format, and the checks that shapes and states are
those of a schema. A size is a number, an axis (``n``), or follows from one (``n + 1``,
``2*n - 3``). Nothing here imports torch, so that a file can be read where torch is not installed.
The JSON form is described by ``schema_v1.json`` in the folder of the package.
"""

from __future__ import annotations

import json
import math
import random
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

from kd_export._console import Row, html_table, plain_table
from kd_export._errors import (
    DtypeMismatch,
    ExportError,
    Key,
    KeyMismatch,
    SchemaVersion,
    ShapeMismatch,
    brief,
    kind_of,
    nearest,
    quoted,
)
from kd_export._schema.files import (
    Json,
    Number,
    as_dict,
    as_dtype,
    as_finite,
    as_int,
    as_key,
    as_list,
    as_number,
    as_size,
    as_str,
    check_mapping,
    wire_key,
    wire_name,
)

Name = TypeVar("Name")
_TEXT = re.compile(r"(?:([1-9]\d{0,8}) ?\* ?)?([^\W\d]\w{0,199})(?: ?([+-]) ?(\d{1,9}))?")


@dataclass(frozen=True, slots=True)
class LinearSize:
    """A multiple of an axis plus a number.

    Attributes:
        axis: The name of the axis.
        factor: What its size is multiplied by, at least 1.
        offset: What is added.
    """

    axis: str
    factor: int = 1
    offset: int = 0

    @classmethod
    def parse(cls, text: str) -> LinearSize | None:
        """Read a size; ``None`` if it is something else.

        >>> LinearSize.parse("2*n+1"), LinearSize.parse("n*m")
        (LinearSize(axis='n', factor=2, offset=1), None)
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            return None
        factor, axis, sign, offset = found.groups()
        return cls(axis, int(factor or 1), int(f"{sign or ''}{offset or 0}"))

    def __str__(self) -> str:
        head = self.axis if self.factor == 1 else f"{self.factor}*{self.axis}"
        return head if not self.offset else f"{head} {'-+'[self.offset > 0]} {abs(self.offset)}"

    def at(self, size: int) -> int:
        """Compute the size where the axis has another.

        >>> LinearSize("n", 2, 1).at(3)
        7
        """
        return self.factor * size + self.offset

    def axis_at(self, size: int) -> int | None:
        """Compute the size of the axis from this size; ``None`` if there is none.

        >>> LinearSize("n", 2, 1).axis_at(7), LinearSize("n", 2, 1).axis_at(8)
        (3, None)
        """
        whole, rest = divmod(size - self.offset, self.factor)
        return whole if rest == 0 and whole >= 0 else None

    def solve(self, other: LinearSize) -> LinearSize | None:
        """Compute the axis from that of an equal size; ``None`` if that is not a whole multiple.

        >>> print(LinearSize("s", 1, 1).solve(LinearSize("n", 2)))
        2*n - 1
        """
        factor, rest = divmod(other.factor, self.factor)
        offset, left = divmod(other.offset - self.offset, self.factor)
        return None if rest or left else LinearSize(other.axis, factor, offset)


def known_size(size: int | str, sizes: Mapping[str, int]) -> int | None:
    """Compute a size of a shape from the sizes of the axes; ``None`` if they do not tell it.

    >>> known_size("2*n", {"n": 3}), known_size(5, {}), known_size("n*m", {"n": 3})
    (6, 5, None)
    """
    if isinstance(size, int):
        return size
    linear = LinearSize.parse(size)
    return None if linear is None or linear.axis not in sizes else linear.at(sizes[linear.axis])


def axes_of(shape: Sequence[int | str]) -> set[str]:
    """Collect the axes that a shape names.

    >>> sorted(axes_of(("n", 3, "2*m + 1")))
    ['m', 'n']
    """
    parsed = (LinearSize.parse(size) for size in shape if isinstance(size, str))
    return {linear.axis for linear in parsed if linear is not None}


STEP_HEADER = ("step", "runs", "reads", "writes")


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the module that a program was made from.

    Attributes:
        name: Its name in the sequence; of one in a sequence inside, the names joined by dots.
        runs: The class or function that runs, with its settings as the module prints them.
        reads: The keys it reads.
        writes: The keys it writes.

    Example:
        >>> Step("0", "Clip(low=-1.0, high=1.0)", (("raw",),), (("action",),)).row()
        ('0', 'Clip(low=-1.0, high=1.0)', 'raw', 'action')
    """

    name: str
    runs: str
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]

    def row(self) -> Row:
        """Return the step as a row of a table under `STEP_HEADER`."""
        reads, writes = (", ".join(map(wire_name, keys)) for keys in (self.reads, self.writes))
        return self.name, self.runs, reads, writes

    def to_data(self) -> Json:
        """Return the step as plain data, fit for JSON."""
        reads: list[Json] = [list(key) for key in self.reads]
        writes: list[Json] = [list(key) for key in self.writes]
        return {"name": self.name, "runs": self.runs, "reads": reads, "writes": writes}

    @classmethod
    def from_data(cls, item: Json) -> Step:
        """Read a step from plain data that may hold anything."""
        data: Mapping[str, Json] = as_dict(item)
        return cls(
            as_str(data["name"]),
            as_str(data["runs"]),
            _wires(data["reads"]),
            _wires(data["writes"]),
        )


def _wires(item: Json) -> tuple[Key, ...]:
    keys = tuple(tuple(as_str(part) for part in as_list(key)) for key in as_list(item))
    if () in keys:
        raise ValueError("a step has an empty key")
    return keys


FORMAT = "kd-export"
VERSION = 1
RANDOM = "random"
"""The mode of programs that draw random numbers: their stored tests have no numbers."""

_MOST_DIMS = 64
_MOST_VECTORS = 1000
_MOST_PARTS = 200_000

ENTRY_HEADER = ("", "key", "wire name", "dtype and shape")


@dataclass(frozen=True, slots=True)
class Axis:
    """The sizes that a named dimension may take.

    Attributes:
        min: The smallest size.
        max: The largest size, or ``None`` when there is no limit.

    Example:
        >>> str(Axis(1, 8)), Axis(1, 8).holds(9)
        ('1..8', False)
    """

    min: int = 1
    max: int | None = None

    def holds(self, size: int) -> bool:
        """Decide whether a size lies in the range."""
        return self.min <= size and (self.max is None or size <= self.max)

    def __str__(self) -> str:
        return f"{self.min}..{'' if self.max is None else self.max}"


_MOST_ELEMENTS = 100_000
Bound = Number | Sequence[Number | None] | None
"""A limit: one number for all elements, or one for each; ``None``: not limited."""
SIGNAL_HEADER = ("entry", "element", "name", "unit", "kind", "limits", "rate")


@dataclass(frozen=True, slots=True)
class Signal:
    """What the numbers of an entry mean outside the program: joints, forces, pixels.

    Elements are those of the last dimension. An entry of one number for each row has one.

    Args:
        names: The name of each element, in order; no two are equal.
        unit: Its unit, such as ``"rad"``: one for all elements, or one for each.
        kind: What it is, such as ``"joint position"``, ``"force"`` or ``"image"``: likewise.
        limits: The least and the greatest value: each a number for all elements, a list of one
            for each, or ``None`` for no limit.
        rate: How many times a second there is a new value, in hertz.

    Raises:
        ExportError: A name is empty or given twice, limits are not in order or not finite, the
            rate is not positive, or lists have different lengths.

    Example:
        >>> Signal(names=["hip", "knee"], unit="rad", limits=(-1.5, [1.5, 2.0])).limits_of(1)
        (-1.5, 2.0)
    """

    names: Sequence[str] = ()
    unit: str | Sequence[str] = ""
    kind: str | Sequence[str] = ""
    limits: tuple[Bound, Bound] | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        """Check the parts against each other, and keep lists as tuples."""
        for name in ("names", "unit", "kind"):
            value: object = getattr(self, name)
            if name == "names" and isinstance(value, str):
                raise _not_signal("names", "a list of names", value)
            if not isinstance(value, str):
                object.__setattr__(self, name, _texts(name, value))
        if "" in self.names or len(set(self.names)) < len(self.names):
            twice = [name for name in self.names if not name or self.names.count(name) > 1]
            raise _not_signal("names", "a different name for each element", twice[0])
        if self.limits is not None:
            object.__setattr__(self, "limits", _limits(self.limits))
        if self.rate is not None and (_one_bound(self.rate) or 0) <= 0:
            raise _not_signal("rate", "a positive number of hertz", self.rate)
        counts = {name: len(part) for name, part in self._lists()}
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{count} in `{name}`" for name, count in counts.items())
            raise ExportError(
                f"the lists of a `Signal` have different lengths: {told}.",
                got=counts,
                hint="Give one value for each element, or a single one for all.",
            )

    def _lists(self) -> list[tuple[str, Sequence[object]]]:
        """Return the parts that have a value for each element, by name."""
        low, high = self.limits or (None, None)
        parts = (("names", self.names or ""), ("unit", self.unit), ("kind", self.kind))
        bounds = (("lower limits", low), ("upper limits", high))
        return [(n, p) for n, p in (*parts, *bounds) if isinstance(p, tuple)]

    @property
    def count(self) -> int | None:
        """How many elements it tells of one by one; ``None`` if it tells only of all."""
        return next((len(part) for _, part in self._lists()), None)

    def name_of(self, place: int) -> str:
        """Return the name of an element, empty if it has none."""
        return self.names[place] if self.names else ""

    def unit_of(self, place: int) -> str:
        """Return the unit of an element, empty if it has none."""
        return self.unit if isinstance(self.unit, str) else self.unit[place]

    def kind_of(self, place: int) -> str:
        """Return what an element is, empty if that is not said."""
        return self.kind if isinstance(self.kind, str) else self.kind[place]

    def limits_of(self, place: int) -> tuple[Number | None, Number | None]:
        """Return the least and the greatest value of an element."""
        low, high = (
            bound[place] if isinstance(bound, Sequence) else bound
            for bound in self.limits or (None, None)
        )
        return low, high

    def rows(self, wire: str) -> list[Row]:
        """Return the elements as rows of a table under `SIGNAL_HEADER`; one row if all are alike.

        >>> Signal(names=["hip", "knee"], unit="rad", rate=50).rows("obs")[1]
        ('obs', '1', 'knee', 'rad', '', '', '50 Hz')
        """
        rate = "" if self.rate is None else f"{self.rate:g} Hz"
        places = range(1 if self.count is None else self.count)
        return [
            (
                wire,
                "all" if self.count is None else str(place),
                self.name_of(place),
                self.unit_of(place),
                self.kind_of(place),
                _range_text(*self.limits_of(place)),
                rate,
            )
            for place in places
        ]

    def to_data(self) -> dict[str, Json]:
        """Return it as plain data, fit for JSON: what is given."""
        low, high = self.limits or (None, None)
        given = {
            "names": self.names,
            "unit": self.unit,
            "kind": self.kind,
            "low": low,
            "high": high,
            "rate": self.rate,
        }
        return {
            name: [*part] if isinstance(part, tuple) else cast("Json", part)
            for name, part in given.items()
            if part not in (None, "", ())
        }

    @classmethod
    def from_data(cls, item: Json) -> Signal:
        """Read it from plain data that may hold anything."""
        data = as_dict(item)
        if not data.keys() <= {"names", "unit", "kind", "low", "high", "rate"}:
            raise ValueError(f"the signal {brief(data)}")
        low, high = (_bound(data.get(name)) for name in ("low", "high"))
        unit, kind = (data.get(name, "") for name in ("unit", "kind"))
        return cls(
            tuple(map(as_str, as_list(data.get("names", [])))),
            unit if isinstance(unit, str) else tuple(map(as_str, as_list(unit))),
            kind if isinstance(kind, str) else tuple(map(as_str, as_list(kind))),
            None if low is None and high is None else (low, high),
            float(as_finite(data["rate"])) if "rate" in data else None,
        )


def _texts(name: str, value: object) -> tuple[str, ...]:
    listed = list(value) if isinstance(value, Iterable) else [value]
    if not all(isinstance(text, str) for text in listed) or len(listed) > _MOST_ELEMENTS:
        raise _not_signal(name, "strings", value)
    return tuple(map(str, listed))


def _not_signal(name: str, expected: str, got: object) -> ExportError:
    return ExportError(
        f"expected {expected} for `{name}` of a `Signal`, got {brief(got)}.",
        expected=expected,
        got=got,
        hint="Write `Signal(names=['hip', 'knee'], unit='rad', limits=(-1.5, 1.5), rate=50)`.",
    )


def _limits(given: object) -> tuple[Bound, Bound]:
    """Check limits: each a number or a list, in order."""
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != 2:
        raise _not_signal("limits", "a pair of the least and the greatest value", given)
    pair = [_checked_bound(one) for one in given]
    count = max(len(one) if isinstance(one, tuple) else 1 for one in pair)
    low, high = (one if isinstance(one, tuple) else (one,) * count for one in pair)
    for least, most in zip(low, high, strict=False):  # lengths are compared with those of names
        if least is not None and most is not None and not least < most:
            raise _not_signal("limits", "a least value below the greatest", (least, most))
    return pair[0], pair[1]


def _checked_bound(given: object) -> Number | tuple[Number | None, ...] | None:
    if not isinstance(given, Sequence):
        return _one_bound(given)
    return tuple(map(_one_bound, given))


def _one_bound(value: object) -> Number | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise _not_signal("limits", "finite numbers, or None for no limit", value)
    return value


def _bound(item: Json) -> Bound:
    if item is None or not isinstance(item, list):
        return None if item is None else as_finite(item)
    return tuple(None if one is None else as_finite(one) for one in item)


def _range_text(low: Number | None, high: Number | None) -> str:
    if low is None and high is None:
        return ""
    return f"{'' if low is None else f'{low:g}'}..{'' if high is None else f'{high:g}'}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One input or output of a program.

    Attributes:
        key: The key in the container, as a tuple of its parts.
        name: What the tensor is called inside the file.
        dtype: The dtype's name, without ``torch.``.
        shape: A size for each fixed dimension, and for each dynamic one an axis name or what
            follows from one (``2*batch + 1``); of outputs also another expression of axis names.
        low: The smallest value of an input that test vectors use.
        high: The largest value of an input that test vectors use.
        signal: What its numbers mean, if that was said.

    Example:
        >>> Entry(("out", "x"), "x", "float32", ("batch", 3)).wire
        'out.x'
    """

    key: Key
    name: str
    dtype: str
    shape: tuple[int | str, ...]
    low: Number | None = None
    high: Number | None = None
    signal: Signal | None = None

    @property
    def wire(self) -> str:
        """The flat name of the key."""
        return wire_name(self.key)

    def describe(self) -> str:
        """Print dtype and shape.

        >>> Entry(("x",), "x", "float32", ("batch", 3)).describe()
        'float32 (batch, 3)'
        """
        sizes = ", ".join(str(size) for size in self.shape)
        return f"{self.dtype} ({sizes}{',' if len(self.shape) == 1 else ''})"


_NOT_IN_COMMENTS = re.compile(r"\\|(?<=\*)/|(?<=/)\*|(?<=\?)\?|<(?=[/!])|[^ -~]")
"""What could end a comment, its line or a script of a page, or may not be visible."""


def comment_lines(entry: Entry) -> list[str]:
    r"""Return what a comment of a program says of an entry: its form, then a line an element.

    No text ends the comment or its line in C, C++, Python, JavaScript or Rust.

    >>> signal = Signal(names=["hip", "knee*/"], unit="rad", limits=(-1, [1, 2]), rate=50)
    >>> print(*comment_lines(Entry(("obs",), "obs", "float32", (2,), signal=signal)), sep="\n")
    obs: float32 (2,), 50 Hz
      0 hip, rad, -1..1
      1 knee*\u002f, rad, -1..2
    """
    rows = [] if entry.signal is None else entry.signal.rows(entry.wire)
    rate = rows[0][-1] if rows else ""
    lines = [f"{entry.wire}: {entry.describe()}{rate and f', {rate}'}"]
    for _, place, *told, _ in rows:
        words = [*filter(None, told)]
        if words:
            lines.append(f"  {place} {', '.join(words)}")
    return [_NOT_IN_COMMENTS.sub(_visible, line) for line in lines]


def _visible(found: re.Match[str]) -> str:
    letter = found[0]
    if letter.isprintable() and not letter.isascii():
        return letter
    return f"\\u{ord(letter):04x}"


@dataclass(frozen=True, slots=True)
class Vector:
    """One stored test: inputs, and some of the numbers that must come out.

    Attributes:
        sizes: The size of each axis.
        seed: The seed that the inputs are drawn with whose numbers are not stored.
        outputs: By wire name, the numbers at evenly spaced positions of the flattened output.
        inputs: By wire name, all numbers of an input that is not drawn, in row-major order.

    Example:
        >>> Vector({"batch": 2}, seed=0, outputs={"y": (0.5, 1.5)}).outputs["y"]
        (0.5, 1.5)
    """

    sizes: Mapping[str, int]
    seed: int
    outputs: Mapping[str, tuple[Number, ...]]
    inputs: Mapping[str, tuple[Number, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Budget:
    """How far the results of a file may be from those of the one that it was made of.

    Attributes:
        max: The largest absolute difference of any number of a floating-point output, in the
            output's own unit; ``None``: not limited.
        rms: The root mean square of the differences of such an output, in its unit.
        agreement: The least share of the integers or booleans of an output that are equal.

    Example:
        >>> Budget(max=0.02, rms=0.005).allows(0.01, 0.001, None)
        True
    """

    max: float | None = None
    rms: float | None = None
    agreement: float = 0.99

    def allows(self, most: float, rms: float, agreement: float | None) -> bool:
        """Decide whether differences are within it; ``agreement`` is that of integers."""
        return self.excess(most, rms, agreement) <= 1

    def excess(self, most: float, rms: float, agreement: float | None) -> float:
        """Return how many times the budget the differences are, the worst of all limits.

        >>> Budget(max=0.02).excess(0.03, 0.001, None)
        1.5
        """
        if agreement is not None:
            spared = 1 - self.agreement
            wrong = 1 - agreement
            return wrong / spared if spared else (math.inf if wrong else 0.0)
        limits = ((most, self.max), (rms, self.rms))
        shares = [_share(found, limit) for found, limit in limits if limit is not None]
        return max(shares, default=0.0)

    def sampled(self, count: int) -> Budget:
        """Return the budget for a sample of some numbers, whose rms and agreement scatter.

        The limits of rms and agreement are wider by three standard deviations of such a sample.
        """
        number = max(count, 1)
        wrong = self.agreement * (1 - self.agreement) / number
        return Budget(
            self.max,
            None if self.rms is None else self.rms * (1 + 3 / math.sqrt(2 * number)),
            max(0.0, self.agreement - 3 * math.sqrt(wrong)),
        )

    def to_data(self) -> dict[str, Json]:
        """Return the budget as plain data, fit for JSON."""
        limits: dict[str, Json] = {"agreement": self.agreement}
        for name, limit in (("max", self.max), ("rms", self.rms)):
            if limit is not None:
                limits[name] = limit
        return limits

    def __str__(self) -> str:
        return f"{self.told(integers=False)}, {self.told(integers=True)}".removeprefix(", ")

    def told(self, *, integers: bool) -> str:
        """Print what limits floating-point outputs, or integers and booleans.

        >>> Budget(max=0.02).told(integers=False), Budget(max=0.02).told(integers=True)
        ('max 0.02', 'agreement 0.99')
        """
        floats = (("max", self.max), ("rms", self.rms))
        limits = (("agreement", self.agreement),) if integers else floats
        return ", ".join(f"{name} {limit:g}" for name, limit in limits if limit is not None)


def _share(found: float, limit: float) -> float:
    return found / limit if limit else (math.inf if found else 0.0)


ADOPTED = "adopted"
"""The precision of what another tool made."""


@dataclass(frozen=True, slots=True)
class Precision:
    """What became of the numbers of a file that was made of another one, and the budget for it.

    Attributes:
        name: ``"fp16"``, ``"int8"``, ``"int8-weights"``, or ``"adopted"`` for what another tool
            made.
        budget: How far results may be from those of the file that it was made of. The stored
            tests hold the results of that file.
        kept: The layers that stayed float.
        rows: How many rows it was judged on.

    Example:
        >>> Precision("int8", Budget(max=0.02), ("4",), 2048).describe()
        'int8 within max 0.02, agreement 0.99, judged on 2,048 rows; float: 4'
    """

    name: str
    budget: Budget
    kept: tuple[str, ...] = ()
    rows: int = 0

    @property
    def loses_nan(self) -> bool:
        """Whether NaN may become a number, as it does where it is rounded to an integer."""
        return self.name in ("int8", ADOPTED)

    def describe(self) -> str:
        """Print it in a line."""
        kept = f"; float: {', '.join(self.kept)}" if self.kept else ""
        return f"{self.name} within {self.budget}, judged on {self.rows:,} rows{kept}"

    def to_data(self) -> Json:
        """Return it as plain data, fit for JSON."""
        kept: list[Json] = list(self.kept)
        return {
            "name": self.name,
            "budget": self.budget.to_data(),
            "kept": kept,
            "rows": self.rows,
        }

    @classmethod
    def from_data(cls, item: Json) -> Precision:
        """Read it from plain data that may hold anything."""
        data = as_dict(item)
        limits = {name: float(as_finite(limit)) for name, limit in as_dict(data["budget"]).items()}
        if not limits.keys() <= {"max", "rms", "agreement"} or min(limits.values(), default=0) < 0:
            raise ValueError(f"the budget {brief(data['budget'])}")
        budget = Budget(limits.get("max"), limits.get("rms"), limits.get("agreement", 1.0))
        kept = tuple(map(as_str, as_list(data["kept"])))
        return cls(as_str(data["name"]), budget, kept, as_size(data["rows"]))


@dataclass(frozen=True, slots=True, repr=False)
class Schema:
    """What a program takes and gives.

    Attributes:
        inputs: The inputs, in the order of the file.
        outputs: The outputs, in the order of the file.
        axes: The range of each dynamic axis.
        batch_dims: How many leading dimensions of the inputs the module takes for the batch size
            of its container.
        mode: The interaction type that was fixed at export, or ``None``.
        metadata: What the user stored.
        versions: The versions that made the file, by name.
        weights: The SHA-256, in hexadecimal, of all weights of a ``.pt2`` file, and of all that a
            file of another format holds but the schema.
        vectors: The stored tests.
        state: What is carried from one step to the next: the wire name of each output that is the
            next value of an input, by that input's.
        initial: What the state starts with, if not with zeros: by the wire name of an input, the
            numbers of its shape with axes of size 1, in row-major order.
        tolerance: How far results may differ from those stored, if not by what suits the dtype:
            ``rtol`` and ``atol``.
        precision: What the file was made of a float one by, and the budget that its results are
            within; ``None`` for a file that was made of a module.
        steps: What the module did, step by step: what prepares the inputs and what becomes of the
            outputs is in the program, and listed here.
        derived: Whether kd_export did not write the file, so that this is all that it tells.

    Example:
        >>> entry = Entry(("x",), "x", "float32", ("batch", 3))
        >>> schema = Schema((entry,), (entry,), {"batch": Axis(1, None)})
        >>> Schema.from_json(schema.to_json()) == schema
        True
        >>> schema
        Schema
                key  wire name  dtype and shape
        input   x    x          float32 (batch, 3)
        output  x    x          float32 (batch, 3)
    """

    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]
    axes: Mapping[str, Axis] = field(default_factory=dict)
    batch_dims: int = 0
    mode: str | None = None
    metadata: Mapping[str, Json] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    weights: str = ""
    vectors: tuple[Vector, ...] = ()
    state: Mapping[str, str] = field(default_factory=dict)
    initial: Mapping[str, tuple[Number, ...]] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    tolerance: Mapping[str, float] = field(default_factory=dict)
    precision: Precision | None = None
    derived: bool = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}\n{plain_table(ENTRY_HEADER, entry_rows(self))}"

    def _repr_html_(self) -> str:
        return html_table(ENTRY_HEADER, entry_rows(self))

    def input(self, key: object) -> Entry:
        """Return the input of a key or wire name."""
        return find_entry(self.inputs, key, "input")

    def output(self, key: object) -> Entry:
        """Return the output of a key or wire name."""
        return find_entry(self.outputs, key, "output")

    def check_names(self, robot: Mapping[Name, Sequence[str]]) -> None:
        """Check that a robot's own lists of names are those of the file, in the same order.

        Args:
            robot: The names of the elements by the key of an input or output, such as
                ``{"obs": ["hip", "knee"]}``.

        Raises:
            KeyMismatch: A list has other names, or the same in another order; the message has
                both, and where they are. Or the file does not say the names of the entry.

        Example:
            >>> signal = Signal(names=["hip", "knee"])
            >>> entry = Entry(("obs",), "obs", "float32", ("batch", 2), signal=signal)
            >>> Schema((entry,), (), {"batch": Axis()}).check_names({"obs": ["knee", "hip"]})
            Traceback (most recent call last):
            kd_export.KeyMismatch: `obs` has another order than the robot: element 0 is `hip` \
in the file and `knee` on the robot, where `hip` is element 1. Reorder what the robot gives.
        """
        check_mapping("robot", robot, "{'obs': ['hip', 'knee']}", KeyMismatch)
        for key, names in robot.items():
            for entry in _named_entries(self, key):
                _check_order(entry, [str(name) for name in names])

    def to_json(self) -> str:
        """Write the schema as one line of JSON."""
        return json.dumps(self.to_data(), allow_nan=False, separators=(",", ":"))

    def to_data(self) -> dict[str, Json]:
        """Return the schema as plain data, fit for JSON."""
        further: dict[str, Json] = {"state": dict(self.state)} if self.state else {}
        if self.initial:
            further["initial"] = _numbers_data(self.initial)
        if self.tolerance:
            further["tolerance"] = dict(self.tolerance)
        if self.precision is not None:
            further["precision"] = self.precision.to_data()
        if self.steps:
            further["steps"] = [step.to_data() for step in self.steps]
        return {
            "format": FORMAT,
            "version": VERSION,
            "inputs": [_entry_data(entry) for entry in self.inputs],
            "outputs": [_entry_data(entry) for entry in self.outputs],
            "axes": {n: {"min": axis.min, "max": axis.max} for n, axis in self.axes.items()},
            "batch_dims": self.batch_dims,
            "mode": self.mode,
            "metadata": dict(self.metadata),
            "versions": dict(self.versions),
            "weights": self.weights,
            "vectors": [_vector_data(vector) for vector in self.vectors],
            **further,
        }

    @classmethod
    def from_json(cls, text: str | bytes) -> Schema:
        """Read a schema from JSON.

        Raises:
            SchemaVersion: The schema is of a version that this release does not know.
            ExportError: The text is not such a schema.
        """
        try:
            text = text.decode() if isinstance(text, bytes) else text
            if text.count("[") + text.count("{") > _MOST_PARTS:
                raise ValueError(f"it has more than {_MOST_PARTS:,} lists and objects")
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ExportError(f"the schema is not JSON: {error}.") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ExportError(f"this is not a {FORMAT} schema.", expected=FORMAT)
        if data.get("version") != VERSION:
            raise SchemaVersion(
                f"the schema has version {data.get('version')}, this release reads {VERSION}.",
                expected=VERSION,
                got=data.get("version"),
                hint="Install the kd-export that wrote the file, or export again.",
            )
        try:
            return cls._from_data(data)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ExportError(f"the schema is damaged: {repr(error)[:500]}.") from error

    @classmethod
    def _from_data(cls, data: dict[str, Json]) -> Schema:
        schema = cls(
            inputs=_entries(data["inputs"]),
            outputs=_entries(data["outputs"]),
            axes={name: _axis(item) for name, item in as_dict(data["axes"]).items()},
            batch_dims=as_int(data["batch_dims"]),
            mode=None if data["mode"] is None else as_str(data["mode"]),
            metadata=as_dict(data["metadata"]),
            versions={name: as_str(item) for name, item in as_dict(data["versions"]).items()},
            weights=as_str(data["weights"]),
            vectors=tuple(_vector(item) for item in as_list(data["vectors"])),
            state={n: as_str(item) for n, item in as_dict(data.get("state", {})).items()},
            initial=_numbers(data.get("initial", {})),
            steps=tuple(map(Step.from_data, as_list(data.get("steps", [])))),
            tolerance=_tolerance(data.get("tolerance", {})),
            precision=Precision.from_data(data["precision"]) if "precision" in data else None,
        )
        if len(schema.vectors) > _MOST_VECTORS:
            raise ValueError(f"{len(schema.vectors)} stored tests")
        _check_axes(schema)
        for pair in schema.state.items():
            _check_pair(*pair, schema)
        for wire, numbers in schema.initial.items():
            _check_initial(wire, len(numbers), schema)
        for vector in schema.vectors:
            _check_vector(vector, schema)
        return schema


def _tolerance(data: Json) -> dict[str, float]:
    found = {name: as_finite(item) for name, item in as_dict(data).items()}
    if not found.keys() <= {"rtol", "atol"} or not all(0 <= x < math.inf for x in found.values()):
        raise ValueError(f"the tolerance {brief(data)}")
    return {name: float(value) for name, value in found.items()}


def _check_axes(schema: Schema) -> None:
    for entry in schema.inputs:
        for size in entry.shape:
            least = known_size(size, {name: axis.min for name, axis in schema.axes.items()})
            if least is None or least < 0:
                raise ValueError(f"the input {entry.wire!r} has the unknown axis {size!r}")


def _check_pair(read: str, written: str, schema: Schema) -> None:
    """Check that an output can be the next value of an input."""
    (one,) = [entry for entry in schema.inputs if entry.wire == read]
    (next_one,) = [entry for entry in schema.outputs if entry.wire == written]
    if (one.dtype, one.shape) != (next_one.dtype, next_one.shape):
        raise ValueError(f"the state {brief(read)} does not fit {brief(written)}")


def _check_initial(wire: str, count: int, schema: Schema) -> None:
    """Check that numbers fill one row of a state."""
    (entry,) = [entry for entry in schema.inputs if entry.wire == wire and wire in schema.state]
    if count != math.prod(size for size in entry.shape if isinstance(size, int)):
        raise ValueError(f"the state {brief(wire)} starts with {count} numbers")


def _check_vector(vector: Vector, schema: Schema) -> None:
    """Check that a stored test gives every axis a size, and numbers of every output."""
    if set(vector.sizes) != set(schema.axes):
        raise ValueError(f"a stored test has sizes for {sorted(vector.sizes)}")
    for name, size in vector.sizes.items():
        if not schema.axes[name].holds(size):
            raise ValueError(f"a stored test has {size} for the axis {brief(name)}")
    shapes = {entry.wire: entry.shape for entry in schema.inputs}
    for name, numbers in vector.inputs.items():
        if name not in shapes:
            raise ValueError(f"a stored test has the unknown input {brief(name)}")
        sizes = [known_size(size, vector.sizes) for size in shapes[name]]
        if len(numbers) != math.prod(size for size in sizes if size is not None):
            raise ValueError(f"a stored test has {len(numbers)} numbers for {brief(name)}")
    expected = set() if schema.mode == RANDOM else {entry.wire for entry in schema.outputs}
    if set(vector.outputs) != expected:
        raise ValueError(f"a stored test has numbers of {sorted(vector.outputs)}")


def entry_rows(schema: Schema) -> list[Row]:
    """Return inputs and outputs as rows of a table under `ENTRY_HEADER`."""
    rows: list[Row] = []
    for what, entries in (("input", schema.inputs), ("output", schema.outputs)):
        for entry in entries:
            after = schema.state.get(entry.wire) if what == "input" else None
            start = ", from given numbers" if entry.wire in schema.initial else ""
            told = entry.describe() + ("" if after is None else f"{start}, then `{after}`")
            key = entry.key[0] if len(entry.key) == 1 else str(entry.key)
            rows.append((what, key, entry.wire, told))
    return rows


def signal_rows(schema: Schema) -> list[Row]:
    """Return what the numbers of entries mean as rows of a table under `SIGNAL_HEADER`."""
    both = {entry.wire: entry for entry in (*schema.outputs, *schema.inputs)}
    order = dict.fromkeys(entry.wire for entry in (*schema.inputs, *schema.outputs))
    named = [(wire, both[wire].signal) for wire in order]
    return [row for wire, signal in named if signal is not None for row in signal.rows(wire)]


def find_entry(entries: tuple[Entry, ...], key: object, what: str) -> Entry:
    """Find an entry by wire name or key; an unknown one is an error that names the nearest."""
    wanted = {wire_key(key), (key,)} if isinstance(key, str) else {as_key(key)}
    for entry in entries:
        if entry.key in wanted:
            return entry
    wires = [entry.wire for entry in entries]
    name = key if isinstance(key, str) else wire_name(as_key(key))
    close = nearest(name, wires)
    raise KeyMismatch(
        f"{what} `{name}` not found; available "
        f"{'entries' if what == 'entry' else f'{what}s'}: {quoted(wires)}.",
        key=as_key(key),
        expected=tuple(wires),
        got=name,
        hint=None if close is None else f"Did you mean `{close}`?",
    )


def check_fit(described: object, found: object) -> None:
    """Refuse a file whose schema describes another program than the one beside it."""
    if described != found:
        raise ExportError(
            "the schema in the file does not fit the program beside it.",
            expected=described,
            got=found,
            hint="The file was put together from two: export again.",
        )


def _entry_data(entry: Entry) -> Json:
    data: dict[str, Json] = {
        "key": list(entry.key),
        "wire": entry.wire,
        "name": entry.name,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
    }
    if entry.low is not None and entry.high is not None:
        data["range"] = [entry.low, entry.high]
    if entry.signal is not None:
        data["signal"] = entry.signal.to_data()
    return data


def _vector_data(vector: Vector) -> Json:
    data: dict[str, Json] = {"sizes": dict(vector.sizes), "seed": vector.seed}
    if vector.inputs:
        data["inputs"] = _numbers_data(vector.inputs)
    return {**data, "outputs": _numbers_data(vector.outputs)}


def _numbers_data(values: Mapping[str, tuple[Number, ...]]) -> Json:
    return {name: [_number_data(number) for number in numbers] for name, numbers in values.items()}


def _number_data(number: Number) -> Json:
    """Convert numbers that are not finite to strings: JSON has no words for them."""
    return str(number) if isinstance(number, float) and not math.isfinite(number) else number


def _entry(item: Json) -> Entry:
    data = as_dict(item)
    low, high = as_list(data["range"]) if "range" in data else (None, None)
    entry = Entry(
        key=tuple(as_str(part) for part in as_list(data["key"])),
        name=as_str(data["name"]),
        dtype=as_dtype(data["dtype"]),
        shape=_shape(data["shape"]),
        low=None if low is None else as_finite(low),
        high=None if high is None else as_finite(high),
        signal=_signal(data["signal"]) if "signal" in data else None,
    )
    if entry.signal is not None and not _fits(entry.signal, entry):
        raise ValueError(f"the signal of {entry.key} is not of {elements_of(entry)} elements")
    if not entry.key or data["wire"] != entry.wire:
        raise ValueError(f"the key {entry.key} has the wire name {data['wire']!r}")
    return entry


def _signal(item: Json) -> Signal:
    try:
        return Signal.from_data(item)
    except ExportError as error:
        raise ValueError(str(error)) from error


def _entries(items: Json) -> tuple[Entry, ...]:
    entries = tuple(_entry(item) for item in as_list(items))
    for names in ([entry.wire for entry in entries], [entry.name for entry in entries]):
        if len(set(names)) < len(names):
            raise ValueError(f"two entries have one name: {names}")
    return entries


def _shape(item: Json) -> tuple[int | str, ...]:
    sizes = as_list(item)
    if len(sizes) > _MOST_DIMS:
        raise ValueError(f"a shape of {len(sizes)} dimensions")
    return tuple(size if isinstance(size, str) else as_size(size) for size in sizes)


def _vector(item: Json) -> Vector:
    data = as_dict(item)
    return Vector(
        sizes={name: as_size(size) for name, size in as_dict(data["sizes"]).items()},
        seed=as_int(data["seed"]),
        outputs=_numbers(data["outputs"]),
        inputs=_numbers(data.get("inputs", {})),
    )


def _numbers(item: Json) -> dict[str, tuple[Number, ...]]:
    return {
        name: tuple(map(as_number, as_list(numbers))) for name, numbers in as_dict(item).items()
    }


def _axis(item: Json) -> Axis:
    data = as_dict(item)
    return Axis(as_size(data["min"]), None if data["max"] is None else as_size(data["max"]))


def axis_sizes(schema: Schema, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """Return the size of each axis, given the shapes of all inputs.

    Raises:
        ShapeMismatch: A shape does not fit, or an axis has two sizes.
    """
    sizes: dict[str, tuple[int, Entry]] = {}
    for entry, shape in zip(schema.inputs, shapes, strict=True):
        check_shape(entry, shape, schema, sizes)
    return {name: size for name, (size, _) in sizes.items()}


def check_shape(
    entry: Entry, shape: tuple[int, ...], schema: Schema, sizes: dict[str, tuple[int, Entry]]
) -> None:
    """Compare a shape with the schema's, each axis having one size throughout."""
    if len(shape) != len(entry.shape):
        raise _misfit(entry, shape, f"It must have {len(entry.shape)} dimensions.")
    for dim, (size, wanted) in enumerate(zip(shape, entry.shape, strict=True)):
        if isinstance(wanted, str):
            reason = _axis_fault(entry, wanted, size, schema, sizes)
        else:
            reason = None if size == wanted else f"Dimension {dim} must be {wanted}."
        if reason is not None:
            raise _misfit(entry, shape, reason)


def _misfit(entry: Entry, shape: tuple[int, ...], hint: str) -> ShapeMismatch:
    return ShapeMismatch(
        f"expected {entry.describe()} for `{entry.wire}`, got shape {shape}.",
        key=entry.key,
        expected=entry.shape,
        got=shape,
        hint=hint,
    )


def _axis_fault(
    entry: Entry, text: str, size: int, schema: Schema, sizes: dict[str, tuple[int, Entry]]
) -> str | None:
    linear = LinearSize.parse(text)
    assert linear is not None  # the schema was checked
    found = linear.axis_at(size)
    if found is None:
        return f"{size} is not a value of `{text}`."
    known, first = sizes.setdefault(linear.axis, (found, entry))
    if known != found:
        follows = "" if text == linear.axis else f", so that `{text}` is {linear.at(known)}"
        return f"The axis `{linear.axis}` has size {known} in `{first.wire}`{follows}."
    axis = schema.axes[linear.axis]
    if not axis.holds(found):
        return f"The axis `{linear.axis}` ranges over {axis}."
    return None


def fixed(shape: Sequence[object]) -> tuple[int | None, ...]:
    """Return the sizes, with ``None`` for those that are dynamic.

    >>> fixed(("batch", 3))
    (None, 3)
    """
    return tuple(size if isinstance(size, int) else None for size in shape)


def described(entry: Entry) -> tuple[object, ...]:
    """Return name, dtype and sizes of an entry, to compare with what a file has."""
    return entry.name, entry.dtype, *fixed(entry.shape)


def completed(name: str, dtype: str, shape: Sequence[object], entry: Entry) -> tuple[object, ...]:
    """Return the same of what a runtime found, which may not know a size that is fixed."""
    found, known = fixed(shape), fixed(entry.shape)
    if len(found) == len(known):
        found = tuple(
            wanted if size is None else size for size, wanted in zip(found, known, strict=True)
        )
    return name, dtype, *found


First = TypeVar("First")
"""A name of an input in ``initial=``, which may be written otherwise than in ``state=``."""


def resolve_state(schema: Schema, state: Mapping[Name, object] | None) -> dict[str, str]:
    """Resolve the argument ``state`` to wire names.

    Raises:
        KeyMismatch: A key is not an input or output, or is named twice.
        ShapeMismatch: The next value has another shape, or other axes.
        DtypeMismatch: The next value has another dtype.
    """
    pairs: dict[str, str] = {}
    check_mapping("state", state, "{'h': ('next', 'h')}", KeyMismatch)
    for word, next_word in (state or {}).items():
        _check_direction(schema, word, next_word)
        entry = find_entry(schema.inputs, word, "input")
        next_entry = find_entry(schema.outputs, next_word, "output")
        if entry.wire in pairs or next_entry.wire in pairs.values():
            raise KeyMismatch(
                f"`state` names `{entry.wire}` or `{next_entry.wire}` twice.",
                key=entry.key,
                got=(word, next_word),
                hint="Give each input of the state one output.",
            )
        _check_fit(entry, next_entry)
        pairs[entry.wire] = next_entry.wire
    if pairs and len(pairs) == len(schema.inputs):
        raise ExportError(
            f"all inputs ({quoted(pairs)}) are state, so that a step would take nothing.",
            got=tuple(pairs),
            hint="Leave one input out of `state`; its shape gives the size of the batch.",
        )
    return pairs


def _check_direction(schema: Schema, word: object, next_word: object) -> None:
    """Refuse a pair of a state that is written the other way round.

    Raises:
        KeyMismatch: The first is an output alone, and the second an input.
    """
    try:
        find_entry(schema.inputs, word, "input")
    except KeyMismatch as error:
        try:
            find_entry(schema.outputs, word, "output")
            find_entry(schema.inputs, next_word, "input")
        except KeyMismatch:
            return  # it is found out below, in the words of the one that is unknown
        raise KeyMismatch(
            f"`state` expected an input and then its next value, got {word!r}: {next_word!r}.",
            key=error.key,
            expected="an input: the output that is its next value",
            got=(word, next_word),
            hint=f"Write `state={{{next_word!r}: {word!r}}}`.",
        ) from None


def _named_entries(schema: Schema, key: object) -> list[Entry]:
    """Return the input and the output of a key; an unknown one is an error."""
    both = (*schema.inputs, *schema.outputs)
    wanted = find_entry(both, key, "entry").key
    return [entry for entry in both if entry.key == wanted]


def _check_order(entry: Entry, robot: Sequence[str]) -> None:
    """Compare the names of an entry with those of a robot."""
    names = () if entry.signal is None else entry.signal.names
    where = f"`{entry.wire}`"
    if not names:
        raise KeyMismatch(
            f"the file does not say the names of the elements of {where}.",
            key=entry.key,
            got=tuple(robot),
            hint=f"Export it with `signals={{'{entry.wire}': Signal(names=[...])}}`.",
        )
    lacking = [name for name in names if name not in robot]
    further = [name for name in robot if name not in names]
    if lacking or further:
        parts = [f"{quoted(lacking)} not found on the robot"] if lacking else []
        parts += [f"{quoted(further)} not found in the file"] if further else []
        close = nearest(further[0], lacking) if further else None
        raise KeyMismatch(
            f"{where} has other elements than the robot: {'; '.join(parts)}.",
            key=entry.key,
            expected=tuple(names),
            got=tuple(robot),
            hint=None if close is None else f"Is `{further[0]}` the same as `{close}`?",
        )
    for place, (name, theirs) in enumerate(zip(names, robot, strict=False)):
        if name != theirs:
            raise KeyMismatch(
                f"{where} has another order than the robot: element {place} is `{name}` in the "
                f"file and `{theirs}` on the robot, where `{name}` is element "
                f"{robot.index(name)}.",
                key=entry.key,
                expected=tuple(names),
                got=tuple(robot),
                hint="Reorder what the robot gives.",
            )
    if len(robot) != len(names):
        raise KeyMismatch(
            f"{where} has {len(names)} elements, the robot lists {len(robot)}.",
            key=entry.key,
            expected=tuple(names),
            got=tuple(robot),
            hint="Name each element once.",
        )


def elements_of(entry: Entry) -> int | None:
    """Return how many elements an entry has: its last size; ``None`` if that is dynamic.

    >>> elements_of(Entry(("x",), "x", "float32", ("batch", 3)))
    3
    """
    *rows, last = entry.shape or (1,)
    if isinstance(last, int):
        return last
    return None if rows else 1


def _fits(signal: Signal, entry: Entry) -> bool:
    return signal.count is None or signal.count == elements_of(entry)


def resolve_signals(
    schema: Schema,
    signals: Mapping[Name, Signal] | None,
    known: Mapping[Key, Signal] | None = None,
) -> Schema:
    """Return the schema with what the numbers of its entries mean.

    Args:
        schema: What the program takes and gives.
        signals: By key, what was said of an entry; of a key that is input and output, of both.
        known: Limits and kinds from elsewhere: they hold where nothing else was said, and where
            they fit.

    Raises:
        KeyMismatch: A key is not an input or output.
        ShapeMismatch: A signal has more or fewer elements than the entry.
        ExportError: A value is not a `Signal`.
    """
    said: dict[Key, Signal] = {}
    check_mapping("signals", signals, "{'obs': Signal(names=['hip', 'knee'])}", KeyMismatch)
    for word, signal in (signals or {}).items():
        given: object = signal
        if not isinstance(given, Signal):
            raise ExportError(
                f"expected a `Signal` for {brief(word)}, got {kind_of(given)}.",
                expected="Signal",
                got=type(given).__name__,
                hint="Write `signals={'obs': Signal(names=['hip', 'knee'], unit='rad')}`.",
            )
        for entry in _named_entries(schema, word):
            if not _fits(signal, entry):
                raise ShapeMismatch(
                    f"the signal of `{entry.wire}` has {signal.count} elements, but the last "
                    f"dimension of {entry.describe()} has {elements_of(entry) or 'any number'}.",
                    key=entry.key,
                    expected=elements_of(entry),
                    got=signal.count,
                    hint="Name each element of the last dimension, in order.",
                )
            said[entry.key] = signal

    def completed(entry: Entry) -> Entry:
        own = said.get(entry.key, entry.signal)
        other = (known or {}).get(entry.key)
        if other is not None and _fits(other, entry):
            own = other if own is None else _filled(own, other)
        return replace(entry, signal=own)

    inputs, outputs = (tuple(map(completed, part)) for part in (schema.inputs, schema.outputs))
    return replace(schema, inputs=inputs, outputs=outputs)


def _filled(own: Signal, other: Signal) -> Signal:
    return replace(own, limits=own.limits or other.limits, kind=own.kind or other.kind)


def check_limits(schema: Schema, known: Mapping[Key, Signal]) -> None:
    """Refuse limits of an output that a policy exceeds: those of its space are wider.

    Raises:
        ExportError: A limit lies inside of those of the space.
    """
    for entry in schema.outputs:
        own, space = entry.signal, known.get(entry.key)
        if own is None or space is None or not _fits(space, entry):
            continue
        for place in range(max(own.count or 1, space.count or 1)):
            (low, high), (least, most) = own.limits_of(place), space.limits_of(place)
            if (low is not None and least is not None and low > least) or (
                high is not None and most is not None and high < most
            ):
                raise ExportError(
                    f"the limits of element {place} of `{entry.wire}` are "
                    f"{_range_text(low, high)}, but the policy gives {_range_text(least, most)}.",
                    expected=(least, most),
                    got=(low, high),
                    hint="Leave the limits out, to take those of the policy, or clip in a module "
                    "of your own.",
                )


def space_signals(metadata: Mapping[str, object]) -> dict[Key, Signal]:
    """Return the limits of spaces that metadata describe, by key; see `policies.from_gymnasium`.

    >>> space = {"space": "Box", "shape": [2], "low": -1, "high": [1, 2]}
    >>> space_signals({"action": space})[("action",)].limits_of(1)
    (-1, 2)
    """
    found: dict[Key, Signal] = {}
    for key, item in metadata.items():
        if not isinstance(item, Mapping) or "space" not in item:
            continue
        inner = item.get("entries")
        if isinstance(inner, Mapping):
            found |= {(key, *below): one for below, one in space_signals(inner).items()}
            continue
        shape, bounds = item.get("shape", ()), (item.get("low"), item.get("high"))
        flat = not any(isinstance(bound, list) for bound in bounds) or len(shape) <= 1
        image = item.get("dtype") == "uint8" and len(shape) == 3
        try:
            found[key,] = Signal(
                kind="image" if image else "",
                limits=bounds if flat and bounds != (None, None) else None,
            )
        except ExportError:  # a limit may equal the other one
            continue
    return {key: signal for key, signal in found.items() if signal != Signal()}


def _check_fit(entry: Entry, next_entry: Entry) -> None:
    kind = DtypeMismatch if entry.dtype != next_entry.dtype else ShapeMismatch
    if (entry.dtype, entry.shape) != (next_entry.dtype, next_entry.shape):
        raise kind(
            f"the state `{entry.wire}` is {entry.describe()}, but its next value "
            f"`{next_entry.wire}` is {next_entry.describe()}.",
            key=entry.key,
            expected=entry.describe(),
            got=next_entry.describe(),
            hint="Let the module give the next state in the form that it takes.",
        )


# The inputs of stored tests, the same on every machine and with every array library.
#
# A file carries the seeds of its tests, the numbers of those inputs that cannot be drawn, and a
# few of the numbers that must come out, so it stays small. Numbers are drawn with `random.Random`,
# whose stream is guaranteed not to change, and need neither torch nor numpy.

STORED = 32
"""How many numbers of each output a stored test holds."""
MOST_NUMBERS = 1 << 25
"""How many numbers a test draws at most: a file may claim any shape."""

MOST_STORED = 1 << 16
"""How many numbers of an input a stored test holds at most; a larger input is drawn."""

_INT64 = 1 << 63

_TOLERANCES = {
    "float64": (1e-7, 1e-9),
    "complex128": (1e-7, 1e-9),
    "float32": (1e-4, 1e-5),
    "complex64": (1e-4, 1e-5),
    "float16": (1e-2, 1e-3),
    "bfloat16": (2e-2, 1e-2),
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """The numbers of one input, in row-major order, and the shape they fill."""

    numbers: Sequence[Number]
    shape: tuple[int, ...]
    dtype: str


WIDE = 4.0
"""How many times the example's range numbers come from where clips and limits are to be met."""


def draw(schema: Schema, vector: Vector) -> list[Drawn]:
    """Build the inputs of a stored test: numbers that it holds, or that its seed gives.

    Drawn numbers are uniform between the bounds of the example.
    """
    source = random.Random(vector.seed)
    return [_draw(entry, vector, source) for entry in schema.inputs]


def _draw(entry: Entry, vector: Vector, source: random.Random) -> Drawn:
    shape = concrete(entry.shape, vector.sizes)
    count = math.prod(shape)
    if count > MOST_NUMBERS:
        raise ExportError(
            f"a test of `{entry.wire}` with shape {shape} needs {count:,} numbers, more than "
            f"{MOST_NUMBERS:,}.",
            key=entry.key,
            expected=MOST_NUMBERS,
            got=count,
            hint="Pass smaller `batch_sizes`, or an example of smaller shape.",
        )
    if entry.wire in vector.inputs:
        return Drawn(vector.inputs[entry.wire], shape, entry.dtype)
    low = 0 if entry.low is None else entry.low
    high = 1 if entry.high is None else entry.high
    numbers: Sequence[Number]
    if entry.dtype == "bool":
        numbers = array("b", (source.random() < 0.5 for _ in range(count)))
    elif "float" in entry.dtype or "complex" in entry.dtype:
        width = high - low
        numbers = array("d", (low + width * source.random() for _ in range(count)))
    else:
        start, width = int(low), high - low + 1
        whole = (start + int(width * source.random()) for _ in range(count))
        small = low >= -_INT64 and high < _INT64
        numbers = array("q", whole) if small else list(whole)
    return Drawn(numbers, shape, entry.dtype)


def concrete(shape: Sequence[int | str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Replace axis names by sizes.

    >>> concrete(("batch", 3, "batch + 1"), {"batch": 2})
    (2, 3, 3)
    """
    found = []
    for size in shape:
        known = known_size(size, sizes)
        if known is None:
            raise ShapeMismatch(f"no size was given for the axis `{size}`.", got=size)
        found.append(known)
    return tuple(found)


def positions(count: int) -> list[int]:
    """Choose evenly spaced positions among the elements of an output.

    >>> positions(3), positions(96)[:3]
    ([0, 1, 2], [0, 3, 6])
    """
    stored = stored_count(count)
    return [index * count // stored for index in range(stored)]


def stored_count(count: int) -> int:
    """Return how many numbers are stored of an output of ``count`` elements."""
    return min(count, STORED)


def tolerance(dtype: str) -> tuple[float, float]:
    """Return the relative and absolute tolerance of a dtype; integers must be equal."""
    return _TOLERANCES.get(dtype, (0.0, 0.0))


def distance(got: Number, expected: Number) -> float:
    """Return how far two numbers are apart; two that are not numbers are equal.

    >>> distance(1, 1.5), distance(math.nan, math.nan), distance(math.nan, 1)
    (0.5, 0.0, inf)
    """
    if got == expected or (math.isnan(got) and math.isnan(expected)):
        return 0.0
    apart = abs(float(got) - float(expected))
    return math.inf if math.isnan(apart) else apart


def magnitude(number: Number) -> float:
    """Return the size that a relative tolerance is relative to.

    >>> magnitude(-2), magnitude(math.inf)
    (2.0, 0.0)
    """
    return abs(float(number)) if math.isfinite(number) else 0.0
