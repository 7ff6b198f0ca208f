"""Switches that programs written for tensordict set: most say what kd does anyway.

A switch that asks for another behaviour gives it where no data is lost, and raises an error
elsewhere.
"""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import TYPE_CHECKING

from kd_core._errors import InvalidArgument

if TYPE_CHECKING:
    from types import TracebackType


class _Modes:
    """What is switched on.

    Attributes:
        list_to_stack: whether a list in a batch is one value per row.
    """

    list_to_stack = True


class _Switch(ContextDecorator):
    """A setting for a `with` block, a decorated function, or from now on (`set`)."""

    def __init__(self, mode: bool = True) -> None:
        self.mode = bool(mode)

    def set(self) -> None:
        """Make the setting from now on."""
        self._check()

    def clone(self) -> _Switch:
        """Return an equal setting."""
        return type(self)(self.mode)

    def _check(self) -> None:
        """Raise an error for what kd does not do."""

    def __enter__(self) -> None:
        self.set()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the setting before."""


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

    def __init__(self, mode: bool = True) -> None:
        super().__init__(mode)
        self._before: list[bool] = []

    def set(self) -> None:
        """Make the setting from now on."""
        _Modes.list_to_stack = self.mode

    def __enter__(self) -> None:
        self._before.append(_Modes.list_to_stack)
        self.set()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the setting before."""
        _Modes.list_to_stack = self._before.pop()


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
    """Accept that equal values of rows stay one per row when they are stacked: `False`.

    Args:
        mode: whether they become one value for all rows: not offered, as rows would collapse.

    Raises:
        InvalidArgument: if it is set to `True`.

    Example:
        >>> from kd_core import set_capture_non_tensor_stack
        >>> set_capture_non_tensor_stack(False).set()
    """

    __module__ = "kd_core"

    def _check(self) -> None:
        if self.mode:
            raise InvalidArgument(
                "`set_capture_non_tensor_stack` must be `False`, got `True`: equal values of rows "
                "would collapse into one. Store `MetaData(value)` for one value of all rows."
            )


def capture_non_tensor_stack(allow_none: bool = False) -> bool:
    """Return whether equal values of rows become one value when they are stacked: no.

    Args:
        allow_none: of no effect: there always is a setting.

    Example:
        >>> from kd_core import capture_non_tensor_stack
        >>> capture_non_tensor_stack()
        False
    """
    return False


class set_lazy_legacy(_Switch):  # noqa: N801  # as above
    """Accept that shape operations return containers of views at once: `False`.

    Args:
        mode: whether they return objects that compute when they are read: not offered.

    Raises:
        InvalidArgument: if it is set to `True`.

    Example:
        >>> from kd_core import set_lazy_legacy
        >>> set_lazy_legacy(False).set()
    """

    __module__ = "kd_core"

    def _check(self) -> None:
        if self.mode:
            raise InvalidArgument(
                "`set_lazy_legacy` must be `False`, got `True`: shape operations return containers "
                "of views, and `lazy_stack` stacks lazily. Remove the call."
            )


def lazy_legacy(allow_none: bool = False) -> bool:
    """Return whether shape operations return objects that compute when they are read: no.

    Args:
        allow_none: of no effect: there always is a setting.

    Example:
        >>> from kd_core import lazy_legacy
        >>> lazy_legacy()
        False
    """
    return False


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
