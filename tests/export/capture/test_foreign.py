"""Keyed modules of another library, by stand-ins with the names and attributes of its classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from kd_export import NotExportable, export
from kd_export._capture.flat_module import converted, is_foreign, recurrent_keys
from kd_nn import TensorDictModule, TensorDictSequential

Keys = list[Any]


def named(name: str, *bases: type) -> Callable[[type], type]:
    """Give a class the name and the home of one of the other library."""

    def renamed(kind: type) -> type:
        kind.__name__, kind.__module__ = name, "tensordict.nn.standin"
        return kind

    return renamed


@named("TensorDictModuleBase")
class Base(nn.Module):
    def __init__(self, in_keys: Keys, out_keys: Keys) -> None:
        super().__init__()
        self.in_keys, self.out_keys = in_keys, out_keys


@named("TensorDictModule")
class Module(Base):
    def __init__(self, module: nn.Module, in_keys: Keys, out_keys: Keys) -> None:
        super().__init__(in_keys, out_keys)
        self.module = module


@named("TensorDictSequential")
class Sequence(Base):
    def __init__(self, *modules: nn.Module, out_keys: Keys) -> None:
        super().__init__([], out_keys)
        self.module = nn.ModuleList(modules)


@named("ProbabilisticTensorDictModule")
class Probabilistic(Base):
    distribution_class = Normal
    distribution_kwargs: dict[str, Any] = {}  # noqa: RUF012  # as theirs
    dist_keys = ("loc", "scale")


@named("QValueModule")
class QValue(Base):
    var_nums = None

    def __init__(self, action_space: str) -> None:
        super().__init__(["values"], ["action", "values", "chosen"])
        self.action_space = action_space


@named("EGreedyModule")
class Exploring(Base):
    """It writes random actions."""


@named("LSTMModule")
class Memory(Base):
    def __init__(self) -> None:
        super().__init__(["x", "h", "c", "is_init"], ["hidden", ("next", "h"), ("next", "c")])
        self.lstm = nn.LSTM(3, 4, batch_first=True)


def steps_of(module: nn.Module) -> list[Any]:
    found = converted(module)
    return list(found) if isinstance(found, TensorDictSequential) else [found]


def test_modules_in_a_sequence_become_ours() -> None:
    layer, head = nn.Linear(3, 4), nn.Linear(4, 2)
    theirs = Sequence(
        Sequence(Module(layer, ["x"], ["hidden"]), out_keys=["hidden"]),
        Module(head, ["hidden"], ["action"]),
        Exploring(["action"], ["action"]),
        out_keys=["action"],
    )
    assert is_foreign(theirs)
    ours = converted(theirs)
    assert ours.out_keys == ["action"]
    assert [step.module for step in steps_of(theirs)] == [layer, head]
    x = torch.randn(5, 3)
    program = export(theirs, {"x": x})
    assert torch.equal(program({"x": x})["action"], head(layer(x)))


def test_outputs_of_another_library_are_chosen() -> None:
    """It was a `TypeError` of that library."""
    theirs = Sequence(
        Module(nn.Linear(3, 4), ["x"], ["hidden"]),
        Module(nn.Linear(4, 2), ["hidden"], ["action"]),
        out_keys=["hidden", "action"],
    )
    program = export(theirs, {"x": torch.zeros(2, 3)}, outputs=["hidden"])
    assert [entry.wire for entry in program.schema.outputs] == ["hidden"]


def test_a_distribution_gives_its_mode() -> None:
    (step,) = steps_of(Probabilistic(["a", "b"], ["action"]))
    a = torch.randn(4)
    assert torch.equal(step.module(a, a.exp()), a)


@pytest.mark.parametrize(("form", "best"), [("categorical", 2), ("one_hot", [0, 0, 1])])
def test_the_best_action_is_an_integer_or_a_code(form: str, best: object) -> None:
    (step,) = steps_of(QValue(form))
    action, values, chosen = step.module(torch.tensor([[0.1, -1.0, 2.0]]))
    assert action.tolist() == [best]
    assert values.shape == (1, 3)
    assert chosen.tolist() == [[2.0]]


def test_a_recurrent_module_has_its_state_pairs() -> None:
    theirs = Memory()
    assert recurrent_keys(theirs) == {"h": ("next", "h"), "c": ("next", "c")}
    (step,) = steps_of(theirs)
    x, h, c = torch.randn(5, 3), torch.randn(5, 1, 4), torch.randn(5, 1, 4)
    out, new, _ = step.module(x, h, c)
    expected, (last, _) = theirs.lstm(
        x[:, None], (h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous())
    )
    assert torch.equal(out, expected[:, 0])
    assert torch.equal(new, last.transpose(0, 1))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(NotExportable, match="a kind that kd_export does not convert"):
        converted(Base(["x"], ["y"]))
    with pytest.raises(NotExportable, match="form 'binary'"):
        converted(QValue("binary"))


def test_our_own_modules_stay() -> None:
    module = TensorDictModule(nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
    assert not is_foreign(module)
    assert not is_foreign(nn.Linear(2, 2))
    assert converted(module) is module


def test_a_distribution_without_a_mode_is_refused() -> None:
    class Wild:
        def __init__(self, loc: Tensor, scale: Tensor) -> None:
            pass

    theirs = Probabilistic(["a", "b"], ["action"])
    theirs.distribution_class = Wild  # type: ignore[assignment]  # any class
    (step,) = steps_of(theirs)
    with pytest.raises(NotExportable, match="`Wild` has neither a mode nor a mean"):
        step.module(torch.zeros(2), torch.ones(2))
