"""Random keyed modules, and what is done with them in the course of their life."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import TypeAlias

import torch
from torch import Tensor, nn

from kd_core import TensorDict
from kd_nn import (
    EnsembleModule,
    TensorDictModule,
    TensorDictParams,
    TensorDictSequential,
    make_functional,
    set_skip_existing,
)
from kd_probabilistic import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    set_interaction_type,
)

Event: TypeAlias = Callable[[TensorDictSequential, TensorDict], object]


def twice(x: Tensor) -> Tensor:
    return x * 2


def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x + y, x - y


def step(rng: Random, number: int) -> TensorDictModule:
    """Return one step; it reads `x` and what steps before it wrote."""
    source = "x" if not number else rng.choice(["x", *(f"h{i}" for i in range(number))])
    written = f"h{number}"
    layers: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(3, 3),
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)),
        nn.Tanh,
    ]
    draw = rng.random()
    if draw < 0.7:
        return TensorDictModule(rng.choice(layers)(), [source], [written])
    if draw < 0.85:
        return TensorDictModule(twice, [source], [written])
    return TensorDictModule(both, [source, "x"], [written, ("n", written)])


def model(rng: Random) -> TensorDictSequential:
    """Return a sequence of up to five steps, some of them sequences."""
    steps: list[TensorDictModule | TensorDictSequential] = []
    count = rng.randint(1, 5)
    for number in range(count):
        each = step(rng, number)
        steps.append(TensorDictSequential(each) if rng.random() < 0.2 else each)
    made = TensorDictSequential(*steps)
    return made.select_out_keys(f"h{count - 1}") if rng.random() < 0.3 else made


def inputs(rows: int = 2) -> TensorDict:
    return TensorDict({"x": torch.linspace(-1, 1, rows * 3).reshape(rows, 3)}, [rows])


def call(made: TensorDictSequential, td: TensorDict) -> object:
    return made(td.clone())


def call_with_tensors(made: TensorDictSequential, td: TensorDict) -> object:
    return made(x=td["x"])


def learn(made: TensorDictSequential, td: TensorDict) -> object:
    found = made(td.clone())
    total = torch.stack([torch.as_tensor(found.get(key)).sum() for key in made.out_keys]).sum()
    if total.requires_grad:
        total.backward()
    made.zero_grad()
    return found


def hook(made: TensorDictSequential, td: TensorDict) -> object:
    handle = made[0].register_forward_hook(lambda *args: None)
    found = made(td.clone())
    handle.remove()
    return found


def duplicate(made: TensorDictSequential, td: TensorDict) -> object:
    return copy.deepcopy(made)(td.clone())


def borrow(made: TensorDictSequential, td: TensorDict) -> object:
    params = TensorDict.from_module(made) if hasattr(TensorDict, "from_module") else None
    if params is None or params.is_empty():
        return None
    with params.detach().clone().to_module(made):
        return made(td.clone())


def select(made: TensorDictSequential, td: TensorDict) -> object:
    part = made.select_subsequence(out_keys=[made.out_keys[-1]])
    return part(td.clone())


def skip(made: TensorDictSequential, td: TensorDict) -> object:
    with set_skip_existing(True):
        return made(made(td.clone()))


def toggle(made: TensorDictSequential, td: TensorDict) -> object:
    made.eval()
    found = made(td.clone())
    made.train()
    return found


def ensemble(made: TensorDictSequential, td: TensorDict) -> object:
    if not any(True for _ in made.parameters()):
        return None
    return EnsembleModule(made, 2)(td.clone())


def functional(made: TensorDictSequential, td: TensorDict) -> object:
    params = make_functional(copy.deepcopy(made))
    return TensorDictParams(params) if not params.is_empty() else None


def draw(made: TensorDictSequential, td: TensorDict) -> object:
    whole = ProbabilisticTensorDictSequential(
        TensorDictModule(both, ["x", "x"], ["loc", "zero"]),
        TensorDictModule(torch.exp, ["x"], ["scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["sample"], distribution_class=torch.distributions.Normal
        ),
    )
    with set_interaction_type(InteractionType.MEAN):
        return whole(td.clone())


EVENTS: dict[str, Event] = {
    "call": call,
    "call with tensors": call_with_tensors,
    "learn": learn,
    "hook": hook,
    "deepcopy": duplicate,
    "to_module": borrow,
    "select_subsequence": select,
    "skip_existing": skip,
    "train and eval": toggle,
    "ensemble": ensemble,
    "make_functional": functional,
    "draw": draw,
}
