"""The overview of `tensordict.nn` runs with other imports: modules, functional, ensembles."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from kd_core import TensorDict, stack
from kd_nn import (
    EnsembleModule,
    NormalParamWrapper,
    TensorDictModule,
    TensorDictSequential,
    get_functional,
    is_functional,
    make_functional,
    repopulate_module,
)
from kd_probabilistic import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential


class Net(nn.Module):
    def __init__(self, input_size: int = 100, hidden_size: int = 50, output_size: int = 10) -> None:
        super().__init__()
        self.fc1 = nn.Linear(input_size, hidden_size)
        self.fc2 = nn.Linear(hidden_size, output_size)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(torch.relu(self.fc1(x)))
        return result


class Masker(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(x * mask, dim=1)


def masked() -> TensorDictSequential:
    net = TensorDictModule(Net(), in_keys=[("input", "x")], out_keys=[("intermediate", "x")])
    masker = TensorDictModule(
        Masker(),
        in_keys=[("intermediate", "x"), ("input", "mask")],
        out_keys=[("output", "probabilities")],
    )
    return TensorDictSequential(net, masker)


def batch() -> TensorDict:
    values = {"x": torch.rand(32, 100), "mask": torch.randint(2, size=(32, 10))}
    return TensorDict({"input": TensorDict(values, batch_size=[32])}, batch_size=[32])


# Of torch, about the layout of the batch.
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_module_of_two_inputs() -> None:
    module = TensorDictModule(
        nn.Transformer(), in_keys=["feature", "target"], out_keys=["prediction"]
    )
    data = TensorDict(
        {"feature": torch.randn(10, 11, 512), "target": torch.randn(10, 11, 512)}, [10, 11]
    )
    data = module(data)
    assert {key: data[key].shape for key in ("feature", "prediction", "target")} == dict.fromkeys(
        ("feature", "prediction", "target"), (10, 11, 512)
    )
    assert data.batch_size == (10, 11)


def test_sequence_of_nested_keys() -> None:
    td = masked()(batch())
    assert list(td.keys(True, True)) == [
        ("input", "x"),
        ("input", "mask"),
        ("intermediate", "x"),
        ("output", "probabilities"),
    ]
    assert td["intermediate", "x"].shape == td["output", "probabilities"].shape == (32, 10)
    assert td.get("output", TensorDict()).batch_size == (32,)  # type: ignore[union-attr]  # a container


def test_part_of_a_sequence_computes_no_more() -> None:
    sub_module = masked().select_subsequence(out_keys=[("intermediate", "x")])
    td = batch()
    sub_module(td)
    assert list(td.keys()) == ["input", "intermediate"]


def test_actor_of_a_recurrent_network() -> None:
    td = TensorDict({"input": torch.randn(3, 4), "hidden": torch.randn(3, 8)}, [3])
    module = TensorDictModule(
        NormalParamWrapper(nn.GRUCell(4, 8)), in_keys=["input", "hidden"], out_keys=["loc", "scale"]
    )
    prob_module = ProbabilisticTensorDictModule(
        in_keys=["loc", "scale"],
        out_keys=["sample"],
        distribution_class=Normal,
        return_log_prob=True,
    )
    ProbabilisticTensorDictSequential(module, prob_module)(td)
    assert td["loc"].shape == td["scale"].shape == td["sample"].shape == (3, 4)
    assert "sample_log_prob" in td


@pytest.mark.parametrize("made_from", ["call", "names", "state_dict"])
def test_functional_model(made_from: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    named: dict[str, object] = dict(model.named_parameters())
    state: dict[str, object] = dict(model.state_dict())
    params = make_functional(model)
    if made_from != "call":
        entries = named if made_from == "names" else state
        params = TensorDict(entries, []).unflatten_keys(".")
    x = torch.randn(10, 3)
    out = model(x, params=params)
    intermediate = model[0](x, params["0"])
    out2 = model[1](intermediate, params["1"])
    torch.testing.assert_close(out, out2)
    stacked = stack([params, params + 1])
    outputs = torch.vmap(model, (None, 0))(x, stacked)
    torch.testing.assert_close(outputs[0], out)


def test_functional_keyed_model_takes_parameters_in_both_ways() -> None:
    model = masked()
    params = make_functional(model)
    assert is_functional(model)
    td = batch()
    by_place = model(td.copy(), params)["output", "probabilities"]
    torch.testing.assert_close(model(td.copy(), params=params)["output", "probabilities"], by_place)
    repopulate_module(model, params)
    torch.testing.assert_close(model(td.copy())["output", "probabilities"], by_place)


def test_stateful_functional_model_takes_parameters_by_keyword() -> None:
    model = get_functional(masked())
    params = TensorDict.from_module(model).detach().clone().zero_()
    probabilities = model(batch(), params=params)["output", "probabilities"]
    torch.testing.assert_close(probabilities, torch.full((32, 10), 0.1))
    assert (model(batch())["output", "probabilities"] != probabilities).any()


def test_ensemble_of_three() -> None:
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    mod = TensorDictModule(net, in_keys=["a"], out_keys=["b"])
    ensemble = EnsembleModule(mod, num_copies=3)
    data = ensemble(TensorDict({"a": torch.randn(10, 4)}, batch_size=[10]))
    assert (data["a"].shape, data["b"].shape) == ((3, 10, 4), (3, 10, 2))
    assert data.batch_size == (3, 10)
