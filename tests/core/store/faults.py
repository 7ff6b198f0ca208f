"""Failures at every call that changes files: a writer that is killed, and a call that fails."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kd_core._store import files

CHANGING = (
    "make_folder",
    "make_folders",
    "make_temporary_folder",
    "remove_folder",
    "remove_empty_folder",
    "create",
    "open_lock",
    "write",
    "truncate",
    "allocate",
    "sync",
    "rename",
    "link",
    "remove",
)
EVERY = (
    *CHANGING,
    "close",
    "lock",
    "opened",
    "opened_folder",
    "read",
    "names_in",
    "has_name",
    "place_of",
)
"""The calls that can fail; those that change nothing, too."""


class Killed(BaseException):
    """What stands for SIGKILL: no call that changes files works after it."""


def is_raised(act: Callable[[], object]) -> bool:
    """Return whether an injected failure reaches the caller."""
    try:
        act()
    except (Killed, OSError):
        return True
    return False


class Calls:
    """Counts the calls that change files, and lets one of them fail.

    Args:
        at: the number of the call, from 1; 0: none.
        error: what is raised instead of it. After `Killed` every later call raises it, too; a
            `KeyboardInterrupt` is raised when the call is done, as the error of a `close` is.
    """

    def __init__(self, at: int, error: BaseException) -> None:
        self.count = 0
        self.names: list[str] = []
        self._at, self._error = at, error

    def replacing(self, name: str) -> Callable[..., object]:
        """Return what replaces a function of `files`."""
        real: Callable[..., object] = getattr(files, name)

        def call(*args: object, **options: object) -> object:
            self.count += 1
            self.names.append(name)
            now = self.count == self._at
            if now and (isinstance(self._error, KeyboardInterrupt) or name == "close"):
                real(*args, **options)
                raise self._error
            if now and name == "write":
                descriptor, data, *start = args
                assert isinstance(data, (bytes, memoryview))
                real(descriptor, data[: len(data) // 2], *start)
            if now or (isinstance(self._error, Killed) and 0 < self._at < self.count):
                raise self._error
            return real(*args, **options)

        return call


@contextmanager
def calls(at: int, error: BaseException, names: tuple[str, ...] = CHANGING) -> Iterator[Calls]:
    """Let the call number `at` of some functions fail while the block runs."""
    counted = Calls(at, error)
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(files, name, counted.replacing(name))
        yield counted


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []
