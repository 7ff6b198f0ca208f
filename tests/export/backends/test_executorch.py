"""ExecuTorch: in the lane `formats`, which installs it."""

import contextlib
import io
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
import torch
from tests.export.models import CASES, Do, Keyed, bounded, case
from tests.tables import REDUCTIONS, Record, reduced
from torch import nn

import kd_export
from kd_export import ExportError, NotExportable, UntrustedArtifact, VerifyError
from kd_export._backends.executorch import check_methods

pytest.importorskip("executorch", reason="the lane `formats` installs it")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, target = case("gru"), tmp_path_factory.mktemp("artefacts") / "gru.pte"
    state = {("state", "h"): ("next", "h")}
    kd_export.save(model.module, target, model.example, dynamic={"batch": (1, 16)}, state=state)
    return target


@pytest.mark.parametrize("name", CASES)
def test_file_gives_what_the_module_gives(name: str, tmp_path: Path) -> None:
    model, path = case(name), tmp_path / f"{name}.pte"
    dynamic = bounded(model.dynamic, (1, 16), (1, 16))  # it needs maxima
    program = kd_export.export(model.module, model.example, dynamic=dynamic)
    assert program.save(path).ok
    assert kd_export.verify(path, trusted=True).ok
    assert kd_export.verify(path, model.module, batch_sizes=[1, 2, 7], trusted=True).ok


def test_a_parameter_is_a_tensor(path: Path) -> None:
    session = kd_export.open(path, trusted=True)
    x, h = torch.ones(4, 3), torch.zeros(4, 5)
    found = session.run({"x": nn.Parameter(x), "state.h": h})["y"]
    assert torch.equal(found, session.run({"x": x, "state.h": h})["y"])


