"""C without a runtime: compiled without a warning, compared with the module, refused by name."""

import ctypes
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn

import kd_export
from kd_export import (
    BackendMissing,
    ExportError,
    NotExportable,
    Signal,
    UntrustedArtifact,
    VerifyError,
)
from kd_export._backends import c
from kd_export._backends.c import FLAGS
from kd_export.cli import main
from kd_export.policies import Clip, Normalise
from kd_nn import TensorDictModule, TensorDictSequential


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRUCell(3, 5)
        self.lstm = nn.LSTMCell(3, 5)

    def forward(self, x: Tensor, h: Tensor, g: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        h = self.gru(x, h)
        g, k = self.lstm(x, (g, k))
        return (h + g).tanh(), h, g, k


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("artefacts") / "robot.c"
    module = TensorDictModule(
        Remembering(), ["x", "h", "g", "k"], ["y", *(("next", name) for name in "hgk")]
    )
    example = {"x": torch.randn(4, 3), **{name: torch.zeros(4, 5) for name in "hgk"}}
    state = {name: ("next", name) for name in "hgk"}
    kd_export.save(module, path, example, state=state, initial={"h": 0.25})
    return path


def compiled(path: Path, folder: Path) -> ctypes.CDLL:
    """Compile a file beside its header, as a user does."""
    user = folder / "user.c"
    user.write_text(f'#include "{path.with_suffix(".h")}"\n')
    compiler = shutil.which("cc")
    assert compiler is not None
    library = folder / "robot.so"
    sources = [str(user), str(path)]
    command = [compiler, *FLAGS, "-shared", "-fPIC", *sources, "-o", str(library), "-lm"]
    subprocess.run(command, check=True, capture_output=True)
    return ctypes.CDLL(str(library))


def test_a_state_is_stepped_and_reset_in_c(recurrent: Path, tmp_path: Path) -> None:
    library = compiled(recurrent, tmp_path)
    session = kd_export.open(recurrent, trusted=True)
    assert session.schema.input("x").describe() == "float32 (1, 3)"
    state, y = numpy.empty(15, numpy.float32), numpy.empty((1, 2, 5), numpy.float32)[:, 0]
    pointer = ctypes.POINTER(ctypes.c_float)
    rows = numpy.random.default_rng(0).standard_normal((8, 1, 3)).astype(numpy.float32)
    for turn, x in enumerate(rows):
        if turn % 5 == 0:
            library.robot_reset(state.ctypes.data_as(pointer))
            session.reset()
        library.robot_step(*(one.ctypes.data_as(pointer) for one in (state, x, y)))
        assert numpy.array_equal(y, session.step({"x": x})["y"])


def test_stored_tests_pass_and_a_changed_number_is_found(recurrent: Path, tmp_path: Path) -> None:
    assert kd_export.verify(recurrent, trusted=True).ok
    text = recurrent.read_text()
    at = text.index("= {\n  ") + 6
    end = text.index("f,", at)
    changed = tmp_path / "robot.c"
    changed.write_text(f"{text[:at]}9.5{text[end:]}")
    with pytest.raises(VerifyError, match=r"weights or the graph in `robot\.c` are not those"):
        kd_export.verify(changed, trusted=True)


def test_a_file_is_a_program(recurrent: Path, tmp_path: Path) -> None:
    assert kd_export.inspect(recurrent).state["h"] == "next.h"
    with pytest.raises(UntrustedArtifact, match="executes the program"):
        kd_export.open(recurrent)
    foreign = tmp_path / "other.c"
    foreign.write_text("int main(void) { return 0; }")
    with pytest.raises(ExportError, match=r"the \.c file carries no kd-export schema"):
        kd_export.inspect(foreign)
    broken = tmp_path / "broken.c"
    broken.write_text(recurrent.read_text().replace("#include <math.h>", "#include <maths.h>"))
    with pytest.raises(ExportError, match=r"cannot be compiled: maths\.h"):
        kd_export.open(broken, trusted=True)


class Everything(nn.Module):
    """Operators that policies use, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Sequential(
            nn.Conv2d(2, 4, 3, 2, padding=1, groups=2), nn.GELU(), nn.BatchNorm2d(4), nn.Flatten()
        )
        self.line = nn.Conv1d(1, 2, 3, dilation=2)
        self.layers = nn.LSTM(3, 4, 2, batch_first=True)
        self.gru = nn.GRU(3, 4, batch_first=True)
        self.body = nn.Sequential(nn.LayerNorm(6), nn.SELU(), nn.Linear(6, 6), nn.Softmax(-1))

    def forward(self, image: Tensor, x: Tensor, word: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        seen = self.see(image)
        steps = x.reshape(-1, 2, 3)
        remembered = self.layers(steps)[0][:, -1] + self.gru(steps)[0].sum(1)
        y = torch.where(mask, self.body(x), nn.functional.elu(x).abs().sqrt())
        y = torch.cat([y[:, 1:], x[:, :1].clamp(-0.5, 0.5)], -1).flip(-1)
        codes = nn.functional.one_hot(word, 5).float() @ torch.arange(10.0).reshape(5, 2)
        lines = self.line(x[:, None]).transpose(1, 2)
        picked = y.max(-1).values - y.min(-1).values / y.std(-1)
        squashed = (
            nn.functional.softplus(y) * nn.functional.leaky_relu(x) - x.double().exp().float()
        )
        return seen, remembered, codes, lines, picked, squashed, y.argmax(-1), y > 0, y.round()


def test_operators_of_policies(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = TensorDictModule(Everything(), ["image", "x", "word", "mask"], list("abcdefghi"))
    example = {
        "image": torch.rand(2, 2, 5, 5),
        "x": torch.randn(2, 6),
        "word": torch.tensor([1, 4]),
        "mask": torch.tensor([[True, False] * 3] * 2),
    }
    report = kd_export.save(module, tmp_path / "all.c", example, dynamic=None)
    assert report.ok
    assert kd_export.inspect(tmp_path / "all.c").input("x").shape == (2, 6)


class Pooled(nn.Module):
    """Poolings, norms of images and sums of exponentials, as CNNs and distributions have them."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.MaxPool2d(3, 2, padding=1), nn.GroupNorm(2, 4), nn.AvgPool2d(2, 1, padding=1)
        )
        self.apart = nn.MaxPool2d((2, 3), (1, 2), dilation=(2, 1), ceil_mode=True)
        self.inner = nn.AvgPool2d(3, 2, padding=1, count_include_pad=False)
        self.line = nn.Sequential(nn.MaxPool1d(2), nn.InstanceNorm1d(3, affine=True))

    def forward(self, image: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        shares = x.logsumexp(-1)
        return (
            self.image(image), self.apart(image), self.inner(image), self.line(x), shares,
            (x - shares[..., None]).exp(), x.abs().sum(1), x.norm(1, -1), image.mean((2, 3)),
        )  # fmt: skip


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_poolings_and_norms(tmp_path: Path, scale: float) -> None:
    """Exponentials of large numbers overflow where the largest is not taken off first."""
    torch.manual_seed(0)
    module = TensorDictModule(Pooled(), ["image", "x"], list("abcdefghi"))
    example = {"image": torch.randn(2, 4, 7, 8), "x": scale * torch.randn(2, 3, 6)}
    assert kd_export.save(module, tmp_path / "all.c", example, dynamic=None).ok


def test_places_and_running_sums(tmp_path: Path) -> None:
    """As the masks of transformers are made; places count from the end, too."""

    def picked(x: Tensor, row: Tensor, column: Tensor) -> tuple[Tensor, ...]:
        return x[row, column], x[row], x.cumsum(1), (x > 0).cumsum(-1)

    module = TensorDictModule(picked, ["x", "row", "column"], list("abcd"))
    example = {
        "x": torch.randn(2, 3, 4),
        "row": torch.tensor([[0, -1], [1, 0]]),
        "column": torch.tensor([[2, 1], [0, -3]]),
    }
    assert kd_export.save(module, tmp_path / "m.c", example, dynamic=None).ok


def test_nan_and_infinity_are_those_of_the_module(tmp_path: Path) -> None:
    net = nn.Sequential(nn.MaxPool1d(2), nn.ReLU())
    module = TensorDictModule(lambda x: (net(x), x.logsumexp(-1)), ["x"], ["y", "z"])
    path = tmp_path / "m.c"
    kd_export.save(module, path, {"x": torch.randn(2, 1, 4)}, dynamic=None)
    x = torch.tensor([[[1.0, math.nan, math.nan, 2.0]], [[-math.inf, -math.inf, 3.0, math.inf]]])
    found = kd_export.open(path, trusted=True).run({"x": x})
    torch.testing.assert_close(found["y"], net(x), equal_nan=True)
    torch.testing.assert_close(found["z"], x.logsumexp(-1), equal_nan=True)


def test_a_policy_is_stepped_beside_its_oracle(tmp_path: Path) -> None:
    torch.manual_seed(0)
    mean, deviation = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0])
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
    policy = TensorDictSequential(
        TensorDictModule(Normalise(mean, deviation), ["obs"], ["obs"]),
        TensorDictModule(net, ["obs"], ["action"]),
        TensorDictModule(Clip(-0.1, 0.1), ["action"], ["action"]),
    )
    policy.select_out_keys("action")

    def predict(obs: Tensor) -> Tensor:
        with torch.no_grad():
            action: Tensor = net((obs - mean) / deviation).clamp(-0.1, 0.1)
            return action

    example = {"obs": mean + deviation * torch.randn(16, 2)}
    report = kd_export.save(policy, tmp_path / "2nd policy.c", example, oracle=predict, steps=10)
    assert "beside the oracle" in report.rows[-1].note
    assert "void _2nd_policy_run(" in (tmp_path / "2nd policy.h").read_text()


