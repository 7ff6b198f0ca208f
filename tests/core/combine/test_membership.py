"""Rows that are in another container, and rows without duplicates."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kd_core import InvalidArgument, ShapeMismatch, TensorDict, isin, lazy_stack, remove_duplicates

ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=6)


def table(rows: list[tuple[int, int]]) -> TensorDict:
    ids = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 2)
    return TensorDict({"n": {"id": ids}, "x": torch.arange(len(rows))}, [len(rows)])


@settings(max_examples=60, deadline=None)
@given(ROWS, ROWS)
def test_rows_are_found_as_python_finds_them(rows: list, others: list) -> None:  # type: ignore[type-arg]  # rows
    found = isin(table(rows), table(others), ("n", "id"))
    assert found.tolist() == [row in others for row in rows]


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_the_first_of_equal_rows_stays(rows: list) -> None:  # type: ignore[type-arg]  # rows
    unique, indices = remove_duplicates(table(rows), ("n", "id"), return_indices=True)
    wanted = list(dict.fromkeys(rows))
    assert [tuple(row) for row in unique["n", "id"].tolist()] == wanted
    assert unique["x"].tolist() == [rows.index(row) for row in wanted]
    assert indices.tolist() == [wanted.index(row) for row in rows]


def test_another_batch_dimension_has_the_rows() -> None:
    td = TensorDict({"id": torch.tensor([[1, 2, 1], [3, 4, 3]])}, [2, 3])
    assert remove_duplicates(td, "id", dim=1)["id"].tolist() == [[1, 2], [3, 4]]
    assert isin(td, td[:, 1:], "id", dim=-1).tolist() == [True, True, True]


def test_stacks_and_rows_without_elements() -> None:
    td = lazy_stack(
        [TensorDict({"id": 1, "x": torch.zeros(2)}), TensorDict({"id": 1, "x": torch.ones(2)})]
    )
    assert remove_duplicates(td, "id")["x"].tolist() == [[0, 0]]
    empty = TensorDict({"id": torch.zeros(3, 0)}, [3])
    assert remove_duplicates(empty, "id").batch_size == (1,)
    assert isin(empty, empty[:1], "id").all()
    assert not isin(empty, empty[:0], "id").any()


def test_rows_of_other_shapes_and_data_are_refused() -> None:
    td = TensorDict({"id": torch.zeros(2, 3), "s": "word"}, [2])
    with pytest.raises(ShapeMismatch, match=r"rows of entry `id` .* got \(3,\) and \(\)"):
        isin(td, TensorDict({"id": torch.zeros(2)}, [2]), "id")
    with pytest.raises(InvalidArgument, match="entry `s` must be a tensor"):
        remove_duplicates(td, "s")
    with pytest.raises(IndexError):
        remove_duplicates(td, "id", dim=1)
