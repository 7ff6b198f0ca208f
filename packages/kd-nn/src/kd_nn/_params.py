"""`TensorDictParams`: a container that is an `nn.Module`.

Each level is a module, its parameters, buffers and sub-modules are the entries, and nothing is kept
twice. So everything that torch does to modules (moving, optimising, `state_dict`, DDP, copies)
works on it without a line of code here, and dotted names come out as those of the module that the
container was made from. Results of operations on it (`params + 1`, `params.data`) are plain
`TensorDict`s. Files hold which tensors are parameters, and which of these are trained.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    NoReturn,
    Self,
    TypeAlias,
    TypeGuard,
    TypeVar,
    cast,
)

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kd_core import (
    FormatError,
    InvalidArgument,
    KdError,
    NestedKey,
    ShapeMismatch,
    TensorDict,
    TensorDictBase,
    TensorDictFuture,
    UnbatchedTensor,
    format_key,
)
from kd_core.extending import (
    Descriptor,
    Entry,
    StoredClass,
    add_class,
    describe,
    make_dense,
    public_in,
    register,
)
from kd_nn._modules.base import is_of_fsdp
from kd_nn._torch_private import unsaved_buffers

if TYPE_CHECKING:
    H = TypeVar("H", bound=Callable[..., object])
    Memo: TypeAlias = "dict[int, tuple[Entry, Entry]]"
    """Containers and tensors with the modules and buffers made of them, by their ids."""


GetHook: TypeAlias = "Callable[[TensorDictBase, Tensor], Tensor | None]"


def _without_graph(name: str) -> Callable[..., object]:
    """Return a method of containers that writes into parameters as an optimiser does."""
    method: Callable[..., object] = getattr(TensorDictBase, name)
    return functools.wraps(method)(torch.no_grad()(method))


def _mapping(name: str) -> Callable[..., object]:
    """Return a method that maps the values of parameters: its result is a plain container."""
    method: Callable[..., object] = getattr(TensorDictBase, name)

    @functools.wraps(method)
    def mapped(self: TensorDictParams, *args: object, **named: object) -> object:
        found = method(self, *args, **named)
        if isinstance(found, TensorDictFuture):
            return TensorDictFuture(found.futures, _values(found.resulting_td))
        return _values(found)

    return mapped


def _values(params: object) -> TensorDictBase:
    return cast(TensorDictParams, params).data.lock_()


def _in_levels(flat: Mapping[str, object]) -> dict[str, object]:
    """Return the tensors of a state dict in nested dicts, one for each part of their names."""
    levels: dict[str, object] = OrderedDict()
    for name, value in flat.items():
        level = levels
        *above, last = name.split(".")
        for part in above:
            level = cast("dict[str, object]", level.setdefault(part, OrderedDict()))
        level[last] = value
    return levels


def _dotted(state_dict: object) -> object:
    """Return a state dict without nested dicts, as a module reads it."""
    if not isinstance(state_dict, Mapping):
        return state_dict
    if not any(isinstance(value, Mapping) for value in state_dict.values()):
        return state_dict
    flat: dict[str, object] = {}
    for name, value in state_dict.items():
        inner = _dotted(value)
        if isinstance(inner, Mapping):
            flat |= {f"{name}.{below}": leaf for below, leaf in inner.items()}
        else:
            flat[name] = value
    return flat


def _casting(whole: Callable[..., object], part: Callable[..., object]) -> Callable[..., object]:
    """Return a cast of a module, in place; where a filter chooses, it makes a container.

    `num_threads` does nothing: it only tunes speed.
    """

    @functools.wraps(whole)
    def cast_leaves(
        self: TensorDictParams,
        *args: object,
        cast_filter: object = None,
        num_threads: int | None = None,
        **named: object,
    ) -> object:
        if cast_filter is None:
            moved = whole(self, *args, **named)
            if whole in _MOVES or any(map(_says_where, (*args, *named.values()))):
                _note_device(self)
            return moved
        plain = make_dense(dict(self._kd_entries), self._kd_desc.unlocked())
        return part(plain, *args, cast_filter=cast_filter, **named)

    return cast_leaves


def _keeping_kinds(apply: Callable[..., object]) -> Callable[..., object]:
    """Return what a module calls to change its tensors: an `nn.Buffer` stays itself.

    A device that is said stays true.
    """

    @functools.wraps(apply)
    def change(self: TensorDictParams, *args: object, **named: object) -> object:
        buffers = {key: old for key, old in self._buffers.items() if isinstance(old, nn.Buffer)}
        changed = apply(self, *args, **named)
        for key, old in buffers.items():
            new = self._buffers[key]
            if new is None or isinstance(new, nn.Buffer):
                continue
            try:  # as torch does it with parameters: an optimiser or a loss may hold them
                old.data = new.data
                self._buffers[key] = old
            except RuntimeError:  # of another kind of device
                self._buffers[key] = nn.Buffer(new, persistent=old.persistent)
        known = self._kd_desc.device
        if known is not None:
            found = {leaf.device for leaf in (*self.parameters(), *self.buffers())}
            if found and found != {known}:
                self._kd_describe_on(found.pop() if len(found) == 1 else None)
        return changed

    return change


_MOVES: Final = (nn.Module.cpu, nn.Module.cuda)


def _says_where(given: object) -> bool:
    return isinstance(given, (str, torch.device, Tensor)) or type(given) is int


def _note_device(params: TensorDictParams) -> None:
    """Set the device of all levels to the one where their tensors are."""
    found = {leaf.device for leaf in (*params.parameters(), *params.buffers())}
    if len(found) == 1:
        device = found.pop()
        for level in params.modules():
            if isinstance(level, TensorDictParams):
                level._kd_describe_on(device)


class TensorDictParams(TensorDictBase, nn.Module):  # type: ignore[misc]  # both have `type`
    """A container of parameters and buffers that is an `nn.Module`.

    Floating-point tensors become parameters, others an `nn.Buffer`. `float`, `double`, `half`,
    `bfloat16`, `to`, `requires_grad_`, `state_dict` and similar methods are those of a module: they
    work in place. An `UnbatchedTensor` is refused: a state dict holds tensors, and would not say
    which one has no batch dimensions. A container without batch dimensions holds tensors of any
    shape.

    Args:
        parameters: A container or (nested) mapping of tensors.
        no_convert: Whether tensors that are not an `nn.Parameter` become an `nn.Buffer`, but
            for those that need gradients, which stay what they are; `"skip"`: all stay.
        lock: Whether the container is locked: its values may change, its entries may not.
        **entries: Tensors by keyword in place of `parameters`, with `batch_size` and `device` as
            for `TensorDict`.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> params = TensorDictParams(TensorDict.from_module(net).clone())
        >>> list(params.state_dict()) == list(net.state_dict())
        True
        >>> with params.to_module(net):
        ...     net(torch.ones(2)).sum().backward()
        >>> params["0", "weight"].grad is None, net[0].weight.grad is None
        (False, True)
    """

    _descriptor: Descriptor
    _data: dict[str, Entry]
    _kd_order: dict[str, None]
    _get_hooks: OrderedDict[int, GetHook]
    no_convert: bool | Literal["skip"]

    def __init__(
        self,
        parameters: TensorDictBase | Mapping[str, object] | None = None,
        *,
        no_convert: bool | Literal["skip"] = False,
        lock: bool = False,
        **entries: object,
    ) -> None:
        if not isinstance(parameters, TensorDictBase) and hasattr(parameters, "named_parameters"):
            raise InvalidArgument(
                f"the parameters must be a mapping or a container, got the module "
                f"`{type(parameters).__name__}`. Write `TensorDictParams.of_module(module)`."
            )
        if entries and parameters is not None:
            raise InvalidArgument(
                f"entries by keyword cannot be combined with `parameters`, got "
                f"{', '.join(f'`{name}`' for name in entries)}. Put them into the container."
            )
        source = parameters
        if source is None:
            source = TensorDict(**entries)  # type: ignore[arg-type]  # checked by the class
        if not isinstance(source, TensorDictBase):
            source = TensorDict(source)
        self._kd_begin(source, no_convert)
        self._kd_fill(source, {})
        if lock:
            self.lock_()

    @classmethod
    def from_dict(
        cls,
        input_dict: Mapping[str, object],
        batch_size: Sequence[int] | int | None = None,
        device: torch.device | str | int | None = None,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        names: Sequence[str | None] | None = None,
    ) -> Self:
        """Build parameters from nested dicts: `TensorDictParams(TensorDict.from_dict(...))`.

        Args:
            input_dict: nested dicts of values.
            batch_size: as of `TensorDict.from_dict`, like the others.
            device: the device to which every entry is moved.
            auto_batch_size: infer the batch size.
            batch_dims: the largest number of batch dimensions to infer.
            names: the name of each batch dimension.

        Example:
            >>> import torch
            >>> params = TensorDictParams.from_dict({"w": torch.ones(2)})
            >>> [name for name, _ in params.named_parameters()]
            ['w']
        """
        return cls(
            TensorDict.from_dict(
                input_dict,
                batch_size,
                device,
                auto_batch_size=auto_batch_size,
                batch_dims=batch_dims,
                names=names,
            )
        )

    @classmethod
    def _kd_of_other_keys(cls) -> type[Self]:
        return cast("type[Self]", TensorDict)

    @classmethod
    def of_module(cls, module: nn.Module) -> Self:
        """Build a container of the parameters and buffers of a module, which keep their kind.

        Buffers that the module does not save are not in the state dict of the container either.

        Args:
            module: The module; its tensors are shared.

        Example:
            >>> norm = nn.BatchNorm1d(3)
            >>> params = TensorDictParams.of_module(norm)
            >>> [name for name, _ in params.named_buffers()]
            ['running_mean', 'running_var', 'num_batches_tracked']
        """
        return cls._kd_of_entries(TensorDict.from_module(module), module)

    @classmethod
    def _kd_of_entries(cls, entries: TensorDictBase, module: nn.Module | None) -> Self:
        """Build it of entries, which keep their kind; a module says which buffers are unsaved."""
        made = cls(entries, no_convert=True)
        if module is not None:
            made._kd_leave_unsaved(module)
        return made

    def register_get_post_hook(self, hook: GetHook) -> RemovableHandle:
        """Register a function that sees each tensor that is read by key: `get` or `params[key]`.

        Operations on the whole container, and `to_module`, use the entries as they are.

        Args:
            hook: Takes the container and the tensor; what it returns, unless None, is given out.

        Returns:
            A handle whose `remove` removes the hook.

        Example:
            >>> import torch
            >>> params = TensorDictParams({"w": torch.ones(2)})
            >>> handle = params.register_get_post_hook(lambda _, leaf: leaf.detach())
            >>> params["w"].requires_grad, next(params.parameters()).requires_grad
            (False, True)
        """
        if not callable(hook):
            raise InvalidArgument(
                f"`hook` must be a function of a container and a tensor, got {hook!r}."
            )
        handle = RemovableHandle(self._get_hooks)
        self._get_hooks[handle.id] = hook
        return handle

    def register_forward_pre_hook(
        self, hook: H, *, prepend: bool = False, with_kwargs: bool = False
    ) -> RemovableHandle:
        """Register a hook that runs before `forward`; see `nn.Module`."""
        if is_of_fsdp(hook):
            raise InvalidArgument(
                "a `TensorDictParams` has no `forward`, before which `fully_shard` would gather "
                "its parameters. Shard the module that holds it."
            )
        return nn.Module.register_forward_pre_hook(
            self, hook, prepend=prepend, with_kwargs=with_kwargs
        )

    if TYPE_CHECKING:
        state_dict = nn.Module.state_dict  # type: ignore[assignment]  # a module's: flat names
        from_tuple = TensorDict.from_tuple  # type: ignore[assignment]  # positions name no parameters
        from_pytree = TensorDict.from_pytree  # type: ignore[assignment]  # nor do those of a tree
        fromkeys = TensorDict.fromkeys  # type: ignore[assignment]  # nor does one value
    else:  # the other types are those of the base class

        def get(self, key: NestedKey, *default: object, **how: object) -> object:
            """Read the entry at `key`, or `default` where there is none, through the hooks."""
            return self._kd_hooked(super().get(key, *default, **how))

        def __getitem__(self, index: object) -> object:
            return self._kd_hooked(super().__getitem__(index))

        # Written as an optimiser writes parameters: the write is not part of a graph.
        apply_ = _without_graph("apply_")
        copy_ = _without_graph("copy_")
        zero_ = _without_graph("zero_")
        fill_ = _without_graph("fill_")
        set_ = _without_graph("set_")
        set_at_ = _without_graph("set_at_")
        update_ = _without_graph("update_")
        copy_at_ = _without_graph("copy_at_")
        update_at_ = _without_graph("update_at_")

        def clone(self, recurse: bool = True) -> object:
            """Return a copy that is a module itself: parameters with several keys stay one.

            Args:
                recurse: Whether the tensors are copied; else they are shared.
            """
            return _cloned(self, recurse, {})

        def copy(self) -> object:
            """Return a copy that is a module itself; its tensors are shared."""
            return _cloned(self, False, {})

        def replace(self, source: object = None, /, **entries: object) -> object:
            """Return parameters in which entries are replaced, as they are given; see `TensorDict`.

            Args:
                source: a mapping or container of the new entries.
                **entries: new entries as keywords.
            """
            made = super().replace(source, **entries)
            return made if made is self else type(self)._kd_of_entries(made, None)

        def share_memory_(self) -> object:
            """Move the tensors to shared memory; as a module, it is not locked then."""
            locked = self.is_locked
            super().share_memory_()
            return self if locked else self.unlock_()

        def is_shared(self) -> bool:
            """Return whether all tensors are in shared memory."""
            tensors = [*self.parameters(), *self.buffers()]
            return all(map(Tensor.is_shared, tensors)) if tensors else bool(super().is_shared())

        __copy__ = copy
        memmap = _mapping("memmap")
        memmap_like = _mapping("memmap_like")

        def state_dict(self, *args: object, flatten: bool = True, **options: object) -> object:
            """Return the tensors by their dotted names, as those of a module.

            Args:
                *args: As for a module.
                flatten: `False`: nested containers become nested dicts instead.
                **options: As for a module.
            """
            found = nn.Module.state_dict(self, *args, **options)
            return found if flatten else _in_levels(found)

        def load_state_dict(
            self, state_dict: object, *args: object, from_flatten: object = None, **options: object
        ) -> object:
            """Copy the tensors of a state dict into these, as a module does; return self.

            Args:
                state_dict: Tensors by their dotted names, or nested dicts of them.
                *args: As for a module.
                from_flatten: Has no effect: both forms are known by their values.
                **options: As for a module.
            """
            nn.Module.load_state_dict(self, _dotted(state_dict), *args, **options)
            return self

        @torch.no_grad()
        def lerp_(self, end: object, weight: object) -> object:
            """Move towards another container, in place: a soft update of a target network.

            Integers, such as counts of batches, cannot lie between: they take the values of `end`.
            A tensor with several names moves once, towards the value of its first name.
            """
            whole, again = _apart(self.items(True, True))
            if not (whole or again) or not isinstance(end, TensorDictBase):
                return super().lerp_(end, weight)
            counts, latest = self.select(*whole), end.select(*whole)
            for key, count in counts.items(True, True):
                if count.shape != latest[key].shape:
                    raise ShapeMismatch(
                        f"{format_key(key)} must have one shape in both containers, got "
                        f"{tuple(count.shape)} and {tuple(latest[key].shape)}."
                    )
            apart = *whole, *again
            if isinstance(weight, TensorDictBase):
                weight = weight.exclude(*apart)
            self.exclude(*apart).lerp_(end.exclude(*apart), weight)
            counts.update_(latest)
            return self

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes without the references to what holds it locked."""
        return {name: each for name, each in vars(self).items() if name != "_kd_holders"}

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Copy all levels, unlocked, as of every container."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        new._kd_describe(describe(self._descriptor.batch, self._descriptor.device))
        return new

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; a tensor with the name of one that is there becomes an entry."""
        if name in _ATTRIBUTES and isinstance(value, Tensor):
            self._kd_set_entry(name, value)
            return
        if isinstance(value, Tensor) and isinstance(self._buffers.get(name), nn.Buffer):
            value = _buffer_of(value, name not in self._non_persistent_buffers_set)
        nn.Module.__setattr__(self, name, value)  # type: ignore[arg-type]  # any value

    def _kd_hooked(self, found: object) -> object:
        if isinstance(found, Tensor):
            for hook in self._get_hooks.values():
                result = hook(self, found)
                found = found if result is None else result
        return found

    @property
    def _kd_entries(self) -> Mapping[str, Entry]:
        parameters, buffers, modules = self._parameters, self._buffers, self._modules
        # The modules are containers.
        entries: dict[str, Any] = {**parameters, **buffers, **modules, **self._data}
        count = len(entries)
        if count not in (len(parameters), len(buffers), len(modules)):
            order = self._kd_order  # of several kinds; else they are in their order anyway
            entries = {key: entries[key] for key in order if key in entries} | entries
        for leaf in entries.values():
            if leaf is None:  # as torch notes a parameter that was taken away
                return {key: leaf for key, leaf in entries.items() if leaf is not None}
        return entries

    @property
    def _kd_desc(self) -> Descriptor:
        return self._descriptor

    def _kd_describe(self, desc: Descriptor) -> None:
        object.__setattr__(self, "_descriptor", desc)  # torch would look for tensors

    def _kd_set_entry(self, key: str, value: Entry) -> None:
        home, entry = self._kd_home_of(key, value)
        unsaved = home == "_buffers" and (
            not value.persistent
            if isinstance(value, nn.Buffer)
            else key in self._non_persistent_buffers_set
        )
        moved = False
        for name in _HOMES:
            store: dict[str, Entry] = getattr(self, name)
            if name == home:
                store[key] = entry
            elif key in store:
                del store[key]
                moved = True
        self._kd_order.setdefault(key)
        if moved:  # to its place among those that are there: see `_kd_entries`
            store = getattr(self, home)
            for each in [each for each in self._kd_order if each in store]:
                store[each] = store.pop(each)
        if unsaved:
            self._non_persistent_buffers_set.add(key)
        else:
            self._non_persistent_buffers_set.discard(key)

    def _kd_home_of(self, key: str, value: Entry) -> tuple[str, Entry]:
        """Return the name of the dict that stores an entry, and the entry converted for it."""
        if isinstance(value, TensorDictParams):
            return "_modules", value
        if isinstance(value, TensorDictBase):
            return "_modules", TensorDictParams(value, no_convert=self.no_convert)
        if isinstance(value, UnbatchedTensor):
            raise InvalidArgument(
                f"entry {format_key(key)} must be a tensor or data to be stored in a module, got "
                "an `UnbatchedTensor`, which a state dict would not restore. Store its `data` in a "
                "container without batch dimensions."
            )
        if not isinstance(value, Tensor):
            return "_data", value
        if isinstance(value, nn.Parameter):
            return "_parameters", value
        if isinstance(value, nn.Buffer):
            return "_buffers", value
        if self._kd_becomes_buffer(value):
            return "_buffers", _buffer_of(value, key not in self._non_persistent_buffers_set)
        return "_parameters", nn.Parameter(value.detach())

    def _kd_becomes_buffer(self, value: Tensor) -> bool:
        """Return whether a tensor is stored as a buffer that is neither one nor a parameter yet."""
        if isinstance(value, (nn.Parameter, nn.Buffer)):
            return False
        return bool(self.no_convert) or not value.is_floating_point()

    def _kd_begin(self, like: TensorDictBase, no_convert: bool | Literal["skip"]) -> None:
        """Set what a level has before its entries; batch size and device are those of another."""
        super().__init__()  # of a module; dynamo traces no other way to call it
        start: dict[str, object] = {
            "_descriptor": describe(tuple(like.batch_size), like.device),
            "_data": {},
            "_kd_order": {},
            "_get_hooks": OrderedDict(),
            "no_convert": no_convert,
        }
        for name, value in start.items():  # no tensors or modules, for which torch would look
            object.__setattr__(self, name, value)

    def _kd_fill(self, source: TensorDictBase, memo: Memo) -> None:
        """Store the entries of a container; one that has several keys becomes one module."""
        for key, value in source._kd_entries.items():
            if isinstance(value, TensorDictBase) and not isinstance(value, TensorDictParams):
                self._kd_set_entry(key, _level_of(value, self.no_convert, memo))
            elif isinstance(value, Tensor) and self._kd_becomes_buffer(value):
                if self.no_convert != "skip":
                    known = memo.setdefault(id(value), (value, _buffer_of(value)))
                    value = cast(Tensor, known[1])
                self._buffers[key] = value
                self._kd_order[key] = None
            else:
                self._kd_set_entry(key, value)
        if isinstance(source, TensorDictParams):
            self._non_persistent_buffers_set.update(unsaved_buffers(source))

    def _kd_leave_unsaved(self, module: nn.Module) -> None:
        """Exclude from the state dict what a module of these entries excludes from its own."""
        unsaved = unsaved_buffers(module)
        if unsaved:
            self._non_persistent_buffers_set.update(unsaved & set(self._buffers))
        for name, inner in self._modules.items():
            member = module._modules.get(name)
            if member is not None and isinstance(inner, TensorDictParams):
                inner._kd_leave_unsaved(member)

    def _kd_del_entry(self, key: str) -> None:
        self._non_persistent_buffers_set.discard(key)
        self._kd_order.pop(key, None)
        for store in (self._parameters, self._buffers, self._modules, self._data):
            if key in store:
                del store[key]

    def _kd_like(self, entries: dict[str, Entry], desc: Descriptor) -> Self:
        # A plain container: a result computed from parameters is not a parameter.
        return cast("Self", make_dense(entries, desc))

    def _kd_with_descriptor(self, desc: Descriptor) -> Self:
        plain = make_dense(dict(self._kd_entries), self._kd_desc)
        return cast("Self", plain._kd_with_descriptor(desc))

    def _kd_describe_on(self, device: torch.device | None) -> None:
        old = self._descriptor
        self._descriptor = describe(old.batch, device).with_lock(old.lock, old.held)

    def __hash__(self) -> int:  # type: ignore[override]  # a container compares by element
        # torch keeps modules in sets.
        return id(self)

    __dir__ = nn.Module.__dir__  # with the names of tensors

    requires_grad_ = nn.Module.requires_grad_
    if not TYPE_CHECKING:  # those of a module, in place; to type checkers those of a container
        _apply = _keeping_kinds(nn.Module._apply)
        to = _casting(nn.Module.to, TensorDictBase.to)
        cpu = _casting(nn.Module.cpu, TensorDictBase.cpu)
        cuda = _casting(nn.Module.cuda, TensorDictBase.cuda)
        type = _casting(nn.Module.type, TensorDictBase.type)
        zero_grad = TensorDictBase.zero_grad
        float = _casting(nn.Module.float, TensorDictBase.float)
        double = _casting(nn.Module.double, TensorDictBase.double)
        half = _casting(nn.Module.half, TensorDictBase.half)
        bfloat16 = _casting(nn.Module.bfloat16, TensorDictBase.bfloat16)


_HOMES: Final = ("_parameters", "_buffers", "_modules", "_data")
"""The dicts that hold the entries of one level."""

_ATTRIBUTES: Final = frozenset({"_data", "_descriptor", "_get_hooks", "_kd_order", "no_convert"})


def _cloned(
    source: TensorDictParams, copies: bool, memo: dict[int, Tensor | TensorDictParams]
) -> TensorDictParams:
    """Return a copy of one level; what has several keys is one thing in the copy, too."""
    made = type(source)(no_convert=source.no_convert)
    memo[id(source)] = made
    made._kd_describe(describe(tuple(source.batch_size), source.device))
    for key, entry in source._kd_entries.items():
        known: Entry | None = memo.get(id(entry))
        if known is None and isinstance(entry, TensorDictParams):
            known = _cloned(entry, copies, memo)
        elif known is None and isinstance(entry, Tensor) and copies:
            if isinstance(entry, nn.Parameter):
                known = nn.Parameter(entry.detach().clone(), entry.requires_grad)
            elif isinstance(entry, nn.Buffer):
                known = _buffer_of(entry.clone(), entry.persistent)
            else:
                known = entry.clone()
            memo[id(entry)] = known
        store = next(s for s in _stores(source) if key in s)
        at = _stores(source).index(store)
        _stores(made)[at][key] = entry if known is None else known
        made._kd_order[key] = None
    unsaved_buffers(made).update(unsaved_buffers(source))
    return made


def _stores(params: TensorDictParams) -> list[dict[str, object]]:
    """Return the dicts that hold the entries of one level."""
    return [getattr(params, name) for name in _HOMES]


def _is_whole(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and not (leaf.is_floating_point() or leaf.is_complex())


def _buffer_of(value: Tensor, persistent: bool = True) -> Tensor:
    """Return a tensor as an `nn.Buffer`; this would cut one that needs gradients from its graph."""
    if value.requires_grad or isinstance(value, (nn.Buffer, nn.Parameter)):
        return value
    return nn.Buffer(value, persistent=persistent)


def _level_of(
    source: TensorDictBase, no_convert: bool | Literal["skip"], memo: Memo
) -> TensorDictParams:
    if id(source) not in memo:
        made = TensorDictParams.__new__(TensorDictParams)
        made._kd_begin(source, no_convert)
        made._kd_fill(source, memo)
        memo[id(source)] = source, made  # with the source, whose id no other may have
    return cast(TensorDictParams, memo[id(source)][1])


def _apart(leaves: Iterable[tuple[NestedKey, object]]) -> tuple[list[NestedKey], list[NestedKey]]:
    """Return the keys of integers, and the further keys of tensors that have several."""
    whole, again, seen = list[NestedKey](), list[NestedKey](), set[int]()
    for key, leaf in leaves:
        if _is_whole(leaf):
            whole.append(key)
        elif id(leaf) in seen:
            again.append(key)
        seen.add(id(leaf))
    return whole, again


register("params_of", TensorDictParams._kd_of_entries)


_FIELDS: Final = ["no_convert", "parameters", "frozen"]


def state_of(params: TensorDictParams) -> dict[str, object]:
    """Return what a file keeps of one level beside its entries."""
    named = params._parameters
    frozen = [key for key, leaf in named.items() if leaf is not None and not leaf.requires_grad]
    values: tuple[object, ...] = params.no_convert, list(named), frozen
    state = dict(zip(_FIELDS, values, strict=True))
    unsaved = [key for key in params._buffers if key in unsaved_buffers(params)]
    return state | ({"unsaved": unsaved} if unsaved else {})


def build(entries: dict[str, Entry], desc: Descriptor, state: object) -> TensorDictParams:
    """Build one level from what a file holds.

    Raises:
        FormatError: If the state is not that of these entries.
    """
    match state:
        case {
            "no_convert": (bool() | "skip") as no_convert,
            "parameters": list(named),
            "frozen": list(frozen),
            **further,
        }:
            unsaved = further.get("unsaved", [])  # left out where there is none
        case _:
            _refuse(state)
    leaves = [key for key, value in entries.items() if isinstance(value, Tensor)]
    buffers = [key for key in leaves if key not in named]
    if not (_are_in(frozen, named) and _are_in(named, leaves) and _are_in(unsaved, buffers)):
        _refuse(state)
    made = TensorDictParams(no_convert=no_convert)
    for key, value in entries.items():
        if key in named and isinstance(value, Tensor):
            made._parameters[key] = nn.Parameter(value, requires_grad=key not in frozen)
        elif isinstance(value, Tensor):
            made._buffers[key] = _buffer_of(value, key not in unsaved)
        else:
            made._kd_set_entry(key, value)
        made._kd_order[key] = None
    unsaved_buffers(made).update(unsaved)
    made._kd_describe(desc)
    return made


def _are_in(names: object, known: list[str]) -> TypeGuard[list[str]]:
    return isinstance(names, list) and all(name in known for name in names)


def _refuse(state: object) -> NoReturn:
    listed = ", ".join(f"`{name}`" for name in _FIELDS)
    raise FormatError(
        f"{str(state)[:80]!r} is not the state of a `TensorDictParams` with the entries that the "
        f"file gives it: expected a dict with {listed}. Restore the file from a copy."
    )


add_class(StoredClass("kd_nn.TensorDictParams", 1, TensorDictParams, build, state_of))


# Modules that take their parameters as an argument.
#
# A functional module is the same object with another `forward`: it looks for a container of
# parameters among its arguments, swaps them in during the call, and runs. Its sub-modules are
# functional too. `make_functional` removes the parameters; `get_functional` keeps them.

M = TypeVar("M", bound=nn.Module)


@public_in("kd_nn")
class ParametersMissing(KdError, TypeError):
    """A functional module was called without parameters."""


@public_in("kd_nn._pickled")
class FunctionalForward:
    """The `forward` of a functional module.

    Args:
        module: The module.
        names: Its own parameters and buffers that were removed from it.
    """

    __slots__ = ("module", "names")
    takes_parameters: Final = True

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        self.module, self.names = module, names

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the module with the parameters among the arguments."""
        module = self.module
        forward = partial(type(module).forward, module)
        params = kwargs.pop("params", None)
        if params is None:
            lacking = _lacking(module)
            if not lacking:
                return forward(*args, **kwargs)
            params, args = _last(module, args, lacking)
        if not isinstance(params, TensorDictBase):
            raise InvalidArgument(
                f"`params` must be a container of parameters, got {type(params).__name__}."
            )
        with params.to_module(module):
            return forward(*args, **kwargs)


