"""In-place functions of all leaves: refused before the first leaf is written, or done to all."""

from collections.abc import Callable, Iterator
from functools import partial
from operator import methodcaller
from typing import Any

import pytest
import torch
from tools.operations import ARITHMETIC, LOGIC, UNARY
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kd_core import InvalidValue, TensorDict


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(4)


LEAVES: dict[str, Callable[[], Tensor]] = {
    "bool": lambda: torch.ones(4, dtype=torch.bool),
    "int64": lambda: torch.ones(4, dtype=torch.int64),
    "uint16": lambda: torch.ones(4, dtype=torch.uint16),
    "half": lambda: torch.ones(4, dtype=torch.half),
    "complex64": lambda: torch.ones(4, dtype=torch.complex64),
    "parameter": lambda: torch.ones(4, requires_grad=True),
    "view of a parameter": lambda: torch.ones(8, requires_grad=True)[:4],
    "one of several views": lambda: torch.ones(2, 4, requires_grad=True).clone().unbind()[0],
    "expanded": lambda: torch.ones(1).expand(4),
    "inference": inference,
    "0-d": lambda: torch.ones(()),
    "sparse": lambda: torch.ones(4).to_sparse(),
}
FUNCTIONS = [f"{row.name}_" for row in UNARY if row.in_place]
OPERATIONS = [f"{row.name}_" for row in (*ARITHMETIC, *LOGIC) if row.in_place]
CALLS: dict[str, Callable[[TensorDict], object]] = {
    "clamp": lambda td: td.clamp_(0, 300),
    "lerp": lambda td: td.lerp_(like(td, 2.0), 0.5),
    "addcmul": lambda td: td.addcmul_(like(td, 2.0), like(td, 2.0), value=0.5),
    "addcdiv": lambda td: td.addcdiv_(like(td, 2.0), like(td, 2.0)),
    "zero": lambda td: td.zero_(),
    "fill": lambda td: td.fill_(300),
    "fill, tensor": lambda td: td.fill_(torch.tensor(2.5)),
    "masked_fill": lambda td: td.masked_fill_(torch.tensor(True), 300.5),
    "copy": lambda td: td.copy_(like(td, 2.0, requires_grad=True)),
    "update": lambda td: td.update_(like(td, 2.0, requires_grad=True)),
    "apply": lambda td: td.apply_(lambda leaf: torch.full((4,), 2.0)),
    "detach": lambda td: td.detach_(),
    "requires_grad": lambda td: td.requires_grad_(),
}


def with_zeros(td: TensorDict, name: str) -> object:
    return getattr(td, name)(like(td, 0.0))


def calls() -> Iterator[tuple[str, Callable[[TensorDict], object]]]:
    yield from CALLS.items()
    for name in FUNCTIONS:
        yield name, methodcaller(name)
    for name in OPERATIONS:
        for number in (0.5, 300, 1j):
            yield f"{name}({number})", methodcaller(name, number)
        yield f"{name}(zeros)", partial(with_zeros, name=name)


def like(td: TensorDict, value: float, requires_grad: bool = False) -> TensorDict:
    return td.apply(lambda leaf: torch.full((4,), value, requires_grad=requires_grad))


def state(td: TensorDict) -> list[tuple[object, ...]]:
    return [
        (leaf.to_dense().tolist(), leaf.dtype, leaf.requires_grad)
        for leaf in (each.detach() if each.is_sparse else each for each in td.values())
    ]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")  # by torch
@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("others", [1, 10])
@pytest.mark.parametrize("recording", [True, False])
def test_what_a_later_leaf_refuses_changes_no_leaf(leaf: str, others: int, recording: bool) -> None:
    refused = 0
    for name, call in calls():
        td = TensorDict({f"a{i}": torch.ones(4) for i in range(others)})
        td["z"], td["last"] = LEAVES[leaf](), torch.ones(4)
        before = state(td)
        try:
            with torch.set_grad_enabled(recording):
                call(td)
        except (RuntimeError, ValueError, TypeError):
            refused += 1
            assert state(td) == before, name
    assert refused


def test_integers_divided_by_zero_change_no_leaf() -> None:
    td = TensorDict({"a": torch.ones(2), "i": torch.tensor([4, 4])}, [2])
    divisor = TensorDict({"a": torch.ones(2) * 2, "i": torch.tensor([2, 0])}, [2])
    for name in ("floor_divide_", "remainder_", "fmod_"):
        with pytest.raises(InvalidValue, match=r"`i` of torch.int64 cannot be .*: ZeroD"):
            getattr(td, name)(divisor)
    assert td["a"].tolist() == [1, 1]
    assert td.floor_divide_(divisor.clamp(min=2))["i"].tolist() == [2, 2]


@pytest.mark.parametrize("index", [[0, 1], torch.tensor([0, 1]), (slice(None), [0, 1])])
def test_an_indexed_write_of_another_dtype_changes_no_leaf(index: Any) -> None:
    td = TensorDict({"a": torch.ones(2, 2), "i": torch.ones(2, 2, dtype=torch.int64)}, [2, 2])
    value = TensorDict({"a": torch.zeros(2, 2), "i": torch.zeros(2, 2)}, [2, 2])
    with pytest.raises(InvalidValue, match=r"value of torch.float32 to rows of `i` of torch.int64"):
        td[index] = value
    assert td["a"].tolist() == [[1, 1], [1, 1]]
    td[index] = value.apply(lambda leaf: leaf.long(), batch_size=[2, 2]).update({"a": value["a"]})
    assert td["i"].tolist() == [[0, 0], [0, 0]]


