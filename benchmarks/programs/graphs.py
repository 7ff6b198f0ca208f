"""`examples.learning.graphs` by hand: plain dicts and modules, the same numbers."""

import torch
from examples.learning.graphs import (
    BATCH,
    EDGES,
    GRAPHS,
    NODES,
    ROUNDS,
    SECONDS,
    UPDATES,
    WIDTH,
    Messenger,
    Receiver,
    spread,
)
from torch import Tensor, nn


class Model(nn.Module):
    """Rounds of messages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, WIDTH)
        self.rounds = nn.ModuleList()
        for _ in range(ROUNDS):
            self.rounds += [Messenger(), Receiver()]
        self.head = nn.Sequential(nn.Linear(WIDTH, 1), nn.Flatten(-2))

    def forward(self, heat: Tensor, start: Tensor, end: Tensor, width: Tensor) -> Tensor:
        """Return the heat that is expected."""
        state, message = self.first(heat), heat
        for number, each in enumerate(self.rounds):
            if number % 2:
                state = each(state, message, start, end)
            else:
                message = each(state, start, end, width)
        expected: Tensor = self.head(state)
        return expected


def draw_graphs() -> dict[str, Tensor]:
    """Return graphs, entries of shape `(GRAPHS, ...)`."""
    start, end = torch.randint(NODES, (2, GRAPHS, EDGES))
    width, heat = torch.rand(GRAPHS, EDGES), torch.randn(GRAPHS, NODES)
    after = heat
    for _ in range(SECONDS):
        after = spread(after, start, end, width)
    nodes = {"heat": heat[..., None], "after": after}
    return {**nodes, "start": start, "end": end, "width": width[..., None]}


def joined(graphs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return one graph with all nodes and all edges of several."""
    first = NODES * torch.arange(len(graphs["start"]))[:, None]
    edges = {"start": graphs["start"] + first, "end": graphs["end"] + first}
    return {key: entry.flatten(0, 1) for key, entry in (graphs | edges).items()}


def loss_of(graph: dict[str, Tensor], model: Model) -> Tensor:
    """Return the error of the heat that is expected, a scalar."""
    expected = model(graph["heat"], graph["start"], graph["end"], graph["width"])
    return (expected - graph["after"]).square().mean()


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train a model from seed 0; return it and the history."""
    torch.manual_seed(0)
    model, graphs = Model(), draw_graphs()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    history: dict[str, list[float]] = {"loss": []}
    for _ in range(iterations):
        losses = []
        for _ in range(UPDATES):
            rows = torch.randint(GRAPHS, (BATCH,))
            loss = loss_of(joined({key: entry[rows] for key, entry in graphs.items()}), model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        history["loss"].append(sum(losses) / UPDATES)
    return model, history
