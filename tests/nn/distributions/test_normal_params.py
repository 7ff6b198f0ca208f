import math

import pytest
import torch
from torch import Tensor, nn

from kd_core import InvalidValue
from kd_nn import AddStateIndependentNormalScale, NormalParamExtractor, NormalParamWrapper


def operations(
    module: nn.Module, *args: Tensor, strict: bool
) -> list[tuple[str, tuple[object, ...]]]:
    """Return the operations of the exported module with their constant arguments."""
    program = torch.export.export(module, args, strict=strict)
    return [
        (str(node.target), tuple(a for a in node.args if isinstance(a, (int, float))))
        for node in program.graph.nodes
        if node.op == "call_function" and "getitem" not in str(node.target)
    ]


@pytest.mark.parametrize("strict", [False, True])
def test_exported_graph_is_split_map_clamp(strict: bool) -> None:
    assert operations(NormalParamExtractor(), torch.randn(1, 4), strict=strict) == [
        ("aten.chunk.default", (2, -1)),
        ("aten.add.Tensor", (0.5254586935043335,)),
        ("aten.softplus.default", ()),
        ("aten.add.Tensor", (0.01,)),
        ("aten.clamp_min.default", (0.0001,)),
    ]


def test_extractor_halves_the_last_dimension() -> None:
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    loc, scale = NormalParamExtractor("exp")(x)
    assert torch.equal(loc, x[..., :4])
    assert torch.equal(scale, x[..., 4:].exp().clamp_min(1e-4))


def test_extractor_passes_further_tensors_through() -> None:
    extra = torch.ones(1)
    assert NormalParamExtractor()(torch.zeros(2), extra)[2] is extra


def test_scale_is_never_below_its_bound() -> None:
    _, scale = NormalParamExtractor("relu", scale_lb=0.3)(torch.full((4,), -1.0))
    assert scale.tolist() == pytest.approx([0.3, 0.3])


@pytest.mark.parametrize("bound", [-1.0, float("nan")])
def test_negative_bound_is_refused(bound: float) -> None:
    for build in (NormalParamExtractor, lambda **more: AddStateIndependentNormalScale(4, **more)):
        with pytest.raises(InvalidValue, match=r"`scale_lb` must be non-negative, got"):
            build(scale_lb=bound)


def test_odd_last_dimension_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"must have an even size.*got a tensor of shape \(3, 5\)"):
        NormalParamExtractor()(torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"must have an even size.*got a tensor of shape \(\)"):
        NormalParamExtractor()(torch.tensor(1.0))


def test_extractor_is_traced_by_fx() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(NormalParamExtractor()))
    x = torch.randn(3, 4)
    for got, expected in zip(traced(x), NormalParamExtractor()(x), strict=True):
        assert torch.equal(got, expected)


def test_wrapper_splits_a_networks_only_output() -> None:
    net = nn.GRUCell(4, 8)
    loc, scale = NormalParamWrapper(net)(torch.randn(3, 4), torch.randn(3, 8))
    assert loc.shape == scale.shape == (3, 4)


def test_wrapper_splits_the_first_of_several_outputs() -> None:
    hidden = torch.randn(3, 8)
    loc, scale, hx, cx = NormalParamWrapper(_TwoOutputs())(hidden)
    assert loc.shape == scale.shape == (3, 4)
    assert hx is cx is hidden


class _TwoOutputs(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * 2, x, x


def test_state_independent_scale_expands_to_the_location() -> None:
    module = AddStateIndependentNormalScale((2, 4), init_value=0.5)
    loc, scale = module(torch.zeros(3, 2, 4))
    assert loc.shape == scale.shape == (3, 2, 4)
    assert torch.equal(scale, torch.full((3, 2, 4), 0.5).exp())


def test_state_independent_scale_may_be_one_number() -> None:
    layer = AddStateIndependentNormalScale(init_value=1.0)
    _, scale = layer(torch.zeros(3, 4))
    assert layer.state_independent_scale.shape == ()
    torch.testing.assert_close(scale, torch.full((3, 4), math.e))


def test_state_independent_scale_learns() -> None:
    module = AddStateIndependentNormalScale(4)
    scale = module(torch.zeros(3, 4))[1]
    (slope,) = torch.autograd.grad(scale.sum(), module.state_independent_scale)
    assert torch.equal(slope, torch.full((4,), 3.0))


def test_state_independent_scale_of_another_shape_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"those of the scale, \(4,\), got a location of shape \(3, 5\)"
    ):
        AddStateIndependentNormalScale(4)(torch.zeros(3, 5))


def test_scale_that_is_not_trained_is_a_buffer() -> None:
    module = AddStateIndependentNormalScale(4, make_param=False, device="meta")
    assert list(module.parameters()) == []
    assert list(module.state_dict()) == ["state_independent_scale"]
    assert module.state_independent_scale.is_meta
