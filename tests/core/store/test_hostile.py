"""Hostile manifests are refused, whatever is in them; nothing in a file is ever run."""

import ast
import hashlib
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.store.forging import Body, Fault, body_of, forged, refused, sample
from tests.repo.tree import ROOT

from kd_core import FormatError, TensorDict, store

LEAF = {"tensor": [0, "t0", "int64", [2, 2]]}


def nested(depth: int) -> Body:
    node: Body = {"td": {"batch": [], "entries": []}}
    for _ in range(depth):
        node = {"td": {"batch": [], "entries": [["k", node]]}}
    return node


def level(*entries: object, batch: object = ()) -> Body:
    return {"td": {"batch": list(batch) if batch == () else batch, "entries": list(entries)}}


HOSTILE: dict[str, object] = {
    "deep": nested(65),
    "very deep": nested(200),
    "no node": None,
    "two kinds": {"td": {}, "json": 1},
    "unknown kind": {"pickle": "cos"},
    "key twice": level(["a", LEAF], ["a", LEAF]),
    "key is a number": level([1, LEAF]),
    "negative size": level(["a", {"tensor": [0, "t0", "int64", [-2, -2]]}]),
    "large shape": level(["a", {"tensor": [0, "t0", "int64", [2**40, 2**40]]}]),
    "huge shape": level(["a", {"tensor": [0, "t0", "int64", [0, 2**62, 2**62]]}]),
    "float shape": level(["a", {"tensor": [0, "t0", "int64", [2.0, 2]]}]),
    "bool shape": level(["a", {"tensor": [0, "t0", "int64", [True, 4]]}]),
    "other dtype": level(["a", {"tensor": [0, "t0", "float64", [2, 2]]}]),
    "other shape": level(["a", {"tensor": [0, "t0", "int64", [4]]}]),
    "dtype of code": level(["a", {"tensor": [0, "t0", "load", [2, 2]]}]),
    "no such segment": level(["a", {"tensor": [7, "t0", "int64", [2, 2]]}]),
    "segment before": level(["a", {"tensor": [-1, "t0", "int64", [2, 2]]}]),
    "one name, two shapes": level(["a", LEAF], ["b", {"tensor": [0, "t0", "int64", [4]]}]),
    "batch too large": level(["a", LEAF], batch=[9]),
    "batch of words": level(["a", LEAF], batch=["x"]),
    "batch inside": level(["a", level(batch=[3])], batch=[2]),
    "names twice": {"td": {"batch": [1, 1], "names": ["a", "a"], "entries": []}},
    "no members": {"lazy": {"dim": 0, "name": None, "members": []}},
    "members differ": {
        "lazy": {"dim": 0, "name": None, "members": [level(batch=[1]), level(batch=[2])]}
    },
    "dimension": {"lazy": {"dim": 9, "name": None, "members": [level()]}},
    "a leaf as root": LEAF,
    "a class": {"class": ["os.system", 1, {"batch": [], "entries": []}]},
    "a type": level(
        ["a", {"data": {"constant": False, "of_batch": False, "value": {"r": ["x", 1]}}}]
    ),
    "no parts": {"cat": []},
    "parts differ": {"cat": [level(["a", LEAF], batch=[2]), level(batch=[1])]},
    "ragged": level(["a", {"jagged": [LEAF, LEAF, None, 1]}]),
    "rows": level(["a", {"rows": {"values": LEAF}}], batch=[2]),
}


