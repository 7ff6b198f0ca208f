"""The pages of frameworks are run from top to bottom, as a new user would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "tutorials"
HANDOVER = PAGES.with_name("how-to") / "handover.md"


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # rl_games compiles with it
@pytest.mark.parametrize(
    "page", ["stable-baselines3", "torchrl", "rsl-rl", "skrl", "tianshou", "rl-games", "lerobot"]
)
def test_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pytest.importorskip(page.replace("-", "_"), reason="the lane `policies` installs it")
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    fences = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert fences
    exec(compile("\n".join(fences), f"{page}.md", "exec"), {"__name__": page})  # our own page


def test_the_page_of_the_hand_over_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its programs in Python, and its commands: the client in C is compiled and compared."""
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("stable_baselines3", reason="the lane `policies` installs it")
    text = HANDOVER.read_text(encoding="utf-8")
    fences = re.findall(r"^```(python|sh)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    code = "\n".join(content for language, content in fences if language == "python")
    exec(compile(code, HANDOVER.name, "exec"), {"__name__": "handover"})  # our own page
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    commands = "\n".join(content for language, content in fences if language == "sh")
    done = subprocess.run(
        ["bash", "-ec", commands],
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert float(done.stdout.splitlines()[-1]) < 1e-5
