"""Time what is stored: beside the peer, safetensors, `torch.save` and code by hand.

    python -m benchmarks.storing [--rounds 5] [--rows 200000]

Contenders that are not installed are left out. All run in one process, one thread, in turns; a
figure is the best of the rounds, in wall time. A load adds up all tensors, because some contenders
read them when they are used. A save of kd waits until it is on the disk; the others do not.
"""

import argparse
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kd_core import TensorDict

Work = Callable[[Path], object]
BATCH, BATCHES = 256, 200
LEAVES, LEAF = 64, (256, 256)
LEAVES_OF_PROMISES = 16
PARTS, PART_ROWS = 10, 200


def peer() -> Any:
    """Return the module of the peer, if it is installed."""
    if find_spec("tensordict") is None:
        return None
    import tensordict

    return tensordict


def columns(rows: int) -> dict[str, Tensor]:
    """Return transitions."""
    return {
        "obs": torch.randn(rows, 8),
        "next": torch.randn(rows, 8),
        "action": torch.randint(4, (rows,)),
        "done": torch.rand(rows) < 0.01,
    }


def fill_and_sample(make: Callable[[Path, dict[str, Tensor], int], Any], rows: int) -> list[Work]:
    """Return how a buffer is filled and sampled; `make` allocates and opens it."""
    chunk = columns(10_000)
    opened: list[Any] = []

    def fill(path: Path) -> None:
        buffer = make(path, chunk, rows)
        opened[:] = [buffer]
        for start in range(0, rows, 10_000):
            part = slice(start, start + 10_000)
            if isinstance(buffer, dict):
                for key, leaf in chunk.items():
                    buffer[key][part] = leaf
            else:
                buffer[part] = type(buffer)(chunk, [10_000])

    def sample(_: Path) -> None:
        buffer = opened[0]
        for _round in range(BATCHES):
            index = torch.randint(rows, (BATCH,))
            if isinstance(buffer, dict):
                assert {key: leaf[index] for key, leaf in buffer.items()}
            else:
                assert buffer[index].batch_size == (BATCH,)

    return [fill, sample]


