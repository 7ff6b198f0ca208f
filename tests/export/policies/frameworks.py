"""Stand-ins: what kd_export reads of frameworks that are not installed here, and no more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

Array = numpy.ndarray[Any, Any]


class Box:
    """A space of gymnasium, as far as it is read."""

    def __init__(self, low: Any, high: Any, shape: tuple[int, ...], dtype: str = "float32") -> None:
        self.dtype = numpy.dtype(dtype)
        self.shape = shape
        self.low = (
            numpy.full(shape, low, dtype) if numpy.ndim(low) == 0 else numpy.array(low, dtype)
        )
        self.high = (
            numpy.full(shape, high, dtype) if numpy.ndim(high) == 0 else numpy.array(high, dtype)
        )


@dataclass
class Discrete:
    n: int
    start: int = 0
    shape: tuple[int, ...] = ()
    dtype: Any = field(default_factory=lambda: numpy.dtype("int64"))


class MultiDiscrete:
    def __init__(self, nvec: list[int]) -> None:
        self.nvec = numpy.array(nvec)
        self.shape = (len(nvec),)
        self.dtype = numpy.dtype("int64")


class MultiBinary:
    def __init__(self, n: int) -> None:
        self.n = n
        self.shape = (n,)
        self.dtype = numpy.dtype("int8")


class Dict:
    def __init__(self, **spaces: Any) -> None:
        self.spaces = spaces
        self.shape = None
        self.dtype = None


class Statistics:
    def __init__(self, mean: list[float], var: list[float]) -> None:
        self.mean, self.var = numpy.array(mean), numpy.array(var)


class VecNormalize:
    """Observations by running statistics, in float64."""

    norm_obs = True
    norm_obs_keys: list[str] | None = None
    epsilon = 1e-8

    def __init__(self, mean: list[float], var: list[float], clip_obs: float = 2.0) -> None:
        self.obs_rms = Statistics(mean, var)
        self.clip_obs = clip_obs
        self.observation_space = None
        self.venv = None

    def normalize_obs(self, obs: Array) -> Array:
        scaled = (obs - self.obs_rms.mean) / numpy.sqrt(self.obs_rms.var + self.epsilon)
        clipped: Array = numpy.clip(scaled, -self.clip_obs, self.clip_obs)
        return clipped.astype(numpy.float32)


class Extractor(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.policy_net = nn.Sequential(nn.Linear(inputs, 16), nn.Tanh())


class ActorCriticPolicy(nn.Module):
    """A policy of PPO on rows of numbers."""

    squash_output = False
    normalize_images = True

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features_extractor = nn.Flatten()
        self.mlp_extractor = Extractor(inputs)
        self.action_net = nn.Linear(16, outputs)


class PPO:
    """A model of stable-baselines3 on rows of numbers."""

    def __init__(self, observation_space: Any, action_space: Any, outputs: int) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self.policy = ActorCriticPolicy(observation_space.shape[0], outputs)
        self.env = None

    def predict(
        self, observation: Array, state: Any, episode_start: Any, deterministic: bool
    ) -> tuple[Array, Any]:
        assert deterministic
        policy = self.policy
        with torch.no_grad():
            latent = policy.mlp_extractor.policy_net(torch.as_tensor(observation).float())
            result = policy.action_net(latent)
        if isinstance(self.action_space, Box):
            return numpy.clip(result.numpy(), self.action_space.low, self.action_space.high), None
        if isinstance(self.action_space, MultiDiscrete):
            parts = result.split(self.action_space.nvec.tolist(), -1)
            return torch.stack([part.argmax(-1) for part in parts], -1).numpy(), None
        if isinstance(self.action_space, MultiBinary):
            return result.sigmoid().round().numpy(), None
        return result.argmax(-1).numpy(), None


class EmpiricalNormalization(nn.Module):
    _mean: Tensor
    _std: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("_mean", torch.full((1, size), 2.0))
        self.register_buffer("_std", torch.full((1, size), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self._mean) / (self._std + 0.01)


class RNN(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.rnn = nn.GRU(inputs, width, 2)
        self.held: Tensor | None = None


class MLPModel(nn.Module):
    """A model of rsl_rl; recurrent if it has a width."""

    def __init__(self, size: int, width: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.obs_groups = ["policy"]
        self.obs_dim = size
        self.obs_normalizer = EmpiricalNormalization(size)
        self.rnn = RNN(size, width) if width else None
        self.mlp = nn.Sequential(nn.Linear(width or size, 16), nn.ELU(), nn.Linear(16, 2))
        self.distribution = None

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        x = self.obs_normalizer(obs["policy"])
        if self.rnn is not None:
            out, self.rnn.held = self.rnn.rnn(x[None], self.rnn.held)
            x = out[0]
        result: Tensor = self.mlp(x)
        return result

    def reset(self, dones: Tensor | None = None) -> None:
        if self.rnn is None:
            return
        if dones is None:
            self.rnn.held = None
        elif self.rnn.held is not None:
            self.rnn.held[:, dones] = 0.0


class GaussianMixin:
    _g_clip_mean_actions = True


class SkrlModel(GaussianMixin, nn.Module):
    """A Gaussian model of skrl that clips its means."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.observation_space, self.action_space = Box(-5, 5, (4,)), Box(-0.1, 0.2, (2,))
        self.net = nn.Linear(4, 2)

    def get_specification(self) -> dict[str, Any]:
        return {}

    def compute(self, inputs: dict[str, Any], role: str) -> tuple[Tensor, dict[str, Any]]:
        return self.net(inputs["observations"]), {}

    def act(self, inputs: dict[str, Any], *, role: str) -> tuple[Tensor, dict[str, Any]]:
        mean, _ = self.compute(inputs, role)
        clipped = mean.clamp(torch.tensor(-0.1), torch.tensor(0.2))
        return clipped + torch.randn_like(mean), {"mean_actions": clipped}


class RunningStandardScaler(nn.Module):
    clip_threshold, epsilon = 2.0, 1e-8
    running_mean: Tensor
    running_variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.full((4,), 1.0, dtype=torch.float64))
        self.register_buffer("running_variance", torch.full((4,), 4.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.running_mean.float(), self.running_variance.float()
        scaled = (x - mean) / (variance.sqrt() + self.epsilon)
        return scaled.clamp(-self.clip_threshold, self.clip_threshold)


class Agent:
    def __init__(self) -> None:
        self.policy = SkrlModel()
        self._observation_preprocessor = RunningStandardScaler()
