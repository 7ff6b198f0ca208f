"""Wrong uses, by Python and by the command line: each answer says what was expected and given."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.export.models import Do, Keyed
from torch import nn

import kd_export
from kd_core import TensorDict
from kd_export import ExportError, KeyMismatch, NotExportable, UntrustedArtifact
from kd_export.cli import main
from kd_nn import TensorDictModule, TensorDictSequential

X = torch.ones(2, 3)


def policy() -> tuple[Keyed, dict[str, torch.Tensor]]:
    return Keyed(nn.Linear(3, 2), ["x"], ["y"]), {"x": X}


OWN = """
from tests.export.test_wrong_use import policy

def fails():
    raise RuntimeError("no data here")

def misspelt():
    return *policy(), {"dynamc": None}

def wrong_mode():
    return *policy(), {"mode": "detreministic"}

def alone():
    return policy()[0]

made = policy()[0]

def unnamed():
    return policy()[0], None

number = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artefacts")
    program = kd_export.export(*policy())
    program.save(path / "policy.onnx")
    program.save(path / "policy.pt2")
    save_file({"x": X}, path / "in.safetensors")
    save_file({"z": X}, path / "other.safetensors")
    torch.save({"w": X}, path / "weights.pt")
    torch.save({"w": X}, path / "weights.pt2")
    (path / "empty.onnx").touch()
    (path / "words.onnx").write_text("hello")
    (path / "words.safetensors").write_text("hello")
    (path / "cut.pt2").write_bytes((path / "policy.pt2").read_bytes()[:900])
    (path / "folder").mkdir()
    (path / "wrong_use_factories.py").write_text(OWN)
    return path


@pytest.fixture
def _inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)


RUN = "run policy.onnx -i {} -o out.safetensors"
OWN_CODE = "export wrong_use_factories:{} out.onnx"
COMMANDS = [
    ("inspect polcy.onnx", 2, "`polcy.onnx` cannot be read: .* Did you mean `policy.onnx`?"),
    ("inspect nothing.pt2", 2, "`nothing.pt2` cannot be read: .* Pass the path of a file"),
    ("inspect policy.onx", 3, "`policy.onx`; available suffixes: .* Did you mean `.onnx`?"),
    ("inspect folder", 3, "the file of a program, got the directory `folder`. Name a file in it"),
    ("inspect .", 3, "expected the file of a program, got the directory `.`. Name a file in it."),
    ("inspect weights.pt", 3, "`weights.pt` is not an exported program; .* Load them into"),
    ("verify weights.pt2 --trusted", 2, "the file is not a program. `torch.save` writes weights"),
    ("inspect empty.onnx", 2, "`empty.onnx` is empty. .*export it again"),
    ("inspect words.onnx", 2, "`words.onnx`: the file is not a whole ONNX model"),
    ("verify cut.pt2 --trusted", 2, "`cut.pt2`: the file is not a whole .pt2 archive"),
    ("verify policy.pt2", 4, "Pass `--trusted` if you know who made it, or `--sha256` with"),
    ("verify policy.pt2 --sha256 abc", 4, "64 hexadecimal digits for `--sha256`, got 'abc'"),
    ("verify policy.onnx --batch-sizes 1,b", 2, "expected sizes such as `1,64`, got `1,b`"),
    ("bench policy.onnx --batch-sizes=-1", 2, "expected sizes such as `1,64`, got `-1`"),
    (
        "bench policy.onnx words.onnx --seconds 0.01",
        2,
        "`words.onnx`: the file is not a whole ONNX model",
    ),
    ("diff policy.onnx words.onnx", 2, "`words.onnx`: the file is not a whole ONNX model"),
    ("convert policy.onnx out.pt2", 2, "`policy.onnx` is ONNX, .* Convert the `.pt2` file"),
    ("convert policy.pt2 out.onx --trusted", 3, "`out.onx`; .* Did you mean `.onnx`?"),
    ("convert policy.pt2 no/out.onnx --trusted", 2, "`no/out.onnx` cannot be written"),
    ("header words.onnx", 2, "`words.onnx`: the file is not a whole ONNX model"),
    ("strip folder", 2, "`folder` is not a regular file. Pass the path"),
    (RUN.format("i.safetensors"), 2, "`i.safetensors` cannot be read: .*Did you mean `in.safe"),
    (RUN.format("words.safetensors"), 2, "`words.safetensors` cannot be read: Error while"),
    (RUN.format("other.safetensors"), 1, "input `x` not found; got `z`. Pass a tensor float32"),
    ("doctor .onx", 3, "not usable: .onx; known formats: .aoti.pt2, .c, .onnx"),
    ("export wrong_use_factories out.onnx", 2, "expected `package.module:attribute`, got"),
    ("export no_such_module:f out.onnx", 2, "No module named 'no_such_module'. Run the command in"),
    (OWN_CODE.format("polcy"), 2, "has no `polcy`. Did you mean `policy`?"),
    (OWN_CODE.format("number"), 2, "got an int. Let it return both, as in `return policy"),
    (OWN_CODE.format("made"), 2, "got a module. Write one: `def build(): return made, example`"),
    ("export wrong_use_factories.py:f out.onnx", 2, "Write `wrong_use_factories:f`, in the folder"),
    (OWN_CODE.format("alone"), 2, "got a Keyed. Let it return both"),
    (OWN_CODE.format("fails"), 2, "RuntimeError: no data here. It is raised at `raise Runtime"),
    (OWN_CODE.format("misspelt"), 2, "does not take: {'dynamc': None}. .* Did you mean `dynamic`?"),
    (
        OWN_CODE.format("wrong_mode"),
        2,
        "'detreministic' is not a valid mode; .* Did you mean `determ",
    ),
    (OWN_CODE.format("unnamed"), 1, "of tensors, got None. Pass a dict with `x`."),
]


