"""The keyed module that is exported: copied, reduced to what is wanted, behind a flat signature.

Exporters want a module whose ``forward`` takes tensors by plain argument names. `FlatModule` is
that: its forward has one named argument per input key, fills a container, runs the keyed module,
and gives a plain dict of outputs by wire name. It adds no operator to the graph. Run eagerly, it is
the `Reference` that an exported program is compared with.

Knows keyed modules and their interaction modes; must not know programs or files.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import TypeVar

import torch
from torch import Tensor, nn

from kd_core import (
    KdError,
    NestedKey,
    NonTensorDataBase,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
)
from kd_export._errors import (
    DtypeMismatch,
    ExportError,
    Key,
    KeyMismatch,
    NotExportable,
    kind_of,
    nearest,
    quoted,
)
from kd_export._schema.files import argument_names, as_key, wire_key, wire_name
from kd_export._schema.schema import Schema
from kd_nn import SupportsInteraction, TensorDictModule, TensorDictModuleBase, TensorDictSequential
from kd_nn.distributions import values_unchecked

# Keyed modules of tensordict and TorchRL, converted to those of kd step by step.
#
# Knows their public attributes; must not know programs or files. Neither library is imported: a
# module is known by the names of its classes.

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
    wanted = [key for key in _foreign_keys(module, "out_keys") if key in sequence.out_keys]
    if wanted and len(wanted) < len(sequence.out_keys):
        sequence.select_out_keys(*wanted)
    return sequence.train(module.training)


def recurrent_keys(module: nn.Module) -> dict[NestedKey, NestedKey]:
    """Return the pairs of a state that recurrent modules in a module carry."""
    return {
        read: written
        for part in module.modules()
        if {"LSTMModule", "GRUModule"} & set(_names(part))
        for read, written in zip(
            _layer_keys(part), _foreign_keys(part, "out_keys")[1:], strict=True
        )
    }


def _is_sequence(module: nn.Module) -> bool:
    return "TensorDictSequential" in _names(module)


def _steps(module: nn.Module) -> Iterator[TensorDictModuleBase]:
    names = _names(module)
    if isinstance(module, TensorDictModuleBase):
        yield module
    elif "TensorDictSequential" in names:
        for part in _inner(module, "module").children():
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
        keys = _foreign_keys(module, "in_keys")
        function: Callable[..., object] = getattr(module, "module", module)
        inputs = keys if words is None else dict(zip(words, keys, strict=True))
        yield TensorDictModule(function, in_keys=inputs, out_keys=_foreign_keys(module, "out_keys"))
    elif "TensorDictModuleWrapper" in names:
        yield from _steps(_inner(module, "td_module"))
    else:
        raise NotExportable(
            f"`{type(module).__name__}` is a keyed module of another library, of a kind that "
            "kd_export does not convert.",
            expected="a TensorDictModule, a sequence of them, or a probabilistic module",
            got=type(module).__name__,
            hint="Write that step as `kd_nn.TensorDictModule`.",
        )


def _foreign_keys(module: nn.Module, name: str) -> list[NestedKey]:
    return list(getattr(module, name))


def _inner(module: nn.Module, name: str) -> nn.Module:
    found = getattr(module, name)
    assert isinstance(found, nn.Module)
    return found


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
            result: Tensor = value
            return result
        raise NotExportable(
            f"`{type(distribution).__name__}` has neither a mode nor a mean.",
            got=type(distribution).__name__,
        )

    def extra_repr(self) -> str:
        """Print the distribution."""
        return getattr(self.kind, "__name__", type(self.kind).__name__)


def _mode(module: nn.Module) -> TensorDictModule:
    names = [
        name if isinstance(name, str) else str(name[-1])
        for name in _foreign_keys(module, "dist_keys")
    ]
    settings, kind = (getattr(module, f"distribution_{word}") for word in ("kwargs", "class"))
    if getattr(kind, "__name__", "") == "CompositeDistribution":
        raise NotExportable(
            "a `CompositeDistribution` of another library is not converted.",
            got="CompositeDistribution",
            hint="Use one probabilistic module for each part, or kd's own.",
        )
    return TensorDictModule(
        Deterministic(kind, names, settings or {}),
        in_keys=_foreign_keys(module, "in_keys"),
        out_keys=_foreign_keys(module, "out_keys")[:1],
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
    counts = getattr(module, "var_nums", None) if form == "mult_one_hot" else None
    keys = _foreign_keys(module, "in_keys")
    step = Best(form, counts, len(keys) > 1)
    return TensorDictModule(step, in_keys=keys, out_keys=_foreign_keys(module, "out_keys"))


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
    for read, written in zip(
        _foreign_keys(module, "in_keys"), _foreign_keys(module, "out_keys"), strict=True
    ):
        name = written if isinstance(written, str) else "_".join(map(str, written))
        low, high = (getattr(module, f"{name}_{end}") for end in ("low", "high"))
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
    return [key for key in _foreign_keys(module, "in_keys")[1:] if key != _INIT]


def _layer(module: nn.Module) -> TensorDictModule:
    name, kind = ("lstm", nn.LSTM) if hasattr(module, "lstm") else ("gru", nn.GRU)
    theirs: nn.RNNBase = getattr(module, name)
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
        in_keys=[_foreign_keys(module, "in_keys")[0], *_layer_keys(module)],
        out_keys=_foreign_keys(module, "out_keys"),
    )


Word = TypeVar("Word")
Example = TensorDictBase | Mapping[Word, object] | Schema


class FlatModule(nn.Module):
    """Call a keyed module with named tensors.

    Args:
        module: A module that takes and gives a container.
        inputs: The keys to fill, in the order of the arguments.
        outputs: The keys to give; a container gives all its tensors.
        batch_dims: How many leading dimensions of the first input are the container's batch size.

    Example:
        >>> import inspect
        >>> import torch
        >>> flat = FlatModule(torch.nn.Identity(), [("in", "x")], [("in", "x")], batch_dims=1)
        >>> str(inspect.signature(flat.forward))
        '(in_x)'
        >>> list(flat(in_x=torch.zeros(2, 3)))
        ['in.x']
    """

    def __new__(
        cls, module: nn.Module, inputs: Sequence[Key], outputs: Sequence[Key], *, batch_dims: int
    ) -> FlatModule:
        """Create an instance of a class whose forward has the arguments of these inputs."""
        kind = type("FlatModule", (cls,), {"forward": _forward(inputs), "__new__": object.__new__})
        return object.__new__(kind)

    def __init__(
        self, module: nn.Module, inputs: Sequence[Key], outputs: Sequence[Key], *, batch_dims: int
    ) -> None:
        super().__init__()
        self.module = module
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.batch_dims = batch_dims
        self.arguments = argument_names(inputs)

    def run(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Fill a container, run the module, read the tensors of the outputs by wire name."""
        container = TensorDict({}, batch_size=tensors[0].shape[: self.batch_dims])
        entries: dict[NestedKey, Tensor] = dict(zip(self.inputs, tensors, strict=True))
        container.update(entries)
        result = self.module(container)
        tensors_of = (_tensors_at(result, key) for key in self.outputs)
        return {name: tensor for found in tensors_of for name, tensor in found.items()}


