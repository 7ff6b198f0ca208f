"""What `in_keys` and `out_keys` may look like, and how they are normalised.

One place parses them, so that every module accepts the same spellings and refuses the others
with the same message. A tuple is one nested key, a list is several keys, and a mapping names the
argument that each key feeds. Inside the package keys are tuples of canonical keys: a `str` for a
top-level entry, a tuple of at least two `str` for a nested one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias, TypeVar

from torch.compiler import is_dynamo_compiling

from kd_core import (
    InvalidArgument,
    InvalidKey,
    NestedKey,
    format_key,
    unravel_key,
    unravel_key_to_tuple,
)
from kd_core.extending import is_prefix, plain_str, public_in

if TYPE_CHECKING:
    from kd_core.extending import Table

T = TypeVar("T")
Keys: TypeAlias = tuple[NestedKey, ...]
Tree: TypeAlias = "dict[str, Tree]"

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


def unique(keys: Iterable[NestedKey]) -> Keys:
    """Return the distinct keys in order of first appearance."""
    return tuple(dict.fromkeys(keys))


def in_order_of_entry(entered: Iterable[NestedKey], keys: Keys) -> Keys:
    """Return keys in the order of a container that gets entries one after the other.

    An entry that is replaced stays where it is.

    Args:
        entered: The keys that the container gets.
        keys: Those of them to return, and others, which come last.
    """
    wanted, places = set(keys), dict.fromkeys(entered)
    if not any_nested(places):  # "build 10 layers" in the benchmarks
        return unique([*filter(wanted.__contains__, places), *keys])
    tree: Tree = {}
    for key in places:
        level = tree
        for part in unravel_key_to_tuple(key):
            level = level.setdefault(part, {})
    found: list[NestedKey] = []
    _add_wanted(tree, (), wanted, found)
    return unique([*found, *keys])


def _add_wanted(
    tree: Tree, head: tuple[str, ...], wanted: set[NestedKey], found: list[NestedKey]
) -> None:
    for part, below in tree.items():
        path = (*head, part)
        key = path if head else part
        if key in wanted:
            found.append(key)
        if below:
            _add_wanted(below, path, wanted, found)


def any_nested(keys: Iterable[NestedKey]) -> bool:
    """Return whether some of the keys are nested: others hold none and are held by none."""
    return tuple in map(type, keys)


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
    if key in by or type(key) is str:
        return key in by
    path = unravel_key_to_tuple(key)
    return path[0] in by or any(path[:count] in by for count in range(2, len(path)))


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
    if not any_nested(distinct):
        return distinct
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
        found: dict[NestedKey, None] = {}
        nested = False
        for node in self.nodes:
            nested = nested or any_nested(node.writes)
            drop_covered(found, node.writes, nested)
            found.update(dict.fromkeys(node.writes))
        found.pop(DISCARD, None)
        return tuple(found)

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

    def late_writes(self) -> list[tuple[int, NestedKey, int]]:
        """Return step, key and writer of each key that is read before the step that writes it.

        One that is meant so is left out: its writer refines it, or needs the reader, or a step
        behind the writer reads it again.
        """
        late = []
        for idx, node in enumerate(self.nodes):
            for key in node.reads:
                after = self._next_writer(idx, key)
                if after is None or self.producers(idx, key) or overlaps(key, node.writes):
                    continue
                again = overlaps(key, self.nodes[after].may_read) or self._is_read_after(after, key)
                if not again and idx not in self._steps_above(after):
                    late.append((idx, key, after))
        return late

    def _steps_above(self, idx: int) -> set[int]:
        """Return the steps whose results a step needs, by way of others too."""
        found: set[int] = set()
        todo = [idx]
        while todo:
            step = todo.pop()
            above = {i for key in self.nodes[step].may_read for i in self.producers(step, key)}
            todo += above - found
            found |= above
        return found

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
        nested = False
        for node in self.nodes:
            for key in node.reads:
                deep = nested or type(key) is tuple
                if key not in written and not (deep and strictly_overlaps(key, written)):
                    external.append((node.name, key))
            written.update(node.writes)
            nested = nested or any_nested(node.writes)
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


def requires_all(flow: KeyFlow) -> bool:
    """Return whether all `inputs` are `required`: no step may be skipped, or do without a key."""
    for node in flow.nodes:
        if node.may_skip or node.optional:
            return False
        if node.inner is not None and not requires_all(node.inner):
            return False
    return True


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


# The key graph as text: a plain table, and a flowchart in Mermaid.


ROWS, CELL = 30, 40
"""How many rows a short table has, and how many characters a cell."""


def dotted(key: NestedKey) -> str:
    """Return a key as text, its parts joined by dots."""
    return key if isinstance(key, str) else ".".join(dotted(part) for part in key)


def table(graph: KeyFlow, short: bool = False) -> Table:
    """Return the steps of a key graph as an aligned table.

    Args:
        graph: The graph.
        short: Whether long cells, and steps in the middle of many, are left out.
    """
    with_shapes = any(node.shapes for node in graph.nodes)
    rows = [["step", "module", "in_keys", "out_keys", "parameters"]]
    if with_shapes:
        rows[0].append("shapes")
    for node in graph.nodes:
        label = node.label if node.needed else f"({node.label})"
        row = [node.name, label, _keys(node.reads), _keys(node.writes), f"{node.parameters:,}"]
        if with_shapes:
            row.append(", ".join(str(shape) for _, shape in node.shapes))
        rows.append(row)
    if short:
        rows = _shortened(rows)
    from kd_core.extending import Table  # programs that print nothing need none

    return Table.of(rows, right=4)


def _shortened(rows: list[list[str]]) -> list[list[str]]:
    if len(rows) > ROWS:
        half = ROWS // 2
        rows = [*rows[:half], ["..."] * len(rows[0]), *rows[-half:]]
    return [
        [text if len(text) <= CELL else f"{text[: CELL - 3]}..." for text in row] for row in rows
    ]


def _keys(keys: tuple[NestedKey, ...]) -> str:
    return ", ".join(dotted(key) for key in keys)


def mermaid(graph: KeyFlow) -> str:
    """Return a key graph as a Mermaid flowchart."""
    lines = ["flowchart LR"]
    inputs = list(graph.inputs)
    for idx, key in enumerate(inputs):
        lines.append(f'    in{idx}(["{_escaped(dotted(key))}"]):::input')
    for idx, node in enumerate(graph.nodes):
        text = _escaped(node.label)
        name = "" if node.name == str(idx) else f"{_escaped(node.name)}: "
        count = f"<br/>{node.parameters:,} parameters" if node.parameters else ""
        kind = "step" if node.needed else "dead"
        lines.append(f'    s{idx}["{name}{text}{count}"]:::{kind}')
    for idx, node in enumerate(graph.nodes):
        for key in node.reads:
            lines += [f"    {edge} s{idx}" for edge in _edges(graph, idx, key, inputs)]
    for number, key in enumerate(graph.outputs):
        source = graph.producer(len(graph.nodes), key)
        if source is not None:
            lines.append(f'    s{source} --> out{number}(["{_escaped(dotted(key))}"]):::output')
    return "\n".join([*lines, *_CLASSES])


def _edges(graph: KeyFlow, idx: int, key: NestedKey, inputs: list[NestedKey]) -> list[str]:
    sources = graph.producers(idx, key)
    if not sources:
        holder = next(place for place, known in enumerate(inputs) if is_prefix(known, key))
        label = "" if inputs[holder] == key else f'|"{_escaped(dotted(key))}"|'
        return [f"in{holder} -->{label}"]
    edges = []
    for source in sources:
        dashed = not (graph.nodes[idx].needed and graph.nodes[source].needed)
        edges.append(f's{source} {"-.->" if dashed else "-->"}|"{_escaped(dotted(key))}"|')
    return edges


def _escaped(text: str) -> str:
    """Return text with the markup characters of Mermaid escaped."""
    for sign, entity in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;")):
        text = text.replace(sign, entity)
    return text


_CLASSES = (
    "    classDef input fill:#ecfdf5,stroke:#059669,color:#064e3b",
    "    classDef step fill:#f8fafc,stroke:#475569,color:#0f172a",
    "    classDef output fill:#eff6ff,stroke:#2563eb,color:#1e3a8a",
    "    classDef dead fill:#f8fafc,stroke:#cbd5e1,color:#94a3b8,stroke-dasharray:4 3",
)


# The key graph as an SVG picture, written here without graphviz.
#
# Steps are boxes with a port per key: what they read on the left, what they write on the right.
# Boxes stand in columns, each one column behind the last step it depends on; within a column they
# are ordered by the positions of their inputs. A key graph is short and mostly a chain, so this is
# enough, and the picture can be drawn without another program.

HEAD, ROW, PAD, GAP_X, GAP_Y, MARGIN, LEGEND = 44, 22, 14, 76, 26, 28, 34
CHARACTER, WIDE_CHARACTER = 7.3, 8.6
LANE, BEND = 14, 30

STYLE = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #334155 }
.title { font: 600 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #0f172a }
.note { font: 11px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #64748b }
.box { fill: #ffffff; stroke: #94a3b8; stroke-width: 1.2 }
.head { fill: #f1f5f9 }
.edge { fill: none; stroke: #64748b; stroke-width: 1.6 }
.port { fill: #ffffff; stroke: #64748b; stroke-width: 1.6 }
.output { fill: #2563eb; stroke: #2563eb }
.output-key { fill: #1d4ed8; font-weight: 600 }
.input { fill: #ecfdf5; stroke: #059669; stroke-width: 1.4 }
.input-key { fill: #065f46; font-weight: 600 }
.dead .box, .dead .head { fill: #fafafa; stroke-dasharray: 4 3; stroke: #cbd5e1 }
.dead .head { stroke: none }
.dead text { fill: #a8b3c2 }
.dead .port { stroke: #cbd5e1 }
.edge.dead { stroke: #cbd5e1; stroke-dasharray: 4 3 }
""".strip()


