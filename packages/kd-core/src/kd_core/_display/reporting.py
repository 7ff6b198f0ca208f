"""Reports for people: how long blocks took, and what is in a folder."""

from __future__ import annotations

import logging
import time
from contextlib import ContextDecorator
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Final

from torch.nn import Buffer as Buffer

from kd_core._naming import public_in

_logger: Final = logging.getLogger("kd")
_UNITS: Final = ("B", "KB", "MB", "GB", "TB")


@public_in("kd_core")
class timeit(ContextDecorator):  # noqa: N801  # the name that users of tensordict know
    """Measure how long a block or a function takes, under a name; see `print`.

    Args:
        name: the name under which times are added.

    Example:
        >>> from kd_core import timeit
        >>> with timeit("step"):
        ...     pass
        >>> timeit.erase()
    """

    _REG: ClassVar[dict[str, list[float]]] = {}
    """For each name the mean time, the sum of times, in seconds, and how often it was measured."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        """Start measuring."""
        self._start = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Add the time to those of the name."""
        _, total, count = self._REG.get(self.name, (0.0, 0.0, 0))
        total, count = total + time.perf_counter() - self._start, count + 1
        self._REG[self.name] = [total / count, total, count]

    @classmethod
    def print(cls, prefix: str | None = None) -> None:
        """Log the mean and the sum of the times of each name, the longest first.

        Args:
            prefix: what each line starts with.
        """
        for name, (mean, total, _) in sorted(cls._REG.items(), key=_total, reverse=True):
            start = "" if prefix is None else f"{prefix} -- "
            _logger.info("%s%s took %.4g msec (total = %.4g sec)", start, name, mean * 1000, total)

    @classmethod
    def erase(cls) -> None:
        """Set the times of all names to zero."""
        for name in cls._REG:
            cls._REG[name] = [0.0, 0.0, 0]


def _total(item: tuple[str, list[float]]) -> float:
    return item[1][1]


def print_directory_tree(path: str | Path, indent: str = "", display_metadata: bool = True) -> str:
    """Log what is in a folder, level by level, and return it as text.

    Args:
        path: the folder.
        indent: what each line starts with.
        display_metadata: start with the size of all files.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, print_directory_tree
        >>> saved = TensorDict({"a": torch.ones(2)}).save("listed.kd")
        >>> print_directory_tree("listed.kd").splitlines()[1]
        'listed.kd/'
    """
    folder, lines = Path(path), list[str]()
    if display_metadata:
        size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
        lines.append(f"Directory size: {_readable(size)}")
    _list_into(lines, folder, indent)
    for line in lines:
        _logger.info(line)
    return "\n".join(lines)


def _list_into(lines: list[str], folder: Path, indent: str) -> None:
    lines.append(f"{indent}{folder.name}/")
    for each in sorted(folder.iterdir()):
        if each.is_dir():
            _list_into(lines, each, f"{indent}    ")
        else:
            lines.append(f"{indent}    {each.name}")


def _readable(size: float) -> str:
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.2f} {_UNITS[unit]}"
