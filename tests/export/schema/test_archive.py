import io
import stat
import zipfile
from pathlib import Path

import pytest
from tests.export.models import case

import kd_export
from kd_export import ExportError, inspect
from kd_export._schema.archive import SCHEMA_PROPERTY, read_onnx_schema, replacing


def test_target_is_replaced_in_one_step(tmp_path: Path) -> None:
    target = tmp_path / "model.onnx"
    target.write_text("old")
    with replacing(target) as temporary:
        temporary.write_text("new")
        assert temporary.suffix == ".onnx"
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]
    assert stat.S_IMODE(target.stat().st_mode) & 0o600 == 0o600


def test_failure_leaves_the_target_alone(tmp_path: Path) -> None:
    target = tmp_path / "model.onnx"
    target.write_text("old")
    with pytest.raises(IsADirectoryError), replacing(target) as temporary:
        tmp_path.read_bytes()
    assert not temporary.exists()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


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


def test_archive_tells_nothing_of_where_it_was_written(tmp_path: Path) -> None:
    model = case("tutorial")
    program = kd_export.export(model.module, model.example)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        program.save(tmp_path / folder / "policy.pt2")
    one, two = (zipfile.ZipFile(tmp_path / folder / "policy.pt2") for folder in ("one", "two"))
    with one, two:
        assert one.namelist() == two.namelist()
        assert all(name.startswith("policy/") for name in one.namelist())


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    target = tmp_path / "missing" / "model.pt2"
    with pytest.raises(ExportError, match="cannot be written: No such file"), replacing(target):
        pass
    with pytest.raises(ExportError, match="cannot be written: it is a folder"), replacing(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_schema_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.pt2"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/archive_format", b"pt2")
        archive.writestr("m/extra/kd_export.json", bytes(1 << 27))
    with pytest.raises(ExportError, match="the schema has 134,217,728 bytes"):
        inspect(path)
