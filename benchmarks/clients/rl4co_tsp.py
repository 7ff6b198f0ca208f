"""RL4CO improves an attention policy on the travelling salesman problem by REINFORCE."""

import torch
from measured import Numbers, fingerprint, main
from rl4co.envs import TSPEnv
from rl4co.models.zoo import AttentionModelPolicy


def train() -> Numbers:
    """Train for a few steps."""
    env = TSPEnv(generator_params={"num_loc": 10}, seed=0)
    policy = AttentionModelPolicy(
        env_name=env.name, embed_dim=32, num_encoder_layers=1, num_heads=4, feedforward_hidden=32
    )
    optimiser = torch.optim.Adam(policy.parameters(), lr=1e-3)
    rewards = []
    for _ in range(20):
        out = policy(env.reset(batch_size=[32]), env, phase="train")
        reward = out["reward"]
        loss = -((reward - reward.mean()) * out["log_likelihood"]).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        rewards.append(reward.mean().item())
    with torch.no_grad():
        greedy = policy(env.reset(batch_size=[32]), env, phase="test", decode_type="greedy")
    return {
        "rewards": sum(rewards),
        "greedy": greedy["reward"].sum().item(),
        "weights": fingerprint(policy),
    }


if __name__ == "__main__":
    main(train)
