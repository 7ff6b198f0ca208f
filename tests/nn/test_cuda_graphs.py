"""`CudaGraphModule`: what is copied, kept and recorded again, without a GPU and on one."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from kd_core import InvalidArgument, InvalidValue, TensorDict
from kd_nn import CudaGraphModule, TensorDictModule, TensorDictSequential, _cuda_graphs

X = torch.arange(6.0).reshape(2, 3)


class Tape:
    """Replays as a CUDA graph does, on the CPU: into the memory of the recording, and nothing else.

    Attributes:
        runs: How often the function itself ran.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.runs: list[str] = []

    def warm_up(self, run: Callable[[], object]) -> object:
        self.runs.append("warm up")
        return run()

    def record(self, run: Callable[[], object]) -> tuple[object, Callable[[], object]]:
        self.runs.append("record")
        result, grad = run(), torch.is_grad_enabled()
        kept = [leaf for leaf in _pytree.tree_leaves(result) if isinstance(leaf, Tensor)]

        def replay() -> None:
            self.runs.append("replay")
            with torch.set_grad_enabled(grad):
                again = _pytree.tree_leaves(run())
            fresh = [leaf for leaf in again if isinstance(leaf, Tensor)]
            for target, source in zip(kept, fresh, strict=True):
                target.data.copy_(source)

        return result, replay


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    made = Tape()
    monkeypatch.setattr(_cuda_graphs, "_recorder", lambda device, passthrough: made)
    return made


def model() -> TensorDictSequential:
    torch.manual_seed(0)
    return TensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), ["x"], [("n", "h")]),
        TensorDictModule(torch.tanh, [("n", "h")], ["y"]),
    )


def test_calls_are_warmed_up_then_recorded_then_replayed(tape: Tape) -> None:
    step = CudaGraphModule(nn.Linear(3, 4), warmup=2)
    for _ in range(4):
        step(X)
    assert tape.runs == ["warm up", "warm up", "record", "replay", "replay"]


@pytest.mark.parametrize("grad", [False, True])
def test_containers_get_what_the_module_writes(tape: Tape, grad: bool) -> None:
    inner = model()
    step = CudaGraphModule(inner, warmup=1)
    with torch.set_grad_enabled(grad):
        for scale in range(5):
            td = TensorDict({"x": X * scale, "other": X}, [2])
            assert step(td) is td
            expected = inner(td.select("x"))
            torch.testing.assert_close(td["y"], expected["y"].detach())
            torch.testing.assert_close(td["n", "h"], expected["n", "h"].detach())
            assert not td["y"].requires_grad
            assert td["other"] is X
    assert tape.runs.count("replay") == 4


def test_results_stay_when_the_next_call_runs(tape: Tape) -> None:
    step = CudaGraphModule(lambda x: {"double": x * 2, "text": "as it is"}, warmup=1)
    results = [step(X + shift) for shift in range(4)]
    for shift, result in enumerate(results):
        assert torch.equal(result["double"], (X + shift) * 2)
        assert result["text"] == "as it is"


def test_writes_in_place_reach_the_argument(tape: Tape) -> None:
    def count(td: TensorDict) -> None:
        td["x"].add_(1)

    step = CudaGraphModule(count, warmup=1)
    td = TensorDict({"x": X.clone()}, [2])
    for calls in range(1, 5):
        x = td["x"]
        assert step(td) is None
        assert td["x"] is x
        assert torch.equal(x, X + calls)


