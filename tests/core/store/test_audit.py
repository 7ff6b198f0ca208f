"""Random stores load or are refused; nothing in a file is ever run or imported."""

import ast
import json
import os
import shutil
import sys
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.store.forging import Fault, body_of, forged, refused, sample
from tests.core.store.test_hostile import HOSTILE
from tests.repo.tree import ROOT

from kd_core import TensorDict, store
from kd_core._store.commit import is_own

READING = {"builtins.id", "mmap.__new__", "open", "os.listdir"}
WRITING = READING | {"ctypes.cdata", "fcntl.flock", "os.remove", "os.rename"}
"""The audit events of the calls of the store; what it writes is a buffer of ctypes."""

CHANGING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
"""The flags with which a file is not opened to be read."""

SEEN: list[tuple[str, object]] = []
FLAGS: list[int] = []
RECORDING: list[bool] = []


def record(event: str, args: tuple[object, ...]) -> None:
    if RECORDING:
        SEEN.append((event, args[0] if args else None))
        if event == "open":
            FLAGS.append(cast(int, args[2]))


@pytest.fixture(scope="module", autouse=True)
def hook() -> None:
    """Record what Python announces; a hook stays for as long as the process runs."""
    sys.addaudithook(record)


@contextmanager
def nothing_run(path: Path, allowed: Set[str] = READING) -> Iterator[None]:
    """Check that nothing is run or imported, and no file opened that is not of a store."""
    RECORDING.append(True)
    try:
        yield
    finally:
        RECORDING.clear()
        seen, SEEN[:] = list(SEEN), []
        flags, FLAGS[:] = list(FLAGS), []
    assert allowed is not READING or not any(each & CHANGING for each in flags)
    assert {event for event, _ in seen} <= allowed
    opened = {str(name) for event, name in seen if event == "open"}
    assert opened
    assert {name for name in opened if not is_own(name)} <= {str(path)}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a store of each form; the library imports some of its modules on first use."""
    folder = tmp_path_factory.mktemp("stores")
    saved, appended, file, foreign = (folder / name for name in ("s", "a", "f", "o"))
    file, foreign = file.with_suffix(".safetensors"), foreign.with_suffix(".safetensors")
    for path in (saved, file):
        sample().save(path)
    for _ in range(2):
        sample().exclude("stack").append_to(appended)
    header = {"a": {"dtype": "I64", "shape": [2, 2], "data_offsets": [0, 32]}}
    foreign.write_bytes(framed(header) + bytes(32))
    shutil.copytree(appended, folder / "first")
    store.compact(folder / "first")
    for path in (saved, appended, file, foreign):
        assert not refused(path, "full")
    return [saved, appended, file, foreign]


def framed(header: object) -> bytes:
    """Return the start of a file of safetensors."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**70)
    | st.text(max_size=3)
    | st.sampled_from(["t0", "int64", "td", "tensor"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["td", "tensor", "lazy", "cat", "batch", "data"]), inner)
    ),
    max_leaves=5,
)


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return each place inside a value of JSON, as what holds it and its key."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        found.append((value, key))
        if isinstance(inner, (dict, list)):
            places(inner, found)
    return found


def change(data: st.DataObject, body: Any) -> None:
    """Replace some places inside a value of JSON by other values, or by those of other places."""
    for _ in range(data.draw(st.integers(1, 2))):
        found = st.sampled_from(places(body, []))
        holder, key = data.draw(found)
        if data.draw(st.booleans()):
            holder[key] = data.draw(ANYTHING)
        else:
            other, its = data.draw(found)
            holder[key] = json.loads(json.dumps(other[its]))


def changed_bytes(data: st.DataObject, content: bytes) -> bytes:
    """Replace some bytes."""
    start = data.draw(st.integers(0, len(content) - 1))
    count = data.draw(st.integers(0, 8))
    return content[:start] + data.draw(st.binary(max_size=8)) + content[start + count :]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_stores_load_or_are_refused(data: st.DataObject, stores: list[Path]) -> None:
    path = data.draw(st.sampled_from(stores))
    files = [path] if path.is_file() else [path / "manifest.json", *path.glob("seg-*")]
    contents = {file: file.read_bytes() for file in files}
    file = data.draw(st.sampled_from(files))
    if file.name == "manifest.json" and data.draw(st.integers(0, 9)):
        body = body_of(path)
        change(data, body)
        forged(path, body)
    elif file is stores[-1] and data.draw(st.booleans()):
        header = {"a": {"dtype": "I64", "shape": [2, 2], "data_offsets": [0, 32]}}
        change(data, header)
        file.write_bytes(framed(header) + bytes(32))
    else:
        file.write_bytes(changed_bytes(data, contents[file]))
    try:
        with nothing_run(path):
            refused(path, data.draw(st.sampled_from(["fast", "full"])))
        if path.is_dir() and data.draw(st.integers(0, 3)) == 0:
            copied = path.with_name("copied")
            shutil.rmtree(copied, ignore_errors=True)
            shutil.copytree(path, copied)
            with nothing_run(copied, WRITING), suppress(*Fault):
                store.compact(copied)
    finally:
        for each, content in contents.items():
            each.write_bytes(content)


def test_nothing_in_a_hostile_tree_is_run(stores: list[Path], tmp_path: Path) -> None:
    TensorDict({"a": torch.arange(4).view(2, 2)}).save(tmp_path)
    for tree in HOSTILE.values():
        forged(tmp_path, body_of(tmp_path) | {"tree": tree})
        with nothing_run(tmp_path):
            assert refused(tmp_path, "full")
    for path in stores:
        with nothing_run(path):
            assert not refused(path, "full")


def test_no_module_of_the_store_can_run_what_it_reads() -> None:
    banned = {"pickle", "marshal", "shelve", "importlib", "eval", "exec", "compile", "__import__"}
    found = set()
    for path in (ROOT / "packages/kd-core/src/kd_core/_store").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            else:
                names = {node.id} if isinstance(node, ast.Name) else set()
            if names & banned or (
                isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load"
            ):
                found.add(f"{path.name}: {ast.unparse(node)}")
    assert found == set()
