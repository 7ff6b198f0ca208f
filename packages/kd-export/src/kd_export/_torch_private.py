"""Private names of torch that kd_export needs, each with what does without it.

They are looked up when this module is loaded, which only modules do that need torch anyway. A torch
that lacks one costs what its fallback says, never the import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeAlias

import sympy
import torch
from torch import Tensor

from kd_core.extending import private_name

if TYPE_CHECKING:
    from torch._C import FunctionSchema
    from torch._ops import OperatorBase as OperatorBase
    from torch._ops import OpOverload as OpOverload
    from torch.export import ExportedProgram
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    OpOverload = type(torch.ops.aten.relu.default)
    """An operator with its types, which has no public name."""

    OperatorBase = object
    """What tables of decompositions have for keys; only type checkers ask for it."""

Layer: TypeAlias = Callable[..., tuple[Tensor, ...]]
"""Computes a recurrent layer from the arguments of `torch.lstm` or `torch.gru`."""


# Who warns.

CAPTURE_LOGGERS = (
    "torch.fx.experimental.symbolic_shapes",
    "torch._subclasses.fake_tensor",
    "torch._dynamo",
    "torch._guards",
    "torch.export._trace",
)
"""The loggers that print graphs and traces of an error that is explained anyway.

Fallback: a torch whose loggers have other names prints them.
"""

LOADING_LOGGER = "torch._export.serde.serialize"
"""The logger that warns of sizes that are not read. Fallback: as above."""


# What a graph holds.

HigherOrderOperator: type = private_name("torch._ops", "HigherOrderOperator", type(None))
"""An operator that calls graphs, such as `cond`.

Fallback: no node is one, so what inner graphs write is not looked at.
"""

ASSERT_METADATA = private_name("torch", "ops.aten._assert_tensor_metadata.default", object())
ASSERT_SCALAR = private_name("torch", "ops.aten._assert_scalar.default", object())
"""The operators by which a graph asserts dtypes and devices, or relations of sizes.

Fallback: no node calls one, so assertions stay in a program as they are.
"""


def tree_leaves(value: object) -> list[object]:
    """Return what a nested argument of a node holds; a slice and None are leaves."""
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in tree_leaves(part)]
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in tree_leaves(part)]
    return [value]


EXACT_LIMITS: dict[type, Callable[..., sympy.Basic]] = {
    private_name("torch.utils._sympy.functions", "Min", sympy.Min): sympy.Min,
    private_name("torch.utils._sympy.functions", "Max", sympy.Max): sympy.Max,
}
"""What torch's own `Min` and `Max` of sizes are in sympy, which sees which of two sums is larger.

Fallback: a relation with one is not shown by algebra, and sizes are tried.
"""


def schema_of(operator: OpOverload) -> FunctionSchema:
    """Return the types of what an operator takes and returns, and which of it is written.

    Nothing does without it: a torch that lacks it exports nothing and opens no ``.pt2``.
    """
    return operator._schema


def argument_names(target: object) -> list[str]:
    """Return the names of the arguments of an operator. Fallback: none, so all may be sizes."""
    schema = getattr(target, "_schema", None)
    return [] if schema is None else [argument.name for argument in schema.arguments]


def set_ranges(size: torch.SymInt, ranges: Mapping[object, object]) -> None:
    """Set the ranges of symbols, among which that of a size is.

    Fallback: the ranges stay as what ran before has narrowed them.
    """
    known: dict[object, object] = getattr(size.node.shape_env, "var_to_range", {})
    known.update(ranges)


@contextmanager
def without_example(program: ExportedProgram) -> Iterator[None]:
    """Remove the example from a program while it is saved. Fallback: a file carries it."""
    samples = getattr(program, "_example_inputs", None)
    if samples is None:
        yield
        return
    program._example_inputs = None
    try:
        yield
    finally:
        program._example_inputs = samples


# How functions of torch are called without their overload objects.

HOMES: tuple[object, ...] = (
    private_name("torch", "_C._nn", None),
    private_name("torch", "_C._VariableFunctions", None),
    torch.Tensor,
)
"""Where the quick functions of operators are. Fallback: an operator is called by its overload."""


# What a call of a module does.

if not TYPE_CHECKING:
    TorchDispatchMode = private_name("torch.utils._python_dispatch", "TorchDispatchMode", None)
    if TorchDispatchMode is None:

        class TorchDispatchMode:  # as a context manager, which sees no operator
            """Fallback: writes into parameters are not seen before they are made."""

            def __enter__(self):
                return self

            def __exit__(self, *exc_info):
                return None


BUFFER_HOOKS: MutableMapping[int, object] = private_name(
    "torch.nn.modules.module", "_global_buffer_registration_hooks", {}
)
"""The hooks that see every buffer that is registered.

Fallback: a hook that a failed export of torch up to 2.12 leaves there stays.
"""


# Recurrent layers.

STEP_LAYERS: dict[str, Layer | None] = {
    name: private_name("torch._decomp.decompositions", f"{name}_impl", None)
    for name in ("lstm", "gru")
}
"""Recurrent layers written out step by step. Fallback: torch takes layers apart as it does."""

LOOP_LAYERS: dict[str, Layer | None] = {
    name: private_name("torch.export._patches", f"{name}_while_loop_impl", None)
    for name in ("lstm", "gru")
}
"""Recurrent layers as loops over time of any length, from torch 2.11 on.

Fallback: a layer serves the length of time of the example.
"""


without_modes: Callable[[], AbstractContextManager[object]] = private_name(
    "torch", "_C.DisableTorchFunction", nullcontext
)
"""Returns a block whose calls no mode of functions sees.

Fallback: a program with a loop over time cannot be saved as ``.pt2``.
"""


def forget_layers() -> None:
    """Let torch look up anew how it takes recurrent layers apart.

    `torch.onnx.export` of a module registers loops and removes them, but torch 2.15 remembers them.
    Fallback: after such a call in the same process, layers are captured as loops.
    """
    for operator in (torch.ops.aten.lstm.input, torch.ops.aten.gru.input):
        cache: dict[object, object] | None = getattr(operator, "_dispatch_cache", None)
        if cache is not None:
            cache.clear()


def without_line_tables() -> dict[str, object]:
    """Return options of AOTInductor without tables of source lines, which hold paths.

    Fallback: none; torch 2.10 has no such tables.
    """
    known: object = private_name("torch._inductor.config", "aot_inductor.enable_line_tables", None)
    return {} if known is None else {"aot_inductor.enable_line_tables": False}


# Operators that a user defined.


def decorated_operators() -> Iterator[tuple[str, str]]:
    """Yield name and module of each operator that `torch.library.custom_op` defined.

    Fallback: none, so a file that calls one is refused.
    """
    known: dict[str, object] = private_name("torch._library.custom_ops", "OPDEFS", {})
    for definition in known.values():
        name, function = (getattr(definition, part, None) for part in ("_qualname", "_init_fn"))
        if isinstance(name, str):
            yield name, str(getattr(function, "__module__", None))


def library_operators() -> Iterator[tuple[str, str]]:
    """Yield name and description of each operator that a `torch.library.Library` defined.

    Fallback: none, so a file that calls one is refused.
    """
    names: set[str] = private_name("torch.library", "_defs", set())
    described: Callable[[str], str] = private_name("torch", "_C._dispatch_dump", lambda name: "")
    for name in names:
        try:
            yield name, described(name)
        except RuntimeError:  # not the name of an operator
            continue
