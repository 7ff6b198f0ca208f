"""Which value of a distribution a probabilistic module returns, and the scope that overrides it.

The scope is a ContextVar, so it holds for the current thread or task only. dynamo cannot read a
ContextVar, but it can read, guard and write the attributes of a `threading.local`: entering a scope
therefore sets both, and compiled code reads the second. A change of scope recompiles once.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from enum import StrEnum
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core import InvalidArgument, InvalidValue, KdError, TensorDictBase, nearest_key
from kd_core.extending import is_batchedtensor, maybe_current_level, run_alone_eagerly
from kd_nn.distributions import values_unchecked
from kd_probabilistic._torch_private import READS_VALUES, computes_shapes_alone

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class InteractionType(StrEnum):
    """How a value is taken from a distribution.

    `MODE`, `MEDIAN` and `MEAN` are these estimates. `RANDOM` draws (with gradients if the
    distribution supports them). `DETERMINISTIC` is the mode on a discrete support, else the mean,
    and if the mean is not finite the mode or the median.

    Example:
        >>> InteractionType("Mean")
        <InteractionType.MEAN: 'mean'>
    """

    MODE = "mode"
    MEDIAN = "median"
    MEAN = "mean"
    RANDOM = "random"
    DETERMINISTIC = "deterministic"

    @classmethod
    def from_str(cls, type_str: str) -> InteractionType:
        """Return the member of a name in any case, as `InteractionType(name)` does.

        Args:
            type_str: The name.

        Raises:
            InvalidValue: If it is not the name of an interaction type.
            InvalidArgument: If it is not a str.

        Example:
            >>> InteractionType.from_str("Median")
            <InteractionType.MEDIAN: 'median'>
        """
        return as_interaction_type(type_str)

    @classmethod
    def _missing_(cls, value: object) -> InteractionType:
        """Find a member by a name in any case, or raise with the valid names."""
        if isinstance(value, str):
            member = cls.__members__.get(value.upper())
            if member is not None:
                return member
        names = ", ".join(f"`{member.value}`" for member in cls)
        near = nearest_key(str(value).lower(), [member.value for member in cls])
        hint = "" if near is None else f" Did you mean `{near}`?"
        raise InvalidValue(f"`{value}` is not a valid interaction type; available: {names}.{hint}")


class _Mirror(threading.local):
    """The innermost scope of this thread, for compiled code."""

    def __init__(self) -> None:
        # Set on the instance: dynamo does not guard that an attribute hides a class default later.
        self.current: InteractionType | None = None


_SCOPE: ContextVar[InteractionType | None] = ContextVar("kd_interaction_type", default=None)
_MIRROR = _Mirror()


def interaction_type() -> InteractionType | None:
    """Return the interaction type of the innermost `set_interaction_type`, or None outside of any.

    Example:
        >>> with set_interaction_type("random"):
        ...     interaction_type()
        <InteractionType.RANDOM: 'random'>
    """
    return _MIRROR.current if is_compiling() else _SCOPE.get()


class set_interaction_type:  # noqa: N801 - named as a context manager
    """Set which value probabilistic modules take, in a `with` block or a decorated function.

    It takes precedence over the default of each module. It holds for the current thread or task;
    scopes nest. A decorated generator or coroutine runs in the scope, its caller does not. Compiled
    code follows the scope that its thread entered last, of whatever task.

    Args:
        type: A member of `InteractionType` or its name in any case; None cancels an outer scope.
        thread_local: Has no effect: a scope is always that of its thread or task.

    Raises:
        InvalidValue: If it is not a valid interaction type.
        InvalidArgument: If a class or an asynchronous generator is decorated.

    Example:
        >>> with set_interaction_type("mean"), set_interaction_type(None):
        ...     print(interaction_type())
        None
    """

    def __init__(
        self,
        type: InteractionType | str | None = InteractionType.DETERMINISTIC,
        *,
        thread_local: bool = False,
    ) -> None:
        self.type = None if type is None else as_interaction_type(type)
        self._outer: list[tuple[Token[InteractionType | None] | None, InteractionType | None]] = []

    def clone(self) -> set_interaction_type:
        """Return a scope of the same type that was not entered."""
        return set_interaction_type(self.type)

    def set(self) -> None:
        """Set the type for the rest of this thread or task."""
        self.__enter__()
        self._outer.pop()

    def __enter__(self) -> None:
        token = None if is_compiling() else _SCOPE.set(self.type)
        self._outer.append((token, _MIRROR.current))
        _MIRROR.current = self.type

    def __exit__(self, *exc_info: object) -> None:
        token, outer = self._outer.pop()
        if token is None:
            _MIRROR.current = outer
        else:
            _SCOPE.reset(token)
            _MIRROR.current = _SCOPE.get()  # another task may have left since

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function` so that each call of it runs in a scope of its own."""
        if isinstance(function, type) or inspect.isasyncgenfunction(function):
            kind = "class" if isinstance(function, type) else "asynchronous generator"
            raise InvalidArgument(
                f"`set_interaction_type` decorates a function, got the {kind} "
                f"`{function.__name__}`. Decorate its methods, or open the scope in a `with` block."
            )
        if inspect.iscoroutinefunction(function):
            return cast("Callable[P, R]", self._coroutine(function))
        if inspect.isgeneratorfunction(function):
            return cast("Callable[P, R]", self._generator(function))

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with set_interaction_type(self.type):
                return function(*args, **kwargs)

        return call

    def _coroutine(
        self, function: Callable[P, Coroutine[object, object, S]]
    ) -> Callable[P, Coroutine[object, object, S]]:
        @functools.wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> S:
            with set_interaction_type(self.type):
                return await function(*args, **kwargs)

        return call

    def _generator(
        self, function: Callable[P, Generator[object, object, S]]
    ) -> Callable[P, Generator[object, object, S]]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Generator[object, object, S]:
            return (yield from _resumed_within(self.type, function(*args, **kwargs)))

        return call


