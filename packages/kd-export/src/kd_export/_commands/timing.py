"""How long an artefact takes, in its own runtime and through its checks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from kd_export._errors import ExportError, VerifyError
from kd_export._running.loading import open  # noqa: A004  # the package's own
from kd_export._running.session import Session
from kd_export._schema.schema import Schema, Vector
from kd_export._stages import stage
from kd_export._verification.judging import inputs_of
from kd_export._verification.trials import trial_sizes

_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one call takes at one set of sizes.

    Attributes:
        path: The file.
        sizes: The size of each axis.
        seconds: The median of several rounds, in seconds for each call.
        best: The quickest round.

    Example:
        >>> Timing("policy.onnx", {"batch": 1}, 2e-5, 1e-5).seconds
        2e-05
    """

    path: str
    sizes: Mapping[str, int]
    seconds: float
    best: float


def benchmark(
    path: str | Path,
    batch_sizes: Sequence[int] | None = None,
    *,
    seconds: float = 0.5,
    trusted: bool = False,
    sha256: str | None = None,
) -> tuple[Timing, ...]:
    """Measure how long a call of an artefact takes, checks of the inputs included.

    The inputs are those of the stored tests; for a size that none has, they are drawn between the
    bounds of the example. Fix the number of threads and close other programs before you compare.

    Args:
        path: The file.
        batch_sizes: The sizes of the dynamic axes, as far as their range allows; by default those
            of the stored tests.
        seconds: How long to measure each set of sizes, at least one call in each of five rounds.
        trusted: As for `open`.
        sha256: As for `open`.

    Raises:
        UntrustedArtifact: As for `open`.
        VerifyError: No size was given, and the file holds no stored test.
        ExportError: The program fails on inputs that are drawn, or ``seconds`` is not finite.

    Example:
        >>> import torch
        >>> import kd_export
        >>> from kd_nn import TensorDictModule
        >>> module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
        >>> report = kd_export.save(module, "policy.pt2", {"x": torch.zeros(1, 3)})
        >>> found = benchmark("policy.pt2", [1, 64], seconds=0.01, trusted=True)
        >>> [row.sizes["batch"] for row in found]
        [1, 64]
    """
    if not 0 <= seconds < math.inf:
        raise ExportError(
            f"expected a time in seconds to measure each size, got `{seconds}`.",
            got=seconds,
            hint="Pass a finite number, such as `0.5`.",
        )
    session = open(path, trusted=trusted, sha256=sha256)
    with stage(f"time `{Path(path).name}`"):
        return tuple(_timings(session, str(path), batch_sizes, seconds))


def _timings(
    session: Session, path: str, batch_sizes: Sequence[int] | None, seconds: float
) -> Iterator[Timing]:
    for vector in _vectors(session.schema, batch_sizes):
        inputs = inputs_of(session, vector)
        session.run(inputs)  # the first calls of a runtime prepare it
        rounds = _rounds(partial(session.run, inputs), seconds)
        yield Timing(path, vector.sizes, median(rounds), min(rounds))


def _vectors(schema: Schema, batch_sizes: Sequence[int] | None) -> Sequence[Vector]:
    if batch_sizes is not None:
        stored = {tuple(v.sizes.items()): v for v in reversed(schema.vectors)}
        wanted = trial_sizes(schema, batch_sizes)
        return [stored.get(tuple(sizes.items()), Vector(sizes, 0, {})) for sizes in wanted]
    if schema.vectors:
        return schema.vectors
    raise VerifyError(
        "the file holds no stored test whose sizes could be taken.",
        hint="Pass `batch_sizes`.",
    )


def _rounds(call: Callable[[], object], seconds: float) -> list[float]:
    """Measure rounds of as many calls as fit into the time."""
    start = time.perf_counter()
    call()
    once = max(time.perf_counter() - start, 1e-9)
    count = max(1, int(seconds / _ROUNDS / once))
    found = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - start) / count)
    return found
