"""Random containers for tests of files."""

from typing import cast

import torch
from hypothesis import strategies as st
from tests.core.content import containers

from kd_core import NonTensorData, TensorDict, TensorDictBase, UnbatchedTensor, lazy_stack
from kd_core._store.mapped_tensor import WIRE

DTYPES = tuple(WIRE)

HOSTILE_KEYS = (
    st.text(st.characters(), max_size=4)
    | st.sampled_from(["", "..", "../x", "a/b", "/", "\0", "\ud800", "__metadata__", "shape", "t0"])
    | st.sampled_from(["A", "a", "é", "e\u0301", "a.b", "seg-0.safetensors", "manifest.json"])
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
        | st.tuples(inner, inner)
    ),
    max_leaves=4,
) | st.binary(max_size=4)


# torch converts random numbers to these; `test_every_dtype_keeps_its_bits` has them all.
_WITH_RANDOM_VALUES = tuple(
    dtype for dtype in DTYPES if dtype not in (torch.complex32, torch.float4_e2m1fn_x2)
)


@st.composite
def trees(draw: st.DrawFn) -> TensorDictBase:
    """Draw a container, or a lazy stack of two that differ."""
    td = draw(containers(HOSTILE_KEYS, _WITH_RANDOM_VALUES, VALUES.map(NonTensorData)))
    if draw(st.booleans()):  # tensors without rows, in front of others and behind them
        leaf = torch.arange(float(draw(st.integers(0, 3))))
        of_batch = {"fixed": UnbatchedTensor(leaf), "held": NonTensorData({"t": [leaf, leaf * 2]})}
        below = TensorDict(of_batch, td.batch_size)
        td = TensorDict({"below": below, **dict(td.items()), **of_batch}, td.batch_size)
    if draw(st.integers(0, 3)):
        return td
    dim = draw(st.integers(0, td.batch_dims))
    other = td.clone()
    for key in list(other.keys())[:1]:
        del other[key]
    return cast("TensorDictBase", lazy_stack([td, other], dim))
