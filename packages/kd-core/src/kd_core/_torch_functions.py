"""The torch functions that accept containers: tables of implementations and of method names.

An entry here makes `torch.f(td)` work. Functions of several containers are in `FUNCTIONS`, those
that treat each leaf or each element alone in `ELEMENTWISE`; all others are mapped to the name of a
method, so that subclasses can override it. An activation maps each leaf. A loss combines leaves of
the same key; without a reduction the result has the batch size of the operands, else each leaf is
one number and the batch size is (). The default collate function of a `DataLoader` stacks them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from kd_core import _protocol as primitives
from kd_core import _registry as registry
from kd_core._base import TensorDictBase
from kd_core._containers.dense import Dense, restore_dense
from kd_core._containers.lazy_stack import restore_stack
from kd_core._containers.non_tensor import (
    MetaData,
    NonTensorData,
    restore_meta,
    restore_row_of_batch,
    restore_shared,
    restore_value,
)
from kd_core._containers.non_tensor_stack import restore_rows
from kd_core._containers.stack_writes import MemberStorage
from kd_core._descriptor import restore_descriptor
from kd_core._errors import (
    InvalidArgument,
    InvalidValue,
    ShapeMismatch,
    different_keys,
    shape_text,
    wrong_type,
)
from kd_core._keys import KeyPath, format_key
from kd_core._leaves.packing import restore_from_bits
from kd_core._ops.binary import Operand, as_operand, check_batches, fitted, pad_to_leaves
from kd_core._ops.filling import fill_like
from kd_core._ops.joining import cat, stack
from kd_core._ops.pointwise import OPERATORS, Arithmetic, Comparisons, Logic, Unary
from kd_core._ops.reduction import Reductions
from kd_core._protocol import AbstractContainer, note_entry, refuse_unbatched
from kd_core._registry import NamedKind
from kd_core._shapes import EVERYTHING, SAME_SHAPE, NamedSize, broadcasts_to, restore_size
from kd_core._torch_private import assume_constant_result, collate_as
from kd_core._unbatched import UnbatchedTensor, restore_unbatched

_MIRRORED = {
    "eq": "__eq__",
    "ne": "__ne__",
    "lt": "__gt__",
    "le": "__ge__",
    "gt": "__lt__",
    "ge": "__le__",
}


def _list_rows() -> None:
    """Register the functions and operators that are generated as methods."""
    for name in (*_methods_of(Unary), *_methods_of(Reductions)):
        primitives.METHODS[getattr(torch, name)] = (name, None)
    for name in (*_methods_of(Arithmetic), *_methods_of(Logic), *_methods_of(Comparisons)):
        operator = OPERATORS.get(name)
        method = (name, _MIRRORED.get(name) or (f"__r{operator}__" if operator else None))
        primitives.METHODS[getattr(torch, name)] = method
        primitives.METHODS[getattr(Tensor, name)] = method
        if operator is not None:
            primitives.METHODS[getattr(Tensor, f"__{operator}__")] = method


def _methods_of(concern: type) -> list[str]:
    return [name for name in vars(concern) if not name.startswith("_")]


def _list_methods(names: str) -> None:
    """Register methods that have the name of a torch function."""
    for name in names.split():
        primitives.METHODS[getattr(torch, name)] = (name, None)


_list_rows()
_list_methods(
    "reshape flatten unflatten squeeze unsqueeze permute transpose swapaxes swapdims movedim "
    "moveaxis tile repeat_interleave roll flip fliplr flipud rot90 atleast_1d atleast_2d "
    "atleast_3d broadcast_to"
)
_list_methods("split chunk tensor_split unbind narrow index_select gather scatter")
_list_methods(
    "rsub is_floating_point all any clone cummax cummin cumprod cumsum quantile softmax "
    "log_softmax max min clamp_min clamp_max lerp addcmul addcdiv "
    "masked_fill masked_select detach"
)


def _where(
    condition: Tensor,
    input: AbstractContainer | Tensor | float,
    other: AbstractContainer | Tensor | float,
) -> object:
    if isinstance(input, TensorDictBase):
        return input._kd_engine.where(input, condition, other)
    if not isinstance(other, TensorDictBase):
        remedy = "Pass a tensor as `condition`."
        raise wrong_type("`input` or `other` of `torch.where`", "a container", other, remedy)
    return other._kd_engine.where(other, ~condition, input)


def _clamp(
    input: object,
    min: Operand | None = None,
    max: Operand | None = None,
    *,
    out: TensorDictBase | None = None,
) -> object:
    """Return a result that is not locked if there are two limits, unlike that of the method."""
    if not isinstance(input, TensorDictBase):
        raise wrong_type("`input` of `torch.clamp`", "a container", input)
    found: TensorDictBase = input._kd_engine.clamp(input, min, max, out=out)
    return found if out is not None or min is None or max is None else found.unlock_()


def _grad(
    outputs: Sequence[AbstractContainer | Tensor],
    inputs: Sequence[TensorDictBase | Tensor],
    grad_outputs: AbstractContainer | Tensor | Sequence[Tensor | None] | None = None,
    *,
    is_grads_batched: bool = False,
    **options: Any,
) -> object:
    """Return gradients in the form of `inputs`: a container lacks what is `None`.

    Outputs and their gradients belong together by key. torch puts one output or input in a tuple.
    """
    of, to = _alone(outputs, "outputs"), _alone(inputs, "inputs")
    made: Any = outputs
    given: Any = grad_outputs
    if isinstance(of, AbstractContainer):
        refuse_unbatched(of, "differentiated")
        paths = list(paths_of(of, ()))
        made = [_leaf_at(of, path) for path in paths]
        if isinstance(given, AbstractContainer):
            keys = set(paths_of(given, ()))
            if keys != set(paths):
                mine, theirs = ([format_key(key)[1:-1] for key in each] for each in (paths, keys))
                raise different_keys(mine, theirs, ("`outputs`", "`grad_outputs`"))
            given = [_leaf_at(given, path) for path in paths]
    elif isinstance(given, AbstractContainer):
        raise wrong_type("`grad_outputs`", "a tensor or several, like `outputs`", given)
    leaves: Any = inputs
    if isinstance(to, TensorDictBase):
        leaves = []
        to.apply(leaves.append)
    found = torch.autograd.grad(made, leaves, given, is_grads_batched=is_grads_batched, **options)
    if not isinstance(to, TensorDictBase):
        return found
    rows = next((tuple(each.shape[:1]) for each in found if each is not None), ())
    batch = (*rows, *to.batch_size) if is_grads_batched else None
    each = iter(found)
    result: TensorDictBase | None = to.apply(
        lambda _: next(each), batch_size=batch, propagate_lock=True
    )
    return to.empty() if result is None else result


def _alone(given: Sequence[object], name: str) -> object:
    """Return the container among the outputs or inputs of `torch.autograd.grad`, if there is one.

    Raises:
        InvalidArgument: if there is more beside it.
    """
    found = next((each for each in given if isinstance(each, AbstractContainer)), None)
    if found is not None and len(given) > 1:
        raise InvalidArgument(
            f"`{name}` of `torch.autograd.grad` may be one container, or tensors, got {len(given)} "
            "values with a container among them. Put them into one container."
        )
    return found


def _leaf_at(td: AbstractContainer, path: KeyPath) -> Tensor:
    """Return the tensor at a path; of a lazy stack, the stacked one."""
    found = td._kd_read(path)
    assert isinstance(found, Tensor)
    return found


primitives.FUNCTIONS.update(
    {
        torch.autograd.grad: _grad,
        torch.clamp: _clamp,
        torch.stack: inspect.unwrap(stack),  # torch knows its parameters
        torch.cat: inspect.unwrap(cat),
        torch.concat: cat,
        torch.concatenate: cat,
        torch.where: _where,
    }
)


def torch_functions() -> list[str]:
    """List the torch functions that accept containers.

    Any other function raises `UnsupportedFunction`; the message names a similar one.

    Returns:
        The public names, sorted.

    Example:
        >>> from kd_core import torch_functions
        >>> "torch.clone" in torch_functions()
        True
    """
    return sorted({primitives.name_of(func) for func in primitives.functions()})


ACTIVATIONS: Final = (
    "celu dropout elu gelu hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 "
    "selu silu softplus softsign threshold"
)
LOSSES: Final = (
    "binary_cross_entropy binary_cross_entropy_with_logits gaussian_nll_loss hinge_embedding_loss "
    "huber_loss kl_div l1_loss mse_loss poisson_nll_loss smooth_l1_loss soft_margin_loss"
)
OPERANDS: Final = ("input", "target", "var", "weight", "pos_weight")
"""The parameters of losses that are tensors, or containers of them."""


_PARAMETERS: Final[dict[Callable[..., object], tuple[str, ...]]] = {}


@assume_constant_result  # dynamo traces no look at a signature
def parameters_of(fn: Callable[..., object]) -> tuple[str, ...]:
    """Return the names of the parameters of a function of torch."""
    names = _PARAMETERS.get(fn)
    if names is None:
        names = _PARAMETERS[fn] = tuple(inspect.signature(fn).parameters)
    return names


def activation(fn: Callable[..., Tensor]) -> Callable[..., object]:
    """Convert an activation of torch to a function of containers."""

    def activated(input: AbstractContainer, *args: object, **options: object) -> object:
        # Those that are written in C take no `inplace`.
        names = parameters_of(fn) if args and isinstance(fn, FunctionType) else ()
        given = dict(zip(names[1:], args, strict=False)) | options
        if given.pop("inplace", False):
            call = primitives.name_of(fn)
            if given:
                settings = [f"{name}={value!r}" for name, value in given.items()]
                call = f"lambda leaf: {call}(leaf, {', '.join(settings)})"
            raise InvalidArgument(
                f"`inplace=True` is not supported for containers. Write `td.apply_({call})`."
            )
        try:
            return input._kd_map_each(lambda leaf: fn(leaf, *args, **options))
        except RuntimeError as error:
            note_entry(error, input, lambda leaf: fn(leaf, *args, **options))
            raise

    return activated


def loss(fn: Callable[..., Tensor]) -> Callable[..., object]:
    """Convert a loss of torch to a function of containers."""

    def of_leaves(*args: object, **named: object) -> object:
        names = parameters_of(fn)
        given = dict(zip(names, args, strict=False)) | named
        if len(given) < len(args) + len(named):  # there are too many, or one is given twice
            inspect.signature(fn).bind(*args, **named)
        legacy = [name for name in ("size_average", "reduce") if given.get(name) is not None]
        if legacy:
            raise InvalidArgument(
                f"`{legacy[0]}` is not supported for containers. Pass "
                '`reduction="none"`, `"mean"` or `"sum"`.'
            )
        operands = {name: given.pop(name) for name in OPERANDS if given.get(name) is not None}
        classes = operands.get("pos_weight")
        if isinstance(classes, Tensor) and classes.ndim:
            raise InvalidArgument(
                "`pos_weight` must be a container of one tensor for each entry, or one number: it "
                "belongs to trailing dimensions, and those of entries differ."
            )
        nodes = [each for each in operands.values() if isinstance(each, AbstractContainer)]
        td = next((each for each in nodes if each._kd_desc.batch), nodes[0])
        refuse_unbatched(td, "compared by a loss")
        leaves = stacked_leaves(td)
        columns = [column_of(td, leaves, operand) for operand in operands.values()]
        results: list[Tensor] = []
        for row in zip(*columns, strict=True):
            try:
                results.append(fn(**dict(zip(operands, row, strict=True)), **given))
            except (RuntimeError, ValueError) as error:
                name, key = primitives.name_of(fn), list(paths_of(td, ()))[len(results)]
                text = f"`{name}` of entry {format_key(key)} failed: {error}"
                raise InvalidValue(text) from error
        alone = given.get("reduction") != "none"
        if not alone:
            check_batch(td, results)
        found = iter(results)
        return td._kd_map_each(lambda leaf: next(found), EVERYTHING if alone else SAME_SHAPE)

    return of_leaves


def stacked_leaves(td: AbstractContainer) -> list[Tensor]:
    """Return all leaves, those of a lazy stack with the stacked dimension."""
    leaves: list[Tensor] = []

    def note(leaf: Tensor) -> Tensor:
        leaves.append(leaf)
        return leaf

    td._kd_map_each(note, SAME_SHAPE)
    return leaves


def column_of(td: AbstractContainer, leaves: list[Tensor], operand: object) -> Sequence[Tensor]:
    """Return the value of an operand for each leaf; a tensor is broadcast over the batch.

    Raises:
        InvalidArgument: if the operand is not a number, a tensor or a container.
        KeySetMismatch: if the keys of a container differ.
        ShapeMismatch: if the batch size of a container, or the shape of a tensor, does not fit.
    """
    batch = td._kd_desc.batch
    if operand is td:
        return leaves
    if isinstance(operand, AbstractContainer):
        operand = fitted(td, operand)
        check_batches(batch, operand._kd_desc.batch)
        beside = stacked_leaves(td._kd_zip_each(operand, lambda mine, theirs: theirs))
        return beside if operand._kd_desc.batch else broadcast(beside, leaves)
    value = as_operand(operand)
    if not isinstance(value, Tensor):
        return [torch.full_like(leaf, value) for leaf in leaves]
    beside = pad_to_leaves(value, leaves, batch) if value.ndim else [value] * len(leaves)
    return broadcast(beside, leaves)


def broadcast(beside: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Expand operands to the shape of their leaf, as losses expect, where they can be."""
    return [
        each.expand(leaf.shape) if broadcasts_to(each.shape, leaf.shape) else each
        for each, leaf in zip(beside, leaves, strict=True)
    ]


