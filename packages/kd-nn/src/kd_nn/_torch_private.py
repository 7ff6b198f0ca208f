"""What this library knows of torch's private names: how torch calls a module, and what is its own.

Names that a torch may lack are looked up with what takes their place, as those of kd_core. What
torch offers to those who write distributions, such as `Distribution._validate_args` and
`_get_checked_instance`, and the dicts of a module that its documentation names are used in place.

A class of torch may be patched at any time, also before this library is imported. So a function is
taken for torch's own only where it says so itself: its globals are those of the file of torch that
defines the class, and its qualified name is the one that it has there. What a decorator returns has
other globals. Everything here is asked when it is needed, nothing is recorded at import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from kd_core.extending import private_name

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The dicts of a module that hold its hooks."""

_MODULE: Final = "torch.nn.modules.module"
GLOBAL_HOOKS: Final[tuple[Mapping[int, object], ...]] = tuple(
    private_name(_MODULE, f"_global{name}", {}) for name in HOOKS
)
"""The dicts that hold the hooks of all modules. Fallback: those are not seen."""
_FORWARD_HOOKS, _PRE_HOOKS = GLOBAL_HOOKS[:2]

REGISTRATION_HOOKS: Final[Mapping[int, object]] = private_name(
    _MODULE, "_global_module_registration_hooks", {}
)
"""The hooks that see every member of a module. Fallback: they do not see those of sequences."""


def _no_trace() -> object | None:
    return None


current_jit_trace: Final[Callable[[], object | None]] = private_name(
    "torch._C", "_get_tracing_state", _no_trace
)
"""Return what `torch.jit.trace` records, None outside of it. Fallback: a plan is recorded."""


def _no_functions() -> int:
    return 0


function_modes: Final[Callable[[], int]] = private_name(
    "torch._C", "_len_torch_function_stack", _no_functions
)
"""Return how many modes see calls of functions. Fallback: they see those of ensembles at once."""


def fake_tensors() -> FakeTensorMode:
    """Return a mode in which operators compute shapes alone, of other tensors too.

    Raises:
        NotImplementedError: If this torch has none: what asks for shapes does not work then.
    """
    mode: type[FakeTensorMode] | None = private_name(
        "torch._subclasses.fake_tensor", "FakeTensorMode", None
    )
    if mode is None:
        raise NotImplementedError(f"torch {torch.__version__} does not have `FakeTensorMode`.")
    return mode(allow_non_fake_inputs=True)


CALLS: Final = ("__call__", "_call_impl", "_wrapped_call_impl")
"""The names by which a class of modules may say how its modules are called."""

MARKS: Final = frozenset({"_is_torch_compile"})
"""What torch writes on a module that it compiles. Fallback: such a mark invalidates its plan."""

RECOMPUTED: Final = "_checkpoint_wrapped_module"
"""The name of the module inside one whose values torch computes again in the backward pass.

Fallback: a step that is wrapped so is called as any other.
"""


def calls_of_modules() -> tuple[object, object]:
    """Return what `nn.Module` has for `__call__` right now, and what that calls."""
    return nn.Module.__call__, getattr(nn.Module, "_call_impl", None)


def is_own(function: object, owner: type, name: str) -> bool:
    """Return whether a function is the one that torch defines under a name in a class."""
    home = sys.modules.get(owner.__module__)
    return (
        type(function) is FunctionType
        and home is not None
        and function.__globals__ is home.__dict__
        and function.__qualname__ == f"{owner.__qualname__}.{name}"
    )


def defines(kind: type, name: str) -> bool:
    """Return whether a class of torch has its own function under a name, inherited or not."""
    for base in kind.__mro__:
        if name in base.__dict__:
            return is_own(base.__dict__[name], base, name)
    return False


def calls_are_own() -> bool:
    """Return whether `nn.Module` calls its subclasses as torch does."""
    call = nn.Module.__dict__["__call__"]
    return is_own(call, nn.Module, "_wrapped_call_impl") and defines(nn.Module, "_call_impl")


def is_watched(module: nn.Module) -> bool:
    """Return whether hooks would see a call of the module with a container.

    Global backward hooks do not count: torch cannot attach them to a container, and they see what
    the steps wrap.
    """
    return bool(
        _FORWARD_HOOKS
        or _PRE_HOOKS
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or module._compiled_call_impl is not None
    )


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of the buffers that a state dict leaves out, to be read and changed.

    Fallback: none, so all are saved.
    """
    found: set[str] = getattr(module, "_non_persistent_buffers_set", set())
    return found


def runs_as_its_class(module: nn.Module) -> bool:
    """Return whether a module was neither patched nor compiled on its own."""
    state = module.__dict__
    return (
        "forward" not in state
        and "__call__" not in state
        and "_call_impl" not in state
        and module._compiled_call_impl is None
    )


def is_called_plainly(module: nn.Module, call: object, impl: object) -> bool:
    """Return whether a call of a module is a call of its `forward`, but for hooks.

    Args:
        module: The module.
        call: The `__call__` that its class must have.
        impl: The `_call_impl` that its class must have.
    """
    kind = type(module)
    return (
        kind.__call__ is call
        and kind._call_impl is impl
        and module._compiled_call_impl is None
        and "_call_impl" not in module.__dict__
    )


def reads_plainly(kind: type[nn.Module], names: Iterable[str]) -> bool:
    """Return whether modules of a class read attributes where torch puts them.

    That is in `__dict__`, else among parameters, buffers and sub-modules: no class defines one of
    the names, and none says how attributes are read.
    """
    if kind.__getattribute__ is not object.__getattribute__ or not defines(kind, "__getattr__"):
        return False
    return not any(name in base.__dict__ for base in kind.__mro__ for name in names)
