import os
import stat
from pathlib import Path

import pytest

import kd_export
from kd_export import ExportError
from kd_export._schema.files import read_regular, replacing


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
