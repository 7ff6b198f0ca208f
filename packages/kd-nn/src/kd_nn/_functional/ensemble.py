"""`EnsembleModule`: several copies of a module, run at once.

The parameters of all copies are stacked in one container; one copy without values is the template
that computes. Eagerly it runs at once where that is known, else under `vmap`. While a graph is
captured the copies run one by one, so that an exported program has no vmap call; so do recurrent
layers, for which torch has no vmap.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kd_core import (
    InvalidArgument,
    InvalidValue,
    ShapeMismatch,
    TensorDict,
    TensorDictBase,
    format_key,
)
from kd_core.extending import public_in, signature_of
from kd_nn._dispatch.dispatch import describe, dispatch, keys_of
from kd_nn._dispatch.entries import read_entries, write_entries
from kd_nn._dispatch.skip_existing import skip_existing
from kd_nn._functional.at_once import is_unchanged, run_at_once, runs_at_once
from kd_nn._functional.params import TensorDictParams
from kd_nn._keys.specs import DISCARD
from kd_nn._modules.base import TensorDictModuleBase
from kd_nn._modules.module import TensorDictModule
from kd_nn._modules.settings import reset_members
from kd_nn._plan.invalidation import is_patched


@public_in("kd_nn")
class EnsembleModule(TensorDictModuleBase):
    """Run several re-initialised copies of a module; outputs gain a first dimension.

    Each copy has its own initial values (`reset_parameters` of each sub-module), its own dropout
    and its own batch statistics. Networks of linear layers, layer norms and activations run as
    batched products, several times faster than under `vmap`.

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
        return int(cast(TensorDictParams, self._modules["params"]).batch_size[0])

    @property
    def _kd_has_value_form(self) -> bool:
        """Whether outputs fit the container of the inputs: not if all get a new dimension."""
        return not self.expand_input

    @property
    def _kd_replaces_container(self) -> bool:
        """Whether the result is another container than the input."""
        return self.expand_input

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all copies."""
        template = self.__dict__.get("_kd_template")
        if template is not None:
            template.train(mode)
        return super().train(mode)

    def reset_parameters(self) -> None:
        """Draw new values for each copy; `reset_parameters_recursive` calls this."""
        params = cast(TensorDictParams, self._modules["params"])._kd_shallow()
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
            With `expand_input` a new container whose batch size starts with the number of copies,
            inputs expanded; else the same container.

        Raises:
            InputMissing: If an entry that the module reads is missing.
            kd_core.ShapeMismatch: Without `expand_input`, if an input has not one part per copy.
        """
        outputs = self._kd_forward_values(
            *read_entries(tensordict, self._kd_own_in_keys(), lambda: describe(self))
        )
        target = tensordict
        if self.expand_input:
            target = tensordict.expand(self.num_copies, *tensordict.batch_size)
        made = dict(zip(self.out_keys_source, outputs, strict=True))
        keys = [key for key in self.out_keys if key != DISCARD]
        write_entries(target, keys, [made[key] for key in keys])
        return target

    def _kd_forward_values(self, *values: object) -> tuple[object, ...]:
        """Run all copies on bare values; every output has the copies in its first dimension."""
        params = cast(TensorDictParams, self._modules["params"])._kd_shallow()  # a plain container
        mapped = () if self.expand_input else values
        if mapped:
            self._kd_check_parts(mapped)
        if self._kd_recurrent or torch.compiler.is_compiling():
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

    def _kd_at_once(self, params: TensorDictBase, values: tuple[object, ...]) -> Tensor | None:
        """Run all copies without `vmap`; None if that cannot be done, or torch refuses."""
        template = self.__dict__["_kd_template"]
        if len(values) != 1 or not _only_calls(template):
            return None
        (value,), module = values, template._modules["module"]
        level = params._kd_entries.get("module")
        entries = level._kd_entries if isinstance(level, TensorDictBase) else {}
        stacked = not self.expand_input
        if not runs_at_once(module, entries, value, stacked):
            return None
        try:
            return run_at_once(module, entries, cast(Tensor, value), self.num_copies, stacked)
        except RuntimeError:  # `vmap` names what is wrong
            return None

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
    parameters = signature_of(module.forward).parameters.values()
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
    ]
    return TensorDictModule(module, names, ["output"])


def _only_calls(keyed: nn.Module) -> bool:
    """Return whether a keyed module passes one tensor to a module, and writes what it returns."""
    if type(keyed) is not TensorDictModule or is_patched(TensorDictModule):
        return False
    if not is_unchanged(keyed, TensorDictModule):
        return False
    if keyed.method is not None or keyed.method_kwargs or keyed._modules.get("module") is None:
        return False
    spec = keyed._kd_in_spec
    outputs = keyed.__dict__.get("_kd_out_names") is None and len(keyed.out_keys_source) == 1
    return outputs and spec.names is None and len(spec.reads) == 1 and not skip_existing()


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
