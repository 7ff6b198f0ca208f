"""What a user passes to be stored: mappings, and values that JSON holds exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kd_export._errors import ExportError
from kd_export._schema.json_values import Json


def check_mapping(
    name: str, value: object, form: str, kind: type[ExportError] = ExportError
) -> None:
    """Check that an argument is a mapping, if it is given.

    Args:
        name: The argument.
        value: What was passed for it.
        form: An example of what may be.
        kind: What to raise.

    Raises:
        ExportError: It is not.
    """
    if value is not None and not isinstance(value, Mapping):
        raise kind(
            f"expected a dict for `{name}`, got {value!r}.",
            expected="a dict",
            got=value,
            hint=f"Pass one, such as `{name}={form}`.",
        )


def check_metadata(value: Mapping[str, object] | None) -> dict[str, Json]:
    """Check that metadata is a mapping of exact JSON.

    Raises:
        ExportError: It is not.
    """
    check_mapping("metadata", value, "{'note': ...}")
    stored = check_json(dict(value or {}))
    assert isinstance(stored, dict)
    return stored


def check_json(value: object, where: str = "metadata") -> Json:
    """Check that a value is exact JSON: no NaN, no tuples, no objects, string keys only."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list):
        return [check_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: check_json(item, f"{where}[{name!r}]") for name, item in value.items()}
    raise ExportError(
        f"`{where}` is {value!r}, which JSON cannot hold exactly.",
        got=value,
        hint="Use None, bool, int, finite float, str, lists of these, or dicts with string keys.",
    )
