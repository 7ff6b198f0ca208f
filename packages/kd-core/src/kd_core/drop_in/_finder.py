"""The import finder: `tensordict` and its modules resolve to the packages of kd.

A name of such a module is looked for in this order: what this folder serves by itself
(`_functions`), then the public names of `kd_core`, `kd_nn` and `kd_probabilistic`. The last two are
found by name when a program asks: `kd_core` does not depend on them. All modules serve all names,
because users import one name from several places.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Final

from kd_core import MissingDependency, NotOffered
from kd_core._naming import homes
from kd_core.drop_in import _attributes, _functions, _report

TOP: Final = "tensordict"
# The release whose names and behaviour kd offers.
VERSION: Final = "0.15.3"
_PACKAGES: Final = ("", "nn", "nn.distributions", "prototype", "store", "_base")
_MODULES: Final = """
    _contextlib _lazy _nestedkey _pytree _reductions _td _tensordict _tensorcollection _torch_func
    _unbatched _utils base functional memmap persistent tensorclass tensordict typedtensordict utils
    nn.common nn.cudagraphs nn.ensemble nn.functional_modules nn.params nn.probabilistic nn.sequence
    nn.utils nn.distributions.composite nn.distributions.continuous nn.distributions.discrete
    nn.distributions.truncated_normal nn.distributions.utils prototype.fx
"""
NAMES: Final = frozenset(f"{TOP}.{each}".rstrip(".") for each in (*_PACKAGES, *_MODULES.split()))
# Modules whose name is that of a function, too, which is what an attribute of the package means.
_SHADOWED: Final = ("memmap", "tensorclass")
_SOURCES: Final = (
    "kd_core",
    "kd_nn",
    "kd_nn.distributions",
    "kd_probabilistic",
    "kd_core.testing",
    "kd_core.convert",
)
# Of these, the whole module stands in: names mean there what they mean nowhere else.
_FIRST: Final = {f"{TOP}.nn.distributions": "kd_nn.distributions"}
_CHILDREN: Final = str(Path(__file__).with_name("_children"))


class StandIn(ModuleType):
    """A module of tensordict; its names are looked for in kd when they are first used."""

    def __getattr__(self, name: str) -> object:
        full = f"{self.__name__}.{name}"
        if full in NAMES:
            return import_module(full)
        if name == "__all__":
            modules = {full.rpartition(".")[2] for full in NAMES} - set(_SHADOWED)
            return [each for each in dir(self) if each[0] != "_" and each not in modules]
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = lookup(self.__name__, name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        names = set(vars(self))
        for source in _SOURCES:
            if _is_there(source):
                names.update(name for name in dir(import_module(source)) if name[0] != "_")
        return sorted(names)


class DropIn(MetaPathFinder, Loader):
    """What finds and makes the modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of tensordict; `None` for other modules."""
        if fullname in NAMES:
            place = fullname.removeprefix(TOP).lstrip(".")
            return ModuleSpec(fullname, self, origin="kd", is_package=place in _PACKAGES)
        if fullname.startswith(f"{TOP}."):
            _report.record(fullname)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return StandIn(spec.name, "A module of tensordict, whose names are those of kd.")

    def exec_module(self, module: ModuleType) -> None:
        """Fill in what must be there at once."""
        if module.__name__ == TOP:
            _attributes.serve_containers()
            for name in _SHADOWED:
                import_module(f"{TOP}.{name}")
                setattr(module, name, lookup(TOP, name))
            module.__dict__["__version__"] = VERSION
        elif module.__name__ == f"{TOP}.nn" and _is_there("kd_nn"):
            _attributes.serve_modules()


def lookup(module: str, name: str) -> object:
    """Return what a name of a module of tensordict means in kd.

    Raises:
        AttributeError: if kd has no such name; the name is then in the report.
        MissingDependency: if the name is in a package of kd that is not installed. It is not an
            `AttributeError`, too: `from tensordict.nn import name` would hide such an error behind
            a message of its own.
    """
    if name in vars(_functions) and name in _functions.SERVED:
        served: object = getattr(_functions, name)
        return served
    home, later = _functions.LATER.get(name, (homes().get(name, "kd_core"), None))
    if not _is_there(home):
        package = home.partition(".")[0].replace("_", "-")
        raise MissingDependency(
            f"`{name}` of `{module}` is in `{home}`, which is not installed. Run `pip install "
            f"{package}`."
        )
    if later is not None:
        return later()
    sources = (_FIRST[module], *_SOURCES) if module in _FIRST else _SOURCES
    for source in () if name.startswith("_") else filter(_is_there, sources):
        try:
            value: object = getattr(import_module(source), name)
        except NotOffered as error:
            _report.record(f"{module}.{name}")
            return _functions.absent(name, str(error))
        except (AttributeError, ImportError):
            continue
        else:
            return value
    _report.record(f"{module}.{name}")
    raise AttributeError(
        f"module {module!r} has no attribute {name!r}: kd has no such name", name=name
    )


def _is_there(module: str) -> bool:
    """Return whether the package that has a module is installed."""
    return find_spec(module.partition(".")[0]) is not None


def is_installed() -> bool:
    """Return whether `import tensordict` resolves to kd in this process."""
    return any(isinstance(each, DropIn) for each in sys.meta_path)


def install() -> None:
    """Make `import tensordict` resolve to kd, in this process and in those that it starts.

    Call it before the first import of `tensordict`, or of a library that imports it. A second call
    does nothing.

    Raises:
        RuntimeError: if the library `tensordict` is imported already.

    Example:
        >>> from kd_core import drop_in
        >>> drop_in.install()  # doctest: +SKIP
    """
    if is_installed():
        return
    if TOP in sys.modules:
        raise RuntimeError(
            "`tensordict` is imported already. Call `kd_core.drop_in.install()` before the first "
            "import of it."
        )
    sys.meta_path.insert(0, DropIn())
    # Children get the search path by one of these: `multiprocessing` hands over `sys.path`, all
    # others the environment. Here the finder comes first: the folder is for children alone.
    sys.path.insert(1, _CHILDREN)
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([_CHILDREN, known] if known else [_CHILDREN])
