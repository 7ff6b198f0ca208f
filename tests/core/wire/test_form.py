"""A container comes back from its header and buffers as it was, bit by bit."""

import json
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from tests.core.content import assert_same
from tests.core.store.trees import DTYPES, trees
from torch import Tensor

from kd_core import (
    FormatError,
    InvalidArgument,
    InvalidValue,
    MetaData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    TensorDictBase,
    lazy_stack,
    store,
)


def back(td: TensorDictBase) -> TensorDictBase:
    header, buffers = td.to_buffers()
    sent = [torch.frombuffer(bytearray(octets(flat)), dtype=flat.dtype) for flat in buffers]
    return TensorDictBase.from_buffers(header, sent)


def octets(flat: Tensor) -> bytes:
    return bytes(flat.view(torch.uint8).tolist()) or b"\0" * flat.dtype.itemsize


def rows() -> TensorDict:
    tokens = [torch.arange(size) for size in (1, 3)]
    entries = {
        "tokens": torch.nested.nested_tensor(tokens, layout=torch.jagged),
        "word": ["w", {"p": float("-inf"), "q": (b"\0", None)}],
        "unit": MetaData("m"),
        "n": {"x": torch.ones(2, 1), "of_all": "z"},
    }
    return TensorDict(entries, [2], names=["row"], device="cpu")


@given(trees())
def test_a_random_tree_comes_back(td: TensorDictBase) -> None:
    header, buffers = td.to_buffers()
    made = TensorDictBase.from_buffers(header, buffers)
    assert type(made) is type(td)
    assert_same(made, td)
    assert len({(flat.dtype, flat.device) for flat in buffers}) == len(buffers)
    assert made.to_buffers()[0] == header
    by_bytes = [flat.view(torch.uint8) for flat in buffers]
    assert_same(TensorDictBase.from_buffers(header, by_bytes), td)
    arrays = [flat.numpy() for flat in by_bytes]
    assert_same(TensorDictBase.from_buffers(header, arrays), td)  # type: ignore[arg-type]  # a buffer, says numpy from Python 3.12 on


def test_bytes_are_used_in_place_or_copied_if_they_are_read_only() -> None:
    header, (flat,) = TensorDict({"a": torch.arange(4)}).to_buffers()
    own, fixed = bytearray(flat.numpy()), bytes(flat.numpy())
    in_place = TensorDict.from_buffers(header, [own])
    copied = TensorDict.from_buffers(header, [fixed])
    for made in (in_place, copied):
        made["a"].add_(1)
    assert own == bytes((flat + 1).numpy())
    assert fixed == bytes(flat.numpy())
    every_other = memoryview(bytearray(64))[::2]
    assert TensorDict.from_buffers(header, [every_other])["a"].tolist() == [0] * 4


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_keeps_its_bits(dtype: torch.dtype) -> None:
    octets = torch.arange(48, dtype=torch.uint8)
    bits = (octets % 2).bool() if dtype is torch.bool else octets.view(dtype)
    td = TensorDict({"row": bits, "one": bits[0], "none": bits[:0], "odd": bits[::2]})
    made = TensorDict.from_buffers(*td.to_buffers())
    for key, leaf in made.items():
        expected = td[key].contiguous()
        assert leaf.dtype is dtype
        assert leaf.shape == expected.shape
        flat = leaf.reshape(-1).view(torch.uint8)
        assert flat.equal(expected.reshape(-1).view(torch.uint8))


def test_strided_expanded_conjugated_and_differentiable_leaves_come_back() -> None:
    leaf = torch.randn(3, 4)
    number = torch.complex(leaf, leaf)
    entries = {
        "strided": leaf.t(),
        "expanded": leaf[:1].expand(4, 4),
        "conjugated": number.t().conj(),
        "negative": number.t().conj().imag,
        "differentiable": leaf.t().clone().requires_grad_(),
    }
    made = back(TensorDict(entries, [4]).lock_())
    assert_same(made, TensorDict(entries, [4]))
    assert not made.is_locked
    assert not made["differentiable"].requires_grad


