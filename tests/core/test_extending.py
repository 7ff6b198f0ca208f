"""The container of docs/extending/a-new-container.md keeps the whole contract."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kd_core.testing import ContainerContract

PAGE = Path(__file__).parents[2] / "docs" / "extending" / "a-new-container.md"
PROMISES = sorted(name for name in dir(ContainerContract) if name.startswith("test_"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The fences of the page as a module, because pickle looks classes up by module."""
    fences = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    file = tmp_path_factory.mktemp("page") / "journal_of_the_page.py"
    file.write_text("\n".join(fences), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[file.stem]


@pytest.mark.parametrize("promise", PROMISES)
def test_the_container_of_the_page_keeps_each_promise(page: ModuleType, promise: str) -> None:
    getattr(page.TestJournal(), promise)()
