"""Measure collectives of containers beside one flat tensor, and beside the shortest correct code.

`python benchmarks/collectives.py [RANKS]` runs real processes and prints for each row the least and
the median time of many rounds, which alternate, so that all contenders see the same machine. The
floor makes the same promises by hand: ranks compare keys, dtypes and shapes before data moves, and
values are written when all of them are there.
"""

import datetime
import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from kd_core import NestedKey, TensorDict

SECONDS, CALLS = 8.0, 4
CONTENDERS = ("kd", "floor", "flat")
MOST_TOGETHER = 1 << 14
"""Bytes of values that travel with what is compared."""


def times(calls: tuple[Callable[[], object], ...]) -> list[list[float]]:
    """Return the times of each call in microseconds, one for each round."""
    found: list[list[float]] = [[] for _ in calls]
    end = torch.tensor(time.perf_counter() + SECONDS, dtype=torch.float64)
    for round_ in range(1_000):
        for position, call in enumerate(calls):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            found[position].append((time.perf_counter() - start) / CALLS * 1e6)
        if round_ % 10 == 9:
            late = torch.tensor(float(time.perf_counter() > end))
            dist.all_reduce(late, dist.ReduceOp.MAX)
            if late:
                break
    return found


def container(leaves: int, numel: int) -> TensorDict:
    """Return a container of equal leaves, four in each nested one."""
    groups: dict[str, dict[str, Tensor]] = {}
    for at in range(leaves):
        groups.setdefault(f"layer{at // 4:02}", {})[f"weight{at % 4}"] = torch.ones(numel)
    return TensorDict(groups)


def compared(leaves: Mapping[NestedKey, Tensor], values: Tensor) -> Tensor:
    """Return values of all ranks, a row for each, after their keys and shapes were compared."""
    rows = [(key, leaf.dtype, leaf.shape) for key, leaf in leaves.items()]
    digest = torch.frombuffer(
        bytearray(hashlib.sha256(repr(rows).encode()).digest()), dtype=torch.uint8
    )
    mine = torch.cat([digest, values.view(torch.uint8)])
    every = torch.empty(dist.get_world_size(), len(mine), dtype=torch.uint8)
    dist.all_gather(list(every), mine)
    if (every[:, :32] != every[0, :32]).any():
        raise ValueError("the ranks differ")
    return every[:, 32:].view(values.dtype)


def floor_all_reduce(td: TensorDict) -> None:
    """Reduce all leaves to their maximum."""
    leaves = dict(td.items(True, True))
    members = list(leaves.values())
    flat = torch.cat([leaf.view(-1) for leaf in members])
    if flat.nbytes <= MOST_TOGETHER:
        flat = compared(leaves, flat).amax(0)
    else:
        compared(leaves, flat[:0])
        dist.all_reduce(flat, dist.ReduceOp.MAX)
    torch._foreach_copy_(members, torch._C._nn.unflatten_dense_tensors(flat, members))


def floor_broadcast(td: TensorDict) -> None:
    """Write the values of rank 0 into all leaves."""
    leaves = dict(td.items(True, True))
    members = list(leaves.values())
    flat = torch.cat([leaf.view(-1) for leaf in members]) if dist.get_rank() == 0 else None
    if flat is None:
        flat = torch.empty(sum(leaf.numel() for leaf in members))
    if flat.nbytes <= MOST_TOGETHER:
        flat = compared(leaves, flat)[0]
    else:
        compared(leaves, flat[:0])
        dist.broadcast(flat, 0)
    if dist.get_rank():
        torch._foreach_copy_(members, torch._C._nn.unflatten_dense_tensors(flat, members))


def measure(rank: int, ranks: int, path: str) -> None:
    """Print the rows on rank 0."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    store = dist.FileStore(path, ranks)  # type: ignore[attr-defined]  # exported without a name
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    for name, leaves, numel in [
        ("200 leaves of 16", 200, 16),
        ("1 MB in 8", 8, 1 << 15),
        ("16 MB in 100", 100, 40_000),
        ("64 MB in 8", 8, 1 << 21),
    ]:
        td, flat = container(leaves, numel), torch.ones(leaves * numel)
        most = dist.ReduceOp.MAX
        reduced = (
            partial(td.all_reduce, "max"),
            partial(floor_all_reduce, td),
            partial(dist.all_reduce, flat, most),
        )
        sent = (
            partial(td.broadcast, 0),
            partial(floor_broadcast, td),
            partial(dist.broadcast, flat, 0),
        )
        for call, row in (("all_reduce", reduced), ("broadcast", sent)):
            found = times(row)
            for kind, choose in (("least", min), ("median", statistics.median)):
                each = [choose(one) for one in found]
                told = "".join(
                    f"{who} {value:7.0f} us  " for who, value in zip(CONTENDERS, each, strict=True)
                )
                if rank == 0:
                    ratios = (
                        f"of flat {each[0] / each[2]:5.2f}, of the floor {each[0] / each[1]:5.2f}"
                    )
                    print(f"{call:10s} {name:16s} {kind:6s} {told} {ratios}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (count, str(Path(folder, "store"))), count)  # type: ignore[no-untyped-call, attr-defined]  # by torch
