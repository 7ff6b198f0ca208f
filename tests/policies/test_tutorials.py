"""The pages of frameworks are run from top to bottom, as a new user would."""

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "tutorials"


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # rl_games compiles with it
@pytest.mark.parametrize(
    "page", ["stable-baselines3", "torchrl", "rsl-rl", "skrl", "tianshou", "rl-games"]
)
def test_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pytest.importorskip(page.replace("-", "_"), reason="the lane `policies` installs it")
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    fences = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert fences
    exec(compile("\n".join(fences), f"{page}.md", "exec"), {"__name__": page})  # our own page
