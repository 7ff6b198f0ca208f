"""Run programs on three real ranks, and collect what each one returned.

One process imports what the programs need and forks a process for each rank, because imports take
longer than all programs.
"""

import datetime
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once, and not on each rank that trains
import torch.distributed as dist
from tests import children
from tests.repo.tree import ROOT

RANKS = 3
Program = Callable[[int], object]
Results = dict[str, list[Any]]


class Programs(dict[str, Program]):
    """Functions of a rank by name, which return plain values; those that end a rank come last.

    Attributes:
        folder: where the functions may write files.
    """

    folder: Path

    def add(self, function: Program) -> Program:
        """Add a function, as a decorator."""
        self[function.__name__] = function
        return function

    def main(self) -> None:
        """Run all programs on all ranks, and write what they returned into a folder."""
        self.folder = Path(sys.argv[1])
        ranks = []
        for rank in range(RANKS):
            ranks.append(os.fork())
            if not ranks[-1]:
                self._run(rank)
        for process in ranks:
            os.waitpid(process, 0)

    def _run(self, rank: int) -> None:
        torch.set_num_threads(1)
        store = dist.FileStore(str(self.folder / "store"), RANKS)  # type: ignore[attr-defined]  # exported without a name
        timeout = datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
        found: dict[str, object] = {}
        try:
            for name, function in self.items():
                (self.folder / f"{rank}.json").write_text(json.dumps(found))
                found[name] = function(rank)
        except BaseException:
            found["failed"] = traceback.format_exc()
        (self.folder / f"{rank}.json").write_text(json.dumps(found))
        os._exit(0)  # as a rank ends that is killed: without a word to the others


def results_of(module: str, folder: Path) -> Results:
    """Return what each program of a module returned on each rank; `None`: the rank ended there."""
    children.check_output("-W", "ignore", "-m", module, folder, cwd=ROOT)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    failed = [each["failed"] for each in found if "failed" in each]
    assert not failed, "\n".join(failed)
    return {name: [each.get(name) for each in found] for name in found[0]}
