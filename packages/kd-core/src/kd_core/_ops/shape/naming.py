"""Names of batch dimensions: set them, refine them, change them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kd_core._batch.names import names_of
from kd_core._errors import InvalidArgument, InvalidValue
from kd_core._ops.shape.rebatching import check_names, set_names
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from types import EllipsisType
    from typing import Self


class Naming(AbstractContainer):
    """Names of batch dimensions.

    A name stays with its dimension through operations that rearrange, slice, remove or add
    dimensions, and through those that select, add or repeat rows of one dimension. A dimension that
    an operation makes, also of several, has no name. Methods that take a batch dimension take its
    name, too.
    """

    __slots__ = ()

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
        return list(names_of(self._desc.batch))

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        checked = check_names(names, self._desc.batch)
        _check_unlocked(self)
        set_names(self, checked)

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
        old = names_of(self._desc.batch)
        given = _filled(names, len(old))
        for dim, (mine, new) in enumerate(zip(old, given, strict=False)):
            if mine is not None and new is not None and mine != new:
                raise InvalidValue(
                    f"dimension {dim} is named `{mine}` and cannot be refined to `{new}`. Use "
                    "`rename`."
                )
        pairs = zip(old, given, strict=False)
        self.names = [mine if new is None else new for mine, new in pairs] + [*given[len(old) :]]
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
        return self._shallow().rename_(*names, **changes)

    def rename_(self, *names: str | None, **changes: str | None) -> Self:
        """Change the names of dimensions in place; return self. See `rename`."""
        old = names_of(self._desc.batch)
        if names and changes:
            raise InvalidArgument("names by position cannot be combined with names by keyword.")
        unknown = [name for name in changes if name not in old]
        if unknown:
            raise InvalidValue(f"no batch dimension is named `{unknown[0]}`; the names are {old}.")
        if names == (None,):
            names = (None,) * len(old)
        self.names = [changes.get(name or "", name) for name in old] if changes else names or old
        return self


def _filled(names: Sequence[object], ndim: int) -> tuple[str | None, ...]:
    """Return names with `...` replaced by as many `None` as there are dimensions left."""
    if names.count(...) > 1:
        raise InvalidArgument("names must hold at most one `...`.")
    if ... not in names:
        return tuple(names)  # type: ignore[arg-type]  # checked when they are set
    at = names.index(...)
    rest = (None,) * (ndim - len(names) + 1)
    return (*names[:at], *rest, *names[at + 1 :])  # type: ignore[arg-type]  # as above


def _check_unlocked(level: AbstractContainer) -> None:
    level._check_unlocked("set the names of dimensions")
    for node in level._below():
        if isinstance(node, AbstractContainer):
            _check_unlocked(node)
