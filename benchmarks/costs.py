"""Time the calls of torch and Python whose cost decided how kd is written.

    python benchmarks/costs.py --json COSTS.json

A choice is two ways to say the same, timed side by side; the fast way is the one that the code
takes. A check is what a method does besides its work, and what would go wrong without it. A figure
is the minimum over the rounds, one thread, in nanoseconds.
"""

import argparse
import collections.abc
import json
import os
import platform
import timeit
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

ROUNDS = 40
SECONDS_OF_A_ROUND = 0.01


class Choice(NamedTuple):
    """Two ways to say the same, and where kd takes the fast one."""

    fast: str
    slow: str
    used_in: str


class Check(NamedTuple):
    """What is done once for each of some things, in which rows, and what it prevents."""

    statement: str
    each: str
    rows: str
    prevents: str


class Sized(collections.abc.Sized):
    """A class behind `ABCMeta`."""

    def __len__(self) -> int:
        return 0


class Plain:
    """A class without a base."""


class Overriding:
    """A class that torch asks before it runs a function."""

    @classmethod
    def __torch_function__(cls, *args: object, **kwargs: object) -> None:
        """Return nothing, whatever the function is."""


CHOICES = (
    Choice("x.shape[0] == 10", "x.shape[:1] == size", "`kd_core._leaves.loops`: does a leaf fit"),
    Choice("x[0]", "x.select(0, 0)", "`kd_core._ops.indexing`"),
    Choice("x[0:5]", "x.narrow(0, 0, 5)", "`kd_core._ops.partition`"),
    Choice("x.split_with_sizes([5, 5])", "x.split(5)", "`kd_core._ops.partition`"),
    Choice("x.index_select(0, rows)", "x[rows]", "`kd_core._ops.indexing`: masks and rows"),
    Choice("x.reshape(5, 8)", "x.reshape(sizes)", "`kd_core._ops.shaping`"),
    Choice("(ten, four)", "torch.Size((ten, four))", "`kd_core._descriptor`: tuples inside"),
    Choice("x + one", "x + 1", "`kd_core._leaves.foreach`: constants in place of numbers"),
    Choice(
        "torch._foreach_add(leaves, 1)",
        "[leaf + 1 for leaf in leaves]",
        "`kd_core._leaves.foreach`: 128 leaves",
    ),
    Choice(
        "torch._foreach_add(leaves, other=one)",
        "torch._foreach_add(leaves, one)",
        "`kd_core._leaves.foreach`: 128 leaves, a constant",
    ),
    Choice("isinstance(x, Plain)", "isinstance(x, Sized)", "`kd_core._protocol`: no ABC"),
    Choice(
        "isinstance(source, Plain)",
        "isinstance(source, Tensor)",
        "`kd_core._containers.dense`: a nested container",
    ),
    Choice("f(overriding)", "torch.exp(overriding)", "`kd_core._protocol`"),
    Choice("parameters['weight']", "linear.weight", "`kd_nn._plan.plans`"),
    Choice("identity.forward(x)", "identity(x)", "`kd_nn._plan.plans`"),
    Choice("five(x)", "sequential(x)", "`kd_nn._plan.plans`: five identities"),
)


CHECKS = (
    Check(
        "x.dtype not in dtypes or y.dtype not in dtypes or x.shape != y.shape or not y.data_ptr() "
        "or x.requires_grad or y.requires_grad or not x.is_contiguous() or x._version < 0",
        "pair of leaves",
        "math: `update_`, `copy_`; index: `td[0] = row`",
        "a write of some leaves only: torch writes the first pairs before it refuses one whose "
        "shapes differ, whose source is sparse, quantized or holds no data, or whose target is "
        "expanded, an inference tensor or a parameter",
    ),
    Check(
        "x.dtype is not dtype or x.requires_grad or not x.is_contiguous() or x._version < 0",
        "leaf",
        "math: `zero_` and all forms with `_`",
        "the same for one operand: `td.neg_()` with a leaf of booleans behind others",
    ),
    Check(
        "is_dynamo_compiling()",
        "call",
        "access: `td['a'] = x`, `pop + set`; keys: `flatten_keys`, `unflatten_keys`",
        "compiled code that is compiled again for each unrelated key, and for each batch size that "
        "was seen before",
    ),
    Check(
        "setattr(source, 'scope', size)",
        "call",
        "lock: `lock_ + unlock_`",
        "`with td.unlock_():` that leaves the container unlocked",
    ),
    Check(
        "look_up((ten, four))",
        "call",
        "construct: `empty`",
        "nothing: equal batch sizes are one object, so that comparing them, locking and the "
        "results of arithmetic take one reference",
    ),
    Check(
        "one_size.__class__ is int",
        "size",
        "construct: all; shape: all",
        "a size that is refused or not depending on what was called before: 2, 2.0 and `True` are "
        "one key of a cache",
    ),
    Check(
        "(ref(source), Plain, (size,))",
        "call",
        "shape: all; keys: `flatten_keys`, `unflatten_keys`",
        "nothing: it is what `with td.view(6) as view:` carries changes back with, without keeping "
        "the source alive",
    ),
    Check(
        "x.__class__ is not Tensor and getattr(x, '_kd_nested', True)",
        "entry",
        "math: `sum`, `mean`, `norm`, `td + td` of nested containers",
        "a sum over rows of a ragged leaf, and arithmetic on the members of a lazy stack as if "
        "they were the stack",
    ),
    Check(
        "x.ndim < y.ndim",
        "leaf",
        "math: `where`",
        "a condition that lines up with trailing dimensions where the other leaf has more of them",
    ),
    Check(
        "x.requires_grad",
        "leaf",
        "move: `state_dict`",
        "a saved state that holds the history of its leaves",
    ),
    Check(
        "setattr(lambda leaf: leaf, 'index', rows)",
        "call",
        "index: masks, row numbers and `...`, nested",
        "a nested lazy stack that is stacked where its members could be selected",
    ),
    Check(
        "isinstance(one_size, Plain)",
        "dimension",
        "index: slices; math: `sum`",
        "a dimension that loses its name",
    ),
)


