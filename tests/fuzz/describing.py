"""Operations that say what a container is, change its settings, or make plain Python of it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from random import Random

import torch
from tests.fuzz.checking import ITSELF, Call, Refusal
from tests.fuzz.data import Data, Unknown
from tests.fuzz.registry import operation
from tests.fuzz.subjects import Plain, Subject
from tests.fuzz.trees import walk
from torch import Tensor

from kd_core import TensorDictBase


@operation("locked", "unlocked")
def scope(rng: Random, s: Subject, name: str) -> Call:
    def ours(td: TensorDictBase) -> object:
        before = td.is_locked
        with getattr(td, name)() as inside:
            during = td.is_locked
        return inside is td, during, td.is_locked is before

    return Call(name, f"with td.{name}()", ours, lambda tree: (True, name == "locked", True))


@operation("lock_", "unlock_")
def lock(rng: Random, s: Subject, name: str) -> Call:
    def ours(td: TensorDictBase) -> object:
        before = td.is_locked
        result = getattr(td, name)()
        now = td.is_locked
        (td.lock_ if before else td.unlock_)()
        return result is td, now

    return Call(name, f"td.{name}()", ours, lambda tree: (True, name == "lock_"))


@operation("requires_grad_", "detach_", "share_memory_", "zero_grad")
@operation("clear_device_", "auto_device_")
def settings(rng: Random, s: Subject, name: str) -> Call:
    args = (rng.random() < 0.6,) if name == "requires_grad_" else ()
    ours = operator.methodcaller(name, *args)

    def theirs(tree: Plain) -> object:
        return ITSELF

    unchecked = name not in ("zero_grad", "clear_device_")
    return Call(name, f"td.{name}{args}", ours, theirs, unchecked=unchecked)


@operation("numpy", "tolist", "state_dict", "load_state_dict")
def convert(rng: Random, s: Subject, name: str) -> Call:
    def theirs(tree: Plain) -> object:
        if name == "tolist":
            return tree_of(tree, lambda leaf: leaf.tolist())
        if name == "numpy":
            for leaf in tree.tensors():
                leaf.numpy()
            return None
        if name == "state_dict":
            return None
        for leaf in tree.tensors():
            with torch.no_grad():
                leaf.copy_(leaf.clone())
        return ITSELF

    def ours(td: TensorDictBase) -> object:
        if name == "tolist":
            return td.to_dict(convert_tensors=True)
        if name == "load_state_dict":
            return td.load_state_dict(td.clone().state_dict())
        getattr(td, name)()
        return None

    exact_nan = any(
        not torch.isfinite(leaf).all()
        for leaf in s.node.tensors()
        if leaf.is_floating_point() or leaf.is_complex()
    )
    return Call(
        name,
        f"td.{name}()",
        ours,
        theirs,
        writes=name == "load_state_dict",
        unchecked=name == "tolist" and exact_nan,
    )


def tree_of(tree: Plain, fn: Callable[[Tensor], object]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in tree.entries.items():
        if isinstance(value, Plain):
            found[key] = tree_of(value, fn)
        else:
            found[key] = value.read() if isinstance(value, Data) else fn(value)
    return found


ASKED: dict[str, Callable[[Plain], object]] = {
    "batch_size": lambda tree: torch.Size(tree.batch),
    "shape": lambda tree: torch.Size(tree.batch),
    "batch_dims": lambda tree: len(tree.batch),
    "ndim": lambda tree: len(tree.batch),
    "dim": lambda tree: len(tree.batch),
    "ndimension": lambda tree: len(tree.batch),
    "size": lambda tree: torch.Size(tree.batch),
    "numel": lambda tree: math.prod(tree.batch),
    "__len__": lambda tree: tree.batch[0] if tree.batch else 0,
    "device": lambda tree: None,
    "is_cpu": lambda tree: False,
    "is_cuda": lambda tree: False,
    "is_meta": lambda tree: False,
    "is_floating_point": lambda tree: all(leaf.dtype.is_floating_point for leaf in tree.tensors()),
    "is_empty": lambda tree: all(isinstance(v, Plain) for _, v in walk(tree, True, False, ())),
    "requires_grad": lambda tree: any(leaf.requires_grad for leaf in tree.tensors()),
    "dtype": lambda tree: _only({leaf.dtype for leaf in tree.tensors()}),
    "depth": lambda tree: _depth(tree),
    "sorted_keys": lambda tree: sorted(tree.entries),
    "param_count": lambda tree: sum(leaf.numel() for leaf in tree.tensors()),
    "bytes": lambda tree: sum(leaf.nbytes for leaf in tree.tensors()),
}


def _only(found: set[torch.dtype]) -> object:
    return found.pop() if len(found) == 1 else None


def _depth(tree: Plain) -> int:
    inner = [value for value in tree.entries.values() if isinstance(value, Plain)]
    return 1 + max(map(_depth, inner)) if inner else 0


@operation(*ASKED)
def ask(rng: Random, s: Subject, name: str) -> Call:
    def ours(td: TensorDictBase) -> object:
        found = len(td) if name == "__len__" else getattr(td, name)
        return found() if callable(found) else found

    ragged_sum = name in ("param_count", "bytes")
    unchecked = (s.ragged and ragged_sum) or (name == "__len__" and not s.batch)
    return Call(name, f"td.{name}", ours, ASKED[name], unchecked=unchecked)


@operation("data_ptr")
def addresses(rng: Random, s: Subject, name: str) -> Call:
    return Call(
        name,
        "td.data_ptr()",
        lambda td: td.data_ptr(),
        lambda tree: tree.map(lambda leaf: torch.tensor(leaf.data_ptr()), lambda batch: ()),
        unchecked=bool(s.node.members) or s.kind == "holder",
    )


@operation(
    "__repr__",
    "summary",
    "is_contiguous",
    "is_shared",
    "is_pinned",
    "is_consolidated",
    "is_locked",
    "grad",
    "_ipython_key_completions_",
    "_repr_html_",
)
def works(rng: Random, s: Subject, name: str) -> Call:
    """Return a call that is to work on anything, whatever it says."""

    def ours(td: TensorDictBase) -> object:
        if not hasattr(td, name) and name.startswith("_"):
            return None
        found = getattr(td, name)
        found() if callable(found) else found
        return None

    return Call(name, f"td.{name}", ours, lambda tree: None, memberwise=False)


@operation("__bool__")
def refuses(rng: Random, s: Subject, name: str) -> Call:
    def theirs(tree: Plain) -> object:
        raise Refusal("a container has no truth")

    return Call(name, "bool(td)", bool, theirs)


@operation("batch_size setter", "auto_batch_size_")
def resize(rng: Random, s: Subject, name: str) -> Call:
    batch = rng.choice([s.batch[:-1], s.batch, (*s.batch, 2), (*s.batch, 1), (5,), ()])
    most = rng.choice([None, 0, 1, 2, -1])

    def ours(td: TensorDictBase) -> object:
        if name == "auto_batch_size_":
            return td.auto_batch_size_(most)
        td.batch_size = torch.Size(batch)
        return None

    def theirs(tree: Plain) -> object:
        if s.node.members:
            raise Refusal("a stack, whose dimension stays")
        new = tree.map(lambda leaf: leaf)
        if name == "auto_batch_size_":
            if most is not None and most < 0:
                raise Refusal("negative")
            _share(new, most)
            return new, ITSELF
        _regrown(new, batch)
        return new, None

    stack = any(True for _ in s.node.members) or s.kind == "holder"
    return Call(name, f"{name} {batch} {most}", ours, theirs, restructures=True, unchecked=stack)


def _share(tree: Plain, most: int | None) -> None:
    """Set the batch sizes to the sizes that the entries share, from the innermost container."""
    shapes: list[tuple[int, ...]] = []
    for value in tree.entries.values():
        if isinstance(value, Plain):
            _share(value, most)
            shapes.append(value.batch)
        elif isinstance(value, Tensor):
            shapes.append(tuple(value.shape))
        elif value.rows is not None and value.rows.ndim:
            shapes.append(tuple(value.rows.shape))
        elif value.rows is not None:
            raise Unknown("the value of the one row that there was")
    if not shapes and most:  # so many dimensions of its own
        shapes.append(tree.batch)
    if shapes:
        tree.batch = _common(shapes, most)


def _common(shapes: list[tuple[int, ...]], most: int | None) -> tuple[int, ...]:
    if not shapes:
        return ()
    found: list[int] = []
    for sizes in zip(*shapes, strict=False):
        if len(set(sizes)) > 1 or (most is not None and len(found) >= most):
            break
        found.append(sizes[0])
    return tuple(found)


def _regrown(tree: Plain, batch: tuple[int, ...]) -> None:
    for value in tree.entries.values():
        if isinstance(value, Tensor) and tuple(value.shape[: len(batch)]) != batch:
            raise Refusal("an entry does not fit")
        rows = value.rows if isinstance(value, Data) else None
        if rows is not None and not rows.ndim:
            raise Unknown("the value of the one row that there was")
        if rows is not None and tuple(rows.shape[: len(batch)]) != batch:
            raise Refusal("there are rows without a value")
        if isinstance(value, Plain):
            if value.batch[: len(batch)] != batch and value.batch != batch[: len(value.batch)]:
                raise Refusal("a nested container does not fit")
            _regrown(value, batch if len(value.batch) < len(batch) else value.batch)
    tree.batch = batch
