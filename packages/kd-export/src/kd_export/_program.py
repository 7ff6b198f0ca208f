"""A captured program with its schema, and the functions that make one.

This module imports torch only when a function is called, so that ``import kd_export`` works where
torch is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ._archive import replacing
from ._backend import backend_for
from ._errors import VerifyError
from ._schema import Schema
from ._session import Session
from ._verify import BATCH_SIZES, Report, check_runner, stored_vectors

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.export import ExportedProgram

    from ._dynamic_shapes import Dynamic
    from ._signature import Example

Inputs = TypeVar("Inputs")
Word = TypeVar("Word")
Name = TypeVar("Name")


@dataclass(frozen=True)
class KeyedProgram:
    """An exported module with its keys.

    Attributes:
        schema: What it takes and gives.
        exported_program: torch's own form of it.
        diagnostics: What was mended on the way, a sentence each.
        reference: The module as it was exported, run eagerly, to compare with.

    Example:
        >>> import torch
        >>> import kd_export
        >>> from kd_nn import TensorDictModule
        >>> module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
        >>> program = kd_export.export(module, {"x": torch.zeros(1, 3)})
        >>> program({"x": torch.zeros(5, 3)})["y"].shape
        torch.Size([5, 2])
    """

    schema: Schema
    exported_program: ExportedProgram
    diagnostics: tuple[str, ...]
    reference: Callable[[Sequence[Tensor]], Mapping[str, Tensor]] = field(repr=False)

    def __call__(self, inputs: Inputs) -> Inputs:
        """Run the program: a nested or flat dict or a container in, the same kind out."""
        return self._session().run(inputs)

    def _session(self) -> Session:
        session: Session | None = self.__dict__.get("_opened")
        if session is None:
            from ._torch_runner import run_program

            session = Session(self.schema, run_program(self.exported_program, self.schema))
            self.__dict__["_opened"] = session
        return session

    def save(
        self,
        path: str | Path,
        *,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        rtol: float | None = None,
        atol: float | None = None,
    ) -> Report:
        """Write the program in the format of the file name, and verify it first.

        The file is written beside the target, loaded in the format's own runtime, run at several
        batch sizes on fresh inputs and compared with the module. Only then does it take the
        target's place; after a mismatch nothing is there that was not there before.

        Args:
            path: The target; its suffix names the format.
            batch_sizes: The sizes of the dynamic axes to try, as far as their range allows.
            rtol: The relative tolerance, by default one that suits the dtype.
            atol: The absolute tolerance, by default one that suits the dtype.

        Raises:
            VerifyError: The file gives other results than the module.
        """
        path = Path(path)
        backend = backend_for(path)
        schema = backend.lower(self.exported_program, self.schema)
        schema = replace(schema, vectors=stored_vectors(schema, self.reference, batch_sizes))
        with replacing(path) as temporary:
            backend.write(self.exported_program, schema, temporary)
            data = temporary.read_bytes()
            runner = backend.load(data, schema)
            report = check_runner(
                runner, schema, self.reference, batch_sizes, rtol=rtol, atol=atol, path=path
            )
            if not report.ok:
                raise VerifyError(
                    f"`{path.name}` was not written: it gives other results than the module.\n"
                    f"{report}",
                    expected="equal results",
                    got=report.largest,
                )
        return report


def export(
    module: nn.Module,
    example: Example[Word],
    *,
    inputs: Sequence[object] | None = None,
    outputs: Sequence[object] | None = None,
    dynamic: Dynamic[Name] = "batch",
    mode: str | None = None,
    strict: bool = False,
    metadata: Mapping[str, object] | None = None,
) -> KeyedProgram:
    """Export a keyed module.

    The module is copied to the CPU and set to eval mode; the original is not touched. Steps that
    no output needs are left out, dropout is removed, and an output that shares memory with an
    input is copied.

    Args:
        module: Any module with ``in_keys`` and ``out_keys`` that takes a container.
        example: A container, a nested dict, or a flat dict by wire name or key. Only shapes,
            dtypes and value ranges are taken from it.
        inputs: The keys to be inputs, in order; by default the module's ``in_keys``.
        outputs: The keys to be outputs, in order; by default the module's ``out_keys``.
        dynamic: ``"batch"``: the leading dimension of all inputs is one axis of this name, of any
            size from 1. ``{"batch": (1, 1024)}``: the same with a range. ``{key: {dim: name}}``:
            named dimensions by input. ``None``: all shapes are fixed.
        mode: What probabilistic parts give: ``"deterministic"``, ``"mode"``, ``"mean"``,
            ``"median"``, or ``"random"``, which also allows random operators.
        strict: Passed on to `torch.export.export`.
        metadata: Anything that JSON holds exactly, kept in the file.

    Returns:
        The program, to call or to save.

    Raises:
        NotExportable: The module cannot be captured, draws random numbers or keeps state.
        Specialized: A dimension that should be dynamic was frozen.
        KeyMismatch: The example or ``inputs``/``outputs`` do not fit the module.

    Example:
        >>> import torch
        >>> from kd_nn import TensorDictModule
        >>> module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
        >>> program = export(module, {"x": torch.zeros(1, 3)})
        >>> program.schema.input("x").describe()
        'float32 (batch, 3)'
        >>> program({"x": torch.zeros(5, 3)})["y"].shape
        torch.Size([5, 2])
    """
    from ._capture import capture

    return capture(
        module,
        example,
        inputs=inputs,
        outputs=outputs,
        dynamic=dynamic,
        mode=mode,
        strict=strict,
        metadata=metadata,
    )


def save(
    module: nn.Module,
    path: str | Path,
    example: Example[Word],
    *,
    inputs: Sequence[object] | None = None,
    outputs: Sequence[object] | None = None,
    dynamic: Dynamic[Name] = "batch",
    mode: str | None = None,
    strict: bool = False,
    metadata: Mapping[str, object] | None = None,
) -> Report:
    """Export a keyed module and write it, verified, in one call.

    The options are those of `export`; the report is the one of `KeyedProgram.save`.

    Example:
        >>> import torch
        >>> from kd_nn import TensorDictModule
        >>> module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
        >>> save(module, "policy.pt2", {"x": torch.zeros(1, 3)}).ok
        True
    """
    program = export(
        module,
        example,
        inputs=inputs,
        outputs=outputs,
        dynamic=dynamic,
        mode=mode,
        strict=strict,
        metadata=metadata,
    )
    return program.save(path)
