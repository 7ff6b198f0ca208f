"""What the list of left out names says to write instead: each piece of code is run."""

import concurrent.futures
import io
import pathlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import torch
import torch.utils.benchmark
from torch import Tensor, nn

import kd_core
import kd_core.convert
import kd_core.store
import kd_nn
import kd_probabilistic
from kd_core import NonTensorData, TensorClass, TensorDict, lazy_stack
from kd_core._naming import decided

ROWS: Final = decided()
ADVICE: Final = [
    row["instead"] for rows in ROWS.values() for row in rows.values() if "instead" in row
]
PIECES: Final = sorted({code for text in ADVICE for code in re.findall(r"`(.+?)`", text)})
# What stands for a piece that is not code by itself.
SPELLED: Final = {
    "WrapModule(lambda td: ...)": "WrapModule(lambda td: td)(td)",
    "TensorDictParams(td.double(cast_filter=...))": (
        "TensorDictParams(td.double(cast_filter=lambda path, leaf: path != ('a',)))"
    ),
    "wrapper.data.attribute": "wrapper.data.upper",
}
# These need files of other packages, or several processes.
ELSEWHERE: Final = {
    "streaming.MDSWriter",
}


@dataclass
class Record:
    """What a dataclass of a user holds."""

    a: Tensor


class Sample(TensorClass):
    """A container of the same field."""

    a: Tensor


class Client:
    """A client of a key-value store that holds a container."""

    def __init__(self, td: TensorDict) -> None:
        buffer = io.BytesIO()
        torch.save(td, buffer)
        self.values = {"td": buffer.getvalue()}
        self.get = self.values.__getitem__
        self.set = self.values.__setitem__


NAMES: Final = {
    "kd_core": kd_core,
    "torch": torch,
    "pathlib": pathlib,
    "concurrent": concurrent,
    "io": io,
    "Sample": Sample,
}


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Return what the pieces of code name."""
    monkeypatch.chdir(tmp_path)
    td = TensorDict({"a": torch.ones(2), "b": torch.zeros(2, 2)}, [2])
    td.save("store")
    td.memmap("arena")
    td.save("x.safetensors")
    scope: dict[str, object] = {}
    for package in (kd_core, kd_nn, kd_probabilistic, kd_core.convert):
        scope |= {name: getattr(package, name) for name in dir(package) if name[0] != "_"}
    return scope | NAMES | variants(td) | {"td": td, "folder": tmp_path}


def variants(td: TensorDict) -> dict[str, object]:
    """Return what is made of a container."""
    same = {name: td.clone() for name in ("rows", "source", "other", "out")}
    return same | {
        "containers": [td, td],
        "dist": kd_probabilistic.CompositeDistribution(
            TensorDict({"p": {"probs": torch.ones(2)}}), {"p": torch.distributions.Bernoulli}
        ),
        "stack": lazy_stack([td, td]),
        "schema": td.schema(),
        "client": Client(td),
        "buffer": io.BytesIO(),
        "module": nn.Linear(2, 2),
        "batch_size": [2],
        "data": {"a": torch.ones(2)},
        "key": "a",
        "index": 0,
        "value": Record(torch.ones(2)),
        "values": ["x", "y", "z"],
        "tensor": torch.ones(2),
        "name": "td",
        "wrapper": NonTensorData("word"),
        "sizes": [2],
        "n": torch.get_num_threads(),
        "fn": lambda row: row + 1,
        "device": torch.device("cpu"),
        "scale": 0.1,
        "zero_point": 0,
        "scales": torch.ones(2),
        "zero_points": torch.zeros(2),
    }


@pytest.mark.filterwarnings("ignore:torch.quantize_per")
@pytest.mark.parametrize("piece", [piece for piece in PIECES if piece not in ELSEWHERE])
def test_what_is_to_be_written_runs(piece: str, scope: dict[str, object]) -> None:
    scope["path"] = Path("arena" if "memmap" in piece or "seal" in piece else "store")
    if piece.startswith("value.") or "set_at_" in piece:
        scope["value"] = torch.ones(())
    if "quint4x2" in piece:
        scope["td"] = TensorDict({"a": torch.ones(2, 3)}, [2])
    if "make_memmap" in piece:
        scope |= {"td": TensorDict.load_memmap("arena"), "key": "c"}
    if piece.startswith("type(td).from_module") and "update_" in piece:
        scope["td"] = TensorDict.from_module(nn.Linear(2, 2)).detach()
    code = SPELLED.get(piece, piece)
    with torch.no_grad():
        exec(compile(code, piece, "exec"), scope)


def test_every_spelling_is_of_a_piece() -> None:
    assert set(SPELLED) | ELSEWHERE <= set(PIECES)
