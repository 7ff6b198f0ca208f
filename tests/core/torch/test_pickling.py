"""Containers outlive the process: pickle, deepcopy and `torch.load`."""

import copy
import pickle
from pathlib import Path

import pytest
import torch

from kd_core import Locked, TensorDict


def nested() -> TensorDict:
    source = {"b": torch.arange(12.0).reshape(3, 4), "a": {"c": torch.ones(3), "word": "reach"}}
    return TensorDict(source, [3], device="cpu")


def assert_same(td: TensorDict, other: TensorDict) -> None:
    assert type(other) is type(td)
    assert other.batch_size == td.batch_size
    assert other.device == td.device
    assert other.is_locked == td.is_locked
    assert list(other.keys(True)) == list(td.keys(True))
    assert other["a", "word"] == td["a", "word"]
    torch.testing.assert_close(other["b"], td["b"])
    torch.testing.assert_close(other["a", "c"], td["a", "c"])


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_keeps_everything(protocol: int) -> None:
    assert_same(nested(), pickle.loads(pickle.dumps(nested(), protocol)))


def test_deepcopy_shares_no_tensor() -> None:
    td = nested()
    other = copy.deepcopy(td)
    assert_same(td, other)
    other["b"].zero_()
    other["a", "c"].zero_()
    torch.testing.assert_close(td["b"], nested()["b"])
    torch.testing.assert_close(td["a", "c"], nested()["a", "c"])


def test_deepcopy_keeps_what_is_one_tensor_one() -> None:
    shared = torch.zeros(2)
    other = copy.deepcopy(TensorDict({"a": shared, "b": {"c": shared}}))
    assert other["a"] is other["b", "c"]


def test_copy_shares_tensors_but_not_levels() -> None:
    td = nested()
    other = copy.copy(td)
    other["a", "new"] = torch.zeros(3)
    assert other["b"] is td["b"]
    assert "new" not in td["a"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda td: pickle.loads(pickle.dumps(td))])
def test_a_lock_is_kept(copied: object) -> None:
    assert callable(copied)
    other = copied(nested().lock_())
    assert_same(nested().lock_(), other)
    with pytest.raises(Locked, match="with the one that encloses it"):
        other.get("a").unlock_()
    other.unlock_()
    other["a", "new"] = torch.zeros(3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda td: pickle.loads(pickle.dumps(td))])
def test_the_lock_of_what_enclosed_it_is_left_behind(copied: object) -> None:
    assert callable(copied)
    td = nested().lock_()
    alone = copied(td.get("a"))
    assert not alone.is_locked


def test_a_view_pickles_its_own_bytes() -> None:
    td = TensorDict({"a": torch.zeros(10_000, 10)}, [10_000])
    assert len(pickle.dumps(td[3])) < 2_000
    torch.testing.assert_close(pickle.loads(pickle.dumps(td[3:5]))["a"], torch.zeros(2, 10))


def test_torch_load_takes_weights_only(tmp_path: Path) -> None:
    torch.save(nested(), tmp_path / "td.pt")
    assert_same(nested(), torch.load(tmp_path / "td.pt", weights_only=True))


def test_load_may_map_to_another_device(tmp_path: Path) -> None:
    torch.save(nested(), tmp_path / "td.pt")
    td = torch.load(tmp_path / "td.pt", weights_only=True, map_location="meta")
    assert td.device == td["b"].device == td["a"].device == torch.device("meta")
    assert td.get(("a", "word")).device == torch.device("meta")


def test_a_device_is_kept_without_leaves() -> None:
    td = TensorDict({"n": {}, "word": "reach"}, device="meta")
    assert pickle.loads(pickle.dumps(td)).device == torch.device("meta")
    assert pickle.loads(pickle.dumps(td))["n"].device == torch.device("meta")
