"""Installing the entries of a container as the parameters of a module, for good or in a `with`.

A module looks its parameters up in two dicts per level (`_parameters`, `_buffers`), so running it
with other parameters is exchanging values of these dicts. Which names of which level take which
entries is found once per module and kept (a *route*), then verified while it is walked: a replaced
sub-module or a changed set of keys makes a new one. "call with params" in the benchmarks shows what
that gains over `torch.func.functional_call`. A route refers to modules weakly and to their dicts
not at all: a sub-module may lead back to the root (a hook that is a bound method does), and then a
module that was exchanged once would live for ever.

Weights that a module shares are written together: one sub-module under two names takes the
entries of the first, one parameter under two names takes the first tensor. What is shared, and
which name is the first, is what the module says when it is borrowed. Recurrent layers of torch keep
a second list of their weights, which is rebuilt. While a module is borrowed, another thread that
wants to borrow it gets an error. A call cannot know whether its result is used in a `with`
statement, so the module counts as borrowed until the result is left, read or dropped.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.rnn import RNNBase
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from kd_core import _registry as registry
from kd_core._descriptor import describe
from kd_core._errors import (
    InvalidArgument,
    KdError,
    KeyNotFound,
    MissingDependency,
    ShapeMismatch,
    listed,
    wrong_type,
)
from kd_core._keys import format_key, nearest_key, plain_str
from kd_core._leaves.loops import entries_of
from kd_core._protocol import AbstractContainer
from kd_core._torch_private import (
    add_batch_dim,
    make_subclass,
    maybe_current_level,
    rebuild_weights,
)

if TYPE_CHECKING:
    from typing import Self

    from kd_core._keys import KeyPath
    from kd_core._nodes import Entries, Entry, Node

    Store: TypeAlias = dict[str, Tensor | None]
    Names: TypeAlias = list[str]
    Slot: TypeAlias = tuple[int, str]
    """A row of a route, and a name in the dict that it stands for."""
    Row: TypeAlias = tuple[int, str, weakref.ref[nn.Module], int, str, Names]
    Moved: TypeAlias = tuple[nn.Module, Store, Store, Store]
    """A module, and what its parameters, its buffers and some of its other attributes were."""
    Taken: TypeAlias = tuple[list[tuple[Store, Store]], list[RNNBase], list[Moved]]
    Level: TypeAlias = tuple[KeyPath, nn.Module, dict[str, Tensor]]
    """A module, its path, and the tensors that it takes."""
    Change: TypeAlias = tuple[Store, str, Tensor | None, Tensor, KeyPath]
    """Where a module keeps a tensor, which it is, what takes its place; the path of its level."""


_PLAIN: Final = (Tensor, nn.Parameter)


class ModuleBusy(KdError, RuntimeError):
    """A module whose parameters are exchanged cannot be exchanged again here."""


class _ReadByRow(Exception):
    """A module must read its row of an entry, so it cannot hold the entry as it is."""


class Modules(AbstractContainer):
    """Exchange with the parameters of a module."""

    __slots__ = ()

    def to_module(
        self,
        module: nn.Module,
        *,
        inplace: bool | None = None,
        return_swap: bool = True,
        swap_dest: AbstractContainer | None = None,
        use_state_dict: bool = False,
        non_blocking: bool = False,
        preserve_module_state: bool = True,
        memo: None = None,
    ) -> Self:
        """Install the entries of this container as the parameters and buffers of a module.

        Without `with` the module keeps them. `with td.to_module(module):` runs a block with them:
        at its end, also after an error, the module is as before. Entries are matched by name with
        parameters, buffers and sub-modules; some of them may be left out. A tensor without
        gradients that takes the place of a parameter is wrapped in one, which shares its memory.
        Blocks nest. Shared weights take one value, that of their first name. A module that other
        threads use at the same time must be copied: a second thread that exchanges its parameters
        during a block gets an error, one that calls it sees the exchanged parameters.

        Args:
            module: The module.
            inplace: Whether values are copied into the tensors of the module.
            return_swap: Whether the result is returned; else there is none.
            swap_dest: A container that receives the tensors that were in the module, and is
                returned.
            use_state_dict: Whether the module loads a state dict, with its hooks; it takes the
                tensors of the container then, as by `load_state_dict(assign=True)`.
            non_blocking: Whether copies to another device may be asynchronous.
            preserve_module_state: Whether parameters stay parameters, and buffers buffers. If not,
                a tensor in the place of a parameter becomes a plain attribute, which does not
                train, and a parameter in the place of a buffer a parameter.
            memo: Not used.

        Returns:
            A container of the tensors that were in the module, which is also the context.

        Raises:
            InvalidArgument: if the module is a scripted one.
            KeyNotFound: if an entry matches nothing in the module; nothing changes.
            ModuleBusy: if another thread is in such a block of the module.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> net = torch.nn.Linear(2, 1)
            >>> ones = TensorDict({"weight": torch.ones(1, 2), "bias": torch.ones(1)})
            >>> with ones.to_module(net):
            ...     net(torch.tensor([1.0, 2.0])).item()
            4.0
            >>> before = ones.to_module(net)
            >>> net.bias.item(), list(before.keys())
            (1.0, ['weight', 'bias'])
        """
        if memo is not None:
            raise InvalidArgument("`memo` of `to_module` must be None. Leave it out.")
        kind = type(module)
        if not isinstance(module, nn.Module):
            raise InvalidArgument(f"`module` must be an `nn.Module`, got {kind.__name__}.")
        if inplace or use_state_dict:
            scope: Scope = CopyingScope(self._kd_entries, module, use_state_dict, non_blocking)
        elif is_compiling():
            scope = _exchange_traced(self._kd_entries, module)
        elif not preserve_module_state and _changes_kinds(self._kd_entries, module):
            scope = MovingScope(self._kd_entries, module, False)
        else:
            try:
                scope = ModuleScope(self._kd_entries, module)
            except (KeyNotFound, _ReadByRow):  # unless it is a plain attribute
                scope = MovingScope(self._kd_entries, module, preserve_module_state)
        if not return_swap:
            scope.settle()
            return None  # type: ignore[return-value]  # asked for
        swap: Self = registry.swap_of(scope)
        if swap_dest is None:
            return swap
        for key, entry in swap._kd_entries.items():
            swap_dest._kd_set_entry(key, entry)
        return cast("Self", swap_dest)


class Scope(Protocol):
    """An exchange that was made, and can be undone."""

    def enter(self) -> None:
        """Enter a block with the exchanged tensors."""

    def leave(self) -> None:
        """Restore the module."""

    def settle(self) -> None:
        """Note that the exchange is not about to be a block."""

    def replaced(self) -> dict[str, object]:
        """Return the tensors that were in the module, nested."""


class TracedScope:
    """An exchange that a tracer follows."""

    __slots__ = ("_changes", "_is_made", "_kd_entries", "_recurrent")

    _changes: list[Change]
    _is_made: bool
    _kd_entries: Entries
    _recurrent: list[RNNBase]

    def enter(self) -> None:
        """Enter a block with the exchanged tensors; exchange them again after an earlier block."""
        if not self._is_made:
            for store, name, _, new, _ in self._changes:
                store[name] = new
            self._rebuild()

    def leave(self) -> None:
        """Restore the module."""
        for store, name, old, _, _ in self._changes:
            store[name] = old
        self._is_made = False
        self._rebuild()

    def _rebuild(self) -> None:
        for member in self._recurrent:
            rebuild_weights(member)

    def settle(self) -> None:
        """Do nothing: the module is not borrowed."""

    def replaced(self) -> dict[str, object]:
        """Return the tensors that were in the module, nested."""
        made: dict[str, object] = {}
        for _, name, old, _, path in self._changes:
            _set_nested(made, (*path, name), old)
        return _like_entries(self._kd_entries, made)


class ModuleScope:
    """An exchange of the tensors of a module by those of a container."""

    __slots__ = ("_borrowed", "_first", "_kd_entries", "_loan", "_module", "_pending")

    def __init__(self, entries: Entries, module: nn.Module) -> None:
        self._kd_entries, self._module = entries, module
        self._pending: Taken | None = None
        self._borrowed: list[Taken] = []
        loan = _LOANS.get(id(module))
        if loan is None or loan.module() is not module:
            loan = _new_loan(module)
        self._loan: _Loan | None = loan
        self._pending = self._exchange(loan)
        self._first = loan.route, self._pending

    def _exchange(self, loan: _Loan) -> Taken:
        module = self._module
        if not loan.acquire():
            raise ModuleBusy(
                f"another thread runs this `{type(module).__name__}` with exchanged parameters. "
                "Give each thread its own copy (`copy.deepcopy(module)`), or take turns."
            )
        try:
            return self._install(loan)
        except BaseException:
            loan.release()
            raise

    def _install(self, loan: _Loan) -> Taken:
        taken = loan.route.exchange(self._kd_entries, self._module)
        if taken is None:
            loan.route = _Route(self._kd_entries, self._module)
            taken = loan.route.exchange(self._kd_entries, self._module)
            assert taken is not None
        return taken

    def enter(self) -> None:
        """Enter a block with the exchanged tensors; exchange them again after an earlier block."""
        loan = self._loan
        assert loan is not None
        taken, self._pending = self._pending, None
        if taken is None:
            taken = self._exchange(loan)
        self._borrowed.append(taken)
        loan.stack.append(taken)

    def leave(self) -> None:
        """Restore the module."""
        loan = self._loan
        assert loan is not None
        taken = self._borrowed.pop()
        if loan.stack[-1] is not taken:
            raise ModuleBusy(
                f"`to_module` blocks of this `{type(self._module).__name__}` must end in reverse "
                "order of their begin; interleaved tasks need a copy of the module each."
            )
        loan.stack.pop()
        _restore(taken)
        loan.release()

    def settle(self) -> None:
        """Note that the exchange is not about to be a block."""
        if self._pending is not None and self._loan is not None:
            self._pending = None
            self._loan.release()

    def __del__(self) -> None:
        if getattr(self, "_pending", None) is not None:
            self.settle()

    def replaced(self) -> dict[str, object]:
        """Return the tensors that were in the module, nested."""
        route, taken = self._first
        levels: list[dict[str, Any]] = []
        for (above, key, *_), (_, before) in zip(route.rows, taken[0], strict=True):
            levels.append({} if above < 0 or key not in levels[above] else levels[above][key])
            if above >= 0:
                levels[above][key] = levels[-1]
            elif len(levels) > 1:
                levels[-1] = levels[0]
            levels[-1].update(before)
        return _like_entries(self._kd_entries, levels[0] if levels else {})


class MovingScope(ModuleScope):
    """An exchange after which a module holds each tensor as it holds one that is assigned to it.

    It changes which names are parameters, so it keeps no route.
    """

    __slots__ = ("_levels", "_moved", "_preserves", "_take_back")

    def __init__(self, entries: Entries, module: nn.Module, preserves: bool) -> None:
        self._preserves = preserves
        self._take_back: list[Callable[[], None]] = []
        super().__init__(entries, module)

    def _install(self, loan: _Loan) -> Taken:
        levels: list[Level] = []
        _find_levels(self._kd_entries, self._module, (), levels)
        moved: dict[nn.Module, Moved] = {}
        self._levels, self._moved = levels, moved
        first: dict[int, Tensor] = {}
        waiting: dict[nn.Module, dict[str, StackedUninitialized]] = {}
        for _, module, given in levels:
            attributes: Store = module.__dict__
            parameters, buffers = _stores_of(module)
            if module not in moved:
                moved[module] = (module, dict(parameters), dict(buffers), {})
            before = moved[module][3]
            # A container has no plain attributes.
            elsewhere = buffers if isinstance(module, AbstractContainer) else attributes
            for name, new in given.items():
                if name in before:
                    continue  # a sub-module under two names takes the entries of the first
                before[name] = attributes.get(name)
                old = _held_by(moved[module], name)
                if old is not None:
                    new = first.setdefault(id(old), new)
                if self._preserves and type(new) is Tensor and name in parameters:
                    new = _as_parameter(new, old)
                elif self._preserves and type(new) is nn.Parameter and name in buffers:
                    new = new.view_as(new)
                home = buffers if name in buffers else elsewhere
                if _is_parameter(new):
                    home = parameters
                for other in (parameters, buffers, attributes):
                    if other is not home:
                        other.pop(name, None)
                home[name] = new
                if isinstance(new, StackedUninitialized) and new._kd_level is not None:
                    waiting.setdefault(module, {})[name] = new
        self._take_back = [read_by_row(*each) for each in waiting.items()]
        recurrent = [module for module in moved if isinstance(module, RNNBase)]
        for module in recurrent:
            rebuild_weights(module)
        return [], recurrent, list(moved.values())

    def leave(self) -> None:
        """Restore the module."""
        for take_back in self._take_back:
            take_back()
        super().leave()

    def replaced(self) -> dict[str, object]:
        """Return the tensors that were in the module, nested."""
        made: dict[str, object] = {}
        for path, module, given in self._levels:
            for name in given:
                _set_nested(made, (*path, name), _held_by(self._moved[module], name))
        return _like_entries(self._kd_entries, made)


def _find_levels(entries: Entries, module: nn.Module, path: KeyPath, levels: list[Level]) -> None:
    """Add a level for the module that takes some entries, and one for each module below."""
    given: dict[str, Tensor] = {}
    levels.append((path, module, given))
    attributes = module.__dict__
    for name in _in_order(entries, _names_of(module)):
        entry = entries[name]
        if isinstance(entry, Tensor):
            if not isinstance(attributes.get(name), Tensor):
                _home_of(module, name, path)
            given[name] = entry
        else:
            _find_levels(*_child(module, name, entry, path), (*path, name), levels)


def _held_by(moved: Moved, name: str) -> Tensor | None:
    """Return the tensor that a module had under a name."""
    _, parameters, buffers, attributes = moved
    return next((held[name] for held in (parameters, buffers) if name in held), attributes[name])


def _is_parameter(tensor: Tensor) -> bool:
    kind = type(tensor)  # a plain tensor is none; torch asks others in Python
    return kind is nn.Parameter or (kind is not Tensor and isinstance(tensor, nn.Parameter))


def _changes_kinds(entries: Entries, module: nn.Module) -> bool:
    """Return whether some entry cannot take its place as a parameter, or as a buffer."""
    for name, entry in entries.items():
        if isinstance(entry, Tensor):
            if _is_parameter(entry) is not (name in module._parameters):
                return True
            continue
        inner, child = entries_of(entry), module._modules.get(name)
        if inner is not None and child is not None and _changes_kinds(inner, child):
            return True
    return False


def _like_entries(entries: Entries, found: dict[str, Any]) -> dict[str, object]:
    """Return nested tensors in the order of the entries that took their place."""
    made: dict[str, object] = {}
    for key, entry in entries.items():
        if key not in found:
            continue
        inner = found[key]
        below = None if isinstance(entry, Tensor) else entries_of(entry)
        made[key] = inner if below is None else _like_entries(below, inner)
    return made


def _check_shape(path: KeyPath, value: Tensor, own: Tensor) -> None:
    """Refuse a value that cannot be copied into a tensor of a module, before any is copied."""
    if value.shape == own.shape:
        return
    try:
        torch.broadcast_to(value, own.shape)
    except RuntimeError:
        raise ShapeMismatch(
            f"entry {format_key(path)} does not fit the module: its shape must be "
            f"{tuple(own.shape)}, got {tuple(value.shape)}. Leave out `inplace=True` to put other "
            "tensors into the module."
        ) from None


class CopyingScope:
    """A copy of values into the tensors of a module, which has a copy of its own to restore."""

    __slots__ = ("_before", "_by_state", "_fresh", "_kd_entries", "_module", "_non_blocking")

    def __init__(
        self, entries: Entries, module: nn.Module, by_state: bool, non_blocking: bool
    ) -> None:
        self._kd_entries, self._module = entries, module
        self._by_state, self._non_blocking = by_state, non_blocking
        self._before: list[dict[str, Tensor]] = []
        self._fresh = True
        self._write()

    def _write(self) -> None:
        own: dict[str, Tensor] = {**dict(self._module.named_parameters(remove_duplicate=False))}
        own |= dict(self._module.named_buffers(remove_duplicate=False))
        flat: dict[str, Tensor] = {}
        for path, entry in _flat(self._kd_entries, ()):
            name = ".".join(path)
            if name not in own:
                raise _unknown(path, "parameter or buffer", self._module, list(own))
            if not isinstance(entry, Tensor):
                raise _not_a_tensor(path)
            if not self._by_state:
                _check_shape(path, entry, own[name])
            flat[name] = entry
        stays = self._by_state  # a module that loads takes other tensors
        self._before.append({name: own[name] if stays else own[name].clone() for name in flat})
        self._copy(flat, own)

    def _copy(self, values: dict[str, Tensor], own: dict[str, Tensor]) -> None:
        if self._by_state:
            self._module.load_state_dict(values, strict=False, assign=True)
            return
        with torch.no_grad():
            for name, value in values.items():
                own[name].copy_(value, non_blocking=self._non_blocking)

    def enter(self) -> None:
        """Enter a block with the copied values; copy them again after an earlier block."""
        if not self._fresh:
            self._write()
        self._fresh = False

    def leave(self) -> None:
        """Copy the values back that the module had."""
        own = dict(self._module.named_parameters(remove_duplicate=False))
        self._copy(self._before.pop(), {**own, **dict(self._module.named_buffers())})

    def settle(self) -> None:
        """Do nothing: the module is not borrowed."""

    def replaced(self) -> dict[str, object]:
        """Return the values that were in the module, nested."""
        made: dict[str, object] = {}
        for name, value in (self._before[-1] if self._before else {}).items():
            _set_nested(made, name.split("."), value)
        return made


def _flat(entries: Entries, path: KeyPath) -> Iterator[tuple[KeyPath, Entry]]:
    """Yield the tensors and the data of nested entries by their paths."""
    for key, entry in entries.items():
        here = (*path, key)
        inner = None if isinstance(entry, Tensor) else entries_of(entry)
        if inner is None:
            yield here, entry
        else:
            yield from _flat(inner, here)


class _Loan:
    """The route of a module, the thread that has borrowed it, and the active exchanges."""

    __slots__ = ("_count", "_owner", "module", "route", "stack")

    def __init__(self, module: weakref.ref[nn.Module]) -> None:
        self.module = module
        self.route = _Route(None, None)
        self._owner, self._count = 0, 0
        self.stack: list[object] = []

    def acquire(self) -> bool:
        """Borrow the module for this thread; return whether no other thread has it."""
        me = threading.get_ident()
        with _OWNERS:
            if self._count and self._owner != me:
                return False
            self._owner = me
            self._count += 1
        return True

    def release(self) -> None:
        """Return the module, once; from whichever thread drops the exchange."""
        with _OWNERS:
            self._count -= 1


_OWNERS: Final = threading.RLock()
"""Held for a moment; it may be entered twice, since a garbage collection may drop an exchange."""
_LOANS: dict[int, _Loan] = {}


def _new_loan(module: nn.Module) -> _Loan:
    key = id(module)

    def forget(gone: weakref.ref[nn.Module]) -> None:
        known = _LOANS.get(key)
        if known is not None and known.module is gone:
            del _LOANS[key]

    return _LOANS.setdefault(key, _Loan(weakref.ref(module, forget)))


class _Route:
    """Which slot of a module each entry goes to.

    Attributes:
        rows: per level of entries and dict of its module: the row of the level above (-1 for the
            root) and the key there, the module, the number of entries, the attribute that is the
            dict, the names in it.
        ties: slots that share the parameter of an earlier slot.
        orders: if anything is shared, a row of each level, the names of its module and the keys.
        recurrent: rows whose module has a list of weights that must be rebuilt.
    """

    __slots__ = ("orders", "recurrent", "rows", "ties")

    def __init__(self, entries: Entries | None, module: nn.Module | None) -> None:
        self.rows: list[Row] = []
        self.ties: list[tuple[Slot, Slot]] = []
        self.orders: list[tuple[int, Names, set[str]]] = []
        self.recurrent: list[int] = []
        if module is not None and entries is not None:
            shares = self._visit(entries, module, (-1, ""), (), {}, set())
            if not shares:
                self.orders.clear()

    def _visit(
        self,
        entries: Entries,
        module: nn.Module,
        place: tuple[int, str],
        path: KeyPath,
        owners: dict[int, Slot],
        seen: set[tuple[int, str]],
    ) -> bool:
        """Add the rows of a level and those below; return whether anything in them is shared."""
        shares = False
        level = (*place, weakref.ref(module), len(entries))
        index = len(self.rows)
        rows = {"_parameters": index}
        self.rows.append((*level, "_parameters", []))
        if isinstance(module, torch.jit.ScriptModule):
            raise InvalidArgument(
                f"`module` must be a plain module, got a scripted `{module.original_name}`, which "
                "computes with its own tensors. Exchange them before `torch.jit.script`."
            )
        names = _names_of(module)
        self.orders.append((index, names, set(entries)))
        if isinstance(module, RNNBase):
            self.recurrent.append(index)
        for name in _in_order(entries, names):
            entry = entries[name]
            if not isinstance(entry, Tensor):
                inner, child = _child(module, name, entry, path)
                shares |= self._visit(inner, child, (index, name), (*path, name), owners, seen)
                continue
            home = _home_of(module, name, path)
            if home not in rows:
                rows[home] = len(self.rows)
                self.rows.append((*level, home, []))
            store: Store = module.__dict__[home]
            if (id(store), name) in seen:
                shares = True
                continue
            seen.add((id(store), name))
            current = store[name]
            slot = (rows[home], name)
            owner = owners.setdefault(id(current), slot)
            if current is None or owner == slot:
                self.rows[rows[home]][-1].append(name)
            else:
                shares = True
                self.ties.append((slot, owner))
        return shares

    def exchange(self, entries: Entries, module: nn.Module) -> Taken | None:
        """Write the entries into their slots and return what was there; None if a slot is wrong."""
        taken: Taken = ([], [], [])
        try:
            self._write(entries, module, taken)
        except (KeyError, AttributeError):
            _restore(taken)
            return None
        except _ReadByRow:
            _restore(taken)
            raise
        for recurrent in taken[1]:
            rebuild_weights(recurrent)
        return taken

    def _write(self, entries: Entries, root: nn.Module, taken: Taken) -> None:
        stores, recurrent, _ = taken
        reached: list[tuple[Entries, nn.Module]] = []
        held: list[Tensor | None] = []
        in_transform = maybe_current_level() is not None
        for above, key, known, count, home, names in self.rows:
            wraps = home == "_parameters" and not in_transform
            if above < 0:
                level, module = entries, root
            else:
                level, module = reached[above]
                level = level[key]._kd_entries  # type: ignore[union-attr]  # a leaf is caught
                module = module._modules[key]  # type: ignore[assignment]  # so is None
            if len(level) != count or known() is not module:
                raise KeyError(key)
            reached.append((level, module))
            store: Store = module.__dict__[home]
            before: Store = {}
            stores.append((store, before))
            for name in names:
                new = level[name]
                if new.__class__ not in _PLAIN:
                    if not isinstance(new, Tensor):
                        raise KeyError(name)
                    if isinstance(new, StackedUninitialized) and new._kd_level is not None:
                        raise _ReadByRow
                before[name] = old = store[name]
                if wraps and new.__class__ is Tensor and not new.requires_grad:
                    new = _as_parameter(new, old)
                elif new.__class__ is nn.Parameter and home == "_buffers":
                    new = new.view_as(new)  # a buffer stays one, through which gradients go
                store[name] = new
            held += before.values()
        if not reached or _has_twice(held):
            raise KeyError("")
        for row, known_names, keys in self.orders:
            level, module = reached[row]
            if level.keys() != keys or _names_of(module) != known_names:
                raise KeyError("")
        for (row, name), (first, other) in self.ties:
            store, before = stores[row]
            held_here = store[name]
            if held_here is None or held_here is not stores[first][1][other]:
                raise KeyError(name)  # two slots without a tensor share none
            before[name] = held_here
            store[name] = stores[first][0][other]
        if self.recurrent:
            recurrent += [cast(RNNBase, reached[row][1]) for row in self.recurrent]


def _as_parameter(new: Tensor, old: Tensor | None) -> Tensor:
    """Return what takes the place of a parameter: a parameter that shares the memory."""
    if type(old) is not nn.Parameter or new.is_inference():
        return new
    trained = old.requires_grad and (new.is_floating_point() or new.is_complex())
    # What `nn.Parameter` calls, without its checks.
    return make_subclass(nn.Parameter, new, trained)


def _names_of(module: nn.Module) -> Names:
    return [*module._parameters, *module._buffers, *module._modules]


def _in_order(entries: Entries, names: Names) -> list[str]:
    """Return the keys in the order of the names of a module; what it does not know comes last."""
    known = [name for name in names if name in entries]
    return known if len(known) == len(entries) else list(dict.fromkeys([*known, *entries]))


def _has_twice(held: list[Tensor | None]) -> bool:
    """Return whether a tensor is held by two slots."""
    if len(set(map(id, held))) == len(held):
        return False
    tensors = [id(tensor) for tensor in held if tensor is not None]
    return len(set(tensors)) < len(tensors)


def _stores_of(module: nn.Module) -> tuple[Store, Store]:
    """Return the dicts of a module that hold its parameters and its buffers."""
    return module.__dict__["_parameters"], module.__dict__["_buffers"]


def _restore(taken: Taken) -> None:
    """Restore the tensors that were replaced."""
    stores, recurrent, moved = taken
    for store, before in stores:
        store.update(before)
    for module, parameters, buffers, attributes in moved:
        for name in attributes:
            module.__dict__.pop(name, None)
        for kept, before in zip(_stores_of(module), (parameters, buffers), strict=True):
            kept.clear()
            kept.update(before)
        held = {name: value for name, value in attributes.items() if value is not None}
        module.__dict__.update(held)
    for module in recurrent:
        rebuild_weights(module)


def _child(module: nn.Module, name: str, entry: Entry, path: KeyPath) -> tuple[Entries, nn.Module]:
    """Return a nested container and the sub-module that takes it; `path` is that of the module."""
    entries = None if isinstance(entry, Tensor) else entries_of(entry)
    if entries is None:
        _home_of(module, name, path)  # a module that lacks it says so
        raise _not_a_tensor((*path, name))
    child = module._modules.get(name)
    if child is None:
        names = [each for each, member in module._modules.items() if member]
        raise _unknown((*path, name), "sub-module", module, names)
    return entries, child


def _not_a_tensor(path: KeyPath) -> InvalidArgument:
    return InvalidArgument(
        f"entry {format_key(path)} must be a tensor: a module takes tensors only."
    )


def _home_of(module: nn.Module, name: str, path: KeyPath) -> str:
    """Return the attribute that is the dict in which a module keeps a tensor."""
    if name in module._parameters:
        return "_parameters"
    if name in module._buffers:
        return "_buffers"
    names = [*module._parameters, *module._buffers]
    raise _unknown((*path, name), "parameter or buffer", module, names)


def _unknown(path: KeyPath, what: str, module: nn.Module, names: list[str]) -> KeyNotFound:
    near = nearest_key(path[-1], names)
    hint = "" if near is None else f" Did you mean {format_key(near)}?"
    return KeyNotFound(
        f"entry {format_key(path)} not found: `{type(module).__name__}` has no such {what}; "
        f"available: {listed(names)}.{hint}"
    )


def _exchange_traced(entries: Entries, module: nn.Module) -> TracedScope:
    """Exchange with plain loops, which a tracer can follow."""
    # One function, and few calls within: a tracer pays for each.
    # What is not read has no guard: all entries of most modules are found among the parameters.
    changes: list[Change] = []
    recurrent: list[RNNBase] = []
    first: dict[Tensor, Tensor] = {}
    left: list[tuple[Entries, nn.Module, KeyPath]] = [(entries, module, ())]
    while left:
        own, part, path = left.pop()
        count = len(own)
        for kind in ("_parameters", "_buffers"):
            if not count:
                break
            # Read as torch does, or there is a guard that both are one; dynamo copies what is
            # `cast`.
            store: Any = part._parameters if kind == "_parameters" else part._buffers
            for name, old in store.items():
                new = own.get(name)
                if isinstance(new, Tensor):
                    # What shares a tensor takes one value, that of its first name.
                    new = new if old is None else first.setdefault(old, new)
                    changes.append((store, name, old, new, path))
                    count -= 1
        if count:
            inside: list[tuple[Entries, nn.Module, KeyPath]] = []
            for name, child in part._modules.items():
                entry = own.get(name)
                inner = None if isinstance(entry, Tensor) else getattr(entry, "_kd_entries", None)
                if inner is not None and child is not None:
                    inside.append((inner, child, (*path, name)))
            if len(inside) != count:
                _refuse(entries, module, ())
            left.extend(inside[::-1])  # the next one is at the end
        if isinstance(part, RNNBase):
            recurrent.append(part)
    made = object.__new__(TracedScope)  # calling a class is slow to trace
    made._kd_entries, made._recurrent, made._is_made = entries, recurrent, False
    made._changes = changes[::-1]  # of a slot that is there twice, the first counts
    made.enter()
    made._is_made = True
    return made


def _refuse(entries: Entries, module: nn.Module, path: KeyPath) -> None:
    """Raise for the first entry that a module has no place for."""
    for name, entry in entries.items():
        if isinstance(entry, Tensor):
            _home_of(module, name, path)
        else:
            inner, child = _child(module, name, entry, path)
            _refuse(inner, child, (*path, name))


# Parameters and buffers of a module as entries of a container.


def check_module(module: object) -> None:
    """Check that a value is a module.

    Raises:
        InvalidArgument: if it is not.
    """
    if not isinstance(module, nn.Module):
        raise wrong_type("`module`", "an `nn.Module`", module)


def module_entries(
    module: nn.Module, memo: dict[int, Entry] | None = None, keep_empty: bool = False
) -> dict[str, Entry]:
    """Collect parameters and buffers; a sub-module met twice is the same container twice.

    Args:
        module: the module.
        memo: the containers of the sub-modules met before, by their ids.
        keep_empty: return an empty container for a sub-module without state.
    """
    memo = {} if memo is None else memo
    entries: dict[str, Entry] = {}
    for name, tensor in module._parameters.items():
        if tensor is not None:
            entries[name if type(name) is str else plain_str(name)] = tensor
    if module._buffers:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                entries[name if type(name) is str else plain_str(name)] = buffer
    for name, child in module._modules.items():
        # A call for each module without state would cost a tenth: "from_module" in the benchmarks.
        if child is None or not (
            child._parameters or child._modules or child._buffers or keep_empty
        ):
            continue
        node = memo.get(id(child))
        if node is None:
            inner = module_entries(child, memo, keep_empty)
            if not inner and not keep_empty:
                continue
            node = registry.make_dense(inner, describe(()), bool(child._modules))
            memo[id(child)] = node
        entries[name if type(name) is str else plain_str(name)] = node
    return entries


def state_entries(module: nn.Module) -> dict[str, Entry]:
    """Collect the state dict of a module, nested like its names; its tensors are detached."""
    tree: dict[str, object] = {}
    for name, value in module.state_dict().items():
        _set_nested(tree, name.split("."), value)
    nested: AbstractContainer = registry.nest_mapping(tree, describe(()), ())
    return dict(nested._kd_entries)


def _set_nested(tree: dict[str, Any], path: Sequence[str], value: object) -> None:
    """Store a value in nested dicts, which are made on the way."""
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def as_module(container: Node, module: nn.Module | None) -> Node:
    """Return a container of parameters as a module.

    Args:
        container: the parameters and buffers.
        module: the module whose buffers say whether they are saved; None: all are.

    Raises:
        MissingDependency: if the package that has the class of it is not imported.
    """
    if not hasattr(registry, "params_of"):
        raise MissingDependency(
            "`as_module=True` requires kd-nn, whose `TensorDictParams` it returns. Install it with "
            "`pip install kd-nn`, and `import kd_nn` first."
        )
    return registry.params_of(container, module)


# Parameters and buffers of several lazy modules, stacked before their shapes are known.
#
# A lazy module of torch gives its parameters a shape when it is first called. Stacked ones get it
# when `vmap` first calls a module with them: the module draws the values of all rows at once, which
# takes `randomness="same"`, and reads its own row from then on.


class StackedUninitialized(Tensor):
    """A tensor for each of several lazy modules.

    Attributes:
        _kd_rows: how many rows there are.
        _kd_level: the level of the `vmap` that maps the rows, once one does.
    """

    _kd_rows: int
    _kd_level: int | None

    def __new__(
        cls,
        rows: int,
        requires_grad: bool,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Build one without values."""
        # `vmap` reads the number of rows.
        data = torch.empty(rows, 0, device=device, dtype=dtype)
        made: Self = make_subclass(cls, data, requires_grad)
        made._kd_rows, made._kd_level = rows, None
        return made

    @property
    def batch_size(self) -> torch.Size:
        """The dimension that is known, that of the rows."""
        return torch.Size([self._kd_rows])

    def dim(self) -> int:
        """Return how many dimensions there are without values."""
        return 2

    def stand_in(self) -> Tensor:
        """Return a tensor that has the rows, and nothing in them."""
        return torch.empty(self._kd_rows, 0)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        data = self.data
        made = type(self)(self._kd_rows, self.requires_grad, data.device, data.dtype)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        data = self.data
        return type(self), (self._kd_rows, self.requires_grad, data.device, data.dtype)


