"""Where an object lives: in this process, or in an actor of Ray."""

from collections.abc import Callable
from typing import Protocol

import ray
import torch
from examples.actors.objects import Stored, get, look, put

from kd_core import TensorDictBase

Result = Callable[[], object]
"""What waits for a result."""


class Engine(Protocol):
    """An object that is asked for results; what it is asked first, it does first."""

    def ask(self, method: str, *args: object) -> Result:
        """Call a method, now or later."""
        ...


class Here:
    """An object in this process, with random numbers of its own."""

    def __init__(self, cls: type[object], *args: object) -> None:
        with torch.random.fork_rng():
            self._made, self._state = cls(*args), torch.get_rng_state()

    def ask(self, method: str, *args: object) -> Result:
        with torch.random.fork_rng():
            torch.set_rng_state(self._state)
            result = getattr(self._made, method)(*args)
            self._state = torch.get_rng_state()
        return lambda: result


class Actor:
    """An object in a process of its own; containers go there and back through the object store."""

    def __init__(self, cls: type[object], *args: object) -> None:
        self._remote = ray.remote(_Host).remote(cls, *args)

    def ask(self, method: str, *args: object) -> Result:
        sent = [_Sent(put(arg)) if isinstance(arg, TensorDictBase) else arg for arg in args]
        answer = self._remote.ask.remote(method, *sent)

        def wait() -> object:
            result = ray.get(answer)
            return get(result.stored) if isinstance(result, _Sent) else result

        return wait


class _Sent:
    """A container on its way."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored


class _Host:
    """What holds an object in an actor."""

    def __init__(self, cls: type[object], *args: object) -> None:
        torch.set_num_threads(1)
        self._made = cls(*args)
        self._error: Exception | None = None

    def ask(self, method: str, *args: object) -> object:
        """Call a method, which must not write to the containers that it is given.

        An error is raised again by all later calls: perhaps nobody waits for this result.
        """
        if self._error is not None:
            raise self._error
        given = [look(arg.stored) if isinstance(arg, _Sent) else arg for arg in args]
        try:
            result = getattr(self._made, method)(*given)
        except Exception as error:
            self._error = error
            raise
        return _Sent(put(result)) if isinstance(result, TensorDictBase) else result
