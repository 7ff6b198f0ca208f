"""All leaves in one tensor: what is packed comes out again, and what cannot be packed is named."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.content import assert_same, containers
from tests.core.kinds import FACTORIES
from torch import Tensor

from kd_core import (
    InvalidArgument,
    InvalidValue,
    KeySetMismatch,
    OutOfRange,
    PackLayout,
    ShapeMismatch,
    TensorClass,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)


class Point(TensorClass):
    """Two fields."""

    x: Tensor
    y: Tensor


def sample() -> TensorDict:
    entries = {"a": torch.arange(6.0).reshape(3, 2), "b": {"c": torch.ones(3, 2, 2)}}
    return TensorDict(entries, [3])


def by_hand(td: TensorDictBase, dim: int) -> Tensor:
    """Pack with the functions of torch."""
    leaves = [leaf.unsqueeze(-1).flatten(td.ndim) for leaf in td.values(True, True)]
    empty = torch.zeros(*td.batch_size, 0)
    return torch.cat([empty, *leaves], -1).movedim(-1, dim)


@settings(max_examples=60, deadline=None)
@given(td=containers(dtypes=(torch.float32,), data=False), data=st.data())
def test_what_is_packed_comes_out_again(td: TensorDict, data: st.DataObject) -> None:
    dim = data.draw(st.integers(-td.ndim - 1, td.ndim))
    flat, layout = td.pack(dim)
    assert torch.equal(flat.nan_to_num(7), by_hand(td, dim).nan_to_num(7))
    assert layout.numel == flat.shape[layout.dim] == flat.shape[dim]
    assert_same(layout.unpack(flat), td)


@pytest.mark.parametrize("kind", FACTORIES)
def test_every_kind_is_packed(kind: str) -> None:
    td = FACTORIES[kind]().filter_non_tensor_data().float()
    flat, layout = td.pack()
    assert_same(layout.unpack(flat), td.to_tensordict())


def test_classes_and_empty_containers_are_kept() -> None:
    point = Point(torch.ones(3, 2), torch.zeros(3), batch_size=[3])
    flat, layout = TensorDict({"p": point, "e": {}}, [3]).pack()
    row = layout.unpack(flat[0])
    assert isinstance(row.get("p"), Point)
    assert "e" in row
    point_layout: PackLayout[Point] = point.pack()[1]
    assert point_layout.unpack(flat).x.shape == (3, 2)


def test_leaves_are_views_of_the_tensor() -> None:
    flat, layout = sample().pack()
    made = layout.unpack(flat)
    flat.zero_()
    assert not made["b", "c"].any()


def test_rows_may_be_selected_stacked_and_converted() -> None:
    flat, layout = sample().pack(0)
    assert layout.unpack(torch.stack([flat, flat]).double()).batch_size == (2, 3)
    assert layout.unpack(flat.double())["a"].dtype is torch.float64
    assert layout.unpack(flat[:, 1:])["a"].tolist() == [[2, 3], [4, 5]]


def test_the_device_of_the_tensor_is_taken() -> None:
    flat, layout = sample().to("cpu").pack()
    assert layout.unpack(flat).device == torch.device("cpu")
    assert layout.unpack(flat.to("meta")).device == torch.device("meta")


def test_a_layout_gives_the_order() -> None:
    flat, layout = sample().pack(0)
    other = TensorDict({"b": {"c": torch.ones(3, 2, 2)}, "a": sample()["a"]}, [3])
    assert torch.equal(other.pack(layout=layout)[0], flat)
    with pytest.raises(KeySetMismatch, match=r"`\('b', 'c'\)` only in the layout"):
        other.select("a").pack(layout=layout)
    other["a"] = torch.ones(3, 2, 1)
    with pytest.raises(ShapeMismatch, match=r"`a` must have the shape \(2,\) of the layout"):
        other.pack(layout=layout)


def test_layouts_are_compared_and_pickled() -> None:
    layout = sample().pack()[1]
    copy = pickle.loads(pickle.dumps(layout))
    assert copy == layout
    assert {copy, layout, sample()[0].pack()[1]} == {layout}
    assert copy != sample().pack(0)[1]
    assert copy.unpack(torch.zeros(6))["b", "c"].shape == (2, 2)


def test_functions_and_compiled_code_pack() -> None:
    td = sample()
    flat, layout = td.pack()
    assert torch.equal(torch.vmap(lambda row: row.pack()[0])(td), flat)
    assert torch.vmap(layout.unpack)(flat).batch_size == (3,)
    grad = torch.func.grad(lambda vector: layout.unpack(vector)["b", "c"].sum())(flat)
    assert grad[0].tolist() == [0, 0, 1, 1, 1, 1]

    @torch.compile(fullgraph=True, backend="eager")
    def twice(td: TensorDict) -> TensorDict:
        flat, layout = td.pack()
        return layout.unpack(flat * 2)

    assert_same(twice(td), td * 2)


def test_what_cannot_be_packed_is_named() -> None:
    td = sample()
    with pytest.raises(TypeError, match=r"entry `s` is not a tensor .* `td.filter_non_tensor"):
        td.clone().set("s", "word").pack()
    with pytest.raises(InvalidArgument, match=r"got torch.int64 in entry `i` after torch.float32"):
        td.clone().set("i", torch.arange(3)).pack()
    with pytest.raises(InvalidValue, match=r"entry `j` is of layout torch.sparse_coo"):
        td.clone().set("j", torch.eye(3).to_sparse()).pack()
    with pytest.raises(ShapeMismatch, match="entry `a` is ragged"):
        lazy_stack([TensorDict({"a": torch.ones(size)}) for size in (1, 2)]).pack()
    with pytest.raises(OutOfRange, match="must be between -2 and 1"):
        td.pack(2)


@pytest.mark.parametrize("shape", [(), (3, 5), (6, 3)])
def test_a_tensor_of_another_size_is_refused(shape: tuple[int, ...]) -> None:
    layout = sample().pack()[1]
    with pytest.raises(ShapeMismatch, match="must have 6 features in dimension -1, got shape"):
        layout.unpack(torch.zeros(shape))


def test_a_layout_does_not_change() -> None:
    layout = TensorDict({"a": torch.zeros(3, 2), "b": torch.ones(3)}, [3]).pack()[1]
    for name in ("keys", "dim", "new"):
        with pytest.raises(AttributeError, match=f"cannot set `{name}`: a layout does not change"):
            setattr(layout, name, 1)
    with pytest.raises(AttributeError, match="cannot delete `dim`"):
        del layout.dim
    for made in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout), copy.copy(layout)):
        assert made == layout
        assert hash(made) == hash(layout)
        assert made.unpack(torch.zeros(2, 3)).batch_size == (2,)
