"""Data that is not a tensor, one value for each row: rows stay with their tensors."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy
import pytest
import torch
from tests.core.kinds import inner
from tests.core.rows import names
from torch import Tensor
from torch.utils._pytree import tree_map

from kd_core import (
    InvalidArgument,
    InvalidValue,
    KeySetMismatch,
    LazyStackedTensorDict,
    LinkedList,
    Locked,
    NonTensorData,
    NonTensorStack,
    ShapeMismatch,
    TensorClass,
    TensorDict,
    TensorDictBase,
    cat,
    lazy_stack,
    make_tensordict,
    maybe_dense_stack,
    pad,
    pad_sequence,
    set_list_to_stack,
    stack,
)


def make(batch: tuple[int, ...] = (4, 3)) -> TensorDict:
    """Rows that say their number twice: as a tensor and as a string."""
    rows = torch.arange(torch.Size(batch).numel()).reshape(batch)
    return TensorDict({"x": rows, "n": {"s": names(rows)}}, batch)


def holds(td: TensorDictBase) -> None:
    """Check that each row has the string of its number."""
    assert td.get_non_tensor(("n", "s")) == names(td["x"])


CHANGES: tuple[Callable[[TensorDictBase], TensorDictBase], ...] = (
    lambda td: td[0],
    lambda td: td[-1:],
    lambda td: td[::2],
    lambda td: td[None],
    lambda td: td[..., 0],
    lambda td: td[[1, 0, 1]],
    lambda td: td[torch.tensor([[0, 1], [1, 0]])],
    lambda td: td[torch.arange(td.shape[0]) % 2 == 0],
    lambda td: td[td["x"] % 2 == 0],
    lambda td: td[:, torch.tensor([0])],
    lambda td: td.split(1)[-1],
    lambda td: td.chunk(2)[0],
    lambda td: td.unbind(0)[-1],
    lambda td: td.reshape(-1),
    lambda td: td.transpose(0, -1),
    lambda td: td.transpose(0, -1).reshape(-1),
    lambda td: td.flip(0),
    lambda td: td.roll(1, 0),
    lambda td: td.unsqueeze(0),
    lambda td: td.repeat(2, *[1] * (td.ndim - 1)),
    lambda td: td.repeat_interleave(2, 0),
    lambda td: td.repeat_interleave(torch.arange(td.shape[0]), dim=0),
    lambda td: td.expand(2, *td.shape),
    lambda td: td.index_select(0, torch.tensor([0, 0])),
    lambda td: td.gather(0, torch.zeros((2, *td.shape[1:]), dtype=torch.int64)),
    lambda td: cat([td, td.flip(0)]),
    lambda td: cat(td.split(1)),
    lambda td: stack([td, td.roll(1, 0)], 1),
    lambda td: stack(td.unbind(0)),
    lambda td: lazy_stack([td, td.flip(0)], 1),
    lambda td: lazy_stack(td.unbind(0)).contiguous(),
    lambda td: td.where(td["x"] % 2 == 0, td.flip(0)),
    lambda td: td.clone(),
    lambda td: td.clone(recurse=False),
    lambda td: td.detach(),
    lambda td: copy.deepcopy(td),
    lambda td: pickle.loads(pickle.dumps(td)),
    lambda td: tree_map(torch.clone, td),
    lambda td: TensorDict(td, td.batch_size),
    lambda td: td.to("cpu"),
    lambda td: td.permute(*reversed(range(td.ndim))),
    lambda td: torch.vmap(lambda row: row.clone())(td),
)


@pytest.mark.parametrize("seed", range(60))
def test_rows_stay_aligned_in_random_programs(seed: int) -> None:
    rng = Random(seed)
    td: TensorDictBase = make(rng.choice([(4,), (4, 3), (1, 2), (2, 2, 2), (0, 2)]))
    for _ in range(6):
        change = rng.choice(CHANGES)
        try:
            changed = change(td)
        except (IndexError, ValueError, RuntimeError, TypeError):
            continue  # the program is refused for its tensors: a row that there is not
        td = changed
        if not td.ndim or td.numel() > 200:
            break
        holds(td)


@pytest.mark.parametrize("change", CHANGES)
def test_rows_stay_aligned(change: Callable[[TensorDictBase], TensorDictBase]) -> None:
    holds(change(make((2, 2))))


@pytest.mark.parametrize(
    "value", [["x", "y"], ("x", "y"), [torch.zeros(2), torch.zeros(3)], numpy.array(["x", "y"])]
)
def test_a_list_with_an_item_for_each_row_is_one_value_per_row(value: list[object]) -> None:
    td = TensorDict({"s": value}, [2])
    assert isinstance(td.get("s"), NonTensorStack)
    assert td[0].get_non_tensor("s") is td.get_non_tensor("s")[0]  # type: ignore[index]  # a list
    td["s"] = ["u", "v"]
    assert td.get_non_tensor("s") == ["u", "v"]


def test_a_list_of_another_length_is_refused() -> None:
    with pytest.raises(ShapeMismatch, match=r"`\('n', 's'\)` must have one .* got 3 where 2 are"):
        TensorDict({"n": {"s": ["x", "y", "z"]}}, [2])
    with pytest.raises(ShapeMismatch, match="got a single one where 2 are expected in dimension 1"):
        TensorDict({"s": ["x", "y"]}, [2, 2])
    td = TensorDict({"s": NonTensorData(["x", "y", "z"])}, [2])
    assert td[0].get_non_tensor("s") == ["x", "y", "z"]


def test_brackets_give_lists_and_get_the_wrapper() -> None:
    td = TensorDict({"s": [["a", "b"], ["c", "d"]]}, [2, 2])
    wrapper: object = td.get("s")
    assert isinstance(wrapper, NonTensorStack)
    assert wrapper.batch_size == (2, 2)
    assert wrapper.tolist() == td.get_non_tensor("s") == [["a", "b"], ["c", "d"]]
    assert [id(value) for value in td.values()] == [id(wrapper)]
    assert [row.tolist() for row in wrapper] == [["a", "b"], ["c", "d"]]
    assert wrapper[0, 1] == NonTensorData("b")
    assert wrapper[:, 1].tolist() == ["b", "d"]
    assert len(wrapper) == 2
    assert td.to_dict() == {"s": [["a", "b"], ["c", "d"]]}


def test_it_is_built_of_values_or_of_wrappers() -> None:
    both = NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d"), stack_dim=1)
    assert both.tolist() == [["a", "c"], ["b", "d"]]
    assert NonTensorStack(NonTensorData("a"), NonTensorData("a")).tolist() == ["a", "a"]
    assert NonTensorStack.from_list(["a", ["b", "c"]]).tolist() == ["a", ["b", "c"]]
    assert NonTensorStack.from_nontensordata(NonTensorData("a", [2])).tolist() == ["a", "a"]
    assert NonTensorStack().batch_size == (0,)
    assert NonTensorStack("a").maybe_to_stack() == NonTensorStack("a")
    with pytest.raises(ShapeMismatch, match=r"got \(1,\) in value 0 and \(2,\) in value 1"):
        NonTensorStack(NonTensorStack("a"), NonTensorStack("b", "c"))
    with pytest.raises(ShapeMismatch, match="the list must have one value for each row"):
        NonTensorStack.from_list(["a"], [2])


def test_a_list_is_rows_of_an_inferred_batch() -> None:
    source = {"x": torch.zeros(2), "s": ["a", "b"]}
    assert TensorDict.from_dict(source, auto_batch_size=True)[1].get_non_tensor("s") == "b"
    assert make_tensordict(source, auto_batch_size=True)[1].get_non_tensor("s") == "b"
    assert TensorDict(source)["s"] == source["s"]


def test_equality_compares_rows() -> None:
    flipped: object = TensorDict({"s": ["b", "a"]}, [2]).flip(0).get("s")
    assert (NonTensorStack("a", "b") == flipped).tolist() == [True, True]
    assert (NonTensorStack("a", "b") == NonTensorStack("a", "c")).tolist() == [True, False]
    assert (NonTensorStack("a", "b") != NonTensorStack("a", "c")).tolist() == [False, True]
    assert (NonTensorStack("a", "b") == NonTensorData("a", [2])).tolist() == [True, False]
    assert NonTensorStack("a") != ["a"]


def test_rows_are_written() -> None:
    td = make((3,))
    view, copied, shallow = td[:2], td[[0, 1]], td.clone(recurse=False)
    td[0] = {"n": {"s": "new"}}
    td[1:] = {"n": {"s": ["u", "v"]}}
    assert td.get_non_tensor(("n", "s")) == ["new", "u", "v"]
    assert shallow.get_non_tensor(("n", "s")) == ["0", "1", "2"]
    assert view.get_non_tensor(("n", "s")) == ["new", "u"]
    assert copied.get_non_tensor(("n", "s")) == ["0", "1"]
    view[0] = {"n": {"s": "through the view"}}
    td[td["x"] == 1] = TensorDict({"n": {"s": "row"}})
    assert td.get_non_tensor(("n", "s")) == ["through the view", "row", "v"]
    td[[0, 2]] = make((3,))[:2]
    assert td.get_non_tensor(("n", "s")) == ["0", "row", "1"]
    td.set_at_(("n", "s"), "last", -1)
    assert td.lock_().set_(("n", "s"), ["a", "b", "c"]).get_non_tensor(("n", "s")) == list("abc")
    assert td.update_({"n": {"s": "all"}}).get_non_tensor(("n", "s")) == ["all"] * 3


ROWS: tuple[Callable[[TensorDict], TensorDictBase], ...] = (
    lambda td: td[0],
    lambda td: td.unbind(0)[0],
    lambda td: td[:2][0],
    lambda td: td.view(3, 1)[0, 0],
    lambda td: td.unsqueeze(0)[0, 0],
    lambda td: td.split(1)[0].squeeze(0),
)


@pytest.mark.parametrize("row_of", ROWS)
def test_a_row_that_was_read_writes_to_the_batch(
    row_of: Callable[[TensorDict], TensorDictBase],
) -> None:
    td = TensorDict({"a": torch.zeros(3), "s": ["x", "y", "z"]}, [3])
    row: Any = row_of(td)
    copied, shallow = row.clone(), row_of(td)
    assert row.set_("s", "q")["s"] == "q"
    assert td["s"] == ["q", "y", "z"]
    row.update_({"a": 1.0, "s": "r"})
    assert td["a"].tolist() == [1, 0, 0]
    assert td.get_non_tensor("s") == ["r", "y", "z"]
    cast("NonTensorData", shallow.get("s")).data = "t"
    assert td.get_non_tensor("s") == ["t", "y", "z"]
    assert row["s"] == "t"
    td[0] = {"a": 2.0, "s": "u"}
    assert (row["s"], copied["s"]) == ("u", "x")
    copied.set_("s", "v")
    row["s"] = "w"
    assert td["s"] == ["u", "y", "z"]


def test_a_write_that_fails_changes_nothing() -> None:
    td = make((3,))
    with pytest.raises(ShapeMismatch, match="`x`"):
        td[:2] = {"n": {"s": ["u", "v"]}, "x": torch.zeros(5)}
    with pytest.raises(ShapeMismatch, match=r"`\('n', 's'\)` must have one value for each row"):
        td[:2] = {"x": 7, "n": {"s": ["u", "v", "w"]}}
    holds(td)
    assert td["x"].tolist() == [0, 1, 2]


def test_many_writes_do_not_fill_the_memory() -> None:
    td = make((3,))
    view = td[1:]
    for count in range(1000):
        td[count % 3] = {"n": {"s": count}}
    wrapper: object = td.get(("n", "s"))
    assert isinstance(wrapper, NonTensorStack)
    assert wrapper.tolist() == [999, 997, 998]
    assert view.get_non_tensor(("n", "s")) == [997, 998]
    assert len(wrapper._cells.values) == 3


def test_few_rows_do_not_keep_all_values() -> None:
    td = make((1000,))
    assert len(pickle.dumps(td[:2])) < 1500
    wrapper: object = td[[1, 5]].get(("n", "s"))
    assert isinstance(wrapper, NonTensorStack)
    assert wrapper._cells.values == ["1", "5"]


KINDS: tuple[Callable[[TensorDict], TensorDictBase], ...] = (
    lambda td: td,
    lambda td: lazy_stack(td.unbind(0)),
    lambda td: lazy_stack(td.unbind(1), 1),
    lambda td: TensorDict({"n": lazy_stack(td.unbind(0))["n"], "x": td["x"]}, td.batch_size),
)
WRITES: tuple[Callable[[TensorDictBase, TensorDict], object], ...] = (
    lambda td, new: td.copy_(new),
    lambda td, new: td.copy_(new, non_blocking=True),
    lambda td, new: td.update_(new),
    lambda td, new: td.update_(lazy_stack(new.unbind(0))),
    lambda td, new: td.update_({"x": new["x"], "n": {"s": new["n", "s"]}}),
    lambda td, new: td.set_("x", new["x"]).set_(("n", "s"), new["n", "s"]),
    lambda td, new: td.copy_at_(new[0], 0),
    lambda td, new: td.copy_at_(new[:1], slice(0, 1)),
    lambda td, new: td.copy_at_(new[:, 1], (slice(None), 1)),
    lambda td, new: td.copy_at_(new[1, 0], (1, 0)),
    lambda td, new: td.copy_at_(new[new["x"] > 1], new["x"] > 1),
    lambda td, new: td.set_at_("x", 7, (1, 1)).set_at_(("n", "s"), "7", (1, 1)),
    lambda td, new: new.where(new["x"] > 1, new.flip(1), out=cast("TensorDict", td)),
    lambda td, new: new.gather(0, torch.zeros(2, 2, dtype=torch.int64), out=cast("TensorDict", td)),
    lambda td, new: stack([new[1], new[0]], out=td),
    lambda td, new: lazy_stack([new[1], new[0]], out=td),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("write", WRITES)
def test_every_write_takes_values_with_their_rows(
    kind: Callable[[TensorDict], TensorDictBase],
    write: Callable[[TensorDictBase, TensorDict], object],
) -> None:
    td = kind(make((2, 2)))
    write(td, make((2, 2)).flip(0))
    holds(td)


def test_one_value_of_a_batch_is_written_for_all_rows() -> None:
    td = TensorDict({"x": torch.zeros(2), "unit": "m"}, [2])
    other = TensorDict({"x": torch.ones(2), "unit": "km"}, [2])
    for write in (td.copy_, td.update_):
        td["unit"] = "m"
        write(other)
        assert td["unit"] == "km"
    with pytest.raises(InvalidArgument, match=r"`unit` holds one value .*'km'"):
        td.update_({"x": torch.zeros(2), "unit": ["a", "b"]})
    assert td["x"].tolist() == [1, 1]


def test_a_tensor_is_not_written_to_values() -> None:
    td = make((2, 2))
    for write in (td.update_, lambda source: td.__setitem__(0, source)):
        with pytest.raises(InvalidArgument, match=r"`\('n', 's'\)` holds values .*shape \(2,\)"):
            write({"x": torch.ones(2), "n": {"s": torch.ones(2)}})
    holds(td)


def test_a_scatter_moves_rows_and_a_number_moves_none() -> None:
    td, index = make((3,)), torch.tensor([2, 0])
    for each in (td, lazy_stack(td.unbind(0))):
        holds(each.scatter(0, index, td[:2]))
        assert each.scatter(0, index, 1)["n", "s"] == ["0", "1", "2"]


def test_where_takes_rows_of_both_and_all_where_one_lacks_the_key() -> None:
    td, keep = make((3,)), torch.tensor([True, False, False])
    holds(td.where(keep, td.flip(0), pad=0))
    alone = TensorDict({"x": torch.zeros(3)}, [3])
    assert td.where(keep, alone, pad=0)["n", "s"] == ["0", "1", "2"]
    assert alone.where(keep, td, pad=0)["n", "s"] == ["0", "1", "2"]


def test_new_rows_have_no_value() -> None:
    td = TensorDict({"x": torch.ones(2), "s": ["a", "b"], "unit": "m"}, [2])
    for each in (td, lazy_stack(td.unbind(0)), td[0]):
        for made in (each.new_zeros(3), each.new_full((3,), 7.0), each.new_empty(3)):
            assert made["s"] == [None, None, None]
        assert each.new_ones(())["s"] is None
    assert td.new_zeros(3)["unit"] == td[0].new_zeros(3)["unit"] == "m"


def test_several_quantiles_collect_the_values_of_the_rows() -> None:
    td = TensorDict({"x": torch.ones(2, 3), "s": ["a", "b"]}, [2])
    assert td.quantile([0.1, 0.9], 0)["s"] == [["a", "b"], ["a", "b"]]
    assert td.quantile(0.5, "feature")["s"] == ["a", "b"]
    assert td.quantile([0.1, 0.9], "feature")["s"] == [["a", "b"], ["a", "b"]]
    assert td.data_ptr()["s"] == ["a", "b"]


def test_arithmetic_leaves_it_alone() -> None:
    td = TensorDict({"a": torch.ones(2, 2), "s": [["a", "b"], ["c", "d"]]}, [2, 2])
    for same in (
        td + 1,
        td + td,
        -td,
        td.cumsum(0),
        td.apply(torch.neg),
        td.sum("feature"),
        td > td,
    ):
        assert same.get_non_tensor("s") == [["a", "b"], ["c", "d"]]


def test_reductions_collect_the_values_of_the_rows() -> None:
    td = TensorDict({"a": torch.ones(2, 2), "s": [["a", "b"], ["c", "d"]]}, [2, 2])
    assert td.sum().get_non_tensor("s") == [["a", "b"], ["c", "d"]]
    assert td.mean(0).get_non_tensor("s") == [["a", "c"], ["b", "d"]]
    assert td.amax(1).get_non_tensor("s") == [["a", "b"], ["c", "d"]]
    assert td.sum(1)[1].get_non_tensor("s") == ["c", "d"]
    assert td.sum(0, keepdim=True).get_non_tensor("s") == [[["a", "c"], ["b", "d"]]]
    assert td.max(0).values.get_non_tensor("s") == [["a", "c"], ["b", "d"]]
    collected = td.sum(1)
    collected[0] = {"s": "x"}
    assert collected.get_non_tensor("s") == ["x", ["c", "d"]]
    assert cat([td.sum(1), td[:, :1].sum(1)]).get_non_tensor("s")[2:] == [["a"], ["c"]]  # type: ignore[index]  # a list


def test_a_reduction_of_all_leaves_does_not_count_it() -> None:
    td = TensorDict({"a": torch.ones(2, 3), "n": {"s": ["a", "b"]}}, [2])
    for each in (td, lazy_stack(td.unbind(0))):
        assert each.sum("feature", reduce=True).tolist() == [3, 3]
        assert each.sum(reduce=True) == 6


def test_the_lists_of_a_reduction_do_not_follow_the_order_of_its_dimensions() -> None:
    td = make((2, 3))
    assert td.sum((1, 0))["n", "s"] == td.sum((0, 1))["n", "s"] == td["n", "s"]


def test_padding_has_no_value() -> None:
    td = make((2,))
    assert pad(td, [1, 2], 1.0).get_non_tensor(("n", "s")) == [None, "0", "1", None, None]
    for value in (float("nan"), float("inf"), 0.5, 1e300):
        assert pad(td.exclude("x"), [1, 0], value)["n", "s"] == [None, "0", "1"]
    both = pad_sequence([make((1,)), make((2,))], return_mask=True)
    assert both.get_non_tensor(("n", "s")) == [["0", None], ["0", "1"]]
    assert list(inner(both, "masks").keys(True, True)) == ["x"]
    assert pad(td, [-1, 0]).get_non_tensor(("n", "s")) == ["1"]


def test_where_takes_rows_of_both() -> None:
    one, other = TensorDict({"s": "a"}, [2]), TensorDict({"s": "b"}, [2])
    keep = torch.tensor([True, False])
    assert one.where(keep, other).get_non_tensor("s") == ["a", "b"]
    assert one.where(keep, one).get_non_tensor("s") == "a"
    assert one.where(keep, 0.0).get_non_tensor("s") == "a"


def test_stacks_are_written_to_out() -> None:
    out = TensorDict({"s": [["", ""], ["", ""]]}, [2, 2])
    stack([TensorDict({"s": list(word)}, [2]) for word in ("ab", "cd")], out=out)
    assert out.get_non_tensor("s") == [["a", "b"], ["c", "d"]]


def test_a_container_of_one_row_gives_its_value() -> None:
    td = make((2,))
    row: object = td[0].get(("n", "s"))
    assert row == NonTensorData("0")
    assert stack([td[0], td[0]]).get_non_tensor(("n", "s")) == ["0", "0"]


def test_it_is_loaded_as_weights_only() -> None:
    file = io.BytesIO()
    torch.save(make((3,))[1:], file)
    file.seek(0)
    holds(torch.load(file, weights_only=True))


def test_a_vmap_sees_all_values_and_gives_them_back() -> None:
    seen = []

    def row(td: TensorDict) -> TensorDict:
        seen.append(td.get_non_tensor(("n", "s")))
        return td.clone()

    holds(torch.vmap(row)(make((2,))))
    assert seen == [["0", "1"]]
    with pytest.raises(InvalidValue, match="`s` has one value per row, so `in_dims` of `vmap`"):
        torch.vmap(row, in_dims=1)(make((2, 2)))
    with pytest.raises(InvalidValue, match="`s` has one value per row, so `out_dims` of `vmap`"):
        torch.vmap(row, out_dims=1)(make((2, 2)))


def test_it_is_traced_without_reading_it() -> None:
    def run(td: TensorDict) -> TensorDictBase:
        return stack([td[1:].flip(0), td[1:]]).reshape(-1) + 0

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    holds(compiled(make((3,))))
    other = make((3,))
    other[0] = {"n": {"s": "0"}}
    holds(compiled(other))


def test_a_compiled_write_takes_its_values() -> None:
    def write(td: TensorDict, new: TensorDict) -> TensorDict:
        td.update_(new)
        td[0] = new[1]
        return td

    compiled = torch.compile(write, fullgraph=True, backend="eager")
    for td in (write(make((2,)), make((2,)).flip(0)), compiled(make((2,)), make((2,)).flip(0))):
        assert td["n", "s"] == ["0", "0"]
        assert td["x"].tolist() == [0, 0]


def test_it_shows_its_values() -> None:
    wrapper = NonTensorStack("a", "b")
    assert repr(wrapper) == "NonTensorStack(['a', 'b'], batch_size=torch.Size([2]), device=None)"
    assert repr(NonTensorStack(*range(30))).startswith("NonTensorStack([0, 1,")
    assert "... (10 more)]" in repr(NonTensorStack(*range(30)))
    assert "&lt;b&gt;" in TensorDict({"s": ["<b>", "x"]}, [2])._repr_html_()


def test_it_is_a_field() -> None:
    class Labelled(TensorClass):
        x: Tensor
        label: list[str]

    data = Labelled(torch.arange(3), ["a", "b", "c"], batch_size=3)
    assert data[1:].label == ["b", "c"]


def test_a_batch_that_it_does_not_fit_is_refused() -> None:
    td = TensorDict({"n": {"s": ["a", "b"]}}, [2])
    with pytest.raises(ShapeMismatch, match=r"does not fit entry `s`: .*got \(2,\)"):
        td.batch_size = torch.Size([2, 1])
    with pytest.raises(ShapeMismatch, match="`s`"):
        TensorDict({"s": NonTensorStack("a", "b")}, [3])


def test_the_batch_size_of_its_container_changes() -> None:
    td = TensorDict({"s": [["a", "b"], ["c", "d"]]}, [2, 2])
    td.batch_size = [2]
    assert td[1].get_non_tensor("s") == ["c", "d"]
    assert td.get("s").batch_size == (2, 2)  # type: ignore[union-attr]  # a wrapper
    td.batch_size = []
    assert td.get_non_tensor("s") == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize("rows", [["a", "b"], []])
def test_rows_go_through_torch_func(rows: list[str]) -> None:
    words = NonTensorStack.from_list(rows, [len(rows)])
    td = TensorDict({"x": torch.ones(len(rows), 3), "w": words}, [len(rows)])
    inside: list[TensorDict] = []

    def loss(given: TensorDict) -> torch.Tensor:
        inside.append((given * 2).flip(0))
        inside.append(cat([given, given]))
        inside.append(given.clone()[torch.ones(len(rows), dtype=torch.bool)])
        return (given["x"] * given["x"]).sum()

    slope = torch.func.grad(loss)(td)
    assert slope["w"] == rows
    assert torch.equal(slope["x"], 2 * td["x"])
    found = [each["w"] for each in inside]
    assert found == [rows[::-1], rows + rows, rows]
    assert [each[:]["w"] for each in inside] == found  # nothing of the call is left


def test_wrappers_in_a_list_are_taken_off() -> None:
    rows = [NonTensorData(value) for value in ("a", ["b"], [])]
    assert NonTensorStack.from_list(rows).tolist() == ["a", ["b"], []]
    assert NonTensorStack.from_list([["a", "c"], ["b", "d"]]).batch_size == (2, 2)
    assert NonTensorStack.from_list([["a", "c"], ["b"]]).tolist() == [["a", "c"], ["b"]]
    assert NonTensorStack[str] is NonTensorStack  # type: ignore[misc]  # for readers alone


def test_it_is_indexed_and_moved_as_a_tensor_of_its_batch() -> None:
    node = NonTensorStack(*"abcd")
    assert [each.data for each in node] == list("abcd")  # type: ignore[attr-defined]  # wrappers of one row
    assert node[1:3].tolist() == ["b", "c"]
    assert (node.ndim, node.dim(), node.numel(), len(node), node.size(0)) == (1, 1, 4, 4, 4)
    assert node.view(2, 2).tolist() == node.reshape(2, 2).tolist() == [["a", "b"], ["c", "d"]]
    assert node.view(2, 2).transpose(0, 1).tolist() == [["a", "c"], ["b", "d"]]
    assert node.view(2, 2).permute(1, 0).flatten().tolist() == ["a", "c", "b", "d"]
    assert node.unflatten(0, (2, 2)).unsqueeze(0).squeeze(0).batch_size == (2, 2)
    assert node.expand(2, 4).tolist() == [list("abcd")] * 2
    assert node.repeat(2).tolist() == list("abcdabcd")
    assert node.repeat_interleave(2).tolist() == list("aabbccdd")
    assert [part.tolist() for part in node.split(3)] == [list("abc"), ["d"]]
    assert [part.tolist() for part in node.chunk(2)] == [list("ab"), list("cd")]
    assert [part.tolist() for part in node.unbind(0)] == list("abcd")
    assert node.gather(0, torch.tensor([3, 0])).tolist() == ["d", "a"]
    assert node.masked_select(torch.tensor([True, False, False, True])).tolist() == ["a", "d"]
    assert node.to("cpu").device == torch.device("cpu")
    copied = node.clone().contiguous()
    node[0] = "z"
    assert (node.tolist()[0], copied.tolist()[0]) == ("z", "a")  # type: ignore[index]  # lists
    node[1:3] = ["x", "y"]
    assert node.tolist() == list("zxyd")
    with pytest.raises(ShapeMismatch):
        node[1:3] = ["x", "y", "z"]


def test_columns_of_text_are_joined_alone() -> None:
    one, other = NonTensorStack(*"ab"), NonTensorStack(*"cd")
    joined: object = torch.cat([one, other])  # type: ignore[list-item]  # wrappers
    stacked: object = torch.stack([one, other], 1)  # type: ignore[list-item]  # wrappers
    mixed: object = torch.stack([NonTensorData(1), NonTensorData(None)])  # type: ignore[list-item]  # wrappers
    assert cast("NonTensorStack", joined).tolist() == list("abcd")
    assert cast("NonTensorStack", stacked).tolist() == [["a", "c"], ["b", "d"]]
    assert cast("NonTensorStack", mixed).tolist() == [1, None]


def test_an_item_of_a_read_list_is_written_to_its_row() -> None:
    td = TensorDict({"s": [["a", "b"], ["c", "d"]]}, [2, 2])
    words: LinkedList = td["s"]  # type: ignore[assignment]  # a list of lists
    assert isinstance(words, LinkedList)
    words[0][1] = "x"  # type: ignore[index]  # as above
    words[1] = ["y", "z"]
    assert words == td["s"] == [["a", "x"], ["y", "z"]]
    words.append(["more"])
    assert td["s"] == [["a", "x"], ["y", "z"]]
    with pytest.raises(ShapeMismatch):
        words[0] = ["only one"]
    assert type(pickle.loads(pickle.dumps(words))) is list
    same = NonTensorData("x", [2]).tolist(as_linked_list=True)
    with pytest.raises(InvalidArgument, match="one value for the whole batch"):
        same[0] = "y"  # type: ignore[index]  # a list


def test_tensors_are_listed_if_asked() -> None:
    node = NonTensorStack(torch.ones(2), "a")
    assert node.tolist(convert_tensors=True) == [[1.0, 1.0], "a"]
    assert NonTensorData(torch.ones(2)).tolist(convert_tensors=True) == [1.0, 1.0]


def test_its_batch_size_may_be_told() -> None:
    told = NonTensorStack("a", "b", batch_size=[2], strict_shape=True)
    assert (told == NonTensorStack("a", "b")).all()
    with pytest.raises(ShapeMismatch, match="must be that of the values"):
        NonTensorStack("a", "b", batch_size=[3])


def test_a_linked_list_that_other_code_copies_by_its_type_is_a_list() -> None:
    td = TensorDict({"w": ["a", "b"]}, [2])
    words: Any = td["w"]
    copied = type(words)(value for value in words)
    copied[0] = "c"
    assert copied == ["c", "b"]
    assert td["w"] == ["a", "b"]


def test_a_list_in_a_container_without_batch_has_rows_of_its_own() -> None:
    td = TensorDict({"w": ["a", "b"], "l": [["a"], ["b", "c"]], "g": [["a", "b"]], "t": ("a", "b")})
    assert td["w"] == ["a", "b"]
    for key, batch in {"w": (2,), "l": (2,), "g": (1, 2)}.items():
        entry: object = td.get(key)
        assert isinstance(entry, NonTensorStack)
        assert entry.batch_size == batch
    assert td.get_non_tensor("t") == ("a", "b")
    both: object = stack([td, td]).get("w")
    assert isinstance(both, NonTensorStack)
    assert both.tolist() == [["a", "b"]] * 2
    assert both.batch_size == (2, 2)
    assert td.expand(3)[0]["w"] == ["a", "b"]
    with set_list_to_stack(False):
        one: object = TensorDict({"w": ["a", "b"]}).get("w")
    assert isinstance(one, NonTensorData)


def test_rows_of_lists_count_for_the_batch_size_that_is_inferred() -> None:
    source = {"q": ["s1", "s2"], "x": torch.zeros(2, 3)}
    assert TensorDict.from_dict(source, auto_batch_size=True).batch_size == (2,)
    assert TensorDict(source).auto_batch_size_().batch_size == (2,)
    assert TensorDict(source).auto_batch_size_()[1]["q"] == "s2"


def test_rows_of_lists_of_different_lengths_are_members_of_a_lazy_stack() -> None:
    rows: list[object] = [{"w": ["a"]}, {"w": ["b", "c"]}]
    made = TensorDict.from_list(rows)
    assert [row["w"] for row in made.unbind(0)] == [["a"], ["b", "c"]]
    with pytest.raises(RuntimeError, match="must be equal"):
        stack([TensorDict({"w": ["a"]}), TensorDict({"w": ["b", "c"]})])


def test_an_entry_has_no_keys_that_a_lazy_stack_would_have() -> None:
    rows = NonTensorStack("a", "b")
    assert list(rows.valid_keys()) == []
    assert rows.get_nestedtensor("key", None) is None
    with pytest.raises(KeyError, match="has no keys"):
        rows.get_nestedtensor("key")


def test_rows_are_added_to_words() -> None:
    words = NonTensorStack("a", "b")
    row = words[0]
    words.append(NonTensorData("c"))
    words.insert(0, NonTensorData("z"))
    words.extend([NonTensorData("d"), NonTensorData("e")])
    assert words.tolist() == ["z", "a", "b", "c", "d", "e"]
    words[1] = "new"
    assert row.tolist() == "new"
    assert words.clone().tolist() == ["z", "new", "b", "c", "d", "e"]
    assert words[torch.tensor([5, 0])].tolist() == ["e", "z"]
    assert cast(Any, torch.stack)([words, words], 1)[3].tolist() == ["c", "c"]
    with pytest.raises(ShapeMismatch, match=r"a row must have batch_size \(\), got \(2,\)"):
        words.append(NonTensorStack("x", "y"))
    with pytest.raises(InvalidArgument, match="must be a non-tensor entry"):
        words.append("x")  # type: ignore[arg-type]  # the error is the promise
    with pytest.raises(Locked, match="cannot add a row"):
        words.lock_().append(NonTensorData("f"))
    assert words.batch_size == (6,)


def test_words_answer_what_containers_are_asked() -> None:
    words = NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d"))
    assert words.contiguous() is words
    assert words.to_tensordict() is words
    assert words.to_lazystack() is words
    assert words.flatten(1) is words
    assert words.permute(0, 1) is not words
    assert not words.is_empty()
    assert words.numpy() == [["a", "b"], ["c", "d"]]
    assert words.load_state_dict({}) is words
    with pytest.raises(KeySetMismatch, match="got a state dict with `a`"):
        words.load_state_dict({"a": 1})
    assert words.load_state_dict({"a": 1}, strict=False) is words
    assert words.update_at_(NonTensorStack("x", "y"), 1).tolist() == [["a", "b"], ["x", "y"]]
    with pytest.raises(IndexError):
        words.update_at_(NonTensorStack("x", "y"), 9)
    with pytest.raises(KeyError):
        words.setdefault(("n", "c"), 1)
    out = words.clone()
    assert words.apply(lambda x: x, out=out) is out


# Parts of a stack that had one value for all of their rows


def episodes() -> TensorDict:
    """Two episodes of four steps, of one task each."""
    parts = [TensorDict({"x": torch.arange(4), "task": task}, [4]) for task in ("lift", "push")]
    return stack(parts)


PARTS: tuple[tuple[Callable[[TensorDict], TensorDictBase], object], ...] = (
    (lambda td: td[1], "push"),
    (lambda td: td[-1, :2], "push"),
    (lambda td: td[1][1:], "push"),
    (lambda td: td[torch.tensor([1, 0])][0], "push"),
    (lambda td: td[[1]].squeeze(0), "push"),
    (lambda td: td.unbind(0)[1], "push"),
    (lambda td: td.split(1)[1][0], "push"),
    (lambda td: list(td)[1], "push"),
    (lambda td: td.permute(1, 0)[:, 1], "push"),
    (lambda td: td.view(2, 2, 2)[1, 0], "push"),
    (lambda td: td[None][0, 1], "push"),
    (lambda td: td.expand(3, 2, 4)[2, 1], "push"),
    (lambda td: td.repeat(2, 1)[3], "push"),
    (lambda td: stack([td, td])[1, 1], "push"),
    (lambda td: lazy_stack([td[0], td[1]])[1], "push"),
    (lambda td: cat([td, td])[3], "push"),
    (lambda td: td.clone()[1].clone(), "push"),
    (lambda td: td.double()[1], "push"),
    (lambda td: td.where(torch.tensor([True, False]), td.clone())[1], "push"),
    (lambda td: copy.deepcopy(td)[1], "push"),
    (lambda td: pickle.loads(pickle.dumps(td))[1], "push"),
    (lambda td: tree_map(lambda leaf: leaf, td)[1], "push"),
    (lambda td: TensorDict({"task": "lift"}, [2, 4]).unsqueeze(0).squeeze(0), "lift"),
    (lambda td: td, [["lift"] * 4, ["push"] * 4]),
    (lambda td: td[:1], [["lift"] * 4]),
    (lambda td: td[:, 0], ["lift", "push"]),
    (lambda td: stack([td, td])[:, 1], [["push"] * 4] * 2),
    (lambda td: cat([td[0], td[1]])[:4], ["lift"] * 4),
    (lambda td: td.reshape(-1)[:3], ["lift"] * 3),
    (lambda td: td.flatten()[torch.tensor([4, 5])], ["push"] * 2),
    (lambda td: td[:1].view(-1), ["lift"] * 4),
    (lambda td: td.reshape(-1).clone()[:2].clone(), ["lift"] * 2),
    (lambda td: stack([td.flatten()[:2], td.flatten()[2:4]])[0], ["lift"] * 2),
    (lambda td: td[torch.ones(2, 4, dtype=torch.bool)][:2], ["lift"] * 2),
    (lambda td: td[[1, 1], [0, 1]], ["push"] * 2),
    (lambda td: stack([TensorDict({"task": ["a"] * 4}, [4])] * 2)[0], ["a"] * 4),
)


@pytest.mark.parametrize(("change", "expected"), PARTS)
def test_a_part_of_one_value_is_read_as_one(
    change: Callable[[TensorDict], TensorDictBase], expected: object
) -> None:
    made = change(episodes())
    words: Any = made.get("task")
    assert made["task"] == expected
    assert made.to_dict()["task"] == expected
    assert len(words.tolist()) == made.batch_size[0]


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (NonTensorStack("a", "a"), "a"),
        (NonTensorStack("a"), "a"),
        (NonTensorStack.from_list([["a", "a"], ["a", "a"]]), "a"),
        (NonTensorStack(NonTensorData([1]), NonTensorData([1])), [1]),
        (NonTensorStack(*[NonTensorData("a", batch_size=[3])] * 2), "a"),
        (NonTensorStack(None, None), None),
        (NonTensorStack("a", "b")[:1], "a"),
    ],
)
def test_data_of_rows_with_one_value_is_the_value(words: NonTensorStack, value: object) -> None:
    assert words.data == value


def test_rows_with_several_values_have_no_data() -> None:
    words = NonTensorStack("a", "b")
    with pytest.raises(AttributeError, match=r"got NonTensorStack\(\['a', 'b'\].*`tolist\(\)`"):
        _ = words.data
    assert not hasattr(words, "data")
    assert not hasattr(words[:0], "data")


def test_writes_to_parts_reach_the_rows() -> None:
    td = episodes()
    part = td[1]
    part.set_("task", "pull")
    assert td["task"] == [["lift"] * 4, ["pull"] * 4]
    assert part["task"] == td[1]["task"] == "pull"
    td[1, 2] = TensorDict({"x": torch.tensor(0), "task": "rest"})
    rows = ["pull", "pull", "rest", "pull"]
    assert part["task"] == td[1]["task"] == rows
    td[0] = part
    assert td[0]["task"] == rows
    td[1] = TensorDict({"x": torch.arange(4), "task": "walk"}, [4])
    assert td["task"] == [rows, ["walk"] * 4]
    assert td.reshape(-1)[0]["task"] == "pull"


def test_parts_are_compared_saved_and_loaded_as_rows(tmp_path: Path) -> None:
    td = episodes()
    rows = TensorDict({"x": td["x"], "task": td["task"]}, [2, 4])
    assert (td == rows).all()
    assert (td[1] == rows[1]).all()
    td.save(tmp_path / "file")
    assert TensorDict.load(tmp_path / "file")["task"] == rows["task"]
    buffer = io.BytesIO()
    torch.save(td, buffer)
    buffer.seek(0)
    assert torch.load(buffer)[1]["task"] == "push"
    assert "Shared" not in repr(td)
    assert "Shared" not in repr(stack([TensorDict({"w": w}, [30]) for w in "ab"]).get("w"))
    lists = stack([TensorDict({"w": NonTensorData([1], [4])}, [4]) for _ in range(2)])
    assert lists[0].clone()["w"] == [1]


def test_parts_are_kept_as_rows_in_formats_of_others(tmp_path: Path) -> None:
    td = episodes()
    for part, words in ((td, td["task"]), (td[1], ["push"] * 4)):
        part.to_json(tmp_path / "rows.json")
        assert TensorDict.from_json(tmp_path / "rows.json")[0]["task"] == words[0]
        assert part.consolidate()["task"] == part["task"]
        part.memmap(tmp_path / f"maps{part.ndim}")
        assert TensorDict.load_memmap(tmp_path / f"maps{part.ndim}")["task"] == words
    pytest.importorskip("h5py")
    assert td.to_h5(tmp_path / "all.h5")["task"] == td["task"]
    assert td[1].to_h5(tmp_path / "part.h5")["task"] == ["push"] * 4


@pytest.mark.parametrize(
    "join",
    [stack, lazy_stack, LazyStackedTensorDict.lazy_stack, maybe_dense_stack, torch.stack],
)
def test_values_alone_are_stacked_as_rows_by_every_function(
    join: Callable[..., NonTensorStack],
) -> None:
    made = join([NonTensorData("x"), NonTensorData("y")])
    assert type(made) is NonTensorStack
    assert made.tolist() == ["x", "y"]
    rows = join([NonTensorStack("x", "y"), NonTensorData("z", batch_size=[2])], -1)
    assert rows.tolist() == [["x", "z"], ["y", "z"]]
    assert join([NonTensorData("x")]).batch_size == (1,)
    with pytest.raises(InvalidArgument, match="1 of"):
        join([TensorDict(), NonTensorData("x")])


@pytest.mark.parametrize("batch", [[], [2, 3], [0]])
@pytest.mark.parametrize("dim", [0, -1])
def test_a_value_and_the_rows_of_it_are_written_together(batch: list[int], dim: int) -> None:
    td = TensorDict({"w": "v", "n": {"w": "v"}}, batch)
    rows = td.unsqueeze(dim)
    more = td.unsqueeze(0)
    assert td.view(-1)["w"] == td.clone()["w"] == "v"
    rows.set_("w", "W")
    rows.update_({"n": {"w": "W"}})
    if 0 in batch:
        return
    assert td["w"] == td["n", "w"] == td.view(-1)["w"] == "W"
    assert (more == TensorDict({"w": "W", "n": {"w": "W"}}, batch).unsqueeze(0)).all()
    td.set_("w", "u")
    assert rows["w"] == TensorDict({"w": "u"}, batch).unsqueeze(dim)["w"]
    td.clone().set_("w", "c")
    td.unsqueeze(0).clone().set_("w", "c")
    td.view(-1).set_("w", "c")
    assert td["w"] == rows[(0,) * rows.ndim]["w"] == "u"


def test_one_row_of_a_value_is_written_alone() -> None:
    td = TensorDict({"w": "v"}, [2])
    rows = td.unsqueeze(0)
    rows[0, 1].set_("w", "W")
    assert list(rows["w"]) == [["v", "W"]]
    assert td["w"] == "v"
    td.set_("w", "u")
    assert list(rows["w"]) == [["u", "u"]]
    del rows
    assert list(td.unsqueeze(-1)["w"]) == [["u"], ["u"]]
