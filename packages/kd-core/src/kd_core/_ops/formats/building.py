"""Building a container of a given class from what a source holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kd_core._batch.descriptor import describe
from kd_core._errors import InvalidArgument
from kd_core._nodes import registry
from kd_core._nodes.entry import is_data
from kd_core._ops.shape.rebatching import named
from kd_core._protocol.composite import Composite
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from typing import TypeVar

    from kd_core._types import Batch, BatchSize, DeviceLike

    C = TypeVar("C", bound=AbstractContainer)


def build(
    cls: type[C],
    tree: object,
    batch_size: BatchSize | None,
    device: DeviceLike | None,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    found: BatchSize | None = None,
    names: Sequence[str | None] | None = None,
) -> C:
    """Build a container of a class from nested dicts.

    Args:
        cls: the class.
        tree: the nested dicts.
        batch_size: the batch size that the caller gives.
        device: the device to which every entry is moved.
        auto_batch_size: infer the batch size if none is given.
        batch_dims: the largest number of batch dimensions to infer.
        found: the batch size that the source has, if none is given or inferred.
        names: the name of each batch dimension; `None`: no names.

    Raises:
        InvalidArgument: if the class is not built from a mapping.
    """
    if batch_size is None and (auto_batch_size or batch_dims is not None):
        batch_size = inferred_batch(cls, tree, batch_dims)
    made = _maker(cls)(tree, found if batch_size is None else batch_size, device)
    return made if names is None else named(made, names)


def inferred_batch(cls: type[C], tree: object, most: int | None) -> Batch:
    """Return the leading dimensions that the leaves of nested dicts share, at most `most`.

    Raises:
        InvalidArgument: if the class is not built from a mapping.
    """
    # Apart from what is built in the end: with a batch size lists are rows.
    made = _maker(cls)(tree, None, None)._kd_shallow()  # which is not locked
    made._kd_engine.auto_batch_size_(made, most)  # type: ignore[attr-defined]  # of a concern
    batch = made._kd_desc.batch
    return batch[: _rows_in_lists(made, batch)]


def _rows_in_lists(level: AbstractContainer, batch: Batch) -> int:
    """Return how many leading dimensions the lists of values have, too: one value for each row.

    A list that does not have an item for each row of dimension 0 is left for the error to name.
    """
    most = len(batch)
    for entry in level._kd_entries.values():
        if isinstance(entry, AbstractContainer):
            most = min(most, _rows_in_lists(entry, batch))
        elif is_data(entry) and isinstance(values := entry._kd_item(), (list, tuple)):
            found = 0
            rows: list[object] = [values]
            while found < most:
                lists = [each for each in rows if isinstance(each, (list, tuple))]
                if len(lists) < len(rows) or any(len(each) != batch[found] for each in lists):
                    break
                rows = [each for row in lists for each in row]
                found += 1
            most = min(most, max(found, 1))
    return most


def _maker(cls: type[C]) -> Callable[..., C]:
    if issubclass(cls, Composite):  # a mapping of entries makes a dense container
        cls = cast("type[C]", type(registry.make_dense({}, describe(()))))
    make = cast("Callable[..., C] | None", getattr(cls._kd_engine, "from_dict", None))
    if make is not None and cls._kd_engine is not cls:  # its author may have a field of that name
        own = make
        return lambda *args: getattr(own, "__func__")(cls, *args)  # noqa: B009  # of a class method
    if make is None:
        raise InvalidArgument(
            f"`{cls.__name__}` cannot be built from a mapping. Call the method of `TensorDict`."
        )
    return make


def kind_of(td: C) -> type[C]:
    """Return the class of what is built like a container; a stack is read as a dense container."""
    return type(td._kd_like({}, td._kd_desc.unlocked()) if isinstance(td, Composite) else td)


def stack_rows(rows: list[C], lazy: bool | None) -> C:
    """Stack containers along a new first dimension; `lazy` as in `from_list`."""
    if lazy is False:
        return cast("C", torch.stack(cast("list[Tensor]", rows)))
    stack = registry.lazy_stack if lazy else registry.maybe_dense_stack
    return cast("C", stack(rows))
