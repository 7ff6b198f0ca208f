"""Every operation of the harness on random containers of the device, beside torch on each leaf."""

import warnings
from random import Random
from typing import Final

import pytest
import torch
from tests.fuzz.checking import check
from tests.fuzz.registry import OPERATIONS
from tests.fuzz.subjects import subject
from tests.fuzz.test_operations import described
from tests.gpu.device import DEVICE

STOPS: Final = frozenset({"binary_cross_entropy", "gather"})
"""What is no probability or no index stops a kernel of the GPU, and with it all later tests."""

READ_ON_CPU: Final = frozenset(
    {"cpu", "data_ptr", "from_struct_array", "numpy", "to", "to_struct_array"}
)
"""Operations whose results, or whose references, are on the CPU in any case."""

UNORDERED: Final = frozenset({"scatter"})
"""A GPU does not say which of several values that are written to one element is the last."""

PROGRAMS = 2 if DEVICE.type == "cpu" else 40
"""How many calls of each operation: the suite makes many more of them on the CPU elsewhere."""


@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - STOPS - READ_ON_CPU - UNORDERED))
def test_an_operation_does_what_torch_does_to_each_leaf(name: str) -> None:
    found = []
    with DEVICE, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(PROGRAMS):
            rng = Random(f"{name} {seed}")
            one = subject(rng)
            call = OPERATIONS[name](rng, one, name)
            wrong = check(one, call)
            if wrong:
                found.append(f"{call.text}\n{wrong}\non {one.kind}:\n{described(one.node)}")
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()  # an error of a kernel belongs to this test
    assert not found, f"{len(found)} of {PROGRAMS} calls: {found[0]}"
