"""`verify`: open a file as `open` does, and compare it with a module or with its stored numbers.

Knows where the expected numbers are; must not know how to load, to run or to compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kd_export._errors import VerifyError
from kd_export._running.loading import open  # noqa: A004  # the package's own
from kd_export._running.session import Session
from kd_export._stages import stage
from kd_export._verification.judging import Tolerance, compare_trials, compare_vectors
from kd_export._verification.report import Comparison, Report
from kd_export._verification.trials import (
    BATCH_SIZES,
    chosen_vectors,
    pool_of,
    trials,
    trials_at,
)

if TYPE_CHECKING:
    from torch import nn

    from kd_export._capture.signature import Example, Word


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
    from kd_export._capture.reference import reference_module

    eager = reference_module(reference, schema)
    given = None if vectors is None else read_vectors(vectors, schema)
    pool = pool_of(schema)
    tried = list(trials(schema, eager, batch_sizes or BATCH_SIZES, pool=pool, given=given))
    if batch_sizes is None and given is None:  # and where the file was compared when it was written
        known = [trial.sizes for trial in tried]
        stored = [vector.sizes for vector in schema.vectors if vector.sizes not in known]
        tried += trials_at(schema, eager, stored, pool=pool).made
    return tuple(compare_trials(session, tried, allowed, eager))
