"""Keyed modules around another keyed module, a function of a container, or a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Self

from torch import Tensor, nn

from kd_core import InvalidArgument, NestedKey, TensorDictBase, is_tensor_collection
from kd_core.extending import public_in
from kd_nn._dispatch.dispatch import dispatch, keys_of
from kd_nn._dispatch.entries import Inplace
from kd_nn._dispatch.skip_existing import outputs_exist
from kd_nn._errors import NotKeyed
from kd_nn._keys.specs import InKeySpec, Keys, parse_keys
from kd_nn._modules.base import TensorDictModuleBase, is_special
from kd_nn._modules.module import InKeys, OutKeys, TensorDictModule
from kd_nn._modules.settings import Check, checked_flag


@public_in("kd_nn")
class TensorDictModuleWrapper(TensorDictModuleBase):
    """Wrap a keyed module and forward everything to it.

    Subclasses add behaviour around `forward`; keys, selection and attributes are those of the
    wrapped module.

    Args:
        td_module: The keyed module.

    Raises:
        NotKeyed: If it has no keys.

    Example:
        >>> import torch
        >>> class Logged(TensorDictModuleWrapper):
        ...     def forward(self, tensordict):
        ...         print("running", self.out_keys)
        ...         return self.td_module(tensordict)
        >>> from kd_core import TensorDict
        >>> _ = Logged(TensorDictModule(torch.neg, ["x"], ["y"]))(TensorDict(x=torch.ones(2)))
        running ['y']
    """

    _kd_changes_by_assignment = True

    def __init__(self, td_module: nn.Module) -> None:
        super().__init__()
        if not self.is_tdmodule_compatible(td_module):
            name = type(td_module).__name__
            raise NotKeyed(
                f"`td_module` must be a keyed module, got `{name}` without in_keys and out_keys. "
                f"Wrap it first: `TensorDictModule({name}(...), in_keys=[...], out_keys=[...])`."
            )
        self.td_module = td_module

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase, **kwargs: object) -> TensorDictBase:
        """Call the wrapped module."""
        result: TensorDictBase = self.td_module(tensordict, **kwargs)
        return result

    def select_out_keys(self, *out_keys: NestedKey) -> Self:
        """Keep only some outputs of the wrapped module, in place."""
        self.td_module.select_out_keys(*out_keys)  # type: ignore[operator]  # keyed
        self._kd_flag_change()
        return self

    def reset_out_keys(self) -> Self:
        """Reset the selection of the wrapped module, in place: all outputs are visible again."""
        self.td_module.reset_out_keys()  # type: ignore[operator]  # keyed
        self._kd_flag_change()
        return self

    @property
    def out_keys_source(self) -> list[NestedKey]:
        """All keys that the wrapped module writes, whatever is selected."""
        source = getattr(self.td_module, "out_keys_source", None)
        return list(self.out_keys if source is None else source)

    @property
    def _kd_may_skip(self) -> bool:
        """Whether the wrapped module may leave out some of the outputs, for want of inputs."""
        return getattr(self.td_module, "_kd_may_skip", False) is True

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        """Return an attribute of the wrapper, else of the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules: dict[str, nn.Module] = self.__dict__.get("_modules", {})
            if "td_module" not in modules or is_special(name):
                raise
            found: Tensor | nn.Module = getattr(modules["td_module"], name)
            return found

    def _kd_own_in_keys(self) -> Keys:
        return keys_of(self.td_module, "in_keys")

    def _kd_own_out_keys(self) -> Keys:
        return keys_of(self.td_module, "out_keys")

    def _kd_set_in_spec(self, spec: InKeySpec) -> None:
        self.td_module.in_keys = list(spec.keys)  # type: ignore[assignment]  # keyed

    def _kd_set_out_keys_source(self, keys: Keys) -> None:
        self.td_module.out_keys = list(keys)  # type: ignore[assignment]  # keyed


@public_in("kd_nn")
class WrapModule(TensorDictModuleBase):
    """Build a keyed module from a function of a container that returns a container.

    Args:
        func: The function. It may return a different container, of another batch size: later steps
            of a sequence continue with it.
        inplace: Whether the entries of the result are written into the input, which is returned.
        in_keys: The keys it reads, if known.
        out_keys: The keys it writes, if known.

    Raises:
        InvalidArgument: If `func` is not callable; in a call, if it does not return a container.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> first = WrapModule(lambda td: td[0])
        >>> first(TensorDict(x=torch.ones(2, 3), batch_size=[2, 3])).batch_size
        torch.Size([3])
    """

    _kd_changes_by_assignment = True
    _kd_checks: ClassVar[Mapping[str, Check]] = {"inplace": checked_flag}

    def __init__(
        self,
        func: Callable[[TensorDictBase], TensorDictBase],
        inplace: bool = False,
        in_keys: NestedKey | Sequence[NestedKey] = (),
        out_keys: NestedKey | Sequence[NestedKey] = (),
    ) -> None:
        super().__init__()
        if not callable(func):
            raise InvalidArgument(
                f"`func` must be a function of a container, got {type(func).__name__}: {func!r}."
            )
        self.in_keys = list(parse_keys(in_keys, "in_keys"))
        self.out_keys = list(parse_keys(out_keys, "out_keys"))
        self.inplace: Inplace = inplace
        self.func = func

    @property
    def _kd_replaces_container(self) -> bool:
        """Whether a sequence goes on with the container that this returns."""
        return not self.inplace

    @property
    def _kd_node_label(self) -> str:
        """The name of the function, for tables and pictures."""
        return str(getattr(self.func, "__name__", type(self.func).__name__))

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Call the function."""
        if outputs_exist(self, tensordict):
            return tensordict
        result = self.func(tensordict)
        if not is_tensor_collection(result):
            raise InvalidArgument(
                f"`{self._kd_node_label}` must return a container, got {type(result).__name__}. "
                "Wrap a function of tensors in a `TensorDictModule`."
            )
        if self.inplace and result is not tensordict:
            return tensordict.update(result)
        return result


def as_tensordict_module(
    in_keys: InKeys, out_keys: OutKeys
) -> Callable[[Callable[..., object]], TensorDictModule]:
    """Convert the decorated function to a keyed module.

    Args:
        in_keys: What it reads; see `TensorDictModule`.
        out_keys: What it writes.

    Returns:
        A decorator.

    Example:
        >>> import torch
        >>> @as_tensordict_module(["x", "y"], ["sum"])
        ... def add(x, y):
        ...     return x + y
        >>> add(x=torch.ones(2), y=torch.ones(2))
        tensor([2., 2.])
    """

    def decorate(function: Callable[..., object]) -> TensorDictModule:
        return TensorDictModule(function, in_keys, out_keys)

    return decorate
