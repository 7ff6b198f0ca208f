"""The command ``kd-export``: write an artefact, look into it, check, compare, time and run it.

Exit codes: 0 ok, 1 something does not match or differs, 2 wrong use or a damaged file, 3 a package
or backend is missing, 4 the file is not trusted.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kd_export import __version__
from kd_export._backends.aoti import copy_without_sources
from kd_export._backends.c import check_header
from kd_export._clients import RESET, STEPS, SUFFIXES, client, header
from kd_export._console import Row, plain_table, task
from kd_export._errors import (
    BackendMissing,
    DtypeMismatch,
    ExportError,
    KeyMismatch,
    NotExportable,
    ShapeMismatch,
    UntrustedArtifact,
    VerifyError,
    brief,
    kind_of,
    nearest,
    printable,
    quoted,
)
from kd_export._export import DIAGNOSIS_HEADER, ExportOptions, benchmark, diagnose, save, verify
from kd_export._handover import hand_over
from kd_export._precision import adopt
from kd_export._program import convert
from kd_export._running.loading import (
    diff,  # the package's own
    inspect,  # the package's own
    model_bytes,
    open,  # noqa: A004  # the package's own
)
from kd_export._running.session import backend_for, formats, packages, require, unusable
from kd_export._schema.files import (
    copy_member,
    open_regular,
    open_zip,
    read_regular,
    replacing,
)
from kd_export._schema.onnx_file import stripped
from kd_export._schema.schema import (
    ENTRY_HEADER,
    SIGNAL_HEADER,
    STEP_HEADER,
    entry_rows,
    signal_rows,
)
from kd_export._schema.trust import disarm
from kd_export._verification.comparison import REDUCTION_HEADER, REPORT_HEADER, Report
from kd_export._verification.trials import shown

if TYPE_CHECKING:
    from torch import nn

    from kd_core import TensorDictBase


# What commands compute that no other part of kd_export needs.
#
# The user's own module, from the ``package.module:attribute`` of a command line; scripts by which
# shells complete a command line; a file without what only its makers should know: source paths,
# stack traces, sample inputs.
#
# Must not know how a command prints.

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
_kd_export() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} words=
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
    COMPREPLY=()
    if [[ $COMP_CWORD == 1 ]]; then
        words='{commands}'
    elif [[ $word != -* ]]; then
        return
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _kd_export kd-export
"""
_ZSH = """\
#compdef kd-export
autoload -U +X bashcompinit && bashcompinit
"""


@dataclass(frozen=True, slots=True)
class Command:
    """A command, as far as a shell completes it.

    Attributes:
        help: What it does.
        options: Its options, such as ``--json``.
    """

    help: str
    options: Sequence[str]


def script(shell: str, commands: Mapping[str, Command]) -> str:
    """Write the script of a shell: it completes commands, options and names of files."""
    if shell == "fish":
        return _fish(commands)
    cases = "\n".join(
        f"        {name}) words='{' '.join(command.options)}' ;;"
        for name, command in commands.items()
    )
    found = _BASH.format(cases=cases, commands=" ".join(commands))
    return _ZSH + found if shell == "zsh" else found


def _fish(commands: Mapping[str, Command]) -> str:
    lines = []
    for name, command in commands.items():
        about = command.help.replace("'", "\\'")
        lines.append(f"complete -c kd-export -n __fish_use_subcommand -f -a {name} -d '{about}'")
        seen = f"complete -c kd-export -n '__fish_seen_subcommand_from {name}'"
        for option in command.options:
            dashes, word = ("-l", option[2:]) if option.startswith("--") else ("-s", option[1:])
            lines.append(f"{seen} {dashes} {word}")
    return "\n".join([*lines, ""])


_FORM = "`(module, example)` or `(module, example, options)`"
OPTIONS = tuple(ExportOptions.__annotations__)
"""The options of `export` that a factory may give."""

Made = tuple["nn.Module", "TensorDictBase | Mapping[object, object]", dict[str, Any]]


