"""Running a sequence step by step on a container, and the note that a failing step leaves.

The steps get a working copy, so the caller's container changes only once all of them have run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeGuard, cast

from torch import Tensor, nn

from kd_core import (
    InvalidArgument,
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    TensorDictBase,
    format_key,
    lazy_stack,
)
from kd_nn._dispatch import (
    MISSING,
    Dispatched,
    add_step_note,
    anyone_skips,
    container_of,
    describe,
    has_entry,
    keys_of,
    read_optional,
    write_entries,
)
from kd_nn._errors import InputMissing, not_a_container, not_written
from kd_nn._keys.specs import DISCARD, Keys, is_covered
from kd_nn._modules.hooks import without_hidden
from kd_nn._modules.steps import StepList
from kd_nn._plan.program import Path, is_watched, keyed, opens

Pair: TypeAlias = tuple[TensorDictBase, TensorDictBase]
Made: TypeAlias = Mapping[Path, tuple[object, ...]]


def members_of(tensordict: TensorDictBase) -> Sequence[TensorDictBase] | None:
    """Return the members of a stack, which may have different keys; None for other containers."""
    if not isinstance(tensordict, LazyStackedTensorDict):
        return None
    return tensordict.unbind(tensordict.stack_dim)


def run_members(
    sequence: StepList,
    stack: LazyStackedTensorDict,
    tensordict_out: TensorDictBase | None,
    run: Callable[[TensorDictBase, TensorDictBase | None], TensorDictBase],
) -> TensorDictBase:
    """Run a sequence on each member of a lazy stack; nothing is written before all have run.

    Args:
        sequence: The sequence, which may skip other steps for each member.
        stack: The lazy stack.
        tensordict_out: A lazy stack of as many members, to be written instead.
        run: Runs the sequence on one container, into another if one is given.

    Returns:
        The stack that was written: the same, `tensordict_out`, or a new one.

    Raises:
        InvalidArgument: If `tensordict_out` has not as many members.
    """
    members = stack.unbind(stack.stack_dim)
    if tensordict_out is not None:
        targets = members_of(tensordict_out)
        if targets is None or len(targets) != len(members):
            raise InvalidArgument(
                f"{describe(sequence)} runs each of the {len(members)} members of the lazy stack, "
                "whose keys may differ: `tensordict_out` must be a lazy stack of as many, got "
                f"{type(tensordict_out).__name__} of batch size {tuple(tensordict_out.batch_size)}."
            )
        empty = [member.empty() for member in members]
        made = [run(m, out) for m, out in zip(members, empty, strict=True)]
        for target, result in zip(targets, made, strict=True):
            target.update(result)
        return tensordict_out
    if sequence.__dict__.get("inplace") not in (None, True):
        return lazy_stack([run(member, None) for member in members], stack.stack_dim)
    copies = [member.copy() for member in members]
    made = [run(each, None) for each in copies]
    if any(result is not each for result, each in zip(made, copies, strict=True)):
        return lazy_stack(made, stack.stack_dim)
    for member, each in zip(members, copies, strict=True):
        keys = changed_keys(each, member)
        write_entries(member, keys, _held(each, keys))
    return stack


def _add_order_note(
    error: BaseException, sequence: StepList, idx: int, missing: list[NestedKey]
) -> None:
    """Add to an exception which later step writes what a step lacks."""
    for later, (_, step) in enumerate(sequence._kd_named_steps()):
        found = [key for key in missing if later > idx and key in keys_of(step, "out_keys")]
        if found:
            error.add_note(f"Step {later} writes {format_key(found[0])}: put it before step {idx}.")


def run_steps(
    sequence: StepList,
    tensordict: TensorDictBase,
    target: TensorDictBase | None,
    outputs: Keys,
    made: Made | None = None,
    in_place: bool = False,
) -> TensorDictBase:
    """Call the steps one by one on a working copy, then write the outputs.

    Args:
        sequence: The sequence to run.
        tensordict: The container to read; it is not changed unless it is `target`.
        target: The container to write; None for an empty one like that of the last step.
        outputs: The keys to write.
        made: What steps have computed already, by their names and those of the sequences around
            them; they are not called again.
        in_place: Whether the container is the working copy of a sequence around this one, which
            gets all that the steps write.

    Returns:
        The container that was written; or, where `target` is the one to read and a step replaced
        it by another one, that one.
    """
    work = tensordict if in_place else tensordict.copy()
    scope = sequence._kd_scope()
    end, leave = (0, None) if scope is None else (scope[0], scope[1]())
    replaced, written = False, work
    try:
        for idx, (name, step) in enumerate(sequence._kd_named_steps()):
            if idx == end and leave is not None:
                leave()
                leave = None
            step = _step_of_now(sequence, name, step)
            inside = (
                None
                if made is None
                else {path[1:]: v for path, v in made.items() if path[0] == name}
            )
            if inside and () in inside:
                _write_made(step, work, inside[()])
                continue
            if not inside and sequence._kd_skips(step, work):
                continue
            try:
                if inside:
                    result: object = _run_sequence(cast("StepList", step), work, inside)
                else:
                    result = _run_step(step, work)
                before = work
                work, swapped = _merge(step, work, result)
                if swapped and not replaced:
                    written = before
            except Exception as error:
                keys = keys_of(step, "in_keys")
                given = dict(zip(keys, read_optional(work, keys), strict=True))
                add_step_note(error, (str(idx), name), step, given)
                if isinstance(error, InputMissing):
                    missing = [key for key, value in given.items() if value is None]
                    _add_order_note(error, sequence, idx, missing)
                raise
            replaced = replaced or swapped
    finally:
        if leave is not None:
            leave()
    if replaced and target is tensordict:
        result = without_hidden(sequence, work, tensordict)
        # What the steps before wrote into the input stays there.
        changed = changed_keys(written, tensordict)
        if not _writes_all(sequence):
            changed = [key for key in changed if is_covered(key, outputs)]
        if sequence.__dict__.get("inplace") is not True:
            write_entries(tensordict, changed, _held(written, changed))
            return result
        trial = tensordict.copy()  # both are written, or neither
        write_entries(trial, changed, _held(written, changed))
        outputs = tuple(key for key in outputs if has_entry(work, key))
        write_entries(trial, outputs, _held(work, outputs))
        changed = changed_keys(trial, tensordict)
        write_entries(target, changed, _held(trial, changed))
        return target
    if in_place and not replaced:
        return work
    if replaced:
        outputs = tuple(key for key in outputs if has_entry(work, key))
    target = work.empty() if target is None else target
    _commit(sequence, work, target, tensordict, outputs)
    return target


def _writes_all(sequence: StepList) -> bool:
    """Return whether all that the steps of a sequence write is visible."""
    return sequence.__dict__.get("_kd_selected") is None


def _step_of_now(sequence: StepList, name: str, step: nn.Module) -> nn.Module:
    """Return the step of a name, which an earlier step of this call may have replaced.

    Raises:
        InvalidArgument: If it was removed, or has other keys: what runs was decided before.
    """
    now = sequence._modules["module"]._modules.get(name)  # type: ignore[union-attr]  # it is there
    if now is step:
        return step
    names = ("in_keys", "out_keys")
    if now is None or any(keys_of(now, each) != keys_of(step, each) for each in names):
        raise InvalidArgument(
            f"step `{name}` of {describe(sequence)} was removed, or replaced by one with other "
            "keys, while the sequence ran. Change the steps between calls."
        )
    return now


def _write_made(step: nn.Module, work: TensorDictBase, values: Sequence[object]) -> None:
    """Write what a step has computed; what nobody reads any more is None."""
    keys = keyed(step).out_keys_source
    made = {k: v for k, v in zip(keys, values, strict=False) if v is not None and v is not MISSING}
    write_entries(work, list(made), list(made.values()))


def _run_step(step: nn.Module, work: TensorDictBase) -> object:
    recomputed = step._modules.get("_checkpoint_wrapped_module")
    if recomputed is not None:
        return _run_recomputed(step, recomputed, work)
    if isinstance(step, StepList) and opens(step) and not anyone_skips and not is_watched(step):
        return _run_sequence(step, work)
    return step(work)


def _run_sequence(step: StepList, work: TensorDictBase, made: Made | None = None) -> TensorDictBase:
    """Run the steps of a sequence inside on the working copy of the one around it."""
    return run_steps(step, work, work, keys_of(step, "out_keys"), made, _writes_all(step))


def _run_recomputed(step: nn.Module, wrapped: nn.Module, work: TensorDictBase) -> object:
    """Call a keyed module that torch's `checkpoint_wrapper` wraps.

    The wrapper calls it again in the backward pass, when the working copy holds what later steps
    wrote. It saves tensors, so it gets tensors where the module takes them.
    """
    keys = keys_of(step, "in_keys")
    values = read_optional(work, keys)
    takes_tensors = isinstance(getattr(type(wrapped), "forward", None), Dispatched)
    if not takes_tensors or not all(isinstance(value, Tensor) for value in values):
        return step(work.copy())
    result = step(*values)
    outputs = result if isinstance(result, tuple) else (result,)
    written = [key for key in keys_of(step, "out_keys") if key != DISCARD]
    made = dict(zip(written, outputs, strict=True))
    return container_of({key: value for key, value in made.items() if value is not None})


def _merge(step: nn.Module, work: TensorDictBase, result: object) -> tuple[TensorDictBase, bool]:
    """Return the container to go on with, and whether it is not the working copy any more."""
    if result is work or result is None:
        return work, False
    if not isinstance(result, TensorDictBase):
        raise not_a_container(describe(step), result)
    visible = [key for key in keys_of(step, "out_keys") if key != DISCARD]
    made = [key for key in visible if has_entry(result, key)]
    replaces = getattr(step, "_kd_replaces_container", None)
    if not isinstance(replaces, bool):
        replaces = not visible or made != visible
    if replaces:
        return result, True
    write_entries(work, made, _held(result, made))
    return work, False


def _commit(
    sequence: StepList,
    work: TensorDictBase,
    target: TensorDictBase,
    source: TensorDictBase,
    outputs: Keys,
) -> None:
    if target is source and _writes_all(sequence):
        changed = changed_keys(work, source)
        keys = [key for key in outputs if key in changed or has_entry(work, key)]
        keys += [key for key in changed if not is_covered(key, keys)]
        write_entries(target, keys, _held(work, keys))
        return
    keys = [key for key in outputs if has_entry(work, key)]
    if len(keys) < len(outputs) and not sequence._kd_may_skip:
        missing = next(key for key in outputs if key not in keys)
        raise not_written(missing, describe(sequence), list(work.keys(True)))
    write_entries(target, keys, _held(work, keys))


def changed_keys(work: TensorDictBase, source: TensorDictBase) -> list[NestedKey]:
    """Return the keys of the entries of a working copy that are not those of its source."""
    if type(work) is type(source) is TensorDict:
        found: list[NestedKey] = []
        _add_changed(work, source, (), found)
        return found
    return list(_changed([(work, source)], ()))


def _add_changed(
    work: TensorDictBase, source: TensorDictBase, head: tuple[str, ...], found: list[NestedKey]
) -> None:
    """Do what `_changed` does for the usual container: "sequence of own modules"."""
    after: Mapping[str, object] = dict(work.items())
    before: Mapping[str, object] = dict(source.items())
    for name, value in after.items():
        old = before.get(name)
        if value is old:
            continue
        here = (*head, name)
        if value.__class__ is Tensor:
            found.append(here if head else name)
        elif type(value) is TensorDict and type(old) is TensorDict:
            _add_changed(value, old, here, found)
        elif _is_nested(value) and _is_nested(old):
            found += _changed([(value, old)], here)
        else:
            found.append(here if head else name)


def _changed(pairs: Sequence[Pair], head: tuple[str, ...]) -> Iterator[NestedKey]:
    """Traverse copies and their sources side by side; several are the members of a stack."""
    flat = [
        (dict(mine.items()), dict(theirs.items()))
        for work, source in pairs
        for mine, theirs in _dense(work, source)
    ]
    for name, value in flat[0][0].items() if flat else ():
        if value is flat[0][1].get(name) and len(flat) == 1:  # most entries
            continue
        values = [(new.get(name), old.get(name)) for new, old in flat]
        if all(new is old for new, old in values):
            continue
        here = (*head, name)
        if all(_is_nested(new) and _is_nested(old) for new, old in values):
            yield from _changed(cast("list[Pair]", values), here)
        elif all(name in work for work, _ in flat):
            yield here if head else name


def _held(source: TensorDictBase, keys: Iterable[NestedKey]) -> list[object]:
    """Return entries as a container holds them: what is not a tensor keeps its wrapper."""
    return [source.get(key) for key in keys]


def _is_nested(value: object) -> TypeGuard[TensorDictBase]:
    """Return whether a value holds entries, unlike a value that is not a tensor, which is one."""
    return isinstance(value, TensorDictBase)


def _dense(work: TensorDictBase, source: TensorDictBase) -> Iterator[Pair]:
    """Yield a pair of containers, or the pairs of their members."""
    mine, theirs = members_of(work), members_of(source)
    if mine is None or theirs is None or len(mine) != len(theirs):
        yield work, source
        return
    for pair in zip(mine, theirs, strict=True):
        yield from _dense(*pair)
