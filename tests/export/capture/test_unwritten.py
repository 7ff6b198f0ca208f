"""A refused `save` or `diagnose` leaves the parameters, whose memory it shares, as they were.

What else a module changes in a call is named.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.export.models import Keyed
from torch import Tensor, nn
from torch._functorch._aot_autograd.utils import register_buffer_assignment_hook
from torch.nn.modules.module import (
    _global_buffer_registration_hooks,
    register_module_buffer_registration_hook,
)

import kd_export
from kd_export import NotExportable
from kd_export._capture.unwritten import Unwritten, hooks_of_torch_removed


class Decaying(nn.Module):
    """Changes its weight in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), 4.0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.w.mul_(0.5)
        return x * self.w


class DecayingUnseen(Decaying):
    """Changes its weight where autograd does not look."""

    def forward(self, x: Tensor) -> Tensor:
        self.w.data.mul_(0.5)
        return x * self.w


@pytest.mark.parametrize("kind", [Decaying, DecayingUnseen])
def test_a_refused_module_stays_as_it_was(tmp_path: Path, kind: type[Decaying]) -> None:
    module, example = Keyed(kind(), ["x"], ["y"]), {"x": torch.ones(2, 3)}
    for strict in (False, True):
        with pytest.raises(NotExportable, match=r"changes `net\.w` of the module \(`aten.mul_\.T"):
            kd_export.save(module, tmp_path / "m.pt2", example, strict=strict)
        assert not kd_export.diagnose(module, example, strict=strict).ok
        (weight,) = module.parameters()
        assert weight.tolist() == [4.0, 4.0, 4.0]


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.data.zero_(),
        lambda w: w.detach()[1:].add_(1),
        lambda w: torch.neg(w.detach(), out=w.detach()),
        lambda w: torch._foreach_mul_([torch.ones(1), w.detach()], 2.0),
    ],
)
def test_every_way_to_write_is_seen(write: Callable[[Tensor], object]) -> None:
    module = Decaying()
    with Unwritten(module), pytest.raises(NotExportable, match="the call changes `w`"):
        write(module.w)
    assert module.w.tolist() == [4.0, 4.0, 4.0]


def test_all_else_may_be_written() -> None:
    module = Decaying()
    module.empty = nn.Parameter(torch.ones(0))
    module.nowhere = nn.Parameter(torch.ones(2, device="meta"))
    sparse = torch.eye(2).to_sparse()
    with Unwritten(module):
        assert torch.ones(0).add_(1).shape == (0,)
        assert sparse.mul_(2.0).to_dense().tolist() == [[2.0, 0.0], [0.0, 2.0]]
        assert (module.w.detach() + 1).mul_(2.0).tolist() == [10.0, 10.0, 10.0]


class Replacing(nn.Module):
    """Gives a buffer another tensor in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        result: Tensor = self.norm(x) + self.count
        return result


def test_a_buffer_that_a_call_replaces_is_named(tmp_path: Path) -> None:
    module = Keyed(Replacing(), ["x"], ["y"])
    program = kd_export.export(module, {"x": torch.randn(2, 3)})
    (note,) = program.diagnostics
    assert note.startswith("the call replaces the buffer `net.count`: the program starts each")
    with pytest.raises(kd_export.VerifyError, match="note: the call replaces the buffer"):
        program.save(tmp_path / "replacing.pt2")
    assert torch.equal(module.get_buffer("net.count"), torch.zeros(3))


class Deciding(nn.Module):
    """Cannot be exported: it branches on a value."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def leave_alone(module: nn.Module, name: str, buffer: Tensor) -> None:
    """Do nothing, as a hook of the user's."""


def test_a_refused_export_leaves_no_hook_of_torch() -> None:
    before = dict(_global_buffer_registration_hooks)
    with pytest.raises(NotExportable, match="decides by the values of a tensor"):
        kd_export.export(Keyed(Deciding(), ["x"], ["y"]), {"x": torch.randn(2, 3)})
    assert _global_buffer_registration_hooks == before
    run = torch.compile(Replacing(), backend="eager", fullgraph=True)
    assert run(torch.randn(2, 3)).shape == (2, 3)


def test_only_hooks_of_torch_are_removed() -> None:
    with hooks_of_torch_removed():
        handle = register_module_buffer_registration_hook(partial(leave_alone))
        left = register_buffer_assignment_hook(nn.Module(), {})
    try:
        assert handle.id in _global_buffer_registration_hooks
        assert left.id not in _global_buffer_registration_hooks
    finally:
        handle.remove()
