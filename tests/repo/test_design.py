"""docs/design.md stays short, and names the tree and the lanes as they are."""

import re
import tomllib
from pathlib import Path

from benchmarks.render import DESIGNS
from tests.repo.tree import IMPORT_NAMES, ROOT, SOURCES, source_files

TEXT = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")


def dotted(path: Path) -> str:
    """Return the import name of a module or folder below a `src`."""
    source = next(source for source in SOURCES if path.is_relative_to(source))
    return ".".join(path.relative_to(source).with_suffix("").parts)


def named_modules(text: str) -> set[str]:
    """Return the modules that `text` names in backticks."""
    return set(re.findall(r"`((?:kd_\w+)(?:\.[a-z_]+)+)`", text))


def test_every_module_it_names_exists() -> None:
    known = {dotted(path) for path in source_files()}
    known |= {name.removesuffix(".__init__") for name in known}
    assert named_modules(TEXT) - known == set()


def test_it_names_every_folder_and_every_top_module() -> None:
    tops = {
        ".".join(name.split(".")[:2])
        for path in source_files()
        if not (name := dotted(path)).endswith("__init__") or name.count(".") > 1
    }
    assert {name for name in tops - set(IMPORT_NAMES) if f"`{name}`" not in TEXT} == set()


def test_it_names_every_lane() -> None:
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    lanes = re.findall(r"^@nox\.session.*?^def (\w+)", noxfile, re.MULTILINE | re.DOTALL)
    assert "release_check" in lanes
    assert {lane for lane in lanes if f"`{lane.replace('_', '-')}`" not in TEXT} == set()


def drawn_layers(text: str) -> dict[str, list[set[str]]]:
    """Return what may import what, as `text` draws it: layers of each distribution, top first."""
    block = re.search(r"```text\n(kd_core  .*?)```", text, re.DOTALL)
    assert block
    lists = re.split(r"\n(?=kd_)", block[1])
    drawn = {line.split()[0]: line.split(maxsplit=1)[1] for line in lists}
    return {
        name: [{part.strip() for part in layer.split("|")} for layer in chain.split(">")]
        for name, chain in drawn.items()
    }


def contract_layers() -> dict[str, list[set[str]]]:
    """Return the contracts of whole distributions, without what does not exist yet."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    known = {dotted(path) for path in source_files()}
    known |= {name.removesuffix(".__init__") for name in known}
    contracts = {}
    for contract in settings["tool"]["importlinter"]["contracts"]:
        container = contract.get("containers", [""])[0]
        if container in IMPORT_NAMES:
            layers = [
                {part.strip(" ()") for part in layer.split("|")} for layer in contract["layers"]
            ]
            contracts[container] = [
                {part for part in layer if f"{container}.{part}" in known} for layer in layers
            ]
    return contracts


def test_its_layers_are_the_contracts() -> None:
    assert drawn_layers(TEXT) == contract_layers()


def test_its_designs_are_those_with_rows() -> None:
    section = TEXT.partition("## What carries the speed")[2].partition("\n## ")[0]
    named = re.findall(r"^- \*\*(.+?)\.\*\*", section, re.MULTILINE)
    assert [name.lower() for name in named] == [design for design, *_ in DESIGNS]


ROWS = re.compile(r'((?:"[^"\n]+"(?:, | and )?)+) in the benchmarks')


def rows_named(source: str) -> set[str]:
    """Return the rows of the benchmarks that comments and docstrings name."""
    text = re.sub(r"\s*\n\s*#?\s*", " ", source)
    return {row for names in ROWS.findall(text) for row in re.findall(r'"([^"]+)"', names)}


def test_rows_that_comments_name_are_in_the_benchmarks() -> None:
    known = (ROOT / "benchmarks" / "figures.json").read_text(encoding="utf-8")
    known += (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    lost = {
        f"{dotted(path)}: {row}"
        for path in source_files()
        for row in rows_named(path.read_text(encoding="utf-8"))
        if row not in known and row.rpartition(": ")[2] not in known
    }
    assert lost == set()
    assert rows_named('# see "a", "b: c" and\n    # "d" in the\n    # benchmarks') == {
        "a",
        "b: c",
        "d",
    }


def test_a_module_that_is_gone_is_seen() -> None:
    assert named_modules("`kd_core._gone` and `kd_core`") == {"kd_core._gone"}
