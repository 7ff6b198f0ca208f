"""One version: VERSION, every `__version__` and every pin between siblings agree."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests.repo.tree import DISTRIBUTIONS, ROOT
from tools.bump import bump

VERSION = (ROOT / "VERSION").read_text(encoding="utf-8").strip()


def dunder_version(init: Path) -> str:
    found = re.search(r'^__version__(?:: \w+)? = "([^"]+)"$', init.read_text("utf-8"), re.MULTILINE)
    assert found, f"{init} states no `__version__`"
    return found[1]


def dependencies(distribution: str) -> list[Requirement]:
    text = (ROOT / "packages" / distribution / "pyproject.toml").read_text(encoding="utf-8")
    return [Requirement(line) for line in tomllib.loads(text)["project"]["dependencies"]]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_package_states_the_one_version(distribution: str) -> None:
    import_name = distribution.replace("-", "_")
    init = ROOT / "packages" / distribution / "src" / import_name / "__init__.py"
    assert dunder_version(init) == VERSION


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_siblings_are_pinned_exactly(distribution: str) -> None:
    for requirement in dependencies(distribution):
        if requirement.name in DISTRIBUTIONS:
            assert str(requirement.specifier) == f"=={VERSION}"


def test_the_citation_states_the_one_version() -> None:
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_package_says_where_it_lives(distribution: str) -> None:
    text = (ROOT / "packages" / distribution / "pyproject.toml").read_text(encoding="utf-8")
    assert {"Documentation", "Source", "Issues", "Changelog"} == set(
        tomllib.loads(text)["project"]["urls"]
    )


def test_core_needs_torch_alone() -> None:
    assert [requirement.name for requirement in dependencies("kd-core")] == ["torch"]


def test_every_package_names_the_torch_floor_that_is_tested() -> None:
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    minors = re.findall(r'"(\d+\.\d+)\.\d+"', noxfile[noxfile.index("TORCHES = (") :])
    floors = {
        str(requirement.specifier)
        for distribution in DISTRIBUTIONS
        for requirement in dependencies(distribution)
        if requirement.name == "torch"
    }
    assert floors == {f">={minors[0]}"}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"torch {minors[0]} to {minors[-1]}" in readme


def test_every_package_names_the_pythons_that_are_tested() -> None:
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    newer = re.findall(r'"(\d\.\d+)"', re.findall(r"^PYTHONS = \((.*)\)$", noxfile, re.M)[0])
    for distribution in DISTRIBUTIONS:
        text = (ROOT / "packages" / distribution / "pyproject.toml").read_text(encoding="utf-8")
        named = re.findall(r'"Programming Language :: Python :: (\d\.\d+)"', text)
        assert named == [re.findall(r'requires-python = ">=([^"]+)"', text)[0], *newer]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"Python {named[0]} to {named[-1]}" in readme
    lanes = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert str(newer).replace("'", '"') in lanes


def test_bump_writes_every_place(tmp_path: Path) -> None:
    for name in ("VERSION", "CITATION.cff", "packages"):
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    bump("9.8.7", tmp_path)
    manifests = sorted(tmp_path.glob("packages/*/pyproject.toml"))
    assert (tmp_path / "VERSION").read_text(encoding="utf-8") == "9.8.7\n"
    assert "\nversion: 9.8.7\n" in (tmp_path / "CITATION.cff").read_text(encoding="utf-8")
    assert {dunder_version(init) for init in tmp_path.glob("packages/*/src/*/__init__.py")} == {
        "9.8.7"
    }
    pins = re.findall(r'"kd-[a-z]+==([^"]+)"', "".join(m.read_text("utf-8") for m in manifests))
    assert set(pins) == {"9.8.7"}


def test_bump_refuses_what_is_no_version(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`one` is not a version"):
        bump("one", tmp_path)
    assert list(tmp_path.iterdir()) == []
