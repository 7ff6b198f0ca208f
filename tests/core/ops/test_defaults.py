"""Functions of two containers whose keys differ."""

import pytest
import torch
from tools.operations import ARITHMETIC, LOGIC
from torch import Tensor

from kd_core import InvalidArgument, InvalidValue, KeySetMismatch, TensorDict, lazy_stack


def first() -> TensorDict:
    return TensorDict({"a": torch.tensor([1, 2]), "n": {"x": torch.tensor([3, 4])}}, [2])


def second() -> TensorDict:
    entries = {"a": torch.tensor([5, 6]), "b": torch.tensor([7, 8]), "n": {"y": torch.ones(2)}}
    return TensorDict(entries, [2])


def test_a_default_stands_for_what_either_side_lacks() -> None:
    got = first().sub(second(), default=10)
    assert got.to_dict().keys() == {"a", "n", "b"}
    assert got["a"].tolist() == [-4, -4]
    assert got["b"].tolist() == [3, 2]
    assert got["n", "x"].tolist() == [-7, -6]
    assert got["n", "y"].tolist() == [9.0, 9.0]


def test_intersection_keeps_the_shared_keys() -> None:
    got = first().mul(second(), default="intersection")
    assert list(got.keys(True, True)) == ["a"]
    assert got["a"].tolist() == [5, 12]


@pytest.mark.parametrize(
    "name",
    [row.name for row in (*ARITHMETIC, *LOGIC)] + ["rsub", "clamp_min", "clamp_max"],
)
def test_each_function_of_two_takes_a_default(name: str) -> None:
    dtype = torch.float32 if name in ("hypot", "logaddexp") else torch.int64
    mine = {"a": torch.tensor([1, 2], dtype=dtype), "own": torch.tensor([2, 3], dtype=dtype)}
    theirs = {"a": torch.tensor([2, 1], dtype=dtype)}
    got = getattr(TensorDict(mine, [2]), name)(TensorDict(theirs, [2]), default=2)
    fn = getattr(torch, name)
    assert torch.equal(got["a"], fn(mine["a"], theirs["a"]))
    assert torch.equal(got["own"], fn(mine["own"], torch.tensor(2, dtype=dtype)))


def test_a_default_promotes_as_the_number_would() -> None:
    got = TensorDict({"a": torch.ones(2, dtype=torch.int32)}).add(TensorDict(), default=1.5)
    assert got["a"].dtype is torch.float32
    got = TensorDict({"a": torch.ones(2, dtype=torch.float16)}).add(TensorDict(), default=1.5)
    assert got["a"].dtype is torch.float16


def test_further_arguments_are_kept() -> None:
    got = first().add(second(), alpha=10, default=0)
    assert got["a"].tolist() == [51, 62]
    assert got["b"].tolist() == [70, 80]


def test_entries_of_a_container_without_batch_are_expanded() -> None:
    got = first().add(TensorDict({"c": torch.ones(3)}), default=1)
    assert got["c"].shape == (2, 3)
    assert got.batch_size == (2,)


def test_members_of_a_stack_are_matched_one_by_one() -> None:
    members = [TensorDict({"a": torch.ones(n)}) for n in (2, 3)]
    others = [TensorDict({"a": torch.ones(n), "b": torch.ones(1)}) for n in (2, 3)]
    got = lazy_stack(members).add(lazy_stack(others), default=1)
    assert got[1]["a"].tolist() == [2.0, 2.0, 2.0]
    assert got["b"].tolist() == [[2.0], [2.0]]


def test_a_default_widens_no_more_in_a_stack_than_in_its_dense_reading() -> None:
    rows = lazy_stack([TensorDict({"a": torch.tensor(1.0)})] * 2)
    other, default = TensorDict({"b": torch.ones(2)}, [2]), torch.tensor(2.0, dtype=torch.float64)
    for td in (rows, rows.contiguous()):
        assert td.add(other, default=default)["a"].dtype is torch.float32
        holder = TensorDict({"inner": td}, [2])
        assert holder.add(other, default=default)["inner", "a"].dtype is torch.float32
        assert other.add(holder, default=default)["inner", "a"].dtype is torch.float32


def test_a_number_beside_a_default_needs_no_default() -> None:
    assert first().add(1, default=5)["a"].tolist() == [2, 3]


@pytest.mark.parametrize("default", ["union", torch.ones(2), [1]])
def test_other_defaults_are_refused(default: object) -> None:
    with pytest.raises((InvalidValue, InvalidArgument), match="`default` must be"):
        first().add(second(), default=default)  # type: ignore[arg-type]  # the error under test


def test_a_leaf_beside_a_container_is_refused() -> None:
    with pytest.raises(KeySetMismatch, match=r"entry `a` must be of one kind"):
        first().add(TensorDict({"a": {"x": torch.ones(2)}}, [2]), default=0)


def test_a_failing_entry_is_named() -> None:
    wrong: dict[str, Tensor] = {"x": torch.ones(2, 3), "z": torch.ones(2)}
    with pytest.raises(RuntimeError) as caught:
        TensorDict({"n": {"x": torch.ones(2, 2)}}, [2]).add(
            TensorDict({"n": wrong}, [2]), default=0
        )
    assert caught.value.__notes__ == ["This is entry `('n', 'x')`."]


def test_the_result_of_a_locked_container_is_locked() -> None:
    td = TensorDict({"a": torch.ones(2)}, [2]).lock_()
    assert td.add(td, default=0.0).is_locked
    assert not td.clone().add(td, default=0.0).is_locked
