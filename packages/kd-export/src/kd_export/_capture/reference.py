"""The module itself, run eagerly: what an exported program is compared with.

Knows keyed modules and their interaction modes; must not know programs or files.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from kd_export._capture.example import prepare
from kd_export._capture.signature import FlatModule
from kd_export._errors import ExportError, nearest, quoted
from kd_export._schema.schema import Schema
from kd_nn import SupportsInteraction
from kd_nn.distributions import values_unchecked

_NUDGES = (-8, -1, 1, 8)
MODES = ("deterministic", "mode", "mean", "median", "random")


def checked_mode(mode: str | None) -> str | None:
    """Return a mode as the schema writes it.

    Raises:
        ExportError: It is none of the modes.
    """
    if mode is None:
        return None
    name = str(mode).lower()
    if name in MODES:
        return name
    close = nearest(name, MODES)
    raise ExportError(
        f"{mode!r} is not a valid mode; available modes: {quoted(MODES)}.",
        expected=MODES,
        got=mode,
        hint="Pass one of them." if close is None else f"Did you mean `{close}`?",
    )


@contextlib.contextmanager
def frozen_modes(module: nn.Module, mode: str | None) -> Iterator[None]:
    """Set the mode of probabilistic parts, and disable the checks of distributions, in a block."""
    parts = [part for part in module.modules() if isinstance(part, SupportsInteraction)]
    with contextlib.ExitStack() as stack:
        for part in parts if mode is not None else ():
            stack.enter_context(part.interaction(str(mode)))
        stack.enter_context(torch.no_grad())
        stack.enter_context(values_unchecked())
        yield


class Reference:
    """The module itself, run eagerly on tensors in the order of the inputs."""

    def __init__(self, flat: FlatModule, mode: str | None) -> None:
        self._flat = flat
        self._mode = mode
        # Scoped settings, such as an interaction type, stay what they were at export.
        self._context = contextvars.copy_context()

    def __call__(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the outputs by wire name."""
        return self._context.copy().run(self._run, [tensor.clone() for tensor in tensors])

    @property
    def module(self) -> nn.Module:
        """The keyed module."""
        return self._flat.module

    def other(self, module: nn.Module) -> Reference:
        """Return the reference of another module with the same inputs and outputs."""
        flat = self._flat
        keys = (flat.inputs, flat.outputs)
        return Reference(FlatModule(module, *keys, batch_dims=flat.batch_dims), self._mode)

    def with_gradients(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the outputs by wire name, which know what they were computed from."""
        with frozen_modes(self._flat, self._mode), torch.enable_grad():
            return self._flat.run(tensors)

    def others(
        self, tensors: Sequence[Tensor], expected: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor] | None, list[dict[str, Tensor]]] | None:
        """Return what a copy in float64 gives, and what inputs give that differ in their last bits.

        The first is ``None`` where the module does not compute in float64; all is, where it does
        not give what is expected again.
        """
        again = self(tensors)
        if not all(torch.equal(again[name], value) for name, value in expected.items()):
            return None
        exact: dict[str, Tensor] | None = None
        with contextlib.suppress(Exception):  # a dtype is written out in it, or it cannot be copied
            exact = self.in_float64()(tensors)
        nudged = [
            self([x * (1 + bits * 2.0**-23) if x.is_floating_point() else x for x in tensors])
            for bits in _NUDGES
        ]
        return exact, nudged

    def in_float64(self) -> Callable[[Sequence[Tensor]], dict[str, Tensor]]:
        """Return a copy that computes in float64, on the same tensors."""
        copied = Reference(copy.deepcopy(self._flat).double(), self._mode)
        return lambda tensors: copied([x.double() if x.is_floating_point() else x for x in tensors])

    def _run(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        with frozen_modes(self._flat, self._mode):
            return self._flat.run(tensors)


def reference_module(module: nn.Module, schema: Schema) -> Reference:
    """Build the reference of a schema's inputs and outputs from a keyed module."""
    in_keys = [entry.key for entry in schema.inputs]
    out_keys = [entry.key for entry in schema.outputs]
    frozen, _, _ = prepare(module, in_keys, out_keys)
    flat = FlatModule(frozen, in_keys, out_keys, batch_dims=schema.batch_dims)
    return Reference(flat, schema.mode)
