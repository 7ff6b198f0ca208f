"""Operations that make other kinds, plain Python or schemas of a container, and read them back."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import cast

import torch
from tests.fuzz.checking import Call, Refusal, keys_of
from tests.fuzz.data import WORDS, Batch, Data, Unknown, stored
from tests.fuzz.registry import dim, lax, operation
from tests.fuzz.subjects import Plain, Subject
from tests.fuzz.trees import as_dict, flattened, walk
from torch import Tensor

from kd_core import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase


@operation("to_tensordict", "densify")
def to_dense(rng: Random, s: Subject, name: str) -> Call:
    """Copy into plain containers, or read ragged entries as nested tensors."""
    keep = rng.random() < 0.7

    def theirs(tree: Plain) -> object:
        if name == "densify":
            return tree
        return without_none(tree.map(torch.clone)) if not keep else tree.map(torch.clone)

    def ours(td: TensorDictBase) -> object:
        made = td.densify() if name == "densify" else td.to_tensordict(retain_none=keep)
        assert name == "densify" or type(made) is TensorDict
        return made

    shares = False if name == "to_tensordict" else None
    return Call(name, f"td.{name}({keep})", ours, theirs, shares=shares)


def without_none(tree: Plain) -> Plain:
    """Leave out data that is `None`."""
    new = Plain(tree.batch)
    for key, value in tree.entries.items():
        if isinstance(value, Plain):
            new.entries[key] = without_none(value)
        elif not (isinstance(value, Data) and value.read() is None):
            new.entries[key] = value
    return new


@operation("to_lazystack")
def to_stack(rng: Random, s: Subject, name: str) -> Call:
    """Make a stack of the rows along a dimension."""
    at = dim(rng, len(s.batch))

    def theirs(tree: Plain) -> object:
        torch.zeros(tree.batch).unbind(cast("int", at))
        if not tree.batch[cast("int", at)]:
            raise Unknown("a stack of no rows")
        return tree

    def ours(td: TensorDictBase) -> object:
        made = td.to_lazystack(cast("int", at))
        assert isinstance(made, LazyStackedTensorDict)
        assert s.node.members or made.stack_dim == at % len(s.batch)  # type: ignore[operator]  # a number
        return made

    return Call(
        name,
        f"td.to_lazystack({at!r})",
        ours,
        theirs,
        lax=lax(at),
        unchecked=bool(s.node.members),  # of another dimension it is the stack itself
    )


@operation("to_padded_tensor")
def to_padded(rng: Random, s: Subject, name: str) -> Call:
    """Pad nested tensors, of which a container of plain leaves has none."""
    return Call(name, "td.to_padded_tensor(1.0)", lambda td: td.to_padded_tensor(1.0), lambda t: t)


@operation("schema", "from_schema")
def schemas(rng: Random, s: Subject, name: str) -> Call:
    """Describe the leaves, or make zeros of such leaves."""
    ndim = len(s.batch)

    def theirs(tree: Plain) -> object:
        found = walk(tree, True, True, ())
        if name == "from_schema":
            return zeros_of(tree)
        return {path: described(entry, ndim) for path, entry in found}

    def ours(td: TensorDictBase) -> object:
        schema = td.schema()
        if name == "from_schema":
            return TensorDict.from_schema(schema, td.batch_size)
        paths = {(key,) if isinstance(key, str) else key: each for key, each in schema.items()}
        return {path: (each.kind, each.shape, each.dtype) for path, each in paths.items()}

    return Call(name, f"td.{name}()", ours, theirs)


def described(entry: object, ndim: int) -> tuple[object, ...]:
    if isinstance(entry, Tensor):
        return ("tensor", entry.shape[ndim:], entry.dtype)
    return ("data", torch.Size(()), None)


def zeros_of(tree: Plain) -> Plain:
    """Return zeros where there are leaves, and `None` where there is data."""
    new = Plain(tree.batch)
    for path, entry in walk(tree, True, True, ()):
        level = new
        for part in path[:-1]:
            level = cast("Plain", level.entries.setdefault(part, Plain(tree.batch)))
        is_leaf = isinstance(entry, Tensor)
        made = torch.zeros_like(cast("Tensor", entry)) if is_leaf else stored(None, tree.batch)
        level.entries[path[-1]] = made
    return new


@operation("pack")
def vectors(rng: Random, s: Subject, name: str) -> Call:
    """Make one tensor of all leaves, and a container of that."""
    ndim = len(s.batch)
    at = dim(rng, ndim + 1)

    def theirs(tree: Plain) -> object:
        found = [entry for _, entry in walk(tree, True, True, ())]
        leaves = [entry for entry in found if isinstance(entry, Tensor)]
        if len(leaves) < len(found) or len({leaf.dtype for leaf in leaves}) > 1:
            raise Refusal("one tensor has one dtype")
        rows = [leaf.unsqueeze(-1).flatten(ndim) for leaf in leaves]
        empty = leaves[0].new_zeros(*tree.batch, 0) if leaves else torch.zeros(*tree.batch, 0)
        flat = torch.cat([empty, *rows], -1).movedim(-1, cast("int", at))
        return flat, tree.map(Tensor.detach)

    def ours(td: TensorDictBase) -> object:
        flat, layout = td.pack(cast("int", at))
        return flat, layout.unpack(flat.detach())

    return Call(name, f"td.pack({at!r})", ours, theirs, lax=lax(at))


def bare(tree: Plain, batch: Batch) -> Plain:
    """Return what a tree reads as once it was plain Python: one batch size, and no wrappers."""
    new = Plain(batch)
    for key, value in tree.entries.items():
        if isinstance(value, Plain):
            new.entries[key] = bare(value, batch)
        elif not isinstance(value, Data):
            new.entries[key] = value
        elif value.rows is None and is_word(value.value):
            new.entries[key] = stored(value.value, batch)
        elif value.rows is None or not words_of(value.rows) or tuple(value.rows.shape) != batch:
            raise Unknown("a list, which is read as a tensor or taken apart")
        else:
            new.entries[key] = value
    return new


def is_word(value: object) -> bool:
    """Whether plain Python of a value is read as that value, not as a tensor or a container."""
    return value is None or isinstance(value, str)


def words_of(rows: Tensor) -> bool:
    """Whether there are rows, and all have words."""
    return bool(rows.numel()) and all(is_word(WORDS[at]) for at in rows.reshape(-1).tolist())


def positions(value: object) -> object:
    """Return nested dicts as nested tuples."""
    return tuple(map(positions, value.values())) if isinstance(value, dict) else value


def numbered(tree: Plain) -> Plain:
    """Return a tree whose keys are positions."""
    pairs = enumerate(tree.entries.values())
    return Plain(tree.batch, {str(i): numbered(e) if isinstance(e, Plain) else e for i, e in pairs})


def in_rows(tree: Plain) -> Plain:
    """Return a tree in which each row has its own value, as it has among the rows of a list."""
    new = Plain(tree.batch)
    for key, value in tree.entries.items():
        if isinstance(value, Plain):
            new.entries[key] = in_rows(value)
        elif isinstance(value, Data):
            new.entries[key] = Data(None, NonTensorData, value.of_rows(tree.batch))
        else:
            new.entries[key] = value
    return new


def record(name: str, value: object) -> object:
    """Return nested dicts as nested dataclasses."""
    if not isinstance(value, dict):
        return value
    parts = {key: record(key, part) for key, part in value.items()}
    return record_class(name.title(), *parts)(**parts)


@lru_cache(64)
def record_class(name: str, *fields: str) -> type:
    """Return a dataclass; Python keeps bytes of each class that `isinstance` is asked about."""
    return dataclasses.make_dataclass(name, fields)


BACK: dict[str, Callable[[TensorDictBase], object]] = {
    "from_any": lambda td: TensorDict.from_any(td.to_dict(), batch_size=td.batch_size),
    "from_dict": lambda td: TensorDict.from_dict(td.to_dict(), td.batch_size),
    "from_dict_instance": lambda td: td.from_dict_instance(td.to_dict(), batch_size=td.batch_size),
    "from_dataclass": lambda td: TensorDict.from_dataclass(
        record("Root", td.to_dict()), batch_size=td.batch_size
    ),
    "from_namedtuple": lambda td: TensorDict.from_namedtuple(
        cast("tuple[object, ...]", td.to_namedtuple()), batch_size=td.batch_size
    ),
    "from_tuple": lambda td: TensorDict.from_tuple(
        cast("tuple[object, ...]", positions(td.to_dict())), batch_size=td.batch_size
    ),
    "from_struct_array": lambda td: TensorDict.from_struct_array(
        td.to_struct_array(), batch_size=td.batch_size
    ),
    "from_list": lambda td: TensorDict.from_list(
        [row.to_dict() for row in td.unbind(0)], batch_size=td.batch_size
    ),
}


@operation(*BACK, "to_namedtuple", "to_struct_array")
def and_back(rng: Random, s: Subject, name: str) -> Call:
    """Make plain Python of a container, and a container of that."""
    way = {"to_namedtuple": "from_namedtuple", "to_struct_array": "from_struct_array"}.get(
        name, name
    )

    def theirs(tree: Plain) -> object:
        found = bare(tree, tree.batch)
        if way in ("from_list", "from_struct_array"):
            if not math.prod(tree.batch):
                raise Unknown("no row says what it holds")
            found = in_rows(found) if len(tree.batch) == 1 or way != "from_list" else found
        if way == "from_struct_array":
            for leaf in tree.tensors():
                leaf.numpy()
            if any(
                isinstance(v, Plain) and v.batch != tree.batch
                for _, v in walk(tree, True, False, ())
            ):
                raise Unknown("rows of more dimensions")
        if way == "from_list" and not tree.batch:
            raise Refusal("no rows")
        return numbered(found) if way == "from_tuple" else found

    return Call(
        name,
        f"{way} of the same",
        BACK[way],
        theirs,
        may_refuse=lambda tree: way == "from_struct_array" and cannot_be_array(tree),
        unchecked=way == "from_dict_instance" and s.node.declared,
    )


def cannot_be_array(tree: Plain) -> bool:
    """Whether numpy has no such dtype, or torch does not give it the memory of a leaf."""
    return any(leaf.dtype is torch.bfloat16 or leaf.requires_grad for leaf in tree.tensors())


@operation("to_pytree", "from_pytree")
def tree_and_back(rng: Random, s: Subject, name: str) -> Call:
    """Make a tree of torch of a container that was made of one."""

    def ours(td: TensorDictBase) -> object:
        return TensorDict.from_pytree(td.to_dict(), batch_size=td.batch_size).to_pytree()

    def theirs(tree: Plain) -> object:
        bare(tree, tree.batch)  # it says where lists are taken apart
        return as_dict(tree)

    return Call(name, "from_pytree(td.to_dict()).to_pytree()", ours, theirs)


def with_levels(found: Plain, tree: Plain) -> Plain:
    """Return what was read with the batch sizes that nested containers had."""
    new = Plain(tree.batch)
    for (key, value), old in zip(found.entries.items(), tree.entries.values(), strict=True):
        if isinstance(value, Plain) and isinstance(old, Plain):
            new.entries[key] = with_levels(value, old)
        elif isinstance(old, Data) and old.rows is None:
            new.entries[key] = stored(old.value, tree.batch)
        else:
            new.entries[key] = value
    return new


@operation("to_json", "from_json", "to_csv", "from_csv")
def through_text(rng: Random, s: Subject, name: str) -> Call:
    """Write a file of text, and read it back; one of values has no dtypes and no levels."""
    way = name.rpartition("_")[2]

    def theirs(tree: Plain) -> object:
        found = bare(tree, tree.batch)  # it says where data is not text
        if any(leaf.is_complex() for leaf in tree.tensors()):
            raise Unknown("numbers that text does not have")
        if way == "json":
            return with_levels(found, tree).map(Tensor.detach)
        if any(not math.prod(leaf.shape[1:]) for leaf in tree.tensors()):
            raise Refusal("no column")
        if len(tree.batch) != 1 or not tree.batch[0] or not keys_of(tree):
            raise Unknown("no row says what it holds")
        return tree.batch[0], sorted(flattened(found, "/").entries)

    def ours(td: TensorDictBase) -> object:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "td"
            if way == "json":
                td.to_json(path)
                return TensorDict.from_json(path)
            td.to_csv(path, separator="/")
            back = TensorDict.from_csv(path, separator=None, batch_size=td.batch_size[:1])
            return back.batch_size[0], sorted(map(str, back.keys()))

    exact = all(bool(torch.isfinite(leaf).all()) for leaf in s.node.tensors())
    return Call(name, f"{way} and back", ours, theirs, unchecked=not exact)
