"""Run a program of a client; print the share of its CPU time that is tensordict's, or kd's, own."""

import contextlib
import gc
import io
import json
import runpy
import signal
import sys
import time
from types import FrameType

OWN = ("tensordict", "kd_core", "kd_nn", "kd_probabilistic")
# What torch does for itself. Its other modules of Python pass calls on: they belong to the caller.
TORCH = ("nn.modules", "nn.utils", "optim", "autograd", "distributions", "_dynamo", "_functorch")
TORCHS = tuple(f"torch.{each}" for each in TORCH)
SECONDS = 0.001


class Sampler:
    """What was running each time that a millisecond of CPU time, or a tick of the system, passed.

    The time since the last sample belongs to the nearest caller that is not of Python's library or
    of those modules of torch that pass calls on: what the keyed library asks torch to compute is
    its own, and the modules and the functions of users that it calls are not. A collection of
    garbage belongs to nobody: it falls where it falls. What the library imports of others is
    theirs, since others mostly import it, too; where none does, a program can be below its floor.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[float, float]] = []
        """Ends and lengths of the times that are the library's own."""
        self._last = self._collecting = time.process_time()

    def start(self) -> None:
        """Begin to take samples."""
        gc.callbacks.append(self._collect)
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, SECONDS, SECONDS)

    def stop(self) -> None:
        """Take no more samples."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        gc.callbacks.remove(self._collect)

    def _collect(self, phase: str, _: object) -> None:
        if phase == "start":
            self._collecting = time.process_time()
        else:
            self._last += time.process_time() - self._collecting

    def _sample(self, _: int, frame: FrameType | None) -> None:
        if frame is None or frame.f_code is Sampler._collect.__code__:
            return
        if frame.f_lineno == frame.f_code.co_firstlineno and frame.f_code.co_name != "<module>":
            frame = frame.f_back  # a function that has not begun: its caller was running
        now = time.process_time()
        if is_own(frame):
            self.samples.append((now, now - self._last))
        self._last = now

    def own(self, start: float, end: float) -> float:
        """Return the time between two moments of CPU time that is the library's own."""
        return sum(length for at, length in self.samples if start < at <= end)


def is_own(frame: FrameType | None) -> bool:
    """Return whether what runs in a frame is the library's own, its import included."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if frame.f_code.co_name == "_find_and_load":
            module = str(frame.f_locals.get("name", ""))
        top = module.partition(".")[0]
        if top in OWN:
            return True
        generated = not top  # what a program compiles from text
        passes_on = top == "torch" and not module.startswith(TORCHS)
        if not (generated or passes_on or top in sys.stdlib_module_names):
            return False
        frame = frame.f_back
    return False


def main() -> None:
    """Print the shares of the first run, with the imports, and of the runs after it."""
    program, *sys.argv = sys.argv[1], *sys.argv[1:]
    printed = io.StringIO()
    sampler = Sampler()
    sampler.start()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(program, run_name="__main__")
    sampler.stop()
    end = time.process_time()
    whole = json.loads(printed.getvalue().splitlines()[-1])["cpu"]
    shares = {
        "whole": sampler.own(0, whole) / whole,
        "again": sampler.own(whole, end) / (end - whole),
    }
    print(json.dumps(shares))


if __name__ == "__main__":
    main()
