"""Contract: the batch dimensions behave as on a tensor of shape `batch_size`."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kd_core._base import TensorDictBase
from kd_core._combine.stacking import cat, stack
from kd_core._errors import KdError, OutOfRange, ShapeMismatch
from kd_core.testing._comparison import assert_close
from kd_core.testing._content import BATCH, Contract, holds, mapped, refused, unchanged

MASK = torch.tensor([True, False, True])
GRID = torch.arange(12).reshape(BATCH) % 5 == 0
INDICES: tuple[object, ...] = (
    0,
    -1,
    slice(1, 3),
    slice(None, None, 2),
    slice(2, 2),
    None,
    Ellipsis,
    MASK,
    GRID,
    [2, 0],
    torch.tensor([2, 0, 0]),
    torch.tensor([[0, 1], [2, 2]]),
    (0, 1),
    (slice(None), 2),
    (slice(1, 3), slice(0, 2)),
    (Ellipsis, 1),
    (None, 0, Ellipsis, None),
    (MASK, 1),
    (slice(None), torch.tensor([3, 0])),
    (torch.tensor([0, 1]), torch.tensor([3, 0])),
)


def _shape(index: object) -> tuple[int, ...]:
    return tuple(torch.empty(BATCH)[index].shape)  # type: ignore[index]  # any of the above


def _whole(index: object) -> object:
    """Return the index for a leaf, which keeps its trailing dimensions."""
    items = index if isinstance(index, tuple) else (index,)
    if not any(item is Ellipsis for item in items):
        return index
    place = next(i for i, item in enumerate(items) if item is Ellipsis)
    used = sum(item is not None and item is not Ellipsis for item in items)
    return (*items[:place], *(slice(None),) * (len(BATCH) - used), *items[place + 1 :])


class _Indexing(Contract):
    def test_an_index_takes_what_it_takes_of_a_tensor(self) -> None:
        for index in INDICES:
            td = self.make()
            with unchanged(td):
                taken: TensorDictBase = td[index]  # type: ignore[call-overload]  # any of the above
            at = _whole(index)
            expected = mapped(self.content(), lambda leaf, at=at: leaf[at])  # type: ignore[misc]  # a default binds the loop variable
            holds(taken, expected, _shape(index))

    def test_a_bad_index_is_refused(self) -> None:
        td = self.make()
        with refused(OutOfRange, "3"):
            td[3]
        with refused(OutOfRange, "too many indices"):
            td[0, 0, 0]
        with refused(OutOfRange, "mask", "(4,)"):
            td[torch.ones(4, dtype=torch.bool)]
        with refused(KdError, "index"):
            td[1.5]  # type: ignore[call-overload]  # what is refused

    def test_one_value_is_written_to_rows(self) -> None:
        for index in INDICES:
            td, content = self.make(), self.content()
            td[index] = 1
            _write(content, _whole(index), lambda rows: 1)
            holds(td, content)

    def test_rows_of_a_container_are_written(self) -> None:
        for index in INDICES:
            td, content = self.make(), self.content()
            td[index] = (self.make() * 3)[index]  # type: ignore[call-overload]  # any of the above
            _write(content, _whole(index), lambda rows: rows * 3)
            holds(td, content)

    def test_a_source_may_have_fewer_keys(self) -> None:
        td, content = self.make(), self.content()
        td[0] = {"a": torch.zeros(4), "n": {"c": torch.ones(5)}}
        content["a"][0] = 0  # type: ignore[index]  # nested content
        content["n"]["c"][0] = 1  # type: ignore[index]  # nested content
        holds(td, content)

    def test_a_locked_container_gets_no_keys_by_rows(self) -> None:
        td = self.make().lock_()
        with unchanged(td), refused(KdError, "`x`"):
            td[0] = {"a": torch.zeros(4), "x": torch.zeros(4)}

    def test_rows_that_do_not_fit_change_nothing(self) -> None:
        td = self.make()
        with unchanged(td), refused(ShapeMismatch, "`b`"):
            td[0] = {"a": torch.zeros(4), "b": torch.zeros(9)}

    def test_rows_of_one_entry_are_read_and_written(self) -> None:
        td, content = self.make(), self.content()
        td.set_at_(("n", "c"), 9.0, (0, 1))
        content["n"]["c"][0, 1] = 9  # type: ignore[index]  # nested content
        holds(td, content)
        torch.testing.assert_close(td.get_at("b", 1), td["b"][1])


def _write(content: dict[str, object], at: object, value: Callable[[Tensor], object]) -> None:
    def written(leaf: Tensor) -> Tensor:
        leaf[at] = value(leaf[at])  # type: ignore[index, assignment]  # any of the above
        return leaf

    mapped(content, written)


ROWS = torch.arange(12).reshape(BATCH)
SHAPES: tuple[tuple[str, Callable[[TensorDictBase], TensorDictBase], Tensor], ...] = (
    ("reshape", lambda td: td.reshape(2, 6), ROWS.reshape(2, 6)),
    ("reshape -1", lambda td: td.reshape(-1), ROWS.reshape(-1)),
    ("flatten", lambda td: td.flatten(0, 1), ROWS.flatten()),
    ("unflatten", lambda td: td.unflatten(1, (2, 2)), ROWS.reshape(3, 2, 2)),
    ("permute", lambda td: td.permute(1, 0), ROWS.permute(1, 0)),
    ("transpose", lambda td: td.transpose(0, 1), ROWS.transpose(0, 1)),
    ("unsqueeze", lambda td: td.unsqueeze(-1), ROWS.unsqueeze(-1)),
    ("squeeze", lambda td: td.unsqueeze(0).squeeze(0), ROWS),
    ("expand", lambda td: td.expand(2, 3, 4), ROWS.expand(2, 3, 4)),
    ("repeat", lambda td: td.repeat(2, 1), ROWS.repeat(2, 1)),
    ("roll", lambda td: td.roll(1, 0), ROWS.roll(1, 0)),
    ("flip", lambda td: td.flip(0), ROWS.flip(0)),
    ("split", lambda td: td.split(2, 1)[1], ROWS[:, 2:]),
    ("chunk", lambda td: td.chunk(2, 0)[0], ROWS.chunk(2, 0)[0]),
    ("unbind 0", lambda td: td.unbind(0)[2], ROWS.unbind(0)[2]),
    ("unbind 1", lambda td: td.unbind(1)[2], ROWS.unbind(1)[2]),
    ("narrow", lambda td: td.narrow(1, 1, 2), ROWS.narrow(1, 1, 2)),
)


class _Shaping(Contract):
    def test_rearranging_moves_rows_as_in_a_tensor(self) -> None:
        for name, change, rows in SHAPES:
            td = self.make()
            with unchanged(td):
                result = change(td)
            flat = mapped(self.content(), lambda leaf: leaf.flatten(0, 1))
            expected = mapped(flat, lambda leaf, rows=rows: leaf[rows])  # type: ignore[misc]  # a default binds the loop variable
            try:
                holds(result, expected, tuple(rows.shape))
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error

    def test_copies_of_it_are_stacked_and_joined(self) -> None:
        td = self.make()
        content = self.content()
        for join in (stack, _torch_stack):
            rows = mapped(content, lambda leaf: torch.stack([leaf, leaf], 1))
            holds(join([td, self.make()], 1), rows, (3, 2, 4))
        joined = mapped(content, lambda leaf: torch.cat([leaf, leaf[:1]], 0))
        holds(cat([td, self.make()[:1]], 0), joined, (4, 4))

    def test_rows_are_put_together_by_a_data_loader(self) -> None:
        batches = list(DataLoader(cast("Dataset[TensorDictBase]", self.make()), batch_size=2))
        holds(batches[0], mapped(self.content(), lambda leaf: leaf[:2]), (2, 4))
        rows = DataLoader(cast("Dataset[TensorDictBase]", list(self.make())), batch_size=3)
        holds(next(iter(rows)), self.content())

    def test_where_chooses_rows(self) -> None:
        td = self.make()
        chosen = td.where(GRID, self.make() * 2)
        doubled = (self.make() * 2).to_dict(retain_none=False)
        assert_close(chosen[GRID], td[GRID])
        assert_close(chosen[~GRID], mapped(doubled, lambda leaf: leaf[~GRID]))

    def test_a_shape_that_does_not_fit_is_refused(self) -> None:
        td = self.make()
        with unchanged(td), refused(KdError, "5"):
            td.reshape(5, 2)
        with unchanged(td), refused(OutOfRange, "2"):
            td.unbind(2)


def _torch_stack(containers: list[TensorDictBase], dim: int) -> TensorDictBase:
    found: object = torch.stack(containers, dim)  # type: ignore[arg-type]  # containers
    assert isinstance(found, TensorDictBase)
    return found


class BatchContract(_Indexing, _Shaping):
    """The tests of batch dimensions."""
