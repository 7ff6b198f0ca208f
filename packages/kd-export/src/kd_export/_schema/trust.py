"""What a ``.pt2`` file may hold before torch is let near it.

`torch.export.load` unpickles weights, evaluates expressions and looks operators up by dotted
name: a forged file runs code. ``trusted=True`` vouches for who made a file, not for forgeries, so
these are refused whatever the caller says. What torch does not recognise as its present format it
takes for an older one, or for compiled code, and unpickles or loads that: so a file may hold what
kd_export writes and nothing else. Stored sample inputs, guard code and extra files, which running
a program does not need, are dropped and the rest is used.
"""

from __future__ import annotations

import ast
import io
import json
import re
import zipfile
from collections.abc import Iterator

from kd_export._errors import ExportError, UntrustedArtifact
from kd_export._schema.archive import DAMAGED

_TARGET = re.compile(
    r"torch\.ops\.(?!__|import_module\b|load_library\b|loaded_libraries\b)\w+\.\w+(\.\w+)?|"
    r"_operator\.\w+|math\.\w+|"
    r"torch\.(sym_\w+|_sym_\w+)|torch\._C\._set_grad_enabled"
)
_FUNCTIONS = (
    "Symbol Integer Rational Float Add Mul Pow Max Min Eq Ne Lt Le Gt Ge And Or Not "
    "FloorDiv ModularIndexing Where PythonMod Mod CleanDiv CeilToInt FloorToInt CeilDiv LShift "
    "RShift PowByNatural FloatPow FloatTrueDiv IntTrueDiv IsNonOverlappingAndDenseIndicator "
    "TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat Identity "
    "Equality Unequality LessThan GreaterThan StrictLessThan StrictGreaterThan"
)
_WORDS = re.compile(r"[a-z]+\d+|true|false|oo|int_oo")
_STRINGS = re.compile(r"[a-z]*\d+|[\d.e+-]+")
_ARITHMETIC = (
    ast.Expression,
    ast.Call,
    ast.keyword,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
)
_FORMAT_FILES = (
    "archive_format archive_version byteorder version .data/version .data/serialization_id "
    ".format_version .storage_alignment"
)
_PARTS = ("data/weights/", "data/constants/", "data/sample_inputs/", "models/", "extra/")
_LARGEST = 1 << 26
"""Bytes that an archive may always unpack to; a larger one, to 16 times its size."""
_PLAIN_TREES = (None, "builtins.dict", "builtins.list", "builtins.tuple", "collections.OrderedDict")


def disarm(data: bytes) -> io.BytesIO:
    """Check a ``.pt2`` file and copy it without the parts that need not be loaded.

    Raises:
        UntrustedArtifact: It holds a pickled payload, an operator outside ``torch.ops``, an
            expression that is more than arithmetic, or what is no part of an exported program.
        ExportError: It is no whole archive, or unpacks to far more than its size.
    """
    result = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(result, "w") as target:
            _check_layout(source.infolist(), len(data))
            _copy_checked(source, target)
    except ExportError:
        raise
    except DAMAGED as error:
        raise ExportError(
            f"the file is not a whole .pt2 archive: {error}.", hint="It may be truncated."
        ) from error
    result.seek(0)
    return result


def _copy_checked(source: zipfile.ZipFile, target: zipfile.ZipFile) -> None:
    for info in source.infolist():
        if not _inner(info.filename).startswith("extra/"):
            target.writestr(info.filename, _checked(info.filename, source.read(info)))


def _inner(path: str) -> str:
    return path.partition("/")[2]


def _check_layout(infos: list[zipfile.ZipInfo], size: int) -> None:
    """Let pass the files of one exported program, all in one folder; each name once."""
    folders = {info.filename.partition("/")[0] for info in infos}
    names = {info.filename for info in infos}
    for info in infos:
        inner = _inner(info.filename)
        known = inner in _FORMAT_FILES.split() or inner.startswith(_PARTS)
        if not known or ".." in info.filename.split("/"):
            raise UntrustedArtifact(
                f"`{info.filename}` is not part of an exported program.",
                got=info.filename,
                hint="The file is forged, or of another format: do not use it.",
            )
    if len(folders) > 1 or len(names) < len(infos):
        raise UntrustedArtifact(
            "the archive holds several programs, or a file twice.",
            got=tuple(sorted(folders)),
            hint="The file is forged or damaged: do not use it.",
        )
    whole = sum(info.file_size for info in infos)
    if whole > max(_LARGEST, 16 * size):
        raise ExportError(
            f"the archive of {size:,} bytes unpacks to {whole:,}.",
            hint="Programs are stored uncompressed: the file is forged or damaged.",
        )


