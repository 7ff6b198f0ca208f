"""Values of rows in compiled code: written by their positions, never read."""

import pytest
import torch

from kd_core import LazyStackedTensorDict, TensorDict, lazy_stack


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
