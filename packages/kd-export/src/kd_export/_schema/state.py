"""Which outputs are the next values of which inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from kd_export._errors import DtypeMismatch, ExportError, KeyMismatch, ShapeMismatch, quoted
from kd_export._schema.arguments import check_mapping
from kd_export._schema.schema import Entry, Schema, find_entry

Name = TypeVar("Name")
First = TypeVar("First")
"""A name of an input in ``initial=``, which may be written otherwise than in ``state=``."""


def resolve_state(schema: Schema, state: Mapping[Name, object] | None) -> dict[str, str]:
    """Resolve the argument ``state`` to wire names.

    Raises:
        KeyMismatch: A key is not an input or output, or is named twice.
        ShapeMismatch: The next value has another shape, or other axes.
        DtypeMismatch: The next value has another dtype.
    """
    pairs: dict[str, str] = {}
    check_mapping("state", state, "{'h': ('next', 'h')}", KeyMismatch)
    for word, next_word in (state or {}).items():
        entry = find_entry(schema.inputs, word, "input")
        next_entry = find_entry(schema.outputs, next_word, "output")
        if entry.wire in pairs or next_entry.wire in pairs.values():
            raise KeyMismatch(
                f"`state` names `{entry.wire}` or `{next_entry.wire}` twice.",
                key=entry.key,
                got=(word, next_word),
                hint="Give each input of the state one output.",
            )
        _check_fit(entry, next_entry)
        pairs[entry.wire] = next_entry.wire
    if pairs and len(pairs) == len(schema.inputs):
        raise ExportError(
            f"all inputs ({quoted(pairs)}) are state, so that a step would take nothing.",
            got=tuple(pairs),
            hint="Leave one input out of `state`; its shape gives the size of the batch.",
        )
    return pairs


def _check_fit(entry: Entry, next_entry: Entry) -> None:
    kind = DtypeMismatch if entry.dtype != next_entry.dtype else ShapeMismatch
    if (entry.dtype, entry.shape) != (next_entry.dtype, next_entry.shape):
        raise kind(
            f"the state `{entry.wire}` is {entry.describe()}, but its next value "
            f"`{next_entry.wire}` is {next_entry.describe()}.",
            key=entry.key,
            expected=entry.describe(),
            got=next_entry.describe(),
            hint="Let the module give the next state in the form that it takes.",
        )
