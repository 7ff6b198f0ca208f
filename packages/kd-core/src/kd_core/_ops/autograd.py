"""Gradients: `detach`, `requires_grad_`, `grad` and `zero_grad`."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kd_core._errors import InvalidValue
from kd_core._nodes import registry
from kd_core._nodes.entry import tensor_of
from kd_core._protocol import AbstractContainer, Composite, leaves_of, locked_as, name_in
from kd_core._torch_private import is_view

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from kd_core._nodes.entry import Entry, Node


class Autograd(AbstractContainer):
    """The methods for gradients of leaves.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"w": torch.ones(2), "b": torch.ones(1)}).requires_grad_()
        >>> (td * 3).sum(reduce=True).backward()
        >>> td.grad["w"], td.detach().requires_grad
        (tensor([3., 3.]), False)
        >>> td.zero_grad().grad is None
        True
    """

    __slots__ = ()

    @property
    def requires_grad(self) -> bool:
        """Whether any leaf requires gradients."""
        return any(leaf.requires_grad for leaf in leaves_of(self))

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set whether every leaf requires gradients; return self.

        Raises:
            InvalidValue: if a leaf cannot have gradients; then nothing is changed.
        """
        leaves = leaves_of(self)
        for leaf in leaves:
            if requires_grad and not (leaf.is_floating_point() or leaf.is_complex()):
                raise InvalidValue(
                    f"{name_in(self, leaf)} must have a floating point or complex dtype to require "
                    f"gradients, got {leaf.dtype}. `exclude` it first, or cast it."
                )
            if requires_grad and leaf.is_inference() and not torch.is_inference_mode_enabled():
                raise InvalidValue(
                    f"{name_in(self, leaf)} must not be an inference tensor to require gradients. "
                    "`clone` the container first."
                )
            if not requires_grad and not leaf.is_leaf:
                raise InvalidValue(
                    f"{name_in(self, leaf)} must be a leaf of the graph to stop requiring "
                    "gradients, got the result of an operation. Use `detach()`."
                )
        for leaf in leaves:
            leaf.requires_grad_(requires_grad)
        return self

    def backward(
        self,
        gradient: AbstractContainer | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: AbstractContainer | Sequence[Tensor] | None = None,
    ) -> None:
        """Compute the gradients of the graph behind all leaves that require them.

        Args:
            gradient: a container of the same keys, the gradient of each leaf; `None`: each leaf
                must be one number.
            retain_graph: keep the graph; `None`: as `create_graph`.
            create_graph: record the computation of the gradients.
            inputs: the leaves of the graph whose gradients are wanted; `None`: all.

        Raises:
            InvalidValue: if no leaf requires gradients, or one is not one number.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.ones(2)}, [2]).requires_grad_()
            >>> (td * 3).sum().backward()
            >>> td.grad["a"]
            tensor([3., 3.])
        """
        mine = leaves_of(self)
        given: list[Tensor] | None = None
        if gradient is not None:
            mine, given = [], []
            self._kd_collect_pair(gradient, mine, given, ())
        roots = [leaf for leaf in mine if leaf.requires_grad]
        if not roots:
            raise InvalidValue(
                "`backward` expected a leaf that requires gradients, got none. Call "
                "`requires_grad_()` before the computation."
            )
        if given is None:
            for leaf in roots:
                if leaf.numel() != 1:
                    raise InvalidValue(
                        f"{name_in(self, leaf)} must be one number, got shape "
                        f"{tuple(leaf.shape)}. Pass `gradient`, or reduce it with `sum()`."
                    )
        else:
            given = [each for leaf, each in zip(mine, given, strict=True) if leaf.requires_grad]
        wanted = leaves_of(inputs) if isinstance(inputs, AbstractContainer) else inputs
        torch.autograd.backward(roots, given, retain_graph, create_graph, inputs=wanted)

    def detach(self) -> Self:
        """Return the container with all leaves detached from the graph; storage is shared."""
        return locked_as(self, self._kd_map_each(Tensor.detach))

    def detach_(self) -> Self:
        """Detach all leaves from the graph, in place; return self.

        Raises:
            InvalidValue: if a leaf is a view of another tensor; then nothing is changed.
        """
        leaves = leaves_of(self)
        for leaf in leaves:
            if is_view(leaf):
                raise InvalidValue(
                    f"{name_in(self, leaf)} must not be a view of another tensor to be detached in "
                    "place. Use `detach()`."
                )
        for leaf in leaves:
            leaf.detach_()
        return self

    @property
    def data(self) -> Self:
        """The container of the data of all leaves: detached from the graph, storage shared."""
        return locked_as(self, self._kd_map_each(lambda leaf: leaf.data))

    @property
    def grad(self) -> Self | None:
        """The container of the gradients; `None` if no leaf has one, as for a tensor.

        A leaf without a gradient is left out; data that is not a tensor is kept, and is reason
        enough for a container.
        """
        gradients = _gradients(self)
        return cast("Self", gradients) if gradients._kd_entries else None

    def zero_grad(self, set_to_none: bool = True) -> Self:
        """Set the gradients of all leaves to `None` or zero; return self.

        Args:
            set_to_none: set gradients to `None`; else write zeros into them.
        """
        for leaf in leaves_of(self):
            if leaf.grad is None:
                continue
            if set_to_none:
                leaf.grad = None
            else:
                with torch.no_grad():  # as `torch.nn.Module.zero_grad` does
                    leaf.grad.requires_grad_(False) if leaf.grad.is_leaf else leaf.grad.detach_()
                    leaf.grad.zero_()
        return self


def _same(leaf: Tensor) -> Tensor:
    return leaf


def _gradients(td: AbstractContainer) -> AbstractContainer:
    if isinstance(td, Composite):
        return td._by_member(_gradients)
    entries: dict[str, Entry] = {}
    for key, value in td._kd_entries.items():
        if isinstance(value, AbstractContainer):
            inner = _gradients(value)
            if inner._kd_entries:
                entries[key] = inner
            continue
        leaf = tensor_of(value)
        if leaf is None:
            entries[key] = cast("Node", value)._kd_map_each(_same)
            continue
        grad = leaf.grad
        if grad is not None:
            entries[key] = grad if leaf is value else registry.wrap_tensor(grad, td._kd_desc)
    return td._kd_like(entries, td._kd_desc.unlocked())
