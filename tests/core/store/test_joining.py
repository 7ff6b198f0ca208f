"""Parts of a store that become one: the content is the same, and no class is asked for."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.content import assert_same
from tests.core.store.trees import DTYPES, trees
from torch import Tensor

from kd_core import (
    FormatError,
    KdError,
    LazyStackedTensorDict,
    NonTensorData,
    TensorClass,
    TensorDict,
    TensorDictBase,
    UnbatchedTensor,
    lazy_stack,
    store,
)
from kd_core import _registry as registry
from kd_core.__main__ import main
from kd_core._store.manifest import canonical, manifest_of, text_of


class Point(TensorClass):
    x: Tensor
    note: str = "p"


@settings(max_examples=15, deadline=None)
@given(tree=trees(), times=st.integers(1, 3))
def test_content_stays(
    tree: TensorDictBase, times: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("rows")
    tree.save(path)
    try:
        for _ in range(times - 1):
            tree.append_to(path)
        before = TensorDict.load(path).clone()
    except KdError:  # rows that cannot be appended: one part
        tree.save(path)
        before = TensorDict.load(path).clone()
    store.compact(path)
    assert store.inspect(path).parts == 1
    after = TensorDict.load(path, verify="full")
    assert_same(after, before)
    assert type(after) is type(before)
    assert after.names == before.names


def test_ragged_rows_aliases_and_stacks_are_joined(tmp_path: Path) -> None:
    for sizes in ((1, 3), (2, 0), (4,)):
        tokens = [torch.arange(size * 2.0).view(size, 2) for size in sizes]
        nested = torch.nested.nested_tensor(tokens, layout=torch.jagged)
        shared = torch.ones(len(sizes))
        TensorDict({"t": nested, "a": shared, "b": shared}, [len(sizes)]).append_to(tmp_path / "td")
        members = [TensorDict({"x": torch.ones(size)}) for size in sizes]
        lazy_stack(members).append_to(tmp_path / "stack")
    for name in ("td", "stack"):
        store.compact(tmp_path / name)
        store.compact(tmp_path / name)  # once more, of one part
    loaded = TensorDict.load(tmp_path / "td", verify="full")
    assert [row.sum().item() for row in loaded["t"].unbind()] == [1, 15, 6, 0, 28]
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert loaded["a"].tolist() == [1] * 5
    stack = TensorDictBase.load(tmp_path / "stack", verify="full")
    assert isinstance(stack, LazyStackedTensorDict)
    assert [len(member["x"]) for member in stack.unbind(0)] == [1, 3, 2, 0, 4]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_is_joined(tmp_path: Path) -> None:
    octets = torch.arange(48, dtype=torch.uint8)
    bits = {
        str(dtype): (octets % 2).bool() if dtype is torch.bool else octets.view(dtype)
        for dtype in DTYPES
    }
    td = TensorDict({name: leaf[:3].view(3, 1) for name, leaf in bits.items()}, [3])
    for _ in range(2):
        td.append_to(tmp_path)
    store.compact(tmp_path)
    loaded = TensorDict.load(tmp_path, verify="full")
    assert loaded.batch_size == (6,)
    for name, leaf in td.items():
        twice = leaf.contiguous().view(torch.uint8).view(-1).tolist() * 2
        assert loaded[name].contiguous().view(torch.uint8).view(-1).tolist() == twice


def test_the_command_needs_no_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "points"
    with monkeypatch.context() as patch:
        for name in ("TYPES", "CLASSES", "_TYPE_NAMES", "_CLASS_NAMES"):
            patch.setattr(registry, name, {})
        patch.setattr("kd_core._store.codec.CLASSES", registry.CLASSES)
        patch.setattr("kd_core._store.manifest.TYPES", registry.TYPES)
        store.register_class(Point, "joining.Point")
        store.register_type(
            date, "joining.date", encode=str, decode=lambda text: date.fromisoformat(str(text))
        )
        days = [date(2030, 1, 2), date(2031, 1, 2)]
        td = TensorDict({"p": Point(torch.ones(2), batch_size=[2]), "day": days}, [2])
        for _ in range(2):
            td.append_to(path)
        known = registry._TYPE_NAMES, registry._CLASS_NAMES
    with (
        pytest.warns(UserWarning, match=r"joining\.Point"),
        pytest.raises(FormatError, match=r"the type 'joining\.date' is not registered"),
    ):
        TensorDict.load(path)
    assert main(["compact", str(path)]) == 0
    assert "joining.Point (version 1) [4]" in capsys.readouterr().out
    monkeypatch.setattr(registry, "_TYPE_NAMES", known[0])
    monkeypatch.setattr(registry, "_CLASS_NAMES", known[1])
    loaded = TensorDict.load(path, verify="full")
    point: object = loaded.get("p")
    assert type(point) is Point
    assert loaded["day"] == days * 2


@pytest.mark.parametrize(
    "tree",
    [
        {"cat": [{"td": {"batch": [1], "entries": 3}}, {"td": {"batch": [1], "entries": 3}}]},
        {"cat": [{"td": {}}, {"td": {}}]},
        {"cat": [{"td": {"batch": [1], "entries": []}}, {"lazy": {}}]},
        {"cat": [{"td": {"batch": [], "entries": []}}] * 2},
        {"cat": [{"td": {"batch": ["a"], "entries": []}}] * 2},
        {"cat": []},
        {"cat": [7]},
        {"cat": [{"cat": [{"td": {"batch": [1], "entries": []}}]}] * 2},
        {"td": {"batch": [0], "entries": [["a", {"rows": {}}]]}},
        {"data": {"value": 1}},
    ],
)
def test_a_tree_that_is_not_valid_is_refused(tree: object, tmp_path: Path) -> None:
    TensorDict({}, [1]).save(tmp_path)
    place = tmp_path / "manifest.json"
    old = manifest_of(place.read_bytes(), "the manifest")
    data = text_of(old._replace(tree=tree))
    assert canonical(tree) in data
    place.write_bytes(data)
    with pytest.raises(KdError):
        store.compact(tmp_path)
    assert place.read_bytes() == data


@pytest.mark.parametrize("name", ["td", "td.safetensors"])
def test_tensors_that_are_no_rows_are_kept(name: str, tmp_path: Path) -> None:
    fixed, moment = torch.arange(2.0), torch.arange(3.0)
    ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(3)], layout=torch.jagged)
    members = [
        TensorDict({"u": UnbatchedTensor(fixed + n), "o": NonTensorData([moment + n])})
        for n in (1, 2)
    ]
    entries = {
        "u": UnbatchedTensor(fixed),
        "r": UnbatchedTensor(ragged),
        "o": NonTensorData({"exp_avg": moment, "again": moment, "step": (1, fixed)}),
        "a": torch.zeros(2, 3),  # of the same size
        "n": {"b": fixed + 9, "u": UnbatchedTensor(moment * 2)},
        "s": lazy_stack(members),
    }
    path = tmp_path / name
    TensorDict(entries, [2]).save(path)
    for _ in range(2):
        if path.is_dir():
            store.compact(path)
        store.check(path)
        lines = store.inspect(path).lines
        assert {"  u: unbatched float32 [2]", "  r: unbatched jagged float32, 2 rows"} <= {*lines}
        found = TensorDict.load(path, verify="full")
        assert torch.equal(found["u"], fixed)
        assert [row.tolist() for row in found["r"].unbind()] == [[1], [1] * 3]
        state: Any = found["o"]
        assert torch.equal(state["exp_avg"], moment)
        assert state["again"] is state["exp_avg"]
        assert torch.equal(state["step"][1], fixed)
        assert torch.equal(found["a"], torch.zeros(2, 3))
        assert torch.equal(found["n", "u"], moment * 2)
        stack: Any = found.get("s")
        assert [row["u"].tolist() for row in stack.unbind(0)] == [[1, 2], [2, 3]]
        assert [row["o"][0].tolist() for row in stack.unbind(0)] == [[1, 2, 3], [2, 3, 4]]
