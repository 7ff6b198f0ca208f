"""`save` beside an oracle: what is compared, and which missing step is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.export.models import Do
from torch import Tensor, nn

import kd_export
from kd_export import ExportError, KeyMismatch, VerifyError
from kd_nn import TensorDictModule, TensorDictSequential

MEAN, DEVIATION = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.5, 2.0, 1.0])
LOW, HIGH = torch.tensor([-0.4, -0.2]), torch.tensor([0.3, 0.5])
EXAMPLE = {"obs": MEAN + 2 * DEVIATION * torch.randn(64, 3, generator=torch.Generator())}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))


def keyed(*steps: tuple[Callable[..., object], str, str]) -> TensorDictSequential:
    """A sequence of steps that keeps the action alone."""
    modules = [
        TensorDictModule(
            one if isinstance(one, nn.Module) else Do(one), in_keys=[read], out_keys=[written]
        )
        for one, read, written in steps
    ]
    sequence = TensorDictSequential(*modules)
    sequence.select_out_keys("action")
    return sequence


def saved(
    module: nn.Module, path: Path, oracle: Callable[..., object], **options: object
) -> kd_export.Report:
    example = options.pop("example", EXAMPLE)
    assert isinstance(example, dict)
    return kd_export.save(
        module,
        path / "policy.pt2",
        example,
        batch_sizes=(2,),
        oracle=oracle,
        rollouts=3,
        steps=12,
        **options,  # type: ignore[arg-type]  # of several types
    )


def refused(module: nn.Module, path: Path, oracle: Callable[..., object], **options: object) -> str:
    with pytest.raises(VerifyError) as caught:
        saved(module, path, oracle, **options)
    assert not (path / "policy.pt2").exists()
    return str(caught.value)


ACTOR = net()


def trained(x: Tensor) -> Tensor:
    """What was trained: normalised, clipped observations in, clipped actions out."""
    with torch.no_grad():
        action: Tensor = ACTOR(((x - MEAN) / DEVIATION).clamp(-3, 3))
        return torch.minimum(torch.maximum(action, LOW), HIGH)


STEPS: dict[str, tuple[Callable[..., object], str, str]] = {
    "normaliser": (lambda x: (x - MEAN) / DEVIATION, "obs", "obs"),
    "inner clip": (lambda x: x.clamp(-3, 3), "obs", "obs"),
    "actor": (ACTOR, "obs", "action"),
    "clip": (lambda a: torch.minimum(torch.maximum(a, LOW), HIGH), "action", "action"),
}


def test_a_whole_policy_is_compared_at_three_batches(tmp_path: Path) -> None:
    report = saved(keyed(*STEPS.values()), tmp_path, trained)
    assert report.ok
    beside = [row for row in report.rows if "beside the oracle" in row.note]
    assert [row.sizes["batch"] for row in beside] == [1, 3, 64]
    assert all(row.difference < 1e-5 for row in beside)


@pytest.mark.parametrize(
    ("left_out", "named"),
    [
        ("normaliser", "a normaliser of `obs`"),
        ("inner clip", "a clip of `obs` to [-3, 3]"),
        ("clip", "a clip of `action`"),
    ],
)
def test_a_missing_step_is_named(left_out: str, named: str, tmp_path: Path) -> None:
    steps = [step for name, step in STEPS.items() if name != left_out]
    message = refused(keyed(*steps), tmp_path, trained)
    assert f"The module lacks {named}" in message


def test_a_normaliser_is_measured(tmp_path: Path) -> None:
    message = refused(keyed(*list(STEPS.values())[1:]), tmp_path, trained)
    assert "(obs - (1, -2, 0.5)) / (0.5, 2, 1)" in message


def plain(x: Tensor) -> Tensor:
    with torch.no_grad():
        action: Tensor = ACTOR(x)
        return action


@pytest.mark.parametrize(
    ("after", "named"),
    [
        (lambda a: a * torch.tensor([2.0, 3.0]) + 1, "a scale: `action` * (2, 3) + 1"),
        (lambda a: a + 3, "a shift: `action` + 3"),
        (lambda a: a.tanh(), "a squash: `action.tanh()`"),
        (lambda a: 2 * a.tanh() - 1, "a squash (tanh) and then a scale"),
        (
            lambda a: 4 * a.clamp(-1, 1),
            "a scale: `action` * 4 + |a clip to [-1, 1] and then a scale",
        ),
        (lambda a: (5 * a).clamp(-0.5, 0.5), "a scale: `action` * 5 + "),
        (lambda a: a.argmax(-1), "an arg-max: `action.argmax(-1)`"),
        (lambda a: (a > 0).long(), "a threshold: `action` > 0.0"),
        (lambda a: a.double(), "a cast of `action` to float64"),
        (lambda a: a[:, None], "a reshape of `action` to ('rows', 1, 2)"),
    ],
)
def test_what_comes_after_a_network_is_named(
    after: Callable[[Tensor], Tensor], named: str, tmp_path: Path
) -> None:
    message = refused(keyed(STEPS["actor"]), tmp_path, lambda x: after(plain(x)))
    assert any(f"The module lacks {one}" in message for one in named.split("|")), message


def test_a_start_and_a_table_of_integers_are_named(tmp_path: Path) -> None:
    chosen = keyed(STEPS["actor"], (lambda a: a.argmax(-1), "action", "action"))
    shifted = refused(chosen, tmp_path, lambda x: plain(x).argmax(-1) + 5)
    assert "lacks a start: `action` + 5" in shifted
    table = torch.tensor([7, 3])
    mapped = refused(chosen, tmp_path, lambda x: table[plain(x).argmax(-1)])
    assert "lacks a table: `action` by {0: 7, 1: 3}" in mapped


def test_pixels_that_are_not_scaled_are_named(tmp_path: Path) -> None:
    class Pixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Conv2d(3, 2, 4)

        def forward(self, x: Tensor) -> Tensor:
            features: Tensor = self.layer(x.float())
            return features.flatten(1).tanh()

    pixels = Pixels()
    images = torch.randint(0, 256, (8, 3, 4, 4), generator=torch.Generator()).to(torch.uint8)
    message = refused(
        keyed((pixels, "obs", "action")),
        tmp_path,
        lambda x: pixels(x / 255).detach(),
        example={"obs": images},
    )
    assert "a step before the network: `obs.float() / 255`" in message


@pytest.mark.parametrize("scale", [1, 255])
def test_pixels_in_another_order_are_named(scale: int, tmp_path: Path) -> None:
    def looks(x: Tensor) -> Tensor:
        return x[:, :2].float().mean((2, 3)) / 255

    images = torch.randint(0, 256, (8, 4, 5, 3), generator=torch.Generator()).to(torch.uint8)
    message = refused(
        keyed((looks, "obs", "action")),
        tmp_path,
        lambda x: looks(x.permute(0, 3, 1, 2).float() / scale),
        example={"obs": images},
    )
    step = "`obs.permute(0, 3, 1, 2)" + ("`" if scale == 1 else ".float() / 255`")
    assert f"a step before the network: {step}" in message


def test_an_action_of_another_type_is_told_beside_the_expected_one(tmp_path: Path) -> None:
    message = refused(keyed(STEPS["actor"]), tmp_path, lambda x: plain(x).double())
    assert "torch.float32 (1, 2) for torch.float64 (1, 2)" in message


class Memory:
    """A recurrent oracle."""

    def __init__(self, cell: nn.GRUCell, forgets: bool = True) -> None:
        self.cell, self.forgets = cell, forgets
        self.state: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            state = torch.zeros(len(x), 4) if self.state is None else self.state
            new: Tensor = self.cell(x, state)
            self.state = new
        return new[:, :2]

    def reset(self, mask: Tensor | None = None) -> None:
        if mask is None:
            self.state = None
        elif self.state is not None and self.forgets:
            self.state = self.state * ~mask[:, None]


def recurrent() -> tuple[nn.GRUCell, TensorDictSequential, dict[str, Tensor]]:
    torch.manual_seed(0)
    cell = nn.GRUCell(3, 4)
    sequence = TensorDictSequential(
        TensorDictModule(cell, in_keys=["obs", "h"], out_keys=["new"]),
        TensorDictModule(Do(lambda h: h[:, :2].clone()), in_keys=["new"], out_keys=["action"]),
    )
    return cell, sequence, {"obs": torch.randn(8, 3), "h": torch.zeros(8, 4)}


def test_a_state_is_carried_and_reset(tmp_path: Path) -> None:
    cell, module, example = recurrent()
    report = saved(module, tmp_path, Memory(cell), example=example, state={"h": "new"})
    assert report.ok


def test_a_state_that_is_not_reset_is_named(tmp_path: Path) -> None:
    cell, module, example = recurrent()
    oracle = Memory(cell, forgets=False)
    message = refused(module, tmp_path, oracle, example=example, state={"h": "new"})
    assert "lacks a reset: the oracle keeps its state" in message


def test_a_state_that_is_not_carried_is_named(tmp_path: Path) -> None:
    cell, module, example = recurrent()
    memory = Memory(cell)

    class Blind:
        """It has a state of its own, whatever is passed as one."""

        reset = memory.reset

        def __call__(self, observations: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"action": memory(observations["obs"])}

    message = refused(module, tmp_path, Blind(), example=example)
    assert "lacks a state that is carried and reset: pass `state={'h': 'new'}`" in message


def test_a_state_needs_an_oracle_that_can_be_reset(tmp_path: Path) -> None:
    _, module, example = recurrent()
    with pytest.raises(ExportError, match="the oracle has no method `reset`"):
        saved(module, tmp_path, plain, example=example, state={"h": "new"})


def test_what_no_step_mends_is_said(tmp_path: Path) -> None:
    torch.manual_seed(3)
    other = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
    message = refused(keyed(STEPS["actor"]), tmp_path, lambda x: other(x.flip(-1).abs()).detach())
    assert "No single step that kd_export knows mends it" in message


def test_an_oracle_that_fails_is_told_from_a_mismatch(tmp_path: Path) -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("no such joint")

    assert "the oracle fails on observations like the example's: no such joint" in refused(
        keyed(STEPS["actor"]), tmp_path, broken
    )


def test_several_observations_go_to_the_oracle_as_a_dict(tmp_path: Path) -> None:
    layer = nn.Linear(5, 2)
    module = TensorDictModule(
        Do(lambda a, b: layer(torch.cat([a, b], -1))),
        in_keys=[("observation", "a"), ("observation", "b")],
        out_keys=["action"],
    )
    example = {"observation": {"a": torch.randn(4, 2), "b": torch.randn(4, 3)}}

    def oracle(given: dict[str, Tensor]) -> Tensor:
        action: Tensor = layer(torch.cat([given["a"], given["b"]], -1))
        return action.detach()

    assert saved(module, tmp_path, oracle, example=example).ok


def test_several_outputs_need_a_name(tmp_path: Path) -> None:
    module = TensorDictModule(Do(lambda x: (x, x + 1)), in_keys=["obs"], out_keys=["a", "b"])
    with pytest.raises(KeyMismatch, match="there are several: `a`, `b`"):
        saved(module, tmp_path, lambda x: x)
    assert saved(module, tmp_path, lambda x: {"b": x + 1}).ok


def test_counts_must_be_positive(tmp_path: Path) -> None:
    module = keyed(STEPS["actor"])
    with pytest.raises(ExportError, match="`rollouts` must be a positive int, got 0"):
        kd_export.save(module, tmp_path / "x.pt2", EXAMPLE, oracle=plain, rollouts=0)


class Amplified(nn.Module):
    """An actor whose rounding errors grow until they are larger than the tolerance."""

    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 256), nn.ReLU(), nn.Linear(256, 2))
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(100 * self.net(x) + self.offset)


def in_another_order(x: Tensor) -> Tensor:
    """What `Amplified` gives, its sums added in float64: as exact, and other last bits."""
    with torch.no_grad():
        action: Tensor = Amplified().double()(x.double())
        return action.float()


def test_rounding_that_the_policy_itself_has_is_no_other_action(tmp_path: Path) -> None:
    report = saved(keyed((Amplified(), "obs", "action")), tmp_path, in_another_order, atol=1e-6)
    notes = [row.note for row in report.rows if "beside the oracle" in row.note]
    assert any("the module's own rounding error is" in note for note in notes), notes


def test_more_than_rounding_is_another_action(tmp_path: Path) -> None:
    other = keyed((Amplified(offset=0.01), "obs", "action"))
    assert "MISMATCH" in refused(other, tmp_path, in_another_order, atol=1e-6)


def test_noise_of_an_oracle_is_no_rounding(tmp_path: Path) -> None:
    """A module whose numbers follow from its inputs has no other error than that of float32."""
    noisy = lambda x: in_another_order(x) + 0.001 * torch.randn(len(x), 2)  # noqa: E731  # one line
    assert "MISMATCH" in refused(keyed((Amplified(), "obs", "action")), tmp_path, noisy, atol=1e-6)
