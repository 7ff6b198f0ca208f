"""`TensorDictSequential`: keyed modules one after the other.

A call runs the plan where there is one (`_plan`); otherwise the steps are interpreted, each called
with a working copy of the container. Both leave the caller's container alone if a step raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling

from kd_core import (
    InvalidArgument,
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    TensorDictBase,
    format_key,
    lazy_stack,
)
from kd_core.extending import is_prefix
from kd_nn._dispatch import (
    MISSING,
    Inplace,
    add_output_note,
    add_step_note,
    anyone_skips,
    call_of,
    container_of,
    describe,
    destination,
    dispatch,
    entry,
    has_entry,
    keys_of,
    outputs_exist,
    parts_of,
    read_optional,
    write_apart,
    write_entries,
)
from kd_nn._errors import (
    EmptySubsequence,
    InputMissing,
    KeyGraphWarning,
    list_keys,
    not_a_container,
)
from kd_nn._keys import (
    DISCARD,
    InKeySpec,
    KeyGraph,
    KeyNode,
    Keys,
    in_order_of_entry,
    is_covered,
    overlaps,
    parse_keys,
    requires_all,
    unique,
)
from kd_nn._modules.base import (
    TensorDictModuleBase,
    checked_flag,
    checked_inplace,
    key_node,
    keys_as_parsed,
    label_of,
    without_hidden,
)
from kd_nn._modules.module import TensorDictModule
from kd_nn._modules.steps import Modules, Step, StepList, named_steps, store_steps
from kd_nn._plan.invalidation import Check, Flag, Flagged, depend_on, lists_in
from kd_nn._plan.program import Path, Plan, keyed, opens, stored_keys, takes_values
from kd_nn._torch_private import RECOMPUTED, is_watched

# Running a sequence step by step on a container, and the note that a failing step leaves.
#
# The steps get a working copy, so the caller's container changes only once all of them have run.


Pair: TypeAlias = tuple[TensorDictBase, TensorDictBase]
Made: TypeAlias = Mapping[Path, tuple[object, ...]]


def members_of(tensordict: TensorDictBase) -> Sequence[TensorDictBase] | None:
    """Return the members of a stack, which may have different keys; None for other containers."""
    if not isinstance(tensordict, LazyStackedTensorDict):
        return None
    return tensordict.unbind(tensordict.stack_dim)


def _are_alike(stack: LazyStackedTensorDict, in_keys: Keys) -> bool:
    """Return whether a stack can be run as a whole: its members skip the same steps."""
    first, *others = parts_of(stack) or [stack]
    keys = set(first.keys(True))
    if any(set(other.keys(True)) != keys for other in others):
        return False
    for key in in_keys:
        shape = getattr(first.get(key), "shape", None)
        if any(getattr(other.get(key), "shape", None) != shape for other in others):
            return False
    return True


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
    if is_dynamo_compiling():
        return
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
    nested: bool = False,
    is_fed: bool = False,
) -> TensorDictBase:
    """Call the steps one by one on a working copy, then write the outputs.

    Args:
        sequence: The sequence to run.
        tensordict: The container to read; it is not changed unless it is `target`.
        target: The container to write; None for an empty one like that of the last step.
        outputs: The keys to write.
        made: What steps have computed already, by their names and those of the sequences around
            them; they are not called again.
        nested: Whether the container is the working copy of a sequence around this one.
        is_fed: Whether the last step is fed, even if no step of this sequence feeds it.

    Returns:
        The container that was written; or, where `target` is the one to read and a step replaced
        it by another one, that one, if it has another batch size or nothing is hidden.
    """
    in_place = nested and _writes_all(sequence)
    work = tensordict if in_place else tensordict.copy()
    if target is tensordict and tensordict.is_locked and _writes_all(sequence):
        work.lock_()  # the first step that writes is refused, before others run
    scope = sequence._kd_scope()
    end, leave = (0, None) if scope is None else (scope[0], scope[1]())
    replaced, written = False, work
    steps = sequence._kd_named_steps()
    is_fed = is_fed or sequence._kd_fed
    try:
        for idx, (name, step) in enumerate(steps):
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
                _write_made((str(idx), name), step, work, inside[()])
                continue
            fed = is_fed and idx == len(steps) - 1 and takes_values(step)
            if not inside and sequence._kd_skips(step, work, fed):
                continue
            try:
                if inside:
                    result: object = _run_sequence(cast("StepList", step), work, inside, fed)
                else:
                    result = _run_step(step, work, fed)
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
    other = work.batch_dims and work.batch_size != tensordict.batch_size  # of several draws
    if replaced and target is tensordict and (other or _writes_all(sequence)):
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
    if target is None:
        target = (work if other else tensordict).empty()
    _commit(sequence, work, target, tensordict, outputs, replaced)
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


def _write_made(
    place: tuple[str, str], step: nn.Module, work: TensorDictBase, values: Sequence[object]
) -> None:
    """Write what a step has computed; what is not read any more is None."""
    keys = keyed(step).out_keys_source
    made = {k: v for k, v in zip(keys, values, strict=False) if v is not None and v is not MISSING}
    try:
        write_entries(work, list(made), list(made.values()))
    except Exception as error:  # what the step had read may be gone
        add_output_note(error, step, {})
        add_step_note(error, place, step, {})
        raise


def _run_step(step: nn.Module, work: TensorDictBase, is_fed: bool) -> object:
    recomputed = step._modules.get(RECOMPUTED)
    if recomputed is not None:
        return _run_recomputed(step, recomputed, work)
    if isinstance(step, StepList) and opens(step) and not anyone_skips and not is_watched(step):
        return _run_sequence(step, work, None, is_fed)
    return step(work, _requires_sample=False) if is_fed else step(work)


def _run_sequence(
    step: StepList, work: TensorDictBase, made: Made | None, is_fed: bool
) -> TensorDictBase:
    """Run the steps of a sequence inside on the working copy of the one around it."""
    return run_steps(step, work, work, stored_keys(step), made, nested=True, is_fed=is_fed)


def _run_recomputed(step: nn.Module, wrapped: nn.Module, work: TensorDictBase) -> object:
    """Call a keyed module that torch's `checkpoint_wrapper` wraps.

    The wrapper calls it again in the backward pass, when the working copy holds what later steps
    wrote. It saves tensors, so it gets tensors where the module takes them.
    """
    keys = keys_of(step, "in_keys")
    values = read_optional(work, keys)
    takes_tensors = call_of(type(wrapped).forward) is not None
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
        other_rows = result.batch_size != work.batch_size
        replaces = other_rows or not visible or made != visible
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
    replaced: bool,
) -> None:
    if target is source and _writes_all(sequence):
        keys = _written_keys(sequence, work, source, outputs)
        write_entries(target, keys, _held(work, keys))
        return
    keys = [key for key in outputs if has_entry(work, key)]
    if target is source:
        write_entries(target, keys, _held(work, keys))
        return
    # Also the keys of steps that were skipped: of those it takes the containers that are there.
    if replaced or _writes_all(sequence):
        target.update(without_hidden(sequence, work, source), keys_to_update=list(outputs))
    else:
        write_apart(target, source, dict(zip(keys, _held(work, keys), strict=True)), outputs)


def _written_keys(
    sequence: StepList, work: TensorDictBase, source: TensorDictBase, outputs: Keys
) -> list[NestedKey]:
    """Return the keys of what the steps, and functions among them, wrote, in their order.

    A container that a step made replaces the one before, with all that it held.
    """
    changed = changed_keys(work, source)
    made = [key for key in outputs if has_entry(work, key) and _is_nested(work.get(key))]
    if not made:
        return changed
    if sequence._kd_may_skip:  # the step that makes it may have been left out
        made = [key for key in made if any(is_prefix(key, each) for each in changed)]
    whole = (next((key for key in made if is_prefix(key, each)), each) for each in changed)
    return list(dict.fromkeys([*whole, *made]))


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
    before: Mapping[str, object] = dict(source.items())
    after: Iterable[tuple[str, object]] = work.items()
    for name, value in after:
        old = before.get(name)
        if value is old:
            continue
        here = (*head, name)
        if type(value) is Tensor:
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


# What a sequence has cached about its steps, and whether it is stale.
#
# Resolving a sequence costs as much as hundreds of calls, so it is done once and kept until a key,
# a step or the way a step runs has changed.

_ALWAYS: Final[Flag] = [True]
_TRIES: Final = 1000
"""How often an edit of another thread may come in between."""
_TRIES_COMPUTED: Final = 10
"""The same where a class of the user computes keys: it may give others each time it is asked."""


def _graph_of(
    steps: Iterable[tuple[str, nn.Module]],
    tolerant: bool,
    selected: Keys | None = None,
    is_fed: bool = False,
) -> tuple[KeyGraph, Keys, Keys]:
    """Return the graph of steps, all that they write, and the same with `_`.

    `_` stands in the place where a step discards a value last. Where the last step is fed, it
    reads what it is fed with.
    """
    nodes: list[KeyNode] = []
    written: list[Keys] = []
    discards = False
    for name, step in steps:
        keys = keys_as_parsed(step)
        nodes.append(key_node(name, step, tolerant, keys))
        written.append(keys[1])
        discards = discards or DISCARD in keys[1]
    if is_fed:
        reads = unique([*nodes[-1].reads, *keyed(step)._kd_fed_keys()])
        nodes[-1] = nodes[-1]._replace(reads=reads, inner=None)
    graph = KeyGraph(tuple(nodes), selected)
    writes = graph.writes
    if not discards:
        return graph, writes, writes
    in_order = {key: None for each in written[::-1] for key in each[::-1]}
    every = tuple([key for key in in_order if key == DISCARD or key in writes][::-1])
    return graph, writes, every


def _without_discarded(keys: Keys) -> Keys:
    return tuple([key for key in keys if key != DISCARD]) if DISCARD in keys else keys


class Resolved:
    """The graph of a sequence, and the functions for dynamo, at one moment.

    Attributes:
        graph: Which step reads and writes what.
        in_keys: What the sequence reads from outside.
        out_keys: All that its steps write.
        visible: Those of them that are selected, or all.
        stored: The same in the order in which a container gets them.
        listed: The same with `_`, where a step discards a value.
        every: `out_keys` with `_`.
        optional: Those of `in_keys` that no step requires.
        is_fed: Whether the last step is fed by earlier ones; see `_kd_fed_keys`.
        unsure: Empty while no edit was announced, and every edit is announced.
    """

    __slots__ = (
        "__weakref__",
        "_changed",
        "_computed",
        "_dependency",
        "_members",
        "every",
        "graph",
        "in_keys",
        "is_fed",
        "listed",
        "optional",
        "out_keys",
        "stored",
        "unsure",
        "visible",
    )

    def __init__(self, sequence: StepList) -> None:
        self._changed: Flag = []
        self._members: list[tuple[nn.Module, list[nn.Module | None]]] = []
        self._computed: list[tuple[nn.Module, tuple[object, ...]]] = []
        # One that is made while tracing is not kept; and dynamo enters no lock.
        if not is_dynamo_compiling():
            # Before anything else is read: what another thread changes meanwhile is then seen.
            self._dependency = depend_on(sequence)
            self._changed = self._dependency.changed
            self._compare_steps(sequence)
        steps = sequence._kd_named_steps()
        selected: Keys | None = sequence.__dict__.get("_kd_selected")
        chosen = None if selected is None else _without_discarded(selected)
        self.is_fed = sequence._kd_feeds_last()
        tolerant = sequence.partial_tolerant
        graph, self.out_keys, self.every = _graph_of(steps, tolerant, chosen, self.is_fed)
        self.in_keys = graph.inputs
        self.listed = self.every if selected is None else selected
        self.visible = self.out_keys if chosen is None else chosen
        # What is read is there before, but for `_`, which only steps write.
        entered = [key for key in self.in_keys if key != DISCARD]
        for _, step in steps:
            entered += stored_keys(step)
        # A distribution stores its value at `_`; other modules discard theirs.
        kept = (DISCARD,) if DISCARD in entered and DISCARD in self.listed else ()
        self.stored = in_order_of_entry(entered, (*self.visible, *kept))
        self.graph = graph
        self.optional: Keys = ()
        if not requires_all(graph):
            required = graph.required
            self.optional = tuple(
                key for key in self.in_keys if not any(is_prefix(key, r) for r in required)
            )
        announced = all(_announces(holder) for holder, _ in self._members)
        self.unsure = self._changed if announced and not self._computed else _ALWAYS

    @property
    def is_computed(self) -> bool:
        """Whether classes of the user compute some of the keys."""
        return bool(self._computed)

    def is_current(self) -> bool:
        """Return whether nothing that it was made from has changed."""
        if is_dynamo_compiling():
            # dynamo of torch 2.10 compares no modules; `unsure` has a guard already.
            return not (self.unsure and self._changed)
        if self._changed:
            return False
        for holder, members in self._members:  # loops: a generator costs more than what it tests
            if [*holder._modules.values()] != members:
                return False
        return not self._computed or all(_asked(step) == was for step, was in self._computed)

    def _compare_steps(self, sequence: StepList) -> None:
        holder = sequence._modules["module"]  # not `.module`, which torch looks up in Python
        assert holder is not None
        self._compare(self._compare_members(holder))

    def _compare_members(self, holder: nn.Module) -> list[nn.Module | None]:
        members: list[nn.Module | None] = [*holder._modules.values()]
        self._members.append((holder, members))
        return members

    def _compare(self, steps: Iterable[nn.Module | None]) -> None:
        """Record what must be compared in steps: what may change without raising a flag."""
        for step in steps:
            if step is None:
                continue
            if getattr(type(step), "_kd_computes_keys", True):
                for holder in lists_in(step):  # it may read the public keys of what is inside
                    self._compare_members(holder)
                self._computed.append((step, _asked(step)))
            if isinstance(step, StepList):
                self._compare_steps(step)
            elif step.__dict__.get("_kd_in_spec") is None:  # it may say the keys of what is inside
                self._compare(each for each in step._modules.values() if hasattr(each, "in_keys"))


def resolve_sequence(sequence: StepList) -> Resolved:
    """Return the graph of a sequence, all of one moment even if another thread changes steps."""
    for tries in range(_TRIES):
        resolved = Resolved(sequence)
        if resolved.is_current() or (tries >= _TRIES_COMPUTED and resolved.is_computed):
            break
        if is_compiling():  # the modules of an export are other objects whenever they are read
            break
    return resolved


def _announces(holder: nn.Module) -> bool:
    return isinstance(holder, Flagged) and holder._kd_announces_members


def _asked(step: nn.Module) -> tuple[object, ...]:
    """Return what a step answers that no assignment needs to announce."""
    keys = keyed(step)
    return list(keys.in_keys), list(keys.out_keys), getattr(step, "_kd_has_value_form", False)


def _runnable(sequence: StepList, known: list[NestedKey]) -> list[Step]:
    """Return the steps that can run from the keys, to which what they write is added."""
    kept: list[Step] = []
    for name, step in sequence._kd_named_steps():
        node = key_node(name, step)  # as it is alone: the steps that feed it may go
        if _can_be_cut(step):
            inside = _runnable(step, [*known])
            if not inside:
                continue
            step = _part_of(step, inside, ())
        elif not all(key in node.optional or overlaps(key, known) for key in node.reads):
            continue
        known += keys_of(step, "out_keys")
        kept.append((name, step))
    return kept


def _needed(steps: Sequence[Step], wanted: list[NestedKey], hidden: Keys) -> list[Step]:
    """Return the steps that lead to the keys, to which what they read is added.

    Args:
        steps: The steps of a sequence; those that write nothing lead to no key.
        wanted: The keys.
        hidden: Those that are shown, although sequences inside hide them.
    """
    kept: list[Step] = []
    for name, step in reversed(steps):
        shown = keys_of(step, "out_keys")
        if _can_be_cut(step):
            inside = _needed(
                step._kd_named_steps(),
                [key for key in wanted if key in hidden or overlaps(key, shown)],
                hidden,
            )
            if not inside:
                continue
            step = _part_of(step, inside, hidden)
        elif not any(overlaps(key, wanted) for key in shown):
            continue
        wanted += key_node(name, step).may_read
        kept.append((name, step))
    return kept[::-1]


def _can_be_cut(step: nn.Module) -> TypeGuard[TensorDictSequential]:
    """Return whether a step has steps; a sequence of a user's class may be built otherwise."""
    return isinstance(step, TensorDictSequential) and step._kd_changes_by_assignment


