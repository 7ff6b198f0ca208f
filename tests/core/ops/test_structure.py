"""Changing keys: what is merged, kept, renamed, and refused."""

import pytest
import torch
from tests.core.kinds import inner
from torch import Tensor

from kd_core import (
    InvalidArgument,
    InvalidKey,
    InvalidValue,
    KeyCollision,
    KeyNotFound,
    KeySetMismatch,
    LazyStackedTensorDict,
    Locked,
    NestedKey,
    ShapeMismatch,
    TensorClass,
    TensorDict,
    TensorDictBase,
    UnknownField,
    lazy_stack,
)


def make() -> TensorDict:
    return TensorDict({"a": torch.zeros(3), "n": {"b": torch.ones(3), "c": torch.ones(3)}}, [3])


def test_update_stores_by_reference_and_keeps_order() -> None:
    td, value = make(), torch.ones(3)
    assert td.update({"z": value, "a": value}) is td
    assert td["a"] is value
    assert list(td.keys()) == ["a", "n", "z"]
    assert make().update({"a": value}, clone=True)["a"] is not value


def test_update_takes_a_new_container_by_reference() -> None:
    td, source = TensorDict(a=torch.zeros(3)), TensorDict(n=TensorDict(b=torch.ones(3)))
    td.update(source)
    assert td["n"] is source["n"]
    assert td.flatten_keys().keys() == {"a", "n.b"}
    outer = TensorDict(other=1.0, td=td)
    with pytest.raises(InvalidValue, match="`td` would contain itself"):
        td.update(outer)
    flat = TensorDict(a=torch.zeros(3))
    with pytest.raises(InvalidValue, match="`flat` would contain itself"):
        flat.update(TensorDict(flat=flat))
    assert list(flat.keys()) == ["a"]


def test_update_replaces_a_container_by_a_leaf_and_back() -> None:
    td = make().update({"n": torch.zeros(3), "a": {"x": torch.ones(3)}})
    assert set(td.keys(True, True)) == {"n", ("a", "x")}


@pytest.mark.parametrize("inplace", [False, True])
def test_update_goes_through_no_leaf(inplace: bool) -> None:
    td = TensorDict({"a": torch.ones(2), "n": {"a": torch.ones(2)}}, [2])
    sources: list[dict[NestedKey, object]] = [
        {("a", "z"): torch.zeros(2)},
        {("n", "a", "z"): torch.zeros(2)},
        {"n": {("a", "z"): torch.zeros(2)}},
        {"b": torch.zeros(2), ("a", "y", "z"): torch.zeros(2)},
    ]
    for source in sources:
        with pytest.raises(KeyNotFound, match=r"it goes through .*, which is a tensor"):
            td.update(source, inplace=inplace)
    assert list(td.keys(True)) == ["a", "n", ("n", "a")]
    assert td["a"].sum() == td["n", "a"].sum() == 2


def test_update_in_place_keeps_the_storage_where_there_is_one() -> None:
    td = make()
    before = td["a"]
    td.update({"a": torch.ones(3), "z": torch.ones(3)}, inplace=True)
    assert td["a"] is before
    torch.testing.assert_close(before, torch.ones(3))
    assert "z" in td


@pytest.mark.parametrize("only", [["z"], [("n", "d")], ["n", "z"]])
def test_update_takes_chosen_keys(only: list[NestedKey]) -> None:
    source = {"z": torch.zeros(3), "y": torch.zeros(3), "n": {"d": torch.zeros(3)}}
    td = make().update(source, keys_to_update=only)
    added = set(td.keys(True, True)) - set(make().keys(True, True))
    assert added == {"z" if key == "z" else ("n", "d") for key in only}


