"""Containers and modules in pickles that the package tensordict wrote: files of `torch.save`.

Knows what such a pickle says of an object, and makes it by the constructors of kd, which check it.
Must not know how pickles of kd look: these do not come here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from typing import Any, Final, ParamSpec, Self, TypeVar, cast

import torch

from kd_core import (
    FormatError,
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    NonTensorDataBase,
    NonTensorStack,
    TensorClass,
    TensorDict,
    TensorDictBase,
    UnbatchedTensor,
    lazy_stack,
)

P = ParamSpec("P")
R = TypeVar("R")
State = Mapping[str, Any]  # Any: what a pickle holds, checked by those who take it

# What the state of a `TensorDict` has that says how it is stored there.
_OF_TENSORDICT: Final = frozenset(
    """
    _tensordict _batch_size _device _td_dim_names _is_locked _locked_schema _is_shared _is_memmap
    _cache _last_op _last_op_queue _lock_id _locked_tensordicts _lock_parents_weakrefs
    _non_tensordict _hook_in _hook_out
    """.split()  # noqa: SIM905  # one list reads better in columns
)


class _NotNeeded:
    """What locked containers and modules with selected outputs remember there."""

    def __new__(cls, *args: object) -> Self:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        """Forget it."""


def _checked(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that says so if a pickle does not hold what it needs."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        try:
            return function(*args, **options)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise FormatError(f"the pickle of tensordict is not valid: {error!r}.") from error

    return call


@_checked
def _make_td(cls: type, state: State) -> TensorDictBase:
    """Return the container of a class and a state, as pickles name it."""
    kind = getattr(cls, "cls", cls)  # its stand-in where only named classes are read
    if kind is TensorDict:
        made: TensorDictBase = TensorDict(
            state["_tensordict"],
            state["_batch_size"],
            state.get("_device"),
            state.get("_td_dim_names"),
        )
    elif kind is LazyStackedTensorDict:
        made = _stacked(state)
    else:
        raise FormatError(f"the pickle builds a `{kind}` as a container, which it is not.")
    return made.lock_() if state.get("_is_locked") else made


def _stacked(state: State) -> TensorDictBase:
    made = lazy_stack(state["tensordicts"], state["stack_dim"])
    name = state.get("_td_dim_name")
    if isinstance(name, str):
        names = list(made.names)
        names[state["stack_dim"]] = name
        made.names = names
    return made


def _set_container(self: TensorDictBase, state: object) -> None:
    """Fill a new instance with the state of one of tensordict, or with that of its own kind."""
    if isinstance(state, Mapping) and not _OF_CONTAINERS.isdisjoint(state):
        _fill_container(self, state)
    else:
        _set_own(TensorDictBase, self, state)


def _set_data(self: NonTensorDataBase, state: object) -> None:
    """Fill a new entry as `_set_container` a container."""
    if isinstance(state, Mapping) and not _OF_CONTAINERS.isdisjoint(state):
        _fill_data(self, state)
    else:
        _set_own(NonTensorDataBase, self, state)


_OF_CONTAINERS: Final = frozenset({"_tensordict", "tensordict", "tensordicts"})


def _set_own(base: type, self: object, state: object) -> None:
    """Do what `pickle` and `copy` do where there is no drop-in."""
    above: Any = super(base, cast("Any", self))
    if hasattr(above, "__setstate__"):
        above.__setstate__(state)
        return
    if type(self).__module__.startswith("kd_"):  # functions restore these, and check the content
        raise FormatError(f"the pickle fills a `{type(self).__name__}` past what restores it.")
    parts: Any = state if isinstance(state, tuple) else (state,)
    for part in filter(None, parts):
        for name, value in part.items():
            object.__setattr__(self, name, value)


@_checked
def _fill_container(self: TensorDictBase, state: State) -> None:
    inner = state.get("tensordict", state.get("_tensordict"))
    if isinstance(self, TensorClass) and isinstance(inner, TensorDictBase):
        data = state.get("non_tensordict", state.get("_non_tensordict"))
        dense = inner.contiguous() if isinstance(inner, LazyStackedTensorDict) else inner
        made = type(self).from_tensordict(dense, data)._kd_shallow()
        self._kd_entries, self._kd_nested = made._kd_entries, made._kd_nested
        self._kd_desc = made._kd_desc
    elif isinstance(self, LazyStackedTensorDict) and "tensordicts" in state:
        LazyStackedTensorDict.__init__(self, *state["tensordicts"], stack_dim=state["stack_dim"])
    elif isinstance(self, TensorDict) and isinstance(inner, Mapping):
        device, names = state.get("_device"), state.get("_td_dim_names")
        TensorDict.__init__(self, inner, state["_batch_size"], device, names)
        if hasattr(self, "__dict__"):
            vars(self).update((k, state[k]) for k in state if k not in _OF_TENSORDICT)
        if state.get("_is_locked"):
            self.lock_()
    else:
        raise FormatError(
            f"the pickle holds a `{type(self).__name__}` in a form that is not known."
        )


@_checked
def _fill_data(self: NonTensorDataBase, state: State) -> None:
    if isinstance(self, NonTensorStack):
        made = torch.stack(state["tensordicts"], state["stack_dim"])
        for name in ("_kd_desc", "_cells", "_loose", "_in_parts", "_positions"):
            setattr(self, name, getattr(made, name))
    elif isinstance(self, NonTensorData):
        inner: Any = state.get("tensordict", state.get("_tensordict"))
        data = state.get("non_tensordict", state.get("_non_tensordict"))
        NonTensorData.__init__(self, cast("State", data)["data"], inner.batch_size, inner.device)


@_checked
def _unbatched(tensor: torch.Tensor, batch_size: Sequence[int] = ()) -> UnbatchedTensor:
    return UnbatchedTensor(tensor, batch_size)


def _set_module(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return a `__setstate__` of keyed modules that takes states of tensordict, too."""

    def set_state(self: torch.nn.Module, state: State) -> None:
        if not _is_of_tensordict(self, state):
            original(self, state)
            return
        _initialise(self, state)
        own, plain = vars(self), vars(torch.nn.Module())
        for name, value in state.items():
            if name.endswith("_hooks") and isinstance(value, Mapping):
                own[name].update((k, v) for k, v in value.items() if type(v) is not _NotNeeded)
            elif name in ("_modules", "_parameters", "_buffers"):
                if "_param_td" not in state:  # whose constructor adds all that it holds
                    own[name].update((k, v) for k, v in value.items() if k not in own[name])
            elif name in plain or not (name in own or name in _OF_MODULES):
                own[name] = value

    return set_state