@pytest.mark.parametrize("tree", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_tree_is_refused(tree: object, tmp_path: Path) -> None:
    path = tmp_path / "td"
    TensorDict({"a": torch.arange(4).view(2, 2)}).save(path)
    forged(path, body_of(path) | {"tree": tree})
    with pytest.raises(FormatError):
        TensorDict.load(path)
    if is_compacted(path):  # which builds no container
        with pytest.raises(FormatError):
            TensorDict.load(path)


def is_compacted(path: Path) -> bool:
    """Join the parts of a store; return whether its manifest is valid so far."""
    try:
        store.compact(path)
    except Fault:
        return False
    return True


def test_offsets_of_ragged_rows_stay_inside_their_values(tmp_path: Path) -> None:
    for offsets in ([0, 1, 9], [0, 2, 1], [-1, 0, 3], []):
        path = tmp_path / f"{len(offsets)}{sum(offsets)}"
        TensorDict({"v": torch.ones(3), "o": torch.tensor(offsets, dtype=torch.int64)}).save(path)
        tree = body_of(path)["tree"]
        [(_, values), (_, rows)] = tree["td"]["entries"]
        node = {"jagged": [values, rows, None, 1]}
        forged(path, body_of(path) | {"tree": level(["a", node])})
        with pytest.raises(FormatError, match="jagged tensor"):
            TensorDict.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "zip"},
        {"generation": -1},
        {"generation": "1"},
        {"parent": 3},
        {"more": 1},
        {"segments": None},
        {"segments": [["../../x", 1, []]]},
        {"segments": [["manifest.json", 1, []]]},
        {"segments": [["seg-" + "0" * 32 + ".safetensors", -1, []]]},
        {"min_reader": 2},
    ],
    ids=str,
)
def test_hostile_fields_are_refused(change: Body, tmp_path: Path) -> None:
    path = tmp_path / "td"
    sample().save(path)
    forged(path, body_of(path) | change)
    assert refused(path)


@pytest.mark.parametrize(
    "text",
    [b'{"a":1,"a":1}', b'{"a":NaN}', b'{"a":1e999}', b"[" * 100_000, b"\xff", b"", b'"a" "b"'],
    ids=["twice", "nan", "inf", "deep", "octets", "empty", "two"],
)
def test_json_that_surprises_is_refused(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "td"
    sample().save(path)
    digest = hashlib.sha256(text).hexdigest().encode()
    (path / "manifest.json").write_bytes(b'{"sha256": "%s"}\n%s' % (digest, text))
    assert refused(path)


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


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_random_manifests_load_or_are_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    if not path.exists():
        sample().save(path)
    good = (path / "manifest.json").read_bytes()
    try:
        body = body_of(path)
        for _ in range(data.draw(st.integers(1, 2))):
            holder, key = data.draw(st.sampled_from(places(body, [])))
            holder[key] = data.draw(ANYTHING)
        forged(path, body)
        refused(path, data.draw(st.sampled_from(["fast", "full"])))
        if data.draw(st.integers(0, 3)) == 0:
            copied = path.with_name("compacted")
            shutil.rmtree(copied, ignore_errors=True)
            shutil.copytree(path, copied)
            is_compacted(copied)
    finally:
        (path / "manifest.json").write_bytes(good)


SEEN: list[tuple[str, object]] = []
RECORDING: list[bool] = []


def record(event: str, args: tuple[object, ...]) -> None:
    if RECORDING:
        SEEN.append((event, args[0] if args else None))


def test_nothing_in_a_file_is_run_or_imported(tmp_path: Path) -> None:
    path = tmp_path / "td"
    sample().save(path)
    sample().save(tmp_path / "td.safetensors")
    good = body_of(path)
    TensorDict.load(path, verify="full")  # modules of the library are imported on first use
    refused(tmp_path / "td.safetensors", "full")
    sys.addaudithook(record)
    for tree in (good["tree"], *HOSTILE.values()):
        forged(path, good | {"tree": tree})
        RECORDING.append(True)
        refused(path, "full")
        refused(tmp_path / "td.safetensors", "full")
        RECORDING.clear()
    allowed = {str(path), str(tmp_path / "td.safetensors"), *(each.name for each in path.iterdir())}
    events = {event for event, _ in SEEN}
    assert {str(args) for event, args in SEEN if event == "open"} <= allowed
    assert events <= {"open", "mmap.__new__", "os.listdir", "builtins.id"}
    assert "open" in events


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
