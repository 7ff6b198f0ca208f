"""Layers of torch that run for all copies of an ensemble at once, on stacked parameters.

`vmap` costs more than the layers of a small network: the row "ensemble of 4" of the benchmarks.
Linear layers become one batched product, layer norms are scaled after all copies are normalised,
pointwise layers run as they are. All others are left to `vmap`, and so is a module with hooks,
patches or parameters of other kinds, which would show a difference.
Knows what `forward` of torch's layers does; must not know keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # as everywhere

from kd_nn._torch_private import (
    GLOBAL_HOOKS,
    HOOKS,
    calls_are_own,
    calls_of_modules,
    defines,
    function_modes,
    is_called_plainly,
    reads_plainly,
)

Stacked: TypeAlias = Mapping[str, object]
"""The entries of one level: parameters with the copies in front, and levels below."""

_POINTWISE: Final = frozenset(
    {
        nn.CELU,
        nn.ELU,
        nn.GELU,
        nn.Hardsigmoid,
        nn.Hardswish,
        nn.Hardtanh,
        nn.Identity,
        nn.LeakyReLU,
        nn.LogSigmoid,
        nn.Mish,
        nn.ReLU,
        nn.ReLU6,
        nn.SELU,
        nn.Sigmoid,
        nn.SiLU,
        nn.Softplus,
        nn.Softsign,
        nn.Tanh,
        nn.Tanhshrink,
    }
)
_READS: Final[Mapping[type[nn.Module], tuple[str, ...]]] = {
    **dict.fromkeys(_POINTWISE, ()),
    nn.LayerNorm: ("weight", "bias", "normalized_shape", "eps"),
    nn.Linear: ("weight", "bias"),
    nn.Sequential: (),
}
"""The layers that are known, and the attributes that are read here in place of their `forward`."""
_PLAIN: Final = frozenset({Tensor, nn.Parameter})


def runs_at_once(module: nn.Module, params: Stacked, value: object, stacked: bool) -> bool:
    """Return whether a module can run for all copies at once, and no hook or patch would show it.

    Args:
        module: One copy, which may be on the meta device.
        params: Its stacked parameters.
        value: What it is called with.
        stacked: Whether the value has the copies in its first dimension; else all read it.
    """
    if type(value) is not Tensor or value.ndim <= stacked:
        return False
    if any(GLOBAL_HOOKS) or function_modes() or not calls_are_own():
        return False
    return _is_known(module, params)


def _is_known(module: nn.Module, params: Stacked) -> bool:
    kind = type(module)
    reads = _READS.get(kind)
    if reads is None or not defines(kind, "forward") or not is_unchanged(module, nn.Module):
        return False
    if kind is nn.Sequential:
        if not defines(kind, "__iter__"):
            return False
        for name, member in module._modules.items():
            below = params.get(name)
            if member is None or not _is_known(member, {} if below is None else _level(below)):
                return False
        return True
    if reads and not reads_plainly(kind, reads):
        return False
    for name, parameter in module._parameters.items():
        if name in module.__dict__:
            return False
        mine = params.get(name)
        if parameter is not None and not (isinstance(mine, Tensor) and _is_plain(mine)):
            return False
    return True


def _is_plain(parameter: Tensor) -> bool:
    return type(parameter) in _PLAIN and parameter.layout is torch.strided


def is_unchanged(module: nn.Module, base: type[nn.Module]) -> bool:
    """Return whether a module is called as those of a class are, and nothing is around that."""
    own = module.__dict__
    if "forward" in own or any(own[name] for name in HOOKS):
        return False
    return is_called_plainly(module, base.__call__, calls_of_modules()[1])


def _level(entry: object) -> Stacked:
    entries: Stacked = getattr(entry, "_kd_entries", {})
    return entries


def run_at_once(
    module: nn.Module, params: Stacked, value: Tensor, count: int, stacked: bool
) -> Tensor:
    """Run a module for which `runs_at_once` was true.

    Args:
        module: One copy.
        params: Its stacked parameters.
        value: What it reads.
        count: How many copies there are.
        stacked: Whether the value has the copies in its first dimension; else all read it.

    Returns:
        The output with the copies in its first dimension.

    Raises:
        RuntimeError: If torch refuses the value, or computes with other dtypes here.
    """
    value, stacked = _run(module, params, value, count, stacked)
    return value if stacked else torch.stack([value] * count)


def _run(
    module: nn.Module, params: Stacked, value: Tensor, count: int, stacked: bool
) -> tuple[Tensor, bool]:
    kind = type(module)
    if kind is nn.Linear:
        return _linear(params, value, count, stacked), True
    if kind is nn.LayerNorm:
        return _layer_norm(module, params, value, stacked)  # type: ignore[arg-type]  # of this class
    if kind is not nn.Sequential:
        return module.forward(value), stacked
    for name, member in module._modules.items():
        below = params.get(name)
        entries = {} if below is None else _level(below)
        value, stacked = _run(member, entries, value, count, stacked)  # type: ignore[arg-type]  # there
    return value, stacked


def _linear(params: Stacked, value: Tensor, count: int, stacked: bool) -> Tensor:
    weight, bias = params["weight"], params.get("bias")
    assert isinstance(weight, Tensor)
    rows = value.shape[stacked:-1]
    if stacked:
        flat = value.reshape(count, -1, value.shape[-1])
    else:
        flat = value.reshape(-1, value.shape[-1]).expand(count, -1, -1)
    if isinstance(bias, Tensor):
        made = torch.baddbmm(bias.unsqueeze(1), flat, weight.transpose(1, 2))
    else:
        made = torch.bmm(flat, weight.transpose(1, 2))
    return made.view(count, *rows, made.shape[-1])


def _layer_norm(
    module: nn.LayerNorm, params: Stacked, value: Tensor, stacked: bool
) -> tuple[Tensor, bool]:
    made = F.layer_norm(value, module.normalized_shape, None, None, module.eps)
    weight, bias = params.get("weight"), params.get("bias")
    if not isinstance(weight, Tensor):
        return made, stacked
    between = value.ndim - stacked - len(module.normalized_shape)
    lower = made.dtype in _LOWER and weight.dtype is torch.float32
    if between < 0 or not (lower or made.dtype is weight.dtype):
        raise RuntimeError
    shape = (len(weight), *(1,) * between, *module.normalized_shape)
    scaled = made * weight.view(shape)
    if isinstance(bias, Tensor):
        scaled = scaled + bias.view(shape)
    return scaled.to(made.dtype), True


_LOWER: Final = frozenset({torch.bfloat16, torch.float16})
"""Dtypes that layer norms of torch take beside weights of float32, as under autocast."""
