"""The drop-in with all packages there."""

import subprocess
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
"""


PLACES = """
from tensordict.nn.tensorclass_module import TensorClassModuleBase
from tensordict.prototype import symbolic_trace
from tensordict.prototype.fx import TDGraphModule, symbolic_trace as same
print(TensorClassModuleBase.__name__, symbolic_trace.__module__, same is symbolic_trace)
print(TDGraphModule.__name__)
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
    assert ran.stdout.splitlines() == ["{30: 1} [2]", "TensorDict", "raised"], ran.stderr


def test_parameters_become_a_module_without_an_import_of_modules(tmp_path: Path) -> None:
    ran = run(tmp_path, PARAMETERS)
    assert ran.stdout.splitlines() == ["True 2 (2, 3)", "True"], ran.stderr


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
