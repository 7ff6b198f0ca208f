"""Calling functions on leaves."""

import pytest
import torch
from tests.core.kinds import inner
from torch import Tensor

from kd_core import (
    InvalidArgument,
    KeySetMismatch,
    LazyStackedTensorDict,
    Locked,
    NestedKey,
    NonTensorData,
    ShapeMismatch,
    TensorDict,
    lazy_stack,
)


@pytest.fixture
def td() -> TensorDict:
    return TensorDict({"a": torch.ones(3), "n": {"b": torch.ones(3, 2)}, "note": "text"}, [3])


def sizes(td: TensorDict, key: str | None = None) -> tuple[int, ...]:
    """The batch size of the container, or of the node at a key."""
    node: object = td if key is None else td.get(key)
    assert isinstance(node, TensorDict | NonTensorData)
    return tuple(node.batch_size)


def test_every_leaf_is_passed(td: TensorDict) -> None:
    result = td.apply(lambda x: x + 1)
    assert result["n", "b"].tolist() == [[2, 2]] * 3
    assert result["note"] == "text"
    assert [sizes(result), sizes(result, "n")] == [(3,), (3,)]
    assert td["a"].tolist() == [1, 1, 1]


def test_others_are_matched_by_key(td: TensorDict) -> None:
    result = td.apply(lambda x, y, z: x + y * z, td * 2, td * 3)
    assert result["a"].tolist() == [7, 7, 7]


def test_keys_of_others_must_match(td: TensorDict) -> None:
    with pytest.raises(KeySetMismatch, match="`n` only in the first container"):
        td.apply(torch.add, td.exclude("n"))


def test_a_default_stands_for_what_others_lack(td: TensorDict) -> None:
    result = td.apply(lambda x, y: x if y is None else x + y, td.exclude("n"), default=None)
    assert result["a"].tolist() == [2, 2, 2]
    assert result["n", "b"].sum() == 6


@pytest.mark.parametrize("filter_empty", [False, True, None])
def test_none_drops_the_leaf(filter_empty: bool | None, td: TensorDict) -> None:
    result = td.apply(lambda x: x if x.ndim == 1 else None, filter_empty=filter_empty)
    assert "a" in result
    assert ("n" in result) is (filter_empty is False)
    assert ("n", "b") not in result.keys(True)


def test_a_new_batch_size_holds_at_every_level(td: TensorDict) -> None:
    result = td.apply(lambda x: x[:2], batch_size=[2])
    assert [sizes(result), sizes(result, "n"), sizes(result, "note")] == [(2,)] * 3


def test_a_result_that_does_not_fit_is_named(td: TensorDict) -> None:
    with pytest.raises(ShapeMismatch, match=r"\(3,\) does not fit entry `\('n', 'b'\)`.*\(2, 3\)"):
        td.apply(lambda x: x.T if x.ndim == 2 else x)


def test_numbers_become_tensors() -> None:
    td = TensorDict({"a": torch.ones(3), "b": torch.ones(2)})
    assert isinstance(td.apply(lambda x: x.shape[0])["a"], Tensor)


def test_device(td: TensorDict) -> None:
    assert td.apply(lambda x: x, device="meta")["n", "b"].device.type == "meta"
    assert td.to_dict()["note"] == "text"
    assert TensorDict({"a": 1}, device="cpu").apply(lambda x: x, device=None).device is None


def test_in_place_writes_into_the_leaves(td: TensorDict) -> None:
    a, b = td["a"], td["n", "b"].clone()
    assert td.lock_().apply(lambda x: x + 1 if x.ndim == 1 else None, inplace=True) is td
    assert td["a"] is a
    assert a.tolist() == [2, 2, 2]
    assert torch.equal(td["n", "b"], b)
    td.named_apply(lambda name, x, y: y * 2 if name == "a" else x, td, inplace=True)
    assert a.tolist() == [4, 4, 4]
    stack = lazy_stack([TensorDict({"a": torch.zeros(2)}, [2]), TensorDict({"a": a[:2]}, [2])])
    stack.apply(lambda x: x * 2, inplace=True)
    assert a.tolist() == [8, 8, 4]


def test_in_place_writes_all_results_or_none(td: TensorDict) -> None:
    before = td.clone()
    with pytest.raises(ShapeMismatch, match=r"cannot write a value of shape .* to `\('n', 'b'\)`"):
        td.apply(lambda x: x + 1 if x.ndim == 1 else x[:, :1, None].expand(3, 5, 5), inplace=True)
    assert (td == before).all()
    with pytest.raises(ShapeMismatch):
        td.apply(lambda x: x.sum(), inplace=True, batch_size=[])
    assert (td == before).all()


def test_in_place_keeps_batch_size_device_and_names(td: TensorDict) -> None:
    total = sum(leaf.sum() for leaf in td.values(True, True))
    made = td.apply(
        lambda x: x * 2, inplace=True, batch_size=td.batch_size[:1], device="cpu", names=None
    )
    assert made is td
    assert td.device is None
    assert sum(leaf.sum() for leaf in td.values(True, True)) == 2 * total


