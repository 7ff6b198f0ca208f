"""Nested tensors of the jagged layout keep their ragged dimension, and are never made dense."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from kd_core import (
    FormatError,
    InvalidValue,
    TensorDict,
    TensorDictBase,
    cat,
    lazy_stack,
    stack,
    store,
)
from kd_core._store.codec import Decoder
from kd_core._store.segments import Spec

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
    TensorDict({"a": leaf}, [4])[[1, 1]]["a"].values().sum().backward()
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
    holds(rows.densify(torch.jagged))


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


def ragged_rows(draw: Random, gaps: bool) -> tuple[Tensor, list[Tensor]]:
    """Draw a nested tensor, perhaps with values between its rows, and its rows."""
    rows = [torch.randn(draw.randint(1, 4), 2) for _ in LENGTHS]
    offsets, parts, end = list[int](), list[Tensor](), 0
    for row in rows:
        between = torch.randn(draw.randint(0, 2) if gaps else 0, 2)
        offsets.append(end + len(between))
        end += len(between) + len(row)
        parts += [between, row]
    ends = torch.tensor([*offsets, end])
    lengths = torch.tensor([len(row) for row in rows]) if gaps else None
    return torch.nested.nested_tensor_from_jagged(torch.cat(parts), ends, lengths), rows


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize(
    ("name", "of_row"),
    [
        ("sum", torch.sum),
        ("mean", torch.mean),
        ("prod", torch.prod),
        ("amax", torch.amax),
        ("std", torch.std),
        ("nansum", torch.nansum),
        ("norm", torch.linalg.vector_norm),
        ("logsumexp", lambda row: torch.logsumexp(row, 0)),
    ],
)
def test_rows_are_reduced_one_by_one(
    name: str, of_row: Callable[[Tensor], Tensor], gaps: bool
) -> None:
    leaf, rows = ragged_rows(Random(name), gaps)
    dense = torch.randn(4, 3)
    td = TensorDict({"n": {"a": leaf}, "d": dense}, [4])
    flat = [row.reshape(-1) for row in rows]
    each = getattr(td, name)("feature")
    torch.testing.assert_close(each["n", "a"], torch.stack([of_row(row) for row in flat]))
    torch.testing.assert_close(each["d"], torch.stack([of_row(row) for row in dense]))
    assert getattr(td, name)("feature", keepdim=True)["n", "a"].shape == (4, 1, 1)
    torch.testing.assert_close(getattr(td, name)()["n", "a"], of_row(torch.cat(flat)))
    both = [torch.cat([row, more]) for row, more in zip(flat, dense, strict=True)]
    wanted = torch.stack([of_row(row) for row in both])
    torch.testing.assert_close(getattr(td, name)("feature", reduce=True), wanted)
    alone = getattr(TensorDict({"a": leaf}), name)("feature")
    torch.testing.assert_close(alone["a"], of_row(torch.cat(flat)))
    with pytest.raises(InvalidValue, match=r"entry `\('n', 'a'\)` is ragged: .* `to_padded_tens"):
        getattr(td, name)(0)


def test_rows_have_quantiles_and_softmax() -> None:
    leaf, rows = ragged_rows(Random(0), True)
    td = TensorDict({"a": leaf}, [4])
    at = torch.tensor([0.1, 0.9])
    found = td.quantile([0.1, 0.9], "feature")["a"]
    wanted = [torch.quantile(row.reshape(-1), at) for row in rows]
    torch.testing.assert_close(found, torch.stack(wanted, -1))
    for got, row in zip(td.softmax("feature")["a"].unbind(), rows, strict=True):
        torch.testing.assert_close(got, row.reshape(-1).softmax(0).reshape(row.shape))
    assert td[:0].quantile([0.1, 0.9], "feature")["a"].shape == (2, 0)
    assert td[:0].softmax("feature")["a"].shape[0] == 0


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "max", "min", "softmax"])
def test_the_batch_dimension_of_ragged_rows_is_refused(name: str) -> None:
    with pytest.raises(InvalidValue, match="entry `a` is ragged"):
        getattr(make(), name)(0)


def test_a_row_without_elements_has_no_maximum() -> None:
    td = make().select("a")
    assert td.sum("feature")["a"].tolist() == [0, 3, 0, 3]
    with pytest.raises(InvalidValue, match=r"entry `a` cannot be reduced row by row.*Remove rows"):
        td.amax("feature")


@pytest.mark.parametrize("gaps", [False, True])
def test_rows_are_chosen_by_a_condition(gaps: bool) -> None:
    (leaf, rows), (more, others) = ragged_rows(Random(1), gaps), ragged_rows(Random(2), not gaps)
    td, other = TensorDict({"a": leaf}, [4]), TensorDict({"a": more}, [4])
    per_row = torch.tensor([5.0, 6.0, 7.0, 8.0])
    numbered = [torch.full_like(row, 5.0 + number) for number, row in enumerate(rows)]
    halves = [torch.full_like(row, 0.5) for row in rows]
    cases: list[tuple[TensorDict | Tensor | float, list[Tensor]]] = [
        (other, others),
        (per_row, numbered),
        (0.5, halves),
        (torch.tensor(0.5), halves),
    ]
    for condition in (torch.tensor([True, False, False, True]), torch.tensor([False])):
        for value, elsewhere in cases:
            found = td.where(condition, value)["a"].unbind()
            for got, mine, its, chosen in zip(
                found, rows, elsewhere, condition.expand(4), strict=True
            ):
                assert torch.equal(got, mine if chosen else its)


def test_chosen_rows_share_offsets_and_carry_gradients() -> None:
    values = torch.arange(6.0, requires_grad=True)
    leaf = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 5, 5, 6]))
    td = TensorDict({"a": leaf, "b": leaf * 2}, [4])
    found = td.where(torch.tensor([True, False, True, False]), td * 3)
    (found["a"] + found["b"]).values().sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [3, 3, 9, 9, 9, 9]


def test_ragged_rows_are_not_chosen_beside_dense_ones() -> None:
    td, dense = make().select("a"), TensorDict({"a": torch.zeros(4, 3)}, [4])
    condition = torch.tensor([True, False, True, False])
    for left, right in ((td, dense), (dense, td)):
        with pytest.raises(InvalidValue, match="entry `a` must be ragged in both containers"):
            left.where(condition, right)
    padded = td.where(condition, TensorDict({"b": jagged()}, [4]), pad=0.0)
    assert [row.sum().item() for row in padded["a"].unbind()] == [0, 0, 0, 0]
    assert [row.sum().item() for row in padded["b"].unbind()] == [0, 3, 0, 3]


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("many", [1, 30])
def test_a_plain_leaf_beside_a_ragged_one_becomes_ragged(many: int, deep: bool) -> None:
    rows = torch.arange(4.0)[:, None]
    mine = TensorDict({f"k{i}": rows for i in range(many)}, [4])
    theirs = TensorDict({f"k{i}": jagged() for i in range(many)}, [4])
    if deep:
        mine, theirs = TensorDict({"n": mine}, [4]), TensorDict({"n": theirs}, [4])
    for found in (mine + theirs, theirs - -mine, mine.lerp(theirs * 3, 0.5)):
        leaf = next(iter(found.sum(dim="feature").values(True, True)))
        assert leaf.tolist() == [2 * row * length for row, length in enumerate(LENGTHS)]
        with pytest.raises(InvalidValue, match="is ragged"):
            found.sum(0)


def test_joined_leaves_that_share_offsets_can_still_be_combined() -> None:
    first = jagged()
    td = TensorDict({"a": first, "b": first * 2}, [4])
    for parts in ([td, td], [td[1:], td, td[:0]]):
        joined = cat(parts)
        expected = [3 * row for part in parts for row in part["a"].unbind()]
        for total, row in zip((joined["a"] + joined["b"]).unbind(), expected, strict=True):
            assert torch.equal(total, row)


def test_rows_with_gaps_beside_rows_without() -> None:
    values, offsets = torch.arange(6.0), torch.tensor([0, 3, 6])
    whole = torch.nested.nested_tensor_from_jagged(values, offsets)
    cut = torch.nested.nested_tensor_from_jagged(values, offsets, lengths=torch.tensor([1, 2]))
    td = TensorDict({"whole": whole, "cut": cut}, [2])
    for made in (td[[0, 1]], cat([td, td])[:2]):
        assert [row.tolist() for row in made["whole"].unbind()] == [[0, 1, 2], [3, 4, 5]]
        assert [row.tolist() for row in made["cut"].unbind()] == [[0], [3, 4]]


def strided(*lengths: int) -> TensorDict:
    """Return a container of a nested tensor of the strided layout, whose rows differ."""
    rows = [torch.arange(2.0 * n).view(n, 2) + n for n in lengths]
    return TensorDict({"n": torch.nested.nested_tensor(rows)}, [len(lengths)])


def same_rows(found: TensorDictBase, wanted: TensorDictBase) -> None:
    pairs = zip(found["n"].unbind(), wanted["n"].unbind(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    assert found["n"].dtype is wanted["n"].dtype
    assert found["n"].layout is torch.strided
    assert found["n"].is_nested


def test_rows_of_the_strided_layout_are_stored_and_come_back(tmp_path: Path) -> None:
    td = strided(3, 0, 5)
    for name in ("td", "td.safetensors"):
        td.save(tmp_path / name)
        same_rows(TensorDict.load(tmp_path / name, verify="full"), td)
    mapped = td.memmap(tmp_path / "arena")
    same_rows(mapped, td)
    mapped["n"].mul_(2)
    same_rows(TensorDict.load_memmap(tmp_path / "arena"), td * 2)
    assert mapped.is_memmap()
    zeros = td.memmap_like(tmp_path / "zeros")
    same_rows(zeros, td * 0)
    td.append_to(tmp_path / "td")
    same_rows(TensorDict.load(tmp_path / "td"), strided(3, 0, 5, 3, 0, 5))
    assert "nested float32, 3 rows" in str(store.inspect(tmp_path / "td.safetensors"))


def test_values_of_the_strided_layout_are_written_to_rows_of_the_same_sizes() -> None:
    writes: list[Callable[[TensorDict], object]] = [
        lambda td: td.load_state_dict((td * 2).state_dict()),
        lambda td: td.update_(td * 2),
        lambda td: td.copy_(td * 2),
    ]
    for write in writes:
        td = strided(3, 5)
        before = td["n"]
        write(td)
        assert td["n"] is before
        same_rows(td, strided(3, 5) * 2)
    td = strided(3, 5)
    with pytest.raises(InvalidValue, match="`n`"):
        td.update_(strided(5, 3))
    same_rows(td, strided(3, 5))


@pytest.mark.parametrize(
    "sizes",
    [[[3, 2], [4, 2]], [[3, 2], [-1, 2]], [[8], [9]], [[16]], [], [[1 << 40, 1 << 40], [1, 1]]],
)
def test_forged_sizes_of_rows_are_refused(sizes: list[list[int]]) -> None:
    values, given = torch.zeros(16), torch.tensor(sizes, dtype=torch.int64)
    specs = [{"v": Spec(torch.float32, (16,)), "s": Spec(torch.int64, tuple(given.shape))}]
    shape = list(given.shape)
    node = {
        "strided": [{"tensor": [0, "v", "float32", [16]]}, {"tensor": [0, "s", "int64", shape]}]
    }
    tree = {"td": {"batch": [2], "entries": [["n", node]]}}
    with pytest.raises(FormatError):
        Decoder(specs, [lambda _: {"v": values, "s": given}]).container_of(tree)
