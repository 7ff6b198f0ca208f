"""`assign_levels` stores what `assign` stores, and refuses what it refuses."""

from collections.abc import Callable
from random import Random
from typing import cast

import pytest
import torch

from kd_core import KdError, NestedKey, TensorClass, TensorDict, TensorDictBase, lazy_stack
from kd_core.extending import assign_levels


class Typed(TensorClass):
    x: torch.Tensor


def value_of(rng: Random) -> object:
    shapes = [(3,), (3, 2), (3, 0), (3, 2, 2)]
    wrong: list[object] = [torch.zeros(2), torch.zeros(()), "text", None, 1.0]
    kinds: list[object] = [
        torch.nn.Parameter(torch.zeros(3)),
        TensorDict({"deep": torch.ones(3)}, [3]),
        {"deep": torch.ones(3)},
        torch.nested.nested_tensor([torch.ones(n) for n in (1, 2, 3)], layout=torch.jagged),
    ]
    pick = rng.random()
    if pick < 0.75:
        return torch.full(rng.choice(shapes), rng.random())
    return rng.choice(wrong if pick < 0.85 else kinds)


def start_of(rng: Random) -> TensorDictBase:
    first: dict[str, object] = {"x": torch.zeros(3), "n": {"x": torch.zeros(3)}}
    kinds: list[Callable[[], TensorDictBase]] = [
        lambda: TensorDict({}, [3]),
        lambda: TensorDict(first, [3]),
        lambda: TensorDict({"n": torch.zeros(3)}, [3]),
        lambda: TensorDict({"n": "text"}, [3]),
        lambda: TensorDict({"n": TensorDict({"x": torch.zeros(3, 2)}, [3, 2])}, [3]),
        lambda: TensorDict({"n": Typed(x=torch.zeros(3), batch_size=[3])}, [3]),
        lambda: TensorDict({"n": lazy_stack([TensorDict(x=1.0)] * 3)}, [3]),
        lambda: TensorDict(first, [3], lock=True),
        lambda: TensorDict({"n": TensorDict({}, [3]).lock_()}, [3]),
        lambda: TensorDict(first, [3], names=["rows"]),
        lambda: TensorDict(first, [3], device="cpu"),
        lambda: TensorDict({}, [3, 2]),
        lambda: TensorDict({}),
        lambda: lazy_stack([TensorDict(first | {"x": 1.0, "n": {"x": 1.0}}) for _ in range(3)]),
        lambda: Typed(x=torch.zeros(3), batch_size=[3]),
    ]
    return rng.choice(kinds)()


def outcome(td: TensorDictBase, store: Callable[[], object]) -> tuple[object, object]:
    try:
        store()
        error: object = None
    except KdError as raised:
        error = type(raised), str(raised)
    leaves = {key: td.get(key) for key in td.keys(True, is_leaf=lambda kind: True)}
    return error, [(key, type(leaf), repr(leaf)) for key, leaf in leaves.items()]


@pytest.mark.parametrize("seed", range(400))
def test_levels_are_stored_as_by_path(seed: int) -> None:
    rng = Random(seed)
    entries: dict[str, object] = {}
    for key in rng.sample(["a", "n", "x", "m"], rng.randint(1, 4)):
        names = rng.sample(["x", "y", "z"], rng.randint(1, 3))
        below = key in {"n", "m"}
        entries[key] = {name: value_of(rng) for name in names} if below else value_of(rng)
    levels = tuple(key for key in entries if key in {"n", "m"})
    paths: dict[NestedKey, object] = {}
    for key, given in entries.items():
        parts = cast("dict[str, object]", given) if key in levels else {}
        paths.update({(key, name): each for name, each in parts.items()} if parts else {key: given})
    mark = rng.random()
    one, other = start_of(Random(mark)), start_of(Random(mark))
    want = outcome(one, lambda: one.assign(paths))
    assert outcome(other, lambda: assign_levels(other, entries, levels)) == want


def test_a_level_that_is_made_is_a_container_of_the_same_batch() -> None:
    td = TensorDict({}, [3])
    leaf = torch.ones(3)
    assign_levels(td, {"n": {"x": leaf}}, ("n",))
    below = td.nested("n", TensorDict)
    assert below["x"] is leaf
    assert below.batch_size == (3,)
    td.lock_()
    assert below.is_locked


def test_nothing_is_stored_if_one_value_does_not_fit() -> None:
    td = TensorDict({"n": {"x": torch.zeros(3)}}, [3])
    with pytest.raises(KdError, match=r"entry `\('n', 'y'\)`"):
        assign_levels(
            td, {"a": torch.ones(3), "n": {"x": torch.ones(3), "y": torch.ones(2)}}, ("n",)
        )
    assert td.to_dict().keys() == {"n"}
    assert td["n", "x"].tolist() == [0, 0, 0]
