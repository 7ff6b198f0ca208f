"""Containers whose entries are on a server of Redis: `TensorDictStore`, and stacks of them.

A container has an id. One hash holds what its entries are, by their paths, and one string the bytes
of each tensor. A tensor that is read remembers where it is from: a write in place to it, or to a
part of it, is sent to the server, as far as the bytes that it covers.

Must not know operations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, cast
from uuid import uuid4

import torch
from torch import Tensor

from kd_core import _registry as registry
from kd_core._base import TensorDictBase
from kd_core._containers.lazy_stack import LazyStackedTensorDict
from kd_core._convert.plain import checked, load
from kd_core._descriptor import describe
from kd_core._errors import InvalidValue
from kd_core._keys import KeyPath, format_key
from kd_core._leaves.arrays import values_of_rows
from kd_core._naming import public_in
from kd_core._nodes import is_data, is_row_data, is_unbatched, kept_value
from kd_core._protocol import AbstractContainer, lock
from kd_core._shapes import without_names
from kd_core._store.mapped_tensor import address_of, is_writing
from kd_core._torch_private import without_torch_function

if TYPE_CHECKING:
    from typing import Self

    from kd_core._descriptor import Descriptor
    from kd_core._nodes import Entry
    from kd_core._types import BatchSize, DeviceLike

Client: TypeAlias = Any
Send: TypeAlias = "Callable[[int, bytes], object]"


class _Place:
    """Where entries are: a server, and the id of a container."""

    __slots__ = ("client", "id", "options")

    def __init__(self, options: dict[str, object], id: str, client: Client = None) -> None:
        self.options, self.id = options, id
        self.client = _connected(options) if client is None else client

    @property
    def name(self) -> str:
        return f"{self.options['prefix']}:{self.id}"

    def described(self) -> dict[KeyPath, dict[str, object]]:
        """Return what all entries are, in the order in which they were added."""
        found = self.client.hgetall(f"{self.name}:entries")
        rows = {tuple(json.loads(path)): json.loads(row) for path, row in found.items()}
        return dict(sorted(rows.items(), key=lambda item: item[1]["number"]))

    def describe(self, path: KeyPath, row: dict[str, object]) -> None:
        known = self.client.hget(f"{self.name}:entries", json.dumps(path))
        number = self.client.incr(f"{self.name}:count") if known is None else None
        row["number"] = json.loads(known)["number"] if number is None else number
        self.client.hset(f"{self.name}:entries", json.dumps(path), json.dumps(row))

    def bytes_of(self, path: KeyPath) -> str:
        return f"{self.name}:bytes:{json.dumps(path)}"

    def remove(self, path: KeyPath) -> None:
        for each in self.described():
            if each[: len(path)] == path:
                self.client.hdel(f"{self.name}:entries", json.dumps(each))
                self.client.delete(self.bytes_of(each))


def _connected(options: dict[str, Any]) -> Client:
    redis = load("redis", "TensorDictStore")
    names = ("host", "port", "db", "unix_socket_path")
    given = {name: options[name] for name in names if options.get(name) is not None}
    return redis.Redis(**given, **options.get("more", {}))


class StoredTensor(Tensor):
    """A tensor that was read from a server: writes in place to it are sent there."""

    _send: Send | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call a function of torch on the plain tensors, and send what it wrote."""
        given = kwargs or {}
        first = args[:1] if args else tuple(given.values())[:1]
        with without_torch_function():
            result = func(*args, **given)
            for tensor in _stored_in((given.get("out"), *(first if is_writing(func) else ()))):
                tensor._written()
            sources = _stored_in(args)
            return _views(result, sources) if sources else result

    def _written(self) -> None:
        if self._send is None or not self.numel():
            return
        plain = self.as_subclass(Tensor)
        if not plain.is_contiguous():  # all that it is a part of
            size = plain.untyped_storage().nbytes()
            whole = torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage())
            self._send(0, _octets(whole[:size]))
        else:
            self._send(int(plain.storage_offset()) * plain.itemsize, _octets(plain))

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        """Return what a pickle of the values holds."""
        with without_torch_function():
            reduced: tuple[object, ...] = self.as_subclass(Tensor).__reduce_ex__(protocol)
        return reduced

    def __deepcopy__(self, memo: object) -> Tensor:
        """Return a copy of the values."""
        with without_torch_function():
            return self.as_subclass(Tensor).clone()


