"""Operations that reduce: the function of torch over the dimensions of each leaf."""

from __future__ import annotations

import operator
from collections.abc import Callable
from random import Random
from typing import cast

import torch
from tests.fuzz.checking import Call, Refusal
from tests.fuzz.data import Batch, Unknown
from tests.fuzz.registry import dim, dims, given, lax, operation
from tests.fuzz.subjects import UNSIGNED, Plain, Subject
from tools.operations import REDUCTIONS
from torch import Tensor

from kd_core import TensorDictBase


def reduce_leaf(
    name: str, leaf: Tensor, over: tuple[int, ...], keepdim: bool, options: dict[str, object]
) -> Tensor:
    """Reduce some dimensions of a leaf."""
    if name == "norm":
        ord_, dtype = options.get("ord", 2), options.get("dtype")
        found = torch.linalg.vector_norm(leaf, ord_, over, keepdim, dtype=dtype)
        return cast("Tensor", found)
    if name == "prod":
        for at in sorted(over, reverse=True):
            leaf = torch.prod(leaf, at, keepdim, **options)  # type: ignore[call-overload]  # dtype
        return leaf if over else torch.prod(leaf, **options)  # type: ignore[call-overload]  # dtype
    return cast("Tensor", getattr(torch, name)(leaf, over, keepdim=keepdim, **options))


def keywords_of(rng: Random, name: str) -> dict[str, object]:
    if name in ("sum", "nansum", "mean", "nanmean", "prod") and rng.random() < 0.2:
        return {"dtype": rng.choice([torch.float64, torch.float32, torch.int64])}
    if name in ("var", "std") and rng.random() < 0.4:
        return {"correction": rng.choice([0, 1, 2, 0.5])}
    if name == "norm" and rng.random() < 0.5:
        found: dict[str, object] = {"ord": rng.choice([1, 2, 3, float("inf"), 0])}
        return found | ({"dtype": torch.float64} if rng.random() < 0.3 else {})
    return {}


@operation(*(row.name for row in REDUCTIONS), "all", "any")
def reduction(rng: Random, s: Subject, name: str) -> Call:
    ndim = len(s.batch)
    options = keywords_of(rng, name)
    draw = rng.random()
    at: object = None
    keepdim = rng.random() < 0.3
    together = False
    if draw < 0.3:
        keepdim = False
        together = rng.random() < 0.4 and name not in ("all", "any")
    elif draw < 0.6:
        at = dim(rng, ndim)
    elif draw < 0.8:
        at = tuple(dims(rng, ndim))
    else:
        at = "feature"
        together = rng.random() < 0.2 and not keepdim and name not in ("all", "any")
    ours_options = options | ({"keepdim": True} if keepdim else {})
    ours_options |= {"reduce": True} if together else {}
    rename = not together and rng.random() < 0.1 and name not in ("all", "any")
    ours_options |= {"key_transform": str.upper} if rename else {}

    def theirs(plain: Plain) -> object:
        if together:
            return reduced_together(plain, name, at, options)
        found = reduced(plain, name, at, keepdim, options)
        return shouted(cast("Plain", found)) if rename else found

    args = () if at is None else (at,)
    return Call(
        name,
        f"td.{name}{given(args, ours_options)}",
        lambda td: getattr(td, name)(*args, **ours_options),
        theirs,
        exact=False,
        lax=lax(args),
        unchecked=has_vague_gradient(s, name, together, options),
        may_refuse=lambda plain: together and promoted_in_some_orders(plain),
    )


def has_vague_gradient(s: Subject, name: str, together: bool, options: dict[str, object]) -> bool:
    """Return whether torch gives different gradients in different places.

    That of a product is one or another of no number, one of halves passes infinity or not; that of
    a variance without a degree of freedom is either infinity.
    """
    if name == "prod":
        finite = all(bool(torch.isfinite(leaf).all()) for leaf in s.node.tensors())
        return not finite or (together and has_halves(s))
    correction = cast("float", options.get("correction", -1))
    return any(leaf.numel() <= correction for leaf in s.node.tensors())


def shouted(plain: Plain) -> Plain:
    """Return a tree of keys in upper case."""
    new = Plain(plain.batch)
    for key, value in plain.entries.items():
        new.entries[key.upper()] = shouted(value) if isinstance(value, Plain) else value
    return new


def has_halves(s: Subject) -> bool:
    return any(leaf.dtype is torch.float16 for leaf in s.node.tensors())


def promoted_in_some_orders(plain: Plain) -> bool:
    """Whether `torch.cat` takes leaves of these dtypes in one order and refuses them in another."""
    dtypes = {leaf.dtype for leaf in plain.tensors()}
    return len(dtypes) > 1 and not dtypes.isdisjoint(UNSIGNED)


