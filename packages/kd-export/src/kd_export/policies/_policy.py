"""A policy with all that its export needs: one object that `kd_export.save` takes as it is.

Here, too, is what the readers of all frameworks put it together with.

Knows keyed modules, states and what an oracle is; must not know frameworks or files.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from kd_core import NestedKey, TensorDict, unravel_key
from kd_export._capture.flat_module import Recurrent as Recurrent
from kd_export._capture.flat_module import detached
from kd_export._errors import (
    ExportError,
    Key,
    KeyMismatch,
    NotExportable,
    ShapeMismatch,
    quoted,
)
from kd_export._schema.files import (
    Json,
    Number,
    argument_names,
    as_key,
    check_mapping,
    nest,
    unnest,
    wire_name,
)
from kd_export._schema.schema import Axis, Entry, Schema
from kd_export._verification.rollouts import arranged
from kd_nn import TensorDictModule, TensorDictSequential

OBSERVATION, ACTION = "observation", "action"
Word = TypeVar("Word")
Read = TypeVar("Read")
First = TypeVar("First")
Theirs = TypeVar("Theirs")


class Policy:
    """A trained policy: raw observations in, environment actions out.

    `kd_export.save` and `kd_export.export` take it as it is, with the options of a module, and
    compare the file with its oracle.

    Args:
        module: A keyed module that takes the observations, and a state, and gives the actions.
        example: Raw observations of some rows, and a state if there is one.
        oracle: What was trained: a callable that takes the observations, a tensor or a dict of
            several, and returns the actions. If it remembers something, it has a method
            ``reset(mask)``.
        state: The key of each next state, by that of the state.
        initial: What the state starts with, if not with zeros.
        metadata: What the file says of the policy: names, limits, units, rates.
        notes: What the report on a file says of the policy, a sentence each.

    Example:
        >>> from kd_nn import TensorDictModule
        >>> net = torch.nn.Linear(3, 2)
        >>> module = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
        >>> example = {"observation": torch.randn(8, 3)}
        >>> policy = Policy(module, example, oracle=lambda x: net(x).detach())
        >>> policy(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        module: nn.Module,
        example: Mapping[Word, object],
        *,
        oracle: Callable[..., object],
        state: Mapping[Read, NestedKey] | None = None,
        initial: Mapping[First, object] | None = None,
        metadata: Mapping[str, object] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        check_mapping("example", example, "{'observation': ...}", KeyMismatch)
        check_mapping("state", state, "{'h': ('next', 'h')}", KeyMismatch)
        if not callable(oracle):
            raise ExportError(
                f"expected a callable for `oracle`, got {oracle!r}.",
                expected="a callable",
                got=oracle,
                hint="Pass the framework's own `predict`: observations in, actions out.",
            )
        self.module = module
        self.example: dict[NestedKey, object] = {_word(key): x for key, x in example.items()}
        self.oracle = oracle
        self.state: dict[NestedKey, NestedKey] = {_word(r): w for r, w in (state or {}).items()}
        self.initial: dict[NestedKey, object] = {_word(k): x for k, x in (initial or {}).items()}
        self.metadata = dict(metadata or {})
        self.notes = tuple(notes)
        self._held: dict[Key, Tensor] = {}

    def __repr__(self) -> str:
        inputs = quoted(wire_name(key) for key in self._observations())
        return f"{type(self).__name__}({inputs} -> {quoted(map(wire_name, self._actions()))})"

    def __call__(self, observations: object) -> object:
        """Return the actions, and carry the state to the next call.

        Args:
            observations: An array or a tensor with rows, or a dict of several.

        Returns:
            The actions, as the observations were given: arrays for arrays.

        Raises:
            KeyMismatch: An observation is missing.
            ShapeMismatch: An observation has not the rank of the example's.
        """
        given = self._given(observations)
        rows = next(iter(given.values())).shape[:1]
        container = TensorDict({}, batch_size=rows)
        for key, value in given.items():
            container.set(key, value)
        for read, start in self._starts(rows).items():
            container.set(read, self._held.get(read, start))
        with torch.no_grad():
            result = self.module(container)
        self._held = {as_key(r): result.get(w).clone() for r, w in self.state.items()}
        numpy = any(not isinstance(leaf, Tensor) for leaf in _leaves(observations))
        found = {key: result.get(key) for key in self._actions()}
        return arranged({key: x.numpy() if numpy else x for key, x in found.items()})

    def reset(self, mask: object = None) -> None:
        """Set the state back to what it starts with.

        Args:
            mask: One bool for each row: which rows to set back. By default all.
        """
        if mask is None:
            self._held = {}
            return
        chosen = torch.as_tensor(mask, dtype=torch.bool).reshape(-1)
        for key, start in self._starts(chosen.shape).items():
            held = self._held.get(key)
            if held is not None:
                rows = chosen.reshape(-1, *[1] * (held.ndim - 1))
                self._held[key] = torch.where(rows, start, held)

    def _observations(self) -> list[Key]:
        states = {as_key(key) for key in self.state}
        return [key for key in _keys(self.module.in_keys) if key not in states]

    def _actions(self) -> list[Key]:
        states = {as_key(key) for key in self.state.values()}
        return [key for key in _keys(self.module.out_keys) if key not in states]

    def _starts(self, rows: torch.Size) -> dict[Key, Tensor]:
        """Return what the state starts with."""
        examples = _unnested(self.example)
        first = {as_key(key): value for key, value in self.initial.items()}
        found = {}
        for key in map(as_key, self.state):
            like = torch.as_tensor(examples[key])
            start = torch.zeros((*rows, *like.shape[1:]), dtype=like.dtype)
            if key in first:
                start += torch.as_tensor(first[key], dtype=like.dtype)
            found[key] = start
        return found

    def _given(self, observations: object) -> dict[Key, Tensor]:
        found = by_key(observations, self._observations())
        examples = _unnested(self.example)
        for key, tensor in found.items():
            like = torch.as_tensor(examples[key])
            if tensor.ndim != like.ndim:
                raise ShapeMismatch(
                    f"expected {like.ndim} dimensions, the rows first, for `{wire_name(key)}`, got "
                    f"shape {tuple(tensor.shape)}.",
                    key=key,
                    expected=like.ndim,
                    got=tuple(tensor.shape),
                    hint="Pass a batch of observations: `observation[None]` for one.",
                )
        return found


class Oracle:
    """What the framework itself does: observations in, actions out.

    One that remembers something has a method ``reset(mask)``, which begins a new episode in these
    rows, or in all.

    Attributes:
        module: The whole sequence of steps, of which a module may lack one.
    """

    module: nn.Module | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        """Return the actions."""
        raise NotImplementedError


class Draft:
    """A policy in the making, a step after the other.

    Attributes:
        steps: The steps.
        example: Raw observations, and a state, by key.
        state: The key of each next state, by that of the state.
    """

    def __init__(self) -> None:
        self.steps: list[TensorDictModule] = []
        self.example: dict[NestedKey, object] = {}
        self.state: dict[NestedKey, NestedKey] = {}

    def add(
        self, step: nn.Module, in_keys: Sequence[NestedKey], out_keys: Sequence[NestedKey]
    ) -> None:
        """Add a step."""
        self.steps.append(TensorDictModule(step, in_keys=[*in_keys], out_keys=[*out_keys]))

    def change(self, key: NestedKey, *steps: nn.Module) -> None:
        """Add steps that read an entry and write it back."""
        for step in steps:
            self.add(step, [unravel_key(key)], [unravel_key(key)])

    def normalise(self, key: NestedKey, mean: Tensor, deviation: Tensor, limit: float) -> None:
        """Add a step that normalises an entry, and one that clips it, if there is a limit."""
        self.change(key, Normalise(mean, deviation))
        if limit:
            self.change(key, Clip(-limit, limit))

    def add_with_state(
        self,
        step: nn.Module,
        in_keys: Sequence[NestedKey],
        out_keys: Sequence[NestedKey],
        starts: Mapping[str, Tensor],
    ) -> None:
        """Add a step that reads states after the rest, and writes the next ones.

        Args:
            step: The step.
            in_keys: What it reads beside.
            out_keys: What it writes beside.
            starts: What each state starts with, by name; the rows come first.
        """
        state: dict[NestedKey, NestedKey] = {("state", n): ("next", "state", n) for n in starts}
        self.add(step, [*in_keys, *state], [*out_keys, *state.values()])
        self.example |= zip(state, starts.values(), strict=True)
        self.state |= state

    def add_layer(self, layer: nn.RNNBase, rows: int) -> None:
        """Add a recurrent layer over the features."""
        names = ("h", "c") if isinstance(layer, nn.LSTM) else ("h",)
        start = torch.zeros(rows, layer.num_layers, layer.hidden_size)
        starts = dict.fromkeys(names, start)
        self.add_with_state(Recurrent(copied(layer)), ["features"], ["features"], starts)

    def finish(self, oracle: Oracle, metadata: Mapping[str, object]) -> Policy:
        """Build the policy: the last step writes the action."""
        module = TensorDictSequential(*self.steps).eval()
        oracle.module = module
        module.select_out_keys(ACTION, *self.state.values())
        return Policy(module, self.example, oracle=oracle, state=self.state, metadata=metadata)


def wrong_kind(wanted: str, given: object, expected: str, hint: str) -> NotExportable:
    """Return the error for what is not of the framework."""
    return NotExportable(
        f"expected {wanted}, got `{type(given).__name__}`.",
        expected=expected,
        got=type(given).__name__,
        hint=hint,
    )


def unknown_kind(what: str, given: object, expected: object = None) -> NotExportable:
    """Return the error for a part of a framework that is not converted."""
    return NotExportable(
        f"the {what} `{type(given).__name__}` is of a kind that kd_export does not know.",
        expected=expected,
        got=type(given).__name__,
        hint="Write it as a keyed module, and pass `oracle=` to `kd_export.save`.",
    )


def by_key(observations: object, keys: Sequence[Key]) -> dict[Key, Tensor]:
    """Read observations by key: an array or a tensor, or a mapping of several.

    The keys of a mapping may leave out the first part, ``"observation"``.

    Raises:
        KeyMismatch: One is missing.
    """
    given: Mapping[Key, object]
    if isinstance(observations, Mapping):
        given = _unnested(observations)
    elif len(keys) == 1:
        given = {keys[0]: observations}
    else:
        raise KeyMismatch(
            f"expected a dict of observations, {quoted(map(wire_name, keys))}.",
            expected=tuple(map(wire_name, keys)),
            got=type(observations).__name__,
        )
    found = {}
    for key in keys:
        value = next((given[k] for k in (key, key[1:], (wire_name(key),)) if k in given), None)
        if value is None:
            raise KeyMismatch(
                f"observation `{wire_name(key)}` not found; available keys: "
                f"{quoted(wire_name(one) for one in given)}.",
                key=key,
                expected=wire_name(key),
            )
        found[key] = torch.as_tensor(value)
    return found


def _unnested(entries: Mapping[Word, object]) -> Mapping[Key, object]:
    return unnest(nest({as_key(key): value for key, value in entries.items()}))


def copied(module: Theirs) -> Theirs:
    """Return a copy of a module of a framework, on the CPU and in eval mode."""
    assert isinstance(module, nn.Module)
    return copy.deepcopy(module, detached(module)).cpu().eval()


def _word(key: object) -> NestedKey:
    """Return a key as people write it: of one part as a string."""
    parts = as_key(key)
    return parts[0] if len(parts) == 1 else parts


def _keys(listed: object) -> list[Key]:
    assert isinstance(listed, Iterable)
    return [as_key(key) for key in listed]


def _leaves(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return [leaf for one in value.values() for leaf in _leaves(one)]
    return [value]


# The steps between an environment and a network: what turns observations into numbers, and back.
#
# Each is a small module that prints its settings. Knows tensors; must not know frameworks, keys or
# spaces.


class Normalise(nn.Module):
    """Subtract a mean and divide by a deviation, in the dtype of both.

    Args:
        mean: The mean.
        deviation: The deviation, with what keeps it from zero.
        dtype: The dtype of the result, if it is not that of the computation.

    Example:
        >>> step = Normalise(torch.tensor([1.0]), torch.tensor([2.0]))
        >>> step(torch.tensor([[5.0]]))
        tensor([[2.]])
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, mean: Tensor, deviation: Tensor, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.register_buffer("mean", mean.detach().clone())
        self.register_buffer("deviation", deviation.detach().clone())
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """Normalise observations."""
        result = (x - self.mean) / self.deviation
        return result if self.dtype is None else result.to(self.dtype)

    def extra_repr(self) -> str:
        """Print what is normalised."""
        return f"{self.mean.numel()} numbers, {str(self.mean.dtype).removeprefix('torch.')}"


class Clip(nn.Module):
    """Clip numbers to limits, one for all or one for each element.

    Example:
        >>> Clip(-1.0, 1.0)(torch.tensor([-2.0, 0.5]))
        tensor([-1.0000,  0.5000])
    """

    low: Tensor
    high: Tensor

    def __init__(self, low: Tensor | float, high: Tensor | float) -> None:
        super().__init__()
        self.numbers = None if isinstance(low, Tensor) else (float(low), float(high))
        if isinstance(low, Tensor):
            self.register_buffer("low", low.detach().clone())
            self.register_buffer("high", torch.as_tensor(high).detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Clip numbers."""
        if self.numbers is not None:
            return x.clamp(*self.numbers)
        return torch.minimum(torch.maximum(x, self.low), self.high)

    def extra_repr(self) -> str:
        """Print the limits."""
        if self.numbers is not None:
            return f"{self.numbers[0]:g}, {self.numbers[1]:g}"
        return f"{_brief(self.low)}, {_brief(self.high)}"


class Unscale(nn.Module):
    """Bring actions from -1 to 1 to the limits of the environment.

    Example:
        >>> Unscale(torch.tensor([0.0]), torch.tensor([4.0]))(torch.tensor([[0.5]]))
        tensor([[3.]])
    """

    low: Tensor
    high: Tensor

    def __init__(self, low: Tensor, high: Tensor) -> None:
        super().__init__()
        self.register_buffer("low", low.detach().clone())
        self.register_buffer("high", high.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Scale actions."""
        return self.low + 0.5 * (x + 1.0) * (self.high - self.low)

    def extra_repr(self) -> str:
        """Print the limits."""
        return f"{_brief(self.low)}, {_brief(self.high)}"


class Affine(nn.Module):
    """Multiply by a scale and add a shift.

    Example:
        >>> Affine(2.0, 1.0)(torch.tensor([3.0]))
        tensor([7.])
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor | float, shift: Tensor | float = 0.0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.as_tensor(scale).detach().clone())
        self.register_buffer("shift", torch.as_tensor(shift).detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift numbers."""
        return x * self.scale + self.shift

    def extra_repr(self) -> str:
        """Print scale and shift."""
        return f"{_brief(self.scale)}, {_brief(self.shift)}"


class ScaleImage(nn.Module):
    """Convert pixels from 0 to 255 to floats from 0 to 1.

    Example:
        >>> ScaleImage()(torch.tensor([255], dtype=torch.uint8))
        tensor([1.])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Scale pixels."""
        return x.float() / 255.0


class ChannelsFirst(nn.Module):
    """Move the last dimension of images, their channels, before the others.

    Example:
        >>> ChannelsFirst()(torch.zeros(2, 8, 9, 3)).shape
        torch.Size([2, 3, 8, 9])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Reorder images."""
        return x.movedim(-1, -3)


class ToFloat(nn.Module):
    """Convert numbers to float32.

    Example:
        >>> ToFloat()(torch.tensor([1])).dtype
        torch.float32
    """

    def forward(self, x: Tensor) -> Tensor:
        """Convert numbers."""
        return x.float()


class OneHot(nn.Module):
    """Encode integers as rows with a single one; several integers, one behind the other.

    Args:
        counts: How many values each integer has.
        start: The smallest of them.

    Example:
        >>> OneHot([2, 3])(torch.tensor([[1, 2]]))
        tensor([[0., 1., 0., 0., 1.]])
    """

    def __init__(self, counts: Sequence[int], start: int = 0) -> None:
        super().__init__()
        self.counts = tuple(int(count) for count in counts)
        self.start = start

    def forward(self, x: Tensor) -> Tensor:
        """Encode integers."""
        columns = x.long() - self.start
        if columns.ndim == 1:
            columns = columns[:, None]
        parts = [
            (columns[:, place, None] == torch.arange(count)).float()
            for place, count in enumerate(self.counts)
        ]
        return torch.cat(parts, -1)

    def extra_repr(self) -> str:
        """Print the counts."""
        return f"{list(self.counts)}"


class ArgMax(nn.Module):
    """Choose the most likely action, or one from each group of logits.

    Args:
        counts: How many logits each group has; without it there is one group.
        start: What the smallest action is called.

    Example:
        >>> ArgMax()(torch.tensor([[0.1, 0.9]])), ArgMax([1, 2])(torch.tensor([[5.0, 0.1, 0.9]]))
        (tensor([1]), tensor([[0, 1]]))
    """

    def __init__(self, counts: Sequence[int] | None = None, start: int = 0) -> None:
        super().__init__()
        self.counts = None if counts is None else [int(count) for count in counts]
        self.start = start

    def forward(self, logits: Tensor) -> Tensor:
        """Choose actions."""
        if self.counts is None:
            chosen = logits.argmax(-1)
        else:
            groups = torch.split(logits, self.counts, -1)
            chosen = torch.stack([group.argmax(-1) for group in groups], -1)
        return chosen + self.start if self.start else chosen

    def extra_repr(self) -> str:
        """Print the groups."""
        return "" if self.counts is None else f"{self.counts}"


class Above(nn.Module):
    """Convert numbers to 1 above a threshold, and to 0 below it.

    Example:
        >>> Above(0.0)(torch.tensor([-1.0, 2.0]))
        tensor([0., 1.])
    """

    def __init__(self, threshold: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.threshold = threshold
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """Compare numbers."""
        return (x > self.threshold).to(self.dtype)

    def extra_repr(self) -> str:
        """Print the threshold."""
        return f"{self.threshold:g}"


class Shaped(nn.Module):
    """Reshape each row.

    Example:
        >>> Shaped([2, 3])(torch.zeros(5, 6)).shape
        torch.Size([5, 2, 3])
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(int(size) for size in shape)

    def forward(self, x: Tensor) -> Tensor:
        """Reshape rows."""
        return x.reshape(x.shape[0], *self.shape)

    def extra_repr(self) -> str:
        """Print the shape."""
        return f"{self.shape}"


def _brief(values: Tensor) -> str:
    numbers = values.flatten().tolist()
    if len(set(numbers)) == 1:
        return f"{numbers[0]:g}"
    listed = [f"{value:g}" for value in numbers[:4]]
    return f"[{', '.join(listed)}{', ...' if len(numbers) > 4 else ''}]"


# Spaces of gymnasium: examples drawn from them, what a file says of them, schemas.
#
# A space is known by the name of its class, so that gymnasium, gym and their kin need not be
# installed. Must not know policies or frameworks.

ROWS = 64
"""How many rows an example has."""
REACH = 3.0
"""How many deviations the rows of an example go from the mean at least."""
SEVERAL = ("Dict", "Tuple")
_FREE, _FAR = 3.0, 1e6
_MOST_LISTED = 256


class Array(Protocol):
    """The part of a numpy array that is read here."""

    def tolist(self) -> object:
        """Return nested lists."""
        ...


class Space(Protocol):
    """What all spaces share."""

    shape: tuple[int, ...]
    dtype: object


def kind(space: object) -> str:
    """Return the name of the class that says what a space is.

    Raises:
        ExportError: It is not known.
    """
    known = ("Box", "Discrete", "MultiDiscrete", "MultiBinary", *SEVERAL)
    for one in type(space).__mro__:
        if one.__name__ in known:
            return one.__name__
    raise ExportError(
        f"`{type(space).__name__}` is not a space that kd_export knows.",
        expected=known,
        got=type(space).__name__,
        hint="Flatten it, or write the keyed module yourself and pass `oracle=` to `save`.",
    )


def leaves(space: object, key: Key) -> Iterator[tuple[Key, Space]]:
    """List the spaces in a space by key; those of a tuple by their number."""
    if _is_leaf(space):
        yield key, space
    else:
        for name, one in _inside(space):
            yield from leaves(one, (*key, name))


def _is_leaf(space: object) -> TypeGuard[Space]:
    return kind(space) not in SEVERAL


def _inside(space: object) -> Iterator[tuple[str, object]]:
    inner: Any = getattr(space, "spaces", ())
    pairs = inner.items() if isinstance(inner, Mapping) else enumerate(inner)
    return ((str(name), one) for name, one in pairs)


def dtype_of(space: Space) -> torch.dtype:
    """Return the dtype of the elements of a space."""
    name = "int64" if kind(space) == "Discrete" else str(getattr(space.dtype, "name", space.dtype))
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def limits(space: Space) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest value of each element."""
    what = kind(space)
    if what == "Box":
        low, high = (torch.as_tensor(getattr(space, name)) for name in ("low", "high"))
        return low, high
    start = torch.as_tensor(getattr(space, "start", 0))
    if what == "MultiBinary":
        count = torch.full(tuple(space.shape), 2)
    else:
        count = torch.as_tensor(getattr(space, "n" if what == "Discrete" else "nvec"))
    start = start.expand(count.shape)
    return start, start + count - 1


def counts(space: Space) -> list[int]:
    """Return how many values each integer of a space may have."""
    low, high = limits(space)
    found: list[int] = (high - low + 1).flatten().tolist()
    return found


def draw(space: Space, source: torch.Generator, rows: int = ROWS) -> Tensor:
    """Draw elements of a space; a side without a limit ends at 3."""
    low, high = (limit.double() for limit in limits(space))
    free_below, free_above = low < -_FAR, high > _FAR
    least = torch.where(free_below, torch.where(free_above, -_FREE, high - 2 * _FREE), low)
    most = torch.where(free_above, torch.where(free_below, _FREE, low + 2 * _FREE), high)
    dtype = dtype_of(space)
    shape = (rows, *least.shape)
    values = torch.rand(shape, generator=source, dtype=torch.float64)
    if dtype.is_floating_point:
        return (least + (most - least) * values).to(dtype)
    return (least + ((most - least + 1) * values).floor()).to(dtype)


def around(
    mean: Tensor, deviation: Tensor, limit: float, shape: Sequence[int], source: torch.Generator
) -> Tensor:
    """Draw observations around a mean, so far away that a limit behind it clips a few."""
    return mean + deviation * max(REACH, limit / 3) * spread(shape, source)


def spread(shape: Sequence[int], source: torch.Generator) -> Tensor:
    """Draw numbers from -1 to 1, as float64."""
    return 2 * torch.rand(tuple(shape), generator=source, dtype=torch.float64) - 1


def described(space: object) -> dict[str, Json]:
    """Return what a file says of a space, as plain data: numbers without a limit are ``None``."""
    if not _is_leaf(space):
        inside: dict[str, Json] = {name: described(one) for name, one in _inside(space)}
        return {"space": kind(space), "entries": inside}
    low, high = limits(space)
    found: dict[str, Json] = {
        "space": kind(space),
        "shape": list(map(int, space.shape or ())),
        "dtype": str(dtype_of(space)).removeprefix("torch."),
    }
    for name, values in (("low", low), ("high", high)):
        found[name] = _numbers(values)
    return found


def told(framework: str, theirs: object, observation: object, action: object) -> dict[str, object]:
    """Return what metadata tells of a policy: where it is from, and the spaces it was made for."""
    return {
        "framework": framework,
        "algorithm": type(theirs).__name__,
        "observation": described(observation),
        "action": described(action),
    }


def _numbers(values: Tensor) -> Json:
    numbers = [_number(float(value)) for value in values.flatten().tolist()]
    if len(set(numbers)) == 1:
        return numbers[0]
    return list(numbers) if len(numbers) <= _MOST_LISTED else None


def _number(value: float) -> Number | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else value


def from_gymnasium(space: object, key: str = "observation") -> Schema:
    """Return the schema of observations of a space, which `kd_export.export` takes as an example.

    Args:
        space: A space of gymnasium or gym: `Box`, `Discrete`, `MultiDiscrete`, `MultiBinary`, or a
            `Dict` or `Tuple` of them.
        key: The key of the observation; those inside a `Dict` are below it.

    Returns:
        A schema with one axis, ``batch``, whose metadata hold the limits.
    """
    found = list(leaves(space, (key,)))
    names = argument_names([path for path, _ in found])
    entries = []
    for path, leaf in found:
        values = draw(leaf, torch.Generator().manual_seed(0))
        low, high = values.min().item(), values.max().item()
        dtype = str(values.dtype).removeprefix("torch.")
        shape = ("batch", *values.shape[1:])
        entries.append(Entry(path, names[path], dtype, shape, low, high))
    metadata: dict[str, Json] = {key: described(space)}
    return Schema(tuple(entries), (), {"batch": Axis(1, None)}, batch_dims=1, metadata=metadata)
