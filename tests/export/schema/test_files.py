"""Files on disk: regular ones, written in one step, and zip archives."""

import copy
import io
import os
import stat
import struct
import zipfile
from pathlib import Path

import pytest
from tests.export.models import exported

import kd_export
from kd_export import ExportError
from kd_export._schema.files import LARGEST_SCHEMA, read_regular, read_zip_schema, replacing


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


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    target = tmp_path / "missing" / "model.pt2"
    with pytest.raises(ExportError, match="cannot be written: No such file"), replacing(target):
        pass
    with pytest.raises(ExportError, match="cannot be written: it is a folder"), replacing(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert read_regular(tmp_path / "file") == b"content"


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link to a device", "odd name"])
def test_only_regular_files_are_read(tmp_path: Path, suffix: str, kind: str) -> None:
    path = tmp_path / f"model.{suffix}"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "odd name":
        path = tmp_path / f"a\0b.{suffix}"
    else:
        path.symlink_to("/dev/zero" if kind == "link to a device" else "/dev/null")
    for call in (kd_export.inspect, kd_export.open, kd_export.verify):
        with pytest.raises(ExportError, match=r"not a regular file|cannot be read"):
            call(path)


def test_archive_tells_nothing_of_where_it_was_written(tmp_path: Path) -> None:
    program = exported("tutorial")
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        program.save(tmp_path / folder / "policy.pt2")
    one, two = (zipfile.ZipFile(tmp_path / folder / "policy.pt2") for folder in ("one", "two"))
    with one, two:
        assert one.namelist() == two.namelist()
        assert all(name.startswith("policy/") for name in one.namelist())


def packed(entries: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> io.BytesIO:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return buffer


SCHEMA = "m/extra/kd_export.json"


def test_schema_is_found() -> None:
    file = packed({"m/archive_format": b"pt2", SCHEMA: b"{}"})
    assert read_zip_schema(file) == "{}"


def test_a_schema_of_absurd_size_is_not_read() -> None:
    file = packed({"m/archive_format": b"pt2", SCHEMA: bytes(LARGEST_SCHEMA + 1)})
    with pytest.raises(ExportError, match="the schema has 16,777,217 bytes"):
        read_zip_schema(file)


def test_a_compressed_archive_is_refused() -> None:
    file = packed({"m/archive_format": b"pt2", SCHEMA: bytes(1 << 20)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(ExportError, match=r"`m/archive_format` in the archive is compressed"):
        read_zip_schema(file)


def test_entries_that_share_bytes_are_refused() -> None:
    """Many entries of a directory may name the same bytes: they unpack to more than the file."""
    file = packed({"m/archive_format": b"pt2", SCHEMA: bytes(1 << 16)})
    with zipfile.ZipFile(file, "a") as archive:
        for number in range(8):
            twin = copy.copy(archive.getinfo(SCHEMA))
            twin.filename = f"m/extra/{number}"
            archive.filelist.append(twin)
        archive._didModify = True  # type: ignore[attr-defined]  # write the forged directory
    with pytest.raises(ExportError, match="unpacks to"):
        read_zip_schema(file)


def test_a_directory_of_absurd_size_is_not_read() -> None:
    file = packed({"m/archive_format": b"pt2"})
    end = file.getvalue().rindex(b"PK\5\6")
    data = bytearray(file.getvalue())
    data[end + 12 : end + 16] = struct.pack("<I", 1 << 30)
    with pytest.raises(ExportError, match="the directory of the archive has 1,073,741,824 bytes"):
        read_zip_schema(io.BytesIO(data))
