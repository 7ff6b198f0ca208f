"""Functions of torch, called with every kind of container in both libraries.

Knows how functions are called; must not know which results are expected.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from tests.interop.calls.comparing import OURS, PEER, Compared
from tests.interop.calls.outcomes import difference, outcome
from tests.interop.calls.subjects import KINDS
from torch.nn import functional as F

Call = Callable[[Any], Any]


def of(name: str, *more: object) -> Call:
    return lambda td: getattr(torch, name)(td, *more)


def beside(name: str) -> Call:
    return lambda td: getattr(torch, name)(td, td.clone())


def shapes(td: Any) -> object:
    leaves = td.values(True, True)
    return tuple(td.batch_size), [tuple(x.shape) for x in leaves if isinstance(x, torch.Tensor)]


FUNCTIONS: Final[dict[str, Call]] = {
    **{
        n: of(n)
        for n in [
            "abs",
            "neg",
            "exp",
            "sqrt",
            "sin",
            "log",
            "sigmoid",
            "clone",
            "zeros_like",
            "ones_like",
            "rand_like",
            "empty_like",
            "isfinite",
            "isnan",
            "isreal",
            "detach",
            "is_floating_point",
            "numel",
            "sum",
            "mean",
            "prod",
            "std",
            "var",
            "amax",
            "amin",
            "any",
            "all",
            "nansum",
            "nanmean",
            "logical_not",
            "trunc",
            "frac",
            "floor",
            "ceil",
            "round",
            "sign",
            "t",
            "squeeze",
            "atleast_1d",
            "atleast_2d",
            "ravel",
            "flatten",
            "max",
            "min",
            "argmax",
        ]
    },
    **{
        f"{n} dim": of(n, 0)
        for n in [
            "sum",
            "mean",
            "prod",
            "std",
            "var",
            "amax",
            "amin",
            "any",
            "all",
            "max",
            "min",
            "cumsum",
            "cumprod",
            "softmax",
            "unsqueeze",
            "squeeze",
            "unbind",
            "logsumexp",
            "cummax",
            "cummin",
            "flip",
            "select",
            "argmax",
            "sort",
            "nansum",
            "nanmean",
            "quantile",
        ]
        if n not in ("select",)
    },
    **{
        f"{n} two": beside(n)
        for n in [
            "add",
            "sub",
            "mul",
            "div",
            "pow",
            "maximum",
            "minimum",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
            "fmod",
            "remainder",
            "bitwise_and",
            "logical_and",
            "logical_or",
            "atan2",
            "lerp",
            "where",
            "equal",
            "allclose",
            "isclose",
            "dist",
            "outer",
            "dot",
            "matmul",
        ]
    },
    **{
        f"{n} number": of(n, 2)
        for n in [
            "add",
            "sub",
            "mul",
            "div",
            "pow",
            "eq",
            "ne",
            "lt",
            "ge",
            "remainder",
            "true_divide",
            "floor_divide",
        ]
    },
    "add alpha": lambda td: torch.add(td, td.clone(), alpha=2),
    "add tensor": lambda td: torch.add(td, torch.tensor(2.0)),
    "tensor add": lambda td: torch.add(torch.tensor(2.0), td),
    "clamp": lambda td: torch.clamp(td, 0.2, 0.6),
    "clamp min": lambda td: torch.clamp(td, min=0.3),
    "clamp out": lambda td: torch.clamp(td, 0.2, out=td.clone()),
    "clamp two": lambda td: torch.clamp(td, td * 0.5, td * 0.9),
    "stack": lambda td: torch.stack([td, td.clone()]),
    "stack 1": lambda td: torch.stack([td, td.clone()], 1),
    "stack -1": lambda td: torch.stack([td, td.clone()], -1),
    "stack out": lambda td: torch.stack([td, td.clone()], 0, out=torch.stack([td, td.clone()]) * 0),
    "cat": lambda td: torch.cat([td, td.clone()]),
    "cat 1": lambda td: torch.cat([td, td.clone()], 1),
    "cat -1": lambda td: torch.cat([td, td.clone()], -1),
    "cat out": lambda td: torch.cat(
        [td, td.clone()], 0, out=torch.cat([td, td.clone()], 0).clone()
    ),
    "split": lambda td: torch.split(td, 2),
    "split list": lambda td: torch.split(td, [1, 2]),
    "chunk": lambda td: torch.chunk(td, 2),
    "tensor_split": lambda td: torch.tensor_split(td, 2),
    "gather": lambda td: torch.gather(td, 0, torch.zeros(td.batch_size, dtype=torch.int64)),
    "masked_select": lambda td: torch.masked_select(
        td, torch.ones(td.batch_size, dtype=torch.bool)
    ),
    "index_select": lambda td: torch.index_select(td, 0, torch.tensor([0, 1])),
    "take_along": lambda td: torch.take_along_dim(
        td, torch.zeros(td.batch_size, dtype=torch.int64), 0
    ),
    "reshape": lambda td: torch.reshape(td, (-1,)),
    "permute": lambda td: torch.permute(td, (1, 0)),
    "transpose": lambda td: torch.transpose(td, 0, 1),
    "movedim": lambda td: torch.movedim(td, 0, 1),
    "swapaxes": lambda td: torch.swapaxes(td, 0, 1),
    "flatten 0 1": lambda td: torch.flatten(td, 0, 1),
    "unflatten": lambda td: torch.unflatten(td, 0, (3, 1)),
    "roll": lambda td: torch.roll(td, 1, 0),
    "flip": lambda td: torch.flip(td, (0,)),
    "tile": lambda td: torch.tile(td, (2, 1)),
    "repeat_interleave": lambda td: torch.repeat_interleave(td, 2, dim=0),
    "broadcast_to": lambda td: torch.broadcast_to(td, (2, *td.batch_size)),
    "squeeze 0": lambda td: torch.squeeze(td, 0),
    "unbind 1": lambda td: torch.unbind(td, 1),
    "diagonal": lambda td: torch.diagonal(td),
    "rot90": lambda td: torch.rot90(td),
    "narrow": lambda td: torch.narrow(td, 0, 0, 2),
    "select": lambda td: torch.select(td, 0, 1),
    "hstack": lambda td: torch.hstack([td, td]),
    "vstack": lambda td: torch.vstack([td, td]),
    "full_like": lambda td: torch.full_like(td, 2.0),
    "zeros_like dtype": lambda td: torch.zeros_like(td, dtype=torch.float64),
    "randn_like": lambda td: torch.randn_like(td),
    "ones_like device": lambda td: torch.ones_like(td, device="meta"),
    "empty_like": lambda td: shapes(torch.empty_like(td)),
    "rand_like": lambda td: shapes(torch.rand_like(td)),
    "where": lambda td: torch.where(torch.ones(td.batch_size, dtype=torch.bool), td, td * 2),
    "where number": lambda td: torch.where(torch.ones(td.batch_size, dtype=torch.bool), td, 0.0),
    "where td": lambda td: torch.where(td > 0, td, td * 2),
    "relu": lambda td: F.relu(td),
    "softmax F": lambda td: F.softmax(td, 0),
    "mse": lambda td: F.mse_loss(td, td * 2),
    "smooth_l1": lambda td: F.smooth_l1_loss(td, td * 2),
    "l1": lambda td: F.l1_loss(td, td * 2),
    "normalize": lambda td: F.normalize(td),
    "pad": lambda td: F.pad(td, (1, 1)),
    "dropout": lambda td: F.dropout(td, 0.0),
    "gelu": lambda td: F.gelu(td),
    "norm": lambda td: torch.norm(td),
    "lin norm": lambda td: torch.linalg.norm(td),
    "addcmul": lambda td: torch.addcmul(td, td, td, value=2),
    "addcdiv": lambda td: torch.addcdiv(td, td, td),
    "lerp": lambda td: torch.lerp(td, td * 2, 0.5),
    "lerp td": lambda td: torch.lerp(td, td * 2, td * 0 + 0.5),
    "is_tensor": lambda td: torch.is_tensor(td),
    "clone": lambda td: torch.clone(td),
    "nan_to_num": lambda td: torch.nan_to_num(td),
    "argsort": lambda td: torch.argsort(td, 0),
    "topk": lambda td: torch.topk(td, 1),
    "cumsum": lambda td: torch.cumsum(td, 0),
    "allclose": lambda td: torch.allclose(td, td.clone()),
    "equal": lambda td: torch.equal(td, td.clone()),
    "result_type": lambda td: torch.result_type(td, 1),
    "sum keepdim": lambda td: torch.sum(td, 0, keepdim=True),
    "mean dtype": lambda td: torch.mean(td, 0, dtype=torch.float64),
    "std corr": lambda td: torch.std(td, 0, correction=0),
    "tree_map": lambda td: torch.utils._pytree.tree_map(lambda x: x * 2, td),
    "tree_leaves": lambda td: torch.utils._pytree.tree_leaves(td),
    "tree_flatten_with_path": lambda td: [
        torch.utils._pytree.keystr(path)
        for path, _ in torch.utils._pytree.tree_flatten_with_path(td)[0]
    ],
    "tree_unflatten": lambda td: torch.utils._pytree.tree_unflatten(
        *torch.utils._pytree.tree_flatten(td)
    ),
    "vmap": lambda td: torch.vmap(lambda x: x * 2)(td),
    "checkpoint": lambda td: torch.utils.checkpoint.checkpoint(
        lambda x: x * 2, td, use_reentrant=False
    ),
    "add_ method": lambda td: torch.Tensor.add_(td, 1),
    "concat": lambda td: torch.concat([td, td]),
    "concatenate": lambda td: torch.concatenate([td, td], 0),
    "dstack": lambda td: torch.dstack([td, td]),
    "meshgrid": lambda td: torch.meshgrid(td, td),
    "einsum": lambda td: torch.einsum("i...->...", td),
    "bmm": lambda td: torch.bmm(td, td),
}

NOT_THERE: Final = ("Multiple dispatch failed", "no implementation found")
"""What torch says where a library does not have a function."""


def compared(kind: str) -> Iterator[Compared]:
    """Yield what both libraries do with a kind of container, for each function."""
    for name, call in FUNCTIONS.items():
        seen: list[dict[str, Any]] = []
        for lib in (OURS, PEER):
            torch.manual_seed(0)
            td = KINDS[kind](lib)
            seen.append(outcome(partial(call, td), td, lib))
        told = [str(each.get("text", each.get("result")))[:300] for each in seen]
        lacks = "error" in seen[1] and any(words in told[1] for words in NOT_THERE)
        found = None if lacks else difference(*seen)
        yield Compared(kind, f"{name}()", name.partition(" ")[0], found, *told)
