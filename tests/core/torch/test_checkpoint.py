"""`torch.distributed.checkpoint` saves and loads containers."""

from pathlib import Path

import pytest
import torch

from kd_core import TensorDict


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_fills_a_container(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    td = TensorDict({"a": torch.arange(3.0), "n": {"b": torch.ones(3, 2)}, "w": "x"}, [3])
    save({"td": td, "step": 7}, checkpoint_id=tmp_path, no_dist=True)
    target = td.apply(torch.zeros_like)
    leaf = target["n", "b"]
    state = {"td": target, "step": 0}
    load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state["step"] == 7
    assert bool((target == td).all())
    assert target["n", "b"] is leaf
