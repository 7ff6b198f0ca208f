"""Whether the values of tensors can be read: not in a capture, in `vmap`, or of fake tensors."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor
from torch.distributions import Distribution

from kd_core import KdError, TensorDictBase

functorch_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
"""Returns how many transformations of `torch.func` are active, None for none."""

_mode_of = torch._C._get_dispatch_mode
_FAKE = torch._C._TorchDispatchModeKey.FAKE

_is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_batchedtensor


def must_not_look(values: Sequence[object]) -> bool:
    """Return whether values cannot be read: in a capture, under `vmap`, or of fake tensors."""
    if torch.compiler.is_compiling():
        # dynamo has disabled checks already, and cannot trace the change.
        return not torch.compiler.is_dynamo_compiling()
    if _mode_of(_FAKE) is not None:  # shapes alone are computed
        return True
    if functorch_level() is None:
        return False
    return any(_holds_batched(value) for value in values)


def can_read(value: Tensor) -> bool:
    """Return whether the values of a tensor can be read: dynamo cannot either."""
    return not torch.compiler.is_compiling() and not must_not_look([value])


def _holds_batched(value: object) -> bool:
    """Return whether a tensor, or one in a container, has a hidden dimension of `vmap`."""
    if isinstance(value, TensorDictBase):
        return any(_is_batched(leaf) for leaf in value.values(True, True))
    return isinstance(value, Tensor) and _is_batched(value)


class NotTraceable(KdError, NotImplementedError):
    """A distribution reads values of tensors where that is impossible: in an export or `vmap`."""


class _Depth(threading.local):
    """How many `unchecked` a thread is in."""

    depth = 0


class _CheckedElsewhere:
    """Torch's default while a thread is in `unchecked`: false there, as before in other threads.

    torch keeps the default on a class, for all threads, and asks for its truth only.
    """

    __slots__ = ("before",)

    def __init__(self, before: bool) -> None:
        self.before = before

    def __bool__(self) -> bool:
        return self.before and not _here.depth

    def __eq__(self, other: object) -> bool:
        """Return whether the truth is `other`: `set_default_validate_args` compares."""
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(self.before)

    def __reduce__(self) -> tuple[type[bool], tuple[bool]]:
        """Copy and pickle as what it was before: an expanded distribution keeps the default."""
        return bool, (self.before,)


class _Threads:
    """How many threads are in `unchecked`, and what torch's default is meanwhile."""

    def __init__(self) -> None:
        self.count = 0
        self.default = _CheckedElsewhere(True)


_here: Final = _Depth()
_threads: Final = _Threads()
_lock: Final = threading.Lock()


def _enter() -> None:
    """Disable torch's default in this thread."""
    with _lock:
        if not _threads.count:
            _threads.default = _CheckedElsewhere(bool(Distribution._validate_args))
            Distribution._validate_args = _threads.default  # type: ignore[assignment]  # a truth
        _threads.count += 1
    _here.depth += 1


def _leave() -> None:
    """Undo `_enter`: the last one that leaves restores torch's default, unless it was set anew."""
    _here.depth -= 1
    with _lock:
        _threads.count -= 1
        if not _threads.count and vars(Distribution)["_validate_args"] is _threads.default:
            Distribution._validate_args = _threads.default.before


@contextmanager
def unchecked(owner: str) -> Iterator[None]:
    """Disable torch's default of checking values, also for distributions inside others.

    Other threads keep it.

    Args:
        owner: How messages name the module.

    Raises:
        NotTraceable: If values are read all the same.
    """
    _enter()
    try:
        yield
    except Exception as error:
        if type(error).__name__ in _READS_VALUES or "data-dependent control" in str(error):
            raise NotTraceable(
                f"`{owner}` reads values of tensors while it is computed, so it can neither be "
                "exported nor mapped in this mode. Take another value, such as the deterministic "
                "one, or another distribution."
            ) from error
        raise
    finally:
        _leave()


_READS_VALUES = {"GuardOnDataDependentSymNode", "DataDependentOutputException"}
"""The errors of torch for a branch on a value, by name: to import them loads the exporter."""
