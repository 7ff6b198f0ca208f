"""Models read without onnx; weights leave a message and come back, and nothing else changes."""

import io
import os
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from tests import children
from tests.export.models import Keyed, exported
from tests.repo.tree import ROOT
from torch import nn

import kd_export
from kd_export import ExportError, UntrustedArtifact
from kd_export._schema import onnx_file
from kd_export._schema.onnx_file import (
    SCHEMA_PROPERTY,
    check_external,
    moved_in,
    moved_out,
    read_onnx_schema,
    schema_field,
    tensor_of,
    weights_digest,
)


def field(number: int, content: bytes) -> bytes:
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


SCHEMA = field(14, field(1, SCHEMA_PROPERTY.encode()) + field(2, b"{}"))


@pytest.mark.parametrize(
    "before",
    [
        b"",
        b"\x08\x0a",  # ir_version, a varint
        field(7, b"a graph"),
        b"\x0d" + b"\x00" * 4 + b"\x09" + b"\x00" * 8,  # fields of 4 and of 8 bytes
        field(14, field(1, b"other") + field(2, b"text")),
    ],
)
def test_schema_is_found_among_other_fields(before: bytes) -> None:
    assert read_onnx_schema(io.BytesIO(before + SCHEMA)) == "{}"


@pytest.mark.parametrize("data", [b"\x72\x7f", b"\xff" * 12, b"\x0b", b"\x08", SCHEMA[:-1]])
def test_broken_message_is_named_so(data: bytes) -> None:
    with pytest.raises(ExportError, match="not a whole ONNX model"):
        read_onnx_schema(io.BytesIO(data))


def test_a_field_has_a_number() -> None:
    with pytest.raises(ExportError, match="a field has no number"):
        read_onnx_schema(io.BytesIO(bytes(1 << 20)))


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("within", [False, True])
def test_a_file_of_endless_fields_is_refused_at_once(within: bool) -> None:
    many = b"\x08\x01" * (1 << 20)
    data = b"\x72\x80\x80\x80\x01" + many if within else many  # a property of 2 MB
    with pytest.raises(ExportError, match="too many fields"):
        read_onnx_schema(io.BytesIO(data))


def test_the_schema_is_appended() -> None:
    model = helper.make_model(helper.make_graph([], "g", [], []))
    data = model.SerializeToString() + schema_field("{}")
    assert read_onnx_schema(io.BytesIO(data)) == "{}"
    (entry,) = onnx.load_from_string(data).metadata_props
    assert (entry.key, entry.value) == (SCHEMA_PROPERTY, "{}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("saved") / "model.onnx"
    exported("nested").save(target)
    return target


@pytest.fixture
def path(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(saved, tmp_path))


def test_the_digest_is_of_the_weights_not_of_the_schema(path: Path) -> None:
    data = path.read_bytes()
    assert weights_digest(data) == weights_digest(data + schema_field("{}"))
    model = onnx.load(path)
    model.graph.initializer[0].raw_data = bytes(len(model.graph.initializer[0].raw_data))
    assert weights_digest(model.SerializeToString()) != weights_digest(data)


def external(name: str) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[2, 3])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "weights.bin", "offset": "0", "length": "24"}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def in_graph(graph: onnx.GraphProto) -> None:
    graph.initializer.append(external("w"))


def in_node(graph: onnx.GraphProto) -> None:
    graph.node.append(helper.make_node("Constant", [], ["w"], value=external("w")))


def in_inner_graph(graph: onnx.GraphProto) -> None:
    inner = helper.make_graph([], "inner", [], [], initializer=[external("w")])
    graph.node.append(helper.make_node("If", ["c"], ["w"], then_branch=inner, else_branch=inner))


def in_sparse(graph: onnx.GraphProto) -> None:
    graph.sparse_initializer.add().values.CopyFrom(external("w"))


def without_location(graph: onnx.GraphProto) -> None:
    graph.initializer.append(external("w"))
    graph.initializer[-1].ClearField("data_location")


PLACES = [in_graph, in_node, in_inner_graph, in_sparse, without_location]


