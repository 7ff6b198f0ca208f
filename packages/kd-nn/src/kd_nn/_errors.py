"""The exceptions and the warning of keyed modules.

    KdError
    +-- KeysNotDeclared     (AttributeError)   a module has no in_keys or out_keys
    +-- NotKeyed            (TypeError)        something in a sequence is not a keyed module
    +-- DispatchError       (TypeError, RuntimeError)   a call with tensors does not fit the keys
    +-- OutputMismatch      (ValueError, RuntimeError)  a module returned a wrong number of outputs
    +-- InputMissing        (KeyNotFound, ValueError, RuntimeError)   an entry to read was not found
        +-- ArgumentMissing (DispatchError)    so was an argument of a call with tensors
    +-- OutKeyUnknown       (KeyNotFound, ValueError, RuntimeError)   no step writes a selected key
    +-- EmptySubsequence    (ValueError)       no step is left after a selection

Messages say what was expected, what was found instead and what to do. Those that more than one
module raises are built here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from kd_core import InvalidArgument, KdError, KeyNotFound, NestedKey, format_key, nearest_key


class KeysNotDeclared(KdError, AttributeError):
    """A keyed module has no `in_keys` or no `out_keys`."""


class NotKeyed(KdError, TypeError):
    """An object that is not a keyed module is given where one is expected."""


class DispatchError(KdError, TypeError, ValueError, RuntimeError):
    """A call with tensors does not fit the keys of the module."""


class OutputMismatch(KdError, ValueError, RuntimeError):
    """A module returned a number of outputs that is not that of its `out_keys`."""


class InputMissing(KeyNotFound, ValueError, RuntimeError):
    """An entry that a module reads was not found in the container."""


class ArgumentMissing(DispatchError, InputMissing):
    """A call with tensors lacks one that the module cannot do without."""


class OutKeyUnknown(KeyNotFound, ValueError, RuntimeError):
    """A selection names a key that the module does not write."""


class EmptySubsequence(KdError, ValueError):
    """No step of a sequence is left after a selection."""


class KeyGraphWarning(UserWarning):
    """A step of a sequence computes something that no later step or output uses."""


def list_keys(keys: Iterable[NestedKey]) -> str:
    """Return keys in backticks, separated by commas, or `none`."""
    return ", ".join(format_key(key) for key in keys) or "none"


def suggest(key: NestedKey, known: Sequence[NestedKey]) -> str:
    """Return ` Did you mean ...?` when a known key resembles `key`, else nothing."""
    near = nearest_key(key, known)
    return "" if near is None else f" Did you mean {format_key(near)}?"


def input_missing(key: NestedKey, who: str, present: Sequence[NestedKey]) -> InputMissing:
    """Build the error for an entry that `who` reads and that is not in the container."""
    says = f"{who} reads {format_key(key)}, which was not found in the container; "
    says += f"available keys: {list_keys(present)}."
    if isinstance(key, tuple) and all(part in present for part in key):
        several = ", ".join(f'"{part}"' for part in key)
        return InputMissing(f"{says} A tuple is one nested key; for several write [{several}].")
    return InputMissing(
        f"{says}{suggest(key, present)} Write the entry before the call, or change `in_keys`."
    )


def output_mismatch(who: str, out_keys: Sequence[NestedKey], got: str) -> OutputMismatch:
    """Build the error for outputs that do not match `out_keys`."""
    return OutputMismatch(
        f"{who} must return one output for each of its {len(out_keys)} out_keys "
        f"({list_keys(out_keys)}), got {got}. "
        'Give one key per output; `"_"` discards one.'
    )


def several_outputs(who: str, key: NestedKey, got: Sequence[object]) -> OutputMismatch:
    """Build the error for several tensors that would be written under one key."""
    return OutputMismatch(
        f"{who} must return one tensor for the out key {format_key(key)}, "
        f"got a {type(got).__name__} of {len(got)}. Give each tensor a key: as in "
        '`out_keys=["y", "h", "c"]` for `(y, (h, c))`. If they are rows of one entry, stack them.'
    )


def not_a_container(who: str, got: object) -> InvalidArgument:
    """Build the error for something that `who` returned in place of a container."""
    return InvalidArgument(
        f"{who} must return a container, got {type(got).__name__}. Return the one it was given."
    )


def out_key_unknown(key: NestedKey, who: str, known: Sequence[NestedKey]) -> OutKeyUnknown:
    """Build the error for a selected key that is not written."""
    return OutKeyUnknown(
        f"{who} does not write {format_key(key)}; available out_keys: {list_keys(known)}."
        f"{suggest(key, known)}"
    )


# The protocol by which an exporter controls a probabilistic module of any package.
#
# `kd_export` sets what the random parts of a model return before it captures them. It must not
# import `kd_probabilistic`, so it uses this protocol, which any module may implement.


@runtime_checkable
class SupportsInteraction(Protocol):
    """Something whose result can be a draw or a summary of a distribution.

    Example:
        >>> from contextlib import contextmanager
        >>> class Noise:
        ...     scale = 1.0
        ...
        ...     @contextmanager
        ...     def interaction(self, mode):
        ...         before, self.scale = self.scale, float(mode == "random")
        ...         yield
        ...         self.scale = before
        >>> isinstance(Noise(), SupportsInteraction)
        True
    """

    def interaction(self, mode: str) -> AbstractContextManager[None]:
        """Set what the module returns inside the context.

        Args:
            mode: ``"deterministic"``, ``"mode"``, ``"mean"``, ``"median"`` or ``"random"``.
        """
