"""Keyed modules of tensordict and TorchRL, converted to those of kd step by step.

Knows their public attributes; must not know programs or files. Neither library is imported: a
module is known by the names of its classes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from kd_core import NestedKey
from kd_export._errors import NotExportable
from kd_nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential

_LIBRARIES = ("tensordict", "torchrl")
_EXPLORING = ("EGreedyModule", "AdditiveGaussianModule", "OrnsteinUhlenbeckProcessModule")
_INIT = "is_init"


def is_foreign(module: object) -> bool:
    """Decide whether a module is a keyed module of tensordict or TorchRL."""
    return not isinstance(module, TensorDictModuleBase) and "TensorDictModuleBase" in _names(module)


def _names(module: object) -> list[str]:
    return [
        one.__name__
        for one in type(module).__mro__
        if one.__module__.partition(".")[0] in _LIBRARIES
    ]


def converted(module: nn.Module) -> TensorDictModuleBase:
    """Convert a module and those in it; what explores gives what it gets.

    Raises:
        NotExportable: It is of a kind that is not known.
    """
    steps = list(_steps(module))
    if len(steps) == 1 and not _is_sequence(module):
        return steps[0]
    sequence = TensorDictSequential(*steps)
    wanted = [key for key in _keys(module, "out_keys") if key in sequence.out_keys]
    if wanted and len(wanted) < len(sequence.out_keys):
        sequence.select_out_keys(*wanted)
    return sequence.train(module.training)


def recurrent_keys(module: nn.Module) -> dict[NestedKey, NestedKey]:
    """Return the pairs of a state that recurrent modules in a module carry."""
    return {
        read: written
        for part in module.modules()
        if {"LSTMModule", "GRUModule"} & set(_names(part))
        for read, written in zip(_layer_keys(part), _keys(part, "out_keys")[1:], strict=True)
    }


def _is_sequence(module: nn.Module) -> bool:
    return "TensorDictSequential" in _names(module)


def _steps(module: nn.Module) -> Iterator[TensorDictModuleBase]:
    names = _names(module)
    if isinstance(module, TensorDictModuleBase):
        yield module
    elif "TensorDictSequential" in names:
        inner = cast("nn.Module", module.module)
        for part in inner.children():
            yield from _steps(part)
    elif "ProbabilisticTensorDictModule" in names:
        yield _mode(module)
    elif "QValueModule" in names and type(module).__name__ == "QValueModule":
        yield _best(module)
    elif "TanhModule" in names:
        yield from _squashed(module)
    elif "LSTMModule" in names or "GRUModule" in names:
        yield _layer(module)
    elif set(names) & set(_EXPLORING):
        return
    elif "TensorDictModule" in names:
        words = getattr(module, "_kwargs", None)
        keys = _keys(module, "in_keys")
        function = cast("Callable[..., object]", module.module)
        inputs = keys if words is None else dict(zip(words, keys, strict=True))
        yield TensorDictModule(function, in_keys=inputs, out_keys=_keys(module, "out_keys"))
    elif "TensorDictModuleWrapper" in names:
        yield from _steps(cast("nn.Module", module.td_module))
    else:
        raise NotExportable(
            f"`{type(module).__name__}` is a keyed module of another library, of a kind that "
            "kd_export does not convert.",
            expected="a TensorDictModule, a sequence of them, or a probabilistic module",
            got=type(module).__name__,
            hint="Write that step as `kd_nn.TensorDictModule`.",
        )


def _keys(module: nn.Module, name: str) -> list[NestedKey]:
    return list(cast("Sequence[NestedKey]", getattr(module, name)))


class Deterministic(nn.Module):
    """Build a distribution, and return what it gives without drawing.

    Args:
        kind: The class of the distribution.
        names: What its parameters are called.
        settings: Its further arguments.
    """

    def __init__(
        self, kind: Callable[..., object], names: Sequence[str], settings: Mapping[str, object]
    ) -> None:
        super().__init__()
        self.kind, self.names, self.settings = kind, list(names), dict(settings)

    def forward(self, *parameters: Tensor) -> Tensor:
        """Return the deterministic sample: the library's own, or else the mode or the mean."""
        given = dict(zip(self.names, parameters, strict=True))
        distribution = self.kind(**given, **self.settings)
        for name in ("deterministic_sample", "mode", "mean"):
            try:
                value = getattr(distribution, name)
            except (AttributeError, NotImplementedError):
                continue
            return cast("Tensor", value)
        raise NotExportable(
            f"`{type(distribution).__name__}` has neither a mode nor a mean.",
            got=type(distribution).__name__,
        )

    def extra_repr(self) -> str:
        """Print the distribution."""
        return getattr(self.kind, "__name__", type(self.kind).__name__)


