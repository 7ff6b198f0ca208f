"""What a ``.pt2`` file may hold before torch loads it.

`torch.export.load` unpickles, evaluates expressions, imports modules and writes names into source:
a forged file runs code. ``trusted=True`` says that the caller trusts who made a file; a forged
file is refused all the same. So nothing of the file reaches torch unless it is described here: an
archive of the files that kd_export writes, stored without compression, whose JSON is checked field
by field (`serialized_program`). What torch does not need to run the program is left out: sample
inputs, extra files, guards, metadata.

A program names its operators by dotted path, and torch looks each one up among all that the
process has registered. Some of those read and write files, open connections or start code. So
only namespaces of pure tensor functions are allowed, and inside ``aten`` not the operators that
reach beyond their tensors.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import zipfile
from collections.abc import Collection, Iterator
from typing import BinaryIO, cast

from kd_export._errors import ExportError, UntrustedArtifact
from kd_export._schema.files import (
    FORMAT_FILES,
    Json,
    copy_member,
    foreign,
    members,
    open_zip,
    unknown_member,
)
from kd_export._schema.serialized_program import check_program, check_weights

_SYMBOLIC = """
_operator.getitem _operator.eq _operator.ne _operator.lt _operator.le _operator.gt _operator.ge
_operator.add _operator.sub _operator.mul _operator.truediv _operator.floordiv _operator.mod
_operator.pow _operator.neg _operator.pos _operator.and_ _operator.or_ math.trunc math.ceil
math.floor torch.sym_float torch.sym_int torch.sym_max torch.sym_min torch.sym_not torch.sym_ite
torch.sym_sqrt torch._sym_sqrt torch.sym_sum
"""
_HIGHER_ORDER = """
cond map_impl scan associative_scan while_loop wrap_with_set_grad_enabled wrap_with_autocast
"""
_OVERLOAD = re.compile(
    r"torch\.ops\.(?:aten|prims|torchvision)\.(_?[A-Za-z]\w*|__i?(?:and|or|xor|lshift|rshift)__)\.\w+"
)
_HIGHER = re.compile(r"torch\.ops\.higher_order\.(\w+)")
_REFUSED = re.compile(
    r"from_file|save|load\w*|warn|_?print|wait|manual_seed|seed|initial_seed|set_grad_enabled|"
    r"set_?|set_data|_backward|record_stream|_cufft_\w+|_share_memory\w*|_test_\w+|_make_dep_token"
)
"""Operators of ``aten`` that touch files, the process, its random state or foreign memory."""


def operators_of(program: object) -> Iterator[str]:
    """List the operators that a checked program calls, those of its inner graphs included."""
    items = [program]
    while items:
        item = items.pop()
        if isinstance(item, dict):
            if isinstance(item.get("target"), str):
                yield item["target"]
            items.extend(item.values())
        elif isinstance(item, list):
            items.extend(item)


def check_operator(target: str, custom: Collection[str] = ()) -> str:
    """Check that a program may call an operator.

    >>> check_operator("torch.ops.aten.relu.default")
    'torch.ops.aten.relu.default'

    Args:
        target: The dotted path of the operator.
        custom: The paths of operators that the user defined in this process.

    Raises:
        UntrustedArtifact: It may not.
    """
    found, higher = _OVERLOAD.fullmatch(target), _HIGHER.fullmatch(target)
    if (
        target in _SYMBOLIC.split()
        or target in custom
        or (found is not None and _REFUSED.fullmatch(found[1]) is None)
        or (higher is not None and higher[1] in _HIGHER_ORDER.split())
    ):
        return target
    raise UntrustedArtifact(
        f"the program calls `{target[:80]}`, which is not an operator that a file may call.",
        expected="an operator of torch on tensors",
        got=target[:1000],
        hint="If the operator is your own, define it with `torch.library.custom_op` or a "
        "`torch.library.Library` before you save or open the file. Otherwise the file is forged or "
        "damaged: do not use it.",
    )


_MODEL = "models/model.json"
_CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_SAMPLES = "data/sample_inputs/model.pt"
_TENSORS = re.compile(r"data/weights/weight_\d{1,9}|data/constants/tensor_\d{1,9}")
_KNOWN = re.compile(
    "|".join((*map(re.escape, (_MODEL, *_CONFIGS, _SAMPLES)), _TENSORS.pattern, FORMAT_FILES))
)
_SIZE = r"L(\['\w+'\]|\[\d+\])+\.size\(\)\[\d+\]"
_EQUAL = re.compile(rf"{_SIZE} == {_SIZE}")
"""Sizes that are one axis of the schema."""
_LARGEST_JSON = 1 << 25
_LARGEST_FORMAT_FILE = 1 << 10
_LARGEST_SPREAD = 1 << 26
"""Bytes that tensors may always spread to, whatever their files hold (a row repeated, say)."""
_WIDEST = 16
"""Bytes of the widest number, complex128."""
_MOST_DIMS = 64


def disarm(file: BinaryIO, custom: Collection[str] = ()) -> tuple[BinaryIO, list[str]]:
    """Check a ``.pt2`` file and write it anew without what need not be loaded.

    The new archive is a temporary file, so that weights are in memory once: where torch puts them.

    Args:
        file: The file, open for reading.
        custom: The paths of operators that the user defined in this process.

    Returns:
        The new archive, and the operators that the program calls.

    Raises:
        UntrustedArtifact: It holds what is not part of an exported program, or would run code.
        ExportError: It is not a whole archive.
    """
    result = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    try:
        return result, _write_anew(file, result, custom)
    except BaseException:
        result.close()
        raise


def read_program(file: BinaryIO) -> Json:
    """Read the checked program of a ``.pt2`` file.

    Raises:
        UntrustedArtifact: The file holds what is not part of an exported program.
        ExportError: It is not a whole archive, or holds no program.
    """
    with open_zip(file) as source:
        files = members(source, _KNOWN)
        if _MODEL not in files:
            raise foreign(".pt2")
        return cast("Json", check_program(_json(source, files[_MODEL])))


def conditions_of(file: BinaryIO) -> list[str]:
    """List the conditions on sizes in a program that torch wrote, but for sizes that are equal.

    They are Python code, which torch runs before each call. Nothing here runs it: what the program
    gives where such a condition does not hold is not what the module would have given.

    Raises:
        ExportError: The file is not a whole archive, or holds no program.
    """
    with open_zip(file) as source:
        files = members(source, _KNOWN)
        if _MODEL not in files:
            raise foreign(".pt2")
        program = _json(source, files[_MODEL])
    guards = program.get("guards_code", []) if isinstance(program, dict) else []
    return [str(guard) for guard in guards if not _EQUAL.fullmatch(str(guard))]


def _write_anew(file: BinaryIO, result: BinaryIO, custom: Collection[str]) -> list[str]:
    with open_zip(file) as source, zipfile.ZipFile(result, "w") as target:
        files = members(source, _KNOWN)
        operators: list[str] = []
        for name, info in files.items():
            if name == _MODEL:
                program = check_program(_json(source, info))
                operators = sorted(set(operators_of(program)))
                content = json.dumps(program).encode()
            elif name in _CONFIGS:
                config = check_weights(_json(source, info))
                _check_extents(config, name, files)
                content = json.dumps(config).encode()
            elif name.startswith("extra/"):
                continue
            elif re.fullmatch(FORMAT_FILES, name) and info.file_size > _LARGEST_FORMAT_FILE:
                raise unknown_member(info.filename)
            elif _TENSORS.fullmatch(name):
                copy_member(source, info, target, f"model/{name}")
                continue
            else:
                content = b"" if name == _SAMPLES else source.read(info)
            target.writestr(f"model/{name}", content)
    for operator in operators:
        check_operator(operator, custom)
    result.seek(0)
    return operators


def _json(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> object:
    if info.file_size > _LARGEST_JSON:
        raise ExportError(
            f"`{info.filename}` has {info.file_size:,} bytes, more than {_LARGEST_JSON:,}.",
            hint="The file is forged or damaged.",
        )
    try:
        data: object = json.loads(archive.read(info))
    except (ValueError, RecursionError) as error:
        raise ExportError(f"`{info.filename}` in the file is not JSON: {error}.") from error
    return data


def _check_extents(config: object, name: str, files: dict[str, zipfile.ZipInfo]) -> None:
    """Check that tensors have the files they name, and do not spread to far more bytes."""
    assert isinstance(config, dict)
    folder = name.rpartition("/")[0]
    for key, weight in config["config"].items():
        info = files.get(f"{folder}/{weight['path_name']}")
        sizes = [size.get("as_int", -1) for size in weight["tensor_meta"]["sizes"]]
        count = math.prod(sizes[:_MOST_DIMS])
        fits = min(sizes, default=0) >= 0 and len(sizes) <= _MOST_DIMS
        if info is None or not fits or (count and not info.file_size):
            raise UntrustedArtifact(
                f"the tensor `{key[:80]}` has no data in the file.",
                got=weight["path_name"],
                hint="The file is forged or damaged: do not use it.",
            )
        if count * _WIDEST > max(_LARGEST_SPREAD, _WIDEST * info.file_size):
            raise UntrustedArtifact(
                f"the tensor `{key[:80]}` spreads {info.file_size:,} bytes to {count:,} numbers.",
                got=count,
                hint="The file is forged or damaged: do not use it.",
            )
