"""Turn a page of the documentation into a notebook: what the button of each page downloads.

Text becomes Markdown cells, Python becomes code cells, and pictures are in the text as data: an
attached SVG is not shown by JupyterLab. Prompts and printed results are left out, because a
notebook prints its own; a cell ends where the page prints something, because a notebook prints
the last value of a cell only.
"""

import base64
import json
import re
from pathlib import Path

INSTALLED_BY = {
    "kd_core": "kd-core",
    "kd_nn": "kd-nn",
    "kd_probabilistic": "kd-probabilistic",
    "kd_export": '"kd-export[onnx,cli]"',
}
TYPES = {".svg": "image/svg+xml", ".png": "image/png"}
Cell = dict[str, object]


def notebook(page: Path) -> str | None:
    """Return the notebook of a page as JSON, or None where the page has no Python.

    Args:
        page: The Markdown file.
    """
    cells: list[Cell] = []
    has_code = False
    text = page.read_text(encoding="utf-8")
    for number, part in enumerate(
        re.split(r"^```(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    ):
        language, _, body = part.partition("\n") if number % 2 else ("", "", part)
        if language == "python":
            cells += code_cells(body)
            has_code = True
        elif number % 2 and not language.startswith("{"):
            cells.append(_cell("markdown", f"```{part}```"))
        elif not number % 2 and (shown := _without_directives(part).strip()):
            cells.append(_cell("markdown", _with_pictures(shown, page.parent)))
    if not has_code:
        return None
    sources = "".join(str(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    needed = [
        name for package, name in INSTALLED_BY.items() if re.search(rf"\b{package}\b", sources)
    ]
    if needed:
        cells.insert(1, _cell("code", f"%pip install --quiet {' '.join(needed)}"))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return json.dumps(
        {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5},
        indent=1,
    )


def code_cells(fence: str) -> list[Cell]:
    """Return the statements of a fence, a cell for each result, without prompts and results.

    A cell that raises, as the page shows, is marked: the cells below it run all the same.
    """
    lines = fence.strip("\n").split("\n")
    if not any(line.startswith(">>> ") for line in lines):
        return [_cell("code", "\n".join(lines))]
    cells: list[Cell] = []
    statements: list[str] = []
    results: list[str] = []
    for line in [*lines, ">>> "]:  # the last prompt ends the last cell
        if not re.match(r"(>>>|\.\.\.)( |$)", line):
            results += [line] if line.strip() else []
            continue
        if statements and (results or line == ">>> "):
            cell = _cell("code", "\n".join(statements))
            if results and results[0].startswith("Traceback"):
                cell["metadata"] = {"tags": ["raises-exception"]}
            cells.append(cell)
            statements, results = [], []
        statements.append(line[4:])
    return cells


def _cell(kind: str, source: str) -> Cell:
    cell: Cell = {"cell_type": kind, "metadata": {}, "source": source}
    return cell | {"outputs": [], "execution_count": None} if kind == "code" else cell


def _without_directives(text: str) -> str:
    return re.sub(r"^:::.*\n?|^<!--.*?-->\n?", "", text, flags=re.MULTILINE)


def _with_pictures(text: str, folder: Path) -> str:
    """Return Markdown that carries the pictures that it shows."""

    def carry(found: re.Match[str]) -> str:
        path = folder / found[2]
        data = base64.b64encode(path.read_bytes()).decode()
        return f"![{found[1]}](data:{TYPES[path.suffix]};base64,{data})"

    return re.sub(r"!\[([^\]]*)\]\(([^):\s]+\.(?:svg|png))\)", carry, text)
