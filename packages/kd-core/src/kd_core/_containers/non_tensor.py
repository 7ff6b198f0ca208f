"""Non-tensor entries of a container: the base of all, and one value for the whole batch.

A value becomes one value per row (`NonTensorStack`) where an operation adds batch dimensions or
stacks rows, so rows of equal values never collapse. Otherwise a value that is stored in a batch
belongs to all of its rows, and stays one value; `MetaData` does in any case.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import Field, dataclass, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core import _registry as registry
from kd_core._descriptor import LOCKED_BY_USER, Descriptor, describe, describe_on, restored
from kd_core._errors import (
    InvalidArgument,
    InvalidKey,
    KeySetMismatch,
    KeyThroughLeaf,
    UnknownField,
    listed,
    one_value_for_all,
    restores,
    shape_text,
    wrong_type,
)
from kd_core._keys import format_key
from kd_core._leaves.foreach import StandIn
from kd_core._leaves.loops import Selection, equal_data, same_data, unwrapped
from kd_core._leaves.writes import Targets
from kd_core._naming import explain_attribute, leaves_out
from kd_core._nodes import Encodes, RowData, Values, is_data, is_node
from kd_core._ops.access import LinkedList
from kd_core._ops.indexing import resolve
from kd_core._protocol import check_not_held, note_holder
from kd_core._shapes import (
    Fresh,
    Grown,
    Padded,
    Reduced,
    Spread,
    batch_of,
    checked_names,
    names_of,
    refuse_open,
    with_names,
)
from kd_core._switches import capture_non_tensor_stack
from kd_core._torch_private import traced_as

if TYPE_CHECKING:
    from typing import Self, TypeGuard

    from kd_core._nodes import Entry, Holders, Memo, Node, PartsMemo
    from kd_core._protocol import AbstractContainer
    from kd_core._types import Batch, BatchFn, BatchSize, DeviceLike, LeafFn, PartsFn


_HELD: Final = "data"
_IMMUTABLE: Final = frozenset({str, int, float, bool, NoneType, bytes, complex})


def copy_of_value(value: object) -> object:
    """Return a deep copy of a value; the value itself if it cannot be copied."""
    if type(value) in _IMMUTABLE or is_node(value):
        return value
    try:
        return deepcopy(value)
    except Exception:  # what the copy of any class may raise
        return value


def _holding(node: NonTensorDataBase) -> AbstractContainer:
    """Return a container that holds an entry alone."""
    return registry.make_dense({_HELD: node}, node._kd_desc, True)


def _all_held(value: object) -> object:
    if isinstance(value, NonTensorDataBase):
        return _holding(value)
    if isinstance(value, (list, tuple)) and _holds_entries(value):
        return [_all_held(each) for each in value]
    return value


def _holds_entries(value: object) -> bool:
    if type(value) is list or type(value) is tuple:
        return any(map(_holds_entries, value))
    return isinstance(value, NonTensorDataBase)


def _all_taken(made: Any) -> Any:
    if isinstance(made, (list, tuple)):
        return tuple(map(_all_taken, made))
    entries: Mapping[str, object] | None = getattr(made, "_kd_entries", None)
    if entries is None or _HELD not in entries:
        return made
    taken = entries[_HELD]
    lock = made._kd_desc.lock
    if lock is not None and isinstance(taken, NonTensorDataBase):
        taken._kd_desc = taken._kd_desc.with_lock(lock, 0)
    return taken


def _empty(node: NonTensorDataBase) -> AbstractContainer:
    """Return a container without entries of the batch size of an entry."""
    return registry.make_dense({}, node._kd_desc, True)


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
        "is_non_tensor",
        "items",
        "keys",
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
        if not asks_for_keys:
            return node._called(name, *args, **options)
        made = borrowed(*args, **options)
        if name in _MADE_APART:
            return made
        if name == "split_keys":
            return tuple(_itself(each, node) for each in made)
        return node if made is holder else _itself(made, node)

    return call


_MADE_APART: Final = frozenset({"to_module"})
"""Methods that return a container which does not hold the entry."""


def _itself(made: object, node: NonTensorDataBase) -> object:
    """Return the entry in place of a container without entries that stands for it."""
    desc: Descriptor | None = getattr(made, "_kd_desc", None)
    is_like = desc is not None and getattr(made, "_kd_entries", None) == {}
    return node._under(desc) if desc is not None and is_like and not is_data(made) else made


def _refuse_keys(index: object) -> None:
    if isinstance(index, str) or (
        type(index) is tuple and any(isinstance(part, str) for part in index)
    ):
        raise _no_keys(index)


def _no_keys(key: object) -> InvalidKey:
    return InvalidKey(
        f"key {key!r} not found: a non-tensor entry has no keys. Read and write its value by "
        "`data`, those of rows by their index."
    )


class Cell:
    """Where the value of an entry is that others have too: it is read and written there."""

    __slots__ = ()

    if TYPE_CHECKING:

        @abstractmethod
        def __getitem__(self, index: int) -> object:
            """Return the value: a cell is read as the tuple of a value is."""

        @abstractmethod
        def write(self, value: object) -> None:
            """Replace the value, for all that have it."""

        @abstractmethod
        def moved(self) -> tuple[object] | Cell:
            """Return where the value of an entry is that is made of this one."""

        @abstractmethod
        def rows(self, desc: Descriptor) -> RowData:
            """Return the entry of a batch of as many rows, which shares the value."""

        @abstractmethod
        def spread(self, desc: Descriptor) -> RowData:
            """Return the entry of a batch whose rows all are this one."""


class Shared:
    """What the rows of a stack hold where each of its parts had one value for all of its rows.

    Each row has a cell of its own, with this object in it. An entry whose rows all hold the same
    one is read as one value, unless it has more dimensions than the part had.

    Attributes:
        value: the value.
        ndim: the number of batch dimensions of the part.
    """

    __slots__ = ("ndim", "value")

    def __init__(self, value: object, ndim: int) -> None:
        self.value = value
        self.ndim = ndim

    def __reduce__(self) -> tuple[object, ...]:
        return restore_shared, (self.value, self.ndim)


class NonTensorDataBase(Values):
    """The base class of non-tensor entries: `NonTensorData`, `MetaData` and `NonTensorStack`.

    `td["key"]` returns the value, `td.get("key")` the wrapper.

    Example:
        >>> from kd_core import NonTensorDataBase, TensorDict
        >>> isinstance(TensorDict({"task": "reach"}).get("task"), NonTensorDataBase)
        True
    """

    __slots__ = ("_kd_desc", "_kd_holders")

    _kd_desc: Descriptor
    _of_batch: bool = False
    """Whether it is one value that belongs to all rows of a batch."""

    @classmethod
    def _always_of_batch(cls) -> bool:
        return False

    def _kd_state(self) -> tuple[bool, bool]:
        return self._always_of_batch(), self._of_batch

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

        def __getattr__(self, item: str) -> object:
            """Return a method or property of containers: an entry is one without keys."""
            return _borrowed(self, item)

    def get(self, key: object, default: object = None) -> object:
        """Return the value for the key "data", and the default for any other."""
        return self._kd_item() if key == _HELD and isinstance(self, NonTensorData) else default

    def set(self, key: object, value: object, *args: object, **options: object) -> Self:
        """Write the value, under its only key, "data"; return self.

        Raises:
            AttributeError: for another key; `KeyError` if it has one value for each row.
        """
        if key != _HELD:
            kind = UnknownField if isinstance(self, NonTensorData) else InvalidKey
            raise kind(f"cannot set {key!r}: a non-tensor entry holds `data` alone.")
        self._write_all(value)
        return self

    def to_dict(self, **options: object) -> object:
        """Return the value, or those of all rows as nested lists: what `to_dict` shows of it."""
        return plain_value(self._kd_item(), False)

    def update(
        self, input_dict_or_td: NonTensorDataBase | None = None, *args: object, **options: object
    ) -> Self:
        """Write the value of another entry, or those of its rows."""
        if isinstance(input_dict_or_td, NonTensorDataBase):
            self._write_all(input_dict_or_td)
        elif input_dict_or_td is not None:
            raise wrong_type("the source", "a non-tensor entry", input_dict_or_td)
        return self

    update_ = copy_ = update

    @abstractmethod
    def _write_all(self, source: object) -> None:
        """Write the value of another entry, or those of its rows; a value stands for itself."""

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return the batch size, or one of its sizes."""
        return self._kd_desc.size if dim is None else self._kd_desc.size[dim]

    def numel(self) -> int:
        """Return the number of rows."""
        return max(1, self._kd_desc.size.numel())

    @abstractmethod
    def tolist(
        self,
        *,
        convert_tensors: bool = False,
        as_linked_list: bool = False,
        convert_nodes: bool = True,
        tolist_first: bool = False,
    ) -> object:
        """Return the value of each row, as nested lists of shape `batch_size`.

        Args:
            convert_tensors: also return the elements of tensors and arrays as lists.
            as_linked_list: return a `LinkedList`, whose items are written through to the rows.
            convert_nodes: nothing, as what follows: they are of containers.
            tolist_first: as above.
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
        refuse_open(self._kd_desc.batch[:1])
        return (self[row] for row in range(self._kd_desc.batch[0]))

    def __getitem__(self, index: object) -> NonTensorDataBase:
        """Return the entry of one row or of several rows, as of a tensor of shape `batch_size`."""
        _refuse_keys(index)
        return self._called("__getitem__", index)

    def __getitems__(self, indices: list[int]) -> NonTensorDataBase:
        """Return the entry of several rows; called by `DataLoader`."""
        return self[indices]

    def _unchanged(self, other: object) -> NonTensorDataBase:
        """Return a copy: arithmetic leaves data that is not a tensor as it is."""
        return self.clone()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _unchanged
    __truediv__ = __rtruediv__ = __mod__ = __pow__ = __rpow__ = _unchanged
    __and__ = __or__ = __xor__ = __ge__ = __gt__ = __le__ = __lt__ = _unchanged

    def _itself(self, other: object) -> Self:
        """Return the entry: arithmetic in place leaves it as it is, too."""
        return self

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = _itself

    def __neg__(self) -> NonTensorDataBase:
        return self.clone()

    __abs__ = __invert__ = __neg__

    def _called(self, method: str, *args: object, **options: object) -> NonTensorDataBase:
        """Return what a method makes of a container that holds the entry, as entries."""
        holder = _holding(self)
        given = {key: _all_held(value) for key, value in options.items()}
        made = getattr(holder, method)(*map(_all_held, args), **given)
        if made is holder:
            self._take(holder)
            return self
        taken: NonTensorDataBase = _all_taken(made)
        return self._kd_with_descriptor(self._kd_desc) if taken is self else taken

    def _take(self, holder: AbstractContainer) -> None:
        """Take the values, the names and the lock of a container that held the entry."""
        entry = holder._kd_entries[_HELD]
        if type(entry) is not type(self):
            raise InvalidArgument(
                f"a `{type(self).__name__}` cannot become a `{type(entry).__name__}` in place. "
                "Leave out `inplace`, and use the result."
            )
        self._take_values(entry)
        desc = holder._kd_desc
        free = describe(desc.batch, entry._kd_desc.device)
        self._kd_desc = free.with_lock(desc.lock, desc.held)

    @abstractmethod
    def _take_values(self, entry: Self) -> None:
        """Take the values of another entry, which may be this one."""

    @abstractmethod
    def _under(self, desc: Descriptor) -> NonTensorDataBase:
        """Return a copy with another batch size, as far as the values allow it."""

    def view(self, *shape: object, **options: object) -> NonTensorDataBase:
        """Return the entry with another batch size of as many rows."""
        return self._called("view", *shape, **options)

    def reshape(self, *shape: object, **options: object) -> NonTensorDataBase:
        """Return the entry with another batch size of as many rows."""
        return self._called("reshape", *shape, **options)

    def expand(self, *shape: object) -> NonTensorDataBase:
        """Return the entry with new dimensions, or with dimensions of size 1 repeated."""
        return self._called("expand", *shape)

    def squeeze(self, *dim: object, **options: object) -> NonTensorDataBase:
        """Return the entry without dimensions of size 1."""
        return self._called("squeeze", *dim, **options)

    def unsqueeze(self, dim: int, **options: object) -> NonTensorDataBase:
        """Return the entry with a dimension of size 1 inserted."""
        return self._called("unsqueeze", dim, **options)

    def permute(self, *dims: object, **options: object) -> NonTensorDataBase:
        """Return the entry with its dimensions reordered."""
        return self._called("permute", *dims, **options)

    def transpose(self, dim0: int, dim1: int, **options: object) -> NonTensorDataBase:
        """Return the entry with two dimensions exchanged."""
        return self._called("transpose", dim0, dim1, **options)

    def flatten(
        self, start_dim: int = 0, end_dim: int = -1, **options: object
    ) -> NonTensorDataBase:
        """Return the entry with several dimensions in one."""
        return self._called("flatten", start_dim, end_dim, **options)

    def unflatten(self, dim: int, sizes: Sequence[int], **options: object) -> NonTensorDataBase:
        """Return the entry with one dimension as several."""
        return self._called("unflatten", dim, sizes, **options)

    def repeat(self, *repeats: object, **options: object) -> NonTensorDataBase:
        """Return the entry with its rows repeated."""
        return self._called("repeat", *repeats, **options)

    def repeat_interleave(
        self, repeats: object, dim: int | None = None, **options: object
    ) -> NonTensorDataBase:
        """Return the entry with each row repeated."""
        return self._called(
            "repeat_interleave", repeats, **({} if dim is None else {"dim": dim}), **options
        )

    def gather(
        self, dim: int, index: Tensor, *args: object, **options: object
    ) -> NonTensorDataBase:
        """Return the entry of the rows that an index names along a dimension."""
        return self._called("gather", dim, index, *args, **options)

    def masked_select(self, mask: Tensor, **options: object) -> NonTensorDataBase:
        """Return the entry of the rows where a mask is true."""
        return self._called("masked_select", mask, **options)

    def unbind(self, dim: int = 0) -> tuple[NonTensorDataBase, ...]:
        """Return the entries of the rows along a dimension."""
        return self._parts("unbind", dim)

    def split(self, split_size: object, dim: int = 0) -> tuple[NonTensorDataBase, ...]:
        """Return the entries of parts of several rows."""
        return self._parts("split", split_size, dim)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[NonTensorDataBase, ...]:
        """Return the entries of a number of parts."""
        return self._parts("chunk", chunks, dim)

    def to_tensordict(self, *, retain_none: bool | None = None) -> Self:
        """Return the entry: its values are not copied with a container."""
        return self

    def is_empty(self) -> bool:
        """Return `False`: it holds one value."""
        return False

    def is_floating_point(self) -> bool:
        """Return `False`: there are no tensors of floats."""
        return True

    def is_shared(self) -> bool:
        """Return whether the values are in shared memory."""
        return False

    def load_state_dict(
        self,
        state_dict: Mapping[str, object],
        strict: bool = True,
        *args: object,
        **options: object,
    ) -> Self:
        """Load a state dict, which has nothing for values that are not tensors; return self.

        Raises:
            KeySetMismatch: if it has keys, unless `strict=False`.
        """
        if strict and state_dict:
            raise KeySetMismatch(
                f"a non-tensor entry has no keys, got a state dict with {listed(state_dict)}. Pass "
                "`strict=False` to ignore them."
            )
        return self

    def update_at_(
        self, input_dict_or_td: object, idx: object, *args: object, **options: object
    ) -> Self:
        """Write the values of another entry to rows; return self."""
        resolve(idx, self._kd_desc.batch)
        if isinstance(input_dict_or_td, Mapping):
            raise _no_keys(next(iter(input_dict_or_td), _HELD))
        if not isinstance(input_dict_or_td, NonTensorDataBase):
            raise wrong_type("the source", "a non-tensor entry", input_dict_or_td)
        self._write_at(idx, input_dict_or_td)
        return self

    def _parts(self, method: str, *args: object) -> tuple[NonTensorDataBase, ...]:
        made = getattr(_holding(self), method)(*args)
        parts: tuple[NonTensorDataBase, ...] = _all_taken(made)
        return parts

    def clone(self, recurse: bool = True) -> NonTensorDataBase:
        """Return a copy, as `TensorDict.clone` does."""
        return self._called("clone", recurse)

    def __copy__(self) -> NonTensorDataBase:
        return self.clone(recurse=False)

    def contiguous(self, **options: object) -> NonTensorDataBase:
        """Return the entry with its rows in order in memory."""
        return self._called("contiguous", **options)

    def to(self, *args: object, **options: object) -> NonTensorDataBase:
        """Return the entry on another device; its values stay as they are."""
        return self._called("to", *args, **options)

    @property
    def is_locked(self) -> bool:
        """Whether the container that it belongs to is locked."""
        return self._kd_desc.frozen

    def lock_(self) -> Self:
        """Lock the entry, as a container is locked; return self."""
        desc = self._kd_desc
        self._kd_desc = desc.with_lock(LOCKED_BY_USER, desc.held)
        return self

    def unlock_(self) -> Self:
        """Undo the lock of a user; return self.

        Raises:
            Locked: if the container that it belongs to is locked.
        """
        check_not_held(self)
        self._kd_desc = self._kd_desc.unlocked()
        return self

    def __contains__(self, key: object) -> bool:
        """Return `False`: there are no keys."""
        return False

    def __delitem__(self, key: object) -> None:
        raise _no_keys(key)

    def __setitem__(self, index: object, value: object) -> None:
        """Write to rows: a wrapper, nested lists, or one value for all of them."""
        _refuse_keys(index)
        self._write_at(index, value)

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
        made = _all_taken(func(*map(_all_held, args), **given))
        if func is torch.unsqueeze:
            one = args[0] if args else (kwargs or {})["input"]
            if isinstance(one, NonTensorData):  # stays one value, as in tensordict
                kept = one._kd_with_descriptor(made._kd_desc)
                kept._kd_desc = made._kd_desc  # with its lock
                return kept
        return made

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
        rows = zip(*found, strict=True)
        same = [equal_data(*pair) is equal for pair in rows]
        answers = torch.tensor(same, dtype=torch.bool, device=desc.device)
        if alone and desc.ndim:
            return answers.expand(desc.batch).clone(memory_format=torch.contiguous_format)
        return answers.reshape(desc.batch)

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

    @abstractmethod
    def _write_at(self, index: object, value: object) -> None:
        """Write a value to rows."""

    def _constant(self) -> object:
        """Return what a pytree stores in its structure to rebuild the entry."""
        return Constant(self)

    @abstractmethod
    def _is_equal(self, other: NonTensorDataBase) -> bool:
        """Return whether another entry has the same values, one for the batch or for each row."""

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

    def _kd_describe(self, desc: Descriptor) -> None:
        self._kd_desc = desc

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
    ) -> Values:
        # Equal values of whole batches that are concatenated stay one value, and equal `MetaData`
        # does. Otherwise each row has its own, unless a switch tells that they become one.
        captured = capture_non_tensor_stack()
        one = captured or desc.ndim == self._kd_desc.ndim
        kind = NonTensorData if one else MetaData
        if isinstance(self, kind) and all(
            isinstance(node, kind) and (captured or node._of_batch) and self._holds_same(node)
            for node in nodes
        ):
            return self._under(desc)
        stacked = desc.ndim > self._kd_desc.ndim
        pool, columns = pool_rows(cast("Sequence[NonTensorDataBase]", nodes), stacked=stacked)
        if not stacked:  # whole parts become rows of one
            pool = [_below(each, desc.ndim) for each in pool]
        return registry.wrap_rows(pool, call(columns, dim), desc)

    @abstractmethod
    def _pooled(self, first: int) -> tuple[list[object], Tensor]:
        """Return the values, and the numbers of the rows' values, counted from `first`."""

    def _agrees(self, value: object) -> bool:
        return same_data(unwrapped(self), unwrapped(value))

    def _kd_below(self) -> tuple[()]:
        return ()

    def _hold_traced(self, count: int, by: Holders = ()) -> bool:
        # One that took the place of another in a locked container is not held.
        desc = self._kd_desc
        self._kd_desc = desc.with_lock(desc.lock, max(desc.held + count, 0))
        note_holder(self, desc, by)
        return False  # what it encloses is not unlocked

    @traced_as(_hold_traced)
    def _kd_hold(self, count: int, by: Holders = ()) -> bool:
        desc = self._kd_desc  # as in `Dense`: "lock" in the benchmarks
        if count == 1 and desc._held_once is not None:
            self._kd_desc = desc._held_once
            self._kd_holders = by
        elif count == -1 and desc.held == 1 and desc.lock is None:
            self._kd_desc = desc._unlocked
        else:
            self._hold_traced(count, by)
        return False


