"""Files of fewer bits: judged within a budget, sealed, and verified where there is no torch."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy
import onnx
import pytest
import torch
from onnx import numpy_helper
from tests.tables import REDUCTIONS, Record, reduced
from torch import Tensor, nn

import kd_export
from kd_core import TensorDict
from kd_export import ExportError, KeyedProgram, KeyMismatch, Report, Schema, VerifyError
from kd_export._backends.onnx import backend
from kd_export._precision import check_precision, save_reduced
from kd_export._running.session import Reduces, backend_for
from kd_export._schema.onnx_file import sealed
from kd_export._schema.schema import Budget
from kd_export.cli import main
from kd_nn import TensorDictModule

Save = Callable[..., Report]


class Acting(nn.Module):
    """Images and numbers in, an action and a choice out."""

    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.ReLU(), nn.Flatten())
        self.body = nn.Sequential(nn.Linear(16 + 6, 128), nn.Tanh(), nn.Linear(128, 3))

    def forward(self, image: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        action = self.body(torch.cat([self.see(image), x], -1))
        return action, action.argmax(-1)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 16)
        self.out = nn.Linear(16, 2)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        new = self.cell(x, h)
        return self.out(new), new


def rows(count: int, seed: int = 0) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=source)
    return {"image": draw(count, 1, 5, 5), "x": draw(count, 6)}


def acting() -> TensorDictModule:
    torch.manual_seed(0)
    return TensorDictModule(Acting(), ["image", "x"], ["action", "choice"])


@pytest.fixture(autouse=True)
def _few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time five calls of each file, and not as many as a tenth of a second has."""
    monkeypatch.setattr("kd_export._precision.SECONDS", 0.0)


@pytest.fixture(scope="module")
def program() -> KeyedProgram:
    return kd_export.export(acting(), rows(8), dynamic={"batch": (1, 1024)})


@pytest.fixture(scope="module")
def floating(tmp_path_factory: pytest.TempPathFactory, program: KeyedProgram) -> Path:
    path = tmp_path_factory.mktemp("float") / "policy.onnx"
    program.save(path, batch_sizes=(2,))
    return path


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("float") / "gru.onnx"
    module = TensorDictModule(Remembering(), ["x", "h"], ["action", ("next", "h")])
    example = {"x": torch.randn(8, 6), "h": torch.zeros(8, 16)}
    state = {"h": ("next", "h")}
    kd_export.save(module, path, example, state=state, initial={"h": 0.1}, batch_sizes=(2,))
    return path


def save_of(path: Path, target: Path) -> Save:
    """Return what writes a float file with fewer bits."""
    return partial(
        save_reduced,
        path,
        target,
        backend_for(path),
        precision="int8",
        calibration=None,
        drawn=None,
        budget={"max": 0.3, "rms": 0.1, "agreement": 0.9},
        keep_float="auto",
    )


@pytest.fixture
def save(floating: Path, tmp_path: Path) -> Save:
    return save_of(floating, tmp_path / "policy.onnx")