class StackedUninitializedParameter(StackedUninitialized, UninitializedParameter):
    """A parameter for each of several lazy modules."""

    def materialize(
        self,
        shape: tuple[int, ...],
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Become a parameter with this shape in each row."""
        super().materialize((self._kd_rows, *shape), device, dtype)
        del self._kd_rows, self._kd_level


class StackedUninitializedBuffer(StackedUninitialized, UninitializedBuffer):
    """A buffer for each of several lazy modules."""

    persistent = True
    _is_buffer = True

    def materialize(
        self,
        shape: tuple[int, ...],
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Become a buffer with this shape in each row."""
        super().materialize((self._kd_rows, *shape), device, dtype)
        del self._kd_rows, self._kd_level


KINDS: Final = frozenset({StackedUninitializedParameter, StackedUninitializedBuffer})


def stacked_uninitialized(column: Sequence[Tensor]) -> StackedUninitialized:
    """Stack tensors of lazy modules.

    Raises:
        InvalidArgument: if some of the modules have been called, whose values would be lost.
    """
    if not all(map(is_lazy, column)):
        raise InvalidArgument(
            "the modules must all be called once or all be new, got parameters with and without "
            "a shape. Call each lazy module once."
        )
    first = column[0]
    is_parameter = isinstance(first, nn.Parameter)
    kind = StackedUninitializedParameter if is_parameter else StackedUninitializedBuffer
    return kind(len(column), first.requires_grad, first.device, first.dtype)


def read_by_row(
    module: nn.Module, tensors: Mapping[str, StackedUninitialized]
) -> Callable[[], None]:
    """Let a module inside `vmap` read its row of tensors, once it has given them a shape.

    Args:
        module: The module, which has them as its parameters and buffers.
        tensors: The tensors by name, mapped by `vmap`.

    Returns:
        A function that takes this back, if the module was not called.
    """
    levels = {name: tensor._kd_level for name, tensor in tensors.items()}

    def take(module: nn.Module, values: object) -> None:
        handle.remove()
        for name, level in levels.items():
            held: dict[str, Tensor] = module.__dict__["_parameters"]
            if name not in held:
                held = module.__dict__["_buffers"]
            if not is_lazy(held[name]):
                module.__dict__[name] = add_batch_dim(held.pop(name), 0, level)

    handle = module.register_forward_pre_hook(take)  # after that which gives shapes
    return handle.remove