def _stored_in(value: object) -> list[StoredTensor]:
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _stored_in(each)]
    return [value] if isinstance(value, StoredTensor) else []


def _views(result: object, sources: list[StoredTensor]) -> object:
    """Return a result of which what shares the memory of a source is sent when it is written."""
    if type(result) is list:
        return [_views(each, sources) for each in result]
    if type(result) is tuple:
        return tuple([_views(each, sources) for each in result])
    if type(result) is not Tensor or not (address := address_of(result)):
        return result
    for source in sources:
        if address_of(source) == address:
            result = result.as_subclass(StoredTensor)
            result._send = source._send
            break
    return result


def _octets(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


class _Entries(Mapping[str, "Entry"]):
    """The entries of one level, which are read when they are asked for."""

    __slots__ = ("_known", "_owner")

    def __init__(self, owner: TensorDictStore) -> None:
        self._owner = owner
        self._known: dict[str, Entry] = {}
        """Nested containers, and data with one value per row: the same object each time."""

    def _rows(self) -> dict[str, dict[str, object]]:
        self.write_back()
        path = self._owner._path
        return {
            each[-1]: row
            for each, row in self._owner._place.described().items()
            if each[:-1] == path
        }

    def __getitem__(self, key: str) -> Entry:
        row = self._rows()[key]
        known = self._known.get(key)
        return self._read(key, row) if known is None else known

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows())

    def __len__(self) -> int:
        return len(self._rows())

    def write_back(self) -> None:
        """Send data with one value per row that was changed in place."""
        place, path = self._owner._place, self._owner._path
        for key, value in self._known.items():
            if not is_data(value):
                continue
            found = place.client.hget(f"{place.name}:entries", json.dumps((*path, key)))
            row = None if found is None else json.loads(found)
            kept = kept_value(value)
            if row is not None and row.get("value") != kept:
                place.describe((*path, key), {**row, "value": checked((key,), kept)})

    def _read(self, key: str, row: dict[str, Any]) -> Entry:
        owner, path = self._owner, (*self._owner._path, key)
        desc = owner._kd_desc
        if row["kind"] == "td":
            batch = describe(tuple(row["batch"]), desc.device)
            made = TensorDictStore._of(owner._place, path, batch)
            self._known[key] = made
            return self._known[key]
        if row["kind"] == "data":
            return registry.wrap_data(row["value"], desc)
        if row["kind"] == "rows":
            values = values_of_rows(row["value"], desc.batch, "the data")
            self._known[key] = registry.wrap_rows(values, None, desc)
            return self._known[key]
        client, name = owner._place.client, owner._place.bytes_of(path)
        dtype, shape = getattr(torch, row["dtype"]), tuple(row["shape"])
        data = bytearray(client.get(name) or b"")
        if not torch.Size(shape).numel():
            return torch.empty(shape, dtype=dtype, device=desc.device)
        flat = torch.frombuffer(data, dtype=dtype).view(shape)
        if desc.device is not None and desc.device.type != "cpu":
            return flat.to(desc.device)
        made_leaf = flat.as_subclass(StoredTensor)
        made_leaf._send = lambda start, octets: client.setrange(name, start, octets)
        return made_leaf


