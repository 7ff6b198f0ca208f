"""Drawing from a given generator.

The distributions of torch draw from the global generator of a device and cannot use another one.
During a draw the global generator therefore has the state of the given one; afterwards its own
state is restored, and the given generator has advanced.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Redirect all draws inside the context to `generator`.

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
