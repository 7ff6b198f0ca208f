"""Check one distribution that is installed alone from its wheel.

    python tools/check_wheel.py kd-nn

Runs in a clean environment without extras, where a name that was only found because another
package of this repository lay beside it would be missing.
"""

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = ("kd-core", "kd-nn", "kd-probabilistic", "kd-export")

# What a wheel alone cannot do, and the install line that the error must hold.
WITHOUT_KD_NN = """
import torch
from kd_core import TensorDict
TensorDict.from_module(torch.nn.Linear(1, 1), as_module=True)
"""
WITHOUT_ONNX = """
import kd_export, torch
from kd_nn import TensorDictModule
module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
kd_export.save(module, "never-written.onnx", {"x": torch.zeros(2, 3)})
"""
REMEDIES = {
    "kd-core": (WITHOUT_KD_NN, "pip install kd-nn"),
    "kd-export": (WITHOUT_ONNX, 'pip install "kd-export[onnx]"'),
}


def declared(distribution: str) -> set[str]:
    """Return the siblings that `distribution` asks for, itself included."""
    wanted = {distribution}
    for line in importlib.metadata.requires(distribution) or ():
        requirement = Requirement(line)
        if requirement.name in DISTRIBUTIONS and "extra" not in str(requirement.marker or ""):
            wanted |= declared(requirement.name)
    return wanted


def import_name(distribution: str) -> str:
    """Return the name that `distribution` is imported by."""
    return distribution.replace("-", "_")


def complaints(distribution: str) -> list[str]:
    """Return what is wrong with the installed `distribution`, as sentences."""
    found = []
    module = importlib.import_module(import_name(distribution))
    home = Path(str(module.__file__)).parent
    version = (ROOT / "VERSION").read_text(encoding="utf-8").strip()
    if home.is_relative_to(ROOT / "packages"):
        found.append(f"{home} is the source tree, not an installed wheel")
    for said in (module.__version__, importlib.metadata.version(distribution)):
        if said != version:
            found.append(f"{distribution} says it is {said}, VERSION says {version}")
    if not (home / "py.typed").is_file():
        found.append(f"{home} lacks py.typed")
    wanted = declared(distribution)
    for sibling in DISTRIBUTIONS:
        present = importlib.util.find_spec(import_name(sibling)) is not None
        if present != (sibling in wanted):
            found.append(f"{sibling} is {'present' if present else 'absent'}, declared: {wanted}")
    return found + unhelpful(distribution)


def unhelpful(distribution: str) -> list[str]:
    """Return where a missing dependency is not answered with the install line."""
    if distribution not in REMEDIES:
        return []
    program, remedy = REMEDIES[distribution]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", program]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode and remedy in result.stderr:
        return []
    return [f"expected an error that says `{remedy}`, got:\n{result.stderr}"]


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in DISTRIBUTIONS:
        sys.exit(__doc__)
    wrong = complaints(sys.argv[1])
    print("\n".join(wrong) or f"{sys.argv[1]}: the wheel alone is in order")
    sys.exit(bool(wrong))
