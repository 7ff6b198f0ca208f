"""What silences a checker says why: `type: ignore[code]  # reason`, `noqa: CODE  # reason`."""

import io
import re
import tokenize

from tests.repo.tree import ROOT, source_files

PRAGMA = re.compile(r"#\s*(type: ignore(\[[^]]*\])?|noqa(: *[A-Z]+\d+(, *[A-Z]+\d+)*)?)")
FILES = [*source_files(), *sorted((ROOT / "tests").rglob("*.py")), ROOT / "conftest.py"]


def says_why(line: str) -> bool:
    """Return whether words follow what silences a checker in a line, if that is there."""
    found = PRAGMA.search(line)
    return found is None or re.search(r"\w\w", PRAGMA.sub("", line[found.start() :])) is not None


def without_reason(source: str) -> list[str]:
    """Return the comments that silence a checker and say no word more."""
    if all(map(says_why, source.splitlines())):
        return []
    comments = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and PRAGMA.match(token.string)
    ]
    return [comment for comment in comments if not says_why(comment)]


def test_each_suppression_has_its_reason() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): without_reason(path.read_text(encoding="utf-8"))
        for path in FILES
    }
    assert {path: bare for path, bare in found.items() if bare} == {}


def test_a_suppression_without_reason_is_seen() -> None:
    bare = ["# type: ignore[misc]", "# noqa: B018, E711", "# type: ignore[misc] # noqa: B018"]
    source = "\n".join([*bare, "# noqa: N801 - usual", "# type: ignore[misc]  # by torch", ""])
    assert without_reason(source) == bare
