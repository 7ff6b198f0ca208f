"""Random small modules whose program compares sizes with constants, saved with a dynamic length.

Sliding windows, chunks, padding to multiples, buffers of a fixed length, branches on the size: a
file gives what the module gives at every length of its range, or it is not written.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TypeAlias, cast

import pytest
import torch
import torch.nn.functional as F
from tests.export.models import Keyed
from tests.fuzz.conftest import Seeds
from torch import Tensor, nn

import kd_export
from kd_export._schema.schema import LinearSize

WIDTH = 2
LONGEST = 80
Part: TypeAlias = Callable[[Tensor], Tensor]
Axes: TypeAlias = "dict[str, dict[int, str] | tuple[int, int | None]]"


def places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


def attended(x: Tensor, mask: Tensor) -> Tensor:
    scores = (x @ x.transpose(1, 2)).masked_fill(~mask, -1e9)
    return scores.softmax(-1) @ x


class Table(nn.Module):
    """Adds what a table of fixed length holds for each place."""

    def __init__(self, kind: str, rows: int) -> None:
        super().__init__()
        self.kind, self.rows = kind, rows
        self.table = nn.Parameter(torch.randn(rows, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Add rows of the table."""
        at = places(x)
        if self.kind == "cut":
            return x + self.table[: x.shape[1]]  # which it cannot serve beyond its length
        if self.kind == "clamped":
            return x + F.embedding(at.clamp(max=self.rows - 1), self.table)
        if self.kind == "wrapped":
            return x + self.table[at % self.rows]
        apart = (at[:, None] - at).clamp(-(self.rows // 2), self.rows - 1 - self.rows // 2)
        return x + self.table[apart + self.rows // 2].sum(1)


class Held(nn.Module):
    """Compares places with a number that is a tensor of the module."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = nn.Buffer(torch.tensor(number))

    def forward(self, x: Tensor) -> Tensor:
        """Double the first rows."""
        return torch.where((places(x) < self.number)[:, None], x * 2, x)


def window(n: int) -> Part:
    def call(x: Tensor) -> Tensor:
        i, j = places(x)[:, None], places(x)
        return attended(x, (i >= j) & (i - j < n))

    return call


def band(n: int) -> Part:
    return lambda x: attended(x, torch.ones(x.shape[1], x.shape[1]).tril(n).triu(-n).bool())


def blocks(n: int) -> Part:
    return lambda x: attended(x, (places(x)[:, None] // n) == (places(x) // n))


def padded(n: int) -> Part:
    """Pad to a multiple, take means of chunks, spread them again and cut."""

    def call(x: Tensor) -> Tensor:
        length = x.shape[1]
        whole = F.pad(x, (0, 0, 0, (-length) % n))
        means = whole.reshape(x.shape[0], -1, n, x.shape[2]).mean(2)
        return x + means.repeat_interleave(n, 1)[:, :length]

    return call


def chunked(n: int) -> Part:
    """Use the whole chunks alone."""

    def call(x: Tensor) -> Tensor:
        count = x.shape[1] // n
        return x + x[:, : count * n].sum(1, keepdim=True)

    return call


def head(n: int) -> Part:
    return lambda x: x + x[:, :n].sum(1, keepdim=True)


def tail(n: int) -> Part:
    return lambda x: x + x[:, -n:].sum(1, keepdim=True)


def beyond(n: int) -> Part:
    return lambda x: x + x[:, n:].sum(1, keepdim=True)


def every_nth(n: int) -> Part:
    return lambda x: x + x[:, ::n].sum(1, keepdim=True)


def first_rows(n: int) -> Part:
    return lambda x: torch.where((places(x) < n)[:, None], x * 2, x)


def every_nth_row(n: int) -> Part:
    return lambda x: torch.where((places(x) % n == 0)[:, None], x * 2, x)


def from_the_end(n: int) -> Part:
    return lambda x: torch.where((x.shape[1] - places(x) <= n)[:, None], x * 2, x)


def branch(n: int) -> Part:
    return lambda x: x * 2 if x.shape[1] > n else x - 1


def branch_within(n: int) -> Part:
    return lambda x: cast(
        Tensor, torch.cond(x.shape[1] > n, lambda y: y * 2, lambda y: y - 1, (x,))
    )


def scaled(n: int) -> Part:
    return lambda x: x * (x.shape[1] // n) + x.shape[1] % n


def at_most(n: int) -> Part:
    return lambda x: x / torch.sym_min(x.shape[1], n)


def at_least(n: int) -> Part:
    return lambda x: x / torch.sym_max(x.shape[1] - n, 1)


def counted(n: int) -> Part:
    return lambda x: torch.where((x > 0).cumsum(1) <= n, x, -x)


def rolled(n: int) -> Part:
    return lambda x: x + x.roll(n, 1)


def largest(n: int) -> Part:
    return lambda x: x + x.topk(min(n, 3), 1).values.sum(1, keepdim=True)


def pooled(n: int) -> Part:
    def call(x: Tensor) -> Tensor:
        return x + F.avg_pool1d(x.transpose(1, 2), min(n, 4)).sum(-1)[:, None]

    return call


def convolved(n: int) -> Part:
    def call(x: Tensor) -> Tensor:
        kernel = torch.full((WIDTH, 1, 2), 0.5)
        padding = F.pad(x.transpose(1, 2), (n, 0))
        return x + F.conv1d(padding, kernel, groups=WIDTH, dilation=n).transpose(1, 2)

    return call


PARTS: list[Callable[[int], Part]] = [
    *(window, band, blocks, padded, chunked, head, tail, beyond, every_nth, first_rows),
    *(every_nth_row, from_the_end, branch, branch_within, scaled, at_most, at_least, counted),
    *(rolled, largest, pooled, convolved, Held),
    *[lambda n, kind=kind: Table(kind, n) for kind in ("cut", "clamped", "wrapped", "apart")],
]


class Sequence(nn.Module):
    """A few parts, one after another."""

    def __init__(self, parts: list[Part]) -> None:
        super().__init__()
        self.parts = parts
        self.held = nn.ModuleList([part for part in parts if isinstance(part, nn.Module)])

    def forward(self, x: Tensor) -> Tensor:
        """Call them."""
        for part in self.parts:
            x = part(x).tanh()
        return x


def saved(module: nn.Module, path: Path, example: Tensor, axes: Axes) -> bool:
    """Save a module, over the range that the refusal advises if the first one is refused."""
    for _ in range(2):
        try:
            assert kd_export.save(module, path, {"x": example}, dynamic=axes).ok
            return True
        except kd_export.ExportError as error:
            advice = re.search(r"Pass `dynamic=(\{.*\})`", str(error))
        if advice is None:
            break
        axes = ast.literal_eval(advice[1])
    return False


def sizes(schema: kd_export.Schema) -> list[int]:
    """List the lengths that a file serves, up to the longest tried."""
    size = schema.inputs[0].shape[1]
    line = LinearSize.parse(size) if isinstance(size, str) else None
    if line is None:
        return [int(size)]
    served = range(LONGEST + 1)
    return [line.at(at) for at in served if schema.axes[line.axis].holds(at)]


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_files_do_at_every_length_what_their_modules_do(
    seeds: Seeds, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"m.{suffix}"
    for seed in seeds(1):
        rng = Random(seed)
        torch.manual_seed(seed)
        chosen = [(rng.choice(PARTS), rng.choice([2, 3, 5, 6, 9, 17, 20, 34])) for _ in range(2)]
        net = Sequence([make(n) for make, n in chosen[: rng.randint(1, 2)]])
        told = [(getattr(make, "__name__", "table"), n) for make, n in chosen]
        length, least = rng.choice([4, 5, 7, 12]), rng.choice([1, 2, 4])
        most = rng.choice([None, 30, LONGEST])
        module, example = Keyed(net, ["x"], ["y"]), torch.randn(2, length, WIDTH)
        axes: Axes = {"x": {0: "batch", 1: "time"}, "time": (least, most)}
        if not saved(module, path, example, axes):
            seeds.count("refused")
            continue
        session = kd_export.open(path, trusted=True)
        for size in sizes(session.schema):
            x = torch.randn(3, size, WIDTH)
            try:
                wanted = net(x)
            except (RuntimeError, IndexError):
                continue  # the module itself fails there
            seeds.count("lengths")
            found = session.run({"x": x})["y"]
            near = torch.isclose(found, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
            assert bool(near.all()), f"{told} over {least}..{most} of {length} at {size}"
        seeds.count("files")
