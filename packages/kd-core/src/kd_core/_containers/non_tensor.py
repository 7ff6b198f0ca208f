"""Non-tensor entries of a container: the base of all, and one value for the whole batch.

A value becomes one value per row (`NonTensorStack`) where an operation adds batch dimensions or
stacks rows, so rows of equal values never collapse. Otherwise a value that is stored in a batch
belongs to all of its rows, and stays one value; `MetaData` does in any case.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core._batch.descriptor import Descriptor, describe_on, restored
from kd_core._batch.names import checked_names, names_of, with_names
from kd_core._batch.plans import Fresh, Grown, Reduced
from kd_core._batch.shapes import batch_of
from kd_core._errors import (
    InvalidArgument,
    KeyNotFound,
    KeySetMismatch,
    one_value_for_all,
    restores,
    shape_text,
    wrong_type,
)
from kd_core._keys import format_key
from kd_core._leaves.foreach import StandIn
from kd_core._leaves.loops import Selection, same_data, unwrapped
from kd_core._leaves.writes import Targets
from kd_core._naming import explain_attribute, leaves_out
from kd_core._nodes import registry
from kd_core._nodes.entry import Encodes, Values, is_node
from kd_core._ops.entries.listing import LinkedList

if TYPE_CHECKING:
    from typing import Self, TypeGuard

    from kd_core._nodes.entry import Entry, Memo, Node, PartsMemo
    from kd_core._protocol.primitives import AbstractContainer
    from kd_core._types import Batch, BatchFn, BatchSize, DeviceLike, LeafFn, PartsFn


_HELD: Final = "data"


def _holding(node: NonTensorDataBase) -> AbstractContainer:
    """Return a container that holds an entry alone."""
    return cast("AbstractContainer", registry.make_dense({_HELD: node}, node._kd_desc, True))


def _all_held(value: object) -> object:
    if isinstance(value, NonTensorDataBase):
        return _holding(value)
    if _holds_entries(value):
        return [_all_held(each) for each in cast("Sequence[object]", value)]
    return value


def _holds_entries(value: object) -> bool:
    if value.__class__ is list or value.__class__ is tuple:
        return any(map(_holds_entries, cast("Sequence[object]", value)))
    return isinstance(value, NonTensorDataBase)


def _all_taken(made: object) -> object:
    if isinstance(made, (list, tuple)):
        return tuple(map(_all_taken, made))
    entries: Mapping[str, object] | None = getattr(made, "_kd_entries", None)
    return made if entries is None or _HELD not in entries else entries[_HELD]


def _empty(node: NonTensorDataBase) -> AbstractContainer:
    """Return a container without entries of the batch size of an entry."""
    return cast("AbstractContainer", registry.make_dense({}, node._kd_desc, True))


_ASKS_FOR_KEYS: Final = frozenset(
    {
        "bytes",
        "cat_tensors",
        "clear",
        "create_nested",
        "del_",
        "depth",
        "empty",
        "entry_class",
        "exclude",
        "fill_",
        "filter_empty_",
        "filter_non_tensor_data",
        "flatten_keys",
        "get_at",
        "get_item_shape",
        "get_non_tensor",
        "is_empty",
        "is_non_tensor",
        "items",
        "keys",
        "load_state_dict",
        "non_tensor_items",
        "non_tensor_values",
        "numpy",
        "pack",
        "param_count",
        "pop",
        "popitem",
        "rename_key_",
        "replace",
        "select",
        "separates",
        "set",
        "set_",
        "set_at_",
        "set_non_tensor",
        "setdefault",
        "sorted_keys",
        "split_keys",
        "stack_tensors",
        "state_dict",
        "to_module",
        "to_namedtuple",
        "to_struct_array",
        "unflatten_keys",
        "update_at_",
        "valid_keys",
        "values",
        "zero_grad",
    }
)
"""Methods that ask for keys: an entry has none."""


def _borrowed(node: NonTensorDataBase, name: str) -> object:
    """Return a method or property of containers for an entry, which is one without keys."""
    if name.startswith("_"):  # loops over levels ask for these, in compiled code too
        raise AttributeError(f"`{type(node).__name__}` has no attribute `{name}`.")
    asks_for_keys = name in _ASKS_FOR_KEYS
    holder = _empty(node) if asks_for_keys else _holding(node)
    if not hasattr(type(holder), name):
        kind = type(node)
        raise explain_attribute(kind, name) or AttributeError(
            f"`{kind.__name__}` has no attribute `{name}`."
        )
    borrowed = getattr(holder, name)
    if not callable(borrowed):
        return borrowed

    def call(*args: object, **options: object) -> object:
        args = tuple(map(_all_held, args))
        made = borrowed(*args, **{key: _all_held(value) for key, value in options.items()})
        if made is holder:
            return node
        if asks_for_keys:
            is_like = isinstance(made, type(holder)) and not made._kd_entries
            return node.clone() if is_like and made._kd_desc.batch == node._kd_desc.batch else made
        taken = _all_taken(made)
        return node._kd_with_descriptor(node._kd_desc) if taken is node else taken

    return call


class Cell:
    """Where the value of one row of several is: an entry of that row reads and writes it there."""

    __slots__ = ()

    if TYPE_CHECKING:

        @abstractmethod
        def __getitem__(self, index: int) -> object:
            """Return the value: a cell is read as the tuple of a value is."""

        @abstractmethod
        def write(self, value: object) -> None:
            """Replace the value, for every view of the row."""

        @abstractmethod
        def spread(self, desc: Descriptor) -> Node:
            """Return the entry of a batch whose rows all are this one."""


class NonTensorDataBase(Values):
    """The base class of non-tensor entries: `NonTensorData`, `MetaData` and `NonTensorStack`.

    `td["key"]` returns the value, `td.get("key")` the wrapper.

    Example:
        >>> from kd_core import NonTensorDataBase, TensorDict
        >>> isinstance(TensorDict({"task": "reach"}).get("task"), NonTensorDataBase)
        True
    """

    __slots__ = ("_kd_desc",)

    _kd_desc: Descriptor
    _of_batch: bool = False
    """Whether it is one value that belongs to all rows of a batch."""

    @property
    def batch_size(self) -> torch.Size:
        """The batch size of the container that it belongs to."""
        return self._kd_desc.size

    @property
    def shape(self) -> torch.Size:
        """The batch size."""
        return self._kd_desc.size

    @property
    def device(self) -> torch.device | None:
        """The device of the container that it belongs to."""
        return self._kd_desc.device

    @property
    def ndim(self) -> int:
        """The number of batch dimensions."""
        return self._kd_desc.ndim

    @property
    def names(self) -> list[str | None]:
        """The names of the batch dimensions, `None` for those without a name."""
        return list(names_of(self._kd_desc.batch))

    def dim(self) -> int:
        """Return the number of batch dimensions."""
        return self._kd_desc.ndim

    batch_dims = ndim
    ndimension = dim

    if not TYPE_CHECKING:  # to type checkers an entry has the methods that stand here

        def __getattr__(self, name: str) -> object:
            """Return a method or property of containers: an entry is one without keys."""
            return _borrowed(self, name)

    def get(self, key: object, default: object = None) -> object:
        """Return the value for the key "data", and a default for others: there are none."""
        return self._kd_item() if key == _HELD and isinstance(self, NonTensorData) else default

    def to_dict(self, **options: object) -> object:
        """Return the value, or those of all rows as nested lists: what `to_dict` shows of it."""
        return plain_value(self._kd_item(), False)

    def update(self, input_dict_or_td: NonTensorDataBase | None = None, **options: object) -> Self:
        """Write the value of another entry, or those of its rows."""
        if isinstance(input_dict_or_td, NonTensorDataBase):
            self._write_all(input_dict_or_td)
        elif input_dict_or_td is not None:
            raise wrong_type("the source", "a non-tensor entry", input_dict_or_td)
        return self

    update_ = copy_ = update

    @abstractmethod
    def _write_all(self, source: NonTensorDataBase) -> None:
        """Write the values of another entry."""

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return the batch size, or one of its sizes."""
        return self._kd_desc.size if dim is None else self._kd_desc.size[dim]

    def numel(self) -> int:
        """Return the number of rows."""
        return max(1, self._kd_desc.size.numel())

    @abstractmethod
    def tolist(self, *, convert_tensors: bool = False, as_linked_list: bool = False) -> object:
        """Return the value of each row, as nested lists of shape `batch_size`.

        Args:
            convert_tensors: also return the elements of tensors and arrays as lists.
            as_linked_list: return a `LinkedList`, whose items are written through to the rows.
        """

    def __len__(self) -> int:
        return self._kd_desc.batch[0] if self._kd_desc.ndim else 0

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[NonTensorDataBase]:
        """Return an iterator over the entries of the rows: wrappers."""
        if not self._kd_desc.ndim:
            raise InvalidArgument(
                "a non-tensor entry must have a batch dimension to be iterated over, got "
                "batch_size (). Read its value with `data`."
            )
        return (self[row] for row in range(self._kd_desc.batch[0]))

    def __getitem__(self, index: object) -> NonTensorDataBase:
        """Return the entry of one row or of several rows, as of a tensor of shape `batch_size`."""
        return self._called("__getitem__", index)

    # Arithmetic leaves data that is not a tensor as it is, in a container and alone.
    def __add__(self, other: object) -> NonTensorDataBase:
        return self._called("__add__", _all_held(other))

    def __radd__(self, other: object) -> NonTensorDataBase:
        return self._called("__radd__", _all_held(other))

    def __sub__(self, other: object) -> NonTensorDataBase:
        return self._called("__sub__", _all_held(other))

    def __rsub__(self, other: object) -> NonTensorDataBase:
        return self._called("__rsub__", _all_held(other))

    def __mul__(self, other: object) -> NonTensorDataBase:
        return self._called("__mul__", _all_held(other))

    def __rmul__(self, other: object) -> NonTensorDataBase:
        return self._called("__rmul__", _all_held(other))

    def __truediv__(self, other: object) -> NonTensorDataBase:
        return self._called("__truediv__", _all_held(other))

    def __rtruediv__(self, other: object) -> NonTensorDataBase:
        return self._called("__rtruediv__", _all_held(other))

    def __mod__(self, other: object) -> NonTensorDataBase:
        return self._called("__mod__", _all_held(other))

    def __pow__(self, other: object) -> NonTensorDataBase:
        return self._called("__pow__", _all_held(other))

    def __ge__(self, other: object) -> NonTensorDataBase:
        return self._called("__ge__", _all_held(other))

    def __gt__(self, other: object) -> NonTensorDataBase:
        return self._called("__gt__", _all_held(other))

    def __le__(self, other: object) -> NonTensorDataBase:
        return self._called("__le__", _all_held(other))

    def __lt__(self, other: object) -> NonTensorDataBase:
        return self._called("__lt__", _all_held(other))

    def __neg__(self) -> NonTensorDataBase:
        return self._called("__neg__")

    def __abs__(self) -> NonTensorDataBase:
        return self._called("__abs__")

    def __invert__(self) -> NonTensorDataBase:
        return self._called("__invert__")

    def _called(self, method: str, *args: object, **options: object) -> NonTensorDataBase:
        """Return the entry of what a method makes of a container that holds it."""
        made = getattr(_holding(self), method)(*args, **options)
        return cast("NonTensorDataBase", made._kd_entries[_HELD])

    def _parts(
        self, method: str, *args: object, **options: object
    ) -> tuple[NonTensorDataBase, ...]:
        made = getattr(_holding(self), method)(*args, **options)
        return tuple(each._kd_entries[_HELD] for each in made)

    def view(self, *shape: object) -> NonTensorDataBase:
        """Return the entry with another batch size of as many rows."""
        return self._called("view", *shape)

    def reshape(self, *shape: object) -> NonTensorDataBase:
        """Return the entry with another batch size of as many rows."""
        return self._called("reshape", *shape)

    def expand(self, *shape: object) -> NonTensorDataBase:
        """Return the entry with new dimensions, or with dimensions of size 1 repeated."""
        return self._called("expand", *shape)

    def squeeze(self, *dim: object) -> NonTensorDataBase:
        """Return the entry without dimensions of size 1."""
        return self._called("squeeze", *dim)

    def unsqueeze(self, dim: int) -> NonTensorDataBase:
        """Return the entry with a dimension of size 1 inserted."""
        return self._called("unsqueeze", dim)

    def permute(self, *dims: object) -> NonTensorDataBase:
        """Return the entry with its dimensions reordered."""
        return self._called("permute", *dims)

    def transpose(self, dim0: int, dim1: int) -> NonTensorDataBase:
        """Return the entry with two dimensions exchanged."""
        return self._called("transpose", dim0, dim1)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> NonTensorDataBase:
        """Return the entry with several dimensions in one."""
        return self._called("flatten", start_dim, end_dim)

    def unflatten(self, dim: int, sizes: Sequence[int]) -> NonTensorDataBase:
        """Return the entry with one dimension as several."""
        return self._called("unflatten", dim, sizes)

    def repeat(self, *repeats: object) -> NonTensorDataBase:
        """Return the entry with its rows repeated."""
        return self._called("repeat", *repeats)

    def repeat_interleave(self, repeats: object, dim: int | None = None) -> NonTensorDataBase:
        """Return the entry with each row repeated."""
        return self._called("repeat_interleave", repeats, **({} if dim is None else {"dim": dim}))

    def gather(self, dim: int, index: Tensor) -> NonTensorDataBase:
        """Return the entry of the rows that an index names along a dimension."""
        return self._called("gather", dim, index)

    def masked_select(self, mask: Tensor) -> NonTensorDataBase:
        """Return the entry of the rows where a mask is true."""
        return self._called("masked_select", mask)

    def unbind(self, dim: int = 0) -> tuple[NonTensorDataBase, ...]:
        """Return the entries of the rows along a dimension."""
        return self._parts("unbind", dim)

    def split(self, split_size: object, dim: int = 0) -> tuple[NonTensorDataBase, ...]:
        """Return the entries of parts of several rows."""
        return self._parts("split", split_size, dim)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[NonTensorDataBase, ...]:
        """Return the entries of a number of parts."""
        return self._parts("chunk", chunks, dim)

    def clone(self, recurse: bool = True) -> NonTensorDataBase:
        """Return a copy; the values themselves are not copied."""
        made = self._called("clone", recurse)
        return self._kd_with_descriptor(self._kd_desc) if made is self else made

    def contiguous(self) -> NonTensorDataBase:
        """Return the entry with its rows in order in memory."""
        return self._called("contiguous")

    def to(self, *args: object, **options: object) -> NonTensorDataBase:
        """Return the entry on another device; its values stay as they are."""
        return self._called("to", *args, **options)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call a function of torch on containers that hold the entries."""
        if not any(map(_holds_entries, (*args, *(kwargs or {}).values()))):
            return NotImplemented  # the class itself was passed
        given = {key: _all_held(value) for key, value in (kwargs or {}).items()}
        return _all_taken(func(*map(_all_held, args), **given))

    @abstractmethod
    def maybe_to_stack(self) -> NonTensorDataBase:
        """Return the same values, one for each row; without batch dimensions, the entry itself.

        Example:
            >>> from kd_core import NonTensorData
            >>> NonTensorData("reach", [2]).maybe_to_stack()
            NonTensorStack(['reach', 'reach'], batch_size=torch.Size([2]), device=None)
        """

    def _kd_item(self) -> object:
        return self.tolist()

    def _equal_rows(self, other: Entry, equal: bool) -> Tensor:
        desc = self._kd_desc
        alone = isinstance(self, NonTensorData) and isinstance(other, NonTensorData)
        theirs = cast("NonTensorDataBase", other)
        if not alone and theirs._kd_desc.batch != desc.batch:
            theirs = theirs.expand(*desc.batch)
        pairs = (self, theirs)
        found = [
            [each._kd_item()] if alone or not desc.ndim else each.reshape(-1).tolist()
            for each in pairs
        ]
        rows = zip(*cast("list[list[object]]", found), strict=True)
        same = [same_data(*pair) is equal for pair in rows]
        answers = torch.tensor(same, dtype=torch.bool, device=desc.device)
        return answers.expand(desc.batch) if alone and desc.ndim else answers.reshape(desc.batch)

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]  # as a container does
        """Return for each row whether its value is equal to that of another entry."""
        return (
            self._equal_rows(other, True)
            if isinstance(other, NonTensorDataBase)
            else NotImplemented
        )

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]  # as above
        """Return for each row whether its value differs from that of another entry."""
        return (
            self._equal_rows(other, False)
            if isinstance(other, NonTensorDataBase)
            else NotImplemented
        )

    __hash__ = None  # type: ignore[assignment]  # the values may not be hashable

    def _write_at(self, index: tuple[object, ...], value: object) -> None:
        """Write a value to rows."""
        raise one_value_for_all("of the list", unwrapped(self), value, self._kd_desc.ndim)

    def _constant(self) -> object:
        """Return what a pytree stores in its structure to rebuild the entry."""
        return Constant(self)

    @abstractmethod
    def _is_equal(self, other: NonTensorDataBase) -> bool:
        """Return whether another entry has the same batch size and values."""

    def _restored(self, desc: Descriptor, ndim: int) -> NonTensorDataBase:
        """Rebuild the entry from what `_constant` returned, with the batch of a rebuilt parent.

        Args:
            desc: the descriptor of the parent.
            ndim: how many batch dimensions the parent had when it was taken apart.
        """
        return self._kd_with_descriptor(desc)

    @abstractmethod
    def _kd_with_descriptor(self, desc: Descriptor) -> Self:
        """Return the entry under another descriptor."""

    def _kd_collect(self, leaves: list[Tensor]) -> None:
        pass

    def _kd_collect_pair(
        self, other: Entry, mine: list[Tensor], theirs: list[Tensor], path: tuple[str, ...]
    ) -> None:
        if not isinstance(other, NonTensorDataBase):
            raise KeySetMismatch(
                f"entry {format_key(path)} must be a non-tensor entry in both containers, got a "
                f"`{type(other).__name__}` in the second."
            )

    def _join(
        self,
        nodes: Sequence[Entry],
        call: Callable[..., Tensor],
        dim: int,
        desc: Descriptor,
        path: tuple[str, ...],
    ) -> Node:
        return registry.join_data(nodes, call, dim, desc)

    def _agrees(self, value: object) -> bool:
        return same_data(unwrapped(self), unwrapped(value))

    def _kd_below(self) -> tuple[()]:
        return ()

    def _kd_hold(self, count: int) -> None:
        pass  # it does not have a structure to lock


class Constant:
    """An entry in the structure of a pytree, which is equal or not as a whole."""

    __slots__ = ("node",)

    def __init__(self, node: NonTensorDataBase) -> None:
        self.node = node

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self.node._is_equal(other.node)

    __hash__ = None  # type: ignore[assignment]  # the values may not be hashable

    def __repr__(self) -> str:
        return repr(self.node)


@dataclass
class _Held:
    """What the fields of an entry are."""

    data: object


@leaves_out("extend")
class NonTensorData(NonTensorDataBase, Encodes):
    """A non-tensor entry: one value for the whole batch.

    `td["key"]` returns the value, `td.get("key")` this wrapper. Operations of the container pass it
    through: indexing and reshaping change only its batch size, arithmetic does not change it.
    Without batch dimensions it is the value of one row: stacking such rows makes a
    `NonTensorStack`, one value per row.

    Args:
        data: the value; kept by reference.
        batch_size: the batch size of the container that it belongs to.
        device: the device of the container.
        names: the names of the batch dimensions.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"x": torch.zeros(3), "task": "reach"}, [3])
        >>> td["task"], td[0]["task"], td.get("task")
        ('reach', 'reach', NonTensorData(data='reach', batch_size=torch.Size([3])))
    """

    __slots__ = ("_boxed", "_of_batch")

    _boxed: tuple[object] | Cell
    """The value in a tuple: compiled code that passes it on adds no guard on the value. The cell of
    the row, if it was read from values of rows."""

    _of_batch: bool

    def __init__(
        self,
        data: object,
        batch_size: BatchSize = (),
        device: DeviceLike | None = None,
        names: Sequence[str | None] | None = None,
    ) -> None:
        self._boxed = (data.data if isinstance(data, NonTensorData) else data,)
        batch = batch_of(batch_size)
        if names is not None:
            batch = with_names(batch, checked_names(names, batch))
        self._kd_desc = describe_on(batch, device)
        self._of_batch = self._always_of_batch() or self._kd_desc.ndim > 0

    @classmethod
    def _always_of_batch(cls) -> bool:
        return False

    @classmethod
    def fields(cls) -> tuple[Field[object], ...]:
        """Return the fields, as those of a dataclass: the value alone."""
        return fields(_Held)

    @classmethod
    def from_tensordict(
        cls,
        tensordict: AbstractContainer,
        non_tensordict: Mapping[str, object] | None = None,
        safe: bool | None = None,
    ) -> Self:
        """Return the value under the key `"data"`, with the batch size of the container.

        Args:
            tensordict: a container, which may hold the value.
            non_tensordict: what holds it else.
            safe: nothing: the key is asked for.

        Raises:
            KeyNotFound: if neither holds it.
        """
        held = tensordict._kd_entries.get(_HELD)
        if held is None and _HELD not in (non_tensordict or {}):
            raise KeyNotFound(f"key `{_HELD}` not found in the container or beside it.")
        value = (non_tensordict or {})[_HELD] if held is None else unwrapped(held)
        return cls(value, tensordict._kd_desc.batch, tensordict._kd_desc.device)

    def __replace__(self, **changes: object) -> Self:
        """Return an entry with another value, batch size or device: `copy.replace`."""
        desc = self._kd_desc
        held = {"data": self.data, "batch_size": desc.batch, "device": desc.device}
        return type(self)(**{**held, **changes})  # type: ignore[arg-type]  # the constructor checks them

    @property
    def data(self) -> object:
        """The value."""
        return self._boxed[0]

    @data.setter
    def data(self, data: object) -> None:
        if isinstance(self._boxed, Cell):
            self._boxed.write(data)
        else:
            self._boxed = (data,)

    def _write_all(self, source: NonTensorDataBase) -> None:
        self.data = source._kd_item()

    def tolist(self, *, convert_tensors: bool = False, as_linked_list: bool = False) -> object:
        """Return the value once for each row, as nested lists of shape `batch_size`."""
        value: object = plain_value(self.data, convert_tensors)
        for size in reversed(self._kd_desc.batch):
            value = [value for _ in range(size)]
        return linked(value, self) if as_linked_list else value

    def maybe_to_stack(self) -> NonTensorDataBase:
        """Return the value once for each row; without batch dimensions, the entry itself."""
        return (
            cast("NonTensorDataBase", self._spread(self._kd_desc)) if self._kd_desc.ndim else self
        )

    def _kd_item(self) -> object:
        data = self.data
        return data._kd_item() if isinstance(data, NonTensorDataBase) else data

    def _constant(self) -> object:
        if isinstance(self.data, NonTensorDataBase):  # see `NonTensorStack._restored`
            return self.data._constant()
        if type(self) is NonTensorData and self._of_batch is (self._kd_desc.ndim > 0):
            return self.data
        return Constant(self)

    def _spread(self, desc: Descriptor) -> Node:
        """Return the value once for each row of a batch."""
        if isinstance(self._boxed, Cell):
            return self._boxed.spread(desc)
        return registry.wrap_rows([self.data], torch.zeros((), dtype=torch.int64), desc)

    def _encode(
        self, value: object, path: tuple[str, ...], shape: tuple[int, ...] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return a tensor that stands for the value of all rows, and one to copy into it.

        Raises:
            InvalidArgument: if there is a value for each row, or the entry is a row of a batch that
                has one value, of which it is a copy.
        """
        refuse_tensors(value, path)
        if not self._agrees(value):
            by_row = isinstance(value, (list, tuple)) or (
                isinstance(value, NonTensorDataBase) and not isinstance(value, NonTensorData)
            )
            if by_row and same_data(unwrapped(value), self.tolist()):
                return stand_in_for(self, self.data)  # each row has the value already
            if by_row or self._is_row_of_batch():
                name = format_key(path)
                raise one_value_for_all(name, unwrapped(self), unwrapped(value), self._kd_desc.ndim)
        return stand_in_for(self, value)

    def _is_row_of_batch(self) -> bool:
        """Return whether it is a row of a batch that has one value, which a write cannot reach."""
        return self._of_batch and not self._kd_desc.ndim and not self._always_of_batch()

    def _under(self, desc: Descriptor) -> Self:
        """Return a copy that has another batch size."""
        new = self._kd_with_descriptor(desc)
        if isinstance(self._boxed, Cell):
            new._boxed = (self.data,)
        return new

    def _kd_map_each(self, fn: LeafFn, batch: BatchFn | None = None, memo: Memo = None) -> Self:
        desc = self._kd_desc
        if batch is None:
            return self._under(desc if memo is None or memo[0] is not desc else memo[1])
        if isinstance(batch, Grown) and not self._always_of_batch():
            return cast("Self", self._spread(desc.with_batch(batch(desc.batch))))
        if not self._of_batch:
            if isinstance(batch, Reduced) and not batch.lead:
                return self._kd_shallow()
            if isinstance(batch, Fresh):
                new = desc.with_batch(batch(desc.batch))
                none = wrap_data(None, desc)
                return cast("Self", none._spread(new) if new.ndim else none._under(new))
        return self._kd_with_descriptor(desc.with_batch(batch(desc.batch)))

    def _kd_shallow(self) -> Self:
        return self  # a write to a row of a stack is seen in all copies that share its tensors

    def _kd_map_to_parts(
        self, fn: PartsFn, batches: Sequence[BatchFn], memo: PartsMemo = None
    ) -> Sequence[Self]:
        desc = self._kd_desc
        return [self._kd_with_descriptor(desc.with_batch(batch(desc.batch))) for batch in batches]

    def _kd_rebuild(self, leaves: Iterator[Tensor]) -> Self:
        return self._under(self._kd_desc)

    def _kd_zip_each(
        self, other: Entry, fn: Callable[[Tensor, Tensor], Tensor], path: tuple[str, ...] = ()
    ) -> Self:
        self._kd_collect_pair(other, [], [], path)
        if isinstance(fn, Selection) and not self._is_same(other):
            return cast("Self", self._spread(self._kd_desc)._kd_zip_each(other, fn, path))
        return self._under(self._kd_desc)

    def _kd_collect_pair(
        self, other: Entry, mine: list[Tensor], theirs: list[Tensor], path: tuple[str, ...]
    ) -> None:
        super()._kd_collect_pair(other, mine, theirs, path)
        if isinstance(mine, Targets) and not self._is_same(other):
            mine.add_values(self, other, path)

    def _is_same(self, other: Entry) -> bool:
        return isinstance(other, NonTensorData) and self._holds_same(other)

    def _is_equal(self, other: NonTensorDataBase) -> bool:
        return (
            isinstance(other, NonTensorData)
            and self._kd_desc.batch == other._kd_desc.batch
            and self._holds_same(other)
        )

    def _holds_same(self, other: NonTensorData) -> bool:
        """Return whether the values are equal; compiled code reads only those of other boxes."""
        return self._boxed is other._boxed or same_data(self.data, other.data)

    def _kd_with_descriptor(self, desc: Descriptor) -> Self:
        new = object.__new__(self.__class__)
        new._boxed = self._boxed
        new._kd_desc = desc._unlocked
        new._of_batch = self._of_batch or desc.ndim > 0
        return new

    def __reduce__(self) -> tuple[object, ...]:
        desc = self._kd_desc
        if self._of_batch and not desc.ndim and not self._always_of_batch():
            return restore_row_of_batch, (self.data, desc.device)
        return type(self), (self.data, desc.batch, desc.device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(data={self.data!r}, batch_size={self.batch_size})"


def linked(values: object, node: NonTensorDataBase, at: tuple[int, ...] = ()) -> object:
    """Return nested lists of rows as lists that write to the rows."""
    if len(at) == node._kd_desc.ndim:
        return values
    rows = cast("list[object]", values)
    if len(at) + 1 < node._kd_desc.ndim:
        rows = [linked(each, node, (*at, row)) for row, each in enumerate(rows)]
    return LinkedList(rows, lambda index, value: node._write_at((*at, index), value))


def plain_value(value: object, convert_tensors: bool) -> object:
    """Return a value without a wrapper; tensors and arrays as lists, if that is asked for."""
    if isinstance(value, NonTensorDataBase):
        return value.tolist(convert_tensors=convert_tensors)
    if convert_tensors and hasattr(value, "tolist"):
        return cast("Tensor", value).tolist()
    return value


def refuse_tensors(value: object, path: tuple[str, ...]) -> None:
    """Refuse to write tensors, or a container or mapping of them, as a value.

    Raises:
        InvalidArgument: if it is refused; the message names the path.
    """
    if _holds_tensors(value):
        of_shape = f" of shape {shape_text(value.shape)}" if isinstance(value, Tensor) else ""
        raise InvalidArgument(
            f"entry {format_key(path)} holds values that are not tensors, got a "
            f"`{type(value).__name__}`{of_shape}. Use `set` to replace the entry, or wrap the "
            "value in `NonTensorData` to store it."
        )


def _holds_tensors(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    return isinstance(value, Tensor) or (
        is_node(value) and not isinstance(value, NonTensorDataBase)
    )


class MetaData(NonTensorData):
    """A non-tensor entry that describes the whole container, whatever its batch size.

    In a container without batch dimensions too it is one value for all rows: stacking containers
    with equal values keeps one value. Different values become one per row.

    Args:
        data: the value; kept by reference.
        batch_size: the batch size of the container that it belongs to.
        device: the device of the container.

    Example:
        >>> from kd_core import MetaData, TensorDict, stack
        >>> rows = [TensorDict({"unit": MetaData("m"), "name": "x"}) for _ in range(2)]
        >>> stack(rows)["unit"], stack(rows)["name"]
        ('m', ['x', 'x'])
    """

    __slots__ = ()

    def __class_getitem__(cls, item: object) -> type[Self]:
        """Return the class: its values may be annotated with their type."""
        return cls

    @classmethod
    def _always_of_batch(cls) -> bool:
        return True


class _OneTarget(StandIn):
    """A tensor that stands for the value of one row in a member of a stack."""

    node: NonTensorData
    value: object

    def store(self, numbers: Tensor, source: Tensor) -> None:
        """Replace the value."""
        self.node.data = self.value


class RowValue(Encodes):
    """The value of one row in a member of a stack, which is written as the rows of the stack are.

    A container without batch dimensions alone refuses such a write: it may be a row of a batch,
    whose value is a copy.
    """

    __slots__ = ("_kd_desc", "_node")

    def __init__(self, node: NonTensorData) -> None:
        self._node, self._kd_desc = node, node._kd_desc

    def _encode(
        self, value: object, path: tuple[str, ...], shape: tuple[int, ...] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return a tensor that stands for the value, and one to copy into it."""
        refuse_tensors(value, path)
        return stand_in_for(self._node, value)


def stand_in_for(node: NonTensorData, value: object) -> tuple[Tensor, Tensor]:
    """Return a tensor that stands for the value of an entry, and one to copy into it."""
    source = torch.zeros((), dtype=torch.int64)
    new = value._kd_item() if isinstance(value, NonTensorDataBase) else value
    if is_compiling():  # it makes no writes if one of them is refused
        node.data = new
        return source.clone(), source
    target = source.clone().as_subclass(_OneTarget)
    target.plain, target.node, target.value = source, node, new
    return target, source


@restores
def restore_row_of_batch(data: object, device: torch.device | None) -> NonTensorData:
    """Rebuild the entry of one row that holds the value of its whole batch; called by pickle."""
    node = wrap_data(data, restored((), device))
    node._of_batch = True
    return node


@restores
def restore_value(data: object, batch: Batch, device: torch.device | None = None) -> NonTensorData:
    """Rebuild an entry; what a pickle calls that is read with `weights_only=True`."""
    return NonTensorData(data, restored(batch, device).batch, device)


@restores
def restore_meta(data: object, batch: Batch, device: torch.device | None = None) -> MetaData:
    """Rebuild metadata; what a pickle calls that is read with `weights_only=True`."""
    return MetaData(data, restored(batch, device).batch, device)


def wrap_data(data: object, desc: Descriptor) -> NonTensorData:
    """Wrap a value with an existing descriptor."""
    node = object.__new__(NonTensorData)
    node._boxed = (data,)
    node._kd_desc = desc._unlocked
    node._of_batch = desc.ndim > 0
    return node


def row_of_cell(cell: Cell, desc: Descriptor) -> NonTensorData:
    """Wrap the value of one row of several, which is read and written where it is."""
    node = wrap_data(None, desc)
    node._boxed = cell
    return node


def _state_of_data(node: NonTensorData) -> tuple[bool, bool]:
    return node._always_of_batch(), node._of_batch


def _restore_data(
    data: object, desc: Descriptor, always_of_batch: bool, of_batch: bool
) -> NonTensorData:
    node: NonTensorData = object.__new__(MetaData if always_of_batch else NonTensorData)
    node._boxed, node._kd_desc, node._of_batch = (data,), desc._unlocked, of_batch
    return node


def is_non_tensor(data: object) -> TypeGuard[NonTensorDataBase]:
    """Return whether a value is the wrapper of a non-tensor entry.

    Example:
        >>> from kd_core import TensorDict, is_non_tensor
        >>> td = TensorDict({"word": "reach"})
        >>> is_non_tensor(td.get("word")), is_non_tensor(td["word"])
        (True, False)
    """
    return isinstance(data, NonTensorDataBase)


registry.register("wrap_data", wrap_data)
registry.register("state_of_data", _state_of_data)
registry.register("restore_data", _restore_data)
