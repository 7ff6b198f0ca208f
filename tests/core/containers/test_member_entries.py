"""The entries of members, seen as those of one container."""

import torch

from kd_core import TensorDict, lazy_stack


def test_the_printed_form_shows_shapes_and_keys_of_all_members() -> None:
    first = TensorDict({"r": torch.zeros(2), "x": 1.0, "own": torch.zeros(5), "n": {"r": 1.0}})
    second = TensorDict({"r": torch.zeros(3), "x": 2.0, "n": {"r": torch.zeros(1)}, "s": "text"})
    text = repr(TensorDict({"members": lazy_stack([first, second])}, [2]))
    assert "own: Tensor in 1 of 2 members, of shape (5,)" in text
    assert "s: NonTensorData in 1 of 2 members, of shape ()" in text
    assert "r: ragged, of shapes (2,), (3,)" in text
    assert "r: ragged, of shapes (), (1,)" in text
    assert "x: f32[]" in text
    assert text.count("LazyStackedTensorDict") == 1


def test_a_stack_of_ragged_stacks_is_used_as_one() -> None:
    rows = [TensorDict({"r": torch.zeros(n), "n": {"x": 1.0}}) for n in (1, 2)]
    stack = lazy_stack([lazy_stack(rows), lazy_stack(rows)])
    assert "r: ragged, of shapes (1,), (2,)" in repr(stack)
    assert list(stack.keys(True, True)) == ["r", ("n", "x")]
    added = stack.clone().update(stack) + 1
    assert [row.tolist() for row in added.get("r", as_list=True)[1]] == [[1.0], [1.0, 1.0]]
    assert stack.auto_batch_size_().batch_size == (2, 2)


def test_a_ragged_entry_that_one_member_alone_has_is_shown() -> None:
    rows = lazy_stack([TensorDict({"r": torch.zeros(n)}) for n in (1, 2, 3)])
    stack = lazy_stack([rows, TensorDict({"q": torch.zeros(3)}, [3])])
    for td in (stack, TensorDict({"n": stack}, [2, 3])):
        assert "r: Tensor in 1 of 2 members, of shape that differs" in repr(td)
