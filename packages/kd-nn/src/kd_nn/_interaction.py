"""The protocol by which an exporter controls a probabilistic module of any package.

`kd_export` sets what the random parts of a model return before it captures them. It must not
import `kd_probabilistic`, so it uses this protocol, which any module may implement.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable


@runtime_checkable
class SupportsInteraction(Protocol):
    """Something whose result can be a draw or a summary of a distribution.

    Example:
        >>> from contextlib import contextmanager
        >>> class Noise:
        ...     scale = 1.0
        ...
        ...     @contextmanager
        ...     def interaction(self, mode):
        ...         before, self.scale = self.scale, float(mode == "random")
        ...         yield
        ...         self.scale = before
        >>> isinstance(Noise(), SupportsInteraction)
        True
    """

    def interaction(self, mode: str) -> AbstractContextManager[None]:
        """Set what the module returns inside the context.

        Args:
            mode: ``"deterministic"``, ``"mode"``, ``"mean"``, ``"median"`` or ``"random"``.
        """
