"""The contract of containers for classes whose fields hide every public name of a container.

The tests of `kd_core.testing` call methods of containers, which fields of these classes hide. So
they are read as source here, and each `td.name` in them becomes a look-up that does not see fields;
kd itself runs as it is.
"""

import ast
import inspect
import sys
import types
from collections.abc import Mapping

from torch import Tensor

from kd_core import (
    LazyStackedTensorDict,
    TensorClass,
    TensorDict,
    TensorDictBase,
    TypedTensorDict,
    testing,
)
from kd_core.testing import ContainerContract

SPREADS = ("test_it_spreads_like_a_mapping",)
"""Tests in which Python itself calls `keys`."""
MODULE = "tests.core.hidden_contract"


def unhidden(owner: object, name: str) -> object:
    """Return an attribute as if no field of a container had its name."""
    if isinstance(owner, TensorDictBase) and not name.startswith("_"):
        kind = type(owner)._kd_engine
        return inspect.getattr_static(kind, name).__get__(owner, type(owner))
    return getattr(owner, name)


def put(owner: object, name: str, value: object) -> None:
    """Set an attribute as if no field of a container had its name."""
    if isinstance(owner, TensorDictBase):
        inspect.getattr_static(type(owner)._kd_engine, name).__set__(owner, value)
    else:
        setattr(owner, name, value)


class Looks(ast.NodeTransformer):
    """Replaces attributes by calls of `unhidden` and `put`."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            return node
        return ast.Call(ast.Name("unhidden", ast.Load()), [node.value, ast.Constant(node.attr)], [])

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        self.generic_visit(node)
        target = node.targets[0]
        if not isinstance(target, ast.Attribute):
            return node
        given = [target.value, ast.Constant(target.attr), node.value]
        return ast.Expr(ast.Call(ast.Name("put", ast.Load()), given, []))


def contract(name: str) -> type:
    """Return a class of the contract whose tests do not see fields."""
    tree = ast.fix_missing_locations(Looks().visit(ast.parse(inspect.getsource(testing))))
    module = types.ModuleType(MODULE)
    vars(module).update(unhidden=unhidden, put=put, getattr=unhidden)
    sys.modules[MODULE] = module
    exec(compile(tree, "<the contract, rewritten>", "exec"), vars(module))
    found: type = getattr(module, name)
    for spread in SPREADS:
        setattr(found, spread, None)
    return found


def _public() -> list[str]:
    kinds = (TensorClass, TypedTensorDict, TensorDict, LazyStackedTensorDict)
    named = {(kind, name) for kind in kinds for name in dir(kind) if not name.startswith("_")}
    names = {name for kind, name in named if hasattr(kind, name)}  # others explain a mistake
    return sorted(names - {"batch_size"})


def _class(base: type, own: Mapping[str, object]) -> type:
    annotations = {**own, **dict.fromkeys(_public(), object)}
    body: dict[str, object] = {"__annotations__": annotations, "__module__": __name__}
    body |= dict.fromkeys(_public())
    return types.new_class("Hiding" + base.__name__, (base,), {}, lambda names: names.update(body))


HidingTensorClass = _class(TensorClass, {"a": Tensor, "b": Tensor, "n": TensorDict, "word": str})
HidingTypedTensorDict = _class(TypedTensorDict, {"word": str})


def hiding(cls: type) -> TensorDictBase:
    """Return an instance that holds the content of the contract."""
    build = inspect.getattr_static(TensorClass, "from_dict").__func__
    made: TensorDictBase = build(cls, ContainerContract.content(), [3, 4])
    return made
