"""The drop-in with all packages there."""

import subprocess
import textwrap
from pathlib import Path

import pytest
from tests import children

PROGRAM = """
import torch
from pathlib import Path
C = cast = container_of_text = "mine"
from torch import nn
import tensordict.nn, tensordict.utils
from tensordict import *
from tensordict.nn import *
print(nn is torch.nn, callable(memmap), callable(tensorclass), TensorDictModule.__name__)
print(Path.__module__, C, cast, container_of_text)
"""

DISPATCHES = """
import torch
from tensordict.nn import dispatch
from tensordict.nn.utils import _set_dispatch_td_nn_modules
class Module(torch.nn.Module):
    in_keys, out_keys = ["x"], ["y"]
    @dispatch(source="in_keys", dest="out_keys")
    def run(self, tensordict):
        return tensordict
with _set_dispatch_td_nn_modules(False):
    print(Module().run({30: 1}), Module().run([2]))
    with _set_dispatch_td_nn_modules(True):
        print(type(Module().run({"y": 1})).__name__)
try:
    Module().run({30: 1})
except (KeyError, TypeError) as error:
    print("raised")
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
module = TensorDictModule(torch.neg, ["x"], ["y"])
def compiled(x):
    with _set_dispatch_td_nn_modules(False):
        return module(TensorDict(x=x))["y"]
print(torch.compile(compiled, backend="eager", fullgraph=True)(torch.ones(1)).item())
"""

ASKS = """
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
module = TensorDictModule(torch.nn.Linear(1, 1), ["a"], ["b"])
for value in (module, TensorDictSequential(module), torch.nn.Linear(1, 1)):
    print(hasattr(value, "no_such"), hasattr(value, "__no_such__"))
print(tuple(module.weight.shape))
"""

PARAMETERS = """
import torch
from tensordict import TensorDict
linears = [torch.nn.Linear(2, 3) for _ in range(2)]
both = TensorDict.from_modules(*linears, as_module=True)
print(isinstance(both, torch.nn.Module), len(list(both.parameters())), tuple(both["bias"].shape))
one = TensorDict.from_module(linears[0], as_module=True)
import tensordict.nn
print(type(one) is type(both) is tensordict.nn.TensorDictParams)
print(list(one._param_td.keys()))
"""

LOSS = """
import copy
from tensordict.nn import TensorDictModuleBase
class Loss(TensorDictModuleBase):
    out_keys = ["b"]
    def __init__(self):
        super().__init__()
        self._in_keys = ["a"]
    @property
    def in_keys(self):
        return self._in_keys
loss = copy.deepcopy(Loss())
print(loss.in_keys, loss.out_keys)
"""


PLACES = """
from tensordict.nn.tensorclass_module import TensorClassModuleBase
from tensordict.prototype import symbolic_trace
from tensordict.prototype.fx import TDGraphModule, symbolic_trace as same
print(TensorClassModuleBase.__name__, symbolic_trace.__module__, same is symbolic_trace)
print(TDGraphModule.__name__)
"""

SEQUENCES = """
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
class Sequence(TensorDictSequential):
    def __init__(self, *modules):
        keys = self._compute_in_and_out_keys(modules)
        super(TensorDictSequential, self).__init__(torch.nn.ModuleList(modules), *keys)
again = TensorDictModule(torch.add, ["a", "a"], ["a"])
split = TensorDictModule(lambda a, b: (a, b), ["a", ("n", "b")], ["_", "c"])
made = Sequence(again, split, again)
print(made.in_keys, made.out_keys)
print(made.in_keys == TensorDictSequential(again, split, again).in_keys)
print(made(TensorDict(a=torch.ones(1), n=TensorDict(b=torch.ones(1))))["a"].item())
"""

