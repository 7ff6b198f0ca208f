"""Running a sequence step by step on a container, and the note that a failing step leaves.

The steps get a working copy, so the caller's container changes only once all of them have run.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from torch import nn

from kd_core import NestedKey, TensorDictBase, is_tensor_collection
from kd_nn._dispatch import describe
from kd_nn._entries import entry, has_entry, read_optional, write_entries
from kd_nn._errors import input_missing
from kd_nn._key_spec import DISCARD, Keys, is_covered, parse_keys
from kd_nn._notes import add_step_note
from kd_nn._program import is_watched, runs_on_values
from kd_nn._step_list import StepList


def members_of(tensordict: TensorDictBase) -> Sequence[TensorDictBase] | None:
    """Return the members of a stack, which may have different keys; None for other containers."""
    if not hasattr(tensordict, "stack_dim"):
        return None
    stack = cast("_Stack", tensordict)
    return stack.unbind(stack.stack_dim)


class _Stack(Protocol):
    stack_dim: int

    def unbind(self, dim: int) -> Sequence[TensorDictBase]: ...


def run_steps(
    sequence: StepList,
    tensordict: TensorDictBase,
    target: TensorDictBase,
    live: Mapping[int, Keys],
    outputs: Keys,
) -> TensorDictBase:
    """Call the steps one by one on a working copy, then write the outputs.

    Args:
        sequence: The sequence to run.
        tensordict: The container to read; it is not changed unless it is `target`.
        target: The container to write.
        live: The steps to run, and which of their keys are needed; see `KeyGraph.live_writes`.
        outputs: The keys to write.

    Returns:
        `target`; or, where a step replaced the container by another one, that one.
    """
    work = tensordict.copy()
    replaced = False
    for idx, (name, step) in enumerate(sequence.named_steps()):
        if idx not in live or _lacks_inputs(sequence, step, work):
            continue
        try:
            result = _run_step(step, work, live[idx])
        except Exception as error:
            reads = parse_keys(list(step.in_keys), "in_keys")  # type: ignore[arg-type]
            add_step_note(error, (str(idx), name), step, zip_present(work, reads))
            raise
        work, swapped = _merge(step, work, result)
        replaced = replaced or swapped
    if replaced:
        return work
    _commit(sequence, work, target, tensordict, outputs)
    return target


def zip_present(tensordict: TensorDictBase, keys: Sequence[NestedKey]) -> dict[NestedKey, object]:
    """Return the entries at those of the keys that are there."""
    return dict(zip(keys, read_optional(tensordict, keys, None), strict=True))


def _lacks_inputs(sequence: StepList, step: nn.Module, work: TensorDictBase) -> bool:
    if not sequence.__dict__.get("partial_tolerant"):
        return False
    return not all(has_entry(work, key) for key in parse_keys(list(step.in_keys), "in_keys"))  # type: ignore[arg-type]


def _run_step(step: nn.Module, work: TensorDictBase, live: Keys) -> object:
    if isinstance(step, StepList) and runs_on_values(step) and not is_watched(step):
        return run_steps(step, work, work, step.key_graph().live_writes(live), live)
    return step(work)


def _merge(step: nn.Module, work: TensorDictBase, result: object) -> tuple[TensorDictBase, bool]:
    """Return the container to go on with, and whether it is not the working copy any more."""
    if result is work or result is None:
        return work, False
    keys = parse_keys(list(step.out_keys), "out_keys")  # type: ignore[arg-type]
    visible = [key for key in keys if key != DISCARD]
    if not is_tensor_collection(result):
        raise TypeError(
            f"{describe(step)} returned {type(result).__name__} for a container. "
            "A keyed module returns a container."
        )
    swaps = getattr(step, "replaces_container", False) is True or not visible
    if not swaps and all(has_entry(result, key) for key in visible):
        write_entries(work, visible, [entry(result, key) for key in visible])
        return work, False
    return result, True


def _commit(
    sequence: StepList,
    work: TensorDictBase,
    target: TensorDictBase,
    source: TensorDictBase,
    outputs: Keys,
) -> None:
    keys = [key for key in outputs if has_entry(work, key)]
    if target is source and sequence.__dict__.get("_selected") is None:
        keys += [key for key in _undeclared(work, source) if not is_covered(key, keys)]
    elif len(keys) < len(outputs) and not sequence.__dict__.get("partial_tolerant"):
        missing = next(key for key in outputs if key not in keys)
        raise input_missing(missing, describe(sequence), list(work.keys(True)))
    write_entries(target, keys, [entry(work, key) for key in keys])


def _undeclared(work: TensorDictBase, source: TensorDictBase) -> list[NestedKey]:
    """Return the entries that steps wrote although they do not declare them."""
    before = dict(source.items(True, True))
    return [key for key, value in work.items(True, True) if before.get(key) is not value]
