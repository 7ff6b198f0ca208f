"""A program for tensordict, which the drop-in runs, too: `python pickled.py write|read FOLDER`."""

import sys
from pathlib import Path
from typing import Any

import tensordict
import torch
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    UnbatchedTensor,
    is_non_tensor,
    is_tensor_collection,
    lazy_stack,
)
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictParams,
    TensorDictSequential,
)


class Pair(TensorClass):
    x: torch.Tensor
    y: torch.Tensor | None = None
    s: str = "word"


class Poses(TensorDict):
    pass


class Scale(TensorDictModuleBase):
    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["a"], ["scale"]
        self.factor = torch.nn.Parameter(torch.ones(2) * 3)
        self.note = "own"

    def forward(self, tensordict: Any) -> Any:
        return tensordict.set("scale", tensordict["a"].exp() * self.factor)


class Named(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x + y), x


def containers() -> dict[str, Any]:
    td = TensorDict(
        {"a": torch.arange(6.0).view(3, 2), "n": {"b": torch.ones(3), "e": {}}, "s": "word"},
        [3],
        names=["time"],
    )
    td["w"] = NonTensorStack("x", ["y"], None)
    return {
        "dense": td,
        "locked": td.clone().lock_(),
        "device": td.to("cpu"),
        "stack": lazy_stack([td, td + 1], 1),
        "ragged": lazy_stack([TensorDict({"x": torch.ones(n + 1)}) for n in range(3)]),
        "pair": Pair(x=torch.ones(3), batch_size=[3]),
        "nested pair": TensorDict({"p": Pair(torch.ones(3), torch.zeros(3), batch_size=[3])}, [3]),
        "poses": Poses({"a": torch.ones(2)}, [2]),
        "data": NonTensorData({"k": 1}, batch_size=[2]),
        "rows": NonTensorStack("a", "b"),
        "meta": TensorDict(m=MetaData(3)),
        "unbatched": TensorDict({"u": UnbatchedTensor(torch.arange(4))}, [2]),
        "parameters": TensorDictParams(TensorDict({"w": torch.ones(3), "b": torch.ones(1)})),
    }


def modules() -> dict[str, Any]:
    torch.manual_seed(0)
    first = TensorDictModule(torch.nn.Linear(2, 2), in_keys=["a"], out_keys=["loc"])
    named = TensorDictModule(Named(), in_keys={"y": "a", "x": "loc"}, out_keys=["v", "w"])
    named.select_out_keys("v")
    draw = ProbabilisticTensorDictModule(
        in_keys={"loc": "loc", "scale": "scale"},
        out_keys=["x"],
        distribution_class=torch.distributions.Normal,
        return_log_prob=True,
    )
    return {
        "module": first.eval(),
        "base": Scale(),
        "sequence": TensorDictSequential(first, TensorDictSequential(named)),
        "policy": ProbabilisticTensorDictSequential(first, Scale(), draw),
    }


def described(value: Any) -> Any:
    """Return what a container holds as numbers, strings and lists."""
    if isinstance(value, UnbatchedTensor):
        return "UnbatchedTensor", value.data.tolist()
    if isinstance(value, torch.Tensor):
        return value.requires_grad, value.tolist()
    if is_non_tensor(value):
        return type(value).__name__, tuple(value.batch_size), value.tolist()
    if not is_tensor_collection(value):
        return value
    kind = type(value).__name__
    facts = kind, tuple(value.batch_size), list(value.names), str(value.device), value.is_locked
    if isinstance(value, LazyStackedTensorDict):
        return *facts, [described(member) for member in value.unbind(value.stack_dim)]
    entries = {key: described(value.get(key)) for key in sorted(value.keys())}
    return *facts, {key: entry for key, entry in entries.items() if entry is not None}


def called(module: Any) -> Any:
    td = module(TensorDict({"a": torch.arange(6.0).view(3, 2)}, [3])).exclude("a")
    state = {key: value.tolist() for key, value in sorted(module.state_dict().items())}
    return module.training, module.in_keys, module.out_keys, described(td), state


def main(what: str, folder: Path) -> None:
    for name, made in {**containers(), **modules()}.items():
        if what == "write":
            torch.save(made, folder / f"{name}.pt")
            continue
        loaded = torch.load(folder / f"{name}.pt", weights_only=False)
        if isinstance(loaded, torch.nn.Module) and not isinstance(loaded, TensorDictParams):
            print(name, called(loaded), getattr(loaded, "note", None))
        else:
            print(name, described(loaded))
    if what == "read":
        for name in ("dense", "locked", "stack", "ragged", "data", "rows"):
            print(name, described(torch.load(folder / f"{name}.pt", weights_only=True)))
        print(tensordict.__version__)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
