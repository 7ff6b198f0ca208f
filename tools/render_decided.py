"""Write the names that are left out on purpose to the page "Coming from tensordict".

    python tools/render_decided.py            write
    python tools/render_decided.py --check    only compare; 1 if the page is stale

`kd_core` holds the list, because its errors quote it. The page gets a table for each area.
"""

import argparse
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = Path("packages/kd-core/src/kd_core/left_out.toml")
PAGE = Path("docs/guide/coming-from-tensordict.md")
START, END = "<!-- decided: start -->\n", "<!-- decided: end -->\n"


def cell(text: str) -> str:
    """Return a text as a cell of a table."""
    return text.replace("|", r"\|")


def advice(name: str, row: dict[str, str]) -> str:
    """Return what to write instead of a name; a parameter that is renamed is taken as it is."""
    if set(row) == {"reason", "instead"}:
        return row["instead"]
    if set(row) == {"reason", "renamed"} and "(" in name:
        return f"Both names work; new code writes `{row['renamed']}`."
    raise SystemExit(f"{name}: expected `reason` and `instead`, got {list(row)}")


def tables(source: str) -> str:
    """Return one table for each area; names with the same text share a row."""
    parts = []
    for area, rows in tomllib.loads(source).items():
        texts: dict[tuple[str, str], list[str]] = {}
        for name, row in rows.items():
            if set(row) == {"ignored"} and "(" in name:  # taken as it is
                continue
            texts.setdefault((row["reason"], advice(f"{area}: {name}", row)), []).append(name)
        if not texts:
            continue
        lines = [f"**`{area}`**", "", "| name | why | instead |", "| --- | --- | --- |"]
        for (reason, instead), names in texts.items():
            shown = ", ".join(f"`{name}`" for name in names)
            lines.append(f"| {shown} | {cell(reason)} | {cell(instead)} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def rendered(root: Path) -> str:
    """Return the page with the tables of the list."""
    source = (root / SOURCE).read_text(encoding="utf-8")
    head, _, rest = (root / PAGE).read_text(encoding="utf-8").partition(START)
    tail = rest.partition(END)[2]
    return f"{head}{START}\n{tables(source)}\n{END}{tail}"


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
