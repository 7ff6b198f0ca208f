"""A save that is killed, or whose calls fail, leaves the old content or the new one."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from stat import S_ISDIR

import pytest
import torch
from tests.core.content import assert_same
from tests.core.store.faults import CHANGING, EVERY, Killed, calls, names_in

from kd_core import FormatError, TensorDict, cat, store
from kd_core._store import files

OLD = TensorDict({"a": torch.arange(5), "w": "old"})
NEW = TensorDict({"a": torch.arange(20_000), "n": {"b": torch.ones(3)}})
Act = Callable[[Path], None]


ROWS = TensorDict({"a": torch.arange(3), "w": ["x", "y", "z"]}, [3])
MORE = TensorDict({"a": torch.arange(9000), "w": ["new"] * 9000}, [9000])
ACTS: dict[str, tuple[TensorDict | None, Act, TensorDict]] = {
    "first": (None, NEW.save, NEW),  # type: ignore[dict-item]  # known at run time
    "over": (OLD, NEW.save, NEW),  # type: ignore[dict-item]  # known at run time
    "append": (ROWS, MORE.append_to, cat([ROWS, MORE])),
    "compact": (ROWS, store.compact, ROWS),
}
ALSO_FILES = ("first", "over")


def prepared(old: TensorDict | None, path: Path) -> None:
    if old is not None:
        old.save(path)
        old.save(path)  # so that there is a generation to remove


def content(path: Path) -> TensorDict | None:
    """Return what a reader finds, all of it compared with its checksums."""
    try:
        return TensorDict.load(path, verify="full")
    except FileNotFoundError:
        return None


def is_same(found: TensorDict | None, expected: TensorDict | None) -> bool:
    if found is None or expected is None:
        return found is expected
    try:
        assert_same(found, expected)
    except AssertionError:
        return False
    return True


@pytest.fixture(params=["td.kd", "td.safetensors"], ids=["directory", "file"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


EACH = pytest.mark.parametrize(
    ("act", "name"),
    [(act, "td.kd") for act in ACTS] + [(act, "td.safetensors") for act in ALSO_FILES],
)


@EACH
def test_a_kill_at_any_call_leaves_old_or_new(act: str, name: str, tmp_path: Path) -> None:
    old, change, new = ACTS[act]
    seen = []
    for at in range(1, 40):
        path = tmp_path / f"{at}" / name
        path.parent.mkdir()
        prepared(old, path)
        with calls(at, Killed()) as made:
            try:
                change(path)
            except Killed:
                pass
            else:
                break
        found = content(path)
        seen.append(is_same(found, new))
        assert seen[-1] or is_same(found, old), made.names
        NEW.save(path)
        assert is_same(content(path), NEW)
        check_swept(path)
    assert made.count == at - 1 > 4
    assert seen == sorted(seen)  # old until the rename of the manifest, new from then on
    assert set(seen) == ({True} if is_same(old, new) else {True, False})


def check_swept(path: Path) -> None:
    """Check that nothing is left but the last two generations."""
    if path.is_file():
        assert names_in(path.parent) == [path.name]
    else:
        rest = set(names_in(path)) - {"manifest.json", ".lock"}
        assert all(each.startswith("seg-") for each in rest)
        assert len(rest) <= 3  # two of rows that were appended


@pytest.mark.parametrize(
    ("error", "names"), [(errno.EIO, EVERY), (errno.ENOSPC, CHANGING)], ids=["EIO", "ENOSPC"]
)
@EACH
def test_a_call_that_fails_raises_and_keeps_the_old_content(
    act: str, error: int, names: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    old, change, new = ACTS[act]
    for at in range(1, 40):
        path = tmp_path / f"{at}" / name
        path.parent.mkdir()
        prepared(old, path)
        with calls(at, OSError(error, "injected"), names) as made:
            raised = error_of(change, path)
        assert raised is None or raised.errno == error
        done = made.names[:at]
        if raised is None:
            # What could not be removed stays for the next writer.
            assert at > made.count or done[-1] == "remove"
            assert is_same(content(path), new)
            if at > made.count:
                break
        elif done[-1] in ("sync", "close") and "rename" in done and is_same(content(path), new):
            assert "sync" in done[:-1]  # the failure is behind the last rename
        else:
            assert is_same(content(path), old), done
            check_swept(path)
    assert at > 5


def error_of(change: Act, path: Path) -> OSError | None:
    """Return the error of a change, if there is one."""
    try:
        change(path)
    except OSError as error:
        return error
    return None


@EACH
def test_an_interrupt_after_any_call_leaves_old_or_new(act: str, name: str, tmp_path: Path) -> None:
    old, change, new = ACTS[act]
    for at in range(1, 40):
        path = tmp_path / f"{at}" / name
        path.parent.mkdir()
        prepared(old, path)
        with calls(at, KeyboardInterrupt()) as made:
            try:
                change(path)
            except KeyboardInterrupt:
                found = content(path)
                assert is_same(found, new) or is_same(found, old), made.names
            else:
                break
        NEW.save(path)
        check_swept(path)
    assert at > 5


@pytest.fixture
def synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records what is written to the disk, in order."""
    seen: list[str] = []

    def record(descriptor: int) -> None:
        found = os.fstat(descriptor)
        is_parent = found.st_ino == tmp_path.stat().st_ino
        seen.append("parent" if is_parent else "folder" if S_ISDIR(found.st_mode) else "file")

    monkeypatch.setattr(files, "sync", record)
    return seen


