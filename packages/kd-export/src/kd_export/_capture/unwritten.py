"""Parameters that a call must not change, buffers that it replaces, and hooks at buffers.

Parameters are the user's own. Knows which memory they have; must not know programs or keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules.module import (
    _global_buffer_registration_hooks,
    register_module_buffer_registration_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from kd_export._errors import NotExportable


class Unwritten(TorchDispatchMode):
    """Refuse, in a block, the operators that write into the parameters of a module.

    Raises:
        NotExportable: An operator would have written into one; it was not run.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # by torch
        self._names = {_memory(one): name for name, one in module.named_parameters()}
        self._names.pop(0, None)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator, if it writes into other memory."""
        given = dict(kwargs or {})
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else given.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                name = self._names.get(_memory(tensor))
                if name is not None:
                    raise changed(name, f"`{func}`")
        return func(*args, **given)


@contextlib.contextmanager
def replaced_buffers(module: nn.Module) -> Iterator[list[str]]:
    """Collect the names of the buffers to which a call in the block assigns another tensor."""
    names = {
        (owner, key): f"{path}.{key}" if path else key
        for path, owner in module.named_modules()
        for key in owner._buffers
    }
    found: list[str] = []

    def note(owner: nn.Module, key: str, _: Tensor) -> None:
        name = names.get((owner, key))
        if name is not None and name not in found:
            found.append(name)

    handle = register_module_buffer_registration_hook(note)
    try:
        yield found
    finally:
        handle.remove()


@contextlib.contextmanager
def hooks_of_torch_removed() -> Iterator[None]:
    """Remove the hooks of torch that a failed export in the block leaves at buffers.

    Up to 2.12, torch removes its own only after an export that succeeds. A hook that stays sees
    every module of the process: it keeps the exported one alive, and breaks compiled graphs.
    """
    before = set(_global_buffer_registration_hooks)
    try:
        yield
    finally:
        for number in _global_buffer_registration_hooks.keys() - before:
            hook = _global_buffer_registration_hooks[number]
            if getattr(hook, "__qualname__", "").startswith("register_buffer_assignment_hook."):
                del _global_buffer_registration_hooks[number]


def changed(name: str, where: str) -> NotExportable:
    """Build the error of a module whose call changes a part of it."""
    return NotExportable(
        f"the call changes `{name}` of the module ({where}).",
        expected="a module without state",
        got=name,
        hint="Give the state as an input key and the new state as an output key.",
    )


def _memory(value: object) -> int:
    """Return where the numbers of a plain tensor are; 0 for what has none in one place."""
    if not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter):
        return 0
    if value.layout is not torch.strided:
        return 0
    return value.untyped_storage().data_ptr()
