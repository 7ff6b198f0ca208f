"""`vmap` maps batch dimensions of containers, whatever the rank of their leaves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from kd_core import (
    InvalidValue,
    LazyStackedTensorDict,
    MetaData,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)

X = torch.arange(6.0).reshape(2, 3)


def alike() -> TensorDict:
    return TensorDict({"a": torch.rand(2, 3, 4), "b": torch.rand(2, 3, 5)}, [2, 3])


def other_ranks() -> TensorDict:
    return TensorDict({"a": torch.rand(2, 3), "n": {"b": torch.rand(2, 3, 3, 3)}}, [2, 3])


def stacked() -> TensorDictBase:
    return lazy_stack([alike()[0], alike()[0]])


KINDS = pytest.mark.parametrize("make", [alike, other_ranks, stacked])


def double(td: TensorDictBase) -> TensorDictBase:
    return td * 2


@pytest.mark.parametrize("make", [alike, stacked])
@pytest.mark.parametrize("dim", [-1, 2])
def test_only_a_batch_dimension_is_mapped(make: Callable[[], TensorDictBase], dim: int) -> None:
    td = make().exclude("b")
    message = r"`in_dims` .* from 0 to 1, got dimension 2 of a leaf"
    with pytest.raises(InvalidValue, match=message):
        torch.vmap(double, in_dims=dim)(td)
    with pytest.raises(InvalidValue, match=message):
        torch.vmap(lambda td, x: td * x, in_dims=({"td": dim}, 0), chunk_size=1)(
            {"td": td}, torch.ones(4)
        )


def test_a_dimension_is_one_of_the_batch_of_each_leaf() -> None:
    td = TensorDict({"a": torch.rand(2, 3), "b": torch.rand(2, 2, 3)}, [2])
    with pytest.raises(InvalidValue, match="from 0 to 0, got dimension 2 of a leaf"):
        torch.vmap(double, in_dims=-1)(td)


@KINDS
@pytest.mark.parametrize("dim", [-1, 2])
def test_a_result_is_stacked_within_its_batch(make: Callable[[], TensorDictBase], dim: int) -> None:
    wrong = (InvalidValue, IndexError)  # torch knows how many dimensions a tensor has
    with pytest.raises(wrong, match=r"`out_dims` .* from 0 to 1, got|range of \[-2, 1\]"):
        torch.vmap(double, out_dims=dim)(make())
    with pytest.raises(wrong, match=r"`out_dims` .* from 0 to 1, got|range of \[-2, 1\]"):
        torch.vmap(lambda td: (td["a"], td), out_dims=(0, dim))(make())


@KINDS
@pytest.mark.parametrize("in_dim", [0, 1])
@pytest.mark.parametrize("out_dim", [0, 1])
def test_batch_dimensions_are_mapped_and_put_back(
    make: Callable[[], TensorDictBase], in_dim: int, out_dim: int
) -> None:
    td = make()
    result = torch.vmap(double, in_dims=in_dim, out_dims=out_dim)(td)
    expected = (td * 2).contiguous()
    expected = expected if in_dim == out_dim else expected.transpose(0, 1)
    assert result.batch_size == expected.batch_size
    assert (result == expected).all()


def test_dimensions_of_other_arguments_may_be_negative() -> None:
    result = torch.vmap(lambda td, x: td["a"] + x, in_dims=(1, -1), out_dims=-1)(other_ranks(), X)
    assert result.shape == (2, 3)


def test_a_tree_of_dimensions_is_checked() -> None:
    td = alike()
    dims = pytree.tree_map(lambda _: -1, td.exclude("b"))
    with pytest.raises(InvalidValue, match="got dimension 2"):
        torch.vmap(double, in_dims=(dims,))(td.exclude("b"))


def test_a_container_without_batch_is_mapped_as_a_dict_of_tensors() -> None:
    leaves = {"w": torch.arange(24.0).reshape(8, 3), "n": {"v": torch.arange(8.0)}}
    td = TensorDict(leaves)
    seen: list[torch.Size] = []

    def both(each: Any) -> Any:
        if isinstance(each, TensorDict):
            seen.append(each.batch_size)
        return each

    result = torch.vmap(both)(td)
    assert seen == [()]
    assert result.batch_size == (8,)
    assert (result == td).all()
    features = torch.vmap(both, in_dims=1, out_dims=0)(td.select("w"))
    assert torch.equal(features["w"], torch.vmap(both, in_dims=1)({"w": td["w"]})["w"])
    assert torch.vmap(lambda t, x: t["w"] * x, in_dims=(None, 0))(td, X[:, :1]).shape == (2, 8, 3)


def test_a_feature_below_a_container_without_batch_leaves_the_batch_below() -> None:
    td = TensorDict({"n": TensorDict({"v": torch.zeros(2, 5)}, [2])})
    seen: list[torch.Size] = []
    torch.vmap(lambda each: (seen.append(each["n"].batch_size), each["n", "v"])[1], in_dims=1)(td)  # type: ignore[func-returns-value]  # known at run time
    assert seen == [(2,)]


@pytest.mark.parametrize("leaf", [False, True])
def test_a_container_without_leaves_below_one_without_batch_is_mapped_too(leaf: bool) -> None:
    below = TensorDict({"w": ["x", "y"], "deep": TensorDict({}, [2, 3])}, [2])
    if leaf:
        below["v"] = torch.zeros(2)
    seen: list[torch.Size] = []

    def part(td: Any) -> Any:
        seen.extend((td["n"].batch_size, td["n", "deep"].batch_size))
        return td + 1

    found: Any = torch.vmap(part)(TensorDict({"a": torch.zeros(2), "n": below}))
    assert seen == [(), (3,)]
    assert found["n"].batch_size == (2,)
    assert found["n", "deep"].batch_size == (2, 3)
    assert found["n", "w"] == ["x", "y"]


def test_dimensions_are_checked_at_each_level() -> None:
    inner = torch.vmap(double, in_dims=-1)
    with pytest.raises(InvalidValue, match="from 0 to 0, got dimension 1"):
        torch.vmap(inner)(alike().exclude("b"))
    assert torch.vmap(torch.vmap(double))(alike()).batch_size == (2, 3)


def test_a_stack_without_leaves_has_the_batch_size_of_its_container() -> None:
    stack = lazy_stack([TensorDict({}, [2, 2]) for _ in range(3)], 1)
    entries = {"a": torch.zeros(2, 3, 2), "empty": TensorDict({}, [2, 3, 2]), "stack": stack}
    got = torch.vmap(lambda td: td.reshape(6), 0, 1)(TensorDict(entries, [2, 3, 2]))
    assert got["empty"].batch_size == got["stack"].batch_size == (6, 2)


def test_names_follow_the_mapped_dimension() -> None:
    td = TensorDict({"a": torch.rand(2, 3, 4)}, [2, 3], names=["x", "y"])
    for dim, left in enumerate("yx"):
        seen: list[list[str | None]] = []

        def note(each: TensorDict, seen: list[list[str | None]] = seen) -> TensorDict:
            seen.append(each.names)
            return each

        for out in (0, 1):
            result = torch.vmap(note, in_dims=dim, out_dims=out)(td)
            assert result.names == ([None, left] if out == 0 else [left, None])
        assert seen == [[left], [left]]


def test_a_lazy_stack_stays_one() -> None:
    stack = lazy_stack([alike()[0], alike()[0]])
    assert type(pytree.tree_map(torch.neg, stack)) is LazyStackedTensorDict
    seen: list[object] = []
    result = torch.vmap(lambda each: (seen.append(each), each * 2)[1], in_dims=1)(stack)  # type: ignore[func-returns-value]  # known at run time
    assert type(seen[0]) is LazyStackedTensorDict
    assert (result == (stack * 2).contiguous().transpose(0, 1)).all()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch calls it
def test_forward_gradients_of_a_lazy_stack() -> None:
    stack = lazy_stack([TensorDict({"a": torch.full((2,), i)}) for i in (1.0, 2.0)])

    def loss(each: TensorDictBase) -> Tensor:
        return (each["a"] ** 2).sum()

    forward = torch.func.jacfwd(loss)(stack)
    assert forward["a"].tolist() == torch.func.jacrev(loss)(stack)["a"].tolist() == [[2, 2], [4, 4]]
    second = torch.func.hessian(loss)(stack)["a"]["a"]
    assert torch.equal(second.reshape(4, 4), torch.eye(4) * 2)


@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_of_a_function_that_returns_a_lazy_stack(dim: int) -> None:
    inner = [TensorDict({"a": torch.rand(2, 4), "n": {"b": torch.rand(2)}}, [2]) for _ in range(3)]
    stack = lazy_stack(inner, dim)
    found = torch.func.jacrev(lambda scale: stack * scale)(torch.tensor(2.0))
    assert type(found) is LazyStackedTensorDict
    assert bool((found == stack).all())
    scales = torch.rand(5, 2)
    rows = torch.vmap(torch.func.jacrev(lambda scale: stack * scale.sum()))(scales)
    assert rows["a"].shape == (5, *stack["a"].shape, 2)
    assert bool((rows["n", "b"] == stack["n", "b"][..., None]).all())
    given, cotangents = torch.func.vjp(lambda scale: stack * scale, torch.tensor(2.0))[:2]
    torch.testing.assert_close(cotangents(given)[0], 2 * (stack**2).sum(reduce=True))


MOVES: list[Callable[[Any], Any]] = [
    lambda td: td.unsqueeze(0),
    lambda td: td.flip(1),
    lambda td: td.reshape(6),
    lambda td: td.view(3, 2),
    lambda td: td.transpose(0, 1),
    lambda td: td.expand(4, 2, 3),
    lambda td: td.roll(1, 0),
    lambda td: td.gather(0, torch.zeros(1, 3, dtype=torch.int64)),
]


@pytest.mark.parametrize("move", MOVES)
def test_rows_of_a_lazy_stack_are_moved_inside_of_gradients(move: Callable[[Any], Any]) -> None:
    td = alike()

    def slope(source: TensorDictBase, scale: Tensor) -> Any:
        return torch.func.grad(lambda scale: move(source * scale).sin().sum(reduce=True))(scale)

    for dim in (0, 1):
        stack = lazy_stack(list(td.unbind(dim)), dim)
        torch.testing.assert_close(slope(stack, X[0, 1]), slope(td, X[0, 1]))
        scales = torch.rand(4)
        rows = torch.vmap(lambda scale, stack=stack: slope(stack, scale))(scales)
        torch.testing.assert_close(rows, torch.stack([slope(td, scale) for scale in scales]))
        assert bool((move(stack) == move(td)).all())  # nothing of a transform is remembered


def selects() -> bool:
    """Return whether torch selects by a single number that `vmap` maps: 2.10 reads it instead."""
    try:
        torch.vmap(lambda row: torch.arange(2)[row])(torch.arange(2))
    except RuntimeError:
        return False
    return True


SELECTS = selects()


@pytest.mark.parametrize("dim", [0, 1])
def test_numbers_of_rows_that_vmap_maps_select_them(dim: int) -> None:
    td: Any = alike()
    stack = lazy_stack(list(td.unbind(dim)), dim)
    index = torch.tensor([[0, 1], [1, 0], [1, 1]])
    found: Any = torch.vmap(lambda rows: stack[:, rows])(index)
    assert bool((found == torch.stack([td[:, rows] for rows in index])).all())
    if SELECTS:
        one: Any = torch.vmap(lambda row: stack[:, row])(index[:, 0])
        assert bool((one == torch.stack([td[:, row] for row in index[:, 0]])).all())
    first: Any = torch.vmap(lambda rows: stack[rows])(index)
    assert bool((first == torch.stack([td[rows] for rows in index])).all())


@pytest.mark.parametrize("index", [lambda row: row, lambda row: (slice(None), row)])
@pytest.mark.parametrize("rank", [1, 2] if SELECTS else [2])
def test_values_of_rows_are_not_selected_by_numbers_that_vmap_maps(
    index: Callable[[Tensor], Any], rank: int
) -> None:
    words = [["a", "b"], ["c", "d"]]
    dense = TensorDict({"a": torch.rand(2, 2), "w": words}, [2, 2])
    rows = torch.zeros(3, 2, dtype=torch.int64) if rank == 2 else torch.zeros(3, dtype=torch.int64)
    for td in (dense, lazy_stack(list(dense.unbind(0)), 0), lazy_stack(list(dense.unbind(1)), 1)):
        with pytest.raises(InvalidValue, match="one value per row cannot be moved"):
            torch.vmap(lambda row, td=td: td[index(row)])(rows)


def test_the_value_of_a_batch_is_the_same_data_below_vmap() -> None:
    """A structure compares what torch took apart with what it makes of it."""
    td = TensorDict({"a": torch.rand(3, 2), "word": "word"}, [3])

    def scaled(part: TensorDict) -> Any:
        return torch.func.jacrev(lambda scale: part * scale)(torch.tensor(2.0))

    found: Any = torch.vmap(scaled)(td)
    assert bool((found.exclude("word") == td.exclude("word")).all())
    part, whole = td[0], TensorDict({"a": torch.rand(2), "word": "word"})
    assert (
        pytree.tree_structure(part)
        == pytree.tree_structure(whole)
        != pytree.tree_structure(whole.replace(word="other"))
    )
    marked = [TensorDict({"a": x, "word": MetaData("word")}, x.shape) for x in (X, X[0])]
    assert pytree.tree_structure(marked[0]) == pytree.tree_structure(marked[1])


@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_taken_inside_of_vmap_keep_the_batch(dim: int) -> None:
    """A gradient is built of tensors that `vmap` maps, though it was not taken apart outside."""
    td = TensorDict({"a": torch.rand(2, 3, 4), "b": torch.rand(2, 3)}, [2, 3], names=["x", "y"])
    seen: list[tuple[object, object]] = []

    def pulled(part: Any) -> Any:
        made, pull = torch.func.vjp(lambda part: part.sin(), part)[:2]
        (found,) = pull(made)
        seen.append(((part.batch_size, part.names), (found.batch_size, found.names)))
        return found

    for source in (td, lazy_stack(list(td.unbind(0)), 0), lazy_stack(list(td.unbind(1)), 1)):
        found: Any = torch.vmap(pulled, dim, dim)(source)
        assert bool((found == td.sin() * td.cos()).all())
        nested: Any = torch.vmap(torch.vmap(pulled))(source)
        assert bool((nested == td.sin() * td.cos()).all())
    assert all(before == after for before, after in seen)


def test_what_is_no_result_of_vmap_is_not_taken_for_one() -> None:
    def inside(row: TensorDict) -> TensorDict:
        wide = pytree.tree_map(lambda leaf: leaf.unsqueeze(-1), row)
        still = pytree.tree_map(lambda leaf: torch.ones(2, 3), row)  # the shape that leaves
        return TensorDict({"wide": wide, "still": still["a"].sum()})

    td = TensorDict({"a": torch.rand(2, 3), "b": torch.rand(2, 3)}, [2])
    result = torch.vmap(inside)(td)
    assert result.batch_size == (2,)
    assert result["wide", "a"].shape == (2, 3, 1)
    assert result["still"].tolist() == [6, 6]


IN_PLACE: list[Callable[[Any], Any]] = [
    lambda td: td.add_(1),
    lambda td: td.sqrt_(),
    lambda td: td.mul_(td * 2),
    lambda td: td.update_(td * 2),
    lambda td: td.set_("k0", td["k0"] * 2),
]


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("dim", [0, 1])
def test_leaves_are_written_inside_of_vmap(count: int, dim: int) -> None:
    leaves = {f"k{i}": torch.rand(3, 4, 5) for i in range(count)}
    for write in IN_PLACE:
        expected = write(TensorDict(leaves, [3, 4]).clone())
        td = TensorDict(leaves, [3, 4]).clone()
        result = torch.vmap(write, in_dims=dim, out_dims=dim)(td)
        assert (result == expected).all()
        assert (td == expected).all()  # the leaves that were given


@pytest.mark.parametrize("stacked", [False, True])
def test_out_dims_in_a_tuple_are_those_of_a_container(stacked: bool) -> None:
    td = TensorDict({"a": torch.ones(2, 3, 4), "n": {"b": torch.zeros(2, 3)}}, [2, 3])
    given = lazy_stack(list(td.unbind(0))) if stacked else td
    found = torch.vmap(lambda x: x + 1, (0,), (0,))(given)
    assert found.batch_size == (2, 3)
    assert bool((found == td + 1).all())
    pair = torch.vmap(lambda x: (x + 1, x["a"]), (0,), (0, 1))(given)
    assert bool((pair[0] == td + 1).all())
    assert pair[1].shape == (3, 2, 4)
    assert torch.vmap(lambda x: {"n": x + 1}, out_dims={"n": 0})(given)["n"].batch_size == (2, 3)  # type: ignore[arg-type]  # any tree
    with pytest.raises(ValueError, match="out_dims is not compatible"):
        torch.vmap(lambda x: x + 1, (0,), (0, 0))(given)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_tree_of_dimensions_inside_of_vmap_is_of_zeros_or_refused(stacked: bool) -> None:
    """What torch compares with it there stands for `out_dims=(0,)`, too."""
    dense = TensorDict({"a": torch.rand(2, 3, 3), "b": torch.rand(2, 3, 3)}, [2, 3, 3])
    td: TensorDictBase = lazy_stack(dense.unbind(2), 2) if stacked else dense

    def inner(row: TensorDictBase, dims: object) -> Any:
        return torch.vmap(double, (dims,))(row)

    def made_inside(a: int | None, b: int | None) -> Any:
        def call(row: TensorDictBase) -> Any:
            dims = pytree.tree_map_with_path(lambda path, _: {"a": a, "b": b}[path[0].key], row)
            return inner(row, dims)

        return torch.vmap(call)(td)

    assert bool((made_inside(0, 0) == td * 2).all())
    message = "of dimensions. Inside of another `vmap` .* pass one number or `None` for all of it"
    for a, b in ((1, 1), (0, None)):
        with pytest.raises(ValueError, match=message):
            made_inside(a, b)
    dims = pytree.tree_map(lambda _: 0, td)  # made outside
    with pytest.raises(ValueError, match=message):
        torch.vmap(lambda row: inner(row, dims))(td)
    assert bool((torch.vmap(lambda row: torch.vmap(double, 1, 1)(row))(td) == td * 2).all())
    found = torch.vmap(torch.vmap(lambda each: each["a"] + each["b"], ({"a": 0, "b": None},)))(
        {"a": td["a"], "b": td["b"]}
    )
    assert torch.equal(found, td["a"][:, :, None] + td["b"][:, None])


def test_values_of_rows_stay_where_another_dimension_than_the_stacked_one_is_mapped() -> None:
    rows = [TensorDict({"w": ["x", "y", "z"], "a": torch.zeros(3)}, [3]) for _ in range(2)]
    stack = lazy_stack(rows, 1)
    found = torch.vmap(lambda part: part)(stack)
    assert found["w"] == stack["w"] == [["x", "x"], ["y", "y"], ["z", "z"]]


def swapped(td: TensorDict) -> TensorDict:
    td = td.clone()
    td[0] = td[1]
    return td


@pytest.mark.parametrize(
    "move",
    [
        lambda td: td.flip(0),
        lambda td: td[0],
        lambda td: td[1:],
        lambda td: td[td["a"].argsort()],
        lambda td: td.unbind(0)[1],
        lambda td: td.split(2)[1],
        lambda td: td.reshape(3, 1),
        lambda td: td.unsqueeze(0),
        lambda td: td.expand(2, 3),
        lambda td: torch.cat([td, td], 0),
        lambda td: torch.stack([td, td], 0),
        lambda td: td.update(td.flip(0)),
        lambda td: td == td.clone().set("w", ["a", "b", "c"]),
        swapped,
    ],
)
def test_values_of_rows_are_not_moved_where_vmap_hides_a_dimension(
    move: Callable[[TensorDict], TensorDict],
) -> None:
    td = TensorDict({"a": X, "w": [["a", "b", "c"], ["d", "e", "f"]]}, [2, 3])
    with pytest.raises(InvalidValue, match="one value per row cannot be moved"):
        torch.vmap(move)(td)
    found = torch.vmap(lambda part: (part + 1).clone().update_(part.exclude("w")))(td)
    assert bool((found == td).all())
    summed: Any = torch.vmap(lambda part: part.sum(dim="feature"))(td)
    assert summed["w"] == td["w"]
    again = torch.vmap(torch.vmap(lambda part: part + 1))(td)
    assert again["w"] == td["w"]


def test_values_of_rows_beside_lazy_stacks_alone_are_not_mapped() -> None:
    inner = lazy_stack([TensorDict({"a": torch.zeros(2)}, [2]) for _ in range(3)], 0)
    td = TensorDict({"s": inner, "w": [["a", "b"], ["c", "d"], ["e", "f"]]}, [3, 2])
    stack = lazy_stack([td[row] for row in range(3)], 0)
    with pytest.raises(InvalidValue, match="maps only lazy stacks beside it"):
        torch.vmap(lambda part: part + 1, 1, 1)(stack)


@pytest.mark.parametrize("stacked", [False, True])
def test_values_of_rows_that_vmap_does_not_map_are_repeated(stacked: bool) -> None:
    words = [["a", "b", "c"], ["d", "e", "f"]]
    dense = TensorDict({"x": torch.zeros(2, 3), "w": words, "n": {"w": words}}, [2, 3])
    td: TensorDictBase = lazy_stack(dense.unbind(0)) if stacked else dense
    for fn in (lambda row, _: row, lambda row, _: row + 1, lambda row, _: row.clone()):
        made = torch.vmap(fn, (None, 0))(td, torch.arange(4))
        assert made.batch_size == (4, 2, 3)
        assert made["w"] == made["n", "w"] == [words] * 4
    alone = torch.vmap(lambda _: td[0], randomness="error")(torch.arange(4))
    assert alone["w"] == alone["n", "w"] == [words[0]] * 4
    assert torch.vmap(lambda _: td, out_dims=None)(torch.arange(4))["w"] == words


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_values_of_rows_are_repeated_for_all_chunks(dim: int | None, size: int) -> None:
    words = [["a", "b", "c"], ["d", "e", "f"]]
    below = {"w": words, "x": torch.zeros(2, 3)}
    dense = TensorDict({"x": X, "w": words, "n": below, "empty": {"w": words}}, [2, 3])
    td: TensorDictBase = dense if dim is None else lazy_stack(dense.unbind(dim), dim)
    for each in (td, TensorDict({"x": X, "s": td}, [2, 3])):
        key = "s" if "s" in each else ()
        made = torch.vmap(lambda row, _: row, (None, 0), chunk_size=size)(each, torch.arange(4))
        assert made.batch_size == (4, 2, 3)
        rows: Any = made[key] if key else made
        assert type(rows) is type(td)
        assert rows["w"] == rows["n", "w"] == rows["empty", "w"] == [words] * 4
        mapped: Any = torch.vmap(lambda row: row, chunk_size=size)(each)
        assert (mapped[key] if key else mapped)["w"] == words
    twice = torch.vmap(
        lambda row, _: torch.vmap(lambda row, _: row, (None, 0), chunk_size=size)(row, X[0]),
        (None, 0),
        chunk_size=size,
    )(td, torch.arange(4))
    assert twice["w"] == [[words] * 3] * 4


@pytest.mark.parametrize("size", [None, 1, 2, 3])
@pytest.mark.parametrize("stacked", [False, True])
def test_values_of_rows_that_an_outer_vmap_maps_are_repeated(
    stacked: bool, size: int | None
) -> None:
    """The inner `vmap` gave them the rows of the outer one, or raised an error."""
    words = [["a", "b", "c"], ["d", "e", "f"]]
    dense = TensorDict({"x": X, "w": words}, [2, 3])
    td: TensorDictBase = lazy_stack(dense.unbind(1), 1) if stacked else dense

    def repeat(count: int, fn: Callable[[Any], Any] = lambda row: row) -> Callable[[Any], Any]:
        return lambda row: torch.vmap(lambda row, _: fn(row), (None, 0), chunk_size=size)(
            row, torch.arange(count)
        )

    def each(fn: Callable[[Any], Any] = lambda row: row) -> Callable[[Any], Any]:
        return lambda row: torch.vmap(fn, chunk_size=size)(row)

    for count in (1, 2, 4):  # of 2 it were the rows of the outer one
        assert each(repeat(count))(td)["w"] == [[row] * count for row in words]
        assert each(each(repeat(count)))(td)["w"] == [[[w] * count for w in row] for row in words]
        assert each(repeat(count, each()))(td)["w"] == [[row] * count for row in words]
        assert repeat(2, each(repeat(count)))(td)["w"] == [[[row] * count for row in words]] * 2
    assert each(each())(td)["w"] == words


def test_rows_that_vmap_hides_are_not_moved_by_functions_inside_of_another() -> None:
    td = TensorDict({"x": X, "w": [["a", "b", "c"], ["d", "e", "f"]]}, [2, 3])
    with pytest.raises(InvalidValue, match="inside of `vmap`"):
        torch.vmap(
            lambda row: torch.vmap(
                lambda row, _: pytree.tree_map(lambda leaf: torch.stack([leaf] * 2), row), (None, 0)
            )(row, torch.arange(4))
        )(td)


def test_rows_that_are_not_repeated_stay_rows_of_their_own() -> None:
    stack = lazy_stack([TensorDict({"x": X[0], "w": word}, [3]) for word in "ab"])
    copy = pytree.tree_map(lambda leaf: leaf, stack)
    copy[0, 1] = TensorDict({"x": torch.zeros(()), "w": "z"}, [])
    assert copy["w"] == [["a", "z", "a"], ["b", "b", "b"]]


def test_mapped_values_of_rows_may_stand_beside_a_leaf_that_is_not_mapped() -> None:
    td = TensorDict({"x": torch.zeros(2, 3), "w": [["a", "b", "c"], ["d", "e", "f"]]}, [2, 3])
    made = torch.vmap(lambda row: row.exclude("x").set("y", torch.ones(3)))(td)
    assert made["w"] == td["w"]
    assert made["y"].tolist() == [[1, 1, 1], [1, 1, 1]]


def test_a_locked_container_is_locked_inside_and_after() -> None:
    seen: list[bool] = []

    def doubled(td: TensorDictBase) -> TensorDictBase:
        seen.append(td.is_locked)
        return td * 2

    result: Any = torch.vmap(doubled)(other_ranks().lock_())
    assert seen == [True]
    assert result.is_locked
    assert result["n"].is_locked
    for other in (
        torch.vmap(double)(other_ranks()),
        torch.vmap(lambda td: td.clone())(other_ranks().lock_()),
    ):
        assert not other.is_locked
    assert not result.unlock_()["n"].is_locked
    assert not pytree.tree_map(lambda leaf: leaf, other_ranks().lock_()).is_locked
