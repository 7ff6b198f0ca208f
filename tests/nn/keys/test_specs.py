"""What `in_keys` and `out_keys` may look like: odd strings, and argument names in Unicode."""

import enum
import inspect
from collections import OrderedDict

import pytest
import torch
from tests.strings import STRINGS, Loud, Mixed
from torch import Tensor, nn

from kd_core import InvalidKey, NestedKey, TensorDict, unravel_key_to_tuple
from kd_nn import DispatchError, TensorDictModule, TensorDictSequential

X = torch.ones(2)


def same(value: object, number: float) -> bool:
    return isinstance(value, Tensor) and bool((value == number).all())


@pytest.mark.parametrize(("a", "b"), STRINGS)
def test_keys_and_argument_names_are_plain_strings(a: str, b: str) -> None:
    reads: dict[str, NestedKey] = {"input": a, "other": (a, b)}
    module = TensorDictModule(torch.sub, reads, [b, (b, a)])
    keys = [*module.in_keys, *module.out_keys]
    assert keys == ["a", ("a", "b"), "b", ("b", "a")]
    assert {type(part) for key in keys for part in unravel_key_to_tuple(key)} == {str}
    named = TensorDictModule(torch.neg, {"input": "x"}, ["y"]).select_out_keys(Loud("y"))
    assert [type(key) for key in named.out_keys] == [str]


@pytest.mark.parametrize(("a", "b"), STRINGS)
def test_odd_strings_run_at_every_call(a: str, b: str) -> None:
    model = TensorDictSequential(
        {
            a: TensorDictModule(nn.Identity(), [a], [(b, a)]),
            b: TensorDictModule(torch.neg, {"input": (b, a)}, ["c"]),
        }
    )
    for _ in range(4):
        assert same(model(a=X)[1], -1)
        assert same(model(TensorDict({a: X}))["c"], -1)
    assert [name for name, _ in model._kd_named_steps()] == ["a", "b"]


def test_names_of_members_may_be_odd_strings() -> None:
    inner = nn.Sequential(OrderedDict({Loud("first"): nn.Identity(), Mixed.B: nn.ReLU()}))
    model = TensorDictSequential({"a": TensorDictModule(inner, ["x"], ["y"])})
    model.module[Loud("b")] = TensorDictModule(torch.neg, ["y"], ["z"])  # type: ignore[index]  # named
    for _ in range(4):
        assert same(model(x=X)[1], -1)
        assert same(model(TensorDict({"x": X}))["z"], -1)


def test_a_method_may_be_a_member_of_an_enumeration() -> None:
    class Method(str, enum.Enum):  # noqa: UP042 - prints another text than a `StrEnum`
        RUN = "run"

    class Inner(nn.Module):
        def run(self, x: Tensor) -> Tensor:
            return -x

    module = TensorDictModule(Inner(), ["x"], ["y"], method=Method.RUN)
    for _ in range(4):
        assert same(module(x=X), -1)
    assert module._kd_node_label == "Inner.run"


MICRO, MU = "\N{MICRO SIGN}", "\N{GREEK SMALL LETTER MU}"


@pytest.mark.parametrize("key", [MICRO, MU])
@pytest.mark.parametrize("name", [MICRO, MU])
def test_names_that_python_takes_for_each_other_are_one(key: str, name: str) -> None:
    module = TensorDictModule(torch.neg, [key], ["y"])
    assert list(inspect.signature(module).parameters) == [MU]
    for _ in range(4):
        assert same(module(**{name: X}), -1)


def test_keys_that_become_one_name_are_given_by_position() -> None:
    module = TensorDictModule(torch.sub, [MICRO, MU], ["y"])
    for _ in range(4):
        assert same(module(X, 3 * X), -2)
        assert same(module(TensorDict({MICRO: X, MU: 3 * X}))["y"], -2)
        with pytest.raises(DispatchError, match=rf"cannot tell which key `{MU}` means.*position"):
            module(**{MICRO: X, MU: X})


def test_a_nested_dict_is_found_by_the_name_of_its_container() -> None:
    module = TensorDictModule(torch.neg, [(MICRO, "x")], ["y"])
    assert same(module(**{MICRO: {"x": X}}), -1)


def test_arguments_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidKey, match=f"names the argument `{MU}` twice"):
        TensorDictModule(torch.sub, {MICRO: "a", MU: "b"}, ["y"])


def test_the_argument_of_a_function_is_found_in_either_spelling() -> None:
    def half(µ: Tensor) -> Tensor:
        return µ / 2

    assert same(TensorDictModule(half, {MICRO: "x"}, ["y"])(x=X), 0.5)
