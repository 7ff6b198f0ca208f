"""Differences that are known and being mended; the table is to be empty."""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.fuzz.checking import Call
from tests.fuzz.subjects import Subject


class Known(NamedTuple):
    """One class of difference.

    Attributes:
        finding: what it is, and where it is listed.
        calls: the names of calls.
        report: what the report of it contains.
        kinds: the kinds of containers.
    """

    finding: str
    calls: str
    report: str
    kinds: str = ""


STACKS = "stack|ragged|holder"

KNOWN: tuple[Known, ...] = (
    # Mended with the lazy stacks.
    Known("A18, F12: vmap counts the dimensions of leaves", "vmap", ""),
    Known("F19", "", "reaches the stacked dimension", STACKS),
    Known("F21", "masked_fill", "only supports boolean masks", STACKS),
    Known("F26", "", "^values|^dtype|Promotion for|Integer division", STACKS),
    # Mended with the operations.
    Known("A14: writes that torch refuses at a later leaf", "", "changed though refused"),
    Known("F3", "", "reshape.. missing 1 required"),
    Known("F6", "item__|_at", "OverflowError|an integer is required"),
    Known("F16", "repeat_interleave", "batch_size .* instead"),
    Known("F17", "__getitems__", "a tensor that indexes rows must be"),
    Known("F18", "reshape|permute", "unexpected keyword"),
    Known("F20", "index_select", "batch_size .* instead|shape .* instead"),
    Known("F25: operands of unsigned", "floor|mod|remainder|div", "Promotion for"),
    # Mended with the faces.
    Known("A13: numpy() detaches", "numpy", "Can't call numpy"),
    Known("F10", "rename_key_|filter_empty_", "changed though refused", "declared"),
    Known("F14", "batch_size|auto_batch", "batch_size .* does not fit"),
    Known("F15", "consolidate", "requires_grad|shares memory"),
)


def is_known(subject: Subject, call: Call, report: str) -> bool:
    """Whether a difference is one of those that are known."""
    return any(
        re.search(known.calls, call.name)
        and re.search(known.report, report)
        and re.search(known.kinds, subject.kind)
        for known in KNOWN
    )
