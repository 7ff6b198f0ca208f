"""A network learns a price from a table on disk, whose rows two workers of a `DataLoader` read.

    python examples/learning/table.py

The table is a memory-mapped container. The loader asks it for all rows of a batch at once, so a
worker reads a batch by one index.
"""

import sys
import tempfile
from pathlib import Path

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from examples.learning.curves import report, told
from torch import Tensor, nn
from torch.utils.data import DataLoader

from kd_core import TensorDict, TensorDictBase
from kd_nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential

ITERATIONS, ROWS, BATCH, WORKERS = 10, 16384, 256, 2
NUMBERS, PLACES, KINDS = 6, 30, 5


def draw_table() -> TensorDict:
    """Return rows of numbers, a place and a kind, with a price that depends on all of them."""
    table = TensorDict(
        {
            "numbers": torch.randn(ROWS, NUMBERS),
            "place": torch.randint(PLACES, (ROWS,)),
            "kind": torch.randint(KINDS, (ROWS,)),
        },
        [ROWS],
    )
    of_place, of_kind = torch.randn(PLACES), torch.rand(KINDS, NUMBERS)
    price = of_place[table["place"]] + (of_kind[table["kind"]] * table["numbers"]).sum(-1)
    return table.set("price", price + 0.1 * torch.randn(ROWS))


def join(numbers: Tensor, place: Tensor, kind: Tensor) -> Tensor:
    """Return what the network reads."""
    return torch.cat((numbers, place, kind), -1)


def network() -> nn.Sequential:
    """Build the network of what is joined."""
    return nn.Sequential(
        nn.Linear(NUMBERS + 12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )


def build_model() -> TensorDictSequential:
    """Build `numbers, place, kind -> codes -> joined -> expected`."""
    codes = [("codes", "place"), ("codes", "kind")]
    return TensorDictSequential(
        TensorDictModule(nn.Embedding(PLACES, 8), in_keys=["place"], out_keys=codes[:1]),
        TensorDictModule(nn.Embedding(KINDS, 4), in_keys=["kind"], out_keys=codes[1:]),
        TensorDictModule(join, in_keys=["numbers", *codes], out_keys=["joined"]),
        TensorDictModule(network(), in_keys=["joined"], out_keys=["expected"]),
    )


def loss_of(batch: TensorDictBase, model: TensorDictModuleBase) -> Tensor:
    """Return the error of the prices that are expected, a scalar."""
    return (model(batch)["expected"].squeeze(-1) - batch["price"]).square().mean()


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train a model from seed 0.

    Returns:
        The model, and the history of the iterations: `loss`, the mean over all rows.
    """
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    history: dict[str, list[float]] = {"loss": []}
    with tempfile.TemporaryDirectory() as folder:
        table = draw_table().memmap(folder)
        loader: DataLoader[TensorDict] = DataLoader(
            table, BATCH, shuffle=True, num_workers=WORKERS, collate_fn=lambda rows: rows
        )
        for _ in range(iterations):
            losses = []
            for batch in loader:
                loss = loss_of(batch, model)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            history["loss"].append(sum(losses) / len(losses))
    return model, history


if __name__ == "__main__":
    with told(__doc__, "5 s"):
        report("table", "A network learns prices", train(ITERATIONS)[1])
