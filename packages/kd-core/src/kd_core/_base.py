"""`TensorDictBase`: the list of concerns that make a container."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from types import GenericAlias
from typing import TYPE_CHECKING, ClassVar, Generic, TypeGuard, overload

import torch
from torch import Tensor

from kd_core import _registry as registry
from kd_core._naming import also_named, leaves_out, offered_names, public_in
from kd_core._nodes import TensorData, Values
from kd_core._ops import joining
from kd_core._ops.access import Access
from kd_core._ops.apply import Apply, Parallel
from kd_core._ops.blending import Blending
from kd_core._ops.conversion import Conversion
from kd_core._ops.description import Description, Inventory
from kd_core._ops.files import Formats, PathLike, Saving, writing
from kd_core._ops.filling import Filling
from kd_core._ops.indexing import Indexing
from kd_core._ops.modules import Modules
from kd_core._ops.objects import Objects
from kd_core._ops.partition import Partition, Ragged, as_stack, densified
from kd_core._ops.placement import Autograd, Placement, dense_copy
from kd_core._ops.pointwise import (
    Arithmetic,
    ArithmeticInPlace,
    Casts,
    Comparisons,
    Logic,
    LogicInPlace,
    Unary,
    UnaryInPlace,
)
from kd_core._ops.processes import Processes
from kd_core._ops.reducing import Statistics
from kd_core._ops.reduction import Reductions
from kd_core._ops.scopes import Contexts
from kd_core._ops.shaping import Dimensions, Shape
from kd_core._ops.storage import MemoryMaps, Storage
from kd_core._ops.structure import Arrangement, Structure
from kd_core._protocol import AbstractContainer
from kd_core._protocol import call as override

if TYPE_CHECKING:
    from kd_core._protocol import Side
    from kd_core._types import BatchSize, DeviceLike, NestedKey

    # Typed here: members that differ make a lazy stack, which is of another class than they.
    def maybe_dense_stack(
        input: Sequence[TensorDictBase],
        dim: int | str = 0,
        out: TensorDictBase | None = None,
        strict: bool = False,
    ) -> TensorDictBase: ...

else:
    maybe_dense_stack = joining.maybe_dense_stack


if TYPE_CHECKING:

    class Concerns(
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
        """The methods of containers by concern, as type checkers see them."""

        __slots__ = ()

else:
    # What a concern defines is bound in the body of `TensorDictBase`, which inherits from none.
    # dynamo looks for a method class by class, and on every call guards that each class before the
    # one that has it still lacks it: with thirty concerns, 40 guards for each method that compiled
    # code calls. "ops: per call" and "ops: first call" in the benchmarks.
    Concerns = AbstractContainer


@public_in("kd_core")
@leaves_out("qint8", "qint32", "quint8", "quint4x2")
class TensorDictBase(Concerns):
    """A mapping of (nested) string keys to tensors that share their leading dimensions.

    What all container kinds have in common: `TensorDict` (dense), `LazyStackedTensorDict` (members
    seen as one), `TensorClass` (declared fields). A kind implements the primitives;
    each method is that of a concern, as the list in the body of the class says.

    Example:
        >>> from kd_core import TensorDict, TensorDictBase
        >>> isinstance(TensorDict(), TensorDictBase)
        True
    """

    __slots__ = ()
    _kd_engine: ClassVar[type[TensorDictBase]]  # type: ignore[assignment]  # with all methods
    __array_ufunc__ = None  # `numpy.float64(2) * td` is for `__rmul__`, not for numpy

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        cls._kd_engine = cls
        registry.new_kind(cls)

    def __class_getitem__(cls, item: object) -> object:
        """Return the class as annotations name it, with the types of keys and entries."""
        if Generic in cls.__mro__:
            return super().__class_getitem__(item)  # type: ignore[misc]  # of a generic subclass
        return GenericAlias(cls, item)

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

    stack = staticmethod(joining.stack)
    cat = staticmethod(joining.cat)
    maybe_dense_stack = staticmethod(maybe_dense_stack)
    _kd_cat_once = staticmethod(joining.cat_once)

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
        stack: TensorDictBase = registry.lazy_stack(
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
        return stack

    def to_tensordict(self, *, retain_none: bool = True) -> TensorDictBase:
        """Return a copy in which every container is a `TensorDict`; leaves are copied.

        Lazy stacks become dense, of the entries that all members hold, and tensor classes plain
        containers.

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
        return dense_copy(self, retain_none)

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
        return as_stack(self, dim)

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
        return registry.attributes_of(self, tuple(fields))

    def densify(self, layout: torch.layout = torch.strided) -> TensorDictBase:
        """Return a `TensorDict` in which entries that cannot be stacked are nested tensors.

        Entries that only some members of a lazy stack hold are left out.

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
        return densified(self, layout)

    # The function itself and not a method that calls it, which dynamo would trace and guard too.
    __torch_function__: ClassVar[classmethod[TensorDictBase, ..., object]] = classmethod(override)

    def to_h5(
        self, filename: PathLike, *, exist_ok: bool = True, **options: object
    ) -> TensorDictBase:
        """Write a file of HDF5, and return the `PersistentTensorDict` whose entries are in it.

        Args:
            filename: the file; one that is there is replaced.
            exist_ok: whether one that is there is replaced; else that is an error.
            options: what `h5py` takes for a new data set, such as `compression="gzip"`.

        Raises:
            AlreadyExists: if something is at the path, and `exist_ok` is false.
            MissingDependency: if h5py is not installed.
            InvalidValue: if non-tensor data cannot be written as JSON.
            KeySetMismatch: if only some members of a lazy stack hold an entry.
        """
        with writing(self, filename, "to_h5", exist_ok):
            return registry.persistent.from_dict(self, filename, **options)

    @classmethod
    def from_h5(
        cls,
        filename: PathLike,
        *,
        mode: str = "r",
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        batch_size: BatchSize | None = None,
        non_tensor_as_stack: bool = False,
    ) -> TensorDictBase:
        """Open a file of HDF5 as a `PersistentTensorDict`, whose entries are read when used.

        Args:
            filename: the file, written by `to_h5` or of another origin.
            mode: `"r"`: for reading; `"r+"`: writes go to the file.
            auto_batch_size: infer the batch size: all leading dimensions that the leaves share.
            batch_dims: the largest number of batch dimensions to infer.
            batch_size: the leading dimensions of every entry; `None`: those of the container that
                was written, or in a file of another origin all that its leaves share.
            non_tensor_as_stack: nothing: the file says which data has one value per row.

        Raises:
            MissingDependency: if h5py is not installed.
        """
        return registry.persistent.from_h5(
            filename,
            mode=mode,
            auto_batch_size=auto_batch_size,
            batch_dims=batch_dims,
            batch_size=batch_size,
        )

    def to_store(self, **options: object) -> TensorDictBase:
        """Send the container to a server of Redis, and return the one there.

        Args:
            options: as of `TensorDictStore`: `host`, `port`, `db`, `prefix`.

        Raises:
            MissingDependency: if redis is not installed.
        """
        return registry.to_store(self, options)

    if not TYPE_CHECKING:  # where `Concerns` says the same
        # Written by `tools/generate_ops.py`: run `nox -s generate`.
        get = Access.get
        set = Access.set
        assign = Access.assign
        _kd_set_leaves = Access._kd_set_leaves
        set_ = Access.set_
        setdefault = Access.setdefault
        pop = Access.pop
        popitem = Access.popitem
        del_ = Access.del_
        nested = Access.nested
        set_non_tensor = Access.set_non_tensor
        get_non_tensor = Access.get_non_tensor
        keys = Access.keys
        values = Access.values
        items = Access.items
        __contains__ = Access.__contains__
        __len__ = Access.__len__
        __bool__ = Access.__bool__
        __hash__ = Access.__dict__["__hash__"]
        batch_size = Description.batch_size
        shape = Description.shape
        size = Description.size
        batch_dims = Description.batch_dims
        ndim = Description.ndim
        dim = Description.dim
        ndimension = Description.ndimension
        numel = Description.numel
        device = Description.device
        clear_device_ = Description.clear_device_
        auto_device_ = Description.auto_device_
        auto_batch_size_ = Description.auto_batch_size_
        update = Structure.update
        update_ = Structure.update_
        replace = Structure.replace
        select = Structure.select
        exclude = Structure.exclude
        rename_key_ = Structure.rename_key_
        flatten_keys = Structure.flatten_keys
        unflatten_keys = Structure.unflatten_keys
        empty = Structure.empty
        is_empty = Structure.is_empty
        _kd_selected = Structure._kd_selected
        _kd_without = Structure._kd_without
        _kd_replace_entries = Structure._kd_replace_entries
        clear = Arrangement.clear
        create_nested = Arrangement.create_nested
        filter_empty_ = Arrangement.filter_empty_
        split_keys = Arrangement.split_keys
        separates = Arrangement.separates
        rename_keys = Arrangement.rename_keys
        filter_non_tensor_data = Arrangement.filter_non_tensor_data
        stack_tensors = Arrangement.stack_tensors
        cat_tensors = Arrangement.cat_tensors
        stack_from_tensordict = Arrangement.stack_from_tensordict
        cat_from_tensordict = Arrangement.cat_from_tensordict
        depth = Inventory.depth
        sorted_keys = Inventory.sorted_keys
        param_count = Inventory.param_count
        bytes = Inventory.bytes
        entry_class = Inventory.entry_class
        get_item_shape = Inventory.get_item_shape
        is_non_tensor = Inventory.is_non_tensor
        data_ptr = Inventory.data_ptr
        is_floating_point = Inventory.is_floating_point
        non_tensor_items = Inventory.non_tensor_items
        summary = Inventory.summary
        __getitem__ = Indexing.__getitem__
        __setitem__ = Indexing.__setitem__
        _kd_traced_rows_at = Indexing._kd_traced_rows_at
        _kd_rows_at = Indexing._kd_rows_at
        __delitem__ = Indexing.__delitem__
        __iter__ = Indexing.__iter__
        __getitems__ = Indexing.__getitems__
        set_at_ = Indexing.set_at_
        copy_at_ = Indexing.copy_at_
        update_at_ = Indexing.update_at_
        _kd_traced_resized = Shape._kd_traced_resized
        view = Shape.view
        _kd_traced_reshape = Shape._kd_traced_reshape
        reshape = Shape.reshape
        view_as = Shape.view_as
        reshape_as = Shape.reshape_as
        flatten = Shape.flatten
        unflatten = Shape.unflatten
        squeeze = Shape.squeeze
        unsqueeze = Shape.unsqueeze
        permute = Shape.permute
        transpose = Shape.transpose
        swapaxes = Shape.swapaxes
        swapdims = Shape.swapdims
        movedim = Shape.movedim
        moveaxis = Shape.moveaxis
        expand = Shape.expand
        expand_as = Shape.expand_as
        repeat = Shape.repeat
        tile = Shape.tile
        repeat_interleave = Shape.repeat_interleave
        roll = Shape.roll
        flip = Shape.flip
        atleast_1d = Dimensions.atleast_1d
        atleast_2d = Dimensions.atleast_2d
        atleast_3d = Dimensions.atleast_3d
        broadcast_to = Dimensions.broadcast_to
        fliplr = Dimensions.fliplr
        flipud = Dimensions.flipud
        rot90 = Dimensions.rot90
        names = Dimensions.names
        refine_names = Dimensions.refine_names
        rename = Dimensions.rename
        rename_ = Dimensions.rename_
        split = Partition.split
        chunk = Partition.chunk
        tensor_split = Partition.tensor_split
        unbind = Partition.unbind
        narrow = Partition.narrow
        index_select = Partition.index_select
        gather = Partition.gather
        scatter = Partition.scatter
        _kd_scattered = Partition._kd_scattered
        masked_select = Partition.masked_select
        where = Partition.where
        get_at = Partition.get_at
        __enter__ = Contexts.__enter__
        __exit__ = Contexts.__exit__
        is_locked = Contexts.is_locked
        lock_ = Contexts.lock_
        unlock_ = Contexts.unlock_
        locked = Contexts.locked
        unlocked = Contexts.unlocked
        to_module = Modules.to_module
        abs = Unary.abs
        __abs__ = Unary.__abs__
        neg = Unary.neg
        __neg__ = Unary.__neg__
        positive = Unary.positive
        __pos__ = Unary.__pos__
        bitwise_not = Unary.bitwise_not
        __invert__ = Unary.__invert__
        acos = Unary.acos
        asin = Unary.asin
        atan = Unary.atan
        cos = Unary.cos
        cosh = Unary.cosh
        erf = Unary.erf
        frac = Unary.frac
        erfc = Unary.erfc
        exp = Unary.exp
        expm1 = Unary.expm1
        lgamma = Unary.lgamma
        log = Unary.log
        log10 = Unary.log10
        log1p = Unary.log1p
        log2 = Unary.log2
        reciprocal = Unary.reciprocal
        rsqrt = Unary.rsqrt
        sigmoid = Unary.sigmoid
        sin = Unary.sin
        sinh = Unary.sinh
        sqrt = Unary.sqrt
        tan = Unary.tan
        tanh = Unary.tanh
        acosh = Unary.acosh
        asinh = Unary.asinh
        atanh = Unary.atanh
        deg2rad = Unary.deg2rad
        digamma = Unary.digamma
        erfinv = Unary.erfinv
        exp2 = Unary.exp2
        rad2deg = Unary.rad2deg
        sinc = Unary.sinc
        logit = Unary.logit
        ceil = Unary.ceil
        floor = Unary.floor
        sign = Unary.sign
        trunc = Unary.trunc
        round = Unary.round
        logical_not = Unary.logical_not
        relu = Unary.relu
        sgn = Unary.sgn
        square = Unary.square
        nan_to_num = Unary.nan_to_num
        isfinite = Unary.isfinite
        isinf = Unary.isinf
        isnan = Unary.isnan
        isneginf = Unary.isneginf
        isposinf = Unary.isposinf
        isreal = Unary.isreal
        signbit = Unary.signbit
        abs_ = UnaryInPlace.abs_
        neg_ = UnaryInPlace.neg_
        bitwise_not_ = UnaryInPlace.bitwise_not_
        acos_ = UnaryInPlace.acos_
        asin_ = UnaryInPlace.asin_
        atan_ = UnaryInPlace.atan_
        cos_ = UnaryInPlace.cos_
        cosh_ = UnaryInPlace.cosh_
        erf_ = UnaryInPlace.erf_
        frac_ = UnaryInPlace.frac_
        erfc_ = UnaryInPlace.erfc_
        exp_ = UnaryInPlace.exp_
        expm1_ = UnaryInPlace.expm1_
        lgamma_ = UnaryInPlace.lgamma_
        log_ = UnaryInPlace.log_
        log10_ = UnaryInPlace.log10_
        log1p_ = UnaryInPlace.log1p_
        log2_ = UnaryInPlace.log2_
        reciprocal_ = UnaryInPlace.reciprocal_
        rsqrt_ = UnaryInPlace.rsqrt_
        sigmoid_ = UnaryInPlace.sigmoid_
        sin_ = UnaryInPlace.sin_
        sinh_ = UnaryInPlace.sinh_
        sqrt_ = UnaryInPlace.sqrt_
        tan_ = UnaryInPlace.tan_
        tanh_ = UnaryInPlace.tanh_
        acosh_ = UnaryInPlace.acosh_
        asinh_ = UnaryInPlace.asinh_
        atanh_ = UnaryInPlace.atanh_
        deg2rad_ = UnaryInPlace.deg2rad_
        digamma_ = UnaryInPlace.digamma_
        erfinv_ = UnaryInPlace.erfinv_
        exp2_ = UnaryInPlace.exp2_
        rad2deg_ = UnaryInPlace.rad2deg_
        sinc_ = UnaryInPlace.sinc_
        logit_ = UnaryInPlace.logit_
        ceil_ = UnaryInPlace.ceil_
        floor_ = UnaryInPlace.floor_
        sign_ = UnaryInPlace.sign_
        trunc_ = UnaryInPlace.trunc_
        round_ = UnaryInPlace.round_
        logical_not_ = UnaryInPlace.logical_not_
        relu_ = UnaryInPlace.relu_
        sgn_ = UnaryInPlace.sgn_
        square_ = UnaryInPlace.square_
        nan_to_num_ = UnaryInPlace.nan_to_num_
        add = Arithmetic.add
        __add__ = Arithmetic.__add__
        __radd__ = Arithmetic.__radd__
        sub = Arithmetic.sub
        __sub__ = Arithmetic.__sub__
        __rsub__ = Arithmetic.__rsub__
        mul = Arithmetic.mul
        __mul__ = Arithmetic.__mul__
        __rmul__ = Arithmetic.__rmul__
        div = Arithmetic.div
        __truediv__ = Arithmetic.__truediv__
        __rtruediv__ = Arithmetic.__rtruediv__
        pow = Arithmetic.pow
        __pow__ = Arithmetic.__pow__
        __rpow__ = Arithmetic.__rpow__
        floor_divide = Arithmetic.floor_divide
        __floordiv__ = Arithmetic.__floordiv__
        __rfloordiv__ = Arithmetic.__rfloordiv__
        remainder = Arithmetic.remainder
        __mod__ = Arithmetic.__mod__
        __rmod__ = Arithmetic.__rmod__
        fmod = Arithmetic.fmod
        maximum = Arithmetic.maximum
        minimum = Arithmetic.minimum
        fmax = Arithmetic.fmax
        fmin = Arithmetic.fmin
        atan2 = Arithmetic.atan2
        copysign = Arithmetic.copysign
        hypot = Arithmetic.hypot
        logaddexp = Arithmetic.logaddexp
        xlogy = Arithmetic.xlogy
        add_ = ArithmeticInPlace.add_
        __iadd__ = ArithmeticInPlace.__iadd__
        sub_ = ArithmeticInPlace.sub_
        __isub__ = ArithmeticInPlace.__isub__
        mul_ = ArithmeticInPlace.mul_
        __imul__ = ArithmeticInPlace.__imul__
        div_ = ArithmeticInPlace.div_
        __itruediv__ = ArithmeticInPlace.__itruediv__
        pow_ = ArithmeticInPlace.pow_
        __ipow__ = ArithmeticInPlace.__ipow__
        floor_divide_ = ArithmeticInPlace.floor_divide_
        __ifloordiv__ = ArithmeticInPlace.__ifloordiv__
        remainder_ = ArithmeticInPlace.remainder_
        __imod__ = ArithmeticInPlace.__imod__
        fmod_ = ArithmeticInPlace.fmod_
        maximum_ = ArithmeticInPlace.maximum_
        minimum_ = ArithmeticInPlace.minimum_
        fmax_ = ArithmeticInPlace.fmax_
        fmin_ = ArithmeticInPlace.fmin_
        atan2_ = ArithmeticInPlace.atan2_
        copysign_ = ArithmeticInPlace.copysign_
        hypot_ = ArithmeticInPlace.hypot_
        logaddexp_ = ArithmeticInPlace.logaddexp_
        xlogy_ = ArithmeticInPlace.xlogy_
        bitwise_and = Logic.bitwise_and
        __and__ = Logic.__and__
        __rand__ = Logic.__rand__
        bitwise_or = Logic.bitwise_or
        __or__ = Logic.__or__
        __ror__ = Logic.__ror__
        bitwise_xor = Logic.bitwise_xor
        __xor__ = Logic.__xor__
        __rxor__ = Logic.__rxor__
        bitwise_left_shift = Logic.bitwise_left_shift
        __lshift__ = Logic.__lshift__
        __rlshift__ = Logic.__rlshift__
        bitwise_right_shift = Logic.bitwise_right_shift
        __rshift__ = Logic.__rshift__
        __rrshift__ = Logic.__rrshift__
        logical_and = Logic.logical_and
        logical_or = Logic.logical_or
        logical_xor = Logic.logical_xor
        bitwise_and_ = LogicInPlace.bitwise_and_
        __iand__ = LogicInPlace.__iand__
        bitwise_or_ = LogicInPlace.bitwise_or_
        __ior__ = LogicInPlace.__ior__
        bitwise_xor_ = LogicInPlace.bitwise_xor_
        __ixor__ = LogicInPlace.__ixor__
        bitwise_left_shift_ = LogicInPlace.bitwise_left_shift_
        __ilshift__ = LogicInPlace.__ilshift__
        bitwise_right_shift_ = LogicInPlace.bitwise_right_shift_
        __irshift__ = LogicInPlace.__irshift__
        logical_and_ = LogicInPlace.logical_and_
        logical_or_ = LogicInPlace.logical_or_
        logical_xor_ = LogicInPlace.logical_xor_
        eq = Comparisons.eq
        __eq__ = Comparisons.__eq__
        ne = Comparisons.ne
        __ne__ = Comparisons.__ne__
        lt = Comparisons.lt
        __lt__ = Comparisons.__lt__
        le = Comparisons.le
        __le__ = Comparisons.__le__
        gt = Comparisons.gt
        __gt__ = Comparisons.__gt__
        ge = Comparisons.ge
        __ge__ = Comparisons.__ge__
        float = Casts.float
        double = Casts.double
        half = Casts.half
        bfloat16 = Casts.bfloat16
        int = Casts.int
        long = Casts.long
        short = Casts.short
        char = Casts.char
        byte = Casts.byte
        bool = Casts.bool
        cfloat = Casts.cfloat
        cdouble = Casts.cdouble
        float16 = Casts.float16
        float32 = Casts.float32
        float64 = Casts.float64
        complex32 = Casts.complex32
        complex64 = Casts.complex64
        complex128 = Casts.complex128
        int8 = Casts.int8
        int16 = Casts.int16
        int32 = Casts.int32
        int64 = Casts.int64
        uint8 = Casts.uint8
        uint16 = Casts.uint16
        uint32 = Casts.uint32
        uint64 = Casts.uint64
        sum = Reductions.sum
        nansum = Reductions.nansum
        mean = Reductions.mean
        nanmean = Reductions.nanmean
        prod = Reductions.prod
        var = Reductions.var
        std = Reductions.std
        amin = Reductions.amin
        amax = Reductions.amax
        logsumexp = Reductions.logsumexp
        norm = Reductions.norm
        quantile = Statistics.quantile
        softmax = Statistics.softmax
        log_softmax = Statistics.log_softmax
        min = Statistics.min
        max = Statistics.max
        all = Statistics.all
        any = Statistics.any
        cumsum = Statistics.cumsum
        cumprod = Statistics.cumprod
        cummax = Statistics.cummax
        cummin = Statistics.cummin
        apply = Apply.apply
        named_apply = Apply.named_apply
        apply_ = Apply.apply_
        map = Parallel.map
        map_iter = Parallel.map_iter
        clamp = Blending.clamp
        clamp_ = Blending.clamp_
        clamp_min = Blending.clamp_min
        clamp_min_ = Blending.clamp_min_
        clamp_max = Blending.clamp_max
        clamp_max_ = Blending.clamp_max_
        mod = Blending.mod
        rsub = Blending.rsub
        lerp = Blending.lerp
        lerp_ = Blending.lerp_
        addcmul = Blending.addcmul
        addcmul_ = Blending.addcmul_
        addcdiv = Blending.addcdiv
        addcdiv_ = Blending.addcdiv_
        zero_ = Filling.zero_
        fill_ = Filling.fill_
        copy_ = Filling.copy_
        masked_fill = Filling.masked_fill
        masked_fill_ = Filling.masked_fill_
        new_zeros = Filling.new_zeros
        new_ones = Filling.new_ones
        new_empty = Filling.new_empty
        new_full = Filling.new_full
        new_tensor = Filling.new_tensor
        to = Placement.to
        cpu = Placement.cpu
        cuda = Placement.cuda
        as_tensor = Placement.as_tensor
        clear_refs_for_compile_ = Placement.clear_refs_for_compile_
        type = Placement.type
        dtype = Placement.dtype
        is_cpu = Placement.is_cpu
        is_cuda = Placement.is_cuda
        is_meta = Placement.is_meta
        contiguous = Placement.contiguous
        is_contiguous = Placement.is_contiguous
        pin_memory = Placement.pin_memory
        pin_memory_ = Placement.pin_memory_
        record_stream = Placement.record_stream
        is_pinned = Placement.is_pinned
        share_memory_ = Placement.share_memory_
        is_shared = Placement.is_shared
        clone = Placement.clone
        copy = Placement.copy
        __copy__ = Placement.__copy__
        to_dict = Placement.to_dict
        requires_grad = Autograd.requires_grad
        requires_grad_ = Autograd.requires_grad_
        backward = Autograd.backward
        detach = Autograd.detach
        detach_ = Autograd.detach_
        data = Autograd.data
        grad = Autograd.grad
        zero_grad = Autograd.zero_grad
        consolidate = Storage.consolidate
        is_consolidated = Storage.is_consolidated
        pack = Storage.pack
        memmap = MemoryMaps.memmap
        memmap_ = MemoryMaps.memmap_
        memmap_like = MemoryMaps.memmap_like
        load_memmap = MemoryMaps.__dict__["load_memmap"]
        load_memmap_ = MemoryMaps.load_memmap_
        is_memmap = MemoryMaps.is_memmap
        saved_path = MemoryMaps.saved_path
        make_memmap = MemoryMaps.make_memmap
        make_memmap_from_tensor = MemoryMaps.make_memmap_from_tensor
        make_memmap_from_storage = MemoryMaps.make_memmap_from_storage
        memmap_refresh_ = MemoryMaps.memmap_refresh_
        state_dict = Conversion.state_dict
        _kd_levels = Conversion._kd_levels
        load_state_dict = Conversion.load_state_dict
        _kd_check_state = Conversion._kd_check_state
        numpy = Conversion.numpy
        tolist = Conversion.tolist
        _kd_dense_entry = Ragged._kd_dense_entry
        to_padded_tensor = Ragged.to_padded_tensor
        pad = Ragged.pad
        from_any = Objects.__dict__["from_any"]
        from_tuple = Objects.__dict__["from_tuple"]
        from_namedtuple = Objects.__dict__["from_namedtuple"]
        from_dataclass = Objects.__dict__["from_dataclass"]
        from_dict_instance = Objects.from_dict_instance
        from_list = Objects.__dict__["from_list"]
        from_pytree = Objects.__dict__["from_pytree"]
        to_pytree = Objects.to_pytree
        from_struct_array = Objects.__dict__["from_struct_array"]
        to_struct_array = Objects.to_struct_array
        to_namedtuple = Objects.to_namedtuple
        fromkeys = Objects.__dict__["fromkeys"]
        from_schema = Objects.__dict__["from_schema"]
        schema = Objects.schema
        from_modules = Objects.__dict__["from_modules"]
        to_json = Formats.to_json
        from_json = Formats.__dict__["from_json"]
        to_csv = Formats.to_csv
        from_csv = Formats.__dict__["from_csv"]
        to_pandas = Formats.to_pandas
        from_pandas = Formats.__dict__["from_pandas"]
        to_arrow = Formats.to_arrow
        from_arrow = Formats.__dict__["from_arrow"]
        to_parquet = Formats.to_parquet
        from_parquet = Formats.__dict__["from_parquet"]
        to_mds = Formats.to_mds
        to_zarr = Formats.to_zarr
        from_zarr = Formats.__dict__["from_zarr"]
        save = Saving.save
        dumps = Saving.__dict__["dumps"]
        load = Saving.__dict__["load"]
        from_consolidated = Saving.__dict__["from_consolidated"]
        load_ = Saving.load_
        append_to = Saving.append_to
        to_buffers = Saving.to_buffers
        from_buffers = Saving.__dict__["from_buffers"]
        broadcast = Processes.broadcast
        all_reduce = Processes.all_reduce
        reduce = Processes.reduce
        all_gather = Processes.all_gather
        gather_and_stack = Processes.gather_and_stack
        send = Processes.send
        isend = Processes.isend
        asend = Processes.asend
        arecv = Processes.arecv
        recv = Processes.recv
        irecv = Processes.irecv
        init_remote = Processes.init_remote
        from_remote_init = Processes.__dict__["from_remote_init"]
        # The end of what is written.


TensorDictBase._kd_engine = TensorDictBase  # type: ignore[type-abstract]  # only methods are asked for
MutableMapping.register(TensorDictBase)  # type: ignore[type-abstract]  # it is abstract, and one


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
    if type(datatype) is Tensor:  # what most loops ask about
        return False
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
