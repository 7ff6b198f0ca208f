"""Containers leave nothing behind, and may be read by several threads."""

import gc
import threading
import weakref

import torch
from tests.core.kinds import inner

from kd_core import TensorDict, TensorDictBase, lazy_stack


def cycle() -> None:
    """Make, change and drop containers of several kinds."""
    td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.ones(3)}, "word": "x"}, [3])
    td.lock_().unlock_()
    td["n", "c"] = td["a"] + 1
    lazy_stack(td.unbind(0))["a"]
    (td[1:] * 2).update({"a": torch.zeros(2)})


def tracked() -> int:
    gc.collect()
    return len(gc.get_objects())


def test_cycles_leave_no_object_behind() -> None:
    for _ in range(50):
        cycle()
    before = tracked()
    for _ in range(200):
        cycle()
    assert tracked() - before < 40


def test_many_batch_sizes_do_not_pile_up() -> None:
    for rows in range(6000):
        TensorDict({}, [rows])
    before = tracked()
    for rows in range(6000, 18_000):
        TensorDict({}, [rows])
    assert tracked() - before < 9000


def test_dropping_a_container_drops_its_tensors_at_once() -> None:
    tensor = torch.zeros(3)
    gone = weakref.ref(tensor)
    td = TensorDict({"n": {"a": tensor}}, [3]).lock_()
    del tensor
    gc.disable()
    try:
        del td
        assert gone() is None
    finally:
        gc.enable()


def test_a_dropped_locked_parent_is_not_kept_by_what_it_enclosed() -> None:
    parent = TensorDict({"n": {"a": torch.zeros(3)}}, [3]).lock_()
    nested = inner(parent, "n")
    gone = weakref.ref(parent)
    del parent
    assert gone() is None
    torch.testing.assert_close(nested["a"], torch.zeros(3))


def test_threads_read_at_the_same_time() -> None:
    td = TensorDict({"a": torch.arange(6.0), "n": {"b": torch.ones(6, 2)}}, [6]).lock_()
    start = threading.Barrier(8)
    wrong: list[object] = []

    def read(td: TensorDictBase) -> None:
        start.wait()
        for row in range(200):
            one = td[row % 6]
            if one["a"].item() != row % 6 or (td + 1)["n", "b"][0, 0] != 2:
                wrong.append(row)

    threads = [threading.Thread(target=read, args=(td,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_leaf_is_not_kept_by_the_history_of_what_is_written_to_it() -> None:
    gc.disable()
    try:
        leaf = torch.ones(2, requires_grad=True) * 1
        found = weakref.ref(leaf)
        td = TensorDict({"a": leaf}).minimum_(0.5).maximum_(TensorDict({"a": leaf}))
        del leaf, td
        assert found() is None
    finally:
        gc.enable()