def test_update_refuses_what_is_no_mapping_and_conflicts() -> None:
    td = make()
    with pytest.raises(InvalidArgument, match="must be a mapping or a container, got an `int`"):
        td.update(3)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidKey, match="must be a string"):
        td.update({3: 1.0})  # type: ignore[type-var]  # wrong on purpose
    both: dict[NestedKey, object] = {"q": torch.zeros(3), ("q", "x"): torch.zeros(3)}
    with pytest.raises(KeyCollision, match="makes `q` a container, and another key makes it a val"):
        td.update(both)
    twice: dict[NestedKey, object] = {("n", "b"): torch.zeros(3), "n": {"b": torch.ones(3)}}
    with pytest.raises(KeyCollision, match=r"`\('n', 'b'\)` is given twice"):
        td.update(twice)


def test_update_with_itself_changes_nothing() -> None:
    td = make()
    td.update(td)
    td.update_(td)
    assert list(td.keys(True)) == list(make().keys(True))


def test_a_locked_nested_container_is_not_updated() -> None:
    td = make()
    inner(td, "n").lock_()
    with pytest.raises(Locked, match=r"`\('n', 'b'\)`"):
        td.update({"a": torch.ones(3), "n": {"b": torch.zeros(3)}})
    torch.testing.assert_close(td["a"], torch.zeros(3))


def test_replace_is_a_new_container_with_shared_tensors() -> None:
    td = make()
    other = td.replace({"n": {"b": torch.zeros(3)}, "z": torch.zeros(3)})
    assert other["a"] is td["a"]
    assert "z" not in td
    torch.testing.assert_close(td["n", "b"], torch.ones(3))
    named = td.replace({"z": torch.zeros(3)}, source=torch.ones(3), a=torch.full((3,), 5.0))
    assert list(named.keys()) == [*td.keys(), "z", "source"]
    assert named["a"].tolist() == [5, 5, 5]
    assert td.replace() is td
    assert td.replace({}) is td


def test_select_shares_tensors_and_keeps_the_asked_order() -> None:
    td = make()
    part = td.select(("n", "c"), "a")
    assert list(part.keys(True)) == ["n", ("n", "c"), "a"]
    assert part["a"] is td["a"]
    assert part["n", "c"] is td["n", "c"]


@pytest.mark.parametrize(
    "keys", [["x"], [("n", "x")], [("a", "x")], ["n", ("n", "x")], [("n", "x"), "n"]]
)
def test_select_of_a_missing_key_is_refused_or_ignored(keys: list[NestedKey]) -> None:
    with pytest.raises(KeyNotFound, match="`"):
        make().select(*keys)
    make().select(*keys, strict=False)


def test_select_names_the_first_key_that_is_missing() -> None:
    with pytest.raises(KeyNotFound, match=r"key `\('n', 'x'\)` not found"):
        make().select("a", ("n", "x"), "y")
    with pytest.raises(KeyNotFound, match="key `y` not found"):
        make().select("a", "y", ("n", "x"))


def test_a_nested_key_beside_its_whole_container_must_be_there() -> None:
    with pytest.raises(KeyNotFound, match=r"key `\('n', 'x'\)` not found"):
        make().select("n", ("n", "x"))
    with pytest.raises(KeyNotFound, match=r"key `\('n', 'x'\)` not found"):
        make().select(("n", "x"), "n")
    assert list(make().select(("n", "b"), "n").keys(True, True)) == [("n", "b"), ("n", "c")]


def test_select_and_exclude_in_place_change_the_container() -> None:
    td = make()
    assert td.select("n", inplace=True) is td
    assert list(td.keys()) == ["n"]
    assert td.exclude(("n", "b"), ("n", "c"), inplace=True) is td
    assert list(td.keys(True)) == ["n"]
    with pytest.raises(Locked, match="exclude in place"):
        td.lock_().exclude("n", inplace=True)


def test_a_part_of_a_locked_container_is_free_and_what_it_keeps_whole_is_not() -> None:
    td = make().lock_()
    for part in (td.select("n"), td.exclude("a"), td.select(("n", "b"))):
        part["new"] = torch.zeros(3)
    assert inner(td.select("n"), "n") is inner(td, "n")
    assert inner(td.exclude("a"), "n").is_locked
    inner(td.select(("n", "b")), "n")["new"] = torch.zeros(3)  # a level of its own
    assert set(td.keys(True, True)) == set(make().keys(True, True))


