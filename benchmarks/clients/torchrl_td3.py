"""TorchRL trains TD3 on Pendulum: several environments, a memory-mapped buffer, delayed updates."""

import torch
from measured import Numbers, fingerprint, main
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
from torchrl.envs import DoubleToFloat, GymEnv, SerialEnv, StepCounter, TransformedEnv
from torchrl.envs.transforms import Compose
from torchrl.modules import MLP, AdditiveGaussianModule, TanhModule, ValueOperator
from torchrl.objectives import SoftUpdate, TD3Loss


def train() -> Numbers:
    """Train for two thousand steps."""
    env = TransformedEnv(
        SerialEnv(2, lambda: GymEnv("Pendulum-v1")), Compose(DoubleToFloat(), StepCounter(100))
    )
    env.set_seed(torch.randint(1000, ()).item())
    spec = env.action_spec_unbatched
    actor = TensorDictSequential(
        TensorDictModule(MLP(3, 1, num_cells=[64, 64]), ["observation"], ["param"]),
        TanhModule(in_keys=["param"], out_keys=["action"], spec=spec),
    )
    critic = ValueOperator(MLP(4, 1, num_cells=[64, 64]), in_keys=["observation", "action"])
    exploring = TensorDictSequential(actor, AdditiveGaussianModule(spec=spec, sigma_init=0.5))
    loss = TD3Loss(actor, critic, bounds=(-2.0, 2.0), num_qvalue_nets=2)
    loss.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss, eps=0.995)
    collector = Collector(
        env, exploring, frames_per_batch=100, total_frames=2000, init_random_frames=200
    )
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(2000), batch_size=64)
    actors = torch.optim.Adam(loss.actor_network_params.flatten_keys().values(), lr=3e-4)
    critics = torch.optim.Adam(loss.qvalue_network_params.flatten_keys().values(), lr=3e-4)
    losses, rewards = [], []
    for data in collector:
        buffer.extend(data.reshape(-1))
        for step in range(5):
            batch = buffer.sample()
            value, _ = loss.value_loss(batch)
            critics.zero_grad()
            value.backward()
            critics.step()
            losses.append(value.item())
            if step % 2:
                value, _ = loss.actor_loss(batch)
                actors.zero_grad()
                value.backward()
                actors.step()
                target.step()
                losses.append(value.item())
        rewards.append(data["next", "reward"].sum().item())
    collector.shutdown()
    return {"loss": sum(losses), "reward": sum(rewards), "weights": fingerprint(loss)}


if __name__ == "__main__":
    main(train)
