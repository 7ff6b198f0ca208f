"""Rollouts beside an oracle: raw observations in, environment actions out, rows reset on the way.

Knows sessions, and what an oracle is; must not know files, formats, frameworks, or which step of a
policy is missing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from kd_export._errors import (
    DtypeMismatch,
    ExportError,
    Key,
    KeyMismatch,
    VerifyError,
    kind_of,
    quoted,
)
from kd_export._running.session import Session
from kd_export._schema.files import as_key, nest, unnest, wire_key
from kd_export._schema.schema import WIDE, Entry, Schema, concrete
from kd_export._verification.comparison import (
    MOST_OWN_ERRORS,
    OWN_ROUNDING,
    Comparison,
    HasError,
    Tolerance,
    own_rounding,
)
from kd_export._verification.trials import may_be_drawn, trial_sizes
from kd_nn import TensorDictModule, TensorDictSequential

ROLLOUT_SIZES = (1, 3, 64)
"""The batches that rollouts are made at."""
SHARE_RESET = 0.15
"""What share of the rows is reset before a step."""
SHARE_WIDE = 0.25
"""What share of the rows is drawn from a range that is `WIDE` times the example's."""
MOST_FLIPPED = 0.01
"""What share of integers may flip where an observation does by its last bits."""
MOST_KEPT = 1 << 21
"""How many numbers of observations a trace holds at most, but for its first steps."""
BITS = (-64, -8, -1, 1, 8, 64)
ACTION: Key = ("action",)

Oracle = Callable[..., object]


@runtime_checkable
class Resets(Protocol):
    """An oracle that remembers something, and forgets it for the rows of a mask."""

    def reset(self, mask: Tensor | None = None) -> None:
        """Forget what is remembered of these rows, or of all."""
        ...


@dataclass(slots=True)
class Trace:
    """Inputs and outputs of some rollouts, by wire name and a step an item.

    Attributes:
        observed: The observations.
        resets: The mask of rows that were reset before the step; ``None`` where all begin anew.
        given: The actions that the program gave.
        expected: The actions that the oracle gave.
    """

    observed: list[dict[str, Tensor]] = field(default_factory=list)
    resets: list[Tensor | None] = field(default_factory=list)
    given: list[dict[str, Tensor]] = field(default_factory=list)
    expected: list[dict[str, Tensor]] = field(default_factory=list)


class Stepper(Protocol):
    """What steps on observations and can be reset: a session, or the module itself."""

    def step(self, x: dict[Key, object]) -> dict[Key, object]:
        """Return all outputs by key."""
        ...

    def reset(self, mask: object = None) -> None:
        """Set rows back to what they start with."""
        ...


class Eager:
    """Step a module itself, eagerly, as a session steps its program."""

    def __init__(
        self,
        schema: Schema,
        reference: Callable[[Sequence[Tensor]], Mapping[str, Tensor]],
        state: Mapping[str, str] | None = None,
    ) -> None:
        self._schema = schema
        self._reference = reference
        self._pairs = schema.state if state is None else state
        self._held: dict[str, Tensor] = {}
        axes = [size for e in schema.inputs for size in e.shape if isinstance(size, str)]
        self._axis = axes[0] if axes else ""

    def step(self, x: dict[Key, object]) -> dict[Key, object]:
        """Run the module on observations and its own state."""
        found = {key: value for key, value in x.items() if isinstance(value, Tensor)}
        first = next(iter(found))
        size = found[first].shape[self._dim(self._schema.input(first))]
        inputs = [
            self._held.get(e.wire, self._start(e, size)) if e.wire in self._pairs else found[e.key]
            for e in self._schema.inputs
        ]
        results = self._reference(inputs)
        self._held = {wire: results[new].detach() for wire, new in self._pairs.items()}
        return {e.key: results[e.wire] for e in self._schema.outputs}

    def reset(self, mask: object = None) -> None:
        """Set rows of the state back to what they start with."""
        if mask is None:
            self._held = {}
            return
        rows = torch.as_tensor(mask)
        for wire, held in list(self._held.items()):
            entry = self._schema.input(wire)
            dim = self._dim(entry)
            shape = [1] * held.ndim
            shape[dim] = len(rows)
            start = self._start(entry, held.shape[dim])
            self._held[wire] = torch.where(rows.reshape(shape), start, held)

    def in_float64(self) -> Eager:
        """Return what steps a copy of the module in float64."""
        reference: object = self._reference
        if not isinstance(reference, HasError):
            raise TypeError("a function that is not a module")
        return Eager(self._schema, reference.in_float64(), self._pairs)

    def _dim(self, entry: Entry) -> int:
        return entry.shape.index(self._axis) if self._axis in entry.shape else 0

    def _start(self, entry: Entry, size: int) -> Tensor:
        shape = [n if isinstance(n, int) else size for n in entry.shape]
        dtype: torch.dtype = getattr(torch, entry.dtype)
        numbers = self._schema.initial.get(entry.wire)
        if numbers is None:
            return torch.zeros(shape, dtype=dtype)
        row = [n if isinstance(n, int) else 1 for n in entry.shape]
        return torch.tensor(numbers, dtype=dtype).reshape(row).expand(shape)


