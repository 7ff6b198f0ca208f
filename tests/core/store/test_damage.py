"""Damaged stores are refused: flipped bytes, truncation, and missing or exchanged files."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path

import pytest
import torch
from tests.core.store.faults import names_in
from tests.core.store.forging import body_of, refused, sample

from kd_core import FormatError, TensorDict, store


def small(rows: int = 2) -> TensorDict:
    return TensorDict({"a": torch.arange(rows), "w": ["p"] * rows}, [rows])


def save(path: Path) -> None:
    small().save(path)


def append(path: Path) -> None:
    for _ in range(3):
        small().append_to(path)


def compact(path: Path) -> None:
    append(path)
    store.compact(path)


STORES = {"saved": save, "appended": append, "compacted": compact}


@pytest.fixture(params=[*STORES, "file"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a small store."""
    if request.param == "file":
        save(tmp_path / "td.safetensors")
        return tmp_path / "td.safetensors"
    STORES[request.param](tmp_path / "td")
    return tmp_path / "td"


def segments_of(path: Path) -> list[Path]:
    """Return the files that the manifest of a directory names."""
    return [path / name for name, *_ in body_of(path)["segments"]]


def files_of(path: Path) -> list[Path]:
    """Return the files that a load reads."""
    return [path] if path.is_file() else [path / "manifest.json", *segments_of(path)]


def structure_of(file: Path, data: bytes) -> int:
    """Return how many bytes of a file are not those of tensors."""
    if file.name == "manifest.json":
        return len(data)
    return 8 + int.from_bytes(data[:8], "little")


def test_every_flipped_byte_is_detected(path: Path) -> None:
    for file in files_of(path):
        data = file.read_bytes()
        structure = structure_of(file, data)
        with file.open("r+b", buffering=0) as opened:
            for at, byte in enumerate(data):
                os.pwrite(opened.fileno(), bytes([byte ^ (1 << at % 8)]), at)  # in place: fast
                assert refused(path, "full"), (file, at)
                assert at >= structure or refused(path), (file, at)
                os.pwrite(opened.fileno(), bytes([byte]), at)
    assert not refused(path, "full")


def test_every_truncation_is_detected(path: Path) -> None:
    for file in files_of(path):
        data = file.read_bytes()
        for length in reversed(range(len(data))):
            os.truncate(file, length)
            assert refused(path), (file, length)
        file.write_bytes(data + b"\0")
        assert refused(path), file
        file.write_bytes(data)
    assert not refused(path, "full")


@contextmanager
def renamed(old: Path, new: Path) -> Iterator[None]:
    """Rename a file while the block runs."""
    old.rename(new)
    yield
    new.rename(old)


@pytest.mark.parametrize("form", STORES)
def test_missing_and_swapped_files_are_detected_and_strange_ones_left_alone(
    form: str, tmp_path: Path
) -> None:
    path, other = tmp_path / "one", tmp_path / "two"
    for each in (path, other):
        STORES[form](each)
    moved = tmp_path / "moved"
    segments = segments_of(path)
    assert len(segments) == (3 if form == "appended" else 1)
    for segment in segments:
        with renamed(segment, moved):
            with pytest.raises(FormatError, match=rf"names `{segment.name}`, which does not exist"):
                TensorDict.load(path)
            with pytest.raises(FormatError, match=r"which does not exist"):
                store.check(path)
    with renamed(path / "manifest.json", moved):
        with pytest.raises(FileNotFoundError):
            TensorDict.load(path)
        shutil.copy(other / "manifest.json", path)
        assert refused(path)  # it names other files
    for name in ("notes.txt", "seg-0.safetensors", "manifest.json~"):
        (path / name).write_text("x")
        assert not refused(path, "full")


def test_exchanged_segments_are_detected(tmp_path: Path) -> None:
    for value in range(3):  # of the same shape: only the checksums tell
        TensorDict({"a": torch.full((3,), value)}, [3]).append_to(tmp_path)
    contents = {segment: segment.read_bytes() for segment in segments_of(tmp_path)}
    for one, two in permutations(contents, 2):
        one.write_bytes(contents[two])
        assert refused(tmp_path, "full")  # one of them twice
        two.write_bytes(contents[one])
        assert refused(tmp_path, "full")
        one.write_bytes(contents[one])
        two.write_bytes(contents[two])
    assert not refused(tmp_path, "full")


def test_damaged_rows_are_not_joined(tmp_path: Path) -> None:
    append(tmp_path)
    before = names_in(tmp_path)
    for segment in segments_of(tmp_path):
        data = segment.read_bytes()
        segment.write_bytes(data[:-1] + b"\0")
        with pytest.raises(FormatError, match=rf"{segment.name}` is damaged: a checksum"):
            store.compact(tmp_path)
        segment.write_bytes(data)
    assert names_in(tmp_path) == before
    assert TensorDict.load(tmp_path, verify="full")["a"].tolist() == [0, 1] * 3


def as_link(file: Path) -> None:
    file.rename(file.with_suffix(".moved"))
    file.symlink_to(file.with_suffix(".moved"))


def as_second_name(file: Path) -> None:
    (file.with_suffix(".moved")).hardlink_to(file)


def as_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def as_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("change", [as_link, as_second_name, as_pipe, as_folder])
@pytest.mark.parametrize("pattern", ["manifest.json", "seg-*"])
def test_only_plain_files_are_opened(
    change: Callable[[Path], None], pattern: str, tmp_path: Path
) -> None:
    path = tmp_path / "td"
    sample().save(path)
    change(next(path.glob(pattern)))
    assert refused(path)
