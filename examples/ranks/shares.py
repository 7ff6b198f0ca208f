"""The shares of the data that a process has: its own, as a rank of several, or all of them."""

import datetime
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from kd_core import TensorDict, TensorDictBase

SHARES = 3


class Shares:
    """The shares of this process, each with random numbers of its own.

    Attributes:
        numbers: which shares they are.
    """

    def __init__(self) -> None:
        self.together = dist.is_initialized()
        self.numbers = [dist.get_rank()] if self.together else list(range(SHARES))
        self._states = [torch.Generator().manual_seed(n).get_state() for n in self.numbers]

    @contextmanager
    def random(self, position: int) -> Iterator[None]:
        """Draw random numbers of the share at a position of `numbers`."""
        with torch.random.fork_rng():
            torch.set_rng_state(self._states[position])
            yield
            self._states[position] = torch.get_rng_state()

    def step(
        self,
        agent: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Sequence[TensorDictBase],
        loss_of: Callable[[TensorDictBase], Tensor],
    ) -> float:
        """Apply one step against the mean of the losses of all shares, and return it.

        Args:
            agent: holds the parameters.
            optimizer: changes them.
            batches: one of each share of this process.
            loss_of: returns the loss of a batch, a scalar.
        """
        optimizer.zero_grad()
        total = torch.zeros(())
        for batch in batches:
            loss = loss_of(batch) / len(batches)
            loss.backward()
            total += loss.detach()
        found = TensorDict({"gradients": TensorDict.from_module(agent).grad, "loss": total})
        if self.together:
            found.all_reduce("mean")
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        return found["loss"].item()


def run(program: Callable[[], None], ranks: int = SHARES) -> None:
    """Run a program on several ranks; by default as many as there are shares."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (ranks, program, str(Path(folder) / "store")), ranks)  # type: ignore[attr-defined]  # exported without a name


def _rank(rank: int, ranks: int, program: Callable[[], None], path: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(path, ranks)  # type: ignore[attr-defined]  # as above
    timeout = datetime.timedelta(minutes=2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    program()
    dist.destroy_process_group()
