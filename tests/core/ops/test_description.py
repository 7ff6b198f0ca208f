"""Batch size and device: reading and setting them."""

import pytest
import torch
from tests.core.kinds import inner

from kd_core import (
    InvalidValue,
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    OutOfRange,
    ShapeMismatch,
    TensorDict,
    lazy_stack,
)


def make() -> TensorDict:
    return TensorDict({"a": torch.zeros(3, 4, 5), "n": {"b": torch.zeros(3, 4)}}, [3])


def test_sizes_are_told_in_the_words_of_tensors() -> None:
    td = TensorDict({}, [3, 4])
    assert td.shape == td.batch_size == td.size() == torch.Size([3, 4])
    assert td.size(1) == td.size(-1) == 4
    assert td.ndim == td.dim() == td.batch_dims == td.ndimension() == 2
    assert td.numel() == 12
    assert TensorDict().numel() == 1
    assert len(td) == 3
    assert len(TensorDict()) == 0
    with pytest.raises(OutOfRange, match="2"):
        td.size(2)


def test_setting_the_batch_size_reaches_nested_containers() -> None:
    td = make()
    td.batch_size = [3, 4]
    assert inner(td, "n").batch_size == (3, 4)
    td.batch_size = []
    assert td.batch_size == ()
    assert inner(td, "n").batch_size == (3, 4)


def test_a_batch_size_that_does_not_fit_changes_nothing() -> None:
    td = make()
    for wrong in ([3, 4, 5], [2], [3, 5]):
        with pytest.raises(ShapeMismatch, match="must start with"):
            td.batch_size = wrong
    assert td.batch_size == inner(td, "n").batch_size == (3,)


def test_a_lock_does_not_cover_the_batch_size() -> None:
    td = make().lock_()
    td.batch_size = []
    assert td.batch_size == ()
    assert td.auto_batch_size_().batch_size == (3, 4)
    assert td.is_locked
    assert inner(td, "n").is_locked
    assert not td.unlock_().is_locked
    assert not inner(td, "n").is_locked


def test_the_batch_size_is_found() -> None:
    td = make().auto_batch_size_()
    assert td.batch_size == (3, 4)
    assert inner(td, "n").batch_size == (3, 4)
    assert make().auto_batch_size_(1).batch_size == (3,)
    assert make().auto_batch_size_(0).batch_size == ()
    with pytest.raises(InvalidValue, match="must be non-negative, got -1"):
        make().auto_batch_size_(-1)


def test_the_device_is_told() -> None:
    assert make().device is None
    assert TensorDict({}, device="cpu").device == torch.device("cpu")
    assert TensorDict({}, device="cpu")[None].device == torch.device("cpu")


@pytest.mark.parametrize("holder", ["itself", "another parent"])
def test_a_locked_child_follows_the_batch_size(holder: str) -> None:
    child = TensorDict({"b": torch.zeros(3, 2)}, [3])
    td = TensorDict({"a": torch.zeros(3, 2), "n": child}, [3])
    (child if holder == "itself" else TensorDict({"x": child}, [3])).lock_()
    td.batch_size = [3, 2]
    assert child.batch_size == (3, 2)
    assert child.is_locked


def test_the_batch_size_is_found_from_below() -> None:
    td = TensorDict(
        {"a": torch.zeros(2, 3, 4), "n": {"x": torch.zeros(2, 3, 4, 5)}}, [2, 3], names=["t", "e"]
    )
    td.auto_batch_size_()
    assert td.batch_size == (2, 3, 4)
    assert inner(td, "n").batch_size == (2, 3, 4, 5)
    assert td.names == ["t", "e", None]
    td.auto_batch_size_(1)
    assert td.batch_size == inner(td, "n").batch_size == (2,)
    assert TensorDict({}, [2]).auto_batch_size_(keep_compliant_size=True).batch_size == (2,)  # type: ignore[unreachable]  # types say less than the run


def test_shape_device_and_lock_are_assigned() -> None:
    td = make()
    td.shape = torch.Size([3])
    assert td.batch_size == (3,)
    td.is_locked = True
    assert inner(td, "n").is_locked
    td.is_locked = False
    assert not td.is_locked
    with pytest.raises(RuntimeError, match="Move the container with"):
        td.device = torch.device("cpu")


def test_a_locked_child_that_fits_stays() -> None:
    child = TensorDict({"b": torch.zeros(3, 2)}, [3, 2]).lock_()
    td = TensorDict({"a": torch.zeros(3, 2), "n": child}, [3])
    td.batch_size = [3, 2]
    assert inner(td, "n").batch_size == (3, 2)


