"""Roles that few programs need are filled when they are first used."""

import pytest
from tests import children

from kd_core import _registry

PROGRAM = """
import sys
from kd_core import _registry
assert {module!r} not in sys.modules
assert callable(_registry.{role})
assert {module!r} in sys.modules
"""


@pytest.mark.parametrize("role", _registry.LATER)
def test_a_role_is_filled_at_its_first_use(role: str) -> None:
    children.check_output("-c", PROGRAM.format(role=role, module=_registry.LATER[role]))


def test_an_unknown_role_is_an_attribute_error() -> None:
    name = "write_h6"
    with pytest.raises(AttributeError, match="has no attribute 'write_h6'"):
        getattr(_registry, name)


def test_a_dataclass_is_read_before_a_tensor_class_was_declared() -> None:
    out = children.check_output(
        "-c",
        "import dataclasses, torch\n"
        "from kd_core import TensorDict\n"
        "@dataclasses.dataclass\n"
        "class Point:\n"
        "    x: torch.Tensor\n"
        "read = TensorDict.from_dataclass(Point(torch.ones(2)), as_tensorclass=True)\n"
        "print(type(read).__name__, read.x.tolist())\n",
    )
    assert out == "Point_tc [1.0, 1.0]\n"