def _part_of(
    sequence: TensorDictSequential, steps: Sequence[Step], shown: Keys
) -> TensorDictSequential:
    """Return a part of a sequence, which hides what it hides unless nothing else is left."""
    part = sequence._kd_part(steps)
    if not _writes_all(sequence):
        seen = (*sequence.out_keys, *shown)
        visible = [key for key in part.out_keys if key in seen]
        part.select_out_keys(*(visible or part.out_keys))
    return part


class TensorDictSequential(StepList, TensorDictModule):  # type: ignore[misc]  # of `module`
    """Run keyed modules in order; each reads and writes entries by key.

    The sequence reads what its steps read and no earlier step writes, and it writes what any step
    writes. Called with tensors it returns all outputs, or the selected ones. All steps run,
    whatever is selected. A step that raises leaves the container as it was.

    `out_keys` are in the order in which they are last written, or as they were selected. A
    container gets them in the order in which they are first written.

    Args:
        *modules: Keyed modules; or one list of them; or one dict, which names the steps.
        partial_tolerant: Whether steps whose inputs are missing are skipped. What a step can do
            without does not count, such as the inputs of a `TensorDictModule` with `strict=False`.
        selected_out_keys: The outputs to keep; see `select_out_keys`. `None` or none: all.
        inplace: As for `TensorDictModule`; None and True write into the input.

    Raises:
        NotKeyed: If something is not a keyed module.
        OutKeyUnknown: If a selected key is not written by any step.

    Warns:
        KeyGraphWarning: If a step writes what a later one replaces before it is read, or reads
            what only a later step writes, which does not need it.

    Example:
        >>> import torch
        >>> from kd_nn import TensorDictModule
        >>> model = TensorDictSequential(
        ...     TensorDictModule(nn.Linear(3, 4), in_keys=["x"], out_keys=["hidden"]),
        ...     TensorDictModule(nn.ReLU(), in_keys=["hidden"], out_keys=["y"]),
        ... )
        >>> model.in_keys, model.out_keys
        (['x'], ['hidden', 'y'])
        >>> hidden, y = model(x=torch.ones(2, 3))
        >>> model.select_out_keys("y")(torch.ones(2, 3)).shape
        torch.Size([2, 4])
    """

    _kd_changes_by_assignment = True

    _kd_traced_first: Plan
    _kd_writes_by_inplace: ClassVar[bool] = True
    _kd_checks: ClassVar[Mapping[str, Check]] = {
        "inplace": checked_inplace,
        "partial_tolerant": checked_flag,
    }

    def __init__(
        self,
        *modules: Modules,
        partial_tolerant: bool = False,
        selected_out_keys: NestedKey | Sequence[NestedKey] | None = None,
        inplace: Inplace = None,
    ) -> None:
        steps = store_steps(modules)
        self._kd_settle(partial_tolerant=partial_tolerant, inplace=inplace)
        start = super().__init__
        if getattr(start, "__func__", None) is TensorDictModule.__init__:
            super(TensorDictModuleBase, self).__init__()  # a mixin behind them is a module, too
            self.module = steps
        else:  # a class between the two gets what `TensorDictModule` takes
            graph, writes, _ = _graph_of(steps._modules.items(), partial_tolerant)
            further: dict[str, Any] = {} if inplace is None else {"inplace": inplace}
            start(module=steps, in_keys=[*graph.inputs], out_keys=[*writes], **further)
        selected = () if selected_out_keys is None else selected_out_keys
        visible = parse_keys(selected, "selected_out_keys")
        if visible:
            self.select_out_keys(*visible)
        else:
            self._kd_resolve()
        self._kd_warn_of_waste()

    if not TYPE_CHECKING:  # in one step each, as they are read often

        @TensorDictModuleBase.in_keys.getter
        def in_keys(self) -> list[NestedKey]:
            """Return the keys that are read, as a fresh list."""
            try:
                resolved = self._kd_resolved
            except AttributeError:
                resolved = self._kd_resolve()
            if resolved.unsure:
                resolved = self._kd_resolve()
            if "_kd_listed" in self.__dict__:
                return [*self.__dict__["_kd_listed"].get("in_keys", resolved.in_keys)]
            return [*resolved.in_keys]

        @TensorDictModuleBase.out_keys.getter
        def out_keys(self) -> list[NestedKey]:
            """Return the keys that are written and visible, as a fresh list."""
            try:
                resolved = self._kd_resolved
            except AttributeError:
                resolved = self._kd_resolve()
            if resolved.unsure:
                resolved = self._kd_resolve()
            if "_kd_listed" in self.__dict__ and _writes_all(self):  # else a selection says it
                return [*self.__dict__["_kd_listed"].get("out_keys", resolved.listed)]
            return [*resolved.listed]

        # What `TensorDictModule` says of the one module that it wraps.
        _kd_node_label = _kd_described_as = _kd_run_on_values = None

        def __getattr__(self, name: str) -> Tensor | nn.Module:
            """Return an attribute, else the step of that name, as `get_submodule("0")` asks."""
            try:
                return TensorDictModuleBase.__getattr__(self, name)
            except AttributeError:
                steps = self.__dict__.get("_modules", {}).get("module")
                if steps is None or name not in steps._modules:
                    raise
                return steps._modules[name]

    @staticmethod
    def _kd_keys_of(modules: Iterable[Modules]) -> tuple[list[NestedKey], list[NestedKey]]:
        """Return `in_keys` and `out_keys` of a sequence of these modules, which is not made."""
        graph, _, every = _graph_of(named_steps([*modules]), False)
        return [*graph.inputs], [*every]

    def _kd_wrap(self, module: object, *others: object) -> None:
        state = self.__dict__
        tolerant, inplace = state.get("partial_tolerant", False), state.get("inplace")
        self._kd_settle(partial_tolerant=tolerant, inplace=inplace)
        self.module = store_steps([cast("nn.Module", module)])

    @property
    def _kd_optional_in_keys(self) -> list[NestedKey]:
        """The `in_keys` that a call with tensors may leave out: no step that runs insists."""
        return list(self._kd_resolve().optional)

    @property
    def _kd_partly_read(self) -> list[NestedKey]:
        """The containers of which steps make a part, and may read the rest from outside."""
        return list(self._kd_resolve().graph.partly_fed)

    @dispatch(auto_batch_size=False)
    def forward(
        self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None = None
    ) -> TensorDictBase:
        """Run the steps on a container.

        Args:
            tensordict: The container to read.
            tensordict_out: The container to write, instead of what `inplace` says.

        Returns:
            The container that was written.

        Raises:
            InputMissing: If an entry that a step reads is missing.
        """
        return self._kd_run(tensordict, tensordict_out)

    def _kd_run(
        self,
        tensordict: TensorDictBase,
        tensordict_out: TensorDictBase | None,
        is_fed: bool = False,
    ) -> TensorDictBase:
        if outputs_exist(self, tensordict):
            return tensordict
        if (
            isinstance(tensordict, LazyStackedTensorDict)
            and self._kd_may_skip
            and not _are_alike(tensordict, self._kd_resolve().in_keys)
        ):
            run = partial(self._kd_run, is_fed=is_fed)
            return run_members(self, tensordict, tensordict_out, run)
        target = None
        if tensordict_out is not None or self.inplace != "empty":
            target = destination(tensordict, self.inplace, tensordict_out)
        return run_steps(self, tensordict, target, self._kd_resolve().stored, is_fed=is_fed)

    def _kd_continue_from(
        self,
        container: TensorDictBase | None,
        given: Mapping[NestedKey, object],
        made: Made,
    ) -> object:
        """Finish a call that a plan has begun; plans call this.

        Args:
            container: What the sequence was called with, None for a call with tensors.
            given: The inputs by key.
            made: What steps have computed already; see `run_steps`.

        Returns:
            What the call returns.
        """
        outputs = self._kd_resolve().stored
        if container is not None:
            target = None
            if self.inplace != "empty":
                target = destination(container, self.inplace, None)
            return run_steps(self, container, target, outputs, made)
        result = run_steps(self, container_of(given), TensorDict(), outputs, made)
        found = read_optional(result, [key for key in self.out_keys if key != DISCARD])
        return found[0] if len(found) == 1 else tuple(found)

    def _kd_forward_values(self, *values: object) -> tuple[object, ...]:
        """Run all steps on one value per key of `in_keys`; return all that they write."""
        resolved = self._kd_resolve()
        given = dict(zip(resolved.in_keys, values, strict=True))
        every = resolved.out_keys
        made = run_steps(self, container_of(given), TensorDict(), every)
        return tuple(entry(made, key) for key in every)

    def select_subsequence(
        self,
        in_keys: NestedKey | Sequence[NestedKey] | None = None,
        out_keys: NestedKey | Sequence[NestedKey] | None = None,
    ) -> Self:
        """Return the steps that can run from `in_keys` and lead to `out_keys`.

        All that write a key that is needed are kept, steps that write nothing are not. Nested
        sequences are cut too. The modules are shared with this sequence. All outputs are visible;
        what a nested sequence hides stays hidden, unless `out_keys` names it, or nothing else is
        left of that sequence.

        Args:
            in_keys: The entries that are given; None stands for all that are needed.
            out_keys: The entries that are wanted; None stands for `out_keys` of the sequence.
                Those that `in_keys` do not lead to are left out.

        Raises:
            EmptySubsequence: If no step is left.

        Example:
            >>> import torch
            >>> from kd_nn import TensorDictModule
            >>> first = TensorDictModule(torch.neg, ["x"], ["y"])
            >>> model = TensorDictSequential(first, TensorDictModule(torch.exp, ["y"], ["z"]))
            >>> model.select_subsequence(out_keys=["y"])[0] is first
            True
        """
        resolved = self._kd_resolve()
        wanted = resolved.visible if out_keys is None else parse_keys(out_keys, "out_keys")
        steps = self._kd_named_steps()
        if in_keys is not None:
            steps = _runnable(self, list(parse_keys(in_keys, "in_keys")))
        hidden = tuple(key for key in wanted if not overlaps(key, resolved.out_keys))
        kept = _needed(steps, list(wanted), hidden)
        if not kept:
            given = resolved.graph.reads if in_keys is None else parse_keys(in_keys, "in_keys")
            raise EmptySubsequence(
                f"no step of {describe(self)} is left for in_keys {list_keys(given)} and out_keys "
                f"{list_keys(wanted)}. It reads {list_keys(resolved.in_keys)} and writes "
                f"{list_keys(resolved.out_keys)}."
            )
        return self._kd_part(kept)

    @property
    def _kd_fed(self) -> bool:
        """Whether the last step is fed by earlier ones."""
        return self._kd_resolve().is_fed

    def _kd_graph(self) -> KeyGraph:
        return self._kd_resolve().graph

    def _kd_stored_keys(self) -> Keys:
        return self._kd_resolve().stored

    def extra_repr(self) -> str:
        """Return the keys, for printing."""
        tolerant = ", partial_tolerant=True" if self.partial_tolerant else ""
        return super().extra_repr() + tolerant

    def _kd_own_in_keys(self) -> Keys:
        return self._kd_resolve().in_keys

    def _kd_own_out_keys(self) -> Keys:
        return self._kd_resolve().every

    def _kd_set_in_spec(self, spec: InKeySpec) -> None:
        self._kd_list("in_keys", spec.keys)

    def _kd_set_out_keys_source(self, keys: Keys) -> None:
        self._kd_list("out_keys", keys)

    def _kd_list(self, name: str, keys: Keys) -> None:
        """Keep the keys that a program gives: what is read and written follows from the steps."""
        self.__dict__["_kd_listed"] = {**self.__dict__.get("_kd_listed", {}), name: keys}

    def _kd_resolve(self) -> Resolved:
        resolved: Resolved | None = self.__dict__.get("_kd_resolved")
        if resolved is not None and resolved.is_current():
            return resolved
        resolved = resolve_sequence(self)
        if not torch.compiler.is_dynamo_compiling():
            self.__dict__["_kd_resolved"] = resolved
            self.__dict__.pop("_kd_traced", None)
            self.__dict__.pop("_kd_traced_first", None)
        return resolved

    def _kd_prepare_first(self, count: int) -> bool:
        """Make `_kd_traced_first`, which runs so many of the steps, and tell whether it can.

        For methods that dynamo runs and does not trace; `count` must be less than all, and the same
        while nothing changes.
        """
        from kd_nn._plan.plans import make_plan_of_first  # what is not compiled needs none

        return self._kd_prepare_as("_kd_traced_first", lambda: make_plan_of_first(self, count))

    def _kd_run_first(self, tensordict: TensorDict) -> bool:
        """Run the steps that were prepared, and tell whether they ran; they write the container."""
        return not anyone_skips and self._kd_traced_first.container(self, tensordict) is tensordict

    def _kd_refresh_keys(self) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self._kd_resolve()

    def _kd_warn_of_waste(self) -> None:
        graph = self._kd_graph()
        for idx, key in graph.lost_writes():
            warnings.warn(
                f"step {idx} (`{label_of(self[idx])}`) of {describe(self)} writes "
                f"{format_key(key)}, which a later step replaces before it is read. "
                'Discard it with the out key `"_"`, or write to another key.',
                KeyGraphWarning,
                stacklevel=3,
            )
        for idx, key, after in graph.late_writes():
            warnings.warn(
                f"step {idx} (`{label_of(self[idx])}`) of {describe(self)} reads "
                f"{format_key(key)}, which step {after} (`{label_of(self[after])}`) writes later. "
                f"Put step {after} before step {idx}, or write to another key if the one of the "
                "input is meant.",
                KeyGraphWarning,
                stacklevel=3,
            )