class Box:
    """A step or an input on the page.

    Args:
        node: The step; None for an input.
        title: The first line of text.
        reads: Keys on the left.
        writes: Keys on the right.

    Attributes:
        column: How many columns from the left.
        sources: The boxes that it reads from.
    """

    __slots__ = (
        "column", "height", "node", "reads", "sources", "title", "width", "writes", "x", "y"
    )  # fmt: skip

    def __init__(
        self,
        node: KeyNode | None,
        title: str,
        reads: tuple[NestedKey, ...],
        writes: tuple[NestedKey, ...],
    ) -> None:
        self.node, self.title, self.reads, self.writes = node, title, reads, writes
        self.column = 0
        self.x = self.y = self.width = self.height = 0.0
        self.sources: list[Box] = []

    def port(self, key: NestedKey, left: bool) -> tuple[float, float]:
        """Return the position of the port of a key."""
        if self.node is None:
            return self.x + self.width, self.y + self.height / 2
        row = (self.reads if left else self.writes).index(key)
        return self.x + (0 if left else self.width), self.y + HEAD + ROW * (row + 0.5) + 4


def svg(graph: KeyFlow) -> str:
    """Return a key graph as an SVG document."""
    boxes = _boxes(graph)
    wires = _wires(graph, boxes)
    _place(boxes)
    paths, lowest = _paths(wires, boxes)
    width = max((box.x + box.width for box in boxes), default=0) + MARGIN
    height = lowest + LEGEND + MARGIN
    width = max(width, 470)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="10" fill="#ffffff"/>',
        *paths,
        *(_box(graph, box, idx - len(graph.inputs)) for idx, box in enumerate(boxes)),
        _legend(graph, height - MARGIN + 4),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _boxes(graph: KeyFlow) -> list[Box]:
    boxes = [Box(None, dotted(key), (), (key,)) for key in graph.inputs]
    for idx, node in enumerate(graph.nodes):
        title = node.label if node.name == str(idx) else f"{node.name}: {node.label}"
        boxes.append(Box(node, title, node.reads, node.writes))
    for box in boxes:
        if box.node is None:
            box.width, box.height = len(box.title) * CHARACTER + 2 * PAD, 30.0
            continue
        left = max((len(dotted(key)) for key in box.reads), default=0)
        right = max((len(dotted(key)) for key in box.writes), default=0)
        keys = (left + right + 3) * CHARACTER
        box.width = max(len(box.title) * WIDE_CHARACTER, keys, len(_note(box.node)) * 6.5) + 2 * PAD
        box.height = HEAD + ROW * max(len(box.reads), len(box.writes), 1) + 10
    return boxes