def _forward(inputs: Sequence[Key]) -> Callable[..., dict[str, Tensor]]:
    """Write ``forward(self, a, b)`` for the inputs."""
    names = ", ".join(argument_names(inputs).values())
    source = f"def forward(self, {names}):\n    return self.run(({names},))\n"
    namespace: dict[str, object] = {"__name__": __name__}
    exec(compile(source, "<kd_export signature>", "exec"), namespace)
    forward = namespace["forward"]
    assert isinstance(forward, FunctionType)
    return forward


def _tensors_at(result: object, key: Key) -> dict[str, Tensor]:
    """Return the tensors of an output by wire name: of a container, all of its."""
    get = getattr(result, "get", None)
    value = get(key) if get is not None else None
    if value is None:
        known = result.keys() if isinstance(result, Mapping | TensorDict) else ()
        raise KeyMismatch(
            f"output `{wire_name(key)}` not found in the result of the module; available keys: "
            f"{quoted(known)}.",
            key=key,
            expected=wire_name(key),
        )
    if not isinstance(value, TensorDictBase):
        return {wire_name(key): _as_tensor(value, key)}
    inside = leaves(value, key)
    if not inside:
        raise KeyMismatch(
            f"the output `{wire_name(key)}` is a container without tensors.",
            key=key,
            expected="a tensor, or a container of tensors",
            hint="Pass `outputs=` with the keys of tensors.",
        )
    return {wire_name(path): _as_tensor(leaf, path) for path, leaf in inside.items()}


