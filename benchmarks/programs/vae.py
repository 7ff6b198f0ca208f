"""`examples.learning.vae` by hand: plain tensors and modules, the same numbers."""

import math

import torch
from examples.learning.vae import BATCH, IMAGES, UPDATES, decoder, draw_rectangles, encoder
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

SCALE_BIAS = math.log(math.expm1(1 - 0.01))


class Model(nn.Module):
    """Encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder(), decoder()

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean and scale of the codes of images, and how a code is drawn."""
        loc, raw = self.encoder(image).chunk(2, -1)
        scale = (softplus(raw + SCALE_BIAS) + 0.01).clamp_min(1e-4)
        return loc, scale, self.decoder(Normal(loc, scale).rsample())


def loss_of(image: Tensor, loc: Tensor, scale: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss, and its part of the images."""
    error = binary_cross_entropy_with_logits(logits, image, reduction="none")
    apart = (loc.square() + scale.square() - 1) / 2 - scale.log()
    found = error.sum((-2, -1)).mean()
    return found + apart.sum(-1).mean(), found


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train a model from seed 0; return it and the history."""
    torch.manual_seed(0)
    model, images = Model(), draw_rectangles()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    history: dict[str, list[float]] = {"image": [], "loss": []}
    for _ in range(iterations):
        for batch in images[torch.randint(IMAGES, (UPDATES * BATCH,))].split(BATCH):
            loss, image = loss_of(batch, *model(batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        history["image"].append(image.item())
        history["loss"].append(loss.item())
    return model, history
