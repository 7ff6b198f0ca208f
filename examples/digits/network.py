"""The network: a keyed graph with a nested key, two heads and one probabilistic node."""

from torch import nn
from torch.distributions import Normal

from kd_nn import NormalParamExtractor, TensorDictModule
from kd_probabilistic import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential

LATENT = 16


def build_network() -> ProbabilisticTensorDictSequential:
    """Build `image -> hidden -> (loc, scale) -> z -> logits` and `z -> ("out", "image")`."""
    encoder = nn.Sequential(
        nn.Unflatten(-2, (1, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(-3),
        nn.Linear(512, 128),
        nn.ReLU(),
    )
    posterior = nn.Sequential(nn.Linear(128, 2 * LATENT), NormalParamExtractor())
    decoder = nn.Sequential(
        nn.Linear(LATENT, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.Sigmoid(),
        nn.Unflatten(-1, (8, 8)),
    )
    return ProbabilisticTensorDictSequential(
        TensorDictModule(encoder, in_keys=["image"], out_keys=["hidden"]),
        TensorDictModule(posterior, in_keys=["hidden"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"], out_keys=["z"], distribution_class=Normal
        ),
        TensorDictModule(nn.Linear(LATENT, 10), in_keys=["z"], out_keys=["logits"]),
        TensorDictModule(decoder, in_keys=["z"], out_keys=[("out", "image")]),
    )