def leaves(container: TensorDictBase, key: Key) -> dict[Key, object]:
    """Return what a container at a key holds in all its levels: tensors and other data."""
    entries: Iterable[tuple[NestedKey, object]] = container.items(include_nested=True)
    return {
        (*key, *as_key(inner)): value
        for inner, value in entries
        if isinstance(value, NonTensorDataBase) or not is_tensor_collection(value)
    }


def _as_tensor(value: object, key: Key) -> Tensor:
    if isinstance(value, Tensor):
        return value
    raise DtypeMismatch(
        f"expected a tensor for the output `{wire_name(key)}`, got {kind_of(value)}.",
        key=key,
        expected="Tensor",
        got=type(value).__name__,
        hint="Pass `outputs=` with the keys of tensors.",
    )


def prepare(
    module: nn.Module,
    inputs: Sequence[object] | None,
    outputs: Sequence[object] | None,
    *,
    shared: bool = False,
) -> tuple[nn.Module, list[Key], list[Key]]:
    """Copy the module, in eval mode, reduced to the steps that the keys asked for need.

    Args:
        module: The module.
        inputs: The keys to be inputs; by default all.
        outputs: The keys to be outputs; by default all.
        shared: Whether parameters keep their memory: the copy must not outlive the call.
    """
    if isinstance(module, type):
        raise NotExportable(
            f"expected a keyed module, got the class `{module.__name__}`.",
            expected="a keyed module",
            got=module.__name__,
            hint="Pass an instance of it.",
        )
    if not hasattr(module, "in_keys") or not hasattr(module, "out_keys"):
        raise NotExportable(
            f"`{type(module).__name__}` has no `in_keys` and `out_keys`.",
            expected="a keyed module",
            got=type(module).__name__,
            hint="Wrap it: `TensorDictModule(module, in_keys=[...], out_keys=[...])`.",
        )
    if is_foreign(module):
        module = converted(module)
    held = [*_keys(module, "in_keys"), *_keys(module, "out_keys")]
    for name, asked in (("inputs", inputs), ("outputs", outputs)):
        _check_list(name, asked, held)
    select = getattr(module, "select_subsequence", None)
    if (inputs is not None or outputs is not None) and select is not None:
        wanted_in = _holding(inputs, _keys(module, "in_keys"))
        wanted_out = _holding(outputs, _keys(module, "out_keys"))
        try:
            module = select(in_keys=wanted_in, out_keys=wanted_out)
        except (KdError, KeyError, ValueError) as error:
            words = [*(inputs or ()), *(outputs or ())]
            meant = {word: _split(word, held) for word in words if _split(word, held)}
            raise KeyMismatch(
                f"no part of the module fits the keys asked for: {error}",
                hint=" ".join(f"For {word!r} write `{key}`." for word, key in meant.items())
                or None,
            ) from error
    chosen_in = _chosen(inputs, _keys(module, "in_keys"), "input", all_needed=True)
    chosen_out = _chosen(outputs, _keys(module, "out_keys"), "output", all_needed=False)
    _refuse_lazy(module)
    _refuse_meta(module)
    known = detached(module) | (_shared(module) if shared else {})
    try:
        frozen = copy.deepcopy(module, known).cpu().eval()
    except Exception as error:  # whatever a `__deepcopy__` or a `__reduce__` raises
        raise _not_copied(module, error) from error
    return frozen, chosen_in, list(dict.fromkeys(chosen_out))


def _check_list(name: str, asked: object, held: Sequence[Key]) -> None:
    """Check that an argument names keys, one or more of them, or none by being left out."""
    if asked is not None and (
        isinstance(asked, str) or not isinstance(asked, Sequence) or not asked
    ):
        raise KeyMismatch(
            f"expected a list of keys for `{name}`, got {asked!r}.",
            expected="a list of keys",
            got=asked,
            hint=f"Pass a list, such as `{name}=[{_split(asked, held) or asked!r}]`."
            if isinstance(asked, str)
            else f"Pass a list, or leave `{name}` out for all.",
        )


