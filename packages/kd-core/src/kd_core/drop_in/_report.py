"""What a program asked for that kd lacks: names, counted over all of its processes."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

# A file that all processes of one program append to: a name a line.
VARIABLE: Final = "KD_DROP_IN_REPORT"

_missing: Counter[str] = Counter()


def ask() -> Path:
    """Ask for a report of this process and its children; return the file that collects it."""
    descriptor, path = tempfile.mkstemp(prefix="kd-drop-in-", text=True)
    os.close(descriptor)
    os.environ[VARIABLE] = path
    return Path(path)


def wanted() -> bool:
    """Return whether a report was asked for: attributes are recorded only then."""
    return VARIABLE in os.environ


def record(name: str) -> None:
    """Count one request for a name that kd lacks."""
    _missing[name] += 1
    path = os.environ.get(VARIABLE)
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{name}\n")


def missing() -> dict[str, int]:
    """Return how often this process asked for each name that kd lacks, most frequent first.

    Example:
        >>> from kd_core import drop_in
        >>> drop_in.missing()
        {}
    """
    return dict(_missing.most_common())


def collected() -> dict[str, int]:
    """Return the counts of all processes, where a file collects them, and of this one otherwise."""
    path = os.environ.get(VARIABLE)
    if not path or not Path(path).exists():
        return missing()
    names = Path(path).read_text(encoding="utf-8").splitlines()
    return dict(Counter(names).most_common())


def render(counts: dict[str, int]) -> str:
    """Return the report as text, a name a line."""
    if not counts:
        return "kd: nothing that the program asked for is missing."
    width = max(map(len, counts))
    lines = [f"  {name:<{width}}  {count}" for name, count in counts.items()]
    return "\n".join([f"kd: {len(counts)} names that the program asked for are missing:", *lines])
