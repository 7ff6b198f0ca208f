"""What each of three ranks runs of `examples/ranks`."""

from examples.ranks import grpo, ppo
from tests.core.distributed.ranks import Programs
from torch import nn

PROGRAMS = Programs()


def told(agent: nn.Module) -> list[list[float]]:
    """Return two figures of each parameter."""
    doubles = [parameter.detach().double() for parameter in agent.parameters()]
    return [[leaf.sum().item(), leaf.abs().sum().item()] for leaf in doubles]


@PROGRAMS.add
def data_parallel_ppo(rank: int) -> object:
    """Return parameters and history after an iteration."""
    agent, history = ppo.train(1)
    return told(agent), history


@PROGRAMS.add
def scattered_grpo(rank: int) -> object:
    """Return parameters, history and the answers after two iterations."""
    agent, history, answers = grpo.train(2)
    return told(agent), history, None if answers is None else answers["text"]


if __name__ == "__main__":
    PROGRAMS.main()
