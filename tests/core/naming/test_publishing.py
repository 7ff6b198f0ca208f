"""Public names: where they say that they are defined, and when they are imported."""

import pytest
from tests import children

import kd_core
from kd_core.extending import public_in


def run(program: str) -> str:
    """Return what a program prints that runs on its own: this one has imported everything."""
    return children.check_output("-c", program)


def test_a_name_is_imported_when_it_is_first_used() -> None:
    program = """
import sys, kd_core
private = "kd_core._rows"
print(private in sys.modules, "pad" in vars(kd_core))
print(kd_core.pad.__module__, private in sys.modules, kd_core.pad is vars(kd_core)["pad"])
"""
    assert run(program).splitlines() == ["False False", "kd_core True True"]


def test_a_public_module_is_an_attribute_before_it_is_imported() -> None:
    program = "import kd_core; print(kd_core.convert.to_arrow is kd_core.to_arrow)"
    assert run(program) == "True\n"


def test_a_star_imports_every_name() -> None:
    program = "from kd_core import *; import kd_core; print(set(dir(kd_core)) - set(dir()))"
    missing = set(run(program).strip("{}\n").replace("'", "").split(", "))
    assert {name for name in missing if not name.startswith("_")} == set()


def test_dir_lists_names_that_are_not_imported_yet() -> None:
    program = "import kd_core; print('pad' in dir(kd_core), 'pad' in vars(kd_core))"
    assert run(program) == "True False\n"


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kd_core' has no attribute 'padd'"):
        getattr(kd_core, "padd")  # noqa: B009  # for type checkers


def test_an_instance_is_of_a_public_class_before_the_name_is_used() -> None:
    program = """
import pickle, torch
from kd_core import TensorDict
td = TensorDict({"a": torch.zeros(2)}, [2])
layout = td.pack()[1]
print(type(layout).__module__, type(layout).unpack.__module__)
print(type(td.schema()["a"]).__module__)
print(pickle.loads(pickle.dumps(layout)) == layout)
"""
    assert run(program).splitlines() == ["kd_core kd_core", "kd_core.convert", "True"]


def test_public_in_moves_a_class_and_its_methods() -> None:
    source = "class Thing:\n    def method(self): ...\n    @classmethod\n    def made(cls): ..."
    namespace: dict[str, object] = {"__name__": "kd_core._private"}
    exec(source, namespace)
    thing = namespace["Thing"]
    assert isinstance(thing, type)
    assert public_in("kd_core")(thing) is thing
    homes = {thing.__module__, *(getattr(thing, name).__module__ for name in ("method", "made"))}
    assert homes == {"kd_core"}


@pytest.mark.parametrize(("name", "home"), [("nn", "`kd_nn`"), ("utils", "`kd_core`")])
def test_a_module_of_tensordict_names_its_package(name: str, home: str) -> None:
    with pytest.raises(AttributeError, match=f"`{name}` is not in `kd_core`. Import .*{home}"):
        getattr(kd_core, name)
