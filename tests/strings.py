"""Strings of classes of their own, which tests use as keys."""

import enum

import pytest


class Mixed(str, enum.Enum):  # noqa: UP042 - prints another text than a `StrEnum`
    A = "a"
    B = "b"


class Plain(enum.StrEnum):
    A = "a"
    B = "b"


class Loud(str):
    def __str__(self) -> str:
        return "loud"

    def __repr__(self) -> str:
        return "loud()"


STRINGS = [
    pytest.param(Mixed.A, Mixed.B, id="str and Enum"),
    pytest.param(Plain.A, Plain.B, id="StrEnum"),
    pytest.param(Loud("a"), Loud("b"), id="a class of one's own"),
]
"""Strings `"a"` and `"b"`."""
