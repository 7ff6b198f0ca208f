"""Containers as plain Python: state dicts, numpy arrays, lists."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import setitem
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kd_core import _registry as registry
from kd_core._descriptor import describe
from kd_core._errors import (
    InvalidArgument,
    InvalidValue,
    KdError,
    KeySetMismatch,
    ShapeMismatch,
    a_type,
    given_twice,
    listed,
    wrong_type,
)
from kd_core._keys import format_key
from kd_core._leaves.loops import kinds_by_key
from kd_core._leaves.writes import Write, write_all
from kd_core._nodes import (
    is_data,
    is_row_data,
    is_unbatched,
    kept_value,
    leaf_or_node,
    tensor_of,
)
from kd_core._ops.access import LinkedList, list_of, plain_item
from kd_core._ops.description import check_names
from kd_core._ops.joining import maybe_dense_stack, stack
from kd_core._ops.modules import StackedUninitialized, stacked_uninitialized
from kd_core._protocol import (
    AbstractContainer,
    Composite,
    engine,
    has_partial_entries,
    is_container,
    set_names,
    unchanged_on_error,
)
from kd_core._shapes import batch_of
from kd_core._torch_private import add_metadata, metadata_of
from kd_core._unbatched import wrap_tensor

if TYPE_CHECKING:
    from typing import Self, TypeVar

    from kd_core._keys import KeyPath
    from kd_core._nodes import Entries
    from kd_core._types import Batch, BatchSize, DeviceLike

    C = TypeVar("C", bound=AbstractContainer)

    State: TypeAlias = Mapping[str, Any]


BATCH_SIZE: Final = "__batch_size"
DEVICE: Final = "__device"
MEMBERS: Final = "__members"
STACK_DIM: Final = "__stack_dim"
UNBATCHED: Final = "__unbatched"
_DATA: Final = "_non_tensor"
_FACTS: Final = {"batch_size": BATCH_SIZE, "device": DEVICE, "unbatched": UNBATCHED}
_ABOUT: Final = (BATCH_SIZE, DEVICE, MEMBERS, STACK_DIM, UNBATCHED)


class Conversion(AbstractContainer):
    """Containers as plain Python."""

    __slots__ = ()

    def state_dict(
        self,
        destination: dict[str, object] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        flatten: bool = True,
    ) -> dict[str, object]:
        """Return an `OrderedDict` of the leaves, for `torch.save`; tensors are shared.

        Nested keys are joined by dots, as those of modules are. What is not a tensor (batch sizes,
        devices, non-tensor data) is in the attribute `_metadata` of the result, where the state
        dicts of modules have their versions: a table for each level, by its key.

        Args:
            destination: a dict to add the items to; `None`: a new one.
            prefix: what each key starts with.
            keep_vars: return leaves as they are; else those that require grad are detached.
            flatten: join nested keys. Else levels are nested dicts, each with a `_metadata` of its
                own and with non-tensor data among its items. A lazy stack whose entries cannot be
                stacked, or are not in all members, is nested in any case: a list of the states of
                its members is under `__members`, the stacked dimension under `__stack_dim`.

        Raises:
            KeyCollision: if two keys become one by flattening.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.ones(2), "b": {"c": torch.zeros(2)}}, [2])
            >>> list(td.state_dict(prefix="net."))
            ['net.a', 'net.b.c']
            >>> list(td.state_dict(flatten=False)["b"])
            ['c']
        """
        if flatten:
            items: dict[str, object] = OrderedDict()
            about: dict[str, object] = OrderedDict()
            if _flatten_state(self, prefix, keep_vars, items, about):
                return _added(items, about, destination)
        levels = self._kd_levels(keep_vars)
        if not flatten:
            return _in_metadata(levels, prefix, destination)
        return _added({prefix + key: value for key, value in levels.items()}, {}, destination)

    def _kd_levels(self, keep_vars: bool) -> dict[str, object]:
        """Return nested dicts of the leaves, with what each level is among its items."""
        state: dict[str, object] = OrderedDict()
        entries = self._kd_entries if self._kd_owns_leaves else _stacked(self, keep_vars, state)
        for key, value in entries.items():
            if type(value) is Tensor or isinstance(value, Tensor):
                state[key] = _kept(value, keep_vars) if value.requires_grad else value
            elif is_container(value, self):
                state[key] = engine(value)._kd_levels(value, keep_vars)
            else:
                leaf = tensor_of(value)
                state[key] = value._kd_item() if leaf is None else _kept(leaf, keep_vars)
        desc = self._kd_desc
        if self._kd_nested:
            unbatched = [key for key, value in entries.items() if is_unbatched(value)]
            state |= {UNBATCHED: unbatched} if unbatched else {}
        state[BATCH_SIZE] = desc.size
        state[DEVICE] = desc.device
        return state

    def load_state_dict(
        self,
        state_dict: Mapping[str, object],
        strict: bool = True,
        assign: bool = False,
        from_flatten: bool | None = None,
    ) -> Self:
        """Load the values of a state dict: all of them, or none if one does not fit.

        Values are copied into the leaves, so a locked container may be loaded into.

        Args:
            state_dict: what `state_dict` returned.
            strict: its keys must be those of this container. Else it may lack some, and what the
                container lacks is added, with the batch sizes of the state dict; the container
                must not be locked then.
            assign: keep the tensors of the state dict instead of copying; then keys and the batch
                size are taken from it too, and the container must not be locked.
            from_flatten: the nested keys of the state dict are joined by dots; `None`: they are if
                no level is a dict. What such a state dict does not say of non-tensor data stays.

        Raises:
            KeySetMismatch: if keys differ.
            ShapeMismatch: if a value does not fit its leaf.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2)}, [2])
            >>> td.load_state_dict(TensorDict({"a": torch.ones(2)}, [2]).state_dict())["a"]
            tensor([1., 1.])
        """
        if _is_flat(state_dict) if from_flatten is None else from_flatten:
            state_dict = _nested_state(kinds_by_key(self._kd_entries), _with_metadata(state_dict))
        else:
            state_dict = _of_levels(state_dict)
        if assign:
            _assign(self, state_dict)
            return self
        writes: list[Write] = []
        if not strict and _lacks(self, state_dict):
            self._kd_check_unlocked("add entries of a state dict")
            trial = self._kd_shallow()  # refuses what does not fit, before anything is changed
            _grow(trial, state_dict)
            _stage(trial, state_dict, strict, (), [])
            _grow(self, state_dict)
        _stage(self, state_dict, strict, (), writes)
        with torch.no_grad():
            write_all(writes)
        return self

    def _kd_check_state(self, state: object) -> None:
        """Raise if the values of a state dict do not fit; keys may be missing on either side."""
        _stage(self, state, False, (), [])

    def numpy(self) -> dict[str, object]:
        """Return nested dicts of numpy arrays that share memory with the leaves where they can.

        Raises:
            RuntimeError: if a leaf requires grad, as in torch; `detach` the container first.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"a": torch.ones(2)}, [2]).numpy()
            {'a': array([1., 1.], dtype=float32)}
        """
        return _arrays(self, ())

    def tolist(
        self,
        *,
        convert_nodes: bool = True,
        convert_tensors: bool = False,
        tolist_first: bool = False,
        as_linked_list: bool = False,
    ) -> object:
        """Return the rows as nested lists of shape `batch_size`; a row is a dict of its entries.

        A container without a batch is one row. `to_dict(convert_tensors=True)` returns a dict of
        lists instead.

        Args:
            convert_nodes: return rows as dicts, else as containers.
            convert_tensors: return tensors as numbers or nested lists of numbers.
            tolist_first: return a nested container that still has a batch as a list of its rows.
            as_linked_list: return a list that writes what is assigned to one of its items into the
                rows of the container, too; lists in it, and other changes of it, do not.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.ones(2), "b": {"c": torch.zeros(2, 1)}}, [2])
            >>> td.tolist(convert_tensors=True)
            [{'a': 1.0, 'b': {'c': [0.0]}}, {'a': 1.0, 'b': {'c': [0.0]}}]
        """
        rows = list_of(self, convert_nodes, convert_tensors, tolist_first)
        if as_linked_list and isinstance(rows, list):
            return LinkedList(rows, partial(setitem, self))
        return rows


def _arrays(td: AbstractContainer, path: KeyPath) -> dict[str, object]:
    """Return the leaves of a level and of those below as arrays."""
    plain: dict[str, object] = {}
    for key, value in td._kd_entries.items():
        where = (*path, key)
        if isinstance(value, AbstractContainer):
            plain[key] = _arrays(value, where)
            continue
        leaf = leaf_or_node(value)
        if not isinstance(leaf, Tensor):
            plain[key] = plain_item(leaf)
            continue
        try:
            if leaf.is_nested:
                plain[key] = tuple([row.cpu().numpy() for row in leaf.unbind()])
            else:
                plain[key] = leaf.cpu().numpy()
        except RuntimeError as error:
            error.add_note(f"This is entry {format_key(where)}.")
            raise
    return plain


def _member_states(
    td: AbstractContainer, state: State, path: KeyPath
) -> list[tuple[AbstractContainer, Any]] | None:
    """Return the members of a stack with the state of each; `None` if the state has no members."""
    if MEMBERS not in state:
        return None
    states = state[MEMBERS]
    dim = state[STACK_DIM]
    if not isinstance(td, Composite) or td._dim != dim or len(td._members) != len(states):
        where = f"of {format_key(path)} " if path else ""
        raise ShapeMismatch(
            f"the state dict {where}is of {len(states)} members stacked along dimension {dim}, and "
            f"the container is {a_type(td)} of batch_size {td._kd_desc.batch}. Load it "
            "into a lazy stack of as many members."
        )
    return list(zip(td._members, states, strict=True))


def _stacked(td: AbstractContainer, keep_vars: bool, state: dict[str, object]) -> Entries:
    """Return the entries of a stack; where it cannot show all, none, and add those of members."""
    if not isinstance(td, Composite):
        return dict(td._kd_entries.items())
    if not has_partial_entries(td):
        with suppress(KdError):
            return dict(td._kd_entries.items())
    state[MEMBERS] = [member._kd_engine._kd_levels(member, keep_vars) for member in td._members]
    state[STACK_DIM] = td._dim
    return {}


def _kept(leaf: Tensor, keep_vars: bool) -> Tensor:
    return leaf if keep_vars or not leaf.requires_grad else leaf.detach()


def _flatten_state(
    td: AbstractContainer,
    prefix: str,
    keep_vars: bool,
    state: dict[str, object],
    about: dict[str, object],
) -> bool:
    """Add the leaves of a level and of those below under joined keys, and what they are beside.

    Returns:
        Whether that can be done: not where a stack cannot show all entries of its members.
    """
    if isinstance(td, Composite) and has_partial_entries(td):
        return False
    try:
        entries = td._kd_entries if td._kd_owns_leaves else dict(td._kd_entries.items())
    except KdError:
        if isinstance(td, Composite):
            return False
        raise
    level: dict[str, Any] = {"batch_size": td._kd_desc.size, "device": td._kd_desc.device}
    about[prefix.removesuffix(".")] = level
    for key, value in entries.items():
        name = prefix + key
        if type(value) is Tensor and name not in state:
            state[name] = _kept(value, keep_vars) if value.requires_grad else value
            continue
        if isinstance(value, AbstractContainer):
            if not _flatten_state(value, f"{name}.", keep_vars, state, about):
                return False
            continue
        leaf = leaf_or_node(value)
        if name in state or (not isinstance(leaf, Tensor) and name in about):
            raise given_twice(f"`{name}`", " once nested keys are joined by dots")
        if not isinstance(leaf, Tensor):
            about[name] = {"batch_size": leaf._kd_desc.size, _DATA: {"data": leaf._kd_item()}}
            continue
        state[name] = _kept(leaf, keep_vars)
        if is_unbatched(value):
            level["unbatched"] = [*level.get("unbatched", []), key]
    return True


def _in_metadata(
    levels: Mapping[str, object], prefix: str = "", destination: dict[str, object] | None = None
) -> dict[str, object]:
    """Return nested dicts where what each level is stands in an attribute of its dict."""
    items: dict[str, object] = {}
    for key, value in levels.items():
        if isinstance(value, Mapping) and BATCH_SIZE in value and MEMBERS not in value:
            value = _in_metadata(value)
        if MEMBERS in levels or key not in _FACTS.values():
            items[prefix + key] = value
    facts = {name: levels[key] for name, key in _FACTS.items() if key in levels}
    return _added(items, {prefix.removesuffix("."): facts}, destination)


def _of_levels(state: Mapping[str, object]) -> Mapping[str, object]:
    """Return nested dicts with what each level is among its items, as `_kd_levels` returns them."""
    found = dict(_with_metadata(state))
    for key, value in found.items():
        if isinstance(value, OrderedDict):
            found[key] = _of_levels(value)
    return found


def _added(
    items: dict[str, object], about: dict[str, object], destination: dict[str, object] | None
) -> dict[str, object]:
    """Return a flat state dict, added to the destination if there is one."""
    state: dict[str, object]
    state = items if isinstance(items, OrderedDict) else OrderedDict(items)
    if destination is not None:
        state = destination
        for name in items:
            if name in state:
                raise given_twice(f"`{name}`", " once nested keys are joined by dots")
        state.update(items)
    if isinstance(state, OrderedDict):
        add_metadata(state, about)
    return state


def _is_flat(state: Mapping[str, object]) -> bool:
    """Return whether nested keys are joined: no level is a dict, none says its batch size."""
    nested = BATCH_SIZE in state or MEMBERS in state
    return not (nested or any(isinstance(value, Mapping) for value in state.values()))


def _with_metadata(state: Mapping[str, object]) -> Mapping[str, object]:
    """Return a flat state dict with the items that its nested form has for what is not a tensor."""
    about = metadata_of(state)
    if about is None:
        return state
    items = dict(state)
    for path, facts in about.items():
        if not isinstance(facts, Mapping):
            continue
        data = facts.get(_DATA)
        if isinstance(data, Mapping) and "data" in data:
            items.setdefault(path, data["data"])
            continue
        prefix = f"{path}." if path else ""
        items |= {f"{prefix}{key}": facts[name] for name, key in _FACTS.items() if name in facts}
    return items


def _nested_state(entries: Entries, state: Mapping[str, object]) -> dict[str, object]:
    """Return a state dict whose joined keys are nested like the entries they are for."""
    nested: dict[str, object] = {}
    pending: dict[str, dict[str, object]] = {}
    for name, value in state.items():
        above = next((name[:at] for at in _dots(name) if _is_level(entries, name[:at])), None)
        if above is None:
            above = name.partition(".")[0]
        if (name in entries and not _is_level(entries, name)) or above == name:
            nested[name] = value
        else:
            nested.setdefault(above, None)  # its place is that of its first entry
            pending.setdefault(above, {})[name[len(above) + 1 :]] = value
    for key, below in pending.items():
        entry = entries.get(key)
        inner = kinds_by_key(entry._kd_entries) if isinstance(entry, AbstractContainer) else {}
        nested[key] = _nested_state(inner, below)
    for key, entry in entries.items():
        if key in nested:
            continue
        if isinstance(entry, AbstractContainer):
            if not entry._kd_entries:
                nested[key] = {}
        elif is_data(entry):
            nested[key] = entry._kd_item()
    return nested


def _dots(name: str) -> list[int]:
    return [at for at, char in enumerate(name) if char == "."]


def _is_level(entries: Entries, key: str) -> bool:
    return isinstance(entries.get(key), AbstractContainer)


def _content(state: State) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key not in _ABOUT}


def _lacks(td: AbstractContainer, state: object) -> bool:
    """Return whether a state dict has keys that a container lacks, or another batch size."""
    if not isinstance(state, Mapping) or _member_states(td, state, ()) is not None:
        return False
    if _other_batch(td, state) is not None:
        return True
    entries = kinds_by_key(td._kd_entries)
    return any(
        key not in entries
        or (isinstance(entry := entries[key], AbstractContainer) and _lacks(entry, value))
        for key, value in _content(state).items()
    )


def _other_batch(td: AbstractContainer, state: State) -> tuple[int, ...] | None:
    """Return the batch size of a state dict; `None` if it is that of the container."""
    batch = _batch_in(state, td)
    return None if batch == td._kd_desc.batch else batch


def _batch_in(state: State, td: AbstractContainer) -> tuple[int, ...]:
    return tuple(state.get(BATCH_SIZE, td._kd_desc.batch))


def _unbatched_in(state: State) -> Sequence[str]:
    keys: Sequence[str] = state.get(UNBATCHED, ())
    return keys


def _grow(td: AbstractContainer, state: State) -> None:
    """Take the batch size of a state dict, and copies of the entries that the container lacks."""
    entries = kinds_by_key(td._kd_entries)
    content = _content(state)
    for key, value in content.items():
        entry = entries.get(key)
        if isinstance(entry, AbstractContainer) and _lacks(entry, value):
            _grow(entry, value)
    batch = _other_batch(td, state)
    if batch is not None:
        td._kd_engine.batch_size.__set__(td, batch)  # type: ignore[attr-defined]  # a property
    lacking = {key: value for key, value in content.items() if key not in entries}
    about = {key: value for key, value in state.items() if key in _ABOUT}
    unbatched = [key for key in _unbatched_in(state) if key in lacking]
    made = _restored(td, {**about, UNBATCHED: unbatched, **lacking})
    for key, value in made._kd_map_each(torch.clone)._kd_entries.items():
        td._kd_check_key(key)
        td._kd_set_entry(key, value)


def _stage(
    td: AbstractContainer,
    state: object,
    strict: bool,
    path: KeyPath,
    writes: list[Write],
) -> None:
    """Check a level and append its writes."""
    if not isinstance(state, Mapping):
        raise wrong_type(
            f"the state of {format_key(path) if path else 'a container'}", "a mapping", state
        )
    members = _member_states(td, state, path)
    content = _content(state)
    if members is not None:
        if strict and content:
            raise KeySetMismatch(
                f"the state dict of members holds {listed(content)} beside them. Remove it, or "
                "pass `strict=False`."
            )
        for member, each in members:
            _stage(member, each, strict, path, writes)
        return
    entries = kinds_by_key(td._kd_entries)
    if strict and content.keys() != entries.keys():
        remedy = "Pass `strict=False` to take the shared keys, or `assign=True` to take all."
        raise _other_keys(entries, content, remedy)
    if BATCH_SIZE in state and tuple(state[BATCH_SIZE]) != td._kd_desc.batch:
        raise ShapeMismatch(
            f"the state dict is of batch_size {tuple(state[BATCH_SIZE])}, "
            f"and the container of {td._kd_desc.batch}. Pass `assign=True` to take that of the "
            "state."
        )
    for key in entries:
        if key not in content:
            continue
        value, entry = content[key], entries[key]
        if isinstance(entry, AbstractContainer):
            _stage(entry, value, strict, (*path, key), writes)
        elif not is_data(entry):
            writes += td._kd_writes(key, value, (*path, key))
        elif not entry._agrees(value):
            if not is_row_data(entry) and isinstance(entry._kd_item(), (list, tuple)):
                value = registry.wrap_data(value, entry._kd_desc)  # else it is one for each row
            writes += td._kd_writes(key, value, (*path, key))


def _other_keys(
    entries: Mapping[str, object], content: Mapping[str, object], remedy: str
) -> KeySetMismatch:
    """Build the error for a state dict of other keys than a container."""
    return KeySetMismatch(
        f"the state dict lacks {listed(key for key in entries if key not in content)}, and the "
        f"container lacks {listed(key for key in content if key not in entries)}. {remedy}"
    )


def _assign(td: AbstractContainer, state: State) -> None:
    td._kd_check_unlocked("replace entries by those of a state dict")
    members = _member_states(td, state, ())
    if members is not None:
        with unchanged_on_error(td):
            for member, each in members:
                _assign(member, each)
        return
    made = _restored(td, _with_data_of_fields(td, state))
    for key in made._kd_entries.keys() - td._kd_entries.keys():
        td._kd_check_key(key)
    for key in list(td._kd_entries):
        td._kd_del_entry(key)
    td._kd_describe(made._kd_desc)
    for key, entry in made._kd_entries.items():
        td._kd_set_entry(key, entry)


def _with_data_of_fields(td: AbstractContainer, state: State) -> State:
    """Return a state dict with the data of fields that it lacks, as one of tensors alone does.

    Raises:
        KeySetMismatch: if it lacks a field that is a tensor or a container.
    """
    if td._kd_tensor_class is None or isinstance(td, Composite):
        return state
    lacking = {key: entry for key, entry in td._kd_entries.items() if key not in state}
    data = {key: entry._kd_item() for key, entry in lacking.items() if is_data(entry)}
    if len(data) != len(lacking):
        raise _other_keys(
            td._kd_entries, _content(state), "Leave out `assign`, with `strict=False`."
        )
    return {**state, **data}


def _restored(td: AbstractContainer, state: State) -> AbstractContainer:
    """Build a dense container from a state dict; what that does not state is as in `td`."""
    if MEMBERS in state:
        rows = [_restored(td, each) for each in state[MEMBERS]]
        return registry.lazy_stack(rows, state[STACK_DIM])
    batch = batch_of(_batch_in(state, td))
    if batch == td._kd_desc.batch:
        batch = td._kd_desc.batch  # its sizes have names
    kinds = kinds_by_key(td._kd_entries)
    content = dict[str, Any]()
    for key, value in _content(state).items():
        content[key] = value
        if isinstance(value, Mapping) and BATCH_SIZE in value:
            there = kinds.get(key)
            content[key] = _restored(there if isinstance(there, AbstractContainer) else td, value)
    for key in _unbatched_in(state):
        content[key] = wrap_tensor(content[key], describe(()))
    made: AbstractContainer = registry.nest_mapping(content, td._kd_desc.with_batch(batch), ())
    if isinstance(td, Composite):
        return made
    return td._kd_like(dict(made._kd_entries), made._kd_desc)


# Building a container of a given class from what a source holds.


def build(
    cls: type[C],
    tree: object,
    batch_size: BatchSize | None,
    device: DeviceLike | None,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    found: BatchSize | None = None,
    names: Sequence[str | None] | None = None,
) -> C:
    """Build a container of a class from nested dicts.

    Args:
        cls: the class.
        tree: the nested dicts.
        batch_size: the batch size that the caller gives.
        device: the device to which every entry is moved.
        auto_batch_size: infer the batch size if none is given.
        batch_dims: the largest number of batch dimensions to infer.
        found: the batch size that the source has, if none is given or inferred.
        names: the name of each batch dimension; `None`: no names.

    Raises:
        InvalidArgument: if the class is not built from a mapping.
    """
    infers = batch_size is None and (auto_batch_size or batch_dims is not None)
    if infers:
        batch_size = inferred_batch(cls, tree, batch_dims)
    made = _maker(cls)(tree, found if batch_size is None else batch_size, device)
    for key, value in tree.items() if infers and isinstance(tree, Mapping) else ():
        entry = made._kd_entries.get(key)
        if isinstance(entry, AbstractContainer) and _is_made(value):
            entry._kd_engine.auto_batch_size_(entry, batch_dims)
    if names is not None and any(checked := check_names(names, made._kd_desc.batch)):
        set_names(made, checked)
    return made


def _is_made(value: object) -> bool:
    """Return whether a value is nested dicts alone: containers in it stay those of the caller."""
    if isinstance(value, AbstractContainer) or not isinstance(value, Mapping):
        return False
    inside = (each for each in value.values() if isinstance(each, (AbstractContainer, Mapping)))
    return all(map(_is_made, inside))


def inferred_batch(cls: type[C], tree: object, most: int | None) -> Batch:
    """Return the leading dimensions that the leaves of nested dicts share, at most `most`.

    Raises:
        InvalidArgument: if the class is not built from a mapping.
    """
    # Apart from what is built in the end: with a batch size lists are rows.
    made = _maker(cls)(tree, None, None)._kd_shallow()  # which is not locked
    made._kd_engine.auto_batch_size_(made, most)
    batch = made._kd_desc.batch
    return batch[: _rows_in_lists(made, batch)]


def _rows_in_lists(level: AbstractContainer, batch: Batch) -> int:
    """Return how many leading dimensions the lists of values have, too: one value for each row.

    A list that does not have an item for each row of dimension 0 is left for the error to name.
    """
    most = len(batch)
    for entry in level._kd_entries.values():
        if isinstance(entry, AbstractContainer):
            most = min(most, _rows_in_lists(entry, batch))
        elif is_data(entry) and isinstance(values := kept_value(entry), (list, tuple)):
            found = 0
            rows: list[object] = [values]
            while found < most:
                lists = [each for each in rows if isinstance(each, (list, tuple))]
                if len(lists) < len(rows) or any(len(each) != batch[found] for each in lists):
                    break
                rows = [each for row in lists for each in row]
                found += 1
            most = min(most, max(found, 1))
    return most


def _maker(cls: type[C]) -> Callable[..., C]:
    if issubclass(cls, Composite):  # a mapping of entries makes a dense container
        dense: C = registry.make_dense({}, describe(()))
        cls = type(dense)
    kind: type = cls._kd_engine
    make: Callable[..., C] | None = getattr(kind, "from_dict", None)
    if make is not None and kind is not cls:  # its author may have a field of that name
        own = make
        return lambda *args: getattr(own, "__func__")(cls, *args)  # noqa: B009  # of a class method
    if make is None:
        raise InvalidArgument(
            f"`{cls.__name__}` cannot be built from a mapping. Call the method of `TensorDict`."
        )
    return make


def kind_of(td: C) -> type[C]:
    """Return the class of what is built like a container; a stack is read as a dense container."""
    return type(td._kd_like({}, td._kd_desc.unlocked()) if isinstance(td, Composite) else td)


def stack_rows(rows: list[C], lazy: bool | None) -> C:
    """Stack containers along a new first dimension; `lazy` as in `from_list`."""
    if lazy is False:
        return stack(rows)
    return registry.lazy_stack(rows) if lazy else maybe_dense_stack(rows)


# The parameters of several modules as one container.


def stacked_modules(
    cls: type[C],
    modules: Sequence[nn.Module],
    use_state_dict: bool,
    lazy_stack: bool,
    expand_identical: bool,
) -> C:
    """Stack the parameters and buffers of modules of the same structure; see `from_modules`."""
    if not modules:
        raise InvalidValue("`modules` must have at least one module, got none.")
    if not hasattr(cls, "from_module"):
        cls = type(cast("C", registry.make_dense({}, describe(()))))
    take: Callable[..., C] = getattr(cls, "from_module")  # noqa: B009  # of dense kinds
    rows = [take(module, use_state_dict=use_state_dict) for module in modules]
    if lazy_stack:
        return stack_rows(rows, True)
    entries = _stacked_parameters([row._kd_entries for row in rows], (), expand_identical)
    made = build(cls, _with_shapes(entries), (len(rows),), None)
    _set_uninitialized(made, entries)
    return made


def _with_shapes(entries: Mapping[str, object]) -> dict[str, object]:
    """Return entries with empty tensors in place of those of lazy modules."""
    return {
        key: _with_shapes(value)
        if isinstance(value, Mapping)
        else value.stand_in()
        if isinstance(value, StackedUninitialized)
        else value
        for key, value in entries.items()
    }


def _set_uninitialized(td: AbstractContainer, entries: Mapping[str, Any]) -> None:
    """Write the tensors of lazy modules in place of the empty ones."""
    for key, value in entries.items():
        entry = td._kd_entries[key]
        if isinstance(entry, AbstractContainer):
            _set_uninitialized(entry, value)
        elif isinstance(value, StackedUninitialized):
            td._kd_set_entry(key, value)


def _stacked_parameters(
    levels: Sequence[Mapping[str, object]], path: tuple[str, ...], expand: bool
) -> dict[str, object]:
    """Stack the tensors of modules as leaves of autograd where those of the modules are."""
    first = levels[0]
    for number, level in enumerate(levels):
        if level.keys() != first.keys():
            raise KeySetMismatch(
                f"the modules must have the same structure, got {sorted(first)} in module 0 and "
                f"{sorted(level)} in module {number}{f' below {path}' if path else ''}."
            )
    made: dict[str, object] = {}
    for key in first:
        column = [level[key] for level in levels]
        leaves = [each for each in column if isinstance(each, Tensor)]
        if leaves:
            made[key] = _stacked_leaf(leaves, expand)
            continue
        inner = [each._kd_entries for each in column if isinstance(each, AbstractContainer)]
        made[key] = _stacked_parameters(inner, (*path, key), expand)
    return made


def _stacked_leaf(column: list[Tensor], expand: bool) -> Tensor:
    if any(map(is_lazy, column)):
        return stacked_uninitialized(column)
    if expand and all(leaf is column[0] for leaf in column):
        return column[0].expand(len(column), *column[0].shape)
    with torch.no_grad():
        stacked = torch.stack(column)
    if all(isinstance(leaf, nn.Parameter) for leaf in column):
        return nn.Parameter(stacked, requires_grad=column[0].requires_grad)
    return stacked.requires_grad_(any(leaf.requires_grad for leaf in column))
