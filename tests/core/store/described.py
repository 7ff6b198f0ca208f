"""A reader and a writer that follow the description of the format, and use no part of kd.

A container is here what a manifest says of it, with the bytes of a tensor in place of where they
are: `{"tensor": [bytes, dtype, sizes]}`.
"""

import hashlib
import json
import os
import re
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Json = dict[str, Any]
BLOCK = 4 << 20
STORED = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "complex64": ("C64", 8),
    "complex128": ("F64", 16),
    "complex32": ("F16", 4),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fnuz": ("U8", 1),
    "float8_e5m2fnuz": ("U8", 1),
    "float8_e8m0fnu": ("U8", 1),
    "float4_e2m1fn_x2": ("U8", 1),
}
PAIRS = ("complex128", "complex32")
OWN = re.compile(r"manifest\.json|\.lock|(seg|arena)-[0-9a-f]{32}\.safetensors")


class Named(NamedTuple):
    """A tensor that nodes name."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        count = STORED[self.dtype][1]
        for size in self.sizes:
            count *= size
        return count


def canonical(value: object) -> str:
    """Return canonical JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def replaced(node: Json, leaf: Callable[[list[Any]], list[Any]]) -> Json:
    """Return a node with other values of its tensors, in the order in which it names them."""
    [(kind, value)] = node.items()
    match kind:
        case "tensor":
            return {kind: leaf(value)}
        case "td":
            return {kind: _level(value, leaf)}
        case "class":
            return {kind: [*value[:2], _level(value[2], leaf)]}
        case "lazy":
            return {kind: {**value, "members": [replaced(each, leaf) for each in value["members"]]}}
        case "cat":
            return {kind: [replaced(each, leaf) for each in value]}
        case "jagged":
            *parts, dim = value
            return {kind: [*(part and replaced(part, leaf) for part in parts), dim]}
        case "rows":
            return {kind: {**value, "values": replaced(value["values"], leaf)}}
        case "unbatched":
            return {kind: replaced(value, leaf)}
        case "object":
            return {kind: {**value, "tensors": [replaced(each, leaf) for each in value["tensors"]]}}
    assert kind == "data", kind
    return node


def _level(level: Json, leaf: Callable[[list[Any]], list[Any]]) -> Json:
    return {**level, "entries": [[key, replaced(node, leaf)] for key, node in level["entries"]]}


def header_of(tensors: dict[str, Named], metadata: Json | None = None) -> tuple[bytes, Json]:
    """Return the header of a segment, with its length in front, and where its tensors are."""
    rows: Json = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -STORED[item[1].dtype][1]):
        start, end = end, end + tensor.nbytes
        sizes = [*tensor.sizes, *([2] if tensor.dtype in PAIRS else [])]
        rows[name] = {
            "data_offsets": [start, end],
            "dtype": STORED[tensor.dtype][0],
            "shape": sizes,
        }
    text = canonical(rows if metadata is None else {**rows, "__metadata__": metadata}).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text, rows


def checksums_of(data: bytes) -> list[int]:
    """Return the checksum of each block."""
    return [zlib.crc32(data[start : start + BLOCK]) for start in range(0, len(data), BLOCK)]


def body_of(data: bytes) -> Json:
    """Return what a manifest says."""
    line, _, body = data.partition(b"\n")
    assert line == b'{"sha256": "%s"}' % hashlib.sha256(body).hexdigest().encode()
    fields: Json = json.loads(body.decode("ascii"))
    assert canonical(fields).encode() == body
    assert (fields["format"], fields["version"], fields["min_reader"]) == ("kd", 1, 1)
    return fields


def manifest_of(segments: list[Any], tree: Json, *, sealed: bool = True) -> bytes:
    """Return a manifest."""
    fields = {"format": "kd", "version": 1, "min_reader": 1, "generation": 1, "parent": None}
    body = canonical({**fields, "sealed": sealed, "segments": segments, "tree": tree}).encode()
    return b'{"sha256": "%s"}\n%s' % (hashlib.sha256(body).hexdigest().encode(), body)