def test_ragged_rows_names_and_data_come_back() -> None:
    made = back(rows())
    assert_same(made.exclude("tokens"), rows().exclude("tokens"))
    assert [row.tolist() for row in made["tokens"].unbind()] == [[0], [0, 1, 2]]
    assert made.names == ["row"]
    assert made.device == torch.device("cpu")
    assert isinstance(made.get("word"), NonTensorStack)
    assert isinstance(made.get("unit"), MetaData)


def test_members_of_different_shapes_come_back() -> None:
    stack = lazy_stack([TensorDict({"x": torch.ones(n), "w": "v"}) for n in (1, 2)])
    made = back(stack)
    assert type(made) is type(stack)
    for member, expected in zip(made.unbind(0), stack.unbind(0), strict=True):
        assert_same(member, expected)


def test_a_class_comes_back_registered_or_not() -> None:
    class Point(TensorClass):
        x: Tensor

    point = Point(x=torch.ones(2), batch_size=[2])
    assert type(back(point)) is Point
    store.register_class(Point, "tests.wire.Point")
    made = back(point)
    assert type(made) is Point
    assert made.x.equal(point.x)


def test_one_tensor_under_two_keys_is_sent_once() -> None:
    leaf = torch.arange(3)
    header, [flat] = TensorDict({"a": leaf, "b": leaf}).to_buffers()
    made = TensorDict.from_buffers(header, [flat])
    assert made["a"] is made["b"]
    assert flat.numel() == 3


def test_leaves_that_follow_one_another_are_not_copied() -> None:
    leaf = torch.arange(6.0).view(2, 3)
    [flat] = TensorDict({"a": leaf}).to_buffers()[1]
    assert flat.data_ptr() == leaf.data_ptr()
    td = TensorDict({"a": leaf, "b": {"c": torch.ones(2)}}).consolidate()
    header, [flat] = td.to_buffers()
    assert flat.data_ptr() == td["a"].data_ptr()
    made = TensorDict.from_buffers(header, [flat])
    made["b", "c"].fill_(7)
    assert td["b", "c"].tolist() == [7, 7]


def test_leaves_side_by_side_in_two_storages_are_copied() -> None:
    base = memoryview(bytearray(torch.arange(4.0).numpy().tobytes()))
    first, second = (torch.frombuffer(part, dtype=torch.float32) for part in (base[:8], base[8:]))
    made = back(TensorDict({"a": first, "b": second}))
    assert [made["a"].tolist(), made["b"].tolist()] == [[0, 1], [2, 3]]


def test_the_devices_of_levels_and_buffers_are_kept_apart() -> None:
    td = TensorDict({"a": torch.ones(2), "n": TensorDict({"b": torch.zeros(2)}, device="cpu")})
    header, [flat] = td.to_buffers()
    moved = TensorDict.from_buffers(header, [flat.to("meta")])
    assert moved.device is None
    assert moved["n"].device == torch.device("meta")


def test_buffers_of_one_device_move_together() -> None:
    header, buffers = TensorDict({"a": torch.ones(2), "b": torch.arange(2)}).to_buffers()
    with pytest.raises(InvalidValue, match="got one on meta after one on cpu"):
        TensorDict.from_buffers(header, [buffers[0], buffers[1].to("meta")])


def test_values_without_a_form_are_refused() -> None:
    cases: list[tuple[object, type[Exception]]] = [
        (torch.ones(2).to_sparse(), InvalidValue),
        (torch.ones(2, device="meta"), InvalidValue),
        (object(), InvalidArgument),
    ]
    for value, error in cases:
        with pytest.raises(error, match="entry `bad`"):
            TensorDict({"bad": value}).to_buffers()


