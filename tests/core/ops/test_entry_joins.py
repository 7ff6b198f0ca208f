"""Entries of one container joined to one."""

import pytest
import torch

from kd_core import (
    InvalidArgument,
    InvalidValue,
    KeyNotFound,
    Locked,
    ShapeMismatch,
    TensorDict,
)


def make() -> TensorDict:
    return TensorDict({"b": torch.zeros(2, 3), "n": {"a": torch.ones(2, 3)}, "s": "text"}, [2])


def test_leaves_become_one_entry() -> None:
    td = make()
    assert td.stack_tensors("b", ("n", "a"), out_key=("n", "c"), dim=1) is td
    assert td["n", "c"].shape == (2, 2, 3)
    assert set(td.keys(True)) == {"n", ("n", "c"), "s"}
    td = make().cat_tensors("b", ("n", "a"), out_key="b", dim=-1, keep_entries=True)
    assert td["b"].shape == (2, 6)
    assert ("n", "a") in td


def test_a_join_that_does_not_fit_changes_nothing() -> None:
    td = make()
    keys, b = list(td.keys(True)), td["b"]
    with pytest.raises(ShapeMismatch, match="batch_size"):
        td.cat_tensors("b", ("n", "a"), out_key="c", dim=0)
    with pytest.raises(KeyNotFound):
        td.stack_tensors("b", "z", out_key="c")
    with pytest.raises(InvalidArgument, match="entry `s` must be a tensor"):
        td.stack_tensors("b", "s", out_key="c")
    with pytest.raises(InvalidValue, match="cannot join leaves of shapes"):
        td.set("d", torch.ones(2)).stack_tensors("b", "d", out_key="c", dim=-1)
    with pytest.raises(InvalidValue, match="got none"):
        td.stack_tensors(out_key="c")
    with pytest.raises(Locked):
        td.lock_().stack_tensors("b", ("n", "a"), out_key="c", dim=-1)
    assert list(td.keys(True)) == [*keys, "d"]
    assert td["b"] is b


def test_all_leaves_become_one_tensor() -> None:
    td = make()
    assert td.stack_from_tensordict().tolist() == torch.stack([td["b"], td["n", "a"]]).tolist()
    assert td.cat_from_tensordict(1).shape == (2, 6)
    assert td.stack_from_tensordict(-1, sorted=[("n", "a"), "b"])[0, 0].tolist() == [1, 0]
    assert td.set("a", torch.full((2, 3), 5.0)).cat_from_tensordict(sorted=True)[0, 0] == 5
    out = torch.empty(4, 3)
    assert td.exclude("a").cat_from_tensordict(out=out) is out
    with pytest.raises(InvalidValue, match="without tensors"):
        TensorDict().stack_from_tensordict()
