"""A replay buffer in an arena: filled in place, sampled at random, and there after a restart.

    python examples/storing/replay_buffer.py

The buffer is a ring. Its transitions are rows of one container, and how many were ever written is a
tensor in a file of its own, so that another process finds both.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import multiprocessing
import tempfile
import time

import torch
from examples.learning.curves import told

from kd_core import MemoryMappedTensor, TensorDict

CAPACITY = 1_000_000
CHUNK = 10_000
BATCH, BATCHES = 256, 1000


def transitions(count: int, generator: torch.Generator) -> TensorDict:
    """Return random transitions."""
    return TensorDict(
        {
            "obs": torch.randn(count, 8, generator=generator),
            "action": torch.randint(4, (count,), generator=generator),
            "next": {
                "obs": torch.randn(count, 8, generator=generator),
                "reward": torch.randn(count, generator=generator),
                "done": torch.rand(count, generator=generator) < 0.01,
            },
        },
        [count],
    )


class ReplayBuffer:
    """A ring of transitions in a directory; open it again by the same path.

    Args:
        path: the directory; it is created if it does not exist.
        capacity: how many transitions a new buffer holds.
    """

    def __init__(self, path: Path, capacity: int = CAPACITY) -> None:
        counter = path / "written.bin"
        if not path.exists():
            path.mkdir()
            row = transitions(1, torch.Generator())[0]
            row.expand(capacity).memmap_like(path / "rows.arena")
            MemoryMappedTensor.zeros((), dtype=torch.int64, filename=counter)
        self.rows = TensorDict.load_memmap(path / "rows.arena")
        self.written = MemoryMappedTensor.from_filename(counter, torch.int64, ())

    def __len__(self) -> int:
        return min(int(self.written), len(self.rows))

    def extend(self, rows: TensorDict) -> None:
        """Write rows behind the last ones, over the oldest."""
        start = int(self.written) % len(self.rows)
        head = min(len(rows), len(self.rows) - start)
        self.rows[start : start + head] = rows[:head]
        if head < len(rows):
            self.rows[: len(rows) - head] = rows[head:]
        self.written.add_(len(rows))

    def sample(self, count: int, generator: torch.Generator) -> TensorDict:
        """Return rows at random."""
        return self.rows[torch.randint(len(self), (count,), generator=generator)]


def sampled(path: Path, batches: int) -> tuple[int, float, float]:
    """Open a buffer and sample; return its length, a checksum, and transitions per second."""
    torch.set_num_threads(1)
    buffer = ReplayBuffer(path)
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    start = time.perf_counter()
    for _ in range(batches):
        batch = buffer.sample(BATCH, generator)
        total += float(batch["next", "reward"].sum() + batch["obs"].sum())
    return len(buffer), total, batches * BATCH / (time.perf_counter() - start)


def main(capacity: int = CAPACITY, batches: int = BATCHES) -> None:
    """Fill a buffer past its end, sample, and sample again in another process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "buffer")
        buffer = ReplayBuffer(path, capacity)
        generator = torch.Generator().manual_seed(1)
        chunk = min(CHUNK, capacity)
        spent = 0.0
        while int(buffer.written) < capacity + chunk // 2:
            rows = transitions(chunk, generator)
            start = time.perf_counter()
            buffer.extend(rows)
            spent += time.perf_counter() - start
        print(f"filled: {int(buffer.written) / spent:,.0f} transitions per second")
        length, total, rate = sampled(path, batches)
        print(f"sampled: {rate:,.0f} transitions per second")
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            again = pool.apply(sampled, (path, batches))
        print(f"after a restart: {again[2]:,.0f} transitions per second")
        if again[:2] != (length, total):
            raise SystemExit(f"expected {length, total} after a restart, got {again[:2]}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with told(__doc__, "10 s"):
        main()
