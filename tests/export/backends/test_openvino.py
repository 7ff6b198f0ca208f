"""OpenVINO: in the lane `formats`, which installs it."""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.export.models import CASES, case, saved
from tests.tables import REDUCTIONS, Record, reduced
from torch import nn

import kd_export
from kd_core import TensorDict
from kd_export import ExportError, NotExportable, UntrustedArtifact, VerifyError
from kd_nn import TensorDictModule, TensorDictSequential

pytest.importorskip("openvino", reason="the lane `formats` installs it")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("gru", tmp_path_factory.mktemp("artefacts") / "gru.xml")


@pytest.mark.parametrize("name", CASES)
def test_file_gives_what_the_module_gives(name: str, tmp_path: Path) -> None:
    model, path = case(name), tmp_path / f"{name}.xml"
    assert kd_export.export(model.module, model.example, dynamic=model.dynamic).save(path).ok
    assert kd_export.verify(path).ok
    assert kd_export.verify(path, model.module, batch_sizes=[1, 2, 7]).ok


def test_names_and_the_schema_are_in_the_file(path: Path) -> None:
    schema = kd_export.inspect(path)
    assert [entry.wire for entry in schema.inputs] == ["x", "state.h"]
    assert "openvino" in schema.versions
    assert path.with_suffix(".bin").is_file()


@pytest.mark.parametrize("word", ["obs -> action", "a < b", "<!", "&gt;", "]]>", "'\"", "\u00e9"])
def test_any_word_may_be_in_the_schema(tmp_path: Path, word: str) -> None:
    """In the metadata, in keys and in the name of a step."""
    step = TensorDictModule(nn.Linear(3, 2), in_keys=[word], out_keys=[("z", word)])
    module = TensorDictSequential(
        step, TensorDictModule(lambda x: x + 1, in_keys=[("z", word)], out_keys=["y"])
    )
    path = tmp_path / "m.xml"
    kd_export.save(module, path, {word: torch.ones(2, 3)}, metadata={word: word})
    schema = kd_export.inspect(path)
    assert schema.metadata == {word: word}
    assert schema.inputs[0].key == (word,)
    assert "<lambda>" in [found.runs for found in schema.steps]
    assert kd_export.verify(path).ok


@pytest.mark.parametrize("character", ["\0", "\x01", "\x1f", "\uffff", "\ud800"])
def test_a_name_that_xml_cannot_hold_is_told(tmp_path: Path, character: str) -> None:
    key = f"a{character}b"
    module = TensorDictModule(nn.Linear(3, 2), in_keys=[key], out_keys=["y"])
    with pytest.raises(NotExportable, match=r"XML cannot hold the character .* Rename the") as e:
        kd_export.save(module, tmp_path / "a.xml", {key: torch.zeros(1, 3)})
    assert e.value.key == (key,)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("character", ["\t", "\n", "\r", "\x7f", "&", "<", '"', "\U0001f600"])
def test_a_name_that_xml_can_hold_is_held(tmp_path: Path, character: str) -> None:
    key, path = f"a{character}b", tmp_path / "a.xml"
    module = TensorDictModule(nn.Linear(3, 2), in_keys=[key], out_keys=["y"])
    assert kd_export.save(module, path, {key: torch.zeros(1, 3)}).ok
    assert kd_export.verify(path).ok


def test_one_runner(path: Path) -> None:
    session = kd_export.open(path)
    container = TensorDict({"x": torch.ones(4, 3), "state": {"h": torch.zeros(4, 5)}}, [4])
    assert session.run(container)["next", "h"].shape == (4, 5)
    assert list(session.run({"x": torch.ones(4, 3), "state.h": torch.zeros(4, 5)}, ["y"])) == ["y"]


