"""Forged files must be refused before torch gets to see them, trusted or not."""

import io
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from tests.export.models import exported

import kd_export
from kd_export import ExportError, UntrustedArtifact
from kd_export._backends.pt2 import check_registered
from kd_export._schema.trust import check_operator, disarm

Edit = Callable[[dict[str, bytes]], None]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("artefacts") / "model.pt2"
    exported("nested").save(path)
    with zipfile.ZipFile(path) as archive:
        return {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"model/{name}", content)
    return buffer.getvalue()


def forged(files: dict[str, bytes], path: str, old: str, new: str) -> bytes:
    text = files[path].decode()
    assert old in text
    return packed(files | {path: text.replace(old, new).encode()})


def disarmed(data: bytes) -> tuple[BinaryIO, list[str]]:
    return disarm(io.BytesIO(data))


MODEL = "models/model.json"
HARMFUL_TARGETS = ["os.system", "torch.os.system", "torch.serialization.load", "builtins.eval"]


@pytest.mark.parametrize("target", HARMFUL_TARGETS)
def test_only_operators_may_be_called(files: dict[str, bytes], target: str) -> None:
    data = forged(files, MODEL, "torch.ops.aten.linear.default", target)
    with pytest.raises(UntrustedArtifact, match=f"calls `{target}`, which is not an operator"):
        disarmed(data)


PICKLED = [
    "data/weights/model.pt",
    "data/constants/opaque_obj_0",
    "data/constants/custom_obj_0",
    "data/constants/opaque_obj/tensor_0",
    "data/constants/opaque_obj_0/x",
    "data/weights/weight_0/x",
    "data/weights/../constants/opaque_obj_0",
]


@pytest.mark.parametrize("path", PICKLED)
def test_pickled_payloads_are_refused(files: dict[str, bytes], path: str) -> None:
    with pytest.raises(UntrustedArtifact, match=r"not part of an exported program.*pickled"):
        disarmed(packed(files | {path: pickle.dumps(1)}))


WEIGHTS = "data/weights/model_weights_config.json"
CONFIGS: dict[str, dict[str, object]] = {
    "expected false in `use_pickle`": {"use_pickle": True},
    "expected weight file in `path_name`": {"path_name": "opaque_obj_x/../weight_0"},
    "has no data": {"path_name": "weight_7"},
    "expected int in `as_int`": {"sizes": [{"as_int": "2"}]},
    "has no data in the file": {"sizes": [{"as_int": -2}]},
    "spreads 24 bytes to 1,000,000,000 numbers": {"sizes": [{"as_int": 10**9}]},
    "expected one of the fields": {"layout_fn": "x"},
    "expected device": {"device": {"type": "evil", "index": None}},
}


@pytest.mark.parametrize("message", CONFIGS)
def test_weights_are_plain_tensors(files: dict[str, bytes], message: str) -> None:
    config = json.loads(files[WEIGHTS])
    weight = config["config"]["net.weight"]
    for field, value in CONFIGS[message].items():
        (weight if field in weight else weight["tensor_meta"])[field] = value
    with pytest.raises(UntrustedArtifact, match=message):
        disarmed(packed(files | {WEIGHTS: json.dumps(config).encode()}))


def test_unknown_data_is_refused(files: dict[str, bytes]) -> None:
    with pytest.raises(UntrustedArtifact, match="not part of an exported program"):
        disarmed(packed(files | {"data/more/x.so": b"x"}))


def test_samples_and_guards_are_dropped(files: dict[str, bytes]) -> None:
    model = json.loads(files[MODEL])
    if "guards_code" in model:
        model["guards_code"] = ["__import__('os')"]
    kept, _ = disarmed(
        packed(
            files | {MODEL: json.dumps(model).encode(), "data/sample_inputs/model.pt": b"pickled"}
        )
    )
    with kept, zipfile.ZipFile(kept) as archive:
        assert archive.read("model/data/sample_inputs/model.pt") == b""
        assert not json.loads(archive.read(f"model/{MODEL}")).get("guards_code")


