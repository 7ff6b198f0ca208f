"""Printing a container: the nested `repr` that readers of the field know."""

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
    from kd_core._nodes.entry import Entries, Entry, Node

INDENT = "    "


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
            keys of a level are shown.

    Raises:
        InvalidArgument: if an option does not exist, or is of another type.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, set_printoptions
        >>> with set_printoptions(show_field_device=False, show_field_is_shared=False):
        ...     print(TensorDict({"a": torch.zeros(2)}, [2]))
        TensorDict(
            fields={
                a: Tensor(shape=torch.Size([2]), dtype=torch.float32)},
            batch_size=torch.Size([2]),
            device=None,
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
    texts = {key: _describe(value) for key, value in shown.items()} | partial | ragged
    lines = [f"{key}: {texts[key]}" for key in keys[:most]]
    if len(keys) > most:
        lines.append(f"... ({len(keys) - most} more)")
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
