"""A subclass that overrides a primitive is asked by every method."""

import pytest
import torch

from kd_core import InvalidArgument, Locked, TensorDict, TensorDictBase
from kd_core._descriptor import Descriptor
from kd_core._nodes import Entry
from kd_core.extending import GeneralMethods

X = torch.zeros(2)


class Counting(GeneralMethods, TensorDict):
    """Notes each entry that is stored, and each container that is made of it."""

    seen: list[str] = []  # noqa: RUF012  # of all instances, for they have slots

    def _kd_set_entry(self, key: str, value: Entry) -> None:
        self.seen.append(key)
        super()._kd_set_entry(key, value)

    def _kd_like(self, entries: dict[str, Entry], desc: Descriptor) -> "Counting":
        self.seen.append("like")
        return super()._kd_like(entries, desc)

    def _kd_describe(self, desc: Descriptor) -> None:
        self.seen.append("describe")
        super()._kd_describe(desc)


class Removing(GeneralMethods, TensorDict):
    """Notes each entry that is removed."""

    seen: list[str] = []  # noqa: RUF012  # as above

    def _kd_del_entry(self, key: str) -> None:
        self.seen.append(key)
        super()._kd_del_entry(key)


class More(Counting):
    """Inherits what it does not override."""


class Noting:
    """Does the same as a mixin."""

    def _kd_set_entry(self, key: str, value: Entry) -> None:
        Counting.seen.append(key)
        super()._kd_set_entry(key, value)  # type: ignore[misc]  # of the container

    def _kd_like(self, entries: dict[str, Entry], desc: Descriptor) -> TensorDict:
        Counting.seen.append("like")
        return super()._kd_like(entries, desc)  # type: ignore[misc, no-any-return]  # as above

    def _kd_describe(self, desc: Descriptor) -> None:
        Counting.seen.append("describe")
        super()._kd_describe(desc)  # type: ignore[misc]  # as above


class Mixed(Noting, GeneralMethods, TensorDict):  # type: ignore[misc]  # the mixin takes the place of primitives
    """A container with the mixin in front."""


class MoreMixed(Mixed):
    """Inherits from one with the mixin."""


class Passing:
    """Has general methods in place of those that bypass primitives, as its own would call them."""

    update = TensorDictBase.update
    rename_key_ = TensorDictBase.rename_key_
    empty = TensorDictBase.empty
    lock_ = TensorDictBase.lock_
    unlock_ = TensorDictBase.unlock_


class BothMixed(Passing, Noting, GeneralMethods, TensorDict):  # type: ignore[misc]  # as above
    """Primitives and the methods that bypass them are overridden by mixins."""


class PassedLater(Passing, Mixed):  # type: ignore[misc]  # as above
    """The methods are overridden in front of a class that overrides the primitives."""


KINDS = (Counting, More, Mixed, MoreMixed, BothMixed, PassedLater)


def test_each_write_is_seen() -> None:
    for kind in KINDS:
        td = kind({}, [2])
        Counting.seen = []
        td["a"] = X
        td.set("b", X)
        td.update({"c": X})
        td.update(TensorDict({"d": X}, [2]))
        td.assign({"e": X})
        td.setdefault("f", X)
        td.rename_key_("f", "g")
        assert Counting.seen == ["a", "b", "c", "d", "e", "f", "g"]


def test_each_result_is_seen() -> None:
    for kind in KINDS:
        td = kind({"a": X}, [2])
        for do in (
            lambda td: td + 1,
            lambda td: td + td,
            lambda td: td[0],
            lambda td: td.split(1),
            lambda td: td.copy(),
            lambda td: td.exp(),
            lambda td: td.empty(),
        ):
            Counting.seen = []
            do(td)  # type: ignore[no-untyped-call]  # by torch
            assert "like" in Counting.seen


def test_each_lock_is_seen() -> None:
    for kind in KINDS:
        td = kind({"a": X}, [2]).lock_().unlock_()
        Counting.seen = []
        td.lock_().unlock_()
        assert Counting.seen == ["describe", "describe"]


def test_a_class_with_methods_that_would_not_ask_it_is_refused() -> None:
    message = "`Silent` overrides `_kd_del_entry`, which `rename_key_` of `TensorDict` does not ask"
    with pytest.raises(InvalidArgument, match=message):

        class Silent(TensorDict):
            _kd_del_entry = Removing._kd_del_entry


def test_a_mixin_with_methods_that_would_not_ask_it_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="`SilentlyMixed` overrides `_kd_"):

        class SilentlyMixed(Noting, TensorDict):  # type: ignore[misc]  # as above
            pass


def test_a_removal_by_renaming_is_seen() -> None:
    Removing({"a": X}, [2]).rename_key_("a", "b")
    assert Removing.seen == ["a"]


def test_locks_of_nested_containers_are_counted_as_by_the_general_methods() -> None:
    fast: list[list[tuple[str | None, int]]] = []
    for general in (False, True):
        lock = TensorDictBase.lock_ if general else TensorDict.lock_
        unlock = TensorDictBase.unlock_ if general else TensorDict.unlock_
        inner = TensorDict({"x": X, "n": {"y": X}}, [2])
        one, other = TensorDict({"i": inner}, [2]), TensorDict({"i": inner, "w": "word"}, [2])
        levels = one, other, inner, inner.nested("n", TensorDict)
        seen: list[list[tuple[str | None, int]]] = []
        for _ in range(2):  # the second time descriptors are cached
            for td in (one, other, inner):
                lock(td)
                seen.append([(each._kd_desc.lock, each._kd_desc.held) for each in levels])
            with pytest.raises(Locked):
                unlock(one)  # the other one holds it, too
            unlock(TensorDict({"one": one, "other": other}))
            seen.append([(each._kd_desc.lock, each._kd_desc.held) for each in levels])
        if general:
            assert seen == fast
        fast = seen
    assert fast[-1] == [(None, 0)] * 4


def test_renaming_after_a_write_in_compiled_code() -> None:
    td = TensorDict({"a": X}, [2])
    torch.compile(lambda td: td.set("z", X + 1), backend="eager", fullgraph=True)(td)
    td.rename_key_("z", "q").rename_key_("a", "b")
    assert list(td.keys()) == ["q", "b"]
    assert td["q"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("size", [[], [3], [3, 1]])
def test_compiled_code_holds_words_beside_tensors(size: list[int]) -> None:
    def program(x: torch.Tensor) -> TensorDict:
        return TensorDict({"x": x, "word": "w", "part": {"x": x, "word": "w"}}, size)

    made = torch.compile(program, backend="eager", fullgraph=True)(torch.ones(size))
    assert made["word"] == made["part", "word"] == "w"
    assert made["x"].shape == made["part", "x"].shape == tuple(size)
