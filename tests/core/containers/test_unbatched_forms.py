"""A tensor without batch dimensions in keys, files, copies, gradients and trees."""

import copy
import io
import multiprocessing
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.core.containers.unbatched import fixed, make, rows_of, wrapper
from torch import Tensor
from torch.utils import _pytree as pytree

from kd_core import (
    InvalidValue,
    TensorDict,
    UnbatchedTensor,
    default_is_leaf,
    lazy_stack,
)
from kd_core.convert import from_schema


def test_keys_and_sizes_count_it_as_a_leaf() -> None:
    td = make()
    assert list(td.keys(True, True)) == ["a", "u", ("n", "u"), ("n", "b")]
    assert len(td.keys(True, True)) == 4
    assert ("n", "u") in td.keys(True, True)
    assert dict(td.items(True, True))["n", "u"].data_ptr() == td["n", "u"].data_ptr()
    assert [leaf.ndim for leaf in td.values(True, True)] == [1, 2, 1, 2]
    assert [type(value) for value in td.values()] == [Tensor, UnbatchedTensor, TensorDict]
    again = TensorDict(dict(td.items(True, True, sort=True)), td.batch_size)
    assert wrapper(again).data is wrapper(td).data
    assert default_is_leaf(UnbatchedTensor)
    assert td.non_tensor_items(True) == ()
    assert not td.is_non_tensor("u")
    assert "u" in td.filter_non_tensor_data()
    assert td.get_item_shape("u") == (2, 3)
    assert td.bytes() == 4 * (4 + 6 + 5 + 8)
    assert td.entry_class("u") is UnbatchedTensor
    assert "u           (2, 3)  float32" in td.summary()
    flat = td.flatten_keys()
    assert wrapper(flat, "n.u").data is wrapper(td, ("n", "u")).data
    assert wrapper(flat.unflatten_keys(), ("n", "u")).data is wrapper(td, ("n", "u")).data


def test_plain_forms_hold_what_can_be_stored_again() -> None:
    td = make()
    plain = td.to_dict()
    assert isinstance(plain["u"], UnbatchedTensor)
    assert plain["u"].data is wrapper(td).data
    assert wrapper(TensorDict(plain, td.batch_size)).data is wrapper(td).data
    rows = td.tolist()
    assert isinstance(rows, list)
    assert isinstance(rows[0]["u"], UnbatchedTensor)
    assert isinstance(td.to_namedtuple()[1], UnbatchedTensor)  # type: ignore[index]  # a tuple
    assert td.to_dict(convert_tensors=True)["u"] == fixed().tolist()
    assert td.numpy()["u"].shape == (2, 3)  # type: ignore[attr-defined]  # an array
    assert td.state_dict(flatten=True)["n.u"] is wrapper(td, ("n", "u")).data


def test_the_schema_says_what_it_is() -> None:
    schema = make().schema()
    assert schema["u"] == ("unbatched", (2, 3), torch.float32)
    made = from_schema(schema, [9])
    assert made["u"].shape == (2, 3)
    assert made["a"].shape == (9,)


def test_state_dicts_bring_it_back() -> None:
    state = make(3.0).state_dict()
    td = make()
    place = td["u"]
    td.load_state_dict(state)
    assert place.tolist() == fixed(3.0).tolist()
    new = TensorDict().load_state_dict(state, assign=True)
    assert isinstance(cast("object", new.get(("n", "u"))), UnbatchedTensor)
    assert "__unbatched" not in rows_of(make()).state_dict()


