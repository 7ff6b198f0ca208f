"""A plugin for pytest: all tensors of all tests are made on the device, unless they say where.

    KD_DEVICE=cuda:0 pytest -p tests.gpu.everywhere tests/core tests/nn

Tests that compare with the CPU by name, or draw from a generator of the CPU, fail then; so what
this finds is read, and is no verdict.
"""

import torch
from tests.gpu.device import DEVICE


def pytest_sessionstart() -> None:
    torch.set_default_device(DEVICE)  # not when it is imported, which looking for tests does
