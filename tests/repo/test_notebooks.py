"""Pages become notebooks that run, and that need nothing beside them."""

import json
from pathlib import Path

import pytest
from tests.repo.tree import ROOT
from tools.notebook import code_of, notebook

PICTURE = '<svg xmlns="http://www.w3.org/2000/svg"/>'
PAGE = """# Title

:::{container} cards
Text with ![a picture](p.svg).
:::

```python
>>> from kd_core import TensorDict
>>> for number in range(2):
...     total = number
>>> total
1

```

```sh
pip install kd-core
```

```python
td = TensorDict(x=total)
```

```{toctree}
other
```
"""


def test_a_page_becomes_cells(tmp_path: Path) -> None:
    (tmp_path / "p.svg").write_text(PICTURE, encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    text = notebook(page)
    assert text is not None
    cells = json.loads(text)["cells"]
    assert [cell["source"] for cell in cells] == [
        "# Title\n\nText with ![a picture](attachment:p.svg).",
        "%pip install --quiet kd-core",
        "from kd_core import TensorDict\nfor number in range(2):\n    total = number\ntotal",
        "```sh\npip install kd-core\n```",
        "td = TensorDict(x=total)",
    ]
    assert list(cells[0]["attachments"]["p.svg"]) == ["image/svg+xml"]
    namespace: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code" and not cell["source"].startswith("%"):
            exec(cell["source"], namespace)
    assert namespace["total"] == 1


def test_a_page_without_python_has_no_notebook(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# Title\n\n```sh\nls\n```\n", encoding="utf-8")
    assert notebook(tmp_path / "page.md") is None


@pytest.mark.parametrize("folder", ["guide", "tutorials"])
def test_every_code_cell_is_python(folder: str) -> None:
    for page in sorted((ROOT / "docs" / folder).glob("*.md")):
        text = notebook(page)
        for cell in json.loads(text)["cells"] if text else []:
            if cell["cell_type"] == "code" and not cell["source"].startswith("%"):
                compile(cell["source"], str(page), "exec")


def test_prompts_and_results_are_left_out() -> None:
    assert code_of(">>> if x:\n...     y\n...\n3\n") == "if x:\n    y\n"
    assert code_of("x = 1\n") == "x = 1"
