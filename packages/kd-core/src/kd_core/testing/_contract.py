"""`ContainerContract`: tests of the behaviour of every container kind, to be inherited."""

from __future__ import annotations

from kd_core.testing._batches import BatchContract
from kd_core.testing._copies import CopyContract
from kd_core.testing._entries import EntryContract
from kd_core.testing._locks import LockContract
from kd_core.testing._values import ValueContract


class ContainerContract(EntryContract, LockContract, BatchContract, ValueContract, CopyContract):
    """The test suite of container kinds: subclass it, implement `make`, and run it.

    Any test runner that calls methods named `test_*` of a class can run it; pytest is not required.
    A test that fails raises `AssertionError`.

    Attributes:
        fixed_keys: set it to `True` if no key can be added after construction.

    Example:
        >>> from kd_core import TensorDict
        >>> from kd_core.testing import ContainerContract
        >>> class TestTensorDict(ContainerContract):
        ...     def make(self) -> TensorDict:
        ...         return TensorDict(self.content(), [3, 4])
        >>> TestTensorDict().test_a_key_reads_its_entry()
    """
