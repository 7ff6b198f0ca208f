"""A container as one header and few flat buffers, for other processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor
    from typing_extensions import Buffer


class Buffers(AbstractContainer):
    """Conversion to flat buffers and back."""

    __slots__ = ()

    def to_buffers(self) -> tuple[bytes, list[Tensor]]:
        """Return the container as a header and one flat tensor for each dtype and device.

        For sockets, shared memory, object stores and other engines that move tensors or bytes. The
        header is JSON, never a pickle; it holds keys, shapes, names of dimensions and data that is
        not a tensor, of the types that `save` keeps. A flat tensor shares the memory of its leaves
        where they follow one another already: a single leaf, or those that `consolidate` placed.
        Gradients, whether they are required, and locks are not kept.

        Returns:
            The header, and the flat tensors.

        Raises:
            InvalidArgument: if the type of an entry cannot be kept, as for `save`.
            InvalidValue: if the value of an entry cannot be kept.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.arange(2), "b": {"c": torch.ones(2, 3)}}, [2])
            >>> header, buffers = td.to_buffers()
            >>> [(flat.dtype, flat.shape) for flat in buffers]
            [(torch.int64, torch.Size([2])), (torch.float32, torch.Size([6]))]
            >>> (TensorDict.from_buffers(header, buffers) == td).all()
            True
        """
        from kd_core._wire.form import form_of

        header, buffers = form_of(self)
        return header, buffers

    @classmethod
    def from_buffers(cls, header: bytes, buffers: Sequence[Tensor | Buffer]) -> Self:
        """Return the container that `to_buffers` described; its leaves are views of the buffers.

        Header and buffers may come from anywhere: nothing in them is run, and what does not fit is
        refused without further memory.

        Args:
            header: the header.
            buffers: the flat tensors in their order, or their bytes: as flat tensors of
                `torch.uint8`, on any device, or as objects that have a buffer, like `bytearray` and
                arrays of numpy. What is read-only, like `bytes`, is copied.

        Raises:
            FormatError: if the header is not valid, or does not fit the buffers, or names a class
                that is not registered with `kd_core.store`.
            InvalidArgument: if an argument has the wrong type.
            InvalidValue: if only some buffers of one device were moved.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> header, buffers = TensorDict({"a": torch.arange(2), "s": "word"}).to_buffers()
            >>> octets = [bytes(flat.numpy()) for flat in buffers]
            >>> TensorDict.from_buffers(header, octets)["a"]
            tensor([0, 1])
        """
        from kd_core._wire.form import container_of

        return cast("Self", container_of(header, buffers))
