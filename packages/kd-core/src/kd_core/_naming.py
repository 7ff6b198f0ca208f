"""Names: those left out on purpose or in another package, and where public ones are defined.

Where kd does something else than tensordict stands in `differences.toml` beside this file, which
also makes the page "Coming from tensordict"; rows with names are the reasons for those that are
left out.
`elsewhere.toml` says which package of kd has a name that tensordict has in another one: it may not
be installed, so it is not asked. Both are read when a name is not found, never by an import.

A public name says that it is defined in the package that users import it from: in tracebacks,
pickles and `help`. A file of saved containers then survives a move of private modules. The price is
that `inspect.getsource` of a class fails, because it reads the file of the module that `__module__`
names, as for numpy and JAX; of functions and methods it succeeds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from importlib import import_module
from importlib.machinery import PathFinder
from inspect import getattr_static
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final, Never, TypeAlias, cast

from torch.compiler import is_dynamo_compiling

from kd_core._errors import InvalidArgument, NotOffered, NotOfferedImport
from kd_core._keys import nearest_key
from kd_core._torch_private import traced_as

if TYPE_CHECKING:
    from typing import TypeVar

    K = TypeVar("K", bound=type)
    C = TypeVar("C", bound=Callable[..., object])

Rows: TypeAlias = dict[str, dict[str, str]]

MODULES: Final = (
    "tensordict",
    "tensordict.utils",
    "tensordict.nn",
    "tensordict.nn.distributions",
)


@cache
def decided() -> dict[str, Rows]:
    """Return all rows: for each area, names and their `reason` and `instead`."""
    areas: dict[str, Rows] = {}
    for row in _read("differences.toml")["difference"]:
        text = {"reason": row["here"], "instead": row.get("write", "")}
        for area, names in row.get("names", {}).items():
            areas.setdefault(area, {}).update(dict.fromkeys(names, text))
    return areas


@cache
def homes() -> dict[str, str]:
    """Return names that users of tensordict look for in another package, each with its package."""
    names: dict[str, list[str]] = _read("elsewhere.toml")
    return {name: package for package, held in names.items() for name in held}


def _read(file: str) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))


def find_reason(name: str, areas: Iterable[str]) -> str | None:
    """Return why a name of one of these areas is left out and what to write; `None` if it is not.

    Args:
        name: the name that was not found.
        areas: the modules and classes of tensordict in which it may be.
    """
    for area in areas:
        row = decided().get(area, {}).get(name)
        if row is not None:
            return f"`{name}` is left out on purpose. {row['reason']} {row['instead']}"
    return None


_KEYED = "Import keyed modules from `kd_nn`, and distributions from `kd_probabilistic`"
_FORMAT = "The format is the suffix of the file: `export(model, example).save('policy.onnx')`"

_MODULES = {
    "kd_core": {
        "nn": _KEYED,
        "modules": _KEYED,
        "distributions": "Import distributions from `kd_nn.distributions` or `kd_probabilistic`",
        "utils": "Import what `tensordict.utils` holds from `kd_core`",
        **dict.fromkeys(
            [
                "base",
                "containers",
                "functional",
                "memmap",
                "persistent",
                "tensorclass",
                "tensordict",
            ],
            "Import its names from `kd_core`",
        ),
    },
    "kd_nn": {
        "probabilistic": "Import its names from `kd_probabilistic`",
        **dict.fromkeys(
            [
                "nn",
                "common",
                "ensemble",
                "functional_modules",
                "modules",
                "params",
                "sequence",
                "utils",
            ],
            "Import its names from `kd_nn`",
        ),
    },
    "kd_probabilistic": dict.fromkeys(
        ("nn", "modules", "distributions", "probabilistic"),
        "Import its names from `kd_probabilistic`, and distributions from `kd_nn.distributions`",
    ),
    "kd_export": {
        **dict.fromkeys(("onnx", "torch", "aoti", "executorch", "tflite", "backends"), _FORMAT),
        **dict.fromkeys(("runtime", "session", "verify"), "Import its names from `kd_export`"),
    },
}
"""What to import instead of modules that users write from habit, for each package."""


_packages: set[str] = set()
"""Packages whose names are looked up here."""


class NamesModules:
    """A finder, asked last: it says where a module or a name is that a package does not have.

    `from package import name` looks for a submodule of that name before it raises an error of its
    own, which would hide what `__getattr__` of the package says.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raise for `kd_core.nn`, written from habit, and for names that are elsewhere or near."""
        package, _, part = name.rpartition(".")
        instead = _MODULES.get(package, {}).get(part)
        if instead is not None:
            # An error whose `name` is that of the module would be hidden by `from ... import`.
            raise ModuleNotFoundError(f"No module named {name!r}. {instead}.", name=package)
        if package not in _packages or part.startswith("_"):
            return
        reason = find_reason(part, MODULES)
        if reason is not None:
            raise NotOfferedImport(reason)
        home = find_home(part, package)
        if home is not None:
            raise ImportError(home, name=package)
        public = [each for each in dir(sys.modules[package]) if not each.startswith("_")]
        near = nearest_key(part, public)
        if near is not None:
            text = f"`{part}` is not in `{package}`. Did you mean `from {package} import {near}`?"
            raise ModuleNotFoundError(text, name=package)


sys.meta_path.append(NamesModules)


def find_home(name: str, package: str) -> str | None:
    """Return where a name is that a package does not have, and what to write; `None` if nowhere.

    Args:
        name: the name that was not found.
        package: the package that was asked for it.
    """
    from importlib.util import find_spec

    if name in _MODULES.get(package, {}):
        return f"`{name}` is not in `{package}`. {_MODULES[package][name]}"
    home = homes().get(name)
    if home is None or home == package:
        return None
    top = home.partition(".")[0]
    install = "" if find_spec(top) else f"`pip install {top.replace('_', '-')}`, then "
    return f"`{name}` is not in `{package}`. Write {install}`from {home} import {name}`"


def attribute_lookup(package: str) -> Callable[[str], Never]:
    """Return what the `__getattr__` of a package calls for a name that it does not have.

    The error says why the name is left out, or which package of kd has it.
    """
    _packages.add(package)

    def explain(name: str) -> Never:
        is_public = not name.startswith("_")
        reason = find_reason(name, MODULES) if is_public else None
        if reason is not None:
            raise NotOffered(reason)
        home = find_home(name, package) if is_public else None
        text = home or f"module {package!r} has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=sys.modules[package])

    return explain


def explain_attribute(cls: type, name: str) -> NotOffered | None:
    """Return the error for an attribute of a container that is left out; `None` for others."""
    areas = ["TensorDict", *(kind.__name__ for kind in cls.__mro__)]
    reason = find_reason(name, areas)
    return None if reason is None else NotOffered(reason)


class LeftOut:
    """An attribute that is left out on purpose: reading it raises the error that says why.

    A `__getattr__` of the class would do the same for all names at once, and make every attribute
    that exists slower to read: "td['a']" in the benchmarks.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> Never:
        # dynamo cannot trace how a reason is found
        error = None if is_dynamo_compiling() else explain_attribute(owner, self.name)
        raise error or AttributeError(self.name)


