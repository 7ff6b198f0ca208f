"""Programs of other people give the same numbers on kd and on the peer, seed by seed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FOLDER = Path(__file__).parent
NOT_PROGRAMS = ("docstrings", "measured", "shares", "test_clients")
PROGRAMS = [path.stem for path in sorted(FOLDER.glob("*.py")) if path.stem not in NOT_PROGRAMS]
# Cases of programs that differ: a store holds no ragged tensors yet (the checkpointers); words of
# rows that were not written are `None`, in tensordict those of another row; tensordict fails.
DIFFERENT = {
    "torchrl_buffers": [
        "NestedStorageCheckpointer",
        "H5StorageCheckpointer",
        "words given",
        "words tensor2",
    ],
    # `__post_init__` runs when an instance is constructed, and not after each operation.
    "physicsnemo_mesh": ["applied"],
    # One tensor under two names is listed once, as by every module.
    "torchrl_losses": ["Distributional mean", "Distributional none"],
}
# Docstrings whose examples run in the lane.
EXAMPLES = r"^torchrl\.(data|modules|objectives)\.(?!llm|vla)"
SEEDS = range(int(os.environ.get("KD_CLIENT_SEEDS", "2")))


class Times(NamedTuple):
    """CPU times of a program in seconds: what is done once, what each run takes, both."""

    start: float
    again: float
    whole: float


def run(program: str, seed: int, *how: str) -> tuple[dict[str, object], Times]:
    found = printed(program, seed, *how)
    return found["numbers"], Times(found["cpu"] - found["again"], found["again"], found["cpu"])


def printed(program: str, seed: int, *how: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", *how, f"{program}.py", str(seed)]
    # Libraries make lists of sets of keys.
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=FOLDER,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": "0", "KD_CLIENT_REPEATS": "1"},
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def agree(expected: object, got: object) -> bool:
    """Return whether two contents are equal, where an error may be of further kinds."""
    if isinstance(expected, dict) and isinstance(got, dict):
        return list(expected) == list(got) and all(agree(expected[k], got[k]) for k in expected)
    if isinstance(expected, list) and isinstance(got, list):
        return len(expected) == len(got) and all(map(agree, expected, got))
    if isinstance(expected, str) and isinstance(got, str) and expected.startswith("raises "):
        return got.startswith("raises ") and expected.split()[1] in got.split()
    return expected == got or (expected != expected and got != got)  # NaN: no game has ended


@pytest.mark.parametrize("program", PROGRAMS)
def test_numbers_are_equal(program: str, record_property: Callable[[str, object], None]) -> None:
    times = []
    for seed in SEEDS:
        expected, peer = run(program, seed)
        got, ours = run(program, seed, "-m", "kd_core.drop_in")
        known = DIFFERENT.get(program, [])
        differing = [
            name
            for name in expected
            if name not in known and not agree(expected[name], got.get(name))
        ]
        assert {name: (expected[name], got.get(name)) for name in differing} == {}
        times.append((ours, peer))
    ours, peer = (
        Times(*map(min, zip(*column, strict=True))) for column in zip(*times, strict=True)
    )
    # What a library would take of the time of tensordict that itself took none.
    own = printed(program, SEEDS[0], "shares.py")
    for name, mine, theirs in zip(Times._fields, ours, peer, strict=True):
        floor = f", floor {1 - own[name]:.2f}" if name in own else ""
        record_property(name, f"{mine / theirs:.2f}{floor}")
        print(f"{program}: {name} {mine:.2f} s on kd, {theirs:.2f} s, {mine / theirs:.2f}{floor}")


def test_examples_of_docstrings_run(tmp_path: Path) -> None:
    outs = {name: tmp_path / name for name in ("peer", "kd")}
    how = {"peer": [], "kd": ["-m", "kd_core.drop_in"]}
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", *how[name], "docstrings.py", str(out), "torchrl"],
            cwd=FOLDER,
            env={**os.environ, "KD_CLIENT_EXAMPLES": EXAMPLES, "PYTHONHASHSEED": "0"},
            stdout=subprocess.DEVNULL,
        )
        for name, out in outs.items()
    ]
    assert [process.wait() for process in running] == [0, 0]
    ran = {
        name: {
            place
            for place, outcomes in map(json.loads, out.read_text(encoding="utf-8").splitlines())
            if not any(error for _, _, error in outcomes)
        }
        for name, out in outs.items()
    }
    print(f"{len(ran['peer'])} examples run on the peer, {len(ran['kd'])} on kd")
    assert len(ran["peer"]) > 100
    assert ran["peer"] - ran["kd"] == set()
