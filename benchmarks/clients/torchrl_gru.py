"""TorchRL trains a recurrent policy (GRU) by DQN on CartPole, on slices of trajectories."""

import torch
from measured import Numbers, fingerprint, main
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
from torchrl.envs import GymEnv, InitTracker, StepCounter, TransformedEnv
from torchrl.envs.transforms import Compose
from torchrl.modules import MLP, EGreedyModule, GRUModule, QValueModule, set_recurrent_mode
from torchrl.objectives import DQNLoss, SoftUpdate


def train() -> Numbers:
    """Train for two thousand steps."""
    gru = GRUModule(input_size=32, hidden_size=32, in_key="embedded", out_key="features")
    env = TransformedEnv(
        GymEnv("CartPole-v1"), Compose(InitTracker(), StepCounter(), gru.make_tensordict_primer())
    )
    env.set_seed(torch.randint(1000, ()).item())
    policy = TensorDictSequential(
        TensorDictModule(MLP(4, 32, num_cells=[32]), ["observation"], ["embedded"]),
        gru,
        TensorDictModule(MLP(32, 2, num_cells=[32]), ["features"], ["action_value"]),
        QValueModule(spec=env.action_spec),
    )
    exploring = EGreedyModule(env.action_spec, annealing_num_steps=1000)
    collector = Collector(
        env, TensorDictSequential(policy, exploring), frames_per_batch=100, total_frames=2000
    )
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(2000),
        sampler=SliceSampler(slice_len=8, end_key=("next", "done"), strict_length=False),
        batch_size=64,
    )
    loss = DQNLoss(policy, action_space=env.action_spec, delay_value=True)
    optimiser = torch.optim.Adam(loss.parameters(), lr=1e-3)
    target = SoftUpdate(loss, eps=0.99)
    losses, rewards = [], []
    for data in collector:
        buffer.extend(data)
        exploring.step(data.numel())
        for _ in range(4):
            batch = buffer.sample()
            with set_recurrent_mode(True):
                value = loss(batch)["loss"]
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            target.step()
            losses.append(value.item())
        rewards.append(data["next", "reward"].sum().item())
    collector.shutdown()
    return {"loss": sum(losses), "reward": sum(rewards), "weights": fingerprint(policy)}


if __name__ == "__main__":
    main(train)
