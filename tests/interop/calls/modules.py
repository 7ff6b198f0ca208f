"""Keyed modules, and calls of them, for both libraries.

Knows public names of modules alone; must not know which results are expected.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from tests.interop.calls.subjects import Library
from torch import nn
from torch.distributions import Normal

Made = Callable[[Library], Any]
Call = Callable[[Library, Any, Any], Any]


def plus(x: torch.Tensor, h: torch.Tensor | None) -> torch.Tensor:
    return x if h is None else x + h


def step(lib: Library, fn: Callable[..., object] = torch.neg, **options: Any) -> Any:
    return lib.TensorDictModule(fn, ["x"], ["y"], **options)


def sequence(lib: Library, **options: Any) -> Any:
    more = lib.TensorDictModule(torch.abs, ["y"], ["z"])
    return lib.TensorDictSequential(step(lib), more, **options)


def drawing(lib: Library, **options: Any) -> Any:
    return lib.ProbabilisticTensorDictModule(
        ["loc", "scale"], ["a"], distribution_class=Normal, **options
    )


def policy(lib: Library, **options: Any) -> Any:
    both = lib.TensorDictModule(lambda x: (x, x.abs() + 1), ["x"], ["loc", "scale"])
    last = drawing(lib, return_log_prob=True)
    return lib.ProbabilisticTensorDictSequential(both, last, **options)


def policy_of_a_value(lib: Library, scores: bool) -> Any:
    all_three = lib.TensorDictModule(
        lambda x: (x, x.abs() + 1, x * 3), ["x"], ["loc", "scale", "a"]
    )
    return lib.ProbabilisticTensorDictSequential(all_three, drawing(lib, return_log_prob=scores))


MODULES: dict[str, Made] = {
    "step": step,
    "step, new": lambda lib: step(lib, inplace=False),
    "step, empty": lambda lib: step(lib, inplace="empty"),
    "step, none": lambda lib: step(lib, inplace=None),
    "optional": lambda lib: lib.TensorDictModule(plus, ["x", "missing"], ["y"]),
    "named": lambda lib: lib.TensorDictModule(plus, {"x": "x", "h": "missing"}, ["y"]),
    "lacking": lambda lib: lib.TensorDictModule(torch.add, ["x", "missing"], ["y"]),
    "strict": lambda lib: lib.TensorDictModule(plus, ["x", "missing"], ["y"], strict=True),
    "several": lambda lib: lib.TensorDictModule(lambda x: (x, -x), ["x"], ["_", ("n", "y")]),
    "too many": lambda lib: step(lib, lambda x: (x, x)),
    "container": lambda lib: step(lib, lambda x: lib.TensorDict({"q": x}, [2])),
    "linear": lambda lib: step(lib, nn.Identity()),
    "sequence": sequence,
    "sequence, new": lambda lib: sequence(lib, inplace=False),
    "sequence, empty": lambda lib: sequence(lib, inplace="empty"),
    "sequence, selected": lambda lib: sequence(lib, selected_out_keys=["z"]),
    "function": lambda lib: lib.TensorDictSequential(lambda td: td.set("y", td["x"] * 2)),
    "wrapped": lambda lib: lib.TensorDictModuleWrapper(step(lib)),
    "of names": lambda lib: lib.TensorDictSequential(
        OrderedDict(one=step(lib), two=lib.TensorDictModule(torch.abs, ["y"], ["z"]))
    ),
    "tolerant": lambda lib: sequence(lib, partial_tolerant=True),
    "policy": policy,
    "policy, composite": lambda lib: policy(lib, return_composite=True),
    "policy, value kept": lambda lib: policy_of_a_value(lib, False),
    "policy, value scored": lambda lib: policy_of_a_value(lib, True),
}
"""Modules that read `x`; other inputs are missing on purpose."""

CALLS: dict[str, Call] = {
    "container": lambda lib, module, td: module(td),
    "out": lambda lib, module, td: module(td, tensordict_out=lib.TensorDict({}, [2])),
    "twice": lambda lib, module, td: [module(td), module(td)],
    "tensor": lambda lib, module, td: module(x=td["x"]),
    "position": lambda lib, module, td: module(td["x"]),
    "keyword": lambda lib, module, td: module(tensordict=td),
    "locked": lambda lib, module, td: module(td.lock_()),
    "stacked": lambda lib, module, td: module(lib.lazy_stack([td, td.clone()])),
    "selected": lambda lib, module, td: module.select_out_keys(module.out_keys[-1])(td),
    "keys": lambda lib, module, td: [module.in_keys, module.out_keys],
    "distribution": lambda lib, module, td: module.get_dist(td).mean,
    "parameters": lambda lib, module, td: module.get_dist_params(td),
    "score": lambda lib, module, td: module.log_prob(td.set("a", torch.zeros(2))),
    "slice": lambda lib, module, td: module[:1](td),
    "subsequence": lambda lib, module, td: module.select_subsequence(out_keys=["z"])(td),
}


def given(lib: Library) -> Any:
    return lib.TensorDict({"x": torch.tensor([1.0, -2.0]), "kept": torch.ones(2)}, [2])


DELIBERATE = {
    ("function", "position"),  # it reads no keys, so a tensor has no name: `DispatchError`
}
"""Calls that differ on purpose."""
