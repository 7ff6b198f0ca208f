"""One HTML page that says what a file takes and gives, and runs it, without a network.

The page holds the model, onnxruntime-web, and the numbers that the runner in Python gave over a
rollout, which it compares with its own. It keeps nothing and asks no server for anything.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

from kd_export._console import Row, html_table
from kd_export._errors import BackendMissing, ExportError
from kd_export._export import Timing
from kd_export._handover.clients import (
    RESET,
    STEPS,
    Interface,
    Part,
    client,
    drawn,
    filled,
    languages,
    template,
)
from kd_export._running.session import Session, require
from kd_export._schema.files import Json, Number, wire_name
from kd_export._schema.schema import (
    ENTRY_HEADER,
    SIGNAL_HEADER,
    Step,
    elements_of,
    entry_rows,
    signal_rows,
)
from kd_export._verification.comparison import REPORT_HEADER, Report
from kd_export._verification.trials import shown

LARGEST = 6_000_000
"""Bytes of a page with its model; a larger model is chosen as a file in the page."""
_PACKAGE = "onnxruntime-web"
_PARTS = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
_MOST_KEPT = 64
"""How many numbers of an output are compared at each step."""
_MOST_SLIDERS = 64
"""An input of more elements has one slider for all."""


class _Numpy(Protocol):
    def asarray(self, values: object, dtype: str) -> _Array: ...


class _Array(Protocol):
    def reshape(self, shape: tuple[int, ...]) -> _Array: ...
    def tolist(self) -> object: ...


def rollout(session: Session, interface: Interface) -> list[list[Number]]:
    """Return what the runner gives at each step of the rollout that every client makes.

    The outputs that are not a state stand one after the other.
    """
    numpy = cast("_Numpy", require("numpy", "onnx"))
    session.reset()
    found = []
    for step in range(STEPS):
        if step == RESET:
            session.reset()
        inputs: dict[str, object] = {
            part.entry.wire: numpy.asarray(drawn(part, step), part.entry.dtype).reshape(part.shape)
            for part in interface.takes()
        }
        results = cast("Mapping[str, _Array]", session.step(inputs))
        numbers: list[Number] = []
        for part in interface.gives():
            flat = cast("list[Number]", results[part.entry.wire].reshape((-1,)).tolist())
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
    bundle, engine = (_packed(script[name]) for name in _PARTS)
    held = _packed(model)
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


def _packed(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def _safe(data: Json) -> str:
    """Write JSON that may stand in a page: no tag begins in it."""
    return json.dumps(data).replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _stepper(interface: Interface, file: str) -> str:
    """Return the client in JavaScript as a part of the page, without its imports and exports."""
    text = client(interface.schema, file, "js")
    body = text[text.index("const INPUTS") : text.index("if (typeof process")]
    return body.replace("export ", "").replace("</", "<\\/")


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
