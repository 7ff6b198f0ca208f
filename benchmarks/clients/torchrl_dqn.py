"""TorchRL trains DQN on CartPole with its own collector, buffer, exploration and logger."""

import tempfile

import torch
from measured import Numbers, fingerprint, main
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.transforms import Compose
from torchrl.modules import MLP, EGreedyModule, QValueModule
from torchrl.objectives import DQNLoss, SoftUpdate
from torchrl.record import CSVLogger


def train() -> Numbers:
    """Train for a few thousand steps."""
    env = TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), RewardSum()))
    env.set_seed(torch.randint(1000, ()).item())
    network = MLP(4, 2, num_cells=[64, 64])
    policy = TensorDictSequential(
        TensorDictModule(network, ["observation"], ["action_value"]),
        QValueModule(spec=env.action_spec),
    )
    exploring = EGreedyModule(env.action_spec, annealing_num_steps=1000)
    collector = Collector(
        env, TensorDictSequential(policy, exploring), frames_per_batch=100, total_frames=3000
    )
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(2000), batch_size=32)
    loss = DQNLoss(policy, action_space=env.action_spec, delay_value=True)
    optimiser = torch.optim.Adam(loss.parameters(), lr=1e-3)
    target = SoftUpdate(loss, eps=0.99)
    rewards, losses = [], []
    with tempfile.TemporaryDirectory() as folder:
        logger = CSVLogger("dqn", folder)
        for step, data in enumerate(collector):
            buffer.extend(data)
            exploring.step(data.numel())
            for _ in range(8):
                value = loss(buffer.sample())["loss"]
                optimiser.zero_grad()
                value.backward()
                optimiser.step()
                target.step()
                losses.append(value.item())
            done = data["next", "done"]
            rewards.append(data["next", "episode_reward"][done].sum().item())
            logger.log_scalar("loss", losses[-1], step)
    collector.shutdown()
    return {"loss": sum(losses), "reward": sum(rewards), "weights": fingerprint(network)}


if __name__ == "__main__":
    main(train)
