"""Operations that calculate: the function of torch on each leaf, operands laid beside it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from random import Random
from typing import cast

import numpy
import torch
from tests.fuzz.checking import Call, Refusal
from tests.fuzz.data import Batch, Data, Unknown, chosen_data
from tests.fuzz.operands import (
    Operand,
    check_keys,
    each,
    operand_node,
    paired,
    some_operand,
    write_each,
)
from tests.fuzz.registry import odd, operation
from tests.fuzz.subjects import Plain, Subject, build, twin, values
from tests.fuzz.subjects import plain as plain_of
from tools.operations import ARITHMETIC, COMPARISONS, LOGIC, UNARY
from torch import Tensor

from kd_core import TensorDictBase

Binary = {row.name: row for row in (*ARITHMETIC, *LOGIC, *COMPARISONS)}


OF_TENSORS = {
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "atan2",
    "hypot",
    "logaddexp",
    "logical_and",
    "logical_or",
    "logical_xor",
}
"""Functions for which torch takes no number."""


def promoted(name: str, leaf: Tensor, other: object) -> object:
    """Return an operand as a function takes it: a number promoted beside the leaf, or as it is."""
    if name not in OF_TENSORS or isinstance(other, Tensor):
        return other
    number = cast("complex", other.item() if isinstance(other, numpy.generic) else other)
    if name.startswith("logical"):
        return torch.tensor(bool(number))
    if name == "atan2" and isinstance(number, int):
        number = float(number)
    dtype = torch.result_type(leaf, number)
    whole = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
    if whole and not torch.iinfo(dtype).min <= int(number.real) <= torch.iinfo(dtype).max:
        raise Refusal(f"{dtype} does not hold {number}")
    return torch.tensor(number, dtype=dtype)


def operand_of(rng: Random, s: Subject, name: str) -> Operand:
    """Return an operand for a function, with which torch computes alike in all its kernels.

    The derivative of a power has the exponent 2**40 - 1, which is odd for the scalar loop of torch,
    and even for its vectorized loop, because no float32 holds it. Beside float16 one loop takes
    2**40 as a float32, the other as infinity.
    """
    operand = some_operand(rng, s)
    half = any(leaf.dtype is torch.float16 for leaf in s.node.tensors())
    while (half or "pow" in name) and isinstance(operand.ours, int) and operand.ours == 2**40:
        operand = some_operand(rng, s)
    return operand


def lacks_promotion(name: str, operand: Operand) -> bool:
    """Return whether torch may lack the promotion of scalars, which members of a stack hold."""
    return name in OF_TENSORS and isinstance(operand.ours, complex)


OPERATORS = ("__neg__", "__pos__", "__invert__", "__abs__")


@operation(*(row.name for row in UNARY), *OPERATORS)
def unary(rng: Random, s: Subject, name: str) -> Call:
    fn: Callable[..., Tensor] = getattr(operator if name in OPERATORS else torch, name)
    use = name not in OPERATORS and rng.random() < 0.2
    options = keywords_of(rng, name)
    if options or not use:
        ours: Callable[[TensorDictBase], object] = operator.methodcaller(name, **options)
    else:
        ours = fn
    return Call(
        name,
        f"{'torch' if use else 'td'}.{name}({options})",
        ours,
        lambda plain: each(plain, lambda leaf: fn(leaf, **options)),
        exact=False,
        memberwise=True,
    )


@operation(*(f"{row.name}_" for row in UNARY if row.in_place))
def unary_in_place(rng: Random, s: Subject, name: str) -> Call:
    write = operator.methodcaller(name, **keywords_of(rng, name))
    return Call(
        name,
        f"td.{name} {write}",
        write,
        lambda plain: write_each(plain, write),
        writes=True,
        exact=False,
        memberwise=True,
    )


def options_of(rng: Random, name: str) -> dict[str, object]:
    """Return keywords of a function of two."""
    base = name.removesuffix("_")
    if rng.random() < 0.6 or base not in ("add", "sub", "rsub", "div"):
        return {}
    if base == "div":
        return {"rounding_mode": rng.choice(["floor", "trunc", None, "up"])}
    return {"alpha": rng.choice([2, 0.5, -1])}


def keywords_of(rng: Random, name: str) -> dict[str, object]:
    """Return keywords of a function of one."""
    base = name.removesuffix("_")
    options: dict[str, dict[str, list[object]]] = {
        "nan_to_num": {"nan": [0.0, 2.0], "posinf": [9.0], "neginf": [-9.0, None]},
        "round": {"decimals": [0, 1, -1]},
        "logit": {"eps": [0.1, None]},
    }
    found = options.get(base, {})
    return {key: rng.choice(values) for key, values in found.items() if rng.random() < 0.4}


@operation(*Binary)
def binary(rng: Random, s: Subject, name: str) -> Call:
    operand, options = operand_of(rng, s, name), options_of(rng, name)
    fn = getattr(Tensor, name) if not hasattr(torch, name) else getattr(torch, name)
    takes = name not in OF_TENSORS or isinstance(operand.ours, (Tensor, TensorDictBase))
    use = takes and rng.random() < 0.15

    def leafwise(leaf: Tensor, other: object) -> object:
        return fn(leaf, promoted(name, leaf, other), **options)

    return Call(
        name,
        f"{'torch' if use else 'td'}.{name}({operand.text}, {options})",
        lambda td: (
            fn(td, operand.ours, **options) if use else getattr(td, name)(operand.ours, **options)
        ),
        lambda plain: answered(name, operand, paired(plain, [operand], leafwise)),
        exact=False,
        memberwise=not isinstance(operand.ours, (Tensor, TensorDictBase)),
        may_refuse=lambda plain: lacks_promotion(name, operand),
    )


def answered(name: str, operand: Operand, result: object) -> object:
    """Return the result of a function of two; whether data is equal is compared elsewhere."""
    if name in ("eq", "ne") and isinstance(operand.ours, TensorDictBase) and holds_data(result):
        raise Unknown("data is compared")
    return result


def holds_data(tree: object) -> bool:
    if isinstance(tree, Plain):
        return any(map(holds_data, tree.entries.values()))
    return isinstance(tree, Data)


@operation(*(f"{row.name} default" for row in Binary.values() if row.default))
@operation("rsub default", "clamp_min default", "clamp_max default")
def with_default(rng: Random, s: Subject, name: str) -> Call:
    """Call a function of two containers whose keys differ."""
    method = name.split()[0]
    fn: Callable[..., Tensor] = getattr(torch, method)
    options = options_of(rng, method)
    default = rng.choice([0, 2, 1.5, True, "intersection", torch.tensor(2), torch.tensor(0.5)])
    if s.ragged:
        node = twin(s.node)
    else:
        whole = rng.random() < 0.8
        node = operand_node(rng, plain_of(s.node), whole, "same", rng.random() < 0.6)
        more = values(rng, node.batch, torch.float32)
        node.entries.update({"more": more} if rng.random() < 0.6 else {})
    operand = build(node)
    return Call(
        name,
        f"td.{method}(container {node.batch} of {[*node.entries]}, {options}, default={default})",
        lambda td: getattr(td, method)(operand, **options, default=default),
        lambda tree: joined(tree, plain_of(node), lambda a, b: fn(a, b, **options), default),
        exact=False,
        unchecked=s.ragged,
    )


def default_beside(leaf: Tensor, default: object) -> Tensor:
    """Return a default as a tensor of the dtype that it has as a number beside a leaf."""
    if isinstance(default, Tensor):
        return default
    value = cast("float", default)
    return torch.full((), value, dtype=torch.result_type(leaf, value))


def joined(
    mine: Plain,
    theirs: Plain,
    fn: Callable[[Tensor, Tensor], Tensor],
    default: object,
    data: Callable[[Data, Data, Batch], Data] | None = None,
) -> Plain:
    """Combine two trees key by key; a default stands for what one of them lacks."""
    new = Plain(mine.batch)

    def alone(value: object, left: bool) -> object:
        if isinstance(value, Plain):
            inner = Plain(mine.batch if not value.batch else value.batch)
            inner.entries = {key: alone(each, left) for key, each in value.entries.items()}  # type: ignore[misc]  # entries
            return inner
        if isinstance(value, Data):
            if data is None or value.rows is None:
                return value
            none = Data(None, value.kind, torch.tensor(-1))
            return data(value, none, ()) if left else data(none, value, ())
        if not isinstance(value, Tensor):
            return value
        number = default_beside(value, default)
        result = fn(value, number) if left else fn(number, value)
        wide = not left and mine.batch and not theirs.batch
        return result.expand((*mine.batch, *result.shape)) if wide else result

    for key, value in mine.entries.items():
        other = theirs.entries.get(key)
        if isinstance(value, Plain) and isinstance(other, Plain):
            new.entries[key] = joined(value, other, fn, default, data)
        elif isinstance(value, Tensor) and isinstance(other, Tensor):
            result = fn(value, other)
            if tuple(result.shape[: len(mine.batch)]) != mine.batch:
                raise Refusal("the batch would change")
            new.entries[key] = result
        elif isinstance(value, Data) and isinstance(other, Data):
            new.entries[key] = value if data is None else data(value, other, mine.batch)
        elif other is not None:
            new.entries[key] = value
        elif default != "intersection":
            new.entries[key] = alone(value, True)  # type: ignore[assignment]  # an entry
    for key, value in theirs.entries.items():
        if key not in mine.entries and default != "intersection":
            new.entries[key] = alone(value, False)  # type: ignore[assignment]  # an entry
    return new


@operation("where pad")
def where_padded(rng: Random, s: Subject, name: str) -> Call:
    """Choose rows of two containers whose keys differ."""
    tree = None if s.ragged else plain_of(s.node)
    if tree is None:
        node = twin(s.node)
    else:
        node = operand_node(rng, tree, True, "same", rng.random() < 0.6)
        node.entries["more"] = values(rng, (*node.batch, 2), torch.float32)
    condition = values(rng, s.batch, torch.bool)
    pad = rng.choice([0, 1.5, 2])
    operand = build(node)

    def choose(leaf: Tensor, other: Tensor) -> Tensor:
        if pad == 0 and torch.bool in (leaf.dtype, other.dtype):  # which a boolean can hold
            leaf, other = (x if x.ndim else x.bool() for x in (leaf, other))
        ndim = max(leaf.ndim, other.ndim)
        behind = condition.reshape((*s.batch, *(1,) * (ndim - len(s.batch))))
        return torch.where(behind, leaf, other)

    def choose_data(mine: Data, theirs: Data, batch: Batch) -> Data:
        return chosen_data(mine, theirs, choose, batch)

    return Call(
        name,
        f"td.where(mask, container of {[*node.entries]}, pad={pad})",
        lambda td: td.where(condition, operand, pad=pad),
        lambda tree: joined(tree, plain_of(node), choose, pad, choose_data),
        exact=False,
        unchecked=s.ragged,
    )


@operation("mod", "rsub")
def irregular(rng: Random, s: Subject, name: str) -> Call:
    operand = operand_of(rng, s, name)
    fn = torch.rsub if name == "rsub" else torch.remainder
    return Call(
        name,
        f"td.{name}({operand.text})",
        lambda td: getattr(td, name)(operand.ours),
        lambda plain: paired(plain, [operand], lambda leaf, other: fn(leaf, other)),
        exact=False,
        memberwise=not isinstance(operand.ours, (Tensor, TensorDictBase)),
    )


OWN = {row.name: getattr(torch, row.name) for row in Binary.values() if row.own}


def written_back(name: str, leaf: Tensor, other: Tensor) -> Tensor:
    """Write the result of a function that has no in-place form."""
    result = OWN[name](leaf, other)
    if not torch.can_cast(result.dtype, leaf.dtype) or result.shape != leaf.shape:
        raise Refusal("the result does not fit")
    return leaf.copy_(cast("Tensor", result))


@operation(*(f"{row.name}_" for row in Binary.values() if row.in_place))
def binary_in_place(rng: Random, s: Subject, name: str) -> Call:
    operand, options = operand_of(rng, s, name), options_of(rng, name)

    def write(leaf: Tensor, other: object) -> object:
        other = promoted(name[:-1], leaf, other)
        if name[:-1] in OWN:
            return written_back(name[:-1], leaf, cast("Tensor", other))
        return getattr(leaf, name)(other, **options)

    return Call(
        name,
        f"td.{name}({operand.text}, {options})",
        lambda td: getattr(td, name)(operand.ours, **options),
        lambda plain: paired(plain, [operand], write, write=True),
        writes=True,
        exact=False,
        memberwise=not isinstance(operand.ours, (Tensor, TensorDictBase)),
        may_refuse=lambda plain: lacks_promotion(name[:-1], operand),
    )


SYMBOLS = {row.operator: row for row in Binary.values() if row.operator}


@operation(*(f"__{symbol}__" for symbol in SYMBOLS))
def symbol(rng: Random, s: Subject, name: str) -> Call:
    operand = operand_of(rng, s, name)
    while isinstance(operand.ours, (str, list)):  # Python answers `==` itself
        operand = operand_of(rng, s, name)
    fn = getattr(operator, {"__and__": "and_", "__or__": "or_"}.get(name, name))
    return Call(
        name,
        f"td {name} {operand.text}",
        lambda td: fn(td, operand.ours),
        lambda plain: answered(name.strip("_"), operand, paired(plain, [operand], fn)),
        exact=False,
        memberwise=not isinstance(operand.ours, (Tensor, TensorDictBase)),
    )


@operation(*(f"__r{symbol}__" for symbol, row in SYMBOLS.items() if row not in COMPARISONS))
def reflected(rng: Random, s: Subject, name: str) -> Call:
    operand = operand_of(rng, s, name)
    while isinstance(operand.ours, (str, TensorDictBase)):
        operand = operand_of(rng, s, name)
    plain_name = f"__{name[3:]}"
    fn = getattr(operator, {"__and__": "and_", "__or__": "or_"}.get(plain_name, plain_name))
    return Call(
        name,
        f"{operand.text} {plain_name} td",
        lambda td: fn(operand.ours, td),
        lambda plain: paired(plain, [operand], lambda leaf, other: fn(other, leaf)),
        exact=False,
    )


@operation(*(f"__i{symbol}__" for symbol, row in SYMBOLS.items() if row.in_place))
def augmented(rng: Random, s: Subject, name: str) -> Call:
    operand = operand_of(rng, s, name)
    fn = getattr(operator, name)
    return Call(
        name,
        f"td {name} {operand.text}",
        lambda td: fn(td, operand.ours),
        lambda plain: paired(plain, [operand], fn, write=True),
        writes=True,
        exact=False,
    )


def clamped(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function of both limits, where one may be a number and the other a tensor."""

    def both(leaf: Tensor, low: object, high: object) -> Tensor:
        try:
            return fn(leaf, low, high)
        except TypeError:
            return fn(fn(leaf, low, None), None, high)

    return both


