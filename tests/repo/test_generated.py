"""Generated sources are what their tables say, and pages with figures what was measured."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.figures import Figures, stored
from benchmarks.front import readme
from benchmarks.render import page, stale
from tests.repo.tree import ROOT


def test_the_operations_of_the_table_are_fresh() -> None:
    command = [sys.executable, "tools/generate_ops.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def figures() -> Figures:
    loaded: Figures = json.loads((ROOT / "benchmarks/figures.json").read_text("utf-8"))
    return loaded


def test_pages_show_the_stored_figures() -> None:
    assert stale(ROOT) == []


def test_a_figure_written_by_hand_is_seen(tmp_path: Path) -> None:
    read = ("benchmarks/figures.json", "benchmarks/figures_gpu.json")
    for name in ("README.md", "docs/benchmarks.md", *read):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    front = tmp_path / "README.md"
    front.write_text(front.read_text("utf-8").replace("geometric mean of", "mean of"), "utf-8")
    assert stale(tmp_path) == ["README.md"]


def test_stored_figures_stay_as_they_are_stored() -> None:
    assert stored(figures()) == (ROOT / "benchmarks/figures.json").read_text("utf-8")


def test_a_run_without_some_rows_still_makes_pages() -> None:
    few = figures()
    few["peer"]["rows"] = [row for row in few["peer"]["rows"] if row["area"] == "construct"]
    few["peer"]["geomeans"] = {"construct": few["peer"]["geomeans"]["construct"]}
    assert "### construct" in page(few)
    assert "build a container" in readme(
        (ROOT / "README.md").read_text("utf-8"), few["peer"], few["programs"]
    )


def test_a_row_with_a_floor_shows_it() -> None:
    some = figures()
    rows = [row for row in some["peer"]["rows"] if row["area"] == "keys"]
    for row in rows:
        row["results"].pop("floor", None)
        row["kd_floor"] = None
    row = rows[0]
    row["results"]["floor"], row["kd_floor"] = {"min": 0.5}, 1.05
    assert "| keys | 1 | 1.05 | 1 |" in page(some)
    assert "| 0.5 us | 1.05 |" in page(some)