def made(place: str) -> Made:
    """Import an attribute and call it: module, example, and the options of `export`.

    The folder of the process is searched first, as ``python -m`` does. This runs the user's code.

    Raises:
        ExportError: The module or attribute is not found, fails, or gives something else.
    """
    path, colon, name = place.partition(":")
    if not (path and colon and name):
        raise ExportError(
            f"expected `package.module:attribute`, got `{place}`.",
            got=place,
            hint="Name a function that returns (module, example), as in `train:policy`.",
        )
    if path.endswith(".py"):
        module = path.removesuffix(".py").replace("/", ".")
        raise ExportError(
            f"expected the name of a module, got the file `{path}`.",
            got=place,
            hint=f"Write `{module}:{name}`, in the folder that holds it.",
        )
    found = _attribute(path, name)
    from torch import nn  # heavy: what is imported has imported it

    if isinstance(found, nn.Module):
        raise ExportError(
            f"expected `{place}` to be a function that returns {_FORM}, got a module.",
            expected=_FORM,
            got=type(found).__name__,
            hint=f"Write one: `def build(): return {name}, example`, and name it `{path}:build`.",
        )
    try:
        parts = found() if callable(found) else found
    except Exception as error:
        raise ExportError(
            f"`{place}` fails: {_told(error)}", got=type(error).__name__, hint=_place(error)
        ) from error
    return _checked(place, parts)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('.')}."


def _place(error: Exception) -> str | None:
    """Name the line of the user's that raised an error."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"It is raised at `{last.line}` ({Path(last.filename).name}:{last.lineno})."


def _meant(unknown: Iterable[object]) -> str:
    close = [nearest(str(name), OPTIONS) for name in unknown]
    return "".join(f" Did you mean `{name}`?" for name in close if name is not None)


def _attribute(path: str, name: str) -> object:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: object = importlib.import_module(path)
    except Exception as error:
        raise ExportError(
            f"`{path}` cannot be imported: {_told(error)}",
            got=path,
            hint="Run the command in the folder that holds it, or install its package.",
        ) from error
    for part in name.split("."):
        known, found = dir(found), getattr(found, part, None)
        if found is None:
            close = nearest(part, known)
            raise ExportError(
                f"`{path}` has no `{name}`.",
                got=name,
                hint=None if close is None else f"Did you mean `{close}`?",
            )
    return found


def _checked(place: str, parts: object) -> Made:
    if not isinstance(parts, tuple | list) or len(parts) not in (2, 3):
        raise ExportError(
            f"expected `{place}` to return {_FORM}, got {kind_of(parts)}.",
            expected=_FORM,
            got=brief(parts),
            hint="Let it return both, as in `return policy, {'obs': obs}`.",
        )
    module, example, *rest = parts
    options = dict(rest[0]) if rest and isinstance(rest[0], Mapping) else {}
    unknown = [name for name in options if name not in OPTIONS]
    if unknown or (rest and not isinstance(rest[0], Mapping)):
        raise ExportError(
            f"`{place}` returns options that `export` does not take: {brief(rest[0])}.",
            expected=OPTIONS,
            got=brief(rest[0]),
            hint=f"It takes {quoted(OPTIONS)}.{_meant(unknown)}",
        )
    return module, example, options


_EXTRA = "extra/"


def strip(path: Path) -> None:
    """Write a file anew, in place, without source paths, stack traces and sample inputs.

    Raises:
        UntrustedArtifact: The file holds what is not part of an exported program.
        NotExportable: The format is not one of those that hold such things.
    """
    name = backend_for(path).name
    if name not in _STRIPPED:
        raise NotExportable(
            f"`{path.name}` is {name}, which holds no source paths or sample inputs.",
            expected=tuple(_STRIPPED),
            got=name,
            hint="Strip `.pt2`, `.aoti.pt2` and `.onnx` files.",
        )
    with replacing(path) as temporary:
        _STRIPPED[name](path, temporary)


def _program(path: Path, target: Path) -> None:
    """Write an archive as it is loaded, and the extra files of the one it is from."""
    with open_regular(path) as file:
        archive, _ = disarm(file)
        with archive, target.open("wb") as copy:
            shutil.copyfileobj(archive, copy)
        with open_zip(file) as source, zipfile.ZipFile(target, "a") as written:
            named = [(info, info.filename.partition("/")[2]) for info in source.infolist()]
            for info, name in (one for one in named if one[1].startswith(_EXTRA)):
                copy_member(source, info, written, f"model/{name}")


def _model(path: Path, target: Path) -> None:
    target.write_bytes(stripped(read_regular(path)))


_STRIPPED: dict[str, Callable[[Path, Path], None]] = {
    "torch.export": _program,
    "AOTInductor": copy_without_sources,
    "ONNX": _model,
}


OK, MISMATCH, USAGE, MISSING, UNTRUSTED = range(5)

_CODES: tuple[tuple[type[ExportError], int], ...] = (
    (BackendMissing, MISSING),
    (UntrustedArtifact, UNTRUSTED),
    (VerifyError, MISMATCH),
    (KeyMismatch, MISMATCH),
    (ShapeMismatch, MISMATCH),
    (DtypeMismatch, MISMATCH),
)


_OPTIONS = {"`trusted=True`": "`--trusted`", "`sha256=`": "`--sha256`", "`sha256`": "`--sha256`"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code.

    Args:
        arguments: The words of the command line, by default those of the process.

    Example:
        >>> main(["inspect", "missing.onnx"])
        2
    """
    parser = _parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help()
        return OK
    options = parser.parse_args(arguments)
    try:
        with _shown(options.name):
            command: int = options.command(options)
    except ExportError as error:
        print(f"kd-export: {_in_words(str(error))}", file=sys.stderr)
        return next((code for kind, code in _CODES if isinstance(error, kind)), USAGE)
    return command