def test_names(td: TensorDict) -> None:
    names: list[NestedKey] = []
    td.named_apply(lambda name, x: names.append(name), nested_keys=True)
    td.named_apply(lambda name, x, y: names.append(name), td)
    assert names == ["a", ("n", "b"), "a", "b"]


def test_writing_into_leaves(td: TensorDict) -> None:
    a = td["a"]
    td.lock_().apply_(lambda x: x * 2).apply_(lambda x: x.add_(1)).apply_(lambda x: None)
    td.apply_(lambda x, y: x + y, td)
    assert td["a"] is a
    assert a.tolist() == [6, 6, 6]


def test_a_failing_write_changes_nothing(td: TensorDict) -> None:
    with pytest.raises(ShapeMismatch, match=r"shape \(5,\) to `\('n', 'b'\)`"):
        td.apply_(lambda x: x + 1 if x.ndim == 1 else torch.ones(5))
    assert td["a"].tolist() == [1, 1, 1]


def test_a_locked_container_gives_an_unlocked_result(td: TensorDict) -> None:
    assert not td.lock_().apply(lambda x: x).is_locked


def test_a_device_leaves_the_batch_size_of_nested_containers() -> None:
    td = TensorDict({"n": TensorDict({"a": torch.zeros(2, 3)}, [2, 3]), "word": "x"}, [2])
    for moved in (
        td.apply(lambda leaf: leaf, device="cpu"),
        td.named_apply(lambda _, leaf, other: leaf + other, td, device="cpu"),
    ):
        assert inner(moved, "n").batch_size == (2, 3)
        assert moved.device == inner(moved, "n").device == torch.device("cpu")


def test_propagate_lock_locks_the_result() -> None:
    td = TensorDict({"a": 1.0, "n": {"b": 2.0}})
    assert not td.apply(lambda x: x + 1, propagate_lock=True).is_locked
    result = td.lock_().apply(lambda x: x + 1, propagate_lock=True)
    assert result.is_locked
    with pytest.raises(Locked):
        result["n", "c"] = 1.0
    assert not td.apply(lambda x: x + 1).is_locked


def test_call_on_nested_enters_no_entry() -> None:
    td = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2)}, "word": "text"}, [2])
    seen = []

    def fn(name: str, value: object) -> object:
        seen.append((name, type(value).__name__))
        return value if name != "a" else None

    result = td.named_apply(fn, call_on_nested=True)
    assert seen == [("a", "Tensor"), ("n", "TensorDict"), ("word", "NonTensorData")]
    assert sorted(result.to_dict()) == ["n", "word"]


def test_is_leaf_selects_by_type() -> None:
    td = TensorDict({"a": {"b": {"c": torch.ones(2)}}, "word": "text"}, [2])
    got = td.apply(
        lambda value: str(value.data).upper() if isinstance(value, NonTensorData) else value,
        is_leaf=lambda kind: issubclass(kind, NonTensorData),
    )
    assert got["word"] == "TEXT"
    assert got["a", "b", "c"] is td["a", "b", "c"]


def test_apply_writes_into_out() -> None:
    td = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2)}}, [2])
    out = td.clone()
    leaf = out["n", "b"]
    assert td.apply(lambda x: x + 1, out=out) is out
    assert leaf.tolist() == [2, 2]
    with pytest.raises(InvalidArgument, match="cannot be combined with `out`"):
        td.apply(lambda x: x + 1, out=out, inplace=True)


def test_out_takes_results_that_it_lacks() -> None:
    td = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2)}}, [2])
    out = TensorDict({"n": {"own": torch.zeros(2)}}, [2])
    td.apply(lambda x: x + 1, out=out)
    assert set(out.keys(True, True)) == {"a", ("n", "own"), ("n", "b")}
    assert out["n", "b"].tolist() == [2, 2]
    with pytest.raises(Locked, match="add results that `out` lacks"):
        td.named_apply(lambda name, x: x, out=TensorDict(batch_size=[2]).lock_())


def test_in_place_on_nested_containers() -> None:
    b = torch.ones(2)
    td = TensorDict({"a": torch.ones(2), "n": {"b": b}}, [2])
    td.apply(lambda value: value + 1, call_on_nested=True, inplace=True)
    assert b.tolist() == [2, 2]
    before = td.clone()
    with pytest.raises(KeySetMismatch, match="source keys below `n` not found in the target: `x`"):
        td.apply(
            lambda value: value * 5 if isinstance(value, torch.Tensor) else {"x": b},
            call_on_nested=True,
            inplace=True,
        )
    assert bool((td == before).all())


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_an_error_of_the_function_says_for_which_entry(named: bool, beside: bool) -> None:
    td = TensorDict({"n": {"a": torch.zeros(2, 3)}}, [2])

    def fails(*given: object) -> object:
        raise ZeroDivisionError

    call = td.named_apply if named else td.apply
    with pytest.raises(ZeroDivisionError) as caught:
        call(fails, *([td] if beside else []))
    assert caught.value.__notes__ == ["This is entry `('n', 'a')` of shape (2, 3)."]