def reduced_together(plain: Plain, name: str, at: object, options: dict[str, object]) -> Tensor:
    leaves = plain.tensors()
    if not leaves:
        raise Refusal("no leaf")
    ndim = len(plain.batch)
    if at is None:
        whole = torch.cat([leaf.reshape(-1) for leaf in leaves])
        if name == "prod":
            return cast("Tensor", getattr(torch, "prod")(whole, **options))  # noqa: B009  # dtype
        return reduce_leaf(name, whole, (0,), False, options)
    whole = torch.cat(
        [leaf.unsqueeze(-1) if leaf.ndim == ndim else leaf.flatten(ndim) for leaf in leaves], ndim
    )
    return reduce_leaf(name, whole, (ndim,), False, options)


def reduced(
    plain: Plain, name: str, at: object, keepdim: bool, options: dict[str, object]
) -> object:
    ndim = len(plain.batch)
    if at is None and name in ("all", "any"):
        return (all if name == "all" else any)(
            bool(getattr(leaf, name)()) for leaf in plain.tensors()
        )
    if at is None and name == "logsumexp" and ndim:
        at = tuple(range(ndim))  # it keeps the features
    if at is None:

        def unmoved(rows: Tensor) -> Tensor:
            if keepdim:
                raise Unknown("values of rows in a batch of one")
            return rows

        return plain.map(
            lambda leaf: reduce_leaf(name, leaf, tuple(range(leaf.ndim)), keepdim, options),
            lambda batch: (1,) * len(batch) if keepdim else (),
            unmoved,
        )
    if at == "feature":

        def features(leaf: Tensor) -> Tensor:
            if leaf.ndim == ndim:
                return reduce_leaf(name, leaf.unsqueeze(-1), (ndim,), False, options)
            return reduce_leaf(name, leaf, tuple(range(ndim, leaf.ndim)), keepdim, options)

        return plain.map(features, lambda batch: batch[:ndim], lambda rows: rows)
    given_dims = at if isinstance(at, tuple) else (at,)
    for each_dim in given_dims:
        torch.zeros(plain.batch).sum(each_dim)
        if not hasattr(each_dim, "__index__") or not -ndim <= each_dim < ndim:
            raise Refusal("no batch dimension")
    over = tuple(int(cast("int", one)) % ndim for one in given_dims)
    if not over or len(set(over)) < len(over):
        raise Refusal("no dimension, or one twice")

    def batch_of(batch: Batch) -> Batch:
        if keepdim:
            return tuple(1 if i in over else size for i, size in enumerate(batch))
        return tuple(size for i, size in enumerate(batch) if i not in over)

    return plain.map(
        lambda leaf: reduce_leaf(name, leaf, over, keepdim, options),
        batch_of,
        lambda rows: collected(rows, over, keepdim),
    )


def collected(
    rows: Tensor, over: tuple[int, ...], keepdim: bool, lead: tuple[int, ...] = ()
) -> Tensor:
    """Put the dimensions of rows that are reduced behind the others: they are lists then."""
    over = tuple(sorted(over))
    kept = [at for at in range(rows.ndim) if at not in over]
    sizes = [1 if at in over else size for at, size in enumerate(rows.shape)]
    left = sizes if keepdim else [rows.shape[at] for at in kept]
    lists = rows.permute(*kept, *over).reshape(*left, *(rows.shape[at] for at in over))
    return lists.expand((*lead, *lists.shape))


@operation("cumsum", "cumprod")
def cumulated(rng: Random, s: Subject, name: str) -> Call:
    at = dim(rng, len(s.batch))

    def theirs(plain: Plain) -> object:
        getattr(torch.zeros(plain.batch), name)(at)
        if not plain.batch:
            raise Refusal("no batch dimension")
        axis = cast("int", at) % len(plain.batch)
        return plain.map(lambda leaf: getattr(leaf, name)(axis))

    ours = operator.methodcaller(name, at)
    return Call(name, f"td.{name}({at!r})", ours, theirs, exact=False, lax=lax(at))


@operation("cummax", "cummin")
def so_far(rng: Random, s: Subject, name: str) -> Call:
    at, indices = dim(rng, len(s.batch)), rng.random() < 0.6

    def theirs(plain: Plain) -> object:
        torch.zeros(plain.batch).sum(at)  # type: ignore[call-overload]  # odd ones
        if not plain.batch:
            raise Refusal("no batch dimension")
        axis = cast("int", at) % len(plain.batch)
        found = plain.map(lambda leaf: getattr(leaf, name)(axis).values)
        if not indices:
            return found
        return found, plain.map(lambda leaf: getattr(leaf, name)(axis).indices)

    def ours(td: TensorDictBase) -> object:
        found = getattr(td, name)(at, return_indices=indices)
        return tuple(found) if indices else found

    return Call(name, f"td.{name}({at!r}, {indices})", ours, theirs, exact=False, lax=lax(at))


