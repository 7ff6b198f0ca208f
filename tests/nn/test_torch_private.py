"""Each private name of torch exists and does what is asked of it; without it modules run."""

import pytest
import torch
from packaging.version import Version
from tests import children
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_module_registration_hook,
)
from torch.overrides import TorchFunctionMode

from kd_nn import _torch_private as private


def test_hooks_of_all_modules_are_seen() -> None:
    assert not any(private.GLOBAL_HOOKS)
    for always in (False, True):
        handle = register_module_forward_hook(lambda *_: None, always_call=always)
        assert any(private.GLOBAL_HOOKS)
        handle.remove()
    assert not private.REGISTRATION_HOOKS
    handle = register_module_module_registration_hook(lambda *_: None)
    assert private.REGISTRATION_HOOKS
    handle.remove()


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_what_records_or_sees_functions_is_known() -> None:
    seen: list[bool] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(private.current_jit_trace() is not None)
        return x + 1

    note(torch.zeros(1))
    torch.jit.trace(note, torch.zeros(1), check_trace=False)
    assert seen == [False, True]
    assert private.function_modes() == 0
    with TorchFunctionMode():
        assert private.function_modes() == 1


def test_buffers_that_are_not_saved_are_known() -> None:
    module = nn.Module()
    module.register_buffer("saved", torch.zeros(1))
    module.register_buffer("unsaved", torch.zeros(1), persistent=False)
    assert private.unsaved_buffers(module) == {"unsaved"}
    private.unsaved_buffers(module).add("saved")
    assert not module.state_dict()


def test_what_runs_otherwise_than_its_class_is_known() -> None:
    for change in ("hook", "patch", "compiled"):
        layer = nn.Linear(2, 2)
        assert not private.is_watched(layer)
        assert private.runs_as_its_class(layer)
        if change == "hook":
            layer.register_forward_hook(lambda *_: None)
        elif change == "patch":
            layer.forward = layer.forward  # type: ignore[method-assign]  # a patch
        else:
            layer.compile(backend="eager")
        assert private.is_watched(layer)
        assert private.runs_as_its_class(layer) == (change == "hook")


def test_marks_and_names_of_wrappers_are_those_of_torch() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    assert all(hasattr(nn.Module, name) for name in private.CALLS)
    assert private.RECOMPUTED in checkpoint_wrapper(nn.Linear(2, 2))._modules
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    if Version(torch.__version__) >= Version("2.13"):  # torch 2.10 marks none
        assert any(getattr(compiled, mark, False) for mark in private.MARKS)


def test_shapes_alone_are_computed() -> None:
    with private.fake_tensors():
        made = torch.ones(2, 3) @ torch.ones(3, 4)
    assert made.shape == (2, 4)
    assert type(made) is not torch.Tensor


def test_what_modules_are_called_by_is_asked_when_it_is_needed() -> None:
    before = nn.Module.__call__
    assert private.calls_of_modules() == (before, nn.Module._call_impl)
    nn.Module.__call__ = lambda self, *args: before(self, *args)  # type: ignore[method-assign]  # a patch
    try:
        assert private.calls_of_modules()[0] is not before
    finally:
        nn.Module.__call__ = before  # type: ignore[method-assign]  # as above


WITHOUT = """
import importlib
import torch
import torch._dynamo  # which needs these names itself

home = importlib.import_module("torch.nn.modules.module")
names = [
    (torch._C, "_get_tracing_state"), (torch._C, "_len_torch_function_stack"),
    (home, "_global_module_registration_hooks"),
]
kept = [(owner, name, getattr(owner, name)) for owner, name in names]
for owner, name, _ in kept:
    delattr(owner, name)
import kd_core, kd_nn
for owner, name, value in kept:
    setattr(owner, name, value)
layers = [kd_nn.TensorDictModule(torch.nn.Linear(2, 2), ["x"], ["y"]) for _ in range(2)]
assert kd_nn.TensorDictSequential(*layers)(x=torch.ones(3, 2)).shape == (3, 2)
many = kd_nn.EnsembleModule(layers[0], 3)
assert many(kd_core.TensorDict(x=torch.ones(3, 2)))["y"].shape == (3, 3, 2)
"""


def test_a_torch_without_them_costs_features_and_not_the_import() -> None:
    children.check_output("-W", "ignore", "-c", WITHOUT)