def test_apply_in_place_takes_the_options_of_apply() -> None:
    leaf = torch.ones(2)
    td = TensorDict({"a": leaf, "b": torch.ones(2)}, [2])
    other = TensorDict({"a": torch.ones(2)}, [2])
    assert td.apply_(lambda x, y: x if y is None else x + y, other, default=None) is td
    assert leaf.tolist() == [2, 2]
    td.apply_(lambda x: None, filter_empty=True)
    assert list(td.keys()) == ["a", "b"]


def test_apply_in_place_refuses_what_makes_another_container() -> None:
    td = TensorDict({"a": torch.ones(2)}, [2])
    with pytest.raises(InvalidArgument, match="cannot be combined with `out`"):
        td.apply_(lambda x: x + 1, out=td.clone())  # type: ignore[call-arg]  # the error is the promise
    assert td["a"].tolist() == [1, 1]


def test_a_prefix_starts_every_path() -> None:
    td = TensorDict({"a": 0.0, "b": {"c": 1.0}})
    for prefix in ("p", ("p",)):
        names: list[object] = []
        td.named_apply(lambda name, x: names.append(name), nested_keys=True, prefix=prefix)  # noqa: B023  # called at once
        assert names == [("p", "a"), ("p", "b", "c")]
    doubled = td.named_apply(
        lambda name, x, y: x + y if name[-1] == "a" else x, td + 1, nested_keys=True, prefix="p"
    )
    assert doubled.to_dict() == {"a": 1.0, "b": {"c": 1.0}}
    with pytest.raises(InvalidArgument, match="`prefix` requires `nested_keys=True`"):
        td.named_apply(lambda name, x: x, prefix="p")


def test_what_has_no_result_stays_in_out() -> None:
    td = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2), "c": torch.ones(2)}}, [2])
    out = td.clone().zero_()
    kept = td.named_apply(lambda name, x: None if name == "b" else x * 2, out=out)
    assert kept is out
    assert out["a"].tolist() == [2, 2]
    assert out["n", "c"].tolist() == [2, 2]
    assert out["n", "b"].tolist() == [0, 0]


def test_members_of_a_ragged_stack_get_a_device_each() -> None:
    stack = lazy_stack([TensorDict({"a": torch.ones(n)}) for n in (1, 2)])
    made = stack.apply(lambda x: x * 2, device="cpu")
    assert isinstance(made, LazyStackedTensorDict)
    assert made.device == torch.device("cpu")
    assert made[1]["a"].tolist() == [2, 2]
    named = stack.named_apply(lambda name, x: x * 2, device=None, filter_empty=True)
    assert named[0]["a"].tolist() == [2]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_what_only_one_member_of_a_stack_gives_is_kept(nested: bool, first: bool) -> None:
    whole = TensorDict({"a": torch.zeros(2, dtype=torch.int64)})
    real = TensorDict({"a": torch.zeros(2), "c": torch.ones(2)})
    stack = lazy_stack([real, whole] if first else [whole, real])
    td = TensorDict({"s": stack}, [2]) if nested else stack
    made = td.apply(lambda x: x if x.is_floating_point() else None)
    made = made.get("s") if nested else made  # type: ignore[assignment]  # the stack
    assert isinstance(made, LazyStackedTensorDict)
    assert made[0 if first else 1]["c"].tolist() == [1, 1]
    assert made[1 if first else 0].is_empty()


def test_a_leaf_that_is_held_twice_is_changed_twice() -> None:
    td = TensorDict({"a": torch.zeros(2)})
    twice = lazy_stack([td, td])
    assert twice.apply_(lambda leaf: leaf + 1)["a"].tolist() == [[2.0, 2.0]] * 2
    assert twice.add_(1)["a"].tolist() == [[4.0, 4.0]] * 2


def test_another_container_may_have_further_keys() -> None:
    td = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2)}}, [2])
    other = TensorDict({"z": torch.ones(2), "n": {"y": torch.ones(2), "b": torch.ones(2)}}, [2])
    other["a"] = torch.ones(2)
    for second in (other, lazy_stack(list(other.unbind(0)))):
        results = [
            td.apply(torch.add, second),
            td.named_apply(lambda _, x, y: x + y, second),
            td.clone().apply_(torch.add, second),
            lazy_stack(list(td.unbind(0))).apply(torch.add, second),
        ]
        for result in results:
            assert result is not None
            assert list(result.keys(True)) == ["a", "n", ("n", "b")]
            assert result["n", "b"].tolist() == result["a"].tolist() == [2, 2]
