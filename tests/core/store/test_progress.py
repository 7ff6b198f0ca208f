"""How far saves, loads and checks are is reported on request, and only then."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kd_core import TensorDict, store
from kd_core.__main__ import main
from kd_core._store.files import STEP


def sample() -> TensorDict:
    return TensorDict({"large": torch.zeros(2 * STEP + 8, dtype=torch.uint8), "b": torch.ones(2)})


@pytest.mark.parametrize("name", ["td", "td.safetensors"])
def test_each_pass_is_reported_to_its_end(name: str, tmp_path: Path) -> None:
    path, seen = tmp_path / name, list[tuple[int, int]]()
    works: list[Callable[[], object]] = [
        lambda: sample().save(path),
        lambda: TensorDict.load(path, verify="full"),
        lambda: store.check(path),
    ]
    for work in works:
        seen.clear()
        with store.progress(lambda done, total: seen.append((done, total))):
            work()
        [total] = {each for _, each in seen}
        assert total >= 2 * STEP + 16
        assert seen[-1][0] == total
        assert len(seen) >= 3
        assert all(
            0 < now - before <= STEP
            for (before, _), (now, _) in itertools.pairwise(seen)
            if before != total
        )
    seen.clear()
    TensorDict.load(path)
    sample().save(path)
    assert not seen


def test_a_report_that_raises_keeps_what_was_there(tmp_path: Path) -> None:
    TensorDict({"a": torch.ones(2)}).save(tmp_path / "td")

    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), store.progress(stop):
        sample().save(tmp_path / "td")
    assert TensorDict.load(tmp_path / "td", verify="full")["a"].tolist() == [1, 1]
    sample().save(tmp_path / "td")  # nothing is reported after the block


def test_the_command_shows_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample().save(tmp_path / "td")
    assert main(["check", str(tmp_path / "td")]) == 0
    assert not capsys.readouterr().err
    assert main(["check", "--progress", str(tmp_path / "td")]) == 0
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("kd: check `td`: compare checksums, 0 B of 8.39 MB")
    assert last == "kd: check `td`: ended after 0 s"
    TensorDict({"none": torch.ones(0)}).save(tmp_path / "none")
    assert main(["compact", "--progress", str(tmp_path / "none")]) == 0
