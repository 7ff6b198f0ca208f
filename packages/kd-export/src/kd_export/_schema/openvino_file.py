"""Reading the XML of an OpenVINO model without openvino and without executing it.

openvino finds out by the content what kind of model it is given, so that a file of another format
under this name would be read by that format's rules, which name other files. It also multiplies
the sizes of a tensor without looking for an overflow. So a file is compared with what openvino
writes before openvino sees it.
"""

from __future__ import annotations

import hashlib
import html
import math
import re
from collections.abc import Mapping
from typing import BinaryIO
from xml.parsers import expat

from kd_export._errors import ExportError, UntrustedArtifact, brief
from kd_export._schema.archive import check_schema_size, foreign
from kd_export._schema.beside import check_extent

LARGEST_MODEL = 1 << 28
"""Bytes that the XML may have; weights are in another file."""

_START = re.compile(rb'<\?xml version="1\.0"\?>\s{1,2}<net ')
_SCHEMA = re.compile(rb'<kd_export value="([^"<>]*)"\s*/>')
_NUMBER = re.compile(r"\d{1,19}")
_DEEPEST = 200
# Bits of one number, by the type of the elements.
_BITS = {
    **dict.fromkeys(("i4", "u4", "nf4", "f4e2m1"), 4),
    **dict.fromkeys(("boolean", "i8", "u8", "f8e4m3", "f8e5m2", "f8e8m0"), 8),
    **dict.fromkeys(("i16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("i32", "u32", "f32"), 32),
    **dict.fromkeys(("i64", "u64", "f64"), 64),
}


def read_model(file: BinaryIO) -> bytes:
    """Read the XML, if it begins as openvino begins it and declares no entities.

    Raises:
        ExportError: It is another kind of file, or too large.
    """
    file.seek(0)
    content = file.read(LARGEST_MODEL + 1)
    if len(content) > LARGEST_MODEL or b"<!" in content or not _START.match(content):
        raise ExportError(
            "the file is not an OpenVINO model, or too large for one.",
            hint="It may be damaged, or another kind of XML.",
        )
    return content


def read_openvino_schema(content: bytes) -> str:
    """Read the schema text out of the runtime information."""
    element = _SCHEMA.search(content)
    if element is None:
        raise foreign(".xml")
    check_schema_size(len(element[1]))
    try:
        return html.unescape(element[1].decode())
    except UnicodeDecodeError as error:
        raise ExportError(f"the schema in the file is not text: {error}.") from error


def with_schema(content: bytes, text: str) -> bytes:
    """Replace the schema in the runtime information."""
    check_schema_size(len(text))
    value = html.escape(text).encode()
    changed, count = _SCHEMA.subn(lambda _: b'<kd_export value="' + value + b'" />', content)
    if count != 1:
        raise ExportError(
            f"expected one place for the schema in the XML, got {count}.",
            expected=1,
            got=count,
            hint="The file is damaged, or this version of OpenVINO writes another format.",
        )
    return changed


def weights_digest(content: bytes, weights: bytes) -> str:
    """Compute the SHA-256 of model and weights, without the schema."""
    digest = hashlib.sha256(_SCHEMA.sub(b"", content))
    digest.update(weights)
    return digest.hexdigest()


def check_constants(content: bytes, name: str, size: int) -> None:
    """Refuse a model whose tensors are not parts of the file beside it.

    Args:
        content: The XML.
        name: The file that holds the weights.
        size: How many bytes that file has.

    Raises:
        UntrustedArtifact: A tensor is not a part of the file, or not of its own length.
        ExportError: It is not whole XML.
    """
    depth = 0

    def start(tag: str, attributes: Mapping[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > _DEEPEST:
            raise ExportError("the XML is nested too deeply.", hint="The file is forged.")
        if tag == "data" and ("offset" in attributes or "size" in attributes):
            _check_constant(attributes, name, size)

    def end(_: str) -> None:
        nonlocal depth
        depth -= 1

    parser = expat.ParserCreate()
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    try:
        parser.Parse(content, True)
    except expat.ExpatError as error:
        raise ExportError(
            f"the file is not whole XML: {error}.", hint="It may be truncated."
        ) from error


def _check_constant(attributes: Mapping[str, str], name: str, size: int) -> None:
    shape = attributes.get("shape", "?")
    sizes = shape.split(",") if shape else []
    numbers = [attributes.get("offset", ""), attributes.get("size", ""), *map(str.strip, sizes)]
    bits = _BITS.get(attributes.get("element_type", ""), 0)
    if not bits or len(sizes) > 64 or not all(map(_NUMBER.fullmatch, numbers)):
        raise UntrustedArtifact(
            f"the model has a tensor {brief(dict(attributes))}.",
            expected="an element type, a shape, an offset and a size",
            got=brief(dict(attributes)),
            hint="The file is forged or damaged, or kd-export did not write it.",
        )
    offset, stated, *dims = map(int, numbers)
    check_extent((math.prod(dims) * bits + 7) // 8, offset, stated, name, size)