@operation(
    "clamp",
    "clamp_",
    "clamp_min",
    "clamp_max",
    "clamp_min_",
    "clamp_max_",
    "lerp",
    "lerp_",
    "addcmul",
    "addcmul_",
    "addcdiv",
    "addcdiv_",
)
def blend(rng: Random, s: Subject, name: str) -> Call:
    first, second = operand_of(rng, s, name), operand_of(rng, s, name)
    write = name.endswith("_")
    options: dict[str, object] = {}
    if name.startswith("addc") and rng.random() < 0.4:
        options = {"value": rng.choice([2, 0.5, True])}
    operands = [first, second]
    if name.startswith(("clamp_min", "clamp_max")):
        operands = [first]
    elif name.startswith("clamp") and rng.random() < 0.4:
        missing = Operand(None, lambda plain, path, leaf: None, "None")
        operands = rng.choice([[first, missing], [missing, second], [missing, missing]])
    fn = getattr(Tensor, name)
    if name in ("clamp", "clamp_"):
        fn = clamped(fn)

    def theirs(plain: Plain) -> object:
        real = [operand for operand in operands if operand.ours is not None]
        if not real:
            raise Refusal("nothing to do")
        check_keys(plain, real)
        return (
            paired(plain, operands, lambda leaf, *others: fn(leaf, *others, **options), write)
            if len(real) == len(operands)
            else paired(
                plain,
                real,
                lambda leaf, *others: fn(leaf, *filled(operands, others), **options),
                write,
            )
        )

    return Call(
        name,
        f"td.{name}({', '.join(operand.text for operand in operands)}, {options})",
        lambda td: getattr(td, name)(*(operand.ours for operand in operands), **options),
        theirs,
        writes=write,
        exact=False,
        wider=len({isinstance(each.ours, (Tensor, TensorDictBase)) for each in operands}) > 1,
    )


def filled(operands: list[Operand], others: tuple[object, ...]) -> list[object]:
    found = iter(others)
    return [None if operand.ours is None else next(found) for operand in operands]


def odd_value(rng: Random) -> object:
    return odd(rng, rng.randint(0, 3))
