"""Running an exported program on tensors, as one straight-line Python function.

Serves the ``.pt2`` backend, and programs that were never written to a file.

`ExportedProgram.module()` flattens and checks its inputs with pytrees and guards, and calls each
operator through its overload object: for a small model that costs more than the operators do.
Here the graph is written out as source, one statement per operator, with weights and constants
bound as globals, and with each operator called by its quickest equivalent route: the row "exported
model, own runner, per call" of the benchmarks.

The routes are those whose results are the same bits:

- ``torch.relu(x)`` for ``torch.ops.aten.relu.default(x)``, the same kernel;
- ``torch.split_with_sizes(x, (2, 2), -1)`` for ``chunk(2, -1)`` of a fixed size;
- ``x + c`` with a cached 0-dim constant for ``x + 0.5``, where `exact_constant` of kd_core says
  that both are equal, on tensors with at least one dimension.
"""

from __future__ import annotations

import ctypes
import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from kd_core.extending import exact_constant
from kd_export._errors import DtypeMismatch, UntrustedArtifact, kind_of
from kd_export._running.session import Direct, picked
from kd_export._schema.files import Number, unused_name
from kd_export._schema.schema import Drawn, Entry, LinearSize, Schema
from kd_export._schema.serialized_program import is_name
from kd_export._torch_private import ASSERT_METADATA, HOMES

Core = Callable[..., tuple[Tensor, ...]]

_ARITHMETIC: dict[object, str] = {
    torch.ops.aten.add.Tensor: "+",
    torch.ops.aten.sub.Tensor: "-",
    torch.ops.aten.mul.Tensor: "*",
    torch.ops.aten.div.Tensor: "/",
}

_QUICK = """
abs.default add.Tensor addmm.default amax.default amin.default argmax.default atan.default
atan2.default baddbmm.default batch_norm.default bmm.default cat.default ceil.default
chunk.default clamp.default clamp_max.default clamp_min.default clone.default conv1d.default
conv2d.default conv3d.default cos.default cumsum.default div.Tensor einsum.default
embedding.default eq.Tensor erf.default exp.default expand.default expm1.default
flatten.using_ints floor.default gather.default ge.Tensor gelu.default group_norm.default
gru_cell.default gt.Tensor hardtanh.default index_add.default index_select.default
layer_norm.default le.Tensor leaky_relu.default linear.default log.default log1p.default
log_softmax.int logical_and.default logical_not.default lstm_cell.default lt.Tensor
masked_fill.Scalar matmul.default max_pool2d.default maximum.default mean.default mean.dim
minimum.default mm.default mul.Tensor narrow.default ne.Tensor neg.default permute.default
pow.Tensor_Scalar pow.Tensor_Tensor reciprocal.default relu.default reshape.default
rsqrt.default scatter_add.default select.int sigmoid.default sign.default silu.default
sin.default softmax.int softplus.default split_with_sizes.default sqrt.default squeeze.dim
stack.default sub.Tensor sum.default sum.dim_IntList t.default tan.default tanh.default
transpose.int tril.default triu.default unsqueeze.default view.default where.self
adaptive_avg_pool2d.default avg_pool2d.default scaled_dot_product_attention.default
"""

_DROPPED = (ASSERT_METADATA,)
_USED = ("Tensor", "KeyError", "divmod", "len", "slice")
"""What the written functions read besides their own names."""


def _quick_routes() -> dict[object, Callable[..., object]]:
    """Find the function of torch's own Python layer for each overload listed."""
    routes: dict[object, Callable[..., object]] = {}
    for row in _QUICK.split():
        name, overload = row.split(".")
        target = getattr(getattr(torch.ops.aten, name), overload)
        for home in HOMES:
            if hasattr(home, name):
                routes[target] = getattr(home, name)
                break
    return routes


_ROUTES = _quick_routes()


