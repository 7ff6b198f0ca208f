import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import pytest
import torch
from tests.nn.models import Opaque
from torch import Tensor, nn

from kd_core import (
    InvalidArgument,
    KeyNotFound,
    Locked,
    NestedKey,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)
from kd_nn import (
    EmptySubsequence,
    InputMissing,
    KeyGraphWarning,
    NotKeyed,
    OutKeyUnknown,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
    WrapModule,
    dispatch,
)

X = torch.arange(6.0).reshape(2, 3)


def same(got: object, expected: Tensor | float) -> bool:
    return isinstance(got, Tensor) and bool((got == expected).all())


def add(n: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x + n


def chain(**options: object) -> TensorDictSequential:
    return TensorDictSequential(
        TensorDictModule(add(1), ["x"], ["a"]),
        TensorDictModule(add(10), ["a"], ["b"]),
        TensorDictModule(lambda a: (a * 2, a * 3), ["a"], ["c", "d"]),
        **options,  # type: ignore[arg-type]  # any option
    )


def test_keys_follow_from_the_steps() -> None:
    model = chain()
    assert model.in_keys == ["x"]
    assert model.out_keys == ["a", "b", "c", "d"]


def test_overwritten_key_stands_where_it_is_written_last() -> None:
    model = TensorDictSequential(
        TensorDictModule(add(1), ["x"], ["h"]),
        TensorDictModule(add(1), ["x"], ["y"]),
        TensorDictModule(add(1), ["h"], ["h"]),
    )
    assert model.out_keys == ["y", "h"]


def test_tensors_give_all_outputs_in_order() -> None:
    a, b, c, d = chain()(x=X)
    for got, expected in ((a, X + 1), (b, X + 11), (c, 2 * X + 2), (d, 3 * X + 3)):
        assert same(got, expected)


def test_container_receives_all_outputs() -> None:
    td = TensorDict({"x": X}, [2])
    assert chain()(td) is td
    assert list(td.keys()) == ["x", "a", "b", "c", "d"]


@pytest.mark.parametrize("way", ["argument", "method", "wrapped"])
def test_three_ways_to_select(way: str) -> None:
    if way == "argument":
        model = chain(selected_out_keys=["d", "b"])
    elif way == "method":
        model = chain().select_out_keys("d", "b")
    else:
        model = TensorDictSequential(chain(), selected_out_keys=["d", "b"])
    d, b = model(x=X)
    assert same(d, 3 * X + 3)
    assert same(b, X + 11)
    assert list(model(TensorDict(x=X)).keys()) == ["x", "b", "d"]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_steps_that_no_selected_output_needs_run(nested: bool, hooked: bool) -> None:
    ran: list[str] = []

    def step(name: str, reads: str) -> TensorDictModule:
        def function(value: Tensor) -> Tensor:
            ran.append(name)
            return value

        return TensorDictModule(function, [reads], [name])

    steps = [step("a", "x"), step("dead", "a"), step("y", "a")]
    model = (
        TensorDictSequential(TensorDictSequential(*steps))
        if nested
        else TensorDictSequential(*steps)
    )
    if hooked:
        steps[0].register_forward_hook(lambda *_: None)
    model.select_out_keys("y")
    model(x=X)
    model(TensorDict(x=X))
    assert ran == ["a", "dead", "y"] * 2


@pytest.mark.parametrize("nested", [False, True])
def test_a_step_that_no_selected_output_needs_draws_and_reads(nested: bool) -> None:
    model = TensorDictSequential(
        TensorDictModule(torch.rand_like, ["x"], ["a"]),
        TensorDictModule(torch.rand_like, ["z"], ["b"]),
    ).select_out_keys("b")
    whole = TensorDictSequential(model, selected_out_keys=["b"]) if nested else model
    for _ in range(3):
        torch.manual_seed(0)
        expected = [torch.rand_like(X), torch.rand_like(X)][1]
        torch.manual_seed(0)
        assert same(whole(x=X, z=X), expected)
        torch.manual_seed(0)
        assert same(whole(TensorDict(x=X, z=X))["b"], expected)
        with pytest.raises(KeyError, match="`x`"):
            whole(TensorDict(z=X))


def test_selection_is_made_among_all_outputs_again() -> None:
    model = chain().select_out_keys("b")
    assert model.select_out_keys("c").out_keys == ["c"]
    assert model.reset_out_keys().out_keys == ["a", "b", "c", "d"]
    with pytest.raises(OutKeyUnknown, match="`a`, `b`, `c`, `d`"):
        model.select_out_keys("x")


def test_selection_keeps_what_the_caller_had() -> None:
    td = chain().select_out_keys("b")(TensorDict(x=X, a=X))
    assert td["a"] is X


def test_selection_inside_hides_keys_outside() -> None:
    inner = chain().select_out_keys("b")
    model = TensorDictSequential(inner, TensorDictModule(add(0), ["a"], ["y"]))
    assert model.in_keys == ["x", "a"]
    b, y = model(x=X, a=-X)
    assert same(b, X + 11)
    assert same(y, -X)


def test_custom_module_sees_the_container() -> None:
    model = TensorDictSequential(TensorDictModule(add(1), ["x"], ["a"]), Opaque())
    assert same(model(x=X)[1], X + 101)
    td = model(TensorDict(x=X))
    assert list(td.keys()) == ["x", "a", "o"]


@pytest.mark.parametrize("hook", [False, True])
def test_write_of_a_container_feeds_a_nested_read(hook: bool) -> None:
    model = TensorDictSequential(
        TensorDictModule(lambda x: TensorDict(b=x + 1), ["x"], ["n"]),
        TensorDictModule(add(10), [("n", "b")], ["y"]),
    )
    if hook:
        model[0].register_forward_hook(lambda *_: None)
    assert model.in_keys == ["x"]
    _, y = model(x=X)
    assert same(y, X + 11)
    assert same(model(TensorDict(x=X))["y"], X + 11)


def test_nested_keys_by_keyword() -> None:
    model = TensorDictSequential(
        TensorDictModule(add(1), [("some", "key")], ["h"]),
        TensorDictModule(add(-1), ["h"], [("some", "output")]),
    ).select_out_keys(("some", "output"))
    assert same(model(some_key=X), X)


def test_partial_tolerant_skips_what_lacks_inputs() -> None:
    model = TensorDictSequential(
        TensorDictModule(add(1), ["x"], ["a"]),
        TensorDictModule(add(1), ["q"], ["z"]),
        partial_tolerant=True,
    )
    assert list(model(TensorDict(x=X)).keys()) == ["x", "a"]
    assert list(model(TensorDict(q=X)).keys()) == ["q", "z"]
    a, z = model(x=X)
    assert same(a, X + 1)
    assert z is None
    a, z = TensorDictModuleWrapper(model)(x=X)
    assert same(a, X + 1)
    assert z is None


@pytest.mark.parametrize("nested", [False, True])
def test_partial_tolerant_runs_a_step_that_can_do_without_what_is_missing(nested: bool) -> None:
    def plus(x: Tensor, y: Tensor | None) -> Tensor:
        return x if y is None else x + y

    step: nn.Module = TensorDictModule(plus, ["x", ("n", "y")], ["a"], strict=False)
    step = TensorDictSequential(step) if nested else step
    model = TensorDictSequential(
        step, TensorDictModule(add(1), [("n", "y")], ["b"]), partial_tolerant=True
    )
    assert list(model(TensorDict(x=X)).keys()) == ["x", "a"]
    assert same(model(TensorDict(x=X, n=TensorDict(y=X)))["a"], 2 * X)
    inner = TensorDictSequential(step, TensorDictModule(add(1), [("n", "y")], ["b"]))
    outer = TensorDictSequential(inner, partial_tolerant=True)
    assert list(outer(TensorDict(x=X)).keys()) == ["x"]


def test_partial_tolerant_step_falls_back_on_the_callers_entry() -> None:
    model = TensorDictSequential(
        TensorDictModule(add(1), ["q"], ["a"]),
        TensorDictModule(add(1), ["a"], ["b"]),
        partial_tolerant=True,
    )
    td = model(TensorDict(a=X))
    assert same(td["b"], X + 1)
    assert td["a"] is X


def test_partial_tolerant_runs_each_member_of_a_lazy_stack() -> None:
    model = TensorDictSequential(
        TensorDictModule(add(1), ["x"], ["a"]),
        TensorDictModule(add(2), ["q"], ["z"]),
        partial_tolerant=True,
    )
    members = [TensorDict(x=X, shared=X), TensorDict(x=X, q=X, shared=X)]
    stack = lazy_stack(members)
    assert model(stack) is stack
    assert "z" not in members[0]
    assert same(members[1]["z"], X + 2)
    assert same(stack["a"], torch.stack([X + 1, X + 1]))


def test_lazy_stack_is_read_and_written() -> None:
    stack = lazy_stack([TensorDict(x=X), TensorDict(x=-X)])
    model = TensorDictSequential(TensorDictModule(add(1), ["x"], ["a"]))
    assert same(model(stack)["a"], torch.stack([X + 1, 1 - X]))


@pytest.mark.parametrize("hook", [False, True])
def test_failing_step_leaves_the_container_and_a_short_note(hook: bool) -> None:
    model = TensorDictSequential(
        {
            "first": TensorDictModule(add(1), ["x"], ["a"]),
            "second": TensorDictModule(nn.Linear(5, 1), ["a"], ["y"]),
        }
    )
    if hook:
        model[0].register_forward_hook(lambda *_: None)
    td = TensorDict(x=X)
    with pytest.raises(RuntimeError) as caught:
        model(td)
    assert list(td.keys()) == ["x"]
    (note,) = caught.value.__notes__
    assert note == (
        "In step 1 `second`, `TensorDictModule(Linear)`: reads `a` (2, 3) float32; writes `y`."
    )


def test_missing_input_names_the_key_and_the_nearest() -> None:
    with pytest.raises(
        InputMissing,
        match=r"reads `x`.*available keys: `xx`. Did you mean `xx`",
    ) as caught:
        chain()(TensorDict(xx=X))
    assert caught.value.__notes__[0].startswith(
        "In step 0, `TensorDictModule(<lambda>)`: reads `x`"
    )


def test_wrapped_function_may_replace_the_container() -> None:
    model = TensorDictSequential(
        WrapModule(lambda td: td[0]), TensorDictModule(add(1), ["x"], ["y"])
    )
    td = TensorDict({"x": X}, [2])
    assert model(td)["y"].shape == (3,)
    assert list(td.keys()) == ["x"]


def test_undeclared_writes_of_a_custom_module_arrive() -> None:
    class Extra(nn.Module):
        in_keys: ClassVar = ["x"]
        out_keys: ClassVar = ["y"]

        @dispatch
        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            return tensordict.set("y", X).set("extra", X)

    assert set(TensorDictSequential(Extra())(TensorDict(x=X)).keys()) == {"x", "y", "extra"}


def test_steps_are_found_by_index_name_and_slice() -> None:
    model = chain()
    assert model[0] is model["0"] is model[-3]
    assert model[1:].in_keys == ["a"]
    assert model[1:][0] is model[1]
    assert len(model) == len(list(model)) == 3
    with pytest.raises(IndexError, match=r"index . is out of range for the 3 steps of"):
        model[3]
    with pytest.raises(KeyNotFound, match=r"step `q` of .* not found; available steps: `0`"):
        model["q"]


def test_steps_are_attributes_by_name() -> None:
    first = TensorDictModule(nn.Linear(2, 2), ["x"], ["y"])
    listed = TensorDictSequential(first, TensorDictModule(torch.neg, ["y"], ["z"]))
    named = TensorDictSequential(
        {"first": first, "last": TensorDictModule(torch.neg, ["y"], ["z"])}
    )
    assert listed.get_submodule("0.module") is first.module
    assert named.first is first is getattr(listed, "0")
    assert named.get_parameter("first.module.weight") is first.module.weight
    with pytest.raises(AttributeError, match="2"):
        listed.get_submodule("2")
    assert not hasattr(named, "0")


def test_editing_recomputes_the_keys() -> None:
    model = chain()
    model.append(TensorDictModule(add(1), ["e"], ["f"]))
    assert model.in_keys == ["x", "e"]
    del model[-1]
    assert model.in_keys == ["x"]
    model[0] = TensorDictModule(add(5), ["q"], ["a"])
    assert model.in_keys == ["q"]
    model.insert(0, TensorDictModule(add(1), ["p"], ["q"]))
    assert model.in_keys == ["p"]
    assert same(model(p=X)[1], X + 6)


def test_named_steps_are_inserted_after_another() -> None:
    model = TensorDictSequential({"one": TensorDictModule(add(1), ["x"], ["a"])})
    model.insert("three", TensorDictModule(add(1), ["b"], ["c"]), after="one")
    model.insert("two", TensorDictModule(add(1), ["a"], ["b"]), after="one")
    assert [name for name, _ in model._kd_named_steps()] == ["one", "two", "three"]
    assert model.in_keys == ["x"]
    with pytest.raises(InvalidArgument, match="a step `two` already"):
        model.insert("two", TensorDictModule(add(1), ["a"], ["b"]))


def test_edit_that_loses_a_selected_key_is_refused() -> None:
    model = chain().select_out_keys("d")
    with pytest.raises(OutKeyUnknown, match="does not write `d`"):
        del model[2]
    assert len(model) == 3
    assert same(model(x=X), 3 * X + 3)


def test_change_of_a_step_changes_the_sequence() -> None:
    model = chain()
    model(x=X)
    model[0].in_keys = ["q"]
    assert model.in_keys == ["q"]
    model[0].module = add(5)
    assert same(model(q=X)[0], X + 5)
    setattr(model.module, "0", TensorDictModule(add(7), ["r"], ["a"]))
    assert model.in_keys == ["r"]
    assert same(model(r=X)[0], X + 7)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (nn.ReLU(), r"\(`ReLU`\) has no keys"),
        (3, "must be a keyed module, got int"),
    ],
)
def test_what_is_not_keyed_is_refused_with_the_remedy(step: object, message: str) -> None:
    with pytest.raises(NotKeyed, match=message):
        TensorDictSequential(TensorDictModule(add(1), ["x"], ["a"]), step)  # type: ignore[arg-type]  # wrong on purpose


