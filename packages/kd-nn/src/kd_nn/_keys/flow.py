"""The flow of keys: which step of a module reads and writes which keys.

Pure data on keys, without tensors. The keys of a sequence, the steps that a selection needs, the
warnings at build time and the pictures follow from it. A step feeds another one if a key that it
writes equals, holds or is held by a key that the other reads: writing `n` feeds `("n", "b")`.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, Optional, Self, TypeAlias

from kd_core import NestedKey
from kd_core.extending import is_prefix
from kd_nn._keys.specs import (
    DISCARD,
    Keys,
    drop_covered,
    is_covered,
    overlaps,
    strictly_overlaps,
    unique,
    without_covered,
)

Needs: TypeAlias = dict[NestedKey, bool]
"""What is read from outside: each key, and whether it must be there."""


class KeyNode(NamedTuple):
    """One step of a key graph.

    Attributes:
        name: The name of the step in its sequence.
        label: The class of what runs there.
        reads: The keys it reads.
        writes: The keys it writes.
        parameters: How many parameter elements it holds.
        needed: Whether a selected output needs it.
        shapes: Shape of each written entry, as far as known: pairs of key and shape.
        partly: Containers of which it makes a part itself and may read the rest from outside.
        inner: The flow of its own steps, if a part of them may run.
        may_skip: Whether it may be left out as a whole, for want of inputs.
        optional: Those of the keys it reads that it can do without.

    Example:
        >>> KeyNode("0", "Linear", ("x",), ("hidden",), parameters=16).writes
        ('hidden',)
    """

    name: str
    label: str
    reads: Keys
    writes: Keys
    parameters: int = 0
    needed: bool = True
    shapes: tuple[tuple[NestedKey, tuple[int, ...]], ...] = ()
    partly: Keys = ()
    inner: Optional["KeyFlow"] = None
    may_skip: bool = False
    optional: Keys = ()

    def __repr__(self) -> str:
        """Return all attributes but `inner`, which has steps of its own."""
        shown = zip(self._fields, self, strict=True)
        return f"KeyNode({', '.join(f'{n}={value!r}' for n, value in shown if n != 'inner')})"

    @property
    def may_read(self) -> Keys:
        """All that it reads, and the containers that it reads in part."""
        return (*self.reads, *self.partly)

    @property
    def has_effects(self) -> bool:
        """Whether it runs for its effects: it writes nothing, or a step inside does."""
        if self.inner is None:
            return not self.writes
        return any(node.has_effects for node in self.inner.nodes)

    def needs(self, out_keys: Keys) -> Needs:
        """Return what it reads when only some of its keys are needed.

        Args:
            out_keys: Those of its `writes`, or of their parts, that are needed.
        """
        if self.inner is not None:
            found = self.inner.trace_back(out_keys)[1]
        else:
            found = dict.fromkeys(self.partly, False) if self.partly else {}
            for key in self.reads:
                found[key] = key not in self.optional
        # Whether it runs at all depends on all that it reads.
        return dict.fromkeys([*found, *self.reads], False) if self.may_skip else found


class KeyFlow:
    """The steps of a keyed module in order, and what can be asked about the keys between them.

    Attributes:
        nodes: The steps, in order.
        out_keys: The outputs that are visible; None stands for all that is written.
    """

    __slots__ = ("nodes", "out_keys")

    def __init__(self, nodes: tuple[KeyNode, ...], out_keys: Keys | None = None) -> None:
        self.nodes, self.out_keys = nodes, out_keys

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeyFlow) or type(other) is not type(self):
            return NotImplemented
        return (self.nodes, self.out_keys) == (other.nodes, other.out_keys)

    def __hash__(self) -> int:
        return hash((self.nodes, self.out_keys))

    @property
    def inputs(self) -> Keys:
        """The keys that are read and that no earlier step writes."""
        return without_covered([key for _, key in self._external_reads()])

    @property
    def reads(self) -> Keys:
        """All keys that are read, in order of first use."""
        return unique(key for node in self.nodes for key in node.reads)

    @property
    def required(self) -> Keys:
        """The keys that must come from outside for all steps to run."""
        written: set[NestedKey] = set()
        found: list[NestedKey] = []
        for node in self.nodes:
            if not node.may_skip:
                inside = node.inner.required if node.inner is not None else node.reads
                must = [key for key in inside if key not in node.optional]
                found += [key for key in must if not is_covered(key, written)]
            written.update(node.writes)
        return unique(found)

    @property
    def partly_fed(self) -> Keys:
        """The containers that are read after a part of them, and not the whole, was written.

        They are not inputs, but what an outer graph writes below their keys may be read.
        """
        written: list[NestedKey] = []
        found: list[NestedKey] = []
        for node in self.nodes:
            found += [
                key
                for key in node.may_read
                if not is_covered(key, written)
                and (key in node.partly or any(is_prefix(key, have) for have in written))
            ]
            written.extend(node.writes)
        return unique(found)

    @property
    def writes(self) -> Keys:
        """All keys that are written, each at the place of its last writer.

        A container that a later step writes takes the place of all that was written below its key.
        """
        found: list[NestedKey] = []
        for _, node, later in self._backwards():
            for key in node.writes[::-1]:
                if key not in later and key != DISCARD and not is_covered(key, later):
                    found.append(key)
        return unique(found[::-1])

    @property
    def outputs(self) -> Keys:
        """The keys that a call leaves behind: the selected ones, or all that are written."""
        return self.writes if self.out_keys is None else self.out_keys

    @property
    def unused_keys(self) -> Keys:
        """The written keys that no later step reads and that are not outputs."""
        found = []
        for idx, node in enumerate(self.nodes):
            for key in node.writes:
                kept = self._is_read_after(idx, key) or self._is_output(key)
                if key != DISCARD and not kept and self._next_writer(idx, key) is None:
                    found.append(key)
        return unique(found)

    @property
    def overwritten_keys(self) -> Keys:
        """The keys whose value is replaced by a later step before any step reads it."""
        return unique(key for _, key in self.lost_writes())

    @property
    def missing_producers(self) -> dict[NestedKey, tuple[str, ...]]:
        """The keys that must come from outside, and the steps that read them."""
        missing: dict[NestedKey, list[str]] = {}
        for name, key in self._external_reads():
            missing.setdefault(key, []).append(name)
        return {key: tuple(names) for key, names in missing.items()}

    def lost_writes(self) -> list[tuple[int, NestedKey]]:
        """Return step index and key of each write that a later one replaces unread."""
        lost = []
        for idx, node, later in self._backwards():
            for key in reversed(node.writes):
                if not is_covered(key, later) or key == DISCARD:
                    continue
                after = self._next_writer(idx, key)
                if after is None:
                    continue
                between = self.nodes[idx + 1 : after + 1]
                if not any(overlaps(key, step.may_read) for step in between):
                    lost.append((idx, key))
        return lost[::-1]

    def needed_for(self, out_keys: Iterable[NestedKey]) -> tuple[int, ...]:
        """Return the indices of the steps that `out_keys` need, in order.

        Args:
            out_keys: Keys that some steps write.
        """
        return tuple(sorted(self.live_writes(out_keys)))

    def live_writes(self, out_keys: Iterable[NestedKey]) -> dict[int, Keys]:
        """Return the steps that `out_keys` need, each with those of its keys that are needed.

        A step that writes nothing is kept, since it runs for its effects. So is an earlier writer
        of a key where the later one may be skipped.

        Args:
            out_keys: Keys that some steps write.
        """
        return self.trace_back(out_keys)[0]

    def trace_back(self, out_keys: Iterable[NestedKey]) -> tuple[dict[int, Keys], Needs]:
        """Return the steps that `out_keys` need, as `live_writes`, and what they need from outside.

        Args:
            out_keys: Keys that some steps write.
        """
        live = dict.fromkeys(out_keys, False)
        nested = any(type(key) is tuple for key in live)
        kept: dict[int, Keys] = {}
        for idx in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[idx]
            written = _wanted_of(node.writes, live)
            if written or node.has_effects:
                kept[idx] = written
                if not node.may_skip:
                    drop_covered(live, written, nested)
                for key, must in node.needs(written).items():
                    live[key] = must or live.get(key, False)
                    nested = nested or type(key) is tuple
        return kept, live

    def restrict(self, indices: Sequence[int]) -> Self:
        """Return the graph with only these steps marked as needed."""
        keep = set(indices)
        nodes = (n._replace(needed=i in keep) for i, n in enumerate(self.nodes))
        return type(self)(tuple(nodes), self.out_keys)

    def producer(self, idx: int, key: NestedKey) -> int | None:
        """Return the last step before the one at `idx` that writes `key`, None if it is an input.

        Args:
            idx: The index of a step that reads `key`, or the number of steps.
            key: The key.
        """
        before = range(min(idx, len(self.nodes)) - 1, -1, -1)
        return next((i for i in before if overlaps(key, self.nodes[i].writes)), None)

    def is_output_of(self, idx: int, key: NestedKey) -> bool:
        """Return whether what the step at `idx` writes to `key` is visible after the call."""
        return self._is_output(key) and self._next_writer(idx, key) is None

    def _backwards(self) -> Iterator[tuple[int, KeyNode, Collection[NestedKey]]]:
        """Yield index and step, the last one first, with the keys that later steps write."""
        later: set[NestedKey] = set()
        for idx in range(len(self.nodes) - 1, -1, -1):
            yield idx, self.nodes[idx], later
            later.update(self.nodes[idx].writes)

    def _external_reads(self) -> list[tuple[str, NestedKey]]:
        written: set[NestedKey] = set()
        external = []
        for node in self.nodes:
            for key in node.reads:
                if key not in written and not strictly_overlaps(key, written):
                    external.append((node.name, key))
            written.update(node.writes)
        return external

    def _is_read_after(self, idx: int, key: NestedKey) -> bool:
        return any(overlaps(key, node.may_read) for node in self.nodes[idx + 1 :])

    def _is_output(self, key: NestedKey) -> bool:
        return self.out_keys is None or overlaps(key, self.out_keys)

    def _next_writer(self, idx: int, key: NestedKey) -> int | None:
        for after in range(idx + 1, len(self.nodes)):
            node = self.nodes[after]
            if is_covered(key, node.writes) and not node.may_skip:
                return after
        return None


def _wanted_of(writes: Keys, wanted: Collection[NestedKey]) -> Keys:
    """Return what is wanted of the written keys: a key, the part of it, or the parts it is of."""
    found = [key for key in writes if key in wanted]
    if len(found) == len(writes):  # most steps
        return writes if len(found) == 1 else unique(found)
    found = []
    for key in writes:
        if key in wanted:
            found.append(key)
            continue
        flat = type(key) is str  # such a key holds nested ones only
        for want in wanted:
            if flat and type(want) is str:
                continue
            if is_prefix(key, want):
                found.append(want)
            elif is_prefix(want, key):
                found.append(key)
    return unique(found)
