"""The parts of a container along a dimension, and the calls of a function on each of them.

A call runs here, in a process of its own, or in an executor. Knows how parts are cut and sent; must
not know what is done with the results.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kd_core._batch.shapes import as_int, wrap_dim
from kd_core._errors import InvalidArgument, InvalidValue
from kd_core._protocol.primitives import AbstractContainer, leaves_of, name_in

if TYPE_CHECKING:
    from typing import Protocol, TypeAlias

    Task: TypeAlias = "tuple[AbstractContainer, int | None]"

    class _Future(Protocol):
        def result(self) -> object: ...

    class Pool(Protocol):
        """What runs the calls: an executor of `concurrent.futures`."""

        def submit(self, fn: Callable[..., object], /, *args: object) -> _Future:
            """Call a function later; return what waits for its result."""


class Cut:
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
        self.at = wrap_dim(dim, td._kd_desc.batch)
        rows = td._kd_desc.batch[self.at]
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


class Call:
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
        copy = part._kd_rebuild(iter([_sendable(part, leaf) for leaf in leaves_of(part)]))
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


def results_of(
    call: Call,
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
