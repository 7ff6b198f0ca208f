"""Run a program of a client with a seed; print its numbers and the CPU time of its process."""

import json
import random
import sys
import time
import warnings
from collections.abc import Callable, Mapping

import numpy
import torch

Numbers = Mapping[str, float]


def main(train: Callable[[], Numbers]) -> None:
    """Print what `train` returns, and the CPU time of the process.

    Args:
        train: the program; the seed is the first word of the command line.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    numbers = train()
    # With the imports: what one library loads at its import, another one loads when it is used.
    seconds = time.process_time()
    print(json.dumps({"numbers": dict(numbers), "cpu": seconds}))


def fingerprint(module: torch.nn.Module) -> float:
    """Return one number that depends on every parameter of a module."""
    return sum(
        float(
            (p.detach().double() * torch.arange(1, p.numel() + 1).view_as(p).double().cos()).sum()
        )
        for p in module.parameters()
    )
