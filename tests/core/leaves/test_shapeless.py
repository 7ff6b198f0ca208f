"""Nested tensors of the layout `torch.strided`, which have no shape, are refused by name."""

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kd_core import InvalidValue, TensorClass, TensorDict, UnbatchedTensor, lazy_stack, stack


def shapeless() -> Tensor:
    rows = [torch.zeros(2), torch.zeros(3), torch.zeros(1)]
    return torch.nested.nested_tensor(rows, layout=torch.strided)


ONE = torch.ones(1)


def batched() -> TensorDict:
    return TensorDict({"a": torch.zeros(2, 3), "x": {"b": torch.zeros(2)}}, [2])


def alone() -> TensorDict:
    return TensorDict({"a": shapeless()})


class Sample(TensorClass):
    a: Tensor


CALLS: dict[str, Callable[[], object]] = {
    "a container": lambda: TensorDict({"a": shapeless()}, [2]),
    "two batch dimensions": lambda: TensorDict({"a": shapeless()}, [2, 3]),
    "many entries": lambda: TensorDict({f"a{i}": shapeless() for i in range(30)}, [2]),
    "a device": lambda: TensorDict({"a": shapeless()}, [2], device="cpu"),
    "below a container": lambda: TensorDict({"n": alone()}, [2]),
    "a tensor class": lambda: Sample.from_dict({"a": shapeless()}, batch_size=[2]),
    "from_dict": lambda: TensorDict.from_dict({"a": shapeless()}, batch_size=[2]),
    "batch_size": lambda: setattr(alone(), "batch_size", [2]),
    "set": lambda: batched().set("a", shapeless()),
    "update": lambda: batched().update({"a": shapeless()}),
    "update in place": lambda: batched().update({"a": shapeless()}, inplace=True),
    "update_": lambda: batched().update_({"a": shapeless()}),
    "update_ of other rows": lambda: alone().update_({"a": torch.nested.nested_tensor([ONE])}),
    "replace": lambda: batched().replace(a=shapeless()),
    "set_": lambda: batched().set_("a", shapeless()),
    "set_at_": lambda: batched().set_at_("a", shapeless(), 0),
    "rows": lambda: batched().select("a").__setitem__(0, alone()),
    "apply": lambda: batched().select("a").apply(lambda leaf: shapeless()),
    "apply_": lambda: batched().select("a").apply_(lambda leaf: shapeless()),
    "a pair": lambda: alone() == alone(),
    "stack": lambda: stack([alone(), alone()]),
    "an entry of a lazy stack": lambda: lazy_stack([alone(), alone()])["a"],
    "set of a lazy stack": lambda: lazy_stack([batched(), batched()]).set("a", shapeless()),
    "set_ of a lazy stack": lambda: lazy_stack([batched(), batched()]).set_("a", shapeless()),
}
OPERANDS: dict[str, Callable[[], object]] = {
    "addition": lambda: batched() + shapeless(),
    "in place": lambda: batched().mul_(shapeless()),
    "condition": lambda: batched().where(shapeless() > 0, 0),
    "fill_": lambda: batched().fill_("a", shapeless()),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_needs_a_shape_names_the_entry_and_the_layout_to_use(name: str) -> None:
    message = r"entry `a0?`.* must have a shape, got .*\. Build it with `layout=torch.jagged`"
    with pytest.raises(InvalidValue, match=message):
        CALLS[name]()


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_without_a_shape_are_refused(name: str) -> None:
    with pytest.raises(InvalidValue, match=r"must have a shape, .* `layout=torch.jagged`"):
        OPERANDS[name]()


def test_the_error_names_the_path_of_a_nested_entry() -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: TensorDict({"x": {"b": shapeless()}}, [2]),
        lambda: batched().set(("x", "b"), shapeless()),
        lambda: batched().update({"x": {"b": shapeless()}}),
    )
    for call in calls:
        with pytest.raises(InvalidValue, match=r"entry `\('x', 'b'\)` .* must have a shape"):
            call()


def test_containers_without_batch_dimensions_hold_and_show_them() -> None:
    td = alone()
    assert "a: f32[ragged]" in repr(td)
    assert "a: <code>Tensor ragged float32 cpu</code>" in td._repr_html_()
    assert "shape=ragged" in repr(UnbatchedTensor(td["a"]))
    assert "a: differs among the members" in repr(lazy_stack([td, td]))
    assert td.auto_batch_size_().batch_size == (3,)


def test_they_are_rows_of_a_batch() -> None:
    leaf = shapeless()
    td = TensorDict({"a": leaf, "b": torch.zeros(3)}, [3])
    assert td["a"] is leaf
    assert [row["a"].shape[0] for row in td] == [2, 3, 1]
    assert [row["a"].shape[0] for row in td.unbind(0)] == [2, 3, 1]
    assert td.clone()["a"].layout is torch.strided
    assert pickle.loads(pickle.dumps(td))[1]["a"].shape == (3,)
    padded = td.to_padded_tensor(mask_key="mask")
    assert padded["a"].shape == (3, 3)
    assert padded["mask"].sum(1).tolist() == [2, 3, 1]


def test_they_are_pickled() -> None:
    rows: list[Tensor] = list(pickle.loads(pickle.dumps(alone() + 1))["a"].unbind(0))
    assert [row.tolist() for row in rows] == [[1, 1], [1, 1, 1], [1]]


def test_an_error_of_a_function_that_is_applied_passes() -> None:
    def fails(leaf: Tensor) -> Tensor:
        raise KeyError(leaf.ndim)

    with pytest.raises(KeyError):
        alone().apply(fails)


def test_their_rows_count_for_a_batch_and_become_arrays() -> None:
    leaf = shapeless()
    entries = {"a": leaf, "n": {"b": torch.zeros(3, 2)}}
    assert TensorDict.from_dict(entries, auto_batch_size=True).batch_size == (3,)
    td = TensorDict(entries).auto_batch_size_()
    assert td.batch_size == (3,)
    rows = td.numpy()["a"]
    assert isinstance(rows, tuple)
    assert [row.tolist() for row in rows] == [row.tolist() for row in leaf.unbind()]
