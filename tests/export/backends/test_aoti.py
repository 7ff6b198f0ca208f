"""AOTInductor: one model of all kinds of parts, because compiling takes long."""

import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import kd_export
from kd_export import (
    DtypeMismatch,
    ExportError,
    Schema,
    ShapeMismatch,
    UntrustedArtifact,
    VerifyError,
)
from kd_nn import NormalParamExtractor, TensorDictModule, TensorDictSequential


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean).clamp(-5.0, 5.0)


def model() -> TensorDictSequential:
    torch.manual_seed(0)
    obs = ("obs", "x")
    return TensorDictSequential(
        TensorDictModule(Shift(), in_keys=[obs], out_keys=[obs]),
        TensorDictModule(nn.GRUCell(3, 4), in_keys=[obs, "h"], out_keys=[("next", "h")]),
        TensorDictModule(
            NormalParamExtractor(), in_keys=[("next", "h")], out_keys=["loc", "scale"]
        ),
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file that was converted: what is compiled was saved and loaded before."""
    source = tmp_path_factory.mktemp("artefacts") / "model.pt2"
    example = {("obs", "x"): torch.randn(2, 3), "h": torch.randn(2, 4)}
    assert kd_export.save(model(), source, example, state={"h": ("next", "h")}).ok
    target = source.with_name("model.aoti.pt2")
    assert kd_export.convert(source, target, trusted=True).ok
    return target


X, H = torch.randn(5, 3), torch.randn(5, 4)


def test_compiled_code_is_checked_and_verified(path: Path) -> None:
    assert kd_export.inspect(path).inputs[0].key == ("obs", "x")
    assert kd_export.verify(path, trusted=True).ok
    session = kd_export.open(path, trusted=True)
    expected = model().eval()
    with torch.no_grad():
        eager = expected(obs_x=X, h=H)
    results = session.run({"h": H, "obs.x": X})  # another order
    torch.testing.assert_close(results["loc"], eager[expected.out_keys.index("loc")])
    strided = session.run({"obs.x": X.t().contiguous().t(), "h": H})
    assert torch.equal(strided["scale"], results["scale"])
    first = session.step({"obs.x": X})["next.h"]
    second = session.run({"obs.x": X, "h": first})
    assert torch.equal(session.step({"obs.x": X})["next.h"], second["next.h"])
    for wrong, error in ((X.double(), DtypeMismatch), (X[:, :2], ShapeMismatch)):
        with pytest.raises(error):
            session.run({"obs.x": wrong, "h": H})


def test_compiled_code_is_trusted_or_not_opened(path: Path, tmp_path: Path) -> None:
    with pytest.raises(UntrustedArtifact, match="executes the program it holds"):
        kd_export.open(path)
    with zipfile.ZipFile(path) as archive:
        assert not any(i.file_size for i in archive.infolist() if i.filename.endswith(".cpp"))
    data = bytearray(path.read_bytes())
    place = data.find(b"\x7fELF") + 4096
    data[place] ^= 1
    (tmp_path / "model.aoti.pt2").write_bytes(data)
    with pytest.raises((VerifyError, ExportError), match=r"not those that it was|not a whole"):
        kd_export.open(tmp_path / "model.aoti.pt2", trusted=True)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List what is given to torch to load, which then loads nothing."""
    paths: list[str] = []

    def load(path: str) -> None:
        paths.append(path)

    monkeypatch.setattr("torch._inductor.aoti_load_package", load)
    return paths


def archive_of(path: Path, members: dict[str, bytes], weights: str = "") -> Path:
    """Write an archive with a schema and other files."""
    schema = Schema((), (), weights=weights).to_json()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {"archive_format": b"pt2", **members}.items():
            archive.writestr(f"model/{name}", content)
        archive.writestr("model/extra/kd_export.json", schema)
    return path


@pytest.mark.parametrize(
    "name",
    [
        "models/model.json",
        "data/weights/model.pt",
        "data/aotinductor/other/x.so",
        "data/aotinductor/model/../../../x.so",
        "data/aotinductor/model//etc/x.so",
        "data/aotinductor/model/..\\x.so",
    ],
)
def test_an_archive_of_more_than_compiled_code_is_refused(
    name: str, tmp_path: Path, loaded: list[str]
) -> None:
    """torch would unpickle exported programs and weights in it, and unpack to any path."""
    path = archive_of(tmp_path / "forged.aoti.pt2", {name: b"x"})
    with pytest.raises(UntrustedArtifact, match="is not part of an exported program"):
        kd_export.open(path, trusted=True)
    assert not loaded


def test_changed_code_is_not_loaded(tmp_path: Path, loaded: list[str]) -> None:
    path = archive_of(tmp_path / "m.aoti.pt2", {"data/aotinductor/model/x.so": b"x"}, "0" * 64)
    with pytest.raises(VerifyError, match=r"weights or the graph in `m\.aoti\.pt2` are not those"):
        kd_export.open(path, trusted=True)
    with pytest.raises(UntrustedArtifact, match="the SHA-256 of"):
        kd_export.open(path, sha256="0" * 64)
    assert kd_export.inspect(path).weights == "0" * 64
    assert not loaded
