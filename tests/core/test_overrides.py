"""What torch's own functions do with a container."""

import pytest
import torch

from kd_core import TensorDict, UnsupportedFunction, torch_functions


def torch_call(name: str, *args: object, **kwargs: object) -> TensorDict:
    """Call a torch function, whose stubs know tensors only."""
    result = getattr(torch, name)(*args, **kwargs)
    assert isinstance(result, TensorDict)
    return result


@pytest.fixture
def td() -> TensorDict:
    return TensorDict({"a": torch.arange(3.0), "b": {"c": torch.ones(3, 2)}}, [3])


def test_a_listed_function_calls_the_method(td: TensorDict) -> None:
    twin = torch_call("clone", td)
    assert twin["a"].equal(td["a"])
    assert twin["a"] is not td["a"]


def test_the_container_may_come_as_input(td: TensorDict) -> None:
    assert torch_call("clone", input=td)["b", "c"].equal(td["b", "c"])


def test_the_method_of_a_subclass_wins() -> None:
    class Twice(TensorDict):
        def clone(self, recurse: bool = True) -> "Twice":
            return Twice({"twice": 2})

    assert torch_call("clone", Twice({"a": 1}))["twice"] == 2


def test_an_unlisted_function_says_what_to_do(td: TensorDict) -> None:
    with pytest.raises(UnsupportedFunction, match=r"`torch.lu`.* `td.apply\(torch.lu\)`"):
        torch_call("lu", td)


def test_listed_functions_are_sorted_by_name() -> None:
    names = torch_functions()
    assert names == sorted(names)
    assert "torch.clone" in names