def _is_of_tensordict(module: torch.nn.Module, state: State) -> bool:
    """Return whether tensordict wrote a state: a class may have `_in_keys` of its own."""
    if "_in_keys" not in state or "_kd_in_spec" in state:
        return "_param_td" in state
    home = next(cls for cls in type(module).__mro__ if "in_keys" in vars(cls))
    return home.__module__.startswith("kd_")


_OF_MODULES: Final = frozenset(
    """
    _in_keys _out_keys _out_keys_apparent _complete_out_keys _kwargs _get_kwargs _ordered_dict
    _requires_sample _det_part _select_before_return module strict method method_kwargs inplace
    dist_keys _trigger_warning_lpk _log_prob_key _log_prob_keys _custom_log_prob_keys _dist
    _composite_lp_aggreate_at_init _generator _generator_key distribution_class
    distribution_kwargs _param_td _lock_content _is_locked _locked_tensordicts _get_post_hook
    """.split()  # noqa: SIM905  # one list reads better in columns
)


@_checked
def _initialise(self: Any, state: State) -> None:
    """Call the constructor of the keyed module that a new instance is, with what a state says."""
    nn, probabilistic = import_module("kd_nn"), None
    if "dist_keys" in state or "_det_part" in state:
        probabilistic = import_module("kd_probabilistic")
    home: Any = next(cls for cls in type(self).__mro__ if cls.__module__.startswith("kd_"))
    steps = state["_modules"].get("module", state.get("module"))
    in_keys: Any = state.get("_in_keys")
    out_keys: Any = state.get("_out_keys")
    match home.__name__:
        case "TensorDictParams":
            options = {"no_convert": state["no_convert"], "lock": state["_lock_content"]}
            nn.TensorDictParams.__init__(self, state["_param_td"], **options)
            return
        case "TensorDictModuleBase":
            torch.nn.Module.__init__(self)
            self.in_keys, self.out_keys = in_keys, out_keys
        case "TensorDictModule":
            if isinstance(steps, bytes):
                raise FormatError(
                    "the pickle holds the function of a module as code. Build the module anew, "
                    "and load its `state_dict`."
                )
            names = state["_kwargs"]
            keys = in_keys if names is None else dict(zip(names, in_keys, strict=True))
            given = {name: state[name] for name in ("inplace", "method", "method_kwargs")}
            nn.TensorDictModule.__init__(self, steps, keys, out_keys, **given)
        case "TensorDictSequential" | "ProbabilisticTensorDictSequential":
            named = isinstance(steps, torch.nn.ModuleDict)
            modules = (OrderedDict(steps.items()),) if named else tuple(steps)
            given = {name: state[name] for name in ("inplace", "partial_tolerant")}
            if probabilistic is not None:
                given["return_composite"] = state["return_composite"]
            home.__init__(self, *modules, **given)
        case "ProbabilisticTensorDictModule":
            given = {name: state[name] for name in _OF_DISTRIBUTIONS if name in state}
            if state["return_log_prob"]:
                given["log_prob_keys"] = state["_log_prob_keys"]
            generator = state.get("_generator_key") or state.get("_generator")
            keys = dict(zip(state["dist_keys"], in_keys, strict=True))
            home.__init__(self, keys, out_keys, generator=generator, **given)
        case name:
            raise FormatError(
                f"the pickle holds a `{name}` of tensordict, whose state kd does not know. Build "
                "the module anew, and load its `state_dict`."
            )
    seen = state.get("_out_keys_apparent")
    if seen is not None and list(self.out_keys) != list(seen):
        self.select_out_keys(*seen)


