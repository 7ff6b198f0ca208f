"""Write the pointwise methods and the reductions of containers, and the list of all methods.

    python tools/generate_ops.py            write
    python tools/generate_ops.py --check    only compare; 1 where a file is stale

Pointwise methods and reductions come from a table. The list, in the body of `TensorDictBase`, comes
from the concerns. The result is plain Python, committed, so that mypy, tracebacks, documentation
and readers see what runs.
"""

import argparse
import ast
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tools.operations import BinaryRow, CastRow, Option, ReductionRow, UnaryRow

SOURCES = Path(__file__).parent.parent / "packages/kd-core/src"
OPS = SOURCES / "kd_core/_ops"
BASE = SOURCES / "kd_core/_base.py"
START = "        # Written by `tools/generate_ops.py`: run `nox -s generate`.\n"
END = "        # The end of what is written.\n"
WIDTH = 100

KERNELS = " ".join(f"{op}_tensor {op}_tensor_" for op in ("add", "div", "mul", "sub"))
FUNCTIONS = "as_float as_truth binary binary_ binary_of_tensors binary_of_tensors_ binary_swapped "
FUNCTIONS += "cast_leaves compared is_comparable reflected unary unary_"
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

POINTWISE = '''"""Pointwise operations: one typed method per row of `tools/operations.py`.

Written by `tools/generate_ops.py`: change the table, then run `nox -s generate`.
`_ops.binary` has the rules for operands, and runs the functions.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from kd_core._leaves.foreach import (%s)
from kd_core._leaves.writes import fmax_, fmin_, logaddexp_, maximum_, minimum_
from kd_core._naming import also_named
from kd_core._ops.binary import (%s)
from kd_core._protocol import AbstractContainer, Addable

if TYPE_CHECKING:
    from typing import Self

    from kd_core._ops.binary import CastFilter, Comparable, Operand
    from kd_core._ops.blending import Default

OPERATORS: Final = {  # of the operations that have one: "truediv" for `/`, which is `__truediv__`
%s}
'''

REDUCTION = '''"""Reductions to one value: one typed method per row of `tools/operations.py`.

Written by `tools/generate_ops.py`: change the table, then run `nox -s generate`.
`_ops.reducing` has the rules for `dim` and `reduce`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, overload

import torch

from kd_core._ops.binary import reduced_to
from kd_core._ops.reducing import logsumexp, norm, prod, reduced
from kd_core._protocol import AbstractContainer

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor

    from kd_core._ops.access import KeyFn
    from kd_core._ops.reducing import Dim
'''

CLASSES = {
    "Reductions": """Reductions to one value.

    Without `dim` every leaf is reduced to one number, and the batch size is (). `dim` names batch
    dimensions, or is `"feature"` for all trailing dimensions; `keepdim` keeps reduced dimensions
    with size 1. `reduce=True` reduces all leaves to one tensor. `key_transform` is a function from
    each key to its name in the result. `out` is a container into whose leaves the result is
    written.

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
        >>> list(td.mean(key_transform="mean_{}".format).keys())
        ['mean_a', 'mean_b']
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

    Two containers must have the same keys, and batch sizes that torch broadcasts, of which the
    shorter one must not fit the first dimensions of the other, too. With `default` their keys may
    differ: it is the number that stands for a leaf that one of them lacks, or `"intersection"`, and
    only the keys that both have are kept.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.ones(2), "b": torch.ones(2, 3)}, [2])
        >>> (1 - td / 2)["a"]
        tensor([0.5000, 0.5000])
        >>> (td * torch.tensor([1.0, 2.0]) + td)["b"]
        tensor([[2., 2., 2.],
                [3., 3., 3.]])
        >>> td.sub(TensorDict({"a": torch.ones(2), "c": torch.ones(2)}, [2]), default=0)["c"]
        tensor([-1., -1.])
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

    `cast_filter` is called with the path and the tensor of each leaf, and says whether it is cast.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.arange(3), "b": torch.ones(3)}, [3])
        >>> td.float()["a"].dtype, td.float()["b"] is td["b"]
        (torch.float32, True)
        >>> td.half(cast_filter=lambda path, leaf: leaf.is_floating_point())["a"].dtype
        torch.int64
    """,
}


