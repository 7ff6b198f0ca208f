"""Programs of modules, made and called in both libraries: pairs of options, and random chains.

All run by `python -m tests.interop.calls.chains`; a test runs some of them, always the same ones,
and more of them for `KD_FUZZ_MINUTES`.
"""

import itertools
import os
import time
from collections.abc import Iterable
from fnmatch import fnmatchcase
from random import Random
from typing import Final, NamedTuple

import pytest

pytest.importorskip("tensordict")

from tests.interop.calls.chains import OPTIONS, Tried, chains, pairs, tried

FEW: Final = 120
MINUTES: Final = float(os.environ.get("KD_FUZZ_MINUTES", "0"))


class Decided(NamedTuple):
    """A difference that is on purpose: patterns of its parts, and what is true of the module."""

    made: str
    call: str
    found: str
    ours: str = "*"
    theirs: str = "*"
    fact: str = ""


SEQUENCES: Final = "*TensorDictSequential(*"
FROZEN: Final = "Installing(*, Layers().eval().requires_grad_(False))"
STATE_DICT: Final = "Installing(*use_state_dict=True*"
DECIDED: Final = (
    # `tensordict_out` takes the outputs wherever they come from.
    Decided("*num_samples=*", "m(td, tensordict_out=*", "result: batch length *"),
    Decided("*inplace=*", "m(td, tensordict_out=*", "result: batch length *"),
    Decided("ProbabilisticTensorDictSequential(*inplace=*", "m(td, tensordict_out=*", "*!= 'self'"),
    # A dict is read as the container, and not as the first input.
    Decided("TensorDictModule(*", "m({'x': td[[]'x'], *", "result: *"),
    Decided("TensorDictModule(*in_keys=[[]]*", "m({'x': td[[]'x'], *", "kind of error"),
    Decided("TensorDictModule(*out_keys=[[]]*", "m({'x': td[[]'x'], *", "*: OutputMismatch"),
    Decided("EnsembleModule(*", "sorted(m.state_dict())", "result: 'params.*' != 'module.*"),
    # What has no outputs runs under `set_skip_existing`.
    Decided(SEQUENCES, "skipping(m, td)", "*", fact="idle"),
    Decided("TensorDictModule(*out_keys=[[]]*", "skipping(m, td)", "raises here: OutputMismatch"),
    # Parameters stay parameters, those that were there return, and gradients reach what is given.
    Decided(STATE_DICT, "m.[adfkt]*", "result: 'Parameter' != 'Tensor'"),
    Decided(STATE_DICT, "m.[af]*", "result: '.w' != None"),
    Decided(STATE_DICT, "m.[dk]*", "result: 'w' != None"),
    Decided(STATE_DICT, "m.learned()", "result: None != ('Tensor'*"),
    # What is given keeps whether it requires gradients; what was frozen is frozen afterwards.
    Decided(FROZEN, "m.[dk]*", "result: True != False"),
    Decided(FROZEN, "m.[af]*", "result: False != True"),
    Decided(FROZEN, "m.twice()", "result: 'w' != None"),
    Decided(FROZEN, "m.learned()", "* != None"),
    Decided("Installing(*preserve_module_state=False)", "m.[af]*", "result: 'mean' != 'w'"),
    # What a module raised is not hidden, and too many tensors are refused before a step runs.
    Decided(
        "ProbabilisticTensorDictSequential(*", "*", "kind of error",
        theirs="RuntimeError: Failed while executing*",
    ),
    Decided(
        SEQUENCES, "m(td[[]'x']*", "kind of error", "DispatchError: * expected at most *",
        "KeyError*",
    ),
    Decided("*", "*", "raises here: made InvalidKey", "*`out_keys` names * twice*"),
    # A selection is made among all outputs, so that it is another error that comes.
    Decided(
        "*selected_out_keys=*", "m.select_out_keys(*", "kind of error",
        theirs="ValueError: All keys in selected*",
    ),
    # Entries at keys that are not selected stay.
    Decided("*", "*", "after: *", fact="hides"),
    Decided("*", "*", "moved: *", fact="hides"),
    Decided("*", "*", "result: *", fact="hides"),
    Decided("*lambda td: *selected_out_keys=*", "*", "after: *"),  # where a function writes
    Decided("*lambda td: *selected_out_keys=*", "*", "result: *"),
    Decided("*lambda td: *", "m.select_out_keys(*", "after: *"),
    Decided("*selected_out_keys=*", "m.select_subsequence(*", "*: length *"),
)  # fmt: skip
"""Differences that are on purpose.

Rows of `differences.toml` say why: those of `tensordict_out`, of `TensorDictParams`, of what does
nothing under `set_skip_existing`, of a step that fails, of selected outputs, of `to_module`, and of
composite distributions.
"""

OPEN: Final[dict[str, int]] = {}
"""How many of the few programs differ and are not mended yet; none may be added."""


def differs(one: Tried) -> bool:
    """Return whether a program does something else here, not on purpose."""
    parts = one.made, one.call, str(one.found), one.ours, one.theirs
    return one.found is not None and not any(
        each.fact in one.facts and all(map(fnmatchcase, parts, each[:5])) for each in DECIDED
    )


def told(found: list[Tried]) -> str:
    return "\n".join(f"{one.call}: {one.found}\n    {one.made}" for one in found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", [*OPTIONS, "chains"])
def test_a_program_of_modules_does_what_it_does_there(form: str) -> None:
    rest: Iterable[tuple[str, str]]
    if form == "chains":  # new ones in each long run
        few, rest = [*chains(range(FEW // 4))], chains(itertools.count(time.time_ns()))
    else:
        programs = [*pairs(form)]
        Random(0).shuffle(programs)
        few, rest = programs[:FEW], programs[FEW:]
    found = [one for one in (tried(*program) for program in few) if differs(one)]
    assert len(found) <= OPEN.get(form, 0), told(found)
    ends = time.monotonic() + MINUTES * 60 / (len(OPTIONS) + 1)
    more = itertools.takewhile(lambda _: time.monotonic() < ends, rest)
    found = [one for one in (tried(*program) for program in more) if differs(one)]
    assert not found, told(found)