_OF_DISTRIBUTIONS: Final = (
    "distribution_class",
    "distribution_kwargs",
    "default_interaction_type",
    "return_log_prob",
    "cache_dist",
    "n_empirical_estimate",
    "num_samples",
)


def serve_pickled_modules() -> None:
    """Let `pickle` and `torch.load(weights_only=False)` read keyed modules of tensordict."""
    nn = import_module("kd_nn")
    for cls in (nn.TensorDictModuleBase, nn.TensorDictParams):
        cls.__setstate__ = _set_module(cls.__setstate__)


SERVED: Final[Mapping[str, object]] = {
    "_make_td": _make_td,
    "_LockedSchema": _NotNeeded,
    "_OutKeysSelect": _NotNeeded,
}
"""What pickles import."""


def serve_pickles() -> None:
    """Let `pickle` and `torch.load` read containers of tensordict, with `weights_only`, too."""
    kinds: Any = ((TensorDictBase, _set_container), (NonTensorDataBase, _set_data))
    for cls, function in kinds:
        cls.__setstate__ = function
    torch.serialization.add_safe_globals(
        [
            (TensorDict, "tensordict._td.TensorDict"),
            (LazyStackedTensorDict, "tensordict._lazy.LazyStackedTensorDict"),
            (_make_td, "tensordict._reductions._make_td"),
            (_NotNeeded, "tensordict.utils._LockedSchema"),
            (NonTensorData, "tensordict.tensorclass.NonTensorData"),
            (MetaData, "tensordict.tensorclass.MetaData"),
            (NonTensorStack, "tensordict.tensorclass.NonTensorStack"),
            (_unbatched, "tensordict._unbatched.UnbatchedTensor"),
        ]
    )
