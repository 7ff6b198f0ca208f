"""What stands in the tree: rooms with a noun, fragments in form, nothing of one machine."""

import re
from pathlib import Path

import pytest
from tests.repo.tree import ROOT, source_files, tracked_files

ROOMS_WITHOUT_A_NOUN = {"common", "helper", "helpers", "misc", "tools", "util", "utils"}
# Folders of the machines we happened to build on, and hosts that pip's configuration names.
OF_ONE_MACHINE = re.compile(
    r"(?<![\w.])/(work|farm|root|opt|home|tmp)/\w|pythonhosted[.]org|pypi[.]org"
)


def test_every_module_has_a_noun() -> None:
    rooms = {p for p in source_files() if p.stem.strip("_") in ROOMS_WITHOUT_A_NOUN}
    assert rooms == set()


def test_modules_are_private_unless_meant_for_import() -> None:
    public = {
        "__main__",
        "backends",
        "cli",
        "convert",
        "distributed",
        "distributions",
        "drop_in",
        "extending",
        "fx",
        "migrate",
        "policies",
        "store",
        "testing",
    }
    strangers = set()
    for path in source_files():
        parts = path.with_suffix("").parts
        inside = parts[parts.index("src") + 2 :]
        if not any(part.startswith("_") for part in inside) and not public & set(inside):
            strangers.add(str(path.relative_to(ROOT)))
    assert strangers == set()


def machine_marks(text: str) -> list[str]:
    return [match.group() for match in OF_ONE_MACHINE.finditer(text)]


def test_nothing_names_one_machine_or_registry() -> None:
    marks = {
        str(path.relative_to(ROOT)): found
        for path in tracked_files()
        if (found := machine_marks(path.read_text(encoding="utf-8", errors="replace")))
    }
    assert marks == {}


def test_a_machine_path_is_seen() -> None:
    assert machine_marks("see /" + "work/main/x and https://pypi" + ".org/simple")


def test_every_distribution_ships_its_type_marker_and_licence() -> None:
    for package in (ROOT / "packages").iterdir():
        marker = Path("src") / package.name.replace("-", "_") / "py.typed"
        assert (package / marker).is_file()
        assert (package / "LICENSE").read_text("utf-8") == (ROOT / "LICENSE").read_text("utf-8")


def test_every_fragment_has_a_package_a_kind_and_one_line() -> None:
    shape = re.compile(r"(core|nn|probabilistic|export)/[\w-]+\.(added|changed|fixed)\.md")
    folder = ROOT / "changelog.d"
    # Right after a release there are none.
    fragments = [path for path in tracked_files() if path.parent.parent == folder]
    for path in fragments:
        assert shape.fullmatch(path.relative_to(folder).as_posix()), path
        assert len(path.read_text(encoding="utf-8").splitlines()) == 1, path


def test_nothing_is_fixed_or_changed_before_the_first_release() -> None:
    released = "\n## " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    early = {
        path.name for path in (ROOT / "changelog.d").glob("*/*.md") if ".added." not in path.name
    }
    assert released or early == set()


@pytest.mark.parametrize("script", [".ci/run", ".github/workflows/ci.yml", "CONTRIBUTING.md"])
def test_every_lane_that_is_named_exists(script: str) -> None:
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    lanes = re.findall(r"^@nox\.session.*?^def (\w+)", noxfile, re.MULTILINE | re.DOTALL)
    text = (ROOT / script).read_text(encoding="utf-8")
    named = {
        lane
        for group in re.findall(r"nox -s ([a-z][a-z -]*[a-z])", text)
        for lane in group.split(" -- ")[0].split()
    }
    assert named
    assert {lane.replace("-", "_") for lane in named} <= set(lanes)


def test_ci_runs_the_commands_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^(python3 -m pip install nox && nox -s \w+)", readme, re.MULTILINE)
    assert len(commands) == 2
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert [command for command in commands if f"bash -c '{command}'" not in script] == []


@pytest.mark.parametrize("script", [".ci/run", "noxfile.py"])
def test_every_folder_of_tests_that_is_named_exists(script: str) -> None:
    text = (ROOT / script).read_text(encoding="utf-8")
    named = set(re.findall(r"""\btests/\w[\w/.]*(?=["'\s])""", text))
    assert len(named) > 1
    assert {path for path in named if not (ROOT / path).exists()} == set()


def test_every_example_runs_as_a_file_from_any_folder() -> None:
    programs = [path for path in tracked_files() if path.match("examples/*/*.py")]
    texts = {path: path.read_text(encoding="utf-8") for path in programs}
    started = {path: text for path, text in texts.items() if '__name__ == "__main__"' in text}
    assert len(started) >= 10
    for path, text in started.items():
        before = text.partition("from examples.")[0]
        assert before == text or "if not __package__:" in before, path
        assert "-m examples." not in text, path
