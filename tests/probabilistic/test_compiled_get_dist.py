"""`get_dist` of a sequence in compiled code: the distribution and the entries of eager code."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributions import Distribution, Normal

from kd_core import Locked, NestedKey, TensorDict, TensorDictBase
from kd_nn import (
    NormalParamExtractor,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    set_skip_existing,
)
from kd_probabilistic import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    interaction_type,
    set_interaction_type,
)

Sequence = ProbabilisticTensorDictSequential

# dynamo reads the gradient of its inputs after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def raw(source: NestedKey = "obs", target: NestedKey = "raw") -> TensorDictModule:
    return TensorDictModule(nn.Linear(3, 4), in_keys=[source], out_keys=[target])


def params(source: NestedKey = "raw", prefix: tuple[str, ...] = ()) -> TensorDictModule:
    keys: list[NestedKey] = [(*prefix, name) for name in ("loc", "scale")]
    return TensorDictModule(NormalParamExtractor(), in_keys=[source], out_keys=keys)


def draw(
    target: NestedKey = "action", prefix: tuple[str, ...] = ()
) -> ProbabilisticTensorDictModule:
    named: dict[str, NestedKey] = {name: (*prefix, name) for name in ("loc", "scale")}
    return ProbabilisticTensorDictModule(
        in_keys=named,
        out_keys=[target],
        distribution_class=Normal,
        default_interaction_type=InteractionType.RANDOM,
    )


def of_scope(x: Tensor) -> Tensor:
    """Return another value in each interaction type."""
    kind = interaction_type()
    return x + (0 if kind is None else 1 if kind is InteractionType.RANDOM else 2)


class Doubled(TensorDictModuleBase):
    """A step without a form for values."""

    in_keys = ["raw"]  # noqa: RUF012  # as users write it
    out_keys = ["raw"]  # noqa: RUF012  # as users write it

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("raw", 2 * tensordict["raw"])


def hidden() -> Sequence:
    inner = TensorDictSequential(raw(), params())
    inner.select_out_keys("loc", "scale")
    return Sequence(inner, draw())


def hooked() -> Sequence:
    model = Sequence(raw(), params(), draw())
    model[0].register_forward_hook(lambda module, args, out: out.set("seen", out["raw"] + 1))
    return model


def selected() -> Sequence:
    model = Sequence(raw(), params(), draw())
    model.select_out_keys("action")
    return model


MODELS: dict[str, Callable[[], Sequence]] = {
    "flat": lambda: Sequence(raw(), params(), draw()),
    "nested keys": lambda: Sequence(
        raw("obs", ("a", "raw")), params(("a", "raw"), ("a", "b")), draw(("a", "x"), ("a", "b"))
    ),
    "nested input": lambda: Sequence(raw(("next", "obs")), params(), draw()),
    "nested sequence": lambda: Sequence(TensorDictSequential(raw(), params()), draw()),
    "nested distribution": lambda: Sequence(raw(), Sequence(params(), draw())),
    "hidden": hidden,
    "discarded": lambda: Sequence(
        raw(), TensorDictModule(lambda x: (x, x), ["raw"], ["_", "raw"]), params(), draw()
    ),
    "selected": selected,
    "hooked": hooked,
    "tolerant": lambda: Sequence(raw(), params(), draw(), partial_tolerant=True),
    "apart": lambda: Sequence(raw(), params(), draw(), inplace=False),
    "scope": lambda: Sequence(
        raw(), TensorDictModule(of_scope, ["raw"], ["raw"]), params(), draw()
    ),
    "general step": lambda: Sequence(raw(), Doubled(), params(), draw()),
    "composite": lambda: Sequence(
        raw(), params(), draw(), TensorDictModule(torch.neg, ["action"], ["y"])
    ),
    "followed": lambda: Sequence(
        raw(),
        params(),
        draw(),
        TensorDictModule(torch.neg, ["action"], ["y"]),
        return_composite=False,
    ),
    "alone": lambda: Sequence(draw()),
}


def given() -> TensorDict:
    data = {"obs": torch.ones(2, 3), "next": {"obs": torch.zeros(2, 3)}, "loc": torch.ones(2, 2)}
    return TensorDict(data, [2]).set("scale", torch.ones(2, 2)).set(("a", "other"), torch.ones(2))


def value_of(dist: Distribution | TensorDictBase) -> Tensor:
    mean: object = dist.mean if isinstance(dist, Distribution) else dist
    if isinstance(mean, TensorDictBase):
        return mean["action"]
    assert isinstance(mean, Tensor)
    return mean


@pytest.mark.parametrize("name", MODELS)
def test_it_is_that_of_eager_code(name: str) -> None:
    torch._dynamo.reset()
    model = MODELS[name]()

    def mean(td: TensorDictBase) -> Tensor:
        return value_of(model.get_dist(td))

    compiled = torch.compile(mean, backend="eager")
    for scope in (None, InteractionType.DETERMINISTIC):
        with set_interaction_type(scope):
            found, expected = given(), given()
            torch.testing.assert_close(compiled(found), mean(expected))
        assert list(found.keys(True)) == list(expected.keys(True))
        for key, value in expected.items(True, True):
            torch.testing.assert_close(found[key], value)
    out, expected_out = TensorDict(batch_size=[2]), TensorDict(batch_size=[2])
    torch.compile(model.get_dist, backend="eager")(given(), out)
    model.get_dist(given(), expected_out)
    assert set(out.keys(True)) == set(expected_out.keys(True))


def test_it_is_one_graph_while_nothing_changes() -> None:
    torch._dynamo.reset()
    model, counter = MODELS["flat"](), CompileCounter()
    compiled = torch.compile(lambda td: model.get_dist(td).mean, backend=counter, fullgraph=True)
    for _ in range(3):
        compiled(given())
    compiled(given().set("unrelated", torch.ones(2)))
    assert counter.frame_count == 1


def test_it_follows_a_change() -> None:
    torch._dynamo.reset()
    model = Sequence(raw(), TensorDictModule(of_scope, ["raw"], ["raw"]), params(), draw())

    def mean(td: TensorDictBase) -> Tensor:
        return value_of(model.get_dist(td))

    compiled = torch.compile(mean, backend="eager")
    changes: tuple[Callable[[], object], ...] = (
        lambda: setattr(model[-1], "default_interaction_type", "mean"),
        lambda: setattr(model[0], "in_keys", [("next", "obs")]),
        lambda: model.insert(2, TensorDictModule(torch.neg, ["raw"], ["raw"])),
        lambda: setattr(model[-2], "out_keys", ["scale", "loc"]),
        lambda: setattr(model[-1], "distribution_class", torch.distributions.Laplace),
        lambda: model[1].register_forward_hook(lambda *_: None),
    )
    for change in (lambda: None, *changes):
        change()
        found, expected = given(), given()
        torch.testing.assert_close(compiled(found), mean(expected))
        assert list(found.keys(True)) == list(expected.keys(True))


def test_it_reads_what_exists_where_steps_are_skipped() -> None:
    torch._dynamo.reset()
    model = MODELS["flat"]()

    def mean(td: TensorDictBase) -> Tensor:
        return value_of(model.get_dist(td))

    compiled = torch.compile(mean, backend="eager")
    changed = compiled(given())
    with set_skip_existing(True):
        kept = compiled(given())
        torch.testing.assert_close(kept, mean(given()))
    torch.testing.assert_close(kept, torch.ones(2, 2))
    assert not torch.equal(kept, changed)


def test_get_kwargs_that_are_assigned_later_are_seen_where_skipping_is_switched() -> None:
    torch._dynamo.reset()
    model = MODELS["flat"]()
    compiled = torch.compile(lambda td: model.get_dist(td), backend="eager")
    with set_skip_existing(False):  # each step is called on its own
        compiled(given())
        model[0].get_kwargs = {"no_such_option": 1}
        with pytest.raises(TypeError, match="no_such_option"):
            compiled(given())


def test_a_missing_input_and_a_lock_are_told() -> None:
    torch._dynamo.reset()
    model = MODELS["flat"]()
    compiled = torch.compile(model.get_dist, backend="eager")
    # dynamo of torch 2.10 cannot trace how the error is built.
    with pytest.raises((KeyError, RuntimeError), match=r"obs|call_setattr"):
        compiled(TensorDict(batch_size=[2]))
    locked = given().lock_()
    with pytest.raises((Locked, RuntimeError), match="locked"):
        compiled(locked)
    assert "raw" not in locked
