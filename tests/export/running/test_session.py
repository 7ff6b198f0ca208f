"""Sessions: inputs in every form, and the state of recurrent programs, set back by rows."""

import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.export.models import Do, Keyed, case, exported
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import kd_export
from kd_core import TensorDict, TensorDictBase, lazy_stack
from kd_export import (
    DtypeMismatch,
    ExportError,
    KeyMismatch,
    Session,
    ShapeMismatch,
    UntrustedArtifact,
)
from kd_export._capture.example import resolve_initial
from kd_export._schema.schema import resolve_state
from kd_nn import TensorDictModule


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artefacts")
    for name in ("nested", "gru"):
        exported(name).save(path / f"{name}.pt2")
    return path


@pytest.fixture
def nested(folder: Path) -> Session:
    return kd_export.open(folder / "nested.pt2", trusted=True)


@pytest.fixture
def gru(folder: Path) -> Session:
    return kd_export.open(folder / "gru.pt2", trusted=True)


X, H = torch.ones(4, 3), torch.zeros(4, 5)


def test_flat_dict_by_wire_name(nested: Session) -> None:
    assert list(nested.run({"in.x": X})) == ["out.image"]


def test_flat_dict_by_key(nested: Session) -> None:
    assert list(nested.run({("in", "x"): X})) == [("out", "image")]


def test_nested_dict(nested: Session) -> None:
    result = nested.run({"in": {"x": X}})
    assert torch.equal(result["out"]["image"], nested.run({"in.x": X})["out.image"])


def test_container_of_which_only_the_inputs_count(nested: Session) -> None:
    td = TensorDict({"in": {"x": X}, "other": X}, batch_size=[4])
    result = nested.run(td)
    assert isinstance(result, TensorDict)
    assert result.batch_size == (4,)
    assert set(result.keys(include_nested=True, leaves_only=True)) == {("out", "image")}


def test_order_of_the_keys_does_not_matter(gru: Session) -> None:
    one, other = gru.run({"x": X, "state.h": H}), gru.run({"state.h": H, "x": X})
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("wanted", ["next.h", ("next", "h")])
def test_outputs_can_be_chosen(gru: Session, wanted: object) -> None:
    assert list(gru.run({"x": X, "state.h": H}, outputs=[wanted])) == ["next.h"]


def test_strided_input_gives_the_same_numbers(nested: Session) -> None:
    strided = torch.randn(3, 4).t()
    assert torch.equal(
        nested.run({"in.x": strided})["out.image"],
        nested.run({"in.x": strided.contiguous()})["out.image"],
    )


def test_results_carry_no_gradient(nested: Session) -> None:
    assert not nested.run({"in.x": X})["out.image"].requires_grad


BAD_SHAPES = [
    (
        torch.ones(4, 2),
        r"expected float32 \(batch, 3\) for `in\.x`, got shape \(4, 2\)\. Dimension 1 must be 3",
    ),
    (torch.ones(3), r"shape \(3,\).*It must have 2 dimensions"),
    (torch.ones(0, 3), r"shape \(0, 3\).*The axis `batch` ranges over 1\.\."),
]


@pytest.mark.parametrize(("x", "message"), BAD_SHAPES)
def test_shape_is_checked(nested: Session, x: Tensor, message: str) -> None:
    with pytest.raises(ShapeMismatch, match=message) as caught:
        nested.run({"in.x": x})
    assert caught.value.key == ("in", "x")
    assert caught.value.got == tuple(x.shape)


def test_axis_has_one_size(gru: Session) -> None:
    with pytest.raises(ShapeMismatch, match=r"`state\.h`.*The axis `batch` has size 4 in `x`"):
        gru.run({"x": X, "state.h": torch.zeros(3, 5)})


@pytest.mark.parametrize("x", [X.double(), X.int(), X.half()])
def test_dtype_is_checked(nested: Session, x: Tensor) -> None:
    with pytest.raises(DtypeMismatch, match=r"for `in\.x`, got dtype .*\.to\(torch\.float32\)"):
        nested.run({"in.x": x})


def test_value_must_be_a_tensor(nested: Session) -> None:
    with pytest.raises(
        DtypeMismatch, match=r"expected a tensor .* for `in\.x`, got a list.*torch\.as_tensor"
    ):
        nested.run({"in.x": [[1.0, 2.0, 3.0]]})


def test_missing_input_names_the_nearest(nested: Session) -> None:
    with pytest.raises(
        KeyMismatch, match=r"input `in\.x` not found.*Did you mean `in\.x` by `in\.xx`"
    ):
        nested.run({"in.xx": X})


