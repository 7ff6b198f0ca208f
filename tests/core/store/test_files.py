"""Every call that changes files is one that the tests let fail, and is made in one module."""

import ast
from collections.abc import Iterator
from functools import cache

from tests.core.store.faults import CHANGING, EVERY
from tests.repo.tree import ROOT

FOLDER = ROOT / "packages/kd-core/src/kd_core/_store"
READING = {
    "fcntl.flock",
    "os.close",
    "os.fspath",
    "os.fstat",
    "os.getpid",
    "os.listdir",
    "os.lseek",
    "os.path.realpath",
    "os.pread",
    "os.urandom",
    "os.urandom(16).hex",
}
"""The calls of the system that leave files as they are."""

HARMLESS = {"is_temporary", "reported"}
"""The functions of `files` that change no file."""

MODULES = {"fcntl", "os", "shutil", "tempfile"}
METHODS = {
    "chmod",
    "hardlink_to",
    "mkdir",
    "open",
    "rename",
    "replace",
    "rmdir",
    "symlink_to",
    "touch",
    "truncate",
    "unlink",
    "write_bytes",
    "write_text",
}
"""The methods of paths and open files that change files."""


@cache
def modules() -> dict[str, ast.Module]:
    """Return the source of each module of the store."""
    return {path.stem: ast.parse(path.read_text("utf-8")) for path in FOLDER.glob("*.py")}


def changes(call: ast.Call, function: ast.FunctionDef) -> bool:
    """Return whether a call is one of the system that may change files."""
    name = ast.unparse(call.func)
    owner, _, method = name.rpartition(".")
    if name == "os.open":
        return "O_CREAT" in ast.unparse(function)
    if owner.partition(".")[0] in MODULES:
        return name not in READING
    return name == "open" or (owner != "files" and method in METHODS)


def changing_calls(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each call that may change files, and the function that makes it."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and changes(node, function):
                yield ast.unparse(node.func), function.name


def test_all_calls_that_change_files_are_let_fail() -> None:
    found = {
        (module, function, name)
        for module, tree in modules().items()
        for name, function in changing_calls(tree)
    }
    assert {module for module, _, _ in found} == {"files"}
    assert {function for _, function, _ in found} <= set(CHANGING)
    assert {name for _, _, name in found} >= {"os.open", "os.write", "os.link", "path.mkdir"}


def test_functions_of_files_are_called_through_their_module() -> None:
    # Else a test that replaces one would not reach the call.
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in MODULES, module
                if node.module == "kd_core._store.files":
                    assert {name.name for name in node.names} <= HARMLESS, module


def test_each_function_of_files_can_fail() -> None:
    functions = {node.name for node in modules()["files"].body if isinstance(node, ast.FunctionDef)}
    assert functions == {*EVERY, *HARMLESS, "locked"}  # which opens and locks
