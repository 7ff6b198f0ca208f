"""`assert_close` tells the key, and what is different there."""

import pytest
import torch

from kd_core import TensorDict, TensorDictBase, UnbatchedTensor, lazy_stack
from kd_core.testing import assert_allclose_td, assert_close

TD = TensorDict({"a": torch.zeros(3), "n": {"b": torch.ones(3, 2), "word": "x"}}, [3])


def test_equal_containers_pass() -> None:
    assert assert_close(TensorDict(a=torch.ones(2)), {"a": torch.ones(2)}) is True
    assert_close(TD, TD.clone())
    assert_close(TD, TD.to_dict())
    assert_close(TD.to_dict(), TD)
    assert_close(lazy_stack(TD.unbind(0)), TD)
    assert_close(TensorDict({"a": torch.tensor(float("nan"))}), {"a": torch.tensor(float("nan"))})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (TD.exclude("a"), r"keys \['n'\] in the container, got \['a', 'n'\]"),
        (TD.exclude(("n", "b")), r"keys .* in `n`"),
        (TD + 1, "`a`: Tensor-likes are not close"),
        (TD.replace({"n": {"b": torch.zeros(3, 2)}}), r"`\('n', 'b'\)`: Tensor-likes"),
        (TD.double(), "`a`: .*dtype"),
        (TD.replace({"n": {"word": "y"}}), r"'y'.* in `\('n', 'word'\)`, got .*'x'"),
        (TD.replace({"n": torch.zeros(3)}), " in `n`, got "),
        (TensorDict(TD, []), r"batch_size \(\) in the container, got \(3,\)"),
    ],
)
def test_a_difference_is_told(other: TensorDict, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_close(TD, other)


def test_tolerances_and_batch_sizes_are_chosen() -> None:
    assert_close(TD, TD + 1e-3, atol=1e-2, rtol=0)
    assert_close(TD, TensorDict(TD, []), batch_size=False)


def test_nan_intersection_message_and_prefix() -> None:
    left = TensorDict({"a": torch.tensor([float("nan")]), "b": {"c": 1}, "only": 2}, [])
    right = TensorDict({"a": torch.tensor([float("nan")]), "b": {"c": 1}}, [])
    assert_close(left, right, intersection=True)
    with pytest.raises(AssertionError, match="step 3: expected the keys"):
        assert_close(left, right, msg="step 3:")
    with pytest.raises(AssertionError, match=r"`\('run', 'a'\)`"):
        assert_close(left, right, intersection=True, equal_nan=False, prefix="run")
    with pytest.raises(AssertionError, match=r"`\('b', 'c'\)`"):
        assert_allclose_td(right, {**right.to_dict(), "b": {"c": torch.tensor(2)}})


def test_tensors_of_the_whole_batch_are_compared_by_their_values() -> None:
    td = TensorDict({"u": UnbatchedTensor(torch.ones(5))}, [3])
    assert_close(td.clone(), td)
    other = TensorDict({"u": UnbatchedTensor(torch.zeros(5))}, [3])
    with pytest.raises(AssertionError, match="`u`"):
        assert_close(other, td)


def test_ragged_stacks_are_compared_by_member() -> None:
    def rows(*values: float) -> TensorDictBase:
        members = [TensorDict({"a": torch.full((n + 1,), each)}) for n, each in enumerate(values)]
        return lazy_stack(members)

    assert assert_close(rows(1.0, 2.0), rows(1.0, 2.0))
    with pytest.raises(AssertionError, match="member 1"):
        assert_close(rows(1.0, 2.0), rows(1.0, 3.0))
    with pytest.raises(AssertionError, match="2 members along dimension 0 in the container, got"):
        assert_close(rows(1.0, 2.0, 3.0), rows(1.0, 2.0))
    with pytest.raises(AssertionError, match="got one that is"):
        assert_close(rows(1.0, 2.0), TensorDict({"a": torch.zeros(2, 1)}, [2]))
