"""The page "What can be exported" says what becomes of each pattern."""

import pytest
from tests.export.catalogue import PATTERNS, Pattern
from tests.repo.tree import ROOT
from tools.render_exportable import PAGE, line

TEXT = (ROOT / PAGE).read_text(encoding="utf-8")


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.title)
def test_the_page_says_what_becomes_of_a_pattern(pattern: Pattern) -> None:
    row = line(pattern.row())
    assert row in TEXT.splitlines(), "run `python tools/render_exportable.py`"


def test_the_page_has_no_other_rows() -> None:
    rows = [text for text in TEXT.splitlines() if text.startswith("| ")]
    assert len(rows) == 2 + len(PATTERNS)
