"""Programs of modules, made and called in both libraries: pairs of options, and random chains.

All run by `python -m tests.interop.calls.chains`; a test runs some of them, always the same ones,
and more of them for `KD_FUZZ_MINUTES`.
"""

import os
import time
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
    ("*out_keys=[[]])", "skipping(m, td): raises here: OutputMismatch"),
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


def differs(one: Tried) -> bool:
    """Return whether a program does something else here, not on purpose."""
    told = f"{one.call}: {one.found}"
    if one.found == "kind of error":
        told += f", {one.theirs}"
    on_purpose = any(fnmatchcase(one.made, at) and fnmatchcase(told, what) for at, what in DECIDED)
    return one.found is not None and not on_purpose


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", [*OPTIONS, "chains"])
def test_a_program_of_modules_does_what_it_does_there(form: str) -> None:
    programs = [*(chains(range(FEW // 4)) if form == "chains" else pairs(form))]
    Random(0).shuffle(programs)
    found = [each for each in (tried(*program) for program in programs[:FEW]) if differs(each)]
    shown = "\n".join(f"{one.call}: {one.found}\n    {one.made}" for one in found)
    assert len(found) <= OPEN.get(form, 0), shown
    rest, share = programs[FEW:], max(len(programs[FEW:]), 1) / FEW
    ends = time.monotonic() + MINUTES * 60 / (len(OPTIONS) + 1)
    more = [one for one in rest if time.monotonic() < ends and differs(tried(*one))]
    assert len(more) <= (OPEN.get(form, 0) + 10) * share
