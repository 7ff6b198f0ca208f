"""What runs in actors, as plain classes: collectors of transitions, and what keeps them."""

import torch
from examples.learning.pendulums import Pendulums
from examples.learning.sac import build_actor

from kd_core import TensorDict, TensorDictBase, stack

COUNT = 8
"""How many pendulums a collector moves at once."""


class Collector:
    """Moves pendulums by a policy that it is sent from time to time."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.policy, self.pendulums, self.version = build_actor(), Pendulums(COUNT), -1

    def load(self, version: int, weights: TensorDictBase) -> None:
        """Load the weights of a version, of any dtype, which must be newer."""
        if version <= self.version:
            raise ValueError(f"version {version} must be newer than {self.version}")
        TensorDict.from_module(self.policy).data.update_(weights)
        self.version = version

    def collect(self, steps: int) -> TensorDict:
        """Return transitions of a number of steps, of batch size `(steps * COUNT,)`."""
        rows = []
        for _ in range(steps):
            with torch.no_grad():
                row = self.policy(TensorDict({"obs": self.pendulums.obs}, [COUNT]))
            row = row.select("obs", "action")
            row["next"] = self.pendulums.step(row["action"])
            row["version"] = torch.full((COUNT,), self.version)
            rows.append(row)
        return stack(rows).flatten(0, 1)


class Buffer:
    """Keeps the last transitions, up to a number."""

    def __init__(self, capacity: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.capacity, self.count = capacity, 0
        self.rows: TensorDictBase = TensorDict()

    def add(self, rows: TensorDictBase) -> int:
        """Write rows over the oldest ones; return how many are kept."""
        if not self.count:
            self.rows = rows.new_zeros(self.capacity)
        places = torch.arange(self.count, self.count + len(rows)) % self.capacity
        self.rows[places] = rows
        self.count += len(rows)
        return min(self.count, self.capacity)

    def sample(self, count: int) -> TensorDictBase:
        """Return random rows."""
        kept = min(self.count, self.capacity)
        return self.rows[torch.randint(kept, (count,))]
