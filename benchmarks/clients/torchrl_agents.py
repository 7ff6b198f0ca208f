"""TorchRL trains a multi-agent policy (MAPPO) on VMAS navigation."""

import torch
from measured import Numbers, fingerprint, main
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import RewardSum, TransformedEnv
from torchrl.envs.libs.vmas import VmasEnv
from torchrl.modules import MultiAgentMLP, ProbabilisticActor, TanhNormal
from torchrl.objectives import ClipPPOLoss, ValueEstimators


def train() -> Numbers:
    """Train for a few iterations."""
    env = VmasEnv("navigation", num_envs=8, n_agents=3, max_steps=50, seed=0)
    env = TransformedEnv(env, RewardSum([("agents", "reward")], [("agents", "episode_reward")]))
    size = env.observation_spec["agents", "observation"].shape[-1]
    actions = env.full_action_spec_unbatched["agents", "action"]
    network = torch.nn.Sequential(
        MultiAgentMLP(
            size, 2 * actions.shape[-1], 3, centralised=False, share_params=False, num_cells=[32]
        ),
        NormalParamExtractor(),
    )
    actor = ProbabilisticActor(
        TensorDictModule(
            network, [("agents", "observation")], [("agents", "loc"), ("agents", "scale")]
        ),
        spec=env.full_action_spec_unbatched,
        in_keys=[("agents", "loc"), ("agents", "scale")],
        out_keys=[("agents", "action")],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": actions.space.low, "high": actions.space.high},
        return_log_prob=True,
        log_prob_key=("agents", "sample_log_prob"),
    )
    critic = TensorDictModule(
        MultiAgentMLP(size, 1, 3, centralised=True, share_params=True, num_cells=[32]),
        [("agents", "observation")],
        [("agents", "state_value")],
    )
    collector = Collector(env, actor, frames_per_batch=400, total_frames=2400)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(400), sampler=SamplerWithoutReplacement(), batch_size=100
    )
    loss = ClipPPOLoss(actor, critic, entropy_coeff=1e-3, normalize_advantage=False)
    loss.set_keys(
        reward=env.reward_key,
        action=env.action_key,
        value=("agents", "state_value"),
        done=("agents", "done"),
        terminated=("agents", "terminated"),
        sample_log_prob=("agents", "sample_log_prob"),
    )
    loss.make_value_estimator(ValueEstimators.GAE, gamma=0.99, lmbda=0.9)
    optimiser = torch.optim.Adam(loss.parameters(), lr=3e-4)
    losses, rewards = [], []
    for data in collector:
        shape = data["next", "agents", "reward"].shape
        for name in ("done", "terminated"):
            value = data["next", name].unsqueeze(-1).expand(shape)
            data.set(("next", "agents", name), value)
        with torch.no_grad():
            loss.value_estimator(
                data,
                params=loss.critic_network_params,
                target_params=loss.target_critic_network_params,
            )
        buffer.extend(data.reshape(-1))
        for _ in range(4):
            for batch in buffer:
                terms = loss(batch)
                value = terms["loss_objective"] + terms["loss_critic"] + terms["loss_entropy"]
                optimiser.zero_grad()
                value.backward()
                torch.nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
                optimiser.step()
                losses.append(value.item())
        rewards.append(data["next", "agents", "reward"].sum().item())
        collector.update_policy_weights_()
    collector.shutdown()
    return {"loss": sum(losses), "reward": sum(rewards), "weights": fingerprint(loss)}


if __name__ == "__main__":
    main(train)
