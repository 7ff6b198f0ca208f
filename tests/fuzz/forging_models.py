"""Forged and damaged models of other runtimes, each with the file beside it, and all forgers."""

import io
import random
import re
from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import TensorProto, helper
from tests.fuzz.forged_worker import CANARY, SECRET
from tests.fuzz.forging import NUMBERS, damage, forge_compiled, forge_json, forge_pt2

from kd_export._backends.executorch import check_methods, schema_place
from kd_export._backends.openvino import read_openvino_schema, with_schema
from kd_export._schema.onnx_file import SCHEMA_PROPERTY

PLACES = [
    f"/tmp/{CANARY}", f"../{SECRET}", SECRET, f"./{SECRET}", f"../here/{SECRET}", "/dev/zero", "",
    "*/_ORT_MEM_ADDR_/*", f"sub/../{SECRET}", "beside.onnx", "beside.onnx.data", "good.bin",
]  # fmt: skip
"""Where a forger lets a model look for its weights."""


def forge_onnx(data: bytes, source: random.Random) -> bytes:
    if source.random() < 0.3:
        return damage(data, source)
    model = onnx.load_from_string(data)
    kind: Callable[..., None] = source.choice([forge_schema, forge_schema, *GRAPH_CHANGES])
    kind(model, source)
    content: bytes = model.SerializeToString()
    return content


def forge_schema(model: onnx.ModelProto, source: random.Random) -> None:
    (entry,) = [entry for entry in model.metadata_props if entry.key == SCHEMA_PROPERTY]
    entry.value = forge_json(entry.value.encode(), source).decode()


def move_outside(model: onnx.ModelProto, source: random.Random) -> None:
    tensor = source.choice(model.graph.initializer)
    if source.random() < 0.8:
        tensor.data_location = TensorProto.EXTERNAL
    entries = {entry.key: entry.value for entry in tensor.external_data}
    entries |= {"location": source.choice([*PLACES, entries.get("location", "")])}
    key = source.choice(["location", "offset", "length", "checksum", "basepath"])
    if key != "location":
        entries[key] = str(source.choice([*NUMBERS, PLACES[0], "0x10", " 4", "4 "]))
    del tensor.external_data[:]
    for name, value in entries.items():
        tensor.external_data.add(key=name, value=value)


def change_tensor(model: onnx.ModelProto, source: random.Random) -> None:
    tensor = source.choice(model.graph.initializer)
    tensor.dims[:] = [source.choice([0, 1, -1, 3, 10**9, 2**40]) for _ in tensor.dims]
    tensor.data_type = source.choice([tensor.data_type, 7, 0, 99])


def change_node(model: onnx.ModelProto, source: random.Random) -> None:
    node = source.choice(model.graph.node)
    kind = source.randrange(4)
    if kind == 0:
        node.op_type = source.choice(["EPContext", "Relu", "If", "Loop", "PythonOp", "ATen", "Neg"])
    elif kind == 1:
        node.domain = source.choice(["com.microsoft", "ai.onnx.ml", CANARY])
    elif kind == 2 and node.input:
        node.input[0] = source.choice(["", "x", "y", CANARY])
    elif node.output:
        node.output[0] = source.choice(["", "x", "y", CANARY])


def change_border(model: onnx.ModelProto, source: random.Random) -> None:
    value = source.choice([*model.graph.input, *model.graph.output])
    if source.random() < 0.5:
        value.name = source.choice(["x", "y", "next.h", CANARY])
    for dim in value.type.tensor_type.shape.dim:
        dim.dim_value = source.choice([1, 3, 5, 10**9])


GRAPH_CHANGES = (move_outside, change_tensor, change_node, change_border)

Files = dict[str, bytes]
Forged = dict[str, bytes | Path]
"""What is written by each name: bytes, or a link to a path."""


def forge_beside(files: Files, source: random.Random) -> Forged:
    """Change a model, or the file of weights beside it."""
    (main, model), (beside, weights) = files.items()
    forge = forge_xml if main.endswith(".xml") else forge_onnx
    kind = source.randrange(6)
    if kind < 4:
        return {main: forge(model, source), beside: weights}
    if kind == 4:
        return {main: model, beside: damage(weights, source)}
    links = (Path(SECRET), Path("/dev/zero"), Path(main), Path("/proc/self/environ"))
    return source.choice([{main: model}, {main: model, beside: source.choice(links)}])


