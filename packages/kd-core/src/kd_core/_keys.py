"""Nested keys: validate, normalise, join, split, compare, and find the nearest one.

Knows strings and tuples; must not know torch or containers. A *path* is the internal normal form: a
flat tuple of strings. The public normal form is a plain string for a path of length one. A member
of an enumeration of strings, or of any other subclass of `str`, becomes a plain `str` here: how a
key is printed, and how it is written into generated code, must not depend on its class.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, KeysView, Set
from typing import TYPE_CHECKING, Final, TypeAlias, TypeGuard, TypeVar

from kd_core._errors import InvalidKey
from kd_core._torch_private import assume_constant_result

if TYPE_CHECKING:
    from kd_core._types import NestedKey

KeyPath: TypeAlias = tuple[str, ...]
K = TypeVar("K")
SEVERAL: Final = (list, Set, KeysView, Iterator)
"""What may hold several keys where one is expected."""

ONE_BY_ONE: Final = "Pass several keys one by one, as `*keys`."


def plain_str(text: str) -> str:
    """Return the characters of a string as a plain `str`, whatever its class prints."""
    # Not `str(text)`, which an enumeration defines, nor a method that dynamo cannot trace.
    return text if type(text) is str else "".join((text,))


def path_of(key: NestedKey) -> KeyPath:
    """Flatten a nested key into a tuple of strings.

    Raises:
        InvalidKey: if the key is not a string or a non-empty (nested) tuple of strings.
    """
    if type(key) is str:
        return (key,)
    if not isinstance(key, tuple):
        if isinstance(key, str):
            return (plain_str(key),)
        raise _no_key(key, _several_remedy(key) if isinstance(key, SEVERAL) else "")
    if not key:
        raise InvalidKey("a key must have at least one part, got an empty tuple.")
    for part in key:
        if type(part) is not str:
            if not isinstance(part, (str, tuple)):
                raise _no_key(part, _rows_beside(key))
            return tuple(name for part in key for name in path_of(part))
    return key  # type: ignore[return-value]  # all parts are strings


def _several_remedy(keys: object) -> str:
    """Return what to write in place of several keys, or of a nested key from YAML or JSON."""
    if isinstance(keys, list) and len(keys) > 1 and all(isinstance(part, str) for part in keys):
        return f"{ONE_BY_ONE} A nested key is a tuple: `{tuple(keys)!r}`."
    return ONE_BY_ONE


def _no_key(value: object, remedy: str) -> InvalidKey:
    got = f"got {value!r} of type `{type(value).__name__}`"
    return InvalidKey(f"a key must be a string or a tuple of strings, {got}. {remedy}".rstrip())


def _rows_beside(key: tuple[object, ...]) -> str:
    """Return the remedy for a key with an index beside it."""
    if not isinstance(key[0], str) or isinstance(key[-1], (str, tuple)):
        return ""
    rows = str(key[-1]) if isinstance(key[-1], int) else "rows"
    return f"Read the entry first for rows of it, as in `td[{key[0]!r}][{rows}]`."


def is_key(value: object) -> TypeGuard[NestedKey]:
    """Return whether `value` is a string or a non-empty (nested) tuple of strings."""
    if not isinstance(value, tuple):
        return isinstance(value, str)
    for part in value:  # a loop, because `all` of a generator takes twice as long
        if type(part) is not str and not is_key(part):
            return False
    return bool(value)


def is_path(index: object) -> TypeGuard[tuple[str, ...]]:
    """Return whether a tuple is a key, by its first part: keys and indices do not mix."""
    first: object = index
    while isinstance(first, tuple):
        if not first:
            return False
        first = first[0]
    return isinstance(first, str)


def unravel_key(key: NestedKey) -> NestedKey:
    """Convert a key to its normal form: a string, or a flat tuple of two or more strings.

    Example:
        >>> unravel_key(("a", ("b",)))
        ('a', 'b')
        >>> unravel_key(("a",))
        'a'
    """
    if type(key) is str:
        return key
    path = path_of(key)
    return path[0] if len(path) == 1 else path


def unravel_key_to_tuple(key: NestedKey) -> tuple[str, ...]:
    """Convert a key to a flat tuple of strings.

    Example:
        >>> unravel_key_to_tuple("a")
        ('a',)
    """
    return path_of(key)


def unravel_key_list(keys: Iterable[NestedKey]) -> list[NestedKey]:
    """Convert each of several keys to its normal form.

    Example:
        >>> unravel_key_list(["a", ("b", ("c",))])
        ['a', ('b', 'c')]
    """
    # Libraries tell a list that is missing by how the message begins.
    return [unravel_key(key) for key in several(keys, "incompatible function arguments:")]


def several(keys: K, what: str = "") -> K:
    """Check that what must be several keys is not a single string, and return it.

    Args:
        keys: what was given.
        what: the parameter, in backticks, for the message.

    Raises:
        InvalidKey: if it is a string, which would be taken letter by letter.
    """
    if not isinstance(keys, str):
        return keys
    got = f"expected a list of keys, got the single key {format_key(keys)}"
    raise InvalidKey(f"{what} {got}. Wrap it in a list.".lstrip())


def format_key(key: NestedKey) -> str:
    """Return a key as messages show it: in backticks, a nested one as a tuple.

    Example:
        >>> format_key(("a", "b"))
        "`('a', 'b')`"
    """
    key = unravel_key(key)
    return f"`{key}`"


def is_prefix(prefix: NestedKey, key: NestedKey) -> bool:
    """Return whether `prefix` is `key`, or a container that holds it."""
    head = path_of(prefix)
    return path_of(key)[: len(head)] == head


@assume_constant_result  # so that an error in compiled code keeps its text
def _closest(wanted: str, paths: tuple[str, ...]) -> str | None:
    """Return the text that has most in common with another one; `None` if none has much."""
    close = difflib.get_close_matches(wanted, paths, n=1, cutoff=0.6)
    close = close or [path for path in paths if path.lower() == wanted.lower()]
    return close[0] if close else None


def nearest_key(key: NestedKey, candidates: Iterable[NestedKey]) -> NestedKey | None:
    """Find the candidate that looks most like `key`, for "did you mean" messages.

    Nested keys are compared with their parts joined by dots. A candidate with the same last part is
    near, and so is one that abbreviates the key, or that the key abbreviates.

    Returns:
        The candidate in normal form, or `None` when nothing is near.

    Example:
        >>> nearest_key("obervation", ["observation", "action"])
        'observation'
        >>> nearest_key("x", ["action"]) is None
        True
    """
    wanted = ".".join(path_of(key))
    paths = {".".join(path_of(candidate)): unravel_key(candidate) for candidate in candidates}
    close = _closest(wanted, tuple(paths))
    if close is not None:
        return paths[close]
    last = path_of(key)[-1]
    same_end = [found for found in paths.values() if path_of(found)[-1] == last]
    if same_end:
        return same_end[0]
    short = [path for path in paths if path.startswith(wanted) or wanted.startswith(path)]
    short = [path for path in short if min(len(path), len(wanted)) > 2]
    return paths[max(short, key=len)] if short else None
