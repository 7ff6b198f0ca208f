"""Write one version into VERSION, CITATION.cff, each `__version__` and the pins between siblings.

Pins are static because a metadata hook outside a package's folder breaks building its wheel from
its sdist; `__version__` is static because `importlib.metadata` costs more than our import budget.
`tests/repo/test_versions.py` holds all of them together.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?(\.dev\d+)?")
PIN = re.compile(r'("kd-[a-z]+==)[^"]+(")')
DUNDER = re.compile(r'^(__version__(?:: \w+)? = ")[^"]+(")', re.MULTILINE)
CITATION = re.compile(r"^(version: ).+()$", re.MULTILINE)


def bump(version: str, root: Path = ROOT) -> list[Path]:
    """Write `version` everywhere it stands and return the files written."""
    if not VERSION.fullmatch(version):
        raise ValueError(f"`{version}` is not a version like 1.2.3, 1.2.3rc1 or 1.2.3.dev4")
    replacement = rf"\g<1>{version}\g<2>"
    written = [root / "VERSION"]
    written[0].write_text(version + "\n", encoding="utf-8")
    for pattern, glob in (
        (PIN, "packages/*/pyproject.toml"),
        (DUNDER, "packages/*/src/*/__init__.py"),
        (CITATION, "CITATION.cff"),
    ):
        for path in sorted(root.glob(glob)):
            text = path.read_text(encoding="utf-8")
            path.write_text(pattern.sub(replacement, text), encoding="utf-8")
            written.append(path)
    return written


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: nox -s bump -- VERSION")
    try:
        for file in bump(sys.argv[1]):
            print(file.relative_to(ROOT))
    except ValueError as error:
        sys.exit(str(error))
