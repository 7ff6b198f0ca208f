"""Policies of lerobot, with their processors.

Knows what lerobot does around its networks: images of cameras, statistics of a data set, chunks of
actions. Its modules are known by their attributes. The oracle alone imports it: it prepares
observations as lerobot's own `predict_action` does.
"""

from __future__ import annotations

import importlib
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from kd_core import NestedKey, unravel_key
from kd_export._errors import ExportError, NotExportable, kind_of
from kd_export._schema.files import Json
from kd_export.policies import _policy as spaces
from kd_export.policies._policy import (
    ACTION,
    Affine,
    ChannelsFirst,
    Draft,
    Normalise,
    Policy,
    ScaleImage,
    Unscale,
    by_key,
    copied,
    wrong_kind,
)

_IMAGES, _IMAGE = "observation.images", "observation.image"
_NUMBERS = ("observation.state", "observation.environment_state")
_SMALL = 3 * 64 * 64
"""How many numbers a small image has."""
_RANGES = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
_BEFORE = (
    *("RenameObservationsProcessorStep", "AddBatchDimensionProcessorStep"),
    *("DeviceProcessorStep", "NormalizerProcessorStep"),
)
_AFTER = ("UnnormalizerProcessorStep", "DeviceProcessorStep")


class Feature(Protocol):
    """What a policy says of an entry."""

    type: object
    shape: Sequence[int]


class Config(Protocol):
    """What is used of the configuration of a policy."""

    type: str
    device: str | None
    input_features: Mapping[str, Feature]
    image_features: Mapping[str, Feature]
    action_feature: Feature


class Normaliser(Protocol):
    """A processor step that normalises."""

    features: Mapping[str, Feature]
    norm_map: Mapping[object, object]
    eps: float
    normalize_observation_keys: Collection[str] | None
    _tensor_stats: Mapping[str, Mapping[str, Tensor]]


class Steps(Protocol):
    """A pipeline of processor steps."""

    steps: Sequence[object]

    def __call__(self, data: object) -> Any:  # a batch, or an action
        """Process observations, or an action."""
        ...


class Model(Protocol):
    """What is used of a policy."""

    config: Config

    def select_action(self, batch: object) -> Tensor:
        """Return one action for each row."""
        ...

    def predict_action_chunk(self, batch: object) -> Tensor:
        """Return a chunk of actions for each row."""
        ...

    def reset(self) -> None:
        """Forget the chunk."""
        ...


@dataclass
class Memory:
    """What a policy remembers of some rows that were reset at the same step.

    Attributes:
        rows: Their numbers.
        held: Tensors with these rows first: actions in a queue, or one mean of several chunks.
        counts: How many chunks each action of that mean is of.
    """

    rows: Tensor
    held: list[Tensor] | None = None
    counts: Tensor | None = None


class Predict(spaces.Oracle):
    """The policy's own `select_action` between its processors.

    A policy of lerobot resets all its rows at once; those that were reset together are called
    together here.
    """

    def __init__(
        self,
        policy: Model,
        processors: tuple[Steps, Steps],
        names: Sequence[str],
        chunk: int,
    ) -> None:
        self._policy, self._before, self._after = policy, *processors
        self._names, self._chunk = names, chunk
        self._memories: list[Memory] = []

    def __call__(self, observations: object) -> Tensor:
        """Return the actions."""
        given = self._prepared(observations)
        count = len(next(iter(given.values())))
        if sum(len(one.rows) for one in self._memories) != count:
            self._memories = [Memory(torch.arange(count))]
        parts = []
        for memory in self._memories:
            batch = self._before({name: value[memory.rows] for name, value in given.items()})
            parts.append(self._whole(batch) if self._chunk else self._one(batch, memory))
        order = torch.cat([memory.rows for memory in self._memories]).argsort()
        return torch.cat(parts)[order]

    def reset(self, mask: Tensor | None = None) -> None:
        """Begin a new episode in these rows, or in all."""
        if mask is None:
            self._memories = []
            return
        kept, new = [], []
        for memory in self._memories:
            out = mask[memory.rows]
            new.append(memory.rows[out])
            if not bool(out.all()):
                held = None if memory.held is None else [x[~out] for x in memory.held]
                kept.append(Memory(memory.rows[~out], held, memory.counts))
        begun = torch.cat(new) if new else torch.zeros(0, dtype=torch.int64)
        self._memories = [*kept, *([Memory(begun)] if len(begun) else [])]

    def _prepared(self, observations: object) -> dict[str, Tensor]:
        """Prepare observations as `predict_action` of lerobot does, one row after the other."""
        theirs = importlib.import_module("lerobot.policies.utils")
        device = torch.device(self._policy.config.device or "cpu")
        keys = [tuple(name.split(".")) for name in self._names]
        by_name = dict(zip(self._names, by_key(observations, keys).values(), strict=True))
        rows = []
        for place in range(len(next(iter(by_name.values())))):
            row = {name: value[place].cpu().numpy() for name, value in by_name.items()}
            rows.append(theirs.prepare_observation_for_inference(row, device))
        return {name: torch.cat([row[name] for row in rows]) for name in self._names}

    def _one(self, batch: object, memory: Memory) -> Tensor:
        before = _remembered(self._policy)
        try:
            if memory.held is None:
                self._policy.reset()
            else:
                _remember(self._policy, memory)
            action = self._policy.select_action(batch)
            now = _remembered(self._policy)
            memory.held, memory.counts = now.held, now.counts
        finally:
            _remember(self._policy, before)
        sent: Tensor = self._after(action)
        return sent.detach().cpu()

    def _whole(self, batch: object) -> Tensor:
        chunk = self._policy.predict_action_chunk(batch)[:, : self._chunk]
        actions = [self._after(action) for action in chunk.unbind(1)]
        return torch.stack(actions, 1).detach().cpu()


