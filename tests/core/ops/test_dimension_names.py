"""Names of batch dimensions follow them through every operation."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from tests.core.kinds import inner
from torch.utils._pytree import (
    tree_flatten,
    tree_map,
    tree_structure,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from kd_core import (
    InvalidArgument,
    InvalidValue,
    LazyStackedTensorDict,
    OutOfRange,
    TensorClass,
    TensorDict,
    TensorDictBase,
    cat,
    lazy_stack,
    maybe_dense_stack,
    stack,
)

Names = list[str | None]


def make() -> TensorDict:
    source = {"a": torch.arange(24.0).reshape(2, 3, 4), "n": {"b": torch.zeros(2, 3)}, "s": "x"}
    return TensorDict(source, [2, 3], names=["time", "env"])


@pytest.mark.parametrize(
    ("change", "want"),
    [
        (lambda td: td[0], ["env"]),
        (lambda td: td[:1], ["time", "env"]),
        (lambda td: td[:, 1:], ["time", "env"]),
        (lambda td: td[..., 0], ["time"]),
        (lambda td: td[None], [None, "time", "env"]),
        (lambda td: td[torch.tensor([1, 0])], ["time", "env"]),
        (lambda td: td[:, [0]], ["time", "env"]),
        (lambda td: td[torch.tensor([True, False])], ["time", "env"]),
        (lambda td: td[:, torch.tensor([True, False, True])], ["time", "env"]),
        (lambda td: td[None, ..., torch.tensor([0, 1]), None], [None, "time", "env", None]),
        (lambda td: td[torch.ones(2, 3).bool()], [None]),
        (lambda td: td[torch.tensor([[1, 0]])], [None, None, "env"]),
        (lambda td: td[[0, 1], [0, 2]], [None]),
        (lambda td: td[1, torch.tensor([0, 1])], ["env"]),
        (lambda td: td.index_select("env", torch.tensor([0, 0])), ["time", "env"]),
        (lambda td: td.gather("env", torch.zeros(2, 1, dtype=torch.int64)), ["time", "env"]),
        (lambda td: td.masked_select(torch.tensor([True, False])), ["time", "env"]),
        (lambda td: td.pad([0, 1]), ["time", "env"]),
        (lambda td: td.repeat_interleave(2, 0), ["time", "env"]),
        (lambda td: td.repeat_interleave(2), [None]),
        (lambda td: td.transpose("time", "env"), ["env", "time"]),
        (lambda td: td.permute(1, 0), ["env", "time"]),
        (lambda td: td.unsqueeze(1), ["time", None, "env"]),
        (lambda td: td[:1].squeeze("time"), ["env"]),
        (lambda td: td.split(1)[0], ["time", "env"]),
        (lambda td: td.chunk(2, "env")[1], ["time", "env"]),
        (lambda td: td.unbind("env")[0], ["time"]),
        (lambda td: td.narrow("env", 0, 2), ["time", "env"]),
        (lambda td: td.expand(5, 2, 3), [None, "time", "env"]),
        (lambda td: td.repeat(2, 1), ["time", "env"]),
        (lambda td: td.flip(0), ["time", "env"]),
        (lambda td: td.roll(1, 0), ["time", "env"]),
        (lambda td: td.reshape(6), [None]),
        (lambda td: td + 1, ["time", "env"]),
        (lambda td: td * td, ["time", "env"]),
        (lambda td: td.abs(), ["time", "env"]),
        (lambda td: td.sum("time"), ["env"]),
        (lambda td: td.mean(("time", "env")), []),
        (lambda td: td.amax("env", keepdim=True), ["time", "env"]),
        (lambda td: td.cumsum("time"), ["time", "env"]),
        (lambda td: td.sum("feature"), ["time", "env"]),
        (lambda td: cat([td, td]), ["time", "env"]),
        (lambda td: stack([td, td]), [None, "time", "env"]),
        (lambda td: stack([td, td], "env"), ["time", None, "env"]),
        (lambda td: lazy_stack(td.unbind(0)), [None, "env"]),
        (lambda td: lazy_stack([td, td], "time"), [None, "time", "env"]),
        (lambda td: maybe_dense_stack([td, td], "env"), ["time", None, "env"]),
        (lambda td: td.clone(), ["time", "env"]),
        (lambda td: td.to("cpu"), ["time", "env"]),
        (lambda td: td.select("a"), ["time", "env"]),
        (lambda td: td.flatten_keys(), ["time", "env"]),
        (lambda td: td.apply(torch.neg), ["time", "env"]),
        (lambda td: copy.deepcopy(td), ["time", "env"]),
        (lambda td: pickle.loads(pickle.dumps(td)), ["time", "env"]),
        (lambda td: td.lock_(), ["time", "env"]),
        (lambda td: td.rename(time="step"), ["step", "env"]),
        (lambda td: td.rename("x", None), ["x", None]),
        (lambda td: td.rename(None), [None, None]),
    ],
)
def test_names_follow_their_dimensions(
    change: Callable[[TensorDict], TensorDictBase], want: Names
) -> None:
    td = make()
    result = change(td)
    assert result.names == want
    assert td.names == ["time", "env"]
    assert result.batch_size == result["a"].shape[: len(want)]


def test_a_reduction_by_name_is_the_one_by_number() -> None:
    td = make()
    assert td.sum("env")["a"].tolist() == td.sum(1)["a"].tolist()
    assert td.amax("time")["a"].tolist() == td.amax(0)["a"].tolist()


@pytest.mark.parametrize("join", [stack, lazy_stack, maybe_dense_stack])
def test_a_name_that_no_dimension_has_is_not_the_place_of_a_new_one(
    join: Callable[..., TensorDictBase],
) -> None:
    with pytest.raises(OutOfRange, match=r"named `tim`; .* `time`, `env`. Did you mean `time`"):
        join([make(), make()], "tim")


def test_nested_containers_have_the_names_too() -> None:
    td = make()
    assert inner(td, "n").names == ["time", "env"]
    td.names = [None, "b"]
    assert inner(td, "n").names == [None, "b"]
    td.names = None
    assert td.names == inner(td, "n").names == [None, None]
    stacked = lazy_stack(make().unbind(0), 0)
    stacked.names = ["t", "e"]
    assert stacked[0].names == ["e"]
    assert (stacked + 1).names == ["t", "e"]


def test_a_stack_is_named_when_it_is_built() -> None:
    rows = make().unbind(0)
    assert LazyStackedTensorDict(*rows, stack_dim_name="t").names == ["t", "env"]
    assert LazyStackedTensorDict(*rows, names=["a", "b"])[0].names == ["b"]
    with pytest.raises(InvalidValue, match="names must differ"):
        LazyStackedTensorDict(*make().unbind(0), stack_dim_name="env")


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "change",
    [
        lambda td: td + 1,
        lambda td: td * td,
        lambda td: td.clone(),
        lambda td: td.clone(recurse=False),
        lambda td: td.contiguous(),
        lambda td: td.select("a", "n"),
        lambda td: td.apply(torch.neg),
        lambda td: td[:2],
        lambda td: td[:, :2],
        lambda td: td.where(td["a"][..., 0] > 3, td),
        lambda td: copy.deepcopy(td),
        lambda td: pickle.loads(pickle.dumps(td)),
        lambda td: td.flatten_keys("_").unflatten_keys("_"),
        lambda td: cat([td, td]),
    ],
)
def test_a_stack_keeps_the_name_of_its_own_dimension(
    change: Callable[[TensorDictBase], TensorDictBase], dim: int
) -> None:
    td = lazy_stack(make().unbind(dim), dim)
    td.names = ["time", "env"]
    assert inner(td, "n").names == ["time", "env"]
    changed = change(td)
    assert changed.names == ["time", "env"]
    assert inner(changed, "n").names == ["time", "env"]
    assert td[torch.tensor([1, 0])].names == ["time", "env"]
    assert td[torch.ones(2, 3).bool()].names == [None]


def test_sizes_that_users_see_are_plain_integers() -> None:
    td = make()
    td["w"] = "x"
    sizes = [td.size(0), td.shape[0], td.batch_size[0], td.get("w").batch_size[0]]  # type: ignore[union-attr]  # data
    assert [type(size) for size in sizes] == [int] * 4
    assert hash(td.size(0)) == hash(2)


def test_a_stack_that_grows_keeps_its_name() -> None:
    td = LazyStackedTensorDict(*make().unbind(0), stack_dim_name="time")
    td.append(make()[0])
    assert td.names == ["time", "env"]


def test_names_are_refined() -> None:
    td = TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3, 4], names=["x", None, None])
    assert td.refine_names(..., "z").names == ["x", None, "z"]
    assert td.refine_names("x", "y", None).names == ["x", "y", "z"]
    with pytest.raises(InvalidValue, match="dimension 0 is named `x` and cannot be refined to `q`"):
        td.refine_names("q", ...)
    with pytest.raises(InvalidArgument, match=r"at most one `\.\.\.`"):
        td.refine_names(..., ...)


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        (["a"], InvalidValue, "one name or `None` for each of the 2 batch dimensions, got 1"),
        (["a", "a"], InvalidValue, "names must differ"),
        (["a", 3], InvalidArgument, "names must be strings or `None`"),
        ("ab", InvalidArgument, r"a list of strings or `None`, got a `str`. Write `\['ab'\]`"),
        ({"a", "b"}, InvalidArgument, "a list of strings or `None`, got a `set`"),
        (3, InvalidArgument, "a list of strings or `None`, got an `int`"),
        (3.5, InvalidArgument, "a list of strings or `None`, got a `float`"),
        (
            (name for name in "ab"),
            InvalidArgument,
            "a list of strings or `None`, got a `generator`",
        ),
    ],
)
def test_wrong_names_change_nothing(names: Names, error: type[Exception], words: str) -> None:
    td = make()
    with pytest.raises(error, match=words):
        td.names = names
    with pytest.raises(error, match=words):
        td.clone().names = names
    assert td.names == inner(td, "n").names == ["time", "env"]


def test_a_lock_does_not_cover_the_names() -> None:
    td = make().lock_()
    td.names = ["a", "b"]
    assert td.names == inner(td, "n").names == ["a", "b"]
    assert td.is_locked
    assert inner(td, "n").is_locked


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    with pytest.raises(OutOfRange, match=r"no batch dimension is named `tme`.*Did you mean `time`"):
        make().sum("tme")
    with pytest.raises(OutOfRange, match="the container has no names"):
        TensorDict({"a": torch.zeros(2)}, [2]).unbind("time")
    with pytest.raises(InvalidValue, match="`dim` must be integers"):
        TensorDict({"a": torch.zeros(2)}, [2]).sum("time")
    with pytest.raises(InvalidValue, match="no batch dimension is named `x`"):
        make().rename(x="y")


def test_names_are_shown_and_saved() -> None:
    assert "names=['time', 'env']" in repr(make())
    assert "names" not in repr(TensorDict({"a": torch.zeros(2)}, [2]))
    file = io.BytesIO()
    torch.save(make(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True).names == ["time", "env"]


def test_names_are_traced() -> None:
    def run(td: TensorDict) -> TensorDict:
        return td.transpose(0, 1)[1:] + 1

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    assert compiled(make()).names == ["env", "time"]
    assert compiled(make().rename("a", "b")).names == ["b", "a"]


@pytest.mark.parametrize(
    "run",
    [
        lambda td: td * td,
        lambda td: td.lerp(td, 0.5),
        lambda td: td.add(td.exclude("n"), default=0.0),
        lambda td: torch.nn.functional.mse_loss(td, td, reduction="none"),
        lambda td: td.split(1, 1)[0] * td[:, :1],
        lambda td: td[0].expand(td.batch_size) * td,
    ],
)
def test_names_are_traced_where_a_size_changed(run: Callable[[TensorDict], TensorDict]) -> None:
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for rows, names in ((2, None), (4, None), (2, ["time", None]), (5, ["time", None])):
        entries = {"a": torch.rand(rows, 3), "n": {"b": torch.rand(rows, 3, 2)}}
        td = TensorDict(entries, [rows, 3], names=names)
        assert bool((compiled(td) == run(td)).all())
        assert compiled(td).names == run(td).names


def test_arithmetic_of_named_sizes_is_traced() -> None:
    def run(td: TensorDict) -> list[TensorDict]:
        td.set("new", torch.zeros(td.batch_size))
        return [
            td[0],
            td[:, 1:],
            td.reshape(-1),
            td.expand(2, *td.batch_size),
            td.split(1)[0],
            cat([td, td]),
            td.apply(lambda leaf: leaf + 1),
        ]

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for got, want in zip(compiled(make()), run(make()), strict=True):
        assert (got.names, got.batch_size) == (want.names, want.batch_size)
        assert (got == want).all()


@pytest.mark.parametrize(
    "build",
    [
        lambda td, names: TensorDict(td.to_dict(), [2, 3], names=names),
        lambda td, names: TensorDict.from_dict(td.to_dict(), [2, 3], names=names),
        lambda td, names: TensorDict.from_dict(
            td.exclude("s").to_dict(), auto_batch_size=True, batch_dims=2, names=names
        ),
        lambda td, names: td.from_dict_instance(td.to_dict(), batch_size=[2, 3], names=names),
        lambda td, names: TensorDict.from_list(
            [row.to_dict() for row in td.unbind(0)], batch_size=[2, 3], names=names
        ),
        lambda td, names: lazy_stack(td.unbind(0)).apply(torch.neg, names=names),
        lambda td, names: td.apply(torch.neg, names=names),
        lambda td, names: td.apply(lambda x, y: x, td, names=names),
        lambda td, names: td.named_apply(lambda name, x: x, names=names),
        lambda td, names: td.lock_().apply(torch.neg, names=names, propagate_lock=True),
        lambda td, names: td.empty(recurse=True, names=names),
        lambda td, names: lazy_stack(td.unbind(0)).empty(recurse=True, names=names),
    ],
)
def test_a_container_is_named_when_it_is_built(
    build: Callable[[TensorDict, Names], TensorDictBase],
) -> None:
    td = make()
    built = build(td, ["x", None])
    assert built.names == inner(built, "n").names == ["x", None]
    for wrong in (["x"], ["x", "x"], "xy"):
        with pytest.raises((InvalidArgument, InvalidValue), match=r"names must (hold|differ|be)"):
            build(td, wrong)  # type: ignore[arg-type]  # wrong on purpose
    assert td.names == inner(td, "n").names == ["time", "env"]


def test_names_of_another_batch_size() -> None:
    td = make()
    assert td.empty(batch_size=[2], names=["x"]).names == ["x"]
    assert td.empty(names=None).names == [None, None]
    assert td.apply(lambda leaf: leaf.sum(1), batch_size=[2], names=["x"]).names == ["x"]
    assert td.apply(torch.neg, names=None).names == [None, None]


def test_names_are_checked_before_the_function_is_called() -> None:
    td, calls = make(), list[object]()
    with pytest.raises(InvalidValue, match="one name or `None` for each of the 2"):
        td.apply(calls.append, names=["x"])
    with pytest.raises(InvalidArgument, match=r"Set `out\.names`"):
        td.named_apply(calls.append, names=["x", "y"], out=td.clone())
    assert not calls


def test_a_constructor_does_not_name_the_containers_it_is_given() -> None:
    given = TensorDict({"b": torch.zeros(2)}, [2]).lock_()
    held = TensorDict({"n": given}, [2], names=["x"])
    assert inner(held, "n").names == ["x"]
    assert given.names == [None]
    assert inner(held, "n")["b"] is given["b"]


def test_a_frozen_class_is_built_with_names() -> None:
    class Frozen(TensorClass, frozen=True):
        x: torch.Tensor

    made = Frozen.from_dict({"x": torch.zeros(2, 3)}, auto_batch_size=True, names=["a", "b"])
    assert made.names == ["a", "b"]
    assert not made.is_locked
    assert Frozen.from_any({"x": torch.zeros(2, 3)}, batch_dims=1).batch_size == (2,)


def test_names_pass_through_pytrees() -> None:
    td = make()
    td["late"] = {}
    mapped = tree_map(torch.neg, td)
    assert mapped.names == inner(mapped, "n").names == inner(mapped, "late").names
    assert mapped.names == ["time", "env"]
    leaves, structure = tree_flatten(td)
    assert structure == tree_structure(td.rename(None))
    assert tree_unflatten([leaf.sum(1) for leaf in leaves], structure).names == [None]
    saved = treespec_loads(treespec_dumps(tree_structure(td)))
    assert tree_unflatten(leaves, saved).names == ["time", "env"]


def test_vmap_removes_the_name_of_the_mapped_dimension() -> None:
    td = make().exclude("s")
    seen: list[list[str | None]] = []

    def step(each: TensorDict) -> TensorDict:
        seen.append(each.names)
        return each + 1

    torch.vmap(step)(td)
    torch.vmap(step, in_dims=1)(td)
    torch.vmap(torch.vmap(step), in_dims=1)(td)
    assert seen == [["env"], ["time"], []]


@pytest.mark.parametrize(
    ("change", "want"),
    [
        (lambda td, *dims: td.permute(dims[1], dims[0]), ["env", "time"]),
        (lambda td, *dims: td.permute(dims=dims[::-1]), ["env", "time"]),
        (lambda td, *dims: td.movedim(dims[0], dims[1]), ["env", "time"]),
        (lambda td, *dims: td.movedim(list(dims), [1, 0]), ["env", "time"]),
        (lambda td, *dims: td.swapaxes(*dims), ["env", "time"]),
        (lambda td, *dims: td.rot90(1, dims), ["env", "time"]),
        (lambda td, *dims: td.flip(dims), ["time", "env"]),
        (lambda td, *dims: td.flip(dims[1]), ["time", "env"]),
        (lambda td, *dims: td.roll(1, dims[1]), ["time", "env"]),
        (lambda td, *dims: td.roll((1, 2), dims), ["time", "env"]),
        (lambda td, *dims: td.flatten(*dims), [None]),
        (lambda td, *dims: td.unflatten(dims[1], (3, 1)), ["time", None, "env"]),
        (lambda td, *dims: td[:1, :1].squeeze(dims), []),
        (lambda td, *dims: td.repeat_interleave(2, dims[1]), ["time", "env"]),
        (lambda td, *dims: td.quantile([0.1, 0.2], dims[1]), [None, "time"]),
        (lambda td, *dims: td.log_softmax(dims[0]), ["time", "env"]),
        (lambda td, *dims: td.to_lazystack(dims[1]), ["time", "env"]),
        (lambda td, *dims: cat([td, td], dims[1]), ["time", "env"]),
        (lambda td, *dims: td.map(lambda part: part + 1, dims[1], chunksize=2), ["time", "env"]),
    ],
)
def test_a_name_stands_for_its_dimension(
    change: Callable[..., TensorDictBase], want: Names
) -> None:
    td = make().exclude("s")
    by_name, by_number = change(td, "time", "env"), change(td, 0, 1)
    assert by_name.names == by_number.names == want
    assert torch.equal(by_name["a"], by_number["a"])
    with pytest.raises(OutOfRange, match="no batch dimension is named `tim`"):
        change(td, "tim", "tim")
    assert td.size("env") == 3


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "call",
    [
        lambda td: td.reshape(3, 2),
        lambda td: td.view(3, 2),
        lambda td: td.flatten(0, 0),
        lambda td: td.flatten(1, 1),
        lambda td: td.unflatten(1, (2,)),
    ],
)
def test_what_is_nested_in_a_resized_stack_has_the_names_of_the_stack(
    dim: int, call: Callable[[TensorDictBase], TensorDictBase]
) -> None:
    leaf = torch.arange(6).reshape(3, 2)
    td = TensorDict({"a": leaf, "n": TensorDict({"b": leaf}, [3, 2])}, [3, 2])
    stack = lazy_stack(td.unbind(dim), dim)
    stack.names = ["agent", "time"]
    result = call(stack)
    assert inner(result, "n").names == result.names
    assert torch.equal(result["n", "b"], leaf)
    assert stack.names == ["agent", "time"]


def test_a_stored_container_takes_the_names_of_the_one_around_it() -> None:
    td = TensorDict({"a": torch.ones(3, 2)}, [3, 2], names=["t", "e"])
    inner = TensorDict({"b": torch.ones(3, 2, 4), "n": {"c": torch.ones(3, 2)}}, [3, 2, 4][:2])
    td["n"] = inner
    td.update({"m": inner})
    td["d"] = {"b": torch.ones(3, 2)}
    for key in ("n", "m", "d", ("n", "n")):
        assert td.nested(key, TensorDict).names == ["t", "e"]
    assert inner.names == [None, None]
    td["own"] = TensorDict({}, [3, 2], names=["x", "y"])
    assert td.nested("own", TensorDict).names == ["x", "y"]


def _set_lazily(nested: TensorDict) -> TensorDictBase:
    td = lazy_stack([TensorDict({}, [3]), TensorDict({}, [3])])
    td["n"] = nested
    return td


def _set(nested: TensorDict) -> TensorDictBase:
    td = TensorDict({"m": TensorDict({}, [2, 3, 5])}, [2, 3])
    td["n"] = nested
    assert inner(td, "m").names == ["time", None, None]
    return td


@pytest.mark.parametrize(
    "build",
    [
        lambda nested: TensorDict({"n": nested}, [2, 3]),
        lambda nested: TensorDict({"n": nested}, [2, 3], names=[None, None]),
        lambda nested: TensorDict({("n", "deep"): nested}, [2, 3]),
        lambda nested: TensorDict.from_dict({"n": {"deep": nested}}, [2, 3]),
        lambda nested: TensorDict.from_dict({"n": nested}, [2, 3], names=[None, None]),
        lambda nested: TensorDict({}, [2, 3]).update({"n": nested}),
        lambda nested: TensorDict({}, [2, 3]).replace({"n": nested}),
        lambda nested: TensorDict({}, [2, 3]).set("n", nested),
        _set,
        _set_lazily,
    ],
)
def test_a_container_without_names_takes_those_of_one_in_it(
    build: Callable[[TensorDict], TensorDictBase],
) -> None:
    nested = TensorDict({"x": torch.zeros(2, 3, 4)}, [2, 3, 4], names=["time", None, "env"])
    td = build(nested)
    assert td.names == ["time", None]
    assert nested.names == ["time", None, "env"]


def test_only_the_level_that_is_written_takes_names() -> None:
    td = TensorDict({}, [2])
    td["n", "deep"] = TensorDict({}, [2], names=["time"])
    assert td.names == [None]
    assert inner(td, "n").names == ["time"]


def test_a_nested_container_takes_the_names_that_it_lacks() -> None:
    td = TensorDict({}, [2, 3], names=["time", "env"])
    td["n"] = TensorDict({}, [2, 3, 4], names=[None, None, "agent"])
    assert inner(td, "n").names == ["time", "env", "agent"]
    td["m"] = TensorDict({}, [2, 3], names=["env", None])  # no two dimensions share a name
    assert inner(td, "m").names == ["env", None]


def test_the_last_of_several_dimensions_has_the_name_of_the_one_that_they_were() -> None:
    td = TensorDict({"a": torch.zeros(4, 2)}, [4, 2], names=["t", "e"])
    assert td.unflatten(0, (2, 2)).names == [None, "t", "e"]
    assert td.unflatten(1, (2, 1, 1)).names == ["t", None, None, "e"]
    assert td.unflatten(0, (4,)).names == ["t", "e"]
