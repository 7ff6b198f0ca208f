"""TorchRL trains PPO on CartPole with its own collector, advantage and loss."""

import torch
from measured import Numbers, fingerprint, main
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import GymEnv, RewardSum, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE


def train() -> Numbers:
    """Train for a few thousand steps."""
    env = TransformedEnv(GymEnv("CartPole-v1"), RewardSum())
    env.set_seed(torch.randint(1000, ()).item())
    network = MLP(4, 2, num_cells=[64, 64], activation_class=torch.nn.Tanh)
    actor = ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["logits"]),
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=torch.distributions.OneHotCategorical,
        return_log_prob=True,
    )
    critic = ValueOperator(MLP(4, 1, num_cells=[64, 64]), in_keys=["observation"])
    collector = Collector(env, actor, frames_per_batch=400, total_frames=4000)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(400), sampler=SamplerWithoutReplacement(), batch_size=100
    )
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    loss = ClipPPOLoss(actor, critic, entropy_coeff=0.01)
    optimiser = torch.optim.Adam(loss.parameters(), lr=1e-3)
    losses, rewards = [], []
    for data in collector:
        for _ in range(4):
            advantage(data)
            buffer.extend(data.reshape(-1))
            for batch in buffer:
                terms = loss(batch)
                value = terms["loss_objective"] + terms["loss_critic"] + terms["loss_entropy"]
                optimiser.zero_grad()
                value.backward()
                torch.nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
                optimiser.step()
                losses.append(value.item())
        rewards.append(data["next", "episode_reward"][data["next", "done"]].sum().item())
        collector.update_policy_weights_()
    collector.shutdown()
    return {"loss": sum(losses), "reward": sum(rewards), "weights": fingerprint(loss)}


if __name__ == "__main__":
    main(train)
