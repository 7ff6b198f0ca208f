"""How long blocks took, and what is in a folder."""

import logging
from pathlib import Path

import pytest
import torch

from kd_core import Buffer, print_directory_tree, timeit


@pytest.fixture(autouse=True)
def no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeit, "_REG", {})


def test_blocks_and_functions_are_measured(logged: list[logging.LogRecord]) -> None:
    for _ in range(2):
        with timeit("block"):
            pass

    @timeit("function")
    def double(x: int) -> int:
        return x * 2

    assert double(3) == 6
    mean, total, count = timeit._REG["block"]
    assert count == 2
    assert total == pytest.approx(2 * mean)
    assert timeit._REG["function"][2] == 1
    timeit.print("run")
    lines = [record.getMessage() for record in logged]
    assert len(lines) == 2
    assert all(line.startswith("run -- ") and "took" in line for line in lines)
    timeit.erase()
    assert timeit._REG == {"block": [0.0, 0.0, 0], "function": [0.0, 0.0, 0]}


def test_a_folder_is_listed_level_by_level(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    (folder / "y").mkdir(parents=True)
    (folder / "f.txt").write_text("abc")
    tree = "x/\n    f.txt\n    y/"
    assert print_directory_tree(folder) == f"Directory size: 3.00 B\n{tree}"
    assert print_directory_tree(folder, display_metadata=False) == tree
    assert print_directory_tree(str(folder), ">", False).startswith(">x/\n>    f.txt")


def test_the_class_of_buffers_is_that_of_torch() -> None:
    assert Buffer is torch.nn.Buffer