@pytest.fixture(scope="module")
def reduced_once(floating: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("int8") / "policy.onnx"
    budget = {"max": 0.1, "rms": 0.03, "agreement": 0.9}
    assert save_of(floating, path)(calibration=rows(600), budget=budget).ok
    return path


@pytest.fixture
def int8(reduced_once: Path, tmp_path: Path) -> Path:
    """Return a copy, which a test may change."""
    return Path(shutil.copy(reduced_once, tmp_path))


def test_one_call_writes_a_file_within_a_budget(program: KeyedProgram, tmp_path: Path) -> None:
    path = tmp_path / "policy.onnx"
    report = program.save(
        path,
        batch_sizes=(2,),
        precision="int8",
        calibration=TensorDict(rows(600), batch_size=[600]),
        budget={"max": 0.3, "rms": 0.1, "agreement": 0.9},
    )
    found = report.reduction
    assert found is not None
    assert report.ok
    assert found.rows == 300
    assert found.smaller > 1.2
    assert [one.output for one in found.outputs] == ["action", "choice"]
    action, choice = found.outputs
    assert 0 < action.rms < action.p999 <= action.max < 0.3
    assert choice.agreement is not None
    assert choice.agreement > 0.9
    assert {one.op_type for one in onnx.load(path).graph.node} >= {"QuantizeLinear"}
    assert kd_export.verify(path).ok
    assert kd_export.verify(path, acting()).ok
    torch.manual_seed(1)
    other = TensorDictModule(Acting(), ["image", "x"], ["action", "choice"])
    assert not kd_export.verify(path, other).ok


@pytest.mark.parametrize("precision", ["int8", "int8-weights", "fp16"])
def test_each_precision_is_measured(save: Save, precision: str, record_property: Record) -> None:
    report = save(precision=precision, calibration=rows(600))
    record_property(REDUCTIONS, reduced(".onnx", report))
    found = report.reduction
    assert found is not None
    assert found.name == precision
    assert found.smaller > 1.2
    assert len(found.latencies) == 2
    text = str(report)
    assert "99.9 %" in text
    assert f"{precision}: judged on 300 rows" in text
    assert re.search("action .* ok: max 0.3, rms 0.1$", text, re.MULTILINE)
    assert re.search("choice .* ok: agreement 0.9$", text, re.MULTILINE)
    assert "size: " in text
    assert "latency at batch=1, one thread: " in text
    assert report.to_data()["reduction"] == found.to_data()


@pytest.mark.parametrize("precision", ["int8", "int8-weights", "fp16"])
@pytest.mark.parametrize("keep", [None, "body.0"])
def test_each_file_is_valid_onnx(
    save: Save, tmp_path: Path, precision: str, keep: str | None
) -> None:
    """Quantizers append nodes behind those that take their results."""
    budget = {"max": 1.0, "agreement": 0.5}
    save(precision=precision, calibration=rows(256), budget=budget, keep_float=keep)
    path = tmp_path / "policy.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    report = kd_export.verify(path, also=["reference"])
    assert report.ok, report


def test_nan_is_refused_where_it_would_become_a_number(int8: Path, floating: Path) -> None:
    """A sensor that fails would still move the robot."""
    failed = rows(2)
    failed["x"][1, 2] = torch.nan
    with pytest.raises(ExportError, match=r"`x` holds NaN, which a program on integers takes for"):
        kd_export.open(int8).run(failed)
    assert kd_export.open(floating).run(failed)["action"][1].isnan().all()
    foreign = onnx.load(int8)
    del foreign.metadata_props[:]
    foreign.producer_name = "another tool"
    onnx.save(foreign, int8)
    with pytest.raises(ExportError, match=r"`x` holds NaN"):
        kd_export.open(int8).run(failed)
    failed["x"][1, 2] = torch.inf
    assert kd_export.open(int8).run(failed)["action"].isfinite().all()


@pytest.mark.parametrize("precision", ["int8-weights", "fp16"])
def test_weights_of_fewer_bits_carry_nan_through(
    save: Save, tmp_path: Path, precision: str
) -> None:
    save(precision=precision, calibration=rows(256))
    failed = rows(2)
    failed["x"][1, 2] = torch.nan
    found = kd_export.open(tmp_path / "policy.onnx").run(failed)["action"]
    assert found[1].isnan().all()
    assert found[0].isfinite().all()


@pytest.mark.parametrize("precision", ["int8-weights", "fp16"])
def test_a_program_of_torch_holds_weights_of_fewer_bits(
    precision: str, tmp_path: Path, record_property: Record
) -> None:
    torch.manual_seed(0)
    net, path = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 2)), tmp_path
    module = TensorDictModule(net, ["x"], [("next", "y")])
    program = kd_export.export(module, {"x": torch.randn(2, 8)})
    save = partial(program.save, batch_sizes=(2,), precision=precision, keep_float=["0"])
    example = {"x": torch.randn(64, 8)}
    report = save(path / "a.pt2", calibration=example, budget={"max": 0.05})
    record_property(REDUCTIONS, reduced(".pt2", report))
    assert report.reduction is not None
    assert report.reduction.kept == ("0",)
    assert report.reduction.layers == ("0", "1")
    assert kd_export.verify(path / "a.pt2", trusted=True).ok
    session = kd_export.open(path / "a.pt2", trusted=True)
    held = session.runner.held.values()  # type: ignore[attr-defined]  # of torch's runner alone
    narrow = torch.float16 if precision == "fp16" else torch.int8
    assert [tuple(one.shape) for one in held if one.dtype is narrow] == [(2, 64)]
    assert sum(one.dtype is torch.float32 and one.ndim == 2 and len(one) > 2 for one in held) == 1
    with pytest.raises(VerifyError, match=f"{precision} cannot meet the budget"):
        save(path / "b.pt2", calibration=example, budget={"max": 1e-9})
    assert not (path / "b.pt2").exists()


