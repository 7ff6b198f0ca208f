"""Recurrent programs: state that a session carries, and sets back by rows."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.export.models import Do, Keyed, case
from torch import Tensor, nn

import kd_export
from kd_core import TensorDict
from kd_export import DtypeMismatch, ExportError, KeyMismatch, Session, ShapeMismatch
from kd_export._capture.initial import resolve_initial
from kd_export._schema.state import resolve_state

STATE = {("state", "h"): ("next", "h")}
FIRST = torch.tensor([0.5, 0.0, -1.0, 0.25, 1 / 3])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artefacts")
    model = case("gru")
    program = kd_export.export(model.module, model.example, state=STATE, initial={"state.h": FIRST})
    program.save(path / "gru.pt2")
    program.save(path / "gru.onnx")
    return path


@pytest.fixture(params=["gru.pt2", "gru.onnx"])
def gru(folder: Path, request: pytest.FixtureRequest) -> Session:
    return kd_export.open(folder / request.param, trusted=True)


X = torch.linspace(-1, 1, 12).reshape(4, 3)


def test_fifty_steps_with_resets_are_those_of_the_module(gru: Session) -> None:
    net, source = case("gru").module.eval().net, random.Random(0)
    state = FIRST.expand(4, 5)
    torch.manual_seed(0)
    for _ in range(50):
        x = torch.randn(4, 3)
        found = gru.step({"x": x})
        with torch.no_grad():
            y, state = net(x, state)
        torch.testing.assert_close(found["y"], y, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found["next.h"], state, atol=1e-5, rtol=1e-5)
        done = torch.tensor([source.random() < 0.3 for _ in range(4)])
        gru.reset(done)
        state = torch.where(done[:, None], FIRST, state)


class Memory(nn.Module):
    """An LSTM of two layers: the batch is the second dimension of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(3, 4, num_layers=2)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        y, (h, c) = self.cell(x[None], (h, c))
        return y[0], h, c


def test_rows_are_those_of_the_batch_wherever_it_stands(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Keyed(Memory(), ["x", "h", "c"], ["y", ("next", "h"), ("next", "c")])
    shapes = {"x": (2, 3), "h": (2, 2, 4), "c": (2, 2, 4)}
    kd_export.save(
        module,
        tmp_path / "lstm.onnx",
        {name: torch.randn(shape) for name, shape in shapes.items()},
        dynamic={"x": {0: "batch"}, "h": {1: "batch"}, "c": {1: "batch"}},
        state={"h": "next.h", "c": ("next", "c")},
    )
    session, state = kd_export.open(tmp_path / "lstm.onnx"), (torch.zeros(2, 4, 4),) * 2
    for keep in ([1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]):
        with torch.no_grad():
            y, *state = module.eval().net(X, *state)
        torch.testing.assert_close(session.step({"x": X})["y"], y, atol=1e-5, rtol=1e-5)
        kept = torch.tensor(keep)[:, None]
        state = tuple(part * kept for part in state)
        session.reset([not row for row in keep])


def test_the_state_belongs_to_the_session(gru: Session) -> None:
    assert gru.state == {}
    first = gru.step({"x": X})["next.h"].clone()
    gru.step({"x": X})["next.h"].zero_()
    gru.state["state.h"][...] = 0  # type: ignore[index]  # an array of the runtime
    gru.run({"x": X, "state.h": torch.ones(4, 5)})
    expected = gru.run({"x": X, "state.h": gru.run({"x": X, "state.h": first})["next.h"]})
    torch.testing.assert_close(gru.step({"x": X})["y"], expected["y"])
    gru.reset()
    torch.testing.assert_close(gru.step({"x": X})["next.h"], first)


def test_no_step_keeps_the_one_before_alive(folder: Path) -> None:
    session = kd_export.open(folder / "gru.pt2", trusted=True)
    found = session.step({"x": X.clone().requires_grad_()})
    assert found["y"].requires_grad
    session.reset(torch.tensor([True, False, False, False]))
    assert not session.step({"x": X})["y"].requires_grad


def test_a_step_takes_every_form_of_inputs(folder: Path) -> None:
    session = kd_export.open(folder / "gru.onnx")
    container = TensorDict({"x": X, "state": {"h": torch.full((4, 5), 9.0)}}, [4])
    first = session.step(container)
    assert first["next", "h"].shape == (4, 5)
    session.reset()
    array = session.step({"x": X.numpy()})
    assert isinstance(array["y"], np.ndarray)
    np.testing.assert_allclose(array["y"], first["y"].numpy())


def test_a_failing_step_leaves_the_state(gru: Session) -> None:
    gru.step({"x": X})
    before = gru.state["state.h"]
    with pytest.raises(ShapeMismatch, match=r"the state `state\.h` has shape \(4, 5\) from the .*"
                       r"Call `reset\(\)` before a batch of another size"):  # fmt: skip
        gru.step({"x": X[:2]})
    with pytest.raises(KeyMismatch, match=r"`state\.h` is not an input"):
        gru.step({"x": X, "state.h": torch.zeros(4, 5)})
    with pytest.raises(ShapeMismatch, match=r"a mask of 4 rows for the state `state\.h`, got 3"):
        gru.reset([True, False, True])
    for mask in (torch.ones(4), [1, 0, 1, 0], torch.ones(4, 1, dtype=torch.bool), True, "tttt"):
        with pytest.raises(DtypeMismatch, match="one bool for each row"):
            gru.reset(mask)
    assert bool((gru.state["state.h"] == before).all())  # type: ignore[attr-defined]  # an array
    gru.reset()
    assert gru.step({"x": X[:2]})["y"].shape == (2, 5)


def test_a_program_without_state_steps_too(tmp_path: Path) -> None:
    model = case("nested")
    session = kd_export.export(model.module, model.example)._session()
    session.reset(torch.ones(3, dtype=torch.bool))
    x = {"in.x": X}
    assert torch.equal(session.step(x)["out.image"], session.run(x)["out.image"])
    assert session.state == {}


def test_a_state_that_would_fill_the_memory_is_refused(folder: Path) -> None:
    session = kd_export.open(folder / "gru.onnx")
    with pytest.raises(ShapeMismatch, match="would have 50,000,000 numbers"):
        session.step({"x": np.lib.stride_tricks.as_strided(np.zeros(3, "f4"), (10**7, 3), (0, 4))})


def test_schema_and_file_tell_the_state(folder: Path) -> None:
    schema = kd_export.inspect(folder / "gru.onnx")
    assert schema.state == {"state.h": "next.h"}
    assert schema.initial == {"state.h": tuple(FIRST.tolist())}
    assert "float32 (batch, 5), from given numbers, then `next.h`" in repr(schema)


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"h": ("next", "h")}, KeyMismatch, r"input `h` not found"),
        ({"state.h": "nxt.h"}, KeyMismatch, r"output `nxt\.h` not found.*`next\.h`"),
        ({"x": "y"}, ShapeMismatch, r"the state `x` is float32 \(batch, 3\), but its next value"),
        ({"state.h": "y", ("state", "h"): "next.h"}, KeyMismatch, "twice"),
    ],
)
def test_wrong_pairs_name_the_key(
    folder: Path, state: dict[object, object], error: type[ExportError], message: str
) -> None:
    with pytest.raises(error, match=message):
        resolve_state(kd_export.inspect(folder / "gru.onnx"), state)


