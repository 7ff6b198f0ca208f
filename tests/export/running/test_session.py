from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.export.models import Do, Keyed, case
from torch import Tensor
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
from kd_nn import TensorDictModule


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artefacts")
    for name in ("nested", "gru"):
        model = case(name)
        kd_export.save(model.module, path / f"{name}.pt2", model.example)
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
    model = case("nested")
    kd_export.save(model.module, tmp_path / f"model.{suffix}", model.example)
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
