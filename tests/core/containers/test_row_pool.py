"""Values of rows in compiled code: written by their positions, never read."""

import gc

import pytest
import torch

from kd_core import LazyStackedTensorDict, NonTensorStack, TensorDict, lazy_stack


def test_compiled_writes_to_members_read_no_value_of_a_row() -> None:
    stack = lazy_stack([TensorDict({"x": torch.zeros(3), "word": word}) for word in ("to", "be")])
    source = TensorDict({"x": torch.ones(2, 3), "word": ["or", "not"]}, [2])

    def write(stack: LazyStackedTensorDict) -> None:
        stack.set_at_("x", torch.ones(3), 0).set_at_("word", "or", 1)

    def copy(stack: LazyStackedTensorDict) -> None:
        stack.update_(source)

    torch.compile(write, fullgraph=True, backend="eager")(stack)
    assert stack["word"] == ["to", "or"]
    assert stack["x"].sum(1).tolist() == [3, 0]
    with pytest.raises(RuntimeError, match="cannot be read in compiled code"):
        torch.compile(copy, fullgraph=True, backend="eager")(stack)
    assert stack["word"] == ["to", "or"]
    torch.compile(copy, backend="eager")(stack)  # a graph break: torch runs it without a graph
    assert stack["word"] == ["or", "not"]
    assert stack["x"].sum() == 6


def test_compiled_writes_at_an_index_add_values() -> None:
    td = TensorDict({"word": ["to", "be"]}, [2])
    torch.compile(lambda td: td.set_at_("word", "or", 1), fullgraph=True, backend="eager")(td)
    assert td["word"] == ["to", "or"]


def test_a_pool_that_compiled_copies_share_is_searched_for_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    td = TensorDict({"word": ["to", "be"]}, [2])
    copied = torch.compile(lambda td: td.clone(), fullgraph=True, backend="eager")(td)
    searches = []
    referrers = gc.get_referrers

    def counted(*of: object) -> list[object]:
        searches.append(of)
        return referrers(*of)

    monkeypatch.setattr(gc, "get_referrers", counted)
    for number in range(1000):
        td[0] = TensorDict({"word": str(number)})
    assert 1 <= len(searches) <= 4  # once each time that the pool has doubled
    assert (td.get_non_tensor("word"), copied.get_non_tensor("word")) == (
        ["999", "be"],
        ["to", "be"],
    )


def test_a_pool_that_views_share_stays_small() -> None:
    td = TensorDict({"word": ["to", "be"]}, [2])
    view = td[1:]
    for number in range(1000):
        td[0] = TensorDict({"word": str(number)})
    node: object = td.get("word")
    assert isinstance(node, NonTensorStack)
    assert len(node._pool) < 200
    assert (td.get_non_tensor("word"), view.get_non_tensor("word")) == (["999", "be"], ["be"])
