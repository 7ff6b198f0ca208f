"""Arguments that are cached: what was called before changes nothing."""

from collections.abc import Callable
from typing import cast

import pytest
import torch

from kd_core import TensorDict, cat, pad, stack

CALLS: dict[str, Callable[[TensorDict, int], object]] = {
    "batch_size": lambda td, n: TensorDict({}, [n]),
    "batch_size, tuple": lambda td, n: TensorDict({}, (2, n)),
    "reshape": lambda td, n: td.reshape(n, 4),
    "view": lambda td, n: td.view((4, n)),
    "flatten": lambda td, n: td.flatten(0, n),
    "unflatten": lambda td, n: td.unflatten(0, (n, 2)),
    "squeeze": lambda td, n: td.squeeze(n),
    "unsqueeze": lambda td, n: td.unsqueeze(n),
    "permute": lambda td, n: td.permute(n, 0),
    "transpose": lambda td, n: td.transpose(n, 0),
    "movedim": lambda td, n: td.movedim(0, n),
    "expand": lambda td, n: td.expand(n, 2, 2),
    "repeat": lambda td, n: td.repeat(n, 2),
    "tile": lambda td, n: td.tile(n),
    "repeat_interleave": lambda td, n: td.repeat_interleave(n, 0),
    "roll": lambda td, n: td.roll(n, 0),
    "roll, dims": lambda td, n: td.roll((1, 1), (0, n)),
    "flip": lambda td, n: td.flip(n),
    "split": lambda td, n: td.split(n),
    "split, dim": lambda td, n: td.split(2, n),
    "split, sizes": lambda td, n: td.split([n, 1]),
    "chunk": lambda td, n: td.chunk(n),
    "tensor_split": lambda td, n: td.tensor_split(n),
    "unbind": lambda td, n: td.unbind(n),
    "narrow": lambda td, n: td.narrow(0, n, 1),
    "index_select": lambda td, n: td.index_select(n, torch.tensor([0])),
    "new_zeros": lambda td, n: td.new_zeros(n),
    "sum": lambda td, n: td.sum(n),
    "sum, two": lambda td, n: td.sum((0, n)),
    "amax, kept": lambda td, n: td.amax(n, keepdim=True),
    "max": lambda td, n: td.max(n),
    "cumsum": lambda td, n: td.cumsum(n),
    "stack": lambda td, n: stack([td, td], n),
    "cat": lambda td, n: cat([td, td], n),
    "pad": lambda td, n: pad(td, [n, 0]),
}


def make() -> TensorDict:
    return TensorDict({"a": torch.arange(8.0).reshape(2, 2, 2)}, [2, 2])


def leaves(result: object) -> list[object]:
    """The batch sizes and values of what a call gave."""
    parts = result if isinstance(result, tuple) else (result,)
    found: list[object] = []
    for part in parts:
        found += [tuple(part.batch_size), [leaf.tolist() for leaf in part.values(True, True)]]
    return found


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", [1.0, True, torch.tensor(1.0), torch.tensor(True)])
def test_a_value_equal_to_a_remembered_integer_is_refused(name: str, value: object) -> None:
    CALLS[name](make(), 1)
    with pytest.raises(TypeError, match="integer"):
        CALLS[name](make(), value)  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize("name", CALLS)
def test_integers_of_numpy_and_tensors_are_integers(name: str) -> None:
    numpy = pytest.importorskip("numpy")
    for value in (numpy.int64(1), torch.tensor(1)):
        assert leaves(CALLS[name](make(), cast("int", value))) == leaves(CALLS[name](make(), 1))


@pytest.mark.parametrize(("first", "second"), [(0.0, -0.0), (-0.0, 0.0), (1, True)])
def test_padding_is_the_value_given_not_an_equal_one(first: float, second: float) -> None:
    pad(make(), [1, 0], first)
    padded = pad(make(), [1, 0], second)["a"][0]
    torch.testing.assert_close(padded.signbit(), torch.full((2, 2), second).signbit())


@pytest.mark.parametrize("bound", [1.5, "a"])
def test_slices_hold_integers(bound: float) -> None:
    with pytest.raises(TypeError, match="expected an integer, got"):
        make()[:bound]