Wire = tuple[Box, NestedKey, Box, NestedKey, bool]


def _wires(graph: KeyFlow, boxes: list[Box]) -> list[Wire]:
    """Return the wires between ports, and set the columns of the boxes."""
    inputs, steps = boxes[: len(graph.inputs)], boxes[len(graph.inputs) :]
    wires: list[Wire] = []
    for idx, box in enumerate(steps):
        box.column = 1 if inputs else 0
        for key in box.reads:
            for origin in [steps[source] for source in graph.producers(idx, key)] or [
                next(b for b in inputs if is_prefix(b.writes[0], key))
            ]:
                written = next(w for w in origin.writes if is_prefix(w, key) or is_prefix(key, w))
                alive = all(b.node is None or b.node.needed for b in (origin, box))
                wires.append((origin, written, box, key, alive))
                box.sources.append(origin)
                box.column = max(box.column, origin.column + 1)
    return wires


def _place(boxes: list[Box]) -> None:
    columns: dict[int, list[Box]] = {}
    for box in boxes:
        columns.setdefault(box.column, []).append(box)
    tallest = max((_height(column) for column in columns.values()), default=0.0)
    x = float(MARGIN)
    for number in sorted(columns):
        column = columns[number]
        column.sort(key=_middle_of_sources)
        y = MARGIN + (tallest - _height(column)) / 2
        wide = max(box.width for box in column)
        for box in column:
            box.x = x + (wide - box.width) * (1 if box.node is None else 0)
            box.y = y
            if box.node is not None:
                box.width = wide
            y += box.height + GAP_Y
        x += wide + GAP_X


