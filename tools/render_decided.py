"""Write the table of differences to the page "Coming from tensordict".

    python tools/render_decided.py            write
    python tools/render_decided.py --check    only compare; 1 if the page is stale

`kd_core` holds the list, because its errors quote it.
"""

import argparse
import sys
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
SOURCE: Final = Path("packages/kd-core/src/kd_core/differences.toml")
PAGE: Final = Path("docs/guide/coming-from-tensordict.md")
START, END = "<!-- differences: start -->\n", "<!-- differences: end -->\n"
MOST: Final = 40
RULES: Final = (1, 2, 3)


def cell(text: str) -> str:
    """Return a text as a cell of a table."""
    return text.replace("|", r"\|")


def table(source: str) -> str:
    """Return the table of all rows, in the order of the list.

    Raises:
        SystemExit: if a row lacks a text or its rule, or there are too many rows.
    """
    rows = tomllib.loads(source)["difference"]
    if len(rows) > MOST:
        raise SystemExit(f"expected at most {MOST} differences, got {len(rows)}")
    lines = ["| rule | tensordict | kd | write |", "| --- | --- | --- | --- |"]
    for row in rows:
        if row.get("rule") not in RULES or not row.get("there") or not row.get("here"):
            raise SystemExit(f"expected `rule` (1, 2 or 3), `there` and `here`, got {row}")
        texts = (row["there"], row["here"], row.get("write", ""))
        lines.append(f"| {row['rule']} | {' | '.join(map(cell, texts))} |")
    return "\n".join(lines) + "\n"


def rendered(root: Path) -> str:
    """Return the page with the table of the list."""
    source = (root / SOURCE).read_text(encoding="utf-8")
    head, _, rest = (root / PAGE).read_text(encoding="utf-8").partition(START)
    tail = rest.partition(END)[2]
    return f"{head}{START}\n{table(source)}\n{END}{tail}"


def is_stale(root: Path) -> bool:
    """Return whether the page says something else than the list."""
    return (root / PAGE).read_text(encoding="utf-8") != rendered(root)


def main() -> int:
    """Write the page, or with `--check` say whether it is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    if not parser.parse_args().check:
        (ROOT / PAGE).write_text(rendered(ROOT), encoding="utf-8")
        return 0
    if is_stale(ROOT):
        print(f"{PAGE.as_posix()} is stale: run `python tools/render_decided.py`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
