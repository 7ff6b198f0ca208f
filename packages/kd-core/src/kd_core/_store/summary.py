"""What a store holds, read from its manifest alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kd_core._errors import FormatError, KdError
from kd_core._keys import format_key
from kd_core._store.canonical import RESTORE
from kd_core._store.decoding import specs_of
from kd_core._store.manifest import VERSION, Manifest


@dataclass(frozen=True)
class StoreInfo:
    """What a store holds.

    Attributes:
        path: where it is.
        form: `"directory"`, `"file"`, or `"safetensors"` for a file of another origin.
        version: the version of the format; 0 for a file of another origin.
        generation: how often the store was saved to.
        files: the files that hold tensors.
        nbytes: the bytes of these files.
        parts: how many containers were saved and appended.
        leaves: the number of tensors.
        lines: one line for each entry, indented by its depth.

    Example:
        >>> from kd_core import TensorDict, store
        >>> _ = TensorDict({"a": [1, 2], "n": {"w": "word"}}, [2]).save("info.kd")
        >>> print(store.inspect("info.kd"))
        info.kd: directory, format 1, generation 1, 1 file, 80 bytes, 1 part, 1 tensor
        td [2]
          a: int64 [2]
          n: td [2]
            w: data
    """

    path: str
    form: str
    version: int
    generation: int
    files: tuple[str, ...]
    nbytes: int
    parts: int
    leaves: int
    lines: tuple[str, ...]

    def __str__(self) -> str:
        counts = [
            _counted(len(self.files), "file"),
            _counted(self.nbytes, "byte"),
            _counted(self.parts, "part"),
            _counted(self.leaves, "tensor"),
        ]
        head = f"{self.path}: {self.form}, format {self.version}, generation {self.generation}"
        return "\n".join([f"{head}, {', '.join(counts)}", *self.lines])


def info_of(path: str, form: str, manifest: Manifest, names: tuple[str, ...]) -> StoreInfo:
    """Return what the manifest of a store says.

    Args:
        path: where the store is.
        form: its form.
        manifest: its manifest.
        names: the files that hold tensors.

    Raises:
        FormatError: if the tree of the manifest is not valid.
    """
    tree: Any = manifest.tree
    try:
        specs = specs_of(tree, max(len(manifest.segments), 1))
        lines = tuple(_lines(tree, "", 0))
        parts = len(tree["cat"]) if "cat" in tree else 1
    except KdError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"the tree of `{path}` is not valid: {error}. {RESTORE}") from error
    return StoreInfo(
        path,
        form,
        VERSION,
        manifest.generation,
        names,
        sum(segment.size for segment in manifest.segments),
        parts,
        sum(map(len, specs)),
        lines,
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _lines(node: Any, name: str, depth: int) -> Iterator[str]:
    """Yield one line for a node, and one for each below it."""
    [(kind, value)] = node.items()
    start = f"{'  ' * depth}{name}: " if name else "  " * depth
    match kind:
        case "tensor":
            yield f"{start}{value[2]} {value[3]}"
        case "jagged":
            yield f"{start}jagged {value[0]['tensor'][2]}, {value[1]['tensor'][3][0] - 1} rows"
        case "strided":
            yield f"{start}nested {value[0]['tensor'][2]}, {value[1]['tensor'][3][0]} rows"
        case "data" | "rows":
            yield f"{start}{kind}"
        case "lazy":
            yield f"{start}stack of {len(value['members'])} along dimension {value['dim']}"
            for member in value["members"]:
                yield from _lines(member, "", depth + 1)
        case "cat":
            for part in value:
                yield from _lines(part, name, depth)
        case _:
            level = value[2] if kind == "class" else value
            title = f"{value[0]} (version {value[1]})" if kind == "class" else kind
            yield f"{start}{title} {level['batch']}"
            for key, inner in level["entries"]:
                yield from _lines(inner, format_key(key).strip("`") or '""', depth + 1)
