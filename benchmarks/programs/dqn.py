"""`examples.learning.dqn` by hand: plain dicts of tensors, plain modules, the same numbers."""

import copy

import torch
from examples.learning.cart_poles import CartPoles
from examples.learning.dqn import BATCH, CARTS, DISCOUNT, EXPLORED, FOLLOW, SIZE, STEPS, network
from torch import Tensor, nn


def new_buffer() -> dict[str, Tensor]:
    """Return a buffer of zeros."""
    return {
        "obs": torch.zeros(SIZE, 4),
        "action": torch.zeros(SIZE, dtype=torch.int64),
        "next_obs": torch.zeros(SIZE, 4),
        "reward": torch.zeros(SIZE),
        "fell": torch.zeros(SIZE, dtype=torch.bool),
        "done": torch.zeros(SIZE, dtype=torch.bool),
    }


@torch.no_grad()
def play(carts: CartPoles, critic: nn.Module, explored: float) -> dict[str, Tensor]:
    """Return one step of all carts, of which some explore."""
    obs = carts.state
    best = critic(obs).argmax(-1)
    explores = torch.rand(CARTS) < explored
    action = torch.where(explores, torch.randint(2, (CARTS,)), best)
    after = carts.step(action)
    after["next_obs"] = after.pop("obs")
    return {"obs": obs, "action": action, **after}


def loss_of(batch: dict[str, Tensor], critic: nn.Module, target: nn.Module) -> Tensor:
    """Return the error of the values of a minibatch, a scalar."""
    with torch.no_grad():
        following = target(batch["next_obs"]).amax(-1)
    wanted = batch["reward"] + DISCOUNT * (~batch["fell"]).float() * following
    found = critic(batch["obs"]).gather(-1, batch["action"][:, None]).squeeze(-1)
    return nn.functional.smooth_l1_loss(found, wanted)


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train a critic from seed 0; return it and the history."""
    torch.manual_seed(0)
    critic = network()
    target = copy.deepcopy(critic)
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    carts, buffer, count = CartPoles(CARTS), new_buffer(), 0
    history: dict[str, list[float]] = {"steps": [], "loss": []}
    for iteration in range(iterations):
        ended = torch.zeros(())
        for _ in range(STEPS):
            step = play(carts, critic, max(0.05, 1 - iteration / EXPLORED))
            ended += step["done"].sum()
            places = (torch.arange(CARTS) + count) % SIZE
            for key, entry in buffer.items():
                entry[places] = step[key]
            count += CARTS
            rows = torch.randint(min(count, SIZE), (BATCH,))
            batch = {key: entry[rows] for key, entry in buffer.items()}
            loss = loss_of(batch, critic, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if count // CARTS % FOLLOW == 0:
                target.load_state_dict(critic.state_dict())
        history["steps"].append((STEPS * CARTS / ended.clamp(min=1)).item())
        history["loss"].append(loss.item())
    return critic, history
