"""Pages become notebooks that run, and that need nothing beside them."""

import base64
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.repo.tree import ROOT
from tools.notebook import code_cells, notebook

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
>>> total = td
Traceback (most recent call last):
    ...
NameError: name 'td' is not defined
>>> total = 1

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
    data = base64.b64encode(PICTURE.encode()).decode()
    assert [cell["source"] for cell in cells] == [
        f"# Title\n\nText with ![a picture](data:image/svg+xml;base64,{data}).",
        "%pip install --quiet kd-core",
        "from kd_core import TensorDict\nfor number in range(2):\n    total = number\ntotal",
        "total = td",
        "total = 1",
        "```sh\npip install kd-core\n```",
        "td = TensorDict(x=total)",
    ]
    raising = [cell for cell in cells if "raises-exception" in cell["metadata"].get("tags", [])]
    assert [cell["source"] for cell in raising] == ["total = td"]
    namespace: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code" and not cell["source"].startswith("%"):
            with pytest.raises(NameError) if cell in raising else nullcontext():
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
    def sources(fence: str) -> list[object]:
        return [cell["source"] for cell in code_cells(fence)]

    assert sources(">>> if x:\n...     y\n...\n3\n") == ["if x:\n    y\n"]
    assert sources(">>> x\n1\n>>> y = 2\n>>> y\n2\n\n") == ["x", "y = 2\ny"]
    assert sources("x = 1\n") == ["x = 1"]
