"""Several walkers in a square that are to meet: a task for teams."""

import torch
from torch import Tensor

STRIDE = 0.1
DIRECTIONS = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])


class Meeting:
    """`worlds` squares with `walkers` each, which see themselves and the middle of their team.

    The reward of a team is minus the mean distance to its middle.
    """

    def __init__(self, worlds: int, walkers: int) -> None:
        self.places = torch.rand(worlds, walkers, 2) * 2 - 1

    @property
    def obs(self) -> Tensor:
        """What each walker sees, `(worlds, walkers, 4)`: its place, and how far the middle is."""
        middle = self.places.mean(1, keepdim=True)
        return torch.cat((self.places, middle - self.places), -1)

    def step(self, action: Tensor) -> Tensor:
        """Move every walker by one action, `(worlds, walkers)`; return the rewards `(worlds,)`."""
        self.places = (self.places + STRIDE * DIRECTIONS[action]).clamp(-1, 1)
        middle = self.places.mean(1, keepdim=True)
        return -(self.places - middle).norm(dim=-1).mean(-1)
