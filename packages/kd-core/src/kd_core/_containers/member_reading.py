"""The members of a stack: reading what cannot be stacked, and adding further ones.

Knows the ways to read ragged entries; must not know how members are written or added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast, overload

import torch
from torch import Tensor

from kd_core._base import TensorDictBase
from kd_core._batch.names import resized
from kd_core._batch.shapes import as_int
from kd_core._containers.member_entries import holds_unbatched
from kd_core._containers.member_storage import MemberStorage, describe_stack
from kd_core._errors import InvalidValue, ShapeMismatch, shape_text, wrap_mapping, wrong_type
from kd_core._keys import path_of
from kd_core._leaves.loops import common_batch, has_entry
from kd_core._ops.shape.description import resize, shapes_of
from kd_core._protocol.composite import absent, reading
from kd_core._protocol.primitives import engine
from kd_core._protocol.validation import refuse_cycle
from kd_core._types import NO_DEFAULT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Self

    from kd_core._nodes.entry import Entry
    from kd_core._protocol.composite import Reading, Side
    from kd_core._types import NestedKey


class Members(MemberStorage):
    """A stack whose ragged entries can be read, and that members can be added to."""

    __slots__ = ()

    @overload
    def get(
        self,
        key: NestedKey,
        default: object = None,
        *,
        as_list: Literal[False] = False,
        as_padded_tensor: bool = False,
        as_nested_tensor: bool = False,
        padding_value: float = 0.0,
        padding_side: Side = "right",
        layout: torch.layout = torch.jagged,
    ) -> Tensor: ...
    @overload
    def get(
        self, key: NestedKey, default: object = None, *, as_list: Literal[True]
    ) -> list[Tensor]: ...
    def get(
        self,
        key: NestedKey,
        default: object = NO_DEFAULT,
        *,
        as_list: bool = False,
        as_padded_tensor: bool = False,
        as_nested_tensor: bool = False,
        padding_value: float = 0.0,
        padding_side: Side = "right",
        layout: torch.layout = torch.jagged,
    ) -> object:
        """Return the entry at `key`, stacked; or `default` where a member has none.

        Args:
            key: a string, or a tuple of strings for a nested entry.
            default: what is returned if the key is missing, `None` if it is not given.
            as_list: return the entries of the members in a list, not stacked.
            as_padded_tensor: pad the entries to one shape, then stack them.
            as_nested_tensor: return a nested tensor; the stacked dimension must be the first.
            padding_value: the value of the elements that are added.
            padding_side: where they are added: `"left"` or `"right"`.
            layout: the layout of a nested tensor.

        Raises:
            ShapeMismatch: if the shapes differ among the members, and how to read them is not said.
            KeyThroughLeaf: if the key goes on below a tensor, and no default is given.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict, lazy_stack
            >>> stack = lazy_stack([TensorDict({"a": torch.ones(n)}) for n in (1, 2)])
            >>> stack.get("a", as_padded_tensor=True)
            tensor([[1., 0.],
                    [1., 1.]])
            >>> [row.shape[0] for row in stack.get("a", as_list=True)]
            [1, 2]
        """
        if not (as_list or as_padded_tensor or as_nested_tensor):
            return super().get(key, default)
        options = padding_value, padding_side, layout
        how = reading(as_list, as_padded_tensor, as_nested_tensor, *options)
        path = path_of(key)
        found = self._read_as(path, None, how)
        return absent(self, path, default) if found is None else found

    def _read_as(self, path: tuple[str, ...], default: object, how: Reading) -> object:
        if not all(has_entry(member._kd_entries, path) for member in self._members):
            return default
        from kd_core._containers.member_rows import nested_rows, padded_rows, rows_of

        if how.form == "list":
            return rows_of(self, path)
        if how.form == "padded":
            return padded_rows(self, path, how.padding_value, how.padding_side)
        return nested_rows(self, path, how.layout)

    def get_nestedtensor(
        self, key: NestedKey, default: object = None, *, layout: torch.layout | None = None
    ) -> Tensor:
        """Return the entry at `key` as a nested tensor, of strided layout unless it is said."""
        layout = layout or torch.strided
        return engine(self).get(self, key, default, as_nested_tensor=True, layout=layout)

    def _kd_dense_entry(self, key: str, layout: torch.layout) -> Entry:
        try:
            return super()._kd_dense_entry(key, layout)
        except ShapeMismatch:
            if holds_unbatched(self, key):
                raise
            from kd_core._containers.member_rows import nested_rows

            return nested_rows(self, (key,), layout)

    def auto_batch_size_(
        self, batch_dims: int | None = None, keep_compliant_size: bool = False
    ) -> Self:
        """Set the batch size to the leading dimensions that the leaves of all members share.

        The stacked dimension stays; see `TensorDict.auto_batch_size_`.
        """
        if batch_dims is not None and batch_dims <= self._dim:
            raise InvalidValue(
                f"`batch_dims` must be larger than the stacked dimension {self._dim}, got "
                f"{batch_dims}. Call `contiguous()` first."
            )
        shapes = [shape for member in self._members for shape in shapes_of(member)]
        inner = common_batch(shapes, None if batch_dims is None else batch_dims - 1)
        if len(inner) < self._dim:
            raise ShapeMismatch(
                f"the leaves of the members share {len(inner)} leading dimensions, and the stacked "
                f"dimension is {self._dim}. Call `contiguous()` first."
            )
        resize(self, (*inner[: self._dim], len(self._members), *inner[self._dim :]))
        return self

    def append(self, tensordict: TensorDictBase) -> None:
        """Add a container to the end of the stack; see `insert`.

        Example:
            >>> from kd_core import TensorDict, lazy_stack
            >>> stack = lazy_stack([TensorDict(a=0)])
            >>> stack.append(TensorDict(a=1))
            >>> stack["a"]
            tensor([0, 1])
        """
        engine(self).insert(self, len(self._members), tensordict)

    def extend(self, tensordict: Iterable[TensorDictBase]) -> None:
        """Add containers to the end of the stack: all, or none if one does not fit.

        Args:
            tensordict: containers of the batch size of the members, or a container whose rows along
                its first batch dimension are added.

        Example:
            >>> from kd_core import TensorDict, lazy_stack
            >>> stack = lazy_stack([TensorDict(a=0)])
            >>> stack.extend([TensorDict(a=1), TensorDict(a=2)])
            >>> stack.batch_size
            torch.Size([3])
        """
        self._grow(len(self._members), list(tensordict))

    def insert(self, index: int, tensordict: TensorDictBase) -> None:
        """Add a container before the member at a position, as `list.insert` does.

        The batch size of the stack grows. A container that holds the stack does not learn of it, so
        take the stack out of its container first.

        Args:
            index: the position in the stacked dimension.
            tensordict: a container of the batch size of the members; kept by reference.

        Raises:
            ShapeMismatch: if its batch size differs.
            Locked: if the stack is locked.

        Example:
            >>> from kd_core import TensorDict, lazy_stack
            >>> stack = lazy_stack([TensorDict(a=0), TensorDict(a=2)])
            >>> stack.insert(1, TensorDict(a=1))
            >>> stack["a"]
            tensor([0, 1, 2])
        """
        self._grow(as_int(index), [tensordict])

    def _replaced(self, **changes: object) -> Self:
        """Return a stack of new members with some fields changed; for stacks of tensor classes."""
        columns = {key: self._rows(self._kd_as_entry(key, value)) for key, value in changes.items()}
        members = []
        for position, member in enumerate(self._members):
            replace = cast("Callable[..., TensorDictBase]", getattr(member, "__replace__"))  # noqa: B009  # hidden
            members.append(replace(**{key: rows[position] for key, rows in columns.items()}))
        return self._of(members)

    def _grow(self, index: int, members: list[TensorDictBase]) -> None:
        if self._kd_desc.frozen:
            super()._kd_check_unlocked("add members")
        for position, member in enumerate(members):
            check_member(member, position, self._members[0], self)
            _check_class(member, position, self._kd_tensor_class)
        grown = self._members.copy()
        grown[index:index] = members
        size = resized(self._kd_desc.batch[self._dim], len(grown))
        self._kd_desc, self._members = describe_stack(grown, self._dim, size), grown


def _check_class(member: TensorDictBase, position: int, cls: type | None) -> None:
    """Refuse a member without the fields of a stack."""
    if cls is not None and not isinstance(member, cls):
        name = cls.__name__
        raise wrong_type(
            f"member {position} that is added to a lazy stack of `{name}`",
            f"an instance of `{name}`",
            member,
            "Make another stack: `lazy_stack([*stack.tensordicts, member])`.",
        )


def check_member(
    member: object, position: int, first: TensorDictBase, holder: MemberStorage | None
) -> None:
    """Check that a container can be a member.

    Args:
        member: the container.
        position: its number, for messages.
        first: a member of the stack.
        holder: the stack, if it exists already.

    Raises:
        InvalidArgument: if it is not a container.
        InvalidValue: if it holds the stack.
        ShapeMismatch: if its batch size differs from that of the first member.
    """
    if not isinstance(member, TensorDictBase):
        what = f"member {position} of" if holder is None else "what is added to"
        what += " a lazy stack"
        raise wrong_type(what, "a container", member, wrap_mapping(member))
    if isinstance(member, MemberStorage) or (holder is not None and member._kd_below()):
        refuse_cycle(f"member {position}", member, holder, ())
    if member._kd_desc is not first._kd_desc and member._kd_desc.batch != first._kd_desc.batch:
        mine, theirs = first._kd_desc.batch, member._kd_desc.batch
        added = holder is not None
        where = "in the members" if added else "in member 0"
        other = f"container {position} that is added to" if added else f"member {position} of"
        shared = shape_text(common_batch([mine, theirs]))
        raise ShapeMismatch(
            f"batch sizes must be equal, got {shape_text(mine)} {where} and {shape_text(theirs)} "
            f"in {other} the lazy stack. Give each container the `batch_size` that they share, "
            f"{shared}, or pad them with `pad_sequence`."
        )
