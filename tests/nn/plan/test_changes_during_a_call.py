"""What a step changes during a call holds for the steps after it, in the same call."""

from collections.abc import Callable
from typing import cast

import pytest
import torch
from tests.nn.plans import module_calls
from torch import Tensor, nn

from kd_core import InvalidArgument, ShapeMismatch, TensorDict
from kd_nn import KeyGraphWarning, TensorDictModule, TensorDictSequential

X = torch.linspace(-1, 1, 6).view(2, 3)


class Meddler(nn.Module):
    """Does something to the model that it is in, once."""

    def __init__(self) -> None:
        super().__init__()
        self.deed: list[Callable[[], object]] = []

    def forward(self, x: Tensor) -> Tensor:
        while self.deed:
            self.deed.pop()()
        return x + 1


class Negated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x


def make() -> TensorDictSequential:
    torch.manual_seed(0)
    return TensorDictSequential(
        TensorDictModule(nn.Tanh(), ["x"], ["first"]),
        TensorDictSequential(
            TensorDictModule(Meddler(), ["first"], ["h"]),
            TensorDictModule(nn.Linear(3, 3), ["h"], ["hidden"]),
            TensorDictModule(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), ["hidden"], ["h"]),
        ).select_out_keys("h"),
        TensorDictModule(nn.Sequential(Meddler(), nn.Linear(3, 3)), ["h"], ["y"]),
        TensorDictModule(nn.Linear(3, 3), ["y"], ["z"]),
    )


def inner(model: TensorDictSequential, idx: int) -> TensorDictModule:
    return cast(TensorDictModule, cast(TensorDictSequential, model[1])[idx])


def last(model: TensorDictSequential) -> TensorDictModule:
    return cast(TensorDictModule, model[3])


def double(_: object, args: object, out: Tensor) -> Tensor:
    return out * 2


def twice(out: object) -> Tensor | None:
    return out * 2 if isinstance(out, Tensor) else None


def double_z(_: object, args: object, td: TensorDict) -> None:
    td["z"] = td["z"] * 2


def double_h(_: object, args: object, td: TensorDict) -> None:
    td["h"] = td["h"] * 2


def member(model: TensorDictSequential, idx: int) -> nn.Sequential:
    return cast(nn.Sequential, cast(TensorDictModule, model[idx]).module)


DEEDS: dict[str, Callable[[TensorDictSequential], object]] = {
    "hook on the next": lambda m: cast(nn.Module, inner(m, 1).module).register_forward_hook(double),
    "hook on a member": lambda m: cast(nn.Sequential, inner(m, 2).module)[0].register_forward_hook(
        double
    ),
    "hook on the last": lambda m: cast(nn.Module, last(m).module).register_forward_hook(double),
    "hook on a step": lambda m: last(m).register_forward_hook(double_z),
    "hook on an inner step": lambda m: inner(m, 2).register_forward_hook(double_h),
    "hook for all": lambda m: HANDLES.append(
        nn.modules.module.register_module_forward_hook(
            cast("Callable[..., None]", lambda _, args, out: twice(out))
        )
    ),
    "module": lambda m: setattr(last(m), "module", Negated()),
    "inner module": lambda m: setattr(inner(m, 2), "module", Negated()),
    "step": lambda m: m.__setitem__(3, TensorDictModule(Negated(), ["y"], ["z"])),
    "inner step": lambda m: cast(TensorDictSequential, m[1]).__setitem__(
        1, TensorDictModule(Negated(), ["h"], ["hidden"])
    ),
    "written step": lambda m: cast(nn.Module, m.module)._modules.__setitem__(
        "3", TensorDictModule(Negated(), ["y"], ["z"])
    ),
    "weight": lambda m: setattr(last(m).module, "weight", nn.Parameter(torch.ones(3, 3))),
    "instance": lambda m: vars(last(m).module).__setitem__("weight", torch.ones(3, 3)),
    "forward": lambda m: setattr(last(m).module, "forward", torch.neg),
    "later member": lambda m: member(m, 2)[1].register_forward_hook(double),
    "replaced member": lambda m: member(m, 2).__setitem__(1, Negated()),
}
HANDLES: list[torch.utils.hooks.RemovableHandle] = []


