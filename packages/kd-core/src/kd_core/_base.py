"""`TensorDictBase`: the list of concerns that make a container."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, ClassVar, TypeGuard, cast, overload

import torch
from torch import Tensor

from kd_core._naming import also_named, leaves_out, offered_names, public_in
from kd_core._nodes import registry
from kd_core._nodes.entry import TensorData, Values
from kd_core._ops.calls.apply import Apply, Parallel
from kd_core._ops.calls.modules import Modules
from kd_core._ops.entries.access import Access
from kd_core._ops.entries.structure import Arrangement, Structure
from kd_core._ops.formats.conversion import Conversion
from kd_core._ops.formats.files import Formats, Saving
from kd_core._ops.formats.objects import Objects
from kd_core._ops.formats.processes import Processes
from kd_core._ops.math.autograd import Autograd
from kd_core._ops.math.blending import Blending
from kd_core._ops.math.pointwise import (
    Arithmetic,
    ArithmeticInPlace,
    Casts,
    Comparisons,
    Logic,
    LogicInPlace,
    Unary,
    UnaryInPlace,
)
from kd_core._ops.math.reduction import Reductions
from kd_core._ops.math.statistics import Statistics
from kd_core._ops.scopes import Contexts
from kd_core._ops.selection.indexing import Indexing
from kd_core._ops.selection.partition import Partition
from kd_core._ops.shape.description import Description
from kd_core._ops.shape.ragged import Ragged, as_stack, densified
from kd_core._ops.shape.shaping import Dimensions, Shape
from kd_core._ops.values.filling import Filling
from kd_core._ops.values.inventory import Inventory
from kd_core._ops.values.placement import Placement, dense_copy
from kd_core._ops.values.storage import MemoryMaps, Storage
from kd_core._protocol.primitives import AbstractContainer
from kd_core._protocol.primitives import call as override

if TYPE_CHECKING:
    from typing import TypeVar

    from kd_core._protocol.primitives import Side
    from kd_core._types import DeviceLike, NestedKey

    C = TypeVar("C", bound="TensorDictBase")


@public_in("kd_core")
@leaves_out("qint8", "qint32", "quint8", "quint4x2")
class TensorDictBase(
    Access,
    Description,
    Structure,
    Arrangement,
    Inventory,
    Indexing,
    Shape,
    Dimensions,
    Partition,
    Contexts,
    Modules,
    Unary,
    UnaryInPlace,
    Arithmetic,
    ArithmeticInPlace,
    Logic,
    LogicInPlace,
    Comparisons,
    Casts,
    Reductions,
    Statistics,
    Apply,
    Parallel,
    Blending,
    Filling,
    Placement,
    Autograd,
    Storage,
    MemoryMaps,
    Conversion,
    Ragged,
    Objects,
    Formats,
    Saving,
    Processes,
):
    """A mapping of (nested) string keys to tensors that share their leading dimensions.

    What all container kinds have in common: `TensorDict` (dense), `LazyStackedTensorDict` (members
    seen as one), `TensorClass` (declared fields). A kind implements the primitives;
    each method stands in the concern that it inherits from.

    Example:
        >>> from kd_core import TensorDict, TensorDictBase
        >>> isinstance(TensorDict(), TensorDictBase)
        True
    """

    __slots__ = ()
    _kd_engine: ClassVar[type[TensorDictBase]]
    __array_ufunc__ = None  # `numpy.float64(2) * td` is for `__rmul__`, not for numpy

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        cls._kd_engine = cls
        registry.new_kind(cls)

    def __dir__(self) -> list[str]:
        return offered_names(self)

    def __repr__(self) -> str:
        from kd_core._display import describe_node  # programs that print nothing need none

        return describe_node(self)

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        from kd_core._display import html_of_node  # the `html` of Python loads all entities

        return html_of_node(self)

    def _ipython_key_completions_(self) -> list[NestedKey]:
        """Return the keys that a prompt offers after `td["`, nested ones as tuples."""
        return list(self._kd_engine.keys(self, include_nested=True))

    @staticmethod
    def stack(input: Sequence[C], dim: int | str = 0, *, out: C | None = None) -> C:
        """Stack containers along a new batch dimension: `kd_core.stack`.

        Example:
            >>> from kd_core import TensorDict
            >>> TensorDict.stack([TensorDict(a=1.0), TensorDict(a=2.0)])["a"]
            tensor([1., 2.])
        """
        return cast("C", registry.stack(input, dim, out=out))

    @staticmethod
    def cat(input: Sequence[C], dim: int | str = 0, *, out: C | None = None) -> C:
        """Concatenate containers along a batch dimension: `kd_core.cat`.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict.cat([TensorDict({"a": torch.zeros(n)}, [n]) for n in (2, 3)]).batch_size
            torch.Size([5])
        """
        return cast("C", registry.cat(input, dim, out=out))

    @staticmethod
    @also_named(items="input")
    def lazy_stack(
        input: Sequence[TensorDictBase],
        dim: int | str = 0,
        *,
        out: TensorDictBase | None = None,
        device: DeviceLike | None = None,
        stack_dim_name: str | None = None,
        strict_shape: bool = False,
        as_list: bool = False,
        as_padded_tensor: bool = False,
        as_nested_tensor: bool = False,
        padding_value: float = 0.0,
        padding_side: Side = "right",
        layout: torch.layout = torch.jagged,
    ) -> TensorDictBase:
        """Stack containers lazily along a new batch dimension: `kd_core.lazy_stack`.

        Example:
            >>> from kd_core import TensorDict
            >>> type(TensorDict.lazy_stack([TensorDict(a=1.0), TensorDict(a=2.0)])).__name__
            'LazyStackedTensorDict'
        """
        stack = registry.lazy_stack(
            input,
            dim,
            out=out,
            device=device,
            stack_dim_name=stack_dim_name,
            strict_shape=strict_shape,
            as_list=as_list,
            as_padded_tensor=as_padded_tensor,
            as_nested_tensor=as_nested_tensor,
            padding_value=padding_value,
            padding_side=padding_side,
            layout=layout,
        )
        return cast("TensorDictBase", stack)

    @staticmethod
    @also_named(items="input")
    def maybe_dense_stack(
        input: Sequence[TensorDictBase],
        dim: int | str = 0,
        out: TensorDictBase | None = None,
        strict: bool = False,
    ) -> TensorDictBase:
        """Stack containers densely if their entries fit, else lazily: `kd_core.maybe_dense_stack`.

        Args:
            input: the containers; the name `items` is taken, too.
            dim: the position of the new dimension.
            out: a container that takes the values.
            strict: nothing: members with other keys make a lazy stack in any case.

        Example:
            >>> from kd_core import TensorDict
            >>> type(TensorDict.maybe_dense_stack([TensorDict(a=1.0), TensorDict(b=1)])).__name__
            'LazyStackedTensorDict'
        """
        return cast("TensorDictBase", registry.maybe_dense_stack(input, dim, out=out))

    def to_tensordict(self, *, retain_none: bool = True) -> TensorDictBase:
        """Return a copy in which every container is a `TensorDict`; leaves are copied.

        Lazy stacks become dense, and tensor classes plain containers.

        Args:
            retain_none: keep entries whose value is `None`.

        Raises:
            ShapeMismatch: if the members of a lazy stack are ragged.

        Example:
            >>> import torch
            >>> from kd_core import TensorClass
            >>> class Point(TensorClass):
            ...     x: torch.Tensor
            >>> type(Point(x=torch.zeros(2), batch_size=[2]).to_tensordict()).__name__
            'TensorDict'
        """
        return cast("TensorDictBase", dense_copy(self, retain_none))

    def to_lazystack(self, dim: int | str = 0) -> TensorDictBase:
        """Return a lazy stack of the rows along a batch dimension; the members are views.

        Args:
            dim: the batch dimension, or its name; that of the stack for a lazy stack, which is
                returned itself.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> stack = TensorDict({"a": torch.zeros(2, 3)}, [2]).to_lazystack()
            >>> type(stack).__name__, stack.batch_size
            ('LazyStackedTensorDict', torch.Size([2]))
        """
        return cast("TensorDictBase", as_stack(self, dim))

    def attrs(
        self,
        *,
        fields: Sequence[str] = ("device", "dtype", "shape"),
        num_threads: int | None = None,
    ) -> TensorDictBase:
        """Return a container without batch of the device, dtype and shape of each leaf.

        They are the fields `tgt_device`, `tgt_dtype` and `tgt_shape` of a `TensorAttrs`; data that
        is not a tensor is kept. See `schema` for a plain dict.

        Args:
            fields: which of them are read; the others are `None`.
            num_threads: nothing: it only tunes speed.

        Raises:
            InvalidArgument: if there is no such field.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> attrs = TensorDict({"a": torch.ones(3, 2)}, [3]).attrs()
            >>> attrs["a"].tgt_dtype, attrs["a"].tgt_shape
            (torch.float32, torch.Size([3, 2]))
        """
        return cast("TensorDictBase", registry.attributes_of(self, tuple(fields)))

    def densify(self, layout: torch.layout = torch.strided) -> TensorDictBase:
        """Return a `TensorDict` in which entries that cannot be stacked are nested tensors.

        Args:
            layout: the layout of the nested tensors: `torch.strided` or `torch.jagged`.

        Raises:
            ShapeMismatch: if rows differ in more dimensions than the layout allows.
            InvalidValue: if the rows are not stacked along the first dimension.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict, lazy_stack
            >>> rows = [TensorDict({"a": torch.zeros(n, 2)}) for n in (1, 3)]
            >>> lazy_stack(rows).densify()["a"].is_nested
            True
        """
        return cast("TensorDictBase", densified(self, layout))

    # The function itself and not a method that calls it, which dynamo would trace and guard too.
    __torch_function__: ClassVar[classmethod[TensorDictBase, ..., object]] = classmethod(override)


def _gather_concerns() -> None:
    """Copy what the concerns define onto the class itself, which then inherits from none of them.

    dynamo looks for a method class by class, and on every call guards that each class before the
    one that has it still lacks it: with thirty concerns, 40 guards for each method that compiled
    code calls. It also searches all classes at each attribute that is set. "ops: per call" and
    "ops: first call" in the benchmarks. Type checkers see the concerns.
    """
    settled = {*vars(TensorDictBase), *AbstractContainer.__annotations__}  # a kind sets the latter
    for concern in TensorDictBase.__mro__[1:-1]:
        for name, value in vars(concern).items():
            if name in settled:
                continue
            settled.add(name)
            setattr(TensorDictBase, name, value)
            value = getattr(value, "__func__", value)
            if isinstance(value, FunctionType):  # what an error of its arguments names
                value.__module__ = TensorDictBase.__module__
                value.__qualname__ = f"TensorDictBase.{name}"
                getattr(value, "__wrapped__", value).__qualname__ = value.__qualname__
    TensorDictBase.__bases__ = (AbstractContainer,)


_gather_concerns()
TensorDictBase._kd_engine = TensorDictBase  # type: ignore[type-abstract]  # only methods are asked for
Mapping.register(TensorDictBase)  # type: ignore[type-abstract]  # it is abstract, and a mapping


TensorCollection = TensorDictBase  # the name of the base of all kinds in tensordict


@overload
def is_tensor_collection(datatype: type) -> bool: ...
@overload
def is_tensor_collection(datatype: object) -> TypeGuard[TensorDictBase | Values]: ...
def is_tensor_collection(datatype: object) -> bool:
    """Return whether a value is a container, or a class of containers, which `is_leaf` is given.

    A wrapper of non-tensor data is a container, too, one without keys.

    Example:
        >>> from kd_core import TensorDict, is_tensor_collection
        >>> is_tensor_collection(TensorDict()), is_tensor_collection({})
        (True, False)
        >>> is_tensor_collection(TensorDict({"s": "word"}).get("s"))
        True
    """
    return isinstance(datatype, (TensorDictBase, Values)) or (
        isinstance(datatype, type) and issubclass(datatype, (TensorDictBase, Values))
    )


def default_is_leaf(cls: type) -> bool:
    """Return whether entries of a type are leaves: tensors. For `is_leaf` of `keys` and `items`.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, default_is_leaf
        >>> default_is_leaf(torch.Tensor), default_is_leaf(TensorDict)
        (True, False)
    """
    return issubclass(cls, (Tensor, TensorData))


def is_leaf_nontensor(cls: type) -> bool:
    """Return whether entries of a type are leaves or non-tensor data: not nested containers.

    Example:
        >>> from kd_core import TensorDict, is_leaf_nontensor
        >>> td = TensorDict({"a": 1, "n": {"s": "word"}})
        >>> list(td.keys(True, True, is_leaf=is_leaf_nontensor))
        ['a', ('n', 's')]
    """
    return not issubclass(cls, TensorDictBase)
