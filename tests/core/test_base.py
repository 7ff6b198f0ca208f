"""What the public base class says of itself."""

import abc
import ast
import inspect

import pytest
import torch

import kd_core
from kd_core import (
    LazyStackedTensorDict,
    TensorCollection,
    TensorDict,
    TensorDictBase,
    _base,
    is_tensor_collection,
    lazy_stack,
)


def test_an_error_of_arguments_names_the_public_class() -> None:
    with pytest.raises(TypeError, match=r"^TensorDictBase\.to_dict\(\) takes 1 positional"):
        TensorDict().to_dict(1)  # type: ignore[call-arg, arg-type]  # what is refused
    with pytest.raises(TypeError, match=r"^TensorDictBase\.from_list\(\) missing 1 required"):
        TensorDict.from_list()  # type: ignore[call-arg]  # as above


def test_the_list_of_methods_has_all_of_each_concern() -> None:
    source = ast.parse(inspect.getsource(_base))
    classes = {each.name: each for each in ast.walk(source) if isinstance(each, ast.ClassDef)}
    settled = {"__module__", "__doc__", "__slots__", "__annotations__"}
    for name in classes["Concerns"].bases:
        for member, value in vars(getattr(_base, ast.unparse(name))).items():
            if member not in settled:
                settled.add(member)
                assert vars(TensorDictBase)[member] is value


def test_the_source_of_methods_is_found_and_that_of_a_class_is_not() -> None:
    assert TensorDict.__module__ == "kd_core"
    assert inspect.getsource(TensorDict.clone).lstrip().startswith("def clone(")
    with pytest.raises(OSError, match=r"could not find class definition|not available"):
        inspect.getsource(TensorDict)


def test_a_container_has_the_methods_of_the_concerns_and_not_their_classes() -> None:
    names = [kind.__name__ for kind in TensorDict.__mro__]
    assert names == ["TensorDict", "Dense", "TensorDictBase", "AbstractContainer", "Node", "object"]
    with pytest.raises(TypeError, match="unhashable"):
        hash(TensorDict())


def test_a_kind_can_be_an_abstract_base_class() -> None:
    class Abstract(TensorDict, abc.ABC):
        @abc.abstractmethod
        def name(self) -> str: ...

    class Real(Abstract):
        def name(self) -> str:
            return "real"

    assert type(TensorDict) is type
    assert Real({"a": 1.0}).name() == "real"


def test_the_name_of_tensordict_is_that_of_all_kinds() -> None:
    found: TensorCollection = lazy_stack([TensorDict()])
    assert isinstance(found, TensorCollection)
    assert is_tensor_collection(found)
    assert not isinstance({}, TensorCollection)


@pytest.mark.parametrize("kind", [TensorDict, LazyStackedTensorDict])
@pytest.mark.parametrize("name", ["stack", "cat", "lazy_stack", "maybe_dense_stack"])
def test_containers_are_combined_by_functions_of_each_class(
    kind: type[TensorDict], name: str
) -> None:
    rows = [TensorDict({"a": torch.full((2, 3), float(n))}, [2, 3]) for n in range(2)]
    found, expected = getattr(kind, name)(rows, 1), getattr(kd_core, name)(rows, 1)
    assert type(found) is type(expected)
    assert found.batch_size == expected.batch_size
    assert found["a"].equal(expected["a"])
    out = TensorDict({"a": torch.zeros(expected.batch_size)}, expected.batch_size)
    assert getattr(kind, name)(rows, dim=1, out=out) is out
    assert out["a"].equal(expected["a"])


def test_classes_of_containers_are_told_as_is_leaf_needs_it() -> None:
    assert is_tensor_collection(TensorDict)
    assert is_tensor_collection(LazyStackedTensorDict)
    assert not is_tensor_collection(torch.Tensor)
    assert not is_tensor_collection(dict)
