import copy
import operator
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn

from kd_core import InvalidArgument, TensorDict
from kd_nn import EnsembleModule, TensorDictModule, TensorDictSequential

X = torch.linspace(-1, 1, 40).view(10, 4)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))


def keyed() -> TensorDictModule:
    return TensorDictModule(net(), in_keys=["a"], out_keys=["b"])


def one(module: EnsembleModule, **values: Tensor) -> Tensor:
    output = module(**values)
    assert isinstance(output, Tensor)
    return output


def test_seed_example_of_an_ensemble() -> None:
    ensemble = EnsembleModule(keyed(), num_copies=3)
    source = TensorDict({"a": torch.randn(10, 4)}, batch_size=[10])
    data = ensemble(source)
    assert data.batch_size == (3, 10)
    assert data["a"].shape == (3, 10, 4)
    assert data["b"].shape == (3, 10, 2)
    assert "b" not in source.keys()  # noqa: SIM118 - iterating a container gives rows


def test_each_copy_computes_with_its_own_part() -> None:
    ensemble = EnsembleModule(keyed(), 3)
    output = one(ensemble, a=X)
    single = net()
    for idx in range(3):
        part = {
            name.removeprefix("module."): value[idx]
            for name, value in ensemble.params.state_dict().items()
        }
        single.load_state_dict(part)
        torch.testing.assert_close(output[idx], single(X))
    assert not torch.equal(output[0], output[1])


def test_only_stacked_parameters_are_parameters() -> None:
    module = keyed()
    ensemble = EnsembleModule(module, 3)
    shapes = {name: tuple(p.shape) for name, p in ensemble.named_parameters()}
    assert shapes["params.module.0.weight"] == (3, 32, 4)
    assert len(shapes) == len(list(module.parameters()))
    one(ensemble, a=X).sum().backward()
    assert all(p.grad is not None for p in ensemble.parameters())
    assert all(p.grad is None for p in module.parameters())


def test_the_parameters_of_a_copy_go_into_what_computes() -> None:
    ensemble = EnsembleModule(TensorDictModule(nn.Linear(3, 2), ["x"], ["y"]), 4)
    x = torch.ones(5, 3)
    whole = ensemble(TensorDict({"x": x}, [5]))["y"]
    for number in range(4):
        with ensemble.params_td[number].to_module(ensemble.module):
            alone = ensemble.module(TensorDict({"x": x}, [5]))["y"]
            torch.testing.assert_close(alone, whole[number])
    assert not any(name.startswith("module") for name in ensemble.state_dict())
    assert len([*ensemble.parameters()]) == 2


def test_weights_that_a_module_shares_are_shared_in_each_copy() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    ensemble = EnsembleModule(TensorDictModule(tied, ["a"], ["b"]), 2)
    assert len(list(ensemble.parameters())) == 3
    one(ensemble, a=X).sum().backward()
    assert all(p.grad is not None for p in ensemble.parameters())


def test_copies_of_a_recurrent_layer_run_one_by_one() -> None:
    recurrent = TensorDictModule(nn.GRU(4, 3), ["a"], ["b", "h"])
    ensemble = EnsembleModule(recurrent, 2)
    out, last = ensemble(a=X)
    assert (out.shape, last.shape) == ((2, 10, 3), (2, 1, 3))
    with ensemble.params[1].to_module(recurrent):
        assert torch.equal(recurrent(a=X)[0], out[1])


def test_plain_module_is_called_by_position_and_keyword() -> None:
    ensemble = EnsembleModule(net(), 3)
    assert ensemble.in_keys == ["input"]
    by_position = ensemble(X)
    assert isinstance(by_position, Tensor)
    assert torch.equal(one(ensemble, input=X), by_position)


def test_second_ensemble_takes_one_part_per_copy() -> None:
    first = EnsembleModule(keyed(), 3)
    second = EnsembleModule(TensorDictModule(nn.Linear(2, 1), ["b"], ["c"]), 3, expand_input=False)
    sequence = TensorDictSequential(first, second)
    data = sequence(TensorDict({"a": X}, [10]))
    assert data["c"].shape == (3, 10, 1)
    torch.testing.assert_close(data["c"], one(second, b=one(first, a=X)))


def test_dropout_differs_between_copies_and_follows_the_mode() -> None:
    torch.manual_seed(0)
    ensemble = EnsembleModule(nn.Dropout(0.5), 2)
    output = one(ensemble, input=torch.ones(50))
    assert not torch.equal(output[0], output[1])
    assert torch.equal(one(ensemble.eval(), input=torch.ones(50)), torch.ones(2, 50))


def test_batch_statistics_belong_to_each_copy() -> None:
    ensemble = EnsembleModule(nn.BatchNorm1d(4), 2, expand_input=False)
    x = torch.stack([X, X + 10])
    one(ensemble, input=x)
    mean = dict(ensemble.named_buffers())["params.module.running_mean"]
    torch.testing.assert_close(mean, 0.1 * x.mean(1))


def test_part_that_cannot_be_drawn_again_is_reported() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    with pytest.warns(UserWarning, match=r"equal values in `module.0`. Define `reset_parameters`"):
        EnsembleModule(nn.Sequential(Scale()), 2)


