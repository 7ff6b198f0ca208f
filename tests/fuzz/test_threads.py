"""Threads: shared containers are read, each writes to its own, modules are called at once."""

import sys
import threading
from collections.abc import Callable, Iterator
from random import Random

import pytest
import torch
from tests.fuzz.checking import Call, attempt
from tests.fuzz.comparing import differ, fingerprint, fingerprints_differ
from tests.fuzz.conftest import Seeds
from tests.fuzz.modules import inputs, model
from tests.fuzz.registry import OPERATIONS
from tests.fuzz.subjects import Plain, Subject, plain, read, subject
from tests.fuzz.test_operations import MODULES

from kd_core import TensorDict, TensorDictBase

THREADS = 4
# These change what the container is, if only for a moment.
CHANGES = {
    *("lock_", "unlock_", "locked", "unlocked", "requires_grad_", "detach_", "share_memory_"),
    *("zero_grad", "clear_device_", "auto_device_", "torch.func.grad", "vmap", "consolidate"),
}


@pytest.fixture(autouse=True)
def busy() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(jobs: list[Callable[[], object]]) -> list[object]:
    """Run jobs in threads that start at once; return what went wrong."""
    start = threading.Barrier(len(jobs))
    wrong: list[object] = []

    def run(job: Callable[[], object]) -> None:
        start.wait()
        try:
            found = job()
        except Exception as error:
            wrong.append(error)
        else:
            if found:
                wrong.append(found)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def reading(rng: Random, one: Subject) -> Call:
    """Return a random call that leaves the container as it is."""
    while True:
        name = rng.choice(sorted(set(OPERATIONS) - CHANGES))
        call = OPERATIONS[name](rng, one, name)
        if not (call.writes or call.restructures or call.unchecked):
            return call


def comparable(result: object) -> object:
    if isinstance(result, TensorDictBase):
        return read(result)
    return tuple(map(comparable, result)) if isinstance(result, (tuple, list)) else result


def readers(rng: Random, one: Subject) -> list[Callable[[], object]]:
    """Return a job for each thread: calls of which each must give what it gave alone."""
    calls = [reading(rng, one) for _ in range(3)]
    alone = []
    for call in calls:
        result, error = attempt(lambda call=call: comparable(call.ours(one.td)))  # type: ignore[misc]  # bound in time
        alone.append((call, result, type(error)))

    def job() -> object:
        for call, result, kind in alone * 2:
            mine, error = attempt(lambda call=call: comparable(call.ours(one.td)))  # type: ignore[misc]  # bound in time
            if type(error) is not kind:
                return f"{call.text}: {error!r} instead of {kind}"
            found = None if error else differ(mine, result, exact=False)
            if found:
                return f"{call.text}: {found}"
        return None

    return [job] * THREADS


def test_what_threads_read_of_one_container_is_what_one_reads(seeds: Seeds) -> None:
    assert MODULES
    for seed in seeds(80):
        rng = Random(seed)
        one = subject(rng)
        before = fingerprint(one.node)
        jobs = readers(rng, one)
        seeds.count("calls", 6 * THREADS)
        assert together(jobs) == []
        assert not fingerprints_differ(before, fingerprint(one.node))


def writer(rows: int, seed: int) -> Callable[[], object]:
    """Return a job that changes a container of its own, and says if it is not what was written."""

    def job() -> object:
        td = TensorDict({"a": torch.zeros(rows)}, [rows])
        for number in range(20):
            key = f"k{(seed + number) % 3}"
            td[key, "b"] = torch.full((rows,), float(number))
            td.lock_().set_((key, "b"), td[key, "b"] + 1).unlock_()
            td["a"].add_(1)
            if not bool((td[key, "b"] == number + 1).all()) or td.is_locked:
                return f"{key} in round {number}: {td[key, 'b']}"
        return None if bool((td["a"] == 20).all()) else td["a"]

    return job


def test_each_thread_writes_to_its_own_container_while_others_read(seeds: Seeds) -> None:
    for seed in seeds(25):
        rng = Random(seed)
        one = subject(rng)
        jobs = [writer(rng.randint(1, 3), number) for number in range(THREADS)]
        seeds.count("calls", 20 * THREADS)
        assert together([*jobs, *readers(rng, one)[:2]]) == []


def test_containers_of_new_batch_sizes_are_made_at_once(seeds: Seeds) -> None:
    for seed in seeds(25):
        rng = Random(seed)
        sizes = [(rng.randint(1, 4000), rng.randint(1, 3)) for _ in range(30)]

        def job(sizes: list[tuple[int, int]] = sizes) -> object:
            for size in sizes:
                td = TensorDict({"a": torch.zeros(1).expand(size)}, size)
                found = (td.batch_size, td.lock_().is_locked, td.unlock_()[0].batch_size)
                if found != (size, True, size[1:]):
                    return found
            return None

        seeds.count("containers", len(sizes) * THREADS)
        assert together([job] * THREADS) == []


def test_first_calls_of_a_model_from_many_threads_are_right(seeds: Seeds) -> None:
    for seed in seeds(25):
        torch.manual_seed(seed)
        made, td = model(Random(seed)), inputs(3)
        plainly = dict(made.state_dict().items())
        twin = model(Random(seed))
        twin.load_state_dict(plainly)
        want = read(twin(td.clone()))

        def job(made: torch.nn.Module = made, td: TensorDict = td, want: Plain = want) -> object:
            for _ in range(3):
                found = differ(made(td.clone()), want, exact=False)
                if found:
                    return found
            return None

        seeds.count("calls", 3 * THREADS)
        assert together([job] * THREADS) == []


def test_a_locked_container_is_copied_by_many_threads(seeds: Seeds) -> None:
    for seed in seeds(40):
        rng = Random(seed)
        one = subject(rng)
        if one.ragged:
            continue
        one.td.lock_()

        def job(one: Subject = one) -> object:
            for _ in range(3):
                copy = one.td.clone(recurse=False)
                if copy.is_locked or not one.td.is_locked:
                    return "the lock went over to a copy"
                copy["new"] = torch.zeros(one.batch)
            return differ(one.td, plain(one.node))

        seeds.count("copies", 3 * THREADS)
        assert [w for w in together([job] * THREADS) if "field" not in str(w)] == []
