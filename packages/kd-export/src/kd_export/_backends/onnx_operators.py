"""Operators that torch's translation to ONNX gets wrong, or lacks, in our own words.

Each is written as torch computes it, for NaN, infinities, zeros of both signs, integers and
numbers near the limits of their dtype too; `tests/export/backends/test_onnx_operators.py` compares
them all. What no ONNX operator can tell, the sign of a zero, onnxruntime itself loses in `Where`.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import onnx_ir as ir
import onnxscript
import torch
from onnxscript import BFLOAT16, BOOL, DOUBLE, FLOAT, FLOAT16, INT8, INT16, INT32, INT64, UINT8
from torch import fx
from torch.export import ExportedProgram

from kd_export._console import muted
from kd_export._errors import NotExportable, line_of, place_of
from kd_export._schema.files import unused_name
from kd_export._schema.onnx_file import LARGE, PRODUCER
from kd_export._schema.schema import Entry, LinearSize, Schema

# mypy: disable-error-code="no-any-return"
# The types of onnxscript's operators are not those of the values that a translation is called with.


T = TypeVar(
    "T", bound=BFLOAT16 | BOOL | DOUBLE | FLOAT | FLOAT16 | INT8 | INT16 | INT32 | INT64 | UINT8
)
op: Any = onnxscript.opset18
aten = torch.ops.aten


def _number(value: float, like: T) -> T:
    """Return a constant of the dtype of a value, which must be an argument: others have none."""
    return op.Constant(value=ir.tensor(value, dtype=like.dtype))


def _is_float(value: T) -> bool:
    return bool(value.dtype.is_floating_point())


def _rank(shape: Sequence[object] | None) -> int:
    """Return the number of dimensions: the class of a value says that its shape is None."""
    return len(shape or ())


def _everywhere(value: bool, shape_of: T) -> BOOL:
    """Return a boolean of the shape of a value."""
    return op.Expand(
        op.Constant(value=ir.tensor(value, dtype=ir.DataType.BOOL)), op.Shape(shape_of)
    )


def _negative(x: T) -> BOOL:
    """Decide whether the sign is set, of zeros too; that of NaN is not seen."""
    zero = _number(0, x)
    return op.Or(op.Less(x, zero), op.Less(op.Reciprocal(x), zero))


def is_nan(x: T) -> BOOL:
    """Integers are never NaN."""
    return op.IsNaN(x) if _is_float(x) else _everywhere(False, x)


def is_infinite(x: T) -> BOOL:
    """Integers are never infinite."""
    return op.IsInf(x) if _is_float(x) else _everywhere(False, x)


def is_finite(x: T) -> BOOL:
    """Integers are always finite."""
    return op.Not(op.Or(op.IsNaN(x), op.IsInf(x))) if _is_float(x) else _everywhere(True, x)


def sign(x: T) -> T:
    """NaN has the sign 0."""
    if x.dtype == ir.DataType.BOOL:
        return op.Identity(x)
    return op.Sign(op.Where(op.IsNaN(x), _number(0, x), x) if _is_float(x) else x)


def signbit(x: T) -> BOOL:
    """The sign bit of a zero counts."""
    if x.dtype == ir.DataType.BOOL:
        return _everywhere(False, x)
    return _negative(x) if _is_float(x) else op.Less(x, _number(0, x))


def floor(x: T) -> T:
    """Integers are whole."""
    return op.Floor(x) if _is_float(x) else op.Identity(x)


def ceil(x: T) -> T:
    """Integers are whole."""
    return op.Ceil(x) if _is_float(x) else op.Identity(x)


def round_to_even(x: T) -> T:
    """Integers are whole."""
    return op.Round(x) if _is_float(x) else op.Identity(x)


def trunc(x: T) -> T:
    """Keep infinities."""
    return _trunc(x, _number(0, x)) if _is_float(x) else op.Identity(x)


def _trunc(x: T, zero: T) -> T:
    return op.Where(op.Less(x, zero), op.Ceil(x), op.Floor(x))


def relu(x: T) -> T:
    """Serve integers, for which onnxruntime has no `Relu`."""
    return op.Relu(x) if _is_float(x) else op.Max(x, _number(0, x))


def expm1(x: T) -> T:
    """Keep the digits of small numbers, which ``exp(x) - 1`` loses."""
    half = op.Mul(x, _number(0.5, x))
    return op.Mul(op.Tanh(half), op.Add(op.Exp(x), _number(1, x)))


def log1p(x: T) -> T:
    """Keep the digits of small numbers, which ``log(1 + x)`` loses."""
    return _log1p(x, _number(1, x))


def _log1p(x: T, one: T) -> T:
    more = op.Add(x, one)
    exact = op.Or(op.Equal(more, one), op.IsInf(x, detect_negative=0))
    return op.Where(exact, x, op.Mul(op.Log(more), op.Div(x, op.Sub(more, one))))


def log_sigmoid(x: T) -> T:
    """Return ``x`` where the sigmoid of it is 0."""
    smaller = op.Min(x, _number(0, x))
    return op.Sub(smaller, _log1p(op.Exp(op.Neg(op.Abs(x))), _number(1, x)))


def _clamp(x: T, low: float | None, high: float | None) -> T:
    """Limit by both bounds: with one, onnxruntime brings infinities to the largest number."""
    if _is_float(x):
        limits = [-math.inf if low is None else low, math.inf if high is None else high]
        return op.Clip(x, *(_number(limit, x) for limit in limits))
    lowest = None if low is None else _number(math.ceil(low), x)
    return op.Clip(x, lowest, None if high is None else _number(math.floor(high), x))


def clamp_min(x: T, min: float) -> T:
    """Keep infinities."""
    return _clamp(x, min, None)


def clamp_max(x: T, max: float) -> T:
    """Keep infinities."""
    return _clamp(x, None, max)


def clamp(x: T, min: float | None = None, max: float | None = None) -> T:
    """Keep infinities; crossed limits give the upper one."""
    return _clamp(x, min, max)


def _differ(mod: T, divisor: T, zero: T) -> BOOL:
    """Decide whether a remainder is not 0 and has another sign than the divisor."""
    signs = op.Xor(op.Less(mod, zero), op.Less(divisor, zero))
    return op.And(op.Not(op.Equal(mod, zero)), signs)


def _remainder(x: T, y: T, like: T) -> T:
    if not _is_float(like):
        return op.Mod(x, y)
    mod = op.Mod(x, y, fmod=1)
    return op.Where(_differ(mod, y, _number(0, like)), op.Add(mod, y), mod)


def remainder(x: T, y: T) -> T:
    """Return a finite number for a finite one divided by an infinite one."""
    return _remainder(x, y, x)


def remainder_of_scalar(x: float, y: T) -> T:
    """Divide a number by a tensor."""
    return _remainder(_number(x, y), y, y)


def remainder_by_scalar(x: T, y: float) -> T:
    """Divide a tensor by a number."""
    return _remainder(x, _number(y, x), x)


def _floor_divide(x: T, y: T) -> T:
    zero = _number(0, x)
    if not _is_float(x):
        quotient = op.Div(x, y)
        mod = op.Sub(x, op.Mul(quotient, y))
        return op.Sub(quotient, op.CastLike(_differ(mod, y, zero), x))
    mod = op.Mod(x, y, fmod=1)
    quotient = op.Sub(op.Div(op.Sub(x, mod), y), op.CastLike(_differ(mod, y, zero), x))
    floor = op.Floor(quotient)
    above = op.Greater(op.Sub(quotient, floor), _number(0.5, x))
    return op.Where(op.Equal(y, zero), op.Div(x, y), op.Add(floor, op.CastLike(above, x)))


def floor_divide(x: T, y: T) -> T:
    """Round the quotient down as torch does, by way of the remainder."""
    return _floor_divide(x, y)


def floor_divide_by_scalar(x: T, y: float) -> T:
    """Divide a tensor by a number."""
    return _floor_divide(x, _number(y, x))


def _divide(x: T, y: T, rounding_mode: str | None) -> T:
    if rounding_mode == "floor":
        return _floor_divide(x, y)
    quotient = op.Div(x, y)
    whole = rounding_mode is None or not _is_float(x)
    return quotient if whole else _trunc(quotient, _number(0, x))


def divide_rounded(x: T, y: T, *, rounding_mode: str | None = None) -> T:
    """Divide, and round down or to zero."""
    return _divide(x, y, rounding_mode)


def divide_rounded_by_scalar(x: T, y: float, *, rounding_mode: str | None = None) -> T:
    """Divide by a number, and round down or to zero."""
    return _divide(x, _number(y, x), rounding_mode)


def shift_left(x: T, y: T) -> T:
    """Multiply by a power of two."""
    return op.Mul(x, op.Pow(_number(2, x), y))


def shift_right(x: T, y: T) -> T:
    """Divide by a power of two, and round down: the sign stays."""
    return _floor_divide(x, op.Pow(_number(2, x), y))


def power(x: T, y: float) -> T:
    """Take roots for exponents of a half: they differ for the negative infinity."""
    if not _is_float(x) and isinstance(y, float):
        return op.Pow(op.Cast(x, to=ir.DataType.FLOAT), op.Constant(value_float=y))
    if _is_float(x) and abs(y) == 0.5:
        return op.Sqrt(x) if y > 0 else op.Reciprocal(op.Sqrt(x))
    return op.Pow(x, _number(y, x))


def power_of_tensors(x: T, y: T) -> T:
    """The result of `Pow` has the dtype of the base."""
    whole = not _is_float(x) and _is_float(y)
    return op.Pow(op.CastLike(x, y) if whole else x, y)


def where(condition: BOOL, x: T, y: T) -> T:
    """Choose among booleans, for which onnxruntime has no `Where`."""
    if x.dtype != ir.DataType.BOOL:
        return op.Where(condition, x, y)
    return op.Or(op.And(condition, x), op.And(op.Not(condition), y))


def heaviside(x: T, y: T) -> T:
    """Return 0 for NaN."""
    zero = _number(0, x)
    return op.Where(op.Equal(x, zero), y, op.CastLike(op.Greater(x, zero), x))


def _xlogy(x: T, y: T, zero: T) -> T:
    product = op.Where(op.Equal(x, zero), zero, op.Mul(x, op.Log(y)))
    return op.Where(op.IsNaN(y), y, product)


def xlogy(x: T, y: T) -> T:
    """Return NaN where ``y`` is NaN, and 0 for any other ``y`` where ``x`` is 0."""
    return _xlogy(x, y, _number(0, x))


def xlogy_of_scalar(x: float, y: T) -> T:
    """Multiply a number by a logarithm."""
    return _xlogy(_number(x, y), y, _number(0, y))


def xlogy_by_scalar(x: T, y: float) -> T:
    """Multiply by the logarithm of a number."""
    return _xlogy(x, _number(y, x), _number(0, x))


def atan2(y: T, x: T) -> T:
    """Distinguish the signs of zeros, and the directions between infinities."""
    up, along = op.Abs(y), op.Abs(x)
    zero, one = _number(0, x), _number(1, x)
    diagonal = op.Where(op.Equal(up, zero), zero, one)
    angle = op.Atan(op.Where(op.Equal(up, along), diagonal, op.Div(up, along)))
    angle = op.Where(_negative(x), op.Sub(_number(math.pi, x), angle), angle)
    return op.Where(_negative(y), op.Neg(angle), angle)


def _log_of_sum(x: T, y: T, scale: float) -> T:
    """Compute the logarithm of the sum of two powers of ``exp(scale)``."""
    unit, one = _number(scale, x), _number(1, x)
    apart = op.Mul(op.Neg(op.Abs(op.Sub(x, y))), unit)
    total = op.Add(op.Max(x, y), op.Div(_log1p(op.Exp(apart), one), unit))
    equal = op.And(op.Equal(x, y), op.IsInf(x))  # their difference is NaN
    return op.Where(equal, x, total)


def logaddexp(x: T, y: T) -> T:
    """Stay finite where ``exp`` is not."""
    return _log_of_sum(x, y, 1.0)


def logaddexp2(x: T, y: T) -> T:
    """Stay finite where ``exp2`` is not."""
    return _log_of_sum(x, y, math.log(2))


def copysign(x: T, y: T) -> T:
    """Take the sign of a zero too."""
    return op.Where(_negative(y), op.Neg(op.Abs(x)), op.Abs(x))


def fmax(x: T, y: T) -> T:
    """Prefer a number to NaN."""
    if not _is_float(x):
        return op.Max(x, y)
    return op.Where(op.IsNaN(x), y, op.Where(op.IsNaN(y), x, op.Max(x, y)))


def fmin(x: T, y: T) -> T:
    """Prefer a number to NaN."""
    if not _is_float(x):
        return op.Min(x, y)
    return op.Where(op.IsNaN(x), y, op.Where(op.IsNaN(y), x, op.Min(x, y)))


def _lerp(x: T, y: T, weight: T) -> T:
    one, half = _number(1, x), _number(0.5, x)
    span = op.Sub(y, x)
    near = op.Add(x, op.Mul(weight, span))
    far = op.Sub(y, op.Mul(span, op.Sub(one, weight)))
    return op.Where(op.Less(op.Abs(weight), half), near, far)


def lerp(x: T, y: T, weight: T) -> T:
    """Start from the nearer end, as torch does."""
    return _lerp(x, y, weight)


def lerp_by_scalar(x: T, y: T, weight: float) -> T:
    """Go a fixed part of the way."""
    return _lerp(x, y, _number(weight, x))


def _any_nan(x: T, dims: INT64 | None, keepdim: bool) -> BOOL:
    marks = op.Cast(op.IsNaN(x), to=ir.DataType.FLOAT)
    reduced = op.ReduceMax(marks, *([] if dims is None else [dims]), keepdims=int(keepdim))
    return op.Cast(reduced, to=ir.DataType.BOOL)


def _extreme(reduce: Callable[..., T], x: T, dims: INT64 | None, keepdim: bool) -> T:
    """Reduce to the largest or smallest number, or to NaN where there is one."""
    if x.dtype == ir.DataType.BOOL:
        found = reduce(
            op.Cast(x, to=ir.DataType.INT32),
            *([] if dims is None else [dims]),
            keepdims=int(keepdim),
        )
        return op.Cast(found, to=ir.DataType.BOOL)
    found = reduce(x, *([] if dims is None else [dims]), keepdims=int(keepdim))
    if not _is_float(x):
        return found
    return op.Where(_any_nan(x, dims, keepdim), _number(math.nan, x), found)


def _place(choose: Callable[..., INT64], x: T, dim: int, keepdim: bool) -> INT64:
    """Find the first of the largest or smallest numbers, or the first NaN."""
    if not _is_float(x):
        return choose(x, axis=dim, keepdims=int(keepdim))
    first = op.ArgMax(op.Cast(op.IsNaN(x), to=ir.DataType.FLOAT), axis=dim, keepdims=int(keepdim))
    dims = op.Constant(value_ints=[dim])
    found = choose(x, axis=dim, keepdims=int(keepdim))
    return op.Where(_any_nan(x, dims, keepdim), first, found)


def _whole_place(choose: Callable[..., INT64], x: T, dim: int | None, keepdim: bool) -> INT64:
    if dim is not None:
        return _place(choose, x, dim, keepdim)
    flat = op.Reshape(x, op.Constant(value_ints=[-1]))
    flat.dtype = x.dtype
    place = _place(choose, flat, 0, False)
    return op.Reshape(place, op.Constant(value_ints=[1] * _rank(x.shape))) if keepdim else place


def argmax(x: T, dim: int | None = None, keepdim: bool = False) -> INT64:
    """NaN is larger than any number."""
    return _whole_place(op.ArgMax, x, dim, keepdim)


def argmin(x: T, dim: int | None = None, keepdim: bool = False) -> INT64:
    """NaN is smaller than any number."""
    return _whole_place(op.ArgMin, x, dim, keepdim)


def amax(x: T, dim: INT64, keepdim: bool = False) -> T:
    """Return NaN where there is one."""
    return _extreme(op.ReduceMax, x, dim, keepdim)


def amin(x: T, dim: INT64, keepdim: bool = False) -> T:
    """Return NaN where there is one."""
    return _extreme(op.ReduceMin, x, dim, keepdim)


def _both(
    reduce: Callable[..., T], choose: Callable[..., INT64], x: T, dim: int, keepdim: bool
) -> tuple[T, INT64]:
    if not _rank(x.shape):
        return op.Identity(x), op.Constant(value_int=0)
    dims = op.Constant(value_ints=[dim])
    return _extreme(reduce, x, dims, keepdim), _place(choose, x, dim, keepdim)


def max_dim(x: T, dim: int, keepdim: bool = False) -> tuple[T, INT64]:
    """Return NaN and its place where there is one."""
    return _both(op.ReduceMax, op.ArgMax, x, dim, keepdim)


def min_dim(x: T, dim: int, keepdim: bool = False) -> tuple[T, INT64]:
    """Return NaN and its place where there is one."""
    return _both(op.ReduceMin, op.ArgMin, x, dim, keepdim)


def max_whole(x: T) -> T:
    """Return NaN where there is one."""
    return _extreme(op.ReduceMax, x, None, False)


def min_whole(x: T) -> T:
    """Return NaN where there is one."""
    return _extreme(op.ReduceMin, x, None, False)


OPERATORS: dict[Callable[..., object], Callable[..., object]] = {
    aten.isnan.default: is_nan,
    aten.isinf.default: is_infinite,
    aten.isfinite.default: is_finite,
    aten.sign.default: sign,
    aten.sgn.default: sign,
    aten.signbit.default: signbit,
    aten.floor.default: floor,
    aten.ceil.default: ceil,
    aten.round.default: round_to_even,
    aten.trunc.default: trunc,
    aten.relu.default: relu,
    aten.expm1.default: expm1,
    aten.log1p.default: log1p,
    aten.log_sigmoid.default: log_sigmoid,
    aten.clamp.default: clamp,
    aten.clamp_min.default: clamp_min,
    aten.clamp_max.default: clamp_max,
    aten.remainder.Tensor: remainder,
    aten.remainder.Scalar: remainder_by_scalar,
    aten.remainder.Scalar_Tensor: remainder_of_scalar,
    aten.floor_divide.default: floor_divide,
    aten.floor_divide.Scalar: floor_divide_by_scalar,
    aten.div.Tensor_mode: divide_rounded,
    aten.div.Scalar_mode: divide_rounded_by_scalar,
    aten.__lshift__.Tensor: shift_left,
    aten.__rshift__.Tensor: shift_right,
    aten.bitwise_left_shift.Tensor: shift_left,
    aten.bitwise_right_shift.Tensor: shift_right,
    aten.pow.Tensor_Scalar: power,
    aten.pow.Tensor_Tensor: power_of_tensors,
    aten.where.self: where,
    aten.heaviside.default: heaviside,
    aten.xlogy.Tensor: xlogy,
    aten.xlogy.Scalar_Self: xlogy_of_scalar,
    aten.xlogy.Scalar_Other: xlogy_by_scalar,
    aten.atan2.default: atan2,
    aten.logaddexp.default: logaddexp,
    aten.logaddexp2.default: logaddexp2,
    aten.copysign.Tensor: copysign,
    aten.fmax.default: fmax,
    aten.fmin.default: fmin,
    aten.argmax.default: argmax,
    aten.argmin.default: argmin,
    aten.amax.default: amax,
    aten.amin.default: amin,
    aten.max.default: max_whole,
    aten.max.dim: max_dim,
    aten.min.default: min_whole,
    aten.min.dim: min_dim,
    aten.lerp.Tensor: lerp,
    aten.lerp.Scalar: lerp_by_scalar,
}
"""The translation of each operator that torch's own is not used for."""


