"""``.pt2``: torch's own format, with the schema as an extra file.

Any process with torch opens such a file with `torch.export.load`. What is left out is what a
reader should not learn: source paths, stack traces and the sample inputs. torch is imported when
a file is written or run; its schema is read without.
"""

from __future__ import annotations

import contextlib
import operator
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kd_export._console import silenced
from kd_export._errors import ExportError, NotExportable, UntrustedArtifact, printable, raised_as
from kd_export._running.session import WEIGHTS
from kd_export._schema.derived import derived_program
from kd_export._schema.files import SCHEMA_FILE, read_zip_schema
from kd_export._schema.schema import Schema, check_fit, fixed
from kd_export._schema.trust import conditions_of, disarm

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from kd_export._running.session import Runner
    from kd_export._running.torch_runner import TorchRunner
    from kd_export._torch_private import OpOverload

Borders = tuple[tuple[tuple[object, ...], ...], ...]

_KEPT = ("val",)
_PLAIN = re.compile(
    r"(?:List\[|Optional\[)*"
    r"(?:Tensor|int|float|bool|number|complex|str|Device|Generator|SymInt|SymFloat|SymBool)\]*"
)

_LIBRARY_NAME = re.compile(r"\w+::\w+(?:\.\w+)?")
_REGISTERED = re.compile(r"^debug: registered at (.+):\d+$", re.MULTILINE)


class Pt2Backend:
    """Write and read ``.pt2`` files."""

    name = "torch.export"
    suffixes = (".pt2",)
    executes = True
    precisions = ("fp16", WEIGHTS)

    def read_schema(self, file: BinaryIO) -> Schema:
        """Read the schema as a file of the zip archive, or derive it from the program."""
        text = read_zip_schema(file)
        return derived_program(file) if text is None else Schema.from_json(text)

    def lower(self, program: ExportedProgram, schema: Schema) -> Schema:
        """Change nothing: the program is already in this form."""
        return schema

    def write(self, program: ExportedProgram, schema: Schema, path: Path) -> None:
        """Save the program without source paths, stack traces and sample inputs."""
        import torch

        with _stripped(program), warnings.catch_warnings():
            # Of weights that fill their memory only in part: ours are on the CPU, and verified.
            warnings.filterwarnings("ignore", "No complete tensor found", UserWarning)
            torch.export.save(program, path, extra_files={SCHEMA_FILE: schema.to_json()})

    def load(self, file: BinaryIO, schema: Schema, path: Path) -> TorchRunner:
        """Check the archive, load it, and write its graph as one function."""
        import torch

        from kd_export._running.torch_runner import run_program
        from kd_export._torch_private import LOADING_LOGGER

        if schema.derived:
            _refuse_conditions(file)
        archive, operators = disarm(file, own_operators())
        check_registered(operators)
        message = f"torch {torch.__version__} cannot load the file"
        hint = f"It was written by torch {schema.versions.get('torch', 'unknown')}."
        with raised_as(ExportError, message, hint):
            # torch warns of buffers that are not writable and of sizes that are not read.
            with silenced(LOADING_LOGGER), archive:
                program = torch.export.load(archive)
            if not schema.derived:
                check_fit(_described(schema), _borders(program))
            return run_program(program, schema)

    def weights(self, file: BinaryIO, runner: Runner) -> str | None:
        """Compute the digest of the weights that the runner holds."""
        from kd_export._running.torch_runner import TorchRunner, digest_of

        assert isinstance(runner, TorchRunner)
        return digest_of(runner.held)


backend = Pt2Backend()


def _refuse_conditions(file: BinaryIO) -> None:
    """Refuse a program that holds for some of its sizes only, which torch tests by code in it."""
    conditions = conditions_of(file)
    if conditions:
        first = printable(conditions[0][:200])
        raise NotExportable(
            f"the program is what its module does only where `{first}`, which torch tests by code "
            "in the file. That code is never run here.",
            expected="a program for all sizes in its ranges",
            got=tuple(conditions),
            hint="Run it by torch alone, or export the module with ranges in which this holds.",
        )