def pool_rows(
    nodes: Sequence[NonTensorDataBase], *, stacked: bool = False
) -> tuple[list[object], list[Tensor]]:
    """Return the values of several entries in one list, and the numbers of their rows in it.

    Args:
        nodes: the entries.
        stacked: whether they become parts of a stack: then one value for all rows of an entry is
            remembered as that.
    """
    values: list[object] = []
    columns = []
    for node in nodes:
        own, numbers = node._pooled(len(values))
        if stacked and node._kd_desc.ndim and isinstance(node, NonTensorData):
            own = [node._shared()]
        values += own
        columns.append(numbers)
    return values, columns


def without_share(value: object) -> object:
    """Return what a cell holds, of a `Shared` its value."""
    return value.value if isinstance(value, Shared) else value


def _below(value: object, ndim: int) -> object:
    """Return what a cell holds, of a `Shared` of as many dimensions its value."""
    return value.value if isinstance(value, Shared) and value.ndim >= ndim else value


def _of_rows(held: object, desc: Descriptor) -> RowData:
    """Return an entry of a batch whose rows all hold one object."""
    return registry.wrap_rows([held], torch.zeros((), dtype=torch.int64, device="cpu"), desc)


class Constant:
    """An entry in the structure of a pytree, which is equal or not as a whole."""

    __slots__ = ("node",)

    def __init__(self, node: NonTensorDataBase) -> None:
        self.node = node

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Constant):
            return self.node._is_equal(other.node)
        # What `NonTensorData._constant` returns beside it: the value alone.
        return type(self.node) is NonTensorData and same_data(self.node.data, other)

    __hash__ = None  # type: ignore[assignment]  # the values may not be hashable

    def __repr__(self) -> str:
        return repr(self.node)


