"""Ragged entries are read as lists, padded, or as nested tensors."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kd_core import (
    InvalidArgument,
    InvalidValue,
    LazyStackedTensorDict,
    NestedKey,
    NonTensorStack,
    ShapeMismatch,
    TensorDict,
    cat,
    lazy_stack,
    stack,
)


def ragged(dim: int = 0) -> LazyStackedTensorDict:
    rows = [TensorDict({"a": torch.ones(n, 2), "n": {"b": torch.full((n,), n)}}) for n in (1, 3)]
    return lazy_stack(rows, dim)


def test_a_list_has_the_entry_of_each_member() -> None:
    stack = ragged()
    assert [tuple(row.shape) for row in stack.get("a", as_list=True)] == [(1, 2), (3, 2)]
    assert [row.tolist() for row in stack.get(("n", "b"), as_list=True)] == [[1], [3, 3, 3]]
    assert stack.get("a", as_list=True)[0] is stack[0]["a"]
    nested: list[object] = [*lazy_stack([stack, stack]).get("a", as_list=True)]
    assert isinstance(nested[1], list)
    words = lazy_stack([TensorDict(w="x"), TensorDict(w="y")])
    assert words["w"] == ["x", "y"]
    for option in ("as_list", "as_padded_tensor", "as_nested_tensor"):  # what is no tensor
        options: Any = {option: True}
        found: Any = words.get("w", **options)
        assert type(found) is NonTensorStack
        assert found.tolist() == ["x", "y"]
        below: Any = stack.get("n", **options)
        assert below.get("b", as_list=True)[1] is stack[1]["n", "b"]


def test_padding_reaches_the_longest_row() -> None:
    stack = ragged()
    padded = stack.get("a", as_padded_tensor=True, padding_value=-1)
    assert padded.shape == (2, 3, 2)
    assert padded[0].tolist() == [[1, 1], [-1, -1], [-1, -1]]
    left = stack.get(("n", "b"), as_padded_tensor=True, padding_side="left")
    assert left.tolist() == [[0, 0, 1], [3, 3, 3]]
    deep = lazy_stack([stack, ragged()], 1).get(("n", "b"), as_padded_tensor=True)
    assert deep.shape == (2, 2, 3)
    columns = lazy_stack([TensorDict({"a": torch.ones(2, n)}, [2]) for n in (1, 3)], 1)
    assert columns.get("a", as_padded_tensor=True).shape == (2, 2, 3)


def test_nested_tensors_keep_the_lengths() -> None:
    nested = ragged().get("a", as_nested_tensor=True)
    assert nested.is_nested
    assert nested.layout is torch.jagged
    assert [row.shape[0] for row in nested.unbind(0)] == [1, 3]
    assert ragged().get_nestedtensor(("n", "b")).is_nested


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"as_list": True, "as_padded_tensor": True}, InvalidArgument, "cannot be combined"),
        ({"as_padded_tensor": True, "padding_side": "up"}, InvalidArgument, '"left" or "right"'),
    ],
)
def test_options_are_checked(
    options: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        ragged().get("a", **options)  # type: ignore[call-overload]  # wrong on purpose


def test_entries_that_cannot_be_padded_or_nested_are_named() -> None:
    stack = lazy_stack([TensorDict({"a": torch.ones(2)}), TensorDict({"a": torch.ones(2, 2)})])
    with pytest.raises(ShapeMismatch, match=r"entry `a` must have the same number of dimensions"):
        stack.get("a", as_padded_tensor=True)
    mixed = lazy_stack([TensorDict({"a": torch.ones(2)}), TensorDict({"a": {"b": 1}})])
    with pytest.raises(InvalidValue, match="entry `a` must be a tensor in every member"):
        mixed.get("a", as_padded_tensor=True)
    columns = lazy_stack([TensorDict({"a": torch.ones(2, n)}, [2]) for n in (1, 3)], 1)
    with pytest.raises(InvalidValue, match="a stack along dimension 1"):
        columns.get("a", as_nested_tensor=True)
    two = lazy_stack([TensorDict({"a": torch.ones(1, 2)}), TensorDict({"a": torch.ones(2, 3)})])
    with pytest.raises(ShapeMismatch, match=r"entry `a` cannot be a nested tensor of shapes"):
        two.get_nestedtensor("a", layout=torch.jagged)


def test_a_missing_key_gives_the_default() -> None:
    stack = ragged()
    assert stack.get("x", as_list=True) is None
    assert stack.get_nestedtensor("x", 3) == 3
    assert stack.get_nestedtensor("x", None) is None
    assert stack.get("x") is None


@pytest.mark.parametrize("key", ["x", "part", ("n", "x")])
def test_a_nested_tensor_of_a_missing_key_is_refused(key: NestedKey) -> None:
    stack = ragged()
    stack[0]["part"] = torch.zeros(1)
    with pytest.raises(KeyError, match="not found"):
        stack.get_nestedtensor(key)


def test_a_stack_is_made_dense_with_nested_tensors() -> None:
    stack = lazy_stack([TensorDict({"a": torch.ones(n), "b": 1.0, "s": "x"}) for n in (1, 3)])
    dense = stack.densify()
    assert type(dense) is TensorDict
    assert dense["a"].is_nested
    assert dense["b"].tolist() == [1, 1]
    assert dense.get_non_tensor("s") == ["x", "x"]
    assert ragged().densify()["n", "b"].is_nested
    padded = dense.to_padded_tensor(-1, mask_key="real")
    assert padded["a"].tolist() == [[1, -1, -1], [1, 1, 1]]
    assert padded["real"].tolist() == [[True, False, False], [True] * 3]


def test_a_dense_container_becomes_a_stack() -> None:
    td = TensorDict({"a": torch.arange(6).view(2, 3), "n": {"s": ["x", "y"]}}, [2])
    stack = td.to_lazystack()
    assert isinstance(stack, LazyStackedTensorDict)
    assert stack[1]["a"].data_ptr() == td["a"][1].data_ptr()
    assert stack.get_non_tensor(("n", "s")) == ["x", "y"]
    assert stack.to_lazystack() is stack
    assert stack.densify()["a"].tolist() == td["a"].tolist()
    with pytest.raises(IndexError):
        td.to_lazystack(1)


def test_the_state_of_a_ragged_stack_is_that_of_its_members() -> None:
    td = TensorDict({"s": ragged(), "x": torch.zeros(2)}, [2])
    file = io.BytesIO()
    torch.save((td * 2).state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    td.load_state_dict(state)
    stack: object = td.get("s")
    assert isinstance(stack, LazyStackedTensorDict)
    assert [row.tolist() for row in stack.get(("n", "b"), as_list=True)] == [[2], [6, 6, 6]]
    other = TensorDict({"s": 0.0}).load_state_dict(state, assign=True)
    assert other.batch_size == (2,)
    again = ragged()
    again.load_state_dict((ragged() * 3).state_dict(), assign=True)
    assert again.get(("n", "b"), as_list=True)[0].tolist() == [3]
    with pytest.raises(ShapeMismatch, match="2 members stacked along dimension 0"):
        TensorDict({"a": torch.zeros(2)}, [2]).load_state_dict(ragged().state_dict())


def test_the_batch_size_of_a_ragged_stack_is_inferred() -> None:
    stack = lazy_stack([TensorDict({"a": torch.ones(2, n)}) for n in (1, 3)])
    assert stack.auto_batch_size_().batch_size == (2, 2)
    assert stack[0].batch_size == (2,)
    assert stack.auto_batch_size_(1).batch_size == (2,)
    last = lazy_stack([TensorDict({"a": torch.ones(2, n)}, [2]) for n in (1, 3)], 1)
    assert last.auto_batch_size_().batch_size == (2, 2)
    with pytest.raises(InvalidValue, match="larger than the stacked dimension 1"):
        last.auto_batch_size_(1)
    mixed = lazy_stack([TensorDict({"a": torch.ones(2)}, [2])], 1)
    mixed.unbind(1)[0]["b"] = torch.zeros(2)
    assert mixed.auto_batch_size_().batch_size == (2, 1)


def test_a_ragged_stack_is_shown() -> None:
    assert "ragged" in repr(ragged())
    assert isinstance(ragged()._repr_html_(), str)


def test_entries_are_typed() -> None:
    rows: list[Tensor] = ragged().get("a", as_list=True)
    padded: Tensor = ragged().get("a", as_padded_tensor=True)
    assert len(rows) == len(padded)


def test_views_give_what_comes_before_a_ragged_entry() -> None:
    td = TensorDict(first=torch.zeros(2), inner=ragged(), batch_size=[2])
    assert any(isinstance(value, LazyStackedTensorDict) for value in td.values(True))
    assert next(key for key, _ in td.items(True) if key == "inner") == "inner"
    for view in (td.values(True), td.items(True)):
        with pytest.raises(ShapeMismatch, match="entry `a` is ragged"):
            list(view)


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("Failed to stack tensors within a tensordict", lambda rows: lazy_stack(rows).get("a")),
        ("The shapes of the tensors to stack is incompatible", stack),
        (
            "The sets of keys in the tensordicts to stack are exclusive",
            lambda rows: stack([rows[0], TensorDict()]),
        ),
        ("Sizes of tensors must match", lambda rows: cat([row[None] for row in rows])),
    ],
)
def test_libraries_tell_by_its_first_words_what_an_error_means(
    words: str, call: Callable[[list[TensorDict]], object]
) -> None:
    """TorchRL reads these words of tensordict, and the last ones of torch."""
    rows = [TensorDict({"a": torch.ones(n, 2)}) for n in (1, 3)]
    with pytest.raises(RuntimeError, match=f"^{words}: .*`a`"):
        call(rows)


def test_a_key_that_goes_on_below_a_ragged_entry_is_not_there() -> None:
    stack = ragged()
    for key in (("a", "b"), ("n", "b", "c")):
        assert key not in stack.keys(True)
        assert key not in stack
    assert ("n", "b") in stack.keys(True)
