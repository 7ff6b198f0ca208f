"""Nested tensors of the jagged layout keep their ragged dimension, and are never made dense."""

import io
import pickle
from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor

from kd_core import InvalidValue, TensorDict, TensorDictBase, cat, lazy_stack, stack

LENGTHS = (2, 3, 0, 1)


def jagged(*features: int) -> Tensor:
    rows = [torch.full((n, *features), float(row)) for row, n in enumerate(LENGTHS)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def make() -> TensorDict:
    nested = {"c": jagged(2)}
    return TensorDict({"a": jagged(), "n": nested, "row": torch.arange(4)}, [4])


def holds(td: TensorDictBase) -> None:
    """Check that each row has the elements of its number."""
    for key in ("a", ("n", "c")):
        leaf = td[key]
        assert leaf.is_nested
        assert leaf.shape[0] == td.shape[0]
        rows: list[Tensor] = list(leaf.unbind(0))
        for got, number in zip(rows, td["row"].tolist(), strict=True):
            assert got.shape[0] == LENGTHS[number]
            assert bool((got == number).all())


CHANGES: tuple[Callable[[TensorDictBase], TensorDictBase], ...] = (
    lambda td: td[1:],
    lambda td: td[:-1],
    lambda td: td[::2],
    lambda td: td[torch.tensor([0, 0, -1])],
    lambda td: td[[0]],
    lambda td: td[td["row"] % 2 == 0],
    lambda td: td.split(2)[0],
    lambda td: td.chunk(2)[-1],
    lambda td: td.tensor_split([1])[-1],
    lambda td: td.narrow(0, 0, 1),
    lambda td: td.flip(0),
    lambda td: td.roll(1, 0),
    lambda td: td.repeat(2),
    lambda td: td.repeat_interleave(2, 0),
    lambda td: td.gather(0, torch.tensor([0, 0])),
    lambda td: td.index_select(0, torch.tensor([0])),
    lambda td: cat([td, td.flip(0)]),
    lambda td: cat(td.split(1)),
    lambda td: td.clone(),
    lambda td: td.clone(recurse=False),
    lambda td: td.to("cpu"),
    lambda td: pickle.loads(pickle.dumps(td)),
)


@pytest.mark.parametrize("change", CHANGES)
def test_rows_keep_their_lengths(change: Callable[[TensorDictBase], TensorDictBase]) -> None:
    holds(change(make()))


@pytest.mark.parametrize("seed", range(20))
def test_rows_keep_their_lengths_in_random_programs(seed: int) -> None:
    rng = Random(seed)
    td: TensorDictBase = make()
    for _ in range(5):
        td = rng.choice(CHANGES)(td)
        holds(td)
        if not 1 < td.shape[0] < 100:
            break


def test_one_row_is_a_plain_tensor() -> None:
    td = make()
    assert td[1]["a"].tolist() == [1, 1, 1]
    assert [row["n", "c"].shape[0] for row in td.unbind(0)] == list(LENGTHS)
    assert td[2]["a"].numel() == 0
    assert td[4:]["a"].shape[0] == 0


def test_leaves_that_share_offsets_can_still_be_combined() -> None:
    first = jagged()
    td = TensorDict({"a": first, "b": first * 2}, [4])
    for part in (td[1:], td.flip(0), td.repeat_interleave(2)):
        total = part["a"] + part["b"]
        assert total.is_nested


def test_gradients_reach_the_rows() -> None:
    values = torch.arange(6.0, requires_grad=True)
    leaf = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 5, 5, 6]))
    TensorDict({"a": leaf}, [4])[[1, 1]]["a"].values().sum().backward()  # type: ignore[no-untyped-call]  # by torch
    assert values.grad is not None
    assert values.grad.tolist() == [0, 0, 2, 2, 2, 0]


def test_another_number_of_batch_dimensions_is_refused() -> None:
    with pytest.raises(InvalidValue, match="has one batch dimension"):
        make().reshape(2, 2)
    with pytest.raises(InvalidValue, match=r"entries `a`: .* has one batch dimension. Use `lazy_"):
        stack([make(), make()])
    with pytest.raises(InvalidValue, match="has one batch dimension"):
        make()[None]
    rows = lazy_stack(make().unbind(0))
    holds(rows.densify())


def test_it_is_padded_and_saved() -> None:
    padded = make()[:2].to_padded_tensor(-1)
    assert padded["a"].tolist() == [[0, 0, -1], [1, 1, 1]]
    file = io.BytesIO()
    torch.save(make()[1:], file)
    file.seek(0)
    holds(torch.load(file, weights_only=False))


def test_casts_and_arithmetic_keep_the_layout() -> None:
    td = make()
    assert td.to(torch.float64)["a"].dtype is torch.float64
    assert (td * 2)["a"].is_nested
    td["b"] = jagged()
    assert td[1:]["b"].is_nested