def named_in(tree: Json) -> dict[int, dict[str, Named]]:
    """Return the tensors that a tree names, by the positions of segments."""
    found: dict[int, dict[str, Named]] = {}

    def add(row: list[Any]) -> list[Any]:
        segment, name, dtype, sizes = row
        named = Named(dtype, tuple(sizes))
        assert found.setdefault(segment, {}).setdefault(name, named) == named
        return row

    replaced(tree, add)
    return found


def read_directory(path: Path) -> Json:
    """Return what a directory holds, all of it compared."""
    fields = body_of((path / "manifest.json").read_bytes())
    tensors = named_in(fields["tree"])
    assert len(tensors) == len(fields["segments"])
    contents = {}
    for position, (name, size, sums) in enumerate(fields["segments"]):
        found = (path / name).lstat()
        assert stat.S_ISREG(found.st_mode)
        assert (found.st_nlink, found.st_size) == (1, size)
        content = (path / name).read_bytes()
        assert sums == (checksums_of(content) if fields["sealed"] else [])
        assert list(tensors[position]) == [f"t{at}" for at in range(len(tensors[position]))]
        header, rows = header_of(tensors[position])
        assert content[: len(header)] == header
        contents[position] = content[len(header) :], rows
    for file in path.iterdir():  # some may be of the manifest before
        assert OWN.fullmatch(file.name), file
    return replaced(fields["tree"], lambda row: _taken(contents, row))


def _taken(contents: dict[int, tuple[bytes, Json]], row: list[Any]) -> list[Any]:
    segment, name, dtype, sizes = row
    data, rows = contents[segment]
    start, end = rows[name]["data_offsets"]
    return [data[start:end], dtype, sizes]


def read_file(path: Path) -> Json:
    """Return what a single file holds, all of it compared."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8:start])["__metadata__"]
    fields = body_of(metadata["kd"].encode())
    tensors = named_in(fields["tree"]).get(0, {})
    header, rows = header_of(tensors, metadata)
    data = content[start:]
    assert content[:start] == header
    assert fields["sealed"]
    assert fields["segments"] == [["", len(data), checksums_of(data)]] * bool(tensors)
    return replaced(fields["tree"], lambda row: _taken({0: (data, rows)}, row))


def _written(tree: Json, segment: int) -> tuple[Json, dict[str, Named], dict[str, bytes]]:
    """Return a tree whose tensors are in a segment, and these tensors."""
    tensors: dict[str, Named] = {}
    contents: dict[str, bytes] = {}

    def add(row: list[Any]) -> list[Any]:
        content, dtype, sizes = row
        name = f"t{len(tensors)}"
        tensors[name], contents[name] = Named(dtype, tuple(sizes)), content
        return [segment, name, dtype, sizes]

    return replaced(tree, add), tensors, contents


def write_directory(path: Path, trees: list[Json], *, sealed: bool = True) -> None:
    """Write containers to a new directory, each in a segment of its own."""
    path.mkdir()
    segments: list[Any] = []
    nodes = []
    for tree in trees:
        node, tensors, contents = _written(tree, len(segments))
        nodes.append(node)
        if tensors:
            header, rows = header_of(tensors)
            content = header + b"".join(contents[name] for name in rows)
            name = f"{'seg' if sealed else 'arena'}-{os.urandom(16).hex()}.safetensors"
            (path / name).write_bytes(content)
            segments.append([name, len(content), checksums_of(content) if sealed else []])
    tree = nodes[0] if len(nodes) == 1 else {"cat": nodes}
    (path / "manifest.json").write_bytes(manifest_of(segments, tree, sealed=sealed))


def write_file(path: Path, tree: Json) -> None:
    """Write a container to a single file."""
    node, tensors, contents = _written(tree, 0)
    _, rows = header_of(tensors)
    data = b"".join(contents[name] for name in rows)
    segments = [["", len(data), checksums_of(data)]] * bool(tensors)
    header, _ = header_of(tensors, {"kd": manifest_of(segments, node).decode("ascii")})
    path.write_bytes(header + data)
