"""`TensorDictParams` in files: which tensors are parameters, and which of these are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

from torch import Tensor, nn

from kd_core import FormatError
from kd_core.extending import StoredClass, add_class
from kd_nn._functional.params import TensorDictParams

if TYPE_CHECKING:
    from kd_core.extending import Descriptor, Entry

_FIELDS: Final = ["no_convert", "parameters", "frozen"]


def state_of(params: TensorDictParams) -> dict[str, object]:
    """Return what a file keeps of one level beside its entries."""
    named = params._parameters
    frozen = [key for key, leaf in named.items() if leaf is not None and not leaf.requires_grad]
    return dict(zip(_FIELDS, (params.no_convert, list(named), frozen), strict=True))


def build(entries: dict[str, Entry], desc: Descriptor, state: object) -> TensorDictParams:
    """Build one level from what a file holds.

    Raises:
        FormatError: if the state is not that of these entries.
    """
    match state:
        case {"no_convert": bool(no_convert), "parameters": list(named), "frozen": list(frozen)}:
            made = TensorDictParams(no_convert=no_convert)
        case _:
            _refuse(state)
    leaves = {key for key, value in entries.items() if isinstance(value, Tensor)}
    if not set(frozen) <= set(named) <= leaves:
        _refuse(state)
    for key, value in entries.items():
        if key in named and isinstance(value, Tensor):
            made._parameters[key] = nn.Parameter(value, requires_grad=key not in frozen)
        elif isinstance(value, Tensor):
            made._buffers[key] = value
        else:
            made._set_entry(key, value)
    made._describe(desc)
    return made


def _refuse(state: object) -> NoReturn:
    listed = ", ".join(f"`{name}`" for name in _FIELDS)
    raise FormatError(
        f"{str(state)[:80]!r} is not the state of a `TensorDictParams` with the entries that the "
        f"file gives it: expected a dict with {listed}. Restore the file from a copy."
    )


add_class(StoredClass("kd_nn.TensorDictParams", 1, TensorDictParams, build, state_of))
