"""Write the pointwise methods and the reductions of containers from their table.

    python tools/generate_ops.py            write
    python tools/generate_ops.py --check    only compare; 1 where a file is stale

The result is plain typed Python, committed, so that mypy, tracebacks and documentation see methods.
"""

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kd_core._ops.table import BinaryRow, CastRow, ReductionRow, UnaryRow

OPS = Path(__file__).parent.parent / "packages/kd-core/src/kd_core/_ops"
WIDTH = 100

POINTWISE = '''"""Pointwise operations: one typed method per row of `table.py`.

Written by `tools/generate_ops.py`: change the table, then run `nox -s generate`. What an operand
may be, and how leaves are paired, stands in `_operands`.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import TYPE_CHECKING

import torch

from kd_core._leaves.foreach import (
    add_tensor,
    add_tensor_,
    div_tensor,
    div_tensor_,
    mul_tensor,
    mul_tensor_,
    sub_tensor,
    sub_tensor_,
)
from kd_core._ops.operands import binary, binary_, cast_leaves, is_operand, reflected, unary, unary_
from kd_core._protocol.primitives import Waist

if TYPE_CHECKING:
    from typing import Self

    from kd_core._ops.operands import Operand
'''

REDUCTION = '''"""Reductions to one value: one typed method per row of `table.py`.

Written by `tools/generate_ops.py`: change the table, then run `nox -s generate`. What `dim` and
`reduce` mean stands in `_reductions`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, overload

import torch

from kd_core._ops.reducing import logsumexp, norm, prod, reduced
from kd_core._protocol.primitives import Waist

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor

    from kd_core._ops.reducing import Dim
'''

CLASSES = {
    "Reductions": """Reductions to one value.

    Without `dim` every leaf is reduced to one number, and the batch size is (). `dim` names batch
    dimensions, or is `"feature"` for all dimensions behind them; `keepdim` keeps those reduced with
    size 1. `reduce=True` takes all leaves as one tensor, and gives one.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.ones(3), "b": torch.ones(3, 2)}, [3])
        >>> td.sum().to_dict()
        {'a': tensor(3.), 'b': tensor(6.)}
        >>> td.sum(0)["b"], td.mean(0, keepdim=True).batch_size
        (tensor([3., 3.]), torch.Size([1]))
        >>> td.sum(dim="feature")["b"], td.sum(reduce=True)
        (tensor([2., 2., 2.]), tensor(9.))
    """,
    "Unary": """Functions of one tensor, applied to every leaf.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.tensor([-4.0]), "b": {"c": torch.tensor([9.0])}})
        >>> td.abs().sqrt().to_dict()
        {'a': tensor([2.]), 'b': {'c': tensor([3.])}}
    """,
    "UnaryInPlace": """Functions of one tensor that write into the storage of every leaf.

    All leaves are checked before the first is written; allowed on a locked container.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> a = torch.tensor([4.0])
        >>> td = TensorDict({"a": a}).lock_()
        >>> td.sqrt_() is td, a
        (True, tensor([2.]))
    """,
    "Arithmetic": """Arithmetic with a number, a tensor over the batch dimensions, or a container.

    Two containers must have the same keys, and the same batch size or one of them ().

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.ones(2), "b": torch.ones(2, 3)}, [2])
        >>> (1 - td / 2)["a"]
        tensor([0.5000, 0.5000])
        >>> (td * torch.tensor([1.0, 2.0]) + td)["b"]
        tensor([[2., 2., 2.],
                [3., 3., 3.]])
    """,
    "ArithmeticInPlace": """Arithmetic that writes into the storage of every leaf.

    All leaves are checked before the first is written; allowed on a locked container.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> a = torch.ones(2)
        >>> td = TensorDict({"a": a}, [2])
        >>> td += 1
        >>> a
        tensor([2., 2.])
    """,
    "Logic": """Bitwise and logical operations.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.tensor([True, False])}, [2])
        >>> (~td | torch.tensor([True, False]))["a"]
        tensor([True, True])
    """,
    "LogicInPlace": """Bitwise and logical operations that write into the storage of every leaf.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.tensor([True, False])}, [2])
        >>> td.logical_xor_(torch.tensor([True, True]))["a"]
        tensor([False,  True])
    """,
    "Comparisons": """Comparisons: containers of booleans.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.arange(3), "b": torch.ones(3)}, [3])
        >>> (td > 0)["a"]
        tensor([False,  True,  True])
    """,
    "Casts": """Casts of every leaf to a dtype; a leaf that has it already is shared.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.arange(3), "b": torch.ones(3)}, [3])
        >>> td.float()["a"].dtype, td.float()["b"] is td["b"]
        (torch.float32, True)
    """,
}


