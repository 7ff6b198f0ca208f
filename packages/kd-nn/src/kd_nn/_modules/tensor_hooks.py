"""Hooks of FSDP on keyed modules: they see the tensors that a module reads and writes.

FSDP2 casts what a module is called with, and learns from inputs and outputs when the gradients of
its parameters are needed. It finds tensors in lists, tuples and dicts alone. So in a call with a
container, its hooks get the tensors at `in_keys` and `out_keys`, as if the module took those.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from torch import nn
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from typing import TypeVar

    H = TypeVar("H", bound=Callable[..., object])


_FSDP: Final = "torch.distributed.fsdp."


class TensorHooks(nn.Module):
    """A module that shows tensors to the hooks of FSDP, and containers to all others."""

    # The signatures are those of torch.
    def register_forward_pre_hook(
        self, hook: H, *, prepend: bool = False, with_kwargs: bool = False
    ) -> RemovableHandle:
        """Register a hook that runs before `forward`; see `nn.Module`."""
        before: Callable[..., object] = hook
        if with_kwargs and is_of_fsdp(hook):
            from kd_nn._modules.hooked_calls import call_before

            before = partial(call_before, hook)
        return super().register_forward_pre_hook(before, prepend=prepend, with_kwargs=with_kwargs)

    def register_forward_hook(
        self,
        hook: H,
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> RemovableHandle:
        """Register a hook that runs after `forward`; see `nn.Module`."""
        after: Callable[..., object] = hook
        if not with_kwargs and is_of_fsdp(hook):
            from kd_nn._modules.hooked_calls import call_after

            after = partial(call_after, hook)
        return super().register_forward_hook(
            after, prepend=prepend, with_kwargs=with_kwargs, always_call=always_call
        )


def is_of_fsdp(hook: object) -> bool:
    """Return whether FSDP registers a hook."""
    return str(getattr(hook, "__module__", None)).startswith(_FSDP)
