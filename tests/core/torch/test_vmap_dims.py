"""`vmap` maps batch dimensions of containers, whatever the rank of their leaves."""

from collections.abc import Callable

import pytest
import torch
from torch.utils import _pytree as pytree

from kd_core import InvalidValue, TensorDict, TensorDictBase, lazy_stack

X = torch.arange(6.0).reshape(2, 3)


def alike() -> TensorDict:
    return TensorDict({"a": torch.rand(2, 3, 4), "b": torch.rand(2, 3, 5)}, [2, 3])


def other_ranks() -> TensorDict:
    return TensorDict({"a": torch.rand(2, 3), "n": {"b": torch.rand(2, 3, 3, 3)}}, [2, 3])


def stacked() -> TensorDictBase:
    return lazy_stack([alike()[0], alike()[0]])


KINDS = pytest.mark.parametrize("make", [alike, other_ranks, stacked])


def double(td: TensorDictBase) -> TensorDictBase:
    return td * 2


@KINDS
@pytest.mark.parametrize(("dim", "remedy"), [(-1, "Pass 1"), (-2, "Pass 0"), (2, "Map a batch")])
def test_only_a_batch_dimension_is_mapped(
    make: Callable[[], TensorDictBase], dim: int, remedy: str
) -> None:
    message = rf"`in_dims` .* from 0 to 1 .* batch_size \(2, 3\), got {dim}\. {remedy}"
    with pytest.raises(InvalidValue, match=message):
        torch.vmap(double, in_dims=dim)(make())
    with pytest.raises(InvalidValue, match=message):
        torch.vmap(lambda td, x: td * x, in_dims=({"td": dim}, 0), chunk_size=1)({"td": make()}, X)


@KINDS
@pytest.mark.parametrize("dim", [-1, -2, 2])
def test_a_result_is_stacked_within_its_batch(make: Callable[[], TensorDictBase], dim: int) -> None:
    with pytest.raises(InvalidValue, match=rf"`out_dims` .* from 0 to 1 .* \(3,\), got {dim}"):
        torch.vmap(double, out_dims=dim)(make())
    with pytest.raises(InvalidValue, match=rf"`out_dims` .* got {dim}"):
        torch.vmap(lambda td: (td["a"], td), out_dims=(0, dim))(make())


@KINDS
@pytest.mark.parametrize("in_dim", [0, 1])
@pytest.mark.parametrize("out_dim", [0, 1])
def test_batch_dimensions_are_mapped_and_put_back(
    make: Callable[[], TensorDictBase], in_dim: int, out_dim: int
) -> None:
    td = make()
    result = torch.vmap(double, in_dims=in_dim, out_dims=out_dim)(td)
    expected = (td * 2).contiguous()
    expected = expected if in_dim == out_dim else expected.transpose(0, 1)
    assert result.batch_size == expected.batch_size
    assert (result == expected).all()


def test_dimensions_of_other_arguments_may_be_negative() -> None:
    result = torch.vmap(lambda td, x: td["a"] + x, in_dims=(1, -1), out_dims=-1)(other_ranks(), X)
    assert result.shape == (2, 3)


def test_a_tree_of_dimensions_is_checked() -> None:
    td = alike()
    dims = pytree.tree_map(lambda _: -1, td)
    with pytest.raises(InvalidValue, match="got -1"):
        torch.vmap(double, in_dims=(dims,))(td)


def test_a_container_without_batch_is_not_mapped() -> None:
    td = TensorDict({"a": torch.zeros(3)})
    with pytest.raises(InvalidValue, match=r"`None` for one of batch_size .* `auto_batch_size_`"):
        torch.vmap(double)(td)
    assert torch.vmap(lambda t, x: t["a"] * x, in_dims=(None, 0))(td, X).shape == (2, 3)


def test_dimensions_are_checked_at_each_level() -> None:
    inner = torch.vmap(double, in_dims=-1)
    with pytest.raises(InvalidValue, match=r"from 0 to 0 .* batch_size \(3,\), got -1"):
        torch.vmap(inner)(alike())
    assert torch.vmap(torch.vmap(double))(alike()).batch_size == (2, 3)


def test_a_stack_without_leaves_has_the_batch_size_of_its_container() -> None:
    stack = lazy_stack([TensorDict({}, [2, 2]) for _ in range(3)], 1)
    entries = {"a": torch.zeros(2, 3, 2), "empty": TensorDict({}, [2, 3, 2]), "stack": stack}
    got = torch.vmap(lambda td: td.reshape(6), 0, 1)(TensorDict(entries, [2, 3, 2]))
    assert got["empty"].batch_size == got["stack"].batch_size == (6, 2)
