"""Contract: copies, conversion and pickling."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.utils import _pytree

from kd_core._base import TensorDictBase
from kd_core.testing._comparison import assert_close
from kd_core.testing._content import BATCH, Contract, holds, inner, mapped, unchanged

Way: TypeAlias = Callable[[TensorDictBase], TensorDictBase]
DEEP: tuple[Way, ...] = (lambda td: td.clone(), copy.deepcopy)
SHALLOW: tuple[Way, ...] = (lambda td: td.clone(recurse=False), copy.copy, lambda td: td.copy())


class CopyContract(Contract):
    """The tests of copies and pickling."""

    def test_a_deep_copy_shares_nothing(self) -> None:
        for deep in DEEP:
            td = self.make()
            other = deep(td)
            holds(other, self.content())
            with unchanged(td):
                other.update_(self.make() * 0)
                other.mul_(0)
            holds(other, mapped(self.content(), torch.zeros_like))

    def test_a_shallow_copy_shares_values_but_no_level(self) -> None:
        for shallow in SHALLOW:
            td, content = self.make(), self.content()
            other = shallow(td)
            with unchanged(td):
                other["a"] = torch.ones(BATCH)
                other["n", "c"] = torch.ones(BATCH)
                inner(other, "n", "d")["e"] = torch.ones(BATCH)
            other.set_("b", 0)
            content["b"] = torch.zeros(*BATCH, 2, dtype=torch.int64)
            holds(td, content)

    def test_it_becomes_nested_dicts(self) -> None:
        plain = self.make().to_dict(retain_none=False)
        assert type(plain) is dict
        assert type(plain["n"]) is dict
        assert_close(plain, self.content())

    def test_it_is_pickled(self) -> None:
        td = self.make().lock_()
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            other = pickle.loads(pickle.dumps(td, protocol))
            assert type(other) is type(td)
            holds(other, self.content())
            assert other.is_locked
            assert not other.unlock_().is_locked

    def test_it_is_loaded_with_weights_only(self) -> None:
        file = io.BytesIO()
        torch.save(self.make(), file)
        file.seek(0)
        holds(torch.load(file, weights_only=True), self.content())

    def test_it_is_a_pytree(self) -> None:
        td = self.make()
        with unchanged(td):
            doubled = _pytree.tree_map(lambda leaf: leaf * 2, td)
        holds(doubled, mapped(self.content(), lambda leaf: leaf * 2))
        assert len(_pytree.tree_leaves(td)) == 4
        assert _pytree.tree_structure(td) == _pytree.tree_structure(td.clone())

    def test_its_batch_shrinks_inside_vmap(self) -> None:
        seen: list[tuple[int, ...]] = []

        def double(row: TensorDictBase) -> TensorDictBase:
            seen.append(tuple(row.batch_size))
            return row * 2

        holds(torch.vmap(double)(self.make()), mapped(self.content(), lambda leaf: leaf * 2))
        assert seen == [BATCH[1:]]

    def test_it_prints_its_keys_shapes_and_batch_size(self) -> None:
        text = repr(self.make())
        assert text.startswith(f"{type(self.make()).__name__}(batch_size=[3, 4], ")
        for part in ("i32[", "'reach'"):
            assert part in text
