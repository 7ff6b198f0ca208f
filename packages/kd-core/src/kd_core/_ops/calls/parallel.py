"""Calling a function on the parts of a container, in this process or in others.

A container is cut into parts along a batch dimension; each part is one call. The results come in
the order of the parts, whichever process computed them. With a generator every part gets a seed of
its own, so random results do not depend on the number of processes.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor

from kd_core._batch.shapes import as_int, wrap_dim
from kd_core._errors import InvalidArgument, InvalidValue
from kd_core._ops.math.output import written_to
from kd_core._protocol.primitives import AbstractContainer, leaves_of, name_in

if TYPE_CHECKING:
    from typing import Protocol, Self, TypeAlias

    Task: TypeAlias = "tuple[AbstractContainer, int | None]"

    class _Future(Protocol):
        def result(self) -> object: ...

    class Pool(Protocol):
        """What runs the calls: an executor of `concurrent.futures`."""

        def submit(self, fn: Callable[..., object], /, *args: object) -> _Future:
            """Call a function later; return what waits for its result."""


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
        call = _Call(fn, num_workers, pool, max_tasks_per_child, worker_threads, mp_start_method)
        cut = _Cut(self, dim, num_workers, chunksize, num_chunks, None)
        parts = iter(cut) if index_with_generator else iter(list(cut))
        results = list(_results(call, parts, len(cut), generator, pbar))
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
        call = _Call(fn, num_workers, pool, max_tasks_per_child, worker_threads, mp_start_method)
        order = None
        if shuffle:
            rows = self._desc.batch[wrap_dim(dim, self._desc.batch)]
            order = torch.randperm(rows, generator=generator)
        cut = _Cut(self, dim, num_workers, chunksize, num_chunks, order)
        parts = iter(cut) if index_with_generator else iter(list(cut))
        return cast("Iterator[R]", _results(call, parts, len(cut), generator, pbar))


class _Cut:
    """The parts of a container along a dimension."""

    def __init__(
        self,
        td: AbstractContainer,
        dim: int | str,
        workers: int,
        chunksize: int | None,
        num_chunks: int | None,
        order: Tensor | None,
    ) -> None:
        if chunksize is not None and num_chunks is not None:
            raise InvalidArgument("expected `chunksize` or `num_chunks`, got both.")
        self.td, self.order = td, order
        self.at = wrap_dim(dim, td._desc.batch)
        rows = td._desc.batch[self.at]
        self.single = chunksize is not None and as_int(chunksize) == 0
        if chunksize is not None:
            size = as_int(chunksize)
        else:
            parts = as_int(max(workers, 1) if num_chunks is None else num_chunks)
            if parts < 1:
                raise InvalidValue(f"`num_chunks` must be positive, got {parts}.")
            size = max(-(-rows // parts), 1)
        if size < 0:
            raise InvalidValue(f"`chunksize` must be non-negative, got {size}.")
        size = size or 1
        self.bounds = [(start, min(start + size, rows)) for start in range(0, rows, size)]

    def __len__(self) -> int:
        return len(self.bounds)

    def __iter__(self) -> Iterator[AbstractContainer]:
        td = cast("Tensor", self.td)  # torch dispatches these functions to the container
        for start, stop in self.bounds:
            if self.order is not None:
                part = torch.index_select(td, self.at, self.order[start:stop])
            else:
                part = torch.narrow(td, self.at, start, stop - start)
            yield cast("AbstractContainer", part.squeeze(self.at) if self.single else part)


class _Call:
    """How the function is called: here, in processes of its own, or by an executor."""

    def __init__(
        self,
        fn: Callable[..., object],
        workers: int,
        pool: Pool | None,
        max_tasks: int | None,
        threads: int,
        start: str | None,
    ) -> None:
        self.fn, self.workers, self.pool = fn, as_int(workers), pool
        self.max_tasks, self.threads, self.start = max_tasks, threads, start
        if self.workers < 0:
            raise InvalidValue(f"`num_workers` must be non-negative, got {workers}.")

    def run(self, tasks: Iterator[Task]) -> Iterator[object]:
        if self.pool is not None:
            return _submitted(self.pool, _call_with, (self.fn,), tasks, 2 * max(self.workers, 4))
        if not self.workers:
            return (_seeded(self.fn, part, seed) for part, seed in tasks)
        return self._in_processes(tasks)

    def _in_processes(self, tasks: Iterator[Task]) -> Iterator[object]:
        from concurrent.futures import ProcessPoolExecutor

        start = self.start or (None if self.max_tasks is None else "spawn")
        context = torch.multiprocessing.get_context(start)
        executor = ProcessPoolExecutor(
            self.workers,
            mp_context=context,
            initializer=_start_worker,
            initargs=(self.fn, self.threads),
            max_tasks_per_child=self.max_tasks,
        )
        try:
            yield from _submitted(executor, _call_in_worker, (), tasks, 2 * self.workers)
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


def _submitted(
    pool: Pool,
    run: Callable[..., object],
    first: tuple[object, ...],
    tasks: Iterator[Task],
    most: int,
) -> Iterator[object]:
    """Yield the results of tasks in their order, with at most `most` of them under way."""
    waiting: deque[_Future] = deque()
    for part, seed in tasks:
        # A copy, because sending a tensor moves its storage into shared memory.
        copy = part._rebuild(iter([_sendable(part, leaf) for leaf in leaves_of(part)]))
        waiting.append(pool.submit(run, *first, copy, seed))
        if len(waiting) >= most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _sendable(part: AbstractContainer, leaf: Tensor) -> Tensor:
    if leaf.requires_grad:
        raise InvalidValue(
            f"{name_in(part, leaf)} requires gradients, which do not reach other processes. Call "
            "`detach()` first, or pass `num_workers=0`."
        )
    return leaf.clone()


_worker: list[Callable[..., object]] = []
"""The function of a worker process, set when it starts."""


def _start_worker(fn: Callable[..., object], threads: int) -> None:
    torch.set_num_threads(threads)
    _worker[:] = [fn]


def _call_in_worker(part: AbstractContainer, seed: int | None) -> object:
    return _seeded(_worker[0], part, seed)


def _call_with(fn: Callable[..., object], part: AbstractContainer, seed: int | None) -> object:
    return _seeded(fn, part, seed)


def _seeded(fn: Callable[..., object], part: AbstractContainer, seed: int | None) -> object:
    """Call the function under the seed of its part, and restore the random state."""
    if seed is None:
        return fn(part)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return fn(part)


def _results(
    call: _Call,
    parts: Iterator[AbstractContainer],
    count: int,
    generator: torch.Generator | None,
    pbar: bool,
) -> Iterator[object]:
    seeds: Sequence[int | None] = [None] * count
    if generator is not None:
        seeds = torch.randint(2**62, (count,), generator=generator).tolist()
    found = call.run(zip(parts, seeds, strict=True))
    return _shown(found, count) if pbar else found


def _shown(results: Iterator[object], count: int) -> Iterator[object]:
    """Yield results, and show how many there were."""
    for done, result in enumerate(results, 1):
        bar = "#" * (20 * done // count)
        end = "\n" if done == count else ""
        sys.stderr.write(f"\rmap |{bar:<20}| {done}/{count}{end}")
        sys.stderr.flush()
        yield result
