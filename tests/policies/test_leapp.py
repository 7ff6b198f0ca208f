"""LEAPP loads the description in a hand-over, and steps as the runner does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.export.models import Cell

import kd_export
from kd_export import Signal
from kd_export._clients import Interface, drawn
from kd_export._handover import hand_over
from kd_nn import TensorDictModule

manager: Any = pytest.importorskip(
    "leapp.inference_manager", reason="the lane `policies` installs it"
)


def test_leapp_steps_as_the_runner(tmp_path: Path) -> None:
    """Over 50 steps, with a reset before one."""
    torch.manual_seed(0)
    module = TensorDictModule(
        Cell(), in_keys=["obs", ("state", "h")], out_keys=["action", ("next", "h")]
    )
    path = tmp_path / "leg.onnx"
    kd_export.save(
        module,
        path,
        {"obs": torch.randn(4, 3), "state": {"h": torch.zeros(4, 8)}},
        state={("state", "h"): ("next", "h")},
        initial={("state", "h"): torch.linspace(-1, 1, 8)},
        signals={"obs": Signal(["hip", "knee", "ankle"], "rad", "state/joint/position")},
    )
    web = tmp_path / "web"
    (web / "dist").mkdir(parents=True)
    for name in ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"):
        (web / "dist" / name).touch()
    hand_over(path, tmp_path / "out", web=web)
    theirs = manager.InferenceManager(str(tmp_path / "out" / "leapp.yaml"))
    session = kd_export.open(path, threads=1)
    (obs,) = Interface.of(session.schema).takes()
    for step in range(50):
        if step == 25:
            theirs.reset()
            session.reset()
        given = torch.tensor(drawn(obs, step)).reshape(obs.shape)
        found = theirs({"leg/obs": given})["leg/action"]
        expected = session.step({"obs": given})["action"]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
