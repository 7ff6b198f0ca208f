"""Operations that move rows: the same done to the numbers of the rows says where each goes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from random import Random
from typing import TypeAlias, cast

import torch
from tests.fuzz.checking import ITSELF, Call, Refusal, attempt, has_stack
from tests.fuzz.data import Batch
from tests.fuzz.registry import dim, dims, given, lax, odd, operation
from tests.fuzz.subjects import Node, Plain, Subject
from torch import Tensor

from kd_core import KdError, TensorDict, TensorDictBase, torch_functions

Args: TypeAlias = tuple[object, ...]
Options: TypeAlias = dict[str, object]

TORCH = {name.removeprefix("torch.") for name in torch_functions()}
VIEWS = {
    *("view", "view_as", "unsqueeze", "squeeze", "permute", "transpose", "swapaxes", "swapdims"),
    *("movedim", "moveaxis", "expand", "expand_as", "split", "chunk", "tensor_split", "unbind"),
    *("narrow", "unflatten", "__iter__"),
}
# Without an argument these take the sizes or dimensions of a batch of (), as in
# `td.reshape(*td.batch_size)`: the first always, because the batch may have had others before.
SIZED = {"view", "reshape", "expand"}
NUMBERED = {"permute", "repeat", "tile", "flip"}
COPIES = {"repeat", "tile", "repeat_interleave", "roll", "flip", "index_select", "gather"}


def numbered(batch: Batch) -> Tensor:
    return torch.arange(math.prod(batch)).reshape(batch)


def taken(plain: Plain, rows: Tensor) -> Plain:
    """Return the rows of a tree that have these numbers."""
    ndim, count = len(plain.batch), math.prod(plain.batch)

    def take(leaf: Tensor) -> Tensor:
        if rows.is_floating_point():
            raise Refusal("rows are not numbered by floats")
        return leaf.reshape(count, *leaf.shape[ndim:])[rows]

    return plain.map(take, lambda batch: (*rows.shape, *batch[ndim:]), take)


def moved(plain: Plain, move: Callable[[Tensor], object]) -> object:
    found = move(numbered(plain.batch))
    if isinstance(found, (tuple, list)):
        return tuple(taken(plain, rows) for rows in found)
    return taken(plain, cast("Tensor", found))


def cannot(move: Callable[[Tensor], object]) -> Callable[[Plain], bool]:
    """Whether torch itself has no such function for the dtype of a leaf."""

    def ask(plain: Plain) -> bool:
        dtypes = {leaf.dtype for leaf in plain.tensors()}
        probes = [torch.zeros(plain.batch, dtype=dtype) for dtype in dtypes]
        # What torch cannot do with rows side by side is done by another of its functions.
        probes += [torch.zeros((*plain.batch, 2), dtype=dtype)[..., 0] for dtype in dtypes]
        return any(attempt(lambda p=probe: move(p))[1] is not None for probe in probes)  # type: ignore[misc]  # bound

    return ask


def rolled(rows: Tensor, *args: object) -> Tensor:
    """Roll the numbers of rows; torch looks at no dimension where there are none."""
    if len(args) > 1 and not rows.numel():
        for at in args[1] if isinstance(args[1], (tuple, list)) else (args[1],):
            rows.select(cast("int", at), 0) if rows.shape[cast("int", at)] else None
    return torch.roll(rows, *args)  # type: ignore[arg-type]  # odd ones


def rows_call(rng: Random, name: str, args: Args, options: Options, function: bool = False) -> Call:
    """Return a call of a method, or of the function of torch, that moves rows."""
    use = function or (name in TORCH and rng.random() < 0.3)

    def move(rows: Tensor) -> object:
        if name == "roll":
            return rolled(rows, *args)
        if not (args or options) and (name in SIZED or (name in NUMBERED and not rows.ndim)):
            return getattr(rows, name)(())
        if use:
            return getattr(torch, name)(rows, *args, **options)
        return getattr(rows, name)(*args, **options)

    def ours(td: TensorDictBase) -> object:
        if use:
            return getattr(torch, name)(td, *args, **options)
        return getattr(td, name)(*args, **options)

    shares = True if name in VIEWS else False if name in COPIES else None
    return Call(
        name,
        f"{'torch.' if use else 'td.'}{name}{given(args, options)}",
        ours,
        lambda plain: moved(plain, move),
        shares=shares,
        may_refuse=cannot(move),
        lax=lax((args, options)),
    )


def sizes(rng: Random, batch: Batch) -> list[object]:
    """Return sizes that the rows of a batch may have, now and then others."""
    count = math.prod(batch)
    if not count:
        options = [[0], [0, 2], [2, 0], [*batch], [-1], [0, -1]]
    else:
        options = [[count], [1, count], [*reversed(batch)], [-1], [*batch], [-1, 1], [count, 1, 1]]
        for divisor in (2, 3):
            if count % divisor == 0:
                options += [[divisor, count // divisor], [-1, divisor], [divisor, -1]]
    chosen = rng.choice(options) if rng.random() < 0.93 else [rng.randint(-2, 4), rng.randint(0, 3)]
    return [odd(rng, size) for size in chosen]


def spelled(rng: Random, numbers: list[object]) -> Args:
    """Return numbers one by one, or as one sequence."""
    how = rng.randrange(4)
    if how == 0:
        return (list(numbers),)
    if how == 1:
        return (tuple(numbers),)
    if how == 2 and all(type(n) is int and n >= 0 for n in numbers):
        return (torch.Size(cast("list[int]", numbers)),)
    return tuple(numbers)


@operation("reshape")
def reshape(rng: Random, s: Subject, name: str) -> Call:
    args = spelled(rng, sizes(rng, s.batch))
    if len(args) == 1 and not isinstance(args[0], int) and rng.random() < 0.3:
        return rows_call(rng, name, args, {}, function=True)
    if rng.random() < 0.1:
        return plain_method(
            name, (), {"shape": args[0] if args and isinstance(args[0], tuple) else args}
        )
    return plain_method(name, args, {})


def plain_method(name: str, args: Args, options: Options) -> Call:
    """Return a call of the method, never of the function of torch."""

    def move(rows: Tensor) -> object:
        if not (args or options) and name in SIZED:
            return getattr(rows, name)(())
        return getattr(rows, name)(*args, **options)

    return Call(
        name,
        f"td.{name}{given(args, options)}",
        lambda td: getattr(td, name)(*args, **options),
        lambda plain: moved(plain, move),
        shares=True if name in VIEWS else False if name in COPIES else None,
        may_refuse=cannot(move),
        lax=lax((args, options)),
    )


@operation("view", "view_as", "reshape_as", "expand_as")
def view(rng: Random, s: Subject, name: str) -> Call:
    if name == "view":
        args = spelled(rng, sizes(rng, s.batch))
        call = plain_method("reshape", args, {})
    else:
        found = [size for size in sizes(rng, s.batch) if type(size) is int and size >= 0]
        shape = tuple(found)
        if name == "expand_as":
            shape = tuple(
                rng.choice([2, *([1] if size == 1 else [])]) if size == 1 else size
                for size in s.batch
            )
            shape = (2, *shape) if rng.random() < 0.4 else shape
        other = torch.zeros(shape)
        container = rng.random() < 0.5
        args = (TensorDict({}, shape) if container else other,)
        call = plain_method("expand_as" if name == "expand_as" else "reshape_as", (other,), {})
    must = name.startswith("view")

    def theirs(plain: Plain) -> object:
        result = cast("Plain", call.theirs(plain))
        ndim = len(plain.batch)
        for leaf in plain.tensors() if must else ():
            leaf.view((*result.batch, *leaf.shape[ndim:]))
        return result

    return Call(
        name,
        f"td.{name}{given(args)}",
        lambda td: getattr(td, name)(*args),
        theirs,
        shares=True if name != "reshape_as" else None,
        lax=lax(args),
        may_refuse=lambda plain: (
            (name == "view" and not plain.batch and _has_gaps(plain))
            or (must and has_stack(s.node) and _has_gaps(s.node))
        ),
    )


def _has_gaps(tree: Plain | Node) -> bool:
    return any(not leaf.is_contiguous() for leaf in tree.tensors())


@operation("flatten", "unflatten", "squeeze", "unsqueeze")
def merge(rng: Random, s: Subject, name: str) -> Call:
    ndim = len(s.batch)
    if name == "flatten":
        args = tuple(dim(rng, ndim) for _ in range(rng.randint(0, 2)))
        if len(args) == 2 and rng.random() < 0.7:
            low = rng.randrange(ndim) if ndim else 0
            args = (low, rng.randrange(low, ndim) - ndim if ndim else -1)
    elif name == "squeeze":
        args = rng.choice([(), (dim(rng, ndim),), (dims(rng, ndim),)])
    elif name == "unsqueeze":
        args = (dim(rng, ndim + 1),)
    else:
        at = rng.randrange(ndim) if ndim else 0
        size = s.batch[at] if ndim else 1
        parts = rng.choice([(size,), (1, size), (-1,), (size, -1), (-1, 2), (2, -1), (1, -1, 1)])
        args = (odd(rng, at - ndim * rng.randrange(2)), tuple(odd(rng, part) for part in parts))
    return rows_call(rng, name, args, {})


@operation("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "flip", "roll")
def reorder(rng: Random, s: Subject, name: str) -> Call:
    ndim = len(s.batch)
    if name == "permute":
        order = (
            rng.sample(range(ndim), ndim)
            if rng.random() < 0.9
            else rng.choices(range(-1, ndim + 1), k=ndim)
        )
        numbers = [odd(rng, each - ndim * rng.randrange(2)) for each in order]
        if rng.random() < 0.1:
            return plain_method(name, (), {"dims": tuple(numbers)})
        return plain_method(name, spelled(rng, numbers), {})
    if name in ("transpose", "swapaxes", "swapdims"):
        return rows_call(rng, name, (dim(rng, ndim), dim(rng, ndim)), {})
    if name == "flip":
        return plain_method(name, spelled(rng, list(dims(rng, ndim))), {})
    if name == "roll":
        shift: object = odd(rng, rng.randint(-4, 4))
        draw = rng.random()
        if draw < 0.3:
            return rows_call(rng, name, (shift,), {})
        if draw < 0.6:
            return rows_call(rng, name, (shift, dim(rng, ndim)), {})
        along = dims(rng, ndim)
        by = tuple(rng.randint(-3, 3) for _ in along)
        return rows_call(rng, name, (by, along) if rng.random() < 0.9 else (by, 0), {})
    if rng.random() < 0.5:
        return rows_call(rng, name, (dim(rng, ndim), dim(rng, ndim)), {})
    source = dims(rng, ndim)
    return rows_call(rng, name, (source, dims(rng, ndim, len(source))), {})


@operation("expand", "repeat", "tile", "repeat_interleave")
def enlarge(rng: Random, s: Subject, name: str) -> Call:
    ndim = len(s.batch)
    if name == "expand":
        shape: list[object] = [
            odd(rng, rng.choice([2, 1, -1]) if size == 1 else rng.choice([size, -1]))
            for size in s.batch
        ]
        shape = [2, *shape] if rng.random() < 0.3 else shape
        return plain_method(name, spelled(rng, shape if rng.random() < 0.95 else shape[1:]), {})
    if name == "repeat_interleave":
        draw = rng.random()
        at: Args = () if rng.random() < 0.3 else (dim(rng, ndim),)
        if draw < 0.6:
            return rows_call(rng, name, (odd(rng, rng.randint(-1, 3)), *at), {})
        size = (
            s.batch[at[0]]
            if at and type(at[0]) is int and -ndim <= at[0] < ndim
            else math.prod(s.batch)
        )
        counts = torch.tensor(
            [rng.randint(0, 2) for _ in range(rng.choice([size, size, 1, size + 1]))],
            dtype=rng.choice([torch.int64, torch.int64, torch.int32, torch.float32]),
        )
        fits = counts.numel() == size
        options: Options = {"output_size": int(counts.sum())} if fits and rng.random() < 0.2 else {}
        return rows_call(rng, name, (counts, *at), options)
    length = rng.randint(max(0, ndim - (name == "tile")), ndim + 1)
    counts_: list[object] = [
        odd(rng, rng.choice([1, 2, 2, 0, 3]) if rng.random() < 0.97 or not all(s.batch) else -1)
        for _ in range(length)
    ]
    if any(type(count) is int and count < 0 for count in counts_) and not all(s.batch):
        counts_ = [1] * len(counts_)  # torch multiplies by 0 before it looks
    if name == "tile" and rng.random() < 0.3:
        return rows_call(rng, name, (tuple(counts_),), {}, function=True)
    return plain_method(name, spelled(rng, counts_), {})


@operation("atleast_1d", "atleast_2d", "atleast_3d", "broadcast_to", "fliplr", "flipud", "rot90")
def turn(rng: Random, s: Subject, name: str) -> Call:
    ndim = len(s.batch)
    if name == "broadcast_to":
        shape = tuple(2 if size == 1 else rng.choice([size, -1]) for size in s.batch)
        return rows_call(rng, name, ((3, *shape) if rng.random() < 0.5 else shape,), {}, True)
    if name != "rot90":
        return rows_call(rng, name, (), {}, True)
    plane = dims(rng, ndim, 2) if rng.random() < 0.3 else tuple(rng.sample(range(max(ndim, 2)), 2))
    return rows_call(rng, name, (rng.randint(-3, 5), plane), {}, True)


SCOPES: dict[str, Args] = {
    "view": (-1,),
    "flatten": (),
    "unsqueeze": (0,),
    "squeeze": (),
    "transpose": (0, -1),
    "flip": (0,),
    "roll": (1, -1),
    "flatten_keys": (),
}


def _gives_itself(td: TensorDictBase, method: str) -> bool:
    try:
        return getattr(td, method)(*SCOPES[method]) is td
    except (KdError, NotImplementedError):  # torch flips no uint16
        return False


@operation("__enter__", "__exit__")
def scope(rng: Random, s: Subject, name: str) -> Call:
    """Change entries of a result in a `with` statement, which changes the container."""
    method = rng.choice(list(SCOPES))
    if _gives_itself(s.td, method):
        method = "unsqueeze"  # in the container itself each step counts, also before a refused one
    gone, new = rng.choice([("a", "new"), ("a", "b"), ("none", "new"), ("b", "new")])

    def theirs(plain: Plain) -> object:
        if not plain.batch or s.td.is_locked or s.node.members:
            raise Refusal("nothing to move, locked, or a stack")
        tree = Plain(plain.batch, dict(plain.entries))
        tree.entries.pop(gone, None)
        tree.entries[new] = numbered(plain.batch)
        return tree, None

    def ours(td: TensorDictBase) -> object:
        rows = TensorDict({"rows": numbered(s.batch)}, s.batch)
        moved_rows = getattr(rows, method)(*SCOPES[method])["rows"]
        with getattr(td, method)(*SCOPES[method]) as view:
            if gone in view:
                del view[gone]
            view[new] = moved_rows
        return None

    nested = any(isinstance(s.node.entries.get(key), Node) for key in (gone, new))
    return Call(
        name,
        f"with td.{method}{SCOPES[method]} as view: del view[{gone!r}]; view[{new!r}] = rows",
        ours,
        theirs,
        restructures=True,
        may_refuse=lambda plain: (
            s.node.declared
            or not plain.batch
            or (method == "view" and (_has_gaps(plain) or _has_gaps(s.node)))
            or (
                method in TORCH
                and cannot(lambda rows: getattr(rows, method)(*SCOPES[method]))(plain)
            )
        ),
        unchecked=nested or bool(s.node.members),
    )


@operation(
    *("flatten inplace", "unflatten inplace", "repeat inplace", "roll inplace"),
    *("repeat_interleave inplace", "gather inplace", "masked_select inplace", "pad inplace"),
)
def in_place(rng: Random, s: Subject, name: str) -> Call:
    """Return a call that gives the container itself the rows that were moved."""
    method, ndim = name.split()[0], len(s.batch)
    args: Args = ()
    if method == "unflatten":
        args = (0, (1, s.batch[0] if s.batch else 1))
    elif method == "repeat":
        args = tuple(rng.randint(0, 2) for _ in s.batch)
    elif method == "roll":
        args = (rng.randint(-2, 2), 0) if ndim else (1,)
    elif method == "repeat_interleave":
        args = (rng.randint(0, 2), rng.randrange(ndim) if ndim else 0)
    elif method == "gather":
        args = (0, torch.zeros(min([1, *s.batch[:1]]), *s.batch[1:], dtype=torch.int64))
    elif method == "masked_select":
        args = (numbered(s.batch) % 2 == 0,)
    elif method == "pad":
        args = ((0, 0),)

    def move(rows: Tensor) -> object:
        if method == "pad":
            return rows if rows.ndim else rows.select(0, 0)
        return getattr(rows, method)(*args)

    def theirs(plain: Plain) -> object:
        if s.td.is_locked:
            raise Refusal("locked")
        return moved(plain, move), ITSELF

    return Call(
        name,
        f"td.{method}{given(args, {'inplace': True})}",
        lambda td: getattr(td, method)(*args, inplace=True),
        theirs,
        restructures=True,
        may_refuse=lambda plain: (  # a stack, if its stacked dimension goes
            not plain.batch or bool(s.node.members) or cannot(move)(plain)
        ),
    )


@operation("split", "chunk", "tensor_split", "unbind", "narrow", "__iter__")
def part(rng: Random, s: Subject, name: str) -> Call:
    ndim = len(s.batch)
    where = rng.randrange(ndim) if ndim else 0
    size = s.batch[where] if ndim else 1
    at: Args = (
        (odd(rng, where - ndim * rng.randrange(2)),) if rng.random() < 0.9 else (dim(rng, ndim),)
    )
    if name == "__iter__":
        return Call(
            name,
            "tuple(td)",
            lambda td: tuple(td),
            lambda plain: moved(plain, lambda rows: tuple(iter(rows))),
            shares=True,
        )
    if name == "unbind":
        return rows_call(rng, name, at, {})
    if name == "narrow":
        start = rng.randint(-size - 1, size + 1)
        return rows_call(rng, name, (*at, odd(rng, start), odd(rng, rng.randint(-1, size))), {})
    if name == "chunk":
        return rows_call(rng, name, (odd(rng, rng.randint(0, 4)), *at), {})
    if rng.random() < 0.5:
        return rows_call(rng, name, (odd(rng, rng.randint(-1, 4)), *at), {})
    cuts = sorted(rng.randint(0, size) for _ in range(rng.randint(0, 3)))
    if name == "tensor_split":
        numbers = [odd(rng, cut if rng.random() < 0.8 else rng.randint(-3, 5)) for cut in cuts]
        return rows_call(rng, name, (tuple(numbers), *at), {})
    bounds = [0, *cuts, size]
    parts = [odd(rng, b - a) for a, b in itertools.pairwise(bounds)]
    return rows_call(rng, name, (parts if rng.random() < 0.5 else tuple(parts), *at), {})