def check_batch(td: AbstractContainer, results: list[Tensor]) -> None:
    """Refuse results that do not start with the batch size."""
    batch = td._kd_desc.size  # without names: to dynamo no symbol is equal to a named size
    for key, result in zip(paths_of(td, ()), results, strict=True):
        if result.shape[: len(batch)] != batch:
            raise ShapeMismatch(
                f"the loss of entry {format_key(key)} must have a shape that starts with "
                f"batch_size {shape_text(batch)}, got {shape_text(result.shape)}."
            )


def paths_of(td: AbstractContainer, path: KeyPath) -> Iterator[KeyPath]:
    """Yield the path of each leaf, in the order of `stacked_leaves`."""
    for key, value in td._kd_entries.items():
        if isinstance(value, AbstractContainer):
            yield from paths_of(value, (*path, key))
        elif isinstance(value, Tensor):
            yield (*path, key)


def softmax(name: str) -> Callable[..., object]:
    """Return `torch.nn.functional.softmax` or `log_softmax` of containers: the method."""

    def along(
        input: AbstractContainer,
        dim: int | None = None,
        _stacklevel: int = 3,
        dtype: torch.dtype | None = None,
    ) -> object:
        if dim is None:
            raise InvalidArgument(f"`{name}` of a container requires `dim`, a batch dimension.")
        return getattr(input._kd_engine, name)(input, dim, dtype)

    return along


