"""From a file to a program ready to run: the one way for `open`, `verify` and `save`.

The schema is read first, from the file itself, so that a file of another kind is refused before
it is read whole. The digest is computed over the bytes that are loaded.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path

from kd_export._errors import UntrustedArtifact, VerifyError
from kd_export._running.backend import Backend, Runner, backend_for
from kd_export._schema.files import open_regular
from kd_export._schema.schema import Schema


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded file."""

    backend: Backend
    data: bytes
    schema: Schema
    runner: Runner


def load_file(path: Path, *, trusted: bool, sha256: str | None) -> Loaded:
    """Load a file that the caller trusts, or that executes nothing."""
    backend = backend_for(path)
    with open_regular(path) as file:
        backend.read_schema(file)
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        data = file.read(size)
    _check_trust(data, path, executes=backend.executes, trusted=trusted, sha256=sha256)
    loaded = load_bytes(backend, data)
    check_weights(loaded, path)
    return loaded


def load_bytes(backend: Backend, data: bytes) -> Loaded:
    """Load the bytes of a file."""
    schema = backend.read_schema(io.BytesIO(data))
    runner = backend.load(data, schema)
    return Loaded(backend, data, schema, runner)


def check_weights(loaded: Loaded, path: Path) -> None:
    """Check that the weights are those that the file was verified with.

    Raises:
        VerifyError: They are not.
    """
    found = loaded.backend.weights(loaded.data, loaded.runner)
    if found is not None and found != loaded.schema.weights:
        raise VerifyError(
            f"the weights in `{path.name}` are not those that it was exported with.",
            expected=loaded.schema.weights,
            got=found,
            hint="The file was changed after its export: export again.",
        )


def _check_trust(
    data: bytes, path: Path, *, executes: bool, trusted: bool, sha256: str | None
) -> None:
    if sha256 is not None:
        digest = hashlib.sha256(data).hexdigest()
        if digest != sha256.lower():
            raise UntrustedArtifact(
                f"the SHA-256 of `{path.name}` is not the one given.",
                expected=sha256,
                got=digest,
                hint="The file was changed since its digest was computed.",
            )
    elif executes and not trusted:
        raise UntrustedArtifact(
            f"opening `{path.name}` executes the program it holds.",
            expected="trusted=True or sha256=...",
            hint="Pass `trusted=True` if you know who made it, or `sha256=` with its digest.",
        )
