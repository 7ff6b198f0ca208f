"""Whether a container can be joined behind another one, from their nodes alone."""

from __future__ import annotations

from typing import Any, Final, cast

from kd_core._errors import FormatError, InvalidValue, KdError, different_keys
from kd_core._keys import KeyPath, format_key
from kd_core._store.canonical import RESTORE
from kd_core._store.encoding import Json


def parts_of(tree: object) -> list[Json]:
    """Return the nodes of the parts of a store, one unless something was appended.

    Raises:
        FormatError: if there is none.
    """
    if isinstance(tree, dict) and "cat" in tree:
        parts = tree["cat"]
        if len(tree) == 1 and isinstance(parts, list) and parts:
            return parts
        raise FormatError(f"{str(tree)[:80]!r} does not have the form of parts. {RESTORE}")
    return [cast("Json", tree)]


def check_parts(parts: list[Json]) -> None:
    """Check that the parts of a store can be joined.

    Raises:
        FormatError: if they cannot, or one of them does not have the form of a container.
    """
    try:
        for part in parts[1:]:
            check_fits(part, parts[0])
    except (KdError, *MISSHAPEN) as error:
        raise FormatError(f"the parts of the tree cannot be joined: {error} {RESTORE}") from error


MISSHAPEN: Final = (LookupError, TypeError, ValueError, AttributeError, RuntimeError)
"""What code that expects the form of a node raises for another one."""


def check_fits(new: Json, old: Json, path: KeyPath = ()) -> None:
    """Check that rows of `new` can be joined behind those of `old`.

    Raises:
        InvalidValue: if a batch size, dtype, shape, class or value of the batch differs.
        KeySetMismatch: if the keys differ.
    """
    [(kind, mine)], [(known, theirs)] = new.items(), old.items()
    if kind != known:
        raise _differs("kind", known, kind, path)
    _CHECKS[kind](mine, theirs, path)


def _check_level(new: Any, old: Any, path: KeyPath) -> None:
    if not new["batch"]:
        where = format_key(path) if path else "the container"
        raise InvalidValue(
            f"{where} must have a batch dimension to be appended along. Pass `batch_size`, or "
            "`unsqueeze` it."
        )
    _check_same("batch size behind the first dimension", new["batch"][1:], old["batch"][1:], path)
    for name in ("names", "device"):
        _check_same(name, new.get(name), old.get(name), path)
    mine, theirs = dict(new["entries"]), dict(old["entries"])
    if mine.keys() != theirs.keys():
        where = f" below key {format_key(path)}" if path else ""
        raise different_keys(mine, theirs, ("what is appended", "the store"), where)
    for key, node in mine.items():
        check_fits(node, theirs[key], (*path, key))


def _check_class(new: Any, old: Any, path: KeyPath) -> None:
    _check_same("class", new[:2], old[:2], path)
    _check_same("state", new[2].get("state"), old[2].get("state"), path)
    _check_level(new[2], old[2], path)


def _check_stack(new: Any, old: Any, path: KeyPath) -> None:
    _check_same("dimension of the stack", new["dim"], 0, path)
    _check_same("dimension of the stack", new["dim"], old["dim"], path)
    _check_same("name", new["name"], old["name"], path)


def _check_tensor(new: Any, old: Any, path: KeyPath) -> None:
    _check_same("dtype", new[2], old[2], path)
    _check_same("shape behind the first dimension", new[3][1:], old[3][1:], path)


def _check_jagged(new: Any, old: Any, path: KeyPath) -> None:
    for mine, theirs in zip(new[:2], old[:2], strict=True):
        check_fits(mine, theirs, path)
    _check_same("ragged dimension", new[2:], old[2:], path)


def _check_data(new: Any, old: Any, path: KeyPath) -> None:
    if new["value"] != old["value"]:
        raise InvalidValue(
            f"entry {format_key(path)} holds one value for the whole batch, which must be equal to "
            f"that of the store, {old['value']!r}, got {new['value']!r}. Save one value for each "
            "row: `NonTensorStack`."
        )


def _check_unbatched(new: Any, old: Any, path: KeyPath) -> None:
    raise InvalidValue(
        f"entry {format_key(path)} is an `UnbatchedTensor`, one tensor for all rows, and rows of "
        "such a container cannot be appended. Save it in a store of its own, and append the rest."
    )


def _check_rows(new: Any, old: Any, path: KeyPath) -> None:
    pass  # rows of any values can be joined


_CHECKS = {
    "td": _check_level,
    "class": _check_class,
    "lazy": _check_stack,
    "tensor": _check_tensor,
    "jagged": _check_jagged,
    "strided": _check_jagged,
    "data": _check_data,
    "rows": _check_rows,
    "unbatched": _check_unbatched,
}


def _check_same(what: str, new: object, old: object, path: KeyPath) -> None:
    if new != old:
        raise _differs(what, old, new, path)


def _differs(what: str, expected: object, got: object, path: KeyPath) -> InvalidValue:
    where = f"entry {format_key(path)}" if path else "what is appended"
    return InvalidValue(
        f"{where} must have the {what} of the store, {expected!r}, got {got!r}. Convert it, or "
        "save it to another store."
    )
