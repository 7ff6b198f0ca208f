"""Check one distribution that is installed alone from its wheel.

    python tools/check_wheel.py kd-nn

Runs in a clean environment without extras, where a name that was only found because another
package of this repository lay beside it would be missing.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = ("kd-core", "kd-nn", "kd-probabilistic", "kd-export")


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
    """Return what is wrong with the installed `distribution`, in sentences."""
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
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in DISTRIBUTIONS:
        sys.exit(__doc__)
    wrong = complaints(sys.argv[1])
    print("\n".join(wrong) or f"{sys.argv[1]}: the wheel alone is in order")
    sys.exit(bool(wrong))