def _queue(policy: object) -> deque[Tensor] | None:
    queues: dict[str, deque[Tensor]] = getattr(policy, "_queues", {})
    found: deque[Tensor] | None = getattr(policy, "_action_queue", queues.get("action"))
    return found


def _remembered(policy: object) -> Memory:
    """Return what a policy remembers."""
    ensembler = getattr(policy, "temporal_ensembler", None)
    if ensembler is not None:
        held = ensembler.ensembled_actions
        return Memory(
            torch.zeros(0), None if held is None else [held], ensembler.ensembled_actions_count
        )
    return Memory(torch.zeros(0), list(_queue(policy) or ()))


def _remember(policy: object, memory: Memory) -> None:
    """Let a policy remember this."""
    ensembler = getattr(policy, "temporal_ensembler", None)
    if ensembler is not None:
        held = memory.held
        ensembler.ensembled_actions = None if held is None else held[0].clone()
        ensembler.ensembled_actions_count = memory.counts
        return
    queue = _queue(policy)
    if queue is not None:
        queue.clear()
        queue.extend(memory.held or ())


class Rename(nn.Identity):
    """Rename an observation."""


class ActionChunk(nn.Module):
    """Run an ACT network of lerobot: a chunk of actions for each row.

    Args:
        network: The network.
        names: What the observations are called, in order.
        images: Which of them are images.
        steps: How many actions of the chunk are used.
    """

    def __init__(
        self, network: nn.Module, names: Sequence[str], images: Sequence[str], steps: int
    ) -> None:
        super().__init__()
        self.network = network
        self.names, self.images, self.steps = list(names), list(images), steps

    def forward(self, *observations: Tensor) -> Tensor:
        """Return the actions, (rows, steps, elements)."""
        batch: dict[str, object] = dict(zip(self.names, observations, strict=True))
        if self.images:
            batch[_IMAGES] = [batch[name] for name in self.images]
        chunk: Tensor = self.network(batch)[0]
        return chunk[:, : self.steps]