def test_the_header_lists_what_each_number_is(tmp_path: Path) -> None:
    names = ["hip (left)", "kn\u00e4*/e", "ankle??/", "/*"]
    signal = Signal(names=names, unit="rad", limits=(-1.5, [1, 2, 3, 4]), rate=20)
    module = TensorDictModule(nn.Linear(4, 1), [("obs", "x")], ["y"])
    path = tmp_path / "leg.c"
    example = {("obs", "x"): torch.randn(2, 4)}
    kd_export.save(module, path, example, signals={("obs", "x"): signal})
    text = path.with_suffix(".h").read_text("utf-8")
    assert " * in_obs_x is obs.x: float32 (1, 4), 20 Hz, row by row\n" in text
    assert " *   0 hip (left), rad, -1.5..1\n *   1 kn\u00e4*\\u002fe, rad, -1.5..2\n" in text
    compiled(path, tmp_path)


def test_the_header_of_a_file_is_not_replaced(
    recurrent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, own = tmp_path / "robot.c", tmp_path / "robot.h"
    shutil.copy(recurrent, source)
    shutil.copy(recurrent.with_suffix(".h"), own)
    text = own.read_bytes()
    for command in (["header"], ["client", "--lang", "c"]):
        for target in (own, source):
            assert main([*command, str(source), "-o", str(target)]) == 2
            assert re.search("would be replaced|is the name of the header", capsys.readouterr().err)
    other = tmp_path / "robot.onnx"
    module = TensorDictModule(nn.Linear(2, 2), ["x"], ["y"])
    kd_export.save(module, other, {"x": torch.randn(2, 2)})
    assert main(["header", str(other), "-o", str(own)]) == 2
    assert "is the header that `robot.c` was saved with" in capsys.readouterr().err
    assert (own.read_bytes(), source.read_bytes()) == (text, recurrent.read_bytes())
    own.unlink()
    assert main(["header", str(source), "-o", str(own)]) == 2
    assert not own.exists()
    assert main(["header", str(source), "-o", str(tmp_path / "listed.h")]) == 0


def test_a_new_file_does_not_replace_the_header_of_another(tmp_path: Path) -> None:
    other = tmp_path / "leg.h"
    other.write_text("/* mine */")
    module = TensorDictModule(nn.Linear(2, 2), ["x"], ["y"])
    with pytest.raises(ExportError, match=r"is written with `leg\.h`, and there is another file"):
        kd_export.save(module, tmp_path / "leg.c", {"x": torch.randn(2, 2)})
    assert [*tmp_path.iterdir()] == [other]
    assert other.read_text() == "/* mine */"
    other.unlink()
    for _ in range(2):  # its own header is replaced
        kd_export.save(module, tmp_path / "leg.c", {"x": torch.randn(2, 2)})


def test_an_operator_that_c_lacks_is_named(tmp_path: Path) -> None:
    module = TensorDictModule(nn.Upsample(scale_factor=2), ["x"], ["y"])
    with pytest.raises(NotExportable, match="C has no operator `Resize`"):
        kd_export.save(module, tmp_path / "a.c", {"x": torch.rand(2, 1, 4, 4)})
    module = TensorDictModule(nn.MaxPool3d(2), ["x"], ["y"])
    with pytest.raises(NotExportable, match="C has no `MaxPool` over 3 dimensions"):
        kd_export.save(module, tmp_path / "a.c", {"x": torch.rand(2, 1, 4, 4, 4)})
    half = TensorDictModule(nn.Linear(2, 2).half(), ["x"], ["y"])
    with pytest.raises(NotExportable, match="float16, which C99 does not have"):
        kd_export.save(half, tmp_path / "a.c", {"x": torch.rand(2, 2).half()})
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(c, "C_COMPILERS", ())
    with pytest.raises(BackendMissing, match="no C compiler was found"):
        kd_export.save(
            TensorDictModule(nn.Linear(2, 2), ["x"], ["y"]),
            tmp_path / "a.c",
            {"x": torch.ones(2, 2)},
        )


def test_the_report_says_which_axis_has_one_size(tmp_path: Path) -> None:
    module = TensorDictModule(nn.Linear(3, 2), ["x"], ["y"])
    report = kd_export.save(module, tmp_path / "one.c", {"x": torch.zeros(1, 3)})
    assert report.notes == (
        "`batch` is fixed at 1 in `one.c`. For another size begin its range there: "
        "`'batch': (8, None)` in `dynamic`.",
    )
    rows = {"x": torch.zeros(8, 3)}
    dynamic = {"batch": (8, None)}
    report = kd_export.save(module, tmp_path / "eight.c", rows, dynamic=dynamic)
    assert "`batch` is fixed at 8" in report.notes[0]
    assert kd_export.save(module, tmp_path / "one.onnx", rows).notes == ()


def test_a_start_of_fixed_rows_keeps_its_numbers(tmp_path: Path) -> None:
    first = torch.arange(4.0)[:, None]
    module = TensorDictModule(lambda x, h: h + x, ["x", "h"], ["new"])
    example = {"x": torch.ones(4, 1), "h": torch.zeros(4, 1)}
    path = tmp_path / "fixed.c"
    kd_export.save(module, path, example, dynamic=None, state={"h": "new"}, initial={"h": first})
    session = kd_export.open(path, trusted=True)
    assert session.schema.initial == {"h": (0, 1, 2, 3)}
    assert session.step({"x": torch.ones(4, 1)})["new"].flatten().tolist() == [1, 2, 3, 4]