def two_calls(deed: str, where: str, form: str, calls: int) -> list[object]:
    """Return what the call gives in which something is done, and the next one."""
    model = make()

    def run() -> object:
        return model(TensorDict(x=X)).to_dict() if form == "container" else model(x=X)

    for _ in range(calls):
        run()
    if calls:
        assert module_calls(run) == 1  # of the member after one that may change it
    meddler = inner(model, 0).module if where == "nested" else member(model, 2)[0]
    cast(Meddler, meddler).deed.append(lambda: DEEDS[deed](model))
    try:
        return [run(), run()]
    finally:
        while HANDLES:
            HANDLES.pop().remove()


@pytest.mark.parametrize("form", ["container", "keyword"])
@pytest.mark.parametrize("where", ["nested", "in a Sequential"])
@pytest.mark.parametrize("deed", DEEDS)
def test_a_plan_does_what_the_steps_do_one_by_one(deed: str, where: str, form: str) -> None:
    found = [two_calls(deed, where, form, calls) for calls in (0, 4)]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("calls", [0, 4])
def test_a_step_of_other_keys_is_refused_in_the_middle_of_a_call(calls: int) -> None:
    model = make()
    for _ in range(calls):
        model(x=X)
    other = TensorDictModule(Negated(), ["first"], ["z"])
    cast(Meddler, inner(model, 0).module).deed.append(lambda: model.__setitem__(3, other))
    td = TensorDict(x=X)
    if calls:  # the rest was decided after the change
        assert torch.equal(model(td)["z"], -td["first"])
        return
    with pytest.raises(InvalidArgument, match=r"step `3` .* while the sequence ran"):
        model(td)
    assert list(td.keys()) == ["x"]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("calls", [0, 4])
def test_an_output_that_does_not_fit_is_noted_with_its_step(calls: int, nested: bool) -> None:
    """A rest that is run one by one begins with what the plan has made."""
    meddler = Meddler()
    meddling = TensorDictModule(meddler, ["x"], ["h"])
    first = TensorDictModule(lambda x: x.sum(0) if meddler.deed else x, ["x"], ["made"])
    steps = [first, meddling] if not nested else [TensorDictSequential(first, meddling)]
    model = TensorDictSequential(*steps, TensorDictModule(nn.Tanh(), ["h"], ["y"]))
    for _ in range(calls):
        model(TensorDict(x=X, batch_size=[2]))
    last_step = cast(TensorDictModule, model[len(steps)])
    meddler.deed.append(lambda: cast(nn.Module, last_step.module).register_forward_hook(double))
    td = TensorDict(x=X, batch_size=[2])
    with pytest.raises(ShapeMismatch, match=r"`made`: its shape must start with \(2,\)") as caught:
        model(td)
    notes = caught.value.__notes__
    assert notes[0].startswith("In step 0, `TensorDictModule(<lambda>)`: ")
    assert notes[0].endswith("writes `made`.")
    assert notes[-2].startswith("In step 0, `TensorDictSequential`") is nested
    assert list(td.keys()) == ["x"]


@pytest.mark.parametrize("form", ["container", "keyword"])
def test_what_nobody_reads_any_more_may_be_gone_where_a_rest_is_run(form: str) -> None:
    """The sequence inside selects `h`, which the step after it overwrites."""
    meddler = Meddler()
    first = TensorDictSequential(
        TensorDictModule(nn.Tanh(), ["x"], ["h"]),
        TensorDictModule(meddler, ["h"], ["middle"]),
        TensorDictModule(nn.Sigmoid(), ["middle"], ["y"]),
    ).select_out_keys("h", "y")
    with pytest.warns(KeyGraphWarning, match="writes `h`, which a later step replaces"):
        model = TensorDictSequential(first, TensorDictModule(nn.Tanh(), ["y"], ["h"]))

    def run() -> object:
        return model(TensorDict(x=X)).to_dict() if form == "container" else model(x=X)

    expected = run()
    for _ in range(3):
        run()
    final = cast(TensorDictModule, model[1])
    meddler.deed.append(
        lambda: cast(nn.Module, final.module).register_forward_hook(lambda *_: None)
    )
    torch.testing.assert_close(run(), expected, rtol=0, atol=0)
