"""Stores whose files are written by hand."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from kd_core import FormatError, TensorDict, lazy_stack

Fault = (FormatError, OSError)
Body = dict[str, Any]


def sample() -> TensorDict:
    """Return a container with every kind of node but a class."""
    rows = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    stack = lazy_stack([TensorDict({"x": torch.ones(n)}) for n in (1, 2)])
    entries = {"a": torch.arange(4).view(2, 2), "rows": rows, "stack": stack, "w": ["p", "q"]}
    return TensorDict({**entries, "n": {"b": torch.ones(2), "word": "z"}}, [2])


def refused(path: Path, verify: str = "fast") -> bool:
    """Return whether a store is refused with an error that a user expects."""
    try:
        TensorDict.load(path, verify=verify)
    except Fault:
        return True
    return False


def forged(path: Path, body: Body) -> None:
    """Write a manifest with a digest that matches."""
    forged_text(path, json.dumps(body))


def forged_text(path: Path, text: str) -> None:
    """Write a manifest from the text of its second line."""
    (path / "manifest.json").write_text(text_of(text))


def text_of(body: str) -> str:
    """Return the text of a manifest from that of its second line."""
    return f'{{"sha256": "{hashlib.sha256(body.encode()).hexdigest()}"}}\n{body}'


def body_of(path: Path) -> Body:
    """Return the second line of a manifest."""
    body: Body = json.loads((path / "manifest.json").read_bytes().partition(b"\n")[2])
    return body


LEAF = {"tensor": [0, "t0", "int64", [2, 2]]}


def level(*entries: object, batch: object = ()) -> Body:
    """Return the node of a container."""
    return {"td": {"batch": list(batch) if batch == () else batch, "entries": list(entries)}}


def nested(depth: int, node: object) -> str:
    """Return the text of a node inside other ones, at any depth."""
    above = '{"td":{"batch":[],"entries":[["k",'
    return above * depth + json.dumps(node) + "]]}}" * depth
