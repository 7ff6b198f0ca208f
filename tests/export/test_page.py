"""The page in a real browser, and the server's configuration in the server's own parser.

In the lane `formats`, which installs onnxruntime-web by npm; the browser is that of the machine.
"""

import importlib
import importlib.util
import os
import re
import sysconfig
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.export.browser import CHROMIUM, Browser
from tests.export.models import Cell
from tests.export.test_clients import WORDS
from torch import nn

import kd_export
from kd_export import Signal
from kd_export._clients import client
from kd_export._handover import hand_over
from kd_nn import TensorDictModule

WEB = os.environ.get("KD_NODE_MODULES")
PARSER = Path(sysconfig.get_path("purelib")) / "tritonclient" / "grpc" / "model_config_pb2.py"
if WEB is None or CHROMIUM is None or not PARSER.is_file():
    pytest.skip("the lane `formats` runs it", allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    torch.manual_seed(0)
    module = TensorDictModule(
        Cell(), in_keys=["obs", ("state", "h")], out_keys=["action", ("next", "h")]
    )
    kd_export.save(
        module,
        folder / "leg.onnx",
        {"obs": torch.randn(4, 3), "state": {"h": torch.zeros(4, 8)}},
        state={("state", "h"): ("next", "h")},
        initial={("state", "h"): torch.linspace(-1, 1, 8)},
        signals={
            "obs": Signal(
                ["hip", "knee", "left_ankle_speed_target"], "rad", limits=(-3, 3), rate=50
            )
        },
    )
    hand_over(folder / "leg.onnx", folder / "out", web=Path(str(WEB)) / "onnxruntime-web")
    return folder / "out"


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1100, False)])
def test_the_model_runs_in_the_page(folder: Path, tmp_path: Path, width: int, dark: bool) -> None:
    """From a `file:` address, without a network: it gives the numbers of Python."""
    assert (folder / "index.html").stat().st_size < 6_000_000
    with Browser(tmp_path / "profile", width, dark=dark) as browser:
        browser.open(f"file://{folder / 'index.html'}")
        browser.wait("document.querySelector('#test').className !== ''")
        told = browser.value("document.querySelector('#test').textContent")
        assert told.startswith("\u2713 passed: 50 steps with a reset, 100 numbers compared")
        browser.wait("steps === 1")
        before = browser.value("document.querySelector('#outputs').textContent")
        browser.value(
            "(slider => { slider.value = 3; slider.dispatchEvent(new Event('input')); })"
            "(document.querySelector('#inputs input'))"
        )
        browser.wait("steps === 2")
        assert browser.value("document.querySelector('#outputs').textContent") != before
        assert "hip3 rad" in browser.value("document.querySelector('#inputs').textContent")
        assert browser.value("document.documentElement.scrollWidth <= innerWidth")
        assert browser.value(  # no name is cut
            "[...document.querySelectorAll('.row label, .row .name')]"
            ".every(one => one.scrollWidth <= one.clientWidth)"
        )


def test_a_model_that_is_too_large_is_chosen_as_a_file(tmp_path: Path) -> None:
    """On a phone."""
    module = TensorDictModule(nn.Linear(700, 2500), in_keys=["obs"], out_keys=["action"])
    path = tmp_path / "large.onnx"
    kd_export.save(module, path, {"obs": torch.randn(4, 700)}, batch_sizes=(2,))
    assert path.stat().st_size > 7_000_000
    other = tmp_path / "other.onnx"
    small = TensorDictModule(nn.Linear(3, 2), in_keys=["obs"], out_keys=["action"])
    kd_export.save(small, other, {"obs": torch.randn(4, 3)}, batch_sizes=(2,))
    hand_over(path, tmp_path / "out", web=Path(str(WEB)) / "onnxruntime-web")
    assert (tmp_path / "out" / "index.html").stat().st_size < 6_000_000
    with Browser(tmp_path / "profile", 390) as browser:
        browser.open(f"file://{tmp_path / 'out' / 'index.html'}")
        browser.wait("!document.querySelector('#choose').hidden")
        assert browser.value("document.querySelector('#step').disabled")
        assert browser.value("document.documentElement.scrollWidth <= innerWidth")
        browser.choose("#choose input", other)
        browser.wait("document.querySelector('#state').className === 'state bad'")
        told = browser.value("document.querySelector('#state').textContent")
        assert "The model does not run here" in told
        browser.choose("#choose input", tmp_path / "out" / "large.onnx")
        browser.wait("document.querySelector('#test').className !== ''")
        told = browser.value("document.querySelector('#test').textContent")
        assert told.startswith("\u2713 passed: 50 steps with a reset, 3200 numbers compared")
        browser.wait("steps === 1")
        assert browser.value("document.querySelector('#state').className") == "state good"


