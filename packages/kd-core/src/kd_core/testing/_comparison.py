"""Comparison of containers in tests, with messages that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from kd_core._base import TensorDictBase
from kd_core._keys import format_key
from kd_core._leaves.loops import same_data, unwrapped
from kd_core._protocol.primitives import AbstractContainer

Comparable: TypeAlias = "TensorDictBase | Mapping[str, object]"


def assert_close(
    actual: Comparable,
    expected: Comparable,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    batch_size: bool = True,
) -> None:
    """Assert that two containers have the same keys, data and batch sizes, and close tensors.

    Either may be a nested mapping of tensors; then batch sizes are not compared. The kinds of
    containers and the order of keys are not compared.

    Args:
        actual: the container to check.
        expected: the expected container.
        rtol: the relative tolerance; `None`: the default of `torch.testing.assert_close`.
        atol: the absolute tolerance; must be given together with `rtol`.
        batch_size: compare batch sizes.

    Raises:
        AssertionError: if they differ; the message names the key and the difference.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> from kd_core.testing import assert_close
        >>> assert_close(TensorDict({"a": torch.zeros(2)}, [2]), {"a": torch.zeros(2)})
    """
    _compare(actual, expected, rtol, atol, batch_size, ())


def _compare(
    actual: Comparable,
    expected: Comparable,
    rtol: float | None,
    atol: float | None,
    batch_size: bool,
    path: tuple[str, ...],
) -> None:
    where = format_key(path) if path else "the container"
    mine, theirs = _level(actual), _level(expected)
    if mine.keys() != theirs.keys():
        raise AssertionError(f"expected the keys {sorted(theirs)} in {where}, got {sorted(mine)}.")
    if (
        batch_size
        and isinstance(actual, AbstractContainer)
        and isinstance(expected, AbstractContainer)
    ):
        got, wanted = tuple(actual._desc.batch), tuple(expected._desc.batch)
        if got != wanted:
            raise AssertionError(f"expected batch_size {wanted} in {where}, got {got}.")
    for key, value in mine.items():
        inner = (*path, key)
        other = theirs[key]
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            _compare_leaves(value, other, rtol, atol, inner)
        elif _is_level(value) and _is_level(other):
            _compare(value, other, rtol, atol, batch_size, inner)  # type: ignore[arg-type]  # checked above
        elif not _same_data(value, other):
            raise AssertionError(f"expected {other!r} in {format_key(inner)}, got {value!r}.")


def _level(value: Comparable) -> Mapping[str, object]:
    return value._entries if isinstance(value, AbstractContainer) else value


def _is_level(value: object) -> bool:
    return isinstance(value, (AbstractContainer, Mapping))


def _compare_leaves(
    actual: Tensor,
    expected: Tensor,
    rtol: float | None,
    atol: float | None,
    path: tuple[str, ...],
) -> None:
    torch.testing.assert_close(
        actual,
        expected,
        rtol=rtol,
        atol=atol,
        equal_nan=True,
        msg=lambda text: f"{format_key(path)}: {text}",
    )


def _same_data(value: object, other: object) -> bool:
    plain, wanted = unwrapped(value), unwrapped(other)
    if isinstance(plain, Tensor) or isinstance(wanted, Tensor):
        return False
    return same_data(plain, wanted)
