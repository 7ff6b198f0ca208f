"""Comparison of containers in tests, with messages that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kd_core._base import TensorDictBase
from kd_core._containers.non_tensor import NonTensorDataBase
from kd_core._keys import format_key, path_of
from kd_core._leaves.loops import same_data, unwrapped
from kd_core._protocol.primitives import AbstractContainer
from kd_core._types import NestedKey

Comparable: TypeAlias = "TensorDictBase | Mapping[str, object]"


class _How(NamedTuple):
    """How two containers are compared: the options of `assert_close`."""

    rtol: float | None
    atol: float | None
    equal_nan: bool
    intersection: bool
    batch_size: bool


def assert_close(
    actual: Comparable,
    expected: Comparable,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = True,
    intersection: bool = False,
    batch_size: bool = True,
    msg: str = "",
    prefix: NestedKey = (),
) -> None:
    """Assert that two containers have the same keys, data and batch sizes, and close tensors.

    Either may be a nested mapping of tensors; then batch sizes are not compared. The kinds of
    containers and the order of keys are not compared.

    Args:
        actual: the container to check.
        expected: the expected container.
        rtol: the relative tolerance; `None`: the default of `torch.testing.assert_close`.
        atol: the absolute tolerance; must be given together with `rtol`.
        equal_nan: NaN is equal to NaN.
        intersection: compare only the keys that both have.
        batch_size: compare batch sizes.
        msg: what the message of a difference starts with.
        prefix: the key of the containers, for messages.

    Raises:
        AssertionError: if they differ; the message names the key and the difference.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> from kd_core.testing import assert_close
        >>> assert_close(TensorDict({"a": torch.zeros(2)}, [2]), {"a": torch.zeros(2)})
    """
    how = _How(rtol, atol, equal_nan, intersection, batch_size)
    try:
        _compare(actual, expected, how, path_of(prefix) if prefix else ())
    except AssertionError as error:
        raise AssertionError(f"{msg} {error}") if msg else error from None


assert_allclose_td = assert_close


def _compare(
    actual: Comparable,
    expected: Comparable,
    how: _How,
    path: tuple[str, ...],
) -> None:
    where = format_key(path) if path else "the container"
    mine, theirs = _level(actual), _level(expected)
    if mine.keys() != theirs.keys() and not how.intersection:
        raise AssertionError(f"expected the keys {sorted(theirs)} in {where}, got {sorted(mine)}.")
    if (
        how.batch_size
        and isinstance(actual, AbstractContainer)
        and isinstance(expected, AbstractContainer)
    ):
        got, wanted = tuple(actual._kd_desc.batch), tuple(expected._kd_desc.batch)
        if got != wanted:
            raise AssertionError(f"expected batch_size {wanted} in {where}, got {got}.")
    for key, value in mine.items():
        if key not in theirs:
            continue
        inner = (*path, key)
        other = theirs[key]
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            _compare_leaves(value, other, how, inner)
        elif _is_level(value) and _is_level(other):
            _compare(value, other, how, inner)  # type: ignore[arg-type]  # checked above
        elif not _same_data(value, other):
            raise AssertionError(f"expected {other!r} in {format_key(inner)}, got {value!r}.")


def _level(value: Comparable) -> Mapping[str, object]:
    return value._kd_entries if isinstance(value, AbstractContainer) else value


def _is_level(value: object) -> bool:
    return isinstance(value, (AbstractContainer, Mapping))


def _compare_leaves(
    actual: Tensor,
    expected: Tensor,
    how: _How,
    path: tuple[str, ...],
) -> None:
    torch.testing.assert_close(
        actual,
        expected,
        rtol=how.rtol,
        atol=how.atol,
        equal_nan=how.equal_nan,
        msg=lambda text: f"{format_key(path)}: {text}",
    )


def _same_data(value: object, other: object) -> bool:
    plain, wanted = unwrapped(value), unwrapped(other)
    if isinstance(plain, Tensor) or isinstance(wanted, Tensor):
        return False
    return same_data(plain, wanted) or _same_rows(value, other)


def _same_rows(value: object, other: object) -> bool:
    """Return whether one has a value for all rows, and the other the same one for each."""
    return (
        isinstance(value, NonTensorDataBase)
        and isinstance(other, NonTensorDataBase)
        and value.batch_size == other.batch_size
        and same_data(value.tolist(), other.tolist())
    )
