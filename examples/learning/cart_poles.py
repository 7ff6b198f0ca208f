"""A batch of carts, each of which balances a pole: the task of Barto, Sutton and Anderson 1983."""

import torch
from torch import Tensor

SECONDS = 0.02
GRAVITY, CART, POLE, HALF_LENGTH, FORCE = 9.8, 1.0, 0.1, 0.5, 10.0
WIDEST, STEEPEST = 2.4, 0.2095  # metres from the middle, radians from upright
LONGEST = 200


class CartPoles:
    """`count` carts on their tracks; one that has dropped its pole, or is through, starts anew.

    A state holds position, speed, angle and angular speed; the action 1 pushes right, 0 left. Every
    step has the reward 1.
    """

    def __init__(self, count: int) -> None:
        self.state = self._fresh(count)
        self.age = torch.zeros(count, dtype=torch.long)

    def step(self, action: Tensor) -> dict[str, Tensor]:
        """Move every cart by one action, shape `(count,)`.

        Returns:
            What follows: `obs` `(count, 4)` and `reward`, `fell`, `done`, each `(count,)`. `done`
            is true after a fall and at the last step of an episode.
        """
        state = _moved(self.state, action)
        fell = (state[:, 0].abs() > WIDEST) | (state[:, 2].abs() > STEEPEST)
        self.age += 1
        done = fell | (self.age == LONGEST)
        self.age = self.age.where(~done, 0)
        self.state = state.where(~done[:, None], self._fresh(len(state)))
        return {"obs": state, "reward": torch.ones(len(state)), "fell": fell, "done": done}

    @staticmethod
    def _fresh(count: int) -> Tensor:
        return torch.rand(count, 4) * 0.1 - 0.05


def _moved(state: Tensor, action: Tensor) -> Tensor:
    """Return the states after one step of Euler's method."""
    _, speed, angle, turn = state.unbind(-1)
    push = FORCE * (2 * action - 1)
    sin, cos = angle.sin(), angle.cos()
    mass = CART + POLE
    lever = (push + POLE * HALF_LENGTH * turn.square() * sin) / mass
    tilt = (GRAVITY * sin - cos * lever) / (HALF_LENGTH * (4 / 3 - POLE * cos.square() / mass))
    pull = lever - POLE * HALF_LENGTH * tilt * cos / mass
    rates = torch.stack((speed, pull, turn, tilt), -1)
    return state + SECONDS * rates
