"""Write what becomes of each pattern to the page "What can be exported".

    python tools/render_exportable.py

Each pattern of `tests/export/catalogue.py` is exported, so this takes a minute. The tests compare
the page, row by row.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = Path("docs/reference/exportable.md")
START, END = "<!-- patterns: start -->\n", "<!-- patterns: end -->\n"


def line(row: Iterable[str]) -> str:
    """Return a row of the table."""
    cells = [cell.replace("|", r"\|") for cell in row]
    return f"| {' | '.join(cells)} |"


def rendered(page: str, rows: Iterable[Iterable[str]]) -> str:
    """Return the page with a table of the rows."""
    head, _, rest = page.partition(START)
    top = ["| pattern | verdict | what kd_export says |", "| --- | --- | --- |"]
    table = "\n".join([*top, *map(line, rows)])
    return f"{head}{START}\n{table}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Try all patterns and write the page."""
    sys.path.insert(0, str(ROOT))
    from tests.export.catalogue import PATTERNS

    path = ROOT / PAGE
    text = path.read_text(encoding="utf-8")
    path.write_text(rendered(text, [pattern.row() for pattern in PATTERNS]), encoding="utf-8")


if __name__ == "__main__":
    main()
