"""The printed form of containers."""

import gc
import weakref

import pytest
import torch

from kd_core import (
    InvalidArgument,
    TensorDict,
    get_printoptions,
    lazy_stack,
    set_printoptions,
)


def test_a_container_prints_nested_and_sorted() -> None:
    td = TensorDict({"b": torch.zeros(3, 4), "a": {"c": torch.ones(3).bool()}}, [3], device="cpu")
    assert repr(td) == (
        "TensorDict(\n"
        "    fields={\n"
        "        a: TensorDict(\n"
        "            fields={\n"
        "                c: Tensor(shape=torch.Size([3]), device=cpu, dtype=torch.bool, "
        "is_shared=False)},\n"
        "            batch_size=torch.Size([3]),\n"
        "            device=cpu,\n"
        "            is_shared=False),\n"
        "        b: Tensor(shape=torch.Size([3, 4]), device=cpu, dtype=torch.float32, "
        "is_shared=False)},\n"
        "    batch_size=torch.Size([3]),\n"
        "    device=cpu,\n"
        "    is_shared=False)"
    )


def test_an_empty_container_prints() -> None:
    assert repr(TensorDict()) == (
        "TensorDict(\n    fields={\n    },\n    batch_size=torch.Size([]),\n    device=None,\n"
        "    is_shared=False)"
    )


def test_parameters_and_data_print_their_kind() -> None:
    text = repr(TensorDict({"w": torch.nn.Parameter(torch.zeros(2)), "s": "text", "m": None}))
    assert "w: Parameter(shape=torch.Size([2])" in text
    assert "s: NonTensorData(data='text', batch_size=torch.Size([]))" in text
    assert "m: NonTensorData(data=None" in text


def test_shared_memory_is_told() -> None:
    shared = torch.zeros(2).share_memory_()  # type: ignore[no-untyped-call]  # torch has no types here
    assert repr(TensorDict({"a": shared})).endswith("is_shared=True)")
    assert repr(TensorDict({"a": shared, "b": torch.zeros(2)})).endswith("is_shared=False)")


def test_many_keys_are_cut() -> None:
    text = repr(TensorDict({f"k{i:04}": 0.0 for i in range(1000)}))
    assert "k0199" in text
    assert "k0200" not in text
    assert "... (800 more)" in text


def test_tensors_without_storage_print() -> None:
    text = repr(TensorDict({"a": torch.zeros(2, device="meta")}))
    assert "device=meta" in text
    torch.vmap(lambda td: [repr(td), td][1])(TensorDict({"a": torch.zeros(2)}, [2]))


def test_options_choose_what_is_shown() -> None:
    td = TensorDict({"b": torch.zeros(2), "a": {"c": torch.zeros(2)}}, [2])
    usual = repr(td)
    options = get_printoptions()
    with set_printoptions(
        show_shape=False, show_dtype=False, show_field_is_shared=False, show_grad=True
    ):
        assert "b: Tensor(device=cpu, requires_grad=False)" in repr(td)
        with set_printoptions(show_device=False, show_is_shared=False, show_batch_size=False):
            assert "device=None" not in repr(td)
            assert "batch_size" not in repr(td)
        assert "device=None" in repr(td)
    assert repr(td) == usual
    with set_printoptions(sort_keys=False):
        assert repr(td).index("b: ") < repr(td).index("a: ")
    with set_printoptions(max_keys=1):
        assert "... (1 more)" in repr(td)
    set_printoptions(max_keys=1)
    set_printoptions()
    assert get_printoptions() == options
    assert repr(td) == usual


def test_options_are_checked_before_any_is_set() -> None:
    before = get_printoptions()
    with pytest.raises(InvalidArgument, match="`show_all` is not a valid option; available"):
        set_printoptions(show_dtype=False, show_all=True)  # type: ignore[call-arg]  # the error is the promise
    with pytest.raises(InvalidArgument, match="`max_keys` must be an `int`"):
        set_printoptions(show_dtype=False, max_keys=True)
    assert get_printoptions() == before


def test_printing_a_stack_of_ragged_members_keeps_nothing() -> None:
    stack = lazy_stack([TensorDict({"a": torch.zeros(n)}) for n in (1, 2)])
    found = weakref.ref(stack)
    gc.disable()
    try:
        assert "ragged" in repr(stack)
        del stack
        assert found() is None
    finally:
        gc.enable()
