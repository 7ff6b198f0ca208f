"""Random containers that tests of formats share."""

from typing import Any, cast

import torch
from hypothesis import strategies as st
from torch import Tensor

from kd_core import NestedKey, NonTensorStack, TensorDict, TensorDictBase
from kd_core._protocol import AbstractContainer

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
)
ODD_KEYS = st.text(max_size=4) | st.sampled_from(["", ".", "a.b", "a/b", "[0]", "..", "%", "key"])
WORDS = st.text(max_size=5) | st.none() | st.integers(-5, 5) | st.lists(st.integers(), max_size=2)


def leaf(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return values of a dtype, among them some that are not finite."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 3
    if dtype.is_complex:
        return torch.complex(values, values.flip(0) if shape else values).to(dtype)
    if dtype.is_floating_point:
        if values.numel() > 2 and dtype is not torch.float8_e4m3fn:
            values.view(-1)[0], values.view(-1)[1] = float("nan"), float("inf")
        return values.to(dtype)
    return values.abs().to(dtype)


@st.composite
def containers(
    draw: st.DrawFn,
    keys: st.SearchStrategy[str] = ODD_KEYS,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    words: st.SearchStrategy[Any] = WORDS,
    min_dims: int = 0,
    max_dims: int = 2,
    data: bool = True,
) -> TensorDict:
    """Draw nested containers with leaves of many dtypes, and data per batch and per row."""
    batch = tuple(draw(st.lists(st.integers(0, 3), min_size=min_dims, max_size=max_dims)))
    return draw(_level(batch, keys, dtypes, words, data, 2))


@st.composite
def _level(
    draw: st.DrawFn,
    batch: tuple[int, ...],
    keys: st.SearchStrategy[str],
    dtypes: tuple[torch.dtype, ...],
    words: st.SearchStrategy[Any],
    data: bool,
    depth: int,
) -> TensorDict:
    td = TensorDict({}, batch)
    for key in draw(st.lists(keys, max_size=3, unique=True)):
        kind = draw(st.sampled_from(["leaf", "leaf", "level", *(["word", "rows"] if data else [])]))
        if kind == "level" and depth:
            inner = (*batch, *draw(st.lists(st.integers(1, 2), max_size=1)))
            td[key] = draw(_level(inner, keys, dtypes, words, data, depth - 1))
        elif kind == "word":
            td[key] = draw(words.filter(lambda word: not isinstance(word, (int, list))))
        elif kind == "rows" and len(batch) == 1 and batch[0]:
            rows = draw(st.lists(words, min_size=batch[0], max_size=batch[0]))
            td[key] = NonTensorStack(*rows)
        else:
            shape = (*batch, *draw(st.lists(st.integers(0, 2), max_size=2)))
            td[key] = leaf(shape, draw(st.sampled_from(dtypes)), draw(st.integers(0, 99)))
    return td


def assert_same(actual: TensorDictBase, expected: TensorDictBase) -> None:
    """Assert that two containers are equal: keys, batch sizes, dtypes, bits and data."""
    _compare(actual, expected, ())


def _compare(actual: AbstractContainer, expected: AbstractContainer, path: NestedKey) -> None:
    assert actual._kd_desc.batch == expected._kd_desc.batch, path
    assert set(actual._kd_entries) == set(expected._kd_entries), path
    for key, value in expected._kd_entries.items():
        found = actual._kd_entries[key]
        where = cast("NestedKey", (*path, key))
        if isinstance(value, AbstractContainer):
            assert isinstance(found, AbstractContainer), where
            _compare(found, value, where)
        elif isinstance(value, Tensor):
            assert isinstance(found, Tensor), where
            assert found.dtype == value.dtype, where
            assert found.shape == value.shape, where
            wide = value.to(torch.complex128 if value.is_complex() else torch.float64)
            assert torch.equal(found.to(wide.dtype).nan_to_num(7), wide.nan_to_num(7)), where
        else:
            assert not isinstance(found, Tensor), where
            assert type(found) is type(value), where
            assert _are_equal(found._kd_item(), value._kd_item()), where


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether values are equal, tensors inside of them too."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return [*one] == [*other] and _are_equal([*one.values()], [*other.values()])
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return bool(one == other)