def load_table() -> ModuleType:
    """Load the table without its package, which needs torch."""
    spec = importlib.util.spec_from_file_location("table", OPS / "table.py")
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    sys.modules["table"] = table
    spec.loader.exec_module(table)
    return table


def class_of(name: str, methods: Iterator[str]) -> str:
    """Write a class: its docstring, and its methods."""
    head = f'\n\nclass {name}(Waist):\n    """{CLASSES[name]}"""\n\n    __slots__ = ()\n'
    return head + "".join(methods)


def method(name: str, arguments: str, text: str, *body: str, ignore: str = "") -> str:
    """Write one method, its docstring being one line (none for an operator)."""
    head = f"\n    def {name}(self{arguments}) -> Self:{ignore}\n"
    doc = f'        """{text}"""\n' if text else ""
    return head + doc + "".join(f"{wrapped(line)}\n" for line in body)


def wrapped(line: str) -> str:
    """Indent a line of a body as the formatter does, its arguments below it if it is too long."""
    indent = " " * 8
    if line.startswith("    "):
        indent, line = " " * 12, line.strip()
    if len(indent + line) <= WIDTH:
        return indent + line
    head, rest = line.split("(", 1)
    inner = f"\n{indent}    "
    if len(indent + rest) + 3 <= WIDTH:
        return f"{indent}{head}({inner}{rest[:-1]}\n{indent})"
    each = "".join(f"{inner}{argument}," for argument in rest[:-1].split(", "))
    return f"{indent}{head}({each}\n{indent})"


def unary(rows: Sequence["UnaryRow"]) -> Iterator[str]:
    """Write the functions of one tensor, and their operators."""
    for row in rows:
        kernel = f", torch._foreach_{row.name}" if row.kernel else ""
        body = f"return unary(self, torch.{row.name}{kernel})"
        yield method(row.name, "", f"Give {row.text} of every leaf: `torch.{row.name}`.", body)
        if row.operator:
            yield method(row.operator, "", "", body)


def unary_in_place(rows: Sequence["UnaryRow"]) -> Iterator[str]:
    """Write the functions of one tensor that have an in-place form."""
    for row in rows:
        name = f"{row.name}_"
        kernel = f", torch._foreach_{name}" if row.kernel else ""
        floats = ", floats=True" if row.floats else ""
        text = f"Write {row.text} into every leaf; return self."
        body = f"return unary_(self, torch.Tensor.{name}{kernel}{floats})"
        if row.in_place:
            yield method(name, "", text, body)


def binary(rows: Sequence["BinaryRow"]) -> Iterator[str]:
    """Write the functions of two, and their operators on both sides."""
    for row in rows:
        call = f"binary(self, other, torch.{row.name}{kernels(row)})"
        text = f"Give {row.text}, leaf by leaf: `torch.{row.name}`."
        yield method(row.name, arguments(row), text, *with_option(row, call))
        if row.operator:
            yield from operators(row, call)


def binary_in_place(rows: Sequence["BinaryRow"]) -> Iterator[str]:
    """Write the functions of two that have an in-place form, and `+=` and its like."""
    for row in rows:
        if not row.in_place:
            continue
        floats = ", floats=True" if row.floats else ""
        call = f"binary_(self, other, torch.Tensor.{row.name}_{kernels(row, '_')}{floats})"
        text = f"Write {row.text} into every leaf; return self."
        yield method(f"{row.name}_", arguments(row), text, *with_option(row, call, "_"))
        if row.operator:
            yield method(f"__i{row.operator}__", ", other: Operand", "", f"return {call}")


def operators(row: "BinaryRow", call: str) -> Iterator[str]:
    """Write the operator of a row, and the reflected one where the order matters."""
    name = row.operator
    if name in ("eq", "ne"):
        # `object` promises a bool for any operand, so a foreign one is left to it.
        ignore = "  # type: ignore[override]"
        body = ("if is_operand(other):", f"    return {call}", "return NotImplemented")
        yield method(f"__{name}__", ", other: Operand", "", *body, ignore=ignore)
        return
    yield method(f"__{name}__", ", other: Operand", "", f"return {call}")
    if name in ("lt", "le", "gt", "ge"):
        return  # Python exchanges these itself
    exact = ", exact=True" if name in ("add", "sub", "mul") else ""
    symbol = f"{name}_" if name in ("and", "or") else name
    back = f"reflected(self, other, operator.{symbol}{exact})"
    if name in ("add", "mul", "and", "or", "xor"):
        back = call
    yield method(f"__r{name}__", ", other: Operand", "", f"return {back}")


