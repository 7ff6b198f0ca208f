"""What an update does to each entry: checked and noted first, then done.

The functions append to a stage, a list of calls that the caller makes when everything is checked.
New names for keys, and entries that move between levels, stand here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from torch import Tensor
from torch.compiler import is_compiling

from kd_core._errors import KeyCollision, batch_does_not_fit, wrong_type
from kd_core._keys import KeyPath, format_key, path_of, plain_str, several
from kd_core._leaves.foreach import PLAIN
from kd_core._leaves.loops import kinds_by_key, missing_key, walk_error
from kd_core._leaves.writes import Write, check_write, write_all, write_checked
from kd_core._nodes.entry import is_row_data, is_unbatched
from kd_core._protocol.composite import Composite, are_alike, rows_or_stacked, unchanged_on_error
from kd_core._protocol.primitives import AbstractContainer, lowest_level
from kd_core._protocol.validation import Branch, spread_keys
from kd_core._types import NoDefault

if TYPE_CHECKING:
    from typing import TypeVar

    from kd_core._nodes.entry import Data, Entry
    from kd_core._types import NestedKey

    W = TypeVar("W", bound=AbstractContainer)

_Commit: TypeAlias = "Callable[[], None]"
Staged: TypeAlias = "list[_Commit | _Deciding]"
LeafTest: TypeAlias = Callable[[type], bool]
_LEVELS: Final = (AbstractContainer, Mapping)
_TENSORS: Final = (AbstractContainer, Tensor)


class Update:
    """How an update treats each entry."""

    __slots__ = ("clone", "inplace", "is_leaf", "non_blocking", "only")

    def __init__(
        self,
        clone: bool = False,
        inplace: bool = False,
        only: list[KeyPath] | None = None,
        non_blocking: bool = False,
        is_leaf: LeafTest | None = None,
    ) -> None:
        self.clone, self.inplace, self.only = clone, inplace, only
        self.non_blocking, self.is_leaf = non_blocking, is_leaf

    def below(self, only: list[KeyPath] | None) -> Update:
        """Return the same rules for a nested container."""
        return Update(self.clone, self.inplace, only, self.non_blocking, self.is_leaf)

    def merges(self, value: object) -> bool:
        """Return whether a container or mapping is merged into the container that is there."""
        return self.is_leaf is None or not self.is_leaf(type(value))


def source_items(source: object, method: str) -> Mapping[str, object]:
    if isinstance(source, AbstractContainer):
        return source._kd_entries
    if not isinstance(source, Mapping):
        raise wrong_type(f"the source of `{method}`", "a mapping or a container", source)
    for key in source:
        if type(key) is not str:
            return spread_keys(source)
    return source


def sources_of(source: object, entries: dict[str, object]) -> list[object]:
    """Return the sources of an update: the one that is given, and the entries by keyword.

    The keyword `ignore_lock` of tensordict is not an entry and does nothing; `None` is not a
    source.
    """
    entries.pop("ignore_lock", None)
    sources = [] if source is None or isinstance(source, NoDefault) else [source]
    return [*sources, entries] if entries else sources


def paths_to_update(keys: Iterable[NestedKey]) -> list[KeyPath]:
    """Return the paths of the keys that alone are updated."""
    return [path_of(key) for key in several(keys, "`keys_to_update`")]


def _narrowed(
    only: list[KeyPath] | None, key: str, value: object
) -> tuple[bool, list[KeyPath] | None]:
    """Return whether an update takes the value at `key`, and which paths below it."""
    if only is None:
        return True, None
    below = [path[1:] for path in only if path[0] == key]
    if not below:
        return False, None
    if () in below:
        return True, None
    return isinstance(value, _LEVELS), below  # nothing is below a tensor


def narrowed_items(items: Mapping[str, object], only: list[KeyPath]) -> dict[str, object]:
    """Return the part of a source that some paths name, nested levels as plain dicts."""
    found: dict[str, object] = {}
    for key, value in items.items():
        taken, below = _narrowed(only, key, value)
        if taken and below is not None:
            found[key] = narrowed_items(source_items(value, "update_at_"), below)
        elif taken:
            found[key] = value
    return found


def merge(td: AbstractContainer, sources: Iterable[object], how: Update) -> None:
    """Store the entries of some sources, merging nested ones. All or nothing."""
    stage: Staged = []
    in_stack = [stage_merge(td, each, (), how, stage) for each in sources]
    if any(in_stack):
        with unchanged_on_error(td):
            commit_all(stage)
    else:
        commit_all(stage)


def stage_merge(
    level: AbstractContainer, source: object, path: KeyPath, how: Update, stage: Staged
) -> bool:
    """Stage an update from a source; a stack takes the entries of one like it member by member.

    Returns:
        Whether a stack is among the levels, which splits an entry when it is stored.
    """
    if (
        not how.inplace
        and isinstance(level, Composite)
        and isinstance(source, Composite)
        and are_alike(level, source)
    ):
        for member, part in zip(level._members, source._members, strict=True):
            stage_merge(member, part, path, how, stage)
        return True
    return _stage_update(level, _entries_for(level, source, "update"), path, how, stage)


def _entries_for(
    level: AbstractContainer, source: object, method: str
) -> Iterable[tuple[str, object]]:
    """Iterate over the entries of a source; a stack takes the rows of one like it as they are."""
    items = source_items(source, method)
    stacks = isinstance(level, Composite) and isinstance(source, Composite)
    if not (stacks and are_alike(cast("Composite", level), cast("Composite", source))):
        return items.items()
    return [(key, rows_or_stacked(cast("Composite", source), key)) for key in items]


def _stage_update(
    level: AbstractContainer,
    items: Iterable[tuple[str, object]],
    path: KeyPath,
    how: Update,
    stage: Staged,
) -> bool:
    """Check each entry and append what to do to the stage; nothing is changed here."""
    kinds = kinds_by_key(level._kd_entries)
    in_stack = isinstance(level, Composite)
    for key, value in items:
        taken, only = _narrowed(how.only, key, value)
        if not taken:
            continue
        current = kinds.get(key)
        merged = isinstance(value, _LEVELS) and how.merges(value)
        if merged and isinstance(current, AbstractContainer):
            in_stack |= stage_merge(current, value, (*path, key), how.below(only), stage)
            continue
        if value.__class__ is Branch and key in kinds:  # as `set` does; a mapping replaces a leaf
            raise walk_error((*path, key, next(iter(value))), len(path) + 1, current)
        if how.inplace and _can_be_written(level, current):
            stage.append(_staged_write(level, (*path, key), value, how.non_blocking))
            continue
        level._kd_check_unlocked(f"update {format_key((*path, key))}")
        if how.non_blocking and isinstance(value, Tensor):
            value = value.to(level._kd_desc.device, non_blocking=True)
        entry = level._kd_as_entry(key, value, path)
        if how.clone:
            entry = entry.clone() if isinstance(entry, Tensor) else entry._kd_map_each(Tensor.clone)
        stage.append(_staged_set(level, key, entry))
    return in_stack


def commit_all(stage: Staged) -> None:
    """Run what was staged."""
    commits = cast("list[_Commit]", stage) if is_compiling() else _after_deciding(stage)
    for commit in commits:
        commit()


def _after_deciding(stage: Staged) -> list[_Commit]:
    """Run the staged writes that may fail, all or none; return what else was staged."""
    doubtful = [each for each in stage if isinstance(each, _Deciding)]
    if doubtful:
        write_all([each for staged in doubtful for each in staged.writes], doubtful[0].non_blocking)
    return [each for each in stage if not isinstance(each, _Deciding)]


class _Deciding:
    """The staged writes of a value, of which one is not of a plain tensor into another."""

    __slots__ = ("non_blocking", "writes")

    def __init__(self, writes: Sequence[Write], non_blocking: bool) -> None:
        self.writes = writes
        self.non_blocking = non_blocking


def _staged_set(level: AbstractContainer, key: str, entry: Entry) -> _Commit:
    return lambda: level._kd_set_entry(key, entry)


def _staged_write(
    level: AbstractContainer, path: KeyPath, value: object, non_blocking: bool = False
) -> _Commit | _Deciding:
    writes = level._kd_writes(path[-1], value, path)
    if is_compiling():
        return lambda: write_all(writes, non_blocking)
    plain = True
    for target, source, where in writes:
        check_write(target, source, where)
        if target.__class__ not in PLAIN or source.__class__ not in PLAIN:
            plain = False
    if plain:
        return lambda: write_checked(writes, non_blocking)
    return _Deciding(writes, non_blocking)


def _can_be_written(level: AbstractContainer, current: Entry | None) -> bool:
    """Return whether an entry is a tensor, or data with one value for each row."""
    if current is None or isinstance(current, AbstractContainer):
        return False
    if isinstance(current, Tensor) or is_row_data(current) or is_unbatched(current):
        return True
    return isinstance(level, Composite) and not cast("Data", current)._of_batch


def _is_same_data(current: Entry, value: object) -> bool:
    """Return whether an entry is non-tensor data equal to the value: nothing is to be written."""
    if isinstance(current, _TENSORS) or isinstance(value, _TENSORS):
        return False
    return not is_unbatched(current) and cast("Data", current)._agrees(value)


def stage_writes(
    level: AbstractContainer, source: object, path: KeyPath, how: Update, stage: Staged
) -> None:
    """Stage the writes of a source into entries that exist."""
    kinds = kinds_by_key(level._kd_entries)
    for key, value in _entries_for(level, source, "update_"):
        taken, below = _narrowed(how.only, key, value)
        if not taken:
            continue
        if key not in kinds:
            level._kd_check_key(key)
            entries = level._kd_entries
            raise missing_key((*path, key), len(path), entries, entries, path)
        current = kinds[key]
        if isinstance(current, AbstractContainer) and isinstance(value, _LEVELS):
            stage_writes(current, value, (*path, key), how.below(below), stage)
        elif not _is_same_data(current, value):
            stage.append(_staged_write(level, (*path, key), value, how.non_blocking))


KeyFn: TypeAlias = Callable[[str], str]
"""A function from a key of one level to its new name."""


def renamed(td: W, name: KeyFn, path: tuple[str, ...] = ()) -> W:
    """Return a container whose keys have new names at every level; tensors are shared.

    Raises:
        KeyCollision: if two keys of a level get the same name.
        InvalidArgument: if a name is not a string.
    """
    if isinstance(td, Composite):
        return td._by_member(lambda member: renamed(member, name, path))
    entries: dict[str, Entry] = {}
    for key, value in td._kd_entries.items():
        new: object = name(key)
        if not isinstance(new, str):
            raise wrong_type(f"the new name of {format_key((*path, key))}", "a string", new)
        new = plain_str(new)
        if new in entries:
            raise KeyCollision(
                f"two keys would be renamed to {format_key((*path, new))}. Return a name of its "
                "own for each key."
            )
        if isinstance(value, AbstractContainer):
            value = cast("Entry", renamed(value, name, (*path, key)))
        entries[new] = value
    return td._kd_like(entries, td._kd_desc.unlocked())


def store_moved(td: AbstractContainer, path: tuple[str, ...], entry: Entry) -> None:
    """Store an entry that was removed elsewhere in a container.

    Raises:
        ShapeMismatch: if it does not fit the batch size of its new level; the value of one row does
            not become one of a batch.
    """
    level, _ = lowest_level(td, path)
    if level._kd_desc.ndim and not isinstance(entry, (Tensor, AbstractContainer)):
        batch = entry._kd_desc.batch
        if not batch and not cast("Data", entry)._of_batch:
            raise batch_does_not_fit(format_key(path), level._kd_desc.batch, batch)
    td._kd_store(path, entry)
