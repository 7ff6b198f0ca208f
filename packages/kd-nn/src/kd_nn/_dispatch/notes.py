"""The note that is added to the exception of a failing module: its keys, shapes and dtypes."""

from collections.abc import Mapping

from torch import Tensor, nn

from kd_core import KdError, NestedKey, TensorDictBase, format_key
from kd_nn._dispatch.dispatch import describe, keys_of
from kd_nn._errors import list_keys


def add_step_note(
    error: BaseException,
    place: tuple[str, str],
    step: nn.Module,
    inputs: Mapping[NestedKey, object],
) -> None:
    """Add to an exception which step raised it, its keys, and shape and dtype of what it was given.

    Args:
        error: What the step raised.
        place: Index and name of the step.
        step: The keyed module.
        inputs: The values it was given, by key.
    """
    index, name = place
    named = "" if name == index else f" `{name}`"
    note = _note_of(step, inputs)
    notes = getattr(error, "__notes__", None)
    if notes and notes[-1] == note:  # the step has added it
        notes.pop()
    error.add_note(f"In step {index}{named}, {note}")


def add_call_note(
    error: BaseException, module: nn.Module, inputs: Mapping[NestedKey, object]
) -> None:
    """Add to an exception of torch, or of a user's function, which module raised it, as above."""
    if not isinstance(error, KdError):  # whose messages name the module
        error.add_note(_note_of(module, inputs))


def _note_of(module: nn.Module, inputs: Mapping[NestedKey, object]) -> str:
    given = ", ".join(f"{format_key(key)} {_shape(value)}" for key, value in inputs.items())
    writes = keys_of(module, "out_keys")
    reads = f"reads {given}; " if given else ""
    return f"{describe(module)}: {reads}writes {list_keys(writes)}."


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, TensorDictBase):
        return f"{type(value).__name__} {tuple(value.batch_size)}"
    return "missing" if value is None else type(value).__name__
