"""The same containers, built with either library.

Knows how each kind is made through public names alone; must not know which calls follow.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Library:
    """One of the two libraries: its public names, wherever they live, and its typed classes."""

    def __init__(self, name: str, *modules: Any) -> None:
        self.name = name
        self.modules = modules
        self.is_peer = name == "peer"
        td_class, typed_class = self.TensorClass, self.TypedTensorDict

        class Based(td_class):  # type: ignore[misc,valid-type]  # the base is chosen at run time
            a: torch.Tensor
            b: torch.Tensor
            s: str = "word"

        class Typed(typed_class):  # type: ignore[misc,valid-type]  # the base is chosen at run time
            a: torch.Tensor
            b: torch.Tensor

        class Decorated:
            a: torch.Tensor
            b: torch.Tensor
            n: Any = None

        for cls in (Based, Typed, Decorated):
            cls.__qualname__ = cls.__name__
        self.Based, self.Typed = Based, Typed
        self.Decorated = self.tensorclass(Decorated)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for module in self.modules:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(name)

    def is_mapped(self, value: object) -> bool:
        """Return whether a value is a tensor in a memory map, as the library says."""
        return isinstance(value, self.MemoryMappedTensor)


def leaf(*shape: int, start: int = 0) -> torch.Tensor:
    """Return positive and distinct floats, which every operation can take."""
    size = int(torch.Size(shape).numel())
    return (torch.arange(size, dtype=torch.float32) + start + 1).reshape(shape) / 8


def dense(lib: Library) -> Any:
    return lib.TensorDict({"a": leaf(3, 2), "b": torch.arange(24).reshape(3, 2, 4)}, [3, 2])


def nested(lib: Library) -> Any:
    inside = lib.TensorDict({"c": leaf(3, 2, 2), "d": {"e": leaf(3, 2, start=5)}}, [3, 2])
    return lib.TensorDict({"a": leaf(3, 2), "n": inside}, [3, 2])


def lazy(lib: Library) -> Any:
    members = [
        lib.TensorDict({"a": leaf(2, start=i), "n": {"c": leaf(2, 3, start=i)}}, [2])
        for i in range(3)
    ]
    return lib.lazy_stack(members, 0)


def ragged(lib: Library) -> Any:
    members = [lib.TensorDict({"a": leaf(2, i + 1), "b": leaf(2)}, [2]) for i in range(3)]
    return lib.lazy_stack(members, 0)


def based(lib: Library) -> Any:
    return lib.Based(a=leaf(3, 2), b=torch.arange(6).reshape(3, 2), batch_size=[3, 2])


def decorated(lib: Library) -> Any:
    return lib.Decorated(
        a=leaf(3, 2), b=torch.arange(6).reshape(3, 2), n=dense(lib), batch_size=[3, 2]
    )


def typed(lib: Library) -> Any:
    return lib.Typed(a=leaf(3, 2), b=torch.arange(6).reshape(3, 2), batch_size=[3, 2])


def params(lib: Library) -> Any:
    source = {"a": nn.Parameter(leaf(3, 2)), "n": {"c": nn.Parameter(leaf(3, 2, 2))}}
    return lib.TensorDictParams(lib.TensorDict(source, []))


def unbatched(lib: Library) -> Any:
    td = lib.TensorDict({"a": leaf(3, 2)}, [3, 2])
    td["u"] = lib.UnbatchedTensor(leaf(5))
    return td


def worded(lib: Library) -> Any:
    td = lib.TensorDict({"a": leaf(3, 2)}, [3, 2])
    td["s"] = "word"
    td["w"] = lib.NonTensorStack(*[lib.NonTensorStack(f"x{i}", f"y{i}") for i in range(3)])
    return td


def named(lib: Library) -> Any:
    return lib.TensorDict({"a": leaf(3, 2), "n": {"c": leaf(3, 2, 2)}}, [3, 2], names=["t", "e"])


def locked(lib: Library) -> Any:
    return nested(lib).lock_()


def mapped(lib: Library) -> Any:
    return nested(lib).memmap_()


def shared(lib: Library) -> Any:
    return nested(lib).share_memory_()


def unsized(lib: Library) -> Any:
    return lib.TensorDict({"a": leaf(3), "n": {"c": leaf(2, 2)}})


def empty(lib: Library) -> Any:
    return lib.TensorDict({}, [3, 2])


def one_value(lib: Library) -> Any:
    return lib.NonTensorData("word", batch_size=[3, 2])


def row_values(lib: Library) -> Any:
    return lib.NonTensorStack(*[lib.NonTensorStack(f"x{i}", f"y{i}") for i in range(3)])


KINDS: dict[str, Callable[[Library], Any]] = {
    make.__name__: make
    for make in (
        *(dense, nested, lazy, ragged, based, decorated, typed, params, unbatched, worded),
        *(named, locked, mapped, shared, unsized, empty, one_value, row_values),
    )
}


class Linear(nn.Module):
    """A module of the shape of `params`."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(leaf(3, 2))
        self.n = nn.Module()
        self.n.c = nn.Parameter(leaf(3, 2, 2))


def folder(tmp: Path, lib: Library) -> Path:
    """Return a fresh folder for the files of one call."""
    path = tmp / f"{lib.name}-{len(list(tmp.iterdir()))}"
    path.mkdir()
    return path
