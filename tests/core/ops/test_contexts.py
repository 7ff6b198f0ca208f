"""Operations as context managers: what is carried back, and what is left alone."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from tests.core.kinds import FACTORIES

from kd_core import (
    InvalidArgument,
    Locked,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)

SHAPES: list[tuple[str, tuple[object, ...]]] = [
    ("view", (6,)),
    ("reshape", (3, 2)),
    ("flatten", ()),
    ("unflatten", (0, (2, 1))),
    ("unsqueeze", (1,)),
    ("squeeze", ()),
    ("permute", (1, 0)),
    ("transpose", (0, 1)),
    ("swapaxes", (0, 1)),
    ("movedim", (0, 1)),
    ("flip", (1,)),
    ("roll", (1, 0)),
    ("rot90", ()),
    ("atleast_3d", ()),
]


def fail(td: TensorDictBase) -> None:
    td["x"] = td["a"]
    del td["a"]
    raise KeyError


def spoil(view: TensorDictBase) -> None:
    """Make it impossible to give an entry the shape of the source."""
    del view["word"]
    view.batch_size = torch.Size([])
    view["x"] = torch.zeros(5)


def assert_unlocked(td: TensorDictBase) -> None:
    assert not td.is_locked


def make() -> TensorDict:
    entries = {"a": torch.arange(6).view(2, 3), "n": {"b": torch.rand(2, 3, 4)}, "word": "text"}
    return TensorDict(entries, [2, 3])


@pytest.mark.parametrize(("name", "args"), SHAPES)
def test_new_entries_take_the_shape_of_the_source(name: str, args: tuple[object, ...]) -> None:
    td = make()
    a, b = td["a"], td["n", "b"]
    with getattr(td, name)(*args) as view:
        view["n", "twice"] = view["a"] * 2
        view["wide"] = torch.stack([view["a"], view["a"]], -1)
        view["data"] = "new"
    assert td["a"] is a
    assert td["n", "b"] is b
    assert torch.equal(td["n", "twice"], a * 2)
    assert torch.equal(td["wide"], torch.stack([a, a], -1))
    assert td["data"] == "new"
    assert td.batch_size == (2, 3)


@pytest.mark.parametrize(("name", "args"), SHAPES)
def test_values_written_in_place_reach_the_source(name: str, args: tuple[object, ...]) -> None:
    td = make()
    with getattr(td, name)(*args) as view:
        view["a"] += 10
        view["n", "b"].zero_()
    assert td["a"].tolist() == [[10, 11, 12], [13, 14, 15]]
    assert not td["n", "b"].any()


@pytest.mark.parametrize(("name", "args"), SHAPES)
def test_removed_entries_are_removed(name: str, args: tuple[object, ...]) -> None:
    td = make()
    with getattr(td, name)(*args) as view:
        del view["a"]
        view.pop("word")
    assert list(td.keys(True, True)) == [("n", "b")]


@pytest.mark.parametrize("kind", FACTORIES)
def test_flat_keys_return_to_their_levels(kind: str) -> None:
    td = FACTORIES[kind]()
    before = set(td.keys(True))
    with td.flatten_keys(".") as flat:
        flat["n.new"] = flat["a"] * 2
        flat["n.c"] = flat["n.c"] + 1
    assert set(td.keys(True)) == {*before, ("n", "new")}
    assert torch.equal(td["n", "new"], td["a"] * 2)
    assert torch.equal(td["n", "c"], FACTORIES[kind]()["n", "c"] + 1)


def test_flat_names_that_hold_the_separator_stay() -> None:
    td = TensorDict({"a.b": 1.0, "n": {"c": 2.0}})
    with td.flatten_keys(".") as flat:
        flat["a.b"] = flat["a.b"] + 1
    assert list(td.keys(True, True)) == ["a.b", ("n", "c")]
    assert td["a.b"] == 2


def test_nested_keys_are_joined_again() -> None:
    td = TensorDict({"a.b": 1.0, "c": 2.0})
    with td.unflatten_keys(".") as nested:
        nested["a", "d"] = 3.0
        del nested["c"]
    assert list(td.keys()) == ["a.b", "a.d"]


def test_locks_are_restored_in_turn() -> None:
    td = make().lock_()
    with td.unlock_() as same:
        assert same is td
        td["x"] = td["a"]
        with td.lock_():
            with pytest.raises(Locked):
                td["y"] = td["a"]
            with td.unlock_():
                td["y"] = td["a"]
            assert td.is_locked
        assert_unlocked(td)
    assert td.is_locked
    assert {"x", "y"} <= set(td.keys())


def test_a_lock_is_restored_after_an_error() -> None:
    td = make().lock_()
    with pytest.raises(KeyError), td.unlock_():
        fail(td)
    assert td.is_locked


def test_an_error_in_the_block_carries_nothing_back() -> None:
    td = make()
    keys = list(td.keys(True))
    with pytest.raises(KeyError), td.view(-1) as view:
        fail(view)
    assert list(td.keys(True)) == keys


def test_an_exit_that_fails_leaves_the_source_as_it_was() -> None:
    td = make()
    entries = dict(td.items())
    with pytest.raises(Locked), td.view(-1) as view:
        view.update({"x": view["a"], "y": td.lock_()["a"].view(-1)})
    td.unlock_()
    with pytest.raises(RuntimeError), td.view(-1) as view:
        spoil(view)
    assert dict(td.items()).keys() == entries.keys()
    assert all(td.get(key) is value for key, value in entries.items())


def test_a_locked_source_takes_unchanged_entries() -> None:
    td = make().lock_()
    with td.view(-1) as view:
        view["a"].zero_()
    assert not td["a"].any()


def test_what_cannot_be_undone_is_refused() -> None:
    td = make()
    for made in (td, td[0], td + 1, td.expand(4, 2, 3), td.clone()):
        with pytest.raises(InvalidArgument, match=r"can be undone|cannot be undone"):
            made.__enter__()
    view = make().view(-1)
    gc.collect()
    with pytest.raises(InvalidArgument, match="does not exist any more"):
        view.__enter__()


def test_a_result_does_not_keep_its_source() -> None:
    td = make()
    alive = weakref.ref(td)
    view = td.view(-1)
    del td
    gc.collect()
    assert alive() is None
    assert view.batch_size == (6,)


def test_scopes_of_one_result_may_follow_each_other() -> None:
    td: TensorDictBase = make()
    view = td.view(-1)
    for number in range(2):
        with view:
            view[f"x{number}"] = view["a"] + number
    assert td["x1"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_members_of_a_stack_take_new_rows() -> None:
    members = [TensorDict({"a": torch.arange(3)}, [3]) for _ in range(2)]
    stack = lazy_stack(members)
    with stack.transpose(0, 1) as view:
        view["b"] = view["a"] * 2
    assert members[1]["b"].tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    ("name", "args", "stacked"),
    [
        ("view", (6,), False),
        ("view", (6,), True),
        ("permute", (1, 0), False),
        ("flatten_keys", (".",), False),
        ("unflatten_keys", (".",), True),
    ],
)
def test_a_scope_that_breaks_a_graph_carries_back(
    name: str, args: tuple[object, ...], stacked: bool
) -> None:
    td: TensorDictBase = TensorDict(
        {"a": torch.arange(6.0).reshape(2, 3), "n": {"b": torch.ones(2, 3)}}, [2, 3]
    )
    td = lazy_stack([*td.unbind(0)]) if stacked else td

    def program(td: TensorDictBase) -> TensorDictBase:
        td = td.clone()
        with getattr(td, name)(*args) as made:
            made["new"] = made["a"] + 1
        return td

    torch._dynamo.reset()
    assert (torch.compile(program, backend="eager")(td) == program(td)).all()


@pytest.mark.parametrize(
    "made",
    [
        lambda td: td.view(-1),
        lambda td: td.flatten(0, 1),
        lambda td: td.permute(1, 0),
        lambda td: td.unflatten(-1, (3, 1)),
        lambda td: td.unsqueeze(0),
        lambda td: td.flatten_keys("."),
    ],
)
@pytest.mark.parametrize("stacked", [False, True])
def test_a_value_that_was_written_in_place_is_carried_back(
    made: Callable[[TensorDictBase], TensorDictBase], stacked: bool
) -> None:
    td: TensorDictBase = TensorDict({"a": torch.zeros(2, 3), "word": "v"}, [2, 3])
    td = lazy_stack([*td.unbind(0)]) if stacked else td
    view = made(td)
    if stacked and view.ndim == 1:  # its rows are parts of members
        return
    with view:
        view.set_("word", "W")
    assert td[1, 0]["word"] == "W"
