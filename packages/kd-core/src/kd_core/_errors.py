"""The exceptions of kd, and the messages that more than one place needs.

    KdError
    +-- KeyNotFound        (KeyError)      a key that is not there
    +-- KeySetMismatch     (KeyError)      two containers that should have the same keys
    +-- InvalidKey         (TypeError)     a key that cannot be a key
    +-- KeyCollision       (ValueError)    two keys that become the same name
    +-- ShapeMismatch      (ValueError)    a shape that does not fit the batch size
    +-- DeviceMismatch     (ValueError)    tensors on different devices
    +-- InvalidValue       (ValueError)    an argument of the right type, but out of range
    +-- InvalidArgument    (TypeError)     an argument of the wrong type
    +-- UnsupportedFunction(TypeError)     a torch function without a meaning for containers
    +-- UnknownField       (AttributeError, TypeError)  a name that a tensor class has not declared
    +-- OutOfRange         (IndexError)    an index beyond the batch size
    +-- Locked             (RuntimeError)  a change of structure of a locked container
    +-- MissingDependency  (ImportError)   an optional package that is not installed

Each is also the builtin in brackets, so `except KeyError` keeps working. A message says what was
expected, what came, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable


class KdError(Exception):
    """Base of all exceptions of kd."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument; a sentence must be printed as it is.
        return str(self.args[0]) if len(self.args) == 1 else super().__str__()


class KeyNotFound(KdError, KeyError):
    """A key that is not in the container."""


class KeySetMismatch(KdError, KeyError):
    """Two containers whose keys should be the same."""


class InvalidKey(KdError, TypeError):
    """A key that is neither a string nor a tuple of strings."""


class KeyCollision(KdError, ValueError):
    """Two keys that would become the same one."""


class ShapeMismatch(KdError, ValueError):
    """A shape that does not fit."""


class DeviceMismatch(KdError, ValueError):
    """Tensors that are on different devices."""


class InvalidValue(KdError, ValueError):
    """An argument of the right type with a value that makes no sense."""


class InvalidArgument(KdError, TypeError):
    """An argument of the wrong type."""


class UnsupportedFunction(KdError, TypeError):
    """A torch function that has no meaning for containers."""


class UnknownField(KdError, AttributeError, TypeError):
    """A name that is no field of a tensor class."""


class OutOfRange(KdError, IndexError):
    """An index beyond the batch size."""


class Locked(KdError, RuntimeError):
    """A change of the structure of a locked container."""


class MissingDependency(KdError, ImportError):
    """An optional package that is not installed."""


def listed(names: Iterable[str], most: int = 12) -> str:
    """Join names in backticks, cut after `most`: the names a message offers."""
    shown = list(names)
    text = ", ".join(f"`{name}`" for name in shown[:most])
    if len(shown) > most:
        text += f", ... ({len(shown) - most} more)"
    return text or "none"


def shape_text(shape: Iterable[int]) -> str:
    """Write a shape as a tuple, whatever sequence it came as."""
    return str(tuple(shape))


def batch_does_not_fit(key: str, batch: tuple[int, ...], shape: Iterable[int]) -> ShapeMismatch:
    """An entry whose shape does not start with the batch size."""
    shape = tuple(shape)
    common = 0
    for expected, got in zip(batch, shape, strict=False):
        if expected != got:
            break
        common += 1
    remedy = f"Pass `batch_size={batch[:common]}`, or reshape {key}."
    return ShapeMismatch(
        f"batch_size {batch} does not fit entry {key}: its shape {shape} must start with {batch}. "
        f"{remedy}"
    )


def locked(action: str, reason: str) -> Locked:
    """A structural change of a locked container."""
    return Locked(
        f"cannot {action}: the container is locked by {reason}. Values may be written in place "
        "(`set_`, `update_`, `td[idx] = ...`); for a writable container call "
        + ("`unlock_()`, or take " if reason == "`lock_()`" else "")
        + "`clone(recurse=False)`, which shares the tensors and is not locked."
    )


def walks_through_leaf(path: str, leaf: str, kind: str) -> KeyNotFound:
    """A path that goes on below a leaf."""
    return KeyNotFound(
        f"key {path} goes through {leaf}, which is a {kind} and has no keys of its own. "
        f"Use {leaf} itself, or a key that ends there."
    )
