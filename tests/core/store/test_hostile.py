"""Hostile manifests are refused, whatever is in them."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from tests.core.store.forging import (
    LEAF,
    Body,
    Fault,
    body_of,
    forged,
    level,
    nested,
    refused,
    sample,
)

from kd_core import FormatError, TensorDict, store


def data(value: object) -> Body:
    return {"data": {"constant": False, "of_batch": True, "value": value}}


HOSTILE: dict[str, object] = {
    "deep": json.loads(nested(65, level())),
    "very deep": json.loads(nested(200, level())),
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
    "parts inside": level(["a", {"cat": [level(batch=[1]), level(batch=[1])]}]),
    "parts and more": {"cat": [level(batch=[1])], "td": {}},
    "parts of one segment": {"cat": [level(["a", LEAF], batch=[2])] * 2},
    "values that differ": {"cat": [level(["a", data(n)], batch=[2**40]) for n in (1, 2)]},
    "too many rows": {"cat": [level(batch=[2**62])] * 2},
    "parts differ": {"cat": [level(["a", LEAF], batch=[2]), level(batch=[1])]},
    "ragged": level(["a", {"jagged": [LEAF, LEAF, None, 1]}]),
    "rows": level(["a", {"rows": {"values": LEAF}}], batch=[2]),
    "rows twice": level(*[[key, {"rows": {"values": LEAF}}] for key in "ab"], batch=[2]),
}


def test_a_key_is_given_once_beside_the_keys_that_are_read(tmp_path: Path) -> None:
    path = tmp_path / "td"
    TensorDict({"a": torch.arange(4).view(2, 2)}).save(path)
    tree = level(["a", LEAF], ["b", LEAF], ["b", LEAF])
    forged(path, body_of(path) | {"tree": tree})
    with pytest.raises(FormatError, match="key `b` is given twice"):
        TensorDict.load(path, keys=["a"])


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


@pytest.mark.parametrize(
    ("offsets", "lengths"),
    [
        ([0, 1, 9], None),
        ([0, 2, 1], None),
        ([-1, 0, 3], None),
        ([], None),
        ([0, 1, 3], [1, -1]),
        ([0, 1, 3], [1, 3]),
        ([0, 1, 3], [1]),
        ([0, 2**63 - 1, 2**63 - 1], [1, 1]),  # the sum overflows
    ],
    ids=str,
)
def test_ragged_rows_stay_inside_their_values(
    offsets: list[int], lengths: list[int] | None, tmp_path: Path
) -> None:
    parts = {"v": torch.ones(3), "o": torch.tensor(offsets, dtype=torch.int64)}
    if lengths is not None:
        parts["l"] = torch.tensor(lengths)
    TensorDict(parts).save(tmp_path)
    nodes = [node for _, node in body_of(tmp_path)["tree"]["td"]["entries"]]
    node = {"jagged": [*nodes, *([None] if lengths is None else []), 1]}
    forged(tmp_path, body_of(tmp_path) | {"tree": level(["a", node])})
    with pytest.raises(FormatError, match=r"valid (jagged tensor|tensor of (offsets|lengths))"):
        TensorDict.load(tmp_path)


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