@pytest.mark.parametrize(
    ("initial", "error", "message"),
    [
        ({"hh": 1.0}, KeyMismatch, "input `hh` not found"),
        ({"x": 1.0}, KeyMismatch, "`initial` names `x`, which is not carried"),
        ({"state.h": 1.0, ("state", "h"): 2.0}, KeyMismatch, "which it names before"),
        ({"state.h": torch.ones(2, 5)}, ShapeMismatch, r"\(2, 5\), which does not .* to \(1, 5\)"),
        (
            {"state.h": torch.ones(5, dtype=torch.float64)},
            DtypeMismatch,
            "cannot be a torch.float64",
        ),
        ({"state.h": "0.5"}, DtypeMismatch, "cannot be a str"),
        ({"state.h": 1j}, DtypeMismatch, "cannot be a complex"),
    ],
)
def test_a_wrong_start_names_the_key(
    folder: Path, initial: dict[object, object], error: type[ExportError], message: str
) -> None:
    with pytest.raises(error, match=message):
        resolve_initial(kd_export.inspect(folder / "gru.onnx"), initial)


def test_a_state_without_dimensions_has_no_rows() -> None:
    module = Keyed(Do(lambda x, n: (x * n, n + 1)), ["x", "n"], ["y", "next"])
    example = {"x": torch.ones(2, 1), "n": torch.tensor(3)}
    session = kd_export.export(module, example, state={"n": "next"}, initial={"n": 7})._session()
    assert [session.step({"x": torch.ones(1, 1)})["y"].item() for _ in range(3)] == [7, 8, 9]
    with pytest.raises(ShapeMismatch, match="expected a mask of 0 rows for the state `n`, got 1"):
        session.reset([True])
    session.reset()
    assert session.step({"x": torch.ones(1, 1)})["next"].item() == 8


def test_a_start_may_differ_by_row_where_the_rows_are_fixed() -> None:
    first = torch.arange(4.0)[:, None]
    module = Keyed(Do(lambda x, h: h + x), ["x", "h"], ["new"])
    example, x = {"x": torch.ones(4, 1), "h": torch.zeros(4, 1)}, {"x": torch.ones(4, 1)}
    session = kd_export.export(
        module, example, dynamic=None, state={"h": "new"}, initial={"h": first}
    )._session()
    assert torch.equal(session.step(x)["new"], first + 1)
    session.reset([False, True, True, False])
    assert session.step(x)["new"].flatten().tolist() == [2, 2, 3, 5]
    session.reset()
    assert torch.equal(session.step(x)["new"], first + 1)


def test_a_step_must_take_something() -> None:
    module = Keyed(nn.Linear(3, 3), ["h"], ["new"])
    with pytest.raises(ExportError, match="a step would take nothing"):
        kd_export.export(module, {"h": torch.ones(2, 3)}, state={"h": "new"})
