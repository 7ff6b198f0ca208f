"""The programs of `examples/storing`, with few rows and kills."""

from tests import children
from tests.repo.tree import ROOT

PROGRAM = """
import torch
from examples.storing import checkpoints, replay_buffer, token_parts
torch.set_num_threads(1)
checkpoints.main(kills=5, steps=20)
token_parts.main(parts=2, rows=20)
replay_buffer.main(capacity=1000, batches=3)
"""


def test_programs_that_store_find_what_they_wrote() -> None:
    # A process of its own: it is forked, which processes with threads must not be.
    told = children.check_output("-c", PROGRAM, cwd=ROOT)
    assert "equal to a training without a kill" in told
    assert "read: " in told
    assert "after a restart: " in told  # a spawned process that shares the arena
