"""What these tests need: a GPU."""

import pytest
from tests.gpu.device import DEVICE

if DEVICE.type != "cuda":
    raise pytest.UsageError("tests/gpu/metal needs a GPU. Run it with KD_DEVICE=cuda:0")
