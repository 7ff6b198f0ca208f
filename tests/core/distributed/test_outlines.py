"""Outlines that are remembered are those of the plain way, whatever becomes of the leaves."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kd_core import InvalidValue, KeySetMismatch, TensorDict, lazy_stack
from kd_core._distributed import outlines
from kd_core._distributed.groups import difference
from kd_core._distributed.outlines import Outline, outlined, rows_of

LEAVES: list[Callable[[], Tensor]] = [
    lambda: torch.ones(2, 3),
    lambda: torch.ones(3, 2),
    lambda: torch.ones(6),
    lambda: torch.ones(2, 3, dtype=torch.int32),
    lambda: torch.ones(3, 2).t(),
    lambda: torch.ones(3).expand(2, 3),
    lambda: torch.nn.Parameter(torch.ones(2, 3)),
    lambda: torch.ones(2, 3, requires_grad=True),
    lambda: torch.ones(2, 3, dtype=torch.complex64),
    lambda: torch.ones(2, 3, dtype=torch.complex64).conj(),
    lambda: torch.ones(()),
    lambda: torch.ones(0),
]


def test_the_outline_of_other_leaves_under_the_same_keys_is_not_taken() -> None:
    """More of them than are kept, in two rounds: made, and remembered."""
    outlines._KNOWN.clear()
    for _ in range(2):
        for make in (*LEAVES, *LEAVES[:3]):
            td = TensorDict({"b": torch.ones(2), "n": {"a": make()}})
            mine = outlined(td)
            assert mine.outline.digest == Outline(rows_of(td)).digest
            leaf = td["n", "a"]
            is_whole = leaf.is_contiguous() and not leaf.is_conj()
            assert mine.is_whole == is_whole
    assert sum(map(len, outlines._KNOWN.values())) <= len(LEAVES)


def test_a_leaf_that_changes_its_shape_is_seen() -> None:
    leaf = torch.ones(2, 3)
    td = TensorDict({"a": leaf})
    rows = [outlined(td).outline.rows[0].shape]
    for change in (leaf.t_, lambda: leaf.resize_(3), lambda: leaf.set_(torch.ones(4))):  # type: ignore[call-overload]  # torch has it
        change()
        rows.append(outlined(td).outline.rows[0].shape)
    assert rows == [(2, 3), (3, 2), (3,), (4,)]


def test_outlines_of_the_same_keys_are_remembered() -> None:
    def make(size: int) -> Any:
        rows = lazy_stack([TensorDict({"x": torch.ones(n)}) for n in (1, size)])
        return TensorDict({"a": torch.ones(size), "rows": rows})

    first, second = outlined(make(2)).outline, outlined(make(3)).outline
    assert first is not second
    assert [outlined(make(size)).outline for size in (2, 3)] == [first, second]


def test_leaves_that_follow_one_another_are_one_view() -> None:
    flat = torch.arange(8.0)
    td = TensorDict({"a": flat[1:3], "n": {"b": flat[3:7].view(2, 2)}, "z": torch.arange(2)})
    views = outlined(td).views()
    assert views is not None
    assert [view.tolist() for view in views] == [[1, 2, 3, 4, 5, 6], [0, 1]]
    room = outlined(td).packed()
    room.flats[0].neg_()
    outlined(td).write(room)
    assert flat.tolist() == [0, -1, -2, -3, -4, -5, -6, 7]


def test_leaves_of_several_storages_are_not_one_view() -> None:
    """They lie side by side, as a storage may begin where another one ends."""
    octets = bytearray(16)
    parts = [torch.frombuffer(octets, dtype=torch.float32, offset=at, count=2) for at in (0, 8)]
    assert parts[1].data_ptr() - parts[0].data_ptr() == 8
    mine = outlined(TensorDict(dict(zip("ab", parts, strict=True))))
    assert mine.views() is None
    room = mine.packed()
    room.flats[0].fill_(1)
    mine.write(room)
    assert [part.tolist() for part in parts] == [[1, 1]] * 2


def test_a_stack_beside_a_dense_container_is_a_difference_of_kinds() -> None:
    stack = lazy_stack([TensorDict(x=torch.ones(n), n={"y": torch.ones(1)}) for n in (1, 2)])
    for members in (True, False):
        for above in (False, True):
            found = TensorDict({"s": stack}, [2]) if above else stack
            parts: list[Any] = [found, TensorDict({"s": stack[:0]}, [0]) if above else stack[:0]]
            for lazy, order in enumerate((parts, parts[::-1])):
                told = [(rank, rows_of(td, members=members)) for rank, td in enumerate(order)]
                what = "entry `s`" if above else "the container"
                error = difference("all_gather()", told)
                assert isinstance(error, InvalidValue)
                text = f"{what} is a lazy stack on rank {lazy}, but dense on rank {1 - lazy}"
                assert text in str(error)
    keys = [(rank, rows_of(TensorDict({name: stack}, [2]))) for rank, name in enumerate("ab")]
    assert isinstance(difference("all_gather()", keys), KeySetMismatch)
    nothing = [(0, rows_of(stack, members=False)), (1, rows_of(TensorDict()))]
    assert "the container is a lazy stack on rank 0" in str(difference("all_gather()", nothing))
