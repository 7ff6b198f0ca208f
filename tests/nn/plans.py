"""A sequence with a plan, the forms of calling it, and a count of what the plan leaves out."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import cast

import torch
from torch import Tensor, nn

from kd_core import TensorDict
from kd_nn import NormalParamExtractor, TensorDictModule, TensorDictSequential

X = torch.arange(6.0).reshape(2, 3)
FORMS = ["container", "keyword", "position"]


def make() -> TensorDictSequential:
    torch.manual_seed(0)
    return TensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), ["x"], ["h"]),
        TensorDictModule(nn.ReLU(), ["h"], ["h"]),
        TensorDictSequential(TensorDictModule(nn.Linear(4, 4), ["h"], ["p"])),
        TensorDictModule(NormalParamExtractor(), ["p"], ["loc", ("out", "scale")]),
    )


def call(model: nn.Module, form: str) -> dict[object, Tensor]:
    if form == "container":
        td = model(TensorDict({"x": X}, [2]))
        return {key: td[key] for key in model.out_keys}  # type: ignore[union-attr]  # a keyed module
    outputs = model(x=X) if form == "keyword" else model(X)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return dict(zip(model.out_keys, outputs, strict=True))  # type: ignore[arg-type]  # a keyed module


def leaf(model: TensorDictSequential, idx: int = 0) -> nn.Module:
    return cast(nn.Module, model[idx].module)


def planned(form: str) -> TensorDictSequential:
    """Return a sequence whose plan was made and used."""
    model = make()
    for _ in range(2):
        call(model, form)
    assert module_calls(lambda: call(model, form)) == 0
    return model


def module_calls(function: Callable[[], object], of: nn.Module | None = None) -> int:
    """Count the calls that go through `nn.Module`, of one module if it is given."""
    seen: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_code is not nn.Module._call_impl.__code__:
            return
        if of is None or frame.f_locals["self"] is of:
            seen.append(event)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(seen)


def same(left: dict[object, Tensor], right: dict[object, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
