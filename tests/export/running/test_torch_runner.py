import pytest
import torch

from kd_export._running import torch_runner
from kd_export._running.torch_runner import digest_of


def test_a_digest_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array of ctypes ends at 2 GiB."""
    held = {"w": torch.arange(1000), "empty": torch.empty(0), "b": torch.ones(3, 3).t()}
    whole = digest_of(held)
    monkeypatch.setattr(torch_runner, "CHUNK", 7)
    assert digest_of(held) == whole
    held["w"][-1] += 1
    assert digest_of(held) != whole