def test_leaves_of_one_dtype_are_written_whatever_it_is() -> None:
    td = TensorDict({"a": torch.ones(2).long(), "b": torch.ones(2).long()}, [2])
    assert td.add_(2).mul_(td)["b"].tolist() == [9, 9]
    with pytest.raises(InvalidValue, match=r"`a` of torch.int64 cannot .*: result"):
        td.add_(0.5)


def test_checks_leave_no_operation_in_a_traced_graph() -> None:
    def double(x: Tensor) -> Tensor:
        return TensorDict({"a": x.clone()}, [2]).mul_(TensorDict({"a": x}, [2]))["a"]

    graph = make_fx(double, tracing_mode="symbolic")(torch.ones(2, 3)).graph
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert called == ["aten.clone.default", "aten.mul_.Tensor"]


@pytest.mark.parametrize("name", ["logical_and_", "logical_or_", "logical_xor_", "logical_not_"])
def test_logical_functions_write_into_parameters_as_in_torch(name: str) -> None:
    plain, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    operands = () if name == "logical_not_" else (torch.zeros(2),)
    getattr(plain, name)(*operands)
    getattr(TensorDict({"a": x, "b": torch.ones(2)}, [2]), name)(*operands)
    assert torch.equal(x, plain)
    assert x.requires_grad


def overlapping(others: int) -> tuple[TensorDict, TensorDict]:
    """Containers of which one pair overlaps in part, which torch refuses."""
    leaves = {f"a{i}": torch.ones(3) for i in range(others)}
    x = torch.arange(1.0, 5)
    return (
        TensorDict({**leaves, "z": x[:3], "last": torch.ones(3)}, [3]),
        TensorDict({**leaves, "z": x[1:], "last": torch.ones(3)}, [3]),
    )


@pytest.mark.parametrize("others", [1, 10])
@pytest.mark.parametrize(
    "write",
    [
        lambda td, other: td.add_(other),
        lambda td, other: td.mul_(other["z"]),
        lambda td, other: td.div_(td["z"]),
        lambda td, other: td.sub_(td["z"][0]),
        lambda td, other: td.clamp_(td["z"] + 0, td["z"]),
        lambda td, other: td.lerp_(other, 0.5),
        lambda td, other: td.addcmul_(other, other),
        lambda td, other: td.clamp_(other, None),
        lambda td, other: td.copy_(other),
        lambda td, other: td.update_(other),
    ],
)
def test_an_operand_that_overlaps_its_leaf_is_read_as_it_was(others: int, write: Any) -> None:
    td, other = overlapping(others)
    expected = td.clone()
    write(expected, other.clone())
    write(td, other)
    assert {key: leaf.tolist() for key, leaf in td.items()} == {
        key: leaf.tolist() for key, leaf in expected.items()
    }


@pytest.mark.parametrize(
    "write",
    [
        lambda td, other: td.update_(other),
        lambda td, other: td.update_(dict(other.items())),
        lambda td, other: td.copy_(other),
        lambda td, other: td.copy_(other, non_blocking=True),
        lambda td, other: td.__setitem__(slice(None), other),
        lambda td, other: td.__setitem__(torch.tensor([0, 1]), other),
        lambda td, other: td.update_at_(other, slice(None)),
        lambda td, other: td.update(other, inplace=True),
    ],
)
def test_each_value_is_read_once_where_a_later_one_overlaps_its_leaf(write: Any) -> None:
    memory = torch.arange(6.0)
    leaves = {key: torch.full((2,), float(i)) for i, key in enumerate("abc")}
    td = TensorDict({**leaves, "d": memory[:4].view(2, 2)}, [2])
    write(td, TensorDict(a=td["b"], b=td["c"], c=td["a"], d=memory[2:].view(2, 2), batch_size=[2]))
    # One after the other: `c` gets what `a` holds by then.
    assert {key: td[key].tolist() for key in "abc"} == {"a": [1, 1], "b": [2, 2], "c": [1, 1]}
    assert memory.tolist() == [2, 3, 4, 5, 4, 5]


def test_nothing_is_written_of_a_cycle_beside_a_leaf_that_is_refused() -> None:
    leaves = {key: torch.full((2,), float(i)) for i, key in enumerate("abc")}
    td = TensorDict({**leaves, "d": torch.zeros(1).expand(2)}, [2])
    other = TensorDict(a=td["b"], b=td["c"], c=td["a"], d=torch.ones(2), batch_size=[2])
    for write in (td.update_, td.copy_, lambda new: td.__setitem__(slice(None), new)):
        with pytest.raises(InvalidValue, match="entry `d` cannot be written in place"):
            write(other)
        assert [td[key].tolist() for key in "abcd"] == [[0, 0], [1, 1], [2, 2], [0, 0]]


def test_the_transposed_leaf_may_be_an_operand() -> None:
    x = torch.arange(4.0).reshape(2, 2)
    TensorDict({"a": torch.ones(2, 2), "z": x}, [2]).add_(
        TensorDict({"a": torch.ones(2, 2), "z": x.T}, [2])
    )
    assert x.tolist() == [[0, 3], [3, 6]]


def test_integers_are_divided_by_a_number_of_an_unsigned_dtype() -> None:
    td = TensorDict({"a": torch.tensor([6, 9], dtype=torch.uint8)}, [2])
    assert td.floor_divide_(torch.tensor(2, dtype=torch.uint16))["a"].tolist() == [3, 4]
    with pytest.raises(InvalidValue, match="ZeroDivisionError"):
        td.floor_divide_(torch.tensor(0, dtype=torch.uint16))
