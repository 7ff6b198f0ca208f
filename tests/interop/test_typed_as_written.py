"""Classes as users write them do what they do in the peer, use by use."""

from fnmatch import fnmatchcase
from typing import Any, Final

import pytest
from tests.interop.calls.outcomes import difference, outcome
from tests.interop.calls.subjects import Library

pytest.importorskip("tensordict")

import tensordict
import tensordict.nn
import torch

import kd_core  # the peer is there
import kd_nn

OURS: Final = Library("kd", kd_core, kd_nn)
PEER: Final = Library("peer", tensordict, tensordict.nn)
HEAD: Final = """
import copy
import dataclasses
from dataclasses import field
from typing import Any, Generic, Optional, TypeVar
import torch
from torch import Tensor
T = TypeVar("T")
X = torch.arange(3.0)
"""
CLASSES: Final[dict[str, str]] = {
    "data": "class C(TensorClass):\n data: Tensor\nmake = lambda: C(data=X, batch_size=[3])",
    "names of methods": "class C(TensorClass):\n nested: Tensor\n fields: Any = None\n _cache: Any = None\nmake = lambda: C(nested=X, batch_size=[3])",
    "decorated data": "@tensorclass\nclass C:\n data: Tensor\n _cache: Any = None\nmake = lambda: C(data=X, batch_size=[3])",
    "own init": "@tensorclass\nclass C:\n x: Tensor\n def __init__(self, x):\n  self.x = x\nmake = lambda: C(X)",
    "own init with batch": "@tensorclass\nclass C:\n x: Tensor\n y: Tensor\n def __init__(self, x):\n  self.x = x\n  self.y = x + 1\n  self.batch_size = [3]\nmake = lambda: C(X)",
    "post init": "class C(TensorClass):\n x: Tensor\n y: Any = None\n def __post_init__(self):\n  self.y = self.x * 2\nmake = lambda: C(x=X, batch_size=[3])",
    "own setattr": "class C(TensorClass):\n x: Tensor\n def __setattr__(self, name, value):\n  super().__setattr__(name, value + 1 if name == 'x' else value)\nmake = lambda: C(x=X, batch_size=[3])",
    "property": "class C(TensorClass):\n x: Tensor\n @property\n def double(self): return self.x * 2\nmake = lambda: C(x=X, batch_size=[3])",
    "super": "class B(TensorClass):\n x: Tensor\n def f(self): return self.x\nclass C(B):\n y: Tensor\n def f(self): return super().f() + self.y\nmake = lambda: C(x=X, y=X, batch_size=[3])",
    "nested class": "class N(TensorClass):\n x: Tensor\nclass C(TensorClass):\n n: N\n s: str = 'w'\nmake = lambda: C(n=N(x=X, batch_size=[3]), batch_size=[3])",
    "optional": "class C(TensorClass):\n x: Tensor\n n: Optional[Tensor] = None\nmake = lambda: C(x=X, batch_size=[3])",
    "dict": "class C(TensorClass):\n x: Tensor\n d: dict = None\nmake = lambda: C(x=X, d={'a': X}, batch_size=[3])",
    "plain values": "class C(TensorClass):\n x: Tensor\n d: object = None\n k: int = 3\n s: str = 'a'\nmake = lambda: C(x=X, d=(1, 2), batch_size=[3])",
    "list": "class C(TensorClass):\n x: Tensor\n w: list = None\nmake = lambda: C(x=X, w=['a', 'b', 'c'], batch_size=[3])",
    "factory": "class C(TensorClass):\n x: Tensor = field(default_factory=lambda: X)\nmake = lambda: C(batch_size=[3])",
    "generic": "class C(TensorClass, Generic[T]):\n x: T\nmake = lambda: C(x=X, batch_size=[3])",
    "class getitem": "@tensorclass\nclass C:\n x: Tensor\n @classmethod\n def __class_getitem__(cls, key): return key\nmake = lambda: C(x=X, batch_size=[3])",
    "names": "class C(TensorClass):\n x: Tensor\nmake = lambda: C(x=X, batch_size=[3], names=['t'])",
    "lock": "class C(TensorClass):\n x: Tensor\nmake = lambda: C(x=X, batch_size=[3], lock=True)",
    "device": "class C(TensorClass):\n x: Tensor\nmake = lambda: C(x=X, batch_size=[3], device='cpu')",
    "autocast": "class C(TensorClass['autocast']):\n x: Tensor\n k: int = 0\nmake = lambda: C(x=[1.0, 2.0, 3.0], k='3')",
    "nocast": "class C(TensorClass['nocast']):\n x: Any\nmake = lambda: C(x=1)",
    "frozen": "class C(TensorClass['frozen']):\n x: Tensor\nmake = lambda: C(x=X, batch_size=[3])",
    "tensor only": "class C(TensorClass['tensor_only']):\n x: Tensor\n n: Optional[Tensor] = None\nmake = lambda: C(x=X, batch_size=[3])",
    "shadow": "@tensorclass(shadow=True)\nclass C:\n x: Tensor\n batch_dims: Any = None\nmake = lambda: C(x=X, batch_size=[3])",
    "class variable": "class C(TensorClass):\n x: Tensor\n scale = 3\n def f(self): return self.x * self.scale\nmake = lambda: C(x=X, batch_size=[3])",
    "static method": "class C(TensorClass):\n x: Tensor\n @staticmethod\n def of(x): return C(x=x, batch_size=[3])\nmake = lambda: C.of(X)",
    "class method": "class C(TensorClass):\n x: Tensor\n @classmethod\n def of(cls, x): return cls(x=x, batch_size=[3])\nmake = lambda: C.of(X)",
    "typed": "class C(TypedTensorDict):\n x: Tensor\n y: Tensor\nmake = lambda: C(x=X, y=X, batch_size=[3])",
    "typed child": "class B(TypedTensorDict):\n x: Tensor\nclass C(B):\n y: Tensor\n def f(self): return self.x + self.y\nmake = lambda: C(x=X, y=X, batch_size=[3])",
}  # fmt: skip
USES: Final = (
    *("c", "c[0]", "c[:2]", "torch.stack([c, c])", "torch.cat([c, c])", "c.clone()", "c + 1"),
    *("c.to_tensordict()", "c.to_dict()", "list(c.keys())", "c.batch_size", "c.device", "c.names"),
    *("c.f()", "c.double", "c.x", "c.n", "c.d", "c.k", "c.w", "c.y", "c.data", "c.nested"),
    *("c.unsqueeze(0)", "c.reshape(-1)", "c == c", "c.get('x')", "c.set('x', c.get('x') + 1)"),
    *("c.is_locked", "c.to(torch.float64)", "lazy_stack([c, c])", "is_tensorclass(c)"),
    *("[f.name for f in dataclasses.fields(c)]", "dataclasses.replace(c, x=X + 1).x"),
    *("dataclasses.is_dataclass(C)", "C.from_dict({'x': X})", "c.apply(torch.neg)", "C.fields()"),
    *("C.from_tensordict(c.to_tensordict())", "setattr(c, 'x', X * 5)", "setattr(c, 'n', X)"),
    *("setattr(c, 'd', 3)", "c.unbind(0)[0]", "c.split(1)[0]", "c.lock_()", "c.zero_()"),
    *("c.update({'x': X})", "c.squeeze()", "c.expand(2, 3)", "c.state_dict()", "c.detach()"),
    *("c.values()", "list(c.items())", "copy.deepcopy(c)", "copy.copy(c)", "c.is_empty()"),
    *("len(c)", "C[1, 2]", "c.__setitem__(0, c[1])", "c.named_apply(lambda n, x: x * 2)"),
    *("torch.zeros_like(c)", "c.gather(0, torch.tensor([0, 1]))", "c.select('x')", "c.numel()"),
    *("c.exclude('x')", "c.flatten_keys()"),
)


