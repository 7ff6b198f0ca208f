"""Run random nests of `vmap` and gradients on containers, beside the same on dicts of tensors.

    python -m tests.fuzz.vmap_worker never|before|after

It reads a seed a line and answers each with one line of JSON: the number of calls, and what went
wrong. The peer, which changes functions of torch when it is imported, is imported before kd, after
it, or never.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeAlias, cast

if sys.argv[1:] == ["before"]:
    importlib.import_module("tensordict.nn")

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from kd_core import (
    NonTensorDataBase,
    TensorClass,
    TensorDict,
    TensorDictBase,
    cat,
    lazy_stack,
    stack,
)

if sys.argv[1:] == ["after"]:
    importlib.import_module("tensordict.nn")

Plain: TypeAlias = "dict[str, Any]"
Value: TypeAlias = "tuple[Plain, int]"
"""Leaves by key, nested, and the number of batch dimensions."""


class Sample(TensorClass):
    """A class of its own, whose fields are those of the other containers."""

    a: Tensor
    b: Tensor
    n: TensorDict


def each(plain: Plain, fn: Callable[..., Tensor], *others: Plain) -> Plain:
    """Return what a function makes of each leaf."""
    return {
        key: each(value, fn, *(other[key] for other in others))
        if isinstance(value, dict)
        else fn(value, *(other[key] for other in others))
        for key, value in plain.items()
    }


def leaves(plain: Plain) -> list[Tensor]:
    return cast("list[Tensor]", pytree.tree_leaves(plain))


def tensors(td: Any) -> Plain:
    """Return the leaves of a container by key, nested, without its data."""
    return {
        key: tensors(value) if isinstance(value, TensorDictBase | TensorClass) else value
        for key, value in td.items()
        if not isinstance(value, NonTensorDataBase)
    }


# What the mapped function does: on a container, and on leaves with so many batch dimensions.


@dataclass
class Step:
    """One operation.

    Attributes:
        name: What a report says.
        ours: On the container.
        theirs: On its leaves.
        needs: How many batch dimensions it needs.
        adds: How many it adds.
        typed: Whether an instance of a tensor class stays one.
    """

    name: str
    ours: Callable[[Any], Any]
    theirs: Callable[[Plain, int], Plain]
    needs: int = 0
    adds: int = 0
    typed: bool = True

    def __str__(self) -> str:
        return self.name


def leafwise(name: str, fn: Callable[[Any], Any], needs: int = 0, adds: int = 0) -> Step:
    return Step(name, fn, lambda plain, _: each(plain, fn), needs, adds)


def same(name: str, ours: Callable[[Any], Any], fn: Callable[..., Tensor]) -> Step:
    return Step(name, ours, lambda plain, _: each(plain, fn))


def with_new(td: Any) -> Any:
    return td.copy().set("new", td["a"] * 2)


def with_nested(td: Any) -> Any:
    td = td.copy()
    td["n", "deep", "new"] = td["b"] + 1
    return td


def without(td: Any) -> Any:
    return td.exclude("a", ("n", "v"))


def written(td: Any) -> Any:
    td = td.clone()
    td["b"] = td["a"].sin()
    return td


STEPS = [
    leafwise("x * 2", lambda x: x * 2),
    leafwise("x.sin()", lambda x: x.sin()),
    leafwise("1 - x", lambda x: 1 - x),
    leafwise("x * x", lambda x: x * x),
    leafwise("x + x.cos()", lambda x: x + x.cos()),
    leafwise("flip", lambda x: x.flip(0), 1),
    leafwise("sum(0)", lambda x: x.sum(0), 1, -1),
    leafwise("x[0]", lambda x: x[0], 1, -1),
    leafwise("x[:1]", lambda x: x[:1], 1),
    leafwise("x[..]", lambda x: x[torch.tensor([0, 0])], 1),
    leafwise("unsqueeze(0)", lambda x: x.unsqueeze(0), 0, 1),
    leafwise("transpose", lambda x: x.transpose(0, 1), 2),
    leafwise("flatten", lambda x: x.flatten(0, 1), 2, -1),
    Step("unsqueeze(-1)", lambda x: x.unsqueeze(-1), lambda p, n: each(p, lambda x: x.unsqueeze(n)),
         0, 1),
    Step("sum(-1)", lambda x: x.sum(-1), lambda p, n: each(p, lambda x: x.sum(n - 1)), 1, -1),
    Step("expand", lambda x: x.expand(2, *x.batch_size),
         lambda p, n: each(p, lambda x: x.expand(2, *x.shape)), 0, 1),
    Step("cat", lambda x: cat([x, x * 2], 0),
         lambda p, n: each(p, lambda x: torch.cat([x, x * 2], 0)), 1),
    Step("stack", lambda x: stack([x, x * 2], 0),
         lambda p, n: each(p, lambda x: torch.stack([x, x * 2], 0)), 0, 1),
    Step("lazy_stack", lambda x: lazy_stack([x, x * 2], 0),
         lambda p, n: each(p, lambda x: torch.stack([x, x * 2], 0)), 0, 1, typed=False),
    Step("unbind", lambda x: x.unbind(0)[-1], lambda p, n: each(p, lambda x: x[-1]), 1, -1),
    Step("split", lambda x: x.split(1)[0], lambda p, n: each(p, lambda x: x[:1]), 1),
    same("apply", lambda td: td.apply(torch.tanh), torch.tanh),
    same("tree_map", lambda td: pytree.tree_map(torch.neg, td), torch.neg),
    same("where", lambda td: td.where(torch.ones(td.batch_size) > 0, td * 3), lambda x: x * 1),
    same("in place", lambda td: td.clone().mul_(2).add_(1), lambda x: x * 2 + 1),
    same("update_", lambda td: td.clone().update_(td.cos()), torch.cos),
    same("copy_", lambda td: td.clone().copy_(td * td), lambda x: x * x),
    same("contiguous", lambda td: td.contiguous() + 1, lambda x: x + 1),
    same("lock_", lambda td: td.clone().lock_().unlock_().sin(), torch.sin),
    same("lerp", lambda td: td.lerp(td.sin(), 0.5), lambda x: torch.lerp(x, x.sin(), 0.5)),
    Step("set", with_new, lambda p, n: {**p, "new": p["a"] * 2}, typed=False),
    Step("set nested", with_nested,
         lambda p, n: {**p, "n": {**p["n"], "deep": {"new": p["b"] + 1}}}, typed=False),
    Step("set over", written, lambda p, n: {**p, "b": p["a"].sin()}),
    Step("exclude", without, lambda p, n: {
        **{k: v for k, v in p.items() if k != "a"},
        "n": {k: v for k, v in p["n"].items() if k != "v"}}, typed=False),
]  # fmt: skip


MOVING_NO_ROWS = {
    *["x * 2", "x.sin()", "1 - x", "x * x", "x + x.cos()", "apply", "tree_map", "in place"],
    *["update_", "copy_", "contiguous", "lock_", "lerp", "set", "set nested", "set over"],
    *["exclude"],
}
"""Values of rows that `vmap` hides are read, and neither moved nor written."""


@dataclass
class Body:
    """What the innermost function does to a container and a number.

    Attributes:
        steps: The operations.
        seen: For each side, the batch sizes that it was called with.
        kind: The class that a container must have inside, if it is a tensor class.
    """

    steps: list[Step]
    ndim: int
    kind: type | None = None
    seen: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = field(default=([], []))

    def ours(self, td: Any, scale: Tensor) -> Any:
        self.seen[0].append(tuple(td.batch_size))
        if self.kind is not None:
            assert isinstance(td, self.kind), type(td)
        for step in self.steps:
            td = step.ours(td)
        return td * scale

    def theirs(self, plain: Plain, scale: Tensor) -> Plain:
        ndim = self.ndim
        self.seen[1].append(tuple(leaves(plain)[0].shape[:ndim]))
        for step in self.steps:
            plain = step.theirs(plain, ndim)
            ndim += step.adds
        return each(plain, lambda x: x * scale)


def a_body(rng: Random, ndim: int, kind: str) -> tuple[Body, int]:
    """Return a function of a container of so many batch dimensions, and those of its result."""
    steps: list[Step] = []
    count = ndim
    gone = False
    for _ in range(rng.randint(0, 3)):
        fitting = [
            step
            for step in STEPS
            if step.needs <= count
            and count + step.adds <= 3
            and (step.typed or "class" not in kind)
            # More rows than one get a value each, which `vmap` does not move.
            and (kind != "data" or (step.adds <= 0 and str(step) != "cat"))
            and ("rows" not in kind or str(step) in MOVING_NO_ROWS)
            and not (gone and step.name in ("set", "set nested", "set over", "exclude"))
        ]
        step = rng.choice(fitting)
        gone = gone or step.name == "exclude"
        steps.append(step)
        count += step.adds
    return Body(steps, ndim), count


def total(tree: Any) -> Tensor:
    """Return one number made of all leaves."""
    return torch.stack([(leaf * leaf).sum() for leaf in leaves(tree)]).sum()


def first(tree: Any) -> Tensor:
    return cast(Tensor, tree["b"])


# What is done to the function, innermost first. Each takes a container and a number.

Function: TypeAlias = "Callable[[Any, Tensor], Any]"


def gradient(fn: Function, read: Callable[[Any], Any]) -> Function:
    return torch.func.grad(lambda td, scale: total(read(fn(td, scale))))


def gradient_and_value(fn: Function, read: Callable[[Any], Any]) -> Function:
    return torch.func.grad_and_value(lambda td, scale: total(read(fn(td, scale))))


def jacobian(fn: Function, read: Callable[[Any], Any]) -> Function:
    return torch.func.jacrev(lambda td, scale: first(read(fn(td, scale))))


def jacobian_forward(fn: Function, read: Callable[[Any], Any]) -> Function:
    return torch.func.jacfwd(lambda td, scale: first(read(fn(td, scale))))


def jacobian_of_number(fn: Function, read: Callable[[Any], Any]) -> Function:
    return torch.func.jacrev(fn, argnums=1)


def jacobian_of_number_forward(fn: Function, read: Callable[[Any], Any]) -> Function:
    return torch.func.jacfwd(fn, argnums=1)


def pulled_back(fn: Function, read: Callable[[Any], Any]) -> Function:
    def call(td: Any, scale: Tensor) -> Any:
        out, pull = torch.func.vjp(fn, td, scale)[:2]
        return pull(pytree.tree_map(torch.cos, out))

    return call


def pushed_forward(fn: Function, read: Callable[[Any], Any]) -> Function:
    def call(td: Any, scale: Tensor) -> Any:
        tangents = (pytree.tree_map(torch.cos, td), torch.ones_like(scale))
        return torch.func.jvp(fn, (td, scale), tangents)[1]

    return call


def twice(fn: Function, read: Callable[[Any], Any]) -> Function:
    return gradient(gradient(fn, read), read)


INSIDE = [
    *[gradient, gradient_and_value, jacobian, jacobian_forward, jacobian_of_number],
    *[jacobian_of_number_forward, pulled_back, pushed_forward, twice],
]


# Containers of several kinds, and what they hold.


def a_batch(rng: Random) -> tuple[int, ...]:
    return tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 3)))


def a_leaf(rng: Random, batch: tuple[int, ...]) -> Tensor:
    """Return a leaf in one of the layouts that a tensor may have."""
    shape = (*batch, *(rng.randint(1, 3) for _ in range(rng.randint(0, 2))))
    layout = rng.randrange(4)
    if layout == 0:
        return torch.rand(shape[::-1], dtype=torch.float64).permute(*range(len(shape))[::-1])
    if layout == 1:
        return torch.rand((1, *shape[1:]), dtype=torch.float64).expand(shape)
    if layout == 2:
        return torch.rand((*shape, 2), dtype=torch.float64)[..., 1]
    return torch.rand(shape, dtype=torch.float64)


KINDS = [
    *["dense", "stack", "class", "stack inside", "locked", "data", "stack of classes", "names"],
    *["rows", "stack of rows", "stack of rows inside"],
]


def words_of(batch: tuple[int, ...], word: str = "") -> Any:
    """Return a value for each row of a batch, in lists."""
    if not batch:
        return word
    return [words_of(batch[1:], f"{word}{number}") for number in range(batch[0])]


def repeated(words: Any, maps: list[tuple[bool, int]]) -> Any:
    """Return what nested `vmap`s make of values of rows: whether each maps them, and its size."""
    if not maps:
        return words
    (mapped, size), *inner = maps
    return [repeated(row, inner) for row in (words if mapped else [words] * size)]


def a_container(rng: Random, kind: str, batch: tuple[int, ...]) -> tuple[Any, Plain]:
    """Return a container and its leaves."""
    n: Plain = {"v": a_leaf(rng, batch), "w": a_leaf(rng, batch)}
    plain: Plain = {"a": a_leaf(rng, batch), "b": a_leaf(rng, batch), "n": n}
    dim = rng.randrange(len(batch))
    nested = TensorDict(n, batch)
    if "rows" in kind:
        nested["word"] = words_of(batch)
    if kind.endswith("inside"):
        td: Any = TensorDict({**plain, "n": lazy_stack(list(nested.unbind(dim)), dim)}, batch)
    elif "class" in kind:
        td = Sample(a=plain["a"], b=plain["b"], n=nested, batch_size=batch)
    else:
        names = list("xyz"[: len(batch)]) if kind == "names" else None
        td = TensorDict({**plain, "n": nested}, batch, names=names)
    if "rows" in kind:
        td["word"] = words_of(batch)
    if kind.startswith("stack") and not kind.endswith("inside"):
        td = lazy_stack(list(td.unbind(dim)), dim)
    if kind == "data":
        td["word"] = "word"
    if kind == "locked":
        td.lock_()
    return td, plain


@dataclass
class Program:
    """A function under nested transforms, and the arguments of both sides."""

    rng: Random
    calls: int = 0
    text: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Make it, call it on both sides, and compare."""
        rng = self.rng
        kind, batch = rng.choice(KINDS), a_batch(rng)
        td, plain = a_container(rng, kind, batch)
        levels = rng.randint(0 if rng.random() < 0.3 else 1, len(batch))
        maps = self.maps(levels, len(batch), "rows" in kind)
        ndim = len(batch) - sum(each["td"] is not None for each in maps)
        typed = Sample if kind == "class" else None
        body, count = a_body(rng, ndim, kind)
        body.kind = typed
        shape = [rng.randint(1, 3) for _ in maps]
        scale = self.a_scale(maps, batch, shape)
        ours: Function = body.ours
        theirs: Function = body.theirs
        # Jacobians map a result that values of rows do not follow: they are refused.
        among = [fn for fn in INSIDE if "rows" not in kind or "jacobian" not in fn.__name__]
        inside = rng.choice(among) if rng.random() < 0.5 else None
        if inside is not None:
            self.text.append(inside.__name__)
            ours, theirs = inside(ours, tensors), inside(theirs, lambda plain: plain)
        counts: int | None = count if inside is None else None
        for each_map in reversed(maps):
            ours, theirs, counts = self.mapped(ours, theirs, counts, each_map)
        self.text = [kind, f"{batch}", " ".join(map(str, body.steps)), *self.text]
        try:
            expected = theirs(plain, scale)
        except (RuntimeError, ValueError, IndexError):
            return
        self.calls += 1
        found = ours(td, scale)
        self.compare(found, expected, counts)
        assert set(body.seen[0]) == set(body.seen[1]), ("batch sizes inside", body.seen)
        self.compare(td, plain, len(batch))
        if kind == "data":
            assert td["word"] == "word"
            if inside is None:
                assert found["word"] == "word"
        if "rows" in kind:
            assert td["word"] == td["n", "word"] == words_of(batch)
            if inside is None:
                sizes = [
                    (each["td"] is not None, size) for each, size in zip(maps, shape, strict=True)
                ]
                words = repeated(words_of(batch), sizes)
                assert found["word"] == found["n", "word"] == words
        if typed is not None and inside in (None, gradient):
            assert isinstance(found, typed), type(found)

    def maps(self, levels: int, ndim: int, rows: bool) -> list[dict[str, Any]]:
        """Return what is mapped at each level, the outermost first; of rows with values, rows."""
        rng, left = self.rng, ndim
        made: list[dict[str, Any]] = []
        for _ in range(levels):
            taken = rng.random() < (0.5 if rows else 0.85)
            dim = 0 if rows else rng.randrange(left)
            made.append({"td": dim if taken else None, "scale": not taken, "rows": rows})
            left -= taken
            if taken and rng.random() < 0.4:
                made[-1]["scale"] = True
        for at, each_map in enumerate(made):
            each_map["outermost"] = not at
        return made

    def a_scale(
        self, maps: list[dict[str, Any]], batch: tuple[int, ...], free: list[int]
    ) -> Tensor:
        """Return a tensor with a dimension for each level that maps it, anywhere."""
        left, sizes = list(batch), []
        for each_map, size in zip(maps, free, strict=True):
            own = left.pop(each_map["td"]) if each_map["td"] is not None else size
            if each_map["scale"]:
                sizes.append(own)
        shape: list[int] = []
        dims: list[int] = []
        for size in reversed(sizes):
            dims.insert(0, self.rng.randint(0, len(shape)))
            shape.insert(dims[0], size)
        for each_map in maps:
            each_map["at"] = dims.pop(0) if each_map["scale"] else None
        return torch.rand(shape, dtype=torch.float64)

    def mapped(
        self, ours: Function, theirs: Function, count: int | None, what: dict[str, Any]
    ) -> tuple[Function, Function, int | None]:
        """Return both functions under one more `vmap`."""
        rng = self.rng
        out = rng.randint(0, count) if count is not None and not what["rows"] else 0
        dims = (what["td"], what["at"])
        options: dict[str, Any] = {"out_dims": out} if out or rng.random() < 0.5 else {}
        if rng.random() < 0.2:
            options["chunk_size"] = rng.randint(1, 3)
        self.text.append(f"vmap(in_dims={dims}, {options})")
        plain = torch.vmap(theirs, in_dims=dims, **options)
        way = rng.randrange(3)
        # A tree of integers: inside of `vmap` torch cannot tell it from what it fills with zeros.
        if way == 0 and what["td"] is not None and what["outermost"]:

            def call(td: Any, scale: Tensor) -> Any:
                tree = pytree.tree_map(lambda _: what["td"], td)
                return torch.vmap(ours, in_dims=(tree, what["at"]), **options)(td, scale)

            return call, plain, None if count is None else count + 1
        if way == 1 and dims[0] == dims[1] and dims[0] is not None:
            options["in_dims"] = dims[0]
        else:
            options["in_dims"] = dims
        return torch.vmap(ours, **options), plain, None if count is None else count + 1

    def compare(self, found: Any, expected: Any, ndim: int | None) -> None:
        """Compare a result: a container, a tensor, or a tuple of them."""
        if isinstance(expected, tuple | list):
            assert len(found) == len(expected)
            for mine, theirs in zip(found, expected, strict=True):
                self.compare(mine, theirs, ndim)
        elif isinstance(expected, dict):
            assert isinstance(found, TensorDictBase | TensorClass), type(found)
            got = tensors(found)
            shapes = [leaf.shape for leaf in leaves(expected)]
            count = len(found.batch_size)
            assert ndim is None or count == ndim, ("batch", found.batch_size, ndim, shapes)
            assert all(shape[:count] == found.batch_size for shape in shapes), found
            self.compare_leaves(got, expected)
        else:
            torch.testing.assert_close(found, expected)

    def compare_leaves(self, got: Plain, expected: Plain) -> None:
        assert got.keys() == expected.keys(), (list(got), list(expected))
        for key, value in expected.items():
            if isinstance(value, dict):
                self.compare_leaves(got[key], value)
            else:
                torch.testing.assert_close(got[key], value)


def answer(seed: int) -> dict[str, object]:
    """Run the programs of a seed."""
    calls = 0
    for number in range(10):
        rng = Random(f"{seed} {number}")
        torch.manual_seed(rng.randrange(1 << 30))
        program = Program(rng)
        try:
            program.run()
        except Exception:
            wrong = traceback.format_exc(limit=-6)
            return {"calls": calls, "wrong": f"{number}: {'; '.join(program.text)}\n{wrong}"}
        calls += program.calls
    return {"calls": calls, "wrong": None}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(int(line))), flush=True)
