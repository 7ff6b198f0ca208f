"""Operations that keep the object: `inplace=True`."""

import pytest
import torch
from tests.core.kinds import inner

from kd_core import InvalidArgument, Locked, TensorDict, lazy_stack

CASES: list[tuple[str, tuple[object, ...]]] = [
    ("flatten", ()),
    ("unflatten", (0, (2, 1))),
    ("repeat", (2, 1)),
    ("repeat_interleave", (2, 1)),
    ("roll", (1, 0)),
    ("gather", (0, torch.zeros(1, 3, dtype=torch.int64))),
    ("masked_select", (torch.tensor([True, False]),)),
    ("pad", ([1, 0, 0, 2],)),
    ("contiguous", ()),
]


def make() -> TensorDict:
    entries = {"a": torch.arange(6).view(2, 3), "n": {"b": torch.rand(2, 3, 4)}, "word": "text"}
    return TensorDict(entries, [2, 3])


@pytest.mark.parametrize(("name", "args"), CASES)
def test_the_container_becomes_the_result(name: str, args: tuple[object, ...]) -> None:
    td = make()
    expected = getattr(td, name)(*args)
    assert getattr(td, name)(*args, inplace=True) is td
    assert td.batch_size == expected.batch_size
    assert inner(td, "n").batch_size == expected.batch_size
    assert bool((td == expected).all())
    assert td["word"] == expected["word"]


@pytest.mark.parametrize(("name", "args"), CASES[:-1])  # what is contiguous does not change
def test_a_locked_container_stays_as_it_is(name: str, args: tuple[object, ...]) -> None:
    td = make().lock_()
    leaf = td["a"]
    with pytest.raises(Locked, match="in place"):
        getattr(td, name)(*args, inplace=True)
    nested = make()
    inner(nested, "n").lock_()
    with pytest.raises(Locked, match="replace `n`"):
        getattr(nested, name)(*args, inplace=True)
    assert td["a"] is leaf
    assert td.batch_size == nested.batch_size == (2, 3)


@pytest.mark.parametrize(("name", "args"), CASES)
def test_a_lazy_stack_takes_other_members(name: str, args: tuple[object, ...]) -> None:
    stack = lazy_stack(list(make().unbind(0)))
    if name == "contiguous":
        with pytest.raises(InvalidArgument, match="stays lazy"):
            stack.contiguous(inplace=True)
        return
    expected = getattr(make(), name)(*args)
    assert getattr(stack, name)(*args, inplace=True) is stack
    assert stack.batch_size == expected.batch_size
    assert torch.equal(stack["a"], expected["a"])
    with pytest.raises(InvalidArgument, match="must keep its stacked dimension"):
        lazy_stack(list(make().unbind(0))).masked_select(torch.zeros(2).bool(), inplace=True)