def _shown(name: str) -> AbstractContextManager[None]:
    """Return what shows how far a command is; those without torch show their stages alone."""
    if name not in _STAGES:
        return nullcontext()
    import kd_core  # noqa: F401  # which shows long tasks, and is needed anyway

    return task(name, _STAGES[name])


def _in_words(message: str) -> str:
    """Name options of the command line in place of arguments of Python."""
    for argument, option in _OPTIONS.items():
        message = message.replace(argument, option)
    return message


class _Parser(argparse.ArgumentParser):
    """A parser that suggests the nearest command or option for a misspelt one."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Keep the words, to find one that stands for a required option."""
        self._words = [*(sys.argv[1:] if args is None else args)]
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and what may have been meant."""
        if "arguments are required" in message:
            known = [option for action in self._actions for option in action.option_strings]
            unknown = [one for one in self._words if one.startswith("--") and one not in known]
            for given in unknown:
                likely = nearest(given, known)
                message += "" if likely is None else f". Did you mean `{likely}`?"
        wrong = re.search(r"invalid choice: '([^']*)'|unrecognized arguments: (\S+)", message)
        if wrong is not None:
            words = [str(word) for action in self._actions for word in action.choices or ()]
            inner = [
                c for a in self._actions if isinstance(a.choices, dict) for c in a.choices.values()
            ]
            for parser in (self, *inner):
                words += [word for action in parser._actions for word in action.option_strings]
            given = wrong[1] or wrong[2]
            close = nearest(given, words)
            if close == given:  # an option of another command
                message += ". See `kd-export COMMAND --help` for the options of a command."
            elif close is not None:
                message += f". Did you mean `{close}`?"
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(prog="kd-export", description=__doc__)
    parser.add_argument("--version", action="version", version=f"kd-export {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="name")

    look = commands.add_parser("inspect", help="print keys, shapes and versions, executing nothing")
    look.set_defaults(command=_inspect)
    check = commands.add_parser("verify", help="run the stored tests in the file's own runtime")
    check.set_defaults(command=_verify)
    check.add_argument("--batch-sizes", type=_sizes, metavar="N,N")
    check.add_argument("--also", type=_words, default=(), metavar="NAME,NAME", help=_ALSO)
    _tolerances(check)
    compare = commands.add_parser("diff", help="compare two artefacts, executing nothing")
    compare.set_defaults(command=_diff)
    compare.add_argument("one", type=Path, metavar="ONE")
    compare.add_argument("other", type=Path, metavar="OTHER")
    compare.add_argument(
        "--interface", action="store_true", help="only what the programs take and give"
    )
    other = commands.add_parser("convert", help="write a .pt2 file in another format, verified")
    other.set_defaults(command=_convert)
    run = commands.add_parser("run", help="run on tensors of a safetensors file, by wire name")
    run.set_defaults(command=_run)
    run.add_argument("-i", "--input", type=Path, required=True, metavar="IN.safetensors")
    run.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.safetensors")

    for command in (look, check, other, run):
        command.add_argument("file", type=Path, metavar="FILE")
    other.add_argument("target", type=Path, metavar="TARGET")
    timed, *others = _more(commands)
    for command in (look, check, compare, other, run, timed, *others):
        command.add_argument("--json", action="store_true", help="print JSON, for machines")
        command.formatter_class = argparse.RawDescriptionHelpFormatter
    for command in (check, other, run, timed):
        command.add_argument("--trusted", action="store_true", help="trust who made the file")
        command.add_argument("--sha256", metavar="HEX", help="require this digest of the file")
    for name, example in _EXAMPLES.items():
        commands.choices[name].epilog = f"example:\n  kd-export {name} {example}"
    return parser


_EXAMPLES = {
    "inspect": "policy.onnx",
    "verify": "policy.pt2 --trusted",
    "diff": "policy.onnx newer.onnx --interface",
    "convert": "policy.pt2 policy.onnx --trusted",
    "adopt": "slim.onnx --like policy.onnx",
    "run": "policy.onnx -i in.safetensors -o out.safetensors",
    "bench": "policy.onnx policy.pt2 --batch-sizes 1,64 --trusted",
    "header": "policy.onnx -o policy.h",
    "client": "policy.onnx --lang c -o policy_client.c",
    "handover": "policy.onnx -o policy-handover",
    "doctor": ".onnx .aoti.pt2",
    "export": "train:policy policy.onnx",
    "diagnose": "train:policy --targets .pt2,.onnx",
    "strip": "policy.onnx",
    "completion": "bash > ~/.local/share/bash-completion/completions/kd-export",
}
_STAGES = {"export": 5, "convert": 5, "diagnose": 0}
"""The commands that need torch, and how many stages they have, if that is always the same."""
_ALSO = "further runtimes for an .onnx file: reference, openvino, tract"
_OWN_CODE = "It imports MODULE and calls FUNCTION: name only code that you trust."


def _more(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> list[argparse.ArgumentParser]:
    bench = commands.add_parser("bench", help="time calls of artefacts in their own runtimes")
    bench.set_defaults(command=_bench)
    bench.add_argument("files", type=Path, nargs="+", metavar="FILE")
    bench.add_argument("--batch-sizes", type=_sizes, metavar="N,N", help="default: those stored")
    bench.add_argument("--seconds", type=float, default=0.5, help="for each size (default 0.5)")
    bench.add_argument("--threads", type=int, help="default: those of the runtime")
    head = commands.add_parser("header", help="write names, dtypes and shapes for C and C++")
    head.set_defaults(command=_header)
    head.add_argument("file", type=Path, metavar="FILE")
    head.add_argument("-o", "--output", type=Path, metavar="OUT.h", help="default: print it")
    made_for = commands.add_parser("client", help="write a program that loads and steps a file")
    made_for.set_defaults(command=_client)
    made_for.add_argument("file", type=Path, metavar="FILE")
    made_for.add_argument("--lang", required=True, choices=tuple(SUFFIXES), help="the language")
    made_for.add_argument("--rows", type=int, default=1, help="rows at once (default 1)")
    made_for.add_argument("-o", "--output", type=Path, metavar="OUT", help="default: print it")
    given = commands.add_parser("handover", help="write a page, clients and server files")
    given.set_defaults(command=_handover)
    given.add_argument("file", type=Path, metavar="FILE")
    given.add_argument("-o", "--output", type=Path, metavar="FOLDER", required=True)
    given.add_argument("--rows", type=int, default=1, help="rows of clients (default 1)")
    given.add_argument("--web", type=Path, metavar="FOLDER", help="that of onnxruntime-web")
    doctor = commands.add_parser("doctor", help="list formats, packages, and what to install")
    doctor.set_defaults(command=_doctor)
    doctor.add_argument("suffixes", nargs="*", metavar="SUFFIX", help="exit with 3 without them")
    write = commands.add_parser(
        "export", help="export a module of your own code, verified", description=_OWN_CODE
    )
    write.set_defaults(command=_export)
    tried = commands.add_parser(
        "diagnose", help="try your module in several formats", description=_OWN_CODE
    )
    tried.set_defaults(command=_diagnose)
    for command in (write, tried):
        command.add_argument(
            "factory",
            metavar="MODULE:FUNCTION",
            help="returns (module, example), or with a dict of options of `kd_export.export`",
        )
    write.add_argument("target", type=Path, metavar="TARGET")
    _tolerances(write)
    tried.add_argument("--targets", type=lambda text: text.split(","), default=[".pt2", ".onnx"])
    clean = commands.add_parser("strip", help="remove source paths and sample inputs from a file")
    clean.set_defaults(command=_strip)
    clean.add_argument("file", type=Path, metavar="FILE")
    taken = commands.add_parser("adopt", help="seal a file that another tool made of one of ours")
    taken.set_defaults(command=_adopt)
    taken.add_argument("file", type=Path, metavar="FILE")
    taken.add_argument("--like", type=Path, required=True, metavar="FILE", help="made of this one")
    taken.add_argument("--max", type=float, help="largest difference allowed; default: rounding")
    taken.add_argument("--rms", type=float, help="largest root mean square of the differences")
    taken.add_argument("--agreement", type=float, help="least share of equal integers")
    shell = commands.add_parser("completion", help="print a script that completes these words")
    shell.set_defaults(command=_completion, commands=commands)
    shell.add_argument("shell", choices=SHELLS)
    return [bench, head, made_for, given, doctor, write, tried, clean, taken, shell]


def _tolerances(command: argparse.ArgumentParser) -> None:
    command.add_argument("--rtol", type=float, help="relative tolerance; without --atol that is 0")
    command.add_argument("--atol", type=float, help="absolute tolerance; without --rtol that is 0")


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _sizes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"expected sizes such as `1,64`, got `{text}`")
    return tuple(map(int, parts))


def _inspect(options: argparse.Namespace) -> int:
    path: Path = options.file
    schema = inspect(path)
    with open_regular(path) as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if options.json:
        sizes = {"bytes": path.stat().st_size, "model_bytes": model_bytes(path, schema)}
        file = {"path": str(path), **sizes, "sha256": digest}
        _print_json({"file": file, "schema": schema.to_data()})
        return OK
    _print_table(
        str(path),
        ("", ""),
        [
            ("format", backend_for(path).name),
            ("size", f"{path.stat().st_size:,} bytes"),
            ("without schema", f"{model_bytes(path, schema):,} bytes"),
            ("sha256", digest),
            ("made by", ", ".join(f"{name} {v}" for name, v in schema.versions.items())),
            ("weights", schema.weights),
            ("mode", schema.mode or "as the module"),
            *(() if schema.precision is None else (("precision", schema.precision.describe()),)),
            ("axes", ", ".join(f"{name} {axis}" for name, axis in schema.axes.items()) or "fixed"),
            ("stored tests", str(len(schema.vectors))),
            *((f"metadata {name}", json.dumps(value)) for name, value in schema.metadata.items()),
        ],
    )
    _print_table("", ENTRY_HEADER, entry_rows(schema))
    if signal_rows(schema):
        _print_table("", SIGNAL_HEADER, signal_rows(schema))
    if schema.steps:
        _print_table("", STEP_HEADER, [step.row() for step in schema.steps])
    return OK


def _verify(options: argparse.Namespace) -> int:
    report = verify(
        options.file,
        batch_sizes=options.batch_sizes,
        rtol=options.rtol,
        atol=options.atol,
        also=options.also,
        trusted=options.trusted,
        sha256=options.sha256,
    )
    return _tell(report, options)


def _adopt(options: argparse.Namespace) -> int:
    given = {name: getattr(options, name) for name in ("max", "rms", "agreement")}
    budget = {name: limit for name, limit in given.items() if limit is not None}
    return _tell(adopt(options.file, options.like, budget=budget or None), options)


def _convert(options: argparse.Namespace) -> int:
    report = convert(options.file, options.target, trusted=options.trusted, sha256=options.sha256)
    return _tell(report, options)


def _tell(report: Report, options: argparse.Namespace) -> int:
    if options.json:
        _print_json(report.to_data())
    else:
        _print_table(report.path, REPORT_HEADER, report.cells())
        if report.reduction is not None:
            _print_table("", REDUCTION_HEADER, report.reduction.cells())
        for line in report.lines():
            print(printable(line))
    return OK if report.ok else MISMATCH


def _diff(options: argparse.Namespace) -> int:
    found = diff(options.one, options.other, interface=options.interface)
    if options.json:
        _print_json(found.to_data())
    elif found.same:
        print(printable(repr(found)))
    else:
        _print_table("", found.header(), found.cells())
    return OK if found.same else MISMATCH


def _run(options: argparse.Namespace) -> int:
    session = open(options.file, trusted=options.trusted, sha256=options.sha256)
    # A file that executes is torch's: its tensors may be of dtypes that numpy does not know.
    kind = "torch" if backend_for(options.file).executes else "numpy"
    require("numpy", "cli")  # safetensors writes with it
    tensors = require(f"safetensors.{kind}", "cli")
    content = read_regular(options.input)
    try:
        inputs = tensors.load(content)
    except Exception as error:
        raise ExportError(f"`{options.input}` cannot be read: {error}.") from error
    outputs = session.run(inputs)
    with replacing(options.output) as temporary:
        temporary.write_bytes(tensors.save(outputs))
    rows = [(entry.wire, entry.describe()) for entry in session.schema.outputs]
    if options.json:
        _print_json({"path": str(options.output), "outputs": [wire for wire, _ in rows]})
    else:
        _print_table(str(options.output), ("output", "dtype and shape"), rows)
    return OK


def _bench(options: argparse.Namespace) -> int:
    rows = [
        row
        for file in options.files
        for row in benchmark(
            file,
            options.batch_sizes,
            seconds=options.seconds,
            threads=options.threads,
            trusted=options.trusted,
            sha256=options.sha256,
        )
    ]
    if options.json:
        _print_json([asdict(row) | {"sizes": dict(row.sizes)} for row in rows])
        return OK
    cells = [
        (r.path, shown(r.sizes), f"{r.seconds * 1e6:,.1f} us", f"{r.best * 1e6:,.1f} us")
        for r in rows
    ]
    _print_table("", ("file", "sizes", "median of a call", "best"), cells)
    return OK


def _check_target(target: Path | None, file: Path) -> None:
    """Refuse to replace the file that is read, or the header that a ``.c`` file has."""
    if target is None:
        return
    if target.absolute() == file.absolute() or (target.exists() and target.samefile(file)):
        raise ExportError(
            f"`{target}` is the file that is read, and would be replaced.",
            got=str(target),
            hint="Give another name to what is written: `-o NAME`.",
        )
    if file.suffix == ".c" and target.absolute() == file.with_suffix(".h").absolute():
        raise ExportError(
            f"`{target}` is the name of the header that `{file.name}` is saved with.",
            got=str(target),
            hint="Include that header in programs that call it, and write this to another name.",
        )
    check_header(target)


def _header(options: argparse.Namespace) -> int:
    target: Path | None = options.output
    _check_target(target, options.file)
    text = header(inspect(options.file), (target or options.file).name.partition(".")[0])
    if target is not None:
        with replacing(target) as temporary:
            temporary.write_text(text, encoding="ascii")
    if options.json:
        _print_json({"path": None if target is None else str(target), "header": text})
    elif target is None:
        print(text, end="")
    return OK


def _client(options: argparse.Namespace) -> int:
    path, target, language = options.file, options.output, options.lang
    _check_target(target, path)
    text = client(inspect(path), path.name, language, rows=options.rows)
    if target is not None:
        with replacing(target) as temporary:
            temporary.write_text(text, encoding="utf-8")
    if options.json:
        told = None if target is None else str(target)
        _print_json({"path": told, "language": language, "client": text})
    elif target is None:
        print(text, end="")
    else:
        print(f"{printable(str(target))}: {STEPS} steps, a reset before step {RESET}")
    return OK


def _handover(options: argparse.Namespace) -> int:
    folder: Path = options.output
    found = hand_over(options.file, folder, web=options.web, rows=options.rows)
    if options.json:
        _print_json({"path": str(folder), "bytes": dict(found)})
    else:
        rows = [(name, f"{size:,}") for name, size in found.items()]
        _print_table(str(folder), ("file", "bytes"), rows)
    return OK


def _doctor(options: argparse.Namespace) -> int:
    found, installed = formats(), packages()
    lacking = unusable(found, options.suffixes)
    if options.json:
        rows = [asdict(row) | {"missing": list(row.missing)} for row in found]
        _print_json({"ok": not lacking, "formats": rows, "packages": dict(installed)})
        return MISSING if lacking else OK
    cells = [(r.suffix, r.name, ", ".join(r.missing) or "-", r.remedy) for r in found]
    _print_table("", ("format", "by", "missing", "what to do"), cells)
    print()
    _print_table("", ("package", "version"), installed)
    if lacking:
        suffixes = [row.suffix for row in found]
        known = "" if set(lacking) <= set(suffixes) else f"; known formats: {', '.join(suffixes)}"
        text = f"kd-export: not usable: {', '.join(map(printable, lacking))}{known}"
        print(text, file=sys.stderr)
    return MISSING if lacking else OK


def _export(options: argparse.Namespace) -> int:
    backend_for(options.target)  # an unknown format is refused before anything runs
    module, example, chosen = made(options.factory)
    chosen.update(rtol=options.rtol, atol=options.atol)
    return _tell(save(module, options.target, example, **chosen), options)


def _diagnose(options: argparse.Namespace) -> int:
    module, example, chosen = made(options.factory)
    chosen.pop("metadata", None)
    found = diagnose(module, example, targets=options.targets, **chosen)
    if options.json:
        _print_json(found.to_data())
    else:
        _print_table("", DIAGNOSIS_HEADER, found.cells())
        for note in found.notes:
            print(f"note: {printable(note)}")
    return OK if found.ok else MISMATCH


def _strip(options: argparse.Namespace) -> int:
    path: Path = options.file
    with open_regular(path) as content:
        before = os.fstat(content.fileno()).st_size
    strip(path)
    after = path.stat().st_size
    if options.json:
        _print_json({"path": str(path), "bytes": {"before": before, "after": after}})
    else:
        print(f"{printable(str(path))}: {before:,} bytes before, {after:,} after")
    return OK


def _completion(options: argparse.Namespace) -> int:
    known: argparse._SubParsersAction[argparse.ArgumentParser] = options.commands
    commands = {
        one.dest: Command(
            one.help or "",
            [word for a in known.choices[one.dest]._actions for word in a.option_strings],
        )
        for one in known._choices_actions
    }
    text = script(options.shell, commands)
    if options.json:
        _print_json({"shell": options.shell, "script": text})
    else:
        print(text, end="")
    return OK


def _print_json(data: object) -> None:
    print(json.dumps(data, indent=2))


def _print_table(title: str, header: Row, rows: Sequence[Row]) -> None:
    """Print a table: by rich on a terminal where rich is installed, else as plain text."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        _print_rich(title, header, rows)
        return
    if title:
        print(title)
    print(plain_table(header, rows))


def _print_rich(title: str, header: Row, rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, title=title or None, show_header=any(header), title_justify="left")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console().print(table)
