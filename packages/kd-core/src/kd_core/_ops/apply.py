"""Application of a function to every leaf."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core._descriptor import Descriptor, describe, describe_on, device_of
from kd_core._errors import (
    InvalidArgument,
    InvalidValue,
    KeySetMismatch,
    shape_text,
    unknown_keys,
    wrong_type,
)
from kd_core._keys import format_key, path_of
from kd_core._leaves.loops import all_fit, entries_of, finder, is_shapeless, key_sets_differ
from kd_core._leaves.writes import Write, writable_source, write_all
from kd_core._nodes import Node, is_unbatched, tensor_of
from kd_core._ops.binary import written_to
from kd_core._ops.description import check_names, named
from kd_core._protocol import (
    AbstractContainer,
    Composite,
    engine,
    holds_entries,
    leaves_of,
    lock,
    name_in,
)
from kd_core._shapes import as_int, batch_of, wrap_dim
from kd_core._types import NO_DEFAULT
from kd_core._unbatched import wrap_tensor
from kd_core._validation import as_entry

if TYPE_CHECKING:
    from multiprocessing.pool import AsyncResult
    from multiprocessing.pool import Pool as MultiprocessingPool
    from typing import Protocol, Self, TypedDict, TypeVar, Unpack

    from kd_core._keys import KeyPath
    from kd_core._nodes import Entries, Entry
    from kd_core._types import BatchSize, DeviceLike, NestedKey, NoDefault

    Target: TypeAlias = Callable[[Descriptor], Descriptor]
    IsLeaf: TypeAlias = Callable[[type], bool]
    W = TypeVar("W", bound=AbstractContainer)

    class InPlaceOptions(TypedDict, total=False):
        """The keyword arguments of `apply_`."""

        default: object
        filter_empty: bool
        propagate_lock: bool
        call_on_nested: bool
        is_leaf: IsLeaf | None

    Task: TypeAlias = "tuple[AbstractContainer, int | None]"

    class _Future(Protocol):
        def result(self) -> object: ...

    class Executor(Protocol):
        """What runs the calls: an executor of `concurrent.futures`, for example."""

        def submit(self, fn: Callable[..., object], /, *args: object) -> _Future:
            """Call a function later; return what waits for its result."""

    Pool: TypeAlias = "Executor | MultiprocessingPool"

    R = TypeVar("R")


class Apply(AbstractContainer):
    """The methods that call a function on every leaf."""

    __slots__ = ()

    def apply(
        self,
        fn: Callable[..., object],
        *others: AbstractContainer,
        batch_size: BatchSize | None = None,
        device: DeviceLike | NoDefault | None = NO_DEFAULT,
        names: Sequence[str | None] | NoDefault | None = NO_DEFAULT,
        inplace: bool = False,
        default: object = NO_DEFAULT,
        filter_empty: bool | None = None,
        propagate_lock: bool = False,
        call_on_nested: bool = False,
        is_leaf: IsLeaf | None = None,
        out: Self | None = None,
        named: bool = False,
        nested_keys: bool = False,
    ) -> Self:
        """Call a function on every leaf, and return a container of the results.

        Non-tensor entries are passed through. A leaf for which `fn` returns `None` is dropped, and
        so is a nested container of which nothing is left. Where nothing at all is left, the result
        is `None`, as for a function that is called for what it does.

        Args:
            fn: called as `fn(leaf, *leaves of others)`.
            others: containers that have these keys; more positional arguments of `fn`.
            batch_size: the batch size of the result and of all containers in it; needed where `fn`
                changes leading dimensions.
            device: the device of the result.
            names: the names of its batch dimensions; `None`: no names. Without it they are those of
                this container.
            inplace: write the results into the leaves and return this container, which may be
                locked; it keeps its batch size, device and names, whatever is asked for. All
                results are checked before the first is written; a leaf for which `fn` returns
                `None`, or the leaf itself, is not written.
            default: what stands for a leaf that one of `others` lacks; without it, an error.
            filter_empty: leave out nested containers that are empty: `None`: those of which nothing
                is left; `True`: also those that were empty before.
            propagate_lock: lock the result if this container is locked.
            call_on_nested: call `fn` on the entries of this level, nested containers and
                non-tensor data included, instead of entering these.
            is_leaf: returns for the type of an entry that is not a tensor whether `fn` is called on
                it; nested containers that are not leaves are entered.
            out: a container into whose leaves the results are written, as with `inplace`; results
                that it lacks are added. It is returned.
            named: call `fn` with the name of the leaf first, as `named_apply` does.
            nested_keys: with `named`, pass the path of a nested leaf as a tuple.

        Raises:
            ShapeMismatch: if a result does not start with the batch size.
            KeySetMismatch: if the keys of another container differ, and there is no `default`.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.ones(2), "b": {"c": torch.zeros(2, 3)}}, [2])
            >>> td.apply(lambda x: x + 1)["a"]
            tensor([2., 2.])
            >>> td.apply(lambda x, y: x - y, td)["b", "c"].sum()
            tensor(0.)
            >>> td.apply(lambda x: x.mean(), batch_size=[])["b", "c"]
            tensor(0.)
        """
        nested = nested_keys if named else None
        target = _target(self, batch_size, device, names, inplace, out)
        if call_on_nested:
            is_leaf = _any_type(is_leaf)
        if not others and is_leaf is None:
            result = _each(self, fn, nested, target, (), filter_empty)
        else:
            walk = _Walk(fn, nested, default, filter_empty, target, is_leaf)
            result = walk.level(self, others, ())
        if not holds_entries(result) and _leaves_out(self, filter_empty):
            return cast("Self", None)
        if inplace or propagate_lock or out is not None or names is not NO_DEFAULT:
            return _finish(self, result, names, inplace, propagate_lock, out)
        return result

    def named_apply(
        self,
        fn: Callable[..., object],
        *others: AbstractContainer,
        nested_keys: bool = False,
        prefix: NestedKey | tuple[()] = (),
        batch_size: BatchSize | None = None,
        device: DeviceLike | NoDefault | None = NO_DEFAULT,
        names: Sequence[str | None] | NoDefault | None = NO_DEFAULT,
        inplace: bool = False,
        default: object = NO_DEFAULT,
        filter_empty: bool | None = None,
        propagate_lock: bool = False,
        call_on_nested: bool = False,
        is_leaf: IsLeaf | None = None,
        out: Self | None = None,
    ) -> Self:
        """Call a function on the name and the value of every leaf; see `apply`.

        Args:
            fn: called as `fn(name, leaf, *leaves of others)`.
            others: containers that have these keys.
            nested_keys: pass the path of a nested leaf as a tuple; else only its last key.
            prefix: keys that the path of every leaf starts with; requires `nested_keys`.
            batch_size: the batch size of the result.
            device: the device of the result.
            names: the names of its batch dimensions; `None`: no names. Without it they are those of
                this container.
            inplace: write the results into the leaves, and return this container.
            default: what stands for a leaf that one of `others` lacks.
            filter_empty: leave out nested containers that are empty: `None`: those of which nothing
                is left; `True`: also those that were empty before.
            propagate_lock: lock the result if this container is locked.
            call_on_nested: call `fn` on the entries of this level instead of entering them.
            is_leaf: returns for the type of an entry whether `fn` is called on it.
            out: a container that takes the results, as for `apply`; it is returned.

        Example:
            >>> from kd_core import TensorDict
            >>> names = []
            >>> td = TensorDict({"a": 0.0, "b": {"c": 1.0}})
            >>> td.named_apply(lambda name, x: names.append(name), nested_keys=True) is None
            True
            >>> names
            ['a', ('b', 'c')]
        """
        if prefix:
            fn = _prefixed(fn, path_of(prefix), nested_keys)
        return Apply.apply(
            self,
            fn,
            *others,
            batch_size=batch_size,
            device=device,
            names=names,
            inplace=inplace,
            default=default,
            filter_empty=filter_empty,
            propagate_lock=propagate_lock,
            call_on_nested=call_on_nested,
            is_leaf=is_leaf,
            out=out,
            named=True,
            nested_keys=nested_keys,
        )

    def apply_(
        self,
        fn: Callable[..., object],
        *others: AbstractContainer,
        **options: Unpack[InPlaceOptions],
    ) -> Self:
        """Call a function on every leaf and write the result into the leaf; return self.

        A result that is the leaf itself, or `None`, is not written. All results are checked before
        the first is written. It is allowed on a locked container.

        Args:
            fn: called as `fn(leaf, *leaves of others)`.
            others: containers that have these keys.
            **options: `default`, `filter_empty`, `propagate_lock`, `call_on_nested` and `is_leaf`,
                as for `apply`.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> a = torch.zeros(2)
            >>> TensorDict({"a": a}, [2]).lock_().apply_(lambda x: x + 1)["a"] is a, a
            (True, tensor([1., 1.]))
        """
        if options:
            engine(self).apply(self, fn, *others, inplace=True, **options)
            return self
        leaves: list[Tensor] = []
        self._kd_collect(leaves)
        columns = [leaves]
        try:
            for other in others:
                theirs: list[Tensor] = []
                self._kd_collect_pair(other, [], theirs, ())
                columns.append(theirs)
        except KeySetMismatch:  # one may have further keys
            engine(self).apply(self, fn, *others, inplace=True)
            return self
        # Compiled code knows no leaf that is held twice by its identity.
        if not is_compiling() and len(set(map(id, leaves))) != len(leaves):
            results = _in_turn(fn, columns)
        elif others:
            results = [fn(*row) for row in zip(*columns, strict=True)]
        else:
            results = [fn(leaf) for leaf in leaves]
        writes: list[Write] = []
        for leaf, result in zip(leaves, results, strict=True):
            if result is not leaf and result is not None:
                where = finder(self._kd_entries, leaf)
                writes.append((leaf, writable_source(where, leaf, result), where))
        write_all(writes)
        return self


def _in_turn(fn: Callable[..., object], columns: Sequence[Sequence[Tensor]]) -> list[object]:
    """Return the results for leaves of which some are held twice, and are changed twice."""
    results: list[object] = []
    after: dict[int, object] = {}
    for leaf, *rest in zip(*columns, strict=True):
        result = fn(after.get(id(leaf), leaf), *rest)
        results.append(result)
        if result is not None:
            after[id(leaf)] = result
    return results


def _each(
    td: W,
    fn: Callable[..., object],
    nested: bool | None,
    target: Target | None,
    path: KeyPath,
    filter_empty: bool | None = None,
) -> W:
    """Apply a function without other containers; results are checked in the same loop.

    Args:
        td: one level.
        fn: the function.
        nested: whether `fn` gets the path of a leaf or its last key; `None`: no name.
        target: a function from the descriptor of a level to that of the result; `None`: keep it.
        path: the path of the level.
        filter_empty: which empty results are left out, as for `apply`.
    """
    by_member = target is None or isinstance(target, _OnDevice)
    if not td._kd_owns_leaves and by_member and isinstance(td, Composite):
        return td._by_member(lambda member: _each(member, fn, nested, target, path, filter_empty))
    desc = td._kd_desc._unlocked if target is None else target(td._kd_desc)
    rows = desc.rows
    entries: dict[str, Entry] = {}
    doubtful: dict[str, object] = {}
    found: Any
    for key, value in td._kd_entries.items():
        if type(value) is Tensor or not isinstance(value, Node):  # as in `_leaves.loops`
            try:
                found = fn(value) if nested is None else fn(_name(path, key, nested), value)
            except Exception as error:
                _note(error, (*path, key), value)
                raise
            if found is None:
                continue
            entries[key] = found  # checked here or below
            if found is value and target is None:
                continue
            try:
                shape = found.shape if rows >= 0 and type(found) is Tensor else None
                fits = shape[0] == rows if shape else False
            except RuntimeError:  # a tensor without a shape
                fits = False
            if not fits:
                doubtful[key] = found
        elif type(value) is type(td) or isinstance(value, AbstractContainer):
            inner = _each(value, fn, nested, target, (*path, key), filter_empty)
            if holds_entries(inner) or not _leaves_out(value, filter_empty):
                entries[key] = inner
        elif is_unbatched(value):
            leaf = value._tensor
            try:
                found = fn(leaf) if nested is None else fn(_name(path, key, nested), leaf)
            except Exception as error:
                _note(error, (*path, key), leaf)
                raise
            if found is not None:
                doubtful[key] = entries[key] = _unbatched(found, desc)  # type: ignore[assignment]  # checked below
        else:
            data = value._kd_map_each(Tensor.clone)  # a write to it does not reach the source
            entries[key] = (
                data if target is None else data._kd_with_descriptor(target(data._kd_desc))
            )
    if doubtful and not all_fit(doubtful, desc):
        _check_results(entries, doubtful, desc, path)
    return td._kd_like(entries, desc)


def _leaves_out(source: AbstractContainer, filter_empty: bool | None) -> bool:
    """Return whether an empty result for a container is left out."""
    # torch 2.10 does not trace `bool` of a dict
    return len(source._kd_entries) > 0 if filter_empty is None else filter_empty


def _unwrapped(value: object) -> object:
    return value._tensor if is_unbatched(value) else value


def _unbatched(found: object, desc: Descriptor) -> object:
    """Return the result for a tensor without batch dimensions, which has none either."""
    return wrap_tensor(found, desc.with_batch(())) if isinstance(found, Tensor) else found


def _prefixed(fn: Callable[..., object], prefix: KeyPath, nested: bool) -> Callable[..., object]:
    """Return a function that is called with paths that start with some keys."""
    if not nested:
        raise InvalidArgument("`prefix` requires `nested_keys=True`: other names have no path.")
    return lambda name, *leaves: fn((*prefix, *path_of(name)), *leaves)


def _name(path: KeyPath, key: str, nested: bool) -> NestedKey:
    return (*path, key) if path and nested else key


def _note(error: Exception, path: KeyPath, leaf: object) -> None:
    if not is_compiling():
        kind = ""
        if isinstance(leaf, Tensor) and not is_shapeless(leaf):
            kind = f" of shape {shape_text(leaf.shape)}"
        error.add_note(f"This is entry {format_key(path)}{kind}.")


def _check_results(
    entries: dict[str, Entry], results: dict[str, object], desc: Descriptor, path: KeyPath
) -> None:
    """Validate and convert results."""
    for key, found in results.items():
        entries[key] = as_entry(key, found, desc, path)


class _Walk:
    """One pass over the levels of a container; `nested` as in `_each`."""

    def __init__(
        self,
        fn: Callable[..., object],
        nested: bool | None,
        default: object,
        filter_empty: bool | None,
        target: Target | None,
        is_leaf: IsLeaf | None = None,
    ) -> None:
        self.fn, self.nested, self.default = fn, nested, default
        self.filter_empty, self.target = filter_empty, target
        self.is_leaf = is_leaf

    def level(self, td: W, others: tuple[object, ...], path: KeyPath) -> W:
        by_member = self.target is None or isinstance(self.target, _OnDevice)
        if isinstance(td, Composite) and by_member:
            return td._by_member(lambda member, *rows: self.level(member, rows, path), *others)
        desc = td._kd_desc.unlocked() if self.target is None else self.target(td._kd_desc)
        mine = td._kd_entries
        theirs = [self._entries_beside(mine, other, path) for other in others]
        entries: dict[str, Entry] = {}
        doubtful: dict[str, object] = {}
        found: Any
        for key, value in mine.items():
            beside = [level.get(key, self.default) for level in theirs]
            found = self._entry(value, beside, (*path, key))
            if type(value) is not Tensor and is_unbatched(value):
                found = _unbatched(found, desc)
            if type(found) is Tensor:
                doubtful[key] = entries[key] = found  # checked below
            elif found is not None:
                entries[key] = as_entry(key, found, desc, path)
        if not all_fit(doubtful, desc):
            _check_results(entries, doubtful, desc, path)
        return td._kd_like(entries, desc)

    def _entry(self, value: Entry, beside: list[object], path: KeyPath) -> object:
        if type(value) is not Tensor and is_unbatched(value):
            value, beside = value._tensor, list(map(_unwrapped, beside))
        if isinstance(value, Tensor) or (self.is_leaf is not None and self.is_leaf(type(value))):
            name: NestedKey = path if self.nested and len(path) > 1 else path[-1]
            try:
                if self.nested is None:
                    return self.fn(value, *beside)
                return self.fn(name, value, *beside)
            except Exception as error:
                _note(error, path, value)
                raise
        if not isinstance(value, AbstractContainer):
            data = value._kd_map_each(Tensor.clone)
            if self.target is None:
                return data
            return data._kd_with_descriptor(self.target(data._kd_desc))
        inner = self.level(value, tuple(beside), path)
        return inner if holds_entries(inner) or not _leaves_out(value, self.filter_empty) else None

    def _entries_beside(self, mine: Entries, other: object, path: KeyPath) -> Entries:
        if other is self.default:
            return {}
        theirs = entries_of(other) if isinstance(other, AbstractContainer) else None
        if theirs is None:
            what = f"the other operand{f' at {format_key(path)}' if path else ''}"
            raise wrong_type(what, "a container", other)
        if self.default is NO_DEFAULT and not mine.keys() <= theirs.keys():
            raise key_sets_differ(mine, theirs, path)
        return theirs


class _OnDevice:
    """The descriptor of a level on another device; the members of a lazy stack stay members."""

    __slots__ = ("device",)

    def __init__(self, device: torch.device | None) -> None:
        self.device = device

    def __call__(self, desc: Descriptor) -> Descriptor:
        return describe(desc.batch, self.device)


def _target(
    td: AbstractContainer,
    batch_size: BatchSize | None,
    device: DeviceLike | NoDefault | None,
    names: Sequence[str | None] | NoDefault | None,
    inplace: bool,
    out: AbstractContainer | None,
) -> Target | None:
    """Return the function from the descriptor of a level to that of the result; `None`: keep it."""
    same = batch_size is None and device is NO_DEFAULT
    if inplace or (same and names is NO_DEFAULT):
        return None
    if names is not NO_DEFAULT:
        if out is not None:
            raise InvalidArgument(
                "`out` has names of its own and cannot be combined with `names`. Set `out.names`."
            )
        check_names(names, td._kd_desc.batch if batch_size is None else batch_of(batch_size))
    if same:
        return None
    if batch_size is None:
        return _OnDevice(None if device is None else device_of(cast("DeviceLike", device)))
    batch = batch_of(batch_size)
    after = (
        describe(batch, td._kd_desc.device) if device is NO_DEFAULT else describe_on(batch, device)
    )
    return lambda desc: after


def _any_type(is_leaf: IsLeaf | None) -> IsLeaf:
    """Return that the function is called on entries of all types, which excludes `is_leaf`."""
    if is_leaf is not None:
        raise InvalidArgument(
            "`call_on_nested=True` calls the function on every entry and cannot be combined with "
            "`is_leaf`. Pass one of them."
        )
    return lambda kind: True


def _finish(
    td: W,
    result: W,
    names: Sequence[str | None] | NoDefault | None,
    inplace: bool,
    propagate_lock: bool,
    out: W | None,
) -> W:
    """Write results where they are wanted, all of them or none, and lock them if asked to."""
    if not inplace:
        if names is not NO_DEFAULT:
            result = named(result, names)
        if isinstance(out, AbstractContainer):
            _write_into(out, result)
            result = out
        else:
            result = written_to(out, result)
        return lock(result) if propagate_lock and td._kd_desc.frozen else result
    if out is not None:
        raise InvalidArgument(
            "`inplace=True` writes into the leaves of this container and cannot be combined with "
            "`out`. Pass one of them."
        )
    writes: list[Write] = []
    _stage_results(td, result, (), writes)
    write_all(writes)
    return td


def _write_into(out: AbstractContainer, result: AbstractContainer) -> None:
    """Write results into a container: what it lacks is added, and what has no result stays."""
    wanted = list(result._kd_engine.keys(result, True, True, _is_entry))
    there = set(out._kd_engine.keys(out, True, True, _is_entry))
    lacking = [key for key in wanted if key not in there]
    if lacking:
        out._kd_check_unlocked("add results that `out` lacks")
    shared = [key for key in wanted if key in there]
    part = out._kd_engine.select(out, *shared)
    written_to(part, result._kd_engine.select(result, *shared) if lacking else result)
    if lacking:
        out._kd_engine.update(out, result._kd_engine.select(result, *lacking))


def _is_entry(kind: type) -> bool:
    return not issubclass(kind, AbstractContainer)


def _stage_results(
    td: AbstractContainer, result: AbstractContainer, path: KeyPath, writes: list[Write]
) -> None:
    """Check the results for one level, and note the writes."""
    if isinstance(td, Composite):
        for member, row in zip(td._members, td._rows_of_operand(result), strict=True):
            assert isinstance(row, AbstractContainer)
            _stage_results(member, row, path, writes)
        return
    unknown = [key for key in result._kd_entries if key not in td._kd_entries]
    if unknown:
        where_ = f" below {format_key(path)}" if path else ""
        raise unknown_keys(unknown, td._kd_entries, where_)
    for key, found in result._kd_entries.items():
        leaf, where = td._kd_entries[key], (*path, key)
        if isinstance(leaf, AbstractContainer):
            if not isinstance(found, AbstractContainer):
                raise wrong_type(f"the result for {format_key(where)}", "a container", found)
            _stage_results(leaf, found, where, writes)
            continue
        target, value = tensor_of(leaf), tensor_of(found)
        if target is not None and value is not target:
            source = found if value is None else value
            writes.append((target, writable_source(where, target, source), where))


# The parts of a container along a dimension, and the calls of a function on each of them.
#
# A call runs here, in a process of its own, or in an executor. Knows how parts are cut and sent;
# must not know what is done with the results.


class Cut:
    """The parts of a container along a dimension."""

    def __init__(
        self,
        td: AbstractContainer,
        dim: int | str,
        workers: int,
        chunksize: int | None,
        num_chunks: int | None,
        order: Tensor | None,
    ) -> None:
        if chunksize is not None and num_chunks is not None:
            raise InvalidArgument("expected `chunksize` or `num_chunks`, got both.")
        self.td, self.order = td, order
        self.at = wrap_dim(dim, td._kd_desc.batch)
        rows = td._kd_desc.batch[self.at]
        self.single = chunksize is not None and as_int(chunksize) == 0
        if chunksize is not None:
            size = as_int(chunksize)
        else:
            parts = as_int(max(workers, 1) if num_chunks is None else num_chunks)
            if parts < 1:
                raise InvalidValue(f"`num_chunks` must be positive, got {parts}.")
            size = max(-(-rows // parts), 1)
        if size < 0:
            raise InvalidValue(f"`chunksize` must be non-negative, got {size}.")
        size = size or 1
        self.bounds = [(start, min(start + size, rows)) for start in range(0, rows, size)]

    def __len__(self) -> int:
        return len(self.bounds)

    def __iter__(self) -> Iterator[AbstractContainer]:
        td = self.td
        for start, stop in self.bounds:
            if self.order is not None:
                part = td._kd_engine.index_select(td, self.at, self.order[start:stop])
            else:
                part = td._kd_engine.narrow(td, self.at, start, stop - start)
            yield part._kd_engine.squeeze(part, self.at) if self.single else part


class Call:
    """How the function is called: here, in processes of its own, or by an executor."""

    def __init__(
        self,
        fn: Callable[..., object],
        workers: int,
        pool: Pool | None,
        max_tasks: int | None,
        threads: int,
        start: str | None,
    ) -> None:
        self.fn, self.workers = fn, as_int(workers)
        self.pool: Executor | None = None
        if pool is not None:
            self.pool = pool if hasattr(pool, "submit") else _AsExecutor(pool)
        self.max_tasks, self.threads, self.start = max_tasks, threads, start
        if self.workers < 0:
            raise InvalidValue(f"`num_workers` must be non-negative, got {workers}.")

    def run(self, tasks: Iterator[Task]) -> Iterator[object]:
        if self.pool is not None:
            return _submitted(self.pool, _seeded, (self.fn,), tasks, 2 * max(self.workers, 4))
        if not self.workers:
            return (_seeded(self.fn, part, seed) for part, seed in tasks)
        return self._in_processes(tasks)

    def _in_processes(self, tasks: Iterator[Task]) -> Iterator[object]:
        from concurrent.futures import ProcessPoolExecutor

        start = self.start or (None if self.max_tasks is None else "spawn")
        context = torch.multiprocessing.get_context(start)
        executor = ProcessPoolExecutor(
            self.workers,
            mp_context=context,
            initializer=_start_worker,
            initargs=(self.fn, self.threads),
            max_tasks_per_child=self.max_tasks,
        )
        try:
            yield from _submitted(executor, _call_in_worker, (), tasks, 2 * self.workers)
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


class _AsExecutor:
    """A pool of `multiprocessing` as an executor."""

    def __init__(self, pool: MultiprocessingPool) -> None:
        self.pool = pool

    def submit(self, fn: Callable[..., object], /, *args: object) -> _Awaited:
        """Call a function later; return what waits for its result."""
        return _Awaited(self.pool.apply_async(fn, args))


class _Awaited:
    """A result of such a pool, which is waited for."""

    def __init__(self, given: AsyncResult[object]) -> None:
        self.result = given.get


def _submitted(
    pool: Executor,
    run: Callable[..., object],
    first: tuple[object, ...],
    tasks: Iterator[Task],
    most: int,
) -> Iterator[object]:
    """Yield the results of tasks in their order, with at most `most` of them under way."""
    waiting: deque[_Future] = deque()
    for part, seed in tasks:
        # A copy, because sending a tensor moves its storage into shared memory.
        copy = part._kd_rebuild(iter([_sendable(part, leaf) for leaf in leaves_of(part)]))
        waiting.append(pool.submit(run, *first, copy, seed))
        if len(waiting) >= most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _sendable(part: AbstractContainer, leaf: Tensor) -> Tensor:
    if leaf.requires_grad:
        raise InvalidValue(
            f"{name_in(part, leaf)} requires gradients, which do not reach other processes. Call "
            "`detach()` first, or pass `num_workers=0`."
        )
    return leaf.clone()


_worker: list[Callable[..., object]] = []
"""The function of a worker process, set when it starts."""


def _start_worker(fn: Callable[..., object], threads: int) -> None:
    torch.set_num_threads(threads)
    _worker[:] = [fn]


def _call_in_worker(part: AbstractContainer, seed: int | None) -> object:
    return _seeded(_worker[0], part, seed)


def _seeded(fn: Callable[..., object], part: AbstractContainer, seed: int | None) -> object:
    """Call the function under the seed of its part, and restore the random state."""
    if seed is None:
        return fn(part)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return fn(part)


def results_of(
    call: Call,
    parts: Iterator[AbstractContainer],
    count: int,
    generator: torch.Generator | None,
    pbar: bool,
) -> Iterator[Any]:
    seeds: Sequence[int | None] = [None] * count
    if generator is not None:
        seeds = torch.randint(2**62, (count,), generator=generator).tolist()
    found = call.run(zip(parts, seeds, strict=True))
    from kd_core._progress import counted

    return counted(found, "map", count, "parts", at_once=pbar)


# Calling a function on the parts of a container, in this process or in others.
#
# A container is cut into parts along a batch dimension; each part is one call. The results come in
# the order of the parts, whichever process computed them. With a generator every part gets a seed
# of its own, so random results do not depend on the number of processes.


class Parallel(AbstractContainer):
    """The methods that call a function on parts of the batch."""

    __slots__ = ()

    def map(
        self,
        fn: Callable[[Self], R],
        dim: int | str = 0,
        num_workers: int = 0,
        *,
        out: Self | None = None,
        chunksize: int | None = None,
        num_chunks: int | None = None,
        pool: Pool | None = None,
        generator: torch.Generator | None = None,
        max_tasks_per_child: int | None = None,
        worker_threads: int = 1,
        index_with_generator: bool = False,
        pbar: bool = False,
        mp_start_method: str | None = None,
    ) -> R:
        """Call a function on parts of the batch, and join the results.

        Args:
            fn: called with each part; returns a container or a tensor with the rows of the part, or
                `None` for all parts. It must be picklable, unless processes are forked.
            dim: the batch dimension that is cut, or its name.
            num_workers: the number of processes; 0: all calls happen in this process.
            out: a container into whose leaves the result is written.
            chunksize: the rows of a part; 0: one row without the dimension, results are stacked.
            num_chunks: the number of parts; without both, one for each process.
            pool: an executor or a pool of `multiprocessing` that runs the calls; it is not shut
                down.
            generator: draws a seed for each part, so that random results are repeatable.
            max_tasks_per_child: after how many calls a process is replaced.
            worker_threads: the number of threads of torch in a process.
            index_with_generator: cut each part when it is needed, instead of all at once.
            pbar: show progress from the start on, not only after two seconds.
            mp_start_method: how processes start: "fork", "spawn" or "forkserver".

        Raises:
            InvalidArgument: if both `chunksize` and `num_chunks` are given.
            InvalidValue: if a leaf requires gradients, which do not reach other processes.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.arange(4)}, [4])
            >>> td.map(lambda part: part + part.batch_size[0], chunksize=3)["a"]
            tensor([3, 4, 5, 4])
        """
        call = Call(fn, num_workers, pool, max_tasks_per_child, worker_threads, mp_start_method)
        cut = Cut(self, dim, num_workers, chunksize, num_chunks, None)
        parts = iter(cut) if index_with_generator else iter(list(cut))
        results = list(results_of(call, parts, len(cut), generator, pbar))
        if not results:
            raise InvalidValue(f"`map` expected at least one row in dimension {dim}, got none.")
        if results[0] is None:
            return cast("R", None)
        joined: Any = (torch.stack if cut.single else torch.cat)(results, cut.at)
        return cast("R", joined if out is None else written_to(out, joined))

    def map_iter(
        self,
        fn: Callable[[Self], R],
        dim: int | str = 0,
        num_workers: int = 0,
        *,
        shuffle: bool = False,
        chunksize: int | None = None,
        num_chunks: int | None = None,
        pool: Pool | None = None,
        generator: torch.Generator | None = None,
        max_tasks_per_child: int | None = None,
        worker_threads: int = 1,
        index_with_generator: bool = True,
        pbar: bool = False,
        mp_start_method: str | None = None,
    ) -> Iterator[R]:
        """Call a function on parts of the batch, and yield the results in order; see `map`.

        Args:
            fn: called with each part; returns anything.
            dim: the batch dimension that is cut, or its name.
            num_workers: the number of processes; 0: all calls happen in this process.
            shuffle: take the rows in random order.
            chunksize: the rows of a part; 0: one row without the dimension.
            num_chunks: the number of parts.
            pool: an executor or a pool of `multiprocessing` that runs the calls.
            generator: draws the order and a seed for each part.
            max_tasks_per_child: after how many calls a process is replaced.
            worker_threads: the number of threads of torch in a process.
            index_with_generator: cut each part when it is needed, instead of all at once.
            pbar: show progress from the start on, not only after two seconds.
            mp_start_method: how processes start.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.arange(4)}, [4])
            >>> [total.item() for total in td.map_iter(lambda part: part["a"].sum(), chunksize=2)]
            [1, 5]
        """
        call = Call(fn, num_workers, pool, max_tasks_per_child, worker_threads, mp_start_method)
        order = None
        if shuffle:
            rows = self._kd_desc.batch[wrap_dim(dim, self._kd_desc.batch)]
            order = torch.randperm(rows, generator=generator)
        cut = Cut(self, dim, num_workers, chunksize, num_chunks, order)
        parts = iter(cut) if index_with_generator else iter(list(cut))
        return results_of(call, parts, len(cut), generator, pbar)
