"""Processes that write, read and die at once: `python race.py FOLDER`, run by `test_races`.

Processes are forked, because each import of torch takes seconds.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch.utils.data import DataLoader, Dataset

from kd_core import TensorDict, store

SECONDS = 1.0
KILLS = 10
ROWS = 400


def forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)


def write(path: Path, writer: int) -> None:
    end, number = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        number += 1
        TensorDict({"v": torch.full((3000,), number), "writer": writer}).save(path)


def read(path: Path) -> None:
    end = time.monotonic() + SECONDS
    newest, last = 0, dict[int, int]()
    held = TensorDict.load(path)
    first = held["v"][0].item()
    while time.monotonic() < end:
        generation = store.inspect(path).generation
        assert generation >= newest, (generation, newest)
        newest = generation
        td = TensorDict.load(path, verify="full")
        [value] = set(td["v"].tolist())
        writer = int(td["writer"])
        assert value >= last.get(writer, 0), (value, last)
        last[writer] = value
    assert set(held["v"].tolist()) == {first}


def write_until_killed(path: Path) -> None:
    number = int(TensorDict.load(path)["v"][0])
    while True:
        number += 1
        part = TensorDict({"v": torch.full((3000,), number)}, [3000])
        part.save(path)
        part.append_to(path)
        store.compact(path)


def race(path: Path) -> None:
    TensorDict({"v": torch.full((3000,), 0), "writer": 0}).save(path)
    work = [partial(write, path, writer) for writer in (1, 2)]
    children = [forked(each) for each in [*work, *[partial(read, path)] * 4]]
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    assert not failed, failed


def kill(path: Path) -> None:
    TensorDict({"v": torch.zeros(3000, dtype=torch.int64)}, [3000]).save(path)
    newest = 0
    for _ in range(KILLS):
        child = forked(lambda: write_until_killed(path))
        time.sleep(random.random() * 0.1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        td = TensorDict.load(path, verify="full")
        [value] = set(td["v"].tolist())
        assert td.batch_size[0] in (3000, 6000)
        assert value >= newest
        newest = value
    TensorDict({"v": torch.zeros(3)}).save(path)
    TensorDict({"v": torch.zeros(3)}).save(path)
    names = sorted(each.name.partition("-")[0] for each in path.iterdir())
    assert names == [".lock", "manifest.json", "seg", "seg"], names
    print("killed", KILLS, "reached", newest)


def fill(path: Path, part: int) -> None:
    data = TensorDict.load_memmap(path)
    rows = slice(part * ROWS // 4, (part + 1) * ROWS // 4)
    for row in range(rows.start, rows.stop):
        data["tokens"][row] = row
        data["length"][row] = row % 8


def as_it_is(rows: object) -> object:
    return rows


def share(path: Path) -> None:
    """Fill an arena in parts, then read it with the workers of a data loader."""
    row = TensorDict({"tokens": torch.zeros(8, dtype=torch.int64), "length": torch.tensor(0)})
    data = row.expand(ROWS).memmap_like(path)
    children = [forked(partial(fill, path, part)) for part in range(4)]
    assert not any(os.waitpid(child, 0)[1] for child in children)
    assert data["length"].tolist() == [number % 8 for number in range(ROWS)]
    store.seal(path)
    sealed = TensorDict.load(path, verify="full")
    for source in (data, sealed):
        batches: DataLoader[TensorDict] = DataLoader(
            cast("Dataset[TensorDict]", source), batch_size=16, num_workers=2, collate_fn=as_it_is
        )
        seen = [number for batch in batches for number in batch["tokens"][:, 3].tolist()]
        assert seen == list(range(ROWS))
    print("shared", len(seen))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    race(folder / "race.kd")
    kill(folder / "kill.kd")
    share(folder / "share.kd")
