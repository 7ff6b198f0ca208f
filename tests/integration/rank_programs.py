"""What each of three ranks runs of `examples/ranks`."""

import torch.distributed as dist
from examples.ranks import grpo, ppo, transformer
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


@PROGRAMS.add
def resharded_transformer(rank: int) -> object:
    """Return the losses of two steps in shares of three ranks, and of two more in shares of two."""
    folder = str(PROGRAMS.folder / "checkpoint")
    training = transformer.Training(dist.group.WORLD)
    training.train(2)
    training.save(folder)
    group = dist.new_group([0, 1])
    if rank == 2:
        return training.history["loss"][:2].tolist()
    training = transformer.Training(group)
    training.load(folder)
    training.train(2)
    return training.history["loss"][:4].tolist()


if __name__ == "__main__":
    PROGRAMS.main()
