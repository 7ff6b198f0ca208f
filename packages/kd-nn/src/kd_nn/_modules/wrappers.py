"""Keyed modules around another keyed module, a function of a container, or a function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Generic, Self, TypeVar, cast, get_args, get_origin

from torch import Tensor, nn

from kd_core import (
    InvalidArgument,
    NestedKey,
    TensorClass,
    TensorDictBase,
    is_tensor_collection,
    is_tensorclass,
)
from kd_core.extending import field_keys, public_in
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


Input = TypeVar("Input")
Output = TypeVar("Output")


@public_in("kd_nn")
class TensorClassModuleBase(nn.Module, ABC, Generic[Input, Output]):
    """Base class of modules that take an instance of one tensor class and return one of another.

    A subclass names both in brackets and defines `forward`. Either may be a tensor: such a module
    has no form for containers.

    Attributes:
        input_type: What `forward` takes.
        output_type: What it returns.

    Example:
        >>> import torch
        >>> from kd_core import TensorClass, TensorDict
        >>> class Pair(TensorClass):
        ...     a: torch.Tensor
        ...     b: torch.Tensor
        >>> class Sum(TensorClass):
        ...     total: torch.Tensor
        >>> class Add(TensorClassModuleBase[Pair, Sum]):
        ...     def forward(self, x: Pair) -> Sum:
        ...         return Sum(total=x.a + x.b, batch_size=x.batch_size)
        >>> Add()(Pair(a=torch.ones(2), b=torch.ones(2), batch_size=[2])).total
        tensor([2., 2.])
        >>> Add().as_td_module()(TensorDict(a=torch.ones(2), b=torch.ones(2)))["total"]
        tensor([2., 2.])
    """

    input_type: type[Input]
    output_type: type[Output]

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Take the types from the brackets behind the base class."""
        super().__init_subclass__(**kwargs)
        for base in vars(cls).get("__orig_bases__", ()):
            origin, kinds = get_origin(base), get_args(base)
            if not isinstance(origin, type) or not issubclass(origin, TensorClassModuleBase):
                continue
            if origin is TensorClassModuleBase:
                cls.input_type, cls.output_type = kinds
                continue
            given = dict(zip(getattr(origin, "__parameters__", ()), kinds, strict=False))
            for name in ("input_type", "output_type"):
                kind = getattr(origin, name, None)
                setattr(cls, name, given.get(kind, kind))

    @abstractmethod
    def forward(self, x: Input, /) -> Output:
        """Return the output for one input."""

    def __call__(self, x: Input, /) -> Output:
        """Run the module."""
        result: Output = super().__call__(x)
        return result

    def as_td_module(self) -> TensorClassModuleWrapper:
        """Return the keyed module that reads and writes the fields.

        Raises:
            InvalidArgument: If the class did not name two tensor classes.
        """
        return TensorClassModuleWrapper(self)


@public_in("kd_nn")
class TensorClassModuleWrapper(TensorDictModuleBase):
    """A keyed module made of one that takes and returns tensor classes.

    Its keys are the fields of the classes. It returns a new container, which holds the outputs
    alone: later steps of a sequence read these. A field that is missing in the input is `None`.

    Args:
        module: The module; its `input_type` and `output_type` are tensor classes.

    Raises:
        InvalidArgument: If they are not.

    Example:
        >>> import torch
        >>> from kd_core import TensorClass, TensorDict
        >>> class Point(TensorClass):
        ...     x: torch.Tensor
        >>> class Move(TensorClassModuleBase[Point, Point]):
        ...     def forward(self, x: Point) -> Point:
        ...         return Point(x=x.x + 1, batch_size=x.batch_size)
        >>> TensorClassModuleWrapper(Move())(TensorDict(x=torch.ones(2)))["x"]
        tensor([2., 2.])
    """

    _kd_changes_by_assignment = True
    _kd_replaces_container = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        kinds = [getattr(type(module), name, None) for name in ("input_type", "output_type")]
        if not isinstance(module, TensorClassModuleBase) or not all(map(is_tensorclass, kinds)):
            raise InvalidArgument(
                f"the input and output of `{type(module).__name__}` must be tensor classes, got "
                f"{' and '.join(getattr(kind, '__name__', repr(kind)) for kind in kinds)}. Name "
                "them: `class Mine(TensorClassModuleBase[InputClass, OutputClass])`."
            )
        self.in_keys = list(field_keys(cast("type[TensorClass]", kinds[0])))
        self.out_keys = list(field_keys(cast("type[TensorClass]", kinds[1])))
        self.tc_module = module

    @property
    def _kd_optional_in_keys(self) -> list[NestedKey]:
        """The `in_keys` that a call with tensors may leave out: all, as fields may be `None`."""
        return self.in_keys

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Build the input, run the module, and return what is visible of the output."""
        kind = cast("type[TensorClass]", self.tc_module.input_type)
        given = tensordict
        if not isinstance(given, kind):
            given = TensorClass.from_tensordict.__func__(kind, tensordict, safe=False)  # type: ignore[attr-defined]  # a field may have its name
        made = self.tc_module(given)
        if not isinstance(made, TensorDictBase):
            raise InvalidArgument(
                f"`{type(self.tc_module).__name__}` must return a tensor class, got "
                f"{type(made).__name__}."
            )
        result = TensorDictBase.to_tensordict(made)
        if self.__dict__.get("_kd_selected") is None:
            return result
        return result.select(*self.out_keys, strict=False)


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
