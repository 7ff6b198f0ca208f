"""What each of three ranks runs of random programs: `exchanging`, for the seeds in a file."""

import json
import traceback

import torch
import torch.distributed as dist
from tests.core.distributed.ranks import RANKS, Programs
from tests.fuzz.exchanging import Program

PROGRAMS = Programs()


@PROGRAMS.add
def random_programs(rank: int) -> object:
    """Return the first seed that went wrong, the name of its call, and what is wrong."""
    for seed in json.loads((PROGRAMS.folder / "seeds").read_text()):
        program = Program(seed, rank)
        try:
            wrong = program.call()
        except Exception:
            wrong = traceback.format_exc()
        every: list[str | None] = [None] * RANKS
        dist.all_gather_object(every, wrong)
        if any(every):
            name = getattr(program.call, "__name__", "")
            return [seed, name, *every]
    return None


if __name__ == "__main__":
    torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)  # imports a part of torch
    PROGRAMS.main()
