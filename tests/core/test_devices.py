"""The logic of devices without one: every kind of container holds fake tensors of a GPU.

Fake tensors have shapes, dtypes and devices, and no numbers. What torch itself does to them on a
build for CPUs alone decides what can be asked: an index in brackets cannot.
"""

from collections.abc import Callable, Iterator
from typing import Final

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kd_core import (
    DeviceMismatch,
    LazyStackedTensorDict,
    TensorClass,
    TensorDict,
    TensorDictBase,
    UnbatchedTensor,
    group_by,
    lazy_stack,
    pad_sequence,
)

GPU: Final = torch.device("cuda:0")
OTHER: Final = torch.device("cuda:1")


class Sample(TensorClass):
    """A typed container with data beside its tensors."""

    a: Tensor
    n: TensorDict
    word: str = "x"


def content() -> dict[str, object]:
    return {"a": torch.zeros(3, 2), "n": TensorDict({"b": torch.zeros(3, 4)}, [3])}


KINDS: Final[dict[str, Callable[[], TensorDictBase]]] = {
    "dense": lambda: TensorDict(content(), [3]),
    "placed": lambda: TensorDict(content(), [3], device="cpu"),
    "lazy": lambda: lazy_stack(
        [TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(4)}}) for _ in range(3)]
    ),
    "worded": lambda: TensorDict({**content(), "s": "text"}, [3]),
    "unbatched": lambda: TensorDict({**content(), "u": UnbatchedTensor(torch.zeros(5))}, [3]),
    "typed": lambda: Sample.from_dict(content(), batch_size=[3]),
    "locked": lambda: TensorDict(content(), [3]).lock_(),
}


@pytest.fixture(params=list(KINDS))
def td(request: pytest.FixtureRequest) -> Iterator[TensorDictBase]:
    """A container of each kind, of fake tensors on the CPU."""
    with FakeTensorMode():
        yield KINDS[request.param]()


def devices(td: TensorDictBase) -> set[torch.device]:
    return {leaf.device for leaf in td.values(True, True)}


STAYS: Final[dict[str, Callable[[TensorDictBase], TensorDictBase]]] = {
    "arithmetic": lambda td: td + 1,
    "in place": lambda td: td.clone().mul_(2),
    "with itself": lambda td: td * td,
    "clone": lambda td: td.clone(),
    "shallow": lambda td: td.clone(recurse=False),
    "reshape": lambda td: td.reshape(-1),
    "squeeze": lambda td: td.squeeze(0),
    "apply": lambda td: td.apply(lambda leaf: leaf * 2),
    "another dtype": lambda td: td.to(torch.float16),
    "zeros": lambda td: td.clone().zero_(),
    "new rows": lambda td: td.new_zeros(4),
    "detach": lambda td: td.detach(),
    "flat keys": lambda td: td.flatten_keys("."),
    "gather": lambda td: td.gather(0, torch.zeros(2, dtype=torch.int64, device=GPU)),
    "several gpus": lambda td: td.to(OTHER).to(GPU),
    "the long way": lambda td: td.cpu().to(GPU),
    "not blocking": lambda td: td.cpu().to(GPU, non_blocking=True),
}


@pytest.mark.parametrize("name", STAYS)
def test_results_stay_where_the_leaves_are(td: TensorDictBase, name: str) -> None:
    there = td.to(GPU)
    assert devices(td) == {torch.device("cpu")}
    assert devices(there) == {GPU}
    assert there.device == GPU
    result = STAYS[name](there)
    assert devices(result) == {GPU}
    assert result.device == GPU


def test_a_move_to_where_it_is_copies_nothing(td: TensorDictBase) -> None:
    there = td.to(GPU)
    again = there.to(GPU)
    pairs = [(there, again)]
    if isinstance(there, LazyStackedTensorDict) and isinstance(again, LazyStackedTensorDict):
        pairs = list(zip(there.tensordicts, again.tensordicts, strict=True))
    for one, other in pairs:
        assert all(leaf is other[key] for key, leaf in one.items(True, True))