class Layers(nn.Module):
    """What the lowering of ExecuTorch freezes at the size of the example."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 4, batch_first=True)
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = x.chunk(2, -1)
        third, fourth = x.split([1, 3], -1)
        rows = torch.cat(x.split(3, 1), 1)
        return self.gru(rows)[0] + self.lstm(x)[0], first * second, third * fourth


def test_chunks_and_recurrent_layers_keep_the_batch_dynamic(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, example = Keyed(Layers(), ["x"], ["y", "a", "b"]), {"x": torch.randn(2, 5, 4)}
    program = kd_export.export(module, example, dynamic={"batch": (1, 16)})
    report = program.save(tmp_path / "m.pte", batch_sizes=(1, 2, 7, 16))
    assert report.ok
    session = kd_export.open(tmp_path / "m.pte", trusted=True)
    assert session.run({"x": torch.randn(16, 5, 4)}, ["a"])["a"].shape == (16, 5, 2)
    with pytest.raises(ExportError, match=r"`batch` ranges over 1\.\.16"):
        session.run({"x": torch.randn(17, 5, 4)})


def test_a_state_is_carried(path: Path) -> None:
    session, module = kd_export.open(path, trusted=True), case("gru").module
    state = torch.zeros(3, 5)
    for step in range(50):
        x = torch.randn(3, 3)
        result = session.step({"x": x})
        with torch.no_grad():
            y, state = module.net(x, state)
        torch.testing.assert_close(result["y"], y, rtol=1e-4, atol=1e-5)
        if step % 7 == 0:
            session.reset(torch.tensor([False, True, False]))
            state[1] = 0


def test_damage_to_what_names_a_delegate_is_answered_with_an_error(delegated: Path) -> None:
    content, source = delegated.read_bytes(), random.Random(0)
    for _ in range(500):
        damaged = bytearray(content[: source.choice((len(content), source.randrange(999)))])
        for _ in range(min(len(damaged), source.randrange(1, 5))):
            damaged[source.randrange(min(len(damaged), 4096))] = source.randrange(256)
        with contextlib.suppress(ExportError):
            check_methods(io.BytesIO(damaged), delegated=True)


@pytest.fixture(scope="module")
def delegated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = nn.Sequential(nn.Conv2d(2, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2))
    module, path = Keyed(layers, ["x"], ["y"]), tmp_path_factory.mktemp("delegates") / "conv.pte"
    program = kd_export.export(module, {"x": torch.rand(2, 2, 8, 8)}, dynamic={"batch": (1, 16)})
    assert program.save(path).ok
    assert program.save(path.with_name("portable.pte"), kernels="portable").ok
    return path


def test_xnnpack_runs_what_it_can_unless_portable_kernels_are_asked_for(delegated: Path) -> None:
    portable = delegated.with_name("portable.pte")
    found = [kd_export.inspect(path).versions["kernels"] for path in (delegated, portable)]
    assert found == ["xnnpack", "portable"]
    for rows in (1, 7, 16):
        x = {"x": torch.rand(rows, 2, 8, 8)}
        one, other = (kd_export.open(p, trusted=True).run(x)["y"] for p in (delegated, portable))
        torch.testing.assert_close(one, other)
    with portable.open("rb") as file, delegated.open("rb") as other_file:
        check_methods(file)
        check_methods(other_file, delegated=True)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_xnnpack_tells_gelu_from_its_approximation(approximate: str, tmp_path: Path) -> None:
    """It has one of both; they are 5e-4 apart."""
    module = Keyed(nn.GELU(approximate), ["x"], ["y"])
    x = torch.linspace(-6, 6, 1000).reshape(2, 500)
    report = kd_export.save(module, tmp_path / "a.pte", {"x": x}, dynamic={"batch": (1, 4)})
    assert report.ok
    assert report.largest < 2e-6


@pytest.mark.parametrize(("count", "sizes"), [(3, (3,)), (1, (3,)), (3, (3, 4)), (3, (3, 4, 5))])
def test_slopes_of_prelu_need_no_image(count: int, sizes: tuple[int, ...], tmp_path: Path) -> None:
    net = nn.PReLU(count)
    nn.init.uniform_(net.weight)
    module, x = Keyed(net, ["x"], ["y"]), torch.randn(2, *sizes)
    assert kd_export.save(module, tmp_path / "a.pte", {"x": x}, dynamic={"batch": (1, 4)}).ok


def test_data_for_a_delegate_are_accepted_from_a_file_of_ours_alone(
    delegated: Path, tmp_path: Path
) -> None:
    content, path = delegated.read_bytes(), tmp_path / "forged.pte"
    magic = content.index(b"XH00")
    forged = {
        "another delegate": content.replace(b"XnnpackBackend", b"Openvino__Back"),
        "data that are not XNNPACK's": content[:magic] + b"XH99" + content[magic + 4 :],
        "weights beyond the end": content[: magic + 18] + b"\xff" * 8 + content[magic + 26 :],
        "a schema that does not say so": content.replace(b'"xnnpack"', b'"portabl"'),
    }
    for changed in forged.values():
        assert changed != content
        path.write_bytes(changed)
        with pytest.raises(UntrustedArtifact, match="code for another back end"):
            kd_export.open(path, trusted=True)
    path.write_bytes(content[:-9] + b"\1" + content[-8:])  # a weight, or what pads them
    with pytest.raises(VerifyError, match="not those that it was exported with"):
        kd_export.open(path, trusted=True)


def test_the_schema_is_read_without_trust(path: Path) -> None:
    schema = kd_export.inspect(path)
    assert [entry.wire for entry in schema.inputs] == ["x", "state.h"]
    assert schema.state == {"state.h": "next.h"}
    assert "executorch" in schema.versions
    with pytest.raises(UntrustedArtifact, match="executes the program"):
        kd_export.open(path)


def test_what_it_cannot_express_is_told(tmp_path: Path) -> None:
    linear, example = Keyed(nn.Linear(3, 2), ["x"], ["y"]), {"x": torch.zeros(2, 3)}
    with pytest.raises(NotExportable, match=r"`batch` has none.*'batch': \(1, 64\)"):
        kd_export.save(linear, tmp_path / "m.pte", example)
    bessel = Keyed(Do(torch.special.i0), ["x"], ["y"])
    with pytest.raises(NotExportable, match=r"no portable kernel for `aten::i0\.out`"):
        kd_export.save(bessel, tmp_path / "m.pte", example, dynamic={"batch": (1, 4)})
    assert list(tmp_path.iterdir()) == []


def test_changed_and_cut_files_are_refused(path: Path, tmp_path: Path) -> None:
    content, target = bytearray(path.read_bytes()), tmp_path / "m.pte"
    content[-100] ^= 1  # a weight
    target.write_bytes(content)
    with pytest.raises(VerifyError, match=r"weights or the graph in `m\.pte` are not those"):
        kd_export.open(target, trusted=True)
    for size in (0, 6, 40, len(content) // 2):
        target.write_bytes(content[:size])
        with pytest.raises(ExportError, match=r"is empty|not a whole ExecuTorch program"):
            kd_export.inspect(target)


@pytest.mark.parametrize("precision", ["int8", "int8-weights", "fp16"])
def test_fewer_bits_stay_within_their_budget(
    precision: str, tmp_path: Path, record_property: Record
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 16))
    module, path = Keyed(net, ["x"], [("next", "y")]), tmp_path / "a.pte"
    program = kd_export.export(module, {"x": torch.randn(1, 8)}, dynamic={"batch": (1, 16)})
    rows = {"x": torch.randn(512, 8)}
    report = program.save(
        path, precision=precision, calibration=rows, budget={"max": 0.3, "rms": 0.02}, keep_float=()
    )
    record_property(REDUCTIONS, reduced(".pte", report))
    assert report.reduction is not None
    assert report.reduction.bytes < report.reduction.other_bytes
    assert report.reduction.layers == ("net.0", "net.2")
    assert kd_export.verify(path, trusted=True).ok
    session, failed = kd_export.open(path, trusted=True), torch.full((1, 8), torch.nan)
    if precision == "int8":
        with pytest.raises(ExportError, match=r"`x` holds NaN, which a program on integers takes"):
            session.run({"x": failed})
    else:
        assert session.run({"x": failed})["next.y"].isnan().all()


def test_the_page_runs_in_python_and_in_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[3] / "docs" / "how-to" / "executorch.md"
    text = page.read_text(encoding="utf-8")
    code = {
        language: "\n".join(
            re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        )
        for language in ("python", "cpp", "sh")
    }
    names: dict[str, object] = {"__name__": "page"}
    exec(compile(code["python"], page.name, "exec"), names)  # our own page
    Path("policy.cpp").write_text(code["cpp"], encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-ec", code["sh"]],
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    printed = [[float(number) for number in line.split()] for line in ran.stdout.splitlines()]
    steps = [cast("torch.Tensor", names[name])[0] for name in ("first", "second")]
    torch.testing.assert_close(torch.tensor(printed), torch.stack(steps), rtol=0, atol=2e-6)