@public_in("kd_core")
class TensorDictStore(TensorDictBase):
    """A container whose entries are on a server of Redis, which several machines share.

    Entries are read when they are used, and every write is sent: of an entry, of a row, in place to
    a leaf. The result of an operation is a `TensorDict`. Data that is not a tensor is kept as JSON.

    Args:
        backend: `"redis"`.
        host: the server.
        port: its port.
        db: the number of the database.
        unix_socket_path: a socket instead of host and port.
        prefix: the start of all names on the server.
        batch_size: the leading dimensions of every entry.
        device: where entries are moved when they are read.
        client: a client of `redis` that is connected already.
        td_id: the id of the container; `None`: a new one.
        cache_metadata: nothing: what entries are is read each time.
        more: further options of the client.

    Raises:
        MissingDependency: if redis is not installed.

    Example:
        >>> from kd_core import TensorDict, TensorDictStore
        >>> def share(td: TensorDict) -> TensorDictStore:
        ...     return TensorDictStore.from_tensordict(td, host="localhost")
    """

    __slots__ = ("__weakref__", "_kd_desc", "_kd_entries", "_kd_holders", "_path", "_place")

    _kd_entries: _Entries
    _kd_desc: Descriptor
    _place: _Place
    _path: KeyPath

    def __init__(
        self,
        *,
        backend: str = "redis",
        host: str = "localhost",
        port: int = 6379,
        db: int = 0,
        unix_socket_path: str | None = None,
        prefix: str = "tensordict",
        batch_size: BatchSize | None = None,
        device: DeviceLike | None = None,
        client: object = None,
        td_id: str | None = None,
        cache_metadata: bool = True,
        **more: object,
    ) -> None:
        if backend != "redis":
            raise InvalidValue(f"`backend` must be 'redis', got {backend!r}.")
        options: dict[str, object] = {"host": host, "port": port, "db": db, "prefix": prefix}
        options |= {"unix_socket_path": unix_socket_path, "more": more}
        place = _Place(options, td_id or str(uuid4()), client)
        found = place.client.get(f"{place.name}:batch")
        if batch_size is None:
            sizes = () if found is None else tuple(json.loads(found))
        else:
            sizes = tuple(torch.empty(batch_size, device="meta").shape)
        self._fill(place, (), describe(sizes, None if device is None else torch.device(device)))
        self._keep_batch()

    def _fill(self, place: _Place, path: KeyPath, desc: Descriptor) -> None:
        self._place, self._path, self._kd_desc = place, path, desc
        self._kd_entries = _Entries(self)

    @classmethod
    def _of(cls, place: _Place, path: KeyPath, desc: Descriptor) -> TensorDictStore:
        made = object.__new__(TensorDictStore)
        made._fill(place, path, desc)
        return made

    def _keep_batch(self) -> None:
        batch = list(without_names(self._kd_desc.batch))
        if self._path:
            self._place.describe(self._path, {"kind": "td", "batch": batch})
        else:
            self._place.client.set(f"{self._place.name}:batch", json.dumps(batch))

    @property
    def td_id(self) -> str:
        """The id of the container on the server."""
        return self._place.id

    @classmethod
    def from_tensordict(cls, td: TensorDictBase, **options: object) -> TensorDictStore:
        """Send a container to a server, and return the one there; options as of the class."""
        made = TensorDictStore(batch_size=td.batch_size, **options)  # type: ignore[arg-type]  # of a client
        for key, value in td._kd_entries.items():
            made._kd_set_entry(key, value)
        return made

    @classmethod
    def from_store(cls, *, td_id: str, **options: object) -> TensorDictStore:
        """Return the container of an id; options as of the class."""
        return TensorDictStore(td_id=td_id, **options)  # type: ignore[arg-type]  # of a client

    def to_local(self) -> TensorDictBase:
        """Return a copy in memory."""
        return self.to_tensordict()

    def clear_redis(self) -> None:
        """Remove the container from the server."""
        client = self._place.client
        for key in client.scan_iter(match=f"{self._place.name}:*"):
            client.delete(key)

    def close(self) -> None:
        """Close the connection."""
        self._kd_entries.write_back()
        self._place.client.close()

    def _kd_set_entry(self, key: str, value: Entry) -> None:
        place, path = self._place, (*self._path, key)
        if isinstance(value, AbstractContainer):
            entries = dict(value._kd_entries)
            self._forget(key)
            made = self._of(place, path, self._kd_desc.unlocked().with_batch(value._kd_desc.batch))
            made._keep_batch()
            for inner, each in entries.items():
                made._kd_set_entry(inner, each)
        elif isinstance(value, Tensor):
            if value.is_nested or value.layout is not torch.strided:
                raise InvalidValue(
                    f"entry {format_key((key,))} must be a dense tensor, got layout "
                    f"`{value.layout}`. Convert it with `to_dense` or `to_padded_tensor`."
                )
            octets = _octets(value.detach().cpu().resolve_conj().resolve_neg())
            self._forget(key, but=value)
            dtype = str(value.dtype).removeprefix("torch.")
            place.client.set(place.bytes_of(path), octets)
            shape = list(value.shape)
            place.describe(path, {"kind": "tensor", "dtype": dtype, "shape": shape})
        elif is_unbatched(value):
            raise InvalidValue(
                f"entry {format_key((key,))} is an `UnbatchedTensor`, which a store does not hold. "
                "Give it the batch dimensions with `expand`."
            )
        else:
            data = checked((key,), kept_value(value))
            self._forget(key)
            place.describe(path, {"kind": "rows" if is_row_data(value) else "data", "value": data})

    def _forget(self, key: str, but: object = None) -> None:
        self._kd_entries._known.pop(key, None)
        row = self._place.client.hget(f"{self._place.name}:entries", json.dumps((*self._path, key)))
        if row is not None and (but is None or json.loads(row)["kind"] != "tensor"):
            self._place.remove((*self._path, key))

    def _kd_del_entry(self, key: str) -> None:
        self._kd_entries._known.pop(key, None)
        self._place.remove((*self._path, key))

    def _kd_describe(self, desc: Descriptor) -> None:
        old, self._kd_desc = self._kd_desc, desc
        if old.batch != desc.batch:
            self._keep_batch()

    def _kd_like(self, entries: dict[str, Entry], desc: Descriptor) -> Self:
        return registry.make_dense(entries, desc)

    def _kd_with_descriptor(self, desc: Descriptor) -> Self:
        dense: Self = registry.make_dense(dict(self._kd_entries), self._kd_desc)
        return dense._kd_with_descriptor(desc)

    def __deepcopy__(self, memo: object) -> Self:
        return cast("Self", self.to_tensordict())

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        self._kd_entries.write_back()
        place = self._place.options, self._place.id, self._path
        return restore_store, (*place, tuple(self._kd_desc.batch), self._kd_desc.lock)


