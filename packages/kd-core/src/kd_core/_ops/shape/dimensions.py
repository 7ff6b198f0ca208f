"""The number, the orientation and the names of batch dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kd_core._batch.names import names_of
from kd_core._batch.plans import Plan, cached, kept, plan
from kd_core._batch.shapes import as_int
from kd_core._errors import InvalidArgument, InvalidValue, OutOfRange
from kd_core._ops.scopes.undoing import moved
from kd_core._ops.shape.rebatching import check_names, set_names
from kd_core._ops.shape.shape_plans import distinct_dims, expand_plan, flip_plan
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from types import EllipsisType
    from typing import Self

    from kd_core._types import Batch


class Dimensions(AbstractContainer):
    """The methods that add batch dimensions, turn the batch, or name its dimensions.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"a": torch.tensor([[1, 2], [3, 4]])}, [2, 2])
        >>> td.rot90()["a"].tolist(), td.fliplr()["a"].tolist()
        ([[2, 4], [1, 3]], [[2, 1], [4, 3]])
        >>> td[0].atleast_3d().batch_size, td.broadcast_to((5, 2, 2)).batch_size
        (torch.Size([1, 2, 1]), torch.Size([5, 2, 2]))
    """

    __slots__ = ()

    def atleast_1d(self) -> Self:
        """Return the container, with one batch dimension at least: `torch.atleast_1d`."""
        return moved(_atleast(self._kd_desc.batch, 1), self)

    def atleast_2d(self) -> Self:
        """Return the container with two batch dimensions at least, new ones in front."""
        return moved(_atleast(self._kd_desc.batch, 2), self)

    def atleast_3d(self) -> Self:
        """Return the container with three batch dimensions at least: `torch.atleast_3d`.

        As in torch, one batch dimension becomes the middle one, and two become the first two.
        """
        return moved(_atleast(self._kd_desc.batch, 3), self)

    def broadcast_to(self, shape: Sequence[int]) -> Self:
        """Repeat batch dimensions of size 1 without copying; `expand` with one argument.

        Args:
            shape: the new batch size; -1 keeps a size, new dimensions come in front.
        """
        return moved(expand_plan(self._kd_desc.batch, (shape,)), self)

    def fliplr(self) -> Self:
        """Reverse the order along the second batch dimension; a copy, as in torch.

        Raises:
            OutOfRange: if there are fewer than two batch dimensions.
        """
        _check_ndim(self, 2, "fliplr")
        return moved(flip_plan(self._kd_desc.batch, (1,)), self)

    def flipud(self) -> Self:
        """Reverse the order along the first batch dimension; a copy, as in torch.

        Raises:
            OutOfRange: if there is no batch dimension.
        """
        _check_ndim(self, 1, "flipud")
        return moved(flip_plan(self._kd_desc.batch, (0,)), self)

    def rot90(self, k: int = 1, dims: Sequence[int | str] = (0, 1)) -> Self:
        """Return the batch rotated by 90 degrees in a plane of two dimensions; a copy, as in torch.

        Args:
            k: the number of turns, from the first dimension towards the second.
            dims: the two batch dimensions.

        Raises:
            OutOfRange: if there are fewer than two batch dimensions.
        """
        _check_ndim(self, 2, "rot90")
        return moved(_rot90(self._kd_desc.batch, k, tuple(dims)), self)

    @property
    def names(self) -> list[str | None]:
        """The name of each batch dimension, `None` for one without a name.

        Setting it names the dimensions of nested containers, too; `None` removes all names.

        Raises:
            InvalidValue: if there is not one for each dimension, or one is given twice.
            Locked: if the container, or one below, is locked.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.ones(2, 3)}, [2, 3], names=["time", "env"])
            >>> td.transpose(0, 1).names, td[0].names, td.sum("time")["a"]
            (['env', 'time'], ['env'], tensor([2., 2., 2.]))
        """
        return list(names_of(self._kd_desc.batch))

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        name_dims(self, names)

    def refine_names(self, *names: str | EllipsisType | None) -> Self:
        """Name dimensions that have no name; return self.

        Args:
            *names: one for each dimension: its name, a name for one without, or `None` to leave it.
                One `...` stands for all dimensions that are not listed.

        Raises:
            InvalidValue: if a dimension has another name already.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.ones(2, 3)}, [2, 3], names=["time", None])
            >>> td.refine_names(..., "env").names
            ['time', 'env']
        """
        old = names_of(self._kd_desc.batch)
        given = _filled(names, len(old))
        for dim, (mine, new) in enumerate(zip(old, given, strict=False)):
            if mine is not None and new is not None and mine != new:
                raise InvalidValue(
                    f"dimension {dim} is named `{mine}` and cannot be refined to `{new}`. Use "
                    "`rename`."
                )
        pairs = zip(old, given, strict=False)
        name_dims(
            self, [mine if new is None else new for mine, new in pairs] + [*given[len(old) :]]
        )
        return self

    def rename(self, *names: str | None, **changes: str | None) -> Self:
        """Return a container with other names of dimensions; tensors are shared.

        Args:
            *names: the new name of each dimension.
            **changes: new names by old name.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.ones(2, 3)}, [2, 3], names=["time", "env"])
            >>> td.rename(time="step").names
            ['step', 'env']
        """
        return self._kd_shallow().rename_(*names, **changes)

    def rename_(self, *names: str | None, **changes: str | None) -> Self:
        """Change the names of dimensions in place; return self. See `rename`."""
        old = names_of(self._kd_desc.batch)
        if names and changes:
            raise InvalidArgument("names by position cannot be combined with names by keyword.")
        unknown = [name for name in changes if name not in old]
        if unknown:
            raise InvalidValue(f"no batch dimension is named `{unknown[0]}`; the names are {old}.")
        if names == (None,):
            names = (None,) * len(old)
        changed = [changes.get(name or "", name) for name in old] if changes else names or old
        name_dims(self, changed)
        return self


def name_dims(td: AbstractContainer, names: Sequence[str | None] | None) -> None:
    """Set the names of all batch dimensions of a container; a lock does not cover them."""
    set_names(td, check_names(names, td._kd_desc.batch))


def _check_ndim(td: AbstractContainer, ndim: int, name: str) -> None:
    if td._kd_desc.ndim < ndim:
        raise OutOfRange(
            f"`{name}` requires at least {ndim} batch dimension{'s' if ndim > 1 else ''}, got "
            f"batch_size {td._kd_desc.batch}. Use `unsqueeze` first."
        )


@cached
def _atleast(batch: Batch, ndim: int) -> Plan:
    missing = ndim - len(batch)
    if missing <= 0:
        return kept(batch)
    behind = int(ndim == 3 and bool(batch))
    new = (1,) * (missing - behind) + batch + (1,) * behind
    at = len(batch)
    return plan(batch, lambda leaf: leaf.reshape((*new, *leaf.shape[at:])), new)


@cached
def _rot90(batch: Batch, k: int, dims: tuple[int | str, ...]) -> Plan:
    turns = as_int(k) % 4
    plane = distinct_dims(dims, batch)
    if len(plane) != 2:
        raise InvalidValue(f"`dims` of `rot90` must be two dimensions, got {dims}.")
    new = list(batch)
    if turns % 2:
        new[plane[0]], new[plane[1]] = new[plane[1]], new[plane[0]]
    return plan(batch, lambda leaf: leaf.rot90(turns, plane), tuple(new))


def _filled(names: Sequence[object], ndim: int) -> tuple[str | None, ...]:
    """Return names with `...` replaced by as many `None` as there are dimensions left."""
    if names.count(...) > 1:
        raise InvalidArgument("names must hold at most one `...`.")
    if ... not in names:
        return tuple(names)  # type: ignore[arg-type]  # checked when they are set
    at = names.index(...)
    rest = (None,) * (ndim - len(names) + 1)
    return (*names[:at], *rest, *names[at + 1 :])  # type: ignore[arg-type]  # as above
