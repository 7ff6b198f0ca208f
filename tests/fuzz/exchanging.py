"""Random containers of three ranks, and what random collectives of them are to give, plainly.

Each rank builds the containers of all ranks from the same seed, so it knows what the others have.
Values are small integers: sums of them are exact in each dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias, cast

import torch
import torch.distributed as dist
from tests.core.distributed.ranks import RANKS
from torch import Tensor

from kd_core import (
    KdError,
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    distributed,
    lazy_stack,
)

Told: TypeAlias = object

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NUMBERS = (*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.complex64)
DTYPES = (*NUMBERS, torch.bool, torch.uint16, torch.uint32, torch.complex128)
SHAPES = ((), (1,), (3,), (2, 2), (0,), (2, 1, 3))
LARGE = (4_000,)
"""A shape whose values do not travel with the agreement."""


@dataclass
class Kinds:
    """What the containers of one program may hold."""

    dtypes: Sequence[torch.dtype]
    data: bool
    ragged: bool
    expanded: bool


class Builder:
    """Builds the container of a rank: its structure by the seed, its values by seed and rank."""

    def __init__(self, seed: int, rank: int, kinds: Kinds, rows: int | None) -> None:
        self.draw = Random(seed)
        self.values = torch.Generator().manual_seed(seed * RANKS + rank)
        self.kinds, self.rank, self.rows = kinds, rank, rows
        self.made: list[Tensor] = []

    def container(self) -> TensorDictBase:
        batch = self.draw.choice([(), (2,), (2,), (3,), (2, 2), (0,)])
        if self.rows is not None:
            batch = (self.rows, *batch[1:])
        return self.level(batch, 0)

    def level(self, batch: tuple[int, ...], depth: int) -> TensorDictBase:
        entries: dict[str, object] = {}
        for key in self.draw.sample("abcdefg", self.draw.randint(0 if depth else 1, 4)):
            entries[key] = self.entry(batch, depth)
        if self.draw.random() < 0.5 and self.rank % 2:  # the order of keys does not matter
            entries = dict(reversed(entries.items()))
        td = TensorDict(entries, batch)
        if depth == 0 and batch and self.draw.random() < 0.2:
            td.names = ["row", *[None] * (len(batch) - 1)]
        return td

    def entry(self, batch: tuple[int, ...], depth: int) -> object:
        kind = self.draw.random()
        if depth < 2 and kind < 0.15:
            return self.level(batch, depth + 1)
        if self.kinds.data and kind < 0.3:
            return self.words(batch)
        if self.kinds.ragged and batch and batch[0] and kind < 0.45:
            return self.stack(batch) if kind < 0.38 else self.jagged(batch)
        return self.leaf(batch)

    def words(self, batch: tuple[int, ...]) -> object:
        if len(batch) != 1 or self.draw.random() < 0.3:
            return self.draw.choice(["m", "km"])
        return [f"{self.rank}.{row}" for row in range(batch[0])] or "m"

    def stack(self, batch: tuple[int, ...]) -> object:
        shapes = [self.draw.randint(0, 3) for _ in range(4)]
        dtype = self.draw.choice(self.kinds.dtypes)
        members = [
            TensorDict({"x": self.filled((*batch[1:], shapes[row % 4]), dtype)}, batch[1:])
            for row in range(batch[0])
        ]
        return lazy_stack(members)

    def jagged(self, batch: tuple[int, ...]) -> object:
        if len(batch) > 1:
            return self.leaf(batch)
        lengths = [self.draw.randint(1, 3) for _ in range(4)]
        rows = [self.filled((lengths[row % 4],), torch.float32) for row in range(batch[0])]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    def filled(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        made = torch.randint(0, 4, tuple(shape), generator=self.values)
        return (
            torch.complex(made.double(), made.double()).to(dtype)
            if dtype.is_complex
            else made.to(dtype)
        )

    def leaf(self, batch: tuple[int, ...]) -> Tensor:
        """Return a leaf that is whole, a view of a larger tensor, expanded, or shared."""
        dtype = self.draw.choice(self.kinds.dtypes)
        feature = self.draw.choice([*SHAPES, LARGE if self.draw.random() < 0.3 else ()])
        shape, how = (*batch, *feature), self.draw.random()
        alike = [each for each in self.made if each.shape == shape]
        if how < 0.1 and alike:
            return alike[0]
        if how < 0.25:
            made = self.filled((*shape, 2), dtype)[..., 1]
        elif how < 0.4:
            made = self.filled(shape[::-1], dtype).permute([*reversed(range(len(shape)))])
        elif how < 0.5 and self.kinds.expanded and shape:
            made = self.filled((1, *shape[1:]), dtype).expand(shape)
        elif how < 0.6 and dtype.is_complex:
            made = self.filled(shape, dtype).conj()
        elif how < 0.7:
            made = torch.cat([self.filled((3,), dtype), self.filled(shape, dtype).view(-1)])[3:]
            made = made.view(shape)
        else:
            made = self.filled(shape, dtype)
        self.made.append(made)
        return made


def told(value: object) -> Told:
    """Return a container or an entry as plain values."""
    if isinstance(value, LazyStackedTensorDict):
        return ["stack", value.stack_dim, [told(part) for part in value.unbind(value.stack_dim)]]
    if isinstance(value, TensorDictBase):
        found = {key: told(value.get(key)) for key in sorted(value.keys())}
        return [tuple(value.batch_size), value.names, found]
    if isinstance(value, Tensor):
        rows = value.unbind() if value.is_nested else [value]
        return [str(value.dtype), [(tuple(row.shape), row.tolist()) for row in rows]]
    item = getattr(value, "tolist", None)
    return ["data", item() if item is not None else value]


def tensors_of(td: TensorDictBase) -> list[Tensor]:
    """Return all tensors, those of members too, in the order of their paths."""
    if isinstance(td, LazyStackedTensorDict):
        return [leaf for part in td.unbind(td.stack_dim) for leaf in tensors_of(part)]
    found: list[Tensor] = []
    for key in sorted(td.keys()):
        value: object = td.get(key)
        if isinstance(value, TensorDictBase):
            found += tensors_of(value)
        elif isinstance(value, Tensor):
            found.append(value)
    return found


def is_writable(leaf: Tensor) -> bool:
    return not leaf.is_nested and torch._debug_has_internal_overlap(leaf) != 1


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(0, dtype=rows.dtype),
    "mean": lambda rows: rows.sum(0, dtype=rows.dtype) / RANKS,
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
    "product": lambda rows: rows.prod(0, dtype=rows.dtype),
}


def reduces(leaf: Tensor, op: str) -> bool:
    dtype = leaf.dtype
    if leaf.is_nested or dtype not in (*NUMBERS, torch.complex128):
        return False
    if op == "mean":
        return dtype.is_floating_point or dtype.is_complex
    return op == "sum" or not dtype.is_complex


class Program:
    """One random call on all ranks, and what is to become of the container of this rank."""

    def __init__(self, seed: int, rank: int) -> None:
        self.seed, self.rank, self.draw = seed, rank, Random(-seed)
        self.call: Callable[[], object] = self.draw.choice(
            [
                *[self.reduced] * 3,
                *[self.broadcast] * 3,
                self.gathered,
                self.gathered,
                self.scattered,
                self.sent,
                self.made_anew,
                self.differing,
            ]
        )

    def containers(self, rows: bool = False, reducing: bool = False) -> list[TensorDictBase]:
        numbers = NUMBERS if self.draw.random() < 0.9 else DTYPES
        few = [self.draw.choice(NUMBERS[:8]), self.draw.choice(NUMBERS)]
        kinds = Kinds(
            (few if self.draw.random() < 0.5 else numbers) if reducing else DTYPES,
            self.draw.random() < 0.5,
            self.draw.random() < (0.2 if reducing else 0.5),
            self.draw.random() < 0.3,
        )
        counts = [self.draw.randint(0, 3) if rows else None for _ in range(RANKS)]
        pairs = enumerate(counts)
        return [Builder(self.seed, rank, kinds, count).container() for rank, count in pairs]

    def reduced(self) -> str | None:
        op = self.draw.choice(list(REDUCTIONS))
        dst = self.draw.choice([None, None, 0, 1, 2])
        every = self.containers(reducing=True)
        mine = every[self.rank]
        columns = list(zip(*map(tensors_of, every), strict=True))
        writers = every if dst is None else [every[dst]]
        fits = all(reduces(column[0], op) for column in columns)
        fits = fits and all(is_writable(leaf) for td in writers for leaf in tensors_of(td))
        writes = fits and dst in (None, self.rank)
        results = [REDUCTIONS[op](torch.stack(column)) for column in columns] if writes else []
        bucket = self.draw.choice([None, None, 1, 1_000])
        later = self.draw.random() < 0.3

        def run() -> None:
            options = {"async_op": later, "bucket_bytes": bucket}
            handle = (
                distributed.all_reduce(mine, op, **options)  # type: ignore[arg-type]  # options of both
                if dst is None
                else distributed.reduce(mine, dst, op, **options)  # type: ignore[arg-type]  # as above
            )
            if handle is not None:
                handle.wait()

        return self.checked(mine, run, fits, dict(enumerate(results)))

    def broadcast(self) -> str | None:
        src = self.draw.randrange(RANKS)
        every = self.containers()
        mine = every[self.rank]
        others = [td for rank, td in enumerate(every) if rank != src]
        fits = all(is_writable(leaf) for td in others for leaf in tensors_of(td))
        expected = told(every[src])
        error = self.error_of(lambda: mine.broadcast(src))
        if not fits:
            return self.refused(error, mine)
        return error or self.differs(told(mine), expected, "broadcast")

    def made_anew(self) -> str | None:
        """Ranks that have nothing, or an empty container, get a new one."""
        src = self.draw.randrange(RANKS)
        source = self.containers()[src]
        lacks = self.draw.choice([None, "empty"])
        mine = source if self.rank == src else (None if lacks is None else TensorDict())
        made: list[object] = []
        error = self.error_of(lambda: made.append(distributed.broadcast(mine, src)))
        return error or self.differs(told(made[0]), told(source), "broadcast of a new one")

    def gathered(self) -> str | None:
        every = self.containers(rows=self.draw.random() < 0.5)
        dst = self.draw.choice([None, 0, 1, 2])
        if len({str(schema(td)) for td in every}) > 1:  # a level without rows has other entries
            error = self.error_of(lambda: distributed.all_gather(every[self.rank]))
            return self.refused(error, every[self.rank])
        made: list[object] = []

        def run() -> None:
            mine = every[self.rank]
            found = distributed.all_gather(mine) if dst is None else distributed.gather(mine, dst)
            made.append(found)

        error = self.error_of(run)
        if error:
            return error
        if dst not in (None, self.rank):
            return None if made == [None] else "a rank that is not `dst` got something"
        parts = cast("list[TensorDictBase]", made[0])
        return self.differs([told(part) for part in parts], [told(td) for td in every], "gather")

    def scattered(self) -> str | None:
        src = self.draw.randrange(RANKS)
        every = self.containers(rows=True)
        made: list[object] = []
        parts = every if self.rank == src else None
        error = self.error_of(lambda: made.append(distributed.scatter(parts, src)))
        return error or self.differs(told(made[0]), told(every[self.rank]), "scatter")

    def sent(self) -> str | None:
        """Each rank sends to the next one, twice; the second time into what it received."""
        every = self.containers()
        left, right = (self.rank - 1) % RANKS, (self.rank + 1) % RANKS
        for _ in range(2):
            handle = distributed.isend(every[self.rank], right)
            made = distributed.from_remote_init(left)
            handle.wait()
            found = self.differs(told(made), told(every[left]), "send")
            if found:
                return found
        return None

    def differing(self) -> str | None:
        """One rank has another schema: all raise the same error, and nothing is written."""
        mine = self.containers()[self.rank]
        at, change = self.draw.randrange(RANKS), self.draw.choice(["key", "dtype", "shape"])
        batch = mine.batch_size
        mine["z"] = torch.zeros(*batch, 2)
        if self.rank == at:
            if change == "key":
                mine.rename_key_("z", "y")
            else:
                made = torch.zeros(*batch, 3 if change == "shape" else 2)
                mine["z"] = made.double() if change == "dtype" else made
        call = self.draw.choice([mine.all_reduce, lambda: mine.broadcast(0), mine.all_gather])
        return self.refused(self.error_of(cast("Callable[[], object]", call)), mine)

    def checked(
        self,
        mine: TensorDictBase,
        run: Callable[[], object],
        fits: bool,
        results: dict[int, Tensor],
    ) -> str | None:
        leaves, before = tensors_of(mine), told(mine)
        error = self.error_of(run)
        if not fits:
            return self.refused(error, mine, before)
        if error:
            return error
        after = tensors_of(mine)
        if any(old is not new for old, new in zip(leaves, after, strict=True) if not old.is_nested):
            return "a leaf was replaced"
        for position, expected in results.items():
            if not torch.allclose(after[position], expected, rtol=1e-2):
                return f"leaf {position} is {after[position]} instead of {expected}"
        return None if results else self.differs(told(mine), before, "what is not written")

    def error_of(self, run: Callable[[], object]) -> str | None:
        try:
            run()
        except KdError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def refused(self, error: str | None, mine: TensorDictBase, before: Told = None) -> str | None:
        """Say what is wrong with a refusal; all ranks must have one, and write nothing."""
        every: list[str | None] = [None] * RANKS
        dist.all_gather_object(every, error)
        if not all(every):
            return f"expected an error on all ranks, got {every}"
        if any("CommunicationError" in str(each) for each in every):
            return str(every)
        if before is not None and told(mine) != before:
            return "something was written before the error"
        return None

    def differs(self, got: Told, expected: Told, what: str) -> str | None:
        return None if got == expected else f"{what}: {got!s:.2000} instead of {expected!s:.2000}"


def schema(td: TensorDictBase) -> object:
    """Return keys, kinds and shapes, without the number of rows."""
    if isinstance(td, LazyStackedTensorDict):
        return "stack"
    found: list[object] = []
    for key in sorted(td.keys()):
        value: object = td.get(key)
        if isinstance(value, TensorDictBase):
            inner = schema(value)
            found.append((key, inner) if inner == "stack" else (key, "level", inner))
        elif isinstance(value, Tensor):
            shape = tuple(value.shape) if not value.is_nested else ()
            found.append((key, str(value.dtype), value.is_nested, shape[1:] if td.ndim else shape))
        else:
            found.append((key, "data"))
    return found
