"""Write what `docs/decided.toml` lists to where readers meet it.

    python tools/render_decided.py            write
    python tools/render_decided.py --check    only compare; 1 where a file is stale

The page "Coming from tensordict" gets a table for each area, and `kd_core` a copy for its errors.
"""

import argparse
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = Path("docs/decided.toml")
COPY = Path("packages/kd-core/src/kd_core/_decided/names.toml")
PAGE = Path("docs/guide/coming-from-tensordict.md")
START, END = "<!-- decided: start -->\n", "<!-- decided: end -->\n"


def cell(text: str) -> str:
    """Return a text as a cell of a table."""
    return text.replace("|", r"\|")


def tables(source: str) -> str:
    """Return one table for each area; names with the same text share a row."""
    parts = []
    for area, rows in tomllib.loads(source).items():
        texts: dict[tuple[str, str], list[str]] = {}
        for name, row in rows.items():
            if set(row) != {"reason", "instead"}:
                raise SystemExit(
                    f"{area}: {name}: expected `reason` and `instead`, got {list(row)}"
                )
            texts.setdefault((row["reason"], row["instead"]), []).append(name)
        lines = [f"**`{area}`**", "", "| name | why | instead |", "| --- | --- | --- |"]
        for (reason, instead), names in texts.items():
            shown = ", ".join(f"`{name}`" for name in names)
            lines.append(f"| {shown} | {cell(reason)} | {cell(instead)} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def rendered(root: Path) -> dict[Path, str]:
    """Return the text of each file that the list is written to."""
    source = (root / SOURCE).read_text(encoding="utf-8")
    head, _, rest = (root / PAGE).read_text(encoding="utf-8").partition(START)
    tail = rest.partition(END)[2]
    return {PAGE: f"{head}{START}\n{tables(source)}\n{END}{tail}", COPY: source}


def stale(root: Path) -> list[str]:
    """Return the files that do not say what the list says."""
    return [
        path.as_posix()
        for path, text in rendered(root).items()
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text
    ]


def main() -> int:
    """Write the files, or with `--check` name those that are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    if parser.parse_args().check:
        found = stale(ROOT)
        for name in found:
            print(f"{name} is stale: run `python tools/render_decided.py`")
        return 1 if found else 0
    for path, text in rendered(ROOT).items():
        (ROOT / path).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
