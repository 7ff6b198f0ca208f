"""Containers of a GPU in other processes, in a group of ranks, and in distributed checkpoints."""

from collections.abc import Iterator
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gpu.device import DEVICE, assert_alike, devices

from kd_core import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    distributed,
    lazy_stack,
    stack,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, which the metal decides


def made() -> dict[str, TensorDictBase]:
    members = [TensorDict({"x": torch.full((n,), 1.0), "s": "m"}) for n in (1, 2, 3)]
    entries = {"x": torch.ones(3), "n": {"y": torch.ones(3, 2)}, "words": ["a", "b", "c"]}
    kinds: dict[str, TensorDictBase] = {
        "dense": TensorDict(entries, [3]),
        "lazy": lazy_stack(members),
        "one storage": TensorDict({"x": torch.ones(3), "y": torch.ones(3, 2)}, [3]).consolidate(),
    }
    return {kind: td.to(DEVICE) for kind, td in kinds.items()}


def tensors(td: TensorDictBase) -> list[torch.Tensor]:
    """Return the leaves, of a ragged stack those of its members."""
    members = td.unbind(0) if isinstance(td, LazyStackedTensorDict) else (td,)
    leaves: list[object] = [leaf for one in members for leaf in one.values(True, True)]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def serve(inbox: "Queue[Any]", outbox: "Queue[Any]") -> None:
    """Run in another process: write 4 into every leaf of what comes."""
    try:
        kinds = inbox.get(timeout=60)
        for td in kinds.values():
            for leaf in tensors(td):
                leaf.fill_(4)
        torch.cuda.synchronize()
        outbox.put({kind: (str(td.device), td.is_shared()) for kind, td in kinds.items()})
        inbox.get(timeout=60)  # until the other process is done with the memory
    except BaseException as error:  # the test tells it
        outbox.put(repr(error))


def test_another_process_writes_into_the_same_memory() -> None:
    context = torch.multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=serve, args=(inbox, outbox), daemon=True)
    process.start()
    try:
        kinds = {kind: td.share_memory_() for kind, td in made().items()}
        inbox.put(kinds)
        found = outbox.get(timeout=90)
        assert found == dict.fromkeys(kinds, (str(DEVICE), True))
        torch.cuda.synchronize()
        for td in kinds.values():
            for leaf in tensors(td):
                assert bool((leaf == 4).all())
        assert list(kinds["dense"]["words"]) == ["a", "b", "c"]
        inbox.put(None)
        process.join(30)
    finally:
        process.kill()


@pytest.fixture(params=["nccl", "cpu:gloo,cuda:nccl", "gloo"])
def group(request: pytest.FixtureRequest) -> Iterator[str]:
    store = dist.HashStore()  # type: ignore[attr-defined]  # exported without a name
    torch.cuda.set_device(DEVICE)
    dist.init_process_group(request.param, store=store, rank=0, world_size=1)
    yield request.param
    dist.destroy_process_group()


def test_collectives_of_one_rank(group: str) -> None:
    td = made()["dense"]
    before = td.clone()
    reduced = td.select("x", "n")
    distributed.all_reduce(reduced)
    assert_alike(reduced, before.select("x", "n"))
    distributed.broadcast(td, 0)
    assert_alike(td, before)
    gathered = distributed.all_gather(td)
    assert len(gathered) == 1
    assert_alike(gathered[0], before)
    assert devices(gathered[0]) == {DEVICE}
    for each in distributed.gather(td, 0) or ():
        assert_alike(each, before)


def test_a_distributed_checkpoint_fills_containers_of_the_gpu(group: str, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    td = made()["dense"]
    save({"td": td, "step": 7}, checkpoint_id=tmp_path)
    target = td.clone().zero_()
    leaf = target["n", "y"]
    state = {"td": target, "step": 0}
    load(state, checkpoint_id=tmp_path)
    assert state["step"] == 7
    assert_alike(target, td)
    assert target["n", "y"] is leaf
    assert leaf.device == DEVICE


def ones(batch: list[TensorDict]) -> TensorDict:
    return stack(batch)


def test_loaders_pin_what_their_workers_send() -> None:
    rows = [TensorDict({"x": torch.full((4,), float(n)), "s": "w"}) for n in range(12)]
    loader: Any = torch.utils.data.DataLoader(
        rows,  # type: ignore[arg-type]  # a list is a data set
        batch_size=3,
        num_workers=1,
        pin_memory=True,
        collate_fn=ones,
        multiprocessing_context="spawn",
    )
    seen = []
    for batch in loader:
        assert batch["x"].is_pinned()
        assert batch.is_pinned()
        seen += batch.to(DEVICE, non_blocking=True)["x"][:, 0].tolist()
    assert seen == list(range(12))