def test_a_device_is_forgotten_and_found_again() -> None:
    td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2), "s": "x"}}, [2], device="cpu")
    assert td.clear_device_() is td
    assert td.device is inner(td, "n").device is None
    td["n", "c"] = torch.zeros(2, device="meta")
    assert td.auto_device_().device is None
    del td["n", "c"]
    assert td.auto_device_().device == inner(td, "n").device == torch.device("cpu")
    assert "NonTensorData" in repr(td.get(("n", "s")))


def test_a_lock_does_not_cover_the_device() -> None:
    td = TensorDict({"n": TensorDict({}, device="cpu").lock_()}, device="cpu")
    assert td.clear_device_().device is None
    assert inner(td, "n").is_locked


def test_members_of_a_stack_share_the_device() -> None:
    stacked = lazy_stack([TensorDict({"a": 0.0}), TensorDict({"a": 1.0})]).auto_device_()
    assert stacked.device == stacked[0].device == torch.device("cpu")


def test_data_alone_fits_any_batch_size() -> None:
    td = TensorDict({"word": "x"}, [3])
    td.batch_size = torch.Size([5, 2])
    assert td.batch_size == td.get("word").batch_size == (5, 2)  # type: ignore[union-attr]  # data


def test_values_of_rows_limit_the_batch_size() -> None:
    words = NonTensorStack.from_list([["a", "b"], ["c", "d"]], (2, 2))
    inner = TensorDict({"words": words, "x": torch.zeros(2, 2, 3)}, [2, 2])
    td = TensorDict({"inner": inner}, [2]).auto_batch_size_()
    assert td.batch_size == td.nested("inner", TensorDict).batch_size == (2, 2)


def test_a_stack_of_stacks_keeps_both_stacked_dimensions() -> None:
    rows = lazy_stack([TensorDict({"x": torch.zeros(3, 4)}) for _ in range(2)])
    assert lazy_stack([rows, rows.clone()]).auto_batch_size_().batch_size == (2, 2, 3, 4)


def test_a_stack_grows_with_the_words_of_its_members() -> None:
    members = [TensorDict({"n": {"word": word, "late": {}}}) for word in "xyz"]
    stack = lazy_stack(members)
    stack.batch_size = torch.Size([3, 2])
    assert stack.nested("n", LazyStackedTensorDict).batch_size == (3, 2)
    assert [member["n", "late"].shape for member in members] == [(2,)] * 3
    assert stack["n", "word"] == [["x", "x"], ["y", "y"], ["z", "z"]]


def test_a_nested_container_without_leaves_keeps_the_sizes_that_it_has() -> None:
    inner = TensorDict({"word": "x"}, [3, 2])
    td = TensorDict({"a": torch.zeros(3, 0), "n": inner}, [3]).auto_batch_size_()
    assert td.batch_size == (3,)
    assert td.nested("n", TensorDict).batch_size == (3, 2)


def test_the_first_dimensions_keep_their_names() -> None:
    td = TensorDict({"a": torch.zeros(3, 4, 5)}, [3, 4], names=["time", "env"])
    td.batch_size = [3, 4, 5]
    assert td.names == ["time", "env", None]
    td.batch_size = [3]
    assert td.names == ["time"]


def test_one_value_keeps_its_longer_batch_size_when_another_is_set() -> None:
    td = TensorDict({"a": torch.ones(2, 3), "s": "word", "n": {"t": "word"}}, [2, 3])
    td.batch_size = [2]
    for key in ("s", ("n", "t")):
        value: object = td.get(key)
        assert isinstance(value, NonTensorData)
        assert value.batch_size == (2, 3)
    row: object = td[0].get("s")
    assert isinstance(row, NonTensorData)
    assert row.batch_size == (3,)
    td.batch_size = []
    assert td["s"] == "word"


def test_one_value_takes_the_batch_size_that_is_inferred() -> None:
    td = TensorDict({"a": torch.ones(3, 2), "s": "word"}, [3, 2])
    value: object = td.auto_batch_size_(batch_dims=1).get("s")
    assert isinstance(value, NonTensorData)
    assert value.batch_size == (3,)


def test_a_nested_container_without_entries_takes_the_batch_size_of_those_before_it() -> None:
    td = TensorDict({"a": torch.zeros(3, 4), "n": {}, "m": {"deep": {}}}).auto_batch_size_()
    assert td.batch_size == (3, 4)
    levels = inner(td, "n"), inner(td, "m"), inner(inner(td, "m"), "deep")
    assert [level.batch_size for level in levels] == [(3, 4)] * 3
    first = TensorDict({"n": {}, "a": torch.zeros(3, 4)}).auto_batch_size_()
    assert first.batch_size == ()


def test_a_nested_container_that_takes_more_dimensions_keeps_its_device() -> None:
    child = TensorDict({"x": torch.zeros(3, 2)}, [], device="cpu")
    td = TensorDict({"n": child}, [3])
    grown = inner(td, "n")
    assert (grown.batch_size, grown.device, td.device) == ((3,), torch.device("cpu"), None)
