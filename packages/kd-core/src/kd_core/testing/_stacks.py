"""`StackContract`: what a kind that is made of members promises beyond every container."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kd_core._base import TensorDictBase
from kd_core._containers.tensordict import TensorDict
from kd_core._errors import Locked, ShapeMismatch
from kd_core.testing._content import BATCH, holds, refused
from kd_core.testing._contract import ContainerContract


class StackContract(ContainerContract):
    """The test suite of kinds made of members: subclass it, implement `make_stack`, and run it.

    Example:
        >>> from kd_core import TensorDictBase, lazy_stack
        >>> from kd_core.testing import StackContract
        >>> class TestLazyStack(StackContract):
        ...     def make_stack(self, members, dim):
        ...         return lazy_stack(members, dim)
        >>> TestLazyStack().test_a_member_keeps_its_own_shape()
    """

    def make_stack(self, members: Sequence[TensorDictBase], dim: int) -> TensorDictBase:
        """Build a container of these members, stacked along a new batch dimension."""
        raise NotImplementedError("implement `make_stack()`: return a container of the members")

    def make(self) -> TensorDictBase:
        """Build a stack that holds `content()`."""
        return self.make_stack(TensorDict(self.content(), BATCH).unbind(0), 0)

    def _ragged(self) -> TensorDictBase:
        rows = [TensorDict({"a": torch.full((n,), n), "b": float(n)}) for n in (1, 2, 3)]
        rows[1]["own"] = torch.zeros(())
        return self.make_stack(rows, 0)

    def test_rows_are_the_members_themselves(self) -> None:
        rows = TensorDict(self.content(), BATCH).unbind(1)
        stack = self.make_stack(rows, 1)
        assert [id(row) for row in stack.unbind(1)] == [id(row) for row in rows]
        holds(stack, self.content())

    def test_a_member_keeps_its_own_shape(self) -> None:
        stack = self._ragged()
        assert [row["a"].shape[0] for row in stack.unbind(0)] == [1, 2, 3]
        with refused(ShapeMismatch, "`a`", "(1,)", "(3,)"):
            stack["a"]
        torch.testing.assert_close(stack["b"], torch.tensor([1.0, 2.0, 3.0]))
        torch.testing.assert_close(stack[1:]["b"], torch.tensor([2.0, 3.0]))

    def test_only_keys_of_all_members_are_visible(self) -> None:
        stack = self._ragged()
        assert list(stack.keys()) == ["a", "b"]
        assert stack.get("own") is None
        assert "own" in stack[1]

    def test_arithmetic_runs_on_ragged_members(self) -> None:
        doubled = self._ragged() * 2
        assert [row["a"].tolist() for row in doubled.unbind(0)] == [[2], [4, 4], [6, 6, 6]]

    def test_a_write_reaches_the_members(self) -> None:
        stack = self._ragged()
        stack["b"] = torch.tensor([4.0, 5.0, 6.0])
        stack["n", "c"] = torch.zeros(3, 2)
        assert [row["b"].item() for row in stack.unbind(0)] == [4, 5, 6]
        assert stack[0]["n", "c"].shape == (2,)

    def test_a_lock_covers_the_members(self) -> None:
        stack = self._ragged()
        member = stack[1]
        with refused(Locked, "`b`"):
            stack.lock_()
            member["b"] = 0.0
        stack.unlock_()
        member["b"] = 0.0
        assert stack["b"][1] == 0

    def test_data_of_rows_stays_with_its_row(self) -> None:
        rows = [TensorDict({"word": word}) for word in ("to", "be", "to")]
        stack = self.make_stack(rows, 0)
        assert stack.get_non_tensor("word") == ["to", "be", "to"]
        assert stack[torch.tensor([True, False, True])].get_non_tensor("word") == ["to", "to"]
        assert stack.flip(0)[1:].get_non_tensor("word") == ["be", "to"]
        assert stack.contiguous().get_non_tensor("word") == ["to", "be", "to"]
