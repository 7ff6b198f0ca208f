"""Steps that are called one by one: stacks with other keys, effects, missing inputs."""

import pytest
import torch
from torch import Tensor

from kd_core import (
    InvalidArgument,
    KeyNotFound,
    ShapeMismatch,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)
from kd_nn import InputMissing, TensorDictModule, TensorDictModuleBase, TensorDictSequential

X = torch.arange(6.0).reshape(2, 3)


def tolerant(**options: object) -> TensorDictSequential:
    return TensorDictSequential(
        TensorDictModule(torch.neg, ["x"], ["a"]),
        TensorDictModule(torch.exp, ["q"], ["z"]),
        partial_tolerant=True,
        **options,  # type: ignore[arg-type]  # any option
    )


def ragged() -> list[TensorDict]:
    return [TensorDict(x=X), TensorDict(q=X)]


def fail(_: Tensor) -> Tensor:
    raise RuntimeError("no")


def keys(members: list[TensorDict]) -> list[list[str]]:
    return [sorted(str(key) for key, _ in member.items()) for member in members]


@pytest.mark.parametrize("inplace", [False, "empty"])
def test_lazy_stack_gives_a_new_one_when_not_in_place(inplace: object) -> None:
    members = ragged()
    made = tolerant(inplace=inplace)(lazy_stack(members))
    assert [sorted(member.keys()) for member in made.unbind(0)] == [["a"], ["z"]]
    assert keys(members) == [["x"], ["q"]]


def test_lazy_stack_is_written_into_another() -> None:
    members, others = ragged(), [TensorDict(), TensorDict(z=X)]
    out = lazy_stack(others)
    assert tolerant()(lazy_stack(members), tensordict_out=out) is out
    assert keys(others) == [["a"], ["z"]]
    assert torch.equal(others[1]["z"], X.exp())
    assert keys(members) == [["x"], ["q"]]


def test_lazy_stack_is_not_written_into_what_has_no_members() -> None:
    with pytest.raises(InvalidArgument, match=r"lazy stack of as many, got TensorDict of.*\(2,\)"):
        tolerant()(lazy_stack(ragged()), tensordict_out=TensorDict(batch_size=[2]))


def test_a_step_that_fails_for_one_member_changes_none() -> None:
    members = [TensorDict(x=X), TensorDict(x=X, q=X)]
    model = TensorDictSequential(
        TensorDictModule(torch.neg, ["x"], ["a"]),
        TensorDictModule(fail, ["q"], ["z"]),
        partial_tolerant=True,
    )
    with pytest.raises(RuntimeError, match="no"):
        model(lazy_stack(members))
    assert keys(members) == [["x"], ["q", "x"]]


@pytest.mark.parametrize("tolerates", [False, True])
def test_entries_that_no_step_writes_stay_the_same_tensors(tolerates: bool) -> None:
    members = [TensorDict(x=X, n={"y": X}), TensorDict(x=-X, n={"y": X})]
    before = [(member["x"], member["n", "y"]) for member in members]
    model = TensorDictSequential(
        TensorDictModule(torch.neg, ["x"], ["a"]), partial_tolerant=tolerates
    )
    model[0].register_forward_hook(lambda *_: None)
    model(lazy_stack(members))
    assert all(m["x"] is x and m["n", "y"] is y for m, (x, y) in zip(members, before, strict=True))


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("inplace", [True, False])
def test_step_that_discards_its_output_keeps_the_container(hook: bool, inplace: bool) -> None:
    seen: list[Tensor] = []
    watch = TensorDictModule(seen.append, ["x"], ["_"], inplace=inplace)
    model = TensorDictSequential(watch, TensorDictModule(torch.neg, ["x"], ["y"]))
    if hook:
        watch.register_forward_hook(lambda *_: None)
    for _ in range(3):
        td = TensorDict(x=X)
        assert model(td) is td
        assert list(td.keys()) == ["x", "y"]
    assert len(seen) == 3


@pytest.mark.parametrize("out_keys", [[], ["_"]])
def test_module_without_outputs_runs_for_its_effects(out_keys: list[str]) -> None:
    seen: list[Tensor] = []
    alone = TensorDictModule(seen.append, ["x"], out_keys)
    model = TensorDictSequential(alone, TensorDictModule(torch.neg, ["x"], ["y"]))
    for _ in range(3):
        assert list(alone(TensorDict(x=X)).keys()) == ["x"]
        assert alone(x=X) == ()
        model.select_out_keys("y")(x=X)
    assert len(seen) == 9


@pytest.mark.parametrize("inplace", [None, False])
def test_sequence_inside_may_skip_steps(inplace: bool | None) -> None:
    model = TensorDictSequential(
        TensorDictModule(torch.neg, ["w"], ["x"]), tolerant(inplace=inplace)
    )
    kept = [] if inplace is False else ["w", "x"]
    for _ in range(3):
        assert list(model(TensorDict(w=X)).keys()) == [*kept, "a"]
        _, a, z = model(w=X)
        assert torch.equal(a, X)
        assert z is None
        assert model(w=X, q=X)[2] is not None
    assert model._kd_optional_in_keys == ["q"]
    assert list(model.select_out_keys("z")(TensorDict(w=X)).keys()) == ["w"]


