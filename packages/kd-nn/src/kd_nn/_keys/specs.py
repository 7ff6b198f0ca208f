"""What `in_keys` and `out_keys` may look like, and how they are normalised.

One place parses them, so that every module accepts the same spellings and refuses the others
with the same message. A tuple is one nested key, a list is several keys, and a mapping names the
argument that each key feeds. Inside the package keys are tuples of canonical keys: a `str` for a
top-level entry, a tuple of at least two `str` for a nested one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

from torch.compiler import is_dynamo_compiling

from kd_core import InvalidArgument, InvalidKey, NestedKey, format_key, unravel_key
from kd_core.extending import is_prefix, plain_str, public_in

T = TypeVar("T")
Keys: TypeAlias = tuple[NestedKey, ...]

DISCARD = "_"
"""The out key of an output that is discarded."""


@public_in("kd_nn._pickled")
class InKeySpec:
    """Parsed `in_keys`: the distinct keys, and what each argument of the module reads.

    Attributes:
        keys: Distinct keys, in order of first use.
        reads: The key that feeds each argument, in the order of the arguments.
        names: Argument names, one per entry of `reads`, or None for positional arguments.
    """

    __slots__ = ("keys", "names", "reads")

    def __init__(self, keys: Keys, reads: Keys, names: tuple[str, ...] | None) -> None:
        self.keys, self.reads, self.names = keys, reads, names

    def __getstate__(self) -> list[object]:
        return [self.keys, self.reads, self.names]

    def __setstate__(self, state: tuple[Keys, Keys, tuple[str, ...] | None]) -> None:
        self.keys, self.reads, self.names = state


def parse_keys(keys: object, what: str) -> Keys:
    """Normalise one key or a list of keys.

    Args:
        keys: A str or tuple (one key; `()` is none), or any other iterable of keys.
        what: The name of the argument, for messages.

    Returns:
        Canonical keys, in order.

    Raises:
        InvalidKey: If an element is not a nested key.
    """
    if type(keys) is list and not is_dynamo_compiling():
        try:  # on each call of a method with `dispatch`
            return _known(tuple(keys), what)
        except TypeError:  # an element is not hashable or not a key: reported below
            pass
    if isinstance(keys, (str, tuple)):
        return (_parse_key(keys, what),) if keys != () else ()
    if isinstance(keys, Mapping) or not isinstance(keys, Iterable):
        raise InvalidKey(
            f"`{what}` must be a key or a list of keys, got {type(keys).__name__}: {keys!r}."
        )
    return tuple(_parse_key(key, what) for key in keys)


@lru_cache(maxsize=1024)
def _known(keys: tuple[object, ...], what: str) -> Keys:
    return tuple(_parse_key(key, what) for key in keys)


def _parse_key(key: object, what: str) -> NestedKey:
    if not isinstance(key, (str, tuple)):
        raise InvalidKey(
            f"each of `{what}` must be a str or a tuple of str, got {type(key).__name__}: {key!r}."
            + (" Unpack the list: `*keys`." if isinstance(key, list) else "")
        )
    return unravel_key(key)


def parse_in_keys(keys: object, out_to_in_map: bool | None = True) -> InKeySpec:
    """Normalise `in_keys`, which may also be a mapping between arguments and keys.

    Args:
        keys: One key, a list of keys, or a mapping.
        out_to_in_map: Whether a mapping reads `{argument: key}`, as it does for None; else
            `{key: argument}`.

    Returns:
        The parsed keys; a key that feeds two arguments is listed once in `keys`.

    Raises:
        InvalidKey: If a key is not a nested key, or an argument is not a str.
        InvalidArgument: If `out_to_in_map` is not True, False or None.
    """
    if out_to_in_map is not None and not isinstance(out_to_in_map, bool):
        raise InvalidArgument(f"`out_to_in_map` must be True or False, got {out_to_in_map!r}.")
    if not isinstance(keys, Mapping):
        parsed = parse_keys(keys, "in_keys")
        return InKeySpec(unique(parsed), parsed, None)
    is_swapped = out_to_in_map is False
    pairs = [(arg, key) for key, arg in keys.items()] if is_swapped else keys.items()
    names = tuple(_argument_of(name) for name, _ in pairs)
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidKey(
            f"a mapping of `in_keys` names the argument `{twice}` twice, since Python treats some "
            "characters as equal (NFKC). Name each argument once."
        )
    reads = tuple(_parse_key(key, "in_keys") for _, key in pairs)
    return InKeySpec(unique(reads), reads, names)


def _argument_of(name: object) -> str:
    if not isinstance(name, str):
        raise InvalidKey(
            f"a mapping of `in_keys` names each argument by a str, got {name!r}. "
            "Write `{argument: key}`, or pass `out_to_in_map=False` for `{key: argument}`."
        )
    return argument_name(name)


def argument_name(text: str) -> str:
    """Return how Python spells a name in source: in the normal form NFKC, as a plain `str`."""
    if text.isascii():
        return plain_str(text)
    import unicodedata  # a library of its own, and few names need it

    return plain_str(unicodedata.normalize("NFKC", text))


def parse_out_keys(keys: object) -> Keys:
    """Normalise `out_keys` and refuse a key that is written twice.

    Raises:
        InvalidKey: If a key is not a nested key, or two outputs share one.
    """
    parsed = parse_keys(keys, "out_keys")
    visible = [key for key in parsed if key != DISCARD]
    if len(set(visible)) != len(visible):
        twice = next(key for key in visible if visible.count(key) > 1)
        raise InvalidKey(
            f"`out_keys` names {format_key(twice)} twice: the second output would overwrite the "
            'first. Rename one, or discard it with `"_"`.'
        )
    return parsed


def unique(keys: Iterable[NestedKey]) -> Keys:
    """Return the distinct keys in order of first appearance."""
    return tuple(dict.fromkeys(keys))


def overlaps(key: NestedKey, others: Collection[NestedKey]) -> bool:
    """Return whether `key` equals, holds or is held by one of the others."""
    return key in others or strictly_overlaps(key, others)


def strictly_overlaps(key: NestedKey, others: Iterable[NestedKey]) -> bool:
    """Return whether `key` holds, or is held by, another key that is not equal to it."""
    flat = type(key) is str  # such a key holds nested ones only: building a sequence asks often
    for other in others:  # a loop: a generator costs more than what it tests
        if flat and type(other) is str:
            continue
        if key != other and (is_prefix(key, other) or is_prefix(other, key)):
            return True
    return False


def is_covered(key: NestedKey, by: Collection[NestedKey]) -> bool:
    """Return whether one of the keys in `by` is `key` or holds it."""
    return key in by or (type(key) is not str and any(is_prefix(other, key) for other in by))


def drop_covered(keys: dict[NestedKey, T], by: Collection[NestedKey], nested: bool) -> None:
    """Remove the keys that are one of `by` or, if there are nested ones, that one of `by` holds."""
    for key in by:
        keys.pop(key, None)
    if nested:
        for key in [key for key in keys if type(key) is not str and is_covered(key, by)]:
            del keys[key]


def without_covered(keys: Sequence[NestedKey]) -> Keys:
    """Return the distinct keys, less those that another one holds."""
    distinct = unique(keys)
    return tuple(
        key
        for key in distinct
        if type(key) is str or not any(key != o and is_prefix(o, key) for o in distinct)
    )