def test_changes_in_place_that_change_nothing_are_allowed_on_a_locked_container() -> None:
    td = make().lock_()
    assert td.exclude(inplace=True) is td.exclude("missing", inplace=True) is td
    assert td.unflatten_keys(inplace=True) is td.contiguous(inplace=True) is td
    with pytest.raises(Locked):
        TensorDict({"a.b": 1.0}).lock_().unflatten_keys(inplace=True)
    with pytest.raises(Locked):
        TensorDict({"a": torch.zeros(3, 2).t()}).lock_().contiguous(inplace=True)
    free = td.flatten_keys().unflatten_keys()
    inner(free, "n")["new"] = torch.zeros(3)
    inner(td.unflatten_keys(), "n")["new"] = torch.zeros(3)


def test_a_locked_container_says_so_before_it_looks_at_the_key() -> None:
    td = make().lock_()
    with pytest.raises(Locked):
        td.set_non_tensor(("a", "below"), "text")
    with pytest.raises(Locked):
        td.create_nested(("a", "below"))


@pytest.mark.parametrize(
    ("old", "new"), [("a", "z"), (("n", "b"), ("n", "z")), (("n", "b"), "z"), ("a", ("m", "z"))]
)
def test_rename_moves_an_entry(old: NestedKey, new: NestedKey) -> None:
    td = make()
    value = td.get(old)
    assert td.rename_key_(old, new) is td
    assert td.get(new) is value
    assert old not in td


def test_rename_overwrites_unless_it_is_to_be_safe() -> None:
    with pytest.raises(KeyCollision, match="there is an entry of that name"):
        make().rename_key_("a", "n", safe=True)
    td = make().rename_key_("a", "n")
    assert list(td.keys(True)) == ["n"]
    assert list(make().rename_key_(("n", "b"), "n").keys(True)) == ["a", "n"]
    assert list(make().rename_key_("a", "a").keys()) == ["a", "n"]


def test_an_entry_that_is_renamed_below_its_name_is_in_a_new_container() -> None:
    assert ("n", "x", "b") in make().rename_key_("n", ("n", "x")).keys(True)
    assert ("a", "b") in make().rename_key_("a", ("a", "b")).keys(True)


def test_rename_that_cannot_be_done_changes_nothing() -> None:
    td = make()
    with pytest.raises(KeyNotFound, match="`x`"):
        td.rename_key_("x", "y")
    with pytest.raises(KeyNotFound, match="goes through `a`"):
        td.rename_key_(("n", "b"), ("a", "b"))
    td.batch_size = []
    inner(td, "n").batch_size = [3]
    td["m"] = TensorDict({"short": torch.zeros(2)}, [2])
    with pytest.raises(ShapeMismatch, match="short"):
        td.rename_key_(("m", "short"), ("n", "short"))
    assert ("m", "short") in td


@pytest.mark.parametrize("separator", [".", "/", "__"])
def test_flat_keys_become_nested_again(separator: str) -> None:
    flat = make().flatten_keys(separator)
    assert list(flat.keys()) == ["a", f"n{separator}b", f"n{separator}c"]
    assert flat[f"n{separator}b"].shape == (3,)
    assert set(flat.unflatten_keys(separator).keys(True)) == set(make().keys(True))


def test_keys_that_would_collide_are_refused() -> None:
    with pytest.raises(KeyCollision, match=r"`a.b`. Choose another separator than '.'"):
        TensorDict({"a": {"b": 1.0}, "a.b": 2.0}).flatten_keys()
    with pytest.raises(KeyCollision, match=r"key `a.b` makes `a` a container"):
        TensorDict({"a": 1.0, "a.b": 2.0}).unflatten_keys()
    with pytest.raises(KeyCollision, match=r"key `a` makes `a` a value"):
        TensorDict({"a.b": 2.0, "a": 1.0}).unflatten_keys()
    with pytest.raises(KeyCollision, match=r"key `a.b.c` makes `a.b` a container"):
        TensorDict({"a.b": 2.0, "a.b.c": 1.0}).unflatten_keys()
    with pytest.raises(InvalidValue, match="separator must not be empty"):
        TensorDict({"a.b": 2.0}).unflatten_keys("")


