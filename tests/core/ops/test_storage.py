"""All leaves in one storage."""

import pickle
from pathlib import Path
from typing import cast

import pytest
import torch
from tests.core.kinds import inner

from kd_core import (
    InvalidArgument,
    InvalidValue,
    Locked,
    NonTensorDataBase,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)


@pytest.fixture(params=["one dtype", "several"])
def td(request: pytest.FixtureRequest) -> TensorDict:
    dtypes = [torch.bool, torch.int64, torch.float32, torch.uint8]
    several = request.param == "several"
    leaves = {
        str(i): torch.rand(3, i + 1).to(dtypes[i % 4] if several else torch.float32)
        for i in range(9)
    }
    return TensorDict({"top": torch.ones(3), "n": leaves, "s": "text"}, [3])


def test_values_are_kept(td: TensorDict) -> None:
    one = td.consolidate()
    assert bool((one == td).all())
    assert one["s"] == "text"
    assert one.batch_size == (3,)
    assert one["n", "3"].dtype is td["n", "3"].dtype


def test_leaves_share_one_storage_of_their_own(td: TensorDict) -> None:
    one = td.consolidate()
    assert one.is_consolidated()
    assert not td.is_consolidated()
    one.zero_()
    assert td["top"].tolist() == [1, 1, 1]


def test_leaves_that_have_no_address_are_told_apart() -> None:
    apart = {"a": torch.zeros(2, device="meta"), "b": torch.zeros(2, device="meta")}
    assert not TensorDict(apart).is_consolidated()
    assert TensorDict(apart).consolidate().is_consolidated()


def test_a_leaf_without_elements_does_not_count() -> None:
    td = TensorDict({"none": torch.zeros(0), "a": torch.ones(2), "b": torch.ones(1)})
    assert not td.is_consolidated()
    assert td.consolidate().is_consolidated()


def ragged() -> TensorDict:
    rows = [torch.ones(2), torch.ones(3)]
    a = torch.nested.nested_tensor(rows, layout=torch.jagged)
    holes = torch.nested.nested_tensor_from_jagged(
        torch.arange(6.0), torch.tensor([0, 3, 6]), torch.tensor([1, 2])
    )
    return TensorDict({"a": a, "b": a * 2, "h": holes, "d": torch.arange(2)}, [2])


def test_a_sparse_leaf_is_not_consolidated() -> None:
    assert not TensorDict({"a": torch.eye(2).to_sparse()}).is_consolidated()


def test_a_container_without_tensors_is_consolidated_once_it_was_asked_to() -> None:
    for td in (TensorDict(), TensorDict({"word": "x", "n": {}})):
        assert not td.is_consolidated()
        made = td.consolidate()
        assert made.is_consolidated()
        assert not made.unlock_().is_consolidated()
    assert not TensorDict({"word": "x"}).lock_().is_consolidated()


@pytest.mark.parametrize("inplace", [False, True])
def test_ragged_leaves_are_in_one_storage(inplace: bool) -> None:
    td = ragged()
    assert not td.is_consolidated()
    one = td.consolidate(inplace=inplace)
    assert (one is td) is inplace
    assert one.is_consolidated()
    for key, leaf in ragged().items():
        assert all(map(torch.equal, one[key].unbind(), leaf.unbind()))
    assert (one["a"] + one["b"]).values().tolist() == [3] * 5  # rows are shared
    assert one["a"].values().untyped_storage().data_ptr() == one["d"].untyped_storage().data_ptr()


def test_ragged_leaves_are_in_shared_memory() -> None:
    td = ragged()
    assert not td.is_shared()
    assert td.share_memory_() is td
    assert td.is_shared()
    assert td["h"].lengths().is_shared()  # type: ignore[attr-defined]  # known at run time
    with pytest.raises(Locked, match="share_memory_"):
        td["new"] = torch.zeros(2)


