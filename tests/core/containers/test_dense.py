"""A subclass that overrides a primitive is asked by every method."""

import torch

from kd_core import TensorDict
from kd_core._batch.descriptor import Descriptor
from kd_core._nodes.entry import Entry

X = torch.zeros(2)


class Counting(TensorDict):
    """Notes each entry that is stored, and each container that is made of it."""

    seen: list[str] = []  # noqa: RUF012  # of all instances, for they have slots

    def _set_entry(self, key: str, value: Entry) -> None:
        self.seen.append(key)
        super()._set_entry(key, value)

    def _like(self, entries: dict[str, Entry], desc: Descriptor) -> "Counting":
        self.seen.append("like")
        return super()._like(entries, desc)


class More(Counting):
    """Inherits what it does not override."""


def test_each_write_is_seen() -> None:
    for kind in (Counting, More):
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
    td = Counting({"a": X}, [2])
    for do in (
        lambda: td + 1,
        lambda: td + td,
        lambda: td[0],
        lambda: td.split(1),
        lambda: td.copy(),
        lambda: td.exp(),
    ):
        Counting.seen = []
        do()
        assert "like" in Counting.seen
