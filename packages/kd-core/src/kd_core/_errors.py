"""The exceptions of kd, and the messages that more than one module raises.

    KdError
    +-- KeyNotFound         (KeyError)                         a key that does not exist
    +-- KeyThroughLeaf      (KeyNotFound, ValueError)          a key that goes on below a tensor
    +-- KeySetMismatch      (KeyError, RuntimeError)           containers that differ in keys
    +-- InvalidKey          (TypeError, KeyError, ValueError, RuntimeError) not a valid key
    +-- KeyCollision        (ValueError, KeyError, RuntimeError) two keys that become the same
    +-- ShapeMismatch       (ValueError, RuntimeError)         a shape that does not fit
    +-- DeviceMismatch      (ValueError, RuntimeError)         tensors on different devices
    +-- InvalidValue        (ValueError, RuntimeError)         a value or dtype that does not fit
    +-- FormatError         (ValueError, RuntimeError)         a damaged file, or of another format
    +-- CommunicationError  (RuntimeError)                     processes that did not exchange data
    +-- Locked              (RuntimeError, ValueError)         a change of a locked container
    |   `-- FrozenField       (AttributeError)                  a field of a frozen tensor class
    +-- InvalidArgument     (TypeError, ValueError, RuntimeError) an argument of the wrong type
    +-- UnsupportedFunction (TypeError)                        a torch function without a meaning
    +-- UnknownField        (KeyNotFound, AttributeError, TypeError, ValueError, RuntimeError)
    |                                                          a name that is not a field
    +-- OutOfRange          (IndexError, ValueError, RuntimeError) an index that is out of range
    +-- NotOffered          (AttributeError)                   a name that is left out on purpose
    +-- NotOfferedImport    (ImportError)                      the same, where it is imported
    `-- MissingDependency   (ImportError)                      an optional package that is missing

Each error is also the builtins in brackets. torch raises `RuntimeError` for shapes, dtypes, devices
and most values, Python raises `ValueError`, and tensordict either, for arguments too: both catch
the error, so code that moves over keeps working. A message says what was expected, what was given,
and what to do.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from typing import ParamSpec

    P = ParamSpec("P")
R = TypeVar("R")

FROZEN: Final = "its frozen class"
"""What locks an instance of a frozen tensor class."""


class KdError(Exception):
    """Base of all exceptions of kd."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument; a sentence must be printed as it is.
        return str(self.args[0]) if len(self.args) == 1 else super().__str__()


class KeyNotFound(KdError, KeyError):
    """A key that is not in the container."""


class KeyThroughLeaf(KeyNotFound, ValueError, RuntimeError):
    """A key that goes on below an entry that is not a container."""


class KeySetMismatch(KdError, KeyError, RuntimeError):
    """Containers that must have the same keys, and differ."""


class InvalidKey(KdError, TypeError, KeyError, ValueError, RuntimeError):
    """A key that is neither a string nor a tuple of strings."""


class KeyCollision(KdError, ValueError, KeyError, RuntimeError):
    """Two keys that would become the same one."""


class ShapeMismatch(KdError, ValueError, RuntimeError):
    """A shape that does not fit."""


class DeviceMismatch(KdError, ValueError, RuntimeError):
    """Tensors that are on different devices."""


class InvalidValue(KdError, ValueError, RuntimeError):
    """An argument of the right type whose dtype, size or value does not fit."""


class InvalidArgument(KdError, TypeError, ValueError, RuntimeError):
    """An argument of the wrong type."""


class UnsupportedFunction(KdError, TypeError):
    """A torch function that has no meaning for containers."""


class UnknownField(KeyNotFound, AttributeError, TypeError, ValueError, RuntimeError):
    """A name that is not a field of a tensor class."""


class OutOfRange(KdError, IndexError, ValueError, RuntimeError):
    """An index or a dimension that is out of range."""


class FormatError(KdError, ValueError, RuntimeError):
    """A file that is damaged, or is not of the format that is expected."""