def test_keys_that_are_assigned_to_a_sequence_are_what_it_lists() -> None:
    module, plain = chain(), chain()
    module.out_keys += ["q"]
    module.in_keys = ["x", "q"]
    assert module.in_keys == ["x", "q"]
    assert module.out_keys == [*plain.out_keys, "q"]
    around = TensorDictSequential(module)
    assert around.out_keys == plain.out_keys
    for _ in range(3):
        td = TensorDict({"x": torch.ones(2)}, [2])
        assert list(around(td.copy()).keys()) == list(module(td).keys()) == ["x", *plain.out_keys]
    assert copy.deepcopy(module).out_keys == module.out_keys


@pytest.mark.parametrize("nested", [False, True])
def test_every_call_of_a_sequence_that_lists_fewer_keys_writes_the_same(nested: bool) -> None:
    module, plain = chain(), chain()
    module.out_keys = [plain.out_keys[-1]]
    outer = TensorDictSequential(module) if nested else module
    compiled = torch.compile(outer, backend="eager")
    for run in (outer, outer, outer, compiled):
        made = run(TensorDict({"x": torch.ones(2)}, [2]))
        assert list(made.keys()) == ["x", *plain.out_keys]
    value: Any = plain(x=torch.ones(2))
    calls: list[Any] = [module, module, module, torch.compile(module, backend="eager")]
    for call in calls:
        assert torch.equal(call(x=torch.ones(2)), value[-1])


