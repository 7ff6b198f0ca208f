"""What an error of torch says about the entry."""

from collections.abc import Callable

import pytest
import torch

from kd_core import TensorDict

FAILING: list[Callable[[TensorDict], object]] = [
    lambda td: -td,
    lambda td: td - 1,
    lambda td: 1 - td,
    lambda td: td - td,
    lambda td: td - torch.tensor(1),
    lambda td: torch.nn.functional.relu(td),  # type: ignore[arg-type]  # torch types tensors alone
]


@pytest.mark.parametrize("leaves", [1, 40])
@pytest.mark.parametrize("function", FAILING)
def test_an_error_of_torch_says_for_which_entry(
    function: Callable[[TensorDict], object], leaves: int
) -> None:
    td = TensorDict({str(n): torch.zeros(2) for n in range(leaves)}, [2])
    td["next", "done"] = torch.zeros(2, 1).bool()
    with pytest.raises(RuntimeError, match=r"[Bb]ool") as caught:
        function(td)
    assert caught.value.__notes__ == [
        "This is entry `('next', 'done')` of shape (2, 1) and torch.bool."
    ]
