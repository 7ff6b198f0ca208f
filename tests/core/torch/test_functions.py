"""The torch functions that stand in the table reach the method of the same name."""

from collections.abc import Callable
from operator import floordiv
from typing import Any

import pytest
import torch
from tests.core.rows import assert_rows, container, numbers
from torch import Tensor

from kd_core import InvalidArgument, TensorClass, TensorDict

BATCH = (4, 3)
ROWS: list[tuple[str, tuple[Any, ...]]] = [
    ("reshape", ((-1, 2),)),
    ("flatten", (0, 1)),
    ("unflatten", (0, (2, 2))),
    ("squeeze", ()),
    ("unsqueeze", (0,)),
    ("permute", ((1, 0),)),
    ("transpose", (0, 1)),
    ("swapaxes", (0, 1)),
    ("swapdims", (0, 1)),
    ("movedim", (0, 1)),
    ("moveaxis", (0, 1)),
    ("tile", ((2,),)),
    ("repeat_interleave", (2, 0)),
    ("roll", (1, 0)),
    ("flip", ((0,),)),
    ("narrow", (0, 1, 2)),
    ("index_select", (0, torch.tensor([2]))),
    ("masked_select", (torch.ones(4, 3, dtype=torch.bool).triu(),)),
    ("gather", (0, torch.zeros(1, 3, dtype=torch.int64))),
    ("split", (2,)),
    ("split", ([1, 3], 0)),
    ("chunk", (2, 1)),
    ("tensor_split", (3,)),
    ("unbind", (1,)),
]


@pytest.mark.parametrize(("name", "args"), ROWS)
def test_torch_moves_rows_as_on_a_tensor_of_row_numbers(name: str, args: tuple[Any, ...]) -> None:
    td, function = container(BATCH), getattr(torch, name)
    got, expected = function(td, *args), function(numbers(BATCH), *args)
    if isinstance(expected, torch.Tensor):
        got, expected = (got,), (expected,)
    for one, rows in zip(got, expected, strict=True):
        assert_rows(one, td, rows)


def test_scatter() -> None:
    td: Any = TensorDict({"a": torch.zeros(3)}, [3])
    got: Any = torch.scatter(td, 0, torch.tensor([1]), 2.0)
    assert got["a"].tolist() == [0, 2, 0]


def test_where_takes_the_container_on_either_side() -> None:
    td: Any = TensorDict({"a": torch.ones(2, 2)}, [2])
    condition = torch.tensor([True, False])
    where: Any = torch.where
    assert where(condition, td, 0.0)["a"][:, 0].tolist() == [1, 0]
    assert where(condition, 0.0, td)["a"][:, 0].tolist() == [0, 1]
    assert where(condition, td, td + 1)["a"][:, 0].tolist() == [1, 2]
    with pytest.raises(InvalidArgument, match="Pass a tensor as `condition`"):
        where(td, 0.0, 1.0)


@pytest.mark.parametrize(
    ("function", "remedy"),
    [(torch.equal, r"Write `\(a == b\)\.all\(\)`"), (torch.allclose, "testing.assert_close")],
)
def test_a_comparison_names_what_compares_containers(
    function: Callable[..., object], remedy: str
) -> None:
    td = TensorDict({"a": torch.zeros(2)}, [2])
    with pytest.raises(TypeError, match=f"is not supported for containers.*{remedy}"):
        function(td, td)
    assert (td == td.clone()).all()
    torch.testing.assert_close(td, td.clone())


@pytest.mark.parametrize("operator", [pow, floordiv])
def test_compiled_operators_with_a_tensor_on_the_left(operator: Callable[..., Any]) -> None:
    tensor, td = torch.tensor([2.0, 3.0]), TensorDict({"a": torch.tensor([2.0, 0.5])}, [2])
    made = torch.compile(lambda node: operator(tensor, node), fullgraph=True, backend="eager")(td)
    assert torch.equal(made["a"], operator(tensor, td["a"]))


class Scaled(TensorClass):
    """A class with operators of its own, as a polynomial has."""

    x: Tensor

    def __rmul__(self, factor: object) -> Any:
        return "multiplied", factor

    def __rsub__(self, other: object) -> Any:
        return "subtracted"

    def __gt__(self, other: object) -> Any:
        return "greater"


def test_operators_of_a_class_answer_with_a_tensor_on_the_left() -> None:
    tensor, made = torch.ones(2), Scaled(torch.ones(2), batch_size=[2])
    product: Any = tensor * made
    assert product[0] == "multiplied"
    assert product[1] is tensor
    answers: list[object] = [tensor - made, tensor < made, (tensor + made).x.tolist()]
    assert answers == ["subtracted", "greater", [2, 2]]
