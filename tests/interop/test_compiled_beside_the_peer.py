"""Programs of modules compile whole, into no more graphs than with the peer, and do the same."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("tensordict")

import tensordict
import tensordict.nn
import torch
from tests.interop.calls.outcomes import difference, outcome
from tests.interop.calls.subjects import Library, leaf
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributions import Normal

import kd_core  # the peer is there
import kd_nn
import kd_probabilistic

Step = Callable[[Any], object]

OURS = Library("kd", kd_core, kd_nn, kd_probabilistic)
PEER = Library("peer", tensordict, tensordict.nn)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 3)


def sequence(lib: Library, **options: Any) -> Any:
    first = lib.TensorDictModule(linear(), ["x"], ["y"])
    return lib.TensorDictSequential(
        first, lib.TensorDictModule(torch.tanh, ["y"], [("n", "z")]), **options
    )


def policy(lib: Library) -> Any:
    both = lib.TensorDictModule(lambda x: (x, x.abs() + 1), ["x"], ["loc", "scale"])
    draw = lib.ProbabilisticTensorDictModule(
        ["loc", "scale"], ["a"], distribution_class=Normal, return_log_prob=True
    )
    return lib.ProbabilisticTensorDictSequential(both, draw)


def by_keyword(lib: Library) -> Step:
    module = sequence(lib)
    return lambda td: module(x=td["x"])


def mean_of_distribution(lib: Library) -> Step:
    module = policy(lib)
    return lambda td: module.get_dist(td).mean


def weights_as_module(lib: Library) -> Step:
    net = linear()
    return lambda td: lib.TensorDict.from_module(net, as_module=True)["weight"] @ td["x"].T


def with_means(lib: Library) -> Step:
    module = policy(lib)

    def run(td: Any) -> object:
        with lib.set_interaction_type(lib.InteractionType.MEAN):
            return module(td)

    return run


def with_other_weights(lib: Library) -> Step:
    net = linear()
    params = lib.TensorDict.from_module(net).data * 2

    def run(td: Any) -> object:
        with params.to_module(net):
            inside = net(td["x"]).detach()
        return inside, net(td["x"]).detach()

    return run


def weights_before(lib: Library) -> Step:
    net = linear()
    params = lib.TensorDict.from_module(net).data * 2

    def run(td: Any) -> object:
        before = params.to_module(net)
        made = td["x"] @ before["weight"] + before["bias"]
        before.to_module(net)
        return made.detach()

    return run


def ensemble(lib: Library) -> Step:
    net = linear()
    weights = lib.TensorDict.from_modules(*map(linear, range(3)), as_module=True).data

    def one(params: Any, x: torch.Tensor) -> object:
        with params.to_module(net):
            return net(x)

    return lambda td: torch.vmap(one, (0, None))(weights, td["x"])


def slopes(lib: Library) -> Step:
    net = linear()
    weights = lib.TensorDict.from_module(net).data.clone()

    def loss(params: Any, x: torch.Tensor) -> object:
        with params.to_module(net):
            return net(x).square().sum()

    return lambda td: torch.func.grad(loss)(weights, td["x"])


def target(lib: Library) -> Step:
    weights = lib.TensorDict.from_module(linear(1)).data.clone()
    source = lib.TensorDict.from_module(linear(2)).data
    return lambda td: weights.lerp_(source, 0.1).clone()


def subclass_of(base: Any) -> Any:
    class Own(base):  # type: ignore[misc]  # of either library
        def forward(self, tensordict: Any) -> Any:
            made = super().forward(tensordict)
            return made.set("more", made["x"] * 2)

    return Own


PROGRAMS: dict[str, Callable[[Library], Step]] = {
    "sequence": sequence,
    "own module": lambda lib: subclass_of(lib.TensorDictModule)(linear(), ["x"], ["y"]),
    "own sequence": lambda lib: subclass_of(lib.TensorDictSequential)(sequence(lib)),
    "own step": lambda lib: lib.TensorDictSequential(
        sequence(lib), subclass_of(lib.TensorDictModule)(linear(), ["y"], ["w"])
    ),
    "own draw": lambda lib: subclass_of(lib.ProbabilisticTensorDictModule)(
        ["x"], ["y"], distribution_class=lambda x: Normal(x, 1.0)
    ),
    "selected": lambda lib: sequence(lib, selected_out_keys=[("n", "z")]),
    "keywords": by_keyword,
    "policy": policy,
    "interaction": with_means,
    "distribution": mean_of_distribution,
    "weights": with_other_weights,
    "swapped": weights_before,
    "as module": weights_as_module,
    "ensemble": ensemble,
    "gradient": slopes,
    "target": target,
    "mapped": lambda lib: torch.vmap(sequence(lib)),
    "copy": lambda lib: copy.copy,
    "deep copy": lambda lib: copy.deepcopy,
}


def given(lib: Library, rows: int) -> Any:
    return lib.TensorDict({"x": leaf(rows, 3), "kept": leaf(rows)}, [rows])


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_compiled_program_does_what_it_does_outside_and_there(name: str) -> None:
    found, graphs = [], []
    for lib in (OURS, PEER):
        step, counter = PROGRAMS[name](lib), CompileCounter()
        run = torch.compile(PROGRAMS[name](lib), fullgraph=True, backend=counter)
        for rows in (2, 2, 4):
            outside, inside = given(lib, rows), given(lib, rows)
            torch.manual_seed(1)
            expected = outcome(lambda: step(outside), outside, lib)  # noqa: B023  # now
            torch.manual_seed(1)
            result = outcome(lambda: run(inside), inside, lib)  # noqa: B023  # now
            if lib.is_peer and "error" in result:
                return  # what it cannot compile has nothing to be compared with
            assert "error" not in result, result
            assert difference(result, expected) is None, (lib.name, result, expected)
            found.append(result)
        graphs.append(counter.frame_count)
    for mine, other in zip(found[:3], found[3:], strict=True):
        assert difference(mine, other) is None, (mine, other)
    assert graphs[0] <= graphs[1]