# From an exported program to a tidy ONNX model.
#
# What torch's exporter leaves to mend: the name of an inner value may be that of an input, unknown
# sizes all get one name, the metadata of nodes, with source paths and stack traces, makes small
# files three times bigger, and its errors hide their cause.

_NOISY = ("torch.onnx", "onnx_ir", "onnxscript")


def translated(program: ExportedProgram, schema: Schema) -> ir.Model:
    """Translate a program; its inputs, outputs and axes are named as the schema says.

    Raises:
        NotExportable: ONNX has no words for a part of it.
    """
    _refuse_complex(schema)
    wanted = schema.versions.get("opset")
    try:
        with muted(*_NOISY), torch.no_grad():
            # Without names: older versions take a name that a weight has too for that weight.
            # As `partial`, which has no name: torch 2.10 would match the names of parameters.
            table: dict[Callable[..., object], Callable[..., object]] = {
                operator: partial(ours) for operator, ours in OPERATORS.items()
            }
            result = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                custom_translation_table=table,
                opset_version=None if wanted is None else int(wanted),
            )
    except Exception as error:
        raise _explained(error) from error
    assert result is not None
    known = result.model.opset_imports.get("")
    if wanted is not None and known != int(wanted):
        raise NotExportable(
            f"the program cannot be written with opset {wanted}: its operators need {known}.",
            expected=int(wanted),
            got=known,
            hint="Pass a newer `opset`, or leave it out.",
        )
    _tidy(result.model, schema)
    return result.model