def test_parameters_that_ask_for_what_is_done_anyway(td: TensorDict, tmp_path: Path) -> None:
    file = tmp_path / "one"
    one = td.consolidate(file, num_threads=2, return_early=False, use_buffer=True, metadata=True)
    assert one.is_consolidated()
    assert bool((TensorDict.from_consolidated(file) == td).all())


def test_what_is_removed_from_one_storage_is_not_written() -> None:
    one = TensorDict({"large": torch.zeros(1000), "a": torch.ones(2), "b": torch.ones(1)})
    one = one.consolidate().unlock_()
    del one["large"]
    one.rename_key_("a", "c")
    assert one.lock_().is_consolidated()
    assert [buffer.nbytes for buffer in one.to_buffers()[1]] == [12]
    assert len(pickle.dumps(one)) < 1000


def test_a_replaced_leaf_is_elsewhere(td: TensorDict) -> None:
    one = td.consolidate()
    with pytest.raises(Locked, match="set `top`"):
        one["top"] = torch.zeros(3)
    one.unlock_()["top"] = torch.zeros(3)
    assert not one.is_consolidated()


def passed_on(td: TensorDictBase) -> TensorDictBase:
    made: TensorDictBase = pickle.loads(pickle.dumps(td))
    return made


def test_a_pickled_copy_of_one_storage_can_change(td: TensorDict) -> None:
    made = passed_on(td.consolidate())
    made["new"] = made["top"] + 1
    made["inner", "new"] = made["top"]
    assert not made.is_locked
    assert not passed_on(lazy_stack([td, td.clone()]).consolidate()).is_locked
    assert not passed_on(td.clone().consolidate(inplace=True)).is_locked
    assert passed_on(td.consolidate().unlock_().lock_()).is_locked
    assert passed_on(td.lock_().consolidate()).is_locked


def test_one_storage_says_how_it_changes(td: TensorDict) -> None:
    with pytest.raises(Locked, match=r"locked by `consolidate`.* call `unlock_\(\)` or"):
        del td.consolidate()["top"]


def test_copies_are_outside_the_graph() -> None:
    one = TensorDict({"w": torch.ones(2, requires_grad=True), "b": torch.ones(1)}).consolidate()
    assert not one.requires_grad
    assert one["w"].tolist() == [1, 1]


def test_strided_and_empty_leaves() -> None:
    one = TensorDict({"a": torch.arange(6).reshape(2, 3).T, "b": torch.ones(3, 0)}, [3])
    assert one.consolidate()["a"].tolist() == one["a"].tolist()
    assert TensorDict().consolidate().is_empty()


def test_a_leaf_that_stands_twice_is_kept_twice() -> None:
    shared = torch.ones(2)
    one = TensorDict({"a": shared, "b": shared, "c": torch.ones(2).int()}, [2]).consolidate()
    assert bool((one == 1).all())


def test_what_does_not_fit_is_named() -> None:
    td = TensorDict({"a": torch.ones(2), "m": torch.ones(2, device="meta")})
    with pytest.raises(InvalidValue, match="entry `m` is on meta, but others are on cpu"):
        td.consolidate()
    sparse = TensorDict({"s": torch.ones(2, 2).to_sparse()})
    with pytest.raises(InvalidValue, match=r"entry `s` is of layout torch.sparse_coo"):
        sparse.consolidate()


def test_one_leaf_is_copied_too() -> None:
    x = torch.ones(3, requires_grad=True)
    copy = TensorDict({"a": x}, [3]).consolidate()["a"]
    assert copy.data_ptr() != x.data_ptr()
    assert not copy.requires_grad


def mixed() -> TensorDict:
    nested = {"c": torch.arange(6).view(3, 2), "s": ["x", "y", "z"]}
    return TensorDict({"a": torch.ones(3), "b": nested}, [3])


def test_the_storage_is_made_on_a_device() -> None:
    moved = mixed().to("cpu").consolidate(device="meta")
    assert moved.device == torch.device("meta")
    assert moved["b", "c"].is_meta
    assert inner(moved, "b").device == torch.device("meta")
    assert not mixed().consolidate(device="cpu", non_blocking=True)["b", "c"].is_meta