@operation("softmax", "log_softmax")
def shares(rng: Random, s: Subject, name: str) -> Call:
    at = "feature" if rng.random() < 0.3 else dim(rng, len(s.batch))
    options = {"dtype": torch.float64} if rng.random() < 0.2 else {}
    fn = getattr(torch, name)

    def theirs(plain: Plain) -> object:
        ndim = len(plain.batch)
        if at == "feature":

            def features(leaf: Tensor) -> Tensor:
                flat = leaf.unsqueeze(-1) if leaf.ndim == ndim else leaf.flatten(ndim)
                return cast("Tensor", fn(flat, ndim, **options).reshape(leaf.shape))

            return plain.map(features)
        fn(torch.zeros(plain.batch), at)
        if not ndim:
            raise Refusal("no batch dimension")
        return plain.map(lambda leaf: fn(leaf, cast("int", at) % ndim, **options))

    ours = operator.methodcaller(name, at, **options)
    return Call(name, f"td.{name}({at!r}, {options})", ours, theirs, exact=False, lax=lax(at))


@operation("quantile")
def quantile(rng: Random, s: Subject, name: str) -> Call:
    q = rng.choice([0.5, 0.0, 1, 0.3, [0.1, 0.9], torch.tensor(0.25), torch.tensor([0.5]), 2.0])
    ndim = len(s.batch)
    at: object = None if rng.random() < 0.3 else dim(rng, ndim)
    keepdim = at is not None and rng.random() < 0.3
    how = rng.choice(["linear", "lower", "nearest"])

    def theirs(plain: Plain) -> object:
        places = torch.as_tensor(q)
        lead = tuple(places.shape)

        def find(leaf: Tensor, axis: int | None) -> Tensor:
            there = places.to(leaf.dtype)
            return torch.quantile(leaf, there, axis, keepdim, interpolation=how)

        if at is None:
            return plain.map(
                lambda leaf: find(leaf, None),
                lambda batch: lead,
                lambda rows: rows.expand((*lead, *rows.shape)),
            )
        torch.zeros(plain.batch).sum(at)  # type: ignore[call-overload]  # odd ones
        if not ndim:
            raise Refusal("no batch dimension")
        axis = cast("int", at) % ndim
        kept = (1,) if keepdim else ()
        return plain.map(
            lambda leaf: find(leaf, axis),
            lambda batch: (*lead, *batch[:axis], *kept, *batch[axis + 1 :]),
            lambda rows: collected(rows, (axis,), keepdim, lead),
        )

    args = (q,) if at is None else (q, at, keepdim)
    return Call(
        name,
        f"td.quantile{args}, {how}",
        lambda td: td.quantile(*args, interpolation=how),
        theirs,
        exact=False,
        lax=lax(at),
    )


def extreme_of_all(
    name: str, whole: Callable[[Tensor], Tensor], each: bool, **given: object
) -> Call:
    if each:
        return Call(
            name,
            f"td.{name}({given})",
            lambda td: getattr(td, name)(**given),
            lambda plain: plain.map(whole, lambda batch: ()),
        )
    return Call(
        name,
        f"td.{name}(reduce=True)",
        lambda td: getattr(td, name)(reduce=True),
        lambda plain: whole(torch.cat([leaf.reshape(-1) for leaf in plain.tensors()])),
    )


@operation("min", "max")
def extreme(rng: Random, s: Subject, name: str) -> Call:
    along, whole = getattr(torch, name), getattr(torch, f"a{name}")
    draw = rng.random()
    if draw < 0.4:
        return extreme_of_all(name, whole, draw < 0.3)
    at, keepdim = dim(rng, len(s.batch)), rng.random() < 0.3
    indices = rng.random() < 0.7
    if at is None:  # with `keepdim` torch refuses it for one tensor
        return extreme_of_all(name, whole, True, dim=None, return_indices=indices)

    def theirs(plain: Plain) -> object:
        found = along(torch.zeros(plain.batch), at, keepdim)
        if not plain.batch:
            raise Refusal("no batch dimension")
        axis = cast("int", at) % len(plain.batch)
        new = tuple(found.values.shape)
        ndim = len(plain.batch)

        def batch_of(batch: Batch) -> Batch:
            return new + batch[ndim:]

        def lists(rows: Tensor) -> Tensor:
            return collected(rows, (axis,), keepdim)

        values = plain.map(lambda leaf: along(leaf, axis, keepdim).values, batch_of, lists)
        if not indices:
            return values
        return values, plain.map(lambda leaf: along(leaf, axis, keepdim).indices, batch_of, lists)

    return Call(
        name,
        f"td.{name}({at!r}, {keepdim}, return_indices={indices})",
        lambda td: (
            tuple(getattr(td, name)(at, keepdim))
            if indices
            else getattr(td, name)(at, keepdim, return_indices=False)
        ),
        theirs,
        lax=lax(at),
    )