DECIDED: Final[dict[str, str]] = {
    "post init: * moved: '.y' != 'new'": "`__post_init__` runs when a program makes an instance",
    "post init: * result: '.y' != 'new'": "`__post_init__` runs when a program makes an instance",
    "post init: c + 1: result: 1.0 != 2.0": "`__post_init__` runs when a program makes an instance",
    "post init: c == c: *": "`__post_init__` runs when a program makes an instance",
    "post init: c.select('x'): *": "`__post_init__` runs when a program makes an instance",
    "names: c == c: result: names *": "comparisons drop names there",
}
"""Differences that are on purpose, and what row of `differences.toml` says so."""


class Beside:
    """A library whose typed classes are those that a program has written."""

    def __init__(self, lib: Library, names: dict[str, Any]) -> None:
        self.lib = lib
        declared = not issubclass(names["C"], lib.TypedTensorDict)  # lazy stacks are none there
        self.Based = names["C"] if declared else lib.Based
        self.Decorated = names.get("N", self.Based)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lib, name)


def made(lib: Library, text: str) -> dict[str, Any]:
    names: dict[str, Any] = {
        each: getattr(lib, each)
        for each in (
            "TensorClass",
            "TypedTensorDict",
            "tensorclass",
            "lazy_stack",
            "is_tensorclass",
        )
    }
    exec(HEAD + text, names)  # our own text
    return names


def seen(lib: Library, names: dict[str, Any], use: str) -> dict[str, Any]:
    names["X"] = torch.arange(3.0)  # what an earlier use may have written
    names["c"] = names["make"]()
    beside: Any = Beside(lib, names)
    return outcome(lambda: eval(use, names), names["c"], beside)


def differences(written: str) -> list[str]:
    """Return the uses of a class that differ, but for those on purpose."""
    here, there = made(OURS, CLASSES[written]), made(PEER, CLASSES[written])
    found: list[str] = []
    for use in USES:
        ours, theirs = seen(OURS, here, use), seen(PEER, there, use)
        differs = difference(ours, theirs)
        if differs is None or "has no attribute" in theirs.get("text", ""):
            continue
        told = f"{written}: {use}: {differs}"
        if not any(fnmatchcase(told, pattern) for pattern in DECIDED):
            found.append(told)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("written", CLASSES)
def test_a_class_as_users_write_it_does_what_it_does_there(written: str) -> None:
    found = differences(written)
    assert found == []
