"""Exchange of containers between the processes of a group of `torch.distributed`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, cast, overload

from kd_core._protocol import AbstractContainer

if TYPE_CHECKING:
    from typing import Self

    from torch.distributed import ProcessGroup

    from kd_core._distributed.collectives import Op
    from kd_core._distributed.groups import Handle
    from kd_core._types import DeviceLike

    class Pipe(Protocol):
        """What sends and receives containers in an event loop."""

        async def asend(self, td: AbstractContainer) -> None:
            """Send a container."""

        async def arecv(self) -> AbstractContainer:
            """Return the container that was sent."""


class Processes(AbstractContainer):
    """Exchange with other processes."""

    __slots__ = ()

    def broadcast(
        self, src: int, *, group: ProcessGroup | None = None, device: DeviceLike | None = None
    ) -> Self:
        """Write the values of the container of one rank into those of all ranks.

        A container without entries takes the batch size and the entries of `src`. All others must
        have its keys, dtypes and shapes, which is checked on all ranks before data moves. Tensors
        and values of rows are written in place; a value for the whole batch replaces another.

        Args:
            src: the rank in the default group whose values are taken.
            group: the process group; `None`: the default group.
            device: where entries are put that the container takes.

        Returns:
            The container.

        Raises:
            KeySetMismatch: on all ranks, if the keys differ between them.
            ShapeMismatch: on all ranks, if shapes differ.
            InvalidValue: on all ranks, if dtypes differ or a leaf cannot be written to.
            Locked: if a value for the whole batch would be replaced in a locked container.
            CommunicationError: if another rank ended, or did not answer in time; no container has
                been written to on this rank.

        Example:
            >>> import torch
            >>> import torch.distributed as dist
            >>> from kd_core import TensorDict
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> TensorDict({"a": torch.ones(2)}).broadcast(src=0)["a"]
            tensor([1., 1.])
            >>> dist.destroy_process_group()
        """
        from kd_core._distributed.collectives import broadcast

        return broadcast(self, src, group, device)

    def all_reduce(
        self,
        op: Op | None = None,
        *,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        bucket_bytes: int | None = None,
    ) -> Handle | None:
        """Replace each value by the sum, or another reduction, over all ranks, in place.

        All leaves of one dtype are one message. Data that is not a tensor stays as it is on each
        rank. Allowed on a locked container.

        Args:
            op: `"sum"`, `"mean"`, `"max"`, `"min"` or `"product"`, or the operation of
                `torch.distributed.ReduceOp`; `None`: the sum.
            group: the process group; `None`: the default group.
            async_op: return a handle once the ranks have agreed; `wait` writes the values.
            bucket_bytes: the most bytes of one message; `None`: no limit.

        Raises:
            KeySetMismatch: on all ranks, if the keys differ between them.
            ShapeMismatch: on all ranks, if shapes differ.
            InvalidValue: on all ranks, if dtypes differ, or cannot be reduced.
            CommunicationError: if another rank ended, or did not answer in time; nothing has been
                written then.

        Example:
            >>> import torch
            >>> import torch.distributed as dist
            >>> from kd_core import TensorDict
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> td = TensorDict({"grad": torch.ones(2)})
            >>> td.all_reduce("mean")
            >>> td["grad"]
            tensor([1., 1.])
            >>> dist.destroy_process_group()
        """
        from kd_core._distributed.collectives import all_reduce

        return all_reduce(self, op, group, async_op, bucket_bytes)

    def reduce(
        self,
        dst: int,
        op: Op | None = None,
        async_op: bool = False,
        return_premature: bool = False,
        group: ProcessGroup | None = None,
        *,
        bucket_bytes: int | None = None,
    ) -> Handle | list[Handle] | None:
        """Replace each value on one rank by a reduction over all ranks; see `all_reduce`.

        The containers of other ranks stay as they are.

        Args:
            dst: the rank in the default group whose container is written to.
            op: the reduction.
            async_op: return a handle.
            return_premature: return it in a list.
            group: the process group; `None`: the default group.
            bucket_bytes: the most bytes of one message.

        Example:
            >>> import torch
            >>> import torch.distributed as dist
            >>> from kd_core import TensorDict
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> TensorDict({"loss": torch.ones(())}).reduce(dst=0)
            >>> dist.destroy_process_group()
        """
        from kd_core._distributed.collectives import reduce

        handle = reduce(self, dst, op, group, async_op, bucket_bytes)
        return [handle] if return_premature and handle is not None else handle

    def all_gather(self, *, group: ProcessGroup | None = None) -> list[Self]:
        """Return the containers of all ranks, in the order of ranks, on each rank.

        Ranks may have different numbers of rows in the first batch dimension; ragged entries and
        data that is not a tensor are kept.

        Raises:
            KeySetMismatch: on all ranks, if the keys differ between them.
            ShapeMismatch: on all ranks, if shapes differ beside the number of rows.
            InvalidValue: on all ranks, if dtypes differ, or an entry cannot be sent.
            CommunicationError: if another rank ended, or did not answer in time.

        Example:
            >>> import torch
            >>> import torch.distributed as dist
            >>> from kd_core import TensorDict
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> rows = TensorDict({"a": torch.arange(2), "word": ["x", "y"]}, [2]).all_gather()
            >>> torch.cat(rows)["word"]
            ['x', 'y']
            >>> dist.destroy_process_group()
        """
        from kd_core._distributed.collectives import all_gather

        return all_gather(self, group)

    def gather_and_stack(self, dst: int, group: ProcessGroup | None = None) -> Self | None:
        """Write the containers of all other ranks into the rows of that of one rank.

        On `dst`, the first batch dimension has a row for each other rank, in the order of ranks.

        Returns:
            The container on `dst`, `None` on other ranks.

        Raises:
            InvalidValue: on all ranks, if the batch size on `dst` does not fit.
            KeySetMismatch: on all ranks, if keys differ from those of a row on `dst`.
            ShapeMismatch: on all ranks, if shapes differ.
            CommunicationError: if another rank ended, or did not answer in time.

        Example:
            >>> from kd_core import TensorDict
            >>> def collect(td: TensorDict, rank: int, ranks: int) -> TensorDict | None:
            ...     rows = td.new_zeros(ranks - 1, *td.batch_size) if rank == 0 else td
            ...     return rows.gather_and_stack(dst=0)
        """
        from kd_core._distributed.collectives import gather_and_stack

        return gather_and_stack(self, dst, group)

    def send(
        self,
        dst: int | None = None,
        *,
        group: ProcessGroup | None = None,
        group_dst: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
    ) -> None:
        """Send the container to a rank, which calls `recv` or `from_remote_init`.

        Args:
            dst: the rank in the default group.
            group: the process group; `None`: the default group.
            group_dst: the rank in `group`, instead of `dst`.
            init_tag: the tag of all messages.
            pseudo_rand: accepted; the messages of a container keep their order.
            consolidated: accepted; all leaves of a dtype are one message anyway.

        Raises:
            InvalidArgument: if the type of an entry cannot be sent.
            InvalidValue: if the value of an entry cannot be sent, or the rank is not another one.
            CommunicationError: if the other rank ended, or did not answer in time.

        Example:
            >>> from kd_core import TensorDict
            >>> def pass_on(td: TensorDict, rank: int) -> None:
            ...     if rank == 0:
            ...         td.send(dst=1)
            ...     else:
            ...         td.recv(src=0)
        """
        from kd_core._distributed.collectives import isend

        isend(self, dst, group, group_dst, init_tag, "send").wait()

    @overload
    def isend(
        self,
        dst: int | None = None,
        *,
        group: ProcessGroup | None = None,
        group_dst: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        return_early: Literal[False] = False,
        consolidated: bool = False,
    ) -> Handle: ...
    @overload
    def isend(
        self,
        dst: int | None = None,
        *,
        group: ProcessGroup | None = None,
        group_dst: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        return_early: Literal[True],
        consolidated: bool = False,
    ) -> list[Handle]: ...
    def isend(
        self,
        dst: int | None = None,
        *,
        group: ProcessGroup | None = None,
        group_dst: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        return_early: bool = False,
        consolidated: bool = False,
    ) -> Handle | list[Handle]:
        """Start to send the container to a rank; arguments as those of `send`.

        Returns:
            A handle; the leaves must not be written to before its `wait` returned. With
            `return_early` a list of it.

        Example:
            >>> from kd_core import TensorDict
            >>> def send_and_work(td: TensorDict) -> None:
            ...     handle = td.isend(dst=1)
            ...     ...  # what does not write to td
            ...     handle.wait()
        """
        from kd_core._distributed.collectives import isend

        handle = isend(self, dst, group, group_dst, init_tag)
        return [handle] if return_early else handle

    async def asend(self, dst: Pipe) -> None:
        """Send the container through a pipe of another library, without waiting for it.

        Args:
            dst: an object with a coroutine `asend` that takes a container.
        """
        await dst.asend(self)

    async def arecv(self, src: Pipe, *, device: DeviceLike | None = None) -> AbstractContainer:
        """Return the container that comes through a pipe of another library.

        Args:
            src: an object with a coroutine `arecv` that returns a container.
            device: where its tensors are moved; `None`: they stay where they are.
        """
        received = await src.arecv()
        return received if device is None else received._kd_engine.to(received, device)

    def recv(
        self,
        src: int | None = None,
        *,
        group: ProcessGroup | None = None,
        group_src: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
    ) -> None:
        """Write the values of a container that another rank sends into this one.

        Args:
            src: the rank in the default group.
            group: the process group; `None`: the default group.
            group_src: the rank in `group`, instead of `src`.
            init_tag: the tag of all messages.
            pseudo_rand: accepted; the messages of a container keep their order.
            consolidated: accepted; all leaves of a dtype are one message anyway.

        Raises:
            KeySetMismatch: if the keys differ from those that were sent; nothing is written.
            ShapeMismatch: if shapes do.
            InvalidValue: if dtypes do, or a leaf cannot be written to.
            CommunicationError: if the other rank ended, or did not answer in time.

        Example:
            >>> from kd_core import TensorDict
            >>> def pass_on(td: TensorDict, rank: int) -> None:
            ...     if rank == 0:
            ...         td.send(dst=1)
            ...     else:
            ...         td.recv(src=0)
        """
        from kd_core._distributed.collectives import irecv

        irecv(self, src, group, group_src, init_tag, "recv").wait()

    @overload
    def irecv(
        self,
        src: int | None = None,
        *,
        group: ProcessGroup | None = None,
        group_src: int | None = None,
        return_premature: Literal[False] = False,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
    ) -> None: ...
    @overload
    def irecv(
        self,
        src: int | None = None,
        *,
        group: ProcessGroup | None = None,
        group_src: int | None = None,
        return_premature: Literal[True],
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
    ) -> list[Handle]: ...
    def irecv(
        self,
        src: int | None = None,
        *,
        group: ProcessGroup | None = None,
        group_src: int | None = None,
        return_premature: bool = False,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
    ) -> list[Handle] | None:
        """Receive the values of a container, or start to; arguments as those of `recv`.

        Args:
            return_premature: start to receive, and return.

        Returns:
            With `return_premature` a list of a handle, whose `wait` receives the rest and writes
            the values. Wait for several ones of one rank and tag in the order in which they were
            begun.

        Example:
            >>> from kd_core import TensorDict
            >>> def receive_and_work(td: TensorDict) -> None:
            ...     handles = td.irecv(src=0, return_premature=True)
            ...     ...  # what does not read td
            ...     for handle in handles:
            ...         handle.wait()
        """
        from kd_core._distributed.collectives import irecv

        handle = irecv(self, src, group, group_src, init_tag)
        if return_premature:
            return [handle]
        handle.wait()
        return None

    def init_remote(
        self,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        device: DeviceLike | None = None,
        use_broadcast: bool = False,
    ) -> None:
        """Send the container to a rank that does not have it yet, or to all ranks.

        The other side calls `from_remote_init` with the same `use_broadcast`.

        Args:
            dst: the rank in the default group; `None` with `use_broadcast`.
            group: the process group; `None`: the default group.
            device: the device from which it is sent; `None`: where it is.
            use_broadcast: send it to all ranks of the group.

        Raises:
            InvalidArgument: if neither or both of `dst` and `use_broadcast` are given.
            CommunicationError: if another rank ended, or did not answer in time.

        Example:
            >>> from kd_core import TensorDict
            >>> def share(rank: int) -> TensorDict:
            ...     if rank:
            ...         return TensorDict.from_remote_init(src=0, use_broadcast=True)
            ...     td = TensorDict({"a": 1.0})
            ...     td.init_remote(use_broadcast=True)
            ...     return td
        """
        from kd_core._distributed.collectives import init_remote
        from kd_core._distributed.groups import moved_to

        init_remote(moved_to(self, device), dst, group, use_broadcast)

    @classmethod
    def from_remote_init(
        cls,
        src: int,
        group: ProcessGroup | None = None,
        device: DeviceLike | None = None,
        use_broadcast: bool = False,
    ) -> Self:
        """Return a new container that another rank sends with `init_remote` or `send`.

        Args:
            src: the rank in the default group.
            group: the process group; `None`: the default group.
            device: where its entries are put; `None`: the type of device that `src` has them on.
            use_broadcast: as on the other side.

        Raises:
            FormatError: if a class is not registered with `kd_core.store` on this rank.
            CommunicationError: if another rank ended, or did not answer in time.

        Example:
            >>> from kd_core import TensorDict
            >>> def share(td: TensorDict | None, rank: int) -> TensorDict:
            ...     if td is None:
            ...         return TensorDict.from_remote_init(src=0)
            ...     td.init_remote(dst=1)
            ...     return td
        """
        from kd_core._distributed.collectives import from_remote_init

        return cast("Self", from_remote_init(src, group, device, use_broadcast))