def test_deep_keys_keep_their_places() -> None:
    td = TensorDict({"a.b.c": 1.0, "d": 2.0, "a.e": 3.0, "a.b.f": 4.0}).unflatten_keys()
    leaves = ["d", ("a", "b", "c"), ("a", "b", "f"), ("a", "e")]
    assert list(td.keys(True, True)) == leaves


def test_flattening_in_place_changes_the_container() -> None:
    td = make()
    assert td.flatten_keys(inplace=True) is td
    assert list(td.keys()) == ["a", "n.b", "n.c"]
    assert set(td.unflatten_keys(inplace=True).keys(True)) == set(make().keys(True))


def test_empty_keeps_levels_on_request() -> None:
    assert list(make().empty(recurse=True).keys(True)) == ["n"]
    assert make().empty(recurse=True).is_empty()
    assert not make().is_empty()
    assert not TensorDict({"word": "x"}).is_empty()


def test_a_rename_that_is_refused_changes_nothing() -> None:
    class Step(TensorClass):
        a: Tensor
        n: TensorDict

    step = Step(torch.ones(2), TensorDict({}, [2]), batch_size=2)
    with pytest.raises(UnknownField, match="`z` is not a field"):
        step.rename_key_("a", "z")
    with pytest.raises(UnknownField, match=r"`n\.x` is not a field"):
        step.set(("n", "x"), torch.zeros(2)).flatten_keys(inplace=True)
    assert list(step.keys(True)) == ["a", "n", ("n", "x")]
    step.rename_key_("a", ("n", "x"))  # a field without an entry reads as `None`
    assert (step.get("a"), step.n["x"].tolist()) == (None, [1, 1])
    td = TensorDict({"a": torch.ones(2), "b": 1.0, "n": TensorDict({}, [2]).lock_()})
    with pytest.raises(Locked):
        td.rename_key_("a", ("n", "x"))
    assert list(td.keys()) == ["a", "b", "n"]


@pytest.mark.parametrize("inplace", [False, True])
def test_unflatten_keys_adds_to_a_container_of_the_same_name(inplace: bool) -> None:
    below = TensorDict({"m": TensorDict({"b": 1.0}), "m.c": 2.0})
    td = TensorDict({"n.m.a": 3.0, "x": 0.0, "n": below, "n.d": 4.0})
    nested = td.unflatten_keys(inplace=inplace)
    found = ["x", ("n", "m", "b"), ("n", "m", "a"), ("n", "m.c"), ("n", "d")]
    assert list(nested.keys(True, True)) == found
    assert list(below.keys(True, True)) == [("m", "b"), "m.c"]
    locked = TensorDict({"n": TensorDict({"b": 1.0}), "n.a": 2.0}).lock_()
    nested = locked.unflatten_keys()
    assert list(nested.keys(True, True)) == [("n", "b"), ("n", "a")]
    assert inner(locked, "n").is_locked
    assert not inner(nested, "n").is_locked


def test_unflatten_keys_overwrites_nothing_in_a_container_of_the_same_name() -> None:
    inside = TensorDict({"a": 1.0, "m": TensorDict({"b": 1.0})})
    for key in ("n.a", "n.m"):
        with pytest.raises(KeyCollision, match=f"`{key}`"):
            TensorDict({"n": inside, key: 2.0}).unflatten_keys()
    with pytest.raises(KeyCollision, match=r"`n.a`"):
        TensorDict({"n": inside, "n.a.b": 2.0}).unflatten_keys()
    rows = TensorDict({"n": TensorDict(a=torch.zeros(3), batch_size=[3]), "n.b": torch.zeros(2)})
    with pytest.raises(ShapeMismatch, match="`b`"):
        rows.unflatten_keys(inplace=True)
    assert list(rows.keys(True, True)) == [("n", "a"), "n.b"]