def _mode(module: nn.Module) -> TensorDictModule:
    names = [
        name if isinstance(name, str) else name[-1]
        for name in cast("Sequence[str | tuple[str, ...]]", module.dist_keys)
    ]
    settings = cast("Mapping[str, object]", module.distribution_kwargs or {})
    kind = cast("Callable[..., object]", module.distribution_class)
    if getattr(kind, "__name__", "") == "CompositeDistribution":
        raise NotExportable(
            "a `CompositeDistribution` of another library is not converted.",
            got="CompositeDistribution",
            hint="Use one probabilistic module for each part, or kd's own.",
        )
    return TensorDictModule(
        Deterministic(kind, names, settings),
        in_keys=_keys(module, "in_keys"),
        out_keys=_keys(module, "out_keys")[:1],
    )


class Best(nn.Module):
    """Choose the action of the highest value, as an integer or as a one-hot code."""

    def __init__(self, form: str, counts: Sequence[int] | None, masked: bool) -> None:
        super().__init__()
        self.form, self.counts, self.masked = form, counts, masked

    def forward(self, values: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the action, the values, and the value of the action."""
        if mask is not None:
            values = torch.where(mask, values, torch.finfo(values.dtype).min)
        if self.form == "categorical":
            chosen = values.argmax(-1)
            return chosen, values, values.gather(-1, chosen.unsqueeze(-1))
        counts = [values.shape[-1]] if self.counts is None else list(self.counts)
        parts = torch.split(values, counts, -1)
        code = torch.cat([(part == part.amax(-1, keepdim=True)).long() for part in parts], -1)
        return code, values, (code * values).sum(-1, True)

    def extra_repr(self) -> str:
        """Print the form of the action."""
        return self.form


def _best(module: nn.Module) -> TensorDictModule:
    form = str(module.action_space)
    if form not in ("one_hot", "mult_one_hot", "categorical"):
        raise NotExportable(f"actions of the form {form!r} are not converted.", got=form)
    counts = module.var_nums if form == "mult_one_hot" else None
    keys = _keys(module, "in_keys")
    step = Best(form, cast("Sequence[int] | None", counts), len(keys) > 1)
    return TensorDictModule(step, in_keys=keys, out_keys=_keys(module, "out_keys"))


class Squash(nn.Module):
    """Squash numbers by tanh, and scale them to limits."""

    low: Tensor
    high: Tensor

    def __init__(self, low: Tensor, high: Tensor, clamp: bool) -> None:
        super().__init__()
        self.register_buffer("low", low.detach().clone())
        self.register_buffer("high", high.detach().clone())
        self.clamp = clamp

    def forward(self, x: Tensor) -> Tensor:
        """Squash numbers."""
        x = x.tanh()
        if self.clamp:
            edge = 1 - torch.finfo(x.dtype).resolution
            x = x.clamp(-edge, edge)
        return self.low + (self.high - self.low) * (x + 1) / 2


def _squashed(module: nn.Module) -> Iterator[TensorDictModule]:
    for read, written in zip(_keys(module, "in_keys"), _keys(module, "out_keys"), strict=True):
        name = written if isinstance(written, str) else "_".join(map(str, written))
        low, high = (cast("Tensor", getattr(module, f"{name}_{end}")) for end in ("low", "high"))
        step = Squash(low, high, bool(module.clamp))
        yield TensorDictModule(step, in_keys=[read], out_keys=[written])


class Recurrent(nn.Module):
    """Run a recurrent layer for one step; states have their rows first.

    Args:
        layer: An `nn.LSTM`, `nn.GRU` or `nn.RNN`.

    Example:
        >>> step = Recurrent(nn.GRU(3, 4))
        >>> out, h = step(torch.zeros(5, 3), torch.zeros(5, 1, 4))
        >>> out.shape, h.shape
        (torch.Size([5, 4]), torch.Size([5, 1, 4]))
    """

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Return the output and the next states."""
        time = 1 if self.layer.batch_first else 0
        held = tuple(state.transpose(0, 1).contiguous() for state in states)
        out, new = self.layer(x.unsqueeze(time), held if len(held) > 1 else held[0])
        kept = new if isinstance(new, tuple) else (new,)
        return out.squeeze(time), *(state.transpose(0, 1) for state in kept)


def _layer_keys(module: nn.Module) -> list[NestedKey]:
    return [key for key in _keys(module, "in_keys")[1:] if key != _INIT]


def _layer(module: nn.Module) -> TensorDictModule:
    theirs = cast("nn.RNNBase", module.lstm if hasattr(module, "lstm") else module.gru)
    kind = nn.LSTM if hasattr(module, "lstm") else nn.GRU
    if not isinstance(theirs, kind):  # one written in Python, with the same weights
        own = kind(
            theirs.input_size,
            theirs.hidden_size,
            theirs.num_layers,
            bias=theirs.bias,
            batch_first=True,
        )
        own.load_state_dict(theirs.state_dict())
        theirs = own
    layer = copy.deepcopy(theirs)
    layer.batch_first = True
    return TensorDictModule(
        Recurrent(layer),
        in_keys=[_keys(module, "in_keys")[0], *_layer_keys(module)],
        out_keys=_keys(module, "out_keys"),
    )
