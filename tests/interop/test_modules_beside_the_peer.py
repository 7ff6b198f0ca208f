"""Modules do with a container what those of the peer do: result, what is written where, errors."""

import pytest

pytest.importorskip("tensordict")

import tensordict
import tensordict.nn
from tests.interop.calls.modules import CALLS, DELIBERATE, MODULES, given
from tests.interop.calls.outcomes import difference, outcome
from tests.interop.calls.subjects import Library

import kd_core  # the peer is there
import kd_nn
import kd_probabilistic

OURS = Library("kd", kd_core, kd_nn, kd_probabilistic)
PEER = Library("peer", tensordict, tensordict.nn)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("made", MODULES)
def test_a_call_of_a_module_does_what_that_of_the_peer_does(made: str, call: str) -> None:
    found = []
    for lib in (OURS, PEER):
        td, module = given(lib), MODULES[made](lib)
        found.append(outcome(lambda: CALLS[call](lib, module, td), td, lib))  # noqa: B023  # now
    differs = difference(*found)
    if (made, call) in DELIBERATE:
        assert differs
    else:
        assert differs is None, (differs, *found)
