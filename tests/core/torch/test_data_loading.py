"""A container goes through loaders and trainers that know mappings of tensors only."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset, default_collate, random_split

from kd_core import InvalidArgument, TensorDict, collate, lazy_stack, stack, tensorclass

BATCH = TensorDict({"input_ids": torch.arange(6).reshape(2, 3), "label": torch.tensor([0, 1])}, [2])


def prepared(inputs: Any) -> Any:
    """Do as the trainer of transformers does to move what it was given."""
    if isinstance(inputs, Mapping):
        return type(inputs)({key: prepared(value) for key, value in inputs.items()})  # type: ignore[call-arg]  # any
    return inputs.to("cpu")


def collated(features: list[Any]) -> dict[str, torch.Tensor]:
    """Do as the default collator of transformers does."""
    assert isinstance(features[0], Mapping)
    first = features[0]
    batch = {"labels": torch.tensor([each["label"].item() for each in features])}
    for key, value in first.items():
        if key != "label" and value is not None and not isinstance(value, str):
            batch[key] = torch.stack([each[key] for each in features])
    return batch


def test_a_trainer_rebuilds_a_batch_as_a_dict() -> None:
    inputs = prepared(BATCH.to_dict())
    assert len(inputs) == 2  # a trainer refuses a batch of no length
    assert len(prepared(BATCH)) == 0
    assert "label" in inputs
    assert torch.equal(dict(**inputs)["input_ids"], BATCH["input_ids"])


def test_a_collator_puts_its_rows_together() -> None:
    for features in (list(BATCH), [BATCH[0], BATCH[1]]):
        batch = collated(features)
        assert torch.equal(batch["input_ids"], BATCH["input_ids"])
        assert batch["labels"].tolist() == [0, 1]


def test_rows_of_a_typed_container_are_put_together_as_containers() -> None:
    """The default function of torch copies the first row and writes the batch into it."""

    @tensorclass
    class Step:
        x: torch.Tensor

    assert issubclass(TensorDict, MutableMapping)
    first = TensorDict({"step": Step(torch.ones(3))})
    batch = default_collate([first, first])
    assert isinstance(batch, TensorDict)
    assert isinstance(batch["step"], Step)
    assert batch["step"].x.shape == (2, 3)


def test_the_length_is_that_of_the_first_batch_dimension() -> None:
    assert len(BATCH) == 2
    assert len(TensorDict({"a": 1.0, "b": 2.0, "c": 3.0})) == 0
    assert len(TensorDict()) == 0


@pytest.mark.parametrize("rows", [False, True])
def test_workers_hand_over_batches(rows: bool) -> None:
    td = TensorDict({"x": torch.arange(6), "n": {"y": torch.arange(6.0)}, "s": list("abcdef")}, [6])
    data: Any = list(td) if rows else td
    loader = DataLoader(data, batch_size=2, num_workers=2)
    batches: list[TensorDict] = list(loader)
    assert [type(batch) for batch in batches] == [TensorDict] * 3
    assert torch.equal(torch.cat([batch["x"] for batch in batches]), td["x"])
    assert [word for batch in batches for word in batch["s"]] == td["s"]
    assert batches[0]["n", "y"].is_shared()


def test_leaves_cross_dlpack_without_a_copy() -> None:
    td = TensorDict({"x": torch.arange(6)}, [6])
    given = torch.utils.dlpack.from_dlpack(td["x"])
    given[0] = 7
    assert td["x"][0] == 7


def test_a_loader_that_takes_containers_apart_says_what_to_pass() -> None:
    data: Any = [TensorDict({"a": torch.zeros(2)}, [2])]
    with pytest.raises(InvalidArgument, match=r"loop over `keys.*`collate_fn=lambda"):
        next(iter(DataLoader(data, batch_size=None)))
    (batch,) = DataLoader(data, batch_size=None, collate_fn=lambda batch: batch)
    assert batch is data[0]


@pytest.mark.parametrize("join", [torch.stack, stack, collate, TensorDict.stack, lazy_stack])
def test_a_function_that_joins_rows_is_a_collate_fn(
    join: Callable[[Sequence[TensorDict]], TensorDict],
) -> None:
    data = TensorDict({"x": torch.arange(6)}, [6])
    for source in (data, Subset(data, [5, 1, 2, 3]), random_split(data, [4, 2])[0]):
        for batch in DataLoader(source, batch_size=2, collate_fn=join):
            assert batch.batch_size == (2,)
            assert batch["x"].shape == (2,)


def test_ragged_rows_are_padded_by_collate_in_a_loader() -> None:
    ragged = lazy_stack([TensorDict({"x": torch.ones(count)}) for count in (1, 3)])
    [batch] = DataLoader(
        ragged, batch_size=2, collate_fn=lambda rows: collate(rows, pad_keys=["x"])
    )
    assert batch["x"].shape == (2, 3)


def test_one_container_stands_for_its_rows_in_stack() -> None:
    td = TensorDict({"x": torch.arange(6).view(2, 3)}, [2, 3])
    joined: Any = torch.stack  # whose types take lists of tensors only
    assert joined(td).batch_size == (2, 3)
    assert torch.equal(stack(td, dim=1)["x"], td["x"].T)
    for wrong in (lambda: joined(td, td), lambda: stack(td[0, 0])):
        with pytest.raises(InvalidArgument, match=r"Put them in a list: `stack\(\[a, b\]\)`"):
            wrong()