def forge_xml(data: bytes, source: random.Random) -> bytes:
    kind = source.randrange(5)
    if kind == 0:
        return damage(data, source)
    if kind == 1:
        forged = forge_json(read_openvino_schema(data).encode(), source).decode()
        return with_schema(data, forged)
    if kind == 2:
        return pretended(data, source)
    if kind == 3:
        entity = source.choice([f'SYSTEM "{SECRET}"', '"&b;&b;"'])
        declared = f"<!DOCTYPE net [<!ENTITY a {entity}>]><net a='&a;' "
        return data.replace(b"<net ", declared.encode(), 1)
    attributes = list(re.finditer(rb'"[^"]*"', data))
    start, end = source.choice(attributes).span()
    new: object = source.choice([*NUMBERS, "", "string", "dynamic", "-1, 3", "&#0;", "?", CANARY])
    return data[:start] + f'"{new}"'.encode() + data[end:]


def pretended(data: bytes, source: random.Random) -> bytes:
    """Write a model of another format that takes weights from another file, under this name."""
    tensor = TensorProto(name="w", data_type=1, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", source.choice(PLACES)), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    ports = [helper.make_tensor_value_info(name, 1, [4]) for name in ("x", "y")]
    node = helper.make_node("Identity", ["w"], ["y"])
    graph = helper.make_graph([node], "<net ", ports[:1], ports[1:], [tensor])
    model = helper.make_model(graph, producer_name="<net ")
    model.doc_string = data.decode()
    content: bytes = model.SerializeToString()
    return content


class Recorder(io.BytesIO):
    """A file that notes where its numbers are read."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.numbers: set[tuple[int, int]] = set()

    def read(self, size: int | None = -1, /) -> bytes:
        if size in (1, 2, 4):
            self.numbers.add((self.tell(), size))
        return super().read(size)


def forge_pte(data: bytes, source: random.Random) -> bytes:
    """Change a flatbuffer: any bytes, the numbers that lead a reader, or the schema."""
    kind = source.randrange(5)
    if kind == 0:
        return damage(data, source)
    if kind == 1:
        return with_text(data, source)
    file, content = Recorder(data), bytearray(data)
    schema_place(file)
    check_methods(file)
    for position, size in source.choices(sorted(file.numbers), k=source.choice([1, 1, 2, 3])):
        old = int.from_bytes(data[position : position + size], "little")
        numbers = [0, 1, old - 1, old + 1, old * 2, position, -position, len(data) - position,
                   2**15, 2**31 - 1, 2**31, 2**32 - 1, source.getrandbits(32)]  # fmt: skip
        new = source.choice(numbers) % 2 ** (8 * size)
        content[position : position + size] = new.to_bytes(size, "little")
    return bytes(content)


def with_text(data: bytes, source: random.Random) -> bytes:
    """Append another schema, and let the program give that."""
    start, size = schema_place(io.BytesIO(data))
    text, end = forge_json(data[start : start + size], source), len(data) + -len(data) % 4
    content = bytearray(data.ljust(end, b"\0"))
    for place in range(0, start - 4, 4):
        if place + int.from_bytes(data[place : place + 4], "little") == start - 4:
            content[place : place + 4] = (end - place).to_bytes(4, "little")
    return bytes(content) + len(text).to_bytes(4, "little") + text + b"\0"


def alone(forge: Callable[[bytes, random.Random], bytes]) -> Callable[..., Forged]:
    """Forge a file that has none beside it."""

    def forge_one(files: Files, source: random.Random) -> Forged:
        ((name, content),) = files.items()
        return {name: forge(content, source)}

    return forge_one


FORGE: dict[tuple[str, ...], Callable[[Files, random.Random], Forged]] = {
    ("good.pt2",): alone(forge_pt2),
    ("good.onnx",): alone(forge_onnx),
    ("beside.onnx", "beside.onnx.data"): forge_beside,
    ("good.xml", "good.bin"): forge_beside,
    ("good.pte",): alone(forge_pte),
    ("good.aoti.pt2",): alone(forge_compiled),
}
"""What forges the files of a format, by their names."""
