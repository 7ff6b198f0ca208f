from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import nn
from torch.distributions import Distribution, Normal

from kd_export._capture.flat_module import frozen_modes


def test_a_capture_keeps_the_checks_of_other_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Distribution, "_validate_args", True)  # dynamo disables it
    with ThreadPoolExecutor(1) as other, frozen_modes(nn.Identity(), None):
        assert Normal(0.0, -1.0).scale == -1
        with pytest.raises(ValueError, match="GreaterThan"):
            other.submit(Normal, 0.0, -1.0).result()
