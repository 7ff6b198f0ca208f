"""The floor of keyed modules: the shortest correct code for the rows of nn, functional and compile.

A module reads entries and writes outputs, a sequence runs modules one after the other. Called with
a container, which changes once all of them have run and all outputs fit, they return it; called
with tensors, by position or by name, they return the outputs. Wrapped modules are called as torch
calls them, hooks included. They have no nested keys deeper than two parts, no optional inputs, no
lists of outputs by name, and their errors say nothing. The keys that a sequence says follow its
members and their keys, but for direct writes to `_modules`; its calls do not. Knows torch and
`Floor`; must not know kd.
"""

from __future__ import annotations

from floor import Floor
from torch import Tensor, nn
from torch.distributions import Distribution


class Keyed(nn.Module):
    """What modules and sequences share: both kinds of calls."""

    changes = 0  # of the keys of any module
    reads: list[object]
    writes: list[object]
    partial_tolerant = False

    @property
    def in_keys(self) -> list[object]:
        return [*self.reads]

    @in_keys.setter
    def in_keys(self, keys: list[object]) -> None:
        Keyed.changes += 1
        self.reads = [*keys]

    @property
    def out_keys(self) -> list[object]:
        return [*self.writes]

    def forward(self, *args: object, **values: object) -> object:
        if len(args) == 1 and isinstance(args[0], Floor):
            return self._on_container(args[0])
        found = dict(zip(self.reads, args, strict=False))
        if values.keys() & found.keys() or len(args) + len(values) != len(self.reads):
            raise TypeError
        found.update(values)
        made = self.run(found)
        outputs = tuple(made[key] for key in self.writes)
        return outputs[0] if len(outputs) == 1 else outputs

    def _on_container(self, td: Floor) -> Floor:
        found = {}
        for key in self.reads:
            value = td.get(key)
            if value is not None:
                found[key] = value
            elif not self.partial_tolerant:
                raise KeyError
        made = self.run(found)
        if td.locked:
            raise RuntimeError
        written = [(key, td._checked("", made[key])) for key in self.writes if key in made]
        for key, value in written:
            if type(key) is str:
                td.entries[key] = value
                continue
            first, last = key
            level = td.entries.get(first)
            if level is None:
                level = td.entries[first] = Floor(None, td.batch_size, td.device)
            level.set(last, value)
        return td

    def select_out_keys(self, *keys: object) -> Keyed:
        if not set(keys) <= set(self.writes):
            raise KeyError
        self.writes = list(keys)
        Keyed.changes += 1
        return self


class Module(Keyed):
    """A module or function between keys."""

    def __init__(self, module: object, in_keys: list[object], out_keys: list[object]) -> None:
        super().__init__()
        self.module, self.reads, self.writes = module, [*in_keys], [*out_keys]

    def run(self, found: dict[object, object]) -> dict[object, Tensor]:
        result = self.module(*[found[key] for key in self.reads])
        outputs = (result,) if isinstance(result, Tensor) else result
        return dict(zip(self.writes, outputs, strict=True))


class Steps(nn.ModuleList):
    """The members of a sequence, which say that they change."""

    def add_module(self, name: str, module: nn.Module | None) -> None:
        super().add_module(name, module)
        Keyed.changes += 1

    def insert(self, index: int, module: nn.Module) -> None:
        super().insert(index, module)
        Keyed.changes += 1

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        Keyed.changes += 1

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        Keyed.changes += 1


class Sequence(Keyed):
    """Modules one after the other; those whose outputs nobody needs are left out."""

    def __init__(self, *steps: Keyed, partial_tolerant: bool = False) -> None:
        super().__init__()
        self.steps, self.partial_tolerant = Steps(steps), partial_tolerant
        self.selected: tuple[object, ...] = ()
        self.follow()

    def follow(self) -> None:
        self.live, self.reads, self.writes = [*self.steps], [], []
        for step in self.live:
            reads, writes = step.in_keys, step.out_keys
            self.reads += [k for k in reads if k not in self.writes and k not in self.reads]
            self.writes += [key for key in writes if key not in self.writes]
        if self.selected:
            self.select_out_keys(*self.selected)
        self.at = Keyed.changes

    @property
    def in_keys(self) -> list[object]:
        if self.at != Keyed.changes:
            self.follow()
        return [*self.reads]

    def __iter__(self) -> object:
        return iter(self.steps)

    def select_out_keys(self, *keys: object) -> Keyed:
        self.selected, needed, self.live = keys, set(keys), []
        for step in reversed(self.steps):
            if needed & set(step.writes):
                self.live.insert(0, step)
                needed = (needed - set(step.writes)) | set(step.reads)
        return super().select_out_keys(*keys)

    def run(self, found: dict[object, object]) -> dict[object, Tensor]:
        values = dict(found)
        for step in self.live:
            if self.partial_tolerant and not values.keys() >= set(step.reads):
                continue
            values.update(step.run(values))
        return values


class Probabilistic(Keyed):
    """A distribution of entries: its mean, or a draw with its log-probability."""

    def __init__(
        self,
        in_keys: list[str],
        out_keys: list[str],
        distribution_class: type[Distribution],
        default_interaction_type: bool,
        return_log_prob: bool,
    ) -> None:
        super().__init__()
        self.reads, self.writes = [*in_keys], [*out_keys]
        self.kind, self.draws = distribution_class, default_interaction_type
        if return_log_prob:
            self.writes.append(f"{out_keys[0]}_log_prob")

    def run(self, found: dict[object, object]) -> dict[object, Tensor]:
        dist = self.kind(**{key: found[key] for key in self.reads})
        value = dist.rsample() if self.draws else dist.mean
        made = {self.writes[0]: value}
        if len(self.writes) > 1:
            made[self.writes[1]] = dist.log_prob(value)
        return made


class Interaction:
    """Which value of a distribution is taken."""

    DETERMINISTIC, RANDOM = False, True


ROWS = {
    "nn": (
        "module(td)",
        "module(x=x)",
        "module(x) positional",
        "module(td), nested keys",
        "function of 2, module(td)",
        "function of 2, kwargs",
        "tutorial Sequential(td)",
        "tutorial Sequential(x=x)",
        "tutorial Sequential(x=x), grad on",
        "tutorial, 256x64, (x=x)",
        "select_out_keys, (td)",
        "partial_tolerant, (td)",
        "10 layers, (td)",
        "10 layers, (x=x)",
        "in_keys of a module",
        "in_keys of 3 layers",
        "in_keys of 10 layers",
        "build 3 layers",
        "build 10 layers",
        "probabilistic, mean",
        "probabilistic, sample + log_prob",
        "stochastic actor, (td)",
    ),
    "functional": ("vmap over 3 sets",),
    "compile": tuple(
        f"{what}: {call}, {backend}"
        for what in ("ops", "seq td", "seq kwargs")
        for call in ("first call", "per call")
        for backend in ("eager backend", "inductor")
    ),
}