@pytest.mark.parametrize("place", PLACES)
def test_weights_in_other_files_are_refused(
    path: Path, place: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = onnx.load(path)
    assert callable(place)
    place(model.graph)
    path.write_bytes(model.SerializeToString())
    monkeypatch.chdir(path.parent)
    np.zeros(6, "float32").tofile("weights.bin")
    for call in (kd_export.open, kd_export.verify):
        with pytest.raises(UntrustedArtifact, match="keeps weights or code in another file"):
            call(path)
    assert kd_export.inspect(path).inputs


def test_a_node_of_compiled_code_is_refused() -> None:
    graph = helper.make_graph([helper.make_node("EPContext", [], ["y"])], "g", [], [])
    with pytest.raises(UntrustedArtifact, match="weights or code in another file"):
        check_external(helper.make_model(graph).SerializeToString())


def test_endless_depth_is_damage() -> None:
    graph = b""
    for _ in range(40):
        for number in (6, 5, 1):  # a graph in an attribute of a node of a graph
            graph = bytes([number << 3 | 2]) + length_of(graph) + graph
    with pytest.raises(ExportError, match="nested too deeply"):
        check_external(b"\x3a" + length_of(graph) + graph)


def length_of(content: bytes) -> bytes:
    return bytes([len(content) & 0x7F | 0x80, len(content) >> 7])


def test_a_model_in_the_format_of_onnxruntime_is_not_read(path: Path) -> None:
    """The bytes at 4 to 8 name that format: a file may be both."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = os.fspath(path.with_suffix(".ort"))
    options.add_session_config_entry("session.save_model_format", "ORT")
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    data = path.with_suffix(".ort").read_bytes()
    assert data[4:8] == b"ORTM"
    schema = kd_export.inspect(path)
    path.write_bytes(data)
    from kd_export._backends.onnx import backend

    with (
        path.open("rb") as file,
        pytest.raises(ExportError, match=r"not a whole ONNX model|cannot load the file"),
    ):
        backend.load(file, schema, path)


@pytest.fixture(scope="module")
def large_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kd_export._backends.onnx.LARGEST_INSIDE", 100)
        patch.setattr("kd_export._backends.onnx_operators.LARGE", 256)
        model = Keyed(nn.Linear(30, 20), ["x"], ["y"])
        kd_export.save(model, folder / "model.onnx", {"x": torch.randn(2, 30)})
    return folder


@pytest.fixture
def large(large_saved: Path, tmp_path: Path) -> Path:
    """A file whose weights are beside it, as those of 2 GiB are."""
    return Path(shutil.copytree(large_saved, tmp_path / "in")) / "model.onnx"


def test_large_weights_are_beside_the_file(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [path.name for path in sorted(large.parent.iterdir())] == [
        "model.onnx",
        "model.onnx.data",
    ]
    monkeypatch.chdir(large.parent.parent)
    assert kd_export.verify(large).ok
    assert kd_export.verify("in/model.onnx").ok


def test_large_weights_are_in_the_digest(large: Path) -> None:
    data = large.with_name("model.onnx.data")
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(
        kd_export.VerifyError, match=r"weights or the graph in `model\.onnx` are not those"
    ):
        kd_export.open(large)


def test_large_weights_that_are_missing_or_cut_are_named(large: Path) -> None:
    data = large.with_name("model.onnx.data")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(UntrustedArtifact, match=r"bytes at .* of `model\.onnx\.data`, which has"):
        kd_export.open(large)
    data.unlink()
    with pytest.raises(UntrustedArtifact, match="which has 0"):
        kd_export.open(large)
    data.mkdir()
    with pytest.raises(ExportError, match="is not a regular file"):
        kd_export.open(large)


def test_large_weights_that_are_a_link_are_refused(large: Path) -> None:
    data = large.with_name("model.onnx.data")
    data.rename(large.with_name("elsewhere"))
    data.symlink_to("elsewhere")
    with pytest.raises(UntrustedArtifact, match=r"`model\.onnx\.data` beside the model is a link"):
        kd_export.open(large)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("location", "../model.onnx.data"),
        ("location", "/etc/passwd"),
        ("offset", "-1"),
        ("offset", "99999999999999999999999"),
        ("length", "1"),
        ("basepath", "/"),
    ],
)
def test_no_other_place_is_read(large: Path, key: str, value: str) -> None:
    model = onnx.load(large, load_external_data=False)
    (tensor,) = (t for t in model.graph.initializer if t.external_data)
    entries = {entry.key: entry.value for entry in tensor.external_data} | {key: value}
    del tensor.external_data[:]
    for name, text in entries.items():
        tensor.external_data.add(key=name, value=text)
    large.write_bytes(model.SerializeToString())
    with pytest.raises(UntrustedArtifact):
        kd_export.open(large)


def test_a_file_beside_that_no_tensor_names_is_not_read(path: Path) -> None:
    path.with_name("model.onnx.data").write_bytes(b"stale")
    assert kd_export.verify(path).ok


X = {"x": torch.randn(3, 20)}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_file, "LARGE", 64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 7))
    kd_export.save(Keyed(net, ["x"], ["y"]), path, X)
    return path.read_bytes()


def whole(moved: bytes, model: bytes) -> bytes:
    return b"".join(moved_in(memoryview(moved), memoryview(model)))


def test_weights_come_back_to_the_same_model(model: bytes) -> None:
    import onnx

    moved = moved_out(memoryview(model), "model")
    assert len(moved) < len(model) - 4 * 20 * 30
    assert check_external(moved, "model", len(model))
    back = onnx.load_from_string(whole(moved, model))
    assert back == onnx.load_from_string(model)


def test_a_model_without_large_weights_stays_as_it_is(model: bytes) -> None:
    onnx_file.LARGE = 1 << 20
    assert moved_out(memoryview(model), "model") == model
    assert moved_in(memoryview(model), memoryview(b"")) == [memoryview(model)]


def test_random_changes_to_a_model_are_read_as_by_the_whole_message(model: bytes) -> None:
    """What a changed model means does not depend on where its weights are read."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # by protobuf
    from onnx import ModelProto

    rng, read = random.Random(0), 0
    for _ in range(400):
        data = bytearray(model)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        forged = bytes(data)
        try:
            check_external(forged)
            moved = moved_out(memoryview(forged), "model")
        except (ExportError, EOFError):
            continue
        try:
            expected = ModelProto.FromString(forged)
        except DecodeError:
            with pytest.raises(DecodeError):
                ModelProto.FromString(whole(moved, forged))
            continue
        assert ModelProto.FromString(whole(moved, forged)) == expected
        read += 1
    assert read > 100


def test_a_field_of_many_sizes_takes_no_time() -> None:
    sizes = b"\x0a" + b"\xff\xff\x7f" + b"\x01" * 0x1FFFFF
    assert tensor_of(memoryview(sizes)) == (0, {})


def test_a_tensor_that_says_no_type_has_no_known_size() -> None:
    three, of_float = b"\x08\x03", b"\x10\x01"
    assert tensor_of(memoryview(three)) == (0, {})
    assert tensor_of(memoryview(three + of_float)) == (12, {})


PEAK = """
import sys, threading, time
import torch, kd_export
from tests.export.models import Keyed
from torch import nn

def own_memory():
    pages = open("/proc/self/statm").read().split()
    return (int(pages[1]) - int(pages[2])) * 4096

def peak_of(call):
    start, most, ended = own_memory(), [0], threading.Event()
    def watch():
        while not ended.is_set():
            most.append(own_memory())
            time.sleep(0.001)
    thread = threading.Thread(target=watch)
    thread.start()
    call()
    ended.set()
    thread.join()
    return max(most) - start

def net(size):
    return Keyed(nn.Sequential(*(nn.Linear(size, size) for _ in range(8))), ["x"], ["y"])

x = {"x": torch.zeros(2, 8)}
kd_export.save(net(8), "small.onnx", x)
kd_export.open("small.onnx")
big = net(1448)
weights = sum(p.nbytes for p in big.parameters())
print(peak_of(lambda: kd_export.save(big, "big.onnx", {"x": torch.zeros(2, 1448)})) / weights)
print(peak_of(lambda: kd_export.open("big.onnx")) / weights)
"""


def test_weights_are_not_copied_again_and_again(tmp_path: Path) -> None:
    """Of 64 MiB of weights, beside those of the module: to write and try it, and to open it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    told = children.check_output("-W", "ignore", "-c", PEAK, cwd=tmp_path, env=environment)
    saving, opening = map(float, told.split())
    assert 0.5 < saving < 2.6  # 3 and more with a copy for each library on the way
    assert 0.5 < opening < 2.2
