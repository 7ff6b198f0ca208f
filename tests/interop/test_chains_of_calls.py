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
from typing import Final

import pytest

pytest.importorskip("tensordict")

from tests.interop.calls.chains import OPTIONS, Tried, chains, pairs, tried

FEW: Final = 120
MINUTES: Final = float(os.environ.get("KD_FUZZ_MINUTES", "0"))
DECIDED: Final[tuple[tuple[str, str], ...]] = (
    ("*", "m(td, tensordict_out=*: result: batch length *"),
    ("*", "m({'x': td[[]'x'], *"),
    ("EnsembleModule(*", "sorted(m.state_dict()): result: 'params.*' != 'module.*"),
    ("TensorDictSequential((lambda *(lambda *", "skipping(m, td): after: *"),
    ("TensorDictSequential(lambda *, lambda *", "skipping(m, td): result: ({* != 'self'"),
    # Parameters stay parameters, those that were there return, and gradients reach what is given.
    ("Installing(*use_state_dict=True*", "m.[adfkt]*: result: 'Parameter' != 'Tensor'"),
    ("Installing(*use_state_dict=True*", "m.[af]*: result: '.w' != None"),
    ("Installing(*use_state_dict=True*", "m.[dk]*: result: 'w' != None"),
    ("Installing(*use_state_dict=True*", "m.learned(): result: None != ('Tensor'*"),
    # What is given keeps whether it requires gradients; what was frozen is frozen afterwards.
    ("Installing(*, Layers().eval().requires_grad_(False))", "m.[dk]*: result: True != False"),
    ("Installing(*, Layers().eval().requires_grad_(False))", "m.[af]*: result: False != True"),
    ("Installing(*, Layers().eval().requires_grad_(False))", "m.twice(): result: 'w' != None"),
    ("Installing(*, Layers().eval().requires_grad_(False))", "m.learned(): * != None"),
    ("*", "m.reset_out_keys().out_keys: result: * != '_'"),
    ("ProbabilisticTensorDictSequential(*", "*: kind of error, RuntimeError: Failed while*"),
    ("Installing(*preserve_module_state=False)", "m.[af]*: result: 'mean' != 'w'"),
    ("ProbabilisticTensorDictSequential(*inplace=*", "m(td, tensordict_out=*: result: * != 'self'"),
    ("*out_keys=[[]]*", "skipping(m, td): raises here: *"),
    ("*", "*: raises here: made InvalidKey"),
    # Entries at keys that are not selected stay; what was reset is as one that never was selected.
    ("*", "m.select_out_keys(*: after: [-0-9]*"),
    ("*selected_out_keys=[[]*", "*: after: [-0-9]*"),
    ("*", "m.select_out_keys(*: moved: '.*' != 'new'"),
    ("*", "m.select_out_keys(*).reset_out_keys()(td): result: ({* != 'self'"),
    ("*lambda td: *", "m.select_out_keys(*).reset_out_keys()(td): after: *"),
    # Too many tensors are refused before a step runs; what a module raised is not hidden.
    ("*lambda td: *", "m(td[[]'x']*: kind of error, KeyError*"),
    ("*", "m(td.lock_()): kind of error, KeyError*"),
    ("ProbabilisticTensorDictSequential(*", "m.log_prob(m(td)): kind of error, KeyError*"),
    ("*Categorical*return_composite=True*", "*: raises here: ShapeMismatch"),
)
"""Differences that are on purpose: how a module is made, and its call with what differs.

Rows of `differences.toml` say why: those of `tensordict_out`, of `TensorDictParams`, of what does
nothing under `set_skip_existing`, of a step that fails, of selected outputs, of `to_module`, and of
composite distributions.
"""

OPEN: Final[dict[str, int]] = {}
"""How many of the few programs differ and are not mended yet; none may be added."""

RARE: Final = 60
"""Of so many programs of a long run one may differ; it is printed if there are more."""


def differs(one: Tried) -> bool:
    """Return whether a program does something else here, not on purpose."""
    told = f"{one.call}: {one.found}"
    if one.found == "kind of error":
        told += f", {one.theirs}"
    on_purpose = any(fnmatchcase(one.made, at) and fnmatchcase(told, what) for at, what in DECIDED)
    return one.found is not None and not on_purpose


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
    count, more, ends = 0, [], time.monotonic() + MINUTES * 60 / (len(OPTIONS) + 1)
    for program in rest:
        if time.monotonic() > ends:
            break
        one = tried(*program)
        count += 1
        if differs(one):
            more.append(one)
    assert len(more) <= count / RARE, told(more)
