"""Further runtimes that read ONNX files, for a second opinion on what a file computes.

Knows how each loads a model and runs it; must not know keys, or how results are compared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, cast

from kd_export._errors import ExportError, raised_as
from kd_export._running.session import require
from kd_export._schema.schema import Schema

Run = Callable[[Sequence[object]], Sequence[object]]
"""Runs a model on arrays in the order of the file, and gives all outputs in theirs."""
Opinions = dict[str, Run]
"""By what was set in the runtime: nothing first, then what makes it compute as the file says."""


def _reference(model: bytes, schema: Schema) -> Opinions:
    """Use the evaluator of the package onnx itself, which computes by numpy."""
    require("onnx", "onnx")
    evaluator = cast("_Evaluators", require("onnx.reference", "onnx")).ReferenceEvaluator(model)
    names = [entry.name for entry in schema.inputs]

    def run(arrays: Sequence[object]) -> Sequence[object]:
        return evaluator.run(None, dict(zip(names, arrays, strict=True)))

    return {"": run}


def _openvino(model: bytes, schema: Schema) -> Opinions:
    """Use OpenVINO, which computes in 16 bits on some processors if nothing is set."""
    core = cast("_OpenVino", require("openvino", "openvino")).Core()

    def compiled(settings: dict[str, str]) -> Run:
        request = core.compile_model(core.read_model(model, b""), "CPU", settings)
        names = [entry.name for entry in schema.inputs]

        def run(arrays: Sequence[object]) -> Sequence[object]:
            results = request(dict(zip(names, arrays, strict=True)))
            return [results[place] for place in range(len(schema.outputs))]

        return run

    wide = {"INFERENCE_PRECISION_HINT": "f32"}
    return {"": compiled({}), "INFERENCE_PRECISION_HINT=f32": compiled(wide)}


def _tract(model: bytes, schema: Schema) -> Opinions:
    """Use tract, a runtime in Rust."""
    tract = cast("_Tract", require("tract", "tract"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(model)
        runnable = tract.onnx().load(str(path)).into_model().into_runnable()

    def run(arrays: Sequence[object]) -> Sequence[object]:
        return [value.to_numpy() for value in runnable.run(list(arrays))]

    return {"": run}


RUNTIMES: dict[str, Callable[[bytes, Schema], Opinions]] = {
    "reference": _reference,
    "openvino": _openvino,
    "tract": _tract,
}


def opinions(name: str, model: bytes, schema: Schema) -> Opinions:
    """Load a model in another runtime.

    Raises:
        BackendMissing: The runtime is not installed.
        ExportError: It cannot load the model.
    """
    hint = "It may lack an operator of the model."
    with raised_as(ExportError, f"{name} cannot load the file", hint):
        return RUNTIMES[name](model, schema)


class _Evaluator(Protocol):
    def run(self, names: None, inputs: dict[str, object]) -> list[object]: ...


class _Evaluators(Protocol):
    def ReferenceEvaluator(self, model: bytes) -> _Evaluator: ...  # noqa: N802  # onnx's name


class _Compiled(Protocol):
    def __call__(self, inputs: dict[str, object]) -> dict[int, object]: ...


class _Core(Protocol):
    def read_model(self, model: bytes, weights: bytes) -> object: ...
    def compile_model(self, model: object, device: str, settings: dict[str, str]) -> _Compiled: ...


class _OpenVino(Protocol):
    def Core(self) -> _Core: ...  # noqa: N802  # openvino's name


class _Value(Protocol):
    def to_numpy(self) -> object: ...


class _Runnable(Protocol):
    def run(self, inputs: list[object]) -> list[_Value]: ...


class _Model(Protocol):
    def into_runnable(self) -> _Runnable: ...


class _Inference(Protocol):
    def into_model(self) -> _Model: ...


class _Onnx(Protocol):
    def load(self, path: str) -> _Inference: ...


class _Tract(Protocol):
    def onnx(self) -> _Onnx: ...
