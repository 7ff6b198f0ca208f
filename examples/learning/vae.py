"""A variational autoencoder (Kingma and Welling 2014) learns to draw rectangles.

    python examples/learning/vae.py

Encoder, code and decoder are one sequence: `image -> loc, scale -> code -> logits`. The loss reads
the entries that it wrote.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from examples.learning.curves import report, told
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.functional import binary_cross_entropy_with_logits

from kd_core import TensorDict, TensorDictBase
from kd_nn import NormalParamExtractor, TensorDictModule
from kd_probabilistic import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
)

ITERATIONS, UPDATES = 40, 40
IMAGES, BATCH, SIDE, CODE = 4096, 128, 12, 8


def encoder() -> nn.Sequential:
    """Build the network of the parameters of a code, mean and raw scale."""
    return nn.Sequential(
        nn.Flatten(-2), nn.Linear(SIDE * SIDE, 128), nn.ReLU(), nn.Linear(128, 2 * CODE)
    )


def decoder() -> nn.Sequential:
    """Build the network that draws a code."""
    return nn.Sequential(
        nn.Linear(CODE, 128),
        nn.ReLU(),
        nn.Linear(128, SIDE * SIDE),
        nn.Unflatten(-1, (SIDE, SIDE)),
    )


def draw_rectangles() -> Tensor:
    """Return images `(IMAGES, SIDE, SIDE)` of a rectangle each."""
    corners = torch.randint(SIDE, (IMAGES, 2, 2)).sort(-1).values
    places = torch.arange(SIDE)
    inside = (places >= corners[..., :1]) & (places <= corners[..., 1:])
    return (inside[:, 0, :, None] & inside[:, 1, None]).float()


def build_model() -> ProbabilisticTensorDictSequential:
    """Build `image -> loc, scale, code, logits`."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(
            nn.Sequential(encoder(), NormalParamExtractor()),
            in_keys=["image"],
            out_keys=["loc", "scale"],
        ),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["code"],
            distribution_class=Normal,
            default_interaction_type=InteractionType.RANDOM,
        ),
        TensorDictModule(decoder(), in_keys=["code"], out_keys=["logits"]),
    )


def loss_of(batch: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Return the loss of a batch that the model has run on, and its part of the images."""
    error = binary_cross_entropy_with_logits(batch["logits"], batch["image"], reduction="none")
    loc, scale = batch["loc"], batch["scale"]
    apart = (loc.square() + scale.square() - 1) / 2 - scale.log()
    image = error.sum((-2, -1)).mean()
    return image + apart.sum(-1).mean(), image


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train a model from seed 0.

    Returns:
        The model, and the history of the iterations: `image`, the error of the images in nats, and
        `loss`, both of the last batch.
    """
    torch.manual_seed(0)
    model, images = build_model(), TensorDict({"image": draw_rectangles()}, [IMAGES])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    history: dict[str, list[float]] = {"image": [], "loss": []}
    for _ in range(iterations):
        for batch in images[torch.randint(IMAGES, (UPDATES * BATCH,))].split(BATCH):
            loss, image = loss_of(model(batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        history["image"].append(image.item())
        history["loss"].append(loss.item())
    return model, history


if __name__ == "__main__":
    with told(__doc__, "5 s"):
        report("vae", "A VAE draws rectangles", train(ITERATIONS)[1])
