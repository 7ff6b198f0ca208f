"""Random containers, and beside each a plain tree of the tensors that it was built from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias, cast

import torch
from tests.fuzz.data import WORDS, Batch, Data, Found, Ragged, Unknown, joined_data, stored
from torch import Tensor, nn

from kd_core import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    NonTensorDataBase,
    TensorClass,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)

Path: TypeAlias = tuple[str, ...]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SIGNED = (torch.int64, torch.int32, torch.int8)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
DTYPES = (*FLOATS, torch.float32, *SIGNED, *UNSIGNED, torch.bool, torch.complex64)
FEATURES: tuple[Batch, ...] = ((), (), (1,), (2,), (2, 3), (0,))
BATCHES: tuple[Batch, ...] = (
    *((), (1,), (2,), (3,), (3,), (0,), (2, 3), (3, 2), (1, 3), (3, 1), (2, 0)),
    *((2, 1, 3), (2, 3, 2), (0, 2, 2)),
)
NAMES = ("a", "b", "c", "n")


@dataclass
class Leaf:
    """What a leaf is to be: realised anew for each member of a stack."""

    dtype: torch.dtype
    feature: Batch


@dataclass
class Words:
    """What data of rows is to be: realised anew for each member of a stack."""


@dataclass
class Level:
    """The keys of a container, and how many batch dimensions it has beyond those around it."""

    keys: dict[str, Leaf | Data | Words | Level]
    extra: Batch = ()


@dataclass
class Node:
    """A container as it was built: of entries, or of members along a dimension."""

    batch: Batch
    entries: dict[str, Tensor | Data | Node] = field(default_factory=dict)
    members: list[Node] = field(default_factory=list)
    dim: int = 0
    declared: bool = False

    def tensors(self) -> Iterator[Tensor]:
        for member in self.members:
            yield from member.tensors()
        for value in self.entries.values():
            if isinstance(value, Node):
                yield from value.tensors()
            elif isinstance(value, Tensor):
                yield value


@dataclass
class Plain:
    """What a container should read as: nested dicts of tensors and data, with batch sizes."""

    batch: Batch
    entries: dict[str, Tensor | Data | Plain] = field(default_factory=dict)

    def map(
        self,
        leaf: Callable[[Tensor], Tensor],
        batch: Callable[[Batch], Batch] = lambda b: b,
        rows: Callable[[Tensor], Tensor] | None = None,
    ) -> Plain:
        """Apply a function to each leaf; `rows` moves the rows of data, which else stay."""
        new = Plain(batch(self.batch))
        for key, value in self.entries.items():
            if isinstance(value, Plain):
                new.entries[key] = value.map(leaf, batch, rows)
            elif isinstance(value, Tensor):
                new.entries[key] = leaf(value)
            elif rows is not None:
                new.entries[key] = value.rearranged(rows)
            elif value.rows is not None and new.batch != self.batch:
                raise Unknown("where rows of data go")
            else:
                new.entries[key] = value
        return new

    def leaves(self, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
        for key, value in self.entries.items():
            if isinstance(value, Plain):
                yield from value.leaves((*path, key))
            elif isinstance(value, Tensor):
                yield (*path, key), value

    def tensors(self) -> list[Tensor]:
        return [leaf for _, leaf in self.leaves()]


class Sample(TensorClass):
    """A container of declared fields."""

    a: Tensor
    b: Tensor
    n: TensorDict
    word: str


def values(rng: Random, shape: Batch, dtype: torch.dtype) -> Tensor:
    """Return small numbers, for floats with some that are not finite."""
    generator = torch.Generator().manual_seed(rng.getrandbits(31))
    low = 0 if dtype in UNSIGNED else -3
    numbers = torch.randint(low, 5, shape, generator=generator, device="cpu")
    numbers = numbers.to(torch.get_default_device())  # `tests/gpu` sets another
    if dtype is torch.bool:
        return numbers > 0
    made = numbers.to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        made = made / 2
        if made.numel() and rng.random() < 0.1:
            made.view(-1)[0] = rng.choice([math.nan, math.inf, -math.inf, -0.0])
    return made


def laid_out(rng: Random, shape: Batch, dtype: torch.dtype) -> Tensor:
    """Return values in one of the layouts that torch knows."""
    how = rng.choice(["plain"] * 5 + ["transposed", "strided", "offset", "expanded"])
    count = math.prod(shape)
    if how == "transposed" and shape:
        return values(rng, shape[::-1], dtype).permute(*reversed(range(len(shape))))
    if how == "strided" and shape:
        at = rng.randrange(len(shape))
        wide = values(rng, (*shape[:at], 2 * shape[at], *shape[at + 1 :]), dtype)
        return wide[(slice(None),) * at + (slice(None, None, 2),)]
    if how == "offset":
        return values(rng, (count + 3,), dtype)[2 : 2 + count].view(shape)
    if how == "expanded" and shape:
        at = rng.randrange(len(shape))
        return values(rng, (*shape[:at], 1, *shape[at + 1 :]), dtype).expand(shape)
    return values(rng, shape, dtype)


def with_grad(rng: Random, leaf: Tensor) -> Tensor:
    """Return the leaf as part of a graph, in one of the ways there are."""
    if not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    how = rng.choice(["none", "none", "leaf", "parameter", "inside", "view"])
    if how == "none":
        return leaf
    if how == "parameter":
        return nn.Parameter(leaf)
    leaf = leaf.requires_grad_()
    if how == "inside":
        return leaf.clone()
    return leaf if how == "leaf" else leaf.view_as(leaf)


def level(rng: Random, depth: int, names: tuple[str, ...] = NAMES) -> Level:
    """Return a random set of keys, nested up to a depth."""
    keys: dict[str, Leaf | Data | Words | Level] = {}
    one_dtype = rng.choice(DTYPES) if rng.random() < 0.5 else None
    for name in rng.sample(names, rng.choice([0, 1, 2, 2, 3, len(names)])):
        draw = rng.random()
        if draw < 0.25 and depth > 0:
            keys[name] = level(rng, depth - 1)
            if rng.random() < 0.2:
                cast("Level", keys[name]).extra = (2,)
        elif draw < 0.32:
            value = rng.choice(["text", None, ("x", 1)])
            data: list[Data | Words] = [Data(value), Data(value), Words()]
            keys[name] = rng.choice(data)
        else:
            keys[name] = Leaf(one_dtype or rng.choice(DTYPES), rng.choice(FEATURES))
    return Level(keys)


def realised(rng: Random, spec: Level, batch: Batch, grad: bool, seen: list[Tensor]) -> Node:
    """Return a level with tensors in it; some share memory with others."""
    batch = (*batch, *spec.extra)
    node = Node(batch)
    for key, what in spec.keys.items():
        if isinstance(what, Level):
            node.entries[key] = realised(rng, what, batch, grad, seen)
        elif isinstance(what, Words):
            node.entries[key] = Data(None, NonTensorData, some_rows(rng, batch))
        elif isinstance(what, Data):
            one = what.kind is MetaData
            node.entries[key] = what if one else stored(what.value, batch)
        else:
            shape = (*batch, *what.feature)
            alike = [t for t in seen if t.shape == shape and t.dtype is what.dtype]
            if alike and rng.random() < 0.2:
                leaf = rng.choice(alike)
                leaf = leaf if leaf.requires_grad or rng.random() < 0.5 else leaf.view_as(leaf)
            else:
                leaf = laid_out(rng, shape, what.dtype)
                leaf = with_grad(rng, leaf) if grad else leaf
                seen.append(leaf)
            node.entries[key] = leaf
    return node


def some_rows(rng: Random, batch: Batch) -> Tensor:
    """Return positions of words."""
    chosen = [rng.randrange(len(WORDS)) for _ in range(math.prod(batch))]
    return torch.tensor(chosen, dtype=torch.int64).reshape(batch)


def differing(rng: Random, spec: Level) -> Level:
    """Return a level that differs from another in a key, a shape or a dtype."""
    keys = dict(spec.keys)
    if keys:
        name = rng.choice(list(keys))
        what = keys[name]
        if isinstance(what, Level):
            keys[name] = differing(rng, what)
        elif rng.random() < 0.4:
            del keys[name]
        elif isinstance(what, Leaf):
            keys[name] = Leaf(rng.choice([what.dtype, what.dtype, torch.float32]), (4,))
    if rng.random() < 0.3:
        keys["own"] = Leaf(torch.float32, ())
    return Level(keys, spec.extra)


def stacked(rng: Random, batch: Batch, spec: Level, grad: bool, ragged: bool) -> Node:
    """Return a stack of members; `batch` is that of the whole and has a dimension above 0."""
    dims = [i for i, size in enumerate(batch) if size]
    dim = rng.choice(dims)
    inner = batch[:dim] + batch[dim + 1 :]
    seen: list[Tensor] = []
    node = Node(batch, dim=dim)
    deeper = bool(inner) and all(inner) and rng.random() < 0.15
    for _ in range(batch[dim]):
        each = differing(rng, spec) if ragged and rng.random() < 0.6 else spec
        if deeper:
            node.members.append(stacked(rng, inner, each, grad, False))
        else:
            node.members.append(realised(rng, each, inner, grad, seen))
    return node


@dataclass
class Subject:
    """A container under test: what it was built from, and the container itself."""

    node: Node
    td: TensorDictBase
    kind: str
    ragged: bool

    @property
    def batch(self) -> Batch:
        return self.node.batch


def subject(rng: Random) -> Subject:
    """Return a random container."""
    kind = rng.choice(["dense"] * 4 + ["declared", "stack", "stack", "stack", "ragged", "holder"])
    batch = rng.choice(BATCHES)
    grad = rng.random() < 0.2
    depth = rng.choice([0, 1, 2, 4])
    if kind in ("stack", "ragged", "holder") and not any(batch):
        batch = (2, 3)
    node = _node(rng, kind, batch, grad, depth)
    td = build(node)
    if rng.random() < 0.1:
        td.lock_()
    return Subject(node, td, kind, ragged=kind == "ragged")


def _node(rng: Random, kind: str, batch: Batch, grad: bool, depth: int) -> Node:
    if kind == "dense":
        return realised(rng, level(rng, depth), batch, grad, [])
    if kind == "declared":
        spec = Level(
            {
                "a": Leaf(rng.choice(DTYPES), rng.choice(FEATURES)),
                "b": Leaf(torch.float32, rng.choice(FEATURES)),
                "n": level(rng, 1),
                "word": Data("reach"),
            }
        )
        node = realised(rng, spec, batch, grad, [])
        node.declared = True
        return node
    if kind == "holder":
        node = realised(rng, level(rng, depth), batch, grad, [])
        node.entries["s"] = stacked(rng, batch, level(rng, 1), grad, False)
        return node
    return stacked(rng, batch, level(rng, depth), grad, kind == "ragged")


def build(node: Node) -> TensorDictBase:
    """Return a container of the tensors of a node themselves."""
    if node.members:
        return lazy_stack([build(member) for member in node.members], node.dim)
    entries: dict[str, object] = {}
    for key, value in node.entries.items():
        if isinstance(value, Node):
            entries[key] = build(value)
        elif isinstance(value, Data):
            entries[key] = value.wrapper(node.batch)
        else:
            entries[key] = value
    if node.declared:
        return Sample.from_dict(entries, node.batch)
    return TensorDict(entries, node.batch)


def twin(node: Node, memo: dict[int, torch.UntypedStorage] | None = None) -> Node:
    """Return a copy of a node, in which what shared memory shares it again."""
    memo = {} if memo is None else memo
    new = Node(node.batch, dim=node.dim, declared=node.declared)
    new.members = [twin(member, memo) for member in node.members]
    same: dict[int, Tensor] = {}
    for key, value in node.entries.items():
        if isinstance(value, Node):
            new.entries[key] = twin(value, memo)
        elif isinstance(value, Data):
            new.entries[key] = value
        else:
            if id(value) not in same:
                same[id(value)] = twin_leaf(value, memo)
            new.entries[key] = same[id(value)]
    return new


def twin_leaf(leaf: Tensor, memo: dict[int, torch.UntypedStorage]) -> Tensor:
    storage = leaf.untyped_storage()
    where = storage.data_ptr() if storage.nbytes() else -1
    if where not in memo:
        memo[where] = storage.clone()
    new = torch.empty(0, dtype=leaf.dtype)
    new.set_(memo[where], leaf.storage_offset(), leaf.size(), leaf.stride())
    if isinstance(leaf, nn.Parameter):
        return nn.Parameter(new)
    if leaf.requires_grad:
        new.requires_grad_()
        if leaf._base is not None:
            return new.view_as(new)
        return new if leaf.is_leaf else new.clone()
    return new


def plain(node: Node) -> Plain:
    """Return what a node should read as.

    Raises:
        Ragged: if members cannot be stacked.
    """
    if node.members:
        return stack_plain([plain(member) for member in node.members], node.dim)
    new = Plain(node.batch)
    for key, value in node.entries.items():
        new.entries[key] = plain(value) if isinstance(value, Node) else value
    return new


def stack_plain(members: list[Plain], dim: int) -> Plain:
    """Return the dense stack of what members read as."""
    first = members[0]
    if any(member.batch != first.batch for member in members):
        raise Ragged
    new = Plain((*first.batch[:dim], len(members), *first.batch[dim:]))
    for key in first.entries:
        rows = [member.entries[key] for member in members if key in member.entries]
        if len(rows) < len(members):
            continue
        if all(isinstance(row, Plain) for row in rows):
            new.entries[key] = stack_plain(cast("list[Plain]", rows), dim)
        elif all(isinstance(row, Tensor) for row in rows):
            leaves = cast("list[Tensor]", rows)
            shapes = {(leaf.shape, leaf.dtype) for leaf in leaves}
            if len(shapes) > 1:
                raise Ragged
            new.entries[key] = torch.stack(leaves, dim)
        elif all(isinstance(row, Data) for row in rows):
            column = cast("list[Data]", rows)
            batches = [member.batch for member in members]
            data = joined_data(column, batches, lambda each: torch.stack(each, dim))
            data.mixed = data.rows is not None and any(
                each.mixed or each.rows is None for each in column
            )
            new.entries[key] = data
        else:
            raise Ragged
    return new


def read(td: TensorDictBase) -> Plain:
    """Return what a container reads as, through its public face."""
    new = Plain(tuple(td.batch_size))
    for key, value in cast("dict[str, object]", dict(td.items())).items():
        if isinstance(value, Tensor):
            new.entries[key] = value
        elif isinstance(value, NonTensorDataBase):
            new.entries[key] = Found(value)
        else:
            new.entries[key] = read(cast("TensorDictBase", value))
    return new


def members_of(td: TensorDictBase) -> tuple[TensorDictBase, ...]:
    """Return the members of a lazy stack themselves."""
    stack = cast("LazyStackedTensorDict", td)
    return tuple(stack.unbind(stack.stack_dim))
