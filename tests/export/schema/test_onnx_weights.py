"""Weights leave the message of a model and come back to it, and nothing else changes."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.export.models import Keyed
from tests.repo.tree import ROOT
from torch import nn

import kd_export
from kd_export import ExportError
from kd_export._schema import onnx_weights
from kd_export._schema.onnx_file import check_external, tensor_of
from kd_export._schema.onnx_weights import moved_in, moved_out

X = {"x": torch.randn(3, 20)}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_weights, "LARGE", 64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 7))
    kd_export.save(Keyed(net, ["x"], ["y"]), path, X)
    return path.read_bytes()


def whole(moved: bytes, model: bytes) -> bytes:
    return b"".join(moved_in(memoryview(moved), memoryview(model)))


def test_weights_come_back_to_the_same_model(model: bytes) -> None:
    import onnx

    moved = moved_out(memoryview(model), "model")
    assert len(moved) < len(model) - 4 * 20 * 30
    assert check_external(moved, "model", len(model))
    back = onnx.load_from_string(whole(moved, model))
    assert back == onnx.load_from_string(model)


def test_a_model_without_large_weights_stays_as_it_is(model: bytes) -> None:
    onnx_weights.LARGE = 1 << 20
    assert moved_out(memoryview(model), "model") == model
    assert moved_in(memoryview(model), memoryview(b"")) == [memoryview(model)]


def test_random_changes_to_a_model_are_read_as_by_the_whole_message(model: bytes) -> None:
    """What a changed model means does not depend on where its weights are read."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # by protobuf
    from onnx import ModelProto

    rng, read = random.Random(0), 0
    for _ in range(400):
        data = bytearray(model)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        forged = bytes(data)
        try:
            check_external(forged)
            moved = moved_out(memoryview(forged), "model")
        except (ExportError, EOFError):
            continue
        try:
            expected = ModelProto.FromString(forged)
        except DecodeError:
            with pytest.raises(DecodeError):
                ModelProto.FromString(whole(moved, forged))
            continue
        assert ModelProto.FromString(whole(moved, forged)) == expected
        read += 1
    assert read > 100


def test_a_field_of_many_sizes_takes_no_time() -> None:
    sizes = b"\x0a" + b"\xff\xff\x7f" + b"\x01" * 0x1FFFFF
    assert tensor_of(memoryview(sizes)) == (0, {})


PEAK = """
import sys, threading, time
import torch, kd_export
from tests.export.models import Keyed
from torch import nn

def own_memory():
    pages = open("/proc/self/statm").read().split()
    return (int(pages[1]) - int(pages[2])) * 4096

def peak_of(call):
    start, most, ended = own_memory(), [0], threading.Event()
    def watch():
        while not ended.is_set():
            most.append(own_memory())
            time.sleep(0.001)
    thread = threading.Thread(target=watch)
    thread.start()
    call()
    ended.set()
    thread.join()
    return max(most) - start

def net(size):
    return Keyed(nn.Sequential(*(nn.Linear(size, size) for _ in range(8))), ["x"], ["y"])

x = {"x": torch.zeros(2, 8)}
kd_export.save(net(8), "small.onnx", x)
kd_export.open("small.onnx")
big = net(1448)
weights = sum(p.nbytes for p in big.parameters())
print(peak_of(lambda: kd_export.save(big, "big.onnx", {"x": torch.zeros(2, 1448)})) / weights)
print(peak_of(lambda: kd_export.open("big.onnx")) / weights)
"""


def test_weights_are_not_copied_again_and_again(tmp_path: Path) -> None:
    """Of 64 MiB of weights, beside those of the module: to write and try it, and to open it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    run = [sys.executable, "-W", "ignore", "-c", PEAK]
    told = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, check=True)
    saving, opening = map(float, told.stdout.split())
    assert 0.5 < saving < 2.6  # 3 and more with a copy for each library on the way
    assert 0.5 < opening < 2.2
