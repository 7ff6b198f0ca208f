"""The table of planted faults follows the code: each fault can be planted, and has tests."""

import tomllib
from collections import Counter

from tests.repo.tree import ROOT

TABLE = ROOT / "tools" / "planted_faults.toml"


def test_every_planted_fault_can_be_planted() -> None:
    rows = tomllib.loads(TABLE.read_text())["fault"]
    stale = []
    for row in rows:
        path = ROOT / "packages" / row["file"]
        found = path.read_text().count(row["before"]) if path.is_file() else 0
        if found != 1:
            stale.append(f"{row['name']}: its text is {found} times in {row['file']}")
        tests = ROOT / row["tests"].split()[0].partition("::")[0]
        if not tests.is_file():
            stale.append(f"{row['name']}: {tests.name} is not there")
    assert stale == []
    names = Counter(row["name"] for row in rows)
    assert [name for name, count in names.items() if count > 1] == []
