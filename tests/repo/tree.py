"""What the checks of the repository ask about its tree."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = ("kd-core", "kd-nn", "kd-probabilistic", "kd-export")
IMPORT_NAMES = tuple(name.replace("-", "_") for name in DISTRIBUTIONS)
SOURCES = tuple(ROOT / "packages" / name / "src" for name in DISTRIBUTIONS)


def source_files() -> list[Path]:
    """Return every module of the four distributions."""
    return sorted(path for source in SOURCES for path in source.rglob("*.py"))


def tracked_files() -> list[Path]:
    """Return every file of the repository that git tracks."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]
