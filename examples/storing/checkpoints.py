"""Training that is killed at random a hundred times, and ends as if it never was.

    python examples/storing/checkpoints.py

A process trains and saves after each step; another one kills it at any moment. What it finds when
it starts again is always a whole checkpoint, so that the parameters at the end are, bit for bit,
those of a training without a kill.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import multiprocessing
import os
import random
import signal
import tempfile
import time

import torch
from examples.learning.curves import told
from torch import nn

from kd_core import TensorDict
from kd_nn import TensorDictParams

KILLS, STEPS = 100, 500
LONGEST = 0.1
"""Seconds until a kill, at most."""


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a network and its optimizer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    return net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Run one step; its data follows from its number."""
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    loss: torch.Tensor = (net(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()


def save(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write a checkpoint in place of the last one."""
    momenta = [optimizer.state[leaf].get("momentum_buffer") for leaf in net.parameters()]
    TensorDict(
        {
            "step": torch.tensor(step),
            "params": TensorDictParams.of_module(net),
            "momenta": {str(at): leaf for at, leaf in enumerate(momenta) if leaf is not None},
        }
    ).save(path)


def resume(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Read the last checkpoint, if there is one; return its step."""
    try:
        found = TensorDict.load(path, verify="full").clone()
    except FileNotFoundError:
        return 0
    TensorDict({"params": TensorDictParams.of_module(net).data}).update_(found.select("params"))
    for at, leaf in enumerate(net.parameters()):
        if ("momenta", str(at)) in found.keys(True):
            optimizer.state[leaf]["momentum_buffer"] = found["momenta", str(at)]
    return int(found["step"])


def work(path: Path, steps: int) -> None:
    """Train up to a number of steps, from the last checkpoint on."""
    torch.set_num_threads(1)
    net, optimizer = training()
    for step in range(resume(path, net, optimizer), steps):
        train(net, optimizer, step)
        save(path, net, optimizer, step + 1)


def main(kills: int = KILLS, steps: int = STEPS) -> None:
    """Train with kills, and compare with a training without."""
    context = multiprocessing.get_context("fork")  # starting Python takes longer than many steps
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.kd")
        start = time.perf_counter()
        done = 0
        for _ in range(kills):
            child = context.Process(target=work, args=(path, 10**9))
            child.start()
            time.sleep(random.random() * LONGEST)
            os.kill(child.pid or 0, signal.SIGKILL)
            child.join()
            net, optimizer = training()
            reached = resume(path, net, optimizer)
            if reached < done:
                raise SystemExit(f"step {done} was saved, but step {reached} was found")
            done = reached
        steps = max(steps, done)
        work(path, steps)
        print(f"{steps} steps and {kills} kills: {time.perf_counter() - start:.1f} s")
        net, optimizer = training()
        resume(path, net, optimizer)
        other, its = training()
        for step in range(steps):
            train(other, its, step)
        for mine, expected in zip(net.parameters(), other.parameters(), strict=True):
            if not torch.equal(mine, expected):
                raise SystemExit("the parameters differ from those without a kill")
        print("equal to a training without a kill")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with told(__doc__, "1 min"):
        main()
