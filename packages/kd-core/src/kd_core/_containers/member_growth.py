"""Adding members to a stack.

Knows which containers may be members; must not know how their entries are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kd_core._base import TensorDictBase
from kd_core._batch.names import resized
from kd_core._batch.shapes import as_int
from kd_core._containers.member_storage import MemberStorage, describe_stack
from kd_core._errors import ShapeMismatch, shape_text, wrap_mapping, wrong_type
from kd_core._naming.parameters import explains_parameters
from kd_core._protocol.validation import refuse_cycle

if TYPE_CHECKING:
    from collections.abc import Iterable


class MemberGrowth(MemberStorage):
    """A stack that members can be added to."""

    __slots__ = ()

    @explains_parameters
    def append(self, member: TensorDictBase) -> None:
        """Add a container to the end of the stack; see `insert`.

        Example:
            >>> from kd_core import TensorDict, lazy_stack
            >>> stack = lazy_stack([TensorDict(a=0)])
            >>> stack.append(TensorDict(a=1))
            >>> stack["a"]
            tensor([0, 1])
        """
        self.insert(len(self._members), member)

    @explains_parameters
    def extend(self, members: Iterable[TensorDictBase]) -> None:
        """Add containers to the end of the stack: all, or none if one does not fit.

        Args:
            members: containers of the batch size of the members, or a container whose rows along
                its first batch dimension are added.

        Example:
            >>> from kd_core import TensorDict, lazy_stack
            >>> stack = lazy_stack([TensorDict(a=0)])
            >>> stack.extend([TensorDict(a=1), TensorDict(a=2)])
            >>> stack.batch_size
            torch.Size([3])
        """
        self._grow(len(self._members), list(members))

    @explains_parameters
    def insert(self, index: int, member: TensorDictBase) -> None:
        """Add a container before the member at a position, as `list.insert` does.

        The batch size of the stack grows. A container that holds the stack does not learn of it, so
        take the stack out of its container first.

        Args:
            index: the position in the stacked dimension.
            member: a container of the batch size of the members; kept by reference.

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
        self._grow(as_int(index), [member])

    def _grow(self, index: int, members: list[TensorDictBase]) -> None:
        if self._desc.frozen:
            super()._check_unlocked("add members")
        for position, member in enumerate(members):
            check_member(member, position, self._members[0], self)
        grown = self._members.copy()
        grown[index:index] = members
        size = resized(self._desc.batch[self._dim], len(grown))
        self._desc, self._members = describe_stack(grown, self._dim, size), grown


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
        what = f"member {position} of a lazy stack"
        raise wrong_type(what, "a container", member, wrap_mapping(member))
    if isinstance(member, MemberStorage) or (holder is not None and member._below()):
        refuse_cycle(f"member {position}", member, holder, ())
    if member._desc is not first._desc and member._desc.batch != first._desc.batch:
        raise ShapeMismatch(
            f"batch sizes must be equal, got {shape_text(first._desc.batch)} in member 0 and "
            f"{shape_text(member._desc.batch)} in member {position} of the lazy stack."
        )
