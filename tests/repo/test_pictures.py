"""The pictures of the guide show what the library does."""

import pytest
from tests.repo.tree import ROOT
from tools.draw_guide import FOLDER, PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_as_it_is_drawn(name: str) -> None:
    stored = (ROOT / FOLDER / name).read_text(encoding="utf-8")
    assert stored == PICTURES[name](), f"run `python tools/draw_guide.py` to draw `{name}` again"
