"""What every test of a device runs under; see `device.py`."""

from importlib import import_module

import pytest
import torch
from tests.gpu.device import DEVICE

if DEVICE.type == "cuda" and not torch.cuda.is_available():
    raise pytest.UsageError(f"KD_DEVICE={DEVICE}, but torch finds no GPU: {torch.__version__}")

# What only a GPU can show; it is not skipped elsewhere, it is not there. On the CPU the contract is
# that of `tests/core/test_contract.py`.
collect_ignore = [] if DEVICE.type == "cuda" else ["metal"]
if DEVICE.type == "cpu":
    collect_ignore.append("test_contract.py")


def pytest_configure(config: pytest.Config) -> None:
    # torch compiles its own old modules where it finds a GPU and resets its compiler.
    config.addinivalue_line(
        "filterwarnings", "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
    )


with DEVICE:  # the contract has tensors in its modules
    import_module("tests.core.test_contract")