@dataclass(init=False, repr=False, eq=False)
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
            InvalidKey: if neither holds it.
        """
        if is_data(tensordict) or not is_node(tensordict):
            raise wrong_type("`tensordict`", "a container", tensordict)
        held = tensordict._kd_entries.get(_HELD)
        if held is None and _HELD not in (non_tensordict or {}):
            raise InvalidKey(
                f"key `{_HELD}` not found in the container or beside it; available keys: "
                f"{listed(tensordict._kd_entries)}."
            )
        value = (non_tensordict or {})[_HELD] if held is None else unwrapped(held)
        return cls(value, tensordict._kd_desc.batch, tensordict._kd_desc.device)

    def __replace__(self, **changes: object) -> Self:
        """Return an entry with another value, batch size or device: `copy.replace`."""
        desc = self._kd_desc
        held: dict[str, Any] = {"data": self.data, "batch_size": desc.batch, "device": desc.device}
        return type(self)(**{**held, **changes})

    def rename_keys(self, mapping: Mapping[str, str], **options: object) -> Self:
        """Return the entry: it has no key that could be renamed.

        Raises:
            UnknownField: if a name is given.
        """
        if mapping:
            raise UnknownField(
                f"a non-tensor entry holds `data` alone and cannot have {listed(mapping.values())}."
            )
        return self

    def select(self, *keys: object, as_tensordict: bool = False, **options: object) -> object:
        """Return the entry, or a container without entries."""
        made = _borrowed(self, "select")(*keys, **options)  # type: ignore[operator]  # a method
        return _empty(self) if as_tensordict else made

    def to_lazystack(self, dim: int = 0) -> Self:
        """Return a copy: it is one value for all rows, along any dimension."""
        return self._under(self._kd_desc)

    def to_namedtuple(self, **options: object) -> tuple[()]:
        """Return an empty tuple: there are no entries."""
        return ()

    def non_tensor_items(self, include_nested: bool = False) -> tuple[tuple[str, object], ...]:
        """Return the value, under the key `"data"`."""
        return ((_HELD, self.data),)

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

    def _write_all(self, source: object) -> None:
        self.data = unwrapped(source)

    def _write_at(self, index: object, value: object) -> None:
        if not self._agrees(value):
            raise one_value_for_all("`data`", self.data, unwrapped(value), self._kd_desc.ndim)

    def _take_values(self, entry: Self) -> None:
        self._boxed, self._of_batch = entry._boxed, entry._of_batch

    def tolist(
        self,
        *,
        convert_tensors: bool = False,
        as_linked_list: bool = False,
        convert_nodes: bool = True,
        tolist_first: bool = False,
    ) -> object:
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

    def _pooled(self, first: int) -> tuple[list[object], Tensor]:
        return [self._kd_item()], torch.full(self._kd_desc.batch, first, device="cpu")

    def _shared(self) -> object:
        """Return what the rows of a stack hold of which this is a part."""
        ndim = self._kd_desc.ndim
        return Shared(self._kd_item(), ndim) if ndim else self._kd_item()

    def _spread(self, desc: Descriptor) -> RowData:
        """Return the value once for each row of a batch."""
        if isinstance(self._boxed, Cell):
            return self._boxed.spread(desc)
        return _of_rows(self.data, desc)

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

    def _copy_values(self) -> None:
        value = self.data
        copied = copy_of_value(value)
        if copied is not value:
            self._boxed = (copied,)

    def _is_row_of_batch(self) -> bool:
        """Return whether it is a row of a batch that has one value, which a write cannot reach."""
        return self._of_batch and not self._kd_desc.ndim and not self._always_of_batch()

    def _under(self, desc: Descriptor) -> Self:
        """Return a copy that has another batch size."""
        new = self._kd_with_descriptor(desc)
        if isinstance(self._boxed, Cell):
            new._boxed = (self.data,)
        return new

    def _kd_map_each(self, fn: LeafFn, batch: BatchFn | None = None, memo: Memo = None) -> Node:
        desc = self._kd_desc
        if batch is None:
            return self._under(desc if memo is None or memo[0] is not desc else memo[1])
        if not self._always_of_batch():
            if isinstance(batch, (Grown, Spread)) and not capture_non_tensor_stack():
                new = desc.with_batch(batch(desc.batch))
                if isinstance(batch, Grown) and new.size.numel() == desc.size.numel():
                    return self._grown(new)
                in_cell = isinstance(self._boxed, Cell)
                return self._spread(new) if in_cell else _of_rows(self._shared(), new)
            if isinstance(batch, Padded) and not isinstance(batch, Fresh) and desc.ndim:
                return self._spread(desc)._kd_map_each(fn, batch)
        if not self._of_batch:
            if isinstance(batch, Reduced) and not batch.lead:
                return self._kd_shallow()
            if isinstance(batch, Fresh):
                new = desc.with_batch(batch(desc.batch))
                none = wrap_data(None, desc)
                return none._spread(new) if new.ndim else none._under(new)
        return self._kd_with_descriptor(desc.with_batch(batch(desc.batch)))

    def _grown(self, desc: Descriptor) -> RowData:
        """Return rows that have the value: a write to all of them, or to this, reaches both."""
        if is_compiling() or isinstance(self.data, NonTensorDataBase):
            return _of_rows(self._shared(), desc)
        boxed = self._boxed
        if not isinstance(boxed, Cell):
            boxed = self._boxed = cast("Cell", registry.whole(self.data, self._kd_desc))
        return boxed.rows(desc)

    def _kd_shallow(self) -> Node:
        return self  # a write to a row of a stack is seen in all copies that share its tensors

    def _kd_map_to_parts(
        self, fn: PartsFn, batches: Sequence[BatchFn], memo: PartsMemo = None
    ) -> Sequence[Node]:
        desc = self._kd_desc
        return [self._kd_with_descriptor(desc.with_batch(batch(desc.batch))) for batch in batches]

    def _kd_rebuild(self, leaves: Iterator[Tensor]) -> Node:
        return self._under(self._kd_desc)

    def _kd_zip_each(
        self, other: Entry, fn: Callable[[Tensor, Tensor], Tensor], path: tuple[str, ...] = ()
    ) -> Node:
        self._kd_collect_pair(other, [], [], path)
        if isinstance(fn, Selection) and not self._is_same(other):
            return self._spread(self._kd_desc)._kd_zip_each(other, fn, path)
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
        return self._is_same(other)

    def _holds_same(self, other: NonTensorData) -> bool:
        """Return whether the values are equal; compiled code reads only those of other boxes."""
        return self._boxed is other._boxed or same_data(self.data, other.data)

    def _kd_with_descriptor(self, desc: Descriptor) -> Self:
        new = object.__new__(type(self))
        boxed = self._boxed
        new._boxed = boxed.moved() if isinstance(boxed, Cell) else boxed
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
    rows: list[object] = values if isinstance(values, list) else [values]
    if len(at) + 1 < node._kd_desc.ndim:
        rows = [linked(each, node, (*at, row)) for row, each in enumerate(rows)]
    return LinkedList(rows, lambda index, value: node._write_at((*at, index), value))


def plain_value(value: object, convert_tensors: bool) -> object:
    """Return a value without a wrapper; tensors and arrays as lists, if that is asked for."""
    value = without_share(value)
    if isinstance(value, NonTensorDataBase):
        return value.tolist(convert_tensors=convert_tensors)
    if convert_tensors and hasattr(value, "tolist"):
        return value.tolist()
    return value


def refuse_tensors(value: object, path: tuple[str, ...]) -> None:
    """Refuse to write tensors, or a container or mapping of them, as a value.

    Raises:
        InvalidArgument: if it is a tensor; the message names the path.
        KeyThroughLeaf: if it has keys.
    """
    if _holds_tensors(value):
        of_shape = f" of shape {shape_text(value.shape)}" if isinstance(value, Tensor) else ""
        kind = InvalidArgument if isinstance(value, Tensor) else KeyThroughLeaf
        raise kind(
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
    source = torch.zeros((), dtype=torch.int64, device="cpu")
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


@restores
def restore_shared(value: object, ndim: int) -> Shared:
    """Build what the rows of one part of a stack hold; called by pickle."""
    return Shared(value, ndim)


def wrap_data(
    data: object, desc: Descriptor, state: tuple[bool, bool] | None = None
) -> NonTensorData:
    """Wrap a value with an existing descriptor, and in a state that `_kd_state` told."""
    if state is not None:
        restored: NonTensorData = object.__new__(MetaData if state[0] else NonTensorData)
        restored._boxed, restored._kd_desc, restored._of_batch = (data,), desc._unlocked, state[1]
        return restored
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