def test_input_that_a_step_can_do_without_may_be_left_out() -> None:
    def scaled(x: Tensor, by: Tensor | None) -> Tensor:
        return x if by is None else x * by

    model = TensorDictSequential(
        TensorDictModule(torch.neg, ["w"], ["x"]),
        TensorDictModule(scaled, ["x", "by"], ["y"], strict=False),
    )
    assert torch.equal(model(w=X)[1], -X)
    assert torch.equal(model(w=X, by=X)[1], -X * X)
    assert model._kd_optional_in_keys == ["by"]


def test_declared_output_that_is_not_written_is_told_where_it_is_returned() -> None:
    class Silent(TensorDictModule):
        def forward(self, tensordict: TensorDict) -> TensorDict:  # type: ignore[override]  # narrower than the base allows
            return tensordict

    model = TensorDictSequential(Silent(torch.neg, ["x"], ["y"])).select_out_keys("y")
    assert list(model(TensorDict(x=X)).keys()) == ["x"]
    with pytest.raises(KeyNotFound, match="key `y` not found; available keys: `x`"):
        model(x=X)


def test_container_takes_the_place_of_what_was_written_below_its_key() -> None:
    model = TensorDictSequential(
        TensorDictModule(torch.neg, ["x"], [("n", "b")]),
        TensorDictModule(torch.exp, [("n", "b")], ["e"]),
        TensorDictModule(lambda e: TensorDict(c=e), ["e"], ["n"]),
    )
    assert model.out_keys == ["e", "n"]
    assert list(model(TensorDict(x=X)).keys(True)) == ["x", "n", ("n", "c"), "e"]


def test_container_and_part_of_it_are_read_from_outside() -> None:
    inner = TensorDictModule(lambda n: n["a"] + 1, ["n"], ["x"])
    model = TensorDictSequential(
        TensorDictSequential(inner), TensorDictModule(torch.neg, [("n", "a")], ["y"])
    )
    for _ in range(3):
        x, y = model(n={"a": X})
        assert torch.equal(x, X + 1)
        assert torch.equal(y, -X)


@pytest.mark.filterwarnings("ignore::kd_nn.KeyGraphWarning")
@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_output_stays_where_the_later_writer_is_skipped(depth: int, hook: bool) -> None:
    model = TensorDictSequential(
        TensorDictModule(torch.neg, ["a"], ["y"]),
        TensorDictModule(torch.exp, ["b"], ["y"]),
        partial_tolerant=True,
    )
    if hook:
        model.register_forward_hook(lambda *_: None)
    for _ in range(depth):
        model = TensorDictSequential(model)
    for _ in range(3):
        assert torch.equal(model(TensorDict(a=X))["y"], -X)
        assert torch.equal(model(TensorDict(a=X, b=X))["y"], X.exp())
        assert torch.equal(model(a=X), -X)


@pytest.mark.filterwarnings("ignore::kd_nn.KeyGraphWarning")
def test_writer_of_what_a_skipped_step_makes_is_not_reported_as_replaced() -> None:
    graph = TensorDictSequential(
        TensorDictModule(torch.neg, ["a"], ["y"]),
        TensorDictModule(torch.exp, ["b"], ["y"]),
        partial_tolerant=True,
    ).key_graph()
    assert graph.overwritten_keys == ()
    assert graph.needed_for(["y"]) == (0, 1)


def nested(calls: list[str]) -> TensorDictSequential:
    """Return a sequence whose inner one makes `y` and `z` of `p` and `q`."""

    def told(name: str) -> TensorDictModule:
        def function(x: Tensor) -> Tensor:
            calls.append(name)
            return -x

        return TensorDictModule(function, ["x" if name in "pq" else calls_of[name]], [name])

    calls_of = {"y": "p", "z": "q"}
    inner = TensorDictSequential(told("y"), told("z"))
    return TensorDictSequential(told("p"), told("q"), inner).select_out_keys("z")


@pytest.mark.parametrize("hook", [None, "step", "sequence"])
@pytest.mark.parametrize("inplace", [None, True])
def test_hook_does_not_change_which_steps_run(hook: str | None, inplace: object) -> None:
    calls: list[str] = []
    model = nested(calls)
    inner = model[2]
    inner.inplace = inplace
    if hook is not None:
        watched = inner if hook == "sequence" else model[1]
        watched.register_forward_hook(lambda *_: None)
    for _ in range(3):
        calls.clear()
        assert list(model(TensorDict(x=X)).keys()) == ["x", "z"]
        assert calls == ["p", "q", "y", "z"]


