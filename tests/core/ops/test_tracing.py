"""Operations on leaves trace into one graph, and give there what they give outside."""

import re
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from tools.operations import ARITHMETIC, REDUCTIONS, UNARY
from torch.utils.checkpoint import checkpoint

from kd_core import KdError, TensorDict
from kd_core.testing import assert_close

Step = Callable[[TensorDict], TensorDict]


def every_unary(td: TensorDict) -> TensorDict:
    parts = {row.name: getattr(td, row.name)() for row in UNARY if row.name != "bitwise_not"}
    return TensorDict(parts, [3])


def every_unary_in_place(td: TensorDict) -> TensorDict:
    for row in UNARY:
        if row.in_place and row.name != "bitwise_not":
            getattr(td.clone(), f"{row.name}_")()
    return td.clone().sqrt_()


def every_binary(td: TensorDict) -> TensorDict:
    return TensorDict({row.name: getattr(td, row.name)(td + 1) for row in ARITHMETIC}, [3])


def every_reduction(td: TensorDict) -> TensorDict:
    return TensorDict({row.name: getattr(td, row.name)(0) for row in REDUCTIONS})


TABLES: dict[str, Step] = {
    "unary": every_unary,
    "unary in place": every_unary_in_place,
    "binary": every_binary,
    "reductions": every_reduction,
}
STEPS: dict[str, Step] = {
    "numbers on both sides": lambda td: (1 - td * 2 + 3) / 2**td - 2 / td,
    "tensors on both sides": lambda td: torch.ones(3) - td * torch.ones(3),
    "binary in place": lambda td: td.clone().add_(1).mul_(td).sub_(torch.ones(3)),
    "logic": lambda td: (td > 0.5) & (td < 0.9) | (td < 0.5).logical_not(),
    "equality": lambda td: ((td == td) & (td != td) | (td == td)).logical_not(),
    "casts": lambda td: td.double().float(),
    "features": lambda td: td.sum("feature", keepdim=True),
    "extremes": lambda td: td.max(0).values,
    "apply": lambda td: td.apply(lambda x, y: x + y, td).apply(torch.sin),
    "named_apply": lambda td: td.named_apply(lambda name, x: x * len(name), nested_keys=True),
    "apply, nothing left": lambda td: td if td.apply(lambda x: None) is None else td + 1,
    "apply_": lambda td: td.clone().apply_(lambda x: x + 1),
    "blending": lambda td: td.clamp(0, 0.5).lerp(td, 0.5).addcmul(td, td).lerp_(td, 0.1),
    "filling": lambda td: td.clone().zero_().fill_(2.0).copy_(td),
    "masks": lambda td: td.masked_fill(torch.tensor([True, False, True]), 0.0),
    "fresh": lambda td: td.new_zeros(4),
    "placement": lambda td: td.to(torch.float64).cpu().contiguous().detach(),
    "storage": lambda td: td.consolidate(),
}


def compare(step: Step, count: int) -> None:
    torch._dynamo.reset()
    inner = {str(i): torch.rand(3, i % 3 + 1) + 0.1 for i in range(count)}
    td = TensorDict({"a": torch.rand(3) + 0.1, "n": inner, "s": "text"}, [3])
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert_close(compiled(td).nan_to_num(), step(td).nan_to_num())


@pytest.mark.parametrize("name", TABLES)
def test_the_rows_of_a_table_are_one_graph(name: str) -> None:
    compare(TABLES[name], 1)


@pytest.mark.parametrize("name", STEPS)
def test_an_operation_is_one_graph(name: str) -> None:
    """With as many leaves as eager foreach kernels take."""
    compare(STEPS[name], 9)


def test_functions_with_a_default_compile_to_one_graph() -> None:
    def program(td: TensorDict, other: TensorDict) -> TensorDict:
        joined = td.add(other, default=1.5).maximum_(td.mul(other, default=2))
        return joined.where(torch.tensor([True, False]), other, pad=0)

    td = TensorDict({"a": torch.ones(2), "n": {"b": torch.arange(2)}}, [2])
    other = TensorDict({"c": torch.ones(2), "n": {"b": torch.ones(2)}}, [2])
    torch._dynamo.reset()
    got = torch.compile(program, backend="eager", fullgraph=True)(td, other)
    want = program(td, other)
    assert set(got.keys(True)) == set(want.keys(True))
    assert bool((got == want).all())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float64, torch.complex64])
@pytest.mark.parametrize("number", [True, 2, 1.5, 1 + 2j])
def test_a_default_has_the_dtype_that_torch_gives_a_number(
    dtype: torch.dtype, number: complex
) -> None:
    leaf = torch.ones(2, dtype=dtype)
    got = TensorDict({"a": leaf}).mul(TensorDict(), default=number)["a"]
    assert got.dtype is torch.result_type(leaf, cast("float", number))


