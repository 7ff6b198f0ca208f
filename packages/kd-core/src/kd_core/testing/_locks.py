"""Contract: the structure of a locked container cannot change, its values can."""

from __future__ import annotations

import torch

from kd_core._errors import Locked
from kd_core.testing._content import BATCH, Contract, holds, inner, refused, unchanged


class LockContract(Contract):
    """The tests of locks."""

    def test_a_locked_container_keeps_its_structure(self) -> None:
        td = self.make().lock_()
        assert td.is_locked
        with unchanged(td), refused(Locked, "set `a`", "`lock_()`", "clone(recurse=False)"):
            td["a"] = torch.ones(BATCH)
        with unchanged(td), refused(Locked, "`('n', 'c')`"):
            td["n", "c"] = torch.ones(BATCH)
        with unchanged(td), refused(Locked, "`a`"):
            del td["a"]
        with unchanged(td), refused(Locked, "`a`"):
            td.update({"a": torch.ones(BATCH)})
        with unchanged(td), refused(Locked, "`a`"):
            td.rename_key_("a", "z")
        td.names = ["rows", None]  # the lock covers entries
        assert (td.names, td.is_locked) == (["rows", None], True)

    def test_values_of_a_locked_container_are_written_in_place(self) -> None:
        td, content = self.make().lock_(), self.content()
        td.set_("a", 1.0)
        td.update_({"n": {"c": 2.0}})
        td[0] = 0
        content["a"] = torch.ones(BATCH)
        content["n"]["c"] = torch.full((*BATCH, 5), 2.0)  # type: ignore[index]  # nested
        for leaf in (content["a"], content["b"], content["n"]["c"], content["n"]["d"]["e"]):  # type: ignore[index]  # nested content
            leaf[0] = 0  # type: ignore[index]  # nested content
        holds(td, content)

    def test_the_lock_covers_nested_containers(self) -> None:
        td = self.make().lock_()
        nested = inner(td, "n")
        assert nested.is_locked
        with refused(Locked, "enclosing container"):
            nested["c"] = torch.ones(BATCH)
        with refused(Locked, "Unlock the outer one"):
            nested.unlock_()

    def test_unlocking_allows_everything_again(self) -> None:
        td = self.make().lock_().unlock_()
        assert not td.is_locked
        td["a"] = torch.ones(BATCH)
        inner(td, "n")["c"] = torch.ones(BATCH)
        torch.testing.assert_close(td["n", "c"], torch.ones(BATCH))

    def test_scopes_restore_the_lock(self) -> None:
        td = self.make()
        with td.locked():
            assert td.is_locked
            with td.unlocked():
                td["a"] = torch.ones(BATCH)
            assert td.is_locked
        assert not td.is_locked

    def test_with_undoes_an_operation(self) -> None:
        td, content = self.make().lock_(), self.content()
        if not hasattr(td, "_kd_scope"):  # the kind has no place for it
            return
        with td.unlock_() as same:
            states = [same is td, td.is_locked]
        assert [*states, td.is_locked] == [True, False, True]
        with td.unlock_(), td.transpose(0, 1) as view:
            view["a"] = view["a"] + 1
        content["a"] = content["a"] + 1  # type: ignore[operator]  # a tensor
        holds(td, content)

    def test_rows_copies_and_selections_are_not_locked(self) -> None:
        td = self.make().lock_()
        assert not td.select("n").is_locked  # what it keeps whole is what it was
        for result in (td.clone(), td.clone(recurse=False), td[0], td == td):
            assert not result.is_locked
            assert not inner(result, "n").is_locked

    def test_arithmetic_casts_and_views_are_locked(self) -> None:
        td = self.make().lock_()
        for result in (td * 2, td + td, td.abs(), td.double(), td.unsqueeze(0), *td.split(1)):
            assert result.is_locked
            assert inner(result, "n").is_locked
            assert not inner(result.unlock_(), "n").is_locked
        assert td.is_locked
