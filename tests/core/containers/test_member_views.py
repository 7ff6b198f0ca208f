"""What torch makes a view is a lazy stack of views of the members: writes reach them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch

from kd_core import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack

View: TypeAlias = Callable[[TensorDictBase], TensorDictBase]

VIEWS: dict[str, View] = {
    "unsqueeze(0)": lambda td: td.unsqueeze(0),
    "unsqueeze(-1)": lambda td: td.unsqueeze(-1),
    "[None]": lambda td: td[None],
    "[:, None]": lambda td: td[:, None],
    "squeeze(0)": lambda td: td.unsqueeze(0).squeeze(0),
    "permute": lambda td: td.permute(1, 0),
    "transpose": lambda td: td.transpose(0, 1),
    "movedim": lambda td: td.movedim(0, 1),
    "view(-1)": lambda td: td.view(-1),
    "view(3, 2)": lambda td: td.view(3, 2),
    "view(2, 3, 1)": lambda td: td.view(2, 3, 1),
    "reshape(1, 2, 3)": lambda td: td.reshape(1, 2, 3),
    "unflatten(0)": lambda td: td.unflatten(0, (2, 1)),
    "unflatten(1)": lambda td: td.unflatten(1, (3, 1)),
    "expand": lambda td: td.expand(4, 2, 3),
    "flatten(1, 1)": lambda td: td.flatten(1, 1),
    "narrow": lambda td: td.narrow(0, 0, 2),
}


def members(dim: int) -> list[TensorDict]:
    shape = (3,) if dim == 0 else (2,)
    count = 2 if dim == 0 else 3
    return [
        TensorDict({"a": torch.zeros(shape), "n": {"x": torch.zeros(*shape, 2)}}, shape)
        for _ in range(count)
    ]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", VIEWS)
def test_writes_through_a_view_reach_the_members(name: str, dim: int) -> None:
    rows = members(dim)
    view = VIEWS[name](lazy_stack(rows, dim))
    assert isinstance(view, LazyStackedTensorDict)
    dense = VIEWS[name](lazy_stack(members(dim), dim).contiguous())
    assert view.batch_size == dense.batch_size
    view.set_("a", torch.ones(view.batch_size))
    view.set_(("n", "x"), torch.full((*view.batch_size, 2), 2.0))
    for row in rows:
        assert row["a"].unique().tolist() == [1.0]
        assert row["n", "x"].unique().tolist() == [2.0]


@pytest.mark.parametrize("name", VIEWS)
def test_a_stack_inside_a_container_is_seen_through_too(name: str) -> None:
    rows = members(0)
    td = TensorDict({"b": torch.zeros(2, 3), "s": lazy_stack(rows)}, [2, 3])
    view = VIEWS[name](td)
    assert isinstance(view["s"], LazyStackedTensorDict)  # type: ignore[unreachable]  # types say less than the run
    view.set_(("s", "a"), torch.ones(view.batch_size))  # type: ignore[unreachable]  # types say less than the run
    assert [row["a"].sum() for row in rows] == [3, 3]


def test_an_entry_of_one_row_is_that_of_the_member() -> None:
    rows = [TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(2))]
    lazy_stack(rows).unsqueeze(0)[0, 0]["a"].fill_(1)
    assert rows[0]["a"].tolist() == [1, 1]
    assert rows[1]["a"].tolist() == [0, 0]


@pytest.mark.parametrize("flatten", [lambda td: td.reshape(-1), lambda td: td.flatten()])
def test_all_rows_in_one_dimension_are_views(flatten: View) -> None:
    rows = members(0)
    flat = flatten(lazy_stack(rows))
    assert isinstance(flat, LazyStackedTensorDict)
    assert flat.batch_size == (6,)
    flat.zero_().add_(1)
    assert rows[0]["a"].sum() == 3


def test_with_keeps_the_storage_of_what_did_not_change() -> None:
    rows = members(0)
    before = [row["n", "x"] for row in rows]
    stack = lazy_stack(rows)
    with stack.transpose(0, 1) as view:
        view["a"] = view["a"] + 1
        view["b"] = torch.arange(6.0).reshape(3, 2)
    assert [row["a"].tolist() for row in rows] == [[1, 1, 1], [1, 1, 1]]
    assert [row["b"].tolist() for row in rows] == [[0, 2, 4], [1, 3, 5]]
    assert all(row["n", "x"] is leaf for row, leaf in zip(rows, before, strict=True))


def test_strides_that_allow_no_view_are_copied_by_reshape() -> None:
    rows = [TensorDict({"a": torch.arange(6.0).reshape(3, 2).t()}, [2, 3]) for _ in range(2)]
    stack = lazy_stack(rows)
    assert stack.reshape(2, 6)["a"].tolist() == stack.contiguous().reshape(2, 6)["a"].tolist()
    with pytest.raises(RuntimeError, match="reshape"):
        stack.view(2, 6)