def load_table() -> ModuleType:
    """Load the table beside this file, also where it runs as a script."""
    spec = importlib.util.spec_from_file_location(
        "operations", Path(__file__).with_name("operations.py")
    )
    assert spec is not None
    assert spec.loader is not None
    table = sys.modules["operations"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    return table


def class_of(name: str, methods: Iterator[str]) -> str:
    """Write a class: its docstring, and its methods."""
    base = "Addable" if name == "Arithmetic" else "AbstractContainer"
    head = f'\n\nclass {name}({base}):\n    """{CLASSES[name]}"""\n\n    __slots__ = ()\n'
    return head + "".join(methods)


def method(name: str, arguments: str, text: str, *body: str, ignore: str = "") -> str:
    """Write one method; its docstring says what it does and names the function (none: no text)."""
    head = wrapped(f"def {name}(self{arguments}) -> Self:{ignore}", 4)
    doc = f"{docstring(text)}\n" if text else ""
    return f"\n{head}\n{doc}" + "".join(f"{wrapped(line)}\n" for line in body)


def docstring(text: str) -> str:
    """Write a docstring of one sentence, what stands behind its colon below it if it is too long.

    Raises:
        ValueError: if that is too long too: the text of the row is then.
    """
    indent = " " * 8
    line = f'{indent}"""{text}"""'
    if len(line) <= WIDTH:
        return line
    first, _, rest = text.partition(": ")
    first = f'{indent}"""{first.rstrip(".")}.'
    if not rest or len(first) > WIDTH:
        raise ValueError(f"the text of a row makes a line of more than {WIDTH} characters: {text}")
    return f'{first}\n\n{indent}See {rest}\n{indent}"""'


def wrapped(line: str, spaces: int = 8) -> str:
    """Indent a line as the formatter does, its arguments below it if it is too long."""
    if not line:
        return line
    indent = " " * (spaces + len(line) - len(line.lstrip()))
    line = line.lstrip()
    if len(indent + line) <= WIDTH:
        return indent + line
    if line.startswith("if "):
        tests = f"\n{indent}    or ".join(line[3:-1].split(" or "))
        return f"{indent}if (\n{indent}    {tests}\n{indent}):"
    head, rest = line.split("(", 1)
    inside, _, tail = rest.rpartition(")")
    inner = f"\n{indent}    "
    if len(inner + inside) - 1 <= WIDTH:
        return f"{indent}{head}({inner}{inside}\n{indent}){tail}"
    below = [wrapped(f"{argument},", len(inner) - 1) for argument in split_arguments(inside)]
    return "\n".join([f"{indent}{head}(", *below, f"{indent}){tail}"])


def split_arguments(text: str) -> Iterator[str]:
    """Split arguments at their commas, but for those inside of brackets."""
    depth = start = 0
    for position, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if character == "," and not depth:
            yield text[start:position].strip()
            start = position + 1
    yield text[start:].strip()


def unary(rows: Sequence["UnaryRow"]) -> Iterator[str]:
    """Write the functions of one tensor, and their operators."""
    for row in rows:
        kernel = f", torch._foreach_{row.name}" if row.kernel else ""
        text = f"Return {row.text} of every leaf: `torch.{row.name}`."
        call = f"unary(self, torch.{row.name}{kernel})"
        bound = f"unary(self, {partial_of(f'torch.{row.name}', row.options)})"
        yield method(row.name, options(row.options), text, *with_options(row.options, bound, call))
        if row.operator == "__invert__":  # torch says what it refuses in other words
            call = "unary(self, operator.invert)"
        if row.operator:
            yield method(row.operator, "", "", f"return {call}")


def unary_in_place(rows: Sequence["UnaryRow"]) -> Iterator[str]:
    """Write the functions of one tensor that have an in-place form."""
    for row in rows:
        name = f"{row.name}_"
        function = f"torch.Tensor.{name}"
        kernel = f", torch._foreach_{name}" if row.kernel else ""
        text = f"Write {row.text} into every leaf; return self."
        call = f"unary_(self, {function}{kernel})"
        bound = f"unary_(self, {partial_of(function, row.options)})"
        if row.in_place:
            yield method(name, options(row.options), text, *with_options(row.options, bound, call))


def binary(rows: Sequence["BinaryRow"]) -> Iterator[str]:
    """Write the functions of two, and their operators on both sides."""
    for row in rows:
        function = f"torch.{row.name}"
        text = f"Return {row.text}, leaf by leaf: `{function}`."
        body = *default_body(row), *binary_body(row, "", function)
        yield row.decorator + method(row.name, defaulted(row), text, *body)
        if row.operator:
            yield from operators(row, f"{applied(row)[0]}(self, other, {function}{kernels(row)})")


def binary_in_place(rows: Sequence["BinaryRow"]) -> Iterator[str]:
    """Write the functions of two that have an in-place form, and `+=` and its like."""
    for row in rows:
        if not row.in_place:
            continue
        function = f"{row.name}_" if row.own else f"torch.Tensor.{row.name}_"
        text = f"Write {row.text} into every leaf; return self."
        body = binary_body(row, "_", function)
        yield row.decorator + method(f"{row.name}_", arguments(row), text, *body)
        if row.operator:
            call = f"binary_(self, other, {function}{kernels(row, '_')})"
            yield method(f"__i{row.operator}__", ", other: Operand", "", f"return {call}")


def defaulted(row: "BinaryRow") -> str:
    """The arguments after `self` of the form that returns a container."""
    if not row.default:
        return arguments(row)
    star = "" if any(option.keyword for option in row.options) else ", *"
    return f"{arguments(row)}{star}, default: Default | None = None"


def default_body(row: "BinaryRow") -> tuple[str, ...]:
    """Write what is done where keys may differ."""
    if not row.default:
        return ()
    function = partial_of(f"torch.{row.name}", row.options)
    apply, operand = applied(row)
    end = "" if apply == "binary" else f", otherwise={apply}"
    call = f"binary_with_default(self, {operand}, {function}, default{end})"
    load = "from kd_core._ops.blending import binary_with_default"
    return "if default is not None:", f"    {load}", "", f"    return {call}"


def applied(row: "BinaryRow") -> tuple[str, str]:
    """The function that applies a row, and the operand for it."""
    apply = "binary_of_tensors" if row.number in ("tensor", "float") else "binary"
    if row.name in COMPARISONS:
        apply = "compared"
    return apply, f"as_{row.number}(other)" if row.number in ("float", "truth") else "other"


def binary_body(row: "BinaryRow", suffix: str, function: str) -> tuple[str, ...]:
    """Write the body of a function of two."""
    apply, operand = applied(row)
    call = f"{apply}{suffix}(self, {operand}, "
    bound = f"{call}{partial_of(function, row.options)})"
    return with_options(row.options, bound, f"{call}{function}{kernels(row, suffix)})")


def operators(row: "BinaryRow", call: str) -> Iterator[str]:
    """Write the operator of a row, and the reflected one where the order matters."""
    name = row.operator
    if name in ("eq", "ne"):
        # `object` promises a bool for any operand, so a foreign one is left to it.
        ignore = "  # type: ignore[override]  # not a bool"
        body = ("if is_comparable(other):", f"    return {call}", "return NotImplemented")
        yield method(f"__{name}__", ", other: Comparable", "", *body, ignore=ignore)
        return
    kind = "Comparable" if name in COMPARISONS else "Operand"
    ignore = "  # type: ignore[override]  # sums, does not chain" if name == "add" else ""
    yield method(f"__{name}__", f", other: {kind}", "", f"return {call}", ignore=ignore)
    if name in ("lt", "le", "gt", "ge"):
        return  # Python exchanges these itself
    exact = ", exact=True" if name in ("add", "sub", "mul") else ""
    symbol = f"{name}_" if name in ("and", "or") else name
    back = f"reflected(self, other, operator.{symbol}{exact})"
    if name in ("add", "mul"):  # torch decides by the order which NaN comes out
        back = call.replace("binary(", "binary_swapped(")
    elif name in ("and", "or", "xor"):
        back = call
    yield method(f"__r{name}__", ", other: Operand", "", f"return {back}")


def arguments(row: "BinaryRow") -> str:
    """The arguments after `self`."""
    kind = "Comparable" if row.name in COMPARISONS else "Operand"
    return f", other: {kind}{options(row.options)}"


def options(given: Sequence["Option"]) -> str:
    """The further arguments of a function, those by keyword last."""
    text, star = "", False
    for option in given:
        text += ", *" if option.keyword and not star else ""
        star = star or option.keyword
        text += f", {option.name}: {option.kind} = {option.default}"
    return text


def partial_of(function: str, given: Sequence["Option"]) -> str:
    """A function that the options are bound to, if there are any."""
    bound = "".join(f", {each.name}={each.name}" for each in given)
    return f"partial({function}{bound})" if bound else function


def with_options(given: Sequence["Option"], bound: str, call: str) -> tuple[str, ...]:
    """Write a body: where an option is given, what is called has the options bound."""
    if not given:
        return (f"return {call}",)
    test = " or ".join(map(differs, given))
    return (f"if {test}:", f"    return {bound}", f"return {call}")


def differs(option: "Option") -> str:
    """The test that an option was given. `True` and 1.0 equal 1: torch is to judge them."""
    if option.default == "None":
        return f"{option.name} is not None"
    return f"type({option.name}) is not int or {option.name} != {option.default}"


def kernels(row: "BinaryRow", suffix: str = "") -> str:
    """The foreach kernels as further arguments, where a row has them."""
    if not row.kernel:
        return ""
    exact = f", {row.exact}{suffix}" if row.exact else ""
    return f", torch._foreach_{row.name}{suffix}{exact}"


def casts(rows: Sequence["CastRow"]) -> Iterator[str]:
    """Write the casts."""
    arguments = ", cast_filter: CastFilter | None = None"
    for row in rows:
        call = f"return cast_leaves(self, torch.{row.dtype}, cast_filter)"
        yield method(row.name, arguments, f"Cast every leaf to `torch.{row.dtype}`.", call)


def reductions(rows: Sequence["ReductionRow"]) -> Iterator[str]:
    """Write the reductions: `reduce` tells whether a container or a tensor comes out."""
    for row in rows:
        function = row.function or f"torch.{row.name}"
        rest = "dim, keepdim, reduce, key_transform)"
        bound = f"reduced(self, {partial_of(function, row.options)}, {rest}"
        call = f"reduced(self, {function}, {rest}"
        if row.out:
            bound, call = f"reduced_to(out, {bound})", f"reduced_to(out, {call})"
        body = with_options(row.options, bound, call)
        option = "".join(f"        {o.name}: {o.kind} = {o.default},\n" for o in row.options)
        named = "        key_transform: KeyFn | None = None,\n"
        named += "        out: Self | None = None,\n" if row.out else ""
        for reduce, result in (("[False] = False", "Self"), ("[True]", "Tensor")):
            head = option + named if result == "Self" else option
            yield "\n    @overload" + signature(row.name, head, f"Literal{reduce}", result, " ...")
        yield signature(row.name, option + named, "bool = False", "Self | Tensor", "")
        yield docstring(f"Return {row.text}: `torch.{row.name}`.") + "\n"
        yield "".join(f"{wrapped(line)}\n" for line in body)


def signature(name: str, option: str, reduce: str, result: str, end: str) -> str:
    """Write the head of a reduction, one argument a line."""
    shared = "        self,\n        dim: Dim = None,\n        keepdim: bool = False,\n        *,\n"
    return (
        f"\n    def {name}(\n{shared}{option}        reduce: {reduce},\n    ) -> {result}:{end}\n"
    )


def listed(names: str) -> str:
    """Write the names of an import, one a line."""
    return "\n" + "".join(f"    {name},\n" for name in names.split())


def members(body: Sequence[ast.stmt]) -> Iterator[tuple[str, bool]]:
    """The names that a class body binds, each with whether a call on the class must find it raw."""
    for step in body:
        if isinstance(step, (ast.FunctionDef, ast.AsyncFunctionDef)):
            kinds = {each.id for each in step.decorator_list if isinstance(each, ast.Name)}
            yield step.name, bool(kinds & {"classmethod", "staticmethod"})
        elif isinstance(step, ast.Assign):
            yield from ((each.id, True) for each in step.targets if isinstance(each, ast.Name))
        elif isinstance(step, ast.AnnAssign) and isinstance(step.target, ast.Name) and step.value:
            yield step.target.id, True


def class_in(tree: ast.Module, name: str) -> ast.ClassDef:
    """Find a class of a module, also below a condition."""
    return next(
        each for each in ast.walk(tree) if isinstance(each, ast.ClassDef) and each.name == name
    )


def with_concerns(base: str, modules: dict[Path, str]) -> str:
    """Write into the body of `TensorDictBase` what each concern defines.

    Args:
        base: the source of its module, which lists the concerns in order.
        modules: sources that are written in the same run, by path.
    """
    tree = ast.parse(base)
    places = {
        name.name: step.module
        for step in tree.body
        if isinstance(step, ast.ImportFrom)
        for name in step.names
    }
    settled = {name for name, _ in members(class_in(tree, "TensorDictBase").body)} | {"__slots__"}
    lines: list[str] = []
    for concern in class_in(tree, "Concerns").bases:
        assert isinstance(concern, ast.Name)
        module = places[concern.id] or ""
        path = SOURCES.joinpath(*module.split(".")).with_suffix(".py")
        source = modules.get(path) or path.read_text(encoding="utf-8")
        for name, raw in members(class_in(ast.parse(source), concern.id).body):
            if name not in settled:
                settled.add(name)
                found = f'__dict__["{name}"]' if raw else name
                lines.append(f"        {name} = {concern.id}.{found}\n")
    head, _, rest = base.partition(START)
    return head + START + "".join(lines) + END + rest.partition(END)[2]


def generated() -> dict[Path, str]:
    """Write the modules."""
    table = load_table()
    pairs = [row for row in (*table.ARITHMETIC, *table.LOGIC, *table.COMPARISONS) if row.operator]
    operators = "".join(f'    "{row.name}": "{row.operator}",\n' for row in pairs)
    pointwise = (
        POINTWISE % (listed(KERNELS), listed(FUNCTIONS), operators),
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
    modules = {OPS / "pointwise.py": "".join(pointwise), OPS / "reduction.py": "".join(reduction)}
    return modules | {BASE: with_concerns(BASE.read_text(encoding="utf-8"), modules)}


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