def test_nan_is_refused(path: Path) -> None:
    """OpenVINO makes a number of it, such as 0 by a ReLU."""
    session = kd_export.open(path)
    x = torch.ones(4, 3)
    x[2, 1] = math.nan
    with pytest.raises(ExportError, match=r"`x` holds NaN.*nan_to_num.*\.onnx"):
        session.run({"x": x, "state.h": torch.zeros(4, 5)})
    x[2, 1] = -math.inf
    assert session.run({"x": x, "state.h": torch.zeros(4, 5)})["y"].shape[0] == 4


def test_threads_share_a_session(path: Path) -> None:
    session = kd_export.open(path)
    rows = [torch.full((4, 3), float(i)) for i in range(8)]
    h = torch.zeros(4, 5)
    alone = [session.run({"x": x, "state.h": h})["y"] for x in rows]

    def run(place: int) -> bool:
        x = rows[place % 8]
        return torch.equal(session.run({"x": x, "state.h": h})["y"], alone[place % 8])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(200)))


def test_other_weights_are_found(path: Path, tmp_path: Path) -> None:
    weights = bytearray(path.with_suffix(".bin").read_bytes())
    weights[0] ^= 1
    (tmp_path / "gru.xml").write_bytes(path.read_bytes())
    (tmp_path / "gru.bin").write_bytes(weights)
    with pytest.raises(VerifyError, match=r"weights or the graph in `gru\.xml` are not those"):
        kd_export.open(tmp_path / "gru.xml")
    (tmp_path / "gru.bin").write_bytes(weights[:8])
    with pytest.raises(UntrustedArtifact, match=r"at 0 of `gru\.bin`, which has 8\."):
        kd_export.open(tmp_path / "gru.xml")
    (tmp_path / "gru.bin").unlink()
    (tmp_path / "gru.bin").symlink_to(path.with_suffix(".bin"))
    with pytest.raises(UntrustedArtifact, match=r"`gru\.bin` beside the model is a link"):
        kd_export.open(tmp_path / "gru.xml")


def test_a_schema_of_other_dtypes_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "gru.bin").write_bytes(path.with_suffix(".bin").read_bytes())
    content = path.read_bytes().replace(b"float32", b"float64", 1)
    (tmp_path / "gru.xml").write_bytes(content)
    with pytest.raises(ExportError, match="does not fit the program beside it"):
        kd_export.open(tmp_path / "gru.xml")


@pytest.mark.parametrize("content", [b"", b"<net/>", b"<!DOCTYPE net><net/>", b"\xff" * 2000])
def test_another_file_is_named_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.xml").write_bytes(content)
    with pytest.raises(ExportError, match=r"is empty|not an OpenVINO model|no kd-export schema"):
        kd_export.inspect(tmp_path / "m.xml")


@pytest.mark.parametrize("precision", ["int8", "int8-weights", "fp16"])
def test_fewer_bits_within_a_budget(
    tmp_path: Path, precision: str, record_property: Record
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 128), nn.Tanh(), nn.Linear(128, 128), nn.Linear(128, 2))
    path, module = tmp_path / "m.xml", TensorDictModule(net, ["x"], ["y"])
    report = kd_export.save(
        module,
        path,
        {"x": torch.randn(8, 6)},
        batch_sizes=(2,),
        precision=precision,
        calibration={"x": torch.randn(600, 6)},
        budget={"max": 0.1, "rms": 0.02},
    )
    record_property(REDUCTIONS, reduced(".xml", report))
    assert report.ok
    found = report.reduction
    assert found is not None
    assert found.smaller > 1.2
    assert kd_export.verify(path).ok
    assert kd_export.inspect(path).precision is not None
    with pytest.raises(VerifyError, match=f"{precision} cannot meet the budget"):
        kd_export.save(
            module,
            tmp_path / "tiny.xml",
            {"x": torch.randn(8, 6)},
            batch_sizes=(2,),
            precision=precision,
            calibration={"x": torch.randn(600, 6)},
            budget={"max": 1e-9},
            keep_float=None,
        )
    assert not (tmp_path / "tiny.xml").exists()
