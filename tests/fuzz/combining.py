"""Operations that make one container of several: the function of torch on each column of leaves."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import cast

import torch
from tests.fuzz.checking import ITSELF, Call, Refusal, keys_of
from tests.fuzz.data import WORDS, Batch, Data, chosen_data, joined_data, stored
from tests.fuzz.operands import operand_node
from tests.fuzz.registry import dim, lax, odd, operation
from tests.fuzz.subjects import DTYPES, Node, Plain, Subject, build, plain, twin, values
from torch import Tensor

import kd_core
from kd_core import TensorDict

FUNCTIONS = (
    "stack",
    "cat",
    "pad",
    "pad_sequence",
    "merge_tensordicts",
    "lazy_stack",
    "maybe_dense_stack",
)


def others(rng: Random, s: Subject, along: object | None) -> list[Node]:
    """Return nodes of the same keys, mostly of the same shapes; `along` may differ in size."""
    found = []
    for _ in range(rng.randint(0, 2)):
        same = s.ragged or rng.random() < 0.5
        node = (
            twin(s.node)
            if same
            else operand_node(rng, plain(s.node), True, "same", rng.random() < 0.04)
        )
        found.append(node)
    return found


def column_plain(
    trees: list[Plain], call: Callable[[list[Tensor]], Tensor], batch: Batch, ndim: int
) -> Plain:
    """Call a function on the leaves of each key."""
    first = trees[0]
    new = Plain((*batch, *first.batch[ndim:]))
    for tree in trees:
        if set(tree.entries) != set(first.entries):
            raise Refusal("keys differ")
    for key, value in first.entries.items():
        column = [tree.entries[key] for tree in trees]
        if isinstance(value, Plain):
            new.entries[key] = column_plain(cast("list[Plain]", column), call, batch, ndim)
        elif isinstance(value, Tensor):
            new.entries[key] = call(cast("list[Tensor]", column))
        else:
            new.entries[key] = joined_data(
                cast("list[Data]", column), [tree.batch for tree in trees], call
            )
    return new


STATIC = {"": TensorDict, "kd_core": kd_core, "torch": torch}
"""Where a function of several containers is found: it is a static method of one, too."""


@operation("kd_core.stack", "kd_core.cat", "torch.stack", "torch.cat", "stack", "cat")
def join(rng: Random, s: Subject, name: str) -> Call:
    ndim = len(s.batch)
    home, _, short = name.rpartition(".")
    at = dim(rng, ndim + (short == "stack"))
    more = others(rng, s, at)
    tds = [build(node) for node in more]
    fn = getattr(STATIC[home], short)
    plain_fn = getattr(torch, short)

    def theirs(tree: Plain) -> object:
        trees = [tree, *(plain(node) for node in more)]
        found = plain_fn([torch.zeros(each.batch) for each in trees], at)
        size = ndim + (short == "stack")
        if isinstance(at, bool) or not -size <= cast("int", at) < size:
            raise Refusal("no dimension of the batch")
        if not ndim and short == "cat":
            raise Refusal("no dimension")
        axis = cast("int", at) % (ndim + (short == "stack"))
        return column_plain(trees, lambda column: plain_fn(column, axis), tuple(found.shape), ndim)

    return Call(
        name, f"{name}([td, {len(tds)} more], {at!r})", lambda td: fn([td, *tds], at), theirs
    )


@operation("kd_core.lazy_stack", "kd_core.maybe_dense_stack")
@operation("lazy_stack", "maybe_dense_stack")
def lazily(rng: Random, s: Subject, name: str) -> Call:
    ndim = len(s.batch)
    at = dim(rng, ndim + 1)
    more = others(rng, s, at)
    tds = [build(node) for node in more]
    home, _, short = name.rpartition(".")
    fn = getattr(STATIC[home], short)

    def theirs(tree: Plain) -> object:
        trees = [tree, *(plain(node) for node in more)]
        found = torch.stack([torch.zeros(each.batch) for each in trees], cast("int", at))
        axis = cast("int", at) % (ndim + 1)
        if len({tuple(sorted(each.entries)) for each in trees}) > 1:
            raise Refusal("keys differ: seen where all have them")
        return column_plain(
            trees, lambda column: torch.stack(column, axis), tuple(found.shape), ndim
        )

    return Call(
        name,
        f"{name}([td, {len(tds)} more], {at!r})",
        lambda td: fn([td, *tds], at),
        theirs,
        unchecked=any(keys_of(plain(node)) != keys_of(plain(s.node)) for node in more)
        if not s.ragged
        else True,
    )


@operation("kd_core.pad", "pad")
def pad(rng: Random, s: Subject, name: str) -> Call:
    ndim = len(s.batch)
    pairs = rng.randint(0, ndim) if rng.random() < 0.95 else ndim + 1
    numbers = [odd(rng, rng.choice([0, 1, 2, 0, -1])) for _ in range(2 * pairs)]
    value = rng.choice([0.0, 1, -0.0, True, 2.5, float("nan"), 0])

    def pad_leaf(leaf: Tensor, trailing: int, value: float) -> Tensor:
        flat = [0, 0] * trailing
        whole = [*numbers, *[0] * (2 * ndim - len(numbers))]
        for i in reversed(range(ndim)):
            flat += whole[2 * i : 2 * i + 2]  # type: ignore[arg-type]  # odd ones too
        return torch.constant_pad_nd(leaf, flat, value)

    def theirs(tree: Plain) -> object:
        if len(numbers) > 2 * ndim:
            raise Refusal("too many")
        new = tuple(pad_leaf(torch.zeros(tree.batch), 0, value).shape)
        return tree.map(
            lambda leaf: pad_leaf(leaf, leaf.ndim - ndim, value),
            lambda batch: (*new, *batch[ndim:]),
            lambda rows: pad_leaf(rows, rows.ndim - ndim, -1),
        )

    return Call(
        name,
        f"pad(td, {numbers}, {value})",
        lambda td: (
            td.pad(cast("list[int]", numbers), value)
            if name == "pad"
            else kd_core.pad(td, cast("list[int]", numbers), value)
        ),
        theirs,
        lax=lax(numbers),
    )


@operation("kd_core.pad_sequence")
def pad_rows(rng: Random, s: Subject, name: str) -> Call:
    ndim = len(s.batch)
    cuts = [rng.randint(0, s.batch[0]) if s.batch else 0 for _ in range(rng.randint(0, 2))]
    value = rng.choice([0.0, 1.0, -1])

    def theirs(tree: Plain) -> object:
        if not ndim:
            raise Refusal("no dimension to pad; decided for a batch of ()")
        longest = tree.batch[0]

        def rows(leaf: Tensor, value: float) -> Tensor:
            parts = [leaf, *(leaf[:cut] for cut in cuts)]
            padded = []
            for each in parts:
                more = leaf.new_full((longest - each.shape[0], *leaf.shape[1:]), value)
                padded.append(torch.cat([each, more]))
            return torch.stack(padded)

        return tree.map(
            lambda leaf: rows(leaf, value),
            lambda batch: (1 + len(cuts), *batch),
            lambda data: rows(data, -1),
        )

    return Call(
        name,
        f"pad_sequence([td, *(td[:cut] for cut in {cuts})], 0, {value})",
        lambda td: kd_core.pad_sequence([td, *(td[:cut] for cut in cuts)], 0, value),
        theirs,
        unchecked=not s.batch,
    )


@operation("kd_core.merge_tensordicts")
def merge(rng: Random, s: Subject, name: str) -> Call:
    node = Node(
        s.batch,
        {"x": values(rng, s.batch, torch.float32), "n": Node(s.batch, {"y": stored(1, s.batch)})},
    )
    if rng.random() < 0.2:
        node.batch = (*s.batch, 1)
        node.entries = {}
    other = build(node)

    def theirs(tree: Plain) -> object:
        if node.batch != tree.batch:
            raise Refusal("other batch sizes")
        return merged(tree, merged(plain(node), tree))  # the first entry stays

    declared = s.node.declared
    return Call(
        name,
        "merge_tensordicts(td, other)",
        lambda td: kd_core.merge_tensordicts(td, other),
        theirs,
        may_refuse=lambda tree: declared,
    )


def merged(first: Plain, second: Plain) -> Plain:
    new = Plain(first.batch, dict(first.entries))
    for key, value in second.entries.items():
        old = new.entries.get(key)
        if isinstance(old, Plain) and isinstance(value, Plain):
            new.entries[key] = merged(old, value)
        elif isinstance(value, Data) and value.rows is not None and not value.rows.ndim:
            new.entries[key] = stored(WORDS[int(value.rows)], new.batch)  # of the level it is in
        else:
            new.entries[key] = value
    return new


@operation("stack_tensors", "cat_tensors", "stack_from_tensordict", "cat_from_tensordict")
def join_entries(rng: Random, s: Subject, name: str) -> Call:
    """Join two entries of one container, or all."""
    fn = torch.stack if name.startswith("stack") else torch.cat
    at, keys = rng.choice([-1, 0, 1]), rng.sample(["a", "b", "c"], 2)
    if name.endswith("tensordict"):
        return Call(
            name,
            f"td.{name}({at})",
            lambda td: getattr(td, name)(at),
            lambda tree: fn(tree.tensors(), at),
        )

    def theirs(tree: Plain) -> object:
        found = [tree.entries.get(key) for key in keys]
        if s.td.is_locked or not all(isinstance(each, Tensor) for each in found):
            raise Refusal("no leaves")
        made = fn(cast("list[Tensor]", found), at)
        if tuple(made.shape[: len(tree.batch)]) != tree.batch:
            raise Refusal("the batch size does not fit")
        rest = {key: value for key, value in tree.entries.items() if key not in keys}
        return Plain(tree.batch, {**rest, "joined": made}), ITSELF

    return Call(
        name,
        f"td.{name}({keys}, {at})",
        lambda td: getattr(td, name)(*keys, out_key="joined", dim=at),
        theirs,
        restructures=True,
        may_refuse=lambda tree: s.node.declared,
    )


@operation("scatter")
def scatter(rng: Random, s: Subject, name: str) -> Call:
    ndim = len(s.batch)
    at = dim(rng, ndim)
    where = at if type(at) is int and -ndim <= at < ndim else 0
    size = s.batch[where] if ndim else 1
    shape = tuple(rng.randint(0, n) if rng.random() < 0.3 else n for n in s.batch)
    index = torch.tensor(
        [rng.randrange(size) if size else 0 for _ in range(torch.Size(shape).numel())],
        dtype=torch.int64,
    ).reshape(shape)
    value: object = rng.choice([1.0, 2, True, 1.5])
    how = rng.choice(["same", "same", "random"])
    tree = None if s.ragged else plain(s.node)
    node = operand_node(rng, tree, True, how, rng.random() < 0.05) if tree else twin(s.node)
    use = rng.random() < 0.5
    other = build(node)

    def theirs(tree: Plain) -> object:
        if use and set(node.entries) != set(tree.entries):
            raise Refusal("keys differ")
        getattr(torch.zeros(tree.batch), "scatter")(at, index, 1.0)  # noqa: B009  # odd ones
        if not ndim:
            raise Refusal("no dimension")
        axis = cast("int", at) % ndim
        return scattered_tree(tree, axis, index, plain(node) if use else value)

    args = (at, index, other if use else value)
    duplicates = index.numel() > size
    return Call(
        name,
        f"td.scatter({at!r}, {index.tolist()}, {'container' if use else value})",
        lambda td: getattr(td, "scatter")(*args),  # noqa: B009  # odd ones
        theirs,
        exact=False,
        unchecked=use and duplicates,
    )


def scattered_tree(tree: Plain, axis: int, index: Tensor, source: object) -> Plain:
    """Scatter the rows of a container, with data of rows among them, or a number."""
    new = Plain(tree.batch)
    for key, value in tree.entries.items():
        mine = source.entries[key] if isinstance(source, Plain) else source
        if isinstance(value, Plain):
            new.entries[key] = scattered_tree(value, axis, index, mine)
        elif isinstance(value, Tensor):
            new.entries[key] = scattered(value, axis, index, mine)
        else:
            new.entries[key] = chosen_data(
                value, mine, lambda rows, more: scattered(rows, axis, index, more), tree.batch
            )
    return new


def scattered(leaf: Tensor, axis: int, index: Tensor, source: object) -> Tensor:
    """Scatter along a dimension of the batch, for all that lies behind it."""
    ndim = index.ndim
    wide = index.reshape((*index.shape, *(1,) * (leaf.ndim - ndim)))
    wide = wide.expand(*index.shape, *leaf.shape[ndim:])
    return leaf.scatter(axis, wide, cast("Tensor", source))


@operation(
    "new_zeros",
    "new_ones",
    "new_empty",
    "new_full",
    "torch.zeros_like",
    "torch.ones_like",
    "torch.full_like",
    "torch.empty_like",
)
def fresh(rng: Random, s: Subject, name: str) -> Call:
    ndim = len(s.batch)
    dtype = rng.choice(DTYPES) if rng.random() < 0.3 else None
    options: dict[str, object] = {} if dtype is None else {"dtype": dtype}
    value = rng.choice([1, 2.5, True, -1])
    if name.startswith("torch."):
        fn = getattr(torch, name.removeprefix("torch."))
        args = (value,) if "full" in name else ()
        return Call(
            name,
            f"{name}(td, {args}, {options})",
            lambda td: fn(td, *args, **options),
            lambda tree: tree.map(lambda leaf: fn(leaf, *args, **options)),
            unchecked="empty" in name,
        )
    shape = [odd(rng, rng.randint(0, 3)) for _ in range(rng.randint(0, 2))]
    spread = name != "new_full" and bool(shape) and rng.random() < 0.5
    first: tuple[object, ...] = tuple(shape) if spread else (shape,)
    rest = (value,) if name == "new_full" else ()

    def theirs(tree: Plain) -> object:
        new = tuple(getattr(torch.zeros(()), name)(*first, *rest).shape)
        return tree.map(
            lambda leaf: getattr(leaf, name)((*new, *leaf.shape[ndim:]), *rest, **options),
            lambda batch: (*new, *batch[ndim:]),
            lambda rows: rows.new_full((*new, *rows.shape[ndim:]), -1),
        )

    return Call(
        name,
        f"td.{name}({first}, {rest}, {options})",
        lambda td: getattr(td, name)(*first, *rest, **options),
        theirs,
        lax=lax(first),
        unchecked="empty" in name,
    )
