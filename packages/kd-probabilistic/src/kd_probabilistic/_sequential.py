"""`ProbabilisticTensorDictSequential`: a sequence with probabilistic modules.

The distribution of all its values comes from a `Walk`: the steps run one after another, and each
probabilistic module leaves its distribution. Knows the plain way to run a sequence; must not know
plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, Self, TypeAlias, overload

from torch import Size, Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.distributions import Distribution

from kd_core import (
    InvalidArgument,
    NestedKey,
    TensorDict,
    TensorDictBase,
    format_key,
)
from kd_core.extending import assume_constant_result, is_exporting
from kd_nn import (
    InputMissing,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    dispatch,
    skip_existing,
)
from kd_probabilistic._composite import CompositeDistribution, list_keys, only_key
from kd_probabilistic._interaction import (
    InteractionType,
    composite_lp_aggregate,
    enter_interaction_type,
    interaction_type,
    set_interaction_type,
)
from kd_probabilistic._module import DISCARD, LogProb, ProbabilisticTensorDictModule, is_done

Keys: TypeAlias = tuple[NestedKey, ...]


# Scoring: the log-probability of a value that another module has produced.


class ScoringModule(TensorDictModuleBase):
    """Write the log-probability of an entry under the distribution of a probabilistic module.

    It reads the parameters and the value, and writes `log_prob_keys`.

    Args:
        module: The probabilistic module whose distribution scores.

    Example:
        >>> import torch
        >>> from torch.distributions import Bernoulli
        >>> coin = ProbabilisticTensorDictModule(["probs"], ["toss"], distribution_class=Bernoulli)
        >>> ScoringModule(coin)(probs=torch.tensor(0.25), toss=torch.tensor(1.0)).exp()
        tensor(0.2500)
    """

    _kd_changes_by_assignment = True

    def __init__(self, module: ProbabilisticTensorDictModule) -> None:
        super().__init__()
        self.module = module

    @property
    def dist_params_keys(self) -> list[NestedKey]:
        """The keys of the parameters."""
        return self.module.dist_params_keys

    @property
    def dist_sample_keys(self) -> list[NestedKey]:
        """The key of each value that is scored."""
        return self.module.dist_sample_keys

    @property
    def log_prob_keys(self) -> list[NestedKey]:
        """The keys of the log-probabilities."""
        return self.module.log_prob_keys

    def get_dist(self, tensordict: TensorDictBase) -> Distribution:
        """Build the distribution of a container's parameters."""
        return self.module.get_dist(tensordict)

    build_dist_from_params = get_dist

    def log_prob(
        self,
        tensordict: TensorDictBase,
        dist: Distribution | None = None,
        *,
        aggregate: bool | None = None,
    ) -> LogProb:
        """Return the log-probability of the value that the container holds."""
        return self.module.log_prob(tensordict, dist, aggregate=aggregate)

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the log-probability of the value.

        Raises:
            InputMissing: If the value or a parameter is missing.
        """
        if skip_existing() and is_done(self, tensordict):
            return tensordict
        module = self.module
        found = self._kd_outputs(module._kd_read(tensordict), module._kd_read_values(tensordict))
        made = dict(zip(self._kd_own_out_keys(), found, strict=True))
        return tensordict.update({key: made[key] for key in self.out_keys})

    def _kd_forward_values(self, *values: object) -> tuple[object, ...]:
        """Score a bare value; see `forward`."""
        by_key = dict(zip(self.in_keys, values, strict=True))
        params = [by_key[key] for key in self.module.dist_params_keys]
        return self._kd_outputs(params, [by_key[key] for key in self.module.dist_sample_keys])

    def _kd_outputs(self, params: Sequence[object], values: Sequence[object]) -> tuple[Tensor, ...]:
        return self.module._kd_scored(params, values)[: len(self.module.log_prob_keys)]

    def _kd_own_in_keys(self) -> tuple[NestedKey, ...]:
        module = self.module
        return tuple(dict.fromkeys([*module.dist_params_keys, *module.dist_sample_keys]))

    def _kd_own_out_keys(self) -> tuple[NestedKey, ...]:
        return tuple(self.module.log_prob_keys)

    def _kd_set_in_spec(self, spec: object) -> None:
        raise self._kd_refusal("in_keys")

    def _kd_set_out_keys_source(self, keys: object) -> None:
        raise self._kd_refusal("out_keys")

    def _kd_refusal(self, name: str) -> InvalidArgument:
        return InvalidArgument(
            f"the {name} of a `ScoringModule` follow from the module whose distribution scores and "
            "cannot be assigned. Change the settings of that module."
        )


Leaf: TypeAlias = ProbabilisticTensorDictModule | ScoringModule
LEAVES = (ProbabilisticTensorDictModule, ScoringModule)
_SAY_ALL = (TensorDictModule, *LEAVES)
"""Classes of modules that write nothing but their `out_keys`."""


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
        self.container = self._first = container
        self.whole = whole
        self._source = container.copy() if keeps else None
        self.found: list[tuple[Leaf, Distribution]] = []
        self._kd_keeps = keeps
        self._written: list[NestedKey] = []
        self._written_first: list[NestedKey] = []

    @property
    def is_replaced(self) -> bool:
        """Whether a step returned another container, with which the others went on."""
        return self.container is not self._first

    def run(self, step: nn.Module, is_fed: bool = False) -> None:
        """Run a step, and note what it writes: with functions inside more than it says."""
        keys, before = _keys(step, "out_keys"), self.container
        says_all = type(step) in _SAY_ALL
        held = {} if says_all else dict(before.items(True, True))
        self.container = step(before, _requires_sample=False) if is_fed else step(before)
        here, now = self.container is before, {} if says_all else before.items(True, True)
        new = [key for key, value in dict(now).items() if held.get(key) is not value]
        self._written += [*new, *keys] if here else keys
        if before is self._first:
            self._written_first += [*new, *keys] if here else new

    def hold(self, leaf: Leaf) -> None:
        """Put the values of a module that are kept into the container of a step, if it is new."""
        if self._source is None:
            return
        present = self.container.keys(True)
        lost = [key for key in leaf.dist_sample_keys if key not in present]
        held = {key: self._source.get(key) for key in lost if key in self._source.keys(True)}
        if held:
            self.container = self.container.copy().update(held)

    def pass_by(self, leaf: Leaf) -> None:
        """Run a probabilistic module whose distribution is not asked for, unless it may be kept."""
        self.hold(leaf)
        present = self.container.keys(True)
        if not self._kd_keeps or any(key not in present for key in leaf.dist_sample_keys):
            self.run(leaf)

    def take(self, leaf: Leaf, draws: bool, is_fed: bool = False) -> None:
        """Build the distribution of a probabilistic module.

        Args:
            leaf: The module.
            draws: Whether its values are needed afterwards.
            is_fed: Whether earlier steps wrote them.

        Raises:
            InputMissing: If a value is missing that is scored, as all are if none is drawn again
                and the distribution is about all of them.
        """
        self.hold(leaf)
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
            self.run(leaf, is_fed)

    def with_given(self, keys: list[NestedKey]) -> TensorDictBase:
        """Return the container with the values that were there at first, if a step replaced one."""
        held = {key: value for key in keys if (value := self._given(key)) is not None}
        if all(self.container.get(key, None) is value for key, value in held.items()):
            return self.container
        return self.container.copy().update(held)

    def _given(self, key: NestedKey) -> object:
        return None if self._source is None else self._source.get(key, None)

    def write(self, target: TensorDictBase) -> TensorDictBase:
        """Write what the steps wrote to another container, and return it."""
        return self._put(self.container, self._written, target)

    def write_first(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write what the steps wrote to the container that they were given.

        Args:
            tensordict: The container of which they got a copy.

        Returns:
            The container that the last of them returned: this one, unless it was replaced.
        """
        self._put(self._first, self._written_first, tensordict)
        return self.container if self.is_replaced else tensordict

    def _put(
        self, made: TensorDictBase, keys: list[NestedKey], target: TensorDictBase
    ) -> TensorDictBase:
        kept = dict.fromkeys(key for key in keys if key != DISCARD)
        return target.update(made.select(*kept, strict=False))

    def composite(self, as_given: bool = False) -> CompositeDistribution:
        """Return the distribution of all values, of the batch size of the last container.

        Args:
            as_given: Whether it has that of the input, if a step returned one of fewer dimensions.

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
        given = self._first.batch_size
        rows = (part.batch_shape[: len(given)] == given for part in parts.values())
        fits = as_given and self.container.batch_dims < len(given) and all(rows)
        return CompositeDistribution.from_distributions(
            self._first if fits else self.container, parts
        )


def _keys(step: nn.Module, name: str) -> list[NestedKey]:
    return list(getattr(step, name))


Modules = nn.Module | list[nn.Module] | dict[str, nn.Module]


class ProbabilisticTensorDictSequential(TensorDictSequential):
    """Run keyed modules in order; at least one of them is probabilistic.

    It offers everything of `TensorDictSequential`, and access to the distribution of its
    probabilistic modules. If earlier steps write all values of the last step, that step draws none:
    with `return_log_prob` it writes the log-probability of those values.

    Args:
        *modules: Keyed modules; or one list of them; or one dict, which names the steps.
        partial_tolerant: Whether steps whose inputs are missing are skipped.
        return_composite: Whether `get_dist` and `log_prob` are about the values of all
            probabilistic modules, as a `CompositeDistribution`; False is about the last module
            alone. None stands for True if several of the steps are `ProbabilisticTensorDictModule`
            of different values, or the last step is not probabilistic. Without it the steps
            before the last one run in the interaction type of that one, unless
            `set_interaction_type` says another.
        selected_out_keys: The outputs to keep; see `select_out_keys`.
        inplace: As for `TensorDictSequential`.

    Raises:
        InvalidArgument: If there is no module.

    Example:
        >>> import torch
        >>> from kd_nn import NormalParamExtractor, TensorDictModule
        >>> actor = ProbabilisticTensorDictSequential(
        ...     TensorDictModule(NormalParamExtractor(), ["hidden"], ["loc", "scale"]),
        ...     ProbabilisticTensorDictModule(
        ...         ["loc", "scale"], ["action"], distribution_class=torch.distributions.Normal
        ...     ),
        ... )
        >>> actor.select_out_keys("action")(hidden=torch.zeros(3, 4)).shape
        torch.Size([3, 2])
        >>> actor.dist_params_keys, actor.dist_sample_keys
        (['loc', 'scale'], ['action'])
    """

    _kd_changes_by_assignment = True
    _kd_writes_by_inplace: ClassVar[bool] = True

    return_composite: bool
    _kd_composite: bool | None
    """As it was given."""

    def __init__(
        self,
        *modules: Modules,
        partial_tolerant: bool = False,
        return_composite: bool | None = None,
        selected_out_keys: NestedKey | Sequence[NestedKey] | None = None,
        inplace: bool | Literal["empty"] | None = None,
    ) -> None:
        # A class of the user between this one and `TensorDictSequential` may not know it.
        chosen = {} if selected_out_keys is None else {"selected_out_keys": selected_out_keys}
        super().__init__(*modules, partial_tolerant=partial_tolerant, inplace=inplace, **chosen)
        steps = self._kd_steps()
        if not steps:
            self._kd_last_probabilistic()  # raises
        given = return_composite
        if return_composite is None:
            leaves = [step for step in steps if isinstance(step, LEAVES)]
            keys = [key for leaf in leaves for key in leaf.dist_sample_keys]
            further = not isinstance(steps[-1], _PROBABILISTIC)
            distinct = DISCARD not in keys and len({*keys}) == len(keys)
            return_composite = (len(leaves) > 1 or further) and distinct
        self._kd_settle(_kd_composite=given, return_composite=return_composite)

    @dispatch(auto_batch_size=False)
    def forward(
        self,
        tensordict: TensorDictBase,
        tensordict_out: TensorDictBase | None = None,
        _requires_sample: bool = True,
    ) -> TensorDictBase:
        """Run the steps on a container.

        Args:
            tensordict: The container to read.
            tensordict_out: The container to write, instead of what `inplace` says.
            _requires_sample: Whether the last step draws where no earlier one writes its values.

        Returns:
            The container that was written.

        Raises:
            InputMissing: If an entry that a step reads is missing.
        """
        return self._kd_run(tensordict, tensordict_out, not _requires_sample)

    def _kd_forward_values(self, *values: object) -> tuple[object, ...]:
        """Run all steps on one value per key of `in_keys`; return all that they write."""
        return super()._kd_forward_values(*values)

    def _kd_fed_keys(self) -> Keys:
        last = self._kd_steps()[-1:]
        return last[0]._kd_fed_keys() if last and isinstance(last[0], _FED) else ()

    def _kd_feeds_last(self) -> bool:
        steps = self._kd_steps()
        last = steps[-1] if steps else None
        if not isinstance(last, _FED) or not last._kd_fed_keys():
            return False
        written = {key for step in steps[:-1] for key in _keys(step, "out_keys")} - {DISCARD}
        return written.issuperset(last.dist_sample_keys)

    @property
    def dist_params_keys(self) -> list[NestedKey]:
        """The keys of the parameters of all probabilistic modules, the last one first."""
        return [key for leaf in reversed(self._kd_leaves()) for key in leaf.dist_params_keys]

    @property
    def dist_sample_keys(self) -> list[NestedKey]:
        """The keys of the values of all probabilistic modules, the last one first."""
        return [key for leaf in reversed(self._kd_leaves()) for key in leaf.dist_sample_keys]

    @property
    def log_prob_keys(self) -> list[NestedKey]:
        """The keys of the log-probabilities of all probabilistic modules, the last one first."""
        return [key for leaf in reversed(self._kd_leaves()) for key in leaf.log_prob_keys]

    @property
    def log_prob_key(self) -> NestedKey:
        """The key of the log-probability, if there is one."""
        return only_key(f"`{type(self).__name__}`", self.log_prob_keys)

    @property
    def default_interaction_type(self) -> InteractionType | None:
        """That of the last probabilistic module; `None` without one."""
        leaves = self._kd_leaves()
        return _drawing(leaves[-1]).default_interaction_type if leaves else None

    @property
    def num_samples(self) -> int | Size | None:
        """That of the last probabilistic module; `None` without one."""
        leaves = self._kd_leaves()
        return _drawing(leaves[-1]).num_samples if leaves else None

    @property
    def det_part(self) -> TensorDictSequential:
        """The steps before the last probabilistic module, as a sequence that shares them."""
        index = self._kd_index_of_last()
        steps = self._kd_named_steps()
        before, (name, last) = steps[:index], steps[index]
        if isinstance(last, ProbabilisticTensorDictSequential):
            before.append((name, last.det_part))
        return super()._kd_part(before, TensorDictSequential)

    def get_dist_params(
        self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None = None
    ) -> TensorDictBase:
        """Run the steps before the last one.

        They run in the interaction type of the last probabilistic module, unless there is a scope.

        Args:
            tensordict: Holds what these steps read.
            tensordict_out: The container to write, instead of `tensordict`.

        Returns:
            The container that was written: it has what the steps wrote, parameters included. Where
            one of them returned another container, as after several draws, that one.
        """
        _check_out(tensordict_out)
        walk = Walk(tensordict.copy(), False, whole=False)
        with set_interaction_type(interaction_type() or self.default_interaction_type):
            self._kd_run_before(walk)
        if tensordict_out is not None:
            return walk.write(tensordict_out)
        return walk.write_first(tensordict)

    def build_dist_from_params(self, tensordict: TensorDictBase) -> Distribution:
        """Build the last distribution from a container that holds its parameters.

        Raises:
            InputMissing: If a parameter is missing.
        """
        return self._kd_last_probabilistic()[1].build_dist_from_params(tensordict)

    def get_dist(
        self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None = None
    ) -> Distribution:
        """Run the steps before the last probabilistic module, and build the distribution.

        With several probabilistic modules, each is given the values of those before it.

        Args:
            tensordict: Holds what the sequence reads. What the steps wrote, parameters included,
                is in it afterwards, unless the distribution is a composite one of all modules.
            tensordict_out: A container to write that, in place of `tensordict`.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> coin = ProbabilisticTensorDictModule(
            ...     ["probs"], ["toss"], distribution_class=torch.distributions.Bernoulli
            ... )
            >>> model = ProbabilisticTensorDictSequential(coin)
            >>> model.get_dist(TensorDict(probs=torch.tensor(0.25))).mean
            tensor(0.2500)
        """
        if is_dynamo_compiling() and tensordict_out is None and type(tensordict) is TensorDict:
            name, holder = self._kd_prepare_dist(), self._modules["module"]
            last = None if name is None or holder is None else holder._modules[name]
            if isinstance(last, LEAVES) and self._kd_run_first(tensordict):
                return last.build_dist_from_params(tensordict)
        walk = self._kd_walked(tensordict, False, tensordict_out)
        dist = walk.composite() if walk.whole else walk.found[-1][1]
        self._kd_written(walk, tensordict, tensordict_out)
        return dist

    @assume_constant_result
    def _kd_prepare_dist(self) -> str | None:
        """Make what dynamo inlines for `get_dist`; see `_kd_prepare`.

        Returns:
            The name of the step whose distribution is asked for; None where only a `Walk` finds it.
        """
        if self.return_composite:
            return None
        index, last = self._kd_last_probabilistic()
        if isinstance(last, ProbabilisticTensorDictSequential) or not self._kd_prepare_first(index):
            return None
        return self._kd_named_steps()[index][0]

    def _kd_written(
        self, walk: Walk, tensordict: TensorDictBase, out: TensorDictBase | None
    ) -> None:
        """Write what the steps wrote, where the caller finds it."""
        if out is not None:
            walk.write(out)
        elif not walk.whole:
            walk.write_first(tensordict)

    @overload
    def log_prob(
        self,
        tensordict: TensorDictBase,
        tensordict_out: TensorDictBase | None = None,
        *,
        dist: Distribution | None = None,
        aggregate: Literal[True],
    ) -> Tensor: ...
    @overload
    def log_prob(
        self,
        tensordict: TensorDictBase,
        tensordict_out: TensorDictBase | None = None,
        *,
        dist: Distribution | None = None,
        aggregate: bool | None = None,
    ) -> LogProb: ...
    def log_prob(
        self,
        tensordict: TensorDictBase,
        tensordict_out: TensorDictBase | None = None,
        *,
        dist: Distribution | None = None,
        aggregate: bool | None = None,
    ) -> LogProb:
        """Return the log-probability of the values that the container holds.

        Values that it holds are not drawn again: each distribution is conditional on them.

        Args:
            tensordict: Holds the values, and what the sequence reads unless `dist` is given; it is
                written as by `get_dist`.
            tensordict_out: A container to write, in place of `tensordict`.
            dist: The distribution, if it has been built.
            aggregate: Whether those of several values are summed to one tensor; None follows the
                modules.

        Returns:
            A tensor; for several values that are not summed a container, at `log_prob_keys`.

        Raises:
            InputMissing: If a value is missing.
        """
        if dist is not None:
            return self._kd_scored_by(dist, tensordict, aggregate)
        walk = self._kd_walked(tensordict, True, tensordict_out)
        if walk.whole:
            values = walk.with_given(self.dist_sample_keys)
            score = self._kd_scored_by(walk.composite(as_given=True), values, aggregate)
        else:
            last, found = walk.found[-1]
            score = last.log_prob(walk.container, found, aggregate=aggregate)
        self._kd_written(walk, tensordict, tensordict_out)
        shown = _drawing(walk.found[-1][0])._kd_settings.shown
        if shown and aggregate is None and tensordict_out is None:
            tensordict.update(walk.container.select(*shown, strict=False))
        return score

    def _kd_scored_by(
        self, dist: Distribution, values: TensorDictBase, aggregate: bool | None
    ) -> LogProb:
        """Score values under a distribution that `get_dist` returned."""
        leaves = self._kd_asked()
        if len(leaves) == 1:
            return leaves[0].log_prob(values, dist, aggregate=aggregate)
        if not isinstance(dist, CompositeDistribution):
            raise InvalidArgument(
                f"`dist` must be the `CompositeDistribution` of all {len(leaves)} probabilistic "
                f"modules, got {type(dist).__name__}. Pass what `get_dist` returns."
            )
        if composite_lp_aggregate() if aggregate is None else aggregate:
            return dist.log_prob(values, aggregate=True)
        made = TensorDict()
        for leaf in leaves:
            found = leaf.log_prob(values, dist, aggregate=aggregate)
            if isinstance(found, Tensor):
                made.set(leaf.log_prob_keys[0], found)
            else:
                made.batch_size = found.batch_size
                made.update(found)
        return made

    def _kd_run_before(self, walk: Walk) -> None:
        """Run the steps before the last one, also those of the sequence that the last one is."""
        index = self._kd_index_of_last()
        self._kd_run_steps(walk, index)
        last = self._kd_steps()[index]
        if isinstance(last, ProbabilisticTensorDictSequential):
            last._kd_run_before(walk)

    def _kd_run_steps(self, walk: Walk, count: int) -> None:
        """Run the first steps."""
        if self.partial_tolerant:  # the keys of a step say whether it is skipped
            self._kd_refresh_keys()
        for step in self._kd_steps()[:count]:
            if self._kd_skips(step, walk.container):
                continue
            if isinstance(step, LEAVES):
                walk.pass_by(step)
            else:
                walk.run(step)

    def _kd_visit(self, walk: Walk, ends: bool, is_fed: bool = False) -> None:
        """Run all steps, and take the distributions of all probabilistic modules.

        Args:
            walk: What is known so far.
            ends: Whether the values of the last step are not needed.
            is_fed: Whether they were written before.
        """
        if self.partial_tolerant:
            self._kd_refresh_keys()
        steps = self._kd_steps()
        is_fed = is_fed or self._kd_fed
        for place, step in enumerate(steps):
            at_end = place == len(steps) - 1
            fed = at_end and is_fed and isinstance(step, _FED)
            if isinstance(step, ProbabilisticTensorDictSequential):
                step._kd_visit(walk, ends and at_end, fed)
            elif isinstance(step, LEAVES):
                walk.take(step, not (ends and at_end), fed)
            elif not self._kd_skips(step, walk.container):
                walk.run(step)

    def _kd_walked(
        self, tensordict: TensorDictBase, keeps: bool, out: TensorDictBase | None
    ) -> Walk:
        _check_out(out)
        if is_dynamo_compiling():
            self._kd_fill_missing()
        walk = Walk(tensordict.copy(), keeps, whole=False)
        self._kd_walk(walk)
        return walk

    def _kd_walk(self, walk: Walk) -> None:
        """Run what the distribution needs, and take it."""
        if self.return_composite:
            if not self._kd_leaves():
                self._kd_last_probabilistic()  # raises
            walk.whole = True
            self._kd_visit(walk, ends=True)
            return
        index, last = self._kd_last_probabilistic()
        with set_interaction_type(interaction_type() or self.default_interaction_type):
            self._kd_run_steps(walk, index)
        if isinstance(last, ProbabilisticTensorDictSequential):
            last._kd_walk(walk)
        else:
            walk.take(last, draws=False)

    def _kd_scope(self) -> tuple[int, Callable[[], Callable[[], None] | None]] | None:
        """Return the scope of the steps before the last one: the interaction type of that one."""
        if self.return_composite:
            return None
        index, last = self._kd_last_probabilistic()
        leaf = (
            last._kd_leaves()[-1] if isinstance(last, ProbabilisticTensorDictSequential) else last
        )
        drawing = _drawing(leaf)
        # An export warns of a scope, which is written outside of its graph: it has one where an
        # earlier value depends on it.
        if not index or (is_exporting() and not self._kd_draws_before(index)):
            return None
        return index, lambda: enter_interaction_type(drawing.default_interaction_type)

    def _kd_draws_before(self, index: int) -> bool:
        """Return whether one of the first steps is, or holds, a probabilistic module."""
        for step in self._kd_steps()[:index]:
            for part in step.modules():
                if isinstance(part, LEAVES):
                    return True
        return False

    def _kd_index_of_last(self) -> int:
        """Return the place of the last probabilistic module, or of the last step of a composite."""
        if self.return_composite:
            return len(self) - 1
        return self._kd_last_probabilistic()[0]

    def _kd_asked(self) -> list[Leaf]:
        """Return the probabilistic modules that the distribution is about."""
        if self.return_composite:
            return self._kd_leaves()
        last = self._kd_last_probabilistic()[1]
        return last._kd_asked() if isinstance(last, ProbabilisticTensorDictSequential) else [last]

    def _kd_leaves(self) -> list[Leaf]:
        """Return all probabilistic modules, also those in sequences inside."""
        found: list[Leaf] = []
        for _, step in self._kd_named_steps():
            if isinstance(step, ProbabilisticTensorDictSequential):
                found += step._kd_leaves()
            elif isinstance(step, LEAVES):
                found.append(step)
        return found

    def _kd_part(self, steps: Sequence[tuple[str, nn.Module]], kind: type | None = None) -> Self:
        if not any(isinstance(step, _PROBABILISTIC) for _, step in steps):
            return super()._kd_part(steps, TensorDictSequential)
        part = super()._kd_part(steps, kind)
        given: bool | None = self.__dict__.get("_kd_composite")
        if given is not None:
            part.return_composite = part._kd_composite = given
        return part

    def _kd_last_probabilistic(self) -> tuple[int, Probabilistic]:
        steps = self._kd_named_steps()
        for index in reversed(range(len(steps))):
            step = steps[index][1]
            if isinstance(step, _PROBABILISTIC):
                return index, step
        raise InvalidArgument(
            "a `ProbabilisticTensorDictSequential` must have a `ProbabilisticTensorDictModule` "
            f"among its {len(steps)} steps to have a distribution. Add one."
        )


Probabilistic = Leaf | ProbabilisticTensorDictSequential
_PROBABILISTIC = (*LEAVES, ProbabilisticTensorDictSequential)
_FED = (ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential)
"""Classes of modules that may be fed with what they would draw."""


def _check_out(out: object) -> None:
    """Raise if the container to write is a distribution, which is given by position easily."""
    if isinstance(out, Distribution):
        raise InvalidArgument(
            "`tensordict_out` must be a container, got a distribution. Pass it as `dist=`."
        )


def _drawing(leaf: Leaf) -> ProbabilisticTensorDictModule:
    """Return the module whose distribution a probabilistic module has."""
    return leaf.module if isinstance(leaf, ScoringModule) else leaf