def _height(column: list[Box]) -> float:
    return sum(box.height for box in column) + GAP_Y * (len(column) - 1)


def _middle_of_sources(box: Box) -> float:
    middles = [source.y + source.height / 2 for source in box.sources]
    return sum(middles) / len(middles) if middles else 0.0


def _paths(wires: list[Wire], boxes: list[Box]) -> tuple[list[str], float]:
    """Return the wires as SVG, and the lowest position that is used.

    A wire that would cross a box is routed below the boxes in between, each in its own lane.
    """
    lowest = max((box.y + box.height for box in boxes), default=0.0)
    lanes: dict[tuple[int, NestedKey], float] = {}
    paths = []
    for origin, written, box, key, alive in wires:
        start, end = origin.port(written, left=False), box.port(key, left=True)
        between = [b for b in boxes if origin.column < b.column < box.column]
        span = (min(start[1], end[1]) - 8, max(start[1], end[1]) + 8)
        blocked = [b for b in between if b.y < span[1] and b.y + b.height > span[0]]
        if not blocked:
            paths.append(_curve(start, end, alive))
            continue
        lane = lanes.setdefault((id(origin), written), lowest + LANE)
        lowest = max(lowest, lane)
        paths.append(_detour(start, end, lane, alive))
    return paths, lowest


def _curve(start: tuple[float, float], end: tuple[float, float], alive: bool) -> str:
    (x0, y0), (x1, y1) = start, end
    bend = max((x1 - x0) / 2, BEND)
    return _path(
        f"M{x0:.1f} {y0:.1f} C{x0 + bend:.1f} {y0:.1f} {x1 - bend:.1f} {y1:.1f} {x1:.1f} {y1:.1f}",
        alive,
    )


def _detour(start: tuple[float, float], end: tuple[float, float], lane: float, alive: bool) -> str:
    (x0, y0), (x1, y1) = start, end
    return _path(
        f"M{x0:.1f} {y0:.1f} "
        f"C{x0 + BEND:.1f} {y0:.1f} {x0 + BEND:.1f} {lane:.1f} {x0 + 2 * BEND:.1f} {lane:.1f} "
        f"H{x1 - 2 * BEND:.1f} "
        f"C{x1 - BEND:.1f} {lane:.1f} {x1 - BEND:.1f} {y1:.1f} {x1:.1f} {y1:.1f}",
        alive,
    )


def _path(data: str, alive: bool) -> str:
    return f'<path class="{"edge" if alive else "edge dead"}" d="{data}"/>'