def test_unflatten_keys_refuses_what_nests_too_deep() -> None:
    with pytest.raises(InvalidValue, match="at most 64 levels deep"):
        TensorDict({".".join(["n"] * 300): 1.0}).unflatten_keys()


def test_update_takes_the_batch_size_of_the_source() -> None:
    td = TensorDict({"a": torch.zeros(2, 3), "n": {"b": torch.zeros(2)}}, [2])
    source = TensorDict({"a": torch.ones(4), "n": {"b": torch.ones(4)}, "c": torch.ones(4)}, [4])
    assert td.update(source, update_batch_size=True) is td
    assert td.batch_size == (4,)
    assert inner(td, "n").batch_size == (4,)
    assert td["a"] is source["a"]
    assert set(td.keys()) == {"a", "n", "c"}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("clone", [False, True])
def test_update_takes_the_batch_sizes_of_nested_containers(lazy: bool, clone: bool) -> None:
    def chat(count: int) -> TensorDictBase:
        rows = [TensorDict(word=str(each), x=torch.ones(each + 1)) for each in range(count)]
        td = TensorDict(history={"prompt": lazy_stack(rows), "n": TensorDict(batch_size=[count])})
        return lazy_stack([td]) if lazy else td

    for before, after in ((3, 2), (2, 3)):
        td, source = chat(before), chat(after)
        with pytest.raises(ShapeMismatch):
            td.update(source)
        assert td.update(source, clone=clone, update_batch_size=True) is td
        prompt = inner(inner(td, "history"), "prompt")
        assert prompt.batch_size == ((1, after) if lazy else (after,))
        prompt["y"] = torch.ones(prompt.batch_size)
        assert "y" not in inner(inner(source, "history"), "prompt") or not clone
    lacking = TensorDict(history={"prompt": TensorDict(word="a", batch_size=[5])})
    with pytest.raises(KeySetMismatch, match=r"lacks `x` below `\('history', 'prompt'\)`"):
        chat(2).update(lazy_stack([lacking]) if lazy else lacking, update_batch_size=True)


def test_update_of_the_batch_size_is_all_or_nothing() -> None:
    td = TensorDict({"a": torch.zeros(2, 3), "n": {"b": torch.zeros(2)}}, [2])
    source = TensorDict({"a": torch.ones(4), "n": {}}, [4])
    with pytest.raises(KeySetMismatch, match="the source lacks `b` below `n`"):
        td.update(source, update_batch_size=True)
    with pytest.raises(ShapeMismatch, match="does not fit entry `a`"):
        td.update({"a": torch.ones(4)}, update_batch_size=True)
    with pytest.raises(Locked):
        td.lock_().update(source, update_batch_size=True)
    assert td.batch_size == (2,)
    assert td["a"].shape == (2, 3)


def test_update_with_is_leaf_replaces_instead_of_merging() -> None:
    td = TensorDict({"n": {"a": 1.0}})
    td.update({"n": TensorDict({"b": 2.0})}, is_leaf=lambda kind: issubclass(kind, TensorDict))
    assert list(td.keys(True, True)) == [("n", "b")]


@pytest.mark.parametrize("name", ["update", "update_"])
def test_non_blocking_changes_no_value(name: str) -> None:
    td = TensorDict({"a": torch.zeros(2)}, [2], device="cpu")
    getattr(td, name)({"a": torch.ones(2)}, non_blocking=True)
    assert td["a"].tolist() == [1, 1]


def test_select_as_a_tensordict() -> None:
    class Pair(TensorClass):
        a: Tensor
        b: Tensor

    pair = Pair(torch.ones(2), torch.zeros(2), batch_size=[2])
    assert isinstance(pair.select("a", "b"), Pair)
    plain: object = pair.select("a", "b", as_tensordict=True)
    assert isinstance(plain, TensorDict)


def test_flatten_keys_keeps_leaves_of_choice() -> None:
    class Pair(TensorClass):
        a: Tensor

    td = TensorDict({"n": {"pair": Pair(torch.ones(2)), "x": 1.0}})
    flat = td.flatten_keys(is_leaf=lambda kind: issubclass(kind, Pair))
    assert list(flat.keys()) == ["n.pair", "n.x"]


