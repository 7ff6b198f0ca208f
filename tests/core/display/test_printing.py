"""The printed form of containers."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch.utils import _pytree as pytree

from kd_core import (
    InvalidArgument,
    TensorDict,
    UnbatchedTensor,
    get_printoptions,
    lazy_stack,
    set_printoptions,
)


def test_a_container_prints_a_short_line_for_each_leaf() -> None:
    td = TensorDict({"b": torch.zeros(3, 4), "a": {"c": torch.ones(3).bool()}}, [3], device="cpu")
    assert repr(td) == "TensorDict(batch_size=[3], device=cpu, fields={a: {c: bool[]}, b: f32[4]})"
    td = TensorDict({f"a_longer_key_{n}": torch.zeros(3, n) for n in range(4)}, [3], names=["t"])
    td["n"] = TensorDict({"x": torch.zeros(3, 2, 5, dtype=torch.complex64)}, [3, 2])
    assert repr(td) == (
        "TensorDict(batch_size=[3], names=['t'], fields={\n"
        "    a_longer_key_0: f32[0],\n"
        "    a_longer_key_1: f32[1],\n"
        "    a_longer_key_2: f32[2],\n"
        "    a_longer_key_3: f32[3],\n"
        "    n: batch_size=[3, 2] {x: c64[5]}})"
    )
    assert repr(TensorDict()) == "TensorDict(batch_size=[], fields={})"


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "f32"),
        (torch.bfloat16, "bf16"),
        (torch.uint8, "u8"),
        (torch.int64, "i64"),
        (torch.bool, "bool"),
        (torch.complex128, "c128"),
        (torch.float8_e4m3fn, "f8_e4m3fn"),
    ],
)
def test_dtypes_have_short_names(dtype: torch.dtype, name: str) -> None:
    td = TensorDict({"x": torch.zeros(2, dtype=dtype)})
    assert repr(td) == f"TensorDict(batch_size=[], fields={{x: {name}[2]}})"


def test_data_and_what_is_not_like_the_others_is_told() -> None:
    td = TensorDict({"s": "text", "m": None, "long": "x" * 99}, [2])
    assert "long: 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...,\n    m: None,\n    s: 'text'" in repr(
        td
    )
    td = TensorDict({"u": UnbatchedTensor(torch.ones(4)), "on": torch.ones(2, device="meta")}, [2])
    assert repr(td) == "TensorDict(batch_size=[2], fields={on: f32[] meta, u: unbatched f32[4]})"
    stack = lazy_stack([TensorDict({"a": torch.zeros(n), "n": {"k": 1}}) for n in (1, 2)])
    assert repr(stack) == (
        "LazyStackedTensorDict(batch_size=[2], stack_dim=0, fields={\n"
        "    a: ragged, of shapes (1,), (2,),\n"
        "    n: {k: i64[]}})"
    )


@pytest.fixture
def all_attributes() -> Iterator[None]:
    with set_printoptions(compact=False):
        yield


def test_all_attributes_are_shown_if_asked_for(all_attributes: None) -> None:
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


def test_an_empty_container_prints(all_attributes: None) -> None:
    assert repr(TensorDict()) == (
        "TensorDict(\n    fields={\n    },\n    batch_size=torch.Size([]),\n    device=None,\n"
        "    is_shared=False)"
    )


def test_parameters_and_data_print_their_kind(all_attributes: None) -> None:
    text = repr(TensorDict({"w": torch.nn.Parameter(torch.zeros(2)), "s": "text", "m": None}))
    assert "w: Parameter(shape=torch.Size([2])" in text
    assert "s: NonTensorData(data='text', batch_size=torch.Size([]))" in text
    assert "m: NonTensorData(data=None" in text


def test_shared_memory_is_told(all_attributes: None) -> None:
    shared = torch.zeros(2).share_memory_()
    assert repr(TensorDict({"a": shared})).endswith("is_shared=True)")
    assert repr(TensorDict({"a": shared, "b": torch.zeros(2)})).endswith("is_shared=False)")


def test_many_keys_are_cut() -> None:
    text = repr(TensorDict({f"k{i:04}": 0.0 for i in range(1000)}))
    assert "k0199" in text
    assert "k0200" not in text
    assert "... (800 more)" in text


def test_tensors_without_storage_print(all_attributes: None) -> None:
    text = repr(TensorDict({"a": torch.zeros(2, device="meta")}))
    assert "device=meta" in text
    torch.vmap(lambda td: [repr(td), td][1])(TensorDict({"a": torch.zeros(2)}, [2]))


def test_what_tree_map_puts_in_place_of_tensors_is_printed() -> None:
    """As torch does, which prints the structure where cotangents do not fit."""
    td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}}, [2])
    found = pytree.tree_map(lambda _: "*", td)
    assert repr(found) == "TensorDict(batch_size=[], fields={a: '*', n: {b: '*'}})"
    assert "<div>a: <code>&#x27;*&#x27;</code></div>" in found._repr_html_()
    rows = lazy_stack(list(td.unbind(0)))
    _, cotangents = torch.func.vjp(lambda each: each.sin(), td)[:2]
    with pytest.raises(
        RuntimeError, match=r"structure of cotangents .* fields={a: \*, n: {b: \*}}"
    ):
        cotangents(rows)


def test_dimensions_in_place_of_an_unbatched_tensor_are_printed() -> None:
    td = TensorDict({"u": UnbatchedTensor(torch.zeros(3)), "a": torch.zeros(2)}, [2])
    for dim in (0, None):
        dims = pytree.tree_map(lambda _, dim=dim: dim, td)
        assert repr(dims) == f"TensorDict(batch_size=[], fields={{a: {dim}, u: unbatched {dim}}})"
        assert repr(dims.get("u")) == f"UnbatchedTensor({dim})"
        assert dims["u"] == dim
        assert f"<div>u: <code>{dim}</code></div>" in dims._repr_html_()


def test_options_choose_what_is_shown() -> None:
    td = TensorDict({"b": torch.zeros(2), "a": {"c": torch.zeros(2)}}, [2])
    usual = repr(td)
    options = get_printoptions()
    with set_printoptions(
        compact=False,
        show_shape=False,
        show_dtype=False,
        show_field_is_shared=False,
        show_grad=True,
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
    short = set_printoptions(max_keys=1)
    set_printoptions()
    for _ in range(2):
        with short, short:
            assert get_printoptions()["max_keys"] == 1
        assert get_printoptions()["max_keys"] == 200
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
