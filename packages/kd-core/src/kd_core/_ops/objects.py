"""Containers from Python objects and back: tuples, dataclasses, trees, structured arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast

from torch import Tensor

from kd_core import _registry as registry
from kd_core._errors import InvalidValue, ShapeMismatch
from kd_core._leaves.arrays import columns_of_struct_array, is_frame, is_record, is_struct_array
from kd_core._nodes import is_node
from kd_core._ops.conversion import (
    build,
    inferred_batch,
    kind_of,
    stack_rows,
    stacked_modules,
)
from kd_core._ops.description import named
from kd_core._protocol import AbstractContainer, Composite, is_container
from kd_core._shapes import batch_of, refuse_open

if TYPE_CHECKING:
    from typing import Self

    import numpy
    from numpy.typing import NDArray
    from torch import nn

    from kd_core._convert.schema import LeafSchema
    from kd_core._types import BatchSize, DeviceLike, NestedKey


_STORED: Final = {
    None: None,
    "memmap": "memmap_",
    "shared": "share_memory_",
    "h5": "to_h5",
    "redis": "to_store",
    "dragonfly": "to_store",
}
"""By the name of a storage, the method that puts a container into it."""


class Objects(AbstractContainer):
    """Conversion of Python objects."""

    __slots__ = ()

    @classmethod
    def from_any(
        cls,
        obj: object,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: DeviceLike | None = None,
        batch_size: BatchSize | None = None,
    ) -> Self:
        """Build a container from nested objects of named or numbered parts.

        Mappings, dataclasses and named tuples become containers of their keys and fields, tuples
        become containers of positions (`"0"`, `"1"`, ...). Structured arrays become containers of
        their fields, data frames containers of their columns with a row for each of their rows.
        Other values become entries: lists of numbers of one type are tensors, other lists have one
        value for each item.

        Args:
            obj: the object.
            auto_batch_size: infer the batch size: all leading dimensions that the leaves share.
            batch_dims: the largest number of batch dimensions to infer.
            device: the device to which every entry is moved.
            batch_size: the leading dimensions of every entry.

        Returns:
            A container; one that is given without another batch size or device is returned as it
            is. Of an object without parts what it is as an entry: a tensor or a `NonTensorStack` of
            a list, any other object itself.

        Example:
            >>> from dataclasses import dataclass
            >>> import torch
            >>> from kd_core import TensorDict
            >>> @dataclass
            ... class Step:
            ...     obs: torch.Tensor
            ...     info: object
            >>> td = TensorDict.from_any(Step(torch.zeros(3), (1, torch.ones(3))))
            >>> list(td.keys(True, True))
            ['obs', ('info', '0'), ('info', '1')]
        """
        from kd_core._convert.plain import entry_of_list, tree_of

        if isinstance(obj, list):
            return cast("Self", entry_of_list(obj))
        if is_frame(obj):
            columns, rows = registry.tree_of_frame(obj, None, None)
            return build(cls, columns, batch_size, device, auto_batch_size, batch_dims, rows)
        if is_struct_array(obj) and not is_record(obj):
            return cls.from_struct_array(
                obj,
                auto_batch_size=auto_batch_size,
                batch_dims=batch_dims,
                device=device,
                batch_size=batch_size,
            )
        if isinstance(obj, AbstractContainer):
            if device is None and batch_size is None and batch_dims is None:
                return cast("Self", obj)
            tree: object = obj._kd_entries
            if batch_size is None:
                batch_size = obj._kd_desc.batch
                refuse_open(batch_size)
        else:
            tree = tree_of(obj)
            if isinstance(obj, tuple) and not hasattr(obj, "_fields"):
                cls = cls._kd_of_other_keys()
        if tree is None:
            return cast("Self", obj)
        return build(cls, tree, batch_size, device, auto_batch_size, batch_dims)

    @classmethod
    def from_tuple(
        cls,
        obj: tuple[object, ...],
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: DeviceLike | None = None,
        batch_size: BatchSize | None = None,
    ) -> Self:
        """Build a container from a tuple, whose positions are the keys; arguments as `from_any`.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> list(TensorDict.from_tuple((torch.zeros(3), {"a": torch.ones(3)})).keys(True, True))
            ['0', ('1', 'a')]
        """
        from kd_core._convert.plain import tree_of_tuple

        tree, cls = tree_of_tuple(obj), cls._kd_of_other_keys()
        return build(cls, tree, batch_size, device, auto_batch_size, batch_dims)

    @classmethod
    def from_namedtuple(
        cls,
        named_tuple: tuple[object, ...],
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: DeviceLike | None = None,
        batch_size: BatchSize | None = None,
    ) -> Self:
        """Build a container from a named tuple, whose fields are the keys; as `from_any`.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> best = torch.arange(6.0).reshape(2, 3).max(dim=1)
            >>> TensorDict.from_namedtuple(best, batch_size=[2])[0]["indices"]
            tensor(2)
        """
        from kd_core._convert.plain import tree_of_named_tuple

        tree = tree_of_named_tuple(named_tuple)
        return build(cls, tree, batch_size, device, auto_batch_size, batch_dims)

    @classmethod
    def from_dataclass(
        cls,
        dataclass: object,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: DeviceLike | None = None,
        batch_size: BatchSize | None = None,
        dest_cls: type | None = None,
        as_tensorclass: bool = False,
    ) -> Self:
        """Build a container from an instance of a dataclass, nested ones too; as `from_any`.

        Args:
            dataclass: the instance.
            auto_batch_size: infer the batch size: all leading dimensions that the leaves share.
            batch_dims: the largest number of batch dimensions to infer.
            device: the device to which every entry is moved.
            batch_size: the leading dimensions of every entry.
            dest_cls: a tensor class: that of the result.
            as_tensorclass: return an instance of a tensor class with the fields of the dataclass.

        Example:
            >>> from dataclasses import dataclass
            >>> import torch
            >>> from kd_core import TensorDict
            >>> @dataclass
            ... class Point:
            ...     x: torch.Tensor
            >>> TensorDict.from_dataclass(Point(torch.ones(2)), batch_size=[2])["x"]
            tensor([1., 1.])
        """
        from kd_core._convert.plain import tree_of_dataclass

        if as_tensorclass or dest_cls is not None:
            made = registry.from_dataclass(
                dataclass,
                dest_cls=dest_cls,
                auto_batch_size=auto_batch_size,
                batch_dims=batch_dims,
                batch_size=batch_size,
                device=device,
            )
            return cast("Self", made)
        tree = tree_of_dataclass(dataclass)
        return build(cls, tree, batch_size, device, auto_batch_size, batch_dims)

    def from_dict_instance(
        self,
        input_dict: Mapping[str, object],
        *,
        auto_batch_size: bool = False,
        batch_size: BatchSize | None = None,
        device: DeviceLike | None = None,
        batch_dims: int | None = None,
        names: Sequence[str | None] | None = None,
    ) -> Self:
        """Build a container of the kind of this one, and of nested kinds; stacks become dense.

        Args:
            input_dict: nested dicts of values; this container is not changed.
            auto_batch_size: infer the batch size: all leading dimensions that the leaves share.
            batch_size: the leading dimensions of every entry.
            device: the device to which every entry is moved.
            batch_dims: the largest number of batch dimensions to infer.
            names: the name of each batch dimension; `None`: no names.

        Example:
            >>> import torch
            >>> from kd_core import TensorClass, TensorDict
            >>> class Point(TensorClass):
            ...     x: torch.Tensor
            >>> td = TensorDict({"p": Point(torch.zeros(()))})
            >>> type(td.from_dict_instance({"p": {"x": torch.ones(())}})["p"]).__name__
            'Point'
        """
        kind = kind_of(self)
        if batch_size is None and (auto_batch_size or batch_dims is not None):
            batch_size = inferred_batch(kind, input_dict, batch_dims)
        tree: dict[str, object] = {}
        for key, value in input_dict.items():
            current = self._kd_entries.get(key)
            nested = is_container(current, self) and isinstance(value, Mapping)
            if nested:  # with the batch size, which says what is a list of rows
                value = current.from_dict_instance(value, batch_size=batch_size)  # type: ignore[union-attr]  # asked above
            tree[key] = value
        return build(kind, tree, batch_size, device, names=names)

    @classmethod
    def from_list(
        cls,
        input: Sequence[object],
        *,
        auto_batch_size: bool = False,
        batch_size: BatchSize | None = None,
        device: DeviceLike | None = None,
        batch_dims: int | None = None,
        names: Sequence[str | None] | None = None,
        lazy: bool | None = None,
    ) -> Self:
        """Build a container from a list of rows, each a mapping or another object with parts.

        Args:
            input: the rows; each is converted as by `from_any`.
            auto_batch_size: infer the batch size of the rows.
            batch_size: the batch size of the result; its first dimension is the number of rows.
            device: the device to which every entry is moved.
            batch_dims: the largest number of batch dimensions of a row to infer.
            names: the name of each batch dimension, that of the rows first; `None`: no names.
            lazy: `True`: keep the rows as members of a lazy stack. `False`: stack the tensors.
                `None`: stack them if all rows have the same keys and shapes. The class of lazy
                stacks keeps them in any case.

        Raises:
            InvalidValue: if the list is empty.
            ShapeMismatch: if the batch size does not start with the number of rows.

        Example:
            >>> from kd_core import TensorDict
            >>> td = TensorDict.from_list([{"a": 1, "b": 2.0}, {"a": 3, "b": 4.0}])
            >>> td["a"], td.batch_size
            (tensor([1, 3]), torch.Size([2]))
        """
        rows = list(input)
        if not rows:
            raise InvalidValue("`input` must have at least one row, got an empty list.")
        inner: BatchSize | None = None
        if batch_size is not None:
            batch = batch_of(batch_size)
            if batch[:1] != (len(rows),):
                raise ShapeMismatch(
                    f"`batch_size` must start with the number of rows, {len(rows)}, got {batch}."
                )
            inner = batch[1:]
        made = [
            cls.from_any(
                tuple(row) if isinstance(row, list) else row,
                auto_batch_size=auto_batch_size,
                batch_dims=batch_dims,
                device=device,
                batch_size=inner,
            )
            for row in rows
        ]
        stacked = stack_rows(made, _is_lazy(cls) or lazy)
        return stacked if names is None else named(stacked, names)

    @classmethod
    def from_pytree(
        cls,
        pytree: object,
        *,
        batch_size: BatchSize | None = None,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
    ) -> Self:
        """Build a container from a tree of torch: nested lists, dicts and registered classes.

        The container remembers the structure, so that `to_pytree` returns a tree of the same kind.
        A tensor or a number alone is returned as a tensor, and a container as it is.

        Args:
            pytree: the tree; numbers become tensors, and containers stay what they are.
            batch_size: the leading dimensions of every entry.
            auto_batch_size: infer the batch size: all leading dimensions that the leaves share.
            batch_dims: the largest number of batch dimensions to infer.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict.from_pytree([torch.zeros(2), {"a": (torch.ones(2),)}])
            >>> td["1", "a", "0"]
            tensor([1., 1.])
            >>> (td + 1).to_pytree()
            [tensor([1., 1.]), {'a': (tensor([2., 2.]),)}]
        """
        from kd_core._convert.plain import STRUCTURE, tree_of_pytree

        if is_node(pytree):
            return cast("Self", pytree)
        tree, cls = tree_of_pytree(pytree), cls._kd_of_other_keys()
        if isinstance(tree, Tensor):
            return cast("Self", tree)
        if batch_size is None and (auto_batch_size or batch_dims is not None):
            leaves = {path: leaf for path, leaf in tree.items() if path != (STRUCTURE,)}
            batch_size = inferred_batch(cls, leaves, batch_dims)
        return build(cls, tree, batch_size, None)

    def to_pytree(self) -> object:
        """Return the tree that `from_pytree` was given, with the current leaves, else self.

        Example:
            >>> from kd_core import TensorDict
            >>> (TensorDict.from_pytree([1, {"a": 2}]) * 2).to_pytree()
            [tensor(2), {'a': tensor(4)}]
        """
        from kd_core._convert.plain import pytree_of

        tree = pytree_of(self)
        return self if tree is None else tree

    @classmethod
    def from_struct_array(
        cls,
        struct_array: object,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: DeviceLike | None = None,
        batch_size: BatchSize | None = None,
    ) -> Self:
        """Build a container from a structured numpy array.

        Its tensors share the memory of fields whose position torch can express, as those of fields
        of one size do; other fields are copied.

        Args:
            struct_array: the array; nested fields become nested containers.
            auto_batch_size: infer the batch size: all leading dimensions that the leaves share.
            batch_dims: the largest number of batch dimensions to infer.
            device: the device to which every entry is moved.
            batch_size: the leading dimensions of every entry; `None`: the shape of the array.

        Example:
            >>> import numpy
            >>> from kd_core import TensorDict
            >>> array = numpy.array([(1, 2.5), (3, 4.5)], dtype=[("n", "i8"), ("x", "f4")])
            >>> td = TensorDict.from_struct_array(array)
            >>> td["x"], bool((td.to_struct_array() == array).all())
            (tensor([2.5000, 4.5000]), True)
        """
        tree = columns_of_struct_array(struct_array)
        if batch_size is None and not auto_batch_size:
            batch_size = cast("Tensor", struct_array).shape
        return build(cls, tree, batch_size, device, auto_batch_size, batch_dims)

    def to_struct_array(self) -> NDArray[numpy.void]:
        """Return a structured numpy array of the batch size, with a field for each key; a copy.

        Nested containers are nested fields, non-tensor data is a field of objects.

        Raises:
            InvalidValue: if numpy does not have the dtype of a leaf.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict(
            ...     {"a": torch.zeros(3), "b": torch.ones(3, 2)}, [3]
            ... ).to_struct_array().shape
            (3,)
        """
        from kd_core._convert.plain import struct_array_of

        return struct_array_of(self)

    def to_namedtuple(self, dest_cls: Callable[..., object] | None = None) -> object:
        """Return a named tuple of the entries, nested containers as nested ones; data is unwrapped.

        Args:
            dest_cls: the class of the result, called with the entries as keywords.

        Raises:
            InvalidValue: if a key is not a valid name of a field.

        Example:
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": 1, "b": {"c": "word"}}).to_namedtuple()
            GenericDict(a=tensor(1), b=GenericDict(c='word'))
        """
        from kd_core._convert.plain import named_tuple_of

        made = named_tuple_of(self)
        if dest_cls is None:
            return made
        return dest_cls(**dict(zip(made._fields, made, strict=True)))

    @classmethod
    def fromkeys(cls, keys: Iterable[NestedKey], value: object = 0) -> Self:
        """Build a container in which every key has the same value.

        Example:
            >>> from kd_core import TensorDict
            >>> TensorDict.fromkeys(["a", ("b", "c")], 1.0)["b", "c"]
            tensor(1.)
        """
        return build(cls._kd_of_other_keys(), dict.fromkeys(keys, value), None, None)

    @classmethod
    def from_schema(
        cls,
        schema: Mapping[NestedKey, object],
        batch_size: BatchSize | None = None,
        *,
        storage: str | None = None,
        device: DeviceLike | None = None,
        **options: object,
    ) -> Self:
        """Build a container of zeros that has a schema; data is `None`.

        Args:
            schema: what `schema` returns, or for each key a pair of shape and dtype, in any order.
            batch_size: the batch size, which precedes the shapes of the schema.
            storage: where the entries are: `None`: in memory; `"memmap"`: in a memory map;
                `"shared"`: in shared memory; `"h5"`: in a file of HDF5; `"redis"` and
                `"dragonfly"`: on a server.
            device: the device of the container.
            **options: what `memmap_`, `to_h5` or `to_store` takes: `prefix`, `filename` and others.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict.from_schema({"a": ((2,), torch.float32)}, [3])
            >>> td["a"].shape, TensorDict.from_schema(td.schema(), [5]).shape
            (torch.Size([3, 2]), torch.Size([5]))
        """
        from kd_core._convert.schema import entries_of_schema

        if storage not in _STORED:
            raise InvalidValue(
                f"`storage` must be one of {', '.join(map(repr, _STORED))}, got {storage!r}."
            )
        batch = () if batch_size is None else batch_of(batch_size)
        made = build(cls, entries_of_schema(schema, batch, device), batch, device)
        how = _STORED[storage]
        if how is None:
            return made
        if storage == "dragonfly":
            options.setdefault("backend", storage)
        return cast("Self", getattr(made._kd_engine, how)(made, **options))

    def schema(self) -> dict[NestedKey, LeafSchema]:
        """Return for each leaf its kind, the shape after the batch size, and its dtype.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> schema = TensorDict({"a": torch.zeros(3, 4), "b": {"s": "x"}}, [3]).schema()
            >>> schema["a"]
            LeafSchema(kind='tensor', shape=torch.Size([4]), dtype=torch.float32)
            >>> schema["b", "s"].kind
            'data'
        """
        from kd_core._convert.schema import schema_of

        return schema_of(self)

    @classmethod
    def from_modules(
        cls,
        *modules: nn.Module,
        as_module: bool = False,
        lock: bool = True,
        use_state_dict: bool = False,
        lazy_stack: bool = False,
        expand_identical: bool = False,
    ) -> Self:
        """Stack the parameters and buffers of modules of the same structure.

        Those of lazy modules get their shapes when `vmap` first calls a module with them, with
        `randomness="same"`, which draws the values of all rows at once.

        Args:
            *modules: the modules; they are not changed.
            as_module: return a `kd_nn.TensorDictParams`, which is an `nn.Module`; needs kd-nn.
            lock: lock the container, whose keys are those of the modules.
            use_state_dict: take the entries of `state_dict()`, with the hooks of the modules.
            lazy_stack: keep the tensors of the modules as members, instead of stacking copies that
                are leaves of autograd.
            expand_identical: expand a tensor that all modules share, instead of copying it.

        Raises:
            KeySetMismatch: if the modules have different structures.
            InvalidArgument: if only some lazy modules have been called.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> nets = [torch.nn.Linear(2, 1) for _ in range(3)]
            >>> TensorDict.from_modules(*nets)["weight"].shape
            torch.Size([3, 1, 2])
        """
        made = stacked_modules(cls, modules, use_state_dict, lazy_stack, expand_identical)
        if as_module:
            from kd_core._ops.modules import as_module as module_of

            source = None if use_state_dict else modules[0]
            made = cast("Self", module_of(made, source))
        return made._kd_engine.lock_(made) if lock else made


def _is_lazy(cls: type[AbstractContainer]) -> bool | None:
    """Return what `lazy=None` means for the class of a stack of rows."""
    return True if issubclass(cls, Composite) else None