def test_empty_of_another_batch_size() -> None:
    td = TensorDict({"a": torch.ones(2)}, [2], device="cpu")
    assert td.empty(batch_size=[5]).batch_size == (5,)
    assert td.empty(batch_size=5).device == torch.device("cpu")
    assert td.empty(device=None).device is None
    td = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2)}}, [2])
    assert inner(td.empty(recurse=True, batch_size=[]), "n").batch_size == (2,)
    assert inner(td.empty(recurse=True, device="cpu"), "n").device == torch.device("cpu")
    with pytest.raises(ShapeMismatch):
        td.empty(recurse=True, batch_size=[5])


def ragged(value: float, sizes: tuple[int, ...] = (1, 2)) -> TensorDict:
    """Return a container with a stack inside whose entry `x` is ragged."""
    members = [TensorDict({"x": torch.full((size,), value)}) for size in sizes]
    return TensorDict({"s": lazy_stack(members), "a": torch.full((len(sizes),), value)})


def stack_of(td: TensorDict) -> LazyStackedTensorDict:
    return td.nested("s", LazyStackedTensorDict)


@pytest.mark.parametrize("keys", [None, [("s", "x")], ["s"]])
def test_update_merges_ragged_stacks_member_by_member(keys: list[NestedKey] | None) -> None:
    td, source = ragged(1.0), ragged(2.0, (3, 5))
    td["s", "kept"] = torch.zeros(2)
    td.update(source, keys_to_update=keys)
    for row in range(2):
        assert stack_of(td)[row]["x"] is stack_of(source)[row]["x"]
    assert td["s", "kept"].tolist() == [0, 0]
    assert td["a"][0] == (2 if keys is None else 1)
    td.update({"s": stack_of(source)}, clone=True)
    assert stack_of(td)[1]["x"] is not stack_of(source)[1]["x"]
    assert stack_of(td)[1]["x"].tolist() == [2.0] * 5


def test_update_of_ragged_stacks_is_all_or_nothing() -> None:
    td, source = ragged(1.0), ragged(2.0)
    source["s", "y"] = torch.zeros(2)
    stack_of(td).lock_()
    with pytest.raises(Locked, match="lock of an enclosing container"):
        td.update(source)
    assert td["a"].tolist() == [1.0, 1.0]
    assert stack_of(td)[1]["x"].tolist() == [1.0, 1.0]


def test_update_takes_entries_by_keyword() -> None:
    td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}}, [2])
    assert td.update(c=torch.ones(2), n={"d": torch.ones(2)}) is td
    assert set(td.keys(True, True)) == {"a", "c", ("n", "b"), ("n", "d")}
    td.update({"a": torch.ones(2)}, a=torch.full((2,), 2.0))
    assert td["a"].tolist() == [2, 2]


def test_update_without_a_source_changes_nothing() -> None:
    td = TensorDict({"a": torch.zeros(2)}, [2]).lock_()
    assert td.update() is td.update_() is td
    assert list(td.keys()) == ["a"]


def test_update_takes_the_source_under_the_name_of_tensordict() -> None:
    td = TensorDict({"a": torch.zeros(2)}, [2])
    td.update(input_dict_or_td={"a": torch.ones(2)}, b=torch.ones(2))
    assert td["a"].tolist() == td["b"].tolist() == [1, 1]
    td.update_(input_dict_or_td={"a": torch.zeros(2)})
    assert td["a"].tolist() == [0, 0]
    for method in (td.update, td.update_):
        with pytest.raises(TypeError, match="multiple values for argument 'input_dict_or_td'"):
            method({"a": torch.ones(2)}, input_dict_or_td={"a": torch.ones(2)})  # type: ignore[misc]  # the error is the promise
    assert td["a"].tolist() == [0, 0]