def test_a_selection_goes_before_the_keys_that_a_sequence_lists() -> None:
    module, plain = chain(), chain()
    module.out_keys = first, last = [plain.out_keys[0], plain.out_keys[-1]]
    assert module.select_out_keys(last).out_keys == [last]
    for _ in range(3):
        assert list(module(TensorDict({"x": torch.ones(2)}, [2])).keys()) == ["x", last]
    assert module.reset_out_keys().out_keys == [first, last]


def test_lost_write_warns_at_build() -> None:
    with pytest.warns(KeyGraphWarning, match=r"step 0 .* writes `a`, which a later step replaces"):
        TensorDictSequential(
            TensorDictModule(add(1), ["x"], ["a"]), TensorDictModule(add(1), ["x"], ["a"])
        )


def keyed(reads: list[NestedKey], writes: list[NestedKey]) -> TensorDictModule:
    return TensorDictModule(lambda *given: [sum(given)] * len(writes), reads, writes)


def test_steps_in_the_wrong_order_are_said_at_build() -> None:
    value, action, other = (
        keyed(["obs", "action"], ["value"]),
        keyed(["obs"], ["action"]),
        keyed(["obs"], ["noise"]),
    )
    message = (
        r"step 0 .* reads `action`, which step 2 .* writes later. Put step 2 before step 0, or"
    )
    with pytest.warns(KeyGraphWarning, match=message):
        TensorDictSequential(value, other, action)
    nested = keyed(["obs"], [("n", "action")])
    with pytest.warns(KeyGraphWarning, match=r"reads `\('n', 'action'\)`, which step 1"):
        TensorDictSequential(keyed([("n", "action")], ["value"]), nested)


