"""The import finder: `tensordict` and its modules resolve to the packages of kd.

A name of such a module is looked for in this order: what this folder serves by itself
(`_functions`), then the public names of `kd_core`, `kd_nn` and `kd_probabilistic`. The last two are
found by name when a program asks: `kd_core` does not depend on them. All modules serve all names,
because users import one name from several places.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    MutableMapping,
    Sequence,
)
from functools import partial, wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from inspect import getattr_static
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from kd_core import (
    NO_DEFAULT,
    KeyNotFound,
    LazyStackedTensorDict,
    MissingDependency,
    NestedKey,
    NonTensorDataBase,
    NotOffered,
    TensorClass,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    stack,
    unravel_key,
    unravel_key_to_tuple,
)
from kd_core._containers.persistent import LinkedRows
from kd_core._keys import is_key, path_of
from kd_core._leaves.loops import has_entry
from kd_core._naming import homes
from kd_core._registry import LATER
from kd_core._switches import set_files_of_tensordict
from kd_core._torch_private import current_trace
from kd_core.drop_in import _functions, _pickles

if TYPE_CHECKING:
    from kd_core._types import Index

# What a program asked for that kd lacks: names, counted over all of its processes.


# A file that all processes of one program append to: a name a line.
VARIABLE: Final = "KD_DROP_IN_REPORT"

_missing: Counter[str] = Counter()


def ask_for_report() -> Path:
    """Ask for a report of this process and its children; return the file that collects it."""
    descriptor, path = tempfile.mkstemp(prefix="kd-drop-in-", text=True)
    os.close(descriptor)
    os.environ[VARIABLE] = path
    return Path(path)


def report_wanted() -> bool:
    """Return whether a report was asked for: attributes are recorded only then."""
    return VARIABLE in os.environ


def record_missing(name: str) -> None:
    """Count one request for a name that kd lacks."""
    _missing[name] += 1
    path = os.environ.get(VARIABLE)
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{name}\n")


def missing() -> dict[str, int]:
    """Return how often this process asked for each name that kd lacks, most frequent first.

    Example:
        >>> from kd_core import drop_in
        >>> drop_in.missing()
        {}
    """
    return dict(_missing.most_common())


def collected() -> dict[str, int]:
    """Return the counts of all processes, where a file collects them, and of this one otherwise."""
    path = os.environ.get(VARIABLE)
    if not path or not Path(path).exists():
        return missing()
    names = Path(path).read_text(encoding="utf-8").splitlines()
    return dict(Counter(names).most_common())


def rendered(counts: dict[str, int]) -> str:
    """Return the report as text, a name a line."""
    if not counts:
        return "kd: nothing that the program asked for is missing."
    width = max(map(len, counts))
    lines = [f"  {name:<{width}}  {count}" for name, count in counts.items()]
    return "\n".join([f"kd: {len(counts)} names that the program asked for are missing:", *lines])


TOP: Final = "tensordict"
# The release whose names and behaviour kd offers.
VERSION: Final = "0.15.3"
_MODULES: Final = """
    nn nn.distributions prototype store _base _C
    _contextlib _lazy _nestedkey _pytree _reductions _td _tensordict _tensorcollection _torch_func
    _unbatched _utils base functional memmap persistent tensorclass tensordict typedtensordict utils
    nn.common nn.cudagraphs nn.ensemble nn.functional_modules nn.params nn.probabilistic nn.sequence
    nn.tensorclass_module nn.utils tabular testing nn.distributions.composite
    nn.distributions.continuous nn.distributions.discrete
    nn.distributions.truncated_normal nn.distributions.utils prototype.fx