def write_model(model: ir.Model, path: Path, data: Path) -> None:
    """Write a model, and its weights beside it if they are large: so no copy of them is made."""
    sizes = [
        value.const_value.nbytes
        for value in model.graph.initializers.values()
        if value.const_value is not None
    ]
    beside = data.name if max(sizes, default=0) >= LARGE else None
    with muted(*_NOISY):
        ir.save(model, path, external_data=beside, size_threshold_bytes=LARGE)


def _explained(error: BaseException) -> NotExportable:
    """Name the cause, the operator and the line of the user's module."""
    chain, nodes = [error], []
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    for one in chain:
        for frame, _ in traceback.walk_tb(one.__traceback__):
            node = frame.f_locals.get("node")
            if isinstance(node, fx.Node) and node.op == "call_function":
                nodes.append(node)
    cause = re.sub(r"\x1b\[\d*m", "", str(chain[-1])).strip() or type(chain[-1]).__name__
    where, operator = "", type(error).__name__
    if nodes:
        operator = str(nodes[-1].target)
        line = line_of(nodes[-1].meta.get("stack_trace") or "")
        where = f" `{operator}`{place_of(nodes[-1])}{line}"
    return NotExportable(
        f"ONNX cannot express{where or ' the program'}: {cause.splitlines()[0].rstrip('.')}.",
        got=operator,
        hint="Save it as `.pt2`, or replace that operator in the module.",
    )


