"""A transformer in shares (FSDP2): three ranks train and save it, and two ranks go on from there.

    python examples/ranks/transformer.py

It learns to continue sequences that repeat. `fully_shard` divides the parameters of each step among
the ranks, and the checkpoint holds them, the optimizer and the history, which is a container.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tempfile
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from examples.learning.curves import report, told
from examples.ranks.shares import run
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from kd_core import TensorDict, distributed
from kd_nn import TensorDictModule, TensorDictSequential

STEPS = 120
ROWS = 24
WORDS, PERIOD, LENGTH = 12, 4, 16
HIDDEN, HEADS, BLOCKS = 32, 4, 2


class Embedding(nn.Module):
    """Words and their positions as vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.positions = nn.Parameter(torch.randn(LENGTH, HIDDEN))

    def forward(self, words: Tensor) -> Tensor:
        """Return vectors, shape `(rows, LENGTH, HIDDEN)`, of words, shape `(rows, LENGTH)`."""
        vectors: Tensor = self.words(words) + self.positions
        return vectors


class Block(nn.Module):
    """Causal attention and a network of two layers, each added to what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.layers_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.projected, self.mixed = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.Sequential(
            nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, h: Tensor) -> Tensor:
        """Return vectors of the same shape, `(rows, LENGTH, HIDDEN)`."""
        heads = self.projected(self.attention_norm(h)).unflatten(-1, (3 * HEADS, -1))
        query, key, value = heads.transpose(1, 2).chunk(3, dim=1)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        h = h + self.mixed(seen.transpose(1, 2).flatten(-2))
        return h + self.layers(self.layers_norm(h))


def build_network() -> TensorDictSequential:
    """Build `words -> log_prob`."""
    head = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WORDS), nn.LogSoftmax(-1))
    return TensorDictSequential(
        TensorDictModule(Embedding(), ["words"], ["h"]),
        *[TensorDictModule(Block(), ["h"], ["h"]) for _ in range(BLOCKS)],
        TensorDictModule(head, ["h"], ["log_prob"]),
    )


def draw(step: int) -> TensorDict:
    """Return the sequences of a step for all ranks."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(WORDS, (ROWS, PERIOD), generator=generator)
    return TensorDict({"words": first.repeat(1, LENGTH // PERIOD)}, [ROWS])


def figures_of(td: TensorDict) -> TensorDict:
    """Return `loss`, the cross-entropy of words that can be known, and `right`, the share of them.

    Args:
        td: sequences that the network has read.
    """
    log_prob, words = td["log_prob"][:, PERIOD - 1 : -1], td["words"][:, PERIOD:]
    loss = nn.functional.nll_loss(log_prob.flatten(0, 1), words.flatten())
    return TensorDict({"loss": loss, "right": (log_prob.argmax(-1) == words).float().mean()})


class Training:
    """A network, its optimizer and its history.

    Attributes:
        network: the network, whole or in shares.
        steps: how many were made.
        history: the figures of each step, `loss` and `right`.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        """Build the network from seed 0.

        Args:
            group: the ranks that share it; `None`: it is whole in this process.
        """
        torch.manual_seed(0)
        self.network = build_network()
        self.group = group
        if group is not None:
            mesh = DeviceMesh.from_group(group, "cpu")
            for part in (*self.network, self.network):
                fully_shard(part, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=3e-3)
        self.steps = 0
        self.history = TensorDict(
            {"loss": torch.zeros(STEPS), "right": torch.zeros(STEPS)}, [STEPS]
        )

    def train(self, steps: int) -> None:
        """Apply steps, each to the rows of this rank."""
        for step in range(self.steps, self.steps + steps):
            rows = draw(step)
            if self.group is not None:
                rows = rows.chunk(self.group.size())[self.group.rank()]
            figures = figures_of(self.network(rows))
            self.optimizer.zero_grad()
            figures["loss"].backward()
            self.optimizer.step()
            figures = figures.detach()
            if self.group is not None:
                figures.all_reduce("mean", group=self.group)
            self.history[step] = figures
        self.steps += steps

    def save(self, folder: str) -> None:
        """Write a checkpoint into a new folder."""
        save(self._state(), checkpoint_id=folder, process_group=self.group)

    def load(self, folder: str) -> None:
        """Load a checkpoint, which any number of ranks wrote."""
        state = self._state()
        distributed.load_checkpoint(state, folder, group=self.group)
        self.steps = state["steps"]
        network, optimizer = state["network"], state["optimizer"]
        set_state_dict(
            self.network, self.optimizer, model_state_dict=network, optim_state_dict=optimizer
        )

    def _state(self) -> dict[str, Any]:
        network, optimizer = get_state_dict(self.network, self.optimizer)
        own = {"history": self.history, "steps": self.steps}
        return {"network": network, "optimizer": optimizer, **own}


def begin(folder: str) -> None:
    """Train for the first half of the steps, and save what became of it."""
    training = Training(dist.group.WORLD)
    training.train(STEPS // 2)
    training.save(folder)


def resume(folder: str) -> None:
    """Train for the other steps; rank 0 draws the history."""
    training = Training(dist.group.WORLD)
    training.load(folder)
    training.train(STEPS // 2)
    if dist.get_rank() == 0:
        history = {key: training.history[key].tolist() for key in ("loss", "right")}
        report("transformer_ranks", "Three ranks begin, two go on", history, limit=("right", 1))


if __name__ == "__main__":
    with told(__doc__, "20 s"), tempfile.TemporaryDirectory() as made:
        checkpoint = str(Path(made) / "checkpoint")
        run(partial(begin, checkpoint))
        run(partial(resume, checkpoint), ranks=2)
