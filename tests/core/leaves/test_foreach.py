from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from kd_core import TensorDict
from kd_core._leaves.foreach import are_apart, clone_leaves

Call = Callable[[TensorDict], TensorDict]


def test_integers_beside_many_leaves_that_need_gradients() -> None:
    leaves = {f"p{i}": torch.ones(2, requires_grad=True) for i in range(9)}
    td = TensorDict({**leaves, "count": torch.tensor([1, 2])}, [2])
    assert td.clone()["count"].tolist() == [1, 2]
    assert (td + 1)["count"].tolist() == [2, 3]
    (slope,) = torch.autograd.grad((td * 3)["p4"].sum(), leaves["p4"])
    assert slope.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    "call",
    [
        lambda td: td.exp(),
        lambda td: td.clone(),
        lambda td: td * 2,
        lambda td: td + td,
        lambda td: (td * 1).mul_(3),
        lambda td: td.clone().add_(td),
    ],
    ids=["exp", "clone", "mul", "add", "mul_", "add_"],
)
def test_only_what_comes_of_leaves_that_need_gradients_needs_them(call: Call) -> None:
    leaves = {f"p{i}": torch.ones(2, requires_grad=True) for i in range(9)}
    result = call(TensorDict({**leaves, "fixed": torch.ones(2)}, [2]))
    assert result["p0"].requires_grad
    assert not result["fixed"].requires_grad


def part(rng: Random, buffer: Tensor) -> Tensor:
    """Return a random view of a vector."""
    start, step = rng.randrange(20), rng.choice((1, 1, 2))
    view = buffer[start : start + rng.randrange(12) : step]
    return view.view(2, -1).T if len(view) % 2 == 0 and len(view) and rng.random() < 0.3 else view


def test_leaves_that_a_gpu_may_write_at_once_have_no_element_in_common() -> None:
    rng, seen = Random(0), set()
    for _ in range(2000):
        buffer = torch.arange(32)
        leaves = [part(rng, buffer) for _ in range(rng.randrange(1, 4))]
        operands = [part(rng, buffer) for _ in leaves] if rng.random() < 0.5 else []
        taken = [set(leaf.flatten().tolist()) for leaf in leaves]
        read = [set(each.flatten().tolist()) for each in operands]
        clash = any(
            taken[i] & other[j]
            for other in (taken, read)
            for i in range(len(taken))
            for j in range(len(other))
            if i != j
        )
        apart = are_apart(leaves, operands)
        assert not (apart and clash)
        seen.add((apart, clash))
        if all(leaf.is_contiguous() and leaf.numel() for leaf in [*leaves, *operands]):
            assert apart is not clash
    assert {(True, False), (False, True)} <= seen


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda leaf: leaf,
    "transposed": lambda leaf: leaf.T,
    "expanded": lambda leaf: leaf[:1].expand(2, 3),
    "conjugated": lambda leaf: leaf.conj(),
    "negated": lambda leaf: leaf.conj().imag,
}
LAYOUTS_OF_DTYPES = [
    *((name, torch.complex64) for name in LAYOUTS),
    *(
        (name, dtype)
        for name in list(LAYOUTS)[:3]
        for dtype in (torch.bool, torch.uint16, torch.uint64, torch.bfloat16, torch.float8_e5m2)
    ),
]


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS_OF_DTYPES)
def test_clones_are_those_of_torch(layout: str, dtype: torch.dtype) -> None:
    leaf = LAYOUTS[layout](torch.arange(6).reshape(2, 3).to(dtype))
    expected = leaf.clone()
    for made in clone_leaves([leaf, leaf]):
        assert (made.dtype, made.stride()) == (expected.dtype, expected.stride())
        assert (made.is_conj(), made.is_neg()) == (expected.is_conj(), expected.is_neg())
        assert made.tolist() == leaf.tolist()
        assert made.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr()


# What a fake tensor says of the strides of an expanded one is not what torch makes of it.
@pytest.mark.parametrize(
    ("layout", "dtype"), [each for each in LAYOUTS_OF_DTYPES if each[0] != "expanded"]
)
@pytest.mark.parametrize("refused", [False, True])
def test_clones_on_a_gpu_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, layout: str, dtype: torch.dtype, refused: bool
) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError('"foreach_tensor_copy" not implemented for this dtype')

    with FakeTensorMode():
        leaf = LAYOUTS[layout](torch.empty(2, 3, dtype=dtype, device="cuda"))
        expected = leaf.clone()
        if refused:
            monkeypatch.setattr(torch, "_foreach_copy_", refuse)
        for made in clone_leaves([leaf, leaf]):
            assert made.is_cuda
            assert (made.dtype, made.stride()) == (expected.dtype, expected.stride())
            assert (made.is_conj(), made.is_neg()) == (expected.is_conj(), expected.is_neg())