def test_what_does_not_fit_the_header_is_refused() -> None:
    td = TensorDict({"a": torch.ones(2), "b": torch.arange(2)})
    header, [floats, numbers] = td.to_buffers()
    for buffers, message in [
        ([floats], "it has 2 buffers, got 1"),
        ([numbers, floats], r"buffer 0 must be of torch.float32, got torch.int64"),
        ([floats, numbers[:1]], r"buffer 1 must have the shape \(2,\), got \(1,\)"),
        ([floats.view(2, 1), numbers], r"must have the shape \(2,\), got \(2, 1\)"),
        ([floats.view(torch.uint8)[:5], numbers], r"must have the shape \(8,\), got \(5,\)"),
    ]:
        with pytest.raises(FormatError, match=message):
            TensorDict.from_buffers(header, buffers)
    with pytest.raises(FormatError, match=r"buffer 1 must have the shape \(16,\), got \(1,\)"):
        TensorDict.from_buffers(header, [floats, b"x"])
    with pytest.raises(InvalidArgument, match="buffer 1 must be a tensor or bytes, got a `list`"):
        TensorDict.from_buffers(header, [floats, [1]])  # type: ignore[list-item]  # the mistake
    with pytest.raises(InvalidArgument, match="`header` must be bytes, got a `str`"):
        TensorDict.from_buffers("{}", [])  # type: ignore[arg-type]  # the mistake


def changed(header: bytes, **fields: Any) -> bytes:
    return json.dumps({**json.loads(header), **fields}).encode()


def test_a_hostile_header_is_refused_before_memory_is_used() -> None:
    header, buffers = TensorDict({"a": torch.ones(2)}).to_buffers()

    def tree(dtype: str, shape: list[object], buffer: int = 0) -> dict[str, object]:
        entry = ["a", {"tensor": [buffer, "t0", dtype, shape]}]
        return {"td": {"batch": [], "entries": [entry]}}

    deep: object = tree("float32", [2])
    for _ in range(80):
        deep = {"td": {"batch": [], "entries": [["a", deep]]}}
    twice = tree("float32", [1])["td"]
    twice["entries"] = [["a", {"tensor": [0, f"t{n}", "float32", [1]]}] for n in (0, 1)]  # type: ignore[index]  # a dict
    hostile = [
        pickle.dumps(Payload()),
        b"",
        b"[" * 100_000,
        b"{}",
        header.replace(b'"version":1', b'"version":2'),
        header.replace(b'"version":1', b'"version":true'),
        header.replace(b'"version":1', b'"version":1,"version":1'),
        changed(header, more=1),
        changed(header, buffers=[["float32", 0, -2]]),
        changed(header, buffers=[["float32", 1, 2]]),
        changed(header, buffers=[["float32", 0, 10**30]]),
        changed(header, buffers=[["object", 0, 2]]),
        changed(header, devices=["cpu"] * 5000),
        changed(header, devices="cpu"),
        changed(header, tree=tree("float32", [2**62])),
        changed(header, tree=tree("float32", [2**62, 0])),
        changed(header, tree=tree("float32", [2**63, 2])),
        changed(header, tree=tree("float32", [-1, -2])),
        changed(header, tree=tree("float32", [True, 2])),
        changed(header, tree=tree("int32", [2])),
        changed(header, tree=tree("float32", [2], 1)),
        changed(header, tree=deep),
        changed(header, tree={"td": twice}),
        changed(header, tree={"td": {**tree("float32", [2])["td"], "device": 9}}),  # type: ignore[dict-item]  # a dict
    ]
    for text in hostile:
        with pytest.raises(FormatError):
            TensorDict.from_buffers(text, buffers)


class Payload:
    """Unpickles to a call that fails the test."""

    def __reduce__(self) -> tuple[object, ...]:
        return pytest.fail, ("a header was unpickled",)


def test_buffers_of_odd_strides_are_bytes_too() -> None:
    """One element, or none, may have any stride."""
    for flat in (torch.arange(2.0)[::2], torch.arange(2.0)[:0].as_strided((0,), (2,))):
        (buffer,) = TensorDict({"a": flat}).to_buffers()[1]
        assert buffer.view(torch.uint8).numel() == flat.nbytes
    leaf = torch.ones(0, 2)[:, 1]
    (buffer,) = TensorDict({"a": leaf}).to_buffers()[1]
    assert buffer.view(torch.uint8).numel() == 0
