import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from tests.export.models import CASES, Do, Keyed, case, saved

import kd_export
from kd_core import TensorDict
from kd_export import (
    DtypeMismatch,
    ExportError,
    KeyMismatch,
    NotExportable,
    Session,
    ShapeMismatch,
    VerifyError,
)
from kd_nn import TensorDictModule

X, H = torch.ones(4, 3), torch.zeros(4, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of the files of all models."""
    path = tmp_path_factory.mktemp("artefacts")
    for name in CASES:
        saved(name, path / f"{name}.onnx")
    return path


@pytest.fixture
def gru(folder: Path) -> Session:
    return kd_export.open(folder / "gru.onnx")


@pytest.mark.parametrize("name", ["in_place", "gru", "graph", "conv"])
def test_file_gives_what_the_module_gives(name: str, folder: Path) -> None:
    model = case(name)
    assert kd_export.verify(folder / f"{name}.onnx").ok
    assert kd_export.verify(folder / f"{name}.onnx", model.module, batch_sizes=[4, 5]).ok


def test_wire_names_and_axes_are_inside_the_file(folder: Path) -> None:
    graph = onnx.load(folder / "gru.onnx").graph
    assert [value.name for value in graph.input] == ["x", "state.h"]
    assert [value.name for value in graph.output] == ["y", "next.h"]
    sizes = [dim.dim_param for dim in graph.input[0].type.tensor_type.shape.dim]
    assert sizes == ["batch", ""]


def test_key_updated_in_place_keeps_its_key(folder: Path) -> None:
    session = kd_export.open(folder / "in_place.onnx")
    assert session.schema.outputs[0].name == "x_1"
    assert list(session.run({"x": X})) == ["x"]


def test_file_tells_no_paths(folder: Path) -> None:
    content = (folder / "gru.onnx").read_bytes()
    assert b".py" not in content
    assert b"stack_trace" not in content


def test_tensors_in_tensors_out(gru: Session) -> None:
    result = gru.run({"x": X, "state.h": H})
    assert isinstance(result["next.h"], torch.Tensor)


def test_arrays_in_arrays_out(gru: Session) -> None:
    result = gru.run({"x": X.numpy(), "state.h": H.numpy()})
    assert isinstance(result["next.h"], np.ndarray)


def test_container_in_container_out(gru: Session) -> None:
    td = TensorDict({"x": X, "state": {"h": H}}, batch_size=[4])
    assert gru.run(td)["next", "h"].shape == (4, 5)


def test_outputs_can_be_chosen(gru: Session) -> None:
    assert list(gru.run({"x": X, "state.h": H}, outputs=[("next", "h")])) == ["next.h"]


def test_strided_array_gives_the_same_numbers(gru: Session) -> None:
    strided = np.asfortranarray(np.random.default_rng(0).random((4, 3), dtype=np.float32))
    one = gru.run({"x": strided, "state.h": H.numpy()})
    other = gru.run({"x": np.ascontiguousarray(strided), "state.h": H.numpy()})
    assert np.array_equal(one["y"], other["y"])


@pytest.fixture(scope="module", params=["onnx", "c"])
def masked(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Session:
    module = Keyed(Do(lambda x, on: torch.where(on, 2 * x, -x)), ["x", "on"], ["y"])
    path = tmp_path_factory.mktemp("artefacts") / f"masked.{request.param}"
    example = {"x": torch.randn(2, 3), "on": torch.tensor([[True, False, True]] * 2)}
    kd_export.save(module, path, example, dynamic=None)
    return kd_export.open(path, trusted=True)


ROW = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
ON = np.array([[True, False, True], [False, True, True]])


@pytest.mark.parametrize(
    ("x", "on"),
    [
        (ROW.astype(">f4"), ON),
        (np.frombuffer(b"?" + ROW.tobytes(), np.float32, offset=1).reshape(2, 3), ON),
        (np.ascontiguousarray(ROW[::-1])[::-1], ON),
        (ROW, (7 * ON.astype(np.uint8)).view(bool)),
    ],
    ids=["bytes of another order", "not aligned", "reversed", "bools that are not 0 or 1"],
)
def test_arrays_that_lie_otherwise_in_memory_give_the_same(
    masked: Session, x: np.ndarray[Any, Any], on: np.ndarray[Any, Any]
) -> None:
    assert np.array_equal(masked.run({"x": x, "on": on})["y"], np.where(ON, 2 * ROW, -ROW))


def test_a_tensor_that_is_marked_as_negative_gives_the_same(masked: Session) -> None:
    x = torch.complex(torch.zeros(2, 3), torch.from_numpy(ROW)).conj().imag
    found = masked.run({"x": x, "on": torch.from_numpy(ON)})["y"]
    assert np.array_equal(found, np.where(ON, -2 * ROW, ROW))


def test_a_masked_array_is_refused(masked: Session) -> None:
    with pytest.raises(DtypeMismatch, match=r"for `x`, got a masked array.*\.filled"):
        masked.run({"x": np.ma.masked_array(ROW, mask=ROW > 0), "on": ON})


def test_inputs_are_checked(gru: Session) -> None:
    with pytest.raises(KeyMismatch, match=r"input `state\.h` not found"):
        gru.run({"x": X})
    with pytest.raises(DtypeMismatch, match=r"for `x`, got dtype float64.*\.to\(torch\.float32\)"):
        gru.run({"x": X.double(), "state.h": H})
    with pytest.raises(DtypeMismatch, match=r"for `x`, got dtype float64.*astype\('float32'\)"):
        gru.run({"x": X.double().numpy(), "state.h": H})
    with pytest.raises(DtypeMismatch, match=r"for `x`, got a list.*numpy\.asarray"):
        gru.run({"x": [1.0], "state.h": H})
    with pytest.raises(ShapeMismatch, match=r"axis `batch` has size 4 in `x`"):
        gru.run({"x": X, "state.h": H[:2]})


def test_inner_name_that_is_also_a_key_does_not_collide(tmp_path: Path) -> None:
    module = Keyed(Do(lambda x, w: (x.relu() + w, x.relu() * 2)), ["add", "mul"], ["relu", "z"])
    example = {"add": torch.randn(2, 3), "mul": torch.randn(2, 3)}
    assert kd_export.save(module, tmp_path / "model.onnx", example).ok


def test_weight_name_that_is_also_a_key_does_not_collide(tmp_path: Path) -> None:
    module = Keyed(torch.nn.Linear(3, 3), [("net", "weight")], [("net", "bias")])
    example = {("net", "weight"): torch.randn(2, 3)}
    assert kd_export.save(module, tmp_path / "model.onnx", example).ok


ALONE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "kd_core", "kd_nn", "kd_probabilistic", "onnx"):
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Blocked())
import numpy as np
import kd_export

path = sys.argv[1]
print([entry.wire for entry in kd_export.inspect(path).inputs])
print(kd_export.verify(path).ok)
session = kd_export.open(path)
result = session.run({"x": np.ones((2, 3), "float32"), "state": {"h": np.zeros((2, 5), "float32")}})
print(result["next"]["h"].shape)
"""


def test_runs_where_there_is_neither_torch_nor_kd_core(folder: Path) -> None:
    command = [sys.executable, "-c", ALONE, str(folder / "gru.onnx")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split("\n") == ["['x', 'state.h']", "True", "(2, 5)", ""]


@pytest.mark.parametrize("cut", [1, 10, 1000])
def test_truncated_file_is_named_so(folder: Path, tmp_path: Path, cut: int) -> None:
    path = tmp_path / "cut.onnx"
    path.write_bytes((folder / "gru.onnx").read_bytes()[:-cut])
    with pytest.raises(ExportError, match=r"may be truncated|carries no kd-export schema"):
        kd_export.inspect(path)


def foreign_model() -> onnx.ModelProto:
    one, other = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 3])
        for name in ("input.1", "out")
    )
    node = onnx.helper.make_node("Add", ["input.1", "input.1"], ["out"])
    opset = [onnx.helper.make_opsetid("", 17)]
    graph = onnx.helper.make_graph([node], "g", [one], [other])
    return onnx.helper.make_model(graph, opset_imports=opset, ir_version=8)


