"""The steps of a module as an artefact lists them: what runs, on which keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kd_export._errors import Key
from kd_export._schema.json_values import Json, as_dict, as_list, as_str
from kd_export._schema.wire import wire_name
from kd_export._tables import Row

STEP_HEADER = ("step", "runs", "reads", "writes")


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the module that a program was made from.

    Attributes:
        name: Its name in the sequence; of one in a sequence inside, the names joined by dots.
        runs: The class or function that runs, with its settings as the module prints them.
        reads: The keys it reads.
        writes: The keys it writes.

    Example:
        >>> Step("0", "Clip(low=-1.0, high=1.0)", (("raw",),), (("action",),)).row()
        ('0', 'Clip(low=-1.0, high=1.0)', 'raw', 'action')
    """

    name: str
    runs: str
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]

    def row(self) -> Row:
        """Return the step as a row of a table under `STEP_HEADER`."""
        reads, writes = (", ".join(map(wire_name, keys)) for keys in (self.reads, self.writes))
        return self.name, self.runs, reads, writes

    def to_data(self) -> Json:
        """Return the step as plain data, fit for JSON."""
        reads: list[Json] = [list(key) for key in self.reads]
        writes: list[Json] = [list(key) for key in self.writes]
        return {"name": self.name, "runs": self.runs, "reads": reads, "writes": writes}

    @classmethod
    def from_data(cls, item: Json) -> Step:
        """Read a step from plain data that may hold anything."""
        data: Mapping[str, Json] = as_dict(item)
        return cls(
            as_str(data["name"]), as_str(data["runs"]), _keys(data["reads"]), _keys(data["writes"])
        )


def _keys(item: Json) -> tuple[Key, ...]:
    keys = tuple(tuple(as_str(part) for part in as_list(key)) for key in as_list(item))
    if () in keys:
        raise ValueError("a step has an empty key")
    return keys