def test_reset_draws_new_values_for_each_copy() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    ensemble = EnsembleModule(TensorDictModule(network, ["x"], ["y"]), 2)
    ensemble(x=X)
    before = {name: value.clone() for name, value in ensemble.state_dict().items()}
    parameters = list(ensemble.parameters())
    TensorDictSequential(ensemble).reset_parameters_recursive()
    state = ensemble.state_dict()
    weight = state["params.module.0.weight"]
    assert not bool((weight == before["params.module.0.weight"]).any())
    assert not torch.equal(weight[0], weight[1])
    assert state["params.module.1.num_batches_tracked"].tolist() == [0, 0]
    assert all(map(operator.is_, parameters, ensemble.parameters()))


def test_reset_of_a_container_leaves_the_ensemble_alone() -> None:
    ensemble = EnsembleModule(TensorDictModule(nn.Linear(4, 1), ["x"], ["y"]), 2)
    before = [parameter.clone() for parameter in ensemble.parameters()]
    given = TensorDict.from_module(ensemble).detach().clone().zero_()
    ensemble.reset_parameters_recursive(given)
    assert bool((given["params", "module", "weight"] != 0).all())
    assert all(map(torch.equal, before, ensemble.parameters()))


def test_ensemble_of_ensembles_draws_all_copies() -> None:
    inner = EnsembleModule(TensorDictModule(nn.Linear(4, 1), ["x"], ["y"]), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outer = EnsembleModule(inner, 3)
    assert len(set(one(outer, x=X[:1]).flatten().tolist())) == 6


def test_selected_outputs_are_returned() -> None:
    both = TensorDictModule(lambda x: (x + 1, x - 1), ["x"], ["up", "down"])
    ensemble = EnsembleModule(both, 2).select_out_keys("down")
    assert torch.equal(one(ensemble, x=X)[1], X - 1)
    assert "up" not in set(ensemble(TensorDict({"x": X}, [10])).keys())


def test_input_without_one_part_per_copy_is_told() -> None:
    ensemble = EnsembleModule(keyed(), 3, expand_input=False)
    with pytest.raises(ValueError, match=r"first dimension of `a` must be 3.* got shape \(10, 4\)"):
        ensemble(a=X)


def test_no_copy_is_an_error() -> None:
    with pytest.raises(ValueError, match="`num_copies` must be a positive int, got 0"):
        EnsembleModule(keyed(), 0)


@pytest.mark.parametrize("number", [2.0, True, "2", None])
def test_number_of_copies_that_is_not_an_int_is_told(number: object) -> None:
    with pytest.raises(InvalidArgument, match="`num_copies` must be an int, got"):
        EnsembleModule(keyed(), number)  # type: ignore[arg-type]  # wrong on purpose


def test_number_of_copies_is_that_of_the_parameters() -> None:
    ensemble = EnsembleModule(keyed(), 3)
    assert ensemble.num_copies == 3
    with pytest.raises(AttributeError):
        ensemble.num_copies = 5  # type: ignore[misc]  # wrong on purpose


def test_module_that_was_never_called_is_refused_if_it_is_lazy() -> None:
    lazy = TensorDictModule(nn.LazyLinear(2), ["a"], ["b"])
    with pytest.raises(InvalidArgument, match="have no shapes before its first call"):
        EnsembleModule(lazy, 2)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_ensemble_survives_copies(copied) -> None:  # type: ignore[no-untyped-def]  # the parameter takes functions of several types
    ensemble = EnsembleModule(keyed(), 2)
    torch.testing.assert_close(one(copied(ensemble), a=X), one(ensemble, a=X))


def test_exported_program_has_no_vmap_calls() -> None:
    ensemble = EnsembleModule(keyed(), 2).eval()
    shapes = {"a": {0: torch.export.Dim("batch")}}
    program = torch.export.export(ensemble, (), {"a": X}, dynamic_shapes=shapes, strict=False)
    assert "vmap" not in program.graph_module.code
    torch.testing.assert_close(program.module()(a=X[:3]), one(ensemble, a=X[:3]))


def test_a_function_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"`module` must be an `nn.Module`, got <function"):
        EnsembleModule(lambda x: x, 2)  # type: ignore[arg-type]  # wrong on purpose


def test_the_state_of_an_ensemble_of_tensordict_loads() -> None:
    ensemble = EnsembleModule(TensorDictModule(nn.Linear(2, 3), ["x"], ["y"]), 2)
    theirs = {
        "module.module.weight": torch.zeros(3, 2),
        "module.module.bias": torch.zeros(3),
        "params_td.module.weight": torch.full((2, 3, 2), 5.0),
        "params_td.module.bias": torch.full((2, 3), 6.0),
    }
    ensemble.load_state_dict(theirs)
    assert len(theirs) == 4
    assert torch.equal(ensemble.params_td["module", "weight"], theirs["params_td.module.weight"])
    inside = nn.ModuleList([ensemble])
    inside.load_state_dict({f"0.{key}": 2 * value for key, value in theirs.items()})
    assert torch.equal(ensemble.params["module", "bias"], torch.full((2, 3), 12.0))
    with pytest.raises(RuntimeError, match="Missing key"):
        ensemble.load_state_dict({key: theirs[key] for key in list(theirs)[:3]})