def test_entries_by_keyword_are_all_or_nothing() -> None:
    td = TensorDict({"a": torch.zeros(2)}, [2])
    with pytest.raises(ShapeMismatch, match="`b`"):
        td.update({"a": torch.ones(2)}, b=torch.ones(3))
    with pytest.raises(KeyNotFound, match="`b`"):
        td.update_({"a": torch.ones(2)}, b=torch.ones(2))
    with pytest.raises(InvalidArgument, match="cannot be combined with entries by keyword"):
        td.update(TensorDict({"a": torch.ones(3)}, [3]), update_batch_size=True, a=torch.ones(3))
    assert td["a"].tolist() == [0, 0]
    assert list(td.keys()) == ["a"]


def test_update_in_place_takes_entries_by_keyword() -> None:
    leaf = torch.zeros(2)
    td = TensorDict({"a": leaf, "n": {"a": leaf[:1]}}, [])
    td.lock_().update_(a=torch.ones(2))
    assert leaf.tolist() == [1, 1]
    td.update({"a": torch.zeros(2)}, inplace=True, n={"a": torch.full((1,), 5.0)})
    assert leaf.tolist() == [5, 0]


def ragged_rows(value: float) -> LazyStackedTensorDict:
    return lazy_stack(
        [
            TensorDict({"a": torch.full((n,), value + n), "d": torch.zeros(2), "s": f"{value}{n}"})
            for n in (1, 3)
        ]
    )


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("method", ["update", "update_"])
@pytest.mark.parametrize("keys", [("a", "d", "s"), ("a",), ("a", "s")])
def test_a_ragged_stack_is_updated_in_place(
    below: bool, method: str, keys: tuple[str, ...]
) -> None:
    stack, source = ragged_rows(0.0), ragged_rows(10.0)
    leaves = [member["a"] for member in stack.tensordicts]
    target: TensorDictBase = TensorDict({"n": stack}, [2]) if below else stack
    chosen = source.select(*keys)
    given: TensorDictBase = TensorDict({"n": chosen}, [2]) if below else chosen
    options = {"inplace": True} if method == "update" else {}
    getattr(target.lock_(), method)(given, **options)
    for leaf, row in zip(leaves, source.tensordicts, strict=True):
        assert torch.equal(leaf, row["a"])
    wanted = source if "s" in keys else ragged_rows(0.0)
    assert [member["s"] for member in stack.tensordicts] == wanted["s"]


@pytest.mark.parametrize("method", ["update", "update_"])
def test_a_ragged_stack_that_does_not_fit_stays_as_it_was(method: str) -> None:
    stack = ragged_rows(0.0)
    before = stack.clone()
    other = lazy_stack([TensorDict({"a": torch.ones(n), "d": torch.ones(2)}) for n in (1, 2)])
    options = {"inplace": True} if method == "update" else {}
    with pytest.raises(ShapeMismatch, match="cannot write a value of shape"):
        getattr(stack, method)(other, **options)
    for mine, old in zip(stack.tensordicts, before.tensordicts, strict=True):
        assert (mine == old).all()


@pytest.mark.parametrize("method", ["update", "update_"])
def test_rows_are_not_written_to_a_member_that_is_held_twice(method: str) -> None:
    member = TensorDict({"a": torch.zeros(3)})
    stack = lazy_stack([member, member])
    other = lazy_stack([TensorDict({"a": torch.ones(n)}) for n in (1, 3)])
    options = {"inplace": True} if method == "update" else {}
    with pytest.raises(InvalidValue, match="each member once"):
        getattr(stack, method)(other, **options)
    assert member["a"].tolist() == [0, 0, 0]


def test_ragged_stacks_along_another_dimension_and_stacks_of_stacks_are_updated() -> None:
    def rows(value: float) -> LazyStackedTensorDict:
        inner = [TensorDict({"a": torch.full((2, n), value)}, [2]) for n in (1, 3)]
        return lazy_stack(inner, 1)

    for make in (rows, lambda value: lazy_stack([rows(value), rows(value + 1)])):
        stack, source = make(0.0), make(5.0)
        leaves = leaves_below(stack)
        stack.update(source, inplace=True)
        assert all(map(torch.equal, leaves, leaves_below(source)))


