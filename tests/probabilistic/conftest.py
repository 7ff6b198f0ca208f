"""What several tests of distributions share."""

from collections.abc import Iterator

import pytest
from torch.distributions import Distribution


@pytest.fixture
def checks_values() -> Iterator[None]:
    """Check values as torch does before dynamo is used."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(True)
    yield
    Distribution.set_default_validate_args(before)
