"""Every kind of container keeps the contract where all tensors are made on the device."""

from collections.abc import Iterator

import pytest
from tests.core.test_contract import (
    TestFieldsThatHideEveryMethod as TestFieldsThatHideEveryMethod,
)
from tests.core.test_contract import TestLazyStack as TestLazyStack
from tests.core.test_contract import TestLazyStackOfColumns as TestLazyStackOfColumns
from tests.core.test_contract import TestTensorClass as TestTensorClass
from tests.core.test_contract import TestTensorDict as TestTensorDict
from tests.core.test_contract import TestTypedTensorDict as TestTypedTensorDict
from tests.gpu.device import DEVICE


@pytest.fixture(autouse=True)
def _on_the_device() -> Iterator[None]:
    with DEVICE:
        yield
