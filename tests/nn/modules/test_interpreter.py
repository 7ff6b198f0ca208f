"""Steps that are called one by one: stacks with other keys, effects, missing inputs."""

import pytest
import torch
from torch import Tensor

from kd_core import InvalidArgument, TensorDict, lazy_stack
from kd_nn import InputMissing, TensorDictModule, TensorDictSequential

X = torch.arange(6.0).reshape(2, 3)


def tolerant(**options: object) -> TensorDictSequential:
    return TensorDictSequential(
        TensorDictModule(torch.neg, ["x"], ["a"]),
        TensorDictModule(torch.exp, ["q"], ["z"]),
        partial_tolerant=True,
        **options,  # type: ignore[arg-type]
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
    for _ in range(3):
        assert list(model(TensorDict(w=X)).keys()) == ["w", "x", "a"]
        _, a, z = model(w=X)
        assert torch.equal(a, X)
        assert z is None
        assert model(w=X, q=X)[2] is not None
    assert model.optional_in_keys == ["q"]
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
    assert model.optional_in_keys == ["by"]


def test_declared_output_that_is_not_written_is_told() -> None:
    class Silent(TensorDictModule):
        def forward(self, tensordict: TensorDict) -> TensorDict:  # type: ignore[override]
            return tensordict

    model = TensorDictSequential(Silent(torch.neg, ["x"], ["y"])).select_out_keys("y")
    with pytest.raises(
        InputMissing, match="must write `y`, but no step wrote it; available keys: `x`"
    ):
        model(TensorDict(x=X))


def test_container_takes_the_place_of_what_was_written_below_its_key() -> None:
    model = TensorDictSequential(
        TensorDictModule(torch.neg, ["x"], [("n", "b")]),
        TensorDictModule(torch.exp, [("n", "b")], ["e"]),
        TensorDictModule(lambda e: TensorDict(c=e), ["e"], ["n"]),
    )
    assert model.out_keys == ["e", "n"]
    assert list(model(TensorDict(x=X)).keys(True)) == ["x", "e", "n", ("n", "c")]


def test_container_and_part_of_it_are_read_from_outside() -> None:
    inner = TensorDictModule(lambda n: n["a"] + 1, ["n"], ["x"])
    model = TensorDictSequential(
        TensorDictSequential(inner), TensorDictModule(torch.neg, [("n", "a")], ["y"])
    )
    for _ in range(3):
        x, y = model(n={"a": X})
        assert torch.equal(x, X + 1)
        assert torch.equal(y, -X)
