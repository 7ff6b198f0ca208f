"""The patterns of the page "What can be exported", each tried by `kd_export.diagnose`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from tests.export.models import Counter, Do, Keyed
from torch import Tensor, nn

import kd_export
from kd_core import TensorDict
from kd_nn import TensorDictModule, TensorDictSequential

BOTH = (".pt2", ".onnx")


@dataclass(frozen=True)
class Pattern:
    """A pattern, a module that has it, and the formats in which its verdict may differ."""

    title: str
    make: Callable[[], nn.Module]
    example: Mapping[str, Tensor] = field(default_factory=lambda: {"x": torch.ones(2, 4)})
    targets: tuple[str, ...] = (".pt2",)
    mode: str | None = None

    def row(self) -> tuple[str, str, str]:
        """Try the pattern: its title, the verdict, and what kd_export says of it."""
        torch.manual_seed(0)
        found = kd_export.diagnose(self.make(), self.example, targets=self.targets, mode=self.mode)
        refused = [row for row in found.rows if not row.ok]
        if not refused:
            return self.title, "mended" if found.notes else "exports", " ".join(found.notes)
        verdict = "refused" if len(refused) == len(self.targets) else "partly"
        if refused[0].target == "export":
            verdict = "refused"
        where = "" if verdict == "refused" else f"{', '.join(row.target for row in refused)}: "
        return self.title, verdict, f"{where}{_one_line(refused[0].message)}"


def _one_line(message: str) -> str:
    """Return a message without the places of this file, which change with every edit."""
    return re.sub(r" at `.*` \(`\w+`, [\w.]+:\d+\)", "", message.partition("\n")[0])


def keyed(function: Callable[..., object], *outputs: str) -> nn.Module:
    return Keyed(Do(function), ["x"], list(outputs) or ["y"])


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


def shared() -> nn.Module:
    layer = nn.Linear(4, 4)
    return Keyed(nn.Sequential(layer, nn.ReLU(), layer), ["x"], ["y"])


def partial() -> nn.Module:
    module = TensorDictSequential(
        TensorDictModule(nn.Linear(4, 3), in_keys=["x"], out_keys=["y"]),
        TensorDictModule(nn.Linear(3, 2), in_keys=["y"], out_keys=["unused"]),
    )
    module.select_out_keys("y")
    return module


PATTERNS = [
    Pattern("a key updated in place", lambda: Keyed(nn.Linear(4, 4), ["x"], ["x"]), targets=BOTH),
    Pattern("a lambda as a module", lambda: TensorDictModule(
        lambda x: x.relu(), in_keys=["x"], out_keys=["y"]
    )),
    Pattern("shared weights", shared),
    Pattern("a step that no selected output needs", partial),
    Pattern("dropout", lambda: Keyed(
        nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2), nn.Dropout(0.5)), ["x"], ["y"]
    )),
    Pattern("an output that is a view of an input", lambda: keyed(lambda x: x[:, :2])),
    Pattern("one tensor under two keys", lambda: keyed(lambda x: ((y := x + 1), y), "y", "z")),
    Pattern("an input overwritten in place", lambda: keyed(lambda x: x.add_(1) * 2)),
    Pattern("a buffer changed by the call", lambda: Keyed(Counter(), ["x"], ["y"])),
    Pattern("random numbers", lambda: keyed(lambda x: x + torch.randn_like(x))),
    Pattern(
        "random numbers, declared by `mode='random'`",
        lambda: keyed(lambda x: x + torch.randn_like(x)),
        mode="random",
    ),
    Pattern("a branch on values", lambda: TensorDictModule(
        Branching(), in_keys=["x"], out_keys=["y"]
    )),
    Pattern("a lazy layer before its first call", lambda: TensorDictModule(
        nn.LazyLinear(2), in_keys=["x"], out_keys=["y"]
    )),
    Pattern("a size that becomes a number", lambda: keyed(lambda x: x.view(2, -1))),
    Pattern("an output that is not a tensor", lambda: keyed(lambda x: (x + 1, "done"), "y", "z")),
    Pattern("a container as output", lambda: keyed(lambda x: (TensorDict({"a": x + 1}),))),
    Pattern("complex numbers", lambda: keyed(torch.fft.rfft), targets=BOTH),
    Pattern("a plain module", lambda: nn.Linear(4, 2)),
]  # fmt: skip
