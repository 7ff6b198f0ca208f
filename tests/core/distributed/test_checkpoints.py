"""`load_checkpoint` writes all values of a checkpoint, or none."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from kd_core import KdError, TensorDict, distributed, lazy_stack


@pytest.fixture(params=[True, False], ids=["group", "alone"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Save a state in a group of one rank, or without a group."""
    from torch.distributed.checkpoint.state_dict_saver import save

    if request.param:
        store = dist.HashStore()  # type: ignore[attr-defined]  # exported without a name
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    save(state(1.0), checkpoint_id=tmp_path)
    yield tmp_path
    if request.param:
        dist.destroy_process_group()


def state(value: float) -> dict[str, Any]:
    members = [TensorDict({"x": torch.full((n,), value), "m": "m"}) for n in (1, 2, 3)]
    entries = {
        "a": torch.full((3,), value),
        "words": ["x", "y", "z"],
        "n": {"b": torch.full((3, 2), value), "unit": "m", "rows": lazy_stack(members)},
    }
    return {"td": TensorDict(entries, [3]), "plain": {"c": torch.full((2,), value)}, "step": value}


def values(found: dict[str, Any]) -> set[float]:
    leaves = tree_leaves([found["td"].state_dict(), found["plain"], torch.tensor(found["step"])])
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return {number for leaf in tensors for number in leaf.flatten().tolist()}


CHANGES: dict[str, Callable[[Any], object]] = {
    r"is of batch_size \(3,\), and the container of \(\)": lambda td: setattr(td, "batch_size", []),
    "some of its elements share memory": lambda td: td.set("a", torch.zeros(1).expand(3)),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_is_loaded_as_a_whole(folder: Path) -> None:
    found = state(0.0)
    leaf = found["td"]["a"]
    for message, change in CHANGES.items():
        refused = state(0.0)
        change(refused["td"])
        with pytest.raises(KdError, match=message):
            distributed.load_checkpoint(refused, folder)
        assert values(refused) == {0.0}
    distributed.load_checkpoint(found, folder)
    assert values(found) == {1.0}
    assert found["td"]["a"] is leaf


def held(value: float, unit: str = "m", batch: tuple[int, ...] = (3,)) -> TensorDict:
    entries = {"a": torch.full((3,), value), "n": {"b": torch.full((3, 2), value), "unit": unit}}
    return TensorDict(entries, batch)


def save_nested(td: TensorDict, folder: Path) -> None:
    """Save what torch's `save` got of a container while `state_dict` was nested."""
    from torch.distributed.checkpoint.state_dict_saver import save

    about = {"__batch_size": td.batch_size, "__device": td.device}
    state = td.state_dict(flatten=False)
    below = cast("dict[str, object]", state["n"])
    save({"td": {**state, **about, "n": {**below, **about}}}, checkpoint_id=folder)


def save_tensors(td: TensorDict, folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"td": td}, checkpoint_id=folder)


def save_ours(td: TensorDict, folder: Path) -> None:
    distributed.save_checkpoint({"td": td}, folder)


def load_of_torch(td: TensorDict, folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    load({"td": td}, checkpoint_id=folder)


def load_ours(td: TensorDict, folder: Path) -> None:
    distributed.load_checkpoint({"td": td}, folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("load", [load_ours, load_of_torch])
@pytest.mark.parametrize("save", [save_ours, save_nested, save_tensors])
def test_each_checkpoint_of_a_container_is_loaded(
    save: Callable[[TensorDict, Path], None],
    load: Callable[[TensorDict, Path], None],
    tmp_path: Path,
) -> None:
    save(held(1.0), tmp_path)
    found = held(0.0)
    leaf = found["n", "b"]
    load(found, tmp_path)
    assert bool((found == held(1.0)).all())
    assert found["n", "b"] is leaf
    assert found["n", "unit"] == "m"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("save", [save_ours, save_nested])
def test_data_that_was_saved_is_loaded(
    save: Callable[[TensorDict, Path], None], tmp_path: Path
) -> None:
    save(held(1.0), tmp_path)
    refused, found = held(0.0, unit="cm", batch=()), held(0.0, unit="cm")
    with pytest.raises(KdError, match=r"is of batch_size \(3,\), and the container of \(\)"):
        distributed.load_checkpoint({"td": refused}, tmp_path)
    assert refused["n", "unit"] == "cm"
    assert refused["a"].sum() == refused["n", "b"].sum() == 0
    distributed.load_checkpoint({"td": found}, tmp_path)
    assert found["n", "unit"] == "m"
