"""Containers as files of HDF5 and stores of Zarr; needs h5py and zarr."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from tests.core.content import assert_same, containers
from tests.core.kinds import stacked

from kd_core import InvalidValue, TensorDict

h5py: Any = pytest.importorskip("h5py")
zarr: Any = pytest.importorskip("zarr")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("groups")


@settings(max_examples=60, deadline=None)
@given(td=containers())
def test_an_equal_container_comes_back_from_hdf5(folder: Path, td: TensorDict) -> None:
    td.to_h5(folder / "td.h5")
    assert_same(TensorDict.from_h5(folder / "td.h5").to_tensordict(), td)


@settings(max_examples=25, deadline=None)
@given(td=containers())
def test_an_equal_container_comes_back_from_zarr(folder: Path, td: TensorDict) -> None:
    td.to_zarr(folder / "td.zarr")
    assert_same(TensorDict.from_zarr(folder / "td.zarr"), td)


def test_a_lazy_stack_is_written(folder: Path) -> None:
    stacked(0).to_h5(folder / "lazy.h5")
    back = TensorDict.from_h5(folder / "lazy.h5")
    assert torch.equal(back["a"], stacked(0)["a"])


def test_files_of_another_origin_are_read(folder: Path) -> None:
    with h5py.File(folder / "other.h5", "w") as root:
        root["x"] = [[1, 2], [3, 4]]
        root["group/y"] = [0.5, 1.5]
        root["word"] = "text"
    td = TensorDict.from_h5(folder / "other.h5", batch_size=[2])
    assert td["x"].shape == (2, 2)
    assert td["group", "y"].tolist() == [0.5, 1.5]
    assert td["word"] == "text"
    assert TensorDict.from_h5(folder / "other.h5").batch_size == (2,)
    group = zarr.open_group(str(folder / "other.zarr"), mode="w")
    group.create_array("x", data=torch.arange(4).numpy())
    group.create_group("n").create_array("y", data=torch.ones(4).numpy())
    back = TensorDict.from_zarr(folder / "other.zarr")
    assert back.batch_size == (4,)
    assert TensorDict.from_zarr(folder / "other.zarr", batch_size=[]).batch_size == ()
    assert back["n", "y"].sum() == 4


def test_a_value_that_no_file_keeps_leaves_no_file(folder: Path) -> None:
    with pytest.raises(InvalidValue, match="entry `s`"):
        TensorDict({"s": object()}).to_h5(folder / "none.h5")
    with pytest.raises(InvalidValue, match="entry `s`"):
        TensorDict({"s": object()}).to_zarr(folder / "none.zarr")
    assert not (folder / "none.h5").exists()
    assert not (folder / "none.zarr").exists()