def leaves_below(member: TensorDictBase) -> list[torch.Tensor]:
    if isinstance(member, LazyStackedTensorDict):
        return [leaf for each in member.tensordicts for leaf in leaves_below(each)]
    return [member["a"]]


def test_a_new_ragged_entry_is_stored_in_place() -> None:
    stack = lazy_stack([TensorDict({"d": torch.zeros(1)}) for _ in range(2)])
    stack.update(ragged_rows(1.0).select("a"), inplace=True)
    assert [row.tolist() for row in stack.get("a", as_list=True)] == [[2], [4, 4, 4]]


@pytest.mark.parametrize("method", ["update", "update_", "update_at_"])
def test_a_key_below_a_tensor_updates_nothing(method: str) -> None:
    td = TensorDict({"b": torch.zeros(2), "n": {"r": torch.zeros(2)}}, [2])
    source = TensorDict({"b": torch.ones(2), "n": torch.ones(2)}, [2])
    index = (slice(None),) if method == "update_at_" else ()
    for key in (("b", "r"), ("n", "r")):
        getattr(td, method)(source, *index, keys_to_update=[key])
    assert td["b"].tolist() == td["n", "r"].tolist() == [0, 0]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("as_dict", [False, True])
def test_a_nested_container_is_written_in_place(lazy: bool, as_dict: bool) -> None:
    one = TensorDict({"a": {"x": torch.zeros(2), "n": {"y": torch.ones(2)}, "s": "word"}}, [2])
    td = lazy_stack([one, one.clone()]) if lazy else one
    x = one["a", "x"]
    new = inner(td, "a") + 1
    td.lock_().set_("a", new.to_dict() if as_dict else new)
    assert x.tolist() == [1, 1]
    assert one["a", "n", "y"].tolist() == [2, 2]
    before = td.clone()
    with pytest.raises(KeyError, match="other"):
        td.set_("a", {"x": torch.zeros(2), "other": torch.zeros(2)})
    assert (td == before).all()
    td.unlock_().set("a", new + 1, inplace=True)
    assert x.tolist() == [2, 2]


def test_an_empty_container_of_another_size_keeps_the_names_of_its_first_dimensions() -> None:
    td = TensorDict({"a": torch.ones(3, 2)}, [3, 2], names=["t", "e"])
    assert td.empty(batch_size=[5]).names == ["t"]
    assert td.empty(batch_size=[5, 6, 7]).names == ["t", "e", None]


def test_keys_to_update_do_not_matter_without_a_source() -> None:
    td = TensorDict({"a": torch.ones(2)}, [2])
    assert td.update(keys_to_update=["b"]) is td
    assert td.update_(keys_to_update=["b"]) is td


def test_entries_that_keep_their_keys_come_first() -> None:
    td = TensorDict({"n.c": 0.0, "a": 0.0, "m.x.y": 0.0, "n.b": 0.0, "m.z": 0.0, "e": 0.0})
    nested = ["a", "e", ("n", "c"), ("n", "b"), ("m", "x", "y"), ("m", "z")]
    split = td.unflatten_keys(".")
    assert list(split.keys(True, True)) == nested
    assert list(td.copy().unflatten_keys(".", inplace=True).keys(True, True)) == nested
    split["last"] = torch.zeros(())
    joined = ["n.c", "n.b", "m.x.y", "m.z"]
    assert list(split.flatten_keys(".").keys()) == ["a", "e", *joined, "last"]
    assert list(split.flatten_keys(".", inplace=True).keys()) == ["a", "e", "last", *joined]


@pytest.mark.parametrize("stacked", [False, True])
def test_containers_of_unflattened_keys_are_copies(stacked: bool) -> None:
    td: TensorDictBase = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2), "w": "c"}})
    td = lazy_stack([td, td.clone()]) if stacked else td
    copied = td.unflatten_keys(".")
    del copied["n", "b"]
    td["n", "new"] = torch.zeros(td.batch_size)
    assert ("n", "b") in td.keys(True)
    assert ("n", "new") not in copied.keys(True)
