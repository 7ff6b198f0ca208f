"""Running the steps of a sequence for the distributions of its probabilistic modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias, cast

from torch import nn
from torch.distributions import Distribution

from kd_core import InvalidArgument, NestedKey, TensorDictBase, format_key
from kd_nn import InputMissing
from kd_probabilistic._components import list_keys
from kd_probabilistic._composite import CompositeDistribution
from kd_probabilistic._module import ProbabilisticTensorDictModule
from kd_probabilistic._scoring import ScoringModule
from kd_probabilistic._settings import DISCARD

Leaf: TypeAlias = ProbabilisticTensorDictModule | ScoringModule
LEAVES = (ProbabilisticTensorDictModule, ScoringModule)


class Walk:
    """The container that the steps have written so far, and the distributions on the way.

    Args:
        container: What the first step reads; a copy, since the steps write into it.
        keeps: Whether values that are in the container are kept instead of drawn again.
        whole: Whether the distribution is about all values, so that none may be left out.

    Attributes:
        container: The container after the last step.
        whole: As given.
        found: The probabilistic modules so far, with their distributions.
    """

    def __init__(self, container: TensorDictBase, keeps: bool, whole: bool) -> None:
        self.container, self.whole = container, whole
        self.found: list[tuple[Leaf, Distribution]] = []
        self._kd_keeps = keeps
        self._written: list[NestedKey] = []

    def run(self, step: nn.Module) -> None:
        """Run a step, and note what it writes."""
        self.container = step(self.container)
        self._written += _keys(step, "out_keys")

    def take(self, leaf: Leaf, draws: bool) -> None:
        """Build the distribution of a probabilistic module.

        Args:
            leaf: The module.
            draws: Whether its values are needed afterwards.

        Raises:
            InputMissing: If a value is missing that is scored, as all are if none is drawn again
                and the distribution is about all of them.
        """
        self.found.append((leaf, leaf.build_dist_from_params(self.container)))
        present = self.container.keys(True)
        missing = [key for key in leaf.dist_sample_keys if key not in present]
        if missing and self._kd_keeps and self.whole and draws:
            raise InputMissing(
                f"the value {format_key(missing[0])} is scored, but was not found in the "
                f"container; available keys: {list_keys(present)}. "
                "Write it before the call, or set `return_composite=False` to draw it."
            )
        if draws and (missing or not self._kd_keeps):
            self.run(leaf)

    def write(self, target: TensorDictBase) -> TensorDictBase:
        """Write what the steps wrote to another container, and return it."""
        keys = [key for key in self._written if key != DISCARD]
        return target.update(self.container.select(*dict.fromkeys(keys), strict=False))

    def composite(self, source: TensorDictBase) -> CompositeDistribution:
        """Return the distribution of all values.

        Args:
            source: A container of the batch size.

        Raises:
            InvalidArgument: If two values have one key, or a value has none.
        """
        parts: dict[NestedKey, Distribution] = {}
        for leaf, dist in self.found:
            own = dist if isinstance(dist, CompositeDistribution) else None
            pairs = [(leaf.dist_sample_keys[0], dist)] if own is None else own.items()
            for key, part in pairs:
                if key == DISCARD or key in parts:
                    raise InvalidArgument(
                        "the values of a composite distribution must have different keys, got "
                        f"{format_key(key)}{'' if key == DISCARD else ' twice'}. Give each "
                        "probabilistic module its own `out_keys`, or set `return_composite=False`."
                    )
                parts[key] = part
        return CompositeDistribution.from_distributions(source, parts)


def _keys(step: nn.Module, name: str) -> list[NestedKey]:
    return list(cast("Iterable[NestedKey]", getattr(step, name)))
