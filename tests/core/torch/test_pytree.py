"""Containers are pytree nodes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.core.kinds import inner
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from kd_core import (
    InvalidArgument,
    InvalidValue,
    LazyStackedTensorDict,
    NonTensorData,
    ShapeMismatch,
    TensorClass,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)


def nested(batch: int = 3) -> TensorDict:
    source = {
        "b": torch.arange(batch * 4.0).reshape(batch, 4),
        "a": {"c": torch.ones(batch), "word": "reach"},
        "empty": {},
    }
    return TensorDict(source, [batch])


def test_tree_map_keeps_kind_keys_batch_and_data() -> None:
    td = nested()
    doubled = pytree.tree_map(lambda leaf: leaf * 2, td)
    assert type(doubled) is TensorDict
    assert doubled.batch_size == (3,)
    assert inner(doubled, "a").batch_size == (3,)
    assert doubled["a", "word"] == "reach"
    assert list(inner(doubled, "empty").keys()) == []
    torch.testing.assert_close(doubled["b"], td["b"] * 2)


def test_leaves_have_the_order_of_keys() -> None:
    first = TensorDict({"a": torch.zeros(2), "b": torch.ones(2)}, [2])
    second = TensorDict({"b": torch.ones(2), "w": "word", "a": torch.zeros(2)}, [2])
    assert [int(leaf[0]) for leaf in pytree.tree_leaves(second)] == [1, 0]
    assert pytree.tree_structure(first) != pytree.tree_structure(second.exclude("w"))
    with pytest.raises(ValueError, match="Node context mismatch"):  # not paired by their order
        pytree.tree_map(torch.add, first, second.exclude("w"))


def test_tensors_of_nested_containers_stand_in_one_row() -> None:
    assert pytree.tree_structure(nested()).num_nodes == 1 + 2


def test_structure_does_not_depend_on_the_size_of_the_batch() -> None:
    assert pytree.tree_structure(nested(2)) == pytree.tree_structure(nested(7))


@pytest.mark.parametrize(
    "other",
    [
        TensorDict({"a": torch.zeros(2)}, [2]),
        TensorDict({"a": torch.zeros(2), "b": "other"}, [2]),
        TensorDict({"a": torch.zeros(2), "b": torch.zeros(2)}, [2]),
        TensorDict({"a": torch.zeros(2), "c": "text"}, [2]),
    ],
)
def test_structure_tells_keys_and_data_apart(other: TensorDict) -> None:
    td = TensorDict({"a": torch.zeros(2), "b": "text"}, [2])
    assert pytree.tree_structure(td) != pytree.tree_structure(other)


def test_structures_with_data_that_has_no_single_truth_value_differ() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise ValueError("no single truth value")

        __hash__ = None  # type: ignore[assignment]  # unhashable, as the value may be

    first, second = (TensorDict({"a": Odd()}) for _ in range(2))
    assert pytree.tree_structure(first) == pytree.tree_structure(first.copy())
    assert pytree.tree_structure(first) != pytree.tree_structure(second)


def test_equal_structures_have_equal_hashes() -> None:
    assert hash(pytree.tree_structure(nested(2))) == hash(pytree.tree_structure(nested(5)))


@pytest.mark.parametrize("leaf", [object(), None, 3, "text"])
def test_anything_may_stand_in_the_place_of_a_leaf(leaf: object) -> None:
    _, spec = pytree.tree_flatten(nested())
    rebuilt = pytree.tree_unflatten([leaf] * spec.num_leaves, spec)
    assert rebuilt.get("b") is leaf
    assert rebuilt.batch_size == ()


def test_key_paths_name_the_keys() -> None:
    paths = [path for path, _ in pytree.tree_leaves_with_path(nested())]
    assert [pytree.keystr(path) for path in paths] == ["['b']", "['a']['c']"]
    torch.testing.assert_close(pytree.key_get(nested(), paths[0]), nested()["b"])
    torch.testing.assert_close(pytree.key_get(nested(), paths[1]), nested()["a", "c"])


@pytest.mark.parametrize(
    ("change", "batch"),
    [
        (lambda leaf: leaf.sum(0), (4,)),
        (lambda leaf: leaf.unsqueeze(0), (1, 3, 4)),
        (lambda leaf: leaf[:, :2], (3, 2)),
        (lambda leaf: leaf.sum(), ()),
    ],
)
def test_batch_is_read_off_the_new_leaves(
    change: Callable[[Tensor], Tensor], batch: tuple[int, ...]
) -> None:
    td = TensorDict({"a": torch.zeros(3, 4, 5), "n": {"b": torch.zeros(3, 4)}}, [3, 4])
    mapped = pytree.tree_map(change, td)
    assert mapped.batch_size == batch
    assert inner(mapped, "n").batch_size == batch


def test_batch_is_no_longer_than_what_all_leaves_share() -> None:
    td = TensorDict({"a": torch.zeros(3, 4), "b": torch.zeros(3, 5)}, [3])
    widened = pytree.tree_map(lambda leaf: leaf.unsqueeze(-1), td)
    assert widened.batch_size == (3,)


def test_a_larger_batch_of_a_nested_container_is_kept() -> None:
    larger = TensorDict({"b": torch.zeros(3, 4)}, [3, 4])
    td = TensorDict({"n": larger, "a": torch.zeros(3)}, [3])
    assert inner(pytree.tree_map(torch.clone, td), "n").batch_size == (3, 4)


def test_a_container_without_leaves_keeps_its_batch() -> None:
    td = TensorDict({"word": "reach", "n": {}}, [3])
    mapped = pytree.tree_map(torch.clone, td)
    assert mapped.batch_size == (3,)
    assert inner(mapped, "n").batch_size == (3,)


def test_device_is_kept_while_the_leaves_are_on_it() -> None:
    td = TensorDict({"a": torch.zeros(3)}, [3], device="cpu")
    assert pytree.tree_map(torch.clone, td).device == torch.device("cpu")
    assert pytree.tree_map(lambda leaf: leaf.to("meta"), td).device is None


def test_the_result_is_not_locked() -> None:
    assert not pytree.tree_map(torch.clone, nested().lock_()).is_locked


def test_batch_shrinks_inside_vmap_and_grows_after_it() -> None:
    seen: list[object] = []

    def double(td: TensorDict) -> TensorDict:
        seen.extend([td.batch_size, inner(td, "a").batch_size, inner(td, "empty").batch_size])
        return TensorDict({"out": td["b"] * 2, "n": td["a"]}, td.batch_size)

    result = torch.vmap(double)(nested())
    assert seen == [(), (), ()]
    assert result.batch_size == (3,)
    assert inner(result, "n").batch_size == (3,)
    torch.testing.assert_close(result["out"], nested()["b"] * 2)


def test_vmap_takes_a_tree_of_dimensions() -> None:
    td = nested()
    sums = torch.vmap(lambda row: row["b"].sum(), in_dims=(pytree.tree_map(lambda _: 0, td),))(td)
    torch.testing.assert_close(sums, td["b"].sum(1))


def test_grad_with_respect_to_a_container_is_a_container() -> None:
    td = TensorDict({"w": torch.ones(2, 3), "n": {"b": torch.ones(2)}})
    grad = torch.func.grad(lambda p: (p["w"] * 2).sum() + (p["n", "b"] ** 2).sum())(td)
    assert type(grad) is TensorDict
    torch.testing.assert_close(grad["w"], torch.full((2, 3), 2.0))
    torch.testing.assert_close(grad["n", "b"], torch.full((2,), 2.0))


def test_a_subclass_comes_back_as_itself() -> None:
    class Own(TensorDict):
        __slots__ = ()

    assert type(pytree.tree_map(torch.clone, Own({"a": torch.zeros(2)}, [2]))) is Own


def test_a_structure_survives_being_written_down() -> None:
    td = TensorDict(
        {"a": torch.zeros(3), "n": {"opts": NonTensorData([1, "x", None, 2])}}, [3], device="cpu"
    )
    spec = pytree.tree_structure(td)
    loaded = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert loaded == spec
    rebuilt = pytree.tree_unflatten([torch.zeros(3)], loaded)
    assert rebuilt.batch_size == (3,)
    assert rebuilt.device == torch.device("cpu")
    assert rebuilt["n"].batch_size == (3,)


@pytest.mark.parametrize("value", [object(), NonTensorData(("x", "y")), {"x"}])
def test_data_that_cannot_be_written_down_is_named(value: object) -> None:
    spec = pytree.tree_structure(TensorDict({"a": torch.zeros(3), "odd": value}, [3]))
    with pytest.raises(InvalidValue, match=r"entry `odd` of a saved .* `exclude` it"):
        pytree.treespec_dumps(spec)


class Net(nn.Module):
    def forward(self, td: TensorDict) -> TensorDict:
        return TensorDict({"out": td["b"] * 2, "n": td["a"]}, td.batch_size)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_with_containers_is_saved_and_loaded(
    strict: bool, tmp_path: Path
) -> None:
    rows = {0: torch.export.Dim("batch")}
    shapes = ([rows, rows],)  # one for each tensor
    program = torch.export.export(Net(), (nested(),), dynamic_shapes=shapes, strict=strict)
    assert [spec.arg.name for spec in program.graph_signature.input_specs] == ["td_b", "td_a_c"]
    torch.export.save(program, tmp_path / "net.pt2")
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    for size in (2, 7):
        result = loaded(nested(size))
        assert type(result) is TensorDict
        assert result.batch_size == (size,)
        assert result["n", "word"] == "reach"
        torch.testing.assert_close(result["out"], nested(size)["b"] * 2)


@pytest.mark.parametrize("strict", [False, True])
def test_containers_without_tensors_do_not_fix_the_batch_of_a_program(strict: bool) -> None:
    class Passing(nn.Module):
        def forward(self, td: TensorDict) -> TensorDict:
            return td.set("y", td["x"] + 1)

    def data(rows: int) -> TensorDict:
        inside = TensorDict({"word": "reach", "empty": TensorDict({}, [rows, 4])}, [rows])
        return TensorDict({"x": torch.ones(rows, 2), "n": inside}, [rows])

    shapes = ([{0: torch.export.Dim("batch")}],)
    program = torch.export.export(Passing(), (data(3),), dynamic_shapes=shapes, strict=strict)
    found = program.module()(data(5))
    assert torch.equal(found["y"], torch.full((5, 2), 2.0))
    assert found["n", "word"] == "reach"
    assert found["n"].batch_size == (5,)
    assert found["n", "empty"].batch_size == (5, 4)


def test_gradients_with_respect_to_a_lazy_stack() -> None:
    td = lazy_stack([TensorDict({"a": torch.full((2,), i)}) for i in (1.0, 2.0)])
    gradient = torch.func.grad(lambda each: (each["a"] ** 2).sum())(td)
    assert gradient["a"].tolist() == [[2, 2], [4, 4]]
    nested = torch.func.grad(lambda each: (each["s", "a"] ** 2).sum())(TensorDict({"s": td}, [2]))
    assert nested["s", "a"].tolist() == [[2, 2], [4, 4]]
    rows = torch.func.vmap(torch.func.grad(lambda each: (each["a"] ** 2).sum()))(td)
    assert rows["a"].tolist() == [[2, 2], [4, 4]]


def ragged() -> LazyStackedTensorDict:
    rows = [
        TensorDict({"ids": torch.arange(float(n)), "same": torch.ones(2), "word": str(n)})
        for n in (2, 3)
    ]
    return LazyStackedTensorDict(*rows, stack_dim_name="prompt")


def test_members_of_a_ragged_stack_are_its_children() -> None:
    stacked = ragged()
    doubled = pytree.tree_map(lambda leaf: leaf * 2, stacked)
    assert type(doubled) is LazyStackedTensorDict
    assert doubled.names == ["prompt"]
    assert [row["ids"].tolist() for row in doubled.unbind(0)] == [[0, 2], [0, 2, 4]]
    assert [row["word"] for row in doubled.unbind(0)] == ["2", "3"]
    assert [row["ids"].tolist() for row in stacked.unbind(0)] == [[0, 1], [0, 1, 2]]


def test_a_ragged_stack_below_a_container_is_a_node() -> None:
    td = TensorDict({"x": torch.zeros(2, 4), "prompts": ragged(), "after": {"y": torch.ones(2)}})
    td.batch_size = [2]
    plus = pytree.tree_map(lambda leaf: leaf + 1, td)
    assert plus.batch_size == (2,)
    assert torch.equal(plus["x"], torch.ones(2, 4))
    assert torch.equal(plus["after", "y"], torch.full((2,), 2.0))
    prompts = inner(plus, "prompts")
    assert [row["ids"].tolist() for row in prompts.unbind(0)] == [[1, 2], [1, 2, 3]]


def test_key_paths_of_a_ragged_stack_count_its_members() -> None:
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(ragged())[0]]
    assert paths == ["[0]['ids']", "[0]['same']", "[1]['ids']", "[1]['same']"]


def test_the_structure_of_a_ragged_stack_can_be_saved() -> None:
    td = TensorDict({"prompts": ragged()}, [2])
    spec = pytree.tree_structure(td)
    loaded = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert loaded == spec
    assert spec != pytree.tree_structure(TensorDict({"prompts": ragged()[:1]}, [1]))
    again = pytree.tree_unflatten(pytree.tree_leaves(td), loaded)
    assert inner(again, "prompts").names == ["prompt"]


def test_gradients_with_respect_to_a_ragged_stack() -> None:
    def loss(td: LazyStackedTensorDict) -> Tensor:
        return torch.stack([(row["ids"] ** 2).sum() for row in td.unbind(0)]).sum()

    slopes = torch.func.grad(loss)(ragged().exclude("word"))
    assert [row["ids"].tolist() for row in slopes.unbind(0)] == [[0, 2], [0, 2, 4]]


@pytest.mark.parametrize("whole", [True, False])
def test_vmap_over_a_ragged_stack_names_the_entry(whole: bool) -> None:
    rows = [TensorDict({"same": torch.zeros(2), "ids": torch.zeros(2, n)}, [2]) for n in (3, 4)]
    stacked = lazy_stack(rows)
    td = stacked if whole else TensorDict({"prompts": stacked}, [2, 2])
    with pytest.raises(ShapeMismatch, match="entry `ids` is ragged"):
        torch.vmap(lambda row: row)(td)
    with pytest.raises(ShapeMismatch, match="entry `ids` is ragged"):
        torch.vmap(lambda x: (x, td))(torch.zeros(2))
    with pytest.raises(ValueError, match="same size in the mapped dimension"):
        torch.vmap(lambda row: row)(ragged().exclude("word"))  # torch compares sizes first


def test_a_member_cannot_be_replaced_by_something_else() -> None:
    with pytest.raises(InvalidArgument, match="member 0"):
        pytree.tree_map(len, ragged(), is_leaf=lambda node: type(node) is TensorDict)


class Turned(TensorClass):
    z: Tensor
    a: Tensor
    word: str = "w"


@pytest.mark.parametrize(
    "td",
    [
        TensorDict({"z": torch.ones(2), "a": torch.ones(2)}, [2]),
        TensorDict({"z": {"y": torch.ones(2), "b": torch.ones(2)}, "c": torch.ones(2)}, [2]),
        TensorDict({"w": "word", "z": torch.ones(2), "n": {"k": "v"}, "a": torch.ones(2)}, [2]),
        Turned(z=torch.ones(2), a=torch.ones(2), batch_size=[2]),
        lazy_stack([TensorDict({"z": torch.ones(2), "a": torch.ones(2)}) for _ in range(2)]),
    ],
)
def test_what_is_rebuilt_has_its_keys_in_their_order(td: TensorDictBase) -> None:
    keys = list(td.keys(True))
    twice = pytree.tree_map(lambda leaf: leaf * 2, td)
    assert list(twice.keys(True)) == keys
    assert list(torch.vmap(lambda row: row.clone())(td).keys(True)) == keys
    if type(td) is TensorDict:
        leaves, spec = pytree.tree_flatten(td)
        turned = TensorDict(dict(reversed(list(td.items()))), td.batch_size)
        assert spec != pytree.tree_structure(turned)
        loaded = pytree.treespec_loads(pytree.treespec_dumps(spec))
        assert list(pytree.tree_unflatten(leaves, loaded).keys(True)) == keys
