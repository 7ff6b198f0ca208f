"""Which differences between both libraries are on purpose.

Knows the list of `kd_core`; must not know how calls are made or compared.
"""

import tomllib
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Final

ROWS: Final[list[dict[str, object]]] = tomllib.loads(
    files("kd_core").joinpath("differences.toml").read_text(encoding="utf-8")
)["difference"]
PATTERNS: Final = [
    pattern
    for row in ROWS
    if isinstance(calls := row.get("calls", []), list)
    for pattern in map(str, calls)
]


def pattern_for(kind: str, method: str, found: str) -> str | None:
    """Return the pattern of the list that allows a difference; `None` if it is not on purpose."""
    told = f"{kind} {method} {found}"
    return next((pattern for pattern in PATTERNS if fnmatchcase(told, pattern)), None)
