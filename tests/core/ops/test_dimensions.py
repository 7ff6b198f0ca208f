"""The batch is turned and widened as a tensor of shape `batch_size`."""

import pytest
import torch
from tests.core.rows import assert_rows, container, lazy_container, numbers

from kd_core import InvalidValue, OutOfRange, TensorDict

CASES: list[tuple[str, tuple[object, ...]]] = [
    ("atleast_1d", ()),
    ("atleast_3d", ()),
    ("broadcast_to", ((2, 4, 3),)),
    ("broadcast_to", ((5, -1, 1, -1),)),
    ("fliplr", ()),
    ("flipud", ()),
    ("rot90", ()),
    ("rot90", (2,)),
    ("rot90", (-1, (0, 2))),
    ("rot90", (5, (-1, 0))),
]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(("name", "args"), CASES)
def test_rows_move_as_those_of_a_tensor(name: str, args: tuple[object, ...], lazy: bool) -> None:
    td = lazy_container() if lazy else container()
    rows = getattr(torch, name)(numbers(), *((2, 4, 3) if a == (2, 4, 3) else a for a in args))
    assert_rows(getattr(td, name)(*args), td, rows)
    assert_rows(getattr(torch, name)(td, *args), td, rows)


@pytest.mark.parametrize("name", ["atleast_1d", "atleast_2d", "atleast_3d"])
@pytest.mark.parametrize("batch", [(), (3,), (3, 2)])
def test_dimensions_are_added_where_torch_adds_them(name: str, batch: tuple[int, ...]) -> None:
    td = TensorDict({"a": torch.zeros(*batch, 5)}, batch)
    got = getattr(td, name)()
    assert got.batch_size == getattr(torch, name)(torch.zeros(batch)).shape
    assert got["a"].shape == (*got.batch_size, 5)


def test_what_turning_refuses() -> None:
    td = TensorDict({"a": torch.zeros(3, 2)}, [3])
    for name in ("fliplr", "rot90"):
        with pytest.raises(OutOfRange, match=f"`{name}` requires at least 2 batch dimensions"):
            getattr(td, name)()
    with pytest.raises(OutOfRange, match="at least 1 batch dimension, got"):
        td[0].flipud()
    with pytest.raises(InvalidValue, match="must be two dimensions"):
        container().rot90(1, (0,))
