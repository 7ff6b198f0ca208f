import torch
from torch import nn

from kd_core import TensorDict
from kd_nn import NormalParamExtractor, TensorDictModule, TensorDictSequential


def make() -> TensorDictSequential:
    offset = torch.ones(8)
    return TensorDictSequential(
        TensorDictModule(nn.Linear(3, 8), [("in", "x")], ["h"]),
        TensorDictModule(nn.BatchNorm1d(8), ["h"], ["n"]),
        TensorDictModule(lambda n: n + offset, ["n"], ["p"]),
        TensorDictModule(NormalParamExtractor(), ["p"], ["loc", ("out", "scale")]),
    )


def test_shapes_are_found_on_the_meta_device_without_touching_the_module() -> None:
    model = make()
    sample = TensorDict({"in": {"x": torch.empty(5, 3, device="meta")}}, [5])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = model.infer(sample)
    assert made["out", "scale"].shape == (5, 4)
    assert all(value.is_meta for value in made.values(True, True))
    assert made.batch_size == (5,)
    assert list(sample.keys(True, True)) == [("in", "x")]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_shapes_are_found_from_real_tensors_too() -> None:
    sample = TensorDict({"in": {"x": torch.rand(5, 3)}}, [5])
    assert make().infer(sample)["loc"].shape == (5, 4)


def test_summary_shows_shapes_when_a_sample_is_given() -> None:
    sample = TensorDict({"in": {"x": torch.empty(5, 3, device="meta")}}, [5])
    lines = make().key_graph(sample).summary().splitlines()
    assert lines[0].split()[-1] == "shapes"
    assert lines[-1].endswith("(5, 4), (5, 4)")


def test_shapes_of_a_single_module() -> None:
    module = TensorDictModule(nn.Linear(3, 4), ["x"], ["y"], inplace=False)
    assert module.infer(TensorDict(x=torch.empty(2, 3)))["y"].shape == (2, 4)