"""
NAMES: Final = frozenset((TOP, *(f"{TOP}.{each}" for each in _MODULES.split())))
# Modules whose name is that of a function, too, which is what an attribute of the package means.
_SHADOWED: Final = ("memmap", "tensorclass")
_SOURCES: Final = (
    "kd_core",
    "kd_nn",
    "kd_nn.distributions",
    "kd_probabilistic",
    "kd_core.testing",
    "kd_core.convert",
)
# Of these, the whole module stands in: names mean there what they mean nowhere else.
_FIRST: Final = {f"{TOP}.nn.distributions": "kd_nn.distributions"}
_CHILDREN: Final = str(Path(__file__).with_name("_children"))


def _found_in(module: ModuleType, name: str) -> object:
    """Return what a name of a module of tensordict means: it is looked for when it is first used.

    Raises:
        AttributeError: if kd has no such name.
    """
    full = f"{module.__name__}.{name}"
    if full in NAMES:
        return import_module(full)
    if name == "__all__":
        return _public()
    if name.startswith("__"):
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
    value = lookup(module.__name__, name)
    setattr(module, name, value)
    return value


def _names_in(module: ModuleType) -> list[str]:
    return sorted({*vars(module), *_public()})


def _public() -> list[str]:
    """Return the public names of all packages of kd that are installed.

    What a module imports for itself does not belong to them: `from tensordict import *` must not
    replace the `Path` or `cast` of a program.
    """
    names: set[str] = set()
    for source in filter(_is_there, _SOURCES):
        module = import_module(source)
        names.update(getattr(module, "__all__", None) or filter(_is_of_kd(module), dir(module)))
    return sorted(names)


def _is_of_kd(module: ModuleType) -> Callable[[str], bool]:
    def holds(name: str) -> bool:
        value: object = getattr(module, name)
        home = str(getattr(value, "__module__", ""))
        return name[0] != "_" and callable(value) and home.startswith("kd_") and "._" not in home

    return holds


class DropIn(MetaPathFinder, Loader):
    """What finds and makes the modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of tensordict; `None` for other modules."""
        if fullname in NAMES:
            # All are packages: a `from ... import` in a function, which libraries have in each
            # step, asks any other module for `__path__`, and so `_found_in`: "clients".
            return ModuleSpec(fullname, self, origin="kd", is_package=True)
        if fullname.startswith(f"{TOP}."):
            record_missing(fullname)
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python to make an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Fill in what must be there at once, and what finds the rest."""
        module.__doc__ = "A module of tensordict, whose names are those of kd."
        # As functions of the module, and not methods of a class, Python asks for them only where
        # a name is not there yet.
        module.__dict__.update(
            __getattr__=partial(_found_in, module), __dir__=partial(_names_in, module)
        )
        if module.__name__ == TOP:
            serve_containers()
            set_files_of_tensordict(True)
            _pickles.serve_pickles()
            for name in _SHADOWED:
                import_module(f"{TOP}.{name}")
                setattr(module, name, lookup(TOP, name))
            module.__dict__["__version__"] = VERSION
        elif module.__name__ == f"{TOP}.nn" and _is_there("kd_nn"):
            serve_modules()
            _pickles.serve_pickled_modules()


def lookup(module: str, name: str) -> object:
    """Return what a name of a module of tensordict means in kd.

    Raises:
        AttributeError: if kd has no such name; the name is then in the report.
        MissingDependency: if the name is in a package of kd that is not installed. It is not an
            `AttributeError`, too: `from tensordict.nn import name` would hide such an error behind
            a message of its own.
    """
    if name in _pickles.SERVED:
        return _pickles.SERVED[name]
    if name in vars(_functions) and name in _functions.SERVED:
        served: object = getattr(_functions, name)
        return served
    home, later = _functions.LATER.get(name, (homes().get(name, "kd_core"), None))
    if not _is_there(home):
        package = home.partition(".")[0].replace("_", "-")
        raise MissingDependency(
            f"`{name}` of `{module}` is in `{home}`, which is not installed. Run `pip install "
            f"{package}`."
        )
    if later is not None:
        return later()
    sources = (_FIRST[module], *_SOURCES) if module in _FIRST else _SOURCES
    for source in () if name.startswith("_") else filter(_is_there, sources):
        try:
            value: object = getattr(import_module(source), name)
        except NotOffered as error:
            record_missing(f"{module}.{name}")
            return _functions.absent(name, str(error))
        except (AttributeError, ImportError):
            continue
        else:
            return value
    record_missing(f"{module}.{name}")
    raise AttributeError(
        f"module {module!r} has no attribute {name!r}: kd has no such name", name=name
    )


def _is_there(module: str) -> bool:
    """Return whether the package that has a module is installed."""
    return find_spec(module.partition(".")[0]) is not None


def is_installed() -> bool:
    """Return whether `import tensordict` resolves to kd in this process."""
    return any(isinstance(each, DropIn) for each in sys.meta_path)


