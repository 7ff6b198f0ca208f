"""Training: cross entropy of the digit, error of the reconstruction, and a prior on `z`."""

import torch
from rich.progress import Progress
from torch.nn import functional as F

from kd_core import TensorDict
from kd_nn import TensorDictModuleBase
from kd_probabilistic import set_interaction_type

EPOCHS = 60
BATCH = 128
PRIOR_WEIGHT = 1e-3
PICTURE_WEIGHT = 0.5


def loss_of(scored: TensorDict) -> torch.Tensor:
    """Return the loss of a batch that went through the network, a scalar.

    The prior is the KL divergence of N(loc, scale) from N(0, 1): Kingma and Welling 2013,
    appendix B.
    """
    digit = F.cross_entropy(scored["logits"], scored["label"])
    picture = (scored["out", "image"] - scored["image"]).square().sum((-2, -1)).mean()
    loc, scale = scored["loc"], scored["scale"]
    prior = 0.5 * (loc.square() + scale.square() - 2 * scale.log() - 1).sum(-1).mean()
    return digit + PICTURE_WEIGHT * picture + PRIOR_WEIGHT * prior


def train(network: TensorDictModuleBase, scans: TensorDict) -> list[float]:
    """Train the network in place.

    Returns:
        The mean loss of each epoch.
    """
    steps = -(-len(scans) // BATCH)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=EPOCHS * steps)
    history = []
    with Progress() as progress, set_interaction_type("random"):
        task = progress.add_task("training", total=EPOCHS * steps)
        for _ in range(EPOCHS):
            total = 0.0
            for batch in scans[torch.randperm(len(scans))].split(BATCH):
                loss = loss_of(network(batch))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                total += loss.item() / steps
                progress.advance(task)
            history.append(total)
            progress.update(task, description=f"training, loss {total:.3f}")
    return history
