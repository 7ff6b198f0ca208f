"""Hostile manifests are refused, whatever is in them."""

import hashlib
import json
import zlib
from pathlib import Path

import pytest
import torch
from tests.core.store.forging import (
    LEAF,
    Body,
    Fault,
    body_of,
    forged,
    forged_text,
    level,
    nested,
    refused,
    sample,
    text_of,
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
        {"min_reader": None},
        {"min_reader": "2"},
        {"min_reader": 0},
        {"version": "1"},
        {"version": 0},
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


def test_a_number_of_a_value_is_finite(tmp_path: Path) -> None:
    TensorDict().save(tmp_path)
    text = json.dumps(body_of(tmp_path) | {"tree": level(["a", data(0.5)])})
    for number in ("1e999", "-1e999"):
        forged_text(tmp_path, text.replace("0.5", number))
        with pytest.raises(FormatError, match="is not a finite number"):
            TensorDict.load(tmp_path)


def test_two_segments_are_two_files(tmp_path: Path) -> None:
    TensorDict({"a": torch.arange(4).view(2, 2)}, [2]).save(tmp_path)
    parts = [level(["a", {"tensor": [at, "t0", "int64", [2, 2]]}], batch=[2]) for at in (0, 1)]
    body = body_of(tmp_path)
    forged(tmp_path, body | {"tree": {"cat": parts}, "segments": body["segments"] * 2})
    with pytest.raises(FormatError, match="names a file of tensors twice"):
        TensorDict.load(tmp_path)


def forged_file(path: Path, change: Body) -> None:
    """Write a single file whose manifest has other fields."""
    data = torch.arange(4).numpy().tobytes()
    body = {
        "format": "kd",
        "generation": 1,
        "min_reader": 1,
        "parent": None,
        "sealed": True,
        "segments": [["", len(data), [zlib.crc32(data)]]],
        "tree": level(["a", LEAF]),
        "version": 1,
    }
    row = {"data_offsets": [0, len(data)], "dtype": "I64", "shape": [2, 2]}
    metadata = {"kd": text_of(json.dumps(body | change))}
    header = {"__metadata__": metadata, "t0": row}
    text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    text = text.ljust(-(-(len(text) + 8) // 64) * 64 - 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    "change",
    [
        {"segments": []},
        {"segments": [["", 31, [0]]]},
        {"segments": [["", 32, [0]]] * 2},
        {"segments": [["seg-" + "0" * 32 + ".safetensors", 32, [0]]]},
        {"sealed": False},
    ],
    ids=str,
)
def test_the_manifest_of_a_file_describes_its_data(change: Body, tmp_path: Path) -> None:
    path = tmp_path / "td.safetensors"
    forged_file(path, {})
    assert TensorDict.load(path, verify="full")["a"].tolist() == [[0, 1], [2, 3]]
    forged_file(path, change)
    with pytest.raises(FormatError, match=r"does not describe its data|names a file .* twice"):
        TensorDict.load(path)


def test_the_manifest_of_a_file_is_ascii(tmp_path: Path) -> None:
    path = tmp_path / "td.safetensors"
    for character in ("\ud800", "\u00e9"):
        header = json.dumps({"__metadata__": {"kd": character}}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(FormatError, match="must be ASCII"):
            TensorDict.load(path)


def test_places_in_a_file_of_another_origin_are_integers(tmp_path: Path) -> None:
    path = tmp_path / "td.safetensors"
    header = b'{"a":{"dtype":"I8","shape":[1],"data_offsets":[false,true]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(FormatError, match="which is not valid"):
        TensorDict.load(path)
