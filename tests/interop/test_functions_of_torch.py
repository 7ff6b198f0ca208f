"""Functions of torch do the same with containers of both libraries, but for what is decided."""

from fnmatch import fnmatchcase
from typing import Final

import pytest

pytest.importorskip("tensordict")

from tests.interop.calls.decided import pattern_for
from tests.interop.calls.functions import FUNCTIONS, compared
from tests.interop.calls.subjects import KINDS

DECIDED: Final[tuple[tuple[str, str, str], ...]] = (
    # Rows that are not tensors are kept, as by the methods.
    ("worded", "*", "result: length 3 != 2"),
    ("row_values", "*", "result: * != None"),
    # An `UnbatchedTensor` is reduced as a whole, or refused by name, and copied into `out`.
    ("unbatched", "cat out*", "result: 'new' != '.u'"),
    ("unbatched", "*", "raises here"),
    ("unbatched", "stack*", "result: 0.125 != 0.0"),
    # Of a lazy stack the stacked entries are leaves, whose dimensions `vmap` counts; so are the
    # tensors of parameters, and the one without a batch. Data belongs to the structure.
    ("lazy", "tree_[lfu]*", "result: *"),
    ("params", "tree_[lfu]*", "result: *"),
    ("unbatched", "tree_*", "result: *"),
    ("worded", "tree_[lfu]*", "result: length 1 != 2"),
    ("one_value", "tree_[lfu]*", "result: *"),
    # As in torch, a dimension is one of the batch, and a mask is a tensor.
    ("unsized", "stack*", "raises here"),
    ("params", "stack*", "raises here"),
    ("empty", "where*", "raises here"),
    ("params", "flatten 0 1*", "result: 1 != 6"),
    # There a dimension is mapped and is there again; as in torch, all that is mapped has its size.
    ("lazy", "vmap*", "result: class 'TensorDict' != 'Lazy*"),
    ("ragged", "vmap*", "raises here"),
    ("unsized", "vmap*", "kind of error"),
    ("*_value*", "vmap*", "raises here"),
    # There the result says no device.
    ("mapped", "vmap*", "result: device 'cpu' != 'None'"),
    # As by the methods, and by those of other containers, what does not change is returned itself.
    *(
        (kind, call, "result: 'self' != *")
        for kind in ("based", "decorated", "one_value")
        for call in ("squeeze*", "atleast_1d*", "atleast_2d*")
    ),
    # As in torch, `out` of what requires gradients is refused.
    ("params", "clamp out*", "raises here"),
)
"""Differences by kind, call and what differs, beside those of `differences.toml` by method."""


@pytest.mark.filterwarnings("ignore")
def test_functions_of_torch_do_the_same() -> None:
    found = [one for kind in KINDS for one in compared(kind)]
    assert len(found) == len(FUNCTIONS) * len(KINDS)
    new = [
        one
        for one in found
        if one.found is not None
        and pattern_for(one.kind, f"{one.method}()", one.found) is None
        and not any(
            fnmatchcase(one.kind, kind)
            and fnmatchcase(one.call, call)
            and fnmatchcase(one.found, what)
            for kind, call, what in DECIDED
        )
    ]
    print(f"{len(found)} calls of functions of torch, {len(new)} differ")
    assert not new, "\n".join(f"{one.kind}: {one.call}: {one.found}" for one in new)