def observations(schema: Schema) -> tuple[Entry, ...]:
    """Return the inputs that are observations: all but the state."""
    return tuple(entry for entry in schema.inputs if entry.wire not in schema.state)


def actions(schema: Schema) -> tuple[Entry, ...]:
    """Return the outputs that may be actions: all but the next state."""
    return tuple(entry for entry in schema.outputs if entry.wire not in schema.state.values())


def arranged(values: Mapping[Key, object]) -> object:
    """Return values as people pass them: one alone, several as a dict without a common first part.

    >>> arranged({("observation", "a"): 1, ("observation", "b"): 2})
    {'a': 1, 'b': 2}
    """
    if len(values) == 1:
        return next(iter(values.values()))
    if len({key[0] for key in values}) == 1 and all(len(key) > 1 for key in values):
        values = {key[1:]: value for key, value in values.items()}
    return nest(values)


def sorted_out(value: object, entries: Sequence[Entry], what: str) -> dict[str, object]:
    """Find the value of each entry in what people pass or return, by wire name.

    Raises:
        KeyMismatch: It has not a value for each.
    """
    if not isinstance(value, Mapping):
        named = [entry for entry in entries if entry.key == ACTION]
        chosen = entries if len(entries) == 1 else named
        if len(chosen) == 1:
            return {chosen[0].wire: value}
        raise KeyMismatch(
            f"{what} is {kind_of(value)}, and there are several: "
            f"{quoted(entry.wire for entry in entries)}.",
            expected=tuple(entry.wire for entry in entries),
            got=type(value).__name__,
            hint="Return a dict by key, or name the one key as `outputs=`.",
        )
    flat = unnest(value)
    found: dict[str, object] = {}
    for entry in entries:
        for key in (entry.key, entry.key[1:], (entry.wire,)):
            if key and key in flat:
                found[entry.wire] = flat[key]
                break
        else:
            if what.startswith("what"):
                continue  # an oracle need not give every output
            raise KeyMismatch(
                f"`{entry.wire}` not found in {what}; available keys: "
                f"{quoted('.'.join(key) for key in flat)}.",
                key=entry.key,
                expected=entry.wire,
            )
    if not found:
        raise KeyMismatch(
            f"{what} has none of the outputs {quoted(entry.wire for entry in entries)}; available "
            f"keys: {quoted('.'.join(as_key(key)) for key in flat)}.",
            expected=tuple(entry.wire for entry in entries),
        )
    return found


def compare_rollouts(
    session: Session,
    oracle: Oracle,
    *,
    pool: Sequence[Tensor] | None,
    reference: Callable[[Sequence[Tensor]], Mapping[str, Tensor]],
    rollouts: int = 8,
    steps: int = 50,
    allowed: Tolerance | None = None,
) -> tuple[list[Comparison], Trace]:
    """Step a session and an oracle side by side, and compare the actions whole.

    Args:
        session: The program.
        oracle: What was trained: called with observations, it returns actions.
        pool: The inputs of the example.
        reference: The module itself: an integer that it gives otherwise where an observation
            differs in its last bits may differ.
        rollouts: How many rollouts, at batches of 1, 3 and 64 in turn.
        steps: How many steps each has.
        allowed: How far numbers may differ.

    Returns:
        The comparisons, one for each action and size, and the inputs and outputs at the last
        size that failed.
    """
    check_counts(rollouts, steps)
    schema = session.schema
    if schema.state and not isinstance(oracle, Resets):
        raise ExportError(
            "the program carries a state, and the oracle has no method `reset`.",
            expected="an oracle with `reset(mask)`",
            got=type(oracle).__name__,
            hint="Give it a method `reset(mask)`, which sets back the rows of a bool tensor, or "
            "all for `None`.",
        )
    sizes = list(trial_sizes(schema, ROLLOUT_SIZES))
    rows: list[Comparison] = []
    kept = Trace()
    for place, one in enumerate(sizes):
        count = len(range(place, max(rollouts, len(sizes)), len(sizes)))
        trace = Trace()
        for turn in range(count):
            _roll(session, oracle, pool, one, steps, 1000 * place + turn, trace)
        note = f"({count} rollout{'s' * (count > 1)} of {steps} steps beside the oracle)"
        eager = Eager(schema, reference)
        found = [
            _judged(entry, trace, one, allowed or Tolerance(), note, eager)
            for entry in actions(schema)
            if entry.wire in trace.expected[0]
        ]
        if not all(row.ok for row in found) or not kept.given:
            kept = trace
        rows += found
    return rows, kept


