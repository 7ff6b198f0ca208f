"""What the tutorial of `torch.export` shows, strictly and not, on keyed modules."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import aoti_compile_and_package, aoti_load_package
from torch.export import Dim, draft_export, export

import kd_export
from kd_nn import TensorDictModule

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")  # deprecated, and used by inductor
X = torch.randn(3, 3)


def keyed(net: nn.Module) -> TensorDictModule:
    return TensorDictModule(net, in_keys=["x"], out_keys=["y"])


class Named(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 + len(type(self).__name__)


class Caught(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        try:
            x = x + 1
            raise RuntimeError("bad")
        except RuntimeError:
            x = x + 2
        return x


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin() if x.sum() > 0 else x.cos()


class Cond(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        return y


class Choose(nn.Module):
    """Branch between keyed modules, whose weights are on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = keyed(nn.Linear(3, 3)), keyed(nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.cond(
            x.sum() > 0, lambda x: self.large(x=x), lambda x: self.small(x=x), (x,)
        )
        return y


class Written(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.data[0, 0] = 3
        return x


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("net", [Named(), Caught(), Cond(), Choose()])
def test_the_program_gives_what_the_module_gives(net: nn.Module, strict: bool) -> None:
    program = export(keyed(net), (), {"x": X}, strict=strict).module()
    for x in (X, -X, torch.ones(3, 3)):
        torch.testing.assert_close(program(x=x), net(x.clone()))


@pytest.mark.parametrize("strict", [False, True])
def test_a_branch_on_values_is_refused_by_torch(strict: bool) -> None:
    with pytest.raises(Exception, match=r"(?i)data-dependent"):
        export(keyed(Branch()), (), {"x": X}, strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_a_write_through_data_is_refused(strict: bool) -> None:
    """`torch.export` loses it without a word if it is strict."""
    with pytest.raises(kd_export.NotExportable, match=r"`\.data` returns .* write to a clone"):
        kd_export.export(keyed(Written()), {"x": X}, strict=strict)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_draft_is_the_program_where_nothing_is_wrong() -> None:
    # torch leaves the log of a draft open.
    drafted, exported = (way(keyed(Cond()), (), {"x": X}) for way in (draft_export, export))
    assert str(drafted.graph) == str(exported.graph)
    torch.testing.assert_close(drafted.module()(x=-X), Cond()(-X))


@pytest.mark.parametrize("strict", [False, True])
def test_bounds_and_derived_sizes(strict: bool) -> None:
    module = TensorDictModule(lambda z, y: z[1:] + y[1::3], in_keys=["z", "y"], out_keys=["s"])
    dx = Dim("dx", min=3, max=6)
    program = export(
        module, (), {"z": torch.randn(4), "y": torch.randn(10)},
        dynamic_shapes={"z": {0: dx + 1}, "y": {0: dx * 3 + 1}}, strict=strict,
    )  # fmt: skip
    assert program.module()(z=torch.randn(7), y=torch.randn(19)).shape == (6,)
    bounds = {(int(r.lower), int(r.upper)) for r in program.range_constraints.values()}
    assert (3, 6) in bounds


def test_an_exported_keyed_module_is_compiled() -> None:
    net = nn.Linear(3, 3)
    program = export(keyed(net), (), {"x": X}).module()
    compiled = torch.compile(program, backend="inductor")
    torch.testing.assert_close(compiled(x=X), net(X))


def test_an_exported_keyed_module_is_compiled_ahead_of_time(tmp_path: Path) -> None:
    net = nn.Linear(3, 3)
    program = export(keyed(net), (), {"x": X}, dynamic_shapes={"x": {0: Dim("batch")}})
    path = aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    compiled = aoti_load_package(path)
    for x in (X, torch.randn(7, 3)):
        torch.testing.assert_close(compiled(x=x), net(x))