def test_copies_and_pickles_bring_it_back() -> None:
    td = make(3.0)
    file = io.BytesIO()
    torch.save(td, file)
    file.seek(0)
    copies = [
        pickle.loads(pickle.dumps(td, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL)
    ]
    for other in (*copies, torch.load(file, weights_only=True), copy.deepcopy(td), td.clone()):
        assert other["u"].data_ptr() != td["u"].data_ptr()
        assert bool((other == td).all())
        assert wrapper(other).batch_size == (4,)
    assert wrapper(copy.copy(td)).data is wrapper(td).data


def test_stores_bring_it_back(tmp_path: Path) -> None:
    td = make(3.0)
    for name in ("store", "store.kd"):
        td.save(tmp_path / name)
        loaded = TensorDict.load(tmp_path / name)
        assert bool((loaded == td).all())
        assert wrapper(loaded).batch_size == (4,)
    assert TensorDict.load(tmp_path / "store", keys=["u"])["u"].tolist() == fixed(3.0).tolist()
    with pytest.raises(InvalidValue, match="entry `u` is an `UnbatchedTensor`, one tensor for all"):
        td.append_to(tmp_path / "store")
    mapped = td.memmap(tmp_path / "arena")
    assert mapped.is_memmap()
    mapped.set_("u", 8.0)
    assert float(TensorDict.load_memmap(tmp_path / "arena")["u"][0, 0]) == 8.0


def test_a_new_arena_has_its_values(tmp_path: Path) -> None:
    row = make(3.0)[0]
    data = row.expand(9).memmap_like(tmp_path / "arena")
    assert data["u"].tolist() == fixed(3.0).tolist()
    data[1] = row
    assert data["a"].shape == (9,)


def _add_one(td: TensorDict) -> None:
    td.add_(1)


def test_processes_share_it() -> None:
    td = make().share_memory_()
    assert td.is_shared()
    process = multiprocessing.get_context("fork").Process(target=_add_one, args=(td,))
    process.start()
    process.join(60)
    assert td["n", "u"].tolist() == [2.0] * 5


def test_gradients_flow_through_it() -> None:
    td = make().requires_grad_()
    assert td["u"].requires_grad
    torch.autograd.backward((td * 2).sum(reduce=True))
    grad = td.grad
    assert grad is not None
    assert grad["u"].tolist() == fixed(2.0).tolist()
    assert wrapper(grad).batch_size == (4,)
    td.zero_grad()
    found = torch.func.grad(lambda each: (each["a"].sum() * each["u"]).sum())(make())
    assert found["u"].tolist() == fixed(6.0).tolist()


def test_it_is_one_child_of_a_tree() -> None:
    td = make()
    leaves, spec = pytree.tree_flatten(td)
    assert [tuple(leaf.shape) for leaf in leaves] == [(4,), (2, 3), (5,), (4, 2)]
    again = pytree.tree_unflatten([leaf * 2 for leaf in leaves], spec)
    assert again["u"].tolist() == fixed(2.0).tolist()
    assert again.batch_size == wrapper(again).batch_size == (4,)
    assert pytree.tree_structure(make(5.0, rows=2)) == spec
    only = TensorDict({"u": UnbatchedTensor(fixed())}, [7])
    assert pytree.tree_map(torch.neg, only).batch_size == (7,)


def test_vmap_does_not_map_it() -> None:
    td = make(rows=2)  # as many rows as the first dimension of `u`
    with pytest.raises(InvalidValue, match=r"`u` is an `UnbatchedTensor`.* `in_dims=None`"):
        torch.vmap(lambda row: row * 2)(td.select("a", "u"))
    with pytest.raises(ValueError, match="same size in the mapped dimension"):
        torch.vmap(lambda row: row * 2)(td)  # torch compares the sizes first

    def scaled(row: TensorDict, u: torch.Tensor) -> torch.Tensor:
        return row["a"] * u.sum()

    result = torch.vmap(scaled, (0, None))(td.select("a"), td["u"])
    assert result.tolist() == [0.0, 6.0]
    assert torch.vmap(lambda x, row: row["u"].sum() + x, (0, None))(torch.ones(3), td).shape == (3,)


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_tree_of_dimensions_passes_it_whole(stacked: bool, rows: int) -> None:
    dense = TensorDict({"a": torch.ones(rows), "u": UnbatchedTensor(fixed())}, [rows])
    td: Any = lazy_stack(dense.unbind(0)) if stacked else dense
    dims = pytree.tree_map(lambda leaf: 0 if leaf.ndim == 1 else None, td)
    seen: list[torch.Size] = []

    def call(row: TensorDict) -> TensorDict:
        seen.append(row["u"].shape)
        return row.set("b", row["a"] + row["u"].sum())

    below = torch.vmap(lambda each: call(each["n"]), ({"n": dims},))({"n": td})
    for made in (torch.vmap(call, (dims,))(td), below):
        assert torch.equal(made["u"], fixed())
        assert made["b"].tolist() == [1 + fixed().sum().item()] * rows
    assert seen == [fixed().shape] * 2
    assert torch.equal(torch.vmap(lambda row: row, (dims,), chunk_size=rows)(td)["u"], fixed())


@pytest.mark.parametrize("out_dim", [0, 1])
def test_what_computed_in_vmap_leaves_it_as_one_tensor_or_as_rows(out_dim: int) -> None:
    """A result with other values along the new dimension has them in its rows, not in each."""
    td = make(rows=4).reshape(2, 2)
    scales = torch.arange(3.0)
    partly = torch.vmap(lambda x, td: td.update({"a": td["a"] * x}), (0, None))(scales, td.copy())
    assert partly.batch_size == wrapper(partly).batch_size == (3, 2, 2)
    assert torch.equal(wrapper(partly).data, fixed())
    scaled = torch.vmap(lambda scale, td: td * scale, (0, None), out_dim)(scales, td)
    for place, scale in enumerate(scales):
        each = scaled[place] if out_dim == 0 else scaled[:, place]
        assert torch.equal(each["u"], (fixed() * scale).expand(2, 2, *fixed().shape))
        assert torch.equal(each["a"], (td * scale)["a"])
    nested = torch.vmap(
        lambda one: torch.vmap(lambda two, td: td * two * one, (0, None))(scales, td)
    )(scales)
    assert torch.equal(nested[2, 1]["u"], (fixed() * 2).expand(2, 2, *fixed().shape))
