"""The pictures of the guide show what the library does."""

import pytest
from tests.repo.tree import ROOT
from tools import draw_engines, draw_guide
from tools.picture import FOLDER

DRAWN = {
    name: (tool.__name__, draw)
    for tool in (draw_guide, draw_engines)
    for name, draw in tool.PICTURES.items()
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_as_it_is_drawn(name: str) -> None:
    tool, draw = DRAWN[name]
    stored = (ROOT / FOLDER / name).read_text(encoding="utf-8")
    assert stored == draw(), f"run `python -m {tool}` to draw `{name}` again"
