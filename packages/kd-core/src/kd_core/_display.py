"""How a node or a table of texts prints, and how a notebook shows it.

Knows entries, texts and cells; must not know how a container stores. Every key and every value is
escaped in a notebook, because both may come from a file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ContextDecorator
from html import escape
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Final, TypedDict, Unpack

import torch
from torch import Tensor
from torch.nn import Buffer as Buffer
from torch.nn.parameter import is_lazy

from kd_core._errors import InvalidArgument, KdError, ShapeMismatch, a_type, listed, wrong_type
from kd_core._leaves.loops import entries_of, is_shapeless, unwrapped
from kd_core._naming import public_in
from kd_core._nodes import is_unbatched, leaf_or_node, tensor_of
from kd_core._shapes import names_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kd_core._nodes import Entries, Entry, Node


# Showing a container in a notebook: a table that folds, without scripts or style sheets.
#
# Knows entries; must not know containers. Every key and every value is escaped, because both may
# come from a file.

MOST_KEYS: Final = 200
LONGEST_VALUE: Final = 80


def html_of_node(node: Node) -> str:
    """Return the HTML of a container: a line for each leaf, a block that folds for each level."""
    return _level(node, type(node).__name__, is_open=True)


def _level(node: Node, title: str, is_open: bool) -> str:
    entries = entries_of(node) or {}
    facts = f"batch_size={tuple(node._kd_desc.batch)}, device={node._kd_desc.device}"
    keys = list(entries)
    rows = [_row(entries, key) for key in keys[:MOST_KEYS]]
    if len(keys) > MOST_KEYS:
        rows.append(f"<div>... ({len(keys) - MOST_KEYS} more)</div>")
    return (
        f"<details{' open' if is_open else ''}><summary><b>{escape(title)}</b> "
        f"<code>{escape(facts)}</code></summary>"
        f'<div style="margin-left: 1.5em">{"".join(rows)}</div></details>'
    )


def _row(entries: Entries, key: str) -> str:
    try:
        entry = entries[key]
    except KdError:  # members of a stack differ: showing does not fail
        return _row_of_html(key, "differs among the members")
    found = leaf_or_node(entry)
    if isinstance(found, Tensor):
        dtype = str(found.dtype).removeprefix("torch.")
        shape = "ragged" if is_shapeless(found) else tuple(found.shape)
        return _row_of_html(key, f"{type(entry).__name__} {shape} {dtype} {found.device}")
    if entries_of(found) is not None:
        return _level(found, key, is_open=False)
    text = repr(unwrapped(found))
    return _row_of_html(key, text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}...")


def _row_of_html(key: str, text: str) -> str:
    return f"<div>{escape(key)}: <code>{escape(text)}</code></div>"


# Printing a container: a short line for each leaf, or all attributes.

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
        self._options = options or _DEFAULTS
        _options.update(self._options)

    def __enter__(self) -> None:
        _options.update(self._options)

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
        return bool(value.is_shared())
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
        leaves = [leaf for leaf in map(tensor_of, shown.values()) if torch.is_tensor(leaf)]
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
        key: getattr(entries, "_ragged")(key)  # noqa: B009  # a stack has it
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
    if is_unbatched(value):
        leaf: object = value._tensor  # or what `tree_map` put in place of it
        return f"unbatched {_short(leaf, 0, above) if torch.is_tensor(leaf) else repr(leaf)}"
    entries = entries_of(value)
    if entries is None:
        data = repr(unwrapped(value))
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


# Reports for people: how long blocks took, and what is in a folder.

_logger: Final = logging.getLogger("kd")
_UNITS: Final = ("B", "KB", "MB", "GB", "TB")


@public_in("kd_core")
class timeit(ContextDecorator):  # noqa: N801  # the name that users of tensordict know
    """Measure how long a block or a function takes, under a name; see `print`.

    Args:
        name: the name under which times are added.

    Example:
        >>> from kd_core import timeit
        >>> with timeit("step"):
        ...     pass
        >>> timeit.erase()
    """

    _REG: ClassVar[dict[str, list[float]]] = {}
    """For each name the mean time, the sum of times, in seconds, and how often it was measured."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        """Start measuring."""
        self._start = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Add the time to those of the name."""
        _, total, count = self._REG.get(self.name, (0.0, 0.0, 0))
        total, count = total + time.perf_counter() - self._start, count + 1
        self._REG[self.name] = [total / count, total, count]

    @classmethod
    def print(cls, prefix: str | None = None) -> None:
        """Log the mean and the sum of the times of each name, the longest first.

        Args:
            prefix: what each line starts with.
        """
        for name, (mean, total, _) in sorted(cls._REG.items(), key=_total, reverse=True):
            start = "" if prefix is None else f"{prefix} -- "
            _logger.info("%s%s took %.4g msec (total = %.4g sec)", start, name, mean * 1000, total)

    @classmethod
    def erase(cls) -> None:
        """Set the times of all names to zero."""
        for name in cls._REG:
            cls._REG[name] = [0.0, 0.0, 0]


def _total(item: tuple[str, list[float]]) -> float:
    return item[1][1]


def print_directory_tree(path: str | Path, indent: str = "", display_metadata: bool = True) -> str:
    """Log what is in a folder, level by level, and return it as text.

    Args:
        path: the folder.
        indent: what each line starts with.
        display_metadata: start with the size of all files.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, print_directory_tree
        >>> saved = TensorDict({"a": torch.ones(2)}).save("listed.kd")
        >>> print_directory_tree("listed.kd").splitlines()[1]
        'listed.kd/'
    """
    folder, lines = Path(path), list[str]()
    if display_metadata:
        size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
        lines.append(f"Directory size: {_readable(size)}")
    _list_into(lines, folder, indent)
    for line in lines:
        _logger.info(line)
    return "\n".join(lines)


def _list_into(lines: list[str], folder: Path, indent: str) -> None:
    lines.append(f"{indent}{folder.name}/")
    for each in sorted(folder.iterdir()):
        if each.is_dir():
            _list_into(lines, each, f"{indent}    ")
        else:
            lines.append(f"{indent}    {each.name}")


def _readable(size: float) -> str:
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.2f} {_UNITS[unit]}"


# A table of texts that a prompt shows as lines and a notebook as a table.
#
# Knows rows of cells; must not know containers.


class Table(str):
    """A table as text, which a prompt shows as it prints it.

    Attributes:
        rows: its cells; the first row is the head.
    """

    __slots__ = ("rows",)
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, rows: Sequence[Sequence[str]], right: int = -1) -> Table:
        """Align cells in columns.

        Args:
            rows: the head, and the rows; each has as many cells.
            right: the column that is aligned to the right.

        Example:
            >>> Table.of([("name", "size"), ("a", "3"), ("longer", "12")])
            name    size
            a          3
            longer    12
        """
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        right %= len(widths)
        lines = []
        for row in rows:
            cells = [
                cell.rjust(width) if place == right else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        made = cls("\n".join(lines))
        made.rows = tuple(map(tuple, rows))
        return made

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        head, *rows = self.rows
        lines = [_line(head, "th"), *(_line(row, "td") for row in rows)]
        return f"<table>{''.join(lines)}</table>"


def _line(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
