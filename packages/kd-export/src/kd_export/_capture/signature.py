"""A keyed module behind a flat, true signature.

Exporters want a module whose ``forward`` takes tensors by plain argument names. `FlatModule` is
that: its forward has one named argument per input key, fills a container, runs the keyed module,
and gives a plain dict of outputs by wire name. It adds no operator to the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import TypeVar, cast

from torch import Tensor, nn

from kd_core import NestedKey, NonTensorDataBase, TensorDict, TensorDictBase, is_tensor_collection
from kd_export._errors import DtypeMismatch, Key, KeyMismatch, kind_of, quoted
from kd_export._schema.schema import Schema
from kd_export._schema.wire import argument_names, as_key, wire_name

Word = TypeVar("Word")
Example = TensorDictBase | Mapping[Word, object] | Schema


class FlatModule(nn.Module):
    """Call a keyed module with named tensors.

    Args:
        module: A module that takes and gives a container.
        inputs: The keys to fill, in the order of the arguments.
        outputs: The keys to give; a container gives all its tensors.
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
        """Fill a container, run the module, read the tensors of the outputs by wire name."""
        container = TensorDict({}, batch_size=tensors[0].shape[: self.batch_dims])
        entries: dict[NestedKey, Tensor] = dict(zip(self.inputs, tensors, strict=True))
        container.update(entries)
        result = self.module(container)
        tensors_of = (_read(result, key) for key in self.outputs)
        return {name: tensor for found in tensors_of for name, tensor in found.items()}


def _forward(inputs: Sequence[Key]) -> Callable[..., dict[str, Tensor]]:
    """Write ``forward(self, a, b)`` for the inputs."""
    names = ", ".join(argument_names(inputs).values())
    source = f"def forward(self, {names}):\n    return self.run(({names},))\n"
    namespace: dict[str, object] = {"__name__": __name__}
    exec(compile(source, "<kd_export signature>", "exec"), namespace)
    forward = namespace["forward"]
    assert isinstance(forward, FunctionType)
    return forward


def _read(result: object, key: Key) -> dict[str, Tensor]:
    """Return the tensors of an output by wire name: of a container, all of its."""
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
    if not isinstance(value, TensorDictBase):
        return {wire_name(key): _tensor(value, key)}
    inside = leaves(value, key)
    if not inside:
        raise KeyMismatch(
            f"the output `{wire_name(key)}` is a container without tensors.",
            key=key,
            expected="a tensor, or a container of tensors",
            hint="Pass `outputs=` with the keys of tensors.",
        )
    return {wire_name(path): _tensor(leaf, path) for path, leaf in inside.items()}


def leaves(container: TensorDictBase, key: Key) -> dict[Key, object]:
    """Return what a container at a key holds in all its levels: tensors and other data."""
    entries = cast("Iterable[tuple[NestedKey, object]]", container.items(include_nested=True))
    return {
        (*key, *as_key(inner)): value
        for inner, value in entries
        if isinstance(value, NonTensorDataBase) or not is_tensor_collection(value)
    }


def _tensor(value: object, key: Key) -> Tensor:
    if isinstance(value, Tensor):
        return value
    raise DtypeMismatch(
        f"expected a tensor for the output `{wire_name(key)}`, got {kind_of(value)}.",
        key=key,
        expected="Tensor",
        got=type(value).__name__,
        hint="Pass `outputs=` with the keys of tensors.",
    )