def _split(word: object, held: Sequence[Key]) -> Key | None:
    """Return the nested key that `"out.action"` or `"out/action"` was written for."""
    if not isinstance(word, str) or (word,) in held:
        return None
    return next((key for key in (wire_key(word), tuple(word.split("/"))) if key in held), None)


def detached(module: nn.Module) -> dict[int, object]:
    """Return detached copies of the results of a graph that a module keeps, by their identity.

    torch refuses to deep-copy them. A policy keeps the distribution of its last call, old
    `weight_norm` its weight, which it computes anew in each call.
    """
    found: dict[int, object] = {}
    seen: set[int] = set()
    waiting: list[object] = [module]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if not value.is_leaf:
                found[id(value)] = value.detach().clone()
            waiting.extend(vars(value).values())
        elif isinstance(value, TensorDictBase | Mapping):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            waiting.extend(value)
        elif isinstance(value, MethodType):
            waiting.append(value.__self__)
        elif not isinstance(value, type | FunctionType | ModuleType):
            waiting.extend(getattr(value, "__dict__", {}).values())
    return found


def _not_copied(module: nn.Module, error: Exception) -> NotExportable:
    """Return the error for a module that cannot be copied, which names the attribute at fault."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name in ("_modules", "_parameters", "_buffers"):
                continue
            try:
                copy.deepcopy(value, detached(part))
            except Exception as reason:
                place = f"{path}.{name}" if path else name
                return NotExportable(
                    f"the module cannot be copied: its attribute `{place}`, {kind_of(value)}, "
                    f"cannot: {str(reason).rstrip('.')}.",
                    expected="attributes that can be copied",
                    got=kind_of(value),
                    hint=f"Delete `{place}` before the export, or give its class a `__deepcopy__`.",
                )
    return NotExportable(
        f"the module cannot be copied: {str(error).rstrip('.')}.",
        hint="Give the class of the part that is named a `__deepcopy__`.",
    )


def _shared(module: nn.Module) -> dict[int, object]:
    """Return parameters that share the memory of a module's own; buffers are copied as ever."""
    return {
        id(one): nn.Parameter(one.detach(), one.requires_grad)
        for one in module.parameters()
        if type(one) is nn.Parameter
    }


def _refuse_lazy(module: nn.Module) -> None:
    """Refuse layers that wait for a first call to learn their shape."""
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(value):
            raise NotExportable(
                f"`{name}` is not initialised: its layer learns its shape at the first call.",
                expected="a module that was called",
                hint="Call the module once on an example before it is exported.",
            )


def _refuse_meta(module: nn.Module) -> None:
    """Refuse parameters and buffers that have no values."""
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if value.is_meta:
            raise NotExportable(
                f"`{name}` of the module is on the meta device and has no values.",
                expected="a module with values",
                hint="Load its weights first, as in `module.to_empty(device='cpu')` and "
                "`module.load_state_dict(...)`.",
            )


def _keys(module: nn.Module, name: str) -> list[Key]:
    # A copy keeps nothing of the keys: steps that were written into `_modules` directly count.
    return [as_key(key) for key in getattr(copy.copy(module), name) if key != "_"]


def _holding(asked: Sequence[object] | None, known: list[Key]) -> list[Key]:
    """Return the keys of the module that are asked for, or that hold what is asked for."""
    if asked is None:
        return known
    keys = [as_key(key) for key in asked]
    return list(dict.fromkeys(next((k for k in known if holds(k, key)), key) for key in keys))


def holds(outer: Key, inner: Key) -> bool:
    """Return whether a key is another one, or that of a container with it."""
    return inner[: len(outer)] == outer


def _chosen(
    asked: Sequence[object] | None, known: list[Key], what: str, *, all_needed: bool
) -> list[Key]:
    if asked is None:
        return known
    keys = [as_key(key) for key in asked]
    wires = [wire_name(key) for key in known]
    for key in keys:
        if not any(holds(outer, key) for outer in known):
            close = nearest(wire_name(key), wires)
            raise KeyMismatch(
                f"{what} `{wire_name(key)}` not found in the module; available {what}s: "
                f"{quoted(wires)}.",
                key=key,
                expected=tuple(wires),
                got=wire_name(key),
                hint=None if close is None else f"Did you mean `{close}`?",
            )
    missing = [outer for outer in known if not any(holds(outer, key) for key in keys)]
    if all_needed and missing:
        raise KeyMismatch(
            f"`inputs` leaves out `{wire_name(missing[0])}`, which the module reads.",
            key=missing[0],
            expected=tuple(wires),
        )
    return keys