SHAPES: list[Callable[[TensorDict], TensorDict]] = [
    lambda td: td.reshape(6),
    lambda td: td.reshape(-1),
    lambda td: td.reshape(3, 2),
    lambda td: td.view(6),
    lambda td: td.view(-1),
    lambda td: td.view(1, 6),
    lambda td: td.flatten(),
    lambda td: td.unflatten(0, (2, 1)),
    lambda td: td.unsqueeze(0),
    lambda td: td.permute(1, 0),
    lambda td: td.expand(4, 2, 3),
]
LOCKS: list[Callable[[TensorDict], TensorDict]] = [
    lambda td: td.lock_(),
    lambda td: td.lock_().unlock_(),
    lambda td: td.lock_().unlock_().lock_(),
]


def pair(*_: object) -> TensorDict:
    return TensorDict({"a": torch.rand(2, 3), "n": {"b": torch.rand(2, 3)}}, [2, 3])


def test_shapes_after_locks_in_one_program() -> None:
    def program(td: TensorDict) -> tuple[list[TensorDict], list[bool]]:
        found, locked = [], []
        # Every shape after all states of a lock; every lock around a few kinds of shapes.
        pairs = [(shape, LOCKS[-1]) for shape in SHAPES]
        pairs += [(shape, lock) for shape in SHAPES[::5] for lock in LOCKS[:-1]]
        for shape, lock in pairs:
            made = shape(lock(td.copy()))
            locked.append(made.is_locked)
            found += [lock(shape(td)), made.unlock_()]
        return found, locked

    torch._dynamo.reset()
    td = pair()
    compiled = torch.compile(program, backend="eager", fullgraph=True)
    (results, locked), (wanted, locked_eagerly) = compiled(td), program(td)
    assert locked == locked_eagerly
    for result, expected in zip(results, wanted, strict=True):
        assert result.batch_size == expected.batch_size
        assert result.is_locked == expected.is_locked
        assert (result == expected).all()


def test_functions_of_the_user_are_called_with_containers() -> None:
    def doubled(td: TensorDict) -> TensorDict:
        return TensorDict({"o": td["a"].sin() * 2}, [2, 3])

    region = torch.compiler.nested_compile_region(doubled)

    def program(td: TensorDict) -> list[Any]:
        by_name = checkpoint(lambda each, x: each["a"] * x, td, x=2, use_reentrant=False)
        return [checkpoint(doubled, td, use_reentrant=False)["o"], region(td)["o"], by_name]

    torch._dynamo.reset()
    td = pair().requires_grad_()
    first, second, third = torch.compile(program, backend="aot_eager", fullgraph=True)(td)
    expected = td["a"].sin() * 2
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    assert torch.equal(third, td["a"] * 2)
    torch.autograd.backward(first.sum())
    assert td["a"].grad is not None


@pytest.mark.parametrize(
    "values",
    [
        [torch.zeros(3), torch.ones(3)],
        [torch.zeros(3), torch.ones(2)],
        [torch.zeros(1), 2.0],
        [{"a": torch.zeros(3)}, 1],
        [[torch.zeros(3)], [torch.ones(3)]],
        [(torch.zeros(2), 1)],
    ],
)
def test_lists_are_converted_as_outside(values: list[object]) -> None:
    def program() -> TensorDict:
        return TensorDict.from_any({"values": values})

    torch._dynamo.reset()
    made = torch.compile(program, backend="eager", fullgraph=True)()
    assert type(made.get("values")) is type(program().get("values"))
    assert repr(made["values"]) == repr(program()["values"])


def test_gradients_are_asked_for() -> None:
    def slope(td: TensorDict) -> torch.Tensor:
        asking = td.clone().requires_grad_()
        return torch.autograd.grad((asking["a"] ** 2).sum(), asking["a"])[0]

    torch._dynamo.reset()
    td = TensorDict({"a": torch.tensor([1.0, 2.0])})
    assert torch.compile(slope, backend="eager")(td).tolist() == [2, 4]
    if torch.__version__ < "2.13":  # dynamo traces no `requires_grad_` of what is made inside
        return
    assert torch.compile(
        lambda td: td.clone().requires_grad_()["a"].requires_grad, backend="eager", fullgraph=True
    )(td)


FAILING: dict[str, Callable[[Any], object]] = {
    "a missing key": lambda td: td["zzz"],
    "a nested one": lambda td: td["n", "bb"],
    "a function": torch.sort,
    "a lock": lambda td: td.lock_().set("x", torch.zeros(2, 3)),
    "a shape": lambda td: td.view(7),
    "keys": lambda td: td + td.select("a"),
    "an operand": lambda td: td + "x",
}


@pytest.mark.parametrize("name", FAILING)
def test_an_error_in_compiled_code_keeps_its_text(name: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(KdError) as eager:
        FAILING[name](pair())
    with pytest.raises(Exception, match=re.escape(f"{eager.value}"[:60])):
        torch.compile(lambda td: FAILING[name](td), backend="eager", fullgraph=True)(pair())
