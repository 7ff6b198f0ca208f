"""What a call did, in plain values that two libraries can be compared by.

Knows how to read a result, a container and an exception through public names; must not know which
differences are allowed.
"""

import inspect
import math
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from tests.interop.calls.subjects import Library

BUILTIN_ERRORS = (
    KeyError, IndexError, NotImplementedError, RuntimeError, AttributeError, TypeError, ValueError,
    OSError, AssertionError, StopIteration, ImportError,
)  # fmt: skip


def leaves(value: Any, lib: Library, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a container with their paths, members of lazy stacks one by one."""
    if isinstance(value, lib.UnbatchedTensor):
        yield path, inside(value)
    elif isinstance(value, torch.Tensor):
        yield path, value
    elif not lib.is_non_tensor(value) and lib.is_tensor_collection(value):
        for key, entry in entries(value, lib):
            yield from leaves(entry, lib, f"{path}.{key}")


def class_of(value: Any, lib: Library) -> str:
    """Return the name of a class that users can import: a subclass of it may have a private one.

    A lazy stack of instances of a tensor class is asked as programs ask: it is an instance, too.
    """
    for cls in (lib.Based, lib.Decorated):
        if isinstance(value, cls):
            return str(cls.__name__)
    if isinstance(value, lib.LazyStackedTensorDict) and not lib.is_non_tensor(value):
        return "LazyStackedTensorDict"
    names = (cls.__name__ for cls in type(value).__mro__ if cls.__name__ != "GeneralMethods")
    return next(name for name in names if not name.startswith("_"))  # without what is mixed in


def entries(value: Any, lib: Library) -> list[tuple[str, Any]]:
    """Return the entries of a container as they are stored; members of a lazy stack as numbers."""
    if class_of(value, lib) == "LazyStackedTensorDict":
        return [(str(i), member) for i, member in enumerate(value.tensordicts)]
    return [(key, value.get(key)) for key in type(value).keys(value)]


class Aliases:
    """Names for the storages of a container before the call, so that views can be told."""

    def __init__(self, subject: Any, lib: Library) -> None:
        self.subject = subject
        self.names: dict[int, str] = {}
        self.mapped: set[str] = set()
        self.kept = list(leaves(subject, lib))  # keeps addresses from being used again
        for path, tensor in self.kept:
            if lib.is_mapped(tensor):
                self.mapped.add(path)
            try:
                pointer = tensor.untyped_storage().data_ptr()
            except (RuntimeError, NotImplementedError):
                continue
            if pointer:
                self.names.setdefault(pointer, path)

    def of(self, tensor: torch.Tensor) -> str:
        try:
            pointer = tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):
            return "?"
        return self.names.get(pointer, "new") if pointer else "new"


def number(value: Any) -> Any:
    if isinstance(value, float):
        return (
            "nan"
            if math.isnan(value)
            else float(f"{value:.5g}")
            if math.isfinite(value)
            else str(value)
        )
    return value


def plain(value: Any) -> Any:
    """Return values of any kind as numbers, strings, lists and dicts."""
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, torch.Tensor) or type(value).__module__ == "numpy":
        return plain(value.tolist())
    return number(value) if isinstance(value, (int, float, str, type(None))) else repr(value)


def describe(value: Any, lib: Library, aliases: Aliases, depth: int = 0) -> Any:
    """Return plain values that say all about a result that a program may rely on."""
    if depth > 8:
        return "..."
    if value is aliases.subject:
        return "self"
    if isinstance(value, lib.UnbatchedTensor):
        return ("UnbatchedTensor", tuple(value.batch_size), tensor(inside(value), lib, aliases))
    if isinstance(value, torch.Tensor):
        return tensor(value, lib, aliases)
    if isinstance(value, type):
        return f"class {value.__name__}"
    if lib.is_non_tensor(value) or lib.is_tensor_collection(value):
        return container(value, lib, aliases, depth)
    if isinstance(value, torch.Size):
        return ("Size", *value)
    if isinstance(value, Mapping):
        return (
            "dict" if isinstance(value, dict) else "mapping",
            [(str(k), describe(v, lib, aliases, depth + 1)) for k, v in value.items()],
        )
    if isinstance(value, (list, tuple)):
        kind = "namedtuple" if hasattr(value, "_fields") else type(value).__mro__[-2].__name__
        return (kind, [describe(v, lib, aliases, depth + 1) for v in value])
    if isinstance(value, (types.GeneratorType, Iterator)) or type(value).__name__.endswith(
        ("View", "keys", "values", "items", "Keys", "Values", "Items")
    ):
        return ("iterable", [describe(v, lib, aliases, depth + 1) for v in value])
    if isinstance(value, (bool, int, float, str, bytes, complex, type(None))):
        return number(value)
    if isinstance(value, (torch.device, torch.dtype, torch.layout, Enum, Path)):
        return str(value).rpartition("/")[2] if isinstance(value, Path) else str(value)
    if type(value).__module__ == "numpy":
        listed = value.tolist() if hasattr(value, "tolist") else repr(value)
        return (type(value).__name__, str(getattr(value, "dtype", "")), plain(listed))
    return f"object {type(value).__name__}" if not callable(value) else "callable"


def inside(value: Any) -> torch.Tensor:
    """Return the tensor that an `UnbatchedTensor` is, or holds: it is one in the peer alone."""
    held: torch.Tensor = value if isinstance(value, torch.Tensor) else value.data
    return held.as_subclass(torch.Tensor)


def tensor(value: torch.Tensor, lib: Library, aliases: Aliases) -> Any:
    # asked as programs ask: what is in a memory map is an instance, whatever its type; of views of
    # it the peer says so for some, by how they were taken
    in_map = lib.is_mapped(value) or aliases.of(value) in aliases.mapped
    kind = "MemoryMappedTensor" if in_map else type(value).__name__
    if value.is_nested:
        return (kind, str(value.dtype), [tensor(part, lib, aliases) for part in value.unbind()])
    values = plain(value.detach().tolist()) if value.device.type != "meta" else "meta"
    return (
        kind, str(value.dtype), tuple(value.shape), values, value.requires_grad, aliases.of(value),
    )  # fmt: skip


def container(value: Any, lib: Library, aliases: Aliases, depth: int) -> Any:
    public = class_of(value, lib)
    if depth and public == "TensorDictParams":
        public = "TensorDict"  # here each level is a module, so that all its tensors are registered
    batch = tuple(inspect.getattr_static(type(value), "batch_size").__get__(value))
    facts = {
        "class": public,
        "batch": batch,
        "device": str(getattr(value, "device", None)),
        "locked": bool(getattr(value, "is_locked", False)),
    }
    names = (getattr(value, "names", None) or ())[: len(batch)]  # others name nothing
    if any(name is not None for name in names):
        facts["names"] = tuple(names)
    if lib.is_non_tensor(value):
        return (facts, plain(value.tolist()))
    if public == "LazyStackedTensorDict":
        facts["stack_dim"] = value.stack_dim
    return (
        facts,
        [
            # what a library notes of a tree is for `to_pytree` alone
            (key, "..." if key == "_pytree_type" else describe(entry, lib, aliases, depth + 1))
            for key, entry in entries(value, lib)
        ],
    )


def family(error: BaseException) -> tuple[str, ...]:
    """Return the builtin classes under which a program may catch an error."""
    return tuple(cls.__name__ for cls in BUILTIN_ERRORS if isinstance(error, cls))


def outcome(call: Callable[[], Any], subject: Any, lib: Library) -> dict[str, Any]:
    """Return what a call gave and what it wrote."""
    aliases = Aliases(subject, lib)
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = call()
        except Exception as error:
            found["error"] = family(error)
            found["text"] = f"{type(error).__name__}: {str(error)[:150]}"
        else:
            try:
                found["result"] = describe(result, lib, aliases)
            except Exception as error:
                found["result"] = f"unreadable: {'RuntimeError' in family(error)}"
        try:
            found["after"] = container(subject, lib, Aliases(subject, lib), 0)
            found["moved"] = [(path, aliases.of(leaf)) for path, leaf in leaves(subject, lib)]
        except Exception as error:
            found["after"] = f"unreadable: {type(error).__name__}: {str(error)[:80]}"
    return found


# What Python itself says when a library did not check its arguments: no program relies on it.
ACCIDENTS = (
    "object has no attribute", "index out of range", "is not iterable", "is not subscriptable",
    "object is not callable", "not supported between", "unexpected keyword argument",
    "positional argument", "invalid combination of arguments", "unsupported operand type",
    "object cannot be interpreted", "Is a directory", "of a 0-d tensor",
    "got multiple values for argument", "cannot convert dictionary update sequence",
    "KeyError: '0'", "AttributeError: __delitem__", "list indices must be integers",
    "Multiple dispatch failed",
    "KeyError: 'swap_dest'", "pop from empty list",
    "Failed to convert the metadata to json",
)  # fmt: skip


def is_accident(found: dict[str, Any]) -> bool:
    """Return whether an error is one of Python from inside of a library, or says: not yet."""
    return "NotImplementedError" in found["error"] or any(
        words in found["text"] for words in ACCIDENTS
    )


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Return what differs, in a word; `None` if a program sees no difference."""
    if "error" in ours and "error" in theirs:
        if not set(theirs["error"]) <= set(ours["error"]) and not is_accident(theirs):
            return "kind of error"
        return None
    if "error" in theirs:
        return None  # a program that relies on an error of the peer says so by `except`
    if str(theirs["result"]).startswith("unreadable"):
        return None  # no program can use what raises when it is read
    if "error" in ours:
        return "raises here"
    if ours["result"] != theirs["result"] and not is_view_of_list(ours, theirs):
        return "result: " + where(ours["result"], theirs["result"])
    for aspect in ("after", "moved"):
        if ours.get(aspect) != theirs.get(aspect):
            return f"{aspect}: " + where(ours.get(aspect), theirs.get(aspect))
    return None


def is_view_of_list(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Return whether the results are an iterable and a list or tuple of the same items.

    A named tuple is a tuple, with the same items by position.
    """
    kinds = ("iterable", "list", "tuple")
    mine, other = ours["result"], theirs["result"]
    if not all(isinstance(result, tuple) and len(result) == 2 for result in (mine, other)):
        return False
    named = (mine[0], other[0]) == ("namedtuple", "tuple")
    alike = named or all(kind in kinds for kind in (mine[0], other[0]))
    return alike and bool(mine[1] == other[1])


def where(ours: Any, theirs: Any) -> str:
    """Return the first place at which two descriptions differ."""
    if type(ours) is not type(theirs) or not isinstance(ours, (dict, list, tuple)):
        return f"{short(ours)} != {short(theirs)}"
    if isinstance(ours, dict):
        for key in {**ours, **theirs}:
            if ours.get(key) != theirs.get(key):
                return f"{key} {where(ours.get(key), theirs.get(key))}"
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return where(mine, other)
    return f"length {len(ours)} != {len(theirs)}"


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