@pytest.mark.usefixtures("_inside")
@pytest.mark.parametrize(("line", "code", "message"), COMMANDS)
def test_a_command_says_what_to_do(
    line: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = main(line.split())
    except SystemExit as refused:  # by argparse
        found = int(refused.code or 0)
    said = capsys.readouterr().err
    assert found == code
    assert "Traceback" not in said
    start, *rest = message.split(".*")
    for part in (start, *rest):
        assert part.strip() in said
        said = said[said.index(part.strip()) :]


def force(x: torch.Tensor) -> torch.Tensor:
    leaf = x.requires_grad_(True)
    return torch.autograd.grad((leaf**2).sum(), leaf)[0]


def exported(**options: Any) -> object:
    return kd_export.export(*policy(), **options)


def nested() -> TensorDictSequential:
    return TensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), ["x"], ["h"]),
        TensorDictModule(nn.Linear(4, 2), ["h"], [("out", "action")]),
    )


def recurrent() -> TensorDictModule:
    return TensorDictModule(nn.GRUCell(3, 5), ["x", "h"], [("next", "h")])


CALLS: list[tuple[Callable[[], object], type[ExportError], str]] = [
    (lambda: kd_export.export(Keyed, {}), NotExportable, "the class `Keyed`. Pass an instance"),  # type: ignore[arg-type]  # wrong on purpose
    (lambda: kd_export.export(policy()[0], [X]), ExportError, "got a list. Pass a dict with `x`."),  # type: ignore[arg-type]  # wrong on purpose
    (lambda: kd_export.export(policy()[0], {"x": np.array("a")}), ExportError, "expected numbers"),
    (
        lambda: kd_export.export(Keyed(Do(force), ["x"], ["y"]), {"x": X}),
        NotExportable,
        "which `torch.export` does not capture. Write the derivative as tensor operations",
    ),
    (lambda: exported(inputs="x"), KeyMismatch, "got 'x'. Pass a list, such as `inputs=['x']`."),
    (lambda: exported(outputs=3), KeyMismatch, "expected a list of keys for `outputs`, got 3."),
    (lambda: exported(outputs=[]), KeyMismatch, "got []. Pass a list, or leave `outputs` out"),
    (lambda: exported(mode="detreministic"), ExportError, "Did you mean `deterministic`?"),
    (lambda: exported(mode=3), ExportError, "3 is not a valid mode; available modes: `determ"),
    (lambda: exported(state=["x"]), KeyMismatch, "expected a dict for `state`, got ['x']."),
    (lambda: exported(initial=[1]), KeyMismatch, "expected a dict for `initial`, got [1]."),
    (lambda: exported(metadata=[1]), ExportError, "expected a dict for `metadata`, got [1]."),
    (
        lambda: kd_export.export(nested(), {"x": X}, outputs=["out.action"]),
        ExportError,
        "For 'out.action' write `('out', 'action')`.",
    ),
    (
        lambda: kd_export.export(nested(), {"x": X}, outputs=["out/action"]),
        ExportError,
        "For 'out/action' write `('out', 'action')`.",
    ),
    (
        lambda: kd_export.export(nested(), {"x": X}, outputs="out.action"),
        ExportError,
        "Pass a list, such as `outputs=[('out', 'action')]`.",
    ),
    (
        lambda: kd_export.export(nested(), {"x": X}, outputs="h"),
        ExportError,
        "Pass a list, such as `outputs=['h']`.",
    ),
    (
        lambda: kd_export.export(
            recurrent(), {"x": X, "h": torch.zeros(2, 5)}, state={("next", "h"): "h"}
        ),
        ExportError,
        "Write `state={'h': ('next', 'h')}`.",
    ),
    (
        lambda: kd_export.export(nested().to("meta"), {"x": X}),
        ExportError,
        "`module.0.module.weight` of the module is on the meta device and has no values.",
    ),
    (
        lambda: kd_export.export(nested(), {"x": X.to("meta")}),
        ExportError,
        "`x` of the example is on the meta device and has no values.",
    ),
    (
        lambda: kd_export.export(nested(), {"x": [[1.0, 2, 3], [4, 5, 6]]}),
        ExportError,
        "got a list. Convert it with `torch.tensor`.",
    ),
    (
        lambda: kd_export.export(nested(), {"x": [X, X]}),
        ExportError,
        "Give each of its tensors under a key of its own, or in a nested dict.",
    ),
    (
        lambda: kd_export.save("policy.onnx", nested(), {"x": X}),  # type: ignore[arg-type]  # refused
        ExportError,
        "Write `save(module, 'policy.onnx', example)`.",
    ),
    (
        lambda: kd_export.save(nested(), {"x": X}, "policy.onnx"),  # type: ignore[arg-type]  # refused
        ExportError,
        "expected a path as the second argument of `save`, got a dict.",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), CALLS)
