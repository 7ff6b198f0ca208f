"""Measure collectives of containers beside one flat tensor, between real processes.

`python benchmarks/collectives.py [RANKS]` prints the ratio of both times for each row: the least of
several rounds, which alternate, so that both see the same machine.
"""

import datetime
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kd_core import TensorDict, TensorDictBase

ROUNDS, CALLS = 9, 20


def least(ours: Callable[[], object], plain: Callable[[], object]) -> tuple[float, float]:
    """Return the least time of each call in seconds."""
    best = [float("inf")] * 2
    for _ in range(ROUNDS):
        for position, call in enumerate((ours, plain)):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            best[position] = min(best[position], (time.perf_counter() - start) / CALLS)
    return best[0], best[1]


def container(leaves: int, numel: int) -> TensorDict:
    """Return a container of equal leaves, four in each nested one."""
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for at in range(leaves):
        groups.setdefault(f"layer{at // 4:02}", {})[f"weight{at % 4}"] = torch.ones(numel)
    return TensorDict(groups)


def rows_of(td: TensorDictBase, flat: torch.Tensor) -> list[tuple[str, float, float]]:
    """Return the time of each collective of a container, and that of a tensor of its values."""
    most = dist.ReduceOp.MAX
    reduced = least(lambda: td.all_reduce("max"), lambda: dist.all_reduce(flat, most))
    sent = least(lambda: td.broadcast(0), lambda: dist.broadcast(flat, 0))
    return [("all_reduce", *reduced), ("broadcast", *sent)]


def measure(rank: int, ranks: int, path: str) -> None:
    """Print the rows on rank 0."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    store = dist.FileStore(path, ranks)  # type: ignore[attr-defined]  # exported without a name
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    for name, leaves, numel in [
        ("200 leaves of 16", 200, 16),
        ("200 leaves of 256", 200, 256),
        ("200 leaves of 1024", 200, 1024),
        ("8 leaves of 1 M", 8, 1 << 20),
    ]:
        td, flat = container(leaves, numel), torch.ones(leaves * numel)
        for kind, each in (("", td), ("in one storage", td.consolidate())):
            for call, mine, floor in rows_of(each, flat):
                if rank == 0:
                    ratio = f"{mine * 1e6:9.0f} us {floor * 1e6:9.0f} us {mine / floor:6.2f}"
                    print(f"{call:12s} {name:20s} {kind:15s} {ratio}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (count, str(Path(folder, "store"))), count)  # type: ignore[attr-defined,no-untyped-call]  # by torch
