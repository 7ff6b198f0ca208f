"""Distributions that are built and scored without torch's checks: as with them, bit by bit."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    Categorical,
    Distribution,
    ExpTransform,
    Independent,
    Normal,
    SigmoidTransform,
    TanhTransform,
    TransformedDistribution,
    constraints,
)

from kd_core import TensorDict
from kd_nn.distributions import values_unchecked
from kd_probabilistic import ProbabilisticTensorDictModule

SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e30, 1e-30)
_NONE = torch.Size()
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True, params=[True, False], ids=["checked", "unchecked"])
def checked(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = Distribution._validate_args
    Distribution.set_default_validate_args(request.param)
    yield request.param
    Distribution.set_default_validate_args(bool(before))


def module_of(
    kind: Callable[..., Distribution], *names: str, **more: object
) -> Callable[..., object]:
    settings: dict[str, object] = {
        "out_keys": ["value"],
        "distribution_class": kind,
        "default_interaction_type": "random",
        "return_log_prob": True,
        **more,
    }
    return ProbabilisticTensorDictModule(list(names), **settings)  # type: ignore[arg-type]  # any option


def seen(call: Callable[[], object]) -> object:
    """Return what a call from one seed gives, or the class and text of its error."""
    torch.manual_seed(0)
    try:
        return call()
    except (ValueError, RuntimeError, IndexError) as error:
        return type(error), str(error)


def by_torch(
    kind: Callable[..., Distribution], count: int | None, *values: Tensor, names: list[str]
) -> object:
    with values_unchecked() if any(not value.numel() for value in values) else nullcontext():
        dist = kind(**dict(zip(names, values, strict=True)))
    shape = torch.Size(() if count is None else (count,))
    value = dist.rsample(shape) if dist.has_rsample else dist.sample(shape)
    return value, dist.log_prob(value)


def both(
    module: Callable[..., object],
    kind: Callable[..., Distribution],
    count: int | None,
    values: list[Tensor],
    names: list[str],
) -> tuple[object, object]:
    """Return what a module gives, and what torch does."""
    return (
        seen(lambda: module(*values)),
        seen(lambda: by_torch(kind, count, *values, names=names)),
    )


def same(ours: object, theirs: object) -> bool:
    if isinstance(ours, tuple) and all(isinstance(each, Tensor) for each in ours):
        assert isinstance(theirs, tuple), (ours, theirs)
        pairs = zip(ours, theirs, strict=True)
        return all(
            mine.dtype is other.dtype and torch.equal(mine.nan_to_num(7), other.nan_to_num(7))
            for mine, other in pairs
        )
    return ours == theirs


def random_values(rng: random.Random, count: int) -> list[Tensor]:
    """Return tensors of one dtype, mostly of one shape, sometimes with odd numbers."""
    dtype = rng.choice(DTYPES)
    shape = [rng.choice((0, 1, 2, 3)) for _ in range(rng.choice((0, 1, 1, 2, 2, 3)))]
    values = []
    for position in range(count):
        value = torch.randn(shape, dtype=torch.float32)
        value = value.abs() if position else value
        if value.numel() and rng.random() < 0.3:
            value.view(-1)[rng.randrange(value.numel())] = rng.choice(SPECIAL)
        if rng.random() < 0.1 and shape:
            value = value[:1]
        values.append(value.to(dtype))
    if rng.random() < 0.1:
        values[0] = values[0].nan_to_num(0, 0, 0).long()
    return values


@pytest.mark.parametrize(("kind", "names"), [(Normal, ["loc", "scale"]), (Categorical, ["logits"])])
@pytest.mark.parametrize("count", [None, 3])
def test_random_parameters_give_what_torch_gives(
    kind: type[Distribution], names: list[str], count: int | None
) -> None:
    rng = random.Random(f"{kind}{count}")
    torch.manual_seed(1)
    module = module_of(kind, *names, num_samples=count)
    raised = 0
    for _ in range(150):
        values = random_values(rng, len(names))
        ours, theirs = both(module, kind, count, values, names)
        assert same(ours, theirs), (values, ours, theirs)
        raised += isinstance(theirs, tuple) and theirs[0] is ValueError
    if Distribution._validate_args:
        assert 0 < raised < 112


def squashed(loc: Tensor, scale: Tensor) -> Distribution:
    steps = [AffineTransform(0.5, 2.0), TanhTransform(), SigmoidTransform(), ExpTransform()]
    count = 1 if loc.ndim else 0
    return Independent(TransformedDistribution(Normal(loc, scale), steps), count)


@pytest.mark.parametrize("count", [None, 3])
def test_random_squashed_normals_give_what_torch_gives(count: int | None) -> None:
    rng = random.Random(f"squashed{count}")
    torch.manual_seed(2)
    module = module_of(squashed, "loc", "scale", num_samples=count)
    raised = 0
    for _ in range(120):
        values = random_values(rng, 2)
        ours, theirs = both(module, squashed, count, values, ["loc", "scale"])
        if any(0 in value.shape for value in values) and isinstance(theirs, tuple):
            continue  # `Independent` of torch fails on a batch of 0 rows
        assert same(ours, theirs), (values, ours, theirs)
        raised += isinstance(theirs, tuple) and theirs[0] is ValueError
    if Distribution._validate_args:
        assert 0 < raised < 100


class Beyond(Normal):
    """Draws what its support does not have."""

    support = constraints.unit_interval  # type: ignore[assignment]  # another support

    def rsample(self, sample_shape: torch.Size = _NONE) -> Tensor:  # type: ignore[override]  # as called
        return torch.full(self._extended_shape(sample_shape), 2.0)


def test_a_draw_of_another_class_is_checked() -> None:
    module = module_of(Beyond, "loc", "scale")
    inside = module_of(lambda loc, scale: Independent(Beyond(loc, scale), 1), "loc", "scale")
    for each in (module, inside):
        if Distribution._validate_args:
            with pytest.raises(ValueError, match="within the support"):
                each(torch.zeros(2), torch.ones(2))
        else:
            each(torch.zeros(2), torch.ones(2))


def test_gradients_are_those_of_torch() -> None:
    logits = torch.randn(5, 4, dtype=torch.float64)
    grads = []
    runs: list[Callable[..., object]] = [
        module_of(Categorical, "logits"),
        lambda given: by_torch(Categorical, None, given, names=["logits"]),
    ]
    for run in runs:
        leaf = logits.clone().requires_grad_()
        torch.manual_seed(0)
        found = run(leaf)
        assert isinstance(found, tuple)
        assert isinstance(found[1], Tensor)
        grads.append(torch.autograd.grad(found[1].sum(), leaf)[0])
    assert torch.equal(*grads)


def test_a_quick_categorical_is_one_of_torch() -> None:
    logits = torch.randn(3, 4)
    module = module_of(Categorical, "logits")
    assert isinstance(module, ProbabilisticTensorDictModule)
    ours, theirs = module.get_dist(TensorDict({"logits": logits}, [3])), Categorical(logits=logits)
    assert vars(ours).keys() == vars(theirs).keys()
    for name in ("probs", "logits", "mode", "param_shape", "batch_shape", "event_shape"):
        mine, its = getattr(ours, name), getattr(theirs, name)
        assert type(mine) is type(its)
        assert torch.equal(mine, its) if isinstance(mine, Tensor) else mine == its
    entropies: list[Tensor] = [ours.entropy(), theirs.entropy()]
    assert torch.equal(*entropies)
    wide: list[Categorical] = [ours.expand([2, 3]), theirs.expand([2, 3])]
    assert torch.equal(wide[0].logits, wide[1].logits)
    assert repr(ours) == repr(theirs)


def test_a_patched_constructor_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    original = Categorical.__init__

    def patched(self: Categorical, *args: object, **kwargs: object) -> None:
        calls.append(self)
        original(self, *args, **kwargs)  # type: ignore[arg-type]  # what it was called with

    monkeypatch.setattr(Categorical, "__init__", patched)
    module_of(Categorical, "logits")(torch.zeros(2))
    assert len(calls) == 1


def test_vmap_and_copies_give_the_same() -> None:
    logits = torch.randn(4, 3)
    module = module_of(Categorical, "logits", default_interaction_type="mode")
    mapped = torch.vmap(module)(logits)
    for run in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert same(run(logits), mapped)
