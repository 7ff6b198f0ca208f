"""Random programs of processes that are killed, beside a plain dict of what they committed.

`python programs.py FOLDER SECONDS [SEED]`, run by `test_races`. Two writers save, append, compact,
fill arenas and seal them; each says what it is about to commit, while it has the lock of the store.
So the order of all commits is known, and a plain dict holds the content of each generation. A
reader must find the content of a generation that was there while it read.
"""

import json
import math
import os
import random
import signal
import sys
import time
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path

import torch
from tests.core.store.race import forked, starts_in

from kd_core import FormatError, InvalidValue, TensorDict, TensorDictBase, store
from kd_core._store.commit import Writer
from kd_core._store.manifest import Manifest, Segment

Content = list[list[int]]
"""How many rows each commit left, in order: pairs of a tag and a count."""

COMMITS = ("save", "save", "append", "append", "append", "append", "compact", "memmap", "seal")


def rows(tag: int, count: int) -> TensorDict:
    """Return rows of a commit, under two keys and beside texts."""
    value = torch.arange(count) + tag * 10_000
    words = [f"{tag}"] * count
    return TensorDict({"v": value, "n": {"same": value}, "w": words}, [count])


def content_of(td: TensorDictBase) -> Content:
    """Return the commits of which a container has rows, after checking each row."""
    values = td["v"].tolist()
    assert td["n", "same"].tolist() == values
    found = []
    for tag, group in groupby(zip(values, td["w"], strict=True), lambda row: row[0] // 10_000):
        part = list(group)
        assert part == [(tag * 10_000 + number, f"{tag}") for number in range(len(part))], part[:3]
        found.append([tag, len(part)])
    return found


def after(kind: str, tag: int, count: int, before: Content) -> Content:
    """Return what a store holds after a commit."""
    if kind in ("compact", "seal", "open"):
        return before
    return [*(before if kind == "append" else []), [tag, count]]


def act(path: Path, kind: str, tag: int, count: int) -> None:
    """Commit, unless the store is of the other kind."""
    try:
        if kind == "save":
            rows(tag, count).save(path)
        elif kind == "append":
            rows(tag, count).append_to(path)
        elif kind == "memmap":
            rows(tag, count).memmap(path)
        else:
            (store.compact if kind == "compact" else store.seal)(path)
    except (FormatError, InvalidValue) as error:  # an arena does not grow by rows of text
        if "arena" not in str(error):
            raise


class Log:
    """What processes say, one line of JSON each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(self, *line: object) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def lines(self) -> list[list[object]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def say_commits(log: Log, said: list[object]) -> None:
    """Let this process say what it commits, before each commit and behind it."""
    commit = Writer.commit

    def spoken(
        self: Writer, segments: list[Segment], tree: object, *, sealed: bool = True
    ) -> Manifest:
        generation = 1 if self.current is None else self.current.generation + 1
        log.say("intent", generation, *said)
        made = commit(self, segments, tree, sealed=sealed)
        log.say("done", generation)
        return made

    setattr(Writer, "commit", spoken)  # noqa: B010  # mypy refuses an assignment to a method


def write(path: Path, log: Log, number: int, end: float, steps: int = sys.maxsize) -> None:
    """Commit at random until the end."""
    rng = random.Random(number)
    said: list[object] = []
    say_commits(log, said)
    for step in range(steps):
        if time.monotonic() > end:
            break
        kind = rng.choice(COMMITS) if steps > 1 else "save"
        said[:] = kind, number * 1_000_000 + step, rng.choice([1, 7, 300, 3000])
        act(path, *said)  # type: ignore[arg-type]  # as the line before says


def read(path: Path, log: Log, commits: Log, end: float) -> None:
    """Read until the end; say what was found, and which generations were there before and after.

    To map a store that is sealed by then makes it an arena, which is a commit.
    """
    say_commits(commits, ["open", 0, 0])
    while time.monotonic() < end:
        first = store.inspect(path).generation
        try:
            found = content_of(TensorDict.load(path, verify=random.choice(["fast", "full"])))
        except FormatError as error:
            if "arena" not in str(error):
                raise
            try:
                found = content_of(TensorDict.load_memmap(path))
            except (FormatError, FileNotFoundError):  # sealed or replaced by now
                continue
        log.say(first, store.inspect(path).generation, found)


def committed(log: Log) -> dict[int, Content]:
    """Return the content of each generation."""
    known: dict[int, Content] = {0: []}
    done = 0
    for what, generation, *act in log.lines():
        assert isinstance(generation, int)
        if what == "done":
            done = generation
            continue
        assert done < generation, (done, generation)  # else a commit was lost
        kind, tag, count = act
        assert isinstance(kind, str)
        assert isinstance(tag, int)
        assert isinstance(count, int)
        known[generation] = after(kind, tag, count, known[generation - 1])
    return known


def run(folder: Path, seconds: float, seed: int) -> None:
    rng = random.Random(seed)
    path, commits, reads = folder / "td.kd", Log(folder / "commits"), Log(folder / "reads")
    first = forked(partial(write, path, commits, seed + 1, math.inf, 1))
    assert not os.waitpid(first, 0)[1]
    end = time.monotonic() + seconds
    readers = [forked(partial(read, path, reads, commits, end)) for _ in range(2)]
    writers: list[int] = []
    number, kills = seed + 2, 0
    while time.monotonic() < end:
        while len(writers) < 2:
            writers.append(forked(partial(write, path, commits, number, end + 10)))
            number += 1
        time.sleep(rng.random() * 0.15)
        victim = writers.pop(rng.randrange(2))
        os.kill(victim, signal.SIGKILL)
        assert os.waitpid(victim, 0)[1] == signal.SIGKILL  # else it failed before
        kills += 1
    for last in writers:
        os.kill(last, signal.SIGKILL)
        assert os.waitpid(last, 0)[1] == signal.SIGKILL
    assert not any(os.waitpid(reader, 0)[1] for reader in readers)
    known = committed(commits)
    for old, new, found in reads.lines():
        assert isinstance(old, int)
        assert isinstance(new, int)
        assert any(known[at] == found for at in range(old, new + 1)), (old, new, found)
    assert all(b - a == 1 for a, b in pairwise(sorted(known)))
    generation = store.inspect(path).generation
    for _ in range(2):
        act(path, "save", 1, 1)
    assert content_of(TensorDict.load(path, verify="full")) == [[1, 1]]
    assert starts_in(path) == [".lock", "manifest.json", "seg", "seg"], starts_in(path)
    print(f"programs: {generation} commits, {len(reads.lines())} reads, {kills} kills")


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    place.mkdir(exist_ok=True)
    run(place, float(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
