"""The folder that is handed over with an ``.onnx`` file: one page, clients, server files, digests.

The page is by `page`, the clients are by `clients`. Here are the rest: the configuration of a
Triton server, which carries the state of each sequence, and the description that LEAPP loads.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

from kd_export._errors import ExportError, NotExportable
from kd_export._export import benchmark, verify
from kd_export._handover.clients import (
    SUFFIXES,
    Interface,
    Part,
    client,
    header,
    identifier,
    languages,
)
from kd_export._handover.page import page, rollout, runtime
from kd_export._running.loading import inspect, open  # noqa: A004  # the package's own
from kd_export._running.session import require
from kd_export._schema.files import Json, Number, contents, open_regular, replacing
from kd_export._schema.onnx_file import check_external, companion
from kd_export._schema.schema import Entry

SUMS = "SHA256SUMS"
_SUFFIX = ".onnx"
_MOST_ROWS = 64
"""The largest batch that a server makes, where the file takes any."""
_TYPES = {
    "float32": ("TYPE_FP32", "f"),
    "float64": ("TYPE_FP64", "d"),
    "int8": ("TYPE_INT8", "b"),
    "int16": ("TYPE_INT16", "h"),
    "int32": ("TYPE_INT32", "i"),
    "int64": ("TYPE_INT64", "q"),
    "uint8": ("TYPE_UINT8", "B"),
    "bool": ("TYPE_BOOL", "?"),
}
"""What Triton calls a dtype, and its letter in `struct`."""


def hand_over(
    path: Path, folder: Path, *, web: Path | None = None, rows: int = 1
) -> Mapping[str, int]:
    """Write the folder that is handed over with a file.

    Args:
        path: The ``.onnx`` file.
        folder: The folder, made if it does not exist; files of the same names are replaced.
        web: The folder of the npm package onnxruntime-web; by default the nearest one in
            ``node_modules``.
        rows: How many rows the clients and the page take at once.

    Returns:
        The size of each file in bytes, by its name in the folder.

    Raises:
        NotExportable: The file is of another format, or keeps its weights beside it.
        VerifyError: The file does not give the results that are stored in it.
        BackendMissing: onnxruntime-web is not found.
    """
    if not path.name.endswith(_SUFFIX):
        raise NotExportable(
            f"a hand-over is written for `{_SUFFIX}` files, got `{path.name}`.",
            expected=_SUFFIX,
            got=path.suffix,
            hint="Save the module as `.onnx`, or convert its `.pt2` file: `kd-export convert`.",
        )
    schema = inspect(path)
    with open_regular(path) as file:
        model = bytes(contents(file))
    if check_external(model, companion(path.name), 1 << 62):
        raise NotExportable(
            f"`{path.name}` keeps its weights in another file, too large for a page.",
            hint="Hand the two files over with `kd-export client`.",
        )
    interface = Interface.of(schema, rows)
    report = verify(path)
    if not report.ok:
        raise ExportError(f"`{path.name}` does not give the results that are stored in it.")
    script = runtime(web)
    timings = benchmark(path, seconds=0.2)
    session = open(path, threads=1)
    stem = identifier(path.stem)
    written: dict[str, bytes] = {
        "index.html": page(
            path.name, model, interface, report, timings, script, rollout(session, interface)
        ).encode(),
        path.name: model,
        f"{stem}.h": header(schema, stem).encode("ascii"),
        f"triton/{stem}/config.pbtxt": triton(interface, stem).encode("ascii"),
        f"triton/{stem}/1/model.onnx": model,
        "leapp.yaml": leapp(interface, path.name, model, stem).encode("ascii"),
    }
    for language in languages(path.name):
        text = client(schema, path.name, language, rows=rows)
        written[f"{stem}_client{SUFFIXES[language]}"] = text.encode()
    for state, _ in interface.states():
        if state.start:
            name = f"triton/{stem}/initial_state/{state.label}"
            written[name] = _packed(state.entry, schema.initial[state.entry.wire])
    started = {f"{stem}/{s.entry.name}": s for s, _ in interface.states() if s.start}
    if started:
        written[_starts(stem)] = _safetensors(started)
    lines = (f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in written.items())
    written[SUMS] = "".join(sorted(lines, key=lambda line: line[66:])).encode()
    for name, data in written.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary:
            temporary.write_bytes(data)
    return {name: len(data) for name, data in written.items()}


def triton(interface: Interface, name: str) -> str:
    """Write the configuration of a model for a Triton server.

    A state is carried by the server, for each sequence, and starts as the file says.
    """
    schema = interface.schema
    entries = (*schema.inputs, *schema.outputs)
    first = {entry.shape[0] if entry.shape else None for entry in entries}
    batch = first.pop() if len(first) == 1 else None
    dynamic = isinstance(batch, str) and batch in schema.axes
    axis = schema.axes[str(batch)] if dynamic else None
    rows = 0 if axis is None else min(_MOST_ROWS, axis.max or _MOST_ROWS)
    if axis is not None and axis.min > 1:
        rows = 0

    def form(entry: Entry) -> str:
        sizes = entry.shape[1:] if rows else entry.shape
        dims = ", ".join(str(size) if isinstance(size, int) else "-1" for size in sizes)
        # A row of a single number has the shape of the batch alone.
        reshaped = "" if sizes else " reshape: { shape: [ ] }"
        return f"data_type: {_TYPES[entry.dtype][0]} dims: [ {dims or 1} ]{reshaped}"

    def listed(word: str, parts: Sequence[Part]) -> list[str]:
        items = [f"  {{ name: {_text(p.entry.name)} {form(p.entry)} }}" for p in parts]
        return [f"{word} [", ",\n".join(items), "]"] if items else []

    lines = [
        "# Written by `kd-export handover`.",
        f"name: {_text(name)}",
        'backend: "onnxruntime"',
        f"max_batch_size: {rows}",
        *listed("input", interface.takes()),
        *listed("output", interface.gives()),
    ]
    states = []
    for before, after in interface.states():
        start = "zero_data: true"
        if before.start:
            start = f"data_file: {_text(before.label)}"
        states.append(
            "    {\n"
            f"      input_name: {_text(before.entry.name)}\n"
            f"      output_name: {_text(after.entry.name)}\n"
            f"      {form(before.entry)}\n"
            f"      initial_state: {{ name: {_text(before.label)} {form(before.entry)} {start} }}\n"
            "    }"
        )
    if states:
        # Steps of several sequences make one batch; the server keeps the state of each.
        batcher = f"oldest {{ max_candidate_sequences: {rows} }}" if rows > 1 else "direct { }"
        lines += ["sequence_batching {", f"  {batcher}", "  state [", ",\n".join(states)]
        lines += ["  ]", "}"]
    return "\n".join([*lines, ""])


def _text(text: str) -> str:
    return json.dumps(text)


def _packed(entry: Entry, numbers: Sequence[Number]) -> bytes:
    return struct.pack(f"<{len(numbers)}{_TYPES[entry.dtype][1]}", *numbers)


def _starts(name: str) -> str:
    return f"{name}_initial_values.safetensors"


class _Numpy(Protocol):
    def asarray(self, values: object, dtype: str) -> _Array: ...


class _Array(Protocol):
    def reshape(self, shape: tuple[int, ...]) -> _Array: ...


class _Safetensors(Protocol):
    def save(self, tensors: Mapping[str, _Array]) -> bytes: ...


def _safetensors(parts: Mapping[str, Part]) -> bytes:
    """Return what states start with as a safetensors file."""
    numpy = cast("_Numpy", require("numpy", "onnx"))
    return cast("_Safetensors", require("safetensors.numpy", "cli")).save(
        {
            name: numpy.asarray(part.start, part.entry.dtype).reshape(part.shape)
            for name, part in parts.items()
        }
    )


def leapp(interface: Interface, file: str, model: bytes, name: str) -> str:
    """Write the description that LEAPP loads: JSON, which is YAML, too."""

    def described(part: Part) -> Json:
        found: dict[str, Json] = {
            "name": part.entry.name,
            "dtype": part.entry.dtype,
            "shape": [*part.shape],
            "type": "tensor",
        }
        signal = part.entry.signal
        if signal is None:
            return found
        if signal.names:
            found["element_names"] = [[*signal.names]]
        for word, value in (("kind", signal.kind), ("unit", signal.unit)):
            if value:
                found[word] = value if isinstance(value, str) else [*value]
        if signal.limits is not None:
            pairs = map(signal.limits_of, range(math.prod(part.shape[-1:])))
            low, high = zip(*pairs, strict=True)
            found["limits"] = [[*low], [*high]]
        if signal.rate is not None:
            found["rate"] = signal.rate
        return found

    states = interface.states()
    pipeline: dict[str, Json] = {
        "data_flow": {},
        "feedback_flow": {
            f"{name}/{after.entry.name}": [f"{name}/{before.entry.name}"]
            for before, after in states
        },
        "inputs": {name: [part.entry.name for part in interface.takes()]},
        "outputs": {name: [part.entry.name for part in interface.gives()]},
    }
    if any(before.start for before, _ in states):
        pipeline["initial_values"] = _starts(name)
    data: dict[str, Json] = {
        "models": {
            name: {
                "inputs": [described(part) for part in interface.inputs],
                "outputs": [described(part) for part in interface.outputs],
                "parameters": {
                    "model_path": file,
                    "md5sum": hashlib.md5(model, usedforsecurity=False).hexdigest(),
                    "sha256sum": hashlib.sha256(model).hexdigest(),
                    "backend": "onnx",
                },
            }
        },
        "pipeline": pipeline,
        "system information": {**interface.schema.versions},
    }
    return json.dumps(data, indent=2) + "\n"
