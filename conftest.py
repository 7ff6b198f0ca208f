"""What every test, docstring and Markdown fence of the repository runs under."""

import contextlib
import copy
import doctest
import functools
import gc
import importlib
import inspect
import logging
import os
import re
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest
import torch
from _pytest.doctest import DoctestModule
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# The same examples in every run, and no clock: a busy machine is no fault of the code.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("suite")


def _enter_scratch(namespace: dict[str, Any]) -> None:
    """Let the fences of one page write files where nobody else looks."""
    namespace["_home"] = Path.cwd()
    namespace["_scratch"] = tempfile.TemporaryDirectory()
    os.chdir(namespace["_scratch"].name)
    torch.manual_seed(0)


def _leave_scratch(namespace: dict[str, Any]) -> None:
    os.chdir(namespace["_home"])
    namespace["_scratch"].cleanup()
    # pytest keeps pages, and a container of files in one would stay mapped.
    for name in [name for name in namespace if not name.startswith("_")]:  # others are dynamo's
        del namespace[name]


# Settings of Sphinx, which only the docs lane installs.
# The other is what children of a program under the drop-in import: it installs the drop-in.
collect_ignore = ["docs/conf.py", "packages/kd-core/src/kd_core/drop_in/_children"]

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["*.md"],
    setup=_enter_scratch,
    teardown=_leave_scratch,
).pytest()


