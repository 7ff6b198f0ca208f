"""Running a module with the entries of a container as its parameters, inside a `with` block.

A module looks its parameters up in two dicts per level (`_parameters`, `_buffers`), so running it
with other parameters is exchanging values of these dicts. Which names of which level take which
entries is found once per module and kept (a *route*), then verified while it is walked: a replaced
sub-module or a changed set of keys makes a new one. "to_module" in the benchmarks shows what that
gains over `torch.func.functional_call`. A route refers to modules weakly and to their dicts not at
all: a sub-module may lead back to the root (a hook that is a bound method does), and then a module
that was exchanged once would live for ever.

Weights that a module shares are written together: one sub-module under two names takes the
entries of the first, one parameter under two names takes the first tensor. What is shared, and
which name is the first, is what the module says when it is borrowed. Recurrent layers of torch keep
a second list of their weights, which is rebuilt. While a module is borrowed, another thread that
wants to borrow it gets an error.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.rnn import RNNBase

from kd_core._errors import InvalidArgument, KdError, KeyNotFound, listed
from kd_core._keys import format_key, nearest_key
from kd_core._leaves.loops import entries_of
from kd_core._naming import explains_parameters
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from kd_core._nodes.entry import Entries, Entry, Node

    Store: TypeAlias = dict[str, Tensor | None]
    Names: TypeAlias = list[str]
    Path: TypeAlias = tuple[str, ...]
    Slot: TypeAlias = tuple[int, str]
    """A row of a route, and a name in the dict that it stands for."""
    Row: TypeAlias = tuple[int, str, weakref.ref[nn.Module], int, str, Names]
    Taken: TypeAlias = tuple[list[tuple[Store, Store]], list[RNNBase]]

_PLAIN: Final = (Tensor, nn.Parameter)


class ModuleBusy(KdError, RuntimeError):
    """A module whose parameters are exchanged cannot be exchanged again here."""


class Modules(AbstractContainer):
    """Exchange with the parameters of a module."""

    __slots__ = ()

    @explains_parameters
    def to_module(
        self, module: nn.Module, *, preserve_module_state: bool | None = None
    ) -> ModuleScope:
        """Return a context in which a module computes with the entries of this container.

        Entries are matched by name with parameters, buffers and sub-modules; some of them may be
        left out. On exit, also after an error, the module is as before. Contexts nest. Shared
        weights take one value, that of their first name. A module that other threads use at the
        same time must be copied: a second thread that enters a context of it gets an error, one
        that calls it sees the exchanged parameters.

        Args:
            module: the module.
            preserve_module_state: has no effect: the module is always restored.

        Raises:
            InvalidArgument: on entry, if the module is a scripted one.
            KeyNotFound: on entry, if an entry matches nothing in the module.
            ModuleBusy: on entry, if another thread is in a context of the module.

        Warns:
            UserWarning: if the context is dropped before it was entered: nothing was exchanged.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> net = torch.nn.Linear(2, 1)
            >>> ones = TensorDict({"weight": torch.ones(1, 2), "bias": torch.ones(1)})
            >>> with ones.to_module(net):
            ...     net(torch.tensor([1.0, 2.0]))
            tensor([4.])
        """
        return ModuleScope(self._entries, module)


class ModuleScope:
    """Exchanges the parameters of a module on entry and restores them on exit."""

    __slots__ = ("_borrowed", "_entered", "_entries", "_module", "_undo")

    def __init__(self, entries: Entries, module: nn.Module) -> None:
        self._entries, self._module, self._entered = entries, module, False
        self._undo: list[Callable[[], None]] = []
        self._borrowed: list[tuple[_Loan, Taken]] = []

    def __enter__(self) -> None:
        module, self._entered = self._module, True
        if is_compiling():
            self._undo.append(_exchange_traced(self._entries, module))
            return
        loan = _LOANS.get(id(module))
        if loan is None or loan.module() is not module:
            loan = _new_loan(module)
        if not loan.lock.acquire(False):
            raise ModuleBusy(
                f"another thread runs this `{type(module).__name__}` with exchanged parameters. "
                "Give each thread its own copy (`copy.deepcopy(module)`), or take turns."
            )
        try:
            taken = loan.route.exchange(self._entries, module)
            if taken is None:
                loan.route = _Route(self._entries, module)
                taken = loan.route.exchange(self._entries, module)
                assert taken is not None
        except BaseException:
            loan.lock.release()
            raise
        borrowed = (loan, taken)
        self._borrowed.append(borrowed)
        loan.stack.append(borrowed)

    def __exit__(self, *exc_info: object) -> None:
        if self._undo:
            self._undo.pop()()
            return
        borrowed = self._borrowed.pop()
        loan, taken = borrowed
        if loan.stack[-1] is not borrowed:
            raise ModuleBusy(
                f"`to_module` blocks of this `{type(self._module).__name__}` must end in reverse "
                "order of their begin; interleaved tasks need a copy of the module each."
            )
        loan.stack.pop()
        _restore(taken)
        loan.lock.release()

    def __del__(self) -> None:
        if not getattr(self, "_entered", True):
            warnings.warn(
                "`to_module` does nothing outside a `with` statement. Write `with "
                "td.to_module(module): ...`, or `type(td).from_module(module).update_(td)` to copy "
                "values into the parameters.",
                stacklevel=2,
            )


class _Loan:
    """The route of a module, its lock, and the exchanges that are active."""

    __slots__ = ("lock", "module", "route", "stack")

    def __init__(self, module: weakref.ref[nn.Module]) -> None:
        self.module = module
        self.route = _Route(None, None)
        self.lock = threading.RLock()
        self.stack: list[object] = []


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
        path: Path,
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
                inner, child = _child(module, name, entry, (*path, name))
                shares |= self._visit(inner, child, (index, name), (*path, name), owners, seen)
                continue
            home = _home_of(module, name, (*path, name))
            if home not in rows:
                rows[home] = len(self.rows)
                self.rows.append((*level, home, []))
            store = cast("Store", module.__dict__[home])
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
        taken: Taken = ([], [])
        try:
            self._write(entries, module, taken)
        except (KeyError, AttributeError):
            _restore(taken)
            return None
        for recurrent in taken[1]:
            _rebuild_weights(recurrent)
        return taken

    def _write(self, entries: Entries, root: nn.Module, taken: Taken) -> None:
        stores, recurrent = taken
        reached: list[tuple[Entries, nn.Module]] = []
        held: list[Tensor | None] = []
        for above, key, known, count, home, names in self.rows:
            if above < 0:
                level, module = entries, root
            else:
                level, module = reached[above]
                level = level[key]._entries  # type: ignore[union-attr]  # a leaf is caught
                module = module._modules[key]  # type: ignore[assignment]  # so is None
            if len(level) != count or known() is not module:
                raise KeyError(key)
            reached.append((level, module))
            store: Store = module.__dict__[home]
            before: Store = {}
            stores.append((store, before))
            for name in names:
                new = level[name]
                if new.__class__ not in _PLAIN and not isinstance(new, Tensor):
                    raise KeyError(name)
                before[name] = store[name]
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


def _restore(taken: Taken) -> None:
    """Restore the tensors that were replaced."""
    stores, recurrent = taken
    for store, before in stores:
        store.update(before)
    for module in recurrent:
        _rebuild_weights(module)


def _rebuild_weights(module: RNNBase) -> None:
    """Rebuild the list of weights that a recurrent layer computes with."""
    found = [module._parameters.get(name) for name in module._flat_weights_names]
    object.__setattr__(module, "_flat_weights", found)


def _child(module: nn.Module, name: str, entry: Entry, path: Path) -> tuple[Entries, nn.Module]:
    entries = entries_of(cast("Node", entry))
    if entries is None:
        raise InvalidArgument(
            f"entry {format_key(path)} must be a tensor: a module takes tensors only."
        )
    child = module._modules.get(name)
    if child is None:
        raise _unknown(path, "sub-module", module, [n for n, m in module._modules.items() if m])
    return entries, child


def _home_of(module: nn.Module, name: str, path: Path) -> str:
    """Return the attribute that is the dict in which a module keeps a tensor."""
    if name in module._parameters:
        return "_parameters"
    if name in module._buffers:
        return "_buffers"
    raise _unknown(path, "parameter or buffer", module, [*module._parameters, *module._buffers])


def _unknown(path: Path, what: str, module: nn.Module, names: list[str]) -> KeyNotFound:
    near = nearest_key(path[-1], names)
    hint = "" if near is None else f" Did you mean {format_key(near)}?"
    return KeyNotFound(
        f"entry {format_key(path)} not found: `{type(module).__name__}` has no such {what}; "
        f"available: {listed(names)}.{hint}"
    )


def _exchange_traced(entries: Entries, module: nn.Module) -> Callable[[], None]:
    """Exchange with plain loops, which a tracer can follow; return what undoes it."""
    slots: list[tuple[Store, str, Tensor]] = []
    _find_slots(entries, module, (), slots)
    held = [store[name] for store, name, _ in slots]
    recurrent = [member for member in module.modules() if isinstance(member, RNNBase)]
    first: dict[Tensor, Tensor] = {}
    for (_, _, entry), tensor in zip(slots, held, strict=True):
        if tensor is not None:
            first.setdefault(tensor, entry)

    def write(tensors: list[Tensor | None]) -> None:
        # Of a slot that is there twice, the first counts.
        for (store, name, _), tensor in reversed(list(zip(slots, tensors, strict=True))):
            store[name] = tensor
        for member in recurrent:
            _rebuild_weights(member)

    write([entry if t is None else first[t] for (*_, entry), t in zip(slots, held, strict=True)])
    return lambda: write(held)


def _find_slots(
    entries: Entries, module: nn.Module, path: Path, slots: list[tuple[Store, str, Tensor]]
) -> None:
    for name in _in_order(entries, _names_of(module)):
        entry = entries[name]
        if isinstance(entry, Tensor):
            home = _home_of(module, name, (*path, name))
            store: Store = module.__dict__[home]  # not `cast`: dynamo would copy a dict of Nones
            slots.append((store, name, entry))
        else:
            inner, child = _child(module, name, entry, (*path, name))
            _find_slots(inner, child, (*path, name), slots)