_NUDGES = (-8, -1, 1, 8)
MODES = ("deterministic", "mode", "mean", "median", "random")


def checked_mode(mode: str | None) -> str | None:
    """Return a mode as the schema writes it.

    Raises:
        ExportError: It is not one of the modes.
    """
    if mode is None:
        return None
    name = str(mode).lower()
    if name in MODES:
        return name
    close = nearest(name, MODES)
    raise ExportError(
        f"{mode!r} is not a valid mode; available modes: {quoted(MODES)}.",
        expected=MODES,
        got=mode,
        hint="Pass one of them." if close is None else f"Did you mean `{close}`?",
    )


@contextlib.contextmanager
def frozen_modes(module: nn.Module, mode: str | None) -> Iterator[None]:
    """Set the mode of probabilistic parts, and disable the checks of distributions, in a block."""
    with contextlib.ExitStack() as stack:
        for part in module.modules() if mode is not None else ():
            if isinstance(part, SupportsInteraction):
                stack.enter_context(part.interaction(str(mode)))
        stack.enter_context(torch.no_grad())
        stack.enter_context(values_unchecked())
        yield


class Reference:
    """The module itself, run eagerly on tensors in the order of the inputs."""

    def __init__(self, flat: FlatModule, mode: str | None) -> None:
        self._flat = flat
        self._mode = mode
        # Scoped settings, such as an interaction type, stay what they were at export.
        self._context = contextvars.copy_context()

    def __call__(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the outputs by wire name."""
        return self._context.copy().run(self._run, [tensor.clone() for tensor in tensors])

    @property
    def module(self) -> nn.Module:
        """The keyed module."""
        return self._flat.module

    def other(self, module: nn.Module) -> Reference:
        """Return the reference of another module with the same inputs and outputs."""
        flat = self._flat
        keys = (flat.inputs, flat.outputs)
        return Reference(FlatModule(module, *keys, batch_dims=flat.batch_dims), self._mode)

    def with_gradients(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the outputs by wire name, which know what they were computed from."""
        with frozen_modes(self._flat, self._mode), torch.enable_grad():
            return self._flat.run(tensors)

    def others(
        self, tensors: Sequence[Tensor], expected: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor] | None, list[dict[str, Tensor]]] | None:
        """Return what a copy in float64 gives, and what inputs give that differ in their last bits.

        The first is ``None`` where the module does not compute in float64; all is, where it does
        not give what is expected again.
        """
        again = self(tensors)
        if not all(torch.equal(again[name], value) for name, value in expected.items()):
            return None
        exact: dict[str, Tensor] | None = None
        with contextlib.suppress(Exception):  # a dtype is written out in it, or it cannot be copied
            exact = self.in_float64()(tensors)
        nudged = [
            self([x * (1 + bits * 2.0**-23) if x.is_floating_point() else x for x in tensors])
            for bits in _NUDGES
        ]
        return exact, nudged

    def in_float64(self) -> Callable[[Sequence[Tensor]], dict[str, Tensor]]:
        """Return a copy that computes in float64, on the same tensors."""
        copied = Reference(copy.deepcopy(self._flat).double(), self._mode)
        return lambda tensors: copied([x.double() if x.is_floating_point() else x for x in tensors])

    def _run(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        with frozen_modes(self._flat, self._mode):
            return self._flat.run(tensors)


def reference_module(module: nn.Module, schema: Schema) -> Reference:
    """Build the reference of a schema's inputs and outputs from a keyed module."""
    in_keys = [entry.key for entry in schema.inputs]
    out_keys = [entry.key for entry in schema.outputs]
    frozen, _, _ = prepare(module, in_keys, out_keys)
    flat = FlatModule(frozen, in_keys, out_keys, batch_dims=schema.batch_dims)
    return Reference(flat, schema.mode)