def restores(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that pickle calls: any error of it says that the pickle is not valid."""

    @functools.wraps(function)
    def checked(*args: P.args, **named: P.kwargs) -> R:
        try:
            return function(*args, **named)
        except FormatError:
            raise
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise not_valid(f"{function.__name__}: {error}") from error

    return checked


def not_valid(reason: str) -> FormatError:
    """Return the error of a pickle that no container can be built from."""
    text = f"the pickle is not valid: {reason.rstrip('.')}. Restore the file from a copy."
    return FormatError(text)


class CommunicationError(KdError, RuntimeError):
    """A call of several processes that failed: a rank ended, or did not answer in time."""


class Locked(KdError, RuntimeError, ValueError):
    """A change of the structure of a locked container."""


class FrozenField(Locked, FrozenInstanceError):
    """A field of a frozen tensor class that would be set."""


class AlreadyExists(KdError, FileExistsError, ValueError, RuntimeError):
    """A path where something is, which was not to be replaced."""


class NotOffered(KdError, AttributeError):
    """A name of tensordict that is left out on purpose; the message says what to write instead."""


class NotOfferedImport(KdError, ImportError):
    """The import of a name that is left out on purpose."""


class MissingDependency(KdError, ImportError):
    """An optional package that is not installed."""


def warn_caller(text: str) -> None:
    """Warn with the line of the program that called the package, however deep the call is now.

    The frames decide only which line is shown. Python 3.12 has `skip_file_prefixes` for it, the
    oldest Python that is supported has nothing.
    """
    import warnings

    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)


_OURS: Final = frozenset({"kd_core", "kd_nn", "kd_probabilistic", "kd_export"})


def listed(names: Iterable[str], most: int = 12) -> str:
    """Join names in backticks, cut after `most`: the names a message offers."""
    shown = list(names)
    text = ", ".join(f"`{name}`" for name in shown[:most])
    if len(shown) > most:
        text += f", ... ({len(shown) - most} more)"
    return text or "none"


def shape_text(shape: Iterable[int]) -> str:
    """Format a shape as a tuple, whatever sequence it is."""
    return str(tuple(shape))


def with_article(name: str) -> str:
    """Return a name in backticks after `a` or `an`."""
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} `{name}`"


def a_type(value: object) -> str:
    """Return the name of the class of a value, in the way of `with_article`."""
    return with_article(type(value).__name__)


def wrong_type(what: str, expected: str, got: object, remedy: str = "") -> InvalidArgument:
    """Build the error for an argument of the wrong type.

    Args:
        what: the argument, in backticks where it has a name.
        expected: what it must be, with its article.
        got: the value that was given.
        remedy: one imperative sentence.
    """
    text = f"{what} must be {expected}, got {a_type(got)}."
    return InvalidArgument(f"{text} {remedy}".rstrip())


def wrap_mapping(value: object) -> str:
    """Return the remedy for a value that must be a container, if it is a mapping."""
    return "Wrap a mapping with `TensorDict` first." if isinstance(value, Mapping) else ""


def batch_does_not_fit(key: str, batch: tuple[int, ...], shape: Iterable[int]) -> ShapeMismatch:
    """Build the error for an entry whose shape does not start with the batch size."""
    shape = tuple(shape)
    common = 0
    for expected, got in zip(batch, shape, strict=False):
        if expected != got:
            break
        common += 1
    remedy = f"Pass `batch_size={batch[:common]}`, or reshape {key}."
    if not shape:
        remedy = (
            "Pass `batch_size=()` or a value for each row, or wrap it in `NonTensorData` to store "
            "one for all."
        )
    return ShapeMismatch(
        f"batch_size {batch} does not fit entry {key}: its shape must start with {batch}, got "
        f"{shape}. {remedy}"
    )


def locked(action: str, reason: str) -> Locked:
    """Build the error for a structural change of a locked container."""
    if reason == FROZEN:
        return FrozenField(
            f"cannot {action}: the class is frozen. Write values in place (`set_`, `update_`), or "
            "make a new instance with `__replace__`."
        )
    return Locked(
        f"cannot {action}: the container is locked by {reason}. Write values in place (`set_`, "
        "`update_`, `td[idx] = ...`), or for a container that can change call "
        + ("`unlock_()` or " if reason in {"`lock_()`", "`consolidate`"} else "")
        + "`clone(recurse=False)`, which shares the tensors."
    )


def walks_through_leaf(path: str, leaf: str, kind: str) -> KeyThroughLeaf:
    """Build the error for a path that continues below a leaf."""
    return KeyThroughLeaf(
        f"key {path} not found: it goes through {leaf}, which is a {kind} and has no keys. "
        f"Use {leaf} itself, or a key that ends there."
    )


def different_keys(
    first: Iterable[str], other: Iterable[str], names: tuple[str, str], where: str = ""
) -> KeySetMismatch:
    """Build the error for two containers that must have the same keys.

    Args:
        first: the keys of one container.
        other: the keys of the other one.
        names: what a message calls the two containers.
        where: the level that differs, as in ` below key `; empty for the top level.
    """
    mine, theirs = list(first), list(other)
    only = [key for key in mine if key not in theirs], [key for key in theirs if key not in mine]
    got = [f"{listed(keys)} only in {name}" for keys, name in zip(only, names, strict=True) if keys]
    return KeySetMismatch(
        f"expected the same keys{where}, got {' and '.join(got)}. Use `select` to keep the shared "
        "keys."
    )


def unknown_keys(unknown: Iterable[str], available: Iterable[str], where: str) -> KeySetMismatch:
    """Build the error for a source that has keys which the target does not have."""
    return KeySetMismatch(
        f"source keys{where} not found in the target: {listed(unknown)}; available keys: "
        f"{listed(available)}. Add them with `set` first, or `select` the keys of the source."
    )


def given_twice(key: str, where: str = "") -> KeyCollision:
    """Build the error for a key that is given more than once."""
    return KeyCollision(f"key {key} is given twice{where}. Pass each key once.")


def cannot_broadcast(
    shape: Iterable[int], entry: str, target: Iterable[int], remedy: str = ""
) -> ShapeMismatch:
    """Build the error for a value that does not broadcast to the entry it is written to."""
    text = (
        f"cannot write a value of shape {shape_text(shape)} to {entry} in place: it must be "
        f"broadcastable to {shape_text(target)}."
    )
    return ShapeMismatch(f"{text} {remedy}".rstrip())


def one_value_for_all(key: str, old: object, new: object, ndim: int) -> InvalidArgument:
    """Build the error for a write in place of data that does not have one value for each row."""
    what, remedy = "one value", "or `set_at_` on the batch whose row it is"
    if ndim:
        what = "one value for the whole batch"
        remedy = "which takes one value for each row, too, as a list"
    return InvalidArgument(
        f"entry {key} holds {what}, {old!r}, which cannot be written in place: got {new!r}. Use "
        f"`set` to replace it, {remedy}."
    )


def below_tilde(path: Path) -> str | None:
    """Return what to do about a path below `~`, which only a shell takes for a home directory."""
    if path.parts[:1] != ("~",) or Path("~").exists():
        return None
    return (
        "the path begins with `~`, which only a shell replaces by your home directory. Pass "
        "`Path(path).expanduser()`."
    )


def refuse_existing(path: str | Path, exist_ok: bool) -> None:
    """Raise `AlreadyExists` if there is something at a path that is not to be replaced.

    An empty directory holds nothing that could be lost.
    """
    if exist_ok or not os.path.lexists(path):
        return
    place = Path(path)
    if not place.is_dir() or any(place.iterdir()):
        raise AlreadyExists(
            f"`{path}` exists already, and would be replaced. Choose another path, remove it "
            "first, or pass `exist_ok=True`."
        )


def refuse_pickles(allow_pickle: bool | None) -> None:
    """Raise `InvalidValue` if a file is to be read by running what it says."""
    if allow_pickle:
        raise InvalidValue(
            "`allow_pickle=True` would run code from a file, which kd never does. Leave it out; "
            "data of other types is kept if its type is registered with `kd_core.store`."
        )