@pytest.mark.parametrize(
    "steps",
    [
        [(["x"], ["step"]), (["x", "step"], ["x"])],  # which refines what was read
        [(["x"], ["code"]), (["code"], ["x"])],  # which needs the reader
        [(["x"], ["a"]), (["a"], ["b"]), (["b"], ["x"])],
        [(["obs", "action"], ["q"]), (["obs"], ["action"]), (["obs", "action"], ["other"])],
        [(["x", "h"], ["y", "h"]), (["y"], ["z"])],
        [(["obs"], ["action"]), (["action"], ["value"])],
    ],
)
def test_keys_that_are_written_again_on_purpose_are_not_warned_of(
    steps: list[tuple[list[NestedKey], list[NestedKey]]],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TensorDictSequential(*[keyed(reads, writes) for reads, writes in steps])


def test_subsequence_is_cut_at_both_ends_and_shares_modules() -> None:
    model = chain()
    part = model.select_subsequence(out_keys=["b"])
    assert [part[0], part[1]] == [model[0], model[1]]
    assert len(part) == 2
    assert model.select_subsequence(in_keys=["a"]).in_keys == ["a"]
    nested = TensorDictSequential(chain(), TensorDictModule(add(1), ["b"], ["e"]))
    assert len(nested.select_subsequence(out_keys=["e"])[0]) == 2  # type: ignore[arg-type]  # a sequence is inside
    with pytest.raises(EmptySubsequence, match=r"no step .* is left"):
        model.select_subsequence(out_keys=["q"])


def test_subsequence_of_a_selection_shows_all_outputs() -> None:
    model = chain().select_out_keys("b")
    assert model.select_subsequence().out_keys == ["a", "b"]
    assert model.select_subsequence(in_keys=["x"]).out_keys == ["a", "b"]
    assert model.select_subsequence(out_keys=["a"]).out_keys == ["a"]
    assert model.out_keys == ["b"]
    outer = TensorDictSequential(model, TensorDictModule(add(1), ["b"], ["end"]))
    part = outer.select_subsequence(out_keys=["end"])
    assert part.out_keys == ["b", "end"]  # what a nested one hides stays hidden


def test_subsequence_shows_what_is_hidden_or_discarded_where_it_is_asked_for() -> None:
    outer = TensorDictSequential(
        TensorDictSequential(chain().select_out_keys("b")),
        TensorDictModule(add(1), ["b"], ["end"]),
    )
    part = outer.select_subsequence(out_keys=["a"])
    assert part.out_keys == ["a"]
    assert {*part(TensorDict(x=torch.ones(2))).keys()} == {"x", "a"}
    whole = outer.select_subsequence(out_keys=["a", "end"])
    assert whole.out_keys == ["a", "b", "end"]
    x = TensorDict(x=torch.ones(2))
    assert torch.equal(whole(x.copy())["end"], outer(x.copy())["end"])
    assert outer.out_keys == ["b", "end"]
    discards = TensorDictModule(lambda x: (x, x + 1), ["x"], ["_", "p"])
    model = TensorDictSequential(discards, TensorDictModule(add(1), ["p"], ["q"]))
    assert list(model.select_subsequence(out_keys=["_"])) == [discards]
    assert len(TensorDictSequential(model).select_subsequence(out_keys=["_"])) == 1
    with pytest.raises(EmptySubsequence):
        outer.select_subsequence(out_keys=["_"])


def test_subsequence_leaves_out_what_the_inputs_do_not_lead_to() -> None:
    model = TensorDictSequential(
        TensorDictModule(add(1), ["x"], ["y"]),
        TensorDictModule(add(1), ["y"], ["z"]),
        TensorDictModule(torch.add, ["z", "w"], [("n", "end")]),
    )
    assert model.select_subsequence(["x"], [("n", "end"), "y"]).out_keys == ["y"]
    unreached: list[list[NestedKey]] = [[("n", "end")], [("n", "end"), "q"], ["x"], []]
    for wanted in unreached:
        with pytest.raises(EmptySubsequence):
            model.select_subsequence(["x"], wanted)
    assert len(model.select_subsequence(["x", "w"], [("n", "end")])) == 3


@pytest.mark.filterwarnings("ignore::kd_nn.KeyGraphWarning")
def test_subsequence_keeps_all_that_write_a_key_and_none_that_write_nothing() -> None:
    seen: list[str] = []
    writers = [TensorDictModule(add(1), ["x"], ["y"]), TensorDictModule(add(2), ["w"], ["y"])]
    end = TensorDictModule(add(1), ["y"], ["z"])

    def see(td: TensorDictBase) -> TensorDictBase:
        seen.append("called")
        return td

    look, alone = WrapModule(see, in_keys=["x"]), WrapModule(see)
    for model in (
        TensorDictSequential(alone, *writers, look, end),
        TensorDictSequential(TensorDictSequential(alone, *writers), look, end),
    ):
        part = model.select_subsequence(out_keys=["y"])
        assert (part.in_keys, part.out_keys) == (["x", "w"], ["y"])
        part = model.select_subsequence(in_keys=["x"])
        assert (part.in_keys, part.out_keys) == (["x"], ["y", "z"])
        assert part(TensorDict({"x": X}, [2]))["z"].tolist() == (X + 2).tolist()
    assert not seen
    with pytest.raises(EmptySubsequence):
        TensorDictSequential(alone).select_subsequence()


def test_subsequence_leaves_alone_what_a_nested_sequence_hides() -> None:
    inner = TensorDictSequential(
        TensorDictModule(add(5), ["w"], ["z"]),
        TensorDictModule(add(1), ["z"], ["q"]),
        selected_out_keys=["q"],
    )
    first, last = TensorDictModule(add(1), ["x"], ["z"]), TensorDictModule(add(1), ["z"], ["r"])
    model = TensorDictSequential(first, inner, last)
    assert list(model.select_subsequence(out_keys=["r"])) == [first, last]
    td = TensorDict({"x": X, "w": X}, [2])
    part = model.select_subsequence(out_keys=["q", "r"])
    assert torch.equal(part(td.copy())["r"], model(td.copy())["r"])


@pytest.mark.parametrize("inplace", [False, "empty"])
def test_nested_sequence_that_makes_a_container_replaces_that_of_the_one_around(
    inplace: Literal[False, "empty"],
) -> None:
    nested = TensorDictSequential(TensorDictModule(add(1), ["x"], ["y"]), inplace=inplace)
    model = TensorDictSequential(nested, TensorDictModule(add(1), ["y"], ["z"]))
    for part, keys in ((model, ["y", "z"]), (model[:1], ["y"])):
        for _ in range(12):  # also after the calls in which a plan is made
            td = TensorDict({"x": X}, [2])
            assert list(part(td).keys()) == keys
            assert list(td.keys()) == ["x"]


@pytest.mark.parametrize("inplace", [False, "empty", None])
def test_another_container_gets_what_the_input_would_get(
    inplace: Literal[False, "empty"] | None,
) -> None:
    model = TensorDictSequential(
        TensorDictModule(add(1), ["x"], ["y"]),
        TensorDictModule(add(1), ["x"], [("n", "b")]),
        TensorDictModule(add(2), ["x"], ["x"]),
        inplace=inplace,
    )
    for _ in range(12):
        td = TensorDict({"x": X, "n": {"a": X}, "kept": X}, [2])
        found = model(td, tensordict_out=TensorDict()) if inplace is None else model(td)
        assert list(found.keys(True)) == ["x", "n", ("n", "a"), ("n", "b"), "y"]
        assert found["n", "a"] is td["n", "a"]
        inner: object = found["n"]
        assert isinstance(inner, TensorDict)
        assert inner.batch_size == (2,)
        assert list(td.keys(True)) == ["x", "n", ("n", "a"), "kept"]
    undeclared = WrapModule(lambda td: td.set("q", td["x"]), in_keys=["x"], out_keys=["y"])
    quiet = TensorDictSequential(undeclared, inplace=inplace)
    assert not [*quiet(td, tensordict_out=TensorDict()).keys()]


@pytest.mark.parametrize("watched", [False, True])
def test_a_tolerant_sequence_writes_nothing_where_all_steps_are_skipped(watched: bool) -> None:
    model = TensorDictSequential(
        TensorDictModule(add(1), ["lacking"], ["x"]), partial_tolerant=True
    )
    if watched:  # each call is interpreted
        model[0].register_forward_hook(lambda *_: None)
    for _ in range(12):
        td = TensorDict({"x": X}, [2]).lock_()
        assert model(td) is td
        rows = [TensorDict({"x": X}, [2]) for _ in range(2)]
        model(lazy_stack(rows))
        assert all(row["x"] is X for row in rows)
        with pytest.raises(Locked):
            model(TensorDict({"x": X, "lacking": X}, [2]).lock_())


def test_selected_outputs_are_written_into_the_input_by_any_step() -> None:
    steps = (
        TensorDictModule(add(1), ["x"], ["y"], inplace=False),
        TensorDictModule(add(1), ["y"], ["z"]),
    )
    for model in (
        TensorDictSequential(*steps, selected_out_keys=["z"]),
        TensorDictSequential(*steps).select_out_keys("z"),
    ):
        for _ in range(3):
            td = TensorDict({"x": X}, [2])
            assert model(td) is td
            assert list(td.keys()) == ["x", "z"]
    assert TensorDictSequential(*steps, selected_out_keys=[]).out_keys == ["y", "z"]


def test_what_a_function_writes_keeps_its_place() -> None:
    twice = WrapModule(lambda td: td.set("y", td["x"] * 2))
    model = TensorDictSequential(twice, TensorDictModule(add(1), ["y"], ["z"]))
    td = TensorDict({"x": X}, [2])
    assert list(model(td).keys()) == ["x", "y", "z"]


def test_a_container_that_a_step_writes_replaces_all_of_the_one_before() -> None:
    rebuilt = TensorDictModule(lambda x: TensorDict({"a": x}, [2]), ["x"], ["n"])
    also = WrapModule(lambda td: td.set("y", td["x"] * 2))
    for steps in ((rebuilt,), (rebuilt, also), (also, rebuilt)):
        td = TensorDict({"x": X, "n": {"a": X + 1, "b": X}}, [2])
        TensorDictSequential(*steps)(td)
        assert [key for key in td.keys(True) if key[0] == "n"] == ["n", ("n", "a")]
        assert torch.equal(td["n", "a"], X)


def test_entries_are_in_the_order_in_which_steps_that_ran_wrote_them() -> None:
    first, last = TensorDictModule(add(1), ["y"], ["z"]), TensorDictModule(add(2), ["x"], ["z"])
    steps = first, TensorDictModule(add(1), ["x"], ["y"]), last
    model = TensorDictSequential(*steps, partial_tolerant=True)
    assert list(model(TensorDict({"x": X}, [2])).keys()) == ["x", "y", "z"]


def test_a_step_that_is_skipped_leaves_its_container_in_another_output() -> None:
    model = TensorDictSequential(
        TensorDictModule(add(1), ["lacking"], [("n", "y")]), partial_tolerant=True
    )
    td = TensorDict({"x": X, "n": {"h": X}}, [2])
    out = model(td, tensordict_out=TensorDict(batch_size=[2]))
    assert list(out.keys(True)) == ["n", ("n", "h")]


def test_a_tolerant_sequence_writes_nothing_where_no_step_makes_its_container() -> None:
    made = TensorDictModule(lambda x: TensorDict({"a": x}, [2]), ["lacking"], ["n"])
    model = TensorDictSequential(made, partial_tolerant=True)
    td = TensorDict({"x": X, "n": {"h": X}}, [2]).lock_()
    for _ in range(2):
        assert list(model(td).keys(True)) == ["x", "n", ("n", "h")]
    model.register_forward_hook(lambda *_: None)
    model(td)


def test_an_entry_of_a_stack_that_no_step_wrote_is_the_same_tensor() -> None:
    td = TensorDict({"x": X}, [2])
    model = TensorDictSequential(
        WrapModule(lambda td: td.set("y", td["x"] + 1), in_keys=["x"], out_keys=["x"])
    )
    model(lazy_stack([td, td.clone()]))
    assert td["x"] is X
    assert same(td["y"], X + 1)


def test_a_locked_container_refuses_the_first_step_that_writes() -> None:
    ran: list[str] = []

    def failing(x: Tensor) -> Tensor:
        ran.append("second")
        raise ArithmeticError

    model = TensorDictSequential(
        TensorDictModule(add(1), ["x"], ["y"]), TensorDictModule(failing, ["y"], ["z"])
    )
    with pytest.raises(Locked, match="`y`") as error:
        model(TensorDict({"x": X}, [2]).lock_())
    assert not ran
    assert "In step 0" in error.value.__notes__[0]


def test_subsequence_runs_a_part_of_a_nested_sequence() -> None:
    inner = TensorDictSequential(
        TensorDictModule(add(1), ["x"], ["y"]), TensorDictModule(add(1), ["w"], ["z"])
    )
    model = TensorDictSequential(inner, TensorDictModule(add(1), ["y"], ["end"]))
    part = model.select_subsequence(in_keys=["x"])
    assert (part.in_keys, part.out_keys) == (["x"], ["y", "end"])


def test_inplace_modes() -> None:
    td = TensorDict({"x": X}, [2])
    assert "x" not in chain(inplace=False)(td)
    assert chain(inplace="empty")(td).batch_size == (2,)
    out = TensorDict()
    assert chain()(td, tensordict_out=out) is out
    assert list(td.keys()) == ["x"]


def test_copies_and_pickles_run_alone() -> None:
    model = TensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), ["x"], ["h"]), TensorDictModule(nn.ReLU(), ["h"], ["y"])
    )
    before = model(x=X)[1]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert same(twin(x=X)[1], before)
    twin = copy.deepcopy(model)
    next(twin.parameters()).data.zero_()
    twin.select_out_keys("y")
    assert same(model(x=X)[1], before)
    assert len(model(x=X)) == 2


