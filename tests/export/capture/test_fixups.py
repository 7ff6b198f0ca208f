"""Traps of a graph are mended or named; a refused call leaves shared parameters as they were."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.export.models import Counter, Do, Keyed
from torch import Tensor, nn
from torch._functorch._aot_autograd.utils import register_buffer_assignment_hook
from torch.nn.modules.module import (
    _global_buffer_registration_hooks,
    register_module_buffer_registration_hook,
)

import kd_export
from kd_export import DtypeMismatch, KeyedProgram, NotExportable
from kd_export._capture.fixups import Unwritten, hooks_of_torch_removed
from kd_nn import TensorDictModule

X = {"x": torch.ones(2, 3)}


def export(function: Callable[..., object] | nn.Module, *outputs: str) -> KeyedProgram:
    net = function if isinstance(function, nn.Module) else Do(function)
    return kd_export.export(Keyed(net, ["x"], list(outputs) or ["y"]), X)


def operators(program: KeyedProgram) -> list[str]:
    graph = program.exported_program.graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


ALIASES = [
    lambda x: x,
    lambda x: x.view(-1, 3),
    lambda x: x[:, :2],
    lambda x: x.t().t(),
    lambda x: x.chunk(3, -1)[0],
    lambda x: x.contiguous(),
]


@pytest.mark.parametrize("function", ALIASES)
def test_output_never_shares_memory_with_an_input(function: Callable[[Tensor], Tensor]) -> None:
    program = export(function)
    x = torch.ones(4, 3)
    result = program({"x": x})["y"]
    result.zero_()
    assert bool((x == 1).all())
    assert program.diagnostics == (
        "the output `y` shares memory with an input, a weight or another output: it is copied.",
    )


def test_two_outputs_never_share_memory() -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        return (y := x + 1), y

    result = export(twice, "y", "z")({"x": torch.ones(4, 3)})
    assert result["y"].data_ptr() != result["z"].data_ptr()


class GiveWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.weight, self.weight


def test_output_never_shares_memory_with_a_weight() -> None:
    program = export(GiveWeight(), "y", "w")
    program({"x": torch.ones(4, 3)})["w"].zero_()
    assert bool((program({"x": torch.ones(4, 3)})["w"] == 1).all())


def test_overwritten_input_is_worked_on_as_a_copy(tmp_path: Path) -> None:
    program = export(lambda x: x.add_(1).relu_() * 2)
    x = torch.ones(4, 3)
    assert bool((program({"x": x})["y"] == 4).all())
    assert bool((x == 1).all())
    assert "overwritten" in program.diagnostics[0]
    assert program.save(tmp_path / "model.pt2").ok


def test_dropout_is_gone() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Dropout(0.1), nn.AlphaDropout(0.5))
    assert operators(export(net)) == ["aten.linear.default"]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x + torch.randn_like(x), "randn_like"),
        (lambda x: torch.bernoulli(x), "bernoulli"),
        (lambda x: nn.functional.dropout(x, 0.5, training=True), "dropout"),
    ],
)
def test_random_numbers_are_refused(function: Callable[[Tensor], Tensor], name: str) -> None:
    with pytest.raises(NotExportable, match=f"draws random numbers .*{name}.*mode='random'"):
        export(function)


def branch(then: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        y: Tensor = torch.cond(x.sum() > 0, then, torch.cos, (x,))
        return y

    return forward


def in_scope(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x.add_(1)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (branch(lambda x: x.add_(1)), r"`cond` .*\(`aten\.add_\.Tensor` in `net`\)"),
        (branch(branch(lambda x: x.mul_(2))), r"`cond` .*\(`aten\.mul_\.Tensor`"),
        (in_scope, "`wrap_with_set_grad_enabled`"),
    ],
)
def test_a_write_to_what_a_branch_is_given_is_refused(
    function: Callable[[Tensor], Tensor], name: str
) -> None:
    # torch 2.10 does not capture such a branch, and does not say what writes.
    ours = f"a function inside ({name}|an operator).*Compute a new tensor"
    with pytest.raises(NotExportable, match=ours):
        export(function)


def test_a_branch_may_write_to_what_it_made() -> None:
    program = export(branch(lambda x: x.clone().add_(1)))
    x = torch.ones(4, 3)
    assert bool((program({"x": x})["y"] == 2).all())
    assert bool((x == 1).all())


def test_a_gradient_scope_may_write_to_what_was_made_before_it() -> None:
    def forward(x: Tensor) -> Tensor:
        return in_scope(x * 2)

    program = export(forward)
    assert bool((program({"x": torch.ones(4, 3)})["y"] == 3).all())


def test_what_nobody_needs_of_a_gradient_scope_is_gone() -> None:
    def chosen(x: Tensor) -> Tensor:
        with torch.no_grad():
            best = x.argmax(-1)
        best.long().unsqueeze(-1)  # torch makes one node of `best` and this, and loses its user
        return best

    program = export(chosen)
    assert "aten.unsqueeze.default" not in operators(program)
    assert torch.equal(program(X)["y"], X["x"].argmax(-1))


def test_random_numbers_of_a_branch_are_refused() -> None:
    with pytest.raises(NotExportable, match=r"draws random numbers .*randn_like"):
        export(branch(lambda x: x + torch.randn_like(x)))


def test_dropout_of_a_branch_is_gone() -> None:
    drop = nn.Dropout(0.5).eval()
    program = export(branch(lambda x: drop(x).sin()))
    assert program.diagnostics[0].startswith("dropout is removed (1 in all)")


def test_random_numbers_may_be_declared(tmp_path: Path) -> None:
    module = Keyed(Do(lambda x: x + torch.randn_like(x)), ["x"], ["y"])
    program = kd_export.export(module, X, mode="random")
    report = program.save(tmp_path / "model.pt2")
    assert report.ok
    assert "random" in report.rows[0].note
    assert kd_export.verify(tmp_path / "model.pt2", trusted=True).ok


def test_random_draw_that_nobody_reads_is_gone() -> None:
    def forward(x: Tensor) -> Tensor:
        torch.rand_like(x)
        return x + 1

    assert operators(export(forward)) == ["aten.add.Tensor"]


def test_state_is_refused_by_name() -> None:
    with pytest.raises(NotExportable, match=r"changes `net\.count` of the module.*output key"):
        export(Counter())


def test_output_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(
        DtypeMismatch, match=r"expected a tensor for the output `z`, got a .*Pass `outputs=`"
    ):
        export(lambda x: (x.relu(), None), "y", "z")


def test_a_mode_that_changes_nothing_is_not_advised_again() -> None:
    module = TensorDictModule(torch.rand_like, in_keys=["x"], out_keys=["y"])
    with pytest.raises(NotExportable) as caught:
        kd_export.export(module, {"x": torch.zeros(2, 3)}, mode="deterministic")
    message = str(caught.value)
    assert "which `mode='deterministic'` does not change" in message
    assert "Take the draw out of the module" in message


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
