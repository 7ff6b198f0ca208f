"""rsl_rl runs PPO on a small linear environment, with its own runner."""

import tempfile

import torch
from measured import Numbers, fingerprint, main
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict


class Point(VecEnv):
    """Points that are pushed to the origin."""

    def __init__(self, count: int) -> None:
        self.num_envs, self.num_actions, self.max_episode_length = count, 2, 50
        self.device, self.cfg = "cpu", {}
        self.episode_length_buf = torch.zeros(count, dtype=torch.long)
        self.state = torch.randn(count, 4)

    def get_observations(self) -> TensorDict:
        """Return what the policy sees."""
        return TensorDict({"policy": self.state.clone()}, [self.num_envs])

    def step(
        self, actions: torch.Tensor
    ) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict[str, object]]:
        """Move the points."""
        position, velocity = self.state[:, :2], self.state[:, 2:]
        velocity = 0.9 * velocity + 0.1 * actions.clamp(-1, 1)
        self.state = torch.cat([position + 0.1 * velocity, velocity], 1)
        self.episode_length_buf += 1
        late = self.episode_length_buf >= self.max_episode_length
        self.state[late] = torch.randn(int(late.sum()), 4)
        self.episode_length_buf[late] = 0
        reward = -self.state[:, :2].square().sum(1)
        return self.get_observations(), reward, late.long(), {"time_outs": late.float()}


def train() -> Numbers:
    """Train for a few iterations."""
    env = Point(64)
    network = {"class_name": "MLPModel", "hidden_dims": [32, 32], "activation": "elu"}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0}
    config = {
        "num_steps_per_env": 24,
        "save_interval": 100,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {**network, "distribution_cfg": gaussian},
        "critic": network,
        "algorithm": {"class_name": "PPO", "num_learning_epochs": 4, "num_mini_batches": 4},
        "logger": "tensorboard",
    }
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        runner = OnPolicyRunner(env, config, log_dir=folder, device="cpu")
        runner.learn(num_learning_iterations=15)
    return {
        "actor": fingerprint(runner.alg.actor),
        "critic": fingerprint(runner.alg.critic),
        "state": float(env.state.sum()),
    }


if __name__ == "__main__":
    main(train)
