"""`ContainerContract`: what every kind of container does, as tests that a kind inherits."""

from __future__ import annotations

from kd_core.testing._batches import BatchContract
from kd_core.testing._copies import CopyContract
from kd_core.testing._entries import EntryContract
from kd_core.testing._locks import LockContract
from kd_core.testing._values import ValueContract


class ContainerContract(EntryContract, LockContract, BatchContract, ValueContract, CopyContract):
    """The behaviour suite of containers: subclass it, say how to make one, and run it.

    Any runner that calls methods named `test_*` of a class will do; nothing of pytest is needed.
    A test that finds a promise broken raises `AssertionError`.

    Attributes:
        fixed_keys: set it where the kind refuses keys other than those it was made with.

    Example:
        >>> from kd_core import TensorDict
        >>> from kd_core.testing import ContainerContract
        >>> class TestTensorDict(ContainerContract):
        ...     def make(self) -> TensorDict:
        ...         return TensorDict(self.content(), [3, 4])
        >>> TestTensorDict().test_a_key_reads_its_entry()
    """
