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
from kd_nn import EnsembleModule, NormalParamExtractor, TensorDictModule, TensorDictSequential
from kd_probabilistic import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential


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


def advantages(td: TensorDict, gamma: float = 0.99, decay: float = 0.95) -> TensorDict:
    found = torch.zeros_like(td["reward"])
    last = torch.zeros_like(found[-1])
    for step in reversed(range(len(td))):
        row = td[step]
        goes_on = 1.0 - row["next", "done"].float()
        error = row["reward"] + gamma * goes_on * row["next", "value"] - row["value"]
        last = error + gamma * decay * goes_on * last
        found[step] = last
    return td.set("advantage", found).set("return", found + td["value"])


def test_advantages_are_estimated_backwards() -> None:
    after = {"value": torch.ones(5, 2), "done": torch.zeros(5, 2, dtype=torch.bool)}
    td = TensorDict({"reward": torch.ones(5, 2), "value": torch.ones(5, 2), "next": after}, [5, 2])
    flat = advantages(td).reshape(-1)
    normal = [
        (part["advantage"] - part["advantage"].mean()) / (part["advantage"].std() + 1e-8)
        for part in flat[torch.randperm(len(flat))].split(5)
    ]
    assert torch.cat(normal).shape == (10,)
    assert float(flat["return"].max()) > 1


def test_a_policy_is_scored_by_the_ratio_of_its_densities() -> None:
    net = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(net, in_keys=["obs"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=torch.distributions.Normal,
            return_log_prob=True,
        ),
    )
    out = actor(TensorDict({"obs": torch.ones(4, 3)}, [4]))
    dist = actor.get_dist(out)
    ratio = (dist.log_prob(out["action"]) - out["action_log_prob"]).exp()
    loss = -(ratio.clamp(0.8, 1.2) * torch.ones(4, 2)).mean() - 0.01 * dist.entropy().mean()
    torch.autograd.backward(loss)
    assert ratio.detach().allclose(torch.ones(4, 2))


def test_an_ensemble_is_trained_and_its_minimum_taken() -> None:
    critic = TensorDictModule(nn.Linear(6, 1), in_keys=["obs"], out_keys=["q"])
    ensemble = EnsembleModule(critic, num_copies=5)
    optimizer = torch.optim.SGD(ensemble.parameters(), lr=0.1)
    out = ensemble(TensorDict({"obs": torch.ones(7, 6)}, [7]))
    torch.autograd.backward(out["q"].square().mean())
    optimizer.step()
    assert out["q"].min(0).values.shape == (7, 1)


def test_a_sequence_is_trained_and_a_part_of_it_run() -> None:
    model = TensorDictSequential(
        TensorDictModule(nn.Linear(4, 8), in_keys=["x"], out_keys=["h"]),
        TensorDictModule(torch.relu, in_keys=["h"], out_keys=["h"]),
        TensorDictModule(nn.Linear(8, 2), in_keys=["h"], out_keys=["logits"]),
    )
    data = TensorDict({"x": torch.ones(64, 4), "y": torch.ones(64, dtype=torch.long)}, [64])
    for batch in data.split(16):
        out = model(batch.clone(recurse=False))
        torch.autograd.backward(nn.functional.cross_entropy(out["logits"], out["y"]))
    correct = (model(data)["logits"].argmax(-1) == data["y"]).float().mean()
    hidden, logits = model[:2](x=torch.ones(2, 4)), model(x=torch.ones(2, 4))[-1]
    assert 0 <= correct.item() <= 1
    assert hidden is not None
    assert logits.shape == (2, 2)


def test_parameters_are_mapped_over() -> None:
    net = nn.Linear(3, 1)
    many = stack([TensorDict.from_module(net).data.clone() for _ in range(4)])

    def loss(params: TensorDict, x: Tensor) -> Tensor:
        with params.to_module(net):
            out: Tensor = net(x)
        return out.square().mean()

    x = torch.ones(10, 3)
    slope: TensorDict = torch.func.grad(loss)(many[0], x)
    after = many[0] - 0.1 * slope
    assert torch.vmap(loss, (0, None))(many, x).shape == (4,)
    assert loss(after, x).item() <= loss(many[0], x).item()
