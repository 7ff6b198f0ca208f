"""What an exporter needs to know of a probabilistic module, without knowing the package it is of.

`kd_export` fixes what the random parts of a model give before it captures them. It must not import
`kd_probabilistic`, so the one thing it needs is this protocol: any module may implement it.
"""

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
        """Fix what the module gives while the context lasts.

        Args:
            mode: ``"deterministic"``, ``"mode"``, ``"mean"``, ``"median"`` or ``"random"``.
        """
