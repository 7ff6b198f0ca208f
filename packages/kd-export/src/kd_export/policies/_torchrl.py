"""Policies of TorchRL: modules of tensordict, and the transforms before them.

Knows what TorchRL's transforms do to observations, and how its policies are called. The libraries
are never imported: what is needed of them is there already where a policy of theirs is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeGuard

import torch
from torch import Tensor, nn

from kd_core import NestedKey
from kd_export._capture.flat_module import converted, is_foreign, recurrent_keys
from kd_export._errors import Key, KeyMismatch, NotExportable, quoted
from kd_export._schema.files import as_key, nest, unnest, wire_name
from kd_export.policies._policy import (
    Affine,
    ChannelsFirst,
    Normalise,
    Oracle,
    Policy,
    ScaleImage,
    ToFloat,
    by_key,
    unknown_kind,
)
from kd_nn import TensorDictModule, TensorDictSequential

_INIT: NestedKey = "is_init"


class Transform(Protocol):
    """What is used of a transform.

    Attributes:
        dim: The dimension that `CatTensors` joins.
        loc: What `ObservationNorm` adds, or subtracts if it is ``standard_normal``.
        scale: What it multiplies by, or divides by.
        standard_normal: Which of the two it does.
        shape_tolerant: Whether `ToTensorImage` leaves channels alone that come first.
    """

    in_keys: Sequence[NestedKey]
    out_keys: Sequence[NestedKey]
    dim: int
    loc: Tensor
    scale: Tensor
    standard_normal: bool
    shape_tolerant: bool

    def _call(self, container: _Container) -> _Container: ...


class _Container(Protocol):
    batch_size: torch.Size

    def get(self, key: object) -> Tensor: ...
    def set(self, key: object, value: object) -> object: ...


class Predict(Oracle):
    """The policy itself on containers of its own library, without exploration."""

    def __init__(
        self,
        policy: nn.Module,
        transforms: Sequence[Transform],
        keys: Sequence[NestedKey],
        state: Mapping[NestedKey, Tensor],
        action: NestedKey,
    ) -> None:
        self._policy = policy
        self._transforms = transforms
        self._keys = keys
        self._first = dict(state)
        self._pairs = recurrent_keys(policy)
        self._held: dict[NestedKey, Tensor] = {}
        self._new: Tensor | None = None
        self._action = action

    def __call__(self, observations: object) -> Tensor:
        """Return the actions."""
        theirs = sys.modules["tensordict"]
        deterministic = theirs.nn.InteractionType.DETERMINISTIC
        given = by_key(observations, [as_key(key) for key in self._keys])
        rows = len(next(iter(given.values())))
        container: _Container = theirs.TensorDict({}, batch_size=[rows])
        for key, value in given.items():
            container.set(key, value)
        with torch.no_grad(), theirs.nn.set_interaction_type(deterministic):
            for transform in self._transforms:
                container = transform._call(container)
            for read, start in self._first.items():
                value = torch.zeros(rows, *start.shape[1:], dtype=start.dtype)
                container.set(read, self._held.get(read, value))
            if self._first:
                new = torch.ones(rows, dtype=torch.bool) if self._new is None else self._new
                container.set(_INIT, new[:, None])
            result: _Container = self._policy(container)
        self._held = {read: result.get(new).clone() for read, new in self._pairs.items()}
        self._new = torch.zeros(rows, dtype=torch.bool)
        return result.get(self._action)

    def reset(self, mask: Tensor | None = None) -> None:
        """Begin a new episode in these rows, or in all."""
        if mask is None:
            self._held, self._new = {}, None
        elif self._new is not None:
            self._new = self._new | mask


def from_torchrl(
    policy: nn.Module,
    example: object,
    *,
    transforms: object = None,
    action: NestedKey = "action",
    metadata: Mapping[str, object] | None = None,
) -> Policy:
    """Build a policy of a module of TorchRL or tensordict.

    Converted are `TensorDictModule`, sequences, probabilistic modules (their deterministic value
    is taken), `Actor`, `ProbabilisticActor`, `QValueActor`, `TanhModule`, `LSTMModule` and
    `GRUModule`; modules that explore are left out.

    Args:
        policy: The policy, on the CPU and in eval mode.
        example: Raw observations, before the transforms: a container, such as a rollout, or a
            dict. Each has rows.
        transforms: What the environment does to observations: a transform, or a list of them.
            Known are `ObservationNorm`, `ToTensorImage`, `DoubleToFloat`, `CatTensors` and those
            that touch no observation of the policy.
        action: The key of the action.
        metadata: What the file says of the policy.

    Raises:
        NotExportable: A module or a transform is of a kind that is not converted.
    """
    if not is_foreign(policy):
        raise NotExportable(
            f"expected a policy of TorchRL, got `{type(policy).__name__}`.",
            got=type(policy).__name__,
            hint="Pass a keyed module of kd to `kd_export.save` as it is.",
        )
    network = converted(policy)
    state = recurrent_keys(policy)
    needed = [key for key in network.in_keys if key not in state]
    listed = list(_flattened(transforms))
    steps, known = _transformed(listed, needed)
    rows = _rows(example, needed if not steps else _first_keys(steps, needed), state)
    whole = TensorDictSequential(*steps, network).eval()
    if action not in whole.out_keys:
        raise KeyMismatch(
            f"`{action}` not found in the policy's out keys; available keys: "
            f"{quoted(whole.out_keys)}.",
            expected=action,
            got=tuple(whole.out_keys),
            hint="Pass the key of the action as `action=`.",
        )
    starts = {key: _start(policy, key, rows) for key in state}
    example_rows: dict[NestedKey, object] = {**rows, **starts}
    whole.select_out_keys(action, *state.values())
    oracle = Predict(policy, known, list(rows), starts, action)
    oracle.module = TensorDictSequential(*steps, *_parts(network)).eval()
    oracle.module.select_out_keys(action, *state.values())
    said = {"framework": "torchrl", "algorithm": type(policy).__name__, **(metadata or {})}
    return Policy(oracle.module, example_rows, oracle=oracle, state=state, metadata=said)


def _parts(network: nn.Module) -> list[nn.Module]:
    return list(network) if isinstance(network, TensorDictSequential) else [network]


def _flattened(transforms: object) -> Iterator[Transform]:
    """List transforms, those in a `Compose` too."""
    inner = getattr(transforms, "transforms", transforms)
    if isinstance(inner, Iterable):
        for one in inner:
            yield from _flattened(one)
    elif _is_transform(inner):
        yield inner
    elif inner is not None:
        raise unknown_kind("transform", inner)


def _is_transform(given: object) -> TypeGuard[Transform]:
    return hasattr(given, "in_keys") and hasattr(given, "out_keys")


def _transformed(
    transforms: Sequence[Transform], needed: Sequence[NestedKey]
) -> tuple[list[TensorDictModule], list[Transform]]:
    """Convert the transforms that lead to what a policy reads."""
    wanted = {as_key(key) for key in needed}
    kept: list[Transform] = []
    for transform in reversed(transforms):
        written = {as_key(key) for key in transform.out_keys}
        if written & wanted:
            kept.insert(0, transform)
            wanted |= {as_key(key) for key in transform.in_keys}
    steps = [step for transform in kept for step in _steps_of(transform)]
    return steps, kept


def _steps_of(transform: Transform) -> Iterator[TensorDictModule]:
    name = type(transform).__name__
    reads, writes = list(transform.in_keys), list(transform.out_keys)
    if name == "CatTensors":
        yield TensorDictModule(Concatenate(transform.dim), in_keys=reads, out_keys=writes)
        return
    for read, written in zip(reads, writes, strict=True):
        for step in _modules_of(transform, name):
            yield TensorDictModule(step, in_keys=[read], out_keys=[written])
            read = written


def _modules_of(transform: Transform, name: str) -> list[nn.Module]:
    if name == "ObservationNorm":
        if transform.standard_normal:
            return [Normalise(transform.loc, transform.scale)]
        return [Affine(transform.scale, transform.loc)]
    if name == "DoubleToFloat":
        return [ToFloat()]
    if name == "ToTensorImage":
        steps: list[nn.Module] = [] if transform.shape_tolerant else [ChannelsFirst()]
        return [*steps, ScaleImage()]
    raise NotExportable(
        f"the transform `{name}` is of a kind that kd_export does not convert.",
        got=name,
        hint="Write it as a keyed module, and pass `oracle=` to `kd_export.save`.",
    )


class Concatenate(nn.Module):
    """Join observations at one dimension."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, *parts: Tensor) -> Tensor:
        """Join tensors."""
        return torch.cat(parts, self.dim)


