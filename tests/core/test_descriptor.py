"""What containers of one batch size, device and lock share."""

import pickle

import pytest
import torch
from tests.core.kinds import inner

from kd_core import InvalidArgument, InvalidValue, TensorDict


def test_equal_descriptions_are_one_object() -> None:
    first, second = TensorDict({}, [3, 4]), TensorDict({}, (3, 4))
    assert first.batch_size is second.batch_size


def test_nested_containers_share_the_batch_size_of_their_parent() -> None:
    td = TensorDict({"n": {"a": torch.zeros(3)}}, [3])
    assert inner(td, "n").batch_size is td.batch_size


@pytest.mark.parametrize("batch_size", [["x"], [1.5], [None]])
def test_sizes_are_integers(batch_size: list[int]) -> None:
    with pytest.raises(InvalidArgument, match="batch_size must hold integers"):
        TensorDict({}, batch_size)


def test_sizes_are_not_negative() -> None:
    with pytest.raises(InvalidValue, match=r"non-negative, got \(2, -1\)"):
        TensorDict({}, [2, -1])


@pytest.mark.parametrize("batch_size", [object(), 1.5])
def test_a_batch_size_is_an_integer_or_a_sequence(batch_size: int) -> None:
    with pytest.raises(InvalidArgument, match="batch_size must hold integers, got"):
        TensorDict({}, batch_size)


@pytest.mark.parametrize(("device", "error"), [("nope", RuntimeError), (3.5, TypeError)])
def test_a_device_is_what_torch_calls_one(device: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{device!r} is not a valid device"):
        TensorDict({}, device=device)


def test_more_batch_sizes_than_are_kept_are_equal_still() -> None:
    first = TensorDict({}, [7, 7, 7])
    for rows in range(5000):
        TensorDict({}, [rows, 1, 1, 1])
    second = TensorDict({"a": torch.zeros(7, 7, 7)}, [7, 7, 7])
    second["n"] = first
    assert second.batch_size == first.batch_size
    assert (second + 1)["a"].sum() == 343


def test_a_description_is_pickled_with_its_container() -> None:
    td = TensorDict({"a": torch.zeros(3)}, [3], device="cpu")
    other = pickle.loads(pickle.dumps(td))
    assert other.batch_size is td.batch_size
    assert other.device == torch.device("cpu")
