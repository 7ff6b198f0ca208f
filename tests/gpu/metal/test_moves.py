"""Pinned memory, copies that do not wait, and streams: values are right under load."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.core.kinds import FACTORIES
from tests.gpu.device import DEVICE, TORCH, assert_alike, devices
from torch import Tensor

from kd_core import InvalidValue, TensorDict, TensorDictBase, lazy_stack

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, which the metal decides

SIZE = 1 << 18
LEAVES = 24


def busy() -> None:
    """Give the GPU some milliseconds of work, behind which copies wait."""
    TORCH.cuda._sleep(20_000_000)


def numbers(value: float) -> TensorDict:
    return TensorDict(
        {str(n): torch.full((SIZE,), float(value + n)) for n in range(LEAVES)}, [SIZE]
    )


def holds(td: TensorDictBase, value: float) -> bool:
    return all(bool((td[str(n)] == value + n).all()) for n in range(LEAVES))


def test_pinning() -> None:
    for make in FACTORIES.values():
        td = make()
        assert not td.is_pinned()
        pinned = td.pin_memory()
        assert pinned.is_pinned()
        assert_alike(pinned, td)
        assert_alike(pinned.to(DEVICE, non_blocking=True), td)
    td = numbers(0)
    assert td.pin_memory_() is td
    assert td.is_pinned()
    assert td.consolidate(pin_memory=True).is_pinned()
    assert TORCH.zeros_like(td, pin_memory=True).is_pinned()


WAYS: dict[str, Callable[[TensorDictBase], TensorDictBase]] = {
    "to": lambda td: td.to(DEVICE),
    "cuda": lambda td: td.cuda(),
    "consolidate": lambda td: td.consolidate(device=DEVICE),
    "pinned, waiting": lambda td: td.pin_memory().to(DEVICE),
    "set": lambda td: TensorDict({}, [SIZE], device=DEVICE).update(td),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pinned", [False, True])
def test_a_copy_that_waits_is_done_when_it_returns(way: str, pinned: bool) -> None:
    for value in range(5):
        source = numbers(value)
        if pinned:
            source.pin_memory_()
        busy()
        there = WAYS[way](source)
        source.zero_()  # too late to be seen
        assert holds(there, value)
        busy()
        again = there * 1
        back = again.cpu()
        again.zero_()
        assert holds(back, value)


@pytest.mark.parametrize("large", [False, True])
def test_a_move_to_the_cpu_fills_pinned_memory_unless_it_is_large(
    monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    if large:
        monkeypatch.setattr("kd_core._ops.placement.MOST_PINNED", 1000)
    found = []
    for value in range(5):
        there = lazy_stack([numbers(value).to(DEVICE), numbers(value + 1).to(DEVICE)])
        with TORCH.cuda.stream(TORCH.cuda.Stream(DEVICE)):
            busy()
            there = there * 1
            found.append(there.cpu())
            there.zero_()
    for value, back in enumerate(found):
        assert back.is_pinned() is not large
        assert holds(back[0], value)
        assert holds(back[1], value + 1)
        assert devices(back) == {torch.device("cpu")}


def test_copies_that_do_not_wait_are_in_order_of_the_stream() -> None:
    for value in range(5):
        source = numbers(value).pin_memory()
        busy()
        there = source.to(DEVICE, non_blocking=True)
        doubled = there + there
        torch.cuda.synchronize()
        assert holds(there, value)
        assert_alike(doubled["3"].cpu(), torch.full((SIZE,), 2.0 * (value + 3)))
        back = doubled.to("cpu", non_blocking=True)
        torch.cuda.synchronize()
        assert_alike(back["3"], torch.full((SIZE,), 2.0 * (value + 3)))


def test_pinning_on_the_way_keeps_the_pinned_memory_long_enough() -> None:
    found = []
    for value in range(20):
        busy()
        found.append(numbers(value).to(DEVICE, non_blocking_pin=True))
        torch.full((SIZE,), -1.0).pin_memory()  # takes memory that was freed too early
    torch.cuda.synchronize()
    assert all(holds(td, value) for value, td in enumerate(found))


WRITES: dict[str, Callable[[TensorDictBase, TensorDictBase], object]] = {
    "update_": lambda td, new: td.update_(new, non_blocking=True),
    "update": lambda td, new: td.update(new, non_blocking=True),
    "copy_": lambda td, new: td.copy_(new, non_blocking=True),
    "set": lambda td, new: [td.set(key, new[key], non_blocking=True) for key in list(new.keys())],
    "set_": lambda td, new: [td.set_(key, new[key], non_blocking=True) for key in list(new.keys())],
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_that_do_not_wait(write: str) -> None:
    td = numbers(0).to(DEVICE)
    for value in range(1, 10):
        source = numbers(value).pin_memory()
        busy()
        WRITES[write](td, source)
        del source
        assert holds(td, value)
    assert devices(td) == {DEVICE}


@pytest.mark.parametrize("option", ["pin_memory", "share_memory", None])
def test_one_storage_on_the_cpu_is_complete(option: str | None) -> None:
    for value in range(5):
        there = numbers(value).to(DEVICE)
        busy()
        options: dict[str, Any] = {} if option is None else {option: True}
        moved = (there + 0).consolidate(device="cpu", non_blocking=True, **options)
        if option is None:
            torch.cuda.synchronize()
        assert holds(moved, value)


def test_one_storage_on_the_gpu_from_pinned_memory() -> None:
    for value in range(5):
        busy()
        there = numbers(value).consolidate(device=DEVICE, non_blocking=True, pin_memory=True)
        assert holds(there, value)
        assert there.is_consolidated()


def test_files_are_read_to_the_gpu_without_waiting(tmp_path: Path) -> None:
    numbers(3).memmap(tmp_path)
    found = []
    for _ in range(5):
        busy()
        found.append(TensorDict.load_memmap(tmp_path, device=DEVICE, non_blocking=True))
    assert all(holds(td, 3) for td in found)


@pytest.fixture
def stream() -> Iterator[torch.cuda.Stream]:
    made = torch.cuda.Stream(DEVICE)
    yield made
    made.synchronize()


def test_memory_in_use_on_another_stream_is_not_given_away(stream: torch.cuda.Stream) -> None:
    for value in range(10):
        td = numbers(value).to(DEVICE)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            busy()
            result = td + 0
        assert td.record_stream(stream) is td
        del td
        for _ in range(LEAVES):
            torch.full((SIZE,), -1.0, device=DEVICE)  # takes what the allocator gives away
        stream.synchronize()
        assert holds(result, value)


def test_a_waiting_copy_waits_for_the_stream_that_it_is_on(stream: torch.cuda.Stream) -> None:
    for value in range(5):
        source = numbers(value).pin_memory()
        with torch.cuda.stream(stream):
            busy()
            there = source.to(DEVICE)
            source.zero_()
            back = (there * 1).cpu()
        assert holds(back, value)


def test_record_stream_refuses_what_is_not_on_a_gpu(stream: torch.cuda.Stream) -> None:
    td = TensorDict({"a": torch.zeros(2, device=DEVICE), "b": torch.zeros(2)}, [2])
    with pytest.raises(InvalidValue, match=r"`b`.* must be on a GPU"):
        td.record_stream(stream)


def test_leaves_of_a_gpu_cannot_be_pinned() -> None:
    td = TensorDict({"a": torch.zeros(2), "b": torch.zeros(2, device=DEVICE)}, [2])
    with pytest.raises(RuntimeError):
        td.pin_memory()
    assert not td["a"].is_pinned()
    assert_alike(
        td.to(DEVICE, non_blocking_pin=True),
        TensorDict({"a": torch.zeros(2), "b": torch.zeros(2)}, [2]),
    )


@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_kernels_of_many_leaves_do_what_loops_do(count: int) -> None:
    torch.manual_seed(0)
    leaves = {str(n): torch.randn(n + 1, 3, device=DEVICE) for n in range(count)}
    td = TensorDict(dict(leaves))
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "add": lambda x: x + 1.1,
        "sub": lambda x: x - 0.3,
        "mul": lambda x: x * 1.7,
        "div": lambda x: x / 3,
        "pow": lambda x: x**3,
        "exp": lambda x: x.exp(),
        "sqrt": lambda x: x.abs().sqrt(),
        "itself": lambda x: x + x * x / (x + 4),
        "clamp": lambda x: x.clamp(-0.5, 0.5),
    }
    for name, call in calls.items():
        found: object = call(td)  # type: ignore[arg-type]  # of a container, likewise
        for key, leaf in leaves.items():
            assert isinstance(found, TensorDictBase)
            expected = call(leaf)
            if name == "pow":  # one kernel takes x * x * x, the other the power of two numbers
                torch.testing.assert_close(found[key], expected)
            else:
                assert torch.equal(found[key], expected), (name, key)


def test_a_lazy_stack_moves_member_by_member() -> None:
    stack = lazy_stack([TensorDict({"x": torch.full((n + 1,), float(n))}) for n in range(50)])
    busy()
    there = stack.to(DEVICE)
    for n, member in enumerate(there.tensordicts):
        assert bool((member["x"] == n).all())
    for n, member in enumerate(there.cpu().tensordicts):
        assert bool((member["x"] == n).all())
