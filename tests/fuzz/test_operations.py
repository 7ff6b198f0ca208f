"""Random operations on random containers, beside the function of torch on each leaf."""

from random import Random

import torch
from tests.fuzz import (
    calculating,
    combining,
    converting,
    describing,
    filling,
    functional,
    indexing,
    moving,
    naming,
    rearranging,
    reducing,
    restructuring,
    writing,
)
from tests.fuzz.checking import check
from tests.fuzz.conftest import Seeds
from tests.fuzz.registry import OPERATIONS
from tests.fuzz.subjects import Node, subject
from torch import Tensor

from kd_core import TensorDictBase, torch_functions

MODULES = (
    *(calculating, combining, converting, describing, filling, functional, indexing),
    *(moving, naming, rearranging, reducing, restructuring, writing),
)
CALLS = 4

# What no call is made of, and why.
LEFT_OUT = {
    "cuda": "needs a GPU",
    "pin_memory": "needs a GPU",
    "pin_memory_": "needs a GPU",
    "record_stream": "needs a GPU",
    "to_module": "writes to a module: `test_lifetimes.py`, and the tests of kd_nn",
    "from_modules": "takes modules, which have no batch: `tests/core/ops/test_objects.py`",
    "from_arrow": "reads a table of another library: `tests/core/convert`",
    "from_csv": "reads a file, which has no dtypes: `tests/core/convert`",
    "from_h5": "reads a file: `tests/core/convert`",
    "from_json": "reads a file, which has no dtypes: `tests/core/convert`",
    "from_pandas": "reads a table of another library: `tests/core/convert`",
    "from_parquet": "reads a file: `tests/core/convert`",
    "from_zarr": "reads a file: `tests/core/convert`",
    "to_arrow": "makes a table of another library: `tests/core/convert`",
    "to_h5": "writes a file: `tests/core/convert`",
    "to_store": "needs a server: `tests/interop/test_redis.py`",
    "__class_getitem__": "of annotations: `tests/core/containers/test_typed_as_written.py`",
    "attrs": "describes leaves, as `schema` does: `tests/core/containers/test_attributes.py`",
    "to_pandas": "makes a table of another library: `tests/core/convert`",
    "to_mds": "writes files of another library: `tests/core/convert`",
    "to_parquet": "writes a file: `tests/core/convert`",
    "to_zarr": "writes a file: `tests/core/convert`",
    **dict.fromkeys(
        [
            "save",
            "load",
            "append_to",
            "memmap",
            "memmap_",
            "memmap_like",
            "load_memmap",
            "dumps",
            "load_",
            "load_memmap_",
            "from_consolidated",
            "make_memmap",
            "make_memmap_from_tensor",
            "make_memmap_from_storage",
            "memmap_refresh_",
            "is_memmap",
            "saved_path",
        ],
        "reads or writes a file: `tests/core/store`",
    ),
    **dict.fromkeys(
        [
            "all_gather",
            "all_reduce",
            "broadcast",
            "from_remote_init",
            "gather_and_stack",
            "init_remote",
            "irecv",
            "arecv",
            "asend",
            "isend",
            "recv",
            "reduce",
            "send",
        ],
        "needs a group of processes: `tests/core/distributed`",
    ),
    "to_buffers": "makes bytes: `tests/core/wire` and `test_forged_headers.py`",
    "from_buffers": "reads bytes: `tests/core/wire` and `test_forged_headers.py`",
    "new_tensor": "ends leaves at the batch: `tests/core/ops/test_filling.py`",
    "__hash__": "is None",
    "__torch_function__": "every call of a function of torch goes through it",
    "__array_ufunc__": "tells numpy to leave operators to us",
    "__init_subclass__": "makes classes",
    "__subclasshook__": "answers `issubclass`",
}
RANDOM = {
    "torch.nn.functional.dropout",
    "torch.rand_like",
    "torch.randn_like",
    "torch.randint_like",
}
ALIASES = {"torch.concat", "torch.concatenate"}


def described(node: Node, indent: str = "  ") -> str:
    """Return what a container was built from, a line for each entry."""
    if node.members:
        lines = [f"{indent}stack {node.batch} along {node.dim}"]
        lines += [described(member, indent + "  ") for member in node.members]
        return "\n".join(lines)
    lines = [f"{indent}{'declared' if node.declared else 'dense'} {node.batch}"]
    for key, value in node.entries.items():
        if isinstance(value, Node):
            lines += [f"{indent}{key}:", described(value, indent + "  ")]
        elif isinstance(value, Tensor):
            layout = f"{tuple(value.shape)} strides {value.stride()} of {value.dtype}"
            lines.append(f"{indent}{key}: {layout}{' grad' if value.requires_grad else ''}")
        else:
            lines.append(f"{indent}{key}: {value}")
    return "\n".join(lines)


def test_operations(seeds: Seeds) -> None:
    names = sorted(OPERATIONS)
    torch.set_num_threads(1)
    for seed in seeds(400):
        rng = Random(seed)
        for _ in range(CALLS):
            one = subject(rng)
            name = rng.choice(names)
            call = OPERATIONS[name](rng, one, name)
            seeds.count("calls")
            found = check(one, call)
            if found:
                raise AssertionError(f"{call.text}\n{found}\non {one.kind}:\n{described(one.node)}")


class _Empty:
    __slots__ = ()


def test_every_public_method_is_called_or_left_out_for_a_reason() -> None:
    plain = set(dir(object)) - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
    attributes = {"__annotations__", *vars(_Empty)}
    names = {
        name
        for name in dir(TensorDictBase)
        if hasattr(TensorDictBase, name)
        and (not name.startswith("_") or (name.startswith("__") and name.endswith("__")))
    }
    covered = {name.split()[0] for name in OPERATIONS}
    changed = {"__hash__", "__init_subclass__", "__subclasshook__", "__repr__"}
    assert names - covered - set(LEFT_OUT) - (plain - changed) - attributes == set()


def test_every_function_of_torch_is_called() -> None:
    covered = {name.split()[0] for name in OPERATIONS}
    missing = {name for name in torch_functions() if name.rpartition(".")[2] not in covered}
    assert missing - covered - RANDOM - ALIASES == set()