def test_a_model_of_others_runs_by_its_own_names(tmp_path: Path) -> None:
    path = tmp_path / "own.onnx"
    onnx.save(foreign_model(), path)
    x = np.random.default_rng(0).random((4, 3), dtype=np.float32)
    session = kd_export.open(path)
    assert np.array_equal(session.run({"input.1": x})["out"], x + x)
    assert list(session.run({"input": {"1": x}})) == ["out"]
    with pytest.raises(ShapeMismatch, match=r"for `input\.1`.*Dimension 1 must be 3"):
        session.run({"input.1": x[:, :2]})
    with pytest.raises(VerifyError, match=r"was not written by kd-export.*kd_export\.open"):
        kd_export.verify(path)


def test_a_model_that_lost_its_schema_is_not_taken_for_one_of_others(
    folder: Path, tmp_path: Path
) -> None:
    model = onnx.load(folder / "gru.onnx")
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "lost.onnx")
    with pytest.raises(ExportError, match="was written by kd-export, and its schema is missing"):
        kd_export.open(tmp_path / "lost.onnx")


def test_complex_numbers_are_named(tmp_path: Path) -> None:
    module = TensorDictModule(lambda x: x * 2, in_keys=["x"], out_keys=["y"])
    with pytest.raises(NotExportable, match=r"`x` is complex64.*view_as_real"):
        kd_export.save(module, tmp_path / "m.onnx", {"x": torch.ones(3, dtype=torch.complex64)})
    assert not list(tmp_path.iterdir())


def test_half_a_character_in_a_name_is_told(tmp_path: Path) -> None:
    module = Keyed(torch.nn.Linear(3, 2), ["a\ud800"], ["y"])
    with pytest.raises(NotExportable, match=r"ONNX cannot hold the character '\\ud800'"):
        kd_export.save(module, tmp_path / "a.onnx", {"a\ud800": torch.zeros(1, 3)})


@pytest.mark.parametrize("name", CASES)
def test_the_checker_of_onnx_finds_nothing(name: str, folder: Path) -> None:
    onnx.checker.check_model(str(folder / f"{name}.onnx"), full_check=True)