def test_weights_alone_are_rounded_more_finely(save: Save) -> None:
    finer, coarser = (
        save(precision=one, calibration=rows(600)).reduction for one in ("int8-weights", "int8")
    )
    assert finer is not None
    assert coarser is not None
    assert finer.outputs[0].rms < coarser.outputs[0].rms
    assert "float: none" in "\n".join(finer.lines())


def test_the_file_says_its_budget(int8: Path, floating: Path) -> None:
    schema = kd_export.inspect(int8)
    assert schema.precision is not None
    assert schema.precision.budget == Budget(0.1, 0.03, 0.9)
    assert "int8 within max 0.1, rms 0.03, agreement 0.9" in schema.precision.describe()
    assert Schema.from_json(schema.to_json()) == schema
    assert kd_export.diff(floating, int8, interface=True).same
    assert "precision" in str(kd_export.diff(floating, int8))


def scaled(path: Path) -> onnx.ModelProto:
    """Change one scale of a model."""
    model = onnx.load(path)
    scale = next(one for one in model.graph.initializer if one.name.endswith("body.0.weight_scale"))
    changed = numpy_helper.to_array(scale) * numpy.float32(3)
    scale.CopyFrom(numpy_helper.from_array(changed, scale.name))
    return model


def test_a_changed_scale_breaks_the_seal(int8: Path) -> None:
    int8.write_bytes(scaled(int8).SerializeToString())
    with pytest.raises(VerifyError, match=r"weights or the graph in `policy\.onnx` are not those"):
        kd_export.verify(int8)


