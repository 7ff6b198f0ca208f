"""Saying where a result, a container or its tensors differ from what they should be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from tests.fuzz.data import Data, Found
from tests.fuzz.subjects import Node, Path, Plain, members_of, read
from torch import Tensor

from kd_core import LazyStackedTensorDict, NonTensorDataBase, TensorDictBase

TOLERANCE = {
    torch.float16: 4e-3,
    torch.bfloat16: 4e-2,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
}


def tensors_differ(got: object, want: Tensor, exact: bool) -> str | None:
    """Say how a tensor differs from what it should be."""
    if not isinstance(got, Tensor):
        return f"a {type(got).__name__} instead of a tensor"
    if got.dtype is not want.dtype:
        return f"dtype {got.dtype} instead of {want.dtype}"
    if want.is_nested and want.layout is torch.strided:  # it has no shape
        if not got.is_nested:
            return "a tensor instead of a nested one"
        return differ(got.unbind(), want.unbind(), exact)
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    if got.requires_grad != want.requires_grad:
        return f"requires_grad {got.requires_grad} instead of {want.requires_grad}"
    if not values_equal(got.detach(), want.detach(), exact):
        return f"values {got.detach().tolist()} instead of {want.detach().tolist()}"
    return None


def values_equal(got: Tensor, want: Tensor, exact: bool, rate: float = 0.0) -> bool:
    """Whether two tensors agree, to the rounding of their dtype or to a coarser rate."""
    if not (got.is_floating_point() or got.is_complex()):
        return torch.equal(got, want)
    equal = (got == want) | ((got != got) & (want != want))
    if got.is_complex():  # a sum of infinities is one thing or another, by the order of operands
        equal |= ~torch.isfinite(got) & ~torch.isfinite(want)
    if bool(equal.all()):
        return True
    rate = max(rate, TOLERANCE.get(got.dtype, 0.0))
    return not exact and torch.allclose(got, want, rtol=rate, atol=rate, equal_nan=True)


def differ(got: object, want: object, exact: bool = True) -> str | None:
    """Say how a result differs from what it should be."""
    if isinstance(want, Plain):
        if isinstance(got, Plain):
            return plains_differ(got, want, exact, ())
        if not isinstance(got, TensorDictBase):
            return f"a {type(got).__name__} instead of a container"
        if isinstance(got, LazyStackedTensorDict):
            mismatch = [m.batch_size for m in members_of(got)]
            if len(mismatch) != got.batch_size[got.stack_dim]:
                return "members and batch size of a stack do not agree"
        return plains_differ(read(got), want, exact, ())
    if isinstance(want, Tensor):
        return tensors_differ(got, want, exact)
    if isinstance(want, (tuple, list)):
        if not isinstance(got, (tuple, list)) or len(got) != len(want):
            return f"{got!r} instead of {len(want)} results"
        for i, (mine, theirs) in enumerate(zip(got, want, strict=True)):
            found = differ(mine, theirs, exact)
            if found:
                return f"result {i}: {found}"
        return None
    if isinstance(want, dict):
        if not isinstance(got, dict) or list(got) != list(want):
            return f"{got!r} instead of {want!r}"
        return next(filter(None, (differ(got[key], want[key], exact) for key in want)), None)
    if isinstance(want, Data):
        same = isinstance(got, NonTensorDataBase) and want.agrees(got, tuple(got.batch_size))
        return None if same else f"{got!r} instead of {want!r}"
    alike = type(got) is type(want)
    if isinstance(got, NonTensorDataBase) and isinstance(
        want, NonTensorDataBase
    ):  # compared by `==` row by row
        alike = alike and got.batch_size == want.batch_size
        return None if alike and bool((got == want).all()) else f"{got!r} instead of {want!r}"
    return None if alike and got == want else f"{got!r} instead of {want!r}"


def plains_differ(got: Plain, want: Plain, exact: bool, path: Path) -> str | None:
    where = f" at {path}" if path else ""
    if got.batch != want.batch:
        return f"batch_size {got.batch} instead of {want.batch}{where}"
    if list(got.entries) != list(want.entries):
        if sorted(got.entries) == sorted(want.entries):
            return f"keys in the order {list(got.entries)} instead of {list(want.entries)}{where}"
        return f"keys {list(got.entries)} instead of {list(want.entries)}{where}"
    for key, value in want.entries.items():
        mine, below = got.entries[key], (*path, key)
        if isinstance(value, Plain):
            found = (
                plains_differ(mine, value, exact, below)
                if isinstance(mine, Plain)
                else f"no container at {below}"
            )
        elif isinstance(value, Data):
            same = isinstance(mine, Found) and value.agrees(mine.found, want.batch)
            found = None if same else f"{mine!r} instead of {value!r} at {below}"
        else:
            found = tensors_differ(mine, value, exact)
            found = found and f"{found} at {below}"
        if found:
            return found
    return None


def fingerprint(node: Node) -> list[object]:
    """Return all that must stay where a call is refused, or makes something new."""
    found: list[object] = []
    for leaf in node.tensors():
        found.append((id(leaf), leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.requires_grad))
        found.append(leaf.detach().clone())
    return found


def fingerprints_differ(before: Sequence[object], after: Sequence[object]) -> bool:
    for old, new in zip(before, after, strict=True):
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            if not values_equal(old, new, exact=True):
                return True
        elif old != new:
            return True
    return False


def structure(td: TensorDictBase, node: Node, path: Path = ()) -> str | None:
    """Say where a container no longer holds the very tensors it was built from."""
    if tuple(td.batch_size) != node.batch:
        return f"the batch size of {path} became {tuple(td.batch_size)}"
    if node.members:
        if not isinstance(td, LazyStackedTensorDict):
            return f"{path} is no stack any more"
        for row, (member, inner) in enumerate(zip(members_of(td), node.members, strict=True)):
            found = structure(member, inner, (*path, f"[{row}]"))
            if found:
                return found
        return None
    if list(td.keys()) != list(node.entries):
        return f"the keys of {path} became {list(td.keys())}"
    for key, value in node.entries.items():
        mine: object = dict(td.items())[key]  # `get` of a tensor class unwraps
        if isinstance(value, Tensor) and mine is not value:
            return f"{(*path, key)} is another tensor"
        if isinstance(value, Data) and not value.agrees(mine, node.batch):
            return f"{(*path, key)} became {mine!r}"
        if isinstance(value, Node):
            found = structure(cast("TensorDictBase", mine), value, (*path, key))
            if found:
                return found
    return None
