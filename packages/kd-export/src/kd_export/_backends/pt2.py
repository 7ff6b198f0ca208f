"""``.pt2``: torch's own format, with the schema as an extra file.

Any process with torch opens such a file with `torch.export.load`. What is left out is what a
reader should not learn: source paths, stack traces and the sample inputs. torch is imported when
a file is written or run; its schema is read without.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kd_export._errors import ExportError
from kd_export._schema.archive import SCHEMA_FILE, read_zip_schema
from kd_export._schema.schema import Schema, check_fit
from kd_export._schema.trust import disarm

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from kd_export._running.torch_runner import TorchRunner

_KEPT = ("val",)


class Pt2Backend:
    """Write and read ``.pt2`` files."""

    name = "torch.export"
    suffixes = (".pt2",)
    executes = True

    def read_schema(self, file: BinaryIO) -> Schema:
        """Read the schema as a file of the zip archive."""
        return Schema.from_json(read_zip_schema(file))

    def lower(self, program: ExportedProgram, schema: Schema) -> Schema:
        """Change nothing: the program is already in this form."""
        return schema

    def write(self, program: ExportedProgram, schema: Schema, path: Path) -> None:
        """Save the program without source paths, stack traces and sample inputs."""
        import torch

        with _stripped(program):
            torch.export.save(program, path, extra_files={SCHEMA_FILE: schema.to_json()})

    def load(self, data: bytes, schema: Schema) -> TorchRunner:
        """Check the archive, load it, and write its graph as one function."""
        import torch

        from kd_export._running.torch_runner import run_program

        archive = disarm(data)
        try:
            with warnings.catch_warnings():
                # torch 2.10 says so of every file that it loads.
                warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
                program = torch.export.load(archive)
        except Exception as error:
            raise ExportError(
                f"torch {torch.__version__} cannot load the file: {error}",
                got=torch.__version__,
                hint=f"It was written by torch {schema.versions.get('torch', 'unknown')}.",
            ) from error
        described = tuple(
            tuple((entry.dtype, len(entry.shape)) for entry in part)
            for part in (schema.inputs, schema.outputs)
        )
        check_fit(described, _borders(program))
        return run_program(program, schema)


backend = Pt2Backend()


def _borders(program: ExportedProgram) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Dtype and number of dimensions of each input and output."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature
    return tuple(
        tuple(
            (str(values[str(name)].dtype).removeprefix("torch."), values[str(name)].dim())
            for name in names
        )
        for names in (signature.user_inputs, signature.user_outputs)
    )


@contextlib.contextmanager
def _stripped(program: ExportedProgram) -> Iterator[None]:
    """Take away, for as long as it is being saved, what a file should not tell."""
    graphs = [m.graph for m in program.graph_module.modules() if hasattr(m, "graph")]
    nodes = [node for graph in graphs for node in graph.nodes]
    before = [node.meta for node in nodes]
    samples = program._example_inputs
    try:
        for node in nodes:
            node.meta = {name: node.meta[name] for name in _KEPT if name in node.meta}
        program._example_inputs = None
        yield
    finally:
        program._example_inputs = samples
        for node, meta in zip(nodes, before, strict=True):
            node.meta = meta
