"""The drop-in with all packages there."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch
from torch import nn
import tensordict.nn, tensordict.utils
from tensordict import *
from tensordict.nn import *
print(nn is torch.nn, callable(memmap), callable(tensorclass), TensorDictModule.__name__)
"""


def test_a_star_import_brings_all_names_but_no_modules(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "kd_core.drop_in", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout == "True True True TensorDictModule\n", ran.stderr