run_alone_eagerly(interaction_type, set_interaction_type.__enter__, set_interaction_type.__exit__)


def enter_interaction_type(kind: InteractionType) -> Callable[[], None] | None:
    """Enter the scope of a type unless there is one; return what leaves it.

    A `with` block that the functions of a plan can write.
    """
    if interaction_type() is not None:
        return None
    if is_compiling():
        scope = set_interaction_type(kind)
        scope.__enter__()
        return scope.__exit__
    token, _MIRROR.current = _SCOPE.set(kind), kind

    def leave() -> None:
        _SCOPE.reset(token)
        _MIRROR.current = _SCOPE.get()

    return leave


def _resumed_within(
    kind: InteractionType | None, generator: Generator[object, object, S]
) -> Generator[object, object, S]:
    """Run a generator so that each of its steps is in the scope and its caller never is."""
    resume: Callable[[], object] = functools.partial(generator.send, None)
    while True:
        try:
            with set_interaction_type(kind):
                value = resume()
        except StopIteration as stop:
            return cast("S", stop.value)
        try:
            given = yield value
        except BaseException as error:  # `GeneratorExit` too
            resume = functools.partial(generator.throw, error)
        else:
            resume = functools.partial(generator.send, given)


def as_interaction_type(value: object) -> InteractionType:
    """Convert the name of an interaction type, in any case, to the member; a member stays."""
    if isinstance(value, InteractionType):
        return value
    if not isinstance(value, str):
        raise InvalidArgument(
            f"an interaction type must be a member of `InteractionType` or its name, got {value!r}."
        )
    return InteractionType(value)


class _Aggregate:
    """Whether log-probabilities of composite distributions are summed."""

    def __init__(self) -> None:
        self.on = False


_AGGREGATE = _Aggregate()
"""The setting of the whole process; an instance, which compiled code of torch 2.10 can change."""


def composite_lp_aggregate(nowarn: bool = False) -> bool:
    """Return whether log-probabilities of composite distributions are summed by default.

    Args:
        nowarn: Has no effect: nothing is warned of.

    Example:
        >>> composite_lp_aggregate()
        False
        >>> with set_composite_lp_aggregate(True):
        ...     composite_lp_aggregate()
        True
    """
    return _AGGREGATE.on


class set_composite_lp_aggregate:  # noqa: N801 - named as a context manager
    """Set whether log-probabilities and entropies of composite distributions are summed.

    It holds where neither the distribution nor the call says anything: in a `with` block, in a
    decorated function, or from `set()` on. A module asks when it is built. It holds for all
    threads.

    Args:
        mode: Whether to sum.
        thread_local: Has no effect.

    Example:
        >>> with set_composite_lp_aggregate(True):
        ...     composite_lp_aggregate()
        True
        >>> composite_lp_aggregate()
        False
    """

    def __init__(self, mode: bool = True, *, thread_local: bool = False) -> None:
        self.mode = bool(mode)
        self._before: list[bool] = []

    def set(self) -> None:
        """Set it for the rest of the program, or until `unset`."""
        self._before.append(_AGGREGATE.on)
        _AGGREGATE.on = self.mode

    def unset(self) -> None:
        """Restore what was set before the last `set` of this object.

        Example:
            >>> setting = set_composite_lp_aggregate(True)
            >>> setting.set()
            >>> setting.unset()
            >>> composite_lp_aggregate()
            False
        """
        if self._before:
            _AGGREGATE.on = self._before.pop()

    def __enter__(self) -> None:
        self.set()

    def __exit__(self, *exc_info: object) -> None:
        self.unset()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function` so that each call of it runs with this setting."""

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with set_composite_lp_aggregate(self.mode):
                return function(*args, **kwargs)

        return call


# Whether the values of tensors can be read: not in a capture, in `vmap`, or of fake tensors.


def must_not_look(values: Sequence[object]) -> bool:
    """Return whether values cannot be read: in a capture, under `vmap`, or of fake tensors."""
    if is_compiling():
        # dynamo has disabled checks already, and cannot trace the change.
        return not torch.compiler.is_dynamo_compiling()
    if computes_shapes_alone():
        return True
    if maybe_current_level() is None:
        return False
    return any(_holds_batched(value) for value in values)


def can_read(value: Tensor) -> bool:
    """Return whether the values of a tensor can be read: dynamo cannot either."""
    return not is_compiling() and not must_not_look([value])


def _holds_batched(value: object) -> bool:
    """Return whether a tensor, or one in a container, has a hidden dimension of `vmap`."""
    if isinstance(value, TensorDictBase):
        return any(is_batchedtensor(leaf) for leaf in value.values(True, True))
    return isinstance(value, Tensor) and is_batchedtensor(value)


class NotTraceable(KdError, NotImplementedError):
    """A distribution reads values of tensors where that is impossible: in an export or `vmap`."""


@contextmanager
def unchecked(owner: str) -> Iterator[None]:
    """Disable torch's default of checking values, also for distributions inside others.

    Other threads keep it.

    Args:
        owner: How messages name the module.

    Raises:
        NotTraceable: If values are read all the same.
    """
    with values_unchecked():
        try:
            yield
        except Exception as error:
            if type(error).__name__ in READS_VALUES or "data-dependent control" in str(error):
                raise NotTraceable(
                    f"`{owner}` reads values of tensors while it is computed, so it can neither be "
                    "exported nor mapped in this mode. Take another value, such as the "
                    "deterministic one, or another distribution."
                ) from error
            raise
