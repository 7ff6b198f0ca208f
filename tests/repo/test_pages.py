"""Pages name and link only what exists, and need only the packages they say."""

import re
import sys
from pathlib import Path

import pytest
from tests.repo.tree import ROOT, tracked_files

ROOTS = r"packages|tests|docs|examples|benchmarks|tools|changelog\.d|\.ci|\.github"
WRITTEN_BY_EXAMPLES = "examples/digits/out/"
# What a reader with `kd-core` alone can follow.
CORE_PAGES = (
    "kd-core",
    "containers",
    "keys",
    "shapes",
    "indexing",
    "non-tensors",
    "lazy-stacks",
    "typed-containers",
    "locking",
    "data",
    "compile",
    "conversions",
)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


PAGES = [path for path in tracked_files() if path.suffix == ".md"]


def named_paths(text: str) -> set[str]:
    """Return the files and folders of the repository that `text` names in backticks."""
    return set(re.findall(rf"`((?:{ROOTS})(?:/[\w./-]*)?)`", text))


def prose(text: str) -> str:
    """Return a page without its code."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def links(text: str) -> set[str]:
    """Return the files that a page links to."""
    targets = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose(text))}
    return {target for target in targets if target and "://" not in target}


def imported(text: str) -> set[str]:
    """Return the packages that the examples of a page import."""
    return set(re.findall(r"^(?:>>> )?(?:from|import) (\w+)", text, flags=re.MULTILINE))


def test_every_path_exists() -> None:
    found = {
        (name(page), path)
        for page in PAGES
        for path in named_paths(page.read_text(encoding="utf-8")) - {WRITTEN_BY_EXAMPLES}
        if not (ROOT / path).exists()
    }
    assert found == set()


def test_every_link_to_a_file_exists() -> None:
    found = {
        (name(page), target)
        for page in PAGES
        for target in links(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    }
    assert found == set()


@pytest.mark.parametrize("page", CORE_PAGES)
def test_pages_of_kd_core_need_no_other_package(page: str) -> None:
    text = (ROOT / f"docs/guide/{page}.md").read_text(encoding="utf-8")
    assert "kd_core" in imported(text)
    assert imported(text) <= {"kd_core", "torch", *sys.stdlib_module_names}


def test_an_import_is_seen() -> None:
    assert imported(">>> import kd_nn\nfrom torch.utils import data\n") == {"kd_nn", "torch"}


def test_a_path_that_is_gone_is_seen() -> None:
    assert named_paths("`packages/kd-export/src/backends/` and `x`") == {
        "packages/kd-export/src/backends/"
    }