def install() -> None:
    """Make `import tensordict` resolve to kd, in this process and in those that it starts.

    Call it before the first import of `tensordict`, or of a library that imports it. A second call
    does nothing.

    Raises:
        RuntimeError: if the library `tensordict` is imported already.

    Example:
        >>> from kd_core import drop_in
        >>> drop_in.install()  # doctest: +SKIP
    """
    if is_installed():
        return
    if TOP in sys.modules:
        raise RuntimeError(
            "`tensordict` is imported already. Call `kd_core.drop_in.install()` before the first "
            "import of it."
        )
    sys.meta_path.insert(0, DropIn())
    # Children get the search path by one of these: `multiprocessing` hands over `sys.path`, all
    # others the environment. Here the finder comes first: the folder is for children alone.
    sys.path.insert(1, _CHILDREN)
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([_CHILDREN, known] if known else [_CHILDREN])


# Attributes of containers and keyed modules that libraries use without a promise of tensordict.
#
# Programs that do not run under the drop-in do not have them.


# What only tunes speed in tensordict.
_IGNORED = ("num_threads", "checked", "call_on_unbatched", "is_shared", "is_memmap", "nested")

# Any: options that are passed on unchanged to a method that checks them.


def _get(
    self: TensorDictBase, key: NestedKey, default: object = NO_DEFAULT, **how: object
) -> object:
    if how:
        return self.get(key, default, **how)
    return self[key] if default is NO_DEFAULT else self.get(key, default)


def _set(
    self: TensorDictBase,
    key: NestedKey,
    value: object,
    *,
    inplace: bool = False,
    validated: bool = False,
    ignore_lock: bool = False,
    non_blocking: bool = False,
) -> TensorDictBase:
    if inplace or non_blocking:
        return self.set(key, value, inplace=inplace, non_blocking=non_blocking)
    if type(key) is not str:
        return self.set(key, value)
    self._kd_put(key, value)  # what `set` does: libraries call this several times a step
    return self


def _get_at(
    self: TensorDictBase,
    key: str | tuple[str, ...],
    index: Index,
    default: object = NO_DEFAULT,
) -> object:
    return self.get_at(key, index, default)


def _set_at(
    self: TensorDictBase, key: str | tuple[str, ...], value: object, index: Index, **how: object
) -> TensorDictBase:
    return self.set_at_(key, value, index)


def _apply(
    self: TensorDictBase, fn: Callable[..., object], *others: TensorDictBase, **how: Any
) -> TensorDictBase:
    for name in _IGNORED:
        how.pop(name, None)
    how["filter_empty"] = how.get("filter_empty") is True
    named = how.pop("named", False)
    if not named:
        how.pop("nested_keys", None)
        how.pop("prefix", None)
    return (self.named_apply if named else self.apply)(fn, *others, **how)


def _new_unsafe(
    cls: type[TensorDict],
    source: Mapping[str, object] | None = None,
    batch_size: Sequence[int] | None = None,
    device: torch.device | None = None,
    names: Sequence[str] | None = None,
    non_blocking: bool | None = None,
    lock: bool = False,
    **entries: object,
) -> TensorDict:
    if entries:
        for name in _IGNORED:
            entries.pop(name, None)
    return TensorDict(source, batch_size, device, names, non_blocking, lock, **entries)


def _from_tensordict(
    cls: type[TensorClass],
    tensordict: TensorDictBase,
    non_tensordict: Mapping[str, object] | None = None,
    safe: bool = True,
) -> TensorClass:
    return cls.from_tensordict(tensordict, non_tensordict)


def _itself(self: TensorDictBase) -> TensorDictBase:
    """Return what holds the entries of a tensor class, a stack, or parameters: that container."""
    return self


class _Entries(MutableMapping[str, object]):
    """The entries of one level of a container, as tensordict keeps them in a dict."""

    def __init__(self, container: TensorDict) -> None:
        self._container = container

    def __getitem__(self, key: str) -> object:
        return self._container._kd_entries[key]

    def __setitem__(self, key: str, value: object) -> None:
        self._container._kd_put(key, value)

    def __delitem__(self, key: str) -> None:
        self._container.del_(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._container._kd_entries)

    def __len__(self) -> int:
        return len(self._container._kd_entries)