def names() -> dict[str, object]:
    """Return what the statements speak of."""
    linear, identity = nn.Linear(4, 4), nn.Identity()
    forward = identity.forward
    pool: dict[tuple[int, ...], Plain] = {(10, 4): Plain()}

    def look_up(batch: tuple[int, ...]) -> Plain:
        try:
            return pool[batch]
        except KeyError:
            return Plain()

    return {
        "torch": torch,
        "look_up": look_up,
        "is_dynamo_compiling": torch.compiler.is_dynamo_compiling,
        "x": torch.randn(10, 4),
        "y": torch.randn(10, 4),
        "Tensor": torch.Tensor,
        "dtype": torch.float32,
        "dtypes": frozenset({torch.bool, torch.float32, torch.int64}),
        "one_size": 10,
        "ref": weakref.ref,
        "source": Plain(),
        "size": torch.Size([10]),
        "sizes": torch.Size([5, 8]),
        "rows": torch.tensor([1, 3, 5]),
        "one": torch.tensor(1.0),
        "leaves": [torch.randn(10, 4) for _ in range(128)],
        "Plain": Plain,
        "Sized": Sized,
        "ten": 10,
        "four": 4,
        "overriding": Overriding(),
        "f": lambda _: None,
        "linear": linear,
        "parameters": linear._parameters,
        "identity": identity,
        "sequential": nn.Sequential(OrderedDict((str(i), nn.Identity()) for i in range(5))),
        "five": lambda x: forward(forward(forward(forward(forward(x))))),
    }


def nanoseconds(choice: Choice, scope: dict[str, object]) -> tuple[float, float]:
    """Return the minimum of both ways, their rounds interleaved."""
    timers = [timeit.Timer(way, globals=scope) for way in (choice.fast, choice.slow)]
    numbers = [max(1, int(SECONDS_OF_A_ROUND / (timer.timeit(100) / 100))) for timer in timers]
    best = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        for i, (timer, number) in enumerate(zip(timers, numbers, strict=True)):
            best[i] = min(best[i], timer.timeit(number) / number * 1e9)
    return best[0], best[1]


def check_nanoseconds(check: Check, scope: dict[str, object]) -> float:
    """Return the minimum of a check, without what the loop around it takes."""
    choice = Choice(check.statement, "pass", check.rows)
    once, loop = nanoseconds(choice, scope)
    return once - loop


def cpu() -> str:
    """Return the name of the CPU, as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    """Time all choices and checks and write them with the name of the machine's CPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    target = parser.parse_args().json
    torch.set_num_threads(1)
    scope, rows = names(), []
    with torch.no_grad():
        for choice in CHOICES:
            fast, slow = nanoseconds(choice, scope)
            rows.append({**choice._asdict(), "fast_ns": fast, "slow_ns": slow})
            print(f"{fast:10.0f} ns {choice.fast:42s} {slow:10.0f} ns {choice.slow}", flush=True)
        checks = [{**check._asdict(), "ns": check_nanoseconds(check, scope)} for check in CHECKS]
    for each in checks:
        print(f"{each['ns']:10.0f} ns {each['statement']}")
    machine = {"cpu": cpu(), "cores": os.cpu_count(), "system": platform.system()}
    target.write_text(
        json.dumps({"machine": machine, "rows": rows, "checks": checks}), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
