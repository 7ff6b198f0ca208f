"""A keyed module behind a flat, true signature.

Exporters want a module whose ``forward`` takes tensors by plain argument names. `FlatModule` is
that: its forward has one named argument per input key, fills a container, runs the keyed module,
and gives a plain dict of outputs by wire name. It adds no operator to the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import TypeVar

from torch import Tensor, nn

from kd_core import NestedKey, TensorDict, TensorDictBase
from kd_export._errors import DtypeMismatch, Key, KeyMismatch, quoted
from kd_export._schema.schema import Schema
from kd_export._schema.wire import argument_names, wire_name

Word = TypeVar("Word")
Example = TensorDictBase | Mapping[Word, object] | Schema


class FlatModule(nn.Module):
    """Call a keyed module with named tensors.

    Args:
        module: A module that takes and gives a container.
        inputs: The keys to fill, in the order of the arguments.
        outputs: The keys to give.
        batch_dims: How many leading dimensions of the first input are the container's batch size.

    Example:
        >>> import inspect
        >>> import torch
        >>> flat = FlatModule(torch.nn.Identity(), [("in", "x")], [("in", "x")], batch_dims=1)
        >>> str(inspect.signature(flat.forward))
        '(in_x)'
        >>> list(flat(in_x=torch.zeros(2, 3)))
        ['in.x']
    """

    def __new__(
        cls, module: nn.Module, inputs: Sequence[Key], outputs: Sequence[Key], *, batch_dims: int
    ) -> FlatModule:
        """Create an instance of a class whose forward has the arguments of these inputs."""
        kind = type("FlatModule", (cls,), {"forward": _forward(inputs), "__new__": object.__new__})
        return object.__new__(kind)

    def __init__(
        self, module: nn.Module, inputs: Sequence[Key], outputs: Sequence[Key], *, batch_dims: int
    ) -> None:
        super().__init__()
        self.module = module
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.batch_dims = batch_dims
        self.arguments = argument_names(inputs)

    def run(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Fill a container, run the module, read the outputs by wire name."""
        container = TensorDict({}, batch_size=tensors[0].shape[: self.batch_dims])
        entries: dict[NestedKey, Tensor] = dict(zip(self.inputs, tensors, strict=True))
        container.update(entries)
        result = self.module(container)
        return {wire_name(key): _read(result, key) for key in self.outputs}


def _forward(inputs: Sequence[Key]) -> Callable[..., dict[str, Tensor]]:
    """Write ``forward(self, a, b)`` for the inputs."""
    names = ", ".join(argument_names(inputs).values())
    source = f"def forward(self, {names}):\n    return self.run(({names},))\n"
    namespace: dict[str, object] = {"__name__": __name__}
    exec(compile(source, "<kd_export signature>", "exec"), namespace)
    forward = namespace["forward"]
    assert isinstance(forward, FunctionType)
    return forward


def _read(result: object, key: Key) -> Tensor:
    get = getattr(result, "get", None)
    value = get(key) if get is not None else None
    if value is None:
        known = result.keys() if isinstance(result, Mapping | TensorDict) else ()
        raise KeyMismatch(
            f"output `{wire_name(key)}` not found in the result of the module; available keys: "
            f"{quoted(known)}.",
            key=key,
            expected=wire_name(key),
        )
    if not isinstance(value, Tensor):
        raise DtypeMismatch(
            f"expected a tensor for the output `{wire_name(key)}`, got a {type(value).__name__}.",
            key=key,
            expected="Tensor",
            got=type(value).__name__,
            hint="Pass `outputs=` with the keys of tensors.",
        )
    return value