class _Attributes(dict[str, object]):
    """What a program sees as the attributes of an instance: the container that it holds.

    Args:
        instance: an instance of a tensor class, which has no `__dict__`.
    """

    def __init__(self, instance: TensorClass) -> None:
        super().__init__(_tensordict=instance)
        self._instance = instance

    def __setitem__(self, name: str, value: object) -> None:
        """Let the instance hold what another container holds, and nothing else."""
        if name != "_tensordict" or not isinstance(value, TensorDictBase):
            setattr(self._instance, name, value)
            return
        instance = self._instance
        instance._kd_check_unlocked("replace its entries")
        if isinstance(value, LazyStackedTensorDict):
            stack: object = instance
            if isinstance(stack, LazyStackedTensorDict):
                stack._members, stack._dim, stack._kd_desc = (
                    value._members,
                    value._dim,
                    value._kd_desc,
                )
                return
            value = value.contiguous()
        made = _from_tensordict(type(instance), value)._kd_shallow()
        instance._kd_entries, instance._kd_nested = made._kd_entries, made._kd_nested
        instance._kd_desc = made._kd_desc

    def update(self, *others: object, **named: object) -> None:
        """Set several attributes."""
        for name, value in dict(*others, **named).items():
            self[name] = value


def _with_attributes(getter: Callable[[object, str], object]) -> Callable[[Any, str], object]:
    """Return a `__getattr__` that finds `__dict__`, which instances of tensor classes lack.

    A compiler that traces does not: its guards read the dict of the interpreter, and there is none.
    """

    def find(self: TensorClass, name: str) -> object:
        if current_trace() is None:
            if name == "__dict__":
                return _Attributes(self)
            if name in type(self)._kd_declared.fields and name in self._kd_entries:
                return self.get(name)  # a `__getattribute__` of an author asked `object` in vain
        return getter(self, name)

    return find


def _has_names(self: TensorDictBase) -> bool:
    return any(name is not None for name in self.names)


def _stack_onto_(
    self: TensorDictBase, list_item: Sequence[TensorDictBase], dim: int
) -> TensorDictBase:
    return stack(list_item, dim, out=self)


def _has_exclusive_keys(self: LazyStackedTensorDict) -> bool:
    common = set(self.keys())
    return any(set(member.keys()) != common for member in self.tensordicts) or any(
        getattr(value, "_has_exclusive_keys", False)
        for member in self.tensordicts
        for value in member.values()
        if is_tensor_collection(value)
    )


def _maybe_names(self: TensorDictBase) -> list[str | None] | None:
    return list(self.names) if _has_names(self) else None


def _pairs(
    self: TensorDictBase,
    include_nested: bool = False,
    leaves_only: bool = False,
    *,
    collapse: bool = False,
    is_leaf: Callable[[type], bool] | None = None,
    sorting_keys: Sequence[NestedKey] | None = None,
    default: object = None,
) -> list[tuple[NestedKey, object]]:
    found: list[tuple[NestedKey, object]] = []
    if isinstance(self, LazyStackedTensorDict) and not collapse:
        for number, member in enumerate(self.tensordicts):
            for key, value in _pairs(member, include_nested, leaves_only, is_leaf=is_leaf):
                path = key if isinstance(key, tuple) else (key,)
                found.append(((str(number), *path), value))
    else:
        for key, value in self.items(include_nested, leaves_only, is_leaf=is_leaf):
            if not (leaves_only and is_leaf is None and is_non_tensor(value)):
                found.append((key, value))
    if sorting_keys is None:
        return found
    values = dict(found)
    return [
        (key, values[key] if default is None else values.get(key, default)) for key in sorting_keys
    ]


def _values_list(self: TensorDictBase, *args: Any, **options: Any) -> list[object]:
    return [value for _, value in _pairs(self, *args, **options)]


def _items_list(
    self: TensorDictBase, *args: Any, **options: Any
) -> tuple[list[NestedKey], list[object]]:
    found = _pairs(self, *args, **options)
    return [key for key, _ in found], [value for _, value in found]


def _select(
    self: TensorDictBase, *keys: NestedKey, set_shared: bool = True, **options: bool
) -> TensorDictBase:
    return self.select(*keys, **options)


def _exclude(
    self: TensorDictBase, *keys: NestedKey, set_shared: bool = True, **options: bool
) -> TensorDictBase:
    return self.exclude(*keys, **options)


def _get_sub_tensordict(self: TensorDictBase, idx: Index) -> TensorDictBase:
    """Return rows; what is written to them is written to the container, new entries, too."""
    made = self[idx]
    return LinkedRows.of(self, idx, made) if type(self) is TensorDict else made