def test_a_changed_scale_that_is_sealed_again_leaves_the_budget(int8: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.onnx"
    onnx.save(scaled(int8), changed)
    backend.seal(changed, kd_export.inspect(int8), tmp_path / "sealed.onnx")
    assert not kd_export.verify(tmp_path / "sealed.onnx").ok


def test_its_size_is_that_which_inspect_shows(
    floating: Path, save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = save(calibration=rows(600), budget={"max": 1.0})
    assert report.reduction is not None
    path = tmp_path / "policy.onnx"
    for one, told in ((path, report.reduction.bytes), (floating, report.reduction.other_bytes)):
        assert main(["inspect", str(one), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["file"]["model_bytes"] == told


def test_a_tolerance_takes_the_place_of_the_budget(int8: Path) -> None:
    assert kd_export.verify(int8, atol=1.0).ok
    assert not kd_export.verify(int8, atol=1e-6).ok


def test_a_plain_property_does_not_break_the_seal(floating: Path, tmp_path: Path) -> None:
    model = onnx.load(floating)
    note = model.metadata_props.add()
    note.key, note.value = "licence", "MIT"
    onnx.save(model, tmp_path / "noted.onnx")
    assert kd_export.verify(tmp_path / "noted.onnx").ok
    backend.seal(tmp_path / "noted.onnx", kd_export.inspect(floating), tmp_path / "again.onnx")
    kept = {one.key: one.value for one in onnx.load(tmp_path / "again.onnx").metadata_props}
    assert kept["licence"] == "MIT"
    assert len(kept) == 2


def test_a_schema_is_replaced_and_not_added(floating: Path) -> None:
    text = kd_export.inspect(floating).to_json()
    content = b"".join(sealed(memoryview(floating.read_bytes()), text))
    assert content == floating.read_bytes()


def test_a_budget_that_cannot_be_met_writes_nothing(save: Save, tmp_path: Path) -> None:
    with pytest.raises(VerifyError) as caught:
        save(calibration=rows(600), budget={"max": 1e-6})
    message = str(caught.value)
    assert "int8 cannot meet the budget" in message
    assert "times the budget" in message
    assert "EXCEEDED" in message
    assert "int8-weights" in message
    assert list(tmp_path.iterdir()) == []


def test_layers_stay_float_until_the_budget_is_met(save: Save) -> None:
    free = save(calibration=rows(600), keep_float=None, budget={"max": 1.0, "agreement": 0.5})
    assert free.reduction is not None
    assert free.reduction.kept == ()
    assert free.reduction.layers == ("see.0", "body.0", "body.2")
    limit = free.reduction.outputs[0].max * 0.8
    kept = save(calibration=rows(600), budget={"max": limit, "agreement": 0.5})
    assert kept.reduction is not None
    assert kept.reduction.kept
    assert kept.reduction.outputs[0].max <= limit
    with pytest.raises(VerifyError, match="with no layer in float"):
        save(calibration=rows(600), keep_float=None, budget={"max": limit, "agreement": 0.5})


def test_named_layers_stay_float(save: Save) -> None:
    report = save(calibration=rows(600), keep_float=["body.2", "see.0"])
    assert report.reduction is not None
    assert report.reduction.kept == ("see.0", "body.2")
    with pytest.raises(KeyMismatch, match=r"`body.9`.*available layers: `see.0`.*Did you mean"):
        save(calibration=rows(600), keep_float="body.9")


def test_integers_have_an_agreement(save: Save) -> None:
    with pytest.raises(VerifyError, match=r"choice .*%.*EXCEEDED: agreement 1"):
        save(calibration=rows(600), budget={"max": 1.0, "agreement": 1.0}, keep_float=None)


def test_without_a_budget_what_it_would_be_is_told(save: Save) -> None:
    with pytest.raises(ExportError, match=r"needs a `budget`.*off by 0\.\d+ at most, with an rms"):
        save(calibration=rows(600), budget=None)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"mx": 1}, "Did you mean `max`"),
        ({"max": -1}, "'max': -1"),
        ({"max": True}, "'max': True"),
        (3, "expected a dict for `budget`"),
        ({"agreement": 0.9}, "how far `action` may be off"),
    ],
)
def test_a_budget_is_checked(save: Save, budget: Mapping[str, float], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        save(calibration=rows(8), budget=budget)


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ("rows", "expected a container or dict of rows for `calibration`"),
        ([], "expected a container or dict"),
        (rows(1), "at least 2 rows of `calibration`, got 1"),
        ({"x": torch.zeros(4, 6)}, "input `image` not found"),
        ({**rows(4), "x": torch.zeros(4, 7)}, r"expected float32 \(batch, 6\) for `x`"),
        ({**rows(4), "x": torch.zeros(4, 6).double()}, "got dtype float64"),
    ],
)
def test_a_calibration_is_checked(save: Save, calibration: object, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        save(calibration=calibration)


@pytest.mark.parametrize(
    ("precision", "file", "calibration", "message"),
    [
        ("int9", "a.onnx", None, "Did you mean `int8`"),
        ("int8", "a.onnx", None, "`int8` needs `calibration`"),
        (
            "int8",
            "a.pt2",
            rows(2),
            "`precision='int8'` cannot be combined with torch.export. Pass one",
        ),
        ("int8", "a.c", rows(2), "`precision` cannot be combined with C. Save it as `.onnx`"),
    ],
)
def test_a_precision_is_checked(
    precision: str, file: str, calibration: object, message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        check_precision(precision, backend_for(Path(file)), calibration)


def test_several_containers_calibrate_together(save: Save) -> None:
    report = save(calibration=[rows(100, 1), TensorDict(rows(60, 2), batch_size=[60])])
    assert report.reduction is not None
    assert report.reduction.rows == 80
    assert "judged on 80 rows, which says little" in report.notes[0]


def test_weights_need_no_calibration(save: Save, program: KeyedProgram) -> None:
    report = save(precision="int8-weights", drawn=program._many_rows())
    assert report.reduction is not None
    assert report.reduction.rows == 1024
    assert "rows that were drawn like the example" in report.notes[0]


@pytest.mark.parametrize("form", ["trajectories", "steps", "rows"])
def test_a_recurrent_program_is_calibrated_and_judged_by_rollouts(
    recurrent: Path, tmp_path: Path, form: str
) -> None:
    source = torch.Generator().manual_seed(0)
    whole = torch.randn(8, 40, 6, generator=source)
    calibration = {
        "trajectories": TensorDict({"x": whole}, batch_size=[8, 40]),
        "steps": [{"x": whole[:, step]} for step in range(40)],
        "rows": {"x": whole.flatten(0, 1), "h": torch.zeros(320, 16)},
    }[form]
    report = save_of(recurrent, tmp_path / "gru.onnx")(
        calibration=calibration, budget={"max": 0.3, "rms": 0.05}
    )
    found = report.reduction
    assert found is not None
    assert found.rows == (160 if form != "rows" else 4 * 50 * 16)
    assert found.layers == ("cell.weight_ih", "cell.weight_hh", "out")
    assert [one.output for one in found.outputs] == ["action", "next.h"]
    assert kd_export.verify(tmp_path / "gru.onnx").ok
    stored = kd_export.inspect(tmp_path / "gru.onnx").vectors
    assert any(len(set(vector.inputs["h"])) > 1 for vector in stored)  # states of trajectories


def test_a_recurrent_program_is_told_which_rows_it_takes(recurrent: Path, tmp_path: Path) -> None:
    uneven = [{"x": torch.zeros(2, 6)}, {"x": torch.zeros(3, 6)}]
    with pytest.raises(ExportError, match=r"container of \(rows, time, ...\)"):
        save_of(recurrent, tmp_path / "gru.onnx")(calibration=uneven)


def test_only_backends_that_can_reduce_do() -> None:
    assert isinstance(backend, Reduces)
    assert not isinstance(backend_for(Path("a.pt2")), Reduces)


def made_of(path: Path, target: Path, factor: float = 1.0) -> Path:
    """Write a file as another tool does: without our schema, one weight scaled."""
    model = onnx.load(path)
    del model.metadata_props[:]
    weight = next(one for one in model.graph.initializer if one.name.endswith("body.2.bias"))
    changed = numpy_helper.to_array(weight) * numpy.float32(factor)
    weight.CopyFrom(numpy_helper.from_array(changed, weight.name))
    onnx.save(model, target)
    return target


def test_a_file_of_another_tool_is_adopted(floating: Path, tmp_path: Path) -> None:
    path = made_of(floating, tmp_path / "slim.onnx")
    report = kd_export.adopt(path, floating)
    assert report.ok
    assert report.reduction is not None
    assert report.reduction.rows == 1024
    assert report.reduction.outputs[0].max == 0
    assert "ok: rounding" in str(report)
    assert report.to_data()["reduction"]
    assert kd_export.verify(path).ok
    assert kd_export.inspect(path) == kd_export.inspect(floating)


def test_a_file_that_gives_other_results_is_not_adopted(floating: Path, tmp_path: Path) -> None:
    path = made_of(floating, tmp_path / "other.onnx", 1.5)
    before = path.read_bytes()
    with pytest.raises(
        VerifyError, match=r"not sealed: it gives other results than `policy\.onnx`"
    ):
        kd_export.adopt(path, floating)
    assert path.read_bytes() == before
    report = kd_export.adopt(path, floating, budget={"max": 0.5, "agreement": 0.5})
    assert report.ok
    schema = kd_export.inspect(path)
    assert schema.precision is not None
    assert schema.precision.name == "adopted"
    assert kd_export.verify(path).ok


class Bounded(nn.Module):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x).clamp(-self.limit, self.limit)
        return found


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of a file and of one that lost its clip."""
    folder = tmp_path_factory.mktemp("bounded")
    for name, limit in (("whole", 3.0), ("cut", 1e9)):
        torch.manual_seed(0)
        module = TensorDictModule(Bounded(limit), ["x"], ["action"])
        kd_export.save(module, folder / f"{name}.onnx", {"x": torch.randn(64, 4)})
    return folder


@pytest.mark.parametrize("given", [False, True])
def test_a_file_that_lost_its_clip_is_not_adopted(
    bounded: Path, tmp_path: Path, *, given: bool
) -> None:
    """No row like those of the example meets the clip."""
    whole, cut = (
        Path(shutil.copy(bounded / f"{name}.onnx", tmp_path)) for name in ("whole", "cut")
    )
    calibration = {"x": torch.randn(300, 4)} if given else None
    near = kd_export.open(cut).run({"x": torch.randn(300, 4)})["action"]
    assert near.abs().max() < 3
    with pytest.raises(VerifyError, match=r"not sealed: it gives other results than `whole"):
        kd_export.adopt(cut, whole, calibration=calibration)
    within = kd_export.adopt(cut, whole, calibration=calibration, budget={"max": 1e-5})
    assert within.ok
    assert "a clip or a limit that these do not meet may be missing" in str(within)
    other = tmp_path / "other.onnx"
    other.write_bytes(whole.read_bytes())
    assert kd_export.adopt(other, whole, calibration=calibration).ok


def test_a_reduced_file_keeps_its_budget_when_it_is_adopted(int8: Path, tmp_path: Path) -> None:
    model = onnx.load(int8)
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "slim.onnx")
    assert kd_export.adopt(tmp_path / "slim.onnx", int8, calibration=rows(50, 3)).ok
    assert kd_export.inspect(tmp_path / "slim.onnx") == kd_export.inspect(int8)


def test_a_file_of_another_interface_is_not_adopted(
    floating: Path, recurrent: Path, tmp_path: Path
) -> None:
    path = made_of(floating, tmp_path / "other.onnx")
    with pytest.raises(ExportError, match=r"cannot take the place of `gru\.onnx`.*same inputs"):
        kd_export.adopt(path, recurrent)
    with pytest.raises(ExportError, match=r"cannot be adopted as `policy\.onnx`"):
        kd_export.adopt(tmp_path / "a.pt2", floating)
    with pytest.raises(ExportError, match=r"its schema is missing.*kd_export\.adopt"):
        kd_export.adopt(floating, path)


def test_a_recurrent_file_is_adopted(recurrent: Path, tmp_path: Path) -> None:
    model = onnx.load(recurrent)
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "slim.onnx")
    report = kd_export.adopt(tmp_path / "slim.onnx", recurrent)
    assert report.reduction is not None
    assert report.reduction.rows == 4 * 50 * 16  # rollouts


def test_the_command_adopts(
    floating: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made_of(floating, tmp_path / "slim.onnx")
    assert main(["adopt", str(path), "--like", str(floating)]) == 0
    assert "ok: rounding" in capsys.readouterr().out
    other = made_of(floating, tmp_path / "other.onnx", 1.5)
    assert main(["adopt", str(other), "--like", str(floating), "--max", "0.001"]) == 1
    assert main(["inspect", str(path)]) == 0
