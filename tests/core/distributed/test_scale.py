"""What one rank of many sends: the figures of `docs/guide/distributed.md`, from counted runs."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.repo.tree import ROOT
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from kd_core import TensorDict
from kd_core._distributed import outlines

LEAVES, NUMEL = 50, 20_000
CALLS = ("all_gather", "all_reduce", "broadcast")


def counted(ranks: int, call: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Return each message of a call on one of many ranks: what it is, bytes sent and received.

    The other ranks do not exist: torch's `fake` backend leaves the values as they are.
    """
    messages: list[tuple[str, int, int]] = []

    def recorded(name: str) -> Any:
        function = getattr(dist, name)

        def run(first: Any, *args: Any, **kwargs: Any) -> Any:
            own: Tensor = first if isinstance(first, Tensor) else args[0]
            received = own.nbytes if first is own else sum(each.nbytes for each in first)
            messages.append((name, own.nbytes, received))
            return function(first, *args, **kwargs)

        return run

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(dist, name, recorded(name))
            call()
    finally:
        dist.destroy_process_group()
    return messages


def container() -> TensorDict:
    return TensorDict({f"a{at}": torch.ones(NUMEL) for at in range(LEAVES)})


def agreement(ranks: int) -> tuple[str, int, int]:
    """Return the message in which ranks agree, as the page derives it."""
    if ranks > 16:
        return "all_reduce", 64, 64
    own = 64 + (1 << 15) // ranks
    return "all_gather", own, ranks * own


@pytest.mark.parametrize("ranks", [8, 512, 65_536])
def test_messages_of_a_step_do_not_grow_with_the_ranks(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    td, nbytes = container(), 4 * LEAVES * NUMEL
    reduced = counted(ranks, td.all_reduce, monkeypatch)
    assert reduced == [agreement(ranks), ("all_reduce", nbytes, nbytes)]
    sent = counted(ranks, lambda: td.broadcast(0), monkeypatch)
    assert sent == [agreement(ranks), ("broadcast", nbytes, nbytes)]
    name, own, received = agreement(ranks)
    row = f"| {ranks:,} | `{name}` of {own:,} bytes, {received:,} received | 1 |"
    assert row in (ROOT / "docs/guide/distributed.md").read_text("utf-8")


class Copies(TorchDispatchMode):
    """Records which kernels copy values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # by torch
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("aten::cat", "aten::_foreach_copy_", "aten::copy_", "aten::clone"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_values_are_copied_once_to_be_sent_and_once_to_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside the container, a rank has one flat tensor for each dtype."""
    outlines._FREE.clear()
    td = container()
    with Copies() as copies:
        counted(512, td.all_reduce, monkeypatch)
    assert copies.found == ["aten::cat", "aten::_foreach_copy_"]
    (room,) = outlines._FREE.values()
    assert room.nbytes() == 4 * LEAVES * NUMEL
    whole = torch.ones(LEAVES, NUMEL)
    rows = TensorDict({f"a{at:02}": row for at, row in enumerate(whole)})
    with Copies() as copies:
        counted(512, rows.all_reduce, monkeypatch)
    assert copies.found == ["aten::copy_"] * 2
