"""`EnsembleModule`: several copies of a module, run at once.

The parameters of all copies are stacked in one container; one copy without values is the template
that computes. It runs at once where that is known, else under `vmap`. While a program is exported
the copies run one by one, so that it has no vmap call; so do recurrent layers, for which torch has
no vmap.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final, Self, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # as everywhere
from torch.nn.parameter import is_lazy

from kd_core import (
    InvalidArgument,
    InvalidValue,
    NestedKey,
    ShapeMismatch,
    TensorDict,
    TensorDictBase,
    format_key,
)
from kd_core.extending import assume_constant_result, is_exporting, public_in
from kd_nn._dispatch import (
    describe,
    dispatch,
    keys_of,
    read_entries,
    signature_of_call,
    skip_existing,
    write_entries,
)
from kd_nn._keys import DISCARD
from kd_nn._modules.base import TensorDictModuleBase, reset_members
from kd_nn._modules.module import TensorDictModule
from kd_nn._modules.sequence import TensorDictSequential
from kd_nn._params import TensorDictParams
from kd_nn._plan.invalidation import is_patched
from kd_nn._torch_private import (
    GLOBAL_HOOKS,
    HOOKS,
    calls_are_own,
    calls_of_modules,
    defines,
    function_modes,
    is_called_plainly,
    reads_plainly,
)

# Layers of torch that run for all copies of an ensemble at once, on stacked parameters.
#
# `vmap` costs more than the layers of a small network: the row "ensemble of 4" of the benchmarks.
# Linear layers become one batched product, layer norms are scaled after all copies are normalised,
# pointwise layers run as they are. All others are left to `vmap`, and so is a module with hooks,
# patches or parameters of other kinds, which would show a difference.
# Knows what `forward` of torch's layers does; must not know keys.

Stacked: TypeAlias = Mapping[str, object]
"""The entries of one level: parameters with the copies in front, and levels below."""

Step: TypeAlias = tuple[tuple[str, ...], int, int]
"""The names that lead to a module, which value it reads, and how many there are after it."""

_POINTWISE: Final = frozenset(
    {
        nn.CELU,
        nn.ELU,
        nn.GELU,
        nn.Hardsigmoid,
        nn.Hardswish,
        nn.Hardtanh,
        nn.Identity,
        nn.LeakyReLU,
        nn.LogSigmoid,
        nn.Mish,
        nn.ReLU,
        nn.ReLU6,
        nn.SELU,
        nn.Sigmoid,
        nn.SiLU,
        nn.Softplus,
        nn.Softsign,
        nn.Tanh,
        nn.Tanhshrink,
    }
)
_READS: Final[Mapping[type[nn.Module], tuple[str, ...]]] = {
    **dict.fromkeys(_POINTWISE, ()),
    nn.LayerNorm: ("weight", "bias", "normalized_shape", "eps"),
    nn.Linear: ("weight", "bias"),
    nn.Sequential: (),
}
"""The layers that are known, and the attributes that are read here in place of their `forward`."""
_PLAIN: Final = frozenset({Tensor, nn.Parameter})


def _is_known(module: Any, params: Stacked) -> bool:
    kind = type(module)
    if not is_unchanged(module, nn.Module):
        return False
    if "_kd_maps_rows" in kind.__dict__:
        return bool(module._kd_maps_rows())
    reads = _READS.get(kind)
    if reads is None or not defines(kind, "forward"):
        return False
    if kind is nn.Sequential:
        if not defines(kind, "__iter__"):
            return False
        for name, member in module._modules.items():
            if member is None or not _is_known(member, _level(params.get(name))):
                return False
        return True
    if reads and not reads_plainly(kind, reads):
        return False
    for name, parameter in module._parameters.items():
        if name in module.__dict__:
            return False
        mine = params.get(name)
        if parameter is not None and not (isinstance(mine, Tensor) and _is_plain(mine)):
            return False
    return True


def _is_plain(parameter: Tensor) -> bool:
    return type(parameter) in _PLAIN and parameter.layout is torch.strided


def is_unchanged(module: nn.Module, base: type[nn.Module]) -> bool:
    """Return whether a module is called as those of a class are, and nothing is around that."""
    own = module.__dict__
    if "forward" in own or any(own[name] for name in HOOKS):
        return False
    return is_called_plainly(module, base.__call__, calls_of_modules()[1])


def _level(entry: object) -> Stacked:
    entries: Stacked = getattr(entry, "_kd_entries", {})
    return entries


def _run(
    module: Any, params: Stacked, value: Tensor, count: int, stacked: bool
) -> tuple[Any, bool]:
    """Run a module that `_is_known`.

    Args:
        module: One copy.
        params: Its stacked parameters.
        value: What it reads.
        count: How many copies there are.
        stacked: Whether the value has the copies in its first dimension; else all read it.

    Returns:
        The output, or several, and whether they have the copies in their first dimension.

    Raises:
        RuntimeError: If torch refuses the value, or computes with other dtypes here.
    """
    kind = type(module)
    if kind is nn.Linear:
        return _linear(params, value, count, stacked), True
    if kind is nn.LayerNorm:
        return _layer_norm(module, params, value, stacked)
    if kind is not nn.Sequential:
        return module.forward(value), stacked
    for name, member in module._modules.items():
        value, stacked = _run(member, _level(params.get(name)), value, count, stacked)
    return value, stacked


def _linear(params: Stacked, value: Tensor, count: int, stacked: bool) -> Tensor:
    weight, bias = params["weight"], params.get("bias")
    assert isinstance(weight, Tensor)
    rows = value.shape[stacked:-1]
    if stacked:
        flat = value.reshape(count, -1, value.shape[-1])
    else:
        flat = value.reshape(-1, value.shape[-1]).expand(count, -1, -1)
    if isinstance(bias, Tensor):
        made = torch.baddbmm(bias.unsqueeze(1), flat, weight.transpose(1, 2))
    else:
        made = torch.bmm(flat, weight.transpose(1, 2))
    return made.view(count, *rows, made.shape[-1])


def _layer_norm(
    module: nn.LayerNorm, params: Stacked, value: Tensor, stacked: bool
) -> tuple[Tensor, bool]:
    made = F.layer_norm(value, module.normalized_shape, None, None, module.eps)
    weight, bias = params.get("weight"), params.get("bias")
    if not isinstance(weight, Tensor):
        return made, stacked
    between = value.ndim - stacked - len(module.normalized_shape)
    lower = made.dtype in _LOWER and weight.dtype is torch.float32
    if between < 0 or not (lower or made.dtype is weight.dtype):
        raise RuntimeError
    shape = (len(weight), *(1,) * between, *module.normalized_shape)
    scaled = made * weight.view(shape)
    if isinstance(bias, Tensor):
        scaled = scaled + bias.view(shape)
    return scaled.to(made.dtype), True


_LOWER: Final = frozenset({torch.bfloat16, torch.float16})
"""Dtypes that layer norms of torch take beside weights of float32, as under autocast."""


@public_in("kd_nn")
class EnsembleModule(TensorDictModuleBase):
    """Run several re-initialised copies of a module; outputs gain a first dimension.

    Each copy has its own initial values (`reset_parameters` of each sub-module), its own dropout
    and its own batch statistics. Networks of linear layers, layer norms and activations, and
    sequences of them, run as batched products, several times faster than under `vmap`.

    Args:
        module: A keyed module, or a plain `nn.Module` with one output: then its argument names are
            the `in_keys`, and `"output"` is the out key. It is not changed.
        num_copies: How many copies.
        expand_input: Whether all copies read the same input; else the input has one part per copy
            in its first dimension, as the output of another ensemble.

    Raises:
        InvalidValue: If there is not at least one copy.
        InvalidArgument: If the number is not an int, or the shape of a parameter is not known yet.

    Warns:
        UserWarning: If a sub-module has parameters but no `reset_parameters`, so that the copies
            start from equal values.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        >>> module = TensorDictModule(net, in_keys=["a"], out_keys=["b"])
        >>> ensemble = EnsembleModule(module, num_copies=3)
        >>> data = ensemble(TensorDict({"a": torch.randn(10, 4)}, batch_size=[10]))
        >>> data.batch_size, data["b"].shape
        (torch.Size([3, 10]), torch.Size([3, 10, 2]))
        >>> ensemble(a=torch.randn(10, 4)).shape
        torch.Size([3, 10, 2])
    """

    _kd_changes_by_assignment = True

    params: TensorDictParams

    def __init__(self, module: nn.Module, num_copies: int, expand_input: bool = True) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise InvalidArgument(
                f"`module` must be an `nn.Module`, got {module!r}: copies differ in their "
                "parameters. Wrap a function in a module that holds what it learns."
            )
        if type(num_copies) is not int:
            raise InvalidArgument(f"`num_copies` must be an int, got {num_copies!r}.")
        if num_copies < 1:
            raise InvalidValue(f"`num_copies` must be a positive int, got {num_copies!r}.")
        if any(is_lazy(parameter) for parameter in module.parameters()):
            raise InvalidArgument(
                f"the parameters of {describe(module)} have no shapes before its first call. Call "
                "it once, or give the sizes of its lazy modules."
            )
        keyed = module if hasattr(module, "in_keys") else _with_keys(module)
        self.in_keys = list(keys_of(keyed, "in_keys"))
        self.out_keys = list(keys_of(keyed, "out_keys"))
        self.expand_input = expand_input
        _warn_of_equal_parts(keyed)
        self.params = _stacked([_fresh(keyed) for _ in range(num_copies)])
        self._kd_recurrent = any(isinstance(member, nn.RNNBase) for member in keyed.modules())
        # Not registered: its own tensors are not parameters of the ensemble.
        self.__dict__["_kd_template"] = copy.deepcopy(keyed).to("meta")

    @property
    def params_td(self) -> TensorDictParams:
        """The parameters of all copies, stacked: the same as `params`."""
        return cast(TensorDictParams, self._modules["params"])

    @property
    def module(self) -> nn.Module:
        """What computes with the parameters of a copy: `ensemble.params[0].to_module(module)`.

        Its own parameters are on the device `meta`, and not parameters of the ensemble.
        """
        return cast(nn.Module, self.__dict__["_kd_template"])

    def _load_from_state_dict(
        self, state_dict: dict[str, object], prefix: str, *rest: object
    ) -> None:
        """Take the state of an ensemble of tensordict, too.

        It has the parameters of all copies at `params_td`, and those of one more at `module`.
        """
        theirs = f"{prefix}params_td."
        if any(key.startswith(theirs) for key in state_dict):
            for key in [*state_dict]:
                if key.startswith(theirs):
                    state_dict[f"{prefix}params.{key[len(theirs) :]}"] = state_dict.pop(key)
                elif key.startswith(f"{prefix}module."):
                    del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @property
    def num_copies(self) -> int:
        """How many copies there are."""
        return int(self.params_td.batch_size[0])

    _kd_has_value_form = False
    _kd_replaces_container = True

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all copies."""
        template = self.__dict__.get("_kd_template")
        if template is not None:
            template.train(mode)
        return super().train(mode)

    def reset_parameters(self) -> None:
        """Draw new values for each copy; `reset_parameters_recursive` calls this."""
        params = self.params_td._kd_shallow()
        template = self.__dict__["_kd_template"]
        for idx in range(self.num_copies):
            with torch.no_grad():
                own = params[idx]
            with own.to_module(template):
                reset_members(template)

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Run all copies.

        Args:
            tensordict: What each copy reads.

        Returns:
            A new container; with `expand_input` its batch size starts with the number of copies,
            inputs expanded.

        Raises:
            InputMissing: If an entry that the module reads is missing.
            kd_core.ShapeMismatch: Without `expand_input`, if an input has not one part per copy.
        """
        outputs = self._kd_forward_values(
            *read_entries(tensordict, self._kd_own_in_keys(), lambda: describe(self))
        )
        target = tensordict.copy()
        if self.expand_input:
            target = tensordict.expand(self.num_copies, *tensordict.batch_size)
        made = dict(zip(self.out_keys_source, outputs, strict=True))
        keys = self._kd_stored_keys()
        write_entries(target, keys, [made[key] for key in keys])
        return target

    def _kd_forward_values(self, *values: object) -> tuple[object, ...]:
        """Run all copies on bare values; every output has the copies in its first dimension."""
        params = self.params_td._kd_shallow()  # a plain container
        mapped = () if self.expand_input else values
        if mapped:
            self._kd_check_parts(mapped)
        compiling = torch.compiler.is_compiling()
        if self._kd_recurrent or (compiling and is_exporting()):
            return self._kd_one_by_one(params, values)
        output = self._kd_at_once(params, values)
        if output is not None:
            return self._kd_all_outputs(output)
        # Plain tensors only, since vmap would flatten and rebuild containers several times. What is
        # the same for all copies is in the closure.
        leaves: list[Tensor] = []
        params._kd_collect(leaves)
        count = len(leaves)

        def run_one(*tensors: object) -> Tensor | tuple[Tensor, ...]:
            own = params._kd_rebuild(cast("Iterator[Tensor]", iter(tensors)))
            return self._kd_run(own, *(values if self.expand_input else tensors[count:]))

        run = torch.vmap(run_one, randomness="different")
        if count or mapped:
            return self._kd_all_outputs(run(*leaves, *mapped))
        return self._kd_one_by_one(params, values)

    def _kd_at_once(
        self, params: TensorDictBase, values: tuple[object, ...]
    ) -> tuple[Tensor, ...] | None:
        """Run all copies without `vmap`; None if that cannot be done, or torch refuses."""
        mapped = not self.expand_input
        held: list[tuple[Tensor, bool]] = []
        for value in values:
            if type(value) is not Tensor or value.ndim <= mapped:
                return None
            held.append((value, mapped))
        known = None if skip_existing() else self._kd_known_steps()
        if known is None:
            return None
        steps, outputs = known
        template, count = self.__dict__["_kd_template"], self.num_copies
        try:
            for path, read, writes in steps:
                if read >= len(held):  # fewer values than inputs: the call itself says so
                    return None
                module = template
                level: Stacked = params._kd_entries
                for name in path:
                    module, level = module._modules[name], _level(level.get(name))
                value, stacked = held[read]
                made, stacked = _run(module, level, value, count, stacked)
                for each in made if isinstance(made, tuple) else (made,):
                    held.append((each, stacked))
                if len(held) != writes:
                    return None
            return tuple(
                value if stacked else torch.stack([value] * count)
                for value, stacked in [held[number] for number in outputs]
            )
        except RuntimeError:  # `vmap` names what is wrong
            return None

    @assume_constant_result
    def _kd_known_steps(self) -> tuple[tuple[Step, ...], tuple[int, ...]] | None:
        """Return the steps of a copy, and which values are outputs; None if they are not known.

        They are known where all copies can run at once, and no hook or patch would show it. dynamo
        takes this as a constant: compiled code does not see hooks that are added later.
        """
        if any(GLOBAL_HOOKS) or function_modes() or not calls_are_own():
            return None
        return _known_steps(self.__dict__["_kd_template"], _level(self._modules["params"]))

    def _kd_check_parts(self, values: tuple[object, ...]) -> None:
        for key, value in zip(self.in_keys, values, strict=True):
            shape = value.shape if isinstance(value, Tensor) else (self.num_copies,)
            if tuple(shape[:1]) != (self.num_copies,):
                raise ShapeMismatch(
                    f"the first dimension of {format_key(key)} must be {self.num_copies}, one part "
                    f"for each copy of {describe(self)}, got shape {tuple(shape)}. Pass "
                    "`expand_input=True` to give all copies the same input."
                )

    def _kd_run(self, params: TensorDictBase, *values: object) -> Tensor | tuple[Tensor, ...]:
        template = self.__dict__["_kd_template"]
        with params.to_module(template):
            output: Tensor | tuple[Tensor, ...] = template(*values)
        return output

    def _kd_one_by_one(
        self, params: TensorDictBase, values: tuple[object, ...]
    ) -> tuple[object, ...]:
        made: list[tuple[Tensor, ...]] = []
        for idx in range(self.num_copies):
            fed = values
            if not self.expand_input:
                fed = tuple(value[idx] if isinstance(value, Tensor) else value for value in values)
            output = self._kd_run(params[idx], *fed)
            made.append(output if isinstance(output, tuple) else (output,))
        return self._kd_all_outputs(tuple(torch.stack(each) for each in zip(*made, strict=True)))

    def _kd_all_outputs(self, outputs: Tensor | tuple[Tensor, ...]) -> tuple[object, ...]:
        """Return the outputs with None for those that are discarded."""
        rest = iter(outputs if isinstance(outputs, tuple) else (outputs,))
        return tuple(None if key == DISCARD else next(rest) for key in self._kd_own_out_keys())


def _with_keys(module: nn.Module) -> TensorDictModule:
    """Wrap a plain module: its argument names become the in_keys, with one output."""
    parameters = signature_of_call(module).parameters.values()
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
    ]
    return TensorDictModule(module, names, ["output"])


_ALONE: Final[tuple[tuple[Step, ...], tuple[int, ...]]] = ((("module",), 0, 2),), (1,)
"""One module that reads one value, and writes one."""


def _known_steps(keyed: Any, params: Stacked) -> tuple[tuple[Step, ...], tuple[int, ...]] | None:
    if type(keyed) is not TensorDictSequential:
        known = _is_known_step(keyed, _level(params.get("module")))
        return _ALONE if known and len(keyed.out_keys_source) == 1 else None
    unusual = keyed.partial_tolerant or {"_kd_selected", "_kd_listed"} & keyed.__dict__.keys()
    if unusual or not _is_called_as_made(keyed, TensorDictSequential):
        return None
    steps: list[Step] = []
    numbers: dict[NestedKey, int] = {key: number for number, key in enumerate(keyed.in_keys)}
    count, levels = len(numbers), _level(params.get("module"))
    step: Any
    for name, step in keyed._kd_named_steps():
        if not _is_known_step(step, _level(_level(levels.get(name)).get("module"))):
            return None
        read, writes = numbers.get(step._kd_in_spec.reads[0]), step.out_keys_source
        if read is None or DISCARD in writes or len({*writes}) != len(writes):
            return None
        numbers |= {key: count + place for place, key in enumerate(writes)}
        count += len(writes)
        steps.append((("module", name, "module"), read, count))
    if not all(isinstance(key, str) for key in numbers):
        return None  # a key may lie below another
    return tuple(steps), tuple(numbers[key] for key in keyed.out_keys)


def _is_known_step(step: object, params: Stacked) -> bool:
    """Return whether a step passes one tensor to a known module and writes what it returns."""
    if type(step) is not TensorDictModule or not _is_called_as_made(step, TensorDictModule):
        return False
    spec, module = step._kd_in_spec, step._modules.get("module")
    if step.method is not None or step.method_kwargs or spec.names is not None:
        return False
    if step.__dict__.get("_kd_out_names") is not None or len(spec.reads) != 1:
        return False
    return module is not None and _is_known(module, params)


def _is_called_as_made(keyed: nn.Module, kind: type[nn.Module]) -> bool:
    return not is_patched(kind) and is_unchanged(keyed, kind)


def _fresh(module: nn.Module) -> nn.Module:
    made = copy.deepcopy(module)
    reset_members(made)
    return made


def _warn_of_equal_parts(module: nn.Module) -> None:
    ensembles = [member for member in module.modules() if isinstance(member, EnsembleModule)]
    drawn = {member for ensemble in ensembles for member in ensemble.modules()}
    equal = [
        path or type(member).__name__
        for path, member in module.named_modules()
        if member not in drawn
        and any(True for _ in member.parameters(recurse=False))
        and not callable(getattr(type(member), "reset_parameters", None))
    ]
    if equal:
        warnings.warn(
            f"the copies start from equal values in {', '.join(f'`{path}`' for path in equal)}. "
            "Define `reset_parameters` there to draw new values.",
            UserWarning,
            stacklevel=3,
        )


def _stacked(modules: list[nn.Module]) -> TensorDictParams:
    """Stack the state of several modules of the same kind."""
    states = [TensorDict.from_module(module).flatten_keys(".") for module in modules]
    stacked: dict[str, object] = {}
    shared: dict[int, Tensor] = {}
    for key, first in states[0].items():
        if id(first) not in shared:
            with torch.no_grad():
                leaf = torch.stack([state[str(key)] for state in states])
            is_parameter = isinstance(first, nn.Parameter)
            shared[id(first)] = nn.Parameter(leaf, first.requires_grad) if is_parameter else leaf
        stacked[str(key)] = shared[id(first)]
    nested = TensorDict(stacked, [len(modules)]).unflatten_keys(".")
    return TensorDictParams(nested, no_convert=True)