class KeyAsAttribute(LeftOut):
    """A usual key that a container does not have as an attribute: the error says how to read it.

    Python would suggest a method with nearly that name, `abs` for `obs`.
    """

    def __get__(self, instance: object, owner: type) -> Never:
        held: Iterable[str] = () if is_dynamo_compiling() else getattr(instance, "keys", tuple)()
        if self.name in held:
            raise AttributeError(
                f"`{self.name}` is a key, not an attribute of a `{owner.__name__}`. Write "
                f'`td["{self.name}"]`, or declare a tensor class with a field of that name.'
            )
        near = nearest_key(self.name, held)
        hint = (
            "" if near is None else f'. Keys are read as `td["key"]`. Did you mean `td["{near}"]`?'
        )
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}{hint}")


class NamedElsewhere(KeyAsAttribute):
    """What numpy, pandas, JAX or Hugging Face datasets call by a name that containers lack."""

    def __get__(self, instance: object, owner: type) -> Never:
        held: Iterable[str] = () if is_dynamo_compiling() else getattr(instance, "keys", tuple)()
        if self.name in held:
            super().__get__(instance, owner)
        raise AttributeError(
            f"{owner.__name__!r} object has no attribute {self.name!r}. Write "
            f"{ELSEWHERE[self.name]}."
        )


