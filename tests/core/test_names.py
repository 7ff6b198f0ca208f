"""Sizes with names: they rearrange as sizes do, and are kept apart from plain ones."""

import copy
import pickle

from kd_core._descriptor import describe
from kd_core._shapes import NamedSize, names_of, resized, with_names, without_names


def test_a_named_size_is_an_integer() -> None:
    size = NamedSize(3, "time")
    assert size == 3
    assert f"{size}" == repr(size) == "3"
    assert hash(size) != hash(3)
    assert names_of((pickle.loads(pickle.dumps(size)), copy.deepcopy(size))) == ("time", "time")
    assert type(size * 2) is int


def test_a_batch_is_named_and_unnamed() -> None:
    batch = with_names((2, 3, 4), ("a", None))
    assert batch == (2, 3, 4)
    assert names_of(batch) == ("a", None, None)
    assert {type(size) for size in without_names(batch)} == {int}
    assert names_of((resized(batch[0], 7), resized(batch[1], 7))) == ("a", None)


def test_descriptors_with_names_are_others() -> None:
    plain, named = describe((2,)), describe(with_names((2,), ("a",)))
    assert plain is describe((2,))
    assert named is not plain
    assert named is describe(with_names((2,), ("a",)))
    assert named is not describe(with_names((2,), ("b",)))
    assert names_of(named.with_lock("x", 0).unlocked().batch) == ("a",)
    assert type(named.size[0]) is int