def _refuse_complex(schema: Schema) -> None:
    for entry in (*schema.inputs, *schema.outputs):
        if entry.dtype.startswith("complex"):
            raise NotExportable(
                f"`{entry.wire}` is {entry.dtype}, and ONNX files cannot hold complex numbers.",
                key=entry.key,
                got=entry.dtype,
                hint="Use `torch.view_as_real(x)` as input or output, or save it as `.pt2`.",
            )


def _tidy(model: ir.Model, schema: Schema) -> None:
    """Drop what a file should not tell, give values and axes their names."""
    graph = model.graph
    _keep_initializers(graph)
    _name_border(graph.inputs, schema.inputs)
    _name_border(graph.outputs, schema.outputs)
    axes = _symbols(graph, schema)
    border = {*graph.inputs, *graph.outputs}
    used = {entry.name for entry in (*schema.inputs, *schema.outputs)}
    for node in graph:
        node.metadata_props.clear()
        node.doc_string = None
    for value in _values(graph):
        value.metadata_props.clear()
        if value.shape is not None:
            value.shape = _renamed_shape(value.shape, axes)
        if value not in border and value.name is not None:
            value.name = unused_name(value.name, used)
            used.add(value.name)
    graph.metadata_props.clear()
    model.metadata_props.clear()
    model.producer_name = PRODUCER


