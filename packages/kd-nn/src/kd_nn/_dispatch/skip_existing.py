"""The switch that skips modules whose outputs already exist.

The switch is a context variable, so it holds for the current thread or task only. dynamo cannot
read one; compiled code reads what its thread entered last, from a `threading.local`. `anyone_skips`
is a cheap test for the fast path: not empty while the switch is on in any context.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import ParamSpec, Self, TypeAlias, TypeVar, cast

from torch import nn
from torch.compiler import is_compiling

from kd_core import InvalidArgument, NestedKey, TensorDictBase
from kd_nn._dispatch.dispatch import keys_of
from kd_nn._dispatch.entries import has_entry
from kd_nn._keys.specs import DISCARD, parse_keys

P = ParamSpec("P")
R = TypeVar("R")


class _Mirror(threading.local):
    """The switch of this thread, for compiled code."""

    def __init__(self) -> None:
        # Set on the instance: dynamo does not guard that an attribute hides a class default later.
        self.on: Mode = False


Mode: TypeAlias = "bool | list[NestedKey]"

_SWITCH: ContextVar[Mode] = ContextVar("skip_existing", default=False)
_MIRROR = _Mirror()

anyone_skips: list[object] = []
"""Holds one element per active `set_skip_existing`; empty means that no module is skipped."""


def skip_existing() -> Mode:
    """Return whether modules whose outputs exist are skipped in the current context.

    A list holds the keys of which a module must write one to be skipped.

    Example:
        >>> skip_existing()
        False
        >>> with set_skip_existing(True):
        ...     skip_existing()
        True
    """
    if not anyone_skips:
        return False
    return _MIRROR.on if is_compiling() else _SWITCH.get()


class set_skip_existing:  # noqa: N801  # used like a function, as a context manager and a decorator
    """Skip keyed modules whose outputs all exist, unless they read one of them.

    As a context manager it switches skipping on (or off) for every keyed module that is called
    inside. As a decorator of a module's `forward(self, tensordict)` it does so for each call of
    that module, which skips itself, too. `set_skip_existing(None)` decorates a module that skips
    itself where the caller has switched it on. Compiled code follows the switch that its thread
    entered last, of whatever task.

    Args:
        mode: Whether to skip; a list of keys skips modules that write one of them alone; None, for
            a decorator alone, leaves the switch as it is.
        in_key_attr: The attribute that lists what a decorated method's module reads.
        out_key_attr: The attribute that lists what it writes.
        thread_local: Has no effect: the switch is always that of its thread or task.

    Raises:
        InvalidArgument: If `mode` is none of these, or None in a `with` statement.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> from kd_nn import TensorDictModule
        >>> module = TensorDictModule(torch.neg, in_keys=["x"], out_keys=["y"])
        >>> td = TensorDict(x=torch.ones(2), y=torch.zeros(2))
        >>> with set_skip_existing(True):
        ...     module(td)["y"]
        tensor([0., 0.])
        >>> module(td)["y"]
        tensor([-1., -1.])
    """

    def __init__(
        self,
        mode: Mode | None = True,
        in_key_attr: str = "in_keys",
        out_key_attr: str = "out_keys",
        *,
        thread_local: bool = False,
    ) -> None:
        if isinstance(mode, (list, tuple)):
            mode = list(parse_keys(list(mode), "mode"))
        elif not isinstance(mode, bool) and mode is not None:
            raise InvalidArgument(
                f"`mode` must be True, False, None or a list of keys, got {mode!r}."
            )
        self.mode: Mode | None = mode
        self.in_key_attr, self.out_key_attr = in_key_attr, out_key_attr
        self._outer: list[tuple[Token[Mode] | None, Mode]] = []

    def clone(self) -> Self:
        """Return the same setting, which was not entered."""
        return type(self)(self.mode, self.in_key_attr, self.out_key_attr)

    def __enter__(self) -> Self:
        if self.mode is None:
            raise InvalidArgument(
                "`set_skip_existing(None)` decorates a method. In a `with` statement `mode` must "
                "be True or False."
            )
        token = None if is_compiling() else _SWITCH.set(self.mode)
        self._outer.append((token, _MIRROR.on))
        _MIRROR.on = self.mode
        anyone_skips.append(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        anyone_skips.remove(self)
        token, outer = self._outer.pop()
        if token is None:
            _MIRROR.on = outer
        else:
            _SWITCH.reset(token)
            _MIRROR.on = _SWITCH.get()  # another task may have left since

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate the `forward` of a module."""

        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            module = args[0] if args else None
            tensordict = args[1] if len(args) > 1 else kwargs.get("tensordict")
            if (
                isinstance(module, nn.Module)
                and isinstance(tensordict, TensorDictBase)
                and outputs_exist(module, tensordict, self.in_key_attr, self.out_key_attr)
            ):
                return cast("R", tensordict)
            return function(*args, **kwargs)

        @functools.wraps(function)
        def switched(*args: P.args, **kwargs: P.kwargs) -> R:
            with set_skip_existing(self.mode):
                return guarded(*args, **kwargs)

        return guarded if self.mode is None else switched


def outputs_exist(
    module: nn.Module,
    tensordict: TensorDictBase,
    in_key_attr: str = "in_keys",
    out_key_attr: str = "out_keys",
) -> bool:
    """Return whether skipping is on and `module` would only write entries that exist."""
    mode = skip_existing()
    if not mode:
        return False
    writes = [key for key in keys_of(module, out_key_attr) if key != DISCARD]
    if mode is not True and not any(key in mode for key in writes):
        return False
    reads = keys_of(module, in_key_attr)
    return bool(writes) and all(has_entry(tensordict, key) and key not in reads for key in writes)
