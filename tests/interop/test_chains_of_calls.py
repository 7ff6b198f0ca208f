"""Programs of modules, made and called in both libraries: pairs of options, and random chains.

All run by `python -m tests.interop.calls.chains`; a test runs some of them, always the same ones,
and more of them for `KD_FUZZ_MINUTES`.
"""

import os
import time
from random import Random
from typing import Final

import pytest

pytest.importorskip("tensordict")

from tests.interop.calls.chains import OPTIONS, chains, pairs, tried

FEW: Final = 120
MINUTES: Final = float(os.environ.get("KD_FUZZ_MINUTES", "0"))
OPEN: Final[dict[str, int]] = {
    "step": 11,
    "sequence": 1,
    "draw": 7,
    "policy": 1,
    "ensemble": 18,
    "wrap": 3,
    "own": 2,
    "chains": 6,
}
"""How many of the few programs differ: those on purpose (`tensordict_out`) and those not mended."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", [*OPTIONS, "chains"])
def test_a_program_of_modules_does_what_it_does_there(form: str) -> None:
    programs = [*(chains(range(FEW // 4)) if form == "chains" else pairs(form))]
    Random(0).shuffle(programs)
    found = [each for each in (tried(*program) for program in programs[:FEW]) if each.found]
    shown = "\n".join(f"{one.call}: {one.found}\n    {one.made}" for one in found)
    assert len(found) <= OPEN.get(form, 0), shown
    rest, share = programs[FEW:], max(len(programs[FEW:]), 1) / FEW
    ends = time.monotonic() + MINUTES * 60 / (len(OPTIONS) + 1)
    more = [one for one in rest if time.monotonic() < ends and tried(*one).found]
    assert len(more) <= (OPEN.get(form, 0) + 10) * share
