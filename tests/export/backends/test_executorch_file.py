"""The flatbuffer of ExecuTorch programs, read without executorch."""

import io
import random
from pathlib import Path

import pytest

import kd_export
from kd_export import ExportError, UntrustedArtifact
from kd_export._backends.executorch import (
    SCHEMA_METHOD,
    check_methods,
    read_executorch_schema,
    schema_place,
    weights_digest,
)

PATH = Path(__file__).parents[1] / "golden" / "gru.pte"
CONTENT = PATH.read_bytes()


def test_the_schema_is_found_and_the_digest_is_of_all_but_it() -> None:
    file = io.BytesIO(CONTENT)
    start, size = schema_place(file)
    assert read_executorch_schema(file).encode() == CONTENT[start : start + size]
    digest = weights_digest(file)
    assert digest == kd_export.inspect(PATH).weights
    other = bytearray(CONTENT)
    other[start : start + size] = b"x" * size
    assert weights_digest(io.BytesIO(other)) == digest
    other[-1] ^= 1
    assert weights_digest(io.BytesIO(other)) != digest


def test_further_methods_and_code_are_refused() -> None:
    check_methods(io.BytesIO(CONTENT))
    file = io.BytesIO(CONTENT)
    table = int.from_bytes(CONTENT[:4], "little")
    names = table - int.from_bytes(CONTENT[table : table + 4], "little", signed=True)
    plans = table + int.from_bytes(CONTENT[names + 6 : names + 8], "little")
    vector = plans + int.from_bytes(CONTENT[plans : plans + 4], "little")
    other = bytearray(CONTENT)
    other[vector] = 1  # one method, where there are two
    with pytest.raises(UntrustedArtifact, match="or further methods"):
        check_methods(io.BytesIO(other))
    other[vector + 3] = 1  # sixteen million
    with pytest.raises(ExportError, match="16,777,217 parts of one kind"):
        schema_place(io.BytesIO(other))
    assert file.read() == CONTENT


@pytest.mark.parametrize("content", [b"", b"PK\5\6" * 9, CONTENT[:5]])
def test_another_file_is_told(content: bytes) -> None:
    with pytest.raises(ExportError, match="not a whole ExecuTorch program"):
        read_executorch_schema(io.BytesIO(content))


def test_a_program_of_others_is_told() -> None:
    other = CONTENT.replace(SCHEMA_METHOD.encode() + b"\0", b"evaluate_\0"[-10:])
    with pytest.raises(ExportError, match=r"the \.pte file carries no kd-export schema"):
        read_executorch_schema(io.BytesIO(other))


def test_damage_is_answered_with_an_error() -> None:
    source = random.Random(0)
    for _ in range(2000):
        damaged = bytearray(CONTENT[: source.choice((len(CONTENT), source.randrange(999)))])
        for _ in range(min(len(damaged), source.randrange(4))):
            damaged[source.randrange(len(damaged))] = source.randrange(256)
        try:
            file = io.BytesIO(damaged)
            kd_export.Schema.from_json(read_executorch_schema(file))
            check_methods(file)
        except ExportError:
            continue