for _name in ACTIVATIONS.split():
    _function = getattr(functional, _name)
    primitives.ELEMENTWISE[_function] = activation(_function)
for _name in LOSSES.split():
    _function = getattr(functional, _name)
    primitives.ELEMENTWISE[_function] = loss(_function)
for _name in ("softmax", "log_softmax"):
    primitives.ELEMENTWISE[getattr(functional, _name)] = softmax(_name)
for _like in (
    torch.zeros_like,
    torch.ones_like,
    torch.full_like,
    torch.empty_like,
    torch.rand_like,
    torch.randn_like,
    torch.randint_like,
):
    primitives.ELEMENTWISE[_like] = fill_like(_like)


def _collate(
    batch: TensorDictBase | Sequence[TensorDictBase], *, collate_fn_map: object = None
) -> TensorDictBase:
    """Stack the samples of a `DataLoader`; a container as data set gives a whole batch at once."""
    return batch if isinstance(batch, TensorDictBase) else stack(batch)


collate_as(TensorDictBase, _collate)


# Containers in `torch.load(weights_only=True)`, and on their way to another process.
#
# Rebuilding a container does not call code of its class, so every kind can be named, also one that
# is defined later. A pickle can call the functions that restore containers, which check what they
# are given, and nothing else of this library; kinds of other libraries are listed as safe
# themselves.


