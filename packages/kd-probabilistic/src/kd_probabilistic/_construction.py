"""Building a distribution from its parameters.

Values are checked exactly when torch would check them, but never while a graph is captured, nor
inside `vmap`: a check is a Python branch on data, which neither can trace.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch.distributions import ContinuousBernoulli, Distribution

from kd_core import InvalidArgument, nearest_key
from kd_core.extending import assume_constant_result, public_in
from kd_probabilistic._plain import builder_of
from kd_probabilistic._reading import must_not_look

_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@public_in("kd_probabilistic._pickled")
class Construction:
    """Calls a distribution class with named parameters and fixed settings.

    Args:
        distribution: The class, or a callable that returns a distribution.
        names: The argument that each parameter is passed as.
        settings: Further keyword arguments.

    Raises:
        InvalidArgument: If `distribution` is not callable, an argument is given twice, or the
            arguments are not those that it takes.
    """

    __slots__ = ("_quick", "_unchecked", "distribution", "names", "settings")

    def __init__(
        self,
        distribution: Callable[..., Distribution],
        names: Sequence[str],
        settings: Mapping[str, object],
    ) -> None:
        if not callable(distribution):
            raise InvalidArgument(
                "`distribution_class` must be a distribution class or a callable that returns a "
                f"distribution, got {distribution!r}. Pass the class, such as `Normal`: its "
                "arguments are read from the container."
            )
        twice = [name for name in names if name in settings]
        if twice:
            raise InvalidArgument(
                f"the argument `{twice[0]}` of `{name_of(distribution)}` is given by `in_keys` and "
                "by `distribution_kwargs`. Give it once."
            )
        _check_arguments(distribution, tuple(names), tuple(settings))
        self.distribution = distribution
        self.names = tuple(names)
        self.settings = dict(settings)
        # dynamo cannot trace a change of torch's default, so each class gets the argument; except
        # one that checks for any value which is not None.
        told = distribution is not ContinuousBernoulli and _accepts(distribution, "validate_args")
        self._unchecked: dict[str, object] = {"validate_args": False} if told else {}
        self._quick = None if settings else builder_of(distribution, self.names)

    def __call__(self, values: Sequence[object]) -> Distribution:
        """Build the distribution of one value per name."""
        if self._quick is not None and not torch.compiler.is_compiling():
            quick = self._quick(values)
            if quick is not None:
                return quick
        settings = self.settings
        if torch.compiler.is_dynamo_compiling():
            settings = {**settings, **self._unchecked}
        elif "validate_args" in settings and must_not_look(values):
            settings = {name: value for name, value in settings.items() if name != "validate_args"}
        found = self.distribution(**dict(zip(self.names, values, strict=True)), **settings)
        if not isinstance(found, Distribution):
            raise InvalidArgument(
                f"`{name_of(self.distribution)}` must return a `torch.distributions.Distribution`, "
                f"got {type(found).__name__}."
            )
        return found


def name_of(distribution: Callable[..., object]) -> str:
    """Return the name of a distribution class for messages."""
    while isinstance(distribution, functools.partial):
        distribution = distribution.func
    return getattr(distribution, "__name__", type(distribution).__name__)


# dynamo cannot trace a signature; and what a class takes does not change.
@assume_constant_result
def _check_arguments(
    function: Callable[..., object], names: tuple[str, ...], settings: tuple[str, ...]
) -> None:
    """Raise unless a callable takes these arguments and requires no others."""
    taken = _signature(function)
    if taken is None:
        return
    known = [name for name, _ in taken.named]
    given = [*names, *settings]
    unknown = [] if taken.open_ended else [name for name in given if name not in known]
    if unknown:
        near = nearest_key(unknown[0], known)
        hint = "" if near is None else f" Did you mean `{near}`?"
        raise InvalidArgument(
            f"`{name_of(function)}` has no argument `{unknown[0]}`; it takes {_listed(known)}."
            f"{hint} The last part of a key names the argument; for other keys give a mapping "
            "`{argument: key}`."
        )
    needed = [name for name, required in taken.named if required and name not in given]
    if needed:
        raise InvalidArgument(
            f"`{name_of(function)}` also requires {_listed(needed)}, got {_listed(given)}. Add "
            "parameters (`in_keys` of a module, entries of a composite), or fixed values "
            "(`distribution_kwargs`, `extra_kwargs`)."
        )


class _Signature:
    """The arguments of a callable, with whether each is required, and whether it takes others."""

    __slots__ = ("named", "open_ended")

    def __init__(self, named: tuple[tuple[str, bool], ...], open_ended: bool) -> None:
        self.named, self.open_ended = named, open_ended


def _signature(function: Callable[..., object]) -> _Signature | None:
    """Return the arguments of a callable, None if they are unknown."""
    try:
        return _inspected(function)
    except TypeError:  # not hashable
        return _inspected.__wrapped__(function)


@functools.lru_cache(maxsize=256)
def _inspected(function: Callable[..., object]) -> _Signature | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    named = tuple((p.name, p.default is p.empty) for p in parameters if p.kind in _NAMED)
    return _Signature(named, any(p.kind is p.VAR_KEYWORD for p in parameters))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"


@assume_constant_result
def _accepts(function: Callable[..., object], name: str) -> bool:
    """Return whether a callable has an argument of this name."""
    taken = _signature(function)
    return taken is not None and any(name == known for known, _ in taken.named)
