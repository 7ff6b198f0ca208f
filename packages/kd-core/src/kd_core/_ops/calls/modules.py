"""Running a module with the entries of a container as its parameters."""

from __future__ import annotations

from torch import nn

from kd_core._ops.calls.module_scope import ModuleScope
from kd_core._protocol.primitives import AbstractContainer


class Modules(AbstractContainer):
    """Exchange with the parameters of a module."""

    __slots__ = ()

    def to_module(self, module: nn.Module) -> ModuleScope:
        """Return a context in which a module computes with the entries of this container.

        Entries are matched by name with parameters, buffers and sub-modules; some of them may be
        left out. On exit, also after an error, the module is as before. Contexts nest. Shared
        weights take one value, that of their first name. A module that other threads use at the
        same time must be copied: a second thread that enters a context of it gets an error, one
        that calls it sees the exchanged parameters.

        Raises:
            KeyNotFound: on entry, if an entry matches nothing in the module.
            ModuleBusy: on entry, if another thread is in a context of the module.

        Warns:
            UserWarning: if the context is dropped before it was entered: nothing was exchanged.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> net = torch.nn.Linear(2, 1)
            >>> ones = TensorDict({"weight": torch.ones(1, 2), "bias": torch.ones(1)})
            >>> with ones.to_module(net):
            ...     net(torch.tensor([1.0, 2.0]))
            tensor([4.])
        """
        return ModuleScope(self._entries, module)