def test_gradients_equal_those_of_plain_modules() -> None:
    linear = nn.Linear(3, 4)
    model = TensorDictSequential(
        TensorDictModule(linear, ["x"], ["h"]), TensorDictModule(nn.Tanh(), ["h"], ["y"])
    )
    expected = torch.autograd.grad(torch.tanh(linear(X)).sum(), linear.weight)
    got = torch.autograd.grad(model(x=X)[1].sum(), linear.weight)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::kd_nn.KeyGraphWarning")
@pytest.mark.parametrize("calls_before", [0, 3])
def test_steps_in_the_wrong_order_are_named(calls_before: int) -> None:
    model = TensorDictSequential(
        TensorDictModule(torch.neg, ["hidden"], ["y"]),
        TensorDictModule(torch.neg, ["x"], ["hidden"]),
    )
    for _ in range(calls_before):
        model(TensorDict(x=X, hidden=X))
    with pytest.raises(InputMissing, match="reads `hidden`") as caught:
        model(TensorDict(x=X))
    assert caught.value.__notes__[-1] == "Step 1 writes `hidden`: put it before step 0."


def test_a_tolerant_sequence_runs_a_stack_of_alike_members_as_a_whole() -> None:
    shapes: list[torch.Size] = []

    def look(x: Tensor) -> Tensor:
        shapes.append(x.shape)
        return x + x.mean()

    module = TensorDictSequential(TensorDictModule(look, ["x"], ["y"]), partial_tolerant=True)
    rows = [TensorDict({"x": torch.full((2,), float(i))}, [2]) for i in range(2)]
    whole = module(lazy_stack(rows))
    assert shapes == [torch.Size([2, 2])]
    assert whole["y"].tolist() == [[0.5, 0.5], [1.5, 1.5]]
    assert rows[1]["y"].tolist() == [1.5, 1.5]
    shapes.clear()
    module(lazy_stack([rows[0], rows[1].exclude("x", "y")]))
    assert shapes == [torch.Size([2])]
    ragged = [TensorDict({"x": torch.ones(i + 1)}) for i in range(2)]
    assert module(lazy_stack(ragged))[1]["y"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("row", [lambda td: td[0], lambda td: TensorDict(x=td["x"].mean(0))])
def test_a_step_whose_result_has_other_rows_replaces_the_container(
    row: Callable[[TensorDictBase], TensorDictBase],
) -> None:
    class OfRows(TensorDictModuleBase):
        def __init__(self) -> None:
            super().__init__()
            self.in_keys = self.out_keys = ["x"]

        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            return row(tensordict)

    td = TensorDict({"x": X, "k": torch.ones(2)}, [2])
    for steps in ((OfRows(),), (TensorDictModule(add(0), ["x"], ["x"]), OfRows())):
        model = TensorDictSequential(*steps, TensorDictModule(add(1), ["x"], ["y"]))
        for _ in range(4):
            got = model(td.clone(recurse=False))
            assert got.batch_size == ()
            assert same(got["y"], row(td)["x"] + 1)
    assert list(td.keys()) == ["x", "k"]


def test_a_setter_of_keys_around_that_of_the_base_leaves_how_they_are_read() -> None:
    base: Any = TensorDictModuleBase

    def count(self: Any, keys: list[NestedKey]) -> None:
        self.sets += 1
        base.out_keys.fset(self, keys)

    class Counting(TensorDictModuleBase):
        in_keys = ["x"]  # noqa: RUF012  # as programs write it
        out_keys = base.out_keys.setter(count)
        sets = 0

        @dispatch
        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            return tensordict.set("y", tensordict["x"] + 1).set("z", tensordict["x"])

    module: Any = Counting()
    with pytest.raises(AttributeError, match="out_keys"):
        module.out_keys  # noqa: B018  # reading it raises
    module.out_keys = ["y", "z"]
    assert (module.out_keys, module.out_keys_source, module.sets) == (["y", "z"], ["y", "z"], 1)
    assert same(module.select_out_keys("y")(x=X), X + 1)
    assert module.out_keys_source == ["y", "z"]