def restore_store(
    options: dict[str, object],
    td_id: str,
    path: KeyPath,
    batch: tuple[int, ...],
    reason: str | None,
) -> TensorDictStore:
    """Connect to the server of a container again; called by pickle."""
    made = TensorDictStore._of(_Place(options, td_id), tuple(path), describe(batch))
    return made if reason is None else lock(made, reason)


@public_in("kd_core")
class LazyStackedTensorDictStore(LazyStackedTensorDict):
    """A lazy stack whose members are on a server of Redis: members may differ in shape.

    Example:
        >>> from kd_core import LazyStackedTensorDict, LazyStackedTensorDictStore
        >>> def share(stack: LazyStackedTensorDict) -> LazyStackedTensorDictStore:
        ...     return LazyStackedTensorDictStore.from_lazy_stack(stack, host="localhost")
    """

    __slots__ = ()

    @classmethod
    def from_lazy_stack(
        cls, lazy_td: LazyStackedTensorDict, **options: object
    ) -> LazyStackedTensorDictStore:
        """Send a lazy stack to a server, and return the one there."""
        members = [TensorDictStore.from_tensordict(td, **options) for td in lazy_td._members]
        place = members[0]._place
        stacked = {"dim": lazy_td._dim, "members": [each.td_id for each in members]}
        place.client.set(f"{place.name}:stack", json.dumps(stacked))
        return LazyStackedTensorDictStore(*members, stack_dim=lazy_td._dim)

    @classmethod
    def from_store(cls, *, td_id: str, **options: object) -> LazyStackedTensorDictStore:
        """Return the stack of an id."""
        first = TensorDictStore.from_store(td_id=td_id, **options)
        found = first._place.client.get(f"{first._place.name}:stack")
        if found is None:
            raise InvalidValue(f"`td_id` must be that of a stack, got {td_id!r}.")
        stacked = json.loads(found)
        members = [TensorDictStore.from_store(td_id=each, **options) for each in stacked["members"]]
        return LazyStackedTensorDictStore(*members, stack_dim=stacked["dim"])

    @property
    def _stores(self) -> list[TensorDictStore]:
        return [each for each in self._members if isinstance(each, TensorDictStore)]

    @property
    def td_id(self) -> str:
        """The id of the stack on the server."""
        return self._stores[0].td_id

    def to_local(self) -> LazyStackedTensorDict:
        """Return a copy in memory."""
        members = [each.to_local() for each in self._stores]
        return LazyStackedTensorDict(*members, stack_dim=self._dim)

    def clear_redis(self) -> None:
        """Remove the stack from the server."""
        for each in self._stores:
            each.clear_redis()

    def close(self) -> None:
        """Close the connections."""
        for each in self._stores:
            each.close()


def _to_store(td: TensorDictBase, options: dict[str, object]) -> TensorDictBase:
    if isinstance(td, LazyStackedTensorDict):
        return LazyStackedTensorDictStore.from_lazy_stack(td, **options)
    return TensorDictStore.from_tensordict(td, **options)


registry.register("to_store", _to_store)
