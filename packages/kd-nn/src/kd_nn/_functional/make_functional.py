"""Modules that take their parameters as an argument.

A functional module is the same object with another `forward`: it looks for a container of
parameters among its arguments, swaps them in during the call, and runs. Its sub-modules are
functional too. `make_functional` removes the parameters; `get_functional` keeps them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar, cast

from torch import Tensor, nn

from kd_core import InvalidArgument, KdError, TensorDict, TensorDictBase
from kd_core.extending import public_in

M = TypeVar("M", bound=nn.Module)


@public_in("kd_nn")
class ParametersMissing(KdError, TypeError):
    """A functional module was called without parameters."""


@public_in("kd_nn._pickled")
class FunctionalForward:
    """The `forward` of a functional module.

    Args:
        module: The module.
        names: Its own parameters and buffers that were removed from it.
    """

    __slots__ = ("module", "names")
    takes_parameters: Final = True

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        self.module, self.names = module, names

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the module with the parameters among the arguments."""
        module = self.module
        forward = partial(cast("Callable[..., object]", type(module).forward), module)
        params = kwargs.pop("params", None)
        if params is None:
            lacking = _lacking(module)
            if not lacking:
                return forward(*args, **kwargs)
            params, args = _last(module, args, lacking)
        if not isinstance(params, TensorDictBase):
            raise InvalidArgument(
                f"`params` must be a container of parameters, got {type(params).__name__}."
            )
        with params.to_module(module):
            return forward(*args, **kwargs)


def _lacking(module: nn.Module) -> list[str]:
    """Return the dotted names of what was removed and not filled in by an enclosing call."""
    found: list[str] = []
    for path, member in module.named_modules():
        own = member.__dict__.get("forward")
        for name in own.names if isinstance(own, FunctionalForward) else ():
            if _store_of(member, name).get(name) is None:
                found.append(f"{path}.{name}" if path else name)
    return found


def _last(
    module: nn.Module, args: tuple[object, ...], lacking: list[str]
) -> tuple[TensorDictBase, tuple[object, ...]]:
    """Split off the last positional argument, which holds the parameters."""
    names = {name.partition(".")[0] for name in lacking}
    params = args[-1] if args else None
    if isinstance(params, TensorDictBase) and not names.isdisjoint(list(params.keys())):
        return params, args[:-1]
    raise ParametersMissing(
        f"this `{type(module).__name__}` is functional and has no parameters of its own. Call it "
        f"with a container of {', '.join(f'`{name}`' for name in lacking)}, as last argument or "
        "`params=`, or restore its parameters with `repopulate_module`."
    )


def make_functional(module: nn.Module) -> TensorDict:
    """Remove the parameters from a module, in place, and make it and its sub-modules functional.

    Afterwards `module(*args, params)` and `module(*args, params=params)` run it with a container
    that is nested like the module; so do its sub-modules with their part of the container.

    Args:
        module: The module; it is changed.

    Returns:
        Its parameters and buffers, together.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
        >>> params = make_functional(model)
        >>> x = torch.randn(10, 3)
        >>> out = model(x, params=params)
        >>> torch.equal(out, model[1](model[0](x, params["0"]), params["1"]))
        True
        >>> list(model.parameters())
        []
    """
    params = TensorDict.from_module(module)
    for member in module.modules():
        known = member.__dict__.get("forward")
        names = list(known.names) if isinstance(known, FunctionalForward) else []
        for store in (member._parameters, member._buffers):
            filled = [name for name, tensor in store.items() if tensor is not None]
            names += [name for name in filled if name not in names]
            store.update(dict.fromkeys(filled))
        # Assigned, not written into the dict: keyed modules invalidate their plans on assignment.
        member.forward = FunctionalForward(member, tuple(names))
    return params


def get_functional(module: M) -> M:
    """Convert a module to a functional one, in place, but keep its parameters.

    It runs as before, and with other parameters when called with `params=` (by keyword only).

    Args:
        module: The module; it is changed.

    Returns:
        The module.

    Example:
        >>> import torch
        >>> model = get_functional(nn.Linear(3, 4))
        >>> ones = TensorDict({"bias": torch.ones(4)})
        >>> bool((model(torch.ones(3), params=ones) != model(torch.ones(3))).any())
        True
    """
    return repopulate_module(module, make_functional(module))


def is_functional(module: nn.Module) -> bool:
    """Return whether a module takes its parameters as an argument.

    Example:
        >>> is_functional(nn.Linear(1, 1)), is_functional(get_functional(nn.Linear(1, 1)))
        (False, True)
    """
    return isinstance(module.__dict__.get("forward"), FunctionalForward)


def repopulate_module(module: M, tensordict: TensorDictBase) -> M:
    """Restore parameters of a module from a container, in place.

    A tensor that replaces a parameter becomes one, unless it was computed from others.

    Args:
        module: The module; it is changed.
        tensordict: Nested like the module.

    Returns:
        The module.

    Raises:
        KeyNotFound: If an entry matches nothing in the module; then nothing changes.

    Example:
        >>> model = nn.Linear(3, 4)
        >>> params = make_functional(model)
        >>> repopulate_module(model, params).weight is params["weight"]
        True
    """
    with tensordict.to_module(module):
        """Entering the context checks that every entry has its place."""
    _fill(module, tensordict)
    return module


def _fill(module: nn.Module, tensordict: TensorDictBase) -> None:
    entries: list[tuple[str, Tensor | TensorDictBase]] = [
        (str(name), value) for name, value in tensordict.items()
    ]
    for key, value in entries:
        if not isinstance(value, Tensor):
            child = module._modules[key]
            assert child is not None
            _fill(child, value)
            continue
        store = _store_of(module, key)
        if store is module._parameters and value.is_leaf:
            if not isinstance(value, nn.Parameter):
                value = nn.Parameter(value, requires_grad=value.requires_grad)
            setattr(module, key, value)  # recurrent layers record what is assigned
        else:
            store[key] = value


def _store_of(module: nn.Module, name: str) -> dict[str, Tensor | None]:
    home = "_parameters" if name in module._parameters else "_buffers"
    store: dict[str, Tensor | None] = module.__dict__[home]  # not `cast`: dynamo would copy it
    return store
