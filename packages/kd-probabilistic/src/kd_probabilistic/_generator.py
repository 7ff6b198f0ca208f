"""Drawing from a generator of one's own.

torch's distributions draw from the global generator of a device and take no other. While a draw is
made, the global generator therefore carries the state of the given one; afterwards each has its own
state back, the given one advanced.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Let everything that draws in this block draw from `generator`.

    Args:
        generator: A generator on the device of the draws.
    """
    shared = _shared(generator.device)
    before = shared.get_state()
    shared.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(shared.get_state())
        shared.set_state(before)


def _shared(device: torch.device) -> torch.Generator:
    """Return the global generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    generator: torch.Generator = torch.cuda.default_generators[device.index]
    return generator


def seeded(seed: int, device: torch.device) -> torch.Generator:
    """Return a new generator on `device` that starts from `seed`."""
    return torch.Generator(device).manual_seed(seed)
