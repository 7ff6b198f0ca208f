"""What a call returns that is still running."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch.distributed import Work

if TYPE_CHECKING:
    from kd_core._distributed.groups import Team


class Handle:
    """A call on a process group that is still running.

    `wait` ends it: only then are received values written into the container. The container must not
    be written to before.
    """

    __slots__ = ("_finish", "_name", "_peer", "_team", "_works")

    def __init__(
        self,
        team: Team,
        name: str,
        works: Sequence[Work],
        finish: Callable[[], object],
        peer: int | None = None,
    ) -> None:
        self._team = team
        self._name = name
        self._peer = peer
        self._works: Sequence[Work] | None = works
        self._finish = finish

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._works is None or all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait for the end of the call; a second time does nothing.

        Raises:
            CommunicationError: if it failed. Nothing has been written then.
        """
        works, self._works = self._works, None
        if works is None:
            return
        with self._team.calling(self._name, self._peer):
            for work in works:
                work.wait()
            self._finish()