def test_unknown_input_is_named(nested: Session) -> None:
    with pytest.raises(
        KeyMismatch, match=r"`y` is not an input of the program; available inputs: `in\.x`"
    ):
        nested.run({"in.x": X, "y": X})


def test_inputs_must_be_a_mapping(nested: Session) -> None:
    with pytest.raises(
        DtypeMismatch, match="expected a mapping or a container of inputs, got a Tensor"
    ):
        nested.run(X)


def test_pt2_demands_trust(folder: Path) -> None:
    with pytest.raises(UntrustedArtifact, match="`trusted=True`"):
        kd_export.open(folder / "nested.pt2")


def test_digest_is_as_good_as_trust(folder: Path) -> None:
    import hashlib

    path = folder / "nested.pt2"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert kd_export.open(path, sha256=digest).run({"in.x": X})
    with pytest.raises(UntrustedArtifact, match=r"SHA-256 of `nested\.pt2` is not the one given"):
        kd_export.open(path, sha256="0" * 64, trusted=True)


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_a_tensor_without_dense_data_is_refused(tmp_path: Path, suffix: str, kind: str) -> None:
    exported("nested").save(tmp_path / f"model.{suffix}")
    session = kd_export.open(tmp_path / f"model.{suffix}", trusted=True)
    x = torch.ones(4, 3)
    x = x.to_sparse() if kind == "sparse" else x.to("meta")
    with pytest.raises(DtypeMismatch, match=r"expected .* for `in.x`, got"):
        session.run({"in": {"x": x}})


def test_a_session_prints_its_table(nested: Session) -> None:
    assert repr(nested).splitlines()[0] == "Session"
    assert repr(nested).splitlines()[1:] == repr(nested.schema).splitlines()[1:]
    assert nested._repr_html_() == nested.schema._repr_html_()


def test_a_program_that_fails_says_so_as_both_families(tmp_path: Path) -> None:
    module = Keyed(torch.nn.Embedding(3, 2), ["i"], ["y"])
    kd_export.save(module, tmp_path / "m.pt2", {"i": torch.tensor([0, 2])})
    kd_export.save(module, tmp_path / "m.onnx", {"i": torch.tensor([0, 2])})
    for suffix in ("pt2", "onnx"):
        session = kd_export.open(tmp_path / f"m.{suffix}", trusted=True)
        with pytest.raises(ExportError, match="the program fails on these inputs") as caught:
            session.run({"i": torch.tensor([0, 99])})
        assert isinstance(caught.value, RuntimeError)


def test_keys_may_be_words_that_the_runner_uses(tmp_path: Path) -> None:
    names = ["len", "inputs", "slice", "Tensor", "shape", "KeyError"]
    module = Keyed(Do(lambda *tensors: sum(tensors)), [*names], ["y"])
    example = {name: torch.ones(2, 3) for name in names}
    kd_export.save(module, tmp_path / "m.pt2", example)
    session = kd_export.open(tmp_path / "m.pt2", trusted=True)
    assert session.run(example)["y"].sum() == 36


ARRANGED = [
    {"in": {"x": X}},
    {"in.x": X},
    {("in", "x"): X},
    {"in": {"x": X.double()}},
    {"in": {"x": X[:, :2]}},
    {"in": {"x": X.t().contiguous().t()}},
    {"in": {"x": X[:0]}},
    {"in": {"x": X, "y": X}},
    {"in": {"x": X}, "y": X},
    {"in": {"y": X}},
    {"in": {"x": {"x": X}}},
    {"in": {"x": None}},
    {"in": {}},
    {"in": X},
    {"x": {"in": X}},
    {},
    OrderedDict({"in": OrderedDict({"x": X})}),
    TensorDict({"in": {"x": X}}, [4]),
    TensorDict({"in": {"x": X}, "y": X}, [4]),
    TensorDict({"in": {"x": X}}, []).lock_(),
    TensorDict({"in": {"x": X.double()}}, [4]),
    TensorDict({"in": {"y": X}}, [4]),
    TensorDict({"in": X}, [4]),
    TensorDict({}, [4]),
    lazy_stack([TensorDict({"in": {"x": row}}) for row in X]),
]


@pytest.mark.parametrize("x", ARRANGED, ids=range(len(ARRANGED)))
def test_the_quick_way_gives_what_the_checks_give(nested: Session, x: object) -> None:
    found, expected = outcome(nested.run, x), outcome(lambda x: nested._checked(x, None), x)
    assert found == expected


