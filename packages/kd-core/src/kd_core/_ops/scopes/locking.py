"""Locking a container against changes of its structure."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from kd_core._ops.scopes.undoing import WAS_UNLOCKED, note, was_locked
from kd_core._protocol.primitives import AbstractContainer, lock, relock, unlock

if TYPE_CHECKING:
    from typing import Self


L = TypeVar("L", bound="Locking")


class LockScope(Generic[L]):
    """Sets the lock of a container on entry and restores it on exit."""

    __slots__ = ("_container", "_lock", "_reason")

    def __init__(self, container: L, lock: bool) -> None:
        self._container, self._lock = container, lock
        self._reason = container._desc.lock

    def __enter__(self) -> L:
        self._reason = self._container._desc.lock
        return self._container.lock_() if self._lock else self._container.unlock_()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        relock(self._container, self._reason)


class Locking(AbstractContainer):
    """Lock and unlock.

    A locked container keeps its keys, the tensors behind them and its batch size; values may still
    be written in place. The lock covers nested containers: they count how many locked containers
    enclose them, and cannot be unlocked on their own.
    """

    __slots__ = ()

    @property
    def is_locked(self) -> bool:
        """Whether the structure may not change."""
        return self._desc.frozen

    def lock_(self) -> Self:
        """Forbid changes of structure, in nested containers too; return self.

        Example:
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": 0.0}).lock_()
            >>> td["b"] = 1.0
            Traceback (most recent call last):
            ...
            kd_core.Locked: cannot set `b`: the container is locked by `lock_()`. ...
        """
        reason = self._desc.lock
        note(self, WAS_UNLOCKED if reason is None else was_locked(reason))
        return lock(self)

    def unlock_(self) -> Self:
        """Allow changes of structure again; return self.

        `with td.unlock_():` locks a container that was locked again at the end of the block.

        Raises:
            Locked: if an enclosing container is locked.
        """
        reason = self._desc.lock
        unlock(self)
        note(self, WAS_UNLOCKED if reason is None else was_locked(reason))
        return self

    def locked(self) -> LockScope[Self]:
        """Return a context in which the container is locked; before and after it is as it was."""
        return LockScope(self, True)

    def unlocked(self) -> LockScope[Self]:
        """Return a context in which the container is unlocked; before and after it is as it was.

        Example:
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": 0.0}).lock_()
            >>> with td.unlocked():
            ...     td["b"] = 1.0
            >>> td.is_locked
            True
        """
        return LockScope(self, False)
