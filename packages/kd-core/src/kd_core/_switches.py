"""Switches that programs written for tensordict set: most say what kd does anyway.

A switch that asks for another behaviour gives it where no data is lost, and raises an error
elsewhere.
"""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import TYPE_CHECKING, ClassVar

from kd_core._errors import InvalidArgument

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self


class _Modes:
    """What is switched on.

    Attributes:
        list_to_stack: whether a list in a batch is one value per row.
        capture_non_tensor_stack: whether equal values of rows become one when they are stacked.
        lazy_legacy: whether `stack` returns a lazy stack.
        files_of_tensordict: whether directories are written as tensordict writes them, where its
            layout can hold the content; the drop-in asks for it.
    """

    list_to_stack = True
    capture_non_tensor_stack = False
    lazy_legacy = False
    files_of_tensordict = False


class _Switch(ContextDecorator):
    """A setting for a `with` block, a decorated function, or from now on (`set`)."""

    _name: ClassVar[str]
    """The attribute of `_Modes`."""

    def __init__(self, mode: bool = True) -> None:
        self.mode = bool(mode)
        self._before: list[bool] = []

    def set(self) -> None:
        """Make the setting from now on."""
        setattr(_Modes, self._name, self.mode)

    def clone(self) -> Self:
        """Return an equal setting."""
        return type(self)(self.mode)

    def __enter__(self) -> None:
        self._before.append(getattr(_Modes, self._name))
        self.set()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the setting before."""
        setattr(_Modes, self._name, self._before.pop())


def set_files_of_tensordict(mode: bool) -> None:
    """Set whether directories are written as tensordict writes them, so that it reads them."""
    _Modes.files_of_tensordict = mode


def files_of_tensordict() -> bool:
    """Return whether directories are written as tensordict writes them."""
    return _Modes.files_of_tensordict


class set_list_to_stack(_Switch):  # noqa: N801  # its name is used as that of a function
    """Set whether a list that is stored in a batch is one value per row: `True`, as it is in kd.

    With `False` such a list is one value for all rows: an array of numpy.

    Args:
        mode: whether it is one value per row.

    Example:
        >>> from kd_core import TensorDict, set_list_to_stack
        >>> with set_list_to_stack(False):
        ...     td = TensorDict({"words": ["to", "be"]}, [2])
        >>> td[0]["words"].tolist()
        ['to', 'be']
    """

    __module__ = "kd_core"

    _name = "list_to_stack"


def list_to_stack(allow_none: bool = False) -> bool:
    """Return whether a list that is stored in a batch is one value per row.

    Args:
        allow_none: of no effect: there always is a setting.

    Example:
        >>> from kd_core import list_to_stack
        >>> list_to_stack()
        True
    """
    return _Modes.list_to_stack


class set_capture_non_tensor_stack(_Switch):  # noqa: N801  # as above
    """Set whether equal values of rows become one value when they are stacked: `False`, as in kd.

    With `True` they do, as those of `MetaData` do in either case, and one value that gets more
    dimensions stays one.

    Args:
        mode: whether they do.

    Example:
        >>> from kd_core import TensorDict, set_capture_non_tensor_stack, stack
        >>> with set_capture_non_tensor_stack(True):
        ...     td = stack([TensorDict({"word": "reach"}), TensorDict({"word": "reach"})])
        >>> td["word"]
        'reach'
    """

    __module__ = "kd_core"
    _name = "capture_non_tensor_stack"


def capture_non_tensor_stack(allow_none: bool = False) -> bool:
    """Return whether equal values of rows become one value when they are stacked.

    Args:
        allow_none: of no effect: there always is a setting.

    Example:
        >>> from kd_core import capture_non_tensor_stack
        >>> capture_non_tensor_stack()
        False
    """
    return _Modes.capture_non_tensor_stack


class set_lazy_legacy(_Switch):  # noqa: N801  # as above
    """Set whether `stack` and `torch.stack` return lazy stacks: `False`, as it is in kd.

    Shape operations return containers of views in either case.

    Args:
        mode: whether they do.

    Example:
        >>> from kd_core import TensorDict, set_lazy_legacy, stack
        >>> with set_lazy_legacy(True):
        ...     stacked = stack([TensorDict({"a": 1}), TensorDict({"a": 2})])
        >>> type(stacked).__name__
        'LazyStackedTensorDict'
    """

    __module__ = "kd_core"
    _name = "lazy_legacy"


def lazy_legacy(allow_none: bool = False) -> bool:
    """Return whether `stack` and `torch.stack` return lazy stacks.

    Args:
        allow_none: of no effect: there always is a setting.

    Example:
        >>> from kd_core import lazy_legacy
        >>> lazy_legacy()
        False
    """
    return _Modes.lazy_legacy


def set_get_defaults_to_none(set_to_none: bool = True) -> None:
    """Accept that `get` returns `None` for a missing key: `True`.

    Args:
        set_to_none: whether it does; `False` is not offered.

    Raises:
        InvalidArgument: if it is `False`.

    Example:
        >>> from kd_core import set_get_defaults_to_none
        >>> set_get_defaults_to_none(True)
    """
    if not set_to_none:
        raise InvalidArgument(
            "`set_get_defaults_to_none` must be `True`, got `False`: `get` returns `None` for a "
            "missing key. Write `td[key]` where a missing key is an error."
        )


def get_defaults_to_none(set_to_none: bool = True) -> bool:
    """Return whether `get` returns `None` for a missing key: yes.

    Args:
        set_to_none: of no effect: there always is a setting.

    Example:
        >>> from kd_core import get_defaults_to_none
        >>> get_defaults_to_none()
        True
    """
    return True
