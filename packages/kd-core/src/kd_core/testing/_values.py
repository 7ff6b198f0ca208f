"""Contract: arithmetic, reductions and user functions run on each leaf."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kd_core._base import TensorDictBase
from kd_core._errors import KeySetMismatch, ShapeMismatch
from kd_core.testing._comparison import assert_close
from kd_core.testing._content import BATCH, Contract, holds, mapped, refused, unchanged

TENSOR = torch.tensor([[1.0], [2.0], [3.0]])
MATHS: tuple[tuple[Callable[[TensorDictBase], TensorDictBase], Callable[[Tensor], Tensor]], ...] = (
    (lambda td: td + 1, lambda x: x + 1),
    (lambda td: 2 - td, lambda x: 2 - x),
    (lambda td: td * td, lambda x: x * x),
    (lambda td: td / 2, lambda x: x / 2),
    (lambda td: -td, lambda x: -x),
    (lambda td: td > 3, lambda x: x > 3),
    (lambda td: td >= td.clone(), lambda x: x >= x),
    (lambda td: td.abs().sqrt(), lambda x: x.abs().sqrt()),
    (lambda td: td * TENSOR, lambda x: x * TENSOR.reshape(3, *(1,) * (x.ndim - 1))),
)


def _masked(leaf: Tensor, mask: Tensor) -> Tensor:
    leaf[mask] = 0
    return leaf


class ValueContract(Contract):
    """The tests of arithmetic, reductions and user functions."""

    def test_maths_run_leaf_by_leaf(self) -> None:
        for ours, theirs in MATHS:
            td = self.make()
            with unchanged(td):
                holds(ours(td), mapped(self.content(), theirs))

    def test_data_is_compared_with_the_leaves(self) -> None:
        td = self.make()
        with unchanged(td):
            assert bool((td == td.clone()).all())
            assert not bool((td != td.clone()).any())

    def test_maths_in_place_write_into_the_entries(self) -> None:
        td = self.make()
        assert td.add_(1) is td
        td.mul_(self.make() * 0 + 2)
        holds(td, mapped(self.content(), lambda x: (x + 1) * 2))

    def test_a_tensor_in_place_broadcasts_over_the_batch(self) -> None:
        td = self.make()
        td.add_(torch.tensor([[1], [2], [3]], dtype=torch.int32))
        holds(
            td,
            mapped(
                self.content(),
                lambda x: x + torch.arange(1, 4, dtype=x.dtype).reshape(3, *(1,) * (x.ndim - 1)),
            ),
        )

    def test_containers_with_other_keys_are_refused(self) -> None:
        td = self.make()
        with unchanged(td), refused(KeySetMismatch, "`b`"):
            td + td.exclude("b")
        with unchanged(td), refused(KeySetMismatch, "`b`"):
            td.add_(td.exclude("b"))
        with refused(ShapeMismatch, "(3, 4)"):
            td + torch.zeros(5)

    def test_a_default_stands_for_keys_of_one_side(self) -> None:
        td, content = self.make(), self.content()
        with unchanged(td):
            got = td.add(td.exclude("a"), default=1)
        expected = mapped(content, lambda x: x + x)
        expected["a"] = content["a"] + 1  # type: ignore[operator]  # a tensor
        holds(got, expected)

    def test_reductions_take_batch_dimensions(self) -> None:
        td = self.make()
        with unchanged(td):
            holds(td.sum(0), mapped(self.content(), lambda x: x.sum(0)), (4,))
            holds(td.amax(1), mapped(self.content(), lambda x: x.amax(1)), (3,))
        total = td.sum()
        assert tuple(total.batch_size) == ()
        assert_close(total, mapped(self.content(), lambda x: x.sum()))

    def test_apply_calls_a_function_on_each_leaf(self) -> None:
        td = self.make()
        with unchanged(td):
            result = td.apply(lambda leaf: leaf * 2)
        assert result is not None
        holds(result, mapped(self.content(), lambda x: x * 2))

    def test_values_are_filled_and_copied_in_place(self) -> None:
        td = self.make()
        holds(td.zero_(), mapped(self.content(), torch.zeros_like))
        holds(td.fill_(3), mapped(self.content(), lambda x: torch.full_like(x, 3)))
        holds(td.copy_(self.make()), self.content())
        mask = torch.tensor([True, False, True])
        holds(td.masked_fill_(mask[:, None], 0), mapped(self.content(), lambda x: _masked(x, mask)))

    def test_it_is_moved_and_cast(self) -> None:
        td = self.make()
        with unchanged(td):
            holds(td.to(torch.float64), mapped(self.content(), lambda x: x.to(torch.float64)))
            moved = td.to("meta")
        assert moved.device == torch.device("meta")
        assert tuple(moved.batch_size) == BATCH
        assert all(leaf.is_meta for leaf in moved.select("a", "b", "n").values(True, True))
        holds(td.contiguous(), self.content())

    def test_gradients_reach_its_entries(self) -> None:
        td = self.make().select("a", ("n", "c"))
        td.requires_grad_()
        (td * 3)["n", "c"].sum().backward()  # type: ignore[no-untyped-call]  # not typed in torch
        assert not td.detach().requires_grad
        expected = torch.full((*BATCH, 5), 3.0)
        assert td.grad is not None
        torch.testing.assert_close(td.grad["n", "c"], expected)

    def test_torch_functions_reach_it(self) -> None:
        td = self.make()
        holds(torch.abs(td), mapped(self.content(), torch.abs))  # type: ignore[arg-type]  # a container
        moved: object = torch.permute(td, (1, 0))  # type: ignore[arg-type]  # a container
        assert isinstance(moved, TensorDictBase)
        assert tuple(moved.batch_size) == (BATCH[1], BATCH[0])
