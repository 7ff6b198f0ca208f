import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import children
from tests.export.models import Do, Keyed, exported, saved
from torch import Tensor, nn

import kd_export
from kd_export import (
    ExportError,
    NotExportable,
    ShapeMismatch,
    UntrustedArtifact,
    VerifyError,
)
from kd_export._backends.pt2 import check_registered, own_operators
from kd_export._schema.trust import check_operator


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("nested", tmp_path_factory.mktemp("artefacts") / "nested.pt2")


ALONE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0].startswith("kd_"):
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Blocked())
import torch
program = torch.export.load(sys.argv[1])
print({name: tuple(y.shape) for name, y in program.module()(in_x=torch.ones(5, 3)).items()})
"""


def test_plain_torch_opens_the_file_without_kd(path: Path) -> None:
    told = children.check_output("-W", "ignore", "-c", ALONE, path)
    assert told == "{'out.image': (5, 2)}\n"


WITHOUT_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "onnx", "onnxruntime", "kd_core", "kd_nn"):
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Blocked())
import kd_export
schema = kd_export.inspect(sys.argv[1])
print(schema.inputs[0].key, schema.outputs[0].describe())
print(kd_export.diff(sys.argv[1], sys.argv[1]).same)
"""


def test_inspect_and_diff_work_without_torch(path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "('in', 'x') float32 (batch, 2)\nTrue\n"


def test_file_tells_no_paths_and_holds_no_samples(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            content = archive.read(info)
            assert b".py" not in content
            assert b"stack_trace" not in content
            if "sample_inputs" in info.filename:
                assert content == b""


def test_program_keeps_its_traces_after_saving(path: Path) -> None:
    program = exported("nested")
    program.save(path.with_name("again.pt2"))
    nodes = [n for n in program.exported_program.graph.nodes if n.op == "call_function"]
    assert all("stack_trace" in node.meta for node in nodes)


@pytest.mark.parametrize("cut", [1, 30, 3000])
def test_truncated_file_is_named_so(path: Path, tmp_path: Path, cut: int) -> None:
    short = tmp_path / "cut.pt2"
    short.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ExportError, match=r"not a whole \.pt2 archive.*It may be truncated"):
        kd_export.inspect(short)


class Others(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> dict[str, torch.Tensor]:
        total = self.linear(x) + y
        return {"one": total, "two": torch.cat([x, x]), "three": total}


def test_a_program_of_others_runs_by_its_own_names_and_converts(tmp_path: Path) -> None:
    path, module = tmp_path / "own.pt2", Others()
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    rows = {0: torch.export.Dim("rows", min=2, max=64)}
    program = torch.export.export(module, (x,), {"y": y}, dynamic_shapes={"x": rows, "y": rows})
    torch.export.save(program, path)
    schema = kd_export.inspect(path)
    (axis,) = schema.axes
    assert [e.describe() for e in schema.inputs] == [f"float32 ({axis}, {n})" for n in (3, 2)]
    assert schema.output("two").describe() == f"float32 (2*{axis}, 3)"
    assert schema.axes[axis].max == 64
    session = kd_export.open(path, trusted=True)
    results, expected = session.run({"x": x, "y": y}), module(x, y=y)
    assert list(results) == ["one", "two", "three"]
    for result, value in zip(results.values(), expected.values(), strict=True):
        assert torch.equal(result, value)
    with pytest.raises(ShapeMismatch, match=f"axis `{axis}` ranges over"):
        session.run({"x": x.repeat(17, 1), "y": y.repeat(17, 1)})
    with pytest.raises(VerifyError, match=r"was not written by kd-export"):
        kd_export.verify(path, trusted=True)
    with pytest.raises(NotExportable, match=r"its arguments have no keys"):
        kd_export.convert(path, tmp_path / "again.pt2", trusted=True)
    assert kd_export.convert(path, tmp_path / "own.onnx", trusted=True).ok
    assert kd_export.verify(tmp_path / "own.onnx").ok


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"`.*none\.pt2` cannot be read"):
        kd_export.inspect(tmp_path / "none.pt2")


def test_schema_of_another_program_is_refused(path: Path, tmp_path: Path) -> None:
    other, mixed = tmp_path / "gru.pt2", tmp_path / "mixed.pt2"
    saved("gru", other)
    with zipfile.ZipFile(path) as one, zipfile.ZipFile(other) as two:
        (schema,) = [one.read(n) for n in one.namelist() if n.endswith("kd_export.json")]
        files = {n: two.read(n) for n in two.namelist()}
    with zipfile.ZipFile(mixed, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, schema if name.endswith("kd_export.json") else content)
    with pytest.raises(ExportError, match="does not fit the program beside it"):
        kd_export.open(mixed, trusted=True)


def conditional(x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    return y


def with_gradient(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return x * 2


@torch.library.custom_op("kd_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def own(x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = twice(x)
    return y


torch_library: Any = torch.library  # its functions have no types
LIBRARY = torch_library.Library("kd_test_library", "DEF")
LIBRARY.define("thrice(Tensor x) -> Tensor")
LIBRARY.define("thrice.scaled(Tensor x, float scale) -> Tensor")
LIBRARY.define("text(str path) -> str")
LIBRARY.impl("thrice", lambda x: x * 3, "CompositeExplicitAutograd")
LIBRARY.impl("thrice.scaled", lambda x, scale: x * 3 * scale, "CompositeExplicitAutograd")
torch_library.register_fake("kd_test_library::thrice", torch.empty_like, lib=LIBRARY)
torch_library.register_fake(
    "kd_test_library::thrice.scaled", lambda x, scale: torch.empty_like(x), lib=LIBRARY
)


def of_a_library(x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = torch.ops.kd_test_library.thrice(x)
    z: torch.Tensor = torch.ops.kd_test_library.thrice.scaled(y, 0.5)
    return z


@pytest.mark.parametrize("function", [conditional, with_gradient, own, of_a_library])
def test_inner_graphs_and_own_operators_are_let_in(tmp_path: Path, function: object) -> None:
    assert callable(function)
    module = Keyed(Do(function), ["x"], ["y"])
    assert kd_export.save(module, tmp_path / "model.pt2", {"x": torch.ones(2, 3)}).ok


def test_an_operator_of_another_package_is_refused() -> None:
    with pytest.raises(ExportError, match=r"define it with `torch\.library\.custom_op` or"):
        check_operator("torch.ops.kd_test.twice.default")


def test_operators_that_torch_defines_in_python_are_not_own() -> None:
    torch.library.define("kd_test_unknown::op", "(Tensor x) -> Tensor")  # made in a file of torch
    found = own_operators()
    assert {
        "torch.ops.kd_test.twice.default",
        "torch.ops.kd_test_library.thrice.default",
        "torch.ops.kd_test_library.thrice.scaled",
    } <= found
    assert {"prims::sin", "debugprims::load_tensor", "kd_test_unknown::op"} <= torch.library._defs
    spaces = {name.split(".")[2] for name in found}
    assert not spaces & {"aten", "prims", "rngprims", "debugprims", "kd_test_unknown"}


def test_an_own_operator_that_takes_no_tensor_is_refused() -> None:
    with pytest.raises(UntrustedArtifact, match="not an operator on tensors"):
        check_registered(["torch.ops.kd_test_library.text.default"])


class Partial(nn.Module):
    """A buffer that fills its memory only in part, as some parametrisations leave it."""

    def __init__(self) -> None:
        super().__init__()
        self.base: Tensor
        self.register_buffer("base", torch.randn(6, 3)[1:4])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.base


def test_a_part_of_a_tensor_is_saved_without_a_warning(tmp_path: Path) -> None:
    module = Keyed(Partial(), ["x"], ["y"])
    assert kd_export.save(module, tmp_path / "m.pt2", {"x": torch.ones(2, 3)}).ok
