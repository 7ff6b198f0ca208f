"""Both libraries called with the same arguments: what differs is on the list, or known and open.

One kind alone is quicker by `python -m tests.interop.calls.comparing --kind lazy`.
"""

from pathlib import Path
from typing import Final, TypeAlias

import pytest
import torch
from tests.interop.calls.comparing import Compared, every, table
from tests.interop.calls.decided import PATTERNS, pattern_for
from tests.interop.calls.subjects import KINDS

# Differences that are not on purpose and not mended yet, for each kind of container: none may be
# added, and a number that falls is lowered here. The goal is none.
OPEN: Final[dict[str, int]] = {
    "dense": 0,
    "nested": 0,
    "lazy": 0,
    "ragged": 0,
    "based": 0,
    "decorated": 0,
    "typed": 0,
    "params": 0,
    "unbatched": 0,
    "worded": 0,
    "named": 0,
    "locked": 0,
    "mapped": 0,
    "shared": 0,
    "unsized": 0,
    "empty": 0,
    "one_value": 0,
    "row_values": 0,
}

Calls: TypeAlias = dict[str, list[Compared]]


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    """Return what became of each call, for each kind of container."""
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("calls")
    return {kind: list(every([kind], None, False, folder)) for kind in KINDS}


def test_the_number_of_calls_is_shown(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print("", table(one for each in calls.values() for one in each), sep="\n")
    assert sum(map(len, calls.values())) > 40_000


@pytest.mark.parametrize("kind", KINDS)
def test_calls_differ_on_purpose_alone(kind: str, calls: Calls) -> None:
    differ = [one for one in calls[kind] if one.found is not None]
    new = [one for one in differ if pattern_for(kind, one.call, str(one.found)) is None]
    print(f"{kind}: {len(calls[kind])} calls, {len(differ)} differ, {len(new)} not on purpose")
    assert len(calls[kind]) > 1000
    shown = "\n".join(
        f"{one.call}: {one.found}\n  ours   {one.ours}\n  theirs {one.theirs}" for one in new
    )
    assert len(new) <= OPEN.get(kind, 0), shown[:20_000]


def test_every_pattern_is_needed(calls: Calls) -> None:
    used = {
        pattern_for(one.kind, one.call, one.found)
        for each in calls.values()
        for one in each
        if one.found is not None
    }
    assert [pattern for pattern in PATTERNS if pattern not in used] == []
