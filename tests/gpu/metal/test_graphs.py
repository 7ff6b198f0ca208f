"""`CudaGraphModule` on a GPU: captured, replayed, with other inputs, and what it refuses."""

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from tests.gpu.device import DEVICE, assert_alike
from torch import Tensor, nn

from kd_core import InvalidArgument, TensorDict
from kd_nn import CudaGraphModule, NormalParamExtractor, TensorDictModule, TensorDictSequential
from kd_probabilistic import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, which the metal decides


def model() -> TensorDictSequential:
    torch.manual_seed(0)
    return TensorDictSequential(
        TensorDictModule(nn.Linear(3, 16), ["x"], [("n", "h")]),
        TensorDictModule(torch.tanh, [("n", "h")], [("n", "h")]),
        TensorDictModule(nn.Linear(16, 4), [("n", "h")], ["y"]),
    ).to(DEVICE)


def given(scale: float, rows: int = 5) -> TensorDict:
    x = torch.arange(3.0 * rows, device=DEVICE).reshape(rows, 3) * scale / 10
    return TensorDict({"x": x, "other": x}, [rows])


@pytest.mark.parametrize("grad", [False, True])
def test_replays_compute_what_the_module_computes(grad: bool) -> None:
    inner = model()
    step = CudaGraphModule(inner)
    kept = []
    with torch.set_grad_enabled(grad):
        for scale in range(8):
            td = given(scale)
            assert step(td) is td
            kept.append((td, inner(given(scale))))
    assert step._forms[0].recording is not None
    for td, expected in kept:  # what an earlier replay returned stays
        assert_alike(td["y"], expected["y"])
        assert_alike(td["n", "h"], expected["n", "h"])
        assert td["other"] is td["x"]


def test_inputs_may_be_anywhere_in_memory_and_laid_out_in_any_way() -> None:
    step = CudaGraphModule(lambda x: {"y": x * 2, "text": "as it is"})
    for number in range(12):
        wide = torch.rand(6, 2 * 5, device=DEVICE)
        x = (wide[:, ::2], wide[:, :5], wide.T[:5].T, wide[:1, :5].expand(6, 5))[number % 4]
        result = step(x)
        assert torch.equal(result["y"], x * 2)
        assert result["text"] == "as it is"
        del wide, x, result
        gc.collect()


def test_writes_in_place_reach_the_argument() -> None:
    def count(td: TensorDict) -> None:
        td["x"].add_(1)

    step = CudaGraphModule(count)
    td = given(1)
    before = td["x"].clone()
    for calls in range(1, 7):
        x = td["x"]
        assert step(td) is None
        assert td["x"] is x
        assert torch.equal(x, before + calls)


def training(net: nn.Module) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, capturable=True)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss: Tensor = net(TensorDict({"x": x}, [len(x)]))["y"].square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def test_a_whole_training_step_is_replayed() -> None:
    first = model()
    second = copy.deepcopy(first)
    plain, graphed = training(first), CudaGraphModule(training(second), warmup=3)
    for number in range(10):
        x = given(number)["x"]
        assert_alike(graphed(x), plain(x).detach())
    for mine, theirs in zip(second.parameters(), first.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.eval(),
        lambda net: setattr(net[0].module, "bias", nn.Parameter(net[0].module.bias.detach() * 2)),
        lambda net: net.cpu().to(DEVICE),
    ],
    ids=["mode", "parameter", "moved"],
)
def test_a_module_that_changed_is_recorded_again(change: Callable[[nn.Module], object]) -> None:
    inner = model()
    step = CudaGraphModule(inner)
    for scale in range(4):
        step(given(scale))
    change(inner)
    for scale in range(4):
        assert_alike(step(given(scale))["y"], inner(given(scale))["y"])


def test_parameters_written_in_place_are_read_by_replays() -> None:
    inner = model()
    step = CudaGraphModule(inner)
    with torch.no_grad():
        for _ in range(6):
            assert_alike(step(given(1))["y"], inner(given(1))["y"])
            for each in inner.parameters():
                each.mul_(1.5)


def test_each_form_has_its_recording() -> None:
    inner = model()
    step = CudaGraphModule(inner)
    with torch.no_grad():
        for _ in range(4):
            for rows in (1, 5, 9):
                assert_alike(step(given(2, rows))["y"], inner(given(2, rows))["y"])
    assert sum(form.recording is not None for form in step._forms) == 3


def test_draws_differ_from_replay_to_replay() -> None:
    torch.manual_seed(0)
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), ["x"], ["p"]),
        TensorDictModule(NormalParamExtractor(), ["p"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["a"],
            distribution_class=torch.distributions.Normal,
            distribution_kwargs={"validate_args": False},
            default_interaction_type="random",
            return_log_prob=True,
            log_prob_key="score",
        ),
    ).to(DEVICE)
    step = CudaGraphModule(actor)
    with torch.no_grad():
        drawn = [step(given(1)) for _ in range(6)]
        for td in drawn:
            far = actor.log_prob(td.select("x", "a"))
            torch.testing.assert_close(td["score"], far)
    assert len({td["a"].sum().item() for td in drawn}) == 6


def test_what_cannot_be_replayed_is_refused() -> None:
    step = CudaGraphModule(torch.neg, passthrough=False)
    x = torch.rand(3, device=DEVICE)
    for _ in range(4):
        with pytest.raises(InvalidArgument, match="must not require gradients"):
            step(x.clone().requires_grad_())
        with pytest.raises(InvalidArgument, match=r"must be on cuda:0, got a tensor on cpu"):
            step(x.cpu())
        assert torch.equal(step(x), -x)


def test_a_function_that_reads_values_cannot_be_recorded_and_says_so() -> None:
    step = CudaGraphModule(lambda x: x * float(x.sum().item()))
    x = torch.ones(3, device=DEVICE)
    for _ in range(2):
        step(x)
    with pytest.raises(RuntimeError):
        step(x)
    torch.cuda.synchronize()
    assert torch.equal(x + 1, torch.full((3,), 2.0, device=DEVICE))  # the GPU works on
    fresh = CudaGraphModule(torch.neg)
    for _ in range(4):
        assert torch.equal(fresh(x), -x)
