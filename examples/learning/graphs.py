"""A graph network (Battaglia et al. 2018) learns how heat spreads along edges.

    python examples/learning/graphs.py

Nodes and edges are nested containers with batch sizes of their own. A batch of graphs is one large
graph, whose edges name rows of its nodes.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from examples.learning.curves import report, told
from torch import Tensor, nn

from kd_core import TensorDict, TensorDictBase
from kd_nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential

ITERATIONS, UPDATES = 40, 10
GRAPHS, NODES, EDGES, BATCH = 512, 12, 36, 32
WIDTH, ROUNDS, SECONDS = 32, 3, 3


def spread(heat: Tensor, start: Tensor, end: Tensor, width: Tensor) -> Tensor:
    """Return the heat of nodes after a second: wide edges carry more of the difference."""
    flow = 0.2 * width * (heat.gather(1, start) - heat.gather(1, end))
    return heat.scatter_add(1, end, flow).scatter_add(1, start, -flow)


def draw_graphs() -> TensorDict:
    """Return graphs, whose nodes know the heat that they have and the heat that they will have."""
    start, end = torch.randint(NODES, (2, GRAPHS, EDGES))
    width, heat = torch.rand(GRAPHS, EDGES), torch.randn(GRAPHS, NODES)
    after = heat
    for _ in range(SECONDS):
        after = spread(after, start, end, width)
    nodes = TensorDict({"heat": heat[..., None], "after": after}, [GRAPHS, NODES])
    edges = {"start": start, "end": end, "width": width[..., None]}
    return TensorDict({"nodes": nodes, "edges": TensorDict(edges, [GRAPHS, EDGES])}, [GRAPHS])


def joined(graphs: TensorDictBase) -> TensorDict:
    """Return one graph with all nodes and all edges of several, whose numbers it moves."""
    first = NODES * torch.arange(len(graphs))[:, None]
    nodes, edges = graphs.nested("nodes", TensorDict), graphs.nested("edges", TensorDict)
    edges["start"], edges["end"] = edges["start"] + first, edges["end"] + first
    return TensorDict({"nodes": nodes.reshape(-1), "edges": edges.reshape(-1)}, [])


class Messenger(nn.Module):
    """A network of both ends of an edge, and of the edge."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2 * WIDTH + 1, WIDTH), nn.ReLU())

    def forward(self, state: Tensor, start: Tensor, end: Tensor, width: Tensor) -> Tensor:
        """Return the message of every edge."""
        return self.network(torch.cat((state[start], state[end], width), -1))


class Receiver(nn.Module):
    """A network of a node and of the messages from both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, state: Tensor, message: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """Return the next state of every node."""
        into = torch.zeros_like(state).index_add(0, end, message)
        out_of = torch.zeros_like(state).index_add(0, start, message)
        return state + torch.tanh(self.network(torch.cat((state, into, out_of), -1)))


def build_model() -> TensorDictSequential:
    """Build `nodes: heat, edges: start, end, width -> nodes: state -> nodes: expected`."""
    state, message = ("nodes", "state"), ("edges", "message")
    start, end, width = ("edges", "start"), ("edges", "end"), ("edges", "width")
    steps = [TensorDictModule(nn.Linear(1, WIDTH), in_keys=[("nodes", "heat")], out_keys=[state])]
    for _ in range(ROUNDS):
        steps += [
            TensorDictModule(Messenger(), in_keys=[state, start, end, width], out_keys=[message]),
            TensorDictModule(Receiver(), in_keys=[state, message, start, end], out_keys=[state]),
        ]
    head = nn.Sequential(nn.Linear(WIDTH, 1), nn.Flatten(-2))
    return TensorDictSequential(
        *steps, TensorDictModule(head, in_keys=[state], out_keys=[("nodes", "expected")])
    )


def loss_of(graph: TensorDictBase, model: TensorDictModuleBase) -> Tensor:
    """Return the error of the heat that is expected, a scalar."""
    nodes = model(graph).nested("nodes", TensorDict)
    return (nodes["expected"] - nodes["after"]).square().mean()


def train(iterations: int) -> tuple[nn.Module, dict[str, list[float]]]:
    """Train a model from seed 0.

    Returns:
        The model, and the history of the iterations: `loss`, the mean of its updates.
    """
    torch.manual_seed(0)
    model, graphs = build_model(), draw_graphs()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    history: dict[str, list[float]] = {"loss": []}
    for _ in range(iterations):
        losses = []
        for _ in range(UPDATES):
            loss = loss_of(joined(graphs[torch.randint(GRAPHS, (BATCH,))]), model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        history["loss"].append(sum(losses) / UPDATES)
    return model, history


if __name__ == "__main__":
    with told(__doc__, "5 s"):
        report("graphs", "A graph network learns how heat spreads", train(ITERATIONS)[1])
