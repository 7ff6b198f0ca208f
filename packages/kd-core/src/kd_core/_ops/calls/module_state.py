"""Parameters and buffers of a module as entries of a container."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn

from kd_core._batch.descriptor import describe
from kd_core._errors import MissingDependency, wrong_type
from kd_core._keys import plain_str
from kd_core._leaves.loops import entries_of
from kd_core._nodes import registry

if TYPE_CHECKING:
    from kd_core._nodes.entry import Entries, Entry, Node


def check_module(module: object) -> None:
    """Check that a value is a module.

    Raises:
        InvalidArgument: if it is not.
    """
    if not isinstance(module, nn.Module):
        raise wrong_type("`module`", "an `nn.Module`", module)


def module_entries(
    module: nn.Module, memo: dict[int, Entry] | None = None, keep_empty: bool = False
) -> dict[str, Entry]:
    """Collect parameters and buffers; a sub-module met twice is the same container twice.

    Args:
        module: the module.
        memo: the containers of the sub-modules met before, by their ids.
        keep_empty: return an empty container for a sub-module without state.
    """
    memo = {} if memo is None else memo
    entries: dict[str, Entry] = {}
    for name, tensor in module._parameters.items():
        if tensor is not None:
            entries[name if name.__class__ is str else plain_str(name)] = tensor
    if module._buffers:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                entries[name if name.__class__ is str else plain_str(name)] = buffer
    for name, child in module._modules.items():
        # A call for each module without state would cost a tenth: "from_module" in the benchmarks.
        if child is None or not (
            child._parameters or child._modules or child._buffers or keep_empty
        ):
            continue
        node = memo.get(id(child))
        if node is None:
            inner = module_entries(child, memo, keep_empty)
            if not inner and not keep_empty:
                continue
            node = registry.make_dense(inner, describe(()), bool(child._modules))
            memo[id(child)] = node
        entries[name if name.__class__ is str else plain_str(name)] = node
    return entries


def state_entries(module: nn.Module) -> dict[str, Entry]:
    """Collect the state dict of a module, nested like its names."""
    tree: dict[str, object] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        level = tree
        *above, last = name.split(".")
        for part in above:
            level = cast("dict[str, object]", level.setdefault(part, {}))
        level[last] = value
    return dict(cast("Entries", entries_of(registry.nest_mapping(tree, describe(()), ()))))


def as_module(container: Node, module: nn.Module | None) -> Node:
    """Return a container of parameters as a module.

    Args:
        container: the parameters and buffers.
        module: the module whose buffers say whether they are saved; None: all are.

    Raises:
        MissingDependency: if the package that has the class of it is not imported.
    """
    if not hasattr(registry, "params_of"):
        raise MissingDependency(
            "`as_module=True` requires kd-nn, whose `TensorDictParams` it returns. Install it with "
            "`pip install kd-nn`, and `import kd_nn` first."
        )
    return registry.params_of(container, module)
