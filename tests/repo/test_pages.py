"""Pages name what is there, in plain words; so do the docstrings of tools and examples."""

import ast
import re
import sys
from pathlib import Path

import pytest
from tests.repo.test_language import PHRASES, VERBS, docstrings
from tests.repo.tree import ROOT, tracked_files

ROOTS = r"packages|tests|docs|examples|benchmarks|tools|changelog\.d|\.ci|\.github"
WRITTEN_BY_EXAMPLES = "examples/digits/out/"
# Verbs of programs that the packages do not need.
PROGRAM_VERBS = {"Connect", "Put", "Time", "Train"}
OF_THE_PACKAGES = "tools/generate_ops.py"
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
# A dense program of rows, whose results are compared and whose text nobody reads as a page.
ROWS = "benchmarks/peer.py"


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


PAGES = [path for path in tracked_files() if path.suffix == ".md"]
PROGRAMS = [
    path
    for path in tracked_files()
    if path.suffix == ".py"
    and name(path).startswith(("benchmarks/", "docs/", "examples/", "noxfile", "tools/"))
    and name(path) not in {OF_THE_PACKAGES, ROWS}
]


def named_paths(text: str) -> set[str]:
    """Return the files and folders of the repository that `text` names in backticks."""
    return set(re.findall(rf"`((?:{ROOTS})(?:/[\w./-]*)?)`", text))


def prose(text: str) -> str:
    """Return a page without its code."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def odd_phrases(text: str) -> list[str]:
    """Return what a page says that it should not."""
    return [found[0] for phrase in PHRASES for found in re.finditer(phrase, prose(text))]


def links(text: str) -> set[str]:
    """Return the files that a page links to."""
    targets = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose(text))}
    return {target for target in targets if target and "://" not in target}


def imported(text: str) -> set[str]:
    """Return the packages that the examples of a page import."""
    return set(re.findall(r"^(?:>>> )?(?:from|import) (\w+)", text, flags=re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_path_exists(page: Path) -> None:
    paths = named_paths(page.read_text(encoding="utf-8")) - {WRITTEN_BY_EXAMPLES}
    assert {path for path in paths if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_to_a_file_exists(page: Path) -> None:
    targets = links(page.read_text(encoding="utf-8"))
    assert {target for target in targets if not (page.parent / target).exists()} == set()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_speak_plainly(page: Path) -> None:
    assert odd_phrases(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", PROGRAMS, ids=name)
def test_docstrings_of_programs_start_with_a_verb(path: Path) -> None:
    found = [said for _, said in docstrings(ast.parse(path.read_text(encoding="utf-8")))]
    allowed = {f"`{verb}`" for verb in PROGRAM_VERBS | set(VERBS.split())}
    assert [said for said in found if said.split()[3].rstrip(",") not in allowed] == []


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


def test_an_odd_phrase_is_seen() -> None:
    assert odd_phrases("an index that is no tensor\n```\ncame\n```\n") == ["is no"]