def _allow(cls: type) -> None:
    ours = issubclass(cls, (Dense, MemberStorage)) or cls.__module__.startswith("kd_core.")
    torch.serialization.add_safe_globals([NamedKind(cls) if ours else cls])
    ForkingPickler.register(cls, _reduced_for_processes)


def _reduced_for_processes(container: Any) -> tuple[Any, ...]:
    # Between processes tensors go through shared memory, whatever the protocol: protocol 3 keeps
    # them tensors.
    function, args, *rest = container.__reduce_ex__(3)
    if function is restore_dense:
        cls, entries, *more = args
        originals = container._kd_entries
        args = (cls, {key: _for_process(originals[key], entries[key]) for key in entries}, *more)
    return function, args, *rest


def _unbatched_for_processes(entry: UnbatchedTensor) -> tuple[Any, ...]:
    function, (reduced, *more) = entry.__reduce_ex__(3)
    return function, (_for_process(entry._tensor, reduced), *more)


def _for_process(entry: object, reduced: object) -> object:
    """Return what stands for an entry in another process.

    A leaf of an arena is mapped there. The storage of another one is shared, also if it is a view:
    a copy of its own bytes, which other pickles hold, would keep what is written there.
    """
    if not isinstance(entry, Tensor):
        return reduced
    from kd_core._store.mapped_tensor import place_of

    if place_of(entry) is None:
        copied = type(reduced) is Tensor and (entry.is_leaf or not entry.requires_grad)
        return entry if copied else reduced
    from kd_core._store.arena import MappedLeaf

    return MappedLeaf(entry)


# `restore` of the descriptor is for kinds of other libraries, which are pickled as any object is.
torch.serialization.add_safe_globals(
    [
        restore_dense,
        restore_stack,
        restore_descriptor,
        restore_row_of_batch,
        restore_rows,
        restore_shared,
        restore_unbatched,
        restore_from_bits,
        NamedKind(NamedSize, restore_size),
        NamedKind(NonTensorData, restore_value),
        NamedKind(MetaData, restore_meta),
    ]
)
ForkingPickler.register(UnbatchedTensor, _unbatched_for_processes)
registry.on_new_kind(_allow)
