"""Drawing from a given generator.

The distributions of torch draw from the global generator of a device and cannot use another one.
During a draw the global generator therefore has the state of the given one; afterwards its own
state is restored, and the given generator has advanced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kd_core import InvalidArgument, NestedKey, TensorDictBase, format_key, unravel_key_to_tuple


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


def generator_at(tensordict: TensorDictBase, key: NestedKey) -> torch.Generator | int | None:
    """Return the generator or seed that an entry holds, None if there is none."""
    if key not in tensordict.keys(True):
        return None
    return as_generator(tensordict[unravel_key_to_tuple(key)], key)


def as_generator(found: object, key: NestedKey) -> torch.Generator | int:
    """Return the generator or seed that the entry at `key` is."""
    if isinstance(found, torch.Generator):
        return found
    if isinstance(found, Tensor) and found.numel() == 1 and not found.is_floating_point():
        return int(found.item())
    if isinstance(found, int):
        return found
    raise InvalidArgument(
        f"the entry {format_key(key)} must hold a `torch.Generator` or one integer seed, got "
        f"{type(found).__name__}."
    )


def advance(tensordict: TensorDictBase, key: NestedKey, generator: torch.Generator) -> None:
    """Replace the seed that an entry holds by one that a generator draws."""
    made = torch.empty((), dtype=torch.int64, device=generator.device)
    seed = int(made.random_(generator=generator))
    before: object = tensordict[unravel_key_to_tuple(key)]
    if isinstance(before, Tensor):
        limit = torch.iinfo(before.dtype).max
        tensordict.set(key, torch.full_like(before, seed % (limit + 1)))
    else:
        tensordict.set_non_tensor(key, seed)
