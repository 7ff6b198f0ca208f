"""Programs as users write them, which mypy and pyright take without an error."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, random_split

from kd_core import (
    NestedKey,
    TensorClass,
    TensorDict,
    TensorDictBase,
    cat,
    group_by,
    lazy_stack,
    stack,
)
from kd_nn import TensorDictModule


class Observation(TensorClass):
    image: Tensor
    state: Tensor


class Buffer:
    """Rows of the newest steps."""

    def __init__(self, size: int) -> None:
        self.size, self.rows = size, 0
        self.storage: TensorDict | None = None

    def extend(self, td: TensorDict) -> None:
        if self.storage is None:
            self.storage = td[:1].new_zeros(self.size)
        self.storage[self.rows : self.rows + len(td)] = td
        self.rows += len(td)

    def sample(self, count: int) -> TensorDict:
        assert self.storage is not None
        return self.storage[torch.randint(self.rows, (count,))]


def collect(policy: nn.Module, steps: int) -> TensorDict:
    rows: list[TensorDict] = []
    td = TensorDict({"obs": torch.zeros(4, 3)}, [4])
    for _ in range(steps):
        action = policy(td["obs"])
        after = {"obs": td["obs"] + 1, "reward": torch.ones(4)}
        rows.append(TensorDict({"obs": td["obs"], "action": action, "next": after}, [4]))
        td = rows[-1].nested("next", TensorDict).select("obs")
    return stack(rows, 1)


def test_a_rollout_is_collected_and_stored() -> None:
    rollout = collect(nn.Linear(3, 2), 5)
    buffer = Buffer(30)
    for row in rollout.reshape(-1).split(7):
        buffer.extend(row)
    batch = buffer.sample(8)
    reward = batch["next", "reward"]
    target = reward + 0.9 * batch["next", "obs"].mean(-1)
    assert target.shape == (8,)


def test_keys_without_nested_ones_are_strings() -> None:
    td = TensorDict({"a": torch.ones(3), "b": torch.ones(3)}, [3])
    norms: dict[str, float] = {key: value.norm().item() for key, value in td.items()}
    plain: dict[str, Tensor] = dict(td.items())
    names: list[str] = [key.upper() for key in td.keys()]  # noqa: SIM118  # as users write it
    for key in td.keys():  # noqa: SIM118  # as above
        td[key] = td[key] * 2
    assert names == ["A", "B"]
    assert norms.keys() == plain.keys()


def test_nested_keys_are_written_back() -> None:
    td = TensorDict({"a": torch.ones(3), "n": {"b": torch.ones(3)}}, [3])
    seen: list[NestedKey] = []
    for key in list(td.keys(True, True)):
        td[key] = td[key] * 2
        seen.append(key)
    totals = {key: value.sum() for key, value in td.items(True, True)}
    assert list(totals) == seen == ["a", ("n", "b")]


def test_a_nested_container_is_changed() -> None:
    td = TensorDict({"next": {"obs": torch.ones(3), "done": torch.zeros(3)}}, [3])
    after = td.nested("next", TensorDict)
    after["obs"] = torch.zeros(3)
    after.update({"reward": torch.ones(3)}).del_("done")
    td["next", "value"] = torch.ones(3)
    assert [*after.keys()] == ["obs", "reward", "value"]
    assert "obs" in td.nested("next", TensorDict)


def encode(obs: Observation) -> Tensor:
    return torch.cat([obs.image.flatten(1), obs.state], -1)


def test_a_declared_container_is_nested_and_stacked() -> None:
    rows = [Observation(torch.zeros(2, 2), torch.ones(3)) for _ in range(4)]
    batch = stack(rows)
    td = TensorDict({"obs": batch, "reward": torch.zeros(4)}, [4])
    assert encode(td.nested("obs", Observation)).shape == (4, 7)
    assert cat([batch, batch]).image.shape == (8, 2, 2)


def train(model: nn.Module, data: TensorDict, optimizer: torch.optim.Optimizer) -> list[float]:
    losses: list[float] = []
    for batch in data.split(4):
        loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_model_is_trained_on_parts_of_the_data() -> None:
    model = nn.Linear(2, 1)
    data = TensorDict({"x": torch.ones(8, 2), "y": torch.ones(8, 1)}, [8])
    assert len(train(model, data, torch.optim.SGD(model.parameters()))) == 2


def follow(target: TensorDict, params: TensorDict, rate: float) -> TensorDict:
    return target.lerp_(params, rate)


def test_parameters_follow_others_and_are_swapped_in() -> None:
    model = nn.Linear(2, 1)
    params = TensorDict.from_module(model)
    target = params.data.clone()
    follow(target, params.data, 0.1)
    with target.to_module(model):
        out: Tensor = model(torch.ones(1, 2))
    gradients = params.apply(lambda leaf: torch.zeros_like(leaf) if leaf.grad is None else leaf)
    assert out.shape == (1, 1)
    assert gradients.keys() == params.keys()


def collate(rows: list[dict[str, Tensor | str]]) -> TensorDict:
    ragged = lazy_stack([TensorDict(row) for row in rows])
    lengths = [len(ids) for ids in ragged.get("ids", as_list=True)]
    padded = ragged.get("ids", as_padded_tensor=True)
    prompts = cast("list[str]", ragged.get_non_tensor("prompt"))
    return TensorDict({"ids": padded, "length": lengths, "prompt": prompts}, [len(rows)])


def test_ragged_rows_with_text_are_collated() -> None:
    rows: list[dict[str, Tensor | str]] = [
        {"ids": torch.arange(n), "prompt": "to be"} for n in (2, 3)
    ]
    batch = collate(rows)
    assert batch["ids"].shape == (2, 3)
    assert batch.get_non_tensor("prompt") == ["to be", "to be"]


def standardised(td: TensorDict) -> TensorDict:
    mean, std = td.mean(0), td.std(0)
    return (td - mean) / (std + 1e-6)


def test_statistics_are_containers_and_sums_of_all_leaves_tensors() -> None:
    td = TensorDict({"a": torch.arange(4.0), "b": torch.ones(4, 2)}, [4])
    total: Tensor = standardised(td).sum(reduce=True)
    best: TensorDict = td.max(0).values
    renamed: TensorDict = td.named_apply(lambda key, leaf: leaf * 2 if key == "a" else leaf)
    assert total.ndim == best["a"].ndim == 0
    assert renamed["a"][1] == 2


def on(td: TensorDictBase, device: str | None) -> TensorDictBase:
    return td.contiguous() if device is None else td.to(device).to(torch.float64)


def test_a_function_of_any_kind_is_typed_by_the_base() -> None:
    td = TensorDict({"a": torch.ones(2)}, [2])
    state: dict[str, object] = on(td, "cpu").to_dict()
    assert isinstance(on(lazy_stack([td, td]), None), TensorDictBase)
    assert list(state) == ["a"]


def test_a_container_is_a_dataset() -> None:
    td = TensorDict({"a": torch.arange(8.0)}, [8])
    train, held_out = random_split(td, [6, 2])
    both: ConcatDataset[TensorDict] = ConcatDataset([td, td])
    as_it_is = lambda batch: batch  # noqa: E731  # as users write it
    seen = [batch["a"].sum().item() for batch in DataLoader(td, 4, collate_fn=as_it_is)]
    rows = DataLoader(train, batch_size=3, collate_fn=as_it_is)
    assert seen == [6.0, 22.0]
    assert sum(len(batch) for batch in rows) == 6
    assert (len(held_out), len(both)) == (2, 16)
    assert (td + td)["a"][1] == 2


def test_outputs_of_a_module_take_part_in_arithmetic() -> None:
    model = TensorDictModule(nn.Linear(3, 1), in_keys=["x"], out_keys=["y"])
    loss = (model(x=torch.ones(2, 3)) + 1).square().mean()
    two = TensorDictModule(lambda x: (x, x + 1), in_keys=["x"], out_keys=["y", "z"])
    y, z = two(x=torch.ones(2))
    assert loss.ndim == 0
    assert (z - y).tolist() == [1, 1]


def test_rows_are_grouped() -> None:
    td = TensorDict({"a": torch.tensor([0, 1, 0]), "b": torch.arange(3.0)}, [3])
    values, groups = group_by(td, "a")
    sums = {
        int(value): group["b"].sum().item() for value, group in zip(values, groups, strict=True)
    }
    assert sums == {0: 2.0, 1: 1.0}
