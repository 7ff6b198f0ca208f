"""Programs that load a file in another language: their text, and the one in Python as it runs."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kd_export
from kd_export import Axis, Entry, ExportError, NotExportable, Schema, Signal
from kd_export._clients import SUFFIXES, Interface, client, drawn, languages
from kd_export._schema.schema import Budget, Precision
from kd_export.cli import main

GOLDEN = Path(__file__).parent / "golden" / "gru.onnx"
OBS = Entry(("obs", "x"), "obs.x", "float32", ("batch", 2), -1, 1, Signal(names=["a", "b"]))
TASK = Entry(("default",), "default", "int64", ("batch",), 0, 3)
STATE = Entry(("h",), "h", "float32", ("batch", 2))
ACTION = Entry(("action",), "action", "float32", ("batch", 1))
NEXT = Entry(("next", "h"), "next.h", "float32", ("batch", 2))
SCHEMA = Schema(
    (OBS, TASK, STATE),
    (ACTION, NEXT),
    {"batch": Axis(1, 8)},
    state={"h": "next.h"},
    initial={"h": (0.5, -1.5)},
)
PAIRS = [
    (f"policy{suffix}", language)
    for suffix in (".onnx", ".xml", ".c")
    for language in languages(suffix)
]


WORDS = (
    *("</script><script>alert(1)</script>", "<!--<script>", "*/ int x; /*", "${alert(1)}", "`a`"),
    *(
        "q\"uo'te",
        "back\\slash",
        "new\nline",
        "\b\u2028\u202e",
        "%s%n",
        "@model@",
        "??/",
        "d\u00e9",
    ),
    *("constructor", "toString", "10", "2", "export x", "\\u0041", "\U0001f916"),
)
"""Names that mean something in one of the languages, or in HTML."""


def stepped(path: Path) -> list[str]:
    """Return what every client prints, by the runner."""
    session = kd_export.open(path, threads=1)
    interface = Interface.of(session.schema)
    lines = []
    for step in range(50):
        if step == 25:
            session.reset()
        inputs = {
            part.entry.wire: np.array(drawn(part, step), part.entry.dtype).reshape(part.shape)
            for part in interface.takes()
        }
        results = session.step(inputs)
        for part in interface.gives():
            numbers = results[part.entry.wire].reshape(-1).tolist()
            lines += [f"{step} {part.entry.wire} {i} {x:.9g}" for i, x in enumerate(numbers)]
    return lines


def test_a_client_in_python_prints_what_the_runner_gives(tmp_path: Path) -> None:
    text = client(kd_export.inspect(GOLDEN), "gru.onnx", "python")
    lines: list[str] = []
    names: dict[str, object] = {
        "__name__": "__main__",
        "print": lambda *words: lines.append(" ".join(map(str, words))),
    }
    exec(text.replace("sys.argv[1] if len(sys.argv) > 1 else", f"{str(GOLDEN)!r} or"), names)
    assert lines == stepped(GOLDEN)
    assert len(lines) > 50


def test_a_client_refuses_nan_where_it_would_become_a_number() -> None:
    """As the session does; a float file carries it through."""
    float_schema = kd_export.inspect(GOLDEN)
    on_integers = replace(float_schema, precision=Precision("int8", Budget(0.1)))
    for schema in (float_schema, on_integers):
        names: dict[str, Any] = {"__name__": "client"}
        exec(client(schema, "gru.onnx", "python"), names)
        policy = names["Policy"](str(GOLDEN))
        inputs = {n: np.full(s, np.nan, d) for n, (d, s) in names["INPUTS"].items()}
        if schema is float_schema:
            assert all(np.isnan(found).all() for found in policy.step(inputs).values())
            continue
        with pytest.raises(ValueError, match="holds NaN, which the file takes for a number"):
            policy.step(inputs)


@pytest.mark.parametrize(("file", "language"), PAIRS)
def test_a_client_has_all_that_the_file_says(file: str, language: str) -> None:
    text = client(SCHEMA, file, language, rows=2)
    assert not re.findall(r"(?<!\w)@\w+@", text)  # no mark is left
    assert file in text
    for number in ("0.5", "-1.5"):
        assert number in text or file.endswith(".c")  # its `reset` has them
    wires = ("action",) if file.endswith(".c") else ("action", "obs.x", "next.h")
    assert all(wire in text for wire in wires)


def test_a_client_in_c_has_no_warning(tmp_path: Path) -> None:
    """A key may be a word of C, and a row a single number."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler is not None
    source = tmp_path / "client.c"
    source.write_text(client(SCHEMA, "policy.onnx", "c"), "utf-8")
    options = ("-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only")
    subprocess.run([compiler, *options, str(source)], check=True)


LEG = (
    "hip",
    "knee",
    "hip_speed (filtered)",
    "knee_speed",
    "hip_torque",
    "knee_torque",
    "f\u00fc\u00df",
)
SENSED = Signal(names=LEG, unit="N*m/s", kind="force", limits=(-1.25, [*range(7)]), rate=50)