@pytest.mark.parametrize("hook", [False, True])
def test_hook_on_a_sequence_that_fails_leaves_no_trace(hook: bool) -> None:
    calls: list[str] = []
    model = nested(calls)

    def refuse(*_: object) -> None:
        raise RuntimeError("no")

    handle = model[2].register_forward_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="no"):
        model(TensorDict(x=X))
    handle.remove()
    calls.clear()
    model[2](TensorDict(p=X, q=X))
    assert calls == ["y", "z"]


@pytest.mark.parametrize("hook", [False, True])
def test_steps_of_a_sequence_that_is_not_needed_run(hook: bool) -> None:
    seen: list[Tensor] = []
    inner = TensorDictSequential(
        TensorDictModule(seen.append, ["x"], ["_"]), TensorDictModule(torch.neg, ["x"], ["y"])
    )
    model = TensorDictSequential(inner, TensorDictModule(torch.exp, ["x"], ["z"]))
    model.select_out_keys("z")
    if hook:
        model[1].register_forward_hook(lambda *_: None)
    for _ in range(3):
        model(TensorDict(x=X))
    assert len(seen) == 3


@pytest.mark.filterwarnings("ignore::kd_nn.KeyGraphWarning")
@pytest.mark.parametrize("hook", [False, True])
def test_sequence_inside_skips_other_steps_for_each_member(hook: bool) -> None:
    members = ragged()
    inner = tolerant()
    if hook:
        inner.register_forward_hook(lambda *_: None)
    TensorDictSequential(inner)(lazy_stack(members))
    assert keys(members) == [["a", "x"], ["q", "z"]]


@pytest.mark.parametrize("inplace", [True, "empty"])
def test_wrong_shape_of_an_output_names_its_step(inplace: object) -> None:
    bad = TensorDictModule(lambda x: x.sum(0), ["x"], ["h"], inplace=inplace)  # type: ignore[arg-type]  # of each kind
    model = TensorDictSequential(TensorDictModule(torch.neg, ["x"], ["x"]), bad)
    bad.register_forward_hook(lambda *_: None)
    with pytest.raises(ShapeMismatch) as caught:
        model(TensorDict({"x": X}, [2]))
    assert caught.value.__notes__[0].startswith("In step 1, ")


class Notes(TensorDictModuleBase):
    """Changes an entry that it does not declare."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["x"], ["y"]
        self.value = value

    def forward(self, tensordict: TensorDict) -> TensorDict:
        tensordict.set_non_tensor("note", self.value)
        return tensordict.set("y", tensordict["x"])


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("value", [5, "new", {"a": 1}])
def test_what_is_no_tensor_is_changed_like_a_tensor(
    value: object, stacked: bool, inside: bool
) -> None:
    step: TensorDictModuleBase = Notes(value)
    model = TensorDictSequential(TensorDictSequential(step) if inside else step)
    td: TensorDictBase = TensorDict({"x": X}, [2]).set_non_tensor("note", "old")
    if stacked:
        td = lazy_stack([TensorDict(x=X).set_non_tensor("note", "old") for _ in range(2)])
    model(td)
    for row in td.unbind(0):
        assert row["note"] == value


class Noted(TensorDictModuleBase):
    """A step of a user, which notes the containers that it is called with."""

    def __init__(self, seen: list[TensorDictBase], out: str = "y") -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["x"], [out]
        self.seen = seen

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.seen.append(tensordict)
        return tensordict.set(self.out_keys[0], tensordict["x"] + 1)


def test_sequence_inside_works_on_the_copy_of_the_one_around_it() -> None:
    seen: list[TensorDictBase] = []
    td = TensorDict(x=X)
    TensorDictSequential(Noted(seen, "a"), TensorDictSequential(Noted(seen)))(td)
    first, second = seen
    assert first is second
    assert first is not td
    assert torch.equal(td["y"], X + 1)


def test_sequence_inside_that_fails_leaves_no_trace() -> None:
    inner = TensorDictSequential(Noted([]), TensorDictModule(fail, ["y"], ["z"]))
    td = TensorDict(x=X)
    with pytest.raises(RuntimeError, match="no"):
        TensorDictSequential(Noted([], "a"), inner)(td)
    assert list(td.keys()) == ["x"]


def test_sequence_inside_hides_what_it_does_not_select() -> None:
    inner = TensorDictSequential(
        Noted([]), TensorDictModule(torch.neg, ["y"], ["z"]), selected_out_keys=["z"]
    )
    td = TensorDict(x=X)
    TensorDictSequential(inner, TensorDictModule(torch.exp, ["z"], ["e"]))(td)
    assert list(td.keys()) == ["x", "z", "e"]


def test_keys_that_are_assigned_to_a_step_of_a_user_are_those_of_the_sequence() -> None:
    step = Noted([])
    model = TensorDictSequential(TensorDictModule(torch.neg, ["q"], ["x"]), step)
    model(TensorDict(q=X))
    step.out_keys = ["other"]
    assert model.out_keys == ["x", "other"]
    with pytest.raises(InputMissing):
        model(TensorDict(r=X))