def _box(graph: KeyFlow, box: Box, idx: int) -> str:
    from html import escape  # the `html` of Python loads all entities

    x, y, node = box.x, box.y, box.node
    if node is None:
        return (
            f'<g><rect class="input" x="{x:.1f}" y="{y:.1f}" width="{box.width:.1f}" '
            f'height="{box.height:.1f}" rx="15"/>'
            f'<text class="input-key" x="{x + box.width / 2:.1f}" y="{y + 19.5:.1f}" '
            f'text-anchor="middle">{escape(box.title)}</text></g>'
        )
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{box.width:.1f}"'
    parts = [
        f'<g class="{"step" if node.needed else "dead"}">',
        f"<title>{escape(node.name)}</title>",
        f'<rect class="box" {shape} height="{box.height:.1f}" rx="8"/>',
        f'<path class="head" d="M{x + 1:.1f} {y + HEAD - 2:.1f} v{-HEAD + 11} q0 -8 8 -8 '
        f'h{box.width - 18:.1f} q8 0 8 8 v{HEAD - 11} z"/>',
        f'<text class="title" x="{x + PAD:.1f}" y="{y + 18:.1f}">{escape(box.title)}</text>',
        f'<text class="note" x="{x + PAD:.1f}" y="{y + 33:.1f}">{escape(_note(node))}</text>',
    ]
    for key in box.reads:
        px, py = box.port(key, left=True)
        parts.append(f'<circle class="port" cx="{px:.1f}" cy="{py:.1f}" r="4.5"/>')
        parts.append(f'<text x="{px + 11:.1f}" y="{py + 4:.1f}">{escape(dotted(key))}</text>')
    for key in box.writes:
        px, py = box.port(key, left=False)
        shown = graph.is_output_of(idx, key) and node.needed
        port, text = ("port output", "output-key") if shown else ("port", "")
        parts.append(f'<circle class="{port}" cx="{px:.1f}" cy="{py:.1f}" r="4.5"/>')
        parts.append(
            f'<text class="{text}" x="{px - 11:.1f}" y="{py + 4:.1f}" text-anchor="end">'
            f"{escape(dotted(key))}</text>"
        )
    return "\n".join([*parts, "</g>"])


def _note(node: KeyNode) -> str:
    count = f"{node.parameters:,} parameters" if node.parameters else "no parameters"
    return count if node.needed else "not needed"


def _legend(graph: KeyFlow, y: float) -> str:
    entries = [
        ('<rect class="input" x="0" y="-9" width="18" height="12" rx="6"/>', "input", 66),
        ('<circle class="port output" cx="9" cy="-3" r="4.5"/>', "output", 72),
        ('<circle class="port" cx="9" cy="-3" r="4.5"/>', "used inside", 98),
    ]
    if any(not node.needed for node in graph.nodes):
        dead = '<g class="dead"><rect class="box" x="0" y="-9" width="18" height="12" rx="3"/></g>'
        entries.append((dead, "not needed", 100))
    parts, x = [], MARGIN
    for sign, text, width in entries:
        label = f'<text class="note" x="25">{text}</text>'
        parts.append(f'<g transform="translate({x} {y:.1f})">{sign}{label}</g>')
        x += width
    return "\n".join(parts)


# The key graph as users hold it: the flow of keys, and the ways to show it.


class KeyGraph(KeyFlow):
    """The steps of a keyed module in order, and the keys between them.

    Attributes:
        nodes: The steps, in order.
        out_keys: The outputs that are visible; None stands for all that is written.

    Example:
        >>> from torch import nn
        >>> from kd_nn import TensorDictModule, TensorDictSequential
        >>> graph = TensorDictSequential(
        ...     TensorDictModule(nn.Linear(3, 4), ["x"], ["hidden"]),
        ...     TensorDictModule(nn.ReLU(), ["hidden"], [("out", "y")]),
        ... ).key_graph()
        >>> graph.inputs, graph.writes
        (('x',), ('hidden', ('out', 'y')))
        >>> graph.summary()
        step  module  in_keys   out_keys    parameters
        0     Linear  x         hidden              16
        1     ReLU    hidden    out.y                0
    """

    __slots__ = ()

    def to_mermaid(self) -> str:
        """Return the graph as Mermaid text; steps that are not needed are grey.

        Returns:
            A `flowchart`, which many Markdown viewers draw.
        """
        return mermaid(self)

    def to_svg(self, path: str | Path | None = None) -> str:
        """Return the graph as an SVG picture; steps that are not needed are grey.

        Args:
            path: Where to write the picture too.

        Returns:
            The SVG document.
        """
        text = svg(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def summary(self) -> Table:
        """Return a table: step, module, keys, parameters, and shapes if they are known.

        It is a string, which a prompt shows as lines and a notebook as a table.
        """
        return table(self)

    def __repr__(self) -> str:
        """Return a short table; `summary` gives all of it."""
        return table(self, short=True)

    def _repr_svg_(self) -> str:
        """Return the picture that a notebook shows."""
        return self.to_svg()