ELSEWHERE: Final = {
    "astype": "`td.to(torch.float32)`",
    "to_numpy": "`td.numpy()`",
    "tree_map": "`td.apply(fn)`",
    **dict.fromkeys(("column_names", "columns"), "`td.keys()`"),
    **dict.fromkeys(("rename_column", "rename_columns"), "`td.rename_key_(old, new)`"),
    **dict.fromkeys(("remove_columns", "drop"), "`td.exclude(key)`"),
    "select_columns": "`td.select(key)`",
    "add_column": "`td[key] = values`",
    **dict.fromkeys(("groupby", "group_by"), "`kd_core.group_by(td, key)`"),
    "iloc": "`td[rows]`",
    **dict.fromkeys(("head", "take"), "`td[:n]`"),
    "tail": "`td[-n:]`",
    "skip": "`td[n:]`",
    **dict.fromkeys(("filter", "query"), "`td[td[key] > 0]`, a mask as the index"),
    **dict.fromkeys(("sort", "sort_values", "sort_by"), "`td[td[key].argsort()]`"),
    "shuffle": "`td[torch.randperm(len(td))]`",
    **dict.fromkeys(("iterrows", "itertuples"), "`for row in td`"),
    "train_test_split": "`torch.utils.data.random_split(td, [0.8, 0.2])`",
    "load_from_disk": "`TensorDict.load(path)`",
    "save_to_disk": "`td.save(path)`",
    **dict.fromkeys(("set_format", "with_format"), "`td`: its entries are tensors already"),
    "to_list": "`td.tolist()`",
    **dict.fromkeys(("todict", "as_dict", "asdict"), "`td.to_dict()`"),
    **dict.fromkeys(("concatenate", "concat"), "`kd_core.cat([one, other])`"),
}
"""By name: what to write instead."""


USUAL_KEYS: Final = (
    "obs observation observations state states action actions reward rewards done terminated "
    "truncated next step time advantage returns logits loss target targets label "
    "labels image images pixels input inputs output outputs x y z hidden h c token tokens "
    "input_ids attention_mask text mask weight weights bias params id ids index features pos "
    "position vel velocity force energy prediction pred score scores prompt response "
    "joint_pos joint_vel qpos qvel command commands torque torques policy critic actor "
    "log_prob sample_log_prob value_target state_value state_action_value td_error collector "
    "priority episode episode_reward step_count is_init feature embedding latent mean_action "
    "loc scale probs user item price time_step timestamp mask_tokens"
)
"""Keys that users write as attributes: `KeyAsAttribute`."""


def leaves_out(*names: str, kind: type[LeftOut] = LeftOut) -> Callable[[K], K]:
    """Add to a class an explanation for each of some attributes that it does not have."""

    def decorate(cls: K) -> K:
        for name in names:
            setattr(cls, name, kind(name))
        return cls

    return decorate


def offered_names(self: object) -> list[str]:
    """Return the names of an object without those that its class leaves out."""
    kind = type(self)
    return [
        name
        for name in object.__dir__(self)
        if not isinstance(getattr_static(kind, name, None), LeftOut)
    ]


