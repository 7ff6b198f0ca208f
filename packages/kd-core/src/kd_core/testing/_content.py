"""The content of every container under test, also as nested dicts for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar, cast

import torch
from torch import Tensor

from kd_core._base import TensorDictBase
from kd_core._containers.non_tensor import MetaData
from kd_core.testing._comparison import assert_close

BATCH = (3, 4)


class Contract:
    """The methods that a kind implements, and the helpers of all tests.

    Attributes:
        fixed_keys: whether no key can be added after construction.
    """

    fixed_keys: ClassVar[bool] = False

    def make(self) -> TensorDictBase:
        """Build a new, unlocked container that holds `content()`, with batch size (3, 4)."""
        raise NotImplementedError("implement `make()`: return a container that holds `content()`")

    @staticmethod
    def content() -> dict[str, object]:
        """Build the content: leaves of several ranks and dtypes, two nested levels, and data."""
        count = 12
        return {
            "a": torch.arange(float(count)).reshape(BATCH) / 4,
            "b": torch.arange(count * 2).reshape(*BATCH, 2),
            "n": {
                "c": torch.arange(count * 5.0).reshape(*BATCH, 5) - 7,
                "d": {"e": torch.arange(count, dtype=torch.int32).reshape(BATCH)},
            },
            "word": MetaData("reach"),  # which stays one value in every operation
        }


def mapped(content: dict[str, object], fn: Callable[[Tensor], Tensor]) -> dict[str, object]:
    """Apply a function to each tensor of nested dicts."""
    return {
        key: mapped(cast("dict[str, object]", value), fn)
        if isinstance(value, dict)
        else (fn(value) if isinstance(value, Tensor) else value)
        for key, value in content.items()
    }


def holds(
    td: TensorDictBase, content: dict[str, object], batch_size: tuple[int, ...] = BATCH
) -> None:
    """Assert content and batch size."""
    assert tuple(td.batch_size) == batch_size, f"{tuple(td.batch_size)} is not {batch_size}"
    assert_close(td, content)
    for key, value in td.items(True):
        if isinstance(value, Tensor):
            assert value.shape[: len(batch_size)] == batch_size, key


def inner(td: TensorDictBase, *path: str) -> TensorDictBase:
    """Return the nested container at a path."""
    found: object = td.get(path)
    assert isinstance(found, TensorDictBase), f"{path} is a {type(found).__name__}"
    return found


@contextmanager
def refused(error: type[Exception], *words: str) -> Iterator[None]:
    """Assert that an error is raised, and that its message contains these words."""
    try:
        yield
    except error as raised:
        text = str(raised)
        lacking = [word for word in words if word not in text]
        assert not lacking, f"expected {lacking} in the message, got: {text}"
    else:
        raise AssertionError(f"expected {error.__name__}, got no error")


@contextmanager
def unchanged(td: TensorDictBase) -> Iterator[None]:
    """Assert that a container has the same content, batch size and lock afterwards."""
    before, batch, locked = (
        td.clone().to_dict(retain_none=False),
        tuple(td.batch_size),
        td.is_locked,
    )
    yield
    holds(td, before, batch)
    assert td.is_locked is locked