@pytest.mark.parametrize(("file", "language"), PAIRS)
def test_comments_list_all_elements_uncut(file: str, language: str) -> None:
    sensed = Entry(("obs",), "obs", "float32", ("batch", 7), signal=SENSED)
    text = client(Schema((sensed,), (ACTION,), {"batch": Axis(1, 8)}), file, language)
    assert "obs: float32 (batch, 7), 50 Hz" in text
    for place, name in enumerate(LEG):
        told = [line for line in text.splitlines() if f"  {place} {name}, N*m/s, force" in line]
        assert len(told) == 1
        assert told[0].removesuffix(" */").endswith(f", -1.25..{place}")


@pytest.mark.parametrize(("file", "language"), PAIRS)
def test_no_name_of_an_element_ends_a_comment(file: str, language: str, tmp_path: Path) -> None:
    odd = (
        *WORDS,
        "a*/",
        "/*b",
        "*",
        "/",
        "c\\",
        "??/",
        "???/",
        "\r#define x",
        '"""',
        "\ud800",
        "--",
    )
    names = tuple(dict.fromkeys(odd))
    sensed = Entry(("o",), "o", "float32", (1, len(names)), signal=Signal(names=names))
    text = client(Schema((sensed,), (ACTION,), {"batch": Axis(1, 8)}), file, language)
    assert not re.search("[\b\r\u2028\u202e\ud800]|\\*/ int x|<!--<s", text.replace("int main", ""))
    assert "\U0001f916" in text
    if language == "python":
        compile(text, "client.py", "exec")
    elif language != "rust" and language != "js" and file != "policy.xml":
        compiler = shutil.which("gcc" if language == "c" else "g++")
        assert compiler is not None
        source = tmp_path / f"client{SUFFIXES[language]}"
        source.write_text(text, "utf-8")
        (tmp_path / "policy.h").write_text(
            "#include <stdint.h>\nvoid policy_run(float*, float*);", "utf-8"
        )
        standard = "-std=c99" if language == "c" else "-std=c++17"
        options = (standard, "-Wall", "-Wextra", "-Werror", "-fsyntax-only")
        subprocess.run([compiler, *options, str(source)], check=True)


def test_states_start_alike_in_each_row() -> None:
    (state,) = [part for part in Interface.of(SCHEMA, rows=3).inputs if part.state]
    assert state.start == (0.5, -1.5) * 3
    assert [part.label for part in Interface.of(SCHEMA).inputs] == ["obs_x", "default_", "h"]


def test_what_clients_do_not_have_is_refused() -> None:
    with pytest.raises(ExportError, match=r"ranges over 1\.\.8, got 9 rows"):
        client(SCHEMA, "policy.onnx", "c", rows=9)
    with pytest.raises(ExportError, match="Did you mean `rust`"):
        client(SCHEMA, "policy.onnx", "rsut")
    with pytest.raises(NotExportable, match=r"clients in rust load `\.onnx` files"):
        client(SCHEMA, "policy.pt2", "rust")
    for file, language in PAIRS:
        half = Schema((Entry(("x",), "x", "float16", (2,)),), ())
        with pytest.raises(NotExportable, match=r"`x`, float16 \(2,?\)\. Convert it in the module"):
            client(half, file, language)
    own = Schema((Entry(("__proto__",), "__proto__", "float32", (2,)),), ())
    with pytest.raises(NotExportable, match="JavaScript cannot have an entry `__proto__`"):
        client(own, "policy.onnx", "js")


@pytest.mark.parametrize(("file", "language"), PAIRS)
def test_the_name_of_a_file_cannot_end_a_comment(file: str, language: str) -> None:
    words = 'a*/ evil(); """ \\ \r\n\u2028\u202e'
    text = client(SCHEMA, f"{words}{file}", language)
    assert not re.search(r"[\r\u2028\u202e]|\*/ evil|\"\"\" [\\?]", text)
    assert "a?? evil()? ??? ? ????" in text


@pytest.mark.parametrize("language", SUFFIXES)
def test_any_names_stay_literals(language: str) -> None:
    entries = [Entry((word,), word, "float32", (2,)) for word in WORDS]
    text = client(Schema(tuple(entries), (ACTION,), {"batch": Axis(1, 8)}), "policy.onnx", language)
    assert not re.search("[\b\u2028\u202e]|</script>|<!--", text) or language in ("python", "rust")
    lines = [line for line in text.splitlines() if "int x" in line]
    assert not any(line.lstrip().startswith("int x") for line in lines)
    if language == "js":  # in the order of the file, where objects put numbers first
        assert text.index('["10", ["float32"') < text.index('["2", ["float32"')


def test_the_command_writes_a_client(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "client.rs"
    assert main(["client", str(GOLDEN), "--lang", "rust", "-o", str(target)]) == 0
    assert "50 steps, a reset before step 25" in capsys.readouterr().out
    assert target.read_text("utf-8") == client(kd_export.inspect(GOLDEN), "gru.onnx", "rust")
    assert set(SUFFIXES) == {"c", "cpp", "python", "js", "rust"}