def arguments(row: "BinaryRow") -> str:
    """The arguments after `self`."""
    if row.option is None:
        return ", other: Operand"
    name, kind, default = row.option
    return f", other: Operand, *, {name}: {kind} = {default}"


def with_option(row: "BinaryRow", call: str, suffix: str = "") -> tuple[str, ...]:
    """Write the body: the option, where one is given, is bound to the function of one leaf."""
    if row.option is None:
        return (f"return {call}",)
    name, _, default = row.option
    test = "is not None" if default == "None" else f"!= {default}"
    space = "torch.Tensor" if suffix else "torch"
    bound = f"partial({space}.{row.name}{suffix}, {name}={name})"
    return (
        f"if {name} {test}:",
        f"    return binary{suffix}(self, other, {bound})",
        f"return {call}",
    )


def kernels(row: "BinaryRow", suffix: str = "") -> str:
    """The foreach kernels as further arguments, where a row has them."""
    if not row.kernel:
        return ""
    exact = f", {row.exact}{suffix}" if row.exact else ""
    return f", torch._foreach_{row.name}{suffix}{exact}"


def casts(rows: Sequence["CastRow"]) -> Iterator[str]:
    """Write the casts."""
    for row in rows:
        text = f"Cast every leaf to `torch.{row.dtype}`."
        yield method(row.name, "", text, f"return cast_leaves(self, torch.{row.dtype})")


def reductions(rows: Sequence["ReductionRow"]) -> Iterator[str]:
    """Write the reductions: `reduce` tells whether a container or a tensor comes out."""
    for row in rows:
        function = row.function or f"torch.{row.name}"
        option, body = "", [f"return reduced(self, {function}, dim, keepdim, reduce)"]
        if row.option is not None:
            name, kind, default = row.option
            option = f"        {name}: {kind} = {default},\n"
            test = "is not None" if default == "None" else f"!= {default}"
            bound = f"partial({function}, {name}={name})"
            body[:0] = [
                f"if {name} {test}:",
                f"    return reduced(self, {bound}, dim, keepdim, reduce)",
            ]
        for reduce, result in (("[False] = False", "Self"), ("[True]", "Tensor")):
            yield "\n    @overload" + signature(
                row.name, option, f"Literal{reduce}", result, " ..."
            )
        yield signature(row.name, option, "bool = False", "Self | Tensor", "")
        yield f'        """Give {row.text}: `torch.{row.name}`."""\n'
        yield "".join(f"{wrapped(line)}\n" for line in body)


def signature(name: str, option: str, reduce: str, result: str, end: str) -> str:
    """Write the head of a reduction, one argument a line."""
    shared = "        self,\n        dim: Dim = None,\n        keepdim: bool = False,\n        *,\n"
    return (
        f"\n    def {name}(\n{shared}{option}        reduce: {reduce},\n    ) -> {result}:{end}\n"
    )


def generated() -> dict[Path, str]:
    """Write both modules."""
    table = load_table()
    pointwise = (
        POINTWISE,
        class_of("Unary", unary(table.UNARY)),
        class_of("UnaryInPlace", unary_in_place(table.UNARY)),
        class_of("Arithmetic", binary(table.ARITHMETIC)),
        class_of("ArithmeticInPlace", binary_in_place(table.ARITHMETIC)),
        class_of("Logic", binary(table.LOGIC)),
        class_of("LogicInPlace", binary_in_place(table.LOGIC)),
        class_of("Comparisons", binary(table.COMPARISONS)),
        class_of("Casts", casts(table.CASTS)),
    )
    reduction = (REDUCTION, class_of("Reductions", reductions(table.REDUCTIONS)))
    return {OPS / "pointwise.py": "".join(pointwise), OPS / "reduction.py": "".join(reduction)}


def main() -> int:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    stale = 0
    for path, text in generated().items():
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            print(f"{path.name} is stale: run `nox -s generate`")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
