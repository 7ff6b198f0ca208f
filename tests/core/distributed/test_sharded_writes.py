"""Writes into plain leaves and `DTensor`s: all of them, or none."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from kd_core import InvalidValue, TensorDict

MASK = torch.tensor([True, False, True, False])
Write = Callable[[TensorDict], object]


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]  # exported without a name
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(value: float, *placements: Any) -> DTensor:
    return distribute_tensor(torch.full((4,), value), init_device_mesh("cpu", (1,)), placements)


def mixed() -> TensorDict:
    """Return plain leaves before and behind two that are sharded."""
    inner = {"c": sharded(0.0, Replicate()), "d": torch.zeros(4)}
    return TensorDict({"a": torch.zeros(4), "b": sharded(0.0, Shard(0)), "n": inner}, [4])


def plain() -> TensorDict:
    inner = {"c": torch.ones(4), "d": torch.ones(4)}
    return TensorDict({"a": torch.ones(4), "b": torch.ones(4), "n": inner}, [4])


def values(td: TensorDict) -> list[list[float]]:
    leaves: list[Tensor] = list(td.values(True, True))
    return [(leaf.full_tensor() if isinstance(leaf, DTensor) else leaf).tolist() for leaf in leaves]


WRITES: dict[str, Write] = {
    "mask": lambda td: td.__setitem__(MASK, 1.0),
    "mask of rows": lambda td: td.__setitem__(MASK, plain()[MASK]),
    "rows": lambda td: td.__setitem__([0, 2], 1.0),
    "slice": lambda td: td.__setitem__(slice(1, None), plain()[1:]),
    "copy_at_": lambda td: td.copy_at_(plain()[MASK], MASK),
    "masked_fill_": lambda td: td.masked_fill_(MASK, 1.0),
    "copy_": lambda td: td.copy_(plain()),
    "update_": lambda td: td.update_(plain()),
    "add_": lambda td: td.add_(plain()),
    "add_ of a tensor": lambda td: td.add_(torch.ones(4)),
    "lerp_": lambda td: td.lerp_(plain(), 0.5),
    "load_state_dict": lambda td: td.load_state_dict(plain().state_dict()),
}
REFUSED_ALWAYS = {"mask", "mask of rows", "rows", "copy_at_"}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("replicates", [False, True], ids=["alone", "implicit_replication"])
def test_a_write_that_a_sharded_leaf_refuses_writes_nothing(name: str, replicates: bool) -> None:
    td, expected = mixed(), TensorDict({}, [4]).update(plain() * 0)
    with implicit_replication() if replicates else nullcontext():
        if replicates and name not in REFUSED_ALWAYS:
            WRITES[name](td)
            WRITES[name](expected)
        else:
            with pytest.raises(InvalidValue, match=r"entry `b` .*cannot be written in place"):
                WRITES[name](td)
    assert values(td) == values(expected)


def test_a_sharded_operand_of_a_plain_leaf_is_refused_before() -> None:
    td = TensorDict({"a": torch.zeros(4), "b": torch.zeros(4)}, [4])
    other = TensorDict({"a": torch.ones(4), "b": sharded(1.0, Shard(0))}, [4])
    for write in (td.add_, td.copy_, td.update_):
        with pytest.raises(InvalidValue, match=r"entry `b` .*cannot be written in place"):
            write(other)
    assert values(td) == [[0.0] * 4] * 2


def test_leaves_of_one_kind_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    td = TensorDict({"a": sharded(0.0, Shard(0)), "b": sharded(0.0, Shard(0))}, [4])
    monkeypatch.setattr(DTensor, "clone", None)
    td.add_(1).mul_(td).copy_(td + 1)
    assert values(td) == [[2.0] * 4] * 2