def by_hand(path: Path, chunk: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Map one file for each column."""
    path.mkdir()
    return {
        key: torch.from_file(
            str(path / key), shared=True, size=rows * leaf[0].numel(), dtype=leaf.dtype
        ).view(rows, *leaf.shape[1:])
        for key, leaf in chunk.items()
    }


def with_kd(path: Path, chunk: dict[str, Tensor], rows: int) -> TensorDict:
    """Create an arena."""
    return TensorDict(chunk, [10_000])[0].expand(rows).memmap_like(path)


def with_peer(path: Path, chunk: dict[str, Tensor], rows: int) -> Any:
    """Create a memory-mapped container of the peer."""
    return peer().TensorDict(chunk, [10_000])[0].expand(rows).memmap_like(path)


def read(values: Any) -> None:
    """Add up all tensors, so that they are read."""
    assert sum(float(leaf.sum()) for leaf in values) is not None


def checkpoints() -> dict[str, list[Work]]:
    """Return how each contender saves and loads a checkpoint."""
    state = {f"layer{number}": torch.randn(LEAF) for number in range(LEAVES)}
    td = TensorDict(state)
    found: dict[str, list[Work]] = {
        "kd": [td.save, lambda path: read(TensorDict.load(path).values())],
        "kd, one file": [
            lambda path: td.save(path.with_suffix(".safetensors")),
            lambda path: read(TensorDict.load(path.with_suffix(".safetensors")).values()),
        ],
        "torch.save": [
            lambda path: torch.save(state, path),
            lambda path: read(torch.load(path, weights_only=True).values()),
        ],
    }
    if find_spec("safetensors") is not None:
        from safetensors.torch import load_file, save_file

        found["safetensors"] = [
            lambda path: save_file(state, path),
            lambda path: read(load_file(path).values()),
        ]
    other = peer()
    if other is not None:
        its = other.TensorDict(state)
        found["peer"] = [
            lambda path: its.memmap(path),
            lambda path: read(other.TensorDict.load_memmap(path).values()),
        ]
    return found


def ragged_rows() -> dict[str, list[Work]]:
    """Return how parts of ragged rows with texts are written and read."""
    tokens = [torch.arange(1 + row % 40) for row in range(PART_ROWS)]
    texts = [f"text {row}" for row in range(PART_ROWS)]
    nested = torch.nested.nested_tensor(tokens, layout=torch.jagged)
    part = TensorDict({"tokens": nested, "text": texts}, [PART_ROWS])

    def append(path: Path) -> None:
        for _ in range(PARTS):
            part.append_to(path)

    def save_each(path: Path) -> None:
        path.mkdir()
        for number in range(PARTS):
            torch.save({"tokens": tokens, "text": texts}, path / f"{number}.pt")

    def load_each(path: Path) -> None:
        for file in path.iterdir():
            read(torch.load(file, weights_only=True)["tokens"])

    return {
        "kd": [append, lambda path: read([TensorDict.load(path)["tokens"].values()])],
        "torch.save": [save_each, load_each],
    }


def promises() -> dict[str, list[Work]]:
    """Return how a checkpoint is written with one promise more each time, and by kd."""
    state = [torch.randn(LEAF) for _ in range(LEAVES_OF_PROMISES)]
    td = TensorDict({f"layer{number}": leaf for number, leaf in enumerate(state)})

    def write(path: Path, *, checked: bool, synced: bool, named: bool) -> None:
        path.mkdir()
        with (path / ".new").open("wb", buffering=0) as file:
            for leaf in state:
                octets = leaf.numpy().data.cast("B")
                if checked:
                    zlib.crc32(octets)
                file.write(octets)
            if synced:
                os.fsync(file.fileno())
        (path / ".new").rename(path / "data")
        for each in (path, path.parent) if named else ():
            descriptor = os.open(each, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    steps = {
        "written and renamed": (False, False, False),
        "+ damage is noticed": (True, False, False),
        "+ content is on the disk": (True, True, False),
        "+ names are on the disk": (True, True, True),
    }
    found: dict[str, list[Work]] = {
        name: [partial(write, checked=checked, synced=synced, named=named)]
        for name, (checked, synced, named) in steps.items()
    }
    found["kd, directory"] = [td.save]
    found["kd, arena"] = [td.memmap]
    return found


@contextmanager
def folder() -> Iterator[Path]:
    """Create a folder for one run."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name, "data")


def best(contenders: dict[str, list[Work]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each step of each contender."""
    seconds = {name: [float("inf")] * len(steps) for name, steps in contenders.items()}
    for _ in range(rounds):
        for name, steps in contenders.items():
            with folder() as path:
                for at, step in enumerate(steps):
                    start = time.perf_counter()
                    step(path)
                    seconds[name][at] = min(seconds[name][at], time.perf_counter() - start)
    return seconds


def main() -> None:
    """Print a table for each kind of work."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=200_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    buffers = {"by hand": by_hand, "kd": with_kd}
    if peer() is not None:
        buffers["peer"] = with_peer
    megabytes = LEAVES * torch.Size(LEAF).numel() * 4 / 1e6
    tables: list[tuple[str, dict[str, list[Work]], list[float], list[str]]] = [
        (
            "replay buffer, thousand transitions per second",
            {name: fill_and_sample(make, options.rows) for name, make in buffers.items()},
            [options.rows / 1e3, BATCH * BATCHES / 1e3],
            ["fill", "sample"],
        ),
        ("checkpoint, MB per second", checkpoints(), [megabytes] * 2, ["save", "load"]),
        (
            "ragged rows with texts, thousand rows per second",
            ragged_rows(),
            [PARTS * PART_ROWS / 1e3] * 2,
            ["write", "read"],
        ),
    ]
    for title, contenders, amounts, steps in tables:
        print(f"\n{title}\n{'':14}{''.join(f'{step:>10}' for step in steps)}")
        for name, seconds in best(contenders, options.rounds).items():
            rates = [amount / each for amount, each in zip(amounts, seconds, strict=True)]
            print(f"{name:14}{''.join(f'{rate:10,.0f}' for rate in rates)}")
    print("\nwhat a promise costs, ms of a save of 4 MB")
    for name, [each] in best(promises(), options.rounds).items():
        print(f"{name:26}{each * 1e3:6.1f}")


if __name__ == "__main__":
    main()
