"""The folder that is handed over with an ``.onnx`` file: one page, clients, server files, digests.

The clients are by `_clients`. Here are the rest: the page, the configuration of a Triton server,
which carries the state of each sequence, and the description that LEAPP loads.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from kd_export._backends.c import check_header
from kd_export._clients import (
    RESET,
    STEPS,
    SUFFIXES,
    Interface,
    Part,
    client,
    drawn,
    filled,
    header,
    languages,
    template,
)
from kd_export._console import Row, html_table
from kd_export._errors import BackendMissing, ExportError, NotExportable
from kd_export._export import Timing, benchmark, verify
from kd_export._running.loading import inspect, open  # noqa: A004  # the package's own
from kd_export._running.session import Session, require
from kd_export._schema.files import (
    Json,
    Number,
    contents,
    identifier,
    open_regular,
    replacing,
    wire_name,
)
from kd_export._schema.onnx_file import check_external, companion
from kd_export._schema.schema import (
    ENTRY_HEADER,
    SIGNAL_HEADER,
    Entry,
    Step,
    elements_of,
    entry_rows,
    signal_rows,
)
from kd_export._verification.comparison import REPORT_HEADER, Report
from kd_export._verification.trials import shown

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
        VerifyError: The file does not reproduce the results that are stored in it.
        BackendMissing: onnxruntime-web is not found.
        ExportError: The folder has the header of a ``.c`` file of the same name.
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
        raise ExportError(f"`{path.name}` does not reproduce the results that are stored in it.")
    check_header(folder / f"{identifier(path.stem)}.h")
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


def _safetensors(parts: Mapping[str, Part]) -> bytes:
    """Return what states start with as a safetensors file."""
    numpy = require("numpy", "onnx")
    content: bytes = require("safetensors.numpy", "cli").save(
        {
            name: numpy.asarray(part.start, part.entry.dtype).reshape(part.shape)
            for name, part in parts.items()
        }
    )
    return content


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


# One HTML page that says what a file takes and gives, and runs it, without a network.
#
# The page holds the model, onnxruntime-web, and the numbers that the runner in Python gave over a
# rollout, which it compares with its own. It keeps nothing and asks no server for anything.

LARGEST = 6_000_000
"""Bytes of a page with its model; a larger model is chosen as a file in the page."""
_PACKAGE = "onnxruntime-web"
_PARTS = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
_MOST_KEPT = 64
"""How many numbers of an output are compared at each step."""
_MOST_SLIDERS = 64
"""An input of more elements has one slider for all."""


def rollout(session: Session, interface: Interface) -> list[list[Number]]:
    """Return what the runner gives at each step of the rollout that every client makes.

    The outputs that are not a state stand one after the other.
    """
    numpy = require("numpy", "onnx")
    session.reset()
    found = []
    for step in range(STEPS):
        if step == RESET:
            session.reset()
        inputs: dict[str, object] = {
            part.entry.wire: numpy.asarray(drawn(part, step), part.entry.dtype).reshape(part.shape)
            for part in interface.takes()
        }
        results = session.step(inputs)
        numbers: list[Number] = []
        for part in interface.gives():
            flat = results[part.entry.wire].reshape((-1,)).tolist()
            numbers += [float(number) for number in flat[:_MOST_KEPT]]
        found.append(numbers)
    return found


def runtime(folder: Path | None) -> Mapping[str, bytes]:
    """Return the two files of onnxruntime-web that a page needs, by name.

    Args:
        folder: The folder of the package; by default the nearest in ``node_modules``.

    Raises:
        BackendMissing: They are not found.
    """
    here = Path.cwd()
    places = [one / "node_modules" / _PACKAGE for one in (here, *here.parents)]
    for place in places if folder is None else [folder, folder / _PACKAGE]:
        held = [place / "dist" / name for name in _PARTS]
        if all(file.is_file() for file in held):
            return {file.name: file.read_bytes() for file in held}
    raise BackendMissing(
        f"`{_PACKAGE}`, which runs the model in the page, was not found in "
        f"`{'node_modules' if folder is None else folder}`.",
        expected=_PACKAGE,
        hint=f"Run `npm install {_PACKAGE}` here, or pass its folder: `--web FOLDER`.",
    )


def page(
    file: str,
    model: bytes,
    interface: Interface,
    report: Report,
    timings: Sequence[Timing],
    script: Mapping[str, bytes],
    expected: Sequence[Sequence[Number]],
) -> str:
    """Write the page.

    Args:
        file: The name of the file.
        model: Its bytes.
        interface: What it takes and gives.
        report: What it was verified by.
        timings: How long its calls took.
        script: What runs it, by `runtime`.
        expected: What it gives, by `rollout`.
    """
    schema = interface.schema
    bundle, engine = (_zipped(script[name]) for name in _PARTS)
    held = _zipped(model)
    inside = len(held) + len(bundle) + len(engine) < LARGEST - 200_000
    data: dict[str, Json] = {
        "file": file,
        "inputs": [_control(part) for part in interface.takes()],
        "outputs": [_control(part) for part in interface.gives()],
        "expected": [[*row] for row in expected],
        "kept": _MOST_KEPT,
        "rate": next((e.signal.rate for e in schema.inputs if e.signal and e.signal.rate), 10),
    }
    words = [
        f"{len(model):,} bytes",
        "float" if schema.precision is None else schema.precision.name,
        "with a state" if schema.state else "no state",
        f"verified: {len(report.rows)} comparisons" if report.ok else "NOT VERIFIED",
    ]
    tables = {
        "contract": html_table(ENTRY_HEADER, entry_rows(schema)),
        "signals": html_table(SIGNAL_HEADER, signal_rows(schema)) if signal_rows(schema) else "",
        "verification": html_table(REPORT_HEADER, report.cells()),
        "latency": html_table(("sizes", "median of a call", "best"), [*map(_timed, timings)]),
        "origin": html_table(("", ""), _origin(interface, model)),
    }
    text = filled(
        "page.html",
        {
            **tables,
            "file": html.escape(file),
            "chips": "".join(f"<span>{html.escape(word)}</span>" for word in words),
            "graph": _graph(schema.steps) or "<p>The file does not say its steps.</p>",
            "precision": "<p>The numbers are those of the module, in float.</p>"
            if schema.precision is None
            else f"<p>{html.escape(schema.precision.describe())}</p>",
            "clients": _commands(file),
            "style": template("page.css"),
            "client": _stepper(interface, file),
            "script": filled("page.js", {"reset": str(RESET)}),
            "data": _safe(data),
            "bundle": bundle,
            "engine": engine,
            "model": held if inside else "",
        },
    )
    if len(text.encode()) > LARGEST:
        raise ExportError(f"the page of `{file}` has {len(text.encode()):,} bytes.", got=len(text))
    return text


def _zipped(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def _safe(data: Json) -> str:
    """Write JSON that may stand in a page: no tag begins in it."""
    return json.dumps(data).replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _stepper(interface: Interface, file: str) -> str:
    """Return the client in JavaScript as a part of the page, without its imports and exports."""
    text = client(interface.schema, file, "js")
    # No line of it begins with a name of the file.
    body = text[text.index("\nconst INPUTS") : text.index("\nif (typeof process")]
    return re.sub("^export ", "", body, flags=re.MULTILINE)


def _control(part: Part) -> Json:
    """Return what the page shows of an input or output."""
    signal, (least, most) = part.entry.signal, part.bounds
    count = elements_of(part.entry) or 1
    single = part.count > _MOST_SLIDERS
    elements: list[Json] = []
    for place in range(1 if single else part.count):
        element = place % count
        low, high = (None, None) if signal is None else signal.limits_of(element)
        name = "" if signal is None or single else signal.name_of(element)
        elements.append(
            {
                "name": name or ("all elements" if single else f"{element}"),
                "unit": "" if signal is None else signal.unit_of(element),
                "low": _plain(least if low is None else low),
                "high": _plain(most if high is None else high),
            }
        )
    return {
        "name": part.entry.name,
        "wire": part.entry.wire,
        "dtype": part.entry.dtype,
        "count": part.count,
        "place": part.place,
        "elements": elements,
    }


def _plain(number: Number) -> Json:
    return int(number) if isinstance(number, bool) else number


def _timed(row: Timing) -> Row:
    return shown(row.sizes), f"{row.seconds * 1e6:,.1f} us", f"{row.best * 1e6:,.1f} us"


def _origin(interface: Interface, model: bytes) -> list[Row]:
    schema = interface.schema
    return [
        ("sha256", hashlib.sha256(model).hexdigest()),
        ("made by", ", ".join(f"{name} {version}" for name, version in schema.versions.items())),
        *((name, json.dumps(value)) for name, value in schema.metadata.items()),
    ]


def _graph(steps: Sequence[Step]) -> str:
    """Draw the steps: what each reads, runs and writes."""

    def keys(found: Sequence[tuple[str, ...]], kind: str) -> str:
        return "".join(
            f'<code class="{kind}">{html.escape(wire_name(key))}</code>' for key in found
        )

    return "".join(
        f'<li><div class="keys">{keys(step.reads, "read")}</div>'
        f'<div class="step">{html.escape(step.runs)}</div>'
        f'<div class="keys">{keys(step.writes, "write")}</div></li>'
        for step in steps
    )


def _commands(file: str) -> str:
    names = {"c": "C", "cpp": "C++", "python": "Python", "js": "JavaScript", "rust": "Rust"}
    rows = "".join(
        f"<li><b>{names[language]}</b> <code>kd-export client {html.escape(file)} "
        f"--lang {language}</code></li>"
        for language in languages(file)
    )
    return f"<ul>{rows}</ul>"