def test_the_storage_is_shared_with_other_processes() -> None:
    td = mixed().consolidate(share_memory=True)
    assert td.is_shared()
    assert td.is_consolidated()
    assert td["b", "c"].tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("stacked", [False, True])
def test_leaves_are_replaced_in_place(stacked: bool) -> None:
    td: TensorDictBase = lazy_stack(mixed().unbind(0)) if stacked else mixed()
    nested = None if stacked else td.get("b")
    assert td.consolidate(inplace=True) is td
    assert stacked or td.get("b") is nested
    assert stacked or td.is_consolidated()
    assert td.get_non_tensor(("b", "s")) == ["x", "y", "z"]
    assert td["b", "c"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert td.is_locked
    td.unlock_()["a"] = torch.zeros(3)
    assert not td.is_consolidated()


def test_a_locked_container_is_not_consolidated_in_place() -> None:
    with pytest.raises(Locked, match="replace leaves"):
        mixed().lock_().consolidate(inplace=True)
    with pytest.raises(InvalidArgument, match="cannot be combined with another `device`"):
        mixed().consolidate(inplace=True, device="meta")


def test_data_alone_is_consolidated_in_a_locked_copy() -> None:
    td = TensorDict({"s": "word", "w": ["a", "b"]}, [2])
    made = td.consolidate()
    for key in ("s", "w"):
        copy, entry = (
            cast("NonTensorDataBase", made.get(key)),
            cast("NonTensorDataBase", td.get(key)),
        )
        assert copy.is_locked
        assert not entry.is_locked


def test_a_file_of_a_consolidated_container_makes_its_folders(tmp_path: Path) -> None:
    td = TensorDict({"a": torch.ones(2)}, [2])
    td.consolidate(tmp_path / "new" / "folder" / "one")
    assert TensorDict.from_consolidated(tmp_path / "new" / "folder" / "one")["a"].tolist() == [1, 1]


def test_consolidating_makes_the_folder_and_says_no_device_that_was_not_said(
    tmp_path: Path,
) -> None:
    td = TensorDict({"a": torch.ones(3)}, [3])
    assert td.consolidate(tmp_path / "new" / "file", device="cpu").device is None
    assert TensorDict.from_consolidated(tmp_path / "new" / "file")["a"].sum() == 3
    assert td.to("cpu").consolidate(device="meta").device == torch.device("meta")


def test_levels_without_a_device_stay_without_one() -> None:
    td = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2)}}, [2])
    assert td.consolidate(device="meta").nested("n", TensorDict).device is None
    assert td.to("cpu").consolidate(device="meta").nested("n", TensorDict).device == torch.device(
        "meta"
    )


def test_the_dimension_of_packing_is_checked_first() -> None:
    td = TensorDict({"a": torch.ones(2), "b": torch.arange(2)}, [2])
    with pytest.raises(IndexError):
        td.pack(dim=5)


def test_inversion_of_floats_is_refused_as_in_torch() -> None:
    with pytest.raises(TypeError, match="only implemented on integer and Boolean"):
        ~TensorDict({"a": torch.ones(2)}, [2])


def test_consolidate_without_a_kernel_for_many_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU torch has none for `uint16`, `uint32` and `uint64`."""

    def lacking(*lists: object) -> None:
        raise NotImplementedError

    td = TensorDict({"a": torch.arange(3), "b": torch.ones(3).to(torch.uint16)}, [3])
    td["c"] = td["b"].clone()
    monkeypatch.setattr(torch, "_foreach_copy_", lacking)
    assert (td.consolidate() == td).all()


def test_one_leaf_alone_is_not_consolidated_by_that() -> None:
    td = TensorDict({"a": torch.ones(2)})
    assert not td.is_consolidated()
    one = td.consolidate()
    assert one.is_consolidated()
    assert not one.unlock_().is_consolidated()


def test_in_place_on_the_device_where_all_leaves_are() -> None:
    td = mixed()
    assert td.consolidate(inplace=True, device="cpu") is td
