"""What torch and the exporters say while they work, and need not: errors are explained anyway."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def silenced(*names: str) -> Iterator[None]:
    """Suppress warnings, and what loggers say."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def muted(*names: str) -> Iterator[None]:
    """Suppress, beside that, what is printed."""
    with silenced(*names), contextlib.redirect_stdout(io.StringIO()):
        yield
