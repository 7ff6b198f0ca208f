"""What `in_keys` and `out_keys` may look like, and how they are normalised.

One place parses them, so that every module accepts the same spellings and refuses the others
with the same message. A tuple is one nested key, a list is several keys, and a mapping names the
argument that each key feeds. Inside the package keys are tuples of canonical keys: a `str` for a
top-level entry, a tuple of at least two `str` for a nested one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Self, TypeAlias, TypeVar

from torch.compiler import is_dynamo_compiling

from kd_core import InvalidArgument, InvalidKey, NestedKey, format_key, unravel_key
from kd_core.extending import is_prefix, plain_str, public_in

T = TypeVar("T")
Keys: TypeAlias = tuple[NestedKey, ...]

DISCARD = "_"
"""The out key of an output that is discarded."""


@public_in("kd_nn._pickled")
class InKeySpec:
    """Parsed `in_keys`: the distinct keys, and what each argument of the module reads.

    Attributes:
        keys: Distinct keys, in order of first use.
        reads: The key that feeds each argument, in the order of the arguments.
        names: Argument names, one per entry of `reads`, or None for positional arguments.
    """

    __slots__ = ("keys", "names", "reads")

    def __init__(self, keys: Keys, reads: Keys, names: tuple[str, ...] | None) -> None:
        self.keys, self.reads, self.names = keys, reads, names

    @property
    def is_plain(self) -> bool:
        """Whether each key feeds one argument, in their order."""
        return self.names is None and self.reads == self.keys

    def __getstate__(self) -> list[object]:
        return [self.keys, self.reads, self.names]

    def __setstate__(self, state: tuple[Keys, Keys, tuple[str, ...] | None]) -> None:
        self.keys, self.reads, self.names = state


def parse_keys(keys: object, what: str) -> Keys:
    """Normalise one key or a list of keys.

    Args:
        keys: A str or tuple (one key; `()` is none), or any other iterable of keys.
        what: The name of the argument, for messages.

    Returns:
        Canonical keys, in order.

    Raises:
        InvalidKey: If an element is not a nested key.
    """
    if type(keys) is list and not is_dynamo_compiling():
        try:  # on each call of a method with `dispatch`
            return _known(tuple(keys), what)
        except TypeError:  # an element is not hashable or not a key: reported below
            pass
    if isinstance(keys, (str, tuple)):
        return (_parse_key(keys, what),) if keys != () else ()
    if isinstance(keys, Mapping) or not isinstance(keys, Iterable):
        raise InvalidKey(
            f"`{what}` must be a key or a list of keys, got {type(keys).__name__}: {keys!r}."
        )
    return tuple(_parse_key(key, what) for key in keys)


@lru_cache(maxsize=1024)
def _known(keys: tuple[object, ...], what: str) -> Keys:
    return tuple(_parse_key(key, what) for key in keys)


def _parse_key(key: object, what: str) -> NestedKey:
    if not isinstance(key, (str, tuple)):
        raise InvalidKey(
            f"each of `{what}` must be a str or a tuple of str, got {type(key).__name__}: {key!r}."
            + (_as_tuple(key) if isinstance(key, list) else "")
        )
    return unravel_key(key)


def _as_tuple(key: list[object]) -> str:
    if len(key) < 2 or not all(isinstance(part, str) for part in key):
        return " Unpack the list: `*keys`."
    return f" Write one nested key as `{tuple(key)}`, or unpack a list of keys: `*keys`."


def parse_in_keys(keys: object, out_to_in_map: bool | None = True) -> InKeySpec:
    """Normalise `in_keys`, which may also be a mapping between arguments and keys.

    Args:
        keys: One key, a list of keys, or a mapping.
        out_to_in_map: Whether a mapping reads `{argument: key}`, as it does for None; else
            `{key: argument}`.

    Returns:
        The parsed keys; a key that feeds two arguments is listed once in `keys`.

    Raises:
        InvalidKey: If a key is not a nested key, or an argument is not a str.
        InvalidArgument: If `out_to_in_map` is not True, False or None.
    """
    if out_to_in_map is not None and not isinstance(out_to_in_map, bool):
        raise InvalidArgument(f"`out_to_in_map` must be True or False, got {out_to_in_map!r}.")
    if not isinstance(keys, Mapping):
        parsed = parse_keys(keys, "in_keys")
        return InKeySpec(unique(parsed), parsed, None)
    is_swapped = out_to_in_map is False
    pairs = [(arg, key) for key, arg in keys.items()] if is_swapped else keys.items()
    names = tuple(_argument_of(name) for name, _ in pairs)
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidKey(
            f"a mapping of `in_keys` names the argument `{twice}` twice, since Python treats some "
            "characters as equal (NFKC). Name each argument once."
        )
    reads = tuple(_parse_key(key, "in_keys") for _, key in pairs)
    return InKeySpec(unique(reads), reads, names)


def _argument_of(name: object) -> str:
    if not isinstance(name, str):
        raise InvalidKey(
            f"a mapping of `in_keys` names each argument by a str, got {name!r}. "
            "Write `{argument: key}`, or pass `out_to_in_map=False` for `{key: argument}`."
        )
    return argument_name(name)


def argument_name(text: str) -> str:
    """Return how Python spells a name in source: in the normal form NFKC, as a plain `str`."""
    if text.isascii():
        return plain_str(text)
    import unicodedata  # a library of its own, and few names need it

    return plain_str(unicodedata.normalize("NFKC", text))


def parse_out_keys(keys: object) -> Keys:
    """Normalise `out_keys` and refuse a key that is written twice.

    Raises:
        InvalidKey: If a key is not a nested key, or two outputs share one.
    """
    parsed = parse_keys(keys, "out_keys")
    visible = [key for key in parsed if key != DISCARD]
    if len(set(visible)) != len(visible):
        twice = next(key for key in visible if visible.count(key) > 1)
        raise InvalidKey(
            f"`out_keys` names {format_key(twice)} twice: the second output would overwrite the "
            'first. Rename one, or discard it with `"_"`.'
        )
    return parsed


def listed_once(keys: Keys) -> Keys:
    """Return the keys of a module that writes them itself, without those that are there again."""
    return tuple(key for at, key in enumerate(keys) if key == DISCARD or key not in keys[:at])


def unique(keys: Iterable[NestedKey]) -> Keys:
    """Return the distinct keys in order of first appearance."""
    return tuple(dict.fromkeys(keys))


def overlaps(key: NestedKey, others: Collection[NestedKey]) -> bool:
    """Return whether `key` equals, holds or is held by one of the others."""
    return key in others or strictly_overlaps(key, others)


def strictly_overlaps(key: NestedKey, others: Iterable[NestedKey]) -> bool:
    """Return whether `key` holds, or is held by, another key that is not equal to it."""
    flat = type(key) is str  # such a key holds nested ones only: building a sequence asks often
    for other in others:  # a loop: a generator costs more than what it tests
        if flat and type(other) is str:
            continue
        if key != other and (is_prefix(key, other) or is_prefix(other, key)):
            return True
    return False


def is_covered(key: NestedKey, by: Collection[NestedKey]) -> bool:
    """Return whether one of the keys in `by` is `key` or holds it."""
    return key in by or (type(key) is not str and any(is_prefix(other, key) for other in by))


def drop_covered(keys: dict[NestedKey, T], by: Collection[NestedKey], nested: bool) -> None:
    """Remove the keys that are one of `by` or, if there are nested ones, that one of `by` holds."""
    for key in by:
        keys.pop(key, None)
    if nested:
        for key in [key for key in keys if type(key) is not str and is_covered(key, by)]:
            del keys[key]


def without_covered(keys: Sequence[NestedKey]) -> Keys:
    """Return the distinct keys, less those that another one holds."""
    distinct = unique(keys)
    return tuple(
        key
        for key in distinct
        if type(key) is str or not any(key != o and is_prefix(o, key) for o in distinct)
    )


# The flow of keys: which step of a module reads and writes which keys.
#
# Pure data on keys, without tensors. The keys of a sequence, the steps that a selection needs, the
# warnings at build time and the pictures follow from it. A step feeds another one if a key that it
# writes equals, holds or is held by a key that the other reads: writing `n` feeds `("n", "b")`.

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
    inner: KeyFlow | None = None
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

    def producers(self, idx: int, key: NestedKey) -> tuple[int, ...]:
        """Return all steps before the one at `idx` that write parts of `key`, in order.

        Args:
            idx: The index of a step that reads `key`, or the number of steps.
            key: The key; several steps may write below it.
        """
        found: list[int] = []
        for i in range(min(idx, len(self.nodes)) - 1, -1, -1):
            writes = self.nodes[i].writes
            replaced = {w for later in found for w in self.nodes[later].writes}
            if any(overlaps(key, (w,)) and w not in replaced for w in writes):
                found.append(i)
            if any(is_prefix(w, key) for w in writes):  # all of it: what was before is gone
                break
        return tuple(reversed(found))

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