def _first_keys(steps: Sequence[TensorDictModule], needed: Sequence[NestedKey]) -> list[NestedKey]:
    """Return what is read before any step writes it."""
    written: set[tuple[str, ...]] = set()
    found: dict[NestedKey, None] = {}
    for step in steps:
        for key in step.in_keys:
            if as_key(key) not in written:
                found[key] = None
        written |= {as_key(key) for key in step.out_keys}
    for key in needed:
        if as_key(key) not in written:
            found[key] = None
    return list(found)


def _rows(
    example: object, keys: Sequence[NestedKey], state: Mapping[NestedKey, NestedKey]
) -> dict[NestedKey, Tensor]:
    """Read the observations of an example, each with one dimension of rows."""
    dims = len(example.batch_size) if _is_container(example) else 1
    flat: Mapping[Key, object] = {}
    if not _is_container(example) and isinstance(example, Mapping):
        flat = unnest(nest({as_key(key): value for key, value in example.items()}))
    found = {}
    for key in keys:
        if key in state:
            continue
        value = example.get(key) if _is_container(example) else flat.get(as_key(key))
        if not isinstance(value, Tensor):
            raise KeyMismatch(
                f"observation `{wire_name(as_key(key))}` not found in the example.",
                key=as_key(key),
                expected=tuple(map(str, keys)),
                hint="Pass raw observations with rows, such as `env.rollout(64)`.",
            )
        found[key] = value.detach().reshape(-1, *value.shape[max(dims, 1) :]).contiguous()
    return found


def _is_container(example: object) -> TypeGuard[_Container]:
    return hasattr(example, "batch_size")


def _start(policy: nn.Module, key: NestedKey, rows: Mapping[NestedKey, Tensor]) -> Tensor:
    count = len(next(iter(rows.values())))
    for part in policy.modules():
        if key in getattr(part, "in_keys", ()):
            layer = getattr(part, "lstm", getattr(part, "gru", None))
            if isinstance(layer, nn.RNNBase):
                return torch.zeros(count, layer.num_layers, layer.hidden_size)
    raise KeyMismatch(f"the state `{key}` is not one of a recurrent module.", got=key)