def also_named(**parameters: str) -> Callable[[C], C]:
    """Decorate a function so that arguments may have further names: those that torch gives them.

    Not for what is called in a fraction of a microsecond, such as `get` and `set`: the call through
    the decorator would show in the benchmarks.

    Args:
        **parameters: by further name, the name of the parameter.
    """

    def decorate(function: C) -> C:
        @traced_as(function)
        @wraps(function)
        def call(*args: object, **given: object) -> object:
            for name in parameters.keys() & given.keys():
                new = parameters[name]
                if new in given:
                    raise InvalidArgument(f"expected `{new}` once, got it as `{name}`, too.")
                given[new] = given.pop(name)
            return function(*args, **given)

        # dynamo, which traces the function itself, guards the defaults that it finds here
        call.__defaults__, call.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        return cast("C", call)

    return decorate


def publish(package: str, later: Mapping[str, str] | None = None) -> None:
    """Set `__module__` of what a package exports, and of the methods of its classes.

    Call it last in the `__init__` of the package. Names that another public package exports already
    keep their place. A name that is left out on purpose gets an error that says why.

    Args:
        package: the name of the package.
        later: modules that are imported when one of their names is first used, and these names. For
            type checkers, import them under `TYPE_CHECKING`, too. If such a class can be met before
            its name is used, as the result of a method, `public_in` decorates it. Container kinds
            that `torch.load(weights_only=True)` restores must not be among them: it takes those
            that exist.
    """
    names = vars(sys.modules[package])
    _move([value for name, value in names.items() if not name.startswith("_")], package)
    homes = {name: home for home, held in (later or {}).items() for name in held.split()}
    if "__getattr__" not in names:
        names["__getattr__"] = _lookup(sys.modules[package], homes)
    if homes:
        names["__dir__"] = lambda: sorted({*names, *homes})


def public_in(package: str) -> Callable[[C], C]:
    """Set `__module__` of one function or class, and of its methods, before it is exported."""

    def decorate(exported: C) -> C:
        _move([exported], package)
        return exported

    return decorate


def _lookup(package: ModuleType, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package, called for names that are not imported yet."""
    name = package.__name__
    explain = attribute_lookup(name)
    modules = {home.rpartition(".")[2]: home for home in homes.values() if "._" not in home}

    def module_getattr(attribute: str) -> object:
        if attribute == "__all__" and homes:  # for `from package import *`
            return [each for each in dir(package) if not each.startswith("_")]
        if attribute in modules:
            return import_module(modules[attribute])
        if attribute not in homes:
            within = f"{name}.{attribute}"
            if attribute[:1] != "_" and PathFinder.find_spec(
                within, getattr(package, "__path__", [])
            ):
                return import_module(within)  # a public module, as `torch.nn` is one
            explain(attribute)
        value: object = getattr(import_module(homes[attribute]), attribute)
        _move([value], name)
        setattr(package, attribute, value)
        return value

    return module_getattr


def _move(exported: Iterable[object], package: str) -> None:
    """Set where private things, and the methods of private classes, are found in public."""
    for thing in exported:
        if isinstance(thing, MethodType) or not callable(thing) or not _is_private(thing, package):
            continue
        if isinstance(thing, type):
            _move_methods(thing, package)
        thing.__module__ = package


def _move_methods(cls: type, package: str) -> None:
    """Set where the methods of a class are found, those too that are bound in it from others."""
    members = vars(cls)
    for member in members.values():
        function = member if type(member) is FunctionType else getattr(member, "__func__", None)
        if type(function) is FunctionType and _is_within(function.__module__ or "", package):
            function.__module__ = package
            name = function.__name__
            if members.get(name) is member:
                function.__qualname__ = f"{cls.__qualname__}.{name}"


def _is_private(thing: object, package: str) -> bool:
    return _is_within(getattr(thing, "__module__", None) or "", package)


@cache
def _is_within(home: str, package: str) -> bool:
    """Return whether a module is a private one of the distribution of a package."""
    return home.startswith(f"{package.partition('.')[0]}.") and "._" in home
