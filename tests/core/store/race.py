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

from kd_core import MemoryMappedTensor, TensorDict, store
from kd_core._store import files

SECONDS = 1.0
KILLS = 100
ROWS = 400


def forked(work: Callable[[], object]) -> int:
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


def commit(path: Path, step: int) -> None:
    """Bring a store to a step: values that are saved, appended to, and compacted."""
    value, act = divmod(step, 1 if path.suffix == ".safetensors" else 3)
    part = TensorDict({"v": torch.full((300,), value), "w": [str(value)] * 300}, [300])
    if act == 0:
        part.save(path)
    elif act == 1:
        part.append_to(path)
    else:
        store.compact(path)


def state_of(path: Path) -> tuple[int, int, int]:
    """Return value, rows and parts of a store, all of it compared with its checksums."""
    td = TensorDict.load(path, verify="full")
    [value] = {*td["v"].tolist(), *map(int, td["w"])}
    return value, td.batch_size[0], store.inspect(path).parts


def state_at(path: Path, step: int) -> tuple[int, int, int]:
    """Return what a store holds at a step."""
    if path.suffix == ".safetensors":
        return step, 300, 1
    value, act = divmod(step, 3)
    return value, 300 if act == 0 else 600, 2 if act == 1 else 1


def commit_until_killed(path: Path, step: int, pipe: int) -> None:
    """Commit step after step, and say so; at first, that it has started."""
    while True:
        os.write(pipe, b"%d " % step)
        step += 1
        commit(path, step)


def race(path: Path) -> None:
    TensorDict({"v": torch.full((3000,), 0), "writer": 0}).save(path)
    work = [partial(write, path, writer) for writer in (1, 2)]
    children = [forked(each) for each in [*work, *[partial(read, path)] * 4]]
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    assert not failed, failed


def kill(path: Path, kills: int) -> None:
    """Kill a writer many times; what it committed last is there, or what it was committing."""
    path.parent.mkdir()
    start = time.monotonic()
    for step in range(4):
        commit(path, step)
    longest = time.monotonic() - start
    for _ in range(kills):
        said, pipe = os.pipe()
        child = forked(partial(commit_until_killed, path, step, pipe))
        os.close(pipe)
        started = os.read(said, 1)
        time.sleep(random.random() * longest)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(said, "rb") as file:
            reached = int((started + file.read()).split()[-1])
        # The disk may be slower by now; and what comes between two kills only takes time.
        longest *= 1.2 if reached == step else 0.9 if reached > step + 3 else 1
        step = reached
        found = state_of(path)
        step += found != state_at(path, step)
        assert found == state_at(path, step), (found, step)
    assert step > kills // 20 + 3  # else all were killed before they wrote
    for _ in range(2):
        commit(path, 0)
    names = starts_in(path if path.is_dir() else path.parent)
    expected = [".lock", "manifest.json", "seg", "seg"] if path.is_dir() else [path.name]
    assert names == expected, names
    print("killed", kills, "reached", step)


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


def create_when_told(path: Path, pipe: int, told: int, tell: int) -> None:
    """Create a mapped tensor; say so when it only lacks its name, which it gets when told."""
    os.close(tell)  # so that it ends with the process that tells it
    link = files.link

    def wait(old: str, new: str, folder: int) -> None:
        os.write(pipe, b".")
        os.read(told, 1)
        link(old, new, folder)

    files.link = wait
    MemoryMappedTensor.full((3,), 7.0, filename=path)


def started(path: Path) -> tuple[int, int]:
    """Start such a process; return it, and where it is told."""
    said, pipe = os.pipe()
    told, tell = os.pipe()
    child = forked(partial(create_when_told, path, pipe, told, tell))
    os.read(said, 1)
    return child, tell


def construct(folder: Path) -> None:
    """Kill a process that creates a mapped tensor, beside one that lives."""
    folder.mkdir()
    killed, _ = started(folder / "killed")
    living, tell = started(folder / "living")
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    assert starts_in(folder) == [".killed.tmp", ".living.tmp"]
    for number in range(2):
        next_one = forked(partial(MemoryMappedTensor.zeros, 3, filename=folder / f"{number}"))
        assert not os.waitpid(next_one, 0)[1]
    assert starts_in(folder) == [".living.tmp", "0", "1"]
    os.write(tell, b".")
    assert not os.waitpid(living, 0)[1]
    assert starts_in(folder) == ["0", "1", "living"]
    found = MemoryMappedTensor.from_filename(folder / "living", torch.float32, (3,))
    assert found.tolist() == [7] * 3
    print("constructed", 3)


def starts_in(folder: Path) -> list[str]:
    return sorted(each.name.partition("-")[0] for each in folder.iterdir())


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    race(folder / "race.kd")
    kill(folder / "directory" / "td.kd", KILLS)
    kill(folder / "file" / "td.safetensors", KILLS // 5)
    share(folder / "share.kd")
    construct(folder / "constructed")
