"""What two processes do to one store or container: the same code runs in both.

A process that was spawned serves `requests`, each of them a name of a method and its arguments.
"""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

import torch
from tests.fuzz.stored_trees import Content, content
from torch import Tensor

from kd_core import KdError, Locked, TensorClass, TensorDict, TensorDictBase, UnknownField, store

Key: TypeAlias = tuple[str, ...]


class Sample(TensorClass):
    """Both processes know it by this name."""

    x: Tensor
    part: TensorDict | None = None
    name: str = "a"


store.register_class(Sample, "tests.fuzz.Sample")


class Side:
    """One process, and the container that it holds."""

    def __init__(self) -> None:
        self.live: TensorDictBase = TensorDict()

    def take(self, td: TensorDictBase) -> bool:
        """Hold what was sent; return whether it is locked."""
        self.live = td
        return self.live.is_locked

    def open(self, path: Path) -> bool:
        return self.take(TensorDict.load_memmap(path))

    def content(self) -> Content:
        return content(self.live)

    def saved(self, path: Path, verify: str) -> Content:
        return content(TensorDict.load(path, verify=verify))

    def write(self, key: Key, value: Tensor, how: str) -> None:
        """Write into a leaf in place."""
        if how == "update_":
            self.live.update_({key: value})
        elif how == "set_":
            self.live.set_(key, value)
        else:
            self.live[key].copy_(value)

    def grow(self, key: Key, value: Tensor) -> None:
        self.live.make_memmap_from_tensor(key, value)

    def refresh(self) -> None:
        self.live.memmap_refresh_()

    def save(self, path: Path, td: TensorDictBase) -> None:
        td.save(path)

    def memmap(self, path: Path, td: TensorDictBase) -> None:
        td.memmap(path)

    def append(self, path: Path, td: TensorDictBase) -> None:
        td.append_to(path)

    def compact(self, path: Path) -> None:
        store.compact(path)

    def seal(self, path: Path) -> None:
        store.seal(path)

    def killed(self, delay: float, name: str, *arguments: object) -> bool:
        """Do something in a process that is killed after a while; return whether it was done."""
        child = os.fork()
        if not child:
            getattr(self, name)(*arguments)
            os._exit(0)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        return os.waitpid(child, 0)[1] == 0

    def refuses(self) -> bool:
        """Return whether the container refuses another entry."""
        try:
            self.live["new entry"] = torch.zeros(self.live.shape)
        except (Locked, UnknownField):
            return True
        del self.live["new entry"]
        return False


def serve(requests: Connection) -> None:
    """Do what is asked; send back results, or the errors."""
    torch.set_num_threads(1)
    side = Side()
    while True:
        name, *arguments = requests.recv()
        try:
            result: object = getattr(side, name)(*arguments)
        except (KdError, OSError) as error:
            result = type(error).__name__, str(error)
            requests.send(("error", result))
        else:
            requests.send(("done", result))
