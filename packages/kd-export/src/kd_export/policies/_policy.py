"""A policy with all that its export needs: one object that `kd_export.save` takes as it is.

Here, too, is what the readers of all frameworks put it together with.

Knows keyed modules, states and what an oracle is; must not know frameworks or files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from kd_core import NestedKey, TensorDict, unravel_key
from kd_export._capture.flat_module import detached
from kd_export._errors import ExportError, Key, KeyMismatch, ShapeMismatch, quoted
from kd_export._schema.wire import as_key, check_mapping, nest, unnest, wire_name
from kd_export._verification.rollouts import arranged
from kd_nn import TensorDictModule, TensorDictSequential

OBSERVATION, ACTION = "observation", "action"
Word = TypeVar("Word")
Read = TypeVar("Read")
First = TypeVar("First")


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
        examples = unnest(nest({as_key(key): value for key, value in self.example.items()}))
        first = {as_key(key): value for key, value in self.initial.items()}
        found = {}
        for key in map(as_key, self.state):
            like = cast("Tensor", examples[key])
            start = torch.zeros((*rows, *like.shape[1:]), dtype=like.dtype)
            if key in first:
                start += torch.as_tensor(first[key], dtype=like.dtype)
            found[key] = start
        return found

    def _given(self, observations: object) -> dict[Key, Tensor]:
        keys = self._observations()
        given: Mapping[Key, object]
        if isinstance(observations, Mapping):
            given = unnest(observations)
        elif len(keys) == 1:
            given = {keys[0]: observations}
        else:
            raise KeyMismatch(
                f"expected a dict of observations, {quoted(map(wire_name, keys))}.",
                expected=tuple(map(wire_name, keys)),
                got=type(observations).__name__,
            )
        examples = unnest(nest({as_key(key): value for key, value in self.example.items()}))
        found = {}
        for key in keys:
            value = given.get(key, given.get(key[1:]))
            if value is None:
                raise KeyMismatch(
                    f"observation `{wire_name(key)}` not found; available keys: "
                    f"{quoted(wire_name(one) for one in given)}.",
                    key=key,
                    expected=wire_name(key),
                )
            tensor, like = torch.as_tensor(value), cast("Tensor", examples[key])
            if tensor.ndim != like.ndim:
                raise ShapeMismatch(
                    f"expected {like.ndim} dimensions, the rows first, for `{wire_name(key)}`, got "
                    f"shape {tuple(tensor.shape)}.",
                    key=key,
                    expected=like.ndim,
                    got=tuple(tensor.shape),
                    hint="Pass a batch of observations: `observation[None]` for one.",
                )
            found[key] = tensor
        return found


def of_steps(
    steps: Sequence[TensorDictModule],
    example: Mapping[NestedKey, object],
    oracle: Callable[..., object],
    state: Mapping[NestedKey, NestedKey],
    metadata: Mapping[str, object],
) -> Policy:
    """Build a policy of steps, of which the last writes the action and all write next states."""
    module = TensorDictSequential(*steps).eval()
    module.select_out_keys(ACTION, *state.values())
    return Policy(module, example, oracle=oracle, state=state, metadata=metadata)


def in_place(step: nn.Module, key: NestedKey) -> TensorDictModule:
    """Return a step that reads an entry and writes it back."""
    return TensorDictModule(step, in_keys=[unravel_key(key)], out_keys=[unravel_key(key)])


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module of a framework, on the CPU and in eval mode."""
    return copy.deepcopy(module, detached(module)).cpu().eval()


def _word(key: object) -> NestedKey:
    """Return a key as people write it: of one part as a string."""
    parts = as_key(key)
    return parts[0] if len(parts) == 1 else parts


def _keys(listed: object) -> list[Key]:
    return [as_key(key) for key in cast("Iterable[object]", listed)]


def _leaves(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return [leaf for one in value.values() for leaf in _leaves(one)]
    return [value]
