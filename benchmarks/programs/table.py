"""`examples.learning.table` by hand: a plain dict of mapped tensors, the same numbers."""

import tempfile
from pathlib import Path

import torch
from examples.learning.table import BATCH, KINDS, NUMBERS, PLACES, ROWS, WORKERS, network
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

Rows = dict[str, Tensor]


class Table(Dataset[Rows]):
    """Columns, of which a batch is read at once."""

    def __init__(self, columns: Rows) -> None:
        self.columns = columns

    def __len__(self) -> int:
        """Return the number of rows."""
        return ROWS

    def __getitems__(self, rows: list[int]) -> Rows:
        """Return several rows; called by `DataLoader`."""
        index = torch.tensor(rows)
        return {key: column[index] for key, column in self.columns.items()}


class Model(nn.Module):
    """Codes of places and kinds, and a network."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.kind = nn.Embedding(PLACES, 8), nn.Embedding(KINDS, 4)
        self.network = network()

    def forward(self, numbers: Tensor, place: Tensor, kind: Tensor) -> Tensor:
        """Return the prices that are expected."""
        joined = torch.cat((numbers, self.place(place), self.kind(kind)), -1)
        expected: Tensor = self.network(joined)
        return expected


def draw_table() -> Rows:
    """Return columns of numbers, a place and a kind, with a price that depends on all of them."""
    numbers = torch.randn(ROWS, NUMBERS)
    place, kind = torch.randint(PLACES, (ROWS,)), torch.randint(KINDS, (ROWS,))
    of_place, of_kind = torch.randn(PLACES), torch.rand(KINDS, NUMBERS)
    price = of_place[place] + (of_kind[kind] * numbers).sum(-1) + 0.1 * torch.randn(ROWS)
    return {"numbers": numbers, "place": place, "kind": kind, "price": price}


def mapped(columns: Rows, folder: Path) -> Rows:
    """Return columns in files."""
    found = {}
    for key, column in columns.items():
        size, dtype = column.numel(), column.dtype
        file = torch.from_file(str(folder / key), shared=True, size=size, dtype=dtype)
        found[key] = file.view(column.shape).copy_(column)
    return found


def loss_of(batch: Rows, model: Model) -> Tensor:
    """Return the error of the prices that are expected, a scalar."""
    expected = model(batch["numbers"], batch["place"], batch["kind"])
    return (expected.squeeze(-1) - batch["price"]).square().mean()


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train a model from seed 0; return it and the history."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    history: dict[str, list[float]] = {"loss": []}
    with tempfile.TemporaryDirectory() as folder:
        table = Table(mapped(draw_table(), Path(folder)))
        loader: DataLoader[Rows] = DataLoader(
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
