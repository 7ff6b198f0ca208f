"""What every operation on batch dimensions must do, said by an index tensor.

An operation that only moves rows does to a container what it does to a tensor of row numbers, with
the rows of each leaf in the place of the numbers. That needs no second implementation to compare
with, and holds for leaves of any rank and nested containers with more batch dimensions.
"""

import math
from typing import cast

import torch
from torch import Tensor

from kd_core import (
    LazyStackedTensorDict,
    NestedKey,
    NonTensorDataBase,
    TensorDict,
    TensorDictBase,
    UnbatchedTensor,
)

BATCH = (2, 1, 3)


def container(batch: tuple[int, ...] = BATCH) -> TensorDict:
    """A container of leaves of several ranks, nested ones, larger ones, an empty one, and data."""
    if 0 in batch:  # an empty list would be a tensor
        rows = container(tuple([max(size, 1) for size in batch]))
        return rows[tuple([slice(size) for size in batch])].clone()
    inner = TensorDict({"wide": _leaf(batch, 5, 2)}, (*batch, 5))
    return TensorDict(
        {
            "bare": _leaf(batch),
            "row": _leaf(batch, 4),
            "image": _leaf(batch, 2, 2),
            "nested": {"flag": _leaf(batch) % 2 == 0, "deep": {"row": _leaf(batch, 3)}},
            "inner": inner,
            "empty": {},
            "word": "text",
            "name": names(_leaf(batch)),
            "fixed": UnbatchedTensor(_leaf((3, 2))),
        },
        batch,
    )


def names(rows: Tensor) -> object:
    """One value for each row: its number as a string."""
    if rows.ndim:
        return [names(row) for row in rows.unbind(0)]
    return str(int(rows))


def _leaf(batch: tuple[int, ...], *trailing: int) -> Tensor:
    shape = (*batch, *trailing)
    return torch.arange(math.prod(shape)).reshape(shape)


def lazy_container(batch: tuple[int, ...] = BATCH) -> LazyStackedTensorDict:
    """The same rows, held by members along the second dimension."""
    return LazyStackedTensorDict(*container(batch).unbind(1), stack_dim=1)


def numbers(batch: tuple[int, ...] = BATCH) -> Tensor:
    """The number of each row."""
    return _leaf(batch)


def assert_rows(got: TensorDictBase, source: TensorDictBase, rows: Tensor) -> None:
    """Check that each leaf of `got` holds the given rows of `source`'s leaf."""
    assert got.batch_size == rows.shape
    assert not got.is_locked
    assert set(got.keys(True)) == set(source.keys(True))
    _assert_entries(got.to_dict(), source.to_dict(), rows, len(source.batch_size))
    _assert_batches(got, source, rows)
    assert set(_flat(got["word"])) <= {"text"}
    assert torch.equal(got["fixed"], source["fixed"])
    fixed = cast("object", got.get("fixed"))
    assert isinstance(fixed, UnbatchedTensor)
    assert fixed.batch_size == rows.shape
    word = cast("object", got.get("word"))
    assert isinstance(word, NonTensorDataBase)
    assert word.batch_size == rows.shape
    assert got.get_non_tensor("name") == names(rows)


def _flat(values: object) -> list[object]:
    """Return the values of nested lists in one list."""
    if not isinstance(values, list):
        return [values]
    return [value for part in values for value in _flat(part)]


def _assert_entries(
    got: dict[str, object], source: dict[str, object], rows: Tensor, ndim: int
) -> None:
    for key, entry in source.items():
        other = got[key]
        if key == "fixed":
            continue  # it has no rows
        if isinstance(entry, Tensor):
            assert isinstance(other, Tensor)
            flat = entry.flatten(0, ndim - 1) if ndim else entry[None]
            torch.testing.assert_close(other, flat[rows], rtol=0, atol=0)
        elif isinstance(entry, dict):
            assert isinstance(other, dict)
            _assert_entries(other, entry, rows, ndim)


def _assert_batches(got: TensorDictBase, source: TensorDictBase, rows: Tensor) -> None:
    ndim = len(source.batch_size)
    for key in ("nested", ("nested", "deep"), "inner", "empty"):
        old, new = _container_at(source, key), _container_at(got, key)
        assert new.batch_size == rows.shape + old.batch_size[ndim:]


def _container_at(td: TensorDictBase, key: NestedKey) -> TensorDictBase:
    entry = cast("object", td.get(key))
    assert isinstance(entry, TensorDictBase)
    return entry
