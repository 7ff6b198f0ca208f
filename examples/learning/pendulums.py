"""A batch of pendulums that a motor too weak to lift them must swing up."""

import math

import torch
from torch import Tensor

SECONDS = 0.05
GRAVITY, LENGTH, TORQUE, FASTEST = 10.0, 1.0, 2.0, 8.0
LONGEST = 200


class Pendulums:
    """`count` pendulums, each of which starts anew every 200 steps, not all at the same time.

    An observation holds cosine and sine of the angle from upright and the speed in eighths of a
    radian per second; the action is the share of the torque, between -1 and 1.
    """

    def __init__(self, count: int) -> None:
        self.angle, self.speed = self._fresh(count)
        self.age = torch.randint(LONGEST, (count,))

    @property
    def obs(self) -> Tensor:
        """What is seen of every pendulum, shape `(count, 3)`."""
        return torch.stack((self.angle.cos(), self.angle.sin(), self.speed / FASTEST), -1)

    def step(self, action: Tensor) -> dict[str, Tensor]:
        """Move every pendulum by one action, shape `(count, 1)`.

        Returns:
            What follows: `obs` `(count, 3)` and `reward` `(count,)`, which is 0 upright and at rest
            and negative elsewhere.
        """
        torque = TORQUE * action.squeeze(-1)
        off = (self.angle + math.pi) % (2 * math.pi) - math.pi
        cost = off.square() + 0.1 * self.speed.square() + 0.001 * torque.square()
        pull = 1.5 * GRAVITY / LENGTH * self.angle.sin() + 3 * torque / LENGTH**2
        self.speed = (self.speed + SECONDS * pull).clamp(-FASTEST, FASTEST)
        self.angle = self.angle + SECONDS * self.speed
        after = {"obs": self.obs, "reward": -cost / 10}
        self.age += 1
        going_on = self.age < LONGEST
        angle, speed = self._fresh(len(going_on))
        self.angle, self.speed = (
            self.angle.where(going_on, angle),
            self.speed.where(going_on, speed),
        )
        self.age = self.age.where(going_on, 0)
        return after

    @staticmethod
    def _fresh(count: int) -> tuple[Tensor, Tensor]:
        return math.pi * (2 * torch.rand(count) - 1), 2 * torch.rand(count) - 1