def test_a_training_step_is_recorded_whole(tape: Tape) -> None:
    torch.manual_seed(0)
    first = nn.Linear(3, 1)
    second = copy.deepcopy(first)

    def training(net: nn.Module) -> Callable[[Tensor], Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss: Tensor = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step

    plain, graphed = training(first), CudaGraphModule(training(second), warmup=2)
    losses = [plain(X).detach() for _ in range(5)]
    found = [graphed(X) for _ in range(4)]
    # To record runs the function once on a CPU; a GPU does not run it then.
    assert torch.equal(torch.stack(found), torch.stack([*losses[:2], *losses[3:]]))
    assert torch.equal(first.weight, second.weight)


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.eval(),
        lambda net: setattr(net, "weight", nn.Parameter(net.weight.detach() * 2)),
        lambda net: net.double().float(),
    ],
)
def test_a_module_that_changed_is_recorded_again(
    tape: Tape, change: Callable[[nn.Module], object]
) -> None:
    net = nn.Linear(3, 4)
    step = CudaGraphModule(net, warmup=1)
    for _ in range(3):
        step(X)
    change(net)
    assert torch.equal(step(X), net(X).detach())
    assert tape.runs == ["warm up", "record", "replay", "replay", "warm up"]


def test_each_form_of_the_arguments_has_its_recording(tape: Tape) -> None:
    step = CudaGraphModule(lambda x, scale=1: x * scale, warmup=1)
    for _ in range(3):
        for x in (X, X[:1], X.double()):
            for scale in (1, 3):
                assert torch.equal(step(x, scale=scale), x * scale)
    assert tape.runs.count("record") == 6


def test_the_oldest_recordings_are_forgotten(tape: Tape) -> None:
    step = CudaGraphModule(lambda x: x + 1, warmup=1)
    for rows in range(1, 2 * _cuda_graphs.MOST_GRAPHS):
        for _ in range(2):
            step(torch.zeros(rows))
    assert len(step._forms) == _cuda_graphs.MOST_GRAPHS


def test_keys_make_a_keyed_module(tape: Tape) -> None:
    step = CudaGraphModule(torch.neg, in_keys=["x"], out_keys=["y"])
    for _ in range(4):
        assert torch.equal(step(TensorDict(x=X))["y"], -X)


def test_copies_have_no_recordings(tape: Tape) -> None:
    step = CudaGraphModule(nn.Linear(3, 4), warmup=1)
    for _ in range(2):
        step(X)
    assert step._forms
    assert not copy.deepcopy(step)._forms
    assert sorted(step.state_dict()) == ["module.bias", "module.weight"]


def test_gradients_are_refused(tape: Tape) -> None:
    step = CudaGraphModule(torch.neg, warmup=1)
    for _ in range(3):  # before and after a call of the same shape was recorded
        with pytest.raises(InvalidArgument, match="must not require gradients"):
            step(X.clone().requires_grad_())
        step(X)


def test_arguments_elsewhere_are_refused(tape: Tape) -> None:
    with pytest.raises(InvalidArgument, match="must be on cpu, got a tensor on meta"):
        CudaGraphModule(torch.neg)(X.to("meta"))


def test_wrong_options_are_refused() -> None:
    with pytest.raises(InvalidValue, match="`warmup` must be a positive int, got 0"):
        CudaGraphModule(torch.neg, warmup=0)
    with pytest.raises(InvalidArgument, match="must be given together"):
        CudaGraphModule(torch.neg, in_keys=["x"])
    with pytest.raises(InvalidArgument, match="need a GPU, got `cpu`"):
        CudaGraphModule(torch.neg, device="cpu", passthrough=False)


def test_without_a_gpu_calls_are_passed_through_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgument, match=r"torch finds none\. Leave out `passthrough=False`"):
        CudaGraphModule(torch.neg, passthrough=False)
    step = CudaGraphModule(torch.neg)
    assert torch.equal(step(X), -X)
    assert torch.equal(CudaGraphModule(torch.neg, device="cpu")(X), -X)
    assert torch.equal(pickle.loads(pickle.dumps(step))(X), -X)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_graph_on_a_gpu_computes_what_the_module_computes() -> None:
    inner = model().cuda()
    step = CudaGraphModule(inner)
    with torch.no_grad():
        for scale in range(6):
            td = TensorDict({"x": X.cuda() * scale}, [2])
            assert step(td) is td
            torch.testing.assert_close(td["y"], inner(td.select("x"))["y"])
