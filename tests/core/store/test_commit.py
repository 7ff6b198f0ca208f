"""A save that is killed, or whose calls fail, leaves the old content or the new one."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.core.content import assert_same
from tests.core.store.faults import Killed, calls, names_in

from kd_core import TensorDict

OLD = TensorDict({"a": torch.arange(5), "w": "old"})
NEW = TensorDict({"a": torch.arange(20_000), "n": {"b": torch.ones(3)}})
Act = Callable[[Path], None]


def over_old(path: Path) -> None:
    NEW.save(path)


ACTS: dict[str, tuple[TensorDict | None, Act, TensorDict]] = {
    "first": (None, over_old, NEW),
    "over": (OLD, over_old, NEW),
}


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


@pytest.mark.parametrize("act", ACTS)
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
        change(path)
        assert is_same(content(path), new)
        check_swept(path)
    assert made.count == at - 1 > 4
    assert seen == sorted(seen)  # old until the rename of the manifest, new from then on
    assert {True, False} == set(seen)


def check_swept(path: Path) -> None:
    """Check that nothing is left but the last two generations."""
    if path.is_file():
        assert names_in(path.parent) == [path.name]
    else:
        rest = set(names_in(path)) - {"manifest.json", ".lock"}
        assert all(each.startswith("seg-") for each in rest)
        assert len(rest) <= 2


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("act", ACTS)
def test_a_call_that_fails_raises_and_keeps_the_old_content(
    act: str, error: int, name: str, tmp_path: Path
) -> None:
    old, change, new = ACTS[act]
    for at in range(1, 40):
        path = tmp_path / f"{at}" / name
        path.parent.mkdir()
        prepared(old, path)
        with calls(at, OSError(error, "injected")) as made:
            try:
                change(path)
            except OSError as raised:
                assert raised.errno == error  # noqa: PT017  # some of the calls may fail unseen
                committed = "rename" in made.names[: at - 1] and made.names[at - 1] == "sync"
                committed = committed and is_same(content(path), new)
                assert committed or is_same(content(path), old), made.names
                if not committed:
                    check_swept(path)
            else:
                # What could not be removed stays for the next writer.
                assert at > made.count or made.names[at - 1] == "remove"
                assert is_same(content(path), new)
                if at > made.count:
                    break
    assert at > 5


@pytest.mark.parametrize("act", ACTS)
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
        change(path)
        check_swept(path)
    assert at > 5


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