def check_counts(rollouts: object, steps: object) -> None:
    """Check the arguments ``rollouts`` and ``steps``.

    Raises:
        ExportError: One is not a positive whole number.
    """
    for name, value in (("rollouts", rollouts), ("steps", steps)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ExportError(
                f"`{name}` must be a positive int, got {value!r}.", expected="an int", got=value
            )


def _roll(
    session: Session,
    oracle: Oracle,
    pool: Sequence[Tensor] | None,
    sizes: Mapping[str, int],
    steps: int,
    seed: int,
    trace: Trace,
) -> None:
    """Make one rollout, and append it to a trace."""
    schema = session.schema
    source = torch.Generator().manual_seed(seed)
    _reset(session, oracle, None)
    kept = 0
    for step in range(steps):
        observed = drawn(schema, pool, sizes, source)
        rows = next(iter(observed.values())).shape[:1] or (1,)
        mask: Tensor | None = None
        if step:
            mask = torch.rand(rows, generator=source) < SHARE_RESET
            _reset(session, oracle, mask)
        by_key = {schema.input(wire).key: value for wire, value in observed.items()}
        results = session.step(dict(by_key))
        copies = {key: value.clone() for key, value in by_key.items()}
        expected = _expected(oracle, arranged(copies), schema)
        given = {e.wire: _tensor(results[e.key]) for e in actions(schema)}
        kept += sum(value.numel() for value in observed.values())
        if step and kept > MOST_KEPT and not schema.state:
            observed = {}  # judged, and no longer needed to find what is missing
        trace.observed.append(observed)
        trace.resets.append(mask)
        trace.given.append(given)
        trace.expected.append(expected)


def _reset(session: Session, oracle: object, mask: Tensor | None) -> None:
    if session.schema.state:
        session.reset(mask)
    if isinstance(oracle, Resets):
        oracle.reset(mask)


def _expected(oracle: Oracle, observed: object, schema: Schema) -> dict[str, Tensor]:
    try:
        result = oracle(observed)
    except Exception as error:
        raise VerifyError(
            f"the oracle fails on observations like the example's: {str(error).strip()}",
            got=type(error).__name__,
            hint="It is called with a tensor, or with a dict of tensors where there are several "
            "observations, and must return the actions. Give an example of raw observations.",
        ) from error
    found = sorted_out(result, actions(schema), "what the oracle returns")
    return {wire: _tensor(value) for wire, value in found.items()}


def _tensor(value: object) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    try:
        return torch.as_tensor(value).clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DtypeMismatch(
            f"expected a tensor or an array of actions from the oracle, got {kind_of(value)}.",
            expected="a tensor or an array",
            got=type(value).__name__,
        ) from error


def drawn(
    schema: Schema,
    pool: Sequence[Tensor] | None,
    sizes: Mapping[str, int],
    source: torch.Generator,
) -> dict[str, Tensor]:
    """Draw observations like those of the example; a quarter of the rows from a wider range.

    Real numbers and images are drawn between the bounds of the example's. Other integers and masks
    are rows of the example, the same rows from every input.
    """
    rows: dict[str, Tensor] = {}
    found = {}
    for place, entry in enumerate(schema.inputs):
        if entry.wire in schema.state:
            continue
        shape = concrete(entry.shape, sizes)
        dtype: torch.dtype = getattr(torch, entry.dtype)
        whole = None if pool is None else pool[place]
        if dtype.is_floating_point and (whole is None or may_be_drawn(entry, whole)):
            low, high = _bounds(entry, whole)
            values = torch.rand(shape, generator=source, dtype=torch.float64)
            if shape:
                far = torch.rand(shape[:1], generator=source) < SHARE_WIDE
                spread = torch.where(far, WIDE, 1.0).reshape(-1, *[1] * (len(shape) - 1))
                values = (values - 0.5) * spread + 0.5
            found[entry.wire] = (low + (high - low) * values).to(dtype)
        elif whole is None or dtype is torch.uint8:
            low, high = (0, 1) if whole is None else (int(whole.min()), int(whole.max()))
            drawn_ints = torch.randint(low, high + 1, shape, generator=source)
            found[entry.wire] = drawn_ints.to(dtype)
        else:
            tensor = whole
            for dim, axis in enumerate(entry.shape):
                if isinstance(axis, str):
                    if axis not in rows:
                        have = tensor.shape[dim]
                        rows[axis] = torch.randint(have, (shape[dim],), generator=source)
                    tensor = tensor.index_select(dim, rows[axis] % tensor.shape[dim])
            found[entry.wire] = tensor.clone()
    return found


def _bounds(entry: Entry, whole: Tensor | None) -> tuple[float, float]:
    values = None if whole is None else whole[whole.isfinite()]
    if values is None or not values.numel():
        return float(entry.low or 0.0), float(1.0 if entry.high is None else entry.high)
    low, high = float(values.min()), float(values.max())
    return (low, high) if high > low else (low - 1.0, high + 1.0)


def _judged(
    entry: Entry,
    trace: Trace,
    sizes: Mapping[str, int],
    allowed: Tolerance,
    note: str,
    eager: Eager,
) -> Comparison:
    """Compare an action over all steps."""
    given = [step[entry.wire] for step in trace.given]
    expected = [step[entry.wire] for step in trace.expected]
    one, other = given[0], expected[0]
    if one.shape != other.shape or one.dtype != other.dtype:
        told = f"{one.dtype} {tuple(one.shape)} for {other.dtype} {tuple(other.shape)}"
        return Comparison(entry.wire, sizes, math.inf, ok=False, note=f"{told} {note}")
    got, truth = torch.stack(given).double(), torch.stack(expected).double()
    magnitudes = truth.abs().nan_to_num(0.0, 0.0)
    rtol, atol = allowed.of(entry, float(magnitudes.max()) if magnitudes.numel() else 0.0)
    apart = differences(got, truth)
    wrong = apart > magnitudes * rtol + atol
    if bool(wrong.any()) and not other.is_floating_point():
        share = float(wrong.double().mean())
        if share <= MOST_FLIPPED and all(trace.observed):
            for bits in BITS:
                again = replay(eager, trace, 1 + bits * 2.0**-23)
                values = torch.stack([step[entry.key] for step in again]).double()
                wrong &= differences(values, truth) > 0
            if not bool(wrong.any()):
                note = f"({share:.2g} flip where an observation does by a bit) {note}"
    elif bool(wrong.any()):
        error = _own_rounding(entry, trace, eager)
        wrong = apart > magnitudes * rtol + atol + MOST_OWN_ERRORS * error
        if not bool(wrong.any()):
            note = f"({OWN_ROUNDING} {error:.2g}) {note}"
    largest = float(apart.max()) if apart.numel() else 0.0
    return Comparison(entry.wire, sizes, largest, not bool(wrong.any()), note, rtol, atol)


def _own_rounding(entry: Entry, trace: Trace, eager: Eager) -> float:
    """Return how far the module itself is from what it gives in float64, in the steps kept.

    It is 0 where the module cannot compute in float64, or gives other numbers when it is called
    again.
    """
    with contextlib.suppress(Exception):  # a dtype is written out in it, or it cannot be copied
        exact = eager.in_float64()
        steps = [pair for pair in zip(trace.observed, trace.resets, strict=True) if pair[0]]
        kept = Trace([observed for observed, _ in steps], [mask for _, mask in steps])
        given, again, truth = (
            torch.stack([step[entry.key] for step in replay(one, kept)]).double()
            for one in (eager, eager, exact)
        )
        if torch.equal(given, again):
            return own_rounding(given, truth)
    return 0.0


def differences(got: Tensor, truth: Tensor) -> Tensor:
    """Return how far numbers are apart; those that are both not a number are equal."""
    same = (got == truth) | (got.isnan() & truth.isnan())
    return (got - truth).abs().masked_fill(same, 0.0).nan_to_num(math.inf)


def replay(
    stepper: Stepper, trace: Trace, factor: float | None = None
) -> Iterator[dict[Key, Tensor]]:
    """Step through the observations of a trace again; real numbers by a factor if asked for."""
    for observed, mask in zip(trace.observed, trace.resets, strict=True):
        stepper.reset(mask)
        inputs: dict[Key, object] = {
            wire_key(wire): value
            if factor is None or not value.is_floating_point()
            else value * factor
            for wire, value in observed.items()
        }
        results = stepper.step(inputs)
        yield {key: value for key, value in results.items() if isinstance(value, Tensor)}


# Which step a policy lacks, found by trying which known step gives what its oracle gives.
#
# Knows a few dozen steps that stand between an environment and a network; must not know files,
# formats or frameworks.

_CLIPS = (1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 100.0)
_CLOSE = 1e-3
"""What share of the largest number mended actions may differ by."""
_AGREE = 0.995
"""What share of the numbers must agree after a mend: ties of an arg-max may fall otherwise."""
_MOST_ROWS = 512
_MOST_FITTED = 64
_AFTER_NORMALISER = (10.0, 5.0, 3.0)


@runtime_checkable
class Rerun(Protocol):
    """A keyed module, run eagerly on tensors in the order of the inputs."""

    @property
    def module(self) -> nn.Module:
        """The module."""
        ...

    def __call__(self, tensors: Sequence[Tensor]) -> Mapping[str, Tensor]:
        """Return the outputs by wire name."""
        ...

    def other(self, module: nn.Module) -> Rerun:
        """Return what runs another module on the same keys."""
        ...

    def with_gradients(self, tensors: Sequence[Tensor]) -> Mapping[str, Tensor]:
        """Return the outputs, which know what they were computed from."""
        ...


def missing_step(trace: Trace, schema: Schema, reference: Rerun, whole: object) -> str | None:
    """Name the step that mends the actions of a trace, or say where they differ.

    Args:
        trace: What the program and the oracle gave.
        schema: What the program takes.
        reference: The module, run eagerly.
        whole: The sequence that the oracle knows to be right, or ``None``.
    """
    wires = [e.wire for e in actions(schema) if e.wire in trace.expected[0]]
    trace = _cut(trace)
    wrong = [wire for wire in wires if not _exactly(_all(trace.given, wire), _truth(trace, wire))]
    if not wrong:
        return None
    eager = Eager(schema, reference)
    if isinstance(whole, nn.Module):
        found = _left_out(trace, schema, whole, wrong, reference)
        if found is not None:
            return found
    for wire in wrong:
        got, truth = _all(trace.given, wire), _truth(trace, wire)
        entry = schema.output(wire)
        found = (
            next(_after(got, truth, f"`{wire}`"), None)
            or _before(trace, eager, entry, truth)
            or _between(trace, schema, entry, truth, reference)
            or _carried(trace, schema, entry, truth, reference)
            or _fitted(trace, schema, entry, truth, reference)
        )
        if found is not None:
            return found
    return _where(trace, wrong)


def _cut(trace: Trace) -> Trace:
    """Return the steps of a trace whose observations are kept, and no more than a few rows."""
    kept = Trace()
    rows = 0
    for observed, mask, given, expected in zip(
        trace.observed, trace.resets, trace.given, trace.expected, strict=True
    ):
        if not observed or (rows > _MOST_ROWS and mask is None):
            break
        kept.observed.append(observed)
        kept.resets.append(mask)
        kept.given.append(given)
        kept.expected.append(expected)
        rows += next(iter(observed.values())).shape[0] if next(iter(observed.values())).ndim else 1
    return kept


def _all(steps: Sequence[Mapping[str, Tensor]], wire: str) -> Tensor:
    return torch.cat([x if x.ndim else x[None] for x in (step[wire] for step in steps)])


def _truth(trace: Trace, wire: str) -> Tensor:
    return _all(trace.expected, wire)


def _agrees(got: Tensor, truth: Tensor) -> bool:
    if got.shape != truth.shape:
        return False
    apart = differences(got.double(), truth.double())
    finite = truth.double().nan_to_num(0.0, 0.0, 0.0).abs()
    allowed = _CLOSE * float(finite.max()) if finite.numel() else 0.0
    integer = not truth.is_floating_point()
    return float((apart <= (0 if integer else allowed)).double().mean()) >= _AGREE


def _exactly(got: Tensor, truth: Tensor) -> bool:
    return got.dtype == truth.dtype and _agrees(got, truth)


def _left_out(
    trace: Trace, schema: Schema, whole: nn.Module, wires: Sequence[str], reference: Rerun
) -> str | None:
    """Leave one step, or two, out of the right sequence: what gives the same is the module."""
    steps = _steps(whole)
    for count in (1, 2):
        for left in combinations(range(len(steps)), count):
            rest = [step for place, step in enumerate(steps) if place not in left]
            if not rest:
                continue
            with contextlib.suppress(Exception):
                shorter = Eager(schema, reference.other(TensorDictSequential(*rest)))
                results = [
                    {e.wire: r[e.key] for e in actions(schema)} for r in replay(shorter, trace)
                ]
                if all(_exactly(_all(results, w), _all(trace.given, w)) for w in wires):
                    return " and ".join(_told(steps[place]) for place in left)
    return None


def _steps(module: nn.Module) -> list[nn.Module]:
    """Return the keyed steps of a sequence; of another module none."""
    if not isinstance(module, TensorDictSequential):
        return []
    return list(module)


def _told(step: nn.Module) -> str:
    inner = getattr(step, "module", step)
    text = repr(inner)
    if not isinstance(inner, nn.Module):
        text = getattr(inner, "__qualname__", type(inner).__name__)
    elif len(text) > 100:
        text = type(inner).__name__
    keys = ", ".join(f"`{key}`" for key in getattr(step, "out_keys", ()))
    return f"`{text}` on {keys}"


def _after(got: Tensor, truth: Tensor, name: str) -> Iterator[str]:
    """Try what may come after the network."""
    if got.shape == truth.shape and got.dtype != truth.dtype and _agrees(got, truth):
        dtype = str(truth.dtype).removeprefix("torch.")
        yield f"a cast of {name} to {dtype}"
    if got.numel() == truth.numel() and got.shape != truth.shape:
        shape = tuple(truth.shape[1:])
        if _agrees(got.reshape(truth.shape), truth):
            yield f"a reshape of {name} to {('rows', *shape)}"
        got = got.reshape(truth.shape)
    if not truth.is_floating_point() and got.is_floating_point():
        if got.ndim == truth.ndim + 1 and _agrees(got.argmax(-1), truth):
            yield f"an arg-max: `{name[1:-1]}.argmax(-1)`"
        if got.shape == truth.shape:
            for limit in (0.0, 0.5):
                if _agrees((got > limit).to(truth.dtype), truth):
                    yield f"a threshold: {name} > {limit}"
            if _agrees(got.round(), truth):
                yield f"rounding of {name}"
    if got.shape != truth.shape or not truth.numel():
        return
    if not truth.is_floating_point():
        yield from _of_integers(got, truth, name)
        return
    flat = got.double().reshape(len(got), -1)
    wanted = truth.double().reshape(len(truth), -1)
    low, high = wanted.min(0).values, wanted.max(0).values
    limits = f"[{_shown(low)}, {_shown(high)}]"
    if _agrees(flat.clamp(low, high), wanted):
        yield f"a clip of {name} to {limits}"
    if _agrees(flat.tanh(), wanted):
        yield f"a squash: `{name[1:-1]}.tanh()`"
    forms: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
        ("", lambda x: x),
        ("a clip to [-1, 1] and then ", lambda x: x.clamp(-1, 1)),
        ("a squash (tanh) and then ", lambda x: x.tanh()),
    )
    for told, form in forms:
        x = form(flat)
        inside = (wanted > low + 1e-6 * (high - low)) & (wanted < high - 1e-6 * (high - low))
        for clipped in (False, True):
            keep = inside if clipped else torch.ones_like(inside)
            scale, shift = _line(x, wanted, keep)
            mended = x * scale + shift
            mended = mended.clamp(low, high) if clipped else mended
            if _agrees(mended, wanted):
                words = [f"{told}a scale: {name} * {_shown(scale)} + {_shown(shift)}"]
                if float(scale.sub(1).abs().max()) < _CLOSE:
                    words = [f"{told}a shift: {name} + {_shown(shift)}"]
                words += [f"a clip to {limits}"] if clipped else []
                yield ", and then ".join(words)


