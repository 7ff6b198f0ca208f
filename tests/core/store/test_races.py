"""Writers and readers at once, processes that are killed, and an arena that many of them fill."""

from pathlib import Path

from tests import children


def output_of(script: str, *arguments: str) -> str:
    return children.check_output(Path(__file__).with_name(script), *arguments)


def test_random_programs_of_killed_processes_leave_what_they_committed(tmp_path: Path) -> None:
    assert "commits" in output_of("programs.py", str(tmp_path), "3")


def test_processes_that_race_die_and_share_see_whole_stores(tmp_path: Path) -> None:
    output = output_of("race.py", str(tmp_path))
    for word in ("killed", "shared", "constructed"):
        assert word in output