def _checked(path: str, content: bytes) -> bytes:
    """Check one file of the archive; give what to put in its place."""
    inner = _inner(path)
    name = inner.rsplit("/", 1)[-1]
    if inner.startswith("data/sample_inputs/"):
        return b""
    if inner.startswith(("data/weights/", "data/constants/")):
        if name.endswith("_config.json"):
            _check_payloads(_json(content, path))
        elif name.endswith(".pt"):
            _check_legacy(content, path)
        elif name.startswith(("custom_obj_", "opaque_obj_")):
            raise _pickled(path)
    elif inner.startswith("models/"):
        return _check_model(_json(content, path))
    return content


def _check_legacy(content: bytes, path: str) -> None:
    """Let pass the weights of torch 2.8 if they hold tensors alone; then torch loads them so."""
    import torch

    if not content:
        return
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        raise _pickled(path) from error


def _json(content: bytes, path: str) -> dict[str, object]:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ExportError(f"`{path}` in the file is not JSON: {error}.") from error
    if not isinstance(data, dict):
        raise ExportError(f"`{path}` in the file is not a JSON object.")
    return data


def _check_payloads(config: dict[str, object]) -> None:
    for field, value in _walk(config):
        if field == "use_pickle" and value:
            raise _pickled("weights")


def _check_model(model: dict[str, object]) -> bytes:
    """Check targets and expressions of a serialised program; drop its guard code."""
    for field, value in _walk(model):
        if field == "target" and isinstance(value, str) and "." in value:
            _check_target(value)
        elif field == "expr_str":
            _check_expression(value)
        elif field in ("in_spec", "out_spec") and isinstance(value, str):
            _check_tree(value)
    for key in model.get("range_constraints", {}):  # type: ignore[attr-defined]  # JSON object
        _check_expression(key)
    if "guards_code" in model:  # torch 2.8 does not know the field
        model["guards_code"] = []
    return json.dumps(model).encode()


def _walk(item: object) -> Iterator[tuple[str, object]]:
    """Give every field of every object."""
    if isinstance(item, dict):
        for field, value in item.items():
            yield field, value
            yield from _walk(value)
    elif isinstance(item, list):
        for value in item:
            yield from _walk(value)


def _check_target(target: str) -> None:
    if not _TARGET.fullmatch(target):
        raise UntrustedArtifact(
            f"the program calls `{target}`, which is not an operator.",
            expected="operators of torch.ops",
            got=target,
            hint="The file is forged or damaged: do not use it.",
        )


def _check_expression(value: object) -> None:
    """Let pass sums, products and the like of sizes, as sympy writes them; nothing else."""
    try:
        harmless = isinstance(value, str) and all(
            map(_is_arithmetic, ast.walk(ast.parse(value.strip(), mode="eval")))
        )
    except (SyntaxError, RecursionError, ValueError):
        harmless = False
    if not harmless:
        raise UntrustedArtifact(
            f"the program holds {value!r} where a size expression should be.",
            expected="arithmetic on sizes",
            got=value,
            hint="The file is forged or damaged: do not use it.",
        )


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS.split()
    if isinstance(node, ast.Name):
        return node.id in _FUNCTIONS.split() or _WORDS.fullmatch(node.id) is not None
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        # A function of sympy evaluates a string that it is given.
        return _STRINGS.fullmatch(node.value) is not None
    return isinstance(node, _ARITHMETIC)


def _check_tree(text: str) -> None:
    for field, value in _walk(_tree(text)):
        if field == "type" and value not in _PLAIN_TREES:
            raise UntrustedArtifact(
                f"the program arranges its arguments as a `{value}`.",
                expected="dict, list or tuple",
                got=value,
            )


def _tree(text: str) -> object:
    try:
        tree: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ExportError(f"the arrangement of arguments is not JSON: {error}.") from error
    return tree


def _pickled(path: str) -> UntrustedArtifact:
    return UntrustedArtifact(
        f"`{path}` in the file is pickled: loading it would execute code.",
        got=path,
        hint="Ask for a file saved with torch 2.9 or later by `kd_export.export(...).save(...)`.",
    )
