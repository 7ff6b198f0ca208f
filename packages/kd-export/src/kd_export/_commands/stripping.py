"""A file without what only its makers should know: source paths, stack traces, sample inputs.

What kd_export writes holds none of it. What others wrote is written anew, and nothing of it is run.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from kd_export._backends.aoti import copy_without_sources
from kd_export._errors import NotExportable
from kd_export._running.backend import backend_for
from kd_export._schema.archive import copy_member, open_zip
from kd_export._schema.files import open_regular, read_regular, replacing
from kd_export._schema.onnx_stripping import stripped
from kd_export._schema.trust import disarm

_EXTRA = "extra/"


def strip(path: Path) -> None:
    """Write a file anew, in place, without source paths, stack traces and sample inputs.

    Raises:
        UntrustedArtifact: The file holds what is not part of an exported program.
        NotExportable: The format is not one of those that hold such things.
    """
    name = backend_for(path).name
    if name not in _STRIPPED:
        raise NotExportable(
            f"`{path.name}` is {name}, which holds no source paths or sample inputs.",
            expected=tuple(_STRIPPED),
            got=name,
            hint="Strip `.pt2`, `.aoti.pt2` and `.onnx` files.",
        )
    with replacing(path) as temporary:
        _STRIPPED[name](path, temporary)


def _program(path: Path, target: Path) -> None:
    """Write an archive as it is loaded, and the extra files of the one it is from."""
    with open_regular(path) as file:
        archive, _ = disarm(file)
        with archive, target.open("wb") as copy:
            shutil.copyfileobj(archive, copy)
        with open_zip(file) as source, zipfile.ZipFile(target, "a") as written:
            named = [(info, info.filename.partition("/")[2]) for info in source.infolist()]
            for info, name in (one for one in named if one[1].startswith(_EXTRA)):
                copy_member(source, info, written, f"model/{name}")


def _model(path: Path, target: Path) -> None:
    target.write_bytes(stripped(read_regular(path)))


_STRIPPED: dict[str, Callable[[Path, Path], None]] = {
    "torch.export": _program,
    "AOTInductor": copy_without_sources,
    "ONNX": _model,
}