def _sync_all(self: TensorDictBase) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _leaving_out_keys(update_: Callable[..., object]) -> Callable[..., object]:
    """Return `update_` that writes what is there, and leaves out other keys.

    Libraries write whole steps into buffers which hold a part of them.
    """

    @wraps(update_)
    def write(
        self: TensorDictBase, input_dict_or_td: object = NO_DEFAULT, *args: object, **named: object
    ) -> object:
        try:
            return update_(self, input_dict_or_td, *args, **named)
        except KeyNotFound:  # nothing is written yet
            if named.get("keys_to_update") is not None:
                raise
            return update_(self, _known_keys(self, input_dict_or_td), *args, **named)

    return write


def _known_keys(td: TensorDictBase, source: Any) -> dict[NestedKey, object]:
    """Return the entries of a source whose keys a container has."""
    found: dict[NestedKey, object] = {}
    keys = td.keys(True)
    for key, value in source.items():
        if key not in keys:
            continue
        entry: object = td.get(key) if isinstance(value, (Mapping, TensorDictBase)) else None
        found[key] = _known_keys(entry, value) if isinstance(entry, TensorDictBase) else value
    return found


def _class_method(function: Callable[..., object]) -> object:
    """Return a class method; a function of a bound type variable is not one for checkers."""
    return classmethod(function)


class _Keys(KeysView[str]):
    """The keys of one level. A tuple of one string is found too, and of a stack a tuple of two."""

    __slots__ = ("_depth",)
    _mapping: Mapping[str, Any]

    def __init__(self, level: Mapping[str, Any], depth: int) -> None:
        self._mapping, self._depth = level, depth  # a call of `super` takes a third of `keys()`

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping)

    def __reversed__(self) -> Iterator[str]:
        return iter(list(self._mapping)[::-1])

    def __contains__(self, key: object) -> bool:
        if type(key) is str:
            return key in self._mapping
        if not is_key(key):
            return False
        path = path_of(key)
        return len(path) <= self._depth and has_entry(self._mapping, path)

    def __repr__(self) -> str:
        return f"keys({list(self)})"


def _with_tuples(keys: Callable[..., object]) -> Callable[..., object]:
    """Return `keys` whose view of one level finds a tuple of one string.

    Libraries look for keys that they have made tuples of.
    """

    @wraps(keys)
    def view(
        self: TensorDictBase,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: Callable[[type], bool] | None = None,
        *,
        sort: bool = False,
    ) -> object:
        if include_nested or leaves_only or sort:
            return keys(self, include_nested, leaves_only, is_leaf, sort=sort)
        return _Keys(self._kd_entries, 2 if isinstance(self, LazyStackedTensorDict) else 1)

    return view


def serve_containers() -> None:
    """Add the attributes of containers."""
    for name, value in {
        "_get_str": _get,
        "_get_tuple": _get,
        "_set_str": _set,
        "_set_tuple": _set,
        "_get_at_str": _get_at,
        "_get_at_tuple": _get_at,
        "_set_at_str": _set_at,
        "_set_at_tuple": _set_at,
        "_fast_apply": _apply,
        "_apply_nest": _apply,
        "_has_names": _has_names,
        "_maybe_names": _maybe_names,
        "_values_list": _values_list,
        "_items_list": _items_list,
        "_clone": TensorDictBase.clone,
        "_select": _select,
        "_exclude": _exclude,
        "_stack_onto_": _stack_onto_,
        "_sync_all": _sync_all,
        "_get_sub_tensordict": _get_sub_tensordict,
        "_has_exclusive_keys": False,
        "update_": _leaving_out_keys(TensorDictBase.update_),
        "keys": _with_tuples(TensorDictBase.keys),
    }.items():
        setattr(TensorDictBase, name, value)
    if _is_there("kd_nn"):  # a program need not import `tensordict.nn` for `as_module=True`
        LATER["params_of"] = "kd_nn"
    for cls, name, value in (
        (TensorDict, "_new_unsafe", _class_method(_new_unsafe)),
        (
            TensorClass,
            "_from_tensordict",
            _class_method(_from_tensordict),
        ),
        (TensorClass, "_tensordict", property(_itself)),
        (TensorClass, "__getattr__", _with_attributes(vars(TensorClass)["__getattr__"])),
        (TensorDict, "_tensordict", property(_Entries)),
        (LazyStackedTensorDict, "_tensordict", property(_itself)),
        (
            LazyStackedTensorDict,  # of instances: it makes one
            "_from_tensordict",
            _class_method(_from_tensordict),
        ),
        (LazyStackedTensorDict, "_has_exclusive_keys", property(_has_exclusive_keys)),
    ):
        setattr(cls, name, value)
    if report_wanted():
        for base in (TensorDictBase, NonTensorDataBase):
            _watch(base)


