"""Score the held-out scans from an exported file alone, in a process that cannot import kd.

    python unaided.py digits.onnx scans.npz scores.npz

This is what a deployment looks like: for `.pt2` torch and nothing else, for `.onnx` numpy and
onnxruntime and nothing else (torch is blocked too). It prints the time of one call as JSON.
"""

import importlib.abc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

Runner = Callable[[np.ndarray], Sequence[np.ndarray]]
KD = {"kd_core", "kd_nn", "kd_probabilistic", "kd_export"}


class Blocked(importlib.abc.MetaPathFinder):
    """A finder that makes the named packages impossible to import."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Refuse a blocked name, and leave any other to the next finder."""
        if name.partition(".")[0] in self.names:
            raise ImportError(f"`{name}` is blocked: this program must run without it")


def runner_of(path: Path) -> Runner:
    """Return a function from images (n, 8, 8) to logits (n, 10) and reconstructions (n, 8, 8)."""
    if path.suffix == ".onnx":
        sys.meta_path.insert(0, Blocked(KD | {"torch"}))
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return lambda image: session.run(["logits", "out.image"], {"image": image})
    sys.meta_path.insert(0, Blocked(KD))
    import torch

    torch.set_num_threads(1)
    model = torch.export.load(path).module()

    def run(image: np.ndarray) -> Sequence[np.ndarray]:
        with torch.no_grad():
            scored = model(image=torch.from_numpy(image))
        return scored["logits"].numpy(), scored["out.image"].numpy()

    return run


def time_of_call(run: Runner, image: np.ndarray) -> float:
    """Return the median seconds of a call with one scan."""
    times = []
    for _ in range(200):
        start = time.perf_counter()
        run(image)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main(program: str, scans: str, scores: str) -> None:
    """Score all scans and print how long one call takes."""
    run = runner_of(Path(program))
    images = np.load(scans)["image"]
    logits, pictures = run(images)
    np.savez(scores, logits=logits, pictures=pictures)
    loaded = sorted(KD & {name.partition(".")[0] for name in sys.modules})
    print(json.dumps({"seconds": time_of_call(run, images[:1]), "kd_modules_loaded": loaded}))


if __name__ == "__main__":
    main(*sys.argv[1:])
