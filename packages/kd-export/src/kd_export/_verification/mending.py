"""Which step a policy lacks, found by trying which known step gives what its oracle gives.

Knows a few dozen steps that stand between an environment and a network; must not know files,
formats or frameworks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from kd_export._schema.schema import Entry, Schema
from kd_export._verification.rollouts import Eager, Trace, actions, differences, replay
from kd_nn import TensorDictModule, TensorDictSequential

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
        value.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        return value.detach()

    for _ in range(250):
        computed()
        far.step()
    near.step(computed)  # type: ignore[no-untyped-call]  # as above


def _where(trace: Trace, wires: Sequence[str]) -> str | None:
    """Say which steps differ, where that tells something."""
    first: set[bool] = set()
    for given, expected, mask in zip(trace.given, trace.expected, trace.resets, strict=True):
        for wire in wires:
            if not _agrees(given[wire], expected[wire]):
                first.add(mask is None)
    if first == {False}:
        return "what happens after the first step of a rollout: a state or a reset"
    return None