def test_a_key_with_a_dot_is_not_the_name_of_a_nested_one(tmp_path: Path) -> None:
    module = TensorDictModule(lambda x, y: x + y, in_keys=["a.b", ("c", "d")], out_keys=["o.p"])
    kd_export.save(module, tmp_path / "m.pt2", {"a.b": X, "c": {"d": X}})
    session = kd_export.open(tmp_path / "m.pt2", trusted=True)
    for x in (
        {"a.b": X, "c": {"d": X}},
        {"a%2Eb": X, "c.d": X},
        {"a.b": X, "c.d": X},
        {"a": {"b": X}, "c": {"d": X}},
        TensorDict({"a.b": X, "c": {"d": X}}, [4]),
    ):
        assert outcome(session.run, x) == outcome(lambda x: session._checked(x, None), x)


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_a_key_with_a_dot_comes_back_as_it_was_given(tmp_path: Path, suffix: str) -> None:
    module = TensorDictModule(
        lambda x, h: (x + h, x * 2), in_keys=["a.b", "h.0"], out_keys=["h.1", ("n", "o.p")]
    )
    example = {"a.b": X, "h.0": X}
    path = tmp_path / f"m{suffix}"
    kd_export.save(module, path, example, state={"h.0": "h.1"})
    session = kd_export.open(path, trusted=True)
    assert list(session.run({"a.b": X, "h.0": X})) == ["h.1", "n.o%2Ep"]
    assert list(session.step({"a.b": X})) == ["h.1", "n.o%2Ep"]
    assert list(session.run({"a%2Eb": X, "h%2E0": X})) == ["h%2E1", "n.o%2Ep"]
    assert list(session.run({("a.b",): X, ("h.0",): X})) == [("h.1",), ("n", "o.p")]


def test_a_key_with_a_dot_gives_way_to_a_nested_one(tmp_path: Path) -> None:
    module = TensorDictModule(lambda x: (x, x + 1), in_keys=["x"], out_keys=["o.p", ("o", "p")])
    kd_export.save(module, tmp_path / "m.pt2", {"x": X})
    session = kd_export.open(tmp_path / "m.pt2", trusted=True)
    found = session.run({"x": X})
    assert list(found) == ["o%2Ep", "o.p"]
    assert torch.equal(found["o.p"], X + 1)


def outcome(call: Callable[[object], object], x: object) -> object:
    """Return what a call gives as plain data, or how it fails."""
    try:
        found = call(x)
    except ExportError as error:
        return type(error), str(error)
    if isinstance(found, TensorDictBase):
        found = (found.batch_size, found.is_locked, found.to_dict())
    return tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, Tensor) else leaf, found)


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_a_result_without_the_batch_of_the_container_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"total{suffix}"
    total = TensorDictModule(lambda x: x.sum(0), ["x"], [("out", "total")])
    kd_export.save(total, path, {"x": torch.ones(2, 3)})
    session = kd_export.open(path, trusted=True)
    message = r"`out.total` must start with the batch size \(4,\) .* got \(3,\)\. Pass a dict"
    with pytest.raises(ShapeMismatch, match=message):
        session.run(TensorDict({"x": torch.ones(4, 3)}, [4]))
    result = session.run(TensorDict({"x": torch.ones(4, 3)}))
    assert result["out", "total"].sum() == 12


STATE = {("state", "h"): ("next", "h")}
FIRST = torch.tensor([0.5, 0.0, -1.0, 0.25, 1 / 3])


@pytest.fixture(scope="module")
def carried_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artefacts")
    model = case("gru")
    program = kd_export.export(model.module, model.example, state=STATE, initial={"state.h": FIRST})
    program.save(path / "gru.pt2")
    program.save(path / "gru.onnx")
    return path


@pytest.fixture(params=["gru.pt2", "gru.onnx"])
def carried(carried_files: Path, request: pytest.FixtureRequest) -> Session:
    return kd_export.open(carried_files / request.param, trusted=True)


ROWS = torch.linspace(-1, 1, 12).reshape(4, 3)


def test_fifty_steps_with_resets_are_those_of_the_module(carried: Session) -> None:
    net, source = case("gru").module.eval().net, random.Random(0)
    state = FIRST.expand(4, 5)
    torch.manual_seed(0)
    for _ in range(50):
        x = torch.randn(4, 3)
        found = carried.step({"x": x})
        with torch.no_grad():
            y, state = net(x, state)
        torch.testing.assert_close(found["y"], y, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found["next.h"], state, atol=1e-5, rtol=1e-5)
        done = torch.tensor([source.random() < 0.3 for _ in range(4)])
        carried.reset(done)
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
            y, *state = module.eval().net(ROWS, *state)
        torch.testing.assert_close(session.step({"x": ROWS})["y"], y, atol=1e-5, rtol=1e-5)
        kept = torch.tensor(keep)[:, None]
        state = tuple(part * kept for part in state)
        session.reset([not row for row in keep])


