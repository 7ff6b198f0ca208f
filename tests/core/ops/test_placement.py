"""Device, dtype and layout of leaves."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kd_core import InvalidArgument, InvalidValue, Locked, ShapeMismatch, TensorDict, lazy_stack

META = torch.device("meta")


@pytest.fixture
def td() -> TensorDict:
    return TensorDict({"a": torch.ones(3), "n": {"b": torch.ones(3, 2).int()}, "s": "text"}, [3])


@pytest.mark.parametrize(
    ("where", "named"),
    [
        (("meta",), {}),
        ((META,), {}),
        ((), {"device": "meta"}),
        (("meta", torch.float64), {}),
        ((torch.ones((), device="meta", dtype=torch.float64),), {}),
        ((TensorDict(device="meta"),), {}),
    ],
)
def test_to_a_device(where: tuple[Any, ...], named: dict[str, Any], td: TensorDict) -> None:
    moved = td.to(*where, **named)
    assert moved.device == moved["a"].device == moved["n", "b"].device == META
    assert moved["s"] == "text"
    assert td.device is None
    again = moved.to(*where, **named)
    assert all(again[key] is moved[key] for key in ("a", ("n", "b")))


@pytest.mark.parametrize("where", [(torch.float64,), (torch.ones((), dtype=torch.float64),)])
def test_to_a_dtype(where: tuple[Any, ...], td: TensorDict) -> None:
    cast = td.to(*where)
    assert cast.dtype is cast["n", "b"].dtype is torch.float64
    assert cast.to(torch.float64) is not cast
    assert cast.to(torch.float64)["a"] is cast["a"]
    assert td.type(torch.float64)["a"].dtype is torch.float64
    assert td.to(dtype=torch.float64).dtype is torch.float64


@pytest.mark.parametrize("kind", [int, float, bool, complex])
def test_a_class_of_python_is_a_dtype_as_in_torch(kind: Any, td: TensorDict) -> None:
    expected = td["a"].to(kind)
    for made in (td.to(kind), td.to(dtype=kind), td.to("cpu", kind)):
        assert made["a"].dtype is made["n", "b"].dtype is expected.dtype
        assert torch.equal(made["a"], expected)
    with pytest.raises(InvalidArgument, match="a dtype"):
        td.to(str)  # type: ignore[arg-type]  # no dtype of torch


def test_what_is_in_place_is_shared(td: TensorDict) -> None:
    assert td.to(torch.float32)["a"] is td["a"]
    assert td.cpu()["a"] is td["a"]
    assert td.cpu().device == torch.device("cpu")
    assert td.to() is td


def test_state_of_placement(td: TensorDict) -> None:
    assert td.dtype is None
    assert not td.is_cpu
    assert td.cpu().is_cpu
    assert not td.cpu().is_cuda
    assert not td.is_pinned()


def test_layout() -> None:
    td = TensorDict({"a": torch.ones(2, 3).T, "b": torch.ones(3)}, [3])
    assert not td.is_contiguous()
    assert td.contiguous().is_contiguous()
    assert td.contiguous()["b"] is td["b"]


def test_shared_memory(td: TensorDict) -> None:
    assert not td.is_shared()
    assert td.share_memory_() is td
    assert td.is_shared()


@pytest.mark.parametrize("kind", [TensorDict, lazy_stack])
def test_unlocking_ends_that_memory_is_shared_or_mapped(kind: Any) -> None:
    leaf = torch.zeros(2)
    made = {"a": leaf, "n": {"b": leaf.clone()}}
    td = kind(made, [2]) if kind is TensorDict else kind([TensorDict(made), TensorDict(made)])
    td.share_memory_()
    assert td.is_shared()
    assert not td.copy().is_shared()  # an entry of the copy may be replaced
    td.unlock_()
    assert not td.is_shared()
    assert td["a"].is_shared() is (kind is TensorDict)  # a stacked entry is new
    td.memmap_()
    assert td.is_memmap()
    assert not td.unlock_().is_memmap()


def test_locks_travel(td: TensorDict) -> None:
    for where in (("meta",), (torch.float64,), ("meta", torch.float64)):
        assert td.lock_().to(*where).is_locked
    inner = td.nested("n", TensorDict)
    assert inner.to() is inner
    assert not td.unlock_().nested("n", TensorDict).is_locked


def test_wrong_places_are_explained(td: TensorDict) -> None:
    with pytest.raises(InvalidArgument, match=r"a dtype, a tensor or a container, got a `list`"):
        td.to([])  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidArgument, match="at most one device and one dtype"):
        td.to("cpu", device="meta")


def test_a_container_without_a_device_names_no_place(td: TensorDict) -> None:
    assert td.to(TensorDict()).device == td.device
    assert td.to(other=TensorDict()).device == td.device


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidValue, match="'nowhere' is not a valid device"):
        TensorDict().to("nowhere")


def test_a_sparse_leaf_keeps_all_leaves_out_of_shared_memory() -> None:
    td = TensorDict({"a": torch.ones(2), "b": torch.ones(2).to_sparse()}, [2])
    with pytest.raises(InvalidValue, match=r"`b` of layout torch\.sparse_coo cannot be in shared"):
        td.share_memory_()
    assert not td["a"].is_shared()


def test_canonical_leaves_have_the_strides_of_new_ones() -> None:
    odd = torch.empty_strided((2, 1), (1, 7))
    td = TensorDict({"a": odd, "b": torch.ones(2)}, [2])
    assert td.contiguous()["a"].stride() == (1, 7)
    got = td.contiguous(canonical=True)
    assert got["a"].stride() == (1, 1)
    assert got["b"] is td["b"]


def test_a_filter_chooses_what_is_cast() -> None:
    td = TensorDict({"a": torch.ones(2), "n": {"a": torch.ones(2), "i": torch.arange(2)}}, [2])
    seen = []

    def nested(path: tuple[str, ...], leaf: Tensor) -> bool:
        seen.append(path)
        return len(path) == 2 and leaf.is_floating_point()

    got = td.half(cast_filter=nested)
    assert seen == [("a",), ("n", "a"), ("n", "i")]
    assert got["a"] is td["a"]
    assert got["n", "a"].dtype is torch.float16
    assert got["n", "i"].dtype is torch.int64
    assert td.type(torch.int8, cast_filter=nested)["n", "a"].dtype is torch.int8
    stack = lazy_stack([td, td]).bfloat16(cast_filter=nested)
    assert stack["n", "a"].dtype is torch.bfloat16


def test_streams_take_leaves_on_a_gpu_only() -> None:
    stream = cast("torch.cuda.Stream", object())
    with pytest.raises(InvalidValue, match="entry `a` must be on a GPU"):
        TensorDict({"a": 1.0}).record_stream(stream)


def test_to_takes_a_batch_size(td: TensorDict) -> None:
    wide = td.exclude("s").to(torch.float64, batch_size=[])
    assert wide.batch_size == ()
    assert wide["a"].dtype is torch.float64
    matrix = TensorDict({"a": torch.ones(3, 2), "n": {"b": torch.ones(3, 2)}}, [3])
    assert matrix.to(batch_size=[3, 2]).batch_size == (3, 2)
    assert matrix.batch_size == (3,)
    with pytest.raises(ShapeMismatch, match="batch_size"):
        matrix.to(torch.float64, batch_size=[3, 4], inplace=True)
    assert matrix["a"].dtype is torch.float32


def test_to_changes_a_container_in_place(td: TensorDict) -> None:
    assert td.to("meta", torch.float64, inplace=True) is td
    assert td.device == td["a"].device == td["n", "b"].device == META
    assert td["a"].dtype is td["n", "b"].dtype is torch.float64
    assert td["s"] == "text"
    same = TensorDict({"a": torch.ones(3)}, [3])
    assert same.to(torch.float32, inplace=True) is same
    with pytest.raises(Locked, match="move in place"):
        td.lock_().to("meta", inplace=True)
    stack = lazy_stack([same, same.clone()])
    assert stack.to(torch.float64, inplace=True) is stack
    assert stack["a"].dtype is torch.float64


@pytest.mark.parametrize("name", ["other", "tensor"])
def test_to_takes_a_tensor_by_keyword(name: str, td: TensorDict) -> None:
    like = torch.ones((), device="meta", dtype=torch.float64)
    moved = cast(Any, td).to(**{name: like})
    assert moved.device == META
    assert moved["a"].dtype == torch.float64


def test_to_takes_a_container_by_keyword(td: TensorDict) -> None:
    assert td.to(other=TensorDict(device="meta")).device == META


def test_to_takes_non_blocking_last_and_none(td: TensorDict) -> None:
    assert td.to("cpu", torch.float64, True)["a"].dtype == torch.float64
    assert td.to("cpu", False).device == torch.device("cpu")
    assert td.to(None) is td
    with pytest.raises(InvalidArgument, match="True is not a valid device"):
        td.to(True)


def test_cast_filter_chooses_what_to_casts(td: TensorDict) -> None:
    made = td.to(torch.float64, cast_filter=lambda path, leaf: path == ("a",))
    assert (made["a"].dtype, made["n", "b"].dtype) == (torch.float64, torch.int32)
    with pytest.raises(InvalidArgument, match="Pass `dtype`, too"):
        td.to("cpu", cast_filter=lambda path, leaf: True)


def test_a_memory_format_is_that_of_leaves_with_its_dimensions() -> None:
    leaf = torch.arange(120.0).view(2, 3, 4, 5)
    td = TensorDict({"image": leaf, "flat": leaf[0]})
    made = td.to(memory_format=torch.channels_last)
    assert made["image"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(made["image"], leaf)
    assert made["flat"] is td["flat"]
    assert made.to(memory_format=torch.contiguous_format)["image"].is_contiguous()
    kept = made.to(memory_format=torch.preserve_format)["image"]
    assert kept.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(InvalidArgument, match="`memory_format` must be"):
        td.to(memory_format=cast(Any, "channels_last"))


def test_cpu_and_cuda_take_the_options_of_to(td: TensorDict) -> None:
    made = td.cpu(dtype=torch.float64, non_blocking=True, batch_size=[], non_blocking_pin=True)
    assert made.device == torch.device("cpu")
    assert made.batch_size == ()
    assert made["a"].dtype == torch.float64
    assert td.cpu(inplace=True) is td
    assert td.device == torch.device("cpu")


def test_unknown_options_of_to_are_named(td: TensorDict) -> None:
    with pytest.raises(InvalidArgument, match=r"`devise`; it takes .*`device`"):
        td.to(devise="cpu")  # type: ignore[call-arg]  # the error is the promise
    assert td.device is None


def test_numbers_of_threads_change_nothing(td: TensorDict) -> None:
    made = td.cpu(num_threads=2)
    assert made.device == torch.device("cpu")
    assert made["a"].tolist() == td["a"].tolist()
