"""TorchRL trains SAC on Pendulum with its own collector, buffer and loss."""

import torch
from measured import Numbers, fingerprint, main
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import DoubleToFloat, GymEnv, RewardScaling, StepCounter, TransformedEnv
from torchrl.envs.transforms import Compose
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import (
    MLP,
    NormalParamExtractor,
    ProbabilisticActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import SACLoss, SoftUpdate


def train() -> Numbers:
    """Train for two thousand steps."""
    env = TransformedEnv(
        GymEnv("Pendulum-v1"), Compose(DoubleToFloat(), RewardScaling(0.0, 0.1), StepCounter(100))
    )
    env.set_seed(torch.randint(1000, ()).item())
    actor = ProbabilisticActor(
        TensorDictSequential(
            TensorDictModule(MLP(3, 2, num_cells=[64, 64]), ["observation"], ["hidden"]),
            TensorDictModule(NormalParamExtractor(), ["hidden"], ["loc", "scale"]),
        ),
        in_keys=["loc", "scale"],
        spec=env.action_spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": env.action_spec.space.low, "high": env.action_spec.space.high},
    )
    critic = ValueOperator(MLP(4, 1, num_cells=[64, 64]), in_keys=["observation", "action"])
    loss = SACLoss(actor, critic, num_qvalue_nets=2, loss_function="smooth_l1")
    loss.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss, eps=0.995)
    collector = Collector(
        env, actor, frames_per_batch=100, total_frames=2000, init_random_frames=200
    )
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(2000), batch_size=64)
    optimiser = torch.optim.Adam(loss.parameters(), lr=3e-4)
    losses, rewards = [], []
    for data in collector:
        buffer.extend(data.reshape(-1))
        for _ in range(5):
            batch = buffer.sample()
            terms = loss(batch)
            value = terms["loss_actor"] + terms["loss_qvalue"] + terms["loss_alpha"]
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            target.step()
            losses.append(value.item())
        rewards.append(data["next", "reward"].sum().item())
    collector.shutdown()
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        final = env.rollout(50, actor)["next", "reward"].sum().item()
    return {
        "loss": sum(losses),
        "reward": sum(rewards),
        "final": final,
        "weights": fingerprint(loss),
    }


if __name__ == "__main__":
    main(train)