def test_the_state_belongs_to_the_session(carried: Session) -> None:
    assert carried.state == {}
    first = carried.step({"x": ROWS})["next.h"].clone()
    carried.step({"x": ROWS})["next.h"].zero_()
    carried.state["state.h"][...] = 0  # type: ignore[index]  # an array of the runtime
    carried.run({"x": ROWS, "state.h": torch.ones(4, 5)})
    expected = carried.run(
        {"x": ROWS, "state.h": carried.run({"x": ROWS, "state.h": first})["next.h"]}
    )
    torch.testing.assert_close(carried.step({"x": ROWS})["y"], expected["y"])
    carried.reset()
    torch.testing.assert_close(carried.step({"x": ROWS})["next.h"], first)


def test_no_step_keeps_the_one_before_alive(carried_files: Path) -> None:
    session = kd_export.open(carried_files / "gru.pt2", trusted=True)
    found = session.step({"x": ROWS.clone().requires_grad_()})
    assert found["y"].requires_grad
    session.reset(torch.tensor([True, False, False, False]))
    assert not session.step({"x": ROWS})["y"].requires_grad


def test_a_step_takes_every_form_of_inputs(carried_files: Path) -> None:
    session = kd_export.open(carried_files / "gru.onnx")
    container = TensorDict({"x": ROWS, "state": {"h": torch.full((4, 5), 9.0)}}, [4])
    first = session.step(container)
    assert first["next", "h"].shape == (4, 5)
    session.reset()
    array = session.step({"x": ROWS.numpy()})
    assert isinstance(array["y"], np.ndarray)
    np.testing.assert_allclose(array["y"], first["y"].numpy())


def test_a_failing_step_leaves_the_state(carried: Session) -> None:
    carried.step({"x": ROWS})
    before = carried.state["state.h"]
    with pytest.raises(ShapeMismatch, match=r"the state `state\.h` has shape \(4, 5\) from the .*"
                       r"Call `reset\(\)` before a batch of another size"):  # fmt: skip
        carried.step({"x": ROWS[:2]})
    with pytest.raises(KeyMismatch, match=r"`state\.h` is not an input"):
        carried.step({"x": ROWS, "state.h": torch.zeros(4, 5)})
    with pytest.raises(ShapeMismatch, match=r"a mask of 4 rows for the state `state\.h`, got 3"):
        carried.reset([True, False, True])
    for mask in (torch.ones(4), [1, 0, 1, 0], torch.ones(4, 1, dtype=torch.bool), True, "tttt"):
        with pytest.raises(DtypeMismatch, match="one bool for each row"):
            carried.reset(mask)
    assert bool((carried.state["state.h"] == before).all())  # type: ignore[attr-defined]  # an array
    carried.reset()
    assert carried.step({"x": ROWS[:2]})["y"].shape == (2, 5)


def test_a_program_without_state_steps_too() -> None:
    session = exported("nested")._session()
    session.reset(torch.ones(3, dtype=torch.bool))
    x = {"in.x": ROWS}
    assert torch.equal(session.step(x)["out.image"], session.run(x)["out.image"])
    assert session.state == {}


def test_a_state_that_would_fill_the_memory_is_refused(carried_files: Path) -> None:
    session = kd_export.open(carried_files / "gru.onnx")
    with pytest.raises(ShapeMismatch, match="would have 50,000,000 numbers"):
        session.step({"x": np.lib.stride_tricks.as_strided(np.zeros(3, "f4"), (10**7, 3), (0, 4))})


def test_schema_and_file_tell_the_state(carried_files: Path) -> None:
    schema = kd_export.inspect(carried_files / "gru.onnx")
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
    carried_files: Path, state: dict[object, object], error: type[ExportError], message: str
) -> None:
    with pytest.raises(error, match=message):
        resolve_state(kd_export.inspect(carried_files / "gru.onnx"), state)


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
    carried_files: Path, initial: dict[object, object], error: type[ExportError], message: str
) -> None:
    with pytest.raises(error, match=message):
        resolve_initial(kd_export.inspect(carried_files / "gru.onnx"), initial)


def test_a_state_without_dimensions_has_no_rows() -> None:
    module = Keyed(Do(lambda x, n: (x * n, n + 1)), ["x", "n"], ["y", "next"])
    example = {"x": torch.ones(2, 1), "n": torch.tensor(3)}
    with pytest.raises(DtypeMismatch, match="`n`, which is int64, cannot be a float"):
        kd_export.export(module, example, state={"n": "next"}, initial={"n": 0.5})
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
