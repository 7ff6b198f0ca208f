"""Stores of format version 1 stay readable, here and by a reader that follows the description."""

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.core.content import assert_same

from kd_core import MetaData, TensorDict, TensorDictBase, cat, lazy_stack

DATA = Path(__file__).with_name("data")


def rows(start: int) -> TensorDict:
    leaf = torch.arange(start, start + 2)
    tokens = [torch.arange(size) for size in (1, 3)]
    inner = {
        "../x": leaf.to(torch.bfloat16),
        "": leaf.to(torch.complex128) * 1j,
        "word": [f"w{start}", {"p": float("-inf"), "q": (b"\0", None)}],
    }
    entries = {
        "a": leaf.view(2, 1),
        "tokens": torch.nested.nested_tensor(tokens, layout=torch.jagged),
        "n": inner,
        "unit": MetaData("m"),
        "none": torch.zeros(2, 0, dtype=torch.float8_e5m2),
    }
    return TensorDict(entries, [2], names=["row"])


def stack() -> TensorDictBase:
    return lazy_stack([TensorDict({"x": torch.ones(2)}), TensorDict({"x": torch.zeros(2), "y": 1})])


def write() -> None:
    """Write the files of this test anew; a file of a released version must never change."""
    for start in (0, 7):
        rows(start).append_to(DATA / "v1" / "rows.kd")
    stack().save(DATA / "v1" / "stack.safetensors")


def test_rows_of_version_1_are_read() -> None:
    loaded = TensorDict.load(DATA / "v1" / "rows.kd", verify="full")
    expected = cat([rows(0), rows(7)])
    assert_same(loaded.exclude("tokens"), expected.exclude("tokens"))
    assert loaded.names == ["row"]
    assert [row.tolist() for row in loaded["tokens"].unbind()] == [[0], [0, 1, 2]] * 2


def test_a_file_of_version_1_is_read() -> None:
    loaded = TensorDictBase.load(DATA / "v1" / "stack.safetensors", verify="full")
    assert_same(loaded, stack())
    assert loaded[1]["y"] == 1


def test_the_description_is_enough_to_read_a_store() -> None:
    path = DATA / "v1" / "rows.kd"
    first, _, body = (path / "manifest.json").read_bytes().partition(b"\n")
    assert json.loads(first) == {"sha256": hashlib.sha256(body).hexdigest()}
    fields = json.loads(body)
    tensors = []
    for name, size, sums in fields["segments"]:
        content = (path / name).read_bytes()
        assert (len(content), [zlib.crc32(content)]) == (size, sums)
        tensors.append(load_file(path / name))

    def read(node: Any) -> Any:
        [(kind, value)] = node.items()
        if kind == "tensor":
            return tensors[value[0]][value[1]].tolist()
        if kind == "td":
            return {key: read(inner) for key, inner in value["entries"]}
        if kind == "rows":
            return json.loads(bytes(read(value["values"])))
        return [read(part) for part in value] if kind == "cat" else value

    parts = read(fields["tree"])
    assert [part["a"] for part in parts] == [[[0], [1]], [[7], [8]]]
    assert parts[1]["n"][""] == [[0, 7], [0, 8]]
    odd = {"d": [["p", {"f": "-inf"}], ["q", {"t": [{"b": "AA=="}, None]}]]}
    assert parts[1]["n"]["word"] == ["w7", odd]
    assert parts[0]["unit"]["value"] == "m"