class StraightLine:
    """The functions written from one graph.

    Attributes:
        core: Takes the input tensors in order, unchecked, and gives the output tensors in order.
        direct: Takes a flat dict by wire name and gives another, or returns ``None`` if any input
            is not exactly as the schema says.
        source: The source text of both.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        bound: Mapping[str, object],
        inputs: Sequence[str],
        schema: Schema,
    ) -> None:
        self._globals: dict[str, object] = {}
        self._names: dict[fx.Node, str] = {}
        self._taken: set[str] = {"inputs", "shape", "rest", *_USED}
        self._constants: dict[object, str] = {}
        body, results = self._write(graph_module, bound)
        arguments = [self._by_placeholder[name] for name in inputs]
        self._globals["Tensor"] = Tensor
        core = _function("core", ", ".join(arguments), [*body, f"return ({_tuple(results)})"])
        guard = list(self._guards(schema, arguments))
        pairs = ", ".join(
            f"{entry.wire!r}: {result}"
            for entry, result in zip(schema.outputs, results, strict=True)
        )
        direct = _function("direct", "inputs", [*guard, *body, f"return {{{pairs}}}"])
        self.source = f"{core}\n\n{direct}\n"
        namespace: dict[str, Any] = dict(self._globals)
        exec(compile(self.source, "<kd_export program>", "exec"), namespace)
        self.core: Core = namespace["core"]
        self.direct: Direct = namespace["direct"]

    def _write(
        self, graph_module: fx.GraphModule, bound: Mapping[str, object]
    ) -> tuple[list[str], list[str]]:
        """Write one statement per node; give them and the expressions of the outputs."""
        self._by_placeholder: dict[str, str] = {}
        last = _last_uses(graph_module.graph)
        lines: list[str] = []
        results: list[str] = []
        for node in graph_module.graph.nodes:
            if node.op == "placeholder":
                name = self._name(node)
                self._by_placeholder[node.name] = name
                if node.name in bound:
                    self._globals[name] = bound[node.name]
            elif node.op == "get_attr":
                self._globals[self._name(node)] = operator.attrgetter(node.target)(graph_module)
            elif node.op == "output":
                results = [self._argument(item) for item in node.args[0]]
            elif node.target not in _DROPPED:
                lines.append(f"{self._name(node)} = {self._call(node)}")
                freed = [self._names[used] for used in last.get(node, ())]
                lines.extend(f"{name} = None" for name in freed if name not in self._globals)
        return lines, results

    def _name(self, node: fx.Node) -> str:
        name = unused_name(_checked(node.name), self._taken)
        self._taken.add(name)
        self._names[node] = name
        return name

    def _call(self, node: fx.Node) -> str:
        """Write the call of one operator."""
        target = node.target
        if target is operator.getitem:
            return f"{self._argument(node.args[0])}[{self._argument(node.args[1])}]"
        if target is torch.ops.aten.sym_size.int:
            return f"{self._argument(node.args[0])}.size({self._argument(node.args[1])})"
        if target in _ARITHMETIC and (quick := self._by_constant(node)) is not None:
            return quick
        if target is torch.ops.aten.chunk.default and (sizes := _chunk_sizes(node)) is not None:
            whole, dim = self._argument(node.args[0]), (*node.args, 0)[2]
            return f"{self._bind(torch.split_with_sizes)}({whole}, ({_tuple(sizes)}), {dim})"
        function = _ROUTES.get(target, target)
        parts = [self._argument(item) for item in node.args]
        parts += [f"{_checked(k)}={self._argument(item)}" for k, item in node.kwargs.items()]
        return f"{self._bind(function)}({', '.join(parts)})"

    def _by_constant(self, node: fx.Node) -> str | None:
        """Write arithmetic with a scalar as arithmetic with a cached tensor, if that is exact."""
        left, right = (*node.args, None, None)[:2]
        value = left.meta.get("val") if isinstance(left, fx.Node) else None
        if not isinstance(value, Tensor) or len(node.args) != 2 or node.kwargs or not value.dim():
            return None
        constant = exact_constant([torch.empty(1, dtype=value.dtype)], right)
        if constant is None:
            return None
        return f"{self._argument(left)} {_ARITHMETIC[node.target]} {self._bind(constant)}"

    def _argument(self, item: object) -> str:
        """Write an argument as an expression."""
        if isinstance(item, fx.Node):
            return self._names[item]
        if isinstance(item, list | tuple):
            return f"({_tuple([self._argument(part) for part in item])})"
        if isinstance(item, slice):
            parts = (item.start, item.stop, item.step)
            return f"slice({', '.join(self._argument(part) for part in parts)})"
        if item is None or isinstance(item, bool | int | str):
            return repr(item)
        if isinstance(item, float) and item - item == 0:
            return repr(item)
        return self._bind(item)

    def _bind(self, value: object) -> str:
        """Bind a value that has no literal to a global name."""
        known = next((n for n, v in self._globals.items() if v is value), None)
        if known is not None:
            return known
        name = unused_name(f"k{len(self._globals)}", self._taken)
        self._taken.add(name)
        self._globals[name] = value
        return name

    def _guards(self, schema: Schema, arguments: Sequence[str]) -> Iterator[str]:
        """Write the checks of `direct`: cheap, and complete for what the schema promises."""
        yield f"if len(inputs) != {len(schema.inputs)}: return None"
        yield "try:"
        for entry, name in zip(schema.inputs, arguments, strict=True):
            yield f"    {name} = inputs[{entry.wire!r}]"
        yield "except KeyError: return None"
        seen: dict[str, str] = {}
        for entry, name in zip(schema.inputs, arguments, strict=True):
            dtype = self._bind(getattr(torch, entry.dtype))
            yield f"if {name}.__class__ is not Tensor or {name}.dtype is not {dtype}: return None"
            yield f"if not {name}.is_contiguous(): return None"
            yield f"shape = {name}.shape"
            if all(isinstance(size, int) for size in entry.shape):
                yield f"if shape != ({_tuple([str(size) for size in entry.shape])}): return None"
                continue
            yield f"if len(shape) != {len(entry.shape)}: return None"
            for position, size in enumerate(entry.shape):
                if isinstance(size, int):
                    yield f"if shape[{position}] != {size}: return None"
                    continue
                linear = LinearSize.parse(size)
                assert linear is not None  # the schema was checked
                if linear.axis in seen:
                    wanted = LinearSize(seen[linear.axis], linear.factor, linear.offset)
                    yield f"if shape[{position}] != {wanted}: return None"
                    continue
                axis, local = schema.axes[linear.axis], self._local()
                seen[linear.axis] = local
                yield f"{local} = shape[{position}]"
                if size != linear.axis:
                    yield f"{local}, rest = divmod({local} - {linear.offset}, {linear.factor})"
                    yield "if rest: return None"
                upper = "" if axis.max is None else f" <= {axis.max}"
                yield f"if not {axis.min} <= {local}{upper}: return None"

    def _local(self) -> str:
        name = unused_name("size", self._taken)
        self._taken.add(name)
        return name


def _checked(name: str) -> str:
    """Return a name that is about to become source, if it is one."""
    if not is_name(name):
        raise UntrustedArtifact(
            f"the program names a value {name[:80]!r}, which is not a name.",
            expected="an identifier",
            got=name[:1000],
            hint="The file is forged or damaged: do not use it.",
        )
    return name


def _chunk_sizes(node: fx.Node) -> list[str] | None:
    """Compute the sizes that a chunk of a fixed dimension has."""
    source, count, dim = (*node.args, 0)[:3]
    assert isinstance(source, fx.Node)
    assert isinstance(dim, int)
    size = source.meta["val"].shape[dim]
    if node.kwargs or not isinstance(size, int) or not isinstance(count, int) or size == 0:
        return None
    step = -(-size // count)
    return [str(min(step, size - start)) for start in range(0, size, step)]


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """List, by node, the values that are not read after it."""
    seen: set[fx.Node] = set()
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                last.setdefault(node, []).append(used)
    return last


def _tuple(parts: Sequence[str]) -> str:
    return ", ".join(parts) + ("," if len(parts) == 1 else "")


def _function(name: str, arguments: str, lines: Sequence[str]) -> str:
    body = "\n".join(f"    {line}" for line in lines)
    return f"def {name}({arguments}):\n{body}"


CHUNK = 1 << 24
"""Bytes that are hashed at once: ctypes has no array of 2 GiB."""


class TensorRunner:
    """What all runners share whose arrays are tensors."""

    direct: Direct | None = None

    def adapt(self, value: object, entry: Entry) -> Tensor:
        """Check that the value is a tensor of the dtype; make it contiguous."""
        if not isinstance(value, Tensor):
            raise DtypeMismatch(
                f"expected a tensor {entry.describe()} for `{entry.wire}`, got {kind_of(value)}.",
                key=entry.key,
                expected=entry.dtype,
                got=type(value).__name__,
                hint="Convert it with `torch.as_tensor`.",
            )
        if value.dtype is not getattr(torch, entry.dtype):
            given = str(value.dtype).removeprefix("torch.")
            raise DtypeMismatch(
                f"expected {entry.describe()} for `{entry.wire}`, got dtype {given}.",
                key=entry.key,
                expected=entry.dtype,
                got=given,
                hint=f"Convert it with `.to(torch.{entry.dtype})`.",
            )
        if value.layout is not torch.strided or value.is_meta:
            raise DtypeMismatch(
                f"expected a dense tensor with data, {entry.describe()}, for `{entry.wire}`, got "
                f"layout {value.layout} on {value.device}.",
                key=entry.key,
                expected="torch.strided",
                got=str(value.layout),
                hint="Convert it with `.to_dense()`, and give it data.",
            )
        return value.contiguous()

    def restore(self, array: object, like: object) -> object:
        """Return the tensor as it is."""
        return array

    def build(self, drawn: Drawn) -> object:
        """Build a tensor of drawn numbers."""
        return build_tensor(drawn)

    def numbers(self, array: object, positions: Sequence[int]) -> list[Number]:
        """Read numbers out of a tensor."""
        assert isinstance(array, Tensor)
        return numbers_of(array, positions)


class TorchRunner(TensorRunner):
    """Run a program as a straight-line function."""

    def __init__(
        self,
        lines: StraightLine,
        schema: Schema,
        held: Mapping[str, object],
        program: ExportedProgram,
    ) -> None:
        self.lines = lines
        self.held = held
        self.program = program
        self._schema = schema
        self.direct = lines.direct

    def __call__(
        self, arrays: Sequence[object], names: Sequence[str] | None = None
    ) -> Sequence[object]:
        """Run on tensors in order; ``names`` picks among the outputs."""
        return picked(self._schema, self.lines.core(*arrays), names)


def run_program(program: ExportedProgram, schema: Schema) -> TorchRunner:
    """Build a runner from an exported program."""
    signature = program.graph_signature
    bound: dict[str, object] = {}
    held = held_by(program)
    for spec in signature.input_specs:
        if spec.kind is InputKind.USER_INPUT or spec.target is None:
            continue
        value = held[spec.target]
        bound[spec.arg.name] = value.detach() if isinstance(value, Tensor) else value
    inputs = [str(name) for name in signature.user_inputs]
    lines = StraightLine(program.graph_module, bound, inputs, schema)
    return TorchRunner(lines, schema, held, program)


def held_by(program: ExportedProgram) -> dict[str, object]:
    """Return the weights, buffers and constants of a program by name."""
    return {**program.state_dict, **program.constants}


def digest_of(held: Mapping[str, object]) -> str:
    """Compute the SHA-256 of all weights: name, dtype, shape and bytes of each, by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(held.items()):
        if isinstance(tensor, Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            whole = tensor.detach().cpu().contiguous()
            for start in range(0, whole.nbytes, CHUNK):
                size = min(CHUNK, whole.nbytes - start)
                digest.update((ctypes.c_char * size).from_address(whole.data_ptr() + start))
    return digest.hexdigest()


def build_tensor(drawn: Drawn) -> Tensor:
    """Build a tensor of drawn numbers."""
    return torch.as_tensor(drawn.numbers, dtype=getattr(torch, drawn.dtype)).reshape(drawn.shape)


def numbers_of(tensor: Tensor, positions: Sequence[int]) -> list[Number]:
    """Read numbers at positions of the flattened tensor."""
    flat = tensor.detach().reshape(-1)[list(positions)]
    return [float(n.real) if flat.is_complex() else n for n in flat.tolist()]
