"""`verify` and `benchmark`: open a file as `open` does, compare what it gives, or time it.

Knows where the expected numbers are, in the file or from a module; must not know how to load, to
run or to compare.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from kd_export._console import stage
from kd_export._errors import ExportError, VerifyError
from kd_export._running.loading import open  # noqa: A004  # the package's own
from kd_export._running.session import Session
from kd_export._schema.schema import Schema, Vector
from kd_export._verification.comparison import (
    Comparison,
    Report,
    Tolerance,
    compare_trials,
    compare_vectors,
    inputs_of,
)
from kd_export._verification.trials import (
    BATCH_SIZES,
    chosen_vectors,
    pool_of,
    trial_sizes,
    trials,
    trials_at,
)

if TYPE_CHECKING:
    from torch import nn

    from kd_export._capture.flat_module import Example, Word


def verify(
    path: str | Path,
    reference: nn.Module | None = None,
    batch_sizes: Sequence[int] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    *,
    vectors: Sequence[Example[Word]] | None = None,
    trusted: bool = False,
    sha256: str | None = None,
) -> Report:
    """Run an artefact in its own runtime and compare its results.

    Args:
        path: The file.
        reference: The keyed module to compare with. Without one, the file is compared with the
            numbers stored in it when it was exported.
        batch_sizes: The sizes of the dynamic axes to try, as far as their range allows; by
            default all at which the file was compared when it was written.
        rtol: The relative tolerance. Without it and ``atol``, that which the file was saved with,
            or one that suits the dtype; where one is given, the other is 0. The report says what
            applied.
        atol: The absolute tolerance.
        vectors: Inputs to compare on in place of made ones, each in any form of an example; they
            need a reference.
        trusted: As for `open`.
        sha256: As for `open`.

    Returns:
        The report: one row for every output at every size. Look at ``report.ok``, or print it.
        Of a program that draws random numbers only shapes and dtypes are compared.

    Raises:
        VerifyError: A size has no stored test, the weights in the file are not those that it was
            exported with, the file fails when it runs, or kd_export did not write it.

    Example:
        >>> import torch
        >>> import kd_export
        >>> from kd_nn import TensorDictModule
        >>> module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
        >>> report = kd_export.save(module, "policy.pt2", {"x": torch.zeros(1, 3)})
        >>> kd_export.verify("policy.pt2", trusted=True).ok
        True
        >>> kd_export.verify("policy.pt2", module, batch_sizes=[4], trusted=True).ok
        True
    """
    session = open(path, trusted=trusted, sha256=sha256)
    with stage(f"run `{Path(path).name}`"):
        if rtol is None and atol is None:
            rtol, atol = (session.schema.tolerance.get(name) for name in ("rtol", "atol"))
        rows = _compared(session, reference, batch_sizes, Tolerance(rtol, atol), vectors)
    return Report(str(path), rows)


def _compared(
    session: Session,
    reference: nn.Module | None,
    batch_sizes: Sequence[int] | None,
    allowed: Tolerance,
    vectors: Sequence[Example[Word]] | None,
) -> tuple[Comparison, ...]:
    schema = session.schema
    if schema.derived:
        raise VerifyError(
            "the file was not written by kd-export: it says neither what its keys are nor what "
            "must come out.",
            expected="a schema with stored tests",
            hint="Export the keyed module with `kd_export.save`. To run the file by the names that "
            "are in it, use `kd_export.open`.",
        )
    if reference is None:
        if vectors is not None:
            raise VerifyError(
                "`vectors` were given without a `reference` that says what must come out.",
                hint="Pass the module as `reference`.",
            )
        return tuple(compare_vectors(session, chosen_vectors(schema, batch_sizes), allowed))
    from kd_export._capture.example import read_vectors
    from kd_export._capture.flat_module import reference_module

    eager = reference_module(reference, schema)
    given = None if vectors is None else read_vectors(vectors, schema)
    pool = pool_of(schema)
    tried = list(trials(schema, eager, batch_sizes or BATCH_SIZES, pool=pool, given=given))
    if batch_sizes is None and given is None:  # and where the file was compared when it was written
        known = [trial.sizes for trial in tried]
        stored = [vector.sizes for vector in schema.vectors if vector.sizes not in known]
        tried += trials_at(schema, eager, stored, pool=pool).made
    return tuple(compare_trials(session, tried, allowed, eager))


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