def test_a_call_says_what_to_do(
    call: Callable[[], object], error: type[ExportError], message: str
) -> None:
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)


@pytest.mark.parametrize("sizes", ["12", 3, [-1], [1.5], None])
def test_sizes_to_try_are_checked(folder: Path, sizes: Any) -> None:
    message = r"expected a list of non-negative sizes for `batch_sizes`, got .*\(1, 64\)"
    with pytest.raises(ExportError, match=message):
        kd_export.export(*policy()).save(folder / "again.pt2", batch_sizes=sizes)
    if sizes is not None:
        with pytest.raises(ExportError, match=message):
            kd_export.verify(folder / "policy.onnx", batch_sizes=sizes)
    assert not (folder / "again.pt2").exists()


@pytest.mark.parametrize("name", ["rtol", "atol"])
def test_tolerances_are_checked(folder: Path, name: str) -> None:
    options: dict[str, Any] = {name: "tight"}
    with pytest.raises(ExportError, match=f"expected a number for `{name}`, got 'tight'"):
        kd_export.verify(folder / "policy.onnx", **options)


@pytest.mark.parametrize("digest", ["abc", 3, "g" * 64])
def test_a_digest_is_64_digits(folder: Path, digest: Any) -> None:
    with pytest.raises(UntrustedArtifact, match="expected 64 hexadecimal digits for `sha256`"):
        kd_export.open(folder / "policy.pt2", sha256=digest)


def test_a_container_without_an_input_lists_what_it_holds(folder: Path) -> None:
    session = kd_export.open(folder / "policy.onnx")
    td = TensorDict({"z": X, "deep": {"w": X}}, batch_size=[2])
    with pytest.raises(KeyMismatch, match=r"input `x` not found; got `z`, `deep\.w`\. Pass"):
        session.run(td)


def test_targets_may_be_written_without_a_dot() -> None:
    found = kd_export.diagnose(
        Keyed(Do(lambda x: x + 1), ["x"], ["y"]), {"x": X}, targets=["pt2", "onx"]
    )
    assert [(row.target, row.ok) for row in found.rows] == [(".pt2", True), (".onx", False)]
    assert found.rows[1].message.endswith("Did you mean `.onnx`?")


def test_a_mode_may_be_written_in_any_case() -> None:
    assert kd_export.export(*policy(), mode="Mean").schema.mode == "mean"


def test_a_wrong_dtype_says_how_to_convert_what_was_given(folder: Path) -> None:
    session = kd_export.open(folder / "policy.onnx")
    with pytest.raises(ExportError, match=re.escape("`.to(torch.float32)`")):
        session.run({"x": X.double()})
    with pytest.raises(ExportError, match=re.escape("`.astype('float32')`")):
        session.run({"x": X.double().numpy()})
