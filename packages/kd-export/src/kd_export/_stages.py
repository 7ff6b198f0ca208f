"""The stages of a long call, told as they begin: by `logging`, and on stderr where one takes long.

The logger ``kd_export`` gets a record of level INFO for each stage. One that takes longer than
`PATIENCE` says so again and again, by level WARNING, so that nobody waits without a sign: where no
handler listens, it is printed.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

LOGGER = logging.getLogger("kd_export")
PATIENCE = 20.0
"""Seconds between two signs of a stage."""


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Report that a stage begins, and every `PATIENCE` seconds that it still runs.

    Args:
        name: What is done, such as "capture the module".
    """
    LOGGER.info(name)
    finished = threading.Event()
    # Compilers are kept quiet by a redirection: signs go where stderr is before the stage.
    watch = threading.Thread(target=_remind, args=(name, finished, sys.stderr), daemon=True)
    watch.start()
    try:
        yield
    finally:
        finished.set()
        watch.join()


def _remind(name: str, finished: threading.Event, stream: TextIO) -> None:
    start = time.monotonic()
    while not finished.wait(PATIENCE):
        sign = f"{name}: {time.monotonic() - start:.0f} s so far"
        if LOGGER.hasHandlers():
            LOGGER.warning(sign)
        elif LOGGER.isEnabledFor(logging.WARNING):
            print(f"kd_export: {sign}", file=stream, flush=True)