class Summed(nn.Module):
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([x * (place + 1) for place, x in enumerate(inputs)]).sum(0)


def test_names_may_be_any_words(tmp_path: Path) -> None:
    """None of them ends a script, becomes a tag, or is taken for a property of an object."""
    module = TensorDictModule(Summed(), in_keys=list(WORDS), out_keys=["hasOwnProperty"])
    path = tmp_path / "words.onnx"
    kd_export.save(
        module,
        path,
        {(word,): torch.randn(4, 2) for word in WORDS},
        batch_sizes=(2,),
        metadata=dict.fromkeys(WORDS, WORDS[0]),
        signals={WORDS[0]: Signal(list(WORDS[:2]), WORDS[0], kind=WORDS[1])},
    )
    hand_over(path, tmp_path / "out", web=Path(str(WEB)) / "onnxruntime-web")
    with Browser(tmp_path / "profile") as browser:
        browser.open(f"file://{tmp_path / 'out' / 'index.html'}")
        browser.wait("document.querySelector('#test').className !== ''")
        told = browser.value("document.querySelector('#test').textContent")
        assert told.startswith("\u2713 passed: 50 steps with a reset, 100 numbers compared")
        shown = browser.value("document.querySelector('#inputs').textContent")
        assert all(word in shown for word in WORDS[:6])
        assert browser.value("document.scripts.length") == 5


def test_the_page_of_the_docs_runs(tmp_path: Path) -> None:
    """The HTML of "In the browser and in C++", with a client, served as it says."""
    docs = Path(__file__).parents[2] / "docs" / "how-to" / "onnx-runtime.md"
    (text,) = re.findall(r"^```html\n(.*?)^```", docs.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    (tmp_path / "index.html").write_text(text, "utf-8")
    (tmp_path / "node_modules").symlink_to(Path(str(WEB)).resolve())
    module = TensorDictModule(nn.Linear(4, 2), in_keys=[("obs", "state")], out_keys=["action"])
    path = tmp_path / "model.onnx"
    kd_export.save(module, path, {"obs": {"state": torch.zeros(2, 4)}})
    made = client(kd_export.inspect(path), path.name, "js")
    (tmp_path / "model_client.mjs").write_text(made, "utf-8")
    handler = partial(Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Browser(tmp_path / "profile", offline=False) as browser:
            browser.open(f"http://127.0.0.1:{server.server_port}/")
            browser.wait("document.querySelector('#out')?.textContent")
            told = browser.value("document.querySelector('#out').textContent")
        server.shutdown()
    assert isinstance(module.module, nn.Linear)
    expected = module.module.bias.tolist()
    assert [float(word) for word in told.split()] == pytest.approx(expected, rel=1e-5)


class Quiet(SimpleHTTPRequestHandler):
    """A server that prints nothing."""

    def log_message(self, format: str, *args: object) -> None:  # its name there
        pass


def test_the_parser_of_the_server_reads_its_configuration(folder: Path) -> None:
    text_format: Any = importlib.import_module("google.protobuf.text_format")
    # The package imports what speaks to servers, too: the messages stand by themselves.
    spec = importlib.util.spec_from_file_location("model_config_pb2", PARSER)
    assert spec is not None
    assert spec.loader is not None
    messages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(messages)
    text = (folder / "triton/leg/config.pbtxt").read_text("utf-8")
    found = text_format.Parse(text, messages.ModelConfig())
    (state,) = found.sequence_batching.state
    assert (state.input_name, state.output_name) == ("state.h", "next.h")
    assert [*state.dims] == [8]
    assert state.initial_state[0].data_file == "state_h"
    start = (folder / "triton/leg/initial_state/state_h").read_bytes()
    assert torch.frombuffer(bytearray(start), dtype=torch.float32).tolist()[0] == -1