META = """
import dataclasses
import torch
from tensordict import TensorClass, TensorDict
from tensordict.tensorclass import _TensorClassMeta
class Meta(_TensorClassMeta):
    def __new__(mcs, name, bases, body, **options):
        for field in body.get("__annotations__", ()):
            body.setdefault(field, dataclasses.field())
        return super().__new__(mcs, name, bases, body, **options)
class Base(TensorClass["nocast", "shadow"], metaclass=Meta):
    def replaced(self, **changes):
        other = self.clone(recurse=False)
        other._tensordict._tensordict.update(changes)
        return other
class Model(Base):
    names: bytes
    dim: torch.Tensor
    size: int = 3
def read(self, name):
    if name in ("names", "dim"):
        held = object.__getattribute__(self, "__dict__").get("_tensordict")
        if held is not None and name in held.keys():
            return held[name]
    return object.__getattribute__(self, name)
Model.__getattribute__ = read
model = Model(names=b"a", dim=torch.ones(2))
other = model.replaced(size=4, dim=torch.zeros(2))
print(type(Model) is Meta, model.names, model.size, model.dim.tolist())
print(type(other) is Model, other.names, other.size, other.dim.tolist())
td = TensorDict(a=torch.ones(1))
print(list(td._tensordict), td._tensordict["a"] is td["a"], "b" in td._tensordict)
td._tensordict.update(b=torch.zeros(1), n={"c": 1})
del td._tensordict["a"]
print(list(td.keys(True)), len(td._tensordict), td._tensordict.pop("b") is None)
try:
    model.nothing
except AttributeError:
    print("raised")
"""


