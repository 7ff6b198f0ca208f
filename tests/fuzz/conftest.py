"""How long a harness runs, and what it reports.

A harness asks the fixture `seeds` for integers and builds one random program from each. In the
suite it gets a small, fixed number of them, the same in every run. With `KD_FUZZ_MINUTES` set
(`nox -s fuzz -- MINUTES`) it gets new ones until the time is up; `KD_FUZZ_SEED` replays one.
What was run is counted and printed at the end.
"""

import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator

import pytest

MINUTES = float(os.environ.get("KD_FUZZ_MINUTES", "0"))
REPLAY = os.environ.get("KD_FUZZ_SEED")
# A long run explores; the suite repeats the same programs each time.
FIRST = int(time.time()) * 1000 if MINUTES else 0
COUNTS: dict[str, Counter[str]] = {}


class Seeds:
    """The seeds of one harness, and the counts of what it ran."""

    def __init__(self, name: str) -> None:
        self.counts = COUNTS.setdefault(name, Counter())

    def __call__(self, in_suite: int) -> Iterator[int]:
        """Yield `in_suite` seeds, or new seeds until the minutes asked for are over."""
        if REPLAY is not None:
            yield self._start(int(REPLAY))
            return
        end = time.monotonic() + 60 * MINUTES
        number = 0
        while time.monotonic() < end if MINUTES else number < in_suite:
            yield self._start(FIRST + number)
            number += 1

    def _start(self, seed: int) -> int:
        print(f"KD_FUZZ_SEED={seed}")  # shown by pytest when the test fails; the last one failed
        self.counts["programs"] += 1
        return seed

    def count(self, what: str, number: int = 1) -> None:
        """Add to the count of `what`: calls, files, events."""
        self.counts[what] += number


@pytest.fixture(autouse=True)
def _warnings_of_odd_programs() -> Iterator[None]:
    """Ignore warnings, once for all threads: `catch_warnings` in several at once undoes others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> Seeds:
    """Return the seeds of this harness."""
    return Seeds(request.node.name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if MINUTES:
        for name, counts in sorted(COUNTS.items()):
            told = ", ".join(f"{number} {what}" for what, number in counts.items())
            terminalreporter.write_line(f"{name}: {told}")
