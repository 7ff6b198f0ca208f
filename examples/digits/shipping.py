"""Export to every format, verify each file in its own runtime, score it without kd."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import kd_export
from kd_core import TensorDict
from kd_nn import TensorDictModuleBase

HERE = Path(__file__).parent
BATCH_SIZES = (1, 2, 7, 64)


@dataclass
class Shipped:
    """One row of the table: a file and how it did."""

    form: str
    bytes: int
    difference: float
    seconds: float
    accuracy: float
    logits: np.ndarray
    pictures: np.ndarray


def score_eager(network: TensorDictModuleBase, scans: TensorDict) -> Shipped:
    """Score the scans in this process, as the reference for all files."""
    with torch.no_grad():
        scored = network(scans.select("image"))
        one = scans.select("image")[:1]
        times = []
        for _ in range(200):
            start = time.perf_counter()
            network(one)
            times.append(time.perf_counter() - start)
    logits, pictures = scored["logits"].numpy(), scored["out", "image"].numpy()
    weights = sum(p.numel() * p.element_size() for p in network.parameters())
    seconds = float(np.median(times))
    return Shipped("eager", weights, 0.0, seconds, accuracy(logits, scans), logits, pictures)


def ship(
    network: TensorDictModuleBase, scans: TensorDict, eager: Shipped, path: Path
) -> tuple[Shipped, str]:
    """Export the network to `path`, verify it, and score it in a process without kd.

    Returns:
        The row of the table, and the report of the verification.
    """
    kd_export.save(network, path, scans.select("image")[:8])
    report = kd_export.verify(path, network, batch_sizes=BATCH_SIZES, trusted=True)
    program, scores = path.parent / "scans.npz", path.with_suffix(path.suffix + ".npz")
    np.savez(program, image=scans["image"].numpy())
    answer = subprocess.run(
        [sys.executable, HERE / "unaided.py", path, program, scores],
        check=True,
        capture_output=True,
        text=True,
    )
    said = json.loads(answer.stdout.splitlines()[-1])
    if said["kd_modules_loaded"]:
        raise RuntimeError(f"the deployed program loaded {said['kd_modules_loaded']}")
    found = np.load(scores)
    difference = max(
        float(np.abs(found["logits"] - eager.logits).max()),
        float(np.abs(found["pictures"] - eager.pictures).max()),
    )
    row = Shipped(
        path.suffix,
        path.stat().st_size,
        difference,
        said["seconds"],
        accuracy(found["logits"], scans),
        found["logits"],
        found["pictures"],
    )
    return row, str(report)


def accuracy(logits: np.ndarray, scans: TensorDict) -> float:
    """Return the share of scans whose digit is found."""
    return float((logits.argmax(-1) == scans["label"].numpy()).mean())