def _watch(base: type) -> None:
    """Record which attributes are asked of instances of kd's classes below `base` in vain."""
    defining: list[type] = [base]
    for cls in defining:
        children: list[type] = type.__subclasses__(cls)
        for child in children:
            if child.__module__.startswith("kd_") and child not in defining:
                defining.append(child)
    for cls in defining:
        if cls is base or "__getattr__" in vars(cls):
            setattr(cls, "__getattr__", _recording(getattr(cls, "__getattr__", None)))  # noqa: B010  # type checkers know no such method


def _recording(getter: Callable[[object, str], object] | None) -> Callable[[object, str], object]:
    """Return a `__getattr__` that records what `getter` does not find."""

    def find(self: object, name: str) -> object:
        try:
            return object.__getattribute__(self, name) if getter is None else getter(self, name)
        except AttributeError:
            cls = type(self)
            outermost = getattr(cls, "__getattr__", None) is find
            # not what a property of the class raised
            if outermost and not name.startswith(("__", "_kd")) and not hasattr(cls, name):
                ours = (each for each in cls.__mro__ if each.__module__.startswith("kd_"))
                record_missing(f"{next(ours).__name__}.{name}")
            raise

    return find


class _Module(Protocol):
    """A keyed module, of packages that are above this one; some have a distribution."""

    out_keys: list[NestedKey]
    out_keys_source: list[NestedKey]
    default_interaction_type: object
    num_samples: Sequence[int] | None
    generator: torch.Generator | NestedKey | None
    dist_sample_keys: list[NestedKey]
    log_prob_keys: list[NestedKey]


def _compute_in_and_out_keys(
    self: object, modules: Iterable[object]
) -> tuple[list[NestedKey], list[NestedKey]]:
    found: tuple[list[NestedKey], list[NestedKey]]
    found = import_module("kd_nn").TensorDictSequential._kd_keys_of(modules)
    return found


def _write_to_tensordict(
    self: _Module,
    tensordict: TensorDictBase,
    tensors: Iterable[object],
    tensordict_out: TensorDictBase | None = None,
    out_keys: Iterable[NestedKey] | None = None,
) -> TensorDictBase:
    target = tensordict if tensordict_out is None else tensordict_out
    for key, value in zip(self.out_keys if out_keys is None else out_keys, tensors, strict=True):
        target.set(key, value)
    return target


def _dist_sample(
    self: _Module,
    dist: torch.distributions.Distribution,
    interaction_type: object = None,
    *,
    generator: torch.Generator | None = None,
) -> object:
    package = import_module("kd_probabilistic")
    kind = interaction_type or package.interaction_type() or self.default_interaction_type
    if kind is not package.InteractionType.RANDOM:
        return package.estimate(dist, kind)
    with _functions._use_generator(generator):
        shape = torch.Size(self.num_samples or ())
        return dist.rsample(shape) if dist.has_rsample else dist.sample(shape)


def _resolve_generator(
    self: _Module, tensordict: TensorDictBase
) -> tuple[torch.Generator | None, Callable[[torch.Generator], None] | None]:
    found = self.generator
    if found is None or isinstance(found, torch.Generator):
        return found, None
    seed = tensordict[found]
    if isinstance(seed, torch.Generator):
        return seed, None

    def write_back(used: torch.Generator) -> None:
        following = torch.randint(0, 2**63 - 1, (), generator=used, device=used.device)
        tensordict.set(found, following)

    device = tensordict.device or torch.device("cpu")
    return torch.Generator(device).manual_seed(int(seed)), write_back


def _update_td_lp(self: _Module, lp: TensorDictBase) -> None:
    for sample, wanted in zip(self.dist_sample_keys, self.log_prob_keys, strict=False):
        *before, last = unravel_key_to_tuple(sample)
        made = unravel_key((*before, f"{last}_log_prob"))
        if made != wanted and made in lp.keys(True):
            lp.rename_key_(made, wanted)


def _aggregates(self: object) -> bool:
    return bool(import_module("kd_probabilistic").composite_lp_aggregate())


