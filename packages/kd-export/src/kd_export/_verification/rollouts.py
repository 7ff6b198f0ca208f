"""Rollouts beside an oracle: raw observations in, environment actions out, rows reset on the way.

Knows sessions, and what an oracle is; must not know files, formats, frameworks, or which step of a
policy is missing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor

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
from kd_export._schema.schema import Entry, Schema
from kd_export._schema.vectors import concrete
from kd_export._schema.wire import as_key, nest, unnest, wire_key
from kd_export._verification.comparison import (
    MOST_OWN_ERRORS,
    OWN_ROUNDING,
    Comparison,
    HasError,
    Tolerance,
    own_rounding,
)
from kd_export._verification.sampling import may_be_drawn
from kd_export._verification.trials import trial_sizes

ROLLOUT_SIZES = (1, 3, 64)
"""The batches that rollouts are made at."""
SHARE_RESET = 0.15
"""What share of the rows is reset before a step."""
SHARE_WIDE, WIDE = 0.25, 4.0
"""What share of the rows is drawn from a wider range than the example's, and how much wider."""
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
    """What went in and came out in some rollouts, by wire name and a step an item.

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
            hint="Let it be a dict by key, or name the one key as `outputs=`.",
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
        The comparisons, one for each action and size, and what went in and came out at the last
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
        results = session.step(cast("dict[Key, object]", dict(by_key)))
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
