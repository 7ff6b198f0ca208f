"""Processes that write, read and die at once: `python race.py FOLDER`, run by `test_races`.

Processes are forked, because each import of torch takes seconds.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kd_core import TensorDict, store

SECONDS = 1.0
KILLS = 10


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
    work = [lambda writer=writer: write(path, writer) for writer in (1, 2)]
    children = [forked(each) for each in [*work, *[lambda: read(path)] * 4]]
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    race(folder / "race.kd")
    kill(folder / "kill.kd")