def test_a_commit_waits_for_names_only_after_what_they_name(
    synced: list[str], tmp_path: Path
) -> None:
    NEW.save(tmp_path / "td.kd")
    assert synced == ["file", "parent", "folder", "file", "folder"]
    synced.clear()
    NEW.save(tmp_path / "td.kd")  # the name of the directory is on the disk
    assert synced == ["file", "folder", "file", "folder"]
    synced.clear()
    NEW.save(tmp_path / "td.safetensors")
    assert synced == ["file", "parent"]


def test_an_arena_waits_for_the_disk_when_it_is_sealed(synced: list[str], tmp_path: Path) -> None:
    td = NEW.memmap(tmp_path / "td.kd")
    td.make_memmap("more", [3])
    assert synced == []
    store.seal(tmp_path / "td.kd")
    assert synced == ["file", "file", "parent", "folder", "file", "folder"]


def test_short_writes_are_continued(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr("kd_core._store.files.os.write", lambda fd, data: write(fd, data[:7]))
    small = TensorDict({"a": torch.arange(50), "n": {"b": torch.ones(3)}})
    small.save(tmp_path / name)
    assert is_same(content(tmp_path / name), small)


def test_a_write_that_writes_nothing_is_an_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    OLD.save(tmp_path / name)
    monkeypatch.setattr("kd_core._store.files.os.write", lambda fd, data: 0)
    with pytest.raises(OSError, match="no byte was written"):
        NEW.save(tmp_path / name)
    assert is_same(content(tmp_path / name), OLD)


@pytest.mark.parametrize("form", ["store", "arena"])
def test_a_reader_starts_again_when_its_files_are_gone(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(value: int) -> None:
        td = TensorDict({"a": torch.full((3,), value)})
        td.memmap(tmp_path) if form == "arena" else td.save(tmp_path)

    read = files.read
    left = [4, 3, 2, 1]

    def read_late(file: files.OpenFile, start: int, count: int) -> bytes:
        found = read(file, start, count)
        if left:  # two commits, which remove the file that the manifest names
            values = left.pop(), left.pop()
            monkeypatch.undo()
            for value in values:
                write(value)
            monkeypatch.setattr(files, "read", read_late)
        return found

    write(0)
    monkeypatch.setattr(files, "read", read_late)
    load = TensorDict.load_memmap if form == "arena" else TensorDict.load
    assert load(tmp_path)["a"].tolist() == [4] * 3
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(FormatError, match=r"names `(arena|seg)-.*`, which does not exist"):
        load(tmp_path)


def test_a_failed_call_says_which_path_it_was(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    OLD.save(path)
    with (
        pytest.raises(OSError, match=rf"\[Errno {errno.ENOSPC}\] .*: '{tmp_path}"),
        calls(1, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), ("write",)),
    ):
        NEW.save(path)


def test_a_file_that_cannot_be_opened_is_named_with_its_directory(tmp_path: Path) -> None:
    OLD.save(tmp_path / "td")
    manifest = (tmp_path / "td" / "manifest.json").rename(tmp_path / "elsewhere")
    (tmp_path / "td" / "manifest.json").symlink_to(manifest)
    with pytest.raises(OSError, match=f"'{tmp_path}/td/manifest.json'"):
        TensorDict.load(tmp_path / "td")
