"""The one file of weights that may stand beside a model.

Which name it has is a matter of the format. It must be a regular file and not a link, which could
lead to any file of the reader, and each tensor must be a part of it of the tensor's own length.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from typing import BinaryIO

from kd_export._errors import UntrustedArtifact
from kd_export._schema.files import open_regular


def mapped(path: Path) -> memoryview:
    """Map a file beside a model, as long as something reads it; one that is not there is empty.

    Raises:
        UntrustedArtifact: It is a link.
        ExportError: It is not a regular file, or it cannot be read.
    """
    if not os.path.lexists(path):
        return memoryview(b"")
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise _link(path)
    with open_regular(path) as file:
        if not os.path.samestat(status, os.fstat(file.fileno())):
            raise _link(path)  # put there in between
        return contents(file)


def contents(file: BinaryIO) -> memoryview:
    """Map the bytes of an open file, as long as something reads them."""
    if not os.fstat(file.fileno()).st_size:
        return memoryview(b"")
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _link(path: Path) -> UntrustedArtifact:
    return UntrustedArtifact(
        f"`{path.name}` beside the model is a link.",
        expected="a regular file",
        got=str(path),
        hint="Put the file itself there.",
    )


def check_extent(needed: int, offset: int, stated: int, name: str, size: int) -> None:
    """Refuse a tensor whose data is not a part of the file, or not of the tensor's own length.

    Args:
        needed: The bytes that its shape and dtype need.
        offset: Where the model says that they start.
        stated: How many bytes the model says that they are.
        name: The file.
        size: How many bytes the file has.

    Raises:
        UntrustedArtifact: The numbers do not fit.
    """
    if stated != needed or offset + needed > size:
        raise UntrustedArtifact(
            f"a tensor of {needed:,} bytes is said to be the {stated:,} bytes at {offset:,} of "
            f"`{name}`, which has {size:,}.",
            expected=needed,
            got=stated,
            hint="The file beside the model is missing or cut, or the model is forged.",
        )