def test_what_is_stored_moves_to_the_device(td: TensorDictBase) -> None:
    there = td.to(GPU).unlock_()
    there.set("a", torch.ones(3, 2))
    assert there["a"].device == GPU
    there.update({"n": {"b": torch.ones(there["n", "b"].shape)}})
    assert there["n", "b"].device == GPU


def test_a_forgotten_device_lets_devices_mix(td: TensorDictBase) -> None:
    there = td.to(GPU).unlock_().clear_device_()
    assert there.device is None
    there.set("a", torch.ones(3, 2))
    assert devices(there) == {torch.device("cpu"), GPU}


def test_operands_on_another_device_are_named(td: TensorDictBase) -> None:
    with pytest.raises(DeviceMismatch, match=r"on the same device in both containers, got cuda:0"):
        td.to(GPU) + td.clone()  # the error is the promise


def test_meta_has_shapes_alone(td: TensorDictBase) -> None:
    nowhere = td.to("meta")
    assert devices(nowhere) == {torch.device("meta")}
    for key, leaf in td.items(True, True):
        assert nowhere[key].shape == leaf.shape
    assert devices(nowhere + 1) == {torch.device("meta")}


INDICES: Final[dict[str, Callable[[torch.device | str], object]]] = {
    "numbers": lambda where: torch.tensor([2, 0], device=where),
    "numbers in a tuple": lambda where: (torch.tensor([2, 0], device=where),),
    "numbers behind": lambda where: (slice(None), torch.tensor([1, 0, 1], device=where)),
    "pairs": lambda where: (
        torch.tensor([[0], [1]], device=where),
        torch.tensor([1, 0, 1], device=where),
    ),
    "with a new dimension": lambda where: (None, torch.tensor([1, 0], device=where)),
}


@pytest.mark.parametrize("name", INDICES)
def test_an_index_may_be_where_the_leaves_are(name: str) -> None:
    td = TensorDict({"a": torch.zeros(3, 2, 4), "n": {"b": torch.zeros(3, 2)}}, [3, 2])
    expected = td[INDICES[name]("cpu")]  # type: ignore[call-overload]  # any index
    found = td.to("meta")[INDICES[name]("meta")]  # type: ignore[call-overload]  # any index
    assert found.batch_size == expected.batch_size
    assert found["a"].shape == expected["a"].shape
    assert found["n", "b"].is_meta


def words() -> TensorDict:
    return TensorDict({"x": torch.arange(3.0), "w": ["a", "b", "a"]}, [3])


def _seen(td: TensorDict) -> TensorDict:
    with td.view(3, 1) as seen:
        seen["y"] = seen["x"] * 2
    return td


def _padded(td: TensorDict) -> TensorDictBase:
    return pad_sequence([td[:1], td], return_mask=True)


COUNTING: Final[dict[str, Callable[[TensorDict, TensorDictBase], TensorDictBase]]] = {
    "views of a stack": lambda td, columns: columns.expand(2, 3, 2),
    "rows of a stack": lambda td, columns: columns[1],
    "part of a stack": lambda td, columns: columns[:, 1],
    "permuted stack": lambda td, columns: columns.permute(1, 0),
    "reshaped stack": lambda td, columns: columns.reshape(-1),
    "groups by words": lambda td, columns: group_by(td, "w")[1][0],
    "padding": lambda td, columns: _padded(td),
    "words": lambda td, columns: td[1:].clone(),
    "written words": lambda td, columns: td.clone().set_at_("w", "c", 1),
    "back from a view": lambda td, columns: _seen(td),
    "addresses": lambda td, columns: td.select("x").data_ptr() != 0,
}


@pytest.mark.parametrize("name", COUNTING)
def test_rows_are_counted_on_the_cpu_whatever_the_default_is(name: str) -> None:
    made = [(td, lazy_stack([td, td.clone()], 1)) for td in (words(), words())]
    expected = COUNTING[name](*made[0])
    with torch.device("meta"):  # such as the GPU in `torch.set_default_device("cuda")`
        found = COUNTING[name](*made[1])
    assert devices(found) == {torch.device("cpu")}
    assert found.tolist() == expected.tolist()