def _of_integers(got: Tensor, truth: Tensor, name: str) -> Iterator[str]:
    apart = truth.long() - got.long()
    if bool((apart == apart.flatten()[0]).all()):
        yield f"a start: {name} + {int(apart.flatten()[0])}"
    pairs = torch.unique(torch.stack([got.flatten().long(), truth.flatten().long()], 1), dim=0)
    if len(pairs) == len(pairs[:, 0].unique()) > 1:
        table = {int(one): int(other) for one, other in pairs[:16]}
        yield f"a table: {name} by {table}"


def _line(x: Tensor, y: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Fit ``y = scale * x + shift`` for each element, by least squares over the rows kept."""
    weight = keep.double()
    count = weight.sum(0).clamp(min=1)
    mean_x, mean_y = (x * weight).sum(0) / count, (y * weight).sum(0) / count
    dx, dy = (x - mean_x) * weight, (y - mean_y) * weight
    scale = (dx * dy).sum(0) / (dx * dx).sum(0).clamp(min=1e-12)
    return scale, mean_y - scale * mean_x


def _shown(values: Tensor) -> str:
    if values.numel() > 1 and float(values.max() - values.min()) > 1e-3:
        listed = [f"{value:.3g}" for value in values[:6].tolist()]
        return f"({', '.join(listed)}{', ...' if len(values) > 6 else ''})"
    return f"{float(values.flatten()[0]):.3g}"


def _before(trace: Trace, eager: Eager, entry: Entry, truth: Tensor) -> str | None:
    """Try what may come before the network, on all observations of a kind at once."""
    one = trace.observed[0]
    changes: list[tuple[str, Callable[[str, Tensor], Tensor]]] = []
    for wire, value in one.items():
        if not value.is_floating_point():
            changes.append((f"`{wire}.float() / 255`", _only(wire, lambda x: x.float() / 255)))
            changes.append((f"`{wire}.float()`", _only(wire, lambda x: x.float())))
        else:
            changes.append((f"`{wire} / 255`", _only(wire, lambda x: x / 255)))
            changes += [
                (f"a clip of `{wire}` to [-{c:g}, {c:g}]", _only(wire, _clamp(c))) for c in _CLIPS
            ]
        if value.ndim == 4:
            for order in ((0, 3, 1, 2), (0, 2, 3, 1)):
                told = f"`{wire}.permute{order}"
                changes.append((f"{told}`", _only(wire, _permuted(order, 0))))
                changes.append((f"{told}.float() / 255`", _only(wire, _permuted(order, 255))))
    for told, change in changes:
        with contextlib.suppress(Exception):
            if _agrees(_changed(trace, eager, entry, change), truth):
                return f"a step before the network: {told}"
    return None


def _permuted(order: Sequence[int], scale: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.permute(*order).float() / scale if scale else x.permute(*order)


def _clamp(most: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x.clamp(-most, most)


def _only(wire: str, change: Callable[[Tensor], Tensor]) -> Callable[[str, Tensor], Tensor]:
    return lambda name, value: change(value) if name == wire else value


def _changed(
    trace: Trace, eager: Eager, entry: Entry, change: Callable[[str, Tensor], Tensor]
) -> Tensor:
    changed = Trace(
        [{wire: change(wire, x) for wire, x in step.items()} for step in trace.observed],
        trace.resets,
    )
    return torch.cat([step[entry.key] for step in replay(eager, changed)])


def _between(
    trace: Trace, schema: Schema, entry: Entry, truth: Tensor, reference: Rerun
) -> str | None:
    """Try a clip between two steps of a sequence, as that of normalised observations."""
    steps = _steps(reference.module)
    for place, step in enumerate(steps[:-1], 1):
        for key in getattr(step, "out_keys", ()):
            for most in _CLIPS:
                clip = TensorDictModule(nn.Hardtanh(-most, most), in_keys=[key], out_keys=[key])
                with contextlib.suppress(Exception):
                    longer = TensorDictSequential(*steps[:place], clip, *steps[place:])
                    eager = Eager(schema, reference.other(longer))
                    results = torch.cat([r[entry.key] for r in replay(eager, trace)])
                    if _agrees(results, truth):
                        return f"a clip of `{key}` to [-{most:g}, {most:g}] after {_told(step)}"
    return None


def _carried(
    trace: Trace, schema: Schema, entry: Entry, truth: Tensor, reference: Rerun
) -> str | None:
    """Try other ways to carry and reset a state."""
    pairs = dict(schema.state)
    for one in schema.inputs:
        for new in schema.outputs:
            fits = (one.dtype, one.shape) == (new.dtype, new.shape)
            free = one.wire not in pairs and new.wire not in pairs.values()
            if fits and free and new.wire not in trace.expected[0]:
                pairs[one.wire] = new.wire
    if pairs != schema.state:
        with contextlib.suppress(Exception):
            eager = Eager(schema, reference, pairs)
            if _agrees(torch.cat([r[entry.key] for r in replay(eager, trace)]), truth):
                return f"a state that is carried and reset: pass `state={pairs}`"
    if schema.state:
        with contextlib.suppress(Exception):
            eager = Eager(schema, reference)
            starts: list[Tensor | None] = [None if m is None else m & False for m in trace.resets]
            unreset = Trace(trace.observed, starts)
            if _agrees(torch.cat([r[entry.key] for r in replay(eager, unreset)]), truth):
                return "a reset: the oracle keeps its state where rows are reset"
            every: list[Tensor | None] = [None for _ in trace.resets]
            forgetful = Trace(trace.observed, every)
            if _agrees(torch.cat([r[entry.key] for r in replay(eager, forgetful)]), truth):
                return "a state: the oracle forgets it after each step"
    return None


def _fitted(
    trace: Trace, schema: Schema, entry: Entry, truth: Tensor, reference: Rerun
) -> str | None:
    """Fit a normaliser of each observation: by gradient, where the network has one."""
    if schema.state or not truth.is_floating_point():
        return None
    for wire, first in trace.observed[0].items():
        if not first.is_floating_point() or first.ndim != 2 or first.shape[1] > _MOST_FITTED:
            continue
        with contextlib.suppress(Exception):
            found = _normaliser(trace, schema, entry, truth, reference, wire)
            if found is not None:
                return found
    return None


def _normaliser(
    trace: Trace, schema: Schema, entry: Entry, truth: Tensor, reference: Rerun, wire: str
) -> str | None:
    observed = {name: _all(trace.observed, name)[:_MOST_ROWS] for name in trace.observed[0]}
    wanted = truth[:_MOST_ROWS].float()
    low, high = wanted.min(0).values, wanted.max(0).values
    inside = ((wanted > low) & (wanted < high)).float()
    x = observed[wire]

    def run(scale: Tensor, shift: Tensor, most: float) -> Tensor:
        values = (x * scale + shift).clamp(-most, most)
        inputs = [values if e.wire == wire else observed[e.wire] for e in schema.inputs]
        return reference.with_gradients(inputs)[entry.wire]

    for most in (math.inf, *_AFTER_NORMALISER):
        spread = x.std(0).clamp(min=1e-6)
        scale = (1 / spread).clone().requires_grad_()
        shift = (-x.mean(0) / spread).clone().requires_grad_()

        def loss(a: Tensor = scale, b: Tensor = shift, c: float = most) -> Tensor:
            return ((run(a, b, c) - wanted) * inside).square().mean()

        _descend([scale, shift], loss)
        with torch.no_grad():
            got = run(scale, shift, most).detach()
            centre, width = _shown(-shift / scale), _shown(1 / scale)
        told = f"a normaliser of `{wire}`, about `({wire} - {centre}) / {width}`"
        told += f", clipped to [-{most:g}, {most:g}]" if most < math.inf else ""
        if _agrees(got, wanted):
            return told
        if _agrees(got.clamp(low, high), wanted):
            return f"{told}, and a clip of `{entry.wire}`"
    return None


def _descend(parameters: Sequence[Tensor], loss: Callable[[], Tensor]) -> None:
    """Minimise a loss: first by steps that find the valley, then by those that find its ground."""
    far = torch.optim.Adam(parameters, lr=0.03)
    near = torch.optim.LBFGS(parameters, max_iter=100, line_search_fn="strong_wolfe")

    def computed() -> Tensor:
        far.zero_grad()
        value = loss()
        value.backward()
        return value.detach()

    for _ in range(250):
        computed()
        far.step()
    near.step(computed)


def _where(trace: Trace, wires: Sequence[str]) -> str | None:
    """Describe which steps differ, if that explains something."""
    first: set[bool] = set()
    for given, expected, mask in zip(trace.given, trace.expected, trace.resets, strict=True):
        for wire in wires:
            if not _agrees(given[wire], expected[wire]):
                first.add(mask is None)
    if first == {False}:
        return "what happens after the first step of a rollout: a state or a reset"
    return None