def run(folder: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"
    path.write_text(program, encoding="utf-8")
    return children.run("-W", "ignore", "-m", "kd_core.drop_in", *options, path)


def test_a_star_import_brings_all_names_but_no_modules(tmp_path: Path) -> None:
    ran = run(tmp_path, PROGRAM)
    expected = ["True True True TensorDictModule", "pathlib mine mine mine"]
    assert ran.stdout.splitlines() == expected, ran.stderr


def test_methods_get_what_they_are_called_with(tmp_path: Path) -> None:
    ran = run(tmp_path, DISPATCHES)
    assert ran.stdout.splitlines() == ["{30: 1} [2]", "TensorDict", "raised", "-1.0"], ran.stderr


def test_parameters_become_a_module_without_an_import_of_modules(tmp_path: Path) -> None:
    ran = run(tmp_path, PARAMETERS)
    expected = ["True 2 (2, 3)", "True", "['weight', 'bias']"]
    assert ran.stdout.splitlines() == expected, ran.stderr


def test_a_module_that_keeps_in_keys_as_tensordict_does_is_copied(tmp_path: Path) -> None:
    """As the losses of TorchRL."""
    ran = run(tmp_path, LOSS)
    assert ran.stdout.splitlines() == ["['a'] ['b']"], ran.stderr


def test_names_are_in_the_modules_where_programs_look_for_them(tmp_path: Path) -> None:
    result = run(tmp_path, PLACES)
    expected = ["TensorClassModuleBase kd_nn.fx True", "TracedModule"]
    assert result.stdout.splitlines() == expected, result.stderr


def test_the_report_lists_attributes_that_modules_lack(tmp_path: Path) -> None:
    ran = run(tmp_path, ASKS, "--report")
    assert ran.stdout.splitlines() == ["False False"] * 3 + ["(1, 1)"], ran.stderr
    assert ran.stderr.splitlines() == [
        "kd: 2 names that the program asked for are missing:",
        "  TensorDictModule.no_such      1",
        "  TensorDictSequential.no_such  1",
    ]


RESTORED = """
import copy, pickle
import torch
from tensordict import TensorDict, TensorDictParams
{imports}

class Mine(TensorDict):
    pass

params = TensorDictParams(TensorDict(w=torch.ones(2), n={{"b": torch.ones(1)}}))
net = torch.nn.Linear(2, 1)
net.params, net.mine = params, Mine(a=torch.ones(2))
net.mine.note = "own"
for made in (copy.deepcopy(net), copy.copy(net), pickle.loads(pickle.dumps(net))):
    print(type(made.params).__name__, made.params["n", "b"].item(), made.mine.note)
"""


@pytest.mark.parametrize("imports", ["", "import tensordict.nn"])
def test_states_of_kd_and_of_the_program_are_restored(imports: str, tmp_path: Path) -> None:
    ran = run(tmp_path, RESTORED.format(imports=imports))
    assert ran.stdout.splitlines() == ["TensorDictParams 1.0 own"] * 3, ran.stderr


def test_compiled_programs_read_instances_wherever_they_are_held(tmp_path: Path) -> None:
    program = """
        import torch
        from tensordict import TensorClass, TensorDict, lazy_stack, tensorclass
        from tensordict.nn import TensorDictParams

        @tensorclass
        class Leg:
            a: torch.Tensor

            def twice(self):
                return self.a * 2

        @tensorclass
        class Mask:
            x: torch.Tensor
            leg: Leg
            note: str = "w"

            def both(self):
                return self.x + self.leg.twice() + len(self.note)

        class Wide(TensorClass):
            x: torch.Tensor
            leg: Leg

            def both(self):
                return self.x + self.leg.twice()

        class Wider(Wide):
            y: torch.Tensor = None

            def both(self):
                return super().both() + self.y

        def leg():
            return Leg(a=torch.ones(3), batch_size=[3])

        def run(m, x):
            new = m.clone()
            new.x = x
            new.set("leg", m.leg)
            sums = [m[:2].both(), m.to(torch.float64).both(), (m + 1).both(), new.both()]
            return [x + m.leg.a, x + m.get("x"), x + m.get("leg").twice(), x + m.both(), *sums]

        def read(m, x):
            held = m.to("cpu")
            return [x + m.leg.a, x + m.get("x"), x + m.both(), x[:2] + m[:2].leg.twice(), held.x]

        def look(m, x):
            return [x + m["x"], x + m["leg", "a"], x[:2] + m[:2]["x"], (m + 1)["x"]]

        class Held(torch.nn.Module):
            def __init__(self, value, function):
                super().__init__()
                self.value, self.values, self.named = value, [value], {"v": value}
                self.within = TensorDict({"v": value}, batch_size=[3])
                self.function = function

            def forward(self, x, given):
                places = self.value, self.values[0], self.named["v"], self.within["v"], given, m
                return [each for place in places for each in self.function(place, x)]

        row = Wide(x=torch.ones(()), leg=Leg(a=torch.ones(())))
        plain = TensorDict(x=torch.ones(3), leg=TensorDict(a=torch.ones(3)), batch_size=[3])
        torch._dynamo.config.error_on_recompile = True
        for m, function in (
            (leg(), lambda m, x: [x + m.a, x + m.twice(), x + m.get("a")]),
            (Mask(x=torch.ones(3), leg=leg(), batch_size=[3]), run),
            (Wide(x=torch.ones(3), leg=leg(), batch_size=[3]), run),
            (Wider(x=torch.ones(3), leg=leg(), y=torch.ones(3), batch_size=[3]), run),
            (lazy_stack([row, row, row]), read),
            (plain, look),
            (lazy_stack([plain[0], plain[1], plain[2]]), look),
            (TensorDictParams(plain), look),
        ):
            torch._dynamo.reset()
            module, x = Held(m, function), torch.arange(3.0)
            compiled = torch.compile(module, backend="eager", fullgraph=True)
            same = True
            for _ in range(2):
                pairs = zip(compiled(x, m), module(x, m), strict=True)
                same = same and all(torch.equal(one, other) for one, other in pairs)
            print(type(m).__name__, same)
        """
    ran = run(tmp_path, textwrap.dedent(program))
    assert ran.stdout.splitlines() == [
        "Leg True",
        "Mask True",
        "Wide True",
        "Wider True",
        "LazyStackedWide True",
        "TensorDict True",
        "LazyStackedTensorDict True",
        "TensorDictParams True",
    ], ran.stderr


def test_a_sequence_computes_its_keys_before_it_is_made(tmp_path: Path) -> None:
    printed = run(tmp_path, SEQUENCES).stdout.splitlines()
    assert printed == ["['a', ('n', 'b')] ['_', 'c', 'a']", "True", "4.0"]


def test_classes_of_a_metaclass_below_that_of_tensor_classes(tmp_path: Path) -> None:
    ran = run(tmp_path, META)
    assert ran.stdout.splitlines() == [
        "True b'a' 3 [1.0, 1.0]",
        "True b'a' 4 [0.0, 0.0]",
        "['a'] True False",
        "['b', 'n', ('n', 'c')] 2 False",
        "raised",
    ], ran.stderr
