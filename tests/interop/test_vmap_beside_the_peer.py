"""`vmap` maps the same, whether the peer, which changes functions of torch, is imported or not."""

import subprocess
import sys

import pytest

pytest.importorskip("tensordict")

PROGRAM = """
import torch
{before}
from kd_core import TensorDict, lazy_stack
{after}

leaves = {{"a": torch.arange(24.0).reshape(2, 3, 4), "n": {{"b": torch.ones(2, 3)}}}}
td = TensorDict(leaves, [2, 3])
for at in (0, 1):
    for out in (0, 1):
        for each in (td, lazy_stack(list(td.unbind(1)), 1)):
            found = torch.vmap(lambda x: x * 2, in_dims=at, out_dims=out)(each)
            expected = td * 2 if at == out else (td * 2).transpose(0, 1)
            assert found.batch_size == expected.batch_size, (at, out)
            assert (found == expected).all(), (at, out)
for dims in ({{"in_dims": 2}}, {{"out_dims": 2}}):
    try:
        torch.vmap(lambda x: x, **dims)(td.select("a"))
    except (ValueError, IndexError):
        continue
    raise AssertionError(dims)
whole = torch.vmap(lambda x: x + 1)(TensorDict({{"w": torch.zeros(8, 3)}}))
assert whole.batch_size == (8,)
assert torch.equal(whole["w"], torch.ones(8, 3))
for source in (td, lazy_stack(list(td.unbind(0)), 0)):
    alike = torch.vmap(lambda x: x + 1, (0,), (0,))(source)
    assert alike.batch_size == (2, 3)
    assert (alike == td + 1).all()
"""


@pytest.mark.parametrize("when", ["never", "before", "after"])
def test_vmap_maps_the_batch(when: str) -> None:
    peer = "import tensordict.nn"
    program = PROGRAM.format(
        before=peer if when == "before" else "", after=peer if when == "after" else ""
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True
    )
    assert not done.returncode, done.stderr[-2000:]