def own_operators() -> set[str]:
    """List the operators that Python code other than torch's defined in this process.

    By `torch.library.custom_op`, or by a `torch.library.Library`: of these the dispatcher knows
    the file that made the library. `torch.library.define` makes it in a file of torch itself.
    """
    import torch

    from kd_export._torch_private import decorated_operators, library_operators

    decorated = {name for name, module in decorated_operators() if not module.startswith("torch.")}
    torch_folder = Path(torch.__file__).parent
    libraries = {
        name
        for name, text in library_operators()
        if _LIBRARY_NAME.fullmatch(name)
        and (found := _REGISTERED.search(text)) is not None
        and not Path(found[1]).is_relative_to(torch_folder)
    }
    return {_dotted(name) for name in decorated | libraries}


def _dotted(name: str) -> str:
    """Return the path of an operator: ``a::b`` is ``torch.ops.a.b.default``."""
    path = name.replace("::", ".")
    return f"torch.ops.{path}" if "." in name else f"torch.ops.{path}.default"


def check_registered(operators: Iterable[str]) -> None:
    """Check that each name is an operator on tensors and not another attribute of ``torch.ops``.

    Raises:
        UntrustedArtifact: It is something else, or an operator on other objects than tensors.
    """
    import torch

    from kd_export._torch_private import OpOverload

    for name in operators:
        if not name.startswith("torch.ops.") or name.startswith("torch.ops.higher_order."):
            continue
        try:
            found = operator.attrgetter(name.removeprefix("torch.ops."))(torch.ops)
        except AttributeError as error:
            raise ExportError(
                f"the program calls `{name}`, which is not registered.",
                got=name,
                hint="Import the package that defines it before you open the file.",
            ) from error
        if not isinstance(found, OpOverload) or not _is_on_tensors(found):
            raise UntrustedArtifact(
                f"the program calls `{name}`, which is not an operator on tensors.",
                expected="an operator of torch on tensors",
                got=name,
                hint="The file is forged or damaged: do not use it.",
            )


def _is_on_tensors(overload: OpOverload) -> bool:
    """Decide by the types of arguments and results: TorchScript's operators take any object."""
    from kd_export._torch_private import schema_of

    schema = schema_of(overload)
    types = [str(item.type) for item in (*schema.arguments, *schema.returns)]
    plain = all(_PLAIN.fullmatch(kind) for kind in types)
    return plain and (
        any("Tensor" in kind for kind in types)
        or "constrain" in schema.name
        or "assert" in schema.name
    )


def _described(schema: Schema) -> Borders:
    """Return name, dtype and dimensions of each input and output, as the schema tells them."""
    inputs = tuple((entry.name, entry.dtype, *fixed(entry.shape)) for entry in schema.inputs)
    outputs = tuple((entry.wire, entry.dtype, *fixed(entry.shape)) for entry in schema.outputs)
    return inputs, outputs


def _borders(program: ExportedProgram) -> Borders:
    """Return name, dtype and dimensions of each input and output, as the program has them."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature, call = program.graph_signature, program.call_spec
    arguments = call.in_spec.children()[1].context
    parts = ((arguments, signature.user_inputs), (call.out_spec.context, signature.user_outputs))
    return tuple(
        tuple(
            (name, str(value.dtype).removeprefix("torch."), *fixed(value.shape))
            for name, value in zip(names, (values[str(n)] for n in nodes), strict=True)
        )
        for names, nodes in parts
    )


@contextlib.contextmanager
def _stripped(program: ExportedProgram) -> Iterator[None]:
    """Remove, for as long as it is being saved, what a file should not tell."""
    from kd_export._torch_private import without_example

    graphs = [m.graph for m in program.graph_module.modules() if hasattr(m, "graph")]
    nodes = [node for graph in graphs for node in graph.nodes]
    before = [node.meta for node in nodes]
    try:
        for node in nodes:
            node.meta = {name: node.meta[name] for name in _KEPT if name in node.meta}
        with without_example(program):
            yield
    finally:
        for node, meta in zip(nodes, before, strict=True):
            node.meta = meta