def test_trust_does_not_reach_forgeries(files: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "forged.pt2"
    path.write_bytes(forged(files, MODEL, "torch.ops.aten.linear.default", "os.system"))
    with pytest.raises(UntrustedArtifact, match="forged or damaged"):
        kd_export.open(path, trusted=True)


@pytest.mark.parametrize("content", [b"{", b"[]"])
def test_damaged_program_is_named_so(files: dict[str, bytes], content: bytes) -> None:
    with pytest.raises(ExportError, match=r"is not JSON|expected an object in `program`"):
        disarmed(packed(files | {MODEL: content}))


def test_no_archive_is_named_so() -> None:
    with pytest.raises(ExportError, match=r"not a whole \.pt2 archive"):
        disarmed(b"hello")


FORGED = {
    "an older format": {"serialized_exported_program.json": b"{}", "version": b"8.20"},
    "compiled code": {"model/data/aotinductor/model/x.so": b"x"},
    "a path upwards": {"model/extra/../../../x": b"x"},
    "an absolute path": {"/model/extra/x": b"x"},
    "another folder": {"other/extra/x": b"x"},
    "pickled data": {"model/data.pkl": b"x"},
}


@pytest.mark.parametrize("more", FORGED.values(), ids=FORGED)
def test_only_the_files_of_one_program_are_let_in(
    files: dict[str, bytes], more: dict[str, bytes]
) -> None:
    buffer = io.BytesIO(packed(files))
    with zipfile.ZipFile(buffer, "a") as archive:
        for name, content in more.items():
            archive.writestr(name, content)
    with pytest.raises(UntrustedArtifact, match=r"not part of an exported program|several"):
        disarmed(buffer.getvalue())


class Payload:
    """Unpickles to a call that leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.trace),)


def test_an_archive_of_an_older_torch_unpickles_nothing(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    major = torch._export.serde.schema.SCHEMA_VERSION[0]
    payload = pickle.dumps(Payload(tmp_path / "executed"))
    with zipfile.ZipFile(tmp_path / "old.pt2", "w") as archive:
        archive.writestr("version", f"{major}.0")
        archive.writestr("serialized_exported_program.json", files[MODEL])
        for name in ("state_dict", "constants", "example_inputs"):
            archive.writestr(f"serialized_{name}.pt", payload)
        archive.writestr("a/archive_format", b"pt2")
        archive.writestr("a/extra/kd_export.json", files["extra/kd_export.json"])
    with pytest.raises(UntrustedArtifact):
        kd_export.open(tmp_path / "old.pt2", trusted=True)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", [MODEL, "extra/kd_export.json"])
def test_endless_depth_is_damage(files: dict[str, bytes], tmp_path: Path, name: str) -> None:
    path = tmp_path / "deep.pt2"
    path.write_bytes(packed(files | {name: b"[" * 200_000}))
    with pytest.raises(ExportError, match="not JSON"):
        kd_export.open(path, trusted=True)


def test_names_in_an_archive_are_text(files: dict[str, bytes]) -> None:
    data = packed(files | {"extra/é": b""})  # zipfile marks its name as UTF-8
    with pytest.raises(ExportError, match="not a whole"):
        disarmed(data.replace("é".encode(), b"\xff\xff"))


def test_a_schema_of_another_program_is_refused(files: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "mixed.pt2"
    schema = json.loads(files["extra/kd_export.json"])
    schema["inputs"][0]["dtype"] = "float64"
    path.write_bytes(packed(files | {"extra/kd_export.json": json.dumps(schema).encode()}))
    with pytest.raises(ExportError, match="does not fit the program"):
        kd_export.open(path, trusted=True)


@pytest.mark.parametrize("part", ["inputs", "outputs"])
def test_a_renamed_entry_is_refused(files: dict[str, bytes], tmp_path: Path, part: str) -> None:
    path = tmp_path / "renamed.pt2"
    schema = json.loads(files["extra/kd_export.json"])
    entry = schema[part][0]
    old, entry["key"], entry["wire"], entry["name"] = entry["wire"], ["y"], "y", "y"
    for vector in schema["vectors"]:
        vector["outputs"] = {"y" if n == old else n: v for n, v in vector["outputs"].items()}
    path.write_bytes(packed(files | {"extra/kd_export.json": json.dumps(schema).encode()}))
    with pytest.raises(ExportError, match="does not fit the program"):
        kd_export.open(path, trusted=True)


def test_a_tensor_name_with_a_default_never_becomes_source(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "named.pt2"
    trace = tmp_path / "executed"
    name = f"in_x=__import__('os').mkdir('{trace}')"
    text = files[MODEL].decode().replace('"in_x"', json.dumps(name))
    path.write_bytes(packed(files | {MODEL: text.encode()}))
    with pytest.raises(UntrustedArtifact, match="expected name in"):
        kd_export.open(path, trusted=True)
    assert not trace.exists()


PLAIN = [
    "torch.ops.aten.relu.default",
    "torch.ops.aten._softmax.default",
    "torch.ops.aten.__and__.Tensor",
    "torch.ops.aten.einsum.default",
    "torch.ops.higher_order.cond",
    "_operator.getitem",
    "torch.sym_max",
]


@pytest.mark.parametrize("target", PLAIN)
def test_operators_on_tensors_pass(target: str) -> None:
    check_registered([check_operator(target)])


HARMFUL = [
    "os.system",
    "torch.os.system",
    "torch.serialization.load",
    "builtins.eval",
    "_operator.call",
    "_operator.attrgetter",
    "torch.ops.load_library",
    "torch.ops.aten",
    "torch.ops.aten.from_file.default",
    "torch.ops.aten.from_file.out",
    "torch.ops.aten.save.default",
    "torch.ops.aten.save",
    "torch.ops.aten.__class__.mro",
    "torch.ops.aten.__loader__.load_module",
    "torch.ops.aten.relu.default.__call__",
    "torch.ops.aten._dir.append",
    "torch.ops.aten.relu._op",
    "torch.ops.aten.warn.default",
    "torch.ops.aten.manual_seed.default",
    "torch.ops.aten.wait.default",
    "torch.ops.aten.append.t",
    "torch.ops.aten.set_.source_Storage",
    "torch.ops.image.read_file.default",
    "torch.ops.image.write_file.default",
    "torch.ops.inductor._alloc_from_pool.default",
    "torch.ops.profiler._record_function_enter.default",
    "torch.ops.c10d.send.default",
    "torch.ops.prim.PythonOp.default",
    "torch.ops.higher_order.call_torchbind",
    "torch.ops.higher_order.triton_kernel_wrapper_functional",
    "torch.ops.higher_order.print",
    "torch.ops.higher_order.inductor_compiled_code",
]


@pytest.mark.parametrize("target", HARMFUL)
def test_what_reaches_beyond_tensors_is_refused(target: str) -> None:
    with pytest.raises(UntrustedArtifact, match="which is not an operator"):
        check_registered([check_operator(target)])


def test_an_operator_that_is_not_registered_says_what_to_import() -> None:
    with pytest.raises(ExportError, match=r"not registered\. Import the package that defines it"):
        check_registered(["torch.ops.torchvision.no_such_operator.default"])


# Operators of aten that take a string, each looked at: none of them uses it as a path or a command.
WITH_TEXT = """
_assert_async _assert_scalar _convolution_mode _functional_assert_async _functional_assert_scalar
_linalg_check_errors _linalg_eigh _linalg_svd _mixed_dtypes_linear _segment_reduce_backward
_sparse_mm _sparse_mm_reduce_impl _sparse_mm_reduce_impl_backward _sparse_semi_structured_linear
_sparse_semi_structured_tile conv1d conv2d conv3d div div_ divide divide_ einsum fft_fft fft_fft2
fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_ihfft2 fft_ihfftn
fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn gelu gelu_ gelu_backward index_reduce
index_reduce_ linalg_cond linalg_eigh linalg_eigvalsh linalg_lstsq linalg_matrix_norm linalg_norm
linalg_qr linalg_svd linalg_svdvals meshgrid nanquantile pad pad_sequence quantile scatter scatter_
scatter_reduce scatter_reduce_ searchsorted segment_reduce stft
"""


# Overloads that take names of dimensions, which older versions of torch have. They are not paths.
WITH_DIMENSION_NAMES = re.compile(
    r"(align_to|refine_names|rename_?)\.\w+|"
    r"\w+\.((dim_)?[Dd]imname(List)?|((correction|generator_with|using)_)?names|named_out_dim)(_\w+)?"
)


def is_allowed(target: str) -> bool:
    try:
        check_registered([check_operator(target)])
    except ExportError:
        return False
    return True


def test_every_operator_that_takes_text_was_looked_at() -> None:
    """A new torch may bring another `from_file`: then this test says so."""
    takers = {
        f"{schema.name.removeprefix('aten::')}.{schema.overload_name or 'default'}"
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::") and any("str" in str(a.type) for a in schema.arguments)
    }
    allowed = {taker for taker in takers if is_allowed(f"torch.ops.aten.{taker}")}
    unnamed = {taker for taker in allowed if not WITH_DIMENSION_NAMES.fullmatch(taker)}
    assert {taker.partition(".")[0] for taker in unnamed} <= set(WITH_TEXT.split())
