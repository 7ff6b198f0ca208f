"""What each leaf of a container is, as typed records."""

from typing import cast

import torch

from kd_core import TensorAttrs, TensorDict, UnbatchedTensor


def test_attrs_say_what_each_leaf_is() -> None:
    td = TensorDict(
        {"a": torch.ones(3, 2), "n": {"b": torch.zeros(3).int()}, "s": "word"}, [3], device="cpu"
    )
    td["u"] = UnbatchedTensor(torch.ones(5))
    attrs = td.attrs()
    assert type(attrs) is TensorDict
    assert attrs.batch_size == ()
    assert list(attrs.keys()) == ["a", "n", "s", "u"]
    a = cast("TensorAttrs", attrs["a"])
    assert type(a) is TensorAttrs
    assert (a.tgt_device, a.tgt_dtype) == (torch.device("cpu"), torch.float32)
    assert a.tgt_shape == torch.Size([3, 2])
    assert cast("TensorAttrs", attrs["n", "b"]).tgt_dtype is torch.int32
    assert cast("TensorAttrs", attrs["u"]).tgt_shape == torch.Size([5])
    assert attrs["s"] == "word"
