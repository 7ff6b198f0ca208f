"""Every file and folder that a page of the project names is there."""

import re

import pytest
from tests.repo.tree import ROOT

ROOTS = r"packages|tests|docs|examples|benchmarks|tools|changelog\.d|\.ci|\.github"
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/design.md",
    "docs/stability.md",
    "docs/extending/an-operation.md",
    "docs/extending/an-export-backend.md",
)


def named_paths(text: str) -> set[str]:
    """Return the files and folders of the repository that `text` names in backticks."""
    return set(re.findall(rf"`((?:{ROOTS})(?:/[\w./-]*)?)`", text))


@pytest.mark.parametrize("page", PAGES)
def test_every_path_exists(page: str) -> None:
    paths = named_paths((ROOT / page).read_text(encoding="utf-8"))
    made = {path for path in paths if path.startswith("examples/digits/out")}
    assert {path for path in paths - made if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_link_to_a_file_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)}
    files = {link for link in links if link and "://" not in link}
    assert {link for link in files if not ((ROOT / page).parent / link).exists()} == set()


def test_a_path_that_is_gone_is_seen() -> None:
    assert named_paths("`packages/kd-export/src/backends/` and `x`") == {
        "packages/kd-export/src/backends/"
    }
