"""The schema of an ``.onnx`` file that kd_export did not write, read without onnx."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import BinaryIO

from kd_export._errors import ExportError, NotExportable
from kd_export._schema.archive import foreign
from kd_export._schema.beside import contents
from kd_export._schema.derived import UNKNOWN, Value, derived_schema
from kd_export._schema.onnx_file import PRODUCER, damaged, fields_in, varint
from kd_export._schema.schema import Schema

# The numbers of fields: of a model, a graph, a value, a type, a tensor.
_PRODUCER_NAME, _PRODUCER_VERSION, _GRAPH = 2, 3, 7
_INITIALIZER, _INPUT, _OUTPUT, _SPARSE_INITIALIZER = 5, 11, 12, 15
_NAME, _TYPE = 1, 2
_TENSOR_TYPE, _ELEMENT, _SHAPE = 1, 1, 2
_TENSOR_NAME, _SPARSE_VALUES = 8, 1
_DTYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
}
_MISNAMED = "None"
"""What torch called every size it did not know: sizes of this name need not be equal."""
_ANY_RANK = "..."
_MOST_FIELDS = 2_000_000
_LONGEST_NAME = 1 << 16
_LARGEST_SIZE = (1 << 63) - 1
"""A larger number is a negative one, by which some exporters say that they do not know a size."""

_Part = tuple[int, memoryview]


def derived_onnx(file: BinaryIO) -> Schema:
    """Build the schema from the inputs and outputs of a model's graph.

    Raises:
        ExportError: The model is damaged, or kd_export wrote it and its schema is missing.
        NotExportable: An input or output is not a tensor of numbers, or an input has any rank.
    """
    try:
        return _derived(contents(file))
    except (EOFError, UnicodeDecodeError) as error:
        raise damaged(error) from error


def _derived(model: memoryview) -> Schema:
    reader = _Reader()
    parts = list(reader.parts(model))
    told = {number: _text(part) for number, part in parts if number in (2, 3)}
    if told.get(_PRODUCER_NAME) == PRODUCER:
        raise ExportError(
            "the .onnx file was written by kd-export, and its schema is missing.",
            expected="a schema",
            hint="The file may be truncated, or another program wrote it anew: export again.",
        )
    weights = {_text(name) for name in reader.weight_names(parts)}
    inputs = [value for value in reader.values(parts, _INPUT) if value.name not in weights]
    outputs = list(reader.values(parts, _OUTPUT))
    if not outputs:
        raise foreign(".onnx")
    for value in inputs:
        if value.shape == (_ANY_RANK,):
            raise _refused(value.name, "has no shape", "a shape, whose sizes may be unknown")
    name = told.get(_PRODUCER_NAME, "")
    versions = {name: told.get(_PRODUCER_VERSION, "")} if name else {}
    return derived_schema(inputs, outputs, {}, versions)


class _Reader:
    """Read the messages of one model, up to a number of fields in all."""

    def __init__(self) -> None:
        self._left = _MOST_FIELDS

    def parts(self, message: memoryview) -> Iterator[_Part]:
        for number, start, size in fields_in(message, 0, len(message)):
            self._left -= 1
            if self._left < 0:
                raise EOFError("it has too many fields")
            yield number, message[start : start + size]

    def inside(self, parts: Sequence[_Part], *numbers: int) -> Iterator[_Part]:
        """Iterate over the fields of those numbers in the graph."""
        for number, part in parts:
            if number == _GRAPH:
                yield from (found for found in self.parts(part) if found[0] in numbers)

    def last(self, message: memoryview, number: int) -> memoryview:
        """Return the last field of a number, the one that counts; empty if there is none."""
        found = memoryview(b"")
        for one, part in self.parts(message):
            found = part if one == number else found
        return found

    def weight_names(self, parts: Sequence[_Part]) -> Iterator[memoryview]:
        """Find the names of initializers, which older models list among the inputs too."""
        for number, part in self.inside(parts, _INITIALIZER, _SPARSE_INITIALIZER):
            tensor = self.last(part, _SPARSE_VALUES) if number == _SPARSE_INITIALIZER else part
            yield self.last(tensor, _TENSOR_NAME)

    def values(self, parts: Sequence[_Part], kind: int) -> Iterator[Value]:
        """Read the inputs, or the outputs, of the graph."""
        for _, part in self.inside(parts, kind):
            name = _text(self.last(part, _NAME))
            tensor = self.last(self.last(part, _TYPE), _TENSOR_TYPE)
            if not tensor:
                raise _refused(name, "is not a tensor", "a tensor")
            element = varint(self.last(tensor, _ELEMENT), 0)[0]
            if element not in _DTYPES:
                raise _refused(name, f"has the data type {element}", "a tensor of numbers or bools")
            shapes = [shape for number, shape in self.parts(tensor) if number == _SHAPE]
            dims = [dim for shape in shapes for _, dim in self.parts(shape)]
            sizes = tuple(self._size(dim) for dim in dims) if shapes else (_ANY_RANK,)
            yield Value(name, _DTYPES[element], sizes)

    def _size(self, dim: memoryview) -> int | str:
        for number, part in self.parts(dim):
            if number == 1:
                size = varint(part, 0)[0]
                return size if size <= _LARGEST_SIZE else UNKNOWN
            if number == 2 and part and _text(part) != _MISNAMED:
                return _text(part)
        return UNKNOWN


def _text(part: memoryview) -> str:
    if len(part) > _LONGEST_NAME:
        raise EOFError("a name is too long")
    return bytes(part).decode()


def _refused(name: str, fault: str, expected: str) -> NotExportable:
    return NotExportable(
        f"`{name[:200]}` of the model {fault}, and a session runs on tensors of known rank.",
        expected=expected,
        got=name[:200],
        hint="Run the file by `onnxruntime.InferenceSession`.",
    )
