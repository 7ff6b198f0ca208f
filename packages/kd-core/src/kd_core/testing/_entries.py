"""Contract: reading and writing by key, and changing which keys there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from kd_core._base import TensorDictBase, is_tensor_collection
from kd_core._containers.non_tensor import MetaData
from kd_core._errors import (
    InvalidKey,
    InvalidValue,
    KdError,
    KeyNotFound,
    ShapeMismatch,
)
from kd_core._types import NestedKey
from kd_core.testing._comparison import assert_close
from kd_core.testing._content import BATCH, Contract, holds, inner, refused, unchanged


class _Reading(Contract):
    def test_it_holds_its_content(self) -> None:
        holds(self.make(), self.content())

    def test_it_is_a_container_and_a_mapping(self) -> None:
        td = self.make()
        assert is_tensor_collection(td)
        assert isinstance(td, TensorDictBase)
        as_object: object = td
        assert isinstance(as_object, Mapping)

    def test_a_key_reads_its_entry(self) -> None:
        td = self.make()
        torch.testing.assert_close(td["a"], td.get("a"))
        torch.testing.assert_close(td["n", "c"], inner(td, "n")["c"])
        assert td["word"] == "reach"
        assert td["n"].batch_size == BATCH  # type: ignore[attr-defined]  # a container

    def test_a_missing_key_gives_the_default(self) -> None:
        td = self.make()
        assert td.get("x") is None
        assert td.get(("n", "x"), 3) == 3
        assert td.get(("x", "y"), "none") == "none"

    def test_a_missing_key_is_named_with_the_nearest(self) -> None:
        td = self.make()
        with refused(KeyNotFound, "`wrod`", "Did you mean `word`?"):
            td["wrod"]
        with refused(KeyNotFound, "`('n', 'x')`", "`c`", "`d`"):
            td["n", "x"]
        with refused(KeyNotFound, "`('a', 'x')`", "goes through `a`", "tensor"):
            td["a", "x"]

    def test_keys_are_seen_by_views(self) -> None:
        td = self.make()
        assert sorted(map(str, td.keys())) == ["a", "b", "n", "word"]
        assert set(td.keys(True, True)) == {"a", "b", ("n", "c"), ("n", "d", "e")}
        assert ("n", "d") in td.keys(True)
        assert ("n", "d") not in td.keys(True, True)
        assert [key for key, _ in td.items()] == list(td.keys())
        assert len(list(td.values(True, True))) == 4

    def test_membership_is_by_key(self) -> None:
        td = self.make()
        assert "a" in td
        assert ("n", "d", "e") in td
        assert "x" not in td
        assert ("a", "x") not in td
        with refused(InvalidKey, "`in` asks for keys"):
            assert td["a"] in td

    def test_it_spreads_like_a_mapping(self) -> None:
        td: Mapping[str, object] = cast("Mapping[str, object]", self.make())
        assert {**td}.keys() == dict(td).keys() == {"a", "b", "n", "word"}

    def test_length_and_iteration_walk_the_first_dimension(self) -> None:
        td = self.make()
        assert len(td) == BATCH[0]
        assert [tuple(row.batch_size) for row in td] == [BATCH[1:]] * BATCH[0]

    def test_truth_and_hash_are_refused(self) -> None:
        td = self.make()
        with refused(InvalidValue, "ambiguous"):
            bool(td)
        with refused(TypeError, "unhashable"):
            hash(td)


class _Writing(Contract):
    def test_a_written_key_is_read_back(self) -> None:
        td, content = self.make(), self.content()
        td["a"] = content["a"] = torch.ones(*BATCH, 2)
        td["n", "c"] = torch.zeros(BATCH)
        content["n"]["c"] = torch.zeros(BATCH)  # type: ignore[index]  # nested
        td.set("word", MetaData("grasp"))
        content["word"] = "grasp"
        holds(td, content)

    def test_a_value_that_does_not_fit_is_refused(self) -> None:
        td = self.make()
        with unchanged(td), refused(ShapeMismatch, "`a`", "(3, 4)", "(4, 3)"):
            td["a"] = torch.zeros(4, 3)
        with unchanged(td), refused(ShapeMismatch, "'c'", "must start with"):
            td["n"] = {"c": torch.zeros(2)}

    def test_a_key_that_is_no_key_is_refused(self) -> None:
        td = self.make()
        with unchanged(td), refused(InvalidKey, "string"):
            td.set(3, torch.zeros(BATCH))  # type: ignore[call-overload]  # what is refused

    def test_new_keys_are_added_or_refused(self) -> None:
        td, content = self.make(), self.content()
        if self.fixed_keys:
            with unchanged(td), refused(KdError, "`new`"):
                td["new"] = torch.ones(BATCH)
            return
        td["new"] = content["new"] = torch.ones(BATCH)
        td["m", "deep", "x"] = torch.zeros(BATCH)
        content["m"] = {"deep": {"x": torch.zeros(BATCH)}}
        td.setdefault("late", torch.ones(BATCH))
        content["late"] = torch.ones(BATCH)
        holds(td, content)
        torch.testing.assert_close(td.setdefault("a", 1.0), td["a"])

    def test_a_path_through_a_leaf_is_refused(self) -> None:
        td = self.make()
        with unchanged(td), refused(KeyNotFound, "goes through `a`"):
            td["a", "x"] = torch.zeros(BATCH)

    def test_values_are_written_in_place(self) -> None:
        td, content = self.make(), self.content()
        td.set_("a", 2.0)
        td.set_(("n", "c"), torch.ones(5))
        td.set("b", torch.zeros(*BATCH, 2, dtype=torch.int64), inplace=True)
        content["a"] = torch.full(BATCH, 2.0)
        content["b"] = torch.zeros(*BATCH, 2, dtype=torch.int64)
        content["n"]["c"] = torch.ones(*BATCH, 5)  # type: ignore[index]  # nested
        holds(td, content)
        with unchanged(td), refused(ShapeMismatch, "broadcast"):
            td.set_("a", torch.zeros(5, 5))
        with unchanged(td), refused(KeyNotFound, "`x`"):
            td.set_("x", 1.0)

    def test_entries_are_removed_or_refused(self) -> None:
        td, content = self.make(), self.content()
        popped, expected = td.pop("a"), content.pop("a")
        assert isinstance(expected, Tensor)
        torch.testing.assert_close(popped, expected)
        del td["n", "d"]
        del content["n"]["d"]  # type: ignore[attr-defined]  # nested
        default: object = td.pop("x", "default")
        assert default == "default"
        with refused(KeyNotFound, "`x`"):
            td.pop("x")
        with refused(KeyNotFound, "`x`"):
            td.del_("x")
        holds(td, content)


class _Updating(Contract):
    def test_update_merges(self) -> None:
        td, content = self.make(), self.content()
        td.update({"a": torch.ones(BATCH), "n": {"c": torch.zeros(BATCH)}})
        by_path: dict[NestedKey, object] = {("n", "d", "e"): torch.ones(BATCH)}
        td.update(by_path)
        content["a"] = torch.ones(BATCH)
        content["n"] = {"c": torch.zeros(BATCH), "d": {"e": torch.ones(BATCH)}}
        holds(td, content)

    def test_update_takes_a_container(self) -> None:
        td = self.make()
        td.update(self.make() * 2)
        assert_close(td, self.make() * 2)

    def test_a_failing_update_changes_nothing(self) -> None:
        td = self.make()
        with unchanged(td), refused(ShapeMismatch, "`b`"):
            td.update({"a": torch.ones(BATCH), "n": {"c": torch.ones(BATCH)}, "b": torch.ones(2)})
        with unchanged(td), refused(ShapeMismatch, "'c'"):
            td.update({"a": torch.ones(BATCH), "n": {"c": torch.ones(2)}})
        with unchanged(td), refused(ShapeMismatch, "`b`"):
            td.update_({"a": 1.0, "b": torch.ones(7, 7)})
        with unchanged(td), refused(KeyNotFound, "`x`"):
            td.update_({"a": 1.0, "x": 1.0})

    def test_update_in_place_writes_values(self) -> None:
        td, content = self.make(), self.content()
        td.update_({"a": torch.ones(BATCH), "n": {"d": {"e": 3}}})
        content["a"] = torch.ones(BATCH)
        content["n"]["d"]["e"] = torch.full(BATCH, 3, dtype=torch.int32)  # type: ignore[index]  # nested content
        holds(td, content)
        td.update_(self.make())
        holds(td, self.content())

    def test_replace_leaves_the_original(self) -> None:
        td = self.make()
        with unchanged(td):
            other = td.replace({"a": torch.ones(BATCH), "n": {"c": torch.ones(BATCH)}})
        torch.testing.assert_close(other["a"], torch.ones(BATCH))
        torch.testing.assert_close(other["n", "c"], torch.ones(BATCH))
        torch.testing.assert_close(other["b"], td["b"])


class _Choosing(Contract):
    def test_select_keeps_and_exclude_drops(self) -> None:
        td, content = self.make(), self.content()
        nested: object = content["n"]
        assert isinstance(nested, dict)
        with unchanged(td):
            holds(td.select("a", ("n", "d")), {"a": content["a"], "n": {"d": nested["d"]}})
            holds(td.exclude("a", "word", ("n", "c")), {"b": content["b"], "n": {"d": nested["d"]}})
        with refused(KeyNotFound, "`x`"):
            td.select("a", "x")
        assert set(td.select("a", "x", strict=False).keys()) == {"a"}

    def test_keys_are_flattened_and_unflattened(self) -> None:
        td = self.make()
        with unchanged(td):
            flat = td.flatten_keys(".")
        assert set(flat.keys()) == {"a", "b", "word", "n.c", "n.d.e"}
        holds(flat.unflatten_keys("."), self.content())

    def test_a_key_is_renamed_or_refused(self) -> None:
        td, content = self.make(), self.content()
        if self.fixed_keys:
            with unchanged(td), refused(KdError, "`z`"):
                td.rename_key_("a", "z")
            return
        td.rename_key_("a", "z")
        content["z"] = content.pop("a")
        holds(td, content)
        with unchanged(td), refused(KdError, "`b`"):
            td.rename_key_("z", "b", safe=True)

    def test_keys_are_renamed_and_split_in_new_containers(self) -> None:
        td, content = self.make(), self.content()
        with unchanged(td):
            renamed = td.rename_keys({"a": "b", "b": "a"})
            part, rest = td.split_keys(["a", ("n", "c")])
            tensors = td.filter_non_tensor_data()
        assert_close(renamed, {**content, "a": content["b"], "b": content["a"]})
        assert set(part.keys(True, True)) == {"a", ("n", "c")}
        assert set(rest.keys(True, True)) == {"b", ("n", "d", "e")}
        assert set(tensors.keys()) == {"a", "b", "n"}

    def test_keys_are_taken_out_or_refused(self) -> None:
        td = self.make()
        with unchanged(td), refused(KdError):
            td.separates("a", "z")
        assert_close(td.separates("a"), {"a": self.content()["a"]})
        assert "a" not in td

    def test_empty_keeps_batch_size_and_no_entry(self) -> None:
        td = self.make().empty()
        assert tuple(td.batch_size) == BATCH
        assert td.is_empty()
        assert list(td.keys()) == []

    def test_the_batch_size_is_set_where_entries_fit(self) -> None:
        td = self.make()
        with unchanged(td), refused(KdError, "9)"):
            td.batch_size = [3, 4, 9]
        try:
            td.batch_size = [3]
        except ShapeMismatch:  # a kind may need its dimensions
            holds(td, self.content())
        else:
            assert tuple(td.batch_size) == (3,)
            assert_close(td, self.content())


class EntryContract(_Reading, _Writing, _Updating, _Choosing):
    """The tests of reading and writing by key."""
