"""SAC (Haarnoja et al. 2018) swings pendulums up, with twin critics and target networks.

    python examples/learning/sac.py

Both critics are one ensemble, whose parameters are one container, stacked. The target networks are
a copy of it that follows by `lerp_`; the replay buffer is a container that is written and sampled
by index.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import copy

import torch
from examples.learning.curves import report, told
from examples.learning.pendulums import Pendulums
from torch import Tensor, nn
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from kd_core import TensorDict, TensorDictBase
from kd_nn import (
    EnsembleModule,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictModuleBase,
)
from kd_probabilistic import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
)

ITERATIONS, STEPS = 48, 40
COUNT, BATCH = 8, 128
DISCOUNT, TEMPERATURE, FOLLOW = 0.98, 0.02, 0.02


def squashed_normal(loc: Tensor, scale: Tensor) -> Independent[TransformedDistribution]:
    """Return a normal distribution on the actions between -1 and 1."""
    squashed = TransformedDistribution(Normal(loc, scale), [TanhTransform(cache_size=1)])
    return Independent(squashed, 1)


def policy_network() -> nn.Sequential:
    """Build the network of the actor, without the last step."""
    return nn.Sequential(
        nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )


def build_actor() -> ProbabilisticTensorDictSequential:
    """Build `obs -> loc, scale -> action, action_log_prob`."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(policy_network(), in_keys=["obs"], out_keys=["raw"]),
        TensorDictModule(NormalParamExtractor(), in_keys=["raw"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=squashed_normal,
            default_interaction_type=InteractionType.RANDOM,
            return_log_prob=True,
        ),
    )


def critic_network() -> nn.Sequential:
    """Build a network that values what was observed, joined with what was done."""
    return nn.Sequential(
        nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )


def build_critics() -> EnsembleModule:
    """Build two critics that run as one: `joined -> value`, of shape `(2, batch, 1)`."""
    critic = TensorDictModule(critic_network(), in_keys=["joined"], out_keys=["value"])
    return EnsembleModule(critic, num_copies=2)


def values_of(batch: TensorDictBase, critics: TensorDictModuleBase) -> Tensor:
    """Return what each critic gives for the actions of a batch, shape `(2, batch)`."""
    joined = torch.cat((batch["obs"], batch["action"]), -1)
    return critics(TensorDict({"joined": joined}, batch.batch_size))["value"].squeeze(-1)


def critic_loss(
    batch: TensorDictBase,
    actor: ProbabilisticTensorDictSequential,
    critics: EnsembleModule,
    targets: EnsembleModule,
) -> Tensor:
    """Return the error of both critics, a scalar."""
    with torch.no_grad():
        after = actor(batch.nested("next", TensorDict))
        value = values_of(after, targets).amin(0) - TEMPERATURE * after["action_log_prob"]
        target = after["reward"] + DISCOUNT * value
    return (values_of(batch, critics) - target).square().mean(1).sum()


def actor_loss(
    batch: TensorDictBase, actor: ProbabilisticTensorDictSequential, critics: EnsembleModule
) -> Tensor:
    """Return what the actor misses in the eyes of the critics, a scalar."""
    chosen = actor(batch.select("obs"))
    value = values_of(chosen, critics).amin(0)
    return (TEMPERATURE * chosen["action_log_prob"] - value).mean()


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """Apply one step against a loss, and return it."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class Learner:
    """Trains an actor and two critics, whose targets follow them."""

    def __init__(self, actor: ProbabilisticTensorDictSequential) -> None:
        self.actor, self.critics = actor, build_critics()
        self.targets = copy.deepcopy(self.critics)
        self._latest = TensorDict.from_module(self.critics).data
        self._followers = TensorDict.from_module(self.targets).data
        self._of_actor = torch.optim.Adam(actor.parameters(), lr=1e-3)
        self._of_critics = torch.optim.Adam(self.critics.parameters(), lr=1e-3)

    def learn(self, batch: TensorDictBase) -> float:
        """Apply one step against both losses of a batch; return the error of the critics."""
        error = update(self._of_critics, critic_loss(batch, self.actor, self.critics, self.targets))
        self.critics.requires_grad_(False)
        update(self._of_actor, actor_loss(batch, self.actor, self.critics))
        self.critics.requires_grad_(True)
        self._followers.lerp_(self._latest, FOLLOW)
        return error


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train an actor and two critics from seed 0.

    Returns:
        The actor, and the history of the iterations: the mean `reward` of a step, and `loss`, the
        error of the critics in the last step.
    """
    torch.manual_seed(0)
    actor = build_actor()
    learner = Learner(actor)
    pendulums = Pendulums(COUNT)
    buffer = TensorDict(
        {
            "obs": torch.zeros(iterations * STEPS, COUNT, 3),
            "action": torch.zeros(iterations * STEPS, COUNT, 1),
            "next": {
                "obs": torch.zeros(iterations * STEPS, COUNT, 3),
                "reward": torch.zeros(iterations * STEPS, COUNT),
            },
        },
        [iterations * STEPS, COUNT],
    )
    history: dict[str, list[float]] = {"reward": [], "loss": []}
    for step in range(iterations * STEPS):
        with torch.no_grad():
            taken = actor(TensorDict({"obs": pendulums.obs}, [COUNT])).select("obs", "action")
        taken["next"] = pendulums.step(taken["action"])
        buffer[step] = taken
        batch = buffer[torch.randint(step + 1, (BATCH,)), torch.randint(COUNT, (BATCH,))]
        error = learner.learn(batch)
        if (step + 1) % STEPS == 0:
            recent = buffer["next", "reward"][step + 1 - STEPS : step + 1]
            history["reward"].append(recent.mean().item())
            history["loss"].append(error)
    return actor, history


if __name__ == "__main__":
    with told(__doc__, "20 s"):
        report("sac", "SAC swings pendulums up", train(ITERATIONS)[1], limit=("reward", 0))