class Latent(Protocol):
    """What is used of the network of TD-MPC."""

    def encode(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Encode observations."""
        ...

    def pi(self, encoded: Tensor) -> Tensor:
        """Return an action for each row."""
        ...


class Planless(nn.Module):
    """Run the policy network of TD-MPC, without planning: an action for each row.

    Args:
        network: The network.
        names: What the observations are called, in order.
        images: Which of them are images.
        repeats: How often the action is used.
    """

    network: Latent

    def __init__(
        self, network: Latent, names: Sequence[str], images: Sequence[str], repeats: int
    ) -> None:
        super().__init__()
        self.network = network
        self.names = [_IMAGE if name in images else name for name in names]
        self.repeats = repeats

    def forward(self, *observations: Tensor) -> Tensor:
        """Return the action as often as it is used, (rows, repeats, elements)."""
        batch = dict(zip(self.names, observations, strict=True))
        action = self.network.pi(self.network.encode(batch))
        return action.clamp(-1, 1)[:, None].expand(-1, self.repeats, -1)


class FirstOf(nn.Module):
    """Take the first action of a chunk.

    Example:
        >>> FirstOf()(torch.tensor([[[1.0], [2.0]]]))
        tensor([[1.]])
    """

    def forward(self, chunk: Tensor) -> Tensor:
        """Return one action for each row."""
        return chunk[:, 0]


class Queue(nn.Module):
    """Use up a chunk of actions, one a step, and take a new one where none is left.

    The state of a row is the chunk, rolled on, and how many of its actions are left: 0 at the
    beginning.

    Example:
        >>> chunk, none = torch.tensor([[[1.0], [2.0]]]), torch.zeros(1, dtype=torch.int64)
        >>> action, held, left = Queue()(chunk, torch.zeros(1, 2, 1), none)
        >>> action, left
        (tensor([[1.]]), tensor([1]))
        >>> Queue()(chunk + 5, held, left)[0]
        tensor([[2.]])
    """

    def forward(self, chunk: Tensor, held: Tensor, left: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return an action for each row, and the next state."""
        ends = left == 0
        used = torch.where(ends[:, None, None], chunk, held)
        count = torch.where(ends, torch.full_like(left, chunk.shape[1]), left)
        return used[:, 0], torch.cat([used[:, 1:], used[:, :1]], 1), count - 1


class Ensemble(nn.Module):
    """Average the chunks of the last steps: for each step what was predicted for it.

    The state of a row is the average for the steps to come, and of how many chunks it is.

    Args:
        weights: The weight of each chunk, the oldest first.
    """

    weights: Tensor
    sums: Tensor

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.register_buffer("weights", weights.detach().clone())
        self.register_buffer("sums", weights.detach().cumsum(0))

    def forward(
        self, chunk: Tensor, means: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return an action for each row, and the next state."""
        before = torch.where(counts == 0, 0.0, self.sums[(counts - 1).clamp(min=0)])[..., None]
        weight, after = self.weights[counts][..., None], self.sums[counts][..., None]
        mixed = (means * before + chunk[:, :-1] * weight) / after
        mixed = torch.cat([mixed, chunk[:, -1:]], 1)
        found = torch.cat([counts + 1, torch.ones_like(counts[:, :1])], 1)
        return mixed[:, 0], mixed[:, 1:], found[:, 1:]


def from_lerobot(
    policy: nn.Module,
    preprocessor: object,
    postprocessor: object,
    *,
    chunk: str = "state",
    metadata: Mapping[str, object] | None = None,
) -> Policy:
    """Build a policy of one of lerobot and its two processors.

    Supported are ACT, with its queue of actions or with temporal ensembling, and TD-MPC without
    planning. Policies that draw noise, such as Diffusion, have no one action to compare.

    Observations are those that `predict_action` of lerobot takes: images of cameras as uint8 with
    their channels last, and numbers as float32. Their keys are lerobot's names, split at the dots.

    Args:
        policy: The policy.
        preprocessor: What stands before it.
        postprocessor: What stands behind it.
        chunk: Where the rest of a chunk of actions is kept. ``"state"``: in the state of the file,
            which gives one action a step and runs the network at each. ``"action"``: nowhere; the
            file gives all actions that are used of a chunk, (rows, steps, elements), and is called
            again when they are used up. The metadata of the file say which, and how many.
        metadata: What the file says of the policy.

    Returns:
        The policy. The action has the key ``"action"``.

    Raises:
        NotExportable: The policy or a step of a processor is of a kind that is not converted.
    """
    if not _is_model(policy):
        raise wrong_kind(
            "a policy of lerobot",
            policy,
            "a policy, such as ACTPolicy",
            "Load it with the class of its kind: `ACTPolicy.from_pretrained(path)`.",
        )
    if chunk not in ("state", "action"):
        raise ExportError(
            f"expected 'state' or 'action' for `chunk`, got {chunk!r}.",
            expected="'state' or 'action'",
            got=chunk,
        )
    config = policy.config
    before = _processor("preprocessor", preprocessor, _BEFORE)
    after = _processor("postprocessor", postprocessor, _AFTER)
    used = _used(config)
    outside = _renamed(before)
    names = [outside.get(name, name) for name in used]
    scales = _scales(before, used)
    draft = Draft()
    shapes = {name: tuple(config.input_features[name].shape) for name in used}
    small = all(math.prod(shape) <= _SMALL for shape in shapes.values())
    rows = spaces.ROWS if small else 2
    for raw, name in zip(names, used, strict=True):
        values = _drawn(raw, (rows, *shapes[name]), scales.get(name))
        draft.example[_key(raw)] = values
        if values.dtype is torch.uint8:
            draft.change(_key(raw), ChannelsFirst(), ScaleImage())
        if raw != name:
            draft.add(Rename(), [_key(raw)], [_key(name)])
        if name in scales:
            draft.change(_key(name), *scales[name].forth())
    network, count, predicted = _network(policy, config, used, chunk)
    draft.add(network, [_key(name) for name in used], [ACTION])
    if chunk == "state":
        kept, starts = _kept(policy, rows, count, predicted, config.action_feature.shape[0])
        draft.add_with_state(kept, [ACTION], [ACTION], starts)
    for scale in _scales(after, [ACTION]).values():
        draft.change(ACTION, *scale.back())
    oracle = Predict(policy, (before, after), names, count if chunk == "action" else 0)
    said: dict[str, object] = {
        "framework": "lerobot",
        "algorithm": type(policy).__name__,
        "chunk": _told(config, chunk, count, predicted),
        **(metadata or {}),
    }
    return draft.finish(oracle, said)


def _is_model(given: object) -> TypeGuard[Model]:
    config = getattr(given, "config", None)
    return hasattr(config, "input_features") and hasattr(given, "select_action")


def _told(config: Config, where: str, count: int, predicted: int) -> dict[str, Json]:
    """Return what a file says of its chunks."""
    weight = getattr(config, "temporal_ensemble_coeff", None)
    told: dict[str, Json] = {"kept in": where, "steps": count, "predicted": predicted}
    return told if weight is None else {**told, "temporal ensemble": float(weight)}


def _key(name: str) -> NestedKey:
    return unravel_key(tuple(name.split(".")))


def _processor(name: str, given: object, known: Sequence[str]) -> Steps:
    if not _is_pipeline(given):
        raise NotExportable(
            f"expected a pipeline of processor steps for `{name}`, got {kind_of(given)}.",
            expected="a pipeline",
            got=type(given).__name__,
            hint="Load both by `make_pre_post_processors(policy.config, path)`. Policies that hold "
            "their statistics themselves are brought up to date by lerobot's "
            "`migrate_policy_normalization`.",
        )
    for step in given.steps:
        kind = type(step).__name__
        if kind not in known or getattr(step, "float_dtype", None) not in (None, "float32"):
            raise NotExportable(
                f"the step `{kind}` of the {name} is of a kind that kd_export does not know.",
                expected=tuple(known),
                got=kind,
                hint="Leave it out and apply it beside the file, or write the policy as a keyed "
                "module and pass `oracle=` to `kd_export.save`.",
            )
    return given


def _is_pipeline(given: object) -> TypeGuard[Steps]:
    return isinstance(getattr(given, "steps", None), Sequence) and callable(given)


def _used(config: Config) -> list[str]:
    """Return the names of the observations that a policy reads."""
    images = config.image_features
    return [name for name in config.input_features if name in images or name in _NUMBERS]


def _renamed(processor: Steps) -> dict[str, str]:
    """Return what observations are called outside, by what the policy calls them."""
    found: dict[str, str] = {}
    for step in processor.steps:
        changes: Mapping[str, str] = getattr(step, "rename_map", {})
        found |= {new: found.get(old, old) for old, new in changes.items()}
    return found


@dataclass(frozen=True)
class Scale:
    """How an entry is normalised.

    Attributes:
        start: The mean, or the least value.
        width: The deviation, or the way from the least value to the greatest.
        ranged: Whether these are a least and a greatest value, which become -1 and 1.
        epsilon: What keeps a deviation from zero.
    """

    start: Tensor
    width: Tensor
    ranged: bool
    epsilon: float

    def forth(self) -> list[nn.Module]:
        """Return the steps that normalise."""
        if self.ranged:
            return [Normalise(self.start, self.width / 2), Affine(1.0, -1.0)]
        return [Normalise(self.start, self.width + self.epsilon)]

    def back(self) -> list[nn.Module]:
        """Return the steps that undo it."""
        if self.ranged:
            return [Unscale(self.start, self.start + self.width)]
        return [Affine(self.width, self.start)]

    def draw(self, rows: int, source: torch.Generator) -> Tensor:
        """Draw raw values, of which most become numbers from -3 to 3, or from -1 to 1."""
        spread = spaces.spread((rows, *self.start.shape), source).float()
        if self.ranged:
            return self.start + (spread + 1) / 2 * self.width
        return self.start + spaces.REACH * self.width * spread


def _scales(processor: Steps, names: Sequence[str]) -> dict[str, Scale]:
    """Return how entries are normalised, of those that are."""
    found = {}
    for step in processor.steps:
        if not _is_normaliser(step):
            continue
        chosen = step.normalize_observation_keys
        for name in names:
            if chosen is not None and name != ACTION and name not in chosen:
                continue
            feature, held = step.features.get(name), step._tensor_stats.get(name)
            mode = "IDENTITY" if feature is None else _word(step.norm_map.get(feature.type))
            if held is not None and mode != "IDENTITY":
                found[name] = _scale(name, held, mode, step.eps)
    return found


def _is_normaliser(step: object) -> TypeGuard[Normaliser]:
    return hasattr(step, "norm_map")


def _scale(name: str, held: Mapping[str, Tensor], mode: str, epsilon: float) -> Scale:
    low, high = _RANGES.get(mode, ("mean", "std"))
    if low not in held or high not in held:
        raise NotExportable(
            f"`{name}` is normalised by {mode}, and has no statistics `{low}` and `{high}`.",
            expected=(low, high),
            got=tuple(held),
            hint="Load the processors with the statistics of the data set.",
        )
    start, end = held[low].detach().cpu().float(), held[high].detach().cpu().float()
    if mode == "MEAN_STD":
        return Scale(start, end, False, epsilon)
    width = end - start
    return Scale(start, torch.where(width == 0, epsilon, width), True, epsilon)


def _word(value: object) -> str:
    return str(getattr(value, "value", "IDENTITY"))


def _drawn(name: str, shape: tuple[int, ...], scale: Scale | None) -> Tensor:
    """Draw raw observations: images as cameras give them."""
    source = torch.Generator().manual_seed(0)
    if "image" in name:  # what lerobot takes for a camera
        rows, channels, *sizes = shape
        moved = (rows, *sizes, channels)
        return torch.randint(0, 256, moved, generator=source, dtype=torch.uint8)
    if scale is not None:
        return scale.draw(shape[0], source)
    return (spaces.REACH * spaces.spread(shape, source)).float()


def _network(
    policy: Model, config: Config, names: Sequence[str], chunk: str
) -> tuple[nn.Module, int, int]:
    """Return what predicts a chunk, how many of its actions are used, and how many there are."""
    images = list(config.image_features)
    model = getattr(policy, "model", None)
    if config.type == "act" and isinstance(model, nn.Module):
        predicted, count = (int(getattr(config, n)) for n in ("chunk_size", "n_action_steps"))
        if hasattr(policy, "temporal_ensembler"):
            count = predicted
        return ActionChunk(copied(model), names, images, count), count, predicted
    planless = config.type == "tdmpc" and not getattr(config, "use_mpc", True)
    if planless and _is_latent(model) and chunk == "state":
        repeats = int(getattr(config, "n_action_repeats"))  # noqa: B009  # not typed
        return Planless(copied(model), names, images, repeats), repeats, 1
    why = "has no chunks: leave `chunk` out" if planless else "draws random numbers"
    raise NotExportable(
        f"the policy `{type(policy).__name__}` of lerobot is not converted: it {why}.",
        expected="ACT, or TD-MPC with `use_mpc=False`",
        got=config.type,
        hint="Write it as a keyed module with its noise as an input, and pass `oracle=` to "
        "`kd_export.save`.",
    )


def _is_latent(network: object) -> TypeGuard[Latent]:
    return isinstance(network, nn.Module) and hasattr(network, "pi")


def _kept(
    policy: Model, rows: int, count: int, predicted: int, width: int
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the step that chooses an action of a chunk, and what its state starts with."""
    ensembler = getattr(policy, "temporal_ensembler", None)
    if count == 1:
        return FirstOf(), {}
    if ensembler is not None:
        counts = torch.zeros(rows, predicted - 1, dtype=torch.int64)
        weights = ensembler.ensemble_weights.cpu()
        return Ensemble(weights), {
            "actions": torch.zeros(rows, predicted - 1, width),
            "counts": counts,
        }
    left = torch.zeros(rows, dtype=torch.int64)
    return Queue(), {"chunk": torch.zeros(rows, count, width), "left": left}