class _OutKeys:
    """Read as the keys of a module; what a module assigns are its keys, unless it computes those.

    Args:
        name: the attribute of tensordict.
        source: the attribute that is read: all that is written, or what is visible.
        assign: what is done with a module and the keys that it is given.
    """

    def __init__(
        self, name: str, source: str, assign: Callable[[_Module, list[NestedKey]], None]
    ) -> None:
        self.name, self.source, self.assign = name, source, assign

    def __get__(self, module: _Module | None, owner: type) -> object:
        if module is None:
            return self
        own = vars(module)
        return own[self.name] if self.name in own else getattr(module, self.source)

    def __set__(self, module: _Module, keys: object) -> None:
        read = getattr(getattr_static(type(module), "out_keys", None), "fget", None)
        if isinstance(keys, (list, tuple)) and str(getattr(read, "__module__", "")) in _READS_KEYS:
            self.assign(module, list(keys))
        else:
            vars(module)[self.name] = keys


_READS_KEYS: Final = frozenset({"kd_nn._modules.base", "kd_nn._modules.module"})


def _set_out_keys(module: _Module, keys: list[NestedKey]) -> None:
    """Let a module write other keys; what is visible of them stays."""
    visible = vars(module).get("_kd_selected")
    import_module("kd_nn").TensorDictModuleBase.out_keys.fset(module, keys)
    vars(module)["_kd_selected"] = visible


def _set_visible_keys(module: _Module, keys: list[NestedKey]) -> None:
    base = import_module("kd_nn").TensorDictModuleBase
    if keys == module.out_keys_source:
        base.reset_out_keys(module)
    else:
        base.select_out_keys(module, *keys)


def serve_modules() -> None:
    """Add the attributes of keyed modules."""
    package = import_module("kd_nn")
    base = package.TensorDictModuleBase
    base._out_keys = _OutKeys("_out_keys", "out_keys_source", _set_out_keys)
    base._out_keys_apparent = _OutKeys("_out_keys_apparent", "out_keys", _set_visible_keys)
    base._write_to_tensordict = _write_to_tensordict
    package.TensorDictSequential._compute_in_and_out_keys = _compute_in_and_out_keys
    package.TensorDictParams._param_td = property(_itself)
    _serve_dispatch(type(package.TensorDictModule.forward._kd_call))
    if find_spec("kd_probabilistic") is not None:
        _serve_probabilistic()
    if report_wanted():
        _watch(base)


def _serve_dispatch(call: Any) -> None:
    """Let methods get what they were called with, where a program says so."""
    enter = call.enter

    def entered(self: Any, module: object, /, *args: object, **kwargs: object) -> object:
        if _functions.dispatching():
            return enter(self, module, *args, **kwargs)
        return self.function(module, *args, **kwargs)

    call.enter = entered


def _serve_probabilistic() -> None:
    package = import_module("kd_probabilistic")
    for name in ("ProbabilisticTensorDictModule", "ProbabilisticTensorDictSequential"):
        getattr(package, name)._dist_sample = _dist_sample
    module = package.ProbabilisticTensorDictModule
    module._resolve_generator = _resolve_generator
    module._update_td_lp = _update_td_lp
    module._composite_lp_aggreate_at_init = property(_aggregates)
    module._CHANGE_IN_C_LP_A = "{}: `composite_lp_aggregate` was {}, and is {} now."


# The pytest plugin: `pytest -p kd_core.drop_in` runs a suite that imports tensordict, on kd.


class _Group(Protocol):
    def addoption(self, name: str, *, action: str, help: str) -> None: ...


class _Parser(Protocol):
    def getgroup(self, name: str) -> _Group: ...


class _Early(Protocol):
    known_args_namespace: Namespace


class _Config(Protocol):
    def getoption(self, name: str) -> bool: ...


class _Writer(Protocol):
    def write_line(self, line: str) -> None: ...


def pytest_addoption(parser: _Parser) -> None:
    """Add the option `--kd-report`."""
    parser.getgroup("kd").addoption(
        "--kd-report",
        action="store_true",
        help="list what the tests asked of tensordict that kd lacks, by name and count",
    )


def pytest_load_initial_conftests(early_config: _Early) -> None:
    """Install the drop-in before the first `conftest.py` is imported."""
    if early_config.known_args_namespace.kd_report:
        atexit.register(ask_for_report().unlink)
    install()


def pytest_terminal_summary(terminalreporter: _Writer, config: _Config) -> None:
    """Print the report, if it was asked for."""
    if config.getoption("--kd-report"):
        terminalreporter.write_line(rendered(collected()))