def _keep_initializers(graph: ir.Graph) -> None:
    """Register the constants that lost their place to another of the same name.

    onnxscript's fusion of `Min` and `Max` names their limits after the value that they limit: of
    two that limit one value, both nodes would read the limits of the second.
    """
    known = {*graph.inputs, *graph.initializers.values()}
    for value in [value for node in graph for value in node.inputs]:
        lost = value is not None and value.producer() is None and value.const_value is not None
        if value is not None and lost and value not in known:
            value.name = unused_name(value.name or "constant", [*graph.initializers])
            graph.register_initializer(value)
            known.add(value)


def _name_border(values: Sequence[ir.Value], entries: Sequence[Entry]) -> None:
    for value, entry in zip(values, entries, strict=True):
        value.name = entry.name


def _symbols(graph: ir.Graph, schema: Schema) -> dict[str, str]:
    """Map the sizes of the translated inputs, and their symbols (``s77``), to names of axes."""
    named = {
        str(size.value): name
        for value, entry in zip(graph.inputs, schema.inputs, strict=True)
        for size, name in zip(value.shape or (), entry.shape, strict=True)
        if isinstance(name, str) and not isinstance(size, int)
    }
    solved: dict[str, str] = {}
    for text, name in named.items():
        one, other = LinearSize.parse(text), LinearSize.parse(name)
        axis = one.solve(other) if one is not None and other is not None else None
        if one is not None and axis is not None:
            solved[one.axis] = str(axis)
    return solved | named


def _renamed_shape(shape: ir.Shape, axes: dict[str, str]) -> ir.Shape:
    """Return a shape whose sizes are named after axes; several values may share the old one."""
    # A size that torch does not know stays without a name: two of one name would be equal.
    return ir.Shape(
        size if isinstance(size, int) or size.value is None else _renamed(str(size.value), axes)
        for size in shape
    )


def _renamed(expression: str, axes: dict[str, str]) -> str:
    def name(word: re.Match[str]) -> str:
        found = axes.get(word[0], word[0])
        return found if found.isidentifier() else f"({found})"

    return axes.get(expression) or re.sub(r"[A-Za-z_]\w*", name, expression)


def _values(graph: ir.Graph) -> list[ir.Value]:
    """List all values of a graph: initialisers, inputs, results of nodes."""
    results = [value for node in graph for value in node.outputs]
    return [*graph.initializers.values(), *graph.inputs, *results]
