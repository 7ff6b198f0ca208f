"""What programs give to keyed modules beside containers and keyed steps."""

import copy
import pickle
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from kd_core import ShapeMismatch, TensorDict
from kd_nn import InputMissing, NotKeyed, TensorDictModule, TensorDictSequential, WrapModule

X = torch.arange(6.0).view(2, 3)


class Noisy(nn.Module):
    def forward(self, a: Tensor, b: Tensor | None = None, noise: float = 0) -> Tensor:
        return (a if b is None else a + b) + noise


def td(**more: Tensor) -> TensorDict:
    return TensorDict({"x": X.clone(), **more}, [2])


def double(container: TensorDict) -> TensorDict:
    return container.set("y", container["x"] * 2)


def test_functions_of_a_container_are_steps() -> None:
    after = TensorDictModule(torch.neg, ["y"], ["z"])
    model = TensorDictSequential(double, after)  # type: ignore[arg-type]  # a function
    for _ in range(3):
        given = td()
        assert model(given) is given
        assert torch.equal(given["z"], -2 * X)
    assert isinstance(model[0], WrapModule)
    assert model.out_keys == ["z"]
    named = TensorDictSequential({"a": double, "b": after})  # type: ignore[dict-item]  # a function
    assert torch.equal(named(td())["z"], -2 * X)
    assert torch.equal(model.append(lambda t: t.set("q", t["z"]))(td())["q"], -2 * X)  # type: ignore[arg-type]  # a function


def test_a_function_may_return_another_container() -> None:
    model = TensorDictSequential(
        lambda t: TensorDict(q=t["x"]),  # type: ignore[arg-type]  # a function
        TensorDictModule(torch.neg, ["q"], ["z"]),
    )
    given = td()
    assert list(model(given).keys()) == ["q", "z"]
    assert list(given.keys()) == ["x"]


@pytest.mark.parametrize("step", [nn.ReLU(), 3, nn.Linear])
def test_what_cannot_take_a_container_is_refused(step: Any) -> None:
    with pytest.raises(NotKeyed):
        TensorDictSequential(step)


@pytest.mark.parametrize("in_keys", [["x", "b"], {"a": "x", "b": "b"}])
def test_an_input_that_is_missing_takes_its_default(in_keys: Any) -> None:
    module = TensorDictModule(Noisy(), in_keys, ["y"])
    model = TensorDictSequential(module)
    for _ in range(3):
        assert torch.equal(module(td())["y"], X)
        assert torch.equal(model(td())["y"], X)
        assert torch.equal(cast(Tensor, module(x=X)), X)
        assert torch.equal(module(td(b=X))["y"], 2 * X)
    with pytest.raises(InputMissing, match="reads `q`"):
        TensorDictModule(Noisy(), ["q", "b"], ["y"])(td())


def test_further_arguments_go_to_what_is_wrapped() -> None:
    module = TensorDictModule(Noisy(), ["x"], ["y"])
    for _ in range(3):
        assert torch.equal(module(td(), noise=2)["y"], X + 2)
        assert torch.equal(module(X, noise=2), X + 2)  # type: ignore[call-overload]  # an argument of the module
        assert torch.equal(module(td())["y"], X)
    fixed = TensorDictModule(Noisy(), ["x"], ["y"], method_kwargs={"noise": 5})
    assert torch.equal(fixed(td(), noise=2)["y"], X + 5)
    with pytest.raises(TypeError):
        module(td(), foo=2)
    with pytest.raises(TypeError, match="no argument `foo`"):
        module(x=X, foo=2)  # type: ignore[call-overload]  # wrong on purpose


def test_a_plain_dict_is_a_container() -> None:
    module = TensorDictModule(torch.neg, ["x"], [("n", "y")])
    for model in (module, TensorDictSequential(module)):
        given = {"x": X}
        made = cast(TensorDict, model(given))
        assert torch.equal(made["n", "y"], -X)
        assert list(given) == ["x"]


@pytest.mark.parametrize("inplace", [False, "empty"])
def test_a_step_that_does_not_write_in_place_starts_a_new_container(inplace: Any) -> None:
    first = TensorDictModule(torch.neg, ["x"], ["y"], inplace=inplace)
    last = TensorDictModule(torch.exp, ["y"], ["z"])
    model = TensorDictSequential(first, last)
    for _ in range(3):
        given = td()
        made = model(given)
        assert list(made.keys()) == ["y", "z"]
        assert list(given.keys()) == ["x"]
    given = td()
    later = TensorDictModule(torch.exp, ["y"], ["z"], inplace=inplace)
    kept = TensorDictSequential(TensorDictModule(torch.neg, ["x"], ["y"]), later)
    assert list(kept(given).keys()) == ["z"]
    assert list(given.keys()) == ["x", "y"]
    assert list(TensorDictSequential(first, later, inplace=True)(given).keys()) == ["x", "y", "z"]


class Fixed(TensorDictSequential):
    """A sequence whose constructor takes something else."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.tag = "mine"


class Built(TensorDictSequential):
    def __init__(self, width: int) -> None:
        first = TensorDictModule(nn.Linear(3, width), ["x"], ["h"])
        super().__init__(first, TensorDictModule(nn.Linear(width, 2), ["h"], ["y"]))


def test_outputs_that_do_not_fit_the_input_leave_it_as_it_was() -> None:
    steps: list[Any] = [
        TensorDictModule(torch.neg, ["x"], ["a"]),
        lambda container: TensorDict({"a": container["a"][:1]}),
        TensorDictModule(torch.exp, ["a"], ["b"]),
    ]
    given = td()
    with pytest.raises(ShapeMismatch):
        TensorDictSequential(*steps, inplace=True)(given)
    assert list(given.keys()) == ["x"]


def test_parts_of_a_subclass_are_of_its_class() -> None:
    built = Built(4)
    fixed = Fixed(*built)
    for model in (built, fixed):
        model(td())
        for part in (model[:1], model.select_subsequence(out_keys=["h"])):
            assert type(part) is type(model)
            assert len(part) == 1
            assert part[0] is model[0]
            assert list(part(td()).keys()) == ["x", "h"]
            part.eval()
        assert len(model) == 2
        assert model.training
        assert list(model(td()).keys()) == ["x", "h", "y"]
    assert fixed[:1].tag == "mine"
    assert len(pickle.loads(pickle.dumps(fixed[1:]))) == len(copy.deepcopy(fixed[1:])) == 1