def _lacking(module: nn.Module) -> list[str]:
    """Return the dotted names of what was removed and not filled in by an enclosing call."""
    found: list[str] = []
    for path, member in module.named_modules():
        own = member.__dict__.get("forward")
        for name in own.names if isinstance(own, FunctionalForward) else ():
            if _store_of(member, name).get(name) is None:
                found.append(f"{path}.{name}" if path else name)
    return found


def _last(
    module: nn.Module, args: tuple[object, ...], lacking: list[str]
) -> tuple[TensorDictBase, tuple[object, ...]]:
    """Split off the last positional argument, which holds the parameters."""
    names = {name.partition(".")[0] for name in lacking}
    params = args[-1] if args else None
    if isinstance(params, TensorDictBase) and not names.isdisjoint(list(params.keys())):
        return params, args[:-1]
    raise ParametersMissing(
        f"this `{type(module).__name__}` is functional and has no parameters of its own. Call it "
        f"with a container of {', '.join(f'`{name}`' for name in lacking)}, as last argument or "
        "`params=`, or restore its parameters with `repopulate_module`."
    )


def make_functional(module: nn.Module) -> TensorDict:
    """Remove the parameters from a module, in place, and make it and its sub-modules functional.

    Afterwards `module(*args, params)` and `module(*args, params=params)` run it with a container
    that is nested like the module; so do its sub-modules with their part of the container.

    Args:
        module: The module; it is changed.

    Returns:
        Its parameters and buffers, together.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
        >>> params = make_functional(model)
        >>> x = torch.randn(10, 3)
        >>> out = model(x, params=params)
        >>> torch.equal(out, model[1](model[0](x, params["0"]), params["1"]))
        True
        >>> list(model.parameters())
        []
    """
    params = TensorDict.from_module(module)
    for member in module.modules():
        known = member.__dict__.get("forward")
        names = list(known.names) if isinstance(known, FunctionalForward) else []
        for store in (member._parameters, member._buffers):
            filled = [name for name, tensor in store.items() if tensor is not None]
            names += [name for name in filled if name not in names]
            store.update(dict.fromkeys(filled))
        # Assigned, not written into the dict: keyed modules invalidate their plans on assignment.
        member.forward = FunctionalForward(member, tuple(names))
    return params


