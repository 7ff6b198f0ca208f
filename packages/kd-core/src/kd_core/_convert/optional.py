"""Optional libraries, imported when a format needs them."""

from __future__ import annotations

import importlib
from typing import Any, TypeAlias

from kd_core._errors import MissingDependency

Library: TypeAlias = Any
"""A module without types: most of these libraries ship none."""


def load(module: str, purpose: str) -> Library:
    """Return an optional module.

    Args:
        module: its dotted name; the package to install has the name of the first part.
        purpose: the method that needs it, for the message.

    Raises:
        MissingDependency: if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingDependency(
            f"`{purpose}` requires {package}. Install it with `pip install {package}`."
        ) from error
