"""Calling a function on the parts of a container, in this process or in others.

A container is cut into parts along a batch dimension; each part is one call. The results come in
the order of the parts, whichever process computed them. With a generator every part gets a seed of
its own, so random results do not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kd_core._batch.shapes import wrap_dim
from kd_core._errors import InvalidValue
from kd_core._ops.math.operands import written_to
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from typing import Self, TypeVar

    from kd_core._ops.calls.parts import Pool

    R = TypeVar("R")


class Parallel(AbstractContainer):
    """The methods that call a function on parts of the batch."""

    __slots__ = ()

    def map(
        self,
        fn: Callable[[Self], R],
        dim: int | str = 0,
        num_workers: int = 0,
        *,
        out: Self | None = None,
        chunksize: int | None = None,
        num_chunks: int | None = None,
        pool: Pool | None = None,
        generator: torch.Generator | None = None,
        max_tasks_per_child: int | None = None,
        worker_threads: int = 1,
        index_with_generator: bool = False,
        pbar: bool = False,
        mp_start_method: str | None = None,
    ) -> R:
        """Call a function on parts of the batch, and join the results.

        Args:
            fn: called with each part; returns a container or a tensor with the rows of the part, or
                `None` for all parts. It must be picklable, unless processes are forked.
            dim: the batch dimension that is cut, or its name.
            num_workers: the number of processes; 0: all calls happen in this process.
            out: a container into whose leaves the result is written.
            chunksize: the rows of a part; 0: one row without the dimension, results are stacked.
            num_chunks: the number of parts; without both, one for each process.
            pool: an executor that runs the calls; it is not shut down.
            generator: draws a seed for each part, so that random results are repeatable.
            max_tasks_per_child: after how many calls a process is replaced.
            worker_threads: the number of threads of torch in a process.
            index_with_generator: cut each part when it is needed, instead of all at once.
            pbar: show progress on the standard error stream.
            mp_start_method: how processes start: "fork", "spawn" or "forkserver".

        Raises:
            InvalidArgument: if both `chunksize` and `num_chunks` are given.
            InvalidValue: if a leaf requires gradients, which do not reach other processes.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.arange(4)}, [4])
            >>> td.map(lambda part: part + part.batch_size[0], chunksize=3)["a"]
            tensor([3, 4, 5, 4])
        """
        from kd_core._ops.calls.parts import Call, Cut, results_of

        call = Call(fn, num_workers, pool, max_tasks_per_child, worker_threads, mp_start_method)
        cut = Cut(self, dim, num_workers, chunksize, num_chunks, None)
        parts = iter(cut) if index_with_generator else iter(list(cut))
        results = list(results_of(call, parts, len(cut), generator, pbar))
        if not results:
            raise InvalidValue(f"`map` expected at least one row in dimension {dim}, got none.")
        if results[0] is None:
            return cast("R", None)
        joined = (torch.stack if cut.single else torch.cat)(cast("list[Tensor]", results), cut.at)
        return cast("R", joined if out is None else written_to(out, cast("Self", joined)))

    def map_iter(
        self,
        fn: Callable[[Self], R],
        dim: int | str = 0,
        num_workers: int = 0,
        *,
        shuffle: bool = False,
        chunksize: int | None = None,
        num_chunks: int | None = None,
        pool: Pool | None = None,
        generator: torch.Generator | None = None,
        max_tasks_per_child: int | None = None,
        worker_threads: int = 1,
        index_with_generator: bool = True,
        pbar: bool = False,
        mp_start_method: str | None = None,
    ) -> Iterator[R]:
        """Call a function on parts of the batch, and yield the results in order; see `map`.

        Args:
            fn: called with each part; returns anything.
            dim: the batch dimension that is cut, or its name.
            num_workers: the number of processes; 0: all calls happen in this process.
            shuffle: take the rows in random order.
            chunksize: the rows of a part; 0: one row without the dimension.
            num_chunks: the number of parts.
            pool: an executor that runs the calls.
            generator: draws the order and a seed for each part.
            max_tasks_per_child: after how many calls a process is replaced.
            worker_threads: the number of threads of torch in a process.
            index_with_generator: cut each part when it is needed, instead of all at once.
            pbar: show progress on the standard error stream.
            mp_start_method: how processes start.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.arange(4)}, [4])
            >>> [total.item() for total in td.map_iter(lambda part: part["a"].sum(), chunksize=2)]
            [1, 5]
        """
        from kd_core._ops.calls.parts import Call, Cut, results_of

        call = Call(fn, num_workers, pool, max_tasks_per_child, worker_threads, mp_start_method)
        order = None
        if shuffle:
            rows = self._kd_desc.batch[wrap_dim(dim, self._kd_desc.batch)]
            order = torch.randperm(rows, generator=generator)
        cut = Cut(self, dim, num_workers, chunksize, num_chunks, order)
        parts = iter(cut) if index_with_generator else iter(list(cut))
        return cast("Iterator[R]", results_of(call, parts, len(cut), generator, pbar))