def get_functional(module: M) -> M:
    """Convert a module to a functional one, in place, but keep its parameters.

    It runs as before, and with other parameters when called with `params=` (by keyword only).

    Args:
        module: The module; it is changed.

    Returns:
        The module.

    Example:
        >>> import torch
        >>> model = get_functional(nn.Linear(3, 4))
        >>> ones = TensorDict({"bias": torch.ones(4)})
        >>> bool((model(torch.ones(3), params=ones) != model(torch.ones(3))).any())
        True
    """
    return repopulate_module(module, make_functional(module))


def is_functional(module: nn.Module) -> bool:
    """Return whether a module takes its parameters as an argument.

    Example:
        >>> is_functional(nn.Linear(1, 1)), is_functional(get_functional(nn.Linear(1, 1)))
        (False, True)
    """
    return isinstance(module.__dict__.get("forward"), FunctionalForward)


def repopulate_module(module: M, tensordict: TensorDictBase) -> M:
    """Restore parameters of a module from a container, in place.

    A tensor that replaces a parameter becomes one, unless it was computed from others.

    Args:
        module: The module; it is changed.
        tensordict: Nested like the module.

    Returns:
        The module.

    Raises:
        KeyNotFound: If an entry matches nothing in the module; then nothing changes.

    Example:
        >>> model = nn.Linear(3, 4)
        >>> params = make_functional(model)
        >>> repopulate_module(model, params).weight is params["weight"]
        True
    """
    with tensordict.to_module(module):
        """Entering the context checks that every entry has its place."""
    _fill(module, tensordict)
    return module


def _fill(module: nn.Module, tensordict: TensorDictBase) -> None:
    entries: list[tuple[str, Tensor | TensorDictBase]] = [
        (str(name), value) for name, value in tensordict.items()
    ]
    for key, value in entries:
        if not isinstance(value, Tensor):
            child = module._modules[key]
            assert child is not None
            _fill(child, value)
            continue
        store = _store_of(module, key)
        if store is module._parameters and value.is_leaf:
            if not isinstance(value, nn.Parameter):
                value = nn.Parameter(value, requires_grad=value.requires_grad)
            setattr(module, key, value)  # recurrent layers record what is assigned
        else:
            store[key] = value


def _store_of(module: nn.Module, name: str) -> dict[str, Tensor | None]:
    home = "_parameters" if name in module._parameters else "_buffers"
    store: dict[str, Tensor | None] = module.__dict__[home]  # not `cast`: dynamo would copy it
    return store
