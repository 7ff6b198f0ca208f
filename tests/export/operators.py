"""Operators of torch, each with the numbers at which a translation of it is most likely wrong.

A row is a function of tensors and the kind of numbers that it takes. The inputs of a kind hold
every combination of its special values: signed zeros, infinities, NaN, halves between two
integers, negative integers, ties.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

NAN, INF = math.nan, math.inf
FLOATS = (0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -1.5, 2.5, -3.0, 7.25, 1e-6, -1e30, INF, -INF, NAN)
FEW = (0.0, -0.0, 1.0, -1.0, 2.5, INF, -INF, NAN)
FINITE = (0.0, -0.0, 0.5, -1.0, 1.0, 2.5, -3.0)
INTEGERS = (0, 1, -1, 2, -2, 3, -3, 7, -8, 100)
NATURAL = (0, 1, 2, 3, 5)
SMALL = (1, 2, 3, 5)


def _columns(*values: tuple[float, ...]) -> tuple[Tensor, ...]:
    """Return one tensor (n, 1) for each argument: together they hold every combination."""
    columns = zip(*itertools.product(*values), strict=True)
    return tuple(torch.tensor(column)[:, None] for column in columns)


def _rows(values: tuple[float, ...], width: int) -> tuple[Tensor, ...]:
    """Return one tensor (n, width) of every combination of values."""
    return (torch.tensor(list(itertools.product(values, repeat=width))),)


def _inputs() -> dict[str, tuple[Tensor, ...]]:
    booleans = (False, True)
    return {
        "float": _columns(FLOATS),
        "floats": _columns(FLOATS, FLOATS),
        "three": _columns(FEW, FEW, FEW),
        "integer": _columns(INTEGERS),
        "integers": _columns(INTEGERS, INTEGERS),
        "by": _columns(INTEGERS, tuple(number for number in INTEGERS if number)),
        "natural": _columns(INTEGERS, NATURAL),
        "mixed": _columns(INTEGERS, FLOATS),
        "bool": _columns(booleans),
        "bools": _columns(booleans, booleans),
        "row": _rows(FEW, 3),
        "finite": _rows(FINITE, 3),
        "whole": _rows((0, 1, -1, 2, -3, 7), 3),
        "flags": _rows(booleans, 3),
    }


INPUTS = _inputs()
"""The inputs of each kind, with the rows of all combinations along the first dimension."""


Function: TypeAlias = Callable[..., Any]


def attended(x: Tensor, **options: Any) -> Tensor:
    heads = x[:, None, :, None]
    return F.scaled_dot_product_attention(heads, heads, heads, **options)


def _calls(where: object, names: str) -> dict[str, Function]:
    return {name: getattr(where, name) for name in names.split()}


_UNARY = _calls(
    torch,
    "abs acos acosh asin asinh atan atanh ceil cos cosh deg2rad erf erfc exp exp2 "
    "expm1 floor frac isfinite isinf isnan isneginf isposinf log log10 log1p log2 "
    "logical_not logit nan_to_num neg positive rad2deg reciprocal relu round rsqrt sgn sigmoid "
    "sign signbit sin sinc sinh sqrt square tan tanh trunc",
)
_ACTIVATIONS = _calls(
    F,
    "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 selu "
    "silu softplus softshrink softsign tanhshrink",
)
_COMPARED = _calls(torch, "eq ne lt le gt ge maximum minimum")
_LOGICAL = _calls(torch, "logical_and logical_or logical_xor")
_BITS = _calls(torch, "bitwise_and bitwise_or bitwise_xor")

OPERATORS: dict[str, dict[str, Function]] = {
    "float": {
        **_UNARY,
        **_ACTIVATIONS,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "threshold": lambda x: F.threshold(x, 0.5, -2.0),
        "round_decimals": lambda x: torch.round(x, decimals=1),
        "clamp": lambda x: x.clamp(-1, 1),
        "clamp_min": lambda x: x.clamp(min=0.5),
        "clamp_max": lambda x: x.clamp(max=-0.5),
        "clamp_crossed": lambda x: x.clamp(1, -1),
        "nan_to_num_given": lambda x: torch.nan_to_num(x, 1.0, 2.0, -2.0),
        "add_number": lambda x: x + 0.5,
        "reverse_sub": lambda x: 1 - x,
        "divide_by_number": lambda x: x / 3,
        "number_divided": lambda x: 1 / x,
        "divide_by_zero": lambda x: x / 0.0,
        "remainder_number": lambda x: x % 0.5,
        "remainder_negative": lambda x: x % -0.5,
        "remainder_of_number": lambda x: torch.remainder(2.5, x),
        "fmod_number": lambda x: torch.fmod(x, 0.5),
        "floor_divide_number": lambda x: x // 0.5,
        "trunc_divide_number": lambda x: torch.div(x, 0.5, rounding_mode="trunc"),
        "wrapped_angle": lambda x: torch.remainder(x - 0.5 + math.pi, 2 * math.pi) - math.pi,
        "pow_0": lambda x: x**0,
        "pow_2": lambda x: x**2,
        "pow_3": lambda x: x**3,
        "pow_half": lambda x: x**0.5,
        "pow_minus_1": lambda x: x**-1,
        "pow_minus_half": lambda x: x**-0.5,
        "number_pow": lambda x: 2**x,
        "negative_pow": lambda x: (-2.0) ** x,
        "heaviside": lambda x: torch.heaviside(x, torch.tensor(0.5)),
        "above": lambda x: x > 0,
        "as_bool": lambda x: x.bool(),
        "as_int": lambda x: x.clamp(-100, 100).nan_to_num().int(),
        "as_long": lambda x: x.clamp(-100, 100).nan_to_num().long(),
        "as_double": lambda x: x.double(),
        "as_half": lambda x: x.half(),
        "as_half_and_back": lambda x: x.half().float(),
        "masked_fill": lambda x: x.masked_fill(x > 0, -INF),
        "where_number": lambda x: torch.where(x >= 0, x, -1.0),
        "xlogy_number": lambda x: torch.xlogy(0.0, x),
        "bucketize": lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
        "bucketize_right": lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0]), right=True),
        "lerp_number": lambda x: torch.lerp(x, x * 2, 0.25),
        "huber": lambda x: F.huber_loss(x, x * 0, reduction="none"),
    },
    "floats": {
        **_COMPARED,
        **_LOGICAL,
        **_calls(
            torch,
            "add sub mul div true_divide floor_divide remainder fmod pow atan2 fmax fmin "
            "logaddexp logaddexp2 copysign heaviside xlogy isclose ldexp",
        ),
        "div_floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
        "div_trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        "clamp_tensor": lambda a, b: a.clamp(min=b),
        "clamp_tensors": lambda a, b: a.clamp(b, -b),
        "where_above": lambda a, b: torch.where(a > b, a, b),
        "lerp": lambda a, b: torch.lerp(a, b, 0.25),
        "angle_between": lambda a, b: torch.remainder(a - b + math.pi, 2 * math.pi) - math.pi,
        "rmod": lambda a, b: (a % b) + (a // b),
        "prelu": lambda a, b: F.prelu(a, torch.tensor([0.25])),
        "masked": lambda a, b: a.masked_fill(b.isnan(), 0.0),
        "outer": lambda a, b: a[:, :, None] * b[:, None, :],
        "smooth_l1": lambda a, b: F.smooth_l1_loss(a, b, reduction="none"),
        "matmul": lambda a, b: a[:, None, :] @ b[:, :, None],
        "cat": lambda a, b: torch.cat([a, b], -1),
    },
    "three": {
        "where": lambda a, b, c: torch.where(a > 0, b, c),
        "where_float": lambda a, b, c: torch.where(a.bool(), b, c),
        "clamp": torch.clamp,
        "addcmul": lambda a, b, c: torch.addcmul(a, b, c, value=0.5),
        "addcdiv": lambda a, b, c: torch.addcdiv(a, b, c, value=0.5),
        "lerp_weight": torch.lerp,
    },
    "integer": {
        **_calls(torch, "abs neg sign sgn square bitwise_not logical_not isnan isinf isfinite"),
        **_calls(torch, "sqrt exp sigmoid tanh reciprocal floor ceil trunc round signbit sin"),
        "relu": torch.relu,
        "as_float": lambda x: x.float(),
        "as_bool": lambda x: x.bool(),
        "as_int": lambda x: x.int(),
        "as_short": lambda x: x.short(),
        "as_char": lambda x: x.to(torch.int8),
        "as_byte": lambda x: (x % 256).to(torch.uint8),
        "remainder_number": lambda x: x % 3,
        "remainder_negative": lambda x: x % -3,
        "remainder_fraction": lambda x: x % 0.5,
        "fmod_number": lambda x: torch.fmod(x, 3),
        "floor_divide_number": lambda x: x // 3,
        "floor_divide_negative": lambda x: x // -3,
        "floor_divide_fraction": lambda x: x // 0.5,
        "trunc_divide_number": lambda x: torch.div(x, 3, rounding_mode="trunc"),
        "divide_by_number": lambda x: x / 3,
        "multiplied": lambda x: x * 2.5,
        "pow_2": lambda x: x**2,
        "pow_fraction": lambda x: x**0.5,
        "shifted": lambda x: x << 2,
        "shifted_back": lambda x: x >> 1,
        "and_number": lambda x: x & 6,
        "clamp": lambda x: x.clamp(-2, 2),
        "clamp_fraction": lambda x: x.clamp(min=0.5),
        "above": lambda x: x > 0,
        "one_hot": lambda x: F.one_hot(x % 5, 5),
        "looked_up": lambda x: torch.arange(5.0)[x % 5],
        "looked_up_from_the_end": lambda x: torch.arange(5.0)[-(x % 5) - 1],
        "bucketize": lambda x: torch.bucketize(x, torch.tensor([-1, 0, 1])),
    },
    "integers": {
        **_COMPARED,
        **_LOGICAL,
        **_BITS,
        **_calls(torch, "add sub mul true_divide fmax fmin"),
        "where": lambda a, b: torch.where(a > b, a, b),
    },
    "by": {
        **_calls(torch, "remainder fmod floor_divide"),
        "div_floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
        "div_trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        "percent": lambda a, b: a % b,
        "remainder_int32": lambda a, b: a.int() % b.int(),
        "floor_divide_int32": lambda a, b: a.int() // b.int(),
    },
    "natural": {
        "pow": torch.pow,
        "shifted": lambda a, b: a << b,
        "shifted_back": lambda a, b: a >> b,
    },
    "mixed": {
        **_COMPARED,
        **_calls(torch, "add sub mul div remainder pow atan2 fmod logical_and"),
    },
    "bool": {
        "logical_not": torch.logical_not,
        "bitwise_not": lambda x: ~x,
        "as_float": lambda x: x.float(),
        "as_long": lambda x: x.long(),
        "plus": lambda x: x + 1,
        "times": lambda x: x * 2.5,
        "sum": lambda x: x.sum(-1),
    },
    "bools": {
        **_COMPARED,
        **_LOGICAL,
        **_BITS,
        "mul": torch.mul,
        "where": lambda a, b: torch.where(a, b, ~b),
    },
    "row": {
        **{
            name: lambda x, call=call: call(x, -1)
            for name, call in _calls(
                torch,
                "sum mean prod amax amin argmax argmin logsumexp softmax log_softmax cumsum "
                "all any count_nonzero nansum nanmean argsort",
            ).items()
        },
        **{
            f"{name}_values": lambda x, call=call: call(x, -1)[0]
            for name, call in _calls(torch, "max min sort").items()
        },
        **{
            f"{name}_places": lambda x, call=call: call(x, -1)[1]
            for name, call in _calls(torch, "max min").items()
        },
        "argmax_kept": lambda x: x.argmax(-1, keepdim=True),
        "argmax_first_dim": lambda x: x[:, :, None].argmax(1),
        "amax_kept": lambda x: x.amax((1,), keepdim=True),
        "sum_two": lambda x: x[:, :, None].sum((1, 2)),
        "max_two": lambda x: x[:, :, None].amax((1, 2)),
        "aminmax": lambda x: torch.cat(torch.aminmax(x, dim=-1), -1),
        "norm": lambda x: x.norm(dim=-1),
        "norm_1": lambda x: x.norm(1, dim=-1),
        "norm_inf": lambda x: x.norm(INF, dim=-1),
        "norm_minus_inf": lambda x: x.norm(-INF, dim=-1),
        "norm_0": lambda x: x.norm(0, dim=-1),
        "norm_3": lambda x: x.norm(3, dim=-1),
        "normalize": lambda x: F.normalize(x, dim=-1),
        "var": lambda x: x.var(-1),
        "std": lambda x: x.std(-1, unbiased=False),
        "softmin": lambda x: F.softmin(x, -1),
        "topk_values": lambda x: x.topk(2).values,
        "smallest": lambda x: x.topk(2, largest=False).values,
        "sort_descending": lambda x: x.sort(-1, descending=True).values,
        "quantile": lambda x: x.quantile(0.5, -1),
        "diff": lambda x: x.diff(),
        "flip": lambda x: x.flip(-1),
        "roll": lambda x: x.roll(1, -1),
        "tril": lambda x: (x[:, None, :] * torch.ones(3, 1)).tril(),
        "triu": lambda x: (x[:, None, :] * torch.ones(3, 1)).triu(1),
        "glu": lambda x: F.glu(torch.cat([x, x], -1)),
        "layer_norm": lambda x: F.layer_norm(x, (3,)),
        "rms_norm": lambda x: F.rms_norm(x, (3,)),
        "max_pool": lambda x: F.max_pool1d(x[:, None], 2, 1),
        "max_pool_2d": lambda x: F.max_pool2d(x[:, None, None], (1, 2), 1),
        "avg_pool": lambda x: F.avg_pool1d(x[:, None], 2, 1),
        "adaptive_max_pool": lambda x: F.adaptive_max_pool1d(x[:, None], 1),
        "adaptive_avg_pool": lambda x: F.adaptive_avg_pool1d(x[:, None], 1),
        "padded": lambda x: F.pad(x, (1, 1), value=-INF),
        "linear": lambda x: F.linear(x, torch.eye(3)),
        "conv": lambda x: F.conv1d(x[:, None], torch.ones(1, 1, 2)),
        "gathered": lambda x: x.gather(1, x.argmax(-1, keepdim=True)),
        "indexed_from_the_end": lambda x: x[:, torch.tensor([-1, 0])],
        "scatter": lambda x: (x * 0).scatter(1, torch.zeros_like(x).long(), x[:, :1].expand_as(x)),
        "scatter_add": lambda x: (x * 0).scatter_add(1, torch.zeros_like(x).long(), x),
        "scatter_amax": lambda x: x.scatter_reduce(1, torch.zeros_like(x).long(), x, "amax"),
        "scatter_amin": lambda x: x.scatter_reduce(1, torch.zeros_like(x).long(), x, "amin"),
        "scatter_prod": lambda x: x.scatter_reduce(1, torch.zeros_like(x).long(), x, "prod"),
        "scatter_amax_alone": lambda x: (x * 0).scatter_reduce(
            1, torch.zeros_like(x).long(), x, "amax", include_self=False
        ),
        "index_add": lambda x: (x * 0).index_add(1, torch.tensor([0, 0, 1]), x),
        "cross": lambda x: torch.linalg.cross(x, x.flip(-1)),
        "cosine": lambda x: F.cosine_similarity(x, x.flip(-1), dim=-1),
        "einsum": lambda x: torch.einsum("ni,nj->nij", x, x),
        "upsampled": lambda x: F.interpolate(x[:, None], scale_factor=2, mode="nearest"),
        "masked_softmax": lambda x: x.masked_fill(x > 0, -INF).softmax(-1),
        "attention": lambda x: attended(x),
        "unfold": lambda x: x.unfold(1, 2, 1),
    },
    "finite": {
        "argmax": lambda x: x.argmax(-1),
        "argmin": lambda x: x.argmin(-1),
        "topk_values": lambda x: x.topk(2).values,
        "sort_values": lambda x: x.sort(-1).values,
        "softmax": lambda x: x.softmax(-1),
        "masked_attention": lambda x: attended(x, attn_mask=(x > 0)[:, None, None, :]),
        "causal_attention": lambda x: attended(x, is_causal=True),
        "nearest": lambda x: F.interpolate(x[:, None], 4, mode="nearest"),
        "nearest_exact": lambda x: F.interpolate(x[:, None], 2, mode="nearest-exact"),
        "linear": lambda x: F.interpolate(x[:, None], 5, mode="linear"),
        "linear_corners": lambda x: F.interpolate(x[:, None], 5, mode="linear", align_corners=True),
        "sampled": lambda x: F.grid_sample(
            torch.arange(9.0).view(1, 1, 3, 3).expand(x.shape[0], 1, 3, 3),
            x[:, None, None, :2],
            align_corners=False,
        ),
        "sampled_nearest": lambda x: F.grid_sample(
            torch.arange(9.0).view(1, 1, 3, 3).expand(x.shape[0], 1, 3, 3),
            x[:, None, None, :2],
            mode="nearest",
            align_corners=True,
        ),
        "reflect": lambda x: F.pad(x[:, None], (1, 1), mode="reflect"),
        "replicate": lambda x: F.pad(x[:, None], (1, 1), mode="replicate"),
        "circular": lambda x: F.pad(x[:, None], (1, 1), mode="circular"),
        "std": lambda x: x.std(-1),
        "group_norm": lambda x: F.group_norm(x[:, :, None], 1),
        "norm_0": lambda x: x.norm(0, dim=-1),
    },
    "whole": {
        **{
            name: lambda x, call=call: call(x, -1)
            for name, call in _calls(
                torch, "sum prod amax amin argmax argmin cumsum all any count_nonzero"
            ).items()
        },
        "max_values": lambda x: x.max(-1).values,
        "min_places": lambda x: x.min(-1).indices,
        "sort_values": lambda x: x.sort(-1).values,
        "topk_values": lambda x: x.topk(2).values,
        "mean_of_floats": lambda x: x.float().mean(-1),
        "gathered": lambda x: x.gather(1, x.abs() % 3),
        "scatter_add": lambda x: (x * 0).scatter_add(1, x.abs() % 3, x),
        "scatter_amax": lambda x: x.scatter_reduce(1, x.abs() % 3, x, "amax"),
        "bincount": lambda x: torch.bincount(x.flatten().abs(), minlength=9)[:8],
        "cumsum_int32": lambda x: x.int().cumsum(-1),
        "sum_int32": lambda x: x.int().sum(-1),
        "repeated": lambda x: x.repeat_interleave(2, 1),
    },
    "flags": {
        **{
            name: lambda x, call=call: call(x, -1)
            for name, call in _calls(torch, "sum all any count_nonzero cumsum").items()
        },
        "mean": lambda x: x.float().mean(-1),
        "amax": lambda x: x.amax(-1),
        "max_values": lambda x: x.max(-1).values,
        "argmax_of_int": lambda x: x.int().argmax(-1),
    },
}

KNOWN: dict[str, set[str]] = {
    # onnxruntime's own kernels pass NaN over.
    "row": {
        *("norm_inf", "norm_minus_inf", "max_pool", "max_pool_2d"),
        *("scatter_amax", "scatter_amin", "scatter_amax_alone", "cosine"),
    },
    # A row of a mask without any True: torch gives zeros, the translation a mean.
    "finite": {"masked_attention"},
}
"""The operators that differ, by kind; the guide to exporting says so."""

if Version(torch.__version__) < Version("2.11"):
    # torch 2.10 itself fails to promote, to capture over a dynamic batch, or to translate these.
    del OPERATORS["integers"]["true_divide"]
    del OPERATORS["row"]["quantile"], OPERATORS["row"]["adaptive_max_pool"]
    KNOWN["row"].remove("cosine")  # which it writes in another way