@pytest.hookimpl(wrapper=True, specname="pytest_collect_file")
def pytest_collect_file_of_tests(
    file_path: Path,
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for no examples in the docstrings of tests: there are none.

    A source is imported by its name first: pytest alone would import its package, and with it the
    source, and then the source once more, whose switches and registries nobody else sees.
    """
    collectors = yield
    if file_path.is_relative_to(Path(__file__).with_name("tests")):
        return [each for each in collectors if not isinstance(each, DoctestModule)]
    _, found, name = str(file_path.with_suffix("")).rpartition("/src/")
    if found and any(isinstance(each, DoctestModule) for each in collectors):
        with contextlib.suppress(ImportError):  # which pytest tells
            importlib.import_module(name.replace("/", ".").removesuffix(".__init__"))
    return collectors


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from looking at torch, pytest and the tests themselves.

    They are 700,000 objects that stay until the end, and to look at all of them takes 0.3 s. Also
    let it come more rarely: what torch traces is many objects, most of which are freed without it.
    """
    gc.disable()
    try:
        collected = yield
    finally:
        gc.enable()
    gc.freeze()
    # A look at the young for each 10,000 of them, and at all others for each 2,000,000.
    gc.set_threshold(10_000, 10, 20)
    return collected


_from_module = doctest.DocTestFinder._from_module  # type: ignore[attr-defined]  # not in typeshed


def _written_in(finder: doctest.DocTestFinder, module: ModuleType, thing: object) -> bool:
    """Run the examples of what is public where it is written: `__module__` names its package."""
    if inspect.isfunction(thing):
        return inspect.unwrap(thing).__globals__ is vars(module)
    if not inspect.isclass(thing):
        return bool(_from_module(finder, module, thing))
    own = thing.__module__.partition(".")[0] == module.__name__.partition(".")[0]
    statement = rf"^ *class {thing.__name__}\b"
    return own and re.search(statement, inspect.getsource(module), re.MULTILINE) is not None


doctest.DocTestFinder._from_module = _written_in  # type: ignore[attr-defined]  # not in typeshed


def _remove_hooks_of_exports() -> None:
    """Remove the hooks at buffers that torch, up to 2.12, leaves where `torch.export` fails.

    They see every module, and break the graphs of modules that are compiled later.
    """
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    for number, hook in list(hooks.items()):
        if getattr(hook, "__qualname__", "").startswith("register_buffer_assignment_hook."):
            del hooks[number]


def _read_translations_once() -> None:
    """Let torch read its 500 translations to ONNX once a process, and not for every file.

    Half of the time of each file went there. Where torch has moved the place, nothing is changed.
    """
    module = sys.modules.get("torch.onnx._internal.exporter._registration")
    registry = getattr(module, "ONNXRegistry", None)
    read = getattr(registry, "from_torchlib", None)
    if read is None or getattr(read, "__self__", None) is not registry:
        return  # not imported yet, or done
    read = functools.cache(read)

    def copied(*args: Any, **options: Any) -> Any:
        found = copy.copy(read(*args, **options))
        found.functions = {target: list(each) for target, each in found.functions.items()}
        return found

    registry.from_torchlib = staticmethod(copied)  # type: ignore[union-attr]  # it is there


def _list_operators_once() -> None:
    """Let torch look its composite operators up once, and not in every export and decomposition.

    A tenth of the time of each export to ONNX went there. It looks again once there are more: a
    library was loaded, or a namespace was opened. Where torch has moved the place, nothing is
    changed.
    """
    module = sys.modules.get("torch._export.utils")
    look = getattr(module, "_materialize_cpp_cia_ops", None)
    if look is None or hasattr(look, "__wrapped__"):
        return  # not imported yet, or done
    seen: list[int] = []

    @functools.wraps(look)
    def looked() -> None:
        count = [len(torch.ops._dir), len(torch.ops.loaded_libraries)]
        if seen != count:
            look()
            seen[:] = [len(torch.ops._dir), len(torch.ops.loaded_libraries)]

    module._materialize_cpp_cia_ops = looked  # type: ignore[union-attr]  # it is there


def _compile_without_figures() -> None:
    """Let dynamo write no notes that nobody reads: how long guards take, and what a call changes.

    To time the guards of a graph it empties the caches of the processor, which takes as long as to
    trace a small one. It also keeps the instructions of more than 128 functions, as a graph of ours
    runs through more, and does not look for garbage after each graph. Where torch has moved the
    places, nothing is changed.
    """
    guards: Any = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = _no_time
    config: Any = sys.modules.get("torch._dynamo.config")
    if hasattr(config, "side_effect_replay_policy"):
        config.side_effect_replay_policy = "silent"
    if hasattr(config, "run_gc_after_compile"):
        config.run_gc_after_compile = False
    bytecode: Any = sys.modules.get("torch._dynamo.bytecode_transformation")
    read: Any = getattr(bytecode, "_cached_cleaned_instructions", None)
    if hasattr(read, "cache_parameters") and read.cache_parameters()["maxsize"] == 128:
        bytecode._cached_cleaned_instructions = functools.lru_cache(4096)(read.__wrapped__)


def _read_hints_once() -> None:
    """Let torch read the annotations of a class once, not wherever one of its objects is loaded.

    So for the classes that a program in a `.pt2` is made of, and for those of the function that
    decorates each of 11,000 kernels during an export to ONNX: `typing.Callable` remembers what
    `collections.abc.Callable` makes anew. Where torch has moved the places, nothing is changed.
    """
    ops: Any = sys.modules["torch._ops"]
    if getattr(ops, "Callable", None) is Callable:
        ops.Callable = typing.Callable
    serialize: Any = sys.modules.get("torch._export.serde.serialize")
    if getattr(serialize, "typing", None) is typing:
        known: dict[object, dict[str, Any]] = {}

        def hints(cls: object, **options: Any) -> dict[str, Any]:
            if cls not in known:
                known[cls] = typing.get_type_hints(cls, **options)
            return known[cls]

        serialize.typing = ModuleType("typing")
        vars(serialize.typing).update(vars(typing) | {"get_type_hints": hints})


def _plan_early() -> None:
    """Let modules make their plan at the second call: tests of plans call them a few times."""
    modules = sys.modules.get("kd_nn._modules.base")
    if modules is not None:
        modules.UNPLANNED = 1  # type: ignore[attr-defined]  # it is there


def _no_time(*_: object) -> float:
    return 0.0


@pytest.fixture(autouse=True)
def _same_start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the seed of every test, and give every docstring a folder of its own."""
    # `torch.manual_seed` notes the stack for each kind of device that is not there: 1.5 ms a test.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    _read_translations_once()
    _list_operators_once()
    _compile_without_figures()
    _read_hints_once()
    _plan_early()
    _remove_hooks_of_exports()
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.chdir(request.getfixturevalue("tmp_path"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tables whose rows tests recorded, of policies and of files with fewer bits."""
    reports = [
        report
        for report in terminalreporter.getreports("passed")
        if any(isinstance(row, dict) for _, row in report.user_properties)
    ]
    if not reports:
        return
    from tests.tables import recorded  # it needs kd_export, as such tests do

    for title, table in recorded(reports):
        terminalreporter.write_sep("-", title)
        terminalreporter.write_line(table)


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """Collect what is logged from `INFO` on, by us too.

    pytest's own plugin is off: it gives every logger of torch a handler in every test, and torch
    then describes all that it traces.
    """
    records: list[logging.LogRecord] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Kept(logging.INFO)
    known = logging.root.manager.loggerDict.values()
    apart = [each for each in known if isinstance(each, logging.Logger) and not each.propagate]
    listened = [logging.root, *apart]
    ours = [logging.getLogger("kd"), logging.getLogger("kd_export")]
    for logger in listened:
        logger.addHandler(handler)
    for logger in ours:
        logger.setLevel(logging.INFO)
    yield records
    for logger in ours:
        logger.setLevel(logging.NOTSET)
    for logger in listened:
        logger.removeHandler(handler)


@pytest.fixture
def _at_once() -> Iterator[None]:
    """Fail a test that takes more than ten seconds of the processor; it guards against years.

    The clock on the wall would measure the machine.
    """
    start = time.process_time()
    yield
    assert time.process_time() - start < 10
