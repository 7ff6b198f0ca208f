"""Copies, casts, functions on leaves, autograd, vmap, descriptions and locks."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from random import Random
from typing import cast

import torch
from tests.fuzz.checking import ITSELF, Call, Refusal, has_stack
from tests.fuzz.data import Data, Unknown
from tests.fuzz.operands import container_operand, paired
from tests.fuzz.registry import dim, lax, operation
from tests.fuzz.subjects import Node, Plain, Subject, read
from torch import Tensor

from kd_core import TensorDictBase


def copied_leaf(leaf: Tensor) -> Tensor:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def saved(td: TensorDictBase) -> object:
    buffer = io.BytesIO()
    torch.save(td, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


COPIES: dict[str, Callable[[TensorDictBase], object]] = {
    "clone": lambda td: td.clone(),
    "clone shallow": lambda td: td.clone(recurse=False),
    "copy": lambda td: td.copy(),
    "__copy__": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "torch.save": saved,
    "torch.clone": lambda td: torch.clone(td),  # type: ignore[arg-type]  # a container
}


def is_pickled(leaf: Tensor) -> bool:
    """Return whether torch itself unpickles the dtype of a tensor."""
    return leaf.dtype not in (torch.uint16, torch.uint32, torch.uint64)


@operation(*COPIES)
def duplicate(rng: Random, s: Subject, name: str) -> Call:
    shallow = name in ("copy", "__copy__", "clone shallow")
    inside = any(leaf.requires_grad and not leaf.is_leaf for leaf in s.node.tensors())
    if name == "torch.save" and s.node.declared:
        name = "pickle"  # a class of one's own is not loaded with `weights_only`
    if name == "pickle" and not all(map(is_pickled, s.node.tensors())):
        name = "copy.deepcopy"

    def theirs(tree: Plain) -> object:
        if shallow:
            return tree
        if name in ("clone", "torch.clone"):
            return tree.map(torch.clone)
        if inside:
            raise Refusal("inside the graph")
        return tree.map(copied_leaf)

    call = Call(name, name, COPIES[name], theirs, memberwise=True, shares=shallow)
    if name in ("pickle", "torch.save", "copy.deepcopy"):
        call.may_refuse = lambda tree: inside
    return call


FUNCTIONS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "x + 1": lambda x: x + 1,
    "x": lambda x: x,
    "view": lambda x: x.view_as(x),
    "bool": lambda x: x != 0,
    "none for integers": lambda x: x if x.is_floating_point() else None,
    "sum": lambda x: x.sum(),
    "stack": lambda x: torch.stack([x, x], -1),
}


def applied(
    tree: Plain, fn: Callable[[Tensor], Tensor | None], batch: tuple[int, ...] | None, prune: bool
) -> Plain:
    new = Plain(tree.batch if batch is None else batch)
    for key, value in tree.entries.items():
        if isinstance(value, Plain):
            inner = applied(value, fn, batch, prune)
            dropped = value.tensors() and not inner.entries  # nothing is left of it
            if inner.entries or not (prune or dropped):
                new.entries[key] = inner
        elif isinstance(value, Tensor):
            found = fn(value)
            if found is None:
                continue
            if tuple(found.shape[: len(new.batch)]) != new.batch:
                raise Refusal("the result does not fit")
            new.entries[key] = found
        else:
            new.entries[key] = value
    return new


@operation("apply", "named_apply")
def apply(rng: Random, s: Subject, name: str) -> Call:
    which = rng.choice(list(FUNCTIONS))
    fn = FUNCTIONS[which]
    named = name == "named_apply"
    batch = rng.choice([None, None, (), s.batch[:1]])
    prune = rng.random() < 0.3 and not s.ragged  # what is left is decided by member
    options: dict[str, object] = {}
    if batch is not None:
        options["batch_size"] = batch
    if prune:
        options["filter_empty"] = True
    if named:
        options["nested_keys"] = True
    seen: list[object] = []

    def call(*args: object) -> object:
        if named:
            seen.append(args[0])
        return fn(cast("Tensor", args[-1]))

    def theirs(tree: Plain) -> object:
        made = applied(tree, fn, batch, prune)
        return None if (prune or tree.tensors()) and not made.entries else made

    return Call(
        name,
        f"td.{name}({which}, {options})",
        lambda td: getattr(td, name)(call, **options),
        theirs,
        memberwise=batch is None and which not in ("sum", "stack"),
        may_refuse=lambda tree: s.node.declared,
        unchecked=has_stack(s.node) and which in ("sum", "stack"),  # of a member, or of all
    )


def part_of(tree: Plain, axis: int, start: int, rows: int) -> Plain:
    """Return twice the rows of a part; with 0 rows, of one row without its dimension."""
    if not rows:
        return tree.map(
            lambda leaf: leaf.select(axis, start) * 2,
            lambda batch: batch[:axis] + batch[axis + 1 :],
        )
    return tree.map(
        lambda leaf: leaf.narrow(axis, start, rows) * 2,
        lambda batch: (*batch[:axis], rows, *batch[axis + 1 :]),
    )


@operation("backward")
def backward(rng: Random, s: Subject, name: str) -> Call:
    """Compute gradients of a function of all leaves."""

    def theirs(tree: Plain) -> object:
        roots = [leaf * 2 for leaf in tree.tensors() if leaf.requires_grad]
        if not roots:
            raise Refusal("no graph")
        return None

    def ours(td: TensorDictBase) -> object:
        twice = td * 2
        twice.backward(twice.detach())
        td.zero_grad()
        return None

    return Call(name, "(td * 2).backward(td * 2)", ours, theirs, unchecked=True)


@operation("map", "map_iter")
def map_parts(rng: Random, s: Subject, name: str) -> Call:
    at, size = dim(rng, len(s.batch)), rng.choice([0, 1, 2, 5])

    def theirs(tree: Plain) -> object:
        torch.zeros(tree.batch).sum(at)  # type: ignore[call-overload]  # odd ones
        if not tree.batch:
            raise Refusal("no dimension")
        axis = cast("int", at) % len(tree.batch)
        rows = tree.batch[axis]
        if name == "map":
            if not rows:
                raise Refusal("no row")
            return tree.map(lambda leaf: leaf * 2)
        starts = range(0, rows, size or 1)
        return [part_of(tree, axis, start, min(size, rows - start)) for start in starts]

    def ours(td: TensorDictBase) -> object:
        found = getattr(td, name)(lambda part: part * 2, at, chunksize=size)
        return found if name == "map" else list(found)

    return Call(
        name,
        f"td.{name}(lambda part: part * 2, {at!r}, chunksize={size})",
        ours,
        theirs,
        exact=False,
        lax=lax(at),
    )


def unstacked(node: Node) -> list[Node]:
    """Return the members of a stack, and of those that are stacks themselves."""
    if not node.members:
        return [node]
    return [each for member in node.members for each in unstacked(member)]


@operation("apply nested")
def apply_nested(rng: Random, s: Subject, name: str) -> Call:
    """Call a function on the entries of the first level, some of them left out."""
    gone = rng.choice(["a", "n", "b"])
    options: dict[str, object] = {"propagate_lock": rng.random() < 0.5}

    def change(key: str, value: object) -> object:
        return None if key == gone else value

    # An empty member stays in a stack of which something is left.
    some_left = bool(s.node.members) and not all(
        list(member.entries) == [gone] for member in unstacked(s.node)
    )

    def theirs(tree: Plain) -> object:
        new = Plain(tree.batch, dict(tree.entries))
        found = new.entries.pop(gone, None)
        return None if found is not None and not new.entries and not some_left else new

    return Call(
        name,
        f"td.named_apply(without {gone}, call_on_nested=True, {options})",
        lambda td: td.named_apply(change, call_on_nested=True, **options),  # type: ignore[arg-type]  # of any value
        theirs,
        memberwise=True,
        may_refuse=lambda tree: s.node.declared,
    )


@operation("apply inplace")
def apply_inplace(rng: Random, s: Subject, name: str) -> Call:
    which = rng.choice(["x + 1", "bool", "sum"])
    fn = cast("Callable[[Tensor], Tensor]", FUNCTIONS[which])

    def theirs(tree: Plain) -> object:
        if s.td.is_locked:
            raise Refusal("locked")
        return applied(tree, fn, None, False), ITSELF

    return Call(
        name,
        f"td.apply({which}, inplace=True)",
        lambda td: td.apply(fn, inplace=True),
        theirs,
        restructures=True,
        unchecked=True,  # whether it writes or binds anew is being decided
    )


@operation("apply_", "apply others")
def apply_pairs(rng: Random, s: Subject, name: str) -> Call:
    write = name == "apply_"
    operand = container_operand(rng, s)
    if write and rng.random() < 0.5:
        return Call(
            name,
            "td.apply_(lambda x: x * 2)",
            lambda td: td.apply_(lambda x: x * 2),
            lambda tree: _copied_over(tree, [leaf * 2 for leaf in tree.tensors()]),
            writes=True,
            exact=False,
        )

    def theirs(tree: Plain) -> object:
        found = cast("Plain", paired(tree, [operand], _sum))
        return _copied_over(tree, found.tensors()) if write else found

    return Call(
        name,
        f"td.apply{'_' if write else ''}(add, {operand.text})",
        lambda td: getattr(td, "apply_" if write else "apply")(_sum, operand.ours),
        theirs,
        writes=write,
        exact=False,
        may_refuse=lambda tree: (
            tuple(cast("TensorDictBase", operand.ours).batch_size) != tree.batch
        ),
    )


def _sum(mine: Tensor, theirs: object) -> Tensor:
    """Add what is promoted by dtype alone: in a stack, `apply` sees the leaves of members."""
    operand = cast("Tensor", theirs)
    dtype = torch.promote_types(mine.dtype, operand.dtype)
    return torch.add(mine.to(dtype), operand.to(dtype))


def _copied_over(tree: Plain, results: list[Tensor]) -> object:
    for leaf, result in zip(tree.tensors(), results, strict=True):
        if not _is_held(leaf.dtype, result):
            raise Unknown("a number that the dtype does not hold becomes another one or another")
        leaf.copy_(result.detach())
    return ITSELF


def _is_held(dtype: torch.dtype, result: Tensor) -> bool:
    """Whether no floating-point number lies beyond the integers of a dtype."""
    if dtype.is_floating_point or dtype.is_complex or not result.is_floating_point():
        return True
    if dtype is torch.bool:
        return True
    limits = torch.iinfo(dtype)
    return bool(((result >= limits.min) & (result <= limits.max)).all())


@operation(
    *("detach", "data", "contiguous", "consolidate", "torch.detach", "cpu"),
    *("as_tensor", "clear_refs_for_compile_"),
)
def outside(rng: Random, s: Subject, name: str) -> Call:
    def ours(td: TensorDictBase) -> object:
        if name == "data":
            return td.data
        if name == "torch.detach":
            return torch.detach(td)  # type: ignore[arg-type]  # a container
        return getattr(td, name)()

    fn: Callable[[Tensor], Tensor] = {
        "contiguous": Tensor.contiguous,
        "consolidate": lambda leaf: leaf.detach().clone(),
        "cpu": lambda leaf: leaf,
        "as_tensor": lambda leaf: leaf,
        "clear_refs_for_compile_": lambda leaf: leaf,
    }.get(name, Tensor.detach)
    shared = {"contiguous": None, "consolidate": False}
    return Call(
        name,
        f"td.{name}",
        ours,
        lambda tree: tree.map(fn),
        shares=shared.get(name, True),
        memberwise=name != "contiguous",
    )


def in_order(tree: Plain) -> Plain:
    """Return a tree with sorted keys, as what went through a pytree has them."""
    new = Plain(tree.batch)
    for key, value in sorted(tree.entries.items()):
        new.entries[key] = in_order(value) if isinstance(value, Plain) else value
    return new


INSIDE: dict[str, Callable[[TensorDictBase], TensorDictBase]] = {
    "x + x": lambda part: part + part,
    "reshape": lambda part: part.reshape(-1).reshape(*part.batch_size),
    "sum": lambda part: part.sum(dim="feature"),
    "neg": lambda part: -part,
}


def by_leaf(which: str, leaf: Tensor, ndim: int) -> Tensor:
    """Do to a leaf what is done inside of vmap."""
    if which == "x + x":
        return leaf + leaf
    if which == "sum":
        return leaf.reshape((*leaf.shape[:ndim], math.prod(leaf.shape[ndim:]))).sum(-1)
    return -leaf if which == "neg" else leaf


@operation("vmap")
def mapped(rng: Random, s: Subject, name: str) -> Call:
    """Return a call under vmap; the dimensions are those of the batch."""
    ndim = len(s.batch) or 1  # without a batch, as for a dict of tensors
    at, out = rng.randrange(ndim), rng.randrange(ndim)
    which = rng.choice(list(INSIDE))
    if rng.random() < 0.05:
        at = ndim

    def ours(td: TensorDictBase) -> object:
        mapped = torch.vmap(INSIDE[which], (at,), out)
        return in_order(read(mapped(td)))

    def theirs(tree: Plain) -> object:
        if at == ndim:
            raise Refusal("not a dimension of the batch") if tree.batch else Unknown  # a feature
        batch = tree.batch
        if not batch:
            sizes = {tuple(leaf.shape[:1]) for leaf in tree.tensors()}
            if len(sizes) != 1 or () in sizes:
                raise Refusal("no dimension that all leaves have")
            batch = sizes.pop()
        moved = tuple(torch.zeros(batch).movedim(at, out).shape)
        cut = which == "sum"
        return in_order(
            tree.map(
                lambda leaf: by_leaf(which, leaf, ndim).movedim(at, out),
                lambda batch: moved if cut else (*moved, *batch[ndim:]),
            )
        )

    def may_refuse(tree: Plain) -> bool:
        moves = (at, out) != (0, 0) or which == "reshape"
        return not tree.tensors() or (moves and has_values_of_rows(tree))

    text = f"vmap({which}, {at}, {out})(td)"
    return Call(name, text, ours, theirs, exact=False, may_refuse=may_refuse)


def has_values_of_rows(tree: Plain) -> bool:
    """Whether an entry holds data of rows, which vmap hides: they stay where they are."""
    return any(
        has_values_of_rows(value)
        if isinstance(value, Plain)
        else isinstance(value, Data) and value.rows is not None
        for value in tree.entries.values()
    )


@operation("torch.func.grad")
def gradient(rng: Random, s: Subject, name: str) -> Call:
    def ours(td: TensorDictBase) -> object:
        return in_order(read(torch.func.grad(lambda each: (each * each).sum(reduce=True))(td)))

    def theirs(tree: Plain) -> object:
        leaves = tree.tensors()
        if not leaves or any(not leaf.is_floating_point() for leaf in leaves):
            raise Refusal("only floats have gradients")
        return in_order(tree.map(lambda leaf: leaf.detach() * 2))

    return Call(
        name,
        "torch.func.grad(...)(td)",
        ours,
        theirs,
        exact=False,
        unchecked=any(leaf.requires_grad for leaf in s.node.tensors())
        or len({leaf.dtype for leaf in s.node.tensors()}) > 1
        or bool(
            [
                leaf
                for leaf in s.node.tensors()
                if not torch.isfinite(
                    leaf.to(torch.float64) if not leaf.is_complex() else leaf
                ).all()
            ]
        ),
    )
