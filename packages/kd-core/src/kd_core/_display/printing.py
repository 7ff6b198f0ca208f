"""Printing a container: a short line for each leaf, or all attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypedDict, Unpack, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from kd_core._batch.names import names_of
from kd_core._errors import InvalidArgument, KdError, ShapeMismatch, a_type, listed, wrong_type
from kd_core._leaves.loops import entries_of
from kd_core._leaves.shapeless import is_shapeless
from kd_core._naming import public_in
from kd_core._nodes.entry import tensor_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kd_core._nodes.entry import Data, Entries, Entry, Node

INDENT = "    "
_WIDTH: Final = 88
"""What is not longer stands in one line."""
_MOST_OF_DATA: Final = 40
_BITS: Final = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


class PrintOptions(TypedDict, total=False):
    """What a printed container shows; see `set_printoptions`."""

    show_batch_size: bool
    show_device: bool
    show_is_shared: bool
    show_shape: bool
    show_field_device: bool
    show_dtype: bool
    show_field_is_shared: bool
    show_grad: bool
    sort_keys: bool
    max_keys: int
    compact: bool


_DEFAULTS: Final = PrintOptions(
    show_batch_size=True,
    show_device=True,
    show_is_shared=True,
    show_shape=True,
    show_field_device=True,
    show_dtype=True,
    show_field_is_shared=True,
    show_grad=False,
    sort_keys=True,
    max_keys=200,
    compact=True,
)
_options = _DEFAULTS.copy()


def get_printoptions() -> PrintOptions:
    """Return what printed containers show; see `set_printoptions`.

    Example:
        >>> from kd_core import get_printoptions
        >>> get_printoptions()["max_keys"]
        200
    """
    return _options.copy()


@public_in("kd_core")
class set_printoptions:  # noqa: N801  # called like the function of torch
    """Set what printed containers show, until it is set again; in a `with` block, until its end.

    Without arguments the defaults are restored. The options hold for all threads.

    Args:
        **options: `show_batch_size`, `show_device` and `show_is_shared` of a container;
            `show_shape`, `show_field_device`, `show_dtype`, `show_field_is_shared` and `show_grad`
            of a tensor; `sort_keys`: in alphabetical order, else as inserted; `max_keys`: how many
            keys of a level are shown; `compact`: a leaf is shown as its dtype and its shape behind
            the batch dimensions, such as `f32[4]`, else with the attributes that are chosen.

    Raises:
        InvalidArgument: if an option does not exist, or is of another type.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, set_printoptions
        >>> td = TensorDict({"a": torch.zeros(2, 4)}, [2])
        >>> print(td)
        TensorDict(batch_size=[2], fields={a: f32[4]})
        >>> with set_printoptions(compact=False, show_field_device=False, show_device=False):
        ...     print(td)
        TensorDict(
            fields={
                a: Tensor(shape=torch.Size([2, 4]), dtype=torch.float32, is_shared=False)},
            batch_size=torch.Size([2]),
            is_shared=False)
    """

    def __init__(self, **options: Unpack[PrintOptions]) -> None:
        self._before = _options.copy()
        for name, value in options.items():
            default = _DEFAULTS.get(name)
            if default is None:
                raise InvalidArgument(
                    f"`{name}` is not a valid option; available options: {listed(_DEFAULTS)}."
                )
            if type(value) is not type(default):
                raise wrong_type(f"`{name}`", a_type(default), value)
        if options:
            _options.update(options)
        else:
            _options.update(_DEFAULTS)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        _options.update(self._before)


def describe_leaf(value: Tensor) -> str:
    """Return a leaf as text: class, shape, device, dtype, and whether processes share it."""
    kind = "Parameter" if isinstance(value, torch.nn.Parameter) else type(value).__name__
    if is_lazy(value):  # it has no shape yet
        return f"{type(value).__name__}()"
    parts: list[str] = []
    if _options["show_shape"]:
        shape = "ragged" if is_shapeless(value) else torch.Size(value.shape)
        parts.append(f"shape={shape}")
    if _options["show_field_device"]:
        parts.append(f"device={value.device}")
    if _options["show_dtype"]:
        parts.append(f"dtype={value.dtype}")
    if _options["show_field_is_shared"]:
        shared = value.is_cuda or (value.device.type == "cpu" and _is_shared(value))
        parts.append(f"is_shared={shared}")
    if _options["show_grad"]:
        parts.append(f"requires_grad={value.requires_grad}")
    return f"{kind}({', '.join(parts)})"


def _is_shared(value: Tensor) -> bool:
    try:
        return bool(value.is_shared())  # type: ignore[no-untyped-call]  # torch does not type it
    except (RuntimeError, NotImplementedError, ValueError):
        # Fake, functional and uninitialised tensors have no storage.
        return False


def describe_node(node: Node) -> str:
    """Return a container and what it holds as text; other nodes describe themselves."""
    entries = entries_of(node)
    if entries is None:
        return repr(node)
    if _options["compact"]:
        parts = [f"batch_size={list(node._kd_desc.batch)}"]
        if node._kd_desc.device is not None:
            parts.append(f"device={node._kd_desc.device}")
        names = names_of(node._kd_desc.batch)
        parts += [f"names={list(names)}"] if any(names) else []
        dim = getattr(node, "stack_dim", None)
        parts += [] if dim is None else [f"stack_dim={dim}"]
        head = f"{type(node).__name__}({', '.join(parts)}, fields="
        return f"{head}{_compact_level(node, entries, len(head))})"
    lines, shown = _lines(entries, _describe)
    inner = _indent(",\n".join(lines), 2)
    fields = f"{INDENT}fields={{\n{inner}}}" if lines else f"{INDENT}fields={{\n{INDENT}}}"
    parts = [fields]
    if _options["show_batch_size"]:
        parts.append(f"{INDENT}batch_size={torch.Size(node._kd_desc.batch)}")
    if _options["show_device"]:
        parts.append(f"{INDENT}device={node._kd_desc.device}")
    if _options["show_is_shared"]:
        leaves = [leaf for leaf in map(tensor_of, shown.values()) if leaf is not None]
        shared = bool(leaves) and all(_is_shared_anywhere(leaf) for leaf in leaves)
        parts.append(f"{INDENT}is_shared={shared}")
    body = ",\n".join(parts)
    return f"{type(node).__name__}(\n{body}{_names(node)}{_stack_dim(node)})"


def _lines(
    entries: Entries, describe: Callable[[Entry | type[KdError]], str]
) -> tuple[list[str], dict[str, Entry | type[KdError]]]:
    """Return a line for each key of a level, and the entries that are shown."""
    partial: dict[str, str] = getattr(entries, "_partial", dict)()
    keys = [*entries, *partial]
    if _options["sort_keys"]:
        keys.sort()
    most = _options["max_keys"]
    shown = {key: _entry(entries, key) for key in keys[:most] if key not in partial}
    ragged = {
        key: cast("str", getattr(entries, "_ragged")(key))  # noqa: B009  # a stack has it
        for key, value in shown.items()
        if value is ShapeMismatch
    }
    texts = {key: describe(value) for key, value in shown.items()} | partial | ragged
    lines = [f"{key}: {texts[key]}" for key in keys[:most]]
    if len(keys) > most:
        lines.append(f"... ({len(keys) - most} more)")
    return lines, shown


def _compact_level(node: Node, entries: Entries, used: int) -> str:
    """Return the entries of a level in one line, if it has room, else a line for each."""
    ndim = len(node._kd_desc.batch)
    lines, _ = _lines(entries, lambda value: _compact(value, ndim, node))
    together = f"{{{', '.join(lines)}}}"
    if used + len(together) <= _WIDTH and "\n" not in together:
        return together
    return f"{{\n{_indent(f',{chr(10)}'.join(lines), 1)}}}"


def _compact(value: Entry | type[KdError], ndim: int, above: Node) -> str:
    """Return an entry of a level with this number of batch dimensions as text."""
    if isinstance(value, type):
        return "differs among the members"
    if isinstance(value, Tensor):
        return _short(value, ndim, above)
    leaf = tensor_of(value)
    if leaf is not None:
        return f"unbatched {_short(leaf, 0, above)}"
    entries = entries_of(value)
    if entries is None:
        data = repr(cast("Data", value)._kd_item())
        return data if len(data) <= _MOST_OF_DATA else f"{data[: _MOST_OF_DATA - 3]}..."
    batch = value._kd_desc.batch
    kind = "" if type(value) is type(above) else type(value).__name__
    other = f"batch_size={list(batch)} " if batch != above._kd_desc.batch else ""
    return f"{kind}{' ' if kind else ''}{other}{_compact_level(value, entries, _WIDTH // 3)}"


def _short(value: Tensor, ndim: int, above: Node) -> str:
    """Return the dtype and the shape behind the batch dimensions, and an unusual device."""
    if is_lazy(value):  # it has no shape yet
        return f"{type(value).__name__}()"
    name = short_name(value.dtype)
    shape = "ragged" if is_shapeless(value) else ",".join(map(str, value.shape[ndim:]))
    is_told = value.device.type == "cpu" or above._kd_desc.device is not None
    return f"{name}[{shape}]" if is_told else f"{name}[{shape}] {value.device}"


def short_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: `f32`, `i64`, `bool`."""
    name = str(dtype).removeprefix("torch.")
    word, _, rest = name.partition("_")
    head = word.rstrip("0123456789")
    if head not in _BITS or head == name:
        return name
    return _BITS[head] + word[len(head) :] + (f"_{rest}" if rest else "")


def _names(node: Node) -> str:
    names = names_of(node._kd_desc.batch)
    return f",\n{INDENT}names={list(names)}" if any(names) else ""


def _stack_dim(node: Node) -> str:
    dim = getattr(node, "stack_dim", None)
    return "" if dim is None else f",\n{INDENT}stack_dim={dim}"


def _is_shared_anywhere(leaf: Tensor) -> bool:
    return leaf.is_cuda or (leaf.device.type == "cpu" and _is_shared(leaf))


def _entry(entries: Entries, key: str) -> Entry | type[KdError]:
    """Return an entry, or the class of the error why it cannot be read: printing does not fail."""
    try:
        return entries[key]
    except KdError as error:
        return type(error)  # the error itself would hold frames that hold it, and the container


def _describe(value: Entry | type[KdError]) -> str:
    if isinstance(value, type):
        return "differs among the members"
    return describe_leaf(value) if isinstance(value, Tensor) else describe_node(value)


def _indent(text: str, levels: int) -> str:
    return "\n".join(INDENT * levels + line for line in text.split("\n"))
