from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributions import Distribution, Normal

from kd_nn.distributions import values_unchecked


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the default, which dynamo disables."""
    monkeypatch.setattr(Distribution, "_validate_args", True)


def test_other_threads_keep_their_checks() -> None:
    before = Distribution._validate_args
    with ThreadPoolExecutor(1) as other, values_unchecked():
        assert Normal(0.0, -1.0).scale == -1
        with pytest.raises(ValueError, match="GreaterThan"):
            other.submit(Normal, 0.0, -1.0).result()
        with values_unchecked():
            pass
        Normal(0.0, -1.0)
    assert Distribution._validate_args is before


def test_what_is_asked_for_is_checked() -> None:
    with values_unchecked(), pytest.raises(ValueError, match="GreaterThan"):
        Normal(0.0, -1.0, validate_args=True)


def test_a_default_that_is_set_inside_stays() -> None:
    with values_unchecked():
        Distribution.set_default_validate_args(False)
    assert Distribution._validate_args is False
