"""`get_at`, and entries of lazy stacks that are read below other containers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kd_core import (
    InvalidArgument,
    LazyStackedTensorDict,
    ShapeMismatch,
    TensorClass,
    TensorDict,
    lazy_stack,
)

WAYS: list[dict[str, Any]] = [
    {"as_list": True},
    {"as_padded_tensor": True},
    {"as_padded_tensor": True, "padding_value": 7.0, "padding_side": "left"},
    {"as_nested_tensor": True},
    {"as_nested_tensor": True, "layout": torch.jagged},
]


class Pair(TensorClass):
    """A field that holds a container."""

    inner: TensorDict
    own: Tensor


def ragged() -> LazyStackedTensorDict:
    rows = [{"a": torch.arange(n) + 1.0, "n": {"b": torch.ones(n, 2) * n}} for n in (1, 3, 2)]
    return lazy_stack([TensorDict(row) for row in rows])


def same(one: object, other: object) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    assert isinstance(one, Tensor)
    assert isinstance(other, Tensor)
    if one.is_nested:
        return same(list(one.unbind()), list(other.unbind()))
    return torch.equal(one, other)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("key", ["a", ("n", "b")])
def test_a_stack_below_a_container_is_read_as_it_is(how: dict[str, Any], key: Any) -> None:
    stack = ragged()
    path = ("s", key)
    td = TensorDict({"s": stack, "d": torch.zeros(3)}, [3])
    wrapped = Pair(inner=td, own=torch.zeros(3), batch_size=[3])
    expected = stack.get(key, **how)
    assert same(td.get(path, **how), expected)
    assert same(wrapped.get(("inner", *path), **how), expected)
    assert same(TensorDict({"td": td}).get(("td", path), **how), expected)


@pytest.mark.parametrize("how", [how for how in WAYS if len(how) == 1])
@pytest.mark.parametrize("key", ["d", ("n", "d"), "s", "absent", ("n", "absent")])
def test_what_is_in_no_stack_is_returned_as_it_is(how: dict[str, Any], key: Any) -> None:
    leaf = torch.zeros(3)
    td = TensorDict({"s": ragged(), "d": leaf, "n": {"d": leaf}}, [3])
    assert td.get(key, **how) is td.get(key)
    assert td.get(key, 5, **how) is td.get(key, 5)


@pytest.mark.parametrize("how", [how for how in WAYS if len(how) == 1])
def test_a_missing_entry_of_a_stack_is_the_default(how: dict[str, Any]) -> None:
    td = TensorDict({"s": ragged()}, [3])
    assert td.get(("s", "absent"), 5, **how) == 5
    assert td.get_at(("s", "absent"), 0, 5, **how) == 5
    assert td.get_at(("s", "absent"), 0, **how) is None


def test_two_ways_at_once_are_refused() -> None:
    td = TensorDict({"s": ragged()}, [3])
    with pytest.raises(InvalidArgument, match="cannot be combined"):
        td.get(("s", "a"), as_padded_tensor=True, as_nested_tensor=True)
    with pytest.raises(InvalidArgument, match="cannot be combined"):
        td.get_at(("s", "a"), 0, as_padded_tensor=True, as_nested_tensor=True)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(
    "index", [slice(1, None), [2, 0], torch.tensor([1]), torch.tensor([True, False, True]), ...]
)
@pytest.mark.parametrize("key", ["a", ("n", "b")])
def test_rows_are_those_of_the_indexed_stack(how: dict[str, Any], index: Any, key: Any) -> None:
    stack = ragged()
    td = TensorDict({"s": stack, "d": torch.zeros(3)}, [3])
    rows = stack[index]
    expected = rows.get(key, **how)
    assert same(stack.get_at(key, index, **how), expected)
    assert same(
        td.get_at(("s", key) if isinstance(key, str) else ("s", *key), index, **how), expected
    )


@pytest.mark.parametrize("how", WAYS)
def test_one_row_is_a_tensor(how: dict[str, Any]) -> None:
    stack = ragged()
    td = TensorDict({"s": stack}, [3])
    assert stack.get_at("a", 1, **how) is stack[1]["a"]
    assert same(td.get_at(("s", "a"), -1, **how), stack[2]["a"])


def test_rows_of_alike_shapes_are_stacked() -> None:
    stack = ragged()
    assert stack.get_at("a", [1]).shape == (1, 3)
    with pytest.raises(ShapeMismatch, match="ragged"):
        stack.get_at("a", [0, 1])


def test_rows_of_dense_entries_are_those_of_the_tensor() -> None:
    td = TensorDict({"d": torch.arange(3), "n": {"d": torch.arange(3)}}, [3])
    for how in WAYS:
        assert td.get_at("d", [2, 1], **how).tolist() == [2, 1]
        assert td.get_at(("n", "d"), 0, **how).item() == 0
    assert td.get_at("n", 2)["d"].item() == 2  # type: ignore[index]  # typed as a tensor


def test_rows_of_a_stack_along_another_dimension() -> None:
    members = [TensorDict({"a": torch.full((2, n), float(n))}, [2]) for n in (1, 2)]
    stack = lazy_stack(members, 1)
    rows = stack.get_at("a", 1, as_list=True)
    assert [row.tolist() for row in rows] == [[1], [2, 2]]


def test_compiled_code_reads_below_a_container() -> None:
    td = TensorDict({"s": ragged(), "d": torch.zeros(3)}, [3])

    @torch.compile(fullgraph=True, backend="eager")
    def read(td: TensorDict) -> Tensor:
        found = td.get(("s", "a"), as_padded_tensor=True)
        assert found is not None
        return found + 1

    assert same(read(td), td["s"].get("a", as_padded_tensor=True) + 1)  # type: ignore[attr-defined]  # a stack
