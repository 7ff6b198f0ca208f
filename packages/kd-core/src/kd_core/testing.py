"""Tools for tests: comparison of containers, and the contract that every container kind fulfils.

The contract is a suite of tests that a class inherits.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kd_core._base import TensorDictBase, is_tensor_collection
from kd_core._containers.non_tensor import MetaData, NonTensorDataBase
from kd_core._containers.tensordict import TensorDict
from kd_core._errors import (
    InvalidKey,
    InvalidValue,
    KdError,
    KeyNotFound,
    KeySetMismatch,
    Locked,
    OutOfRange,
    ShapeMismatch,
)
from kd_core._keys import format_key, path_of
from kd_core._leaves.loops import same_data, unwrapped
from kd_core._ops.joining import cat, stack
from kd_core._protocol import AbstractContainer, Composite
from kd_core._torch_private import torch_tree
from kd_core._types import NestedKey
from kd_core._unbatched import UnbatchedTensor

# Comparison of containers in tests, with messages that name the key.

_Comparable: TypeAlias = "AbstractContainer | Mapping[str, object]"


class _How(NamedTuple):
    """How two containers are compared: the options of `assert_close`."""

    rtol: float | None
    atol: float | None
    equal_nan: bool
    intersection: bool
    batch_size: bool


def assert_close(
    actual: TensorDictBase | Mapping[str, object],
    expected: TensorDictBase | Mapping[str, object],
    *,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = True,
    intersection: bool = False,
    batch_size: bool = True,
    msg: str = "",
    prefix: NestedKey = (),
) -> Literal[True]:
    """Assert that two containers have the same keys, data and batch sizes, and close tensors.

    Either may be a nested mapping of tensors; then batch sizes are not compared. The kinds of
    containers and the order of keys are not compared.

    Args:
        actual: the container to check.
        expected: the expected container.
        rtol: the relative tolerance; `None`: the default of `torch.testing.assert_close`.
        atol: the absolute tolerance; must be given together with `rtol`.
        equal_nan: NaN is equal to NaN.
        intersection: compare only the keys that both have.
        batch_size: compare batch sizes.
        msg: what the message of a difference starts with.
        prefix: the key of the containers, for messages.

    Returns:
        True: a difference raises.

    Raises:
        AssertionError: if they differ; the message names the key and the difference.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> from kd_core.testing import assert_close
        >>> assert_close(TensorDict({"a": torch.zeros(2)}, [2]), {"a": torch.zeros(2)})
        True
    """
    how = _How(rtol, atol, equal_nan, intersection, batch_size)
    try:
        _compare(actual, expected, how, path_of(prefix) if prefix else ())
    except AssertionError as error:
        raise AssertionError(f"{msg} {error}") if msg else error from None
    return True


assert_allclose_td = assert_close


def _compare(
    actual: _Comparable,
    expected: _Comparable,
    how: _How,
    path: tuple[str, ...],
) -> None:
    where = format_key(path) if path else "the container"
    if _is_ragged(actual) or _is_ragged(expected):
        for number, members in enumerate(_members(actual, expected, where)):
            _compare(*members, how, (*path, f"member {number}"))
        return
    mine, theirs = _level(actual), _level(expected)
    if mine.keys() != theirs.keys() and not how.intersection:
        raise AssertionError(f"expected the keys {sorted(theirs)} in {where}, got {sorted(mine)}.")
    if (
        how.batch_size
        and isinstance(actual, AbstractContainer)
        and isinstance(expected, AbstractContainer)
    ):
        got, wanted = tuple(actual._kd_desc.batch), tuple(expected._kd_desc.batch)
        if got != wanted:
            raise AssertionError(f"expected batch_size {wanted} in {where}, got {got}.")
    for key, value in mine.items():
        if key not in theirs:
            continue
        inner = (*path, key)
        other = theirs[key]
        if isinstance(value, UnbatchedTensor) and isinstance(other, UnbatchedTensor):
            value, other = value.data, other.data
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            _compare_leaves(value, other, how, inner)
        elif _is_level(value) and _is_level(other):
            _compare(value, other, how, inner)
        elif not _same_data(value, other):
            raise AssertionError(f"expected {other!r} in {format_key(inner)}, got {value!r}.")


def _at(content: dict[str, Any], *path: str) -> dict[str, Tensor]:
    """Return a level of the content, to read and write its leaves."""
    for key in path:
        content = content[key]
    return content


def _is_ragged(value: _Comparable) -> bool:
    """Return whether a value is a lazy stack that has entries of different shapes."""
    if not isinstance(value, Composite):
        return False
    try:
        for _ in value._kd_entries.values():
            pass
    except ShapeMismatch:
        return True
    return value._kd_desc.open


def _members(
    actual: _Comparable, expected: _Comparable, where: str
) -> list[tuple[_Comparable, _Comparable]]:
    """Return the members of two lazy stacks in pairs."""
    if not isinstance(actual, Composite) or not isinstance(expected, Composite):
        raise AssertionError(f"expected both of {where} to be ragged, got one that is.")
    got, wanted = (len(actual._members), actual._dim), (len(expected._members), expected._dim)
    if got != wanted:
        raise AssertionError(
            f"expected a lazy stack of {wanted[0]} members along dimension {wanted[1]} in {where}, "
            f"got one of {got[0]} along {got[1]}."
        )
    return [*zip(actual._members, expected._members, strict=True)]


def _level(value: _Comparable) -> Mapping[str, object]:
    return value._kd_entries if isinstance(value, AbstractContainer) else value


def _is_level(value: object) -> TypeGuard[_Comparable]:
    return isinstance(value, (AbstractContainer, Mapping))


def _compare_leaves(
    actual: Tensor,
    expected: Tensor,
    how: _How,
    path: tuple[str, ...],
) -> None:
    torch.testing.assert_close(
        actual,
        expected,
        rtol=how.rtol,
        atol=how.atol,
        equal_nan=how.equal_nan,
        msg=lambda text: f"{format_key(path)}: {text}",
    )


def _same_data(value: object, other: object) -> bool:
    plain, wanted = unwrapped(value), unwrapped(other)
    if isinstance(plain, Tensor) or isinstance(wanted, Tensor):
        return False
    return same_data(plain, wanted) or _same_rows(value, other)


def _same_rows(value: object, other: object) -> bool:
    """Return whether one has a value for all rows, and the other the same one for each."""
    if not isinstance(value, NonTensorDataBase) or not isinstance(other, NonTensorDataBase):
        return False
    if isinstance(other, MetaData):  # a value beside the rows is that of each of them
        return all(same_data(row, other.data) for row in _rows(value.tolist(), value.batch_dims))
    return value.batch_size == other.batch_size and same_data(value.tolist(), other.tolist())


def _rows(values: object, dims: int) -> list[object]:
    """Return the values of nested lists, row by row."""
    if not dims or not isinstance(values, list):
        return [values]
    return [row for inner in values for row in _rows(inner, dims - 1)]


# The content of every container under test, also as nested dicts for comparison.

_BATCH = (3, 4)


class _Contract:
    """The methods that a kind implements, and the helpers of all tests.

    Attributes:
        fixed_keys: whether no key can be added after construction.
    """

    fixed_keys: ClassVar[bool] = False

    def make(self) -> TensorDictBase:
        """Build a new, unlocked container that holds `content()`, with batch size (3, 4)."""
        raise NotImplementedError("implement `make()`: return a container that holds `content()`")

    @staticmethod
    def content() -> dict[str, object]:
        """Build the content: leaves of several ranks and dtypes, two nested levels, and data."""
        count = 12
        return {
            "a": torch.arange(float(count)).reshape(_BATCH) / 4,
            "b": torch.arange(count * 2).reshape(*_BATCH, 2),
            "n": {
                "c": torch.arange(count * 5.0).reshape(*_BATCH, 5) - 7,
                "d": {"e": torch.arange(count, dtype=torch.int32).reshape(_BATCH)},
            },
            "word": MetaData("reach"),  # which stays one value in every operation
        }


def _mapped(content: dict[str, object], fn: Callable[[Tensor], Tensor]) -> dict[str, object]:
    """Apply a function to each tensor of nested dicts."""
    return {
        key: _mapped(value, fn)
        if isinstance(value, dict)
        else (fn(value) if isinstance(value, Tensor) else value)
        for key, value in content.items()
    }


def _holds(
    td: TensorDictBase, content: dict[str, object], batch_size: tuple[int, ...] = _BATCH
) -> None:
    """Assert content and batch size."""
    assert tuple(td.batch_size) == batch_size, f"{tuple(td.batch_size)} is not {batch_size}"
    assert_close(td, content)
    for key, value in td.items(True):
        if isinstance(value, Tensor):
            assert value.shape[: len(batch_size)] == batch_size, key


def _inner(td: TensorDictBase, *path: str) -> TensorDictBase:
    """Return the nested container at a path."""
    found: object = td.get(path)
    assert isinstance(found, TensorDictBase), f"{path} is a {type(found).__name__}"
    return found


@contextmanager
def _refused(error: type[Exception], *words: str) -> Iterator[None]:
    """Assert that an error is raised, and that its message contains these words."""
    try:
        yield
    except error as raised:
        text = str(raised)
        lacking = [word for word in words if word not in text]
        assert not lacking, f"expected {lacking} in the message, got: {text}"
    else:
        raise AssertionError(f"expected {error.__name__}, got no error")


@contextmanager
def _unchanged(td: TensorDictBase) -> Iterator[None]:
    """Assert that a container has the same content, batch size and lock afterwards."""
    before, batch, locked = (
        td.clone().to_dict(retain_none=False),
        tuple(td.batch_size),
        td.is_locked,
    )
    yield
    _holds(td, before, batch)
    assert td.is_locked is locked


# _Contract: the batch dimensions behave as on a tensor of shape `batch_size`.

_MASK = torch.tensor([True, False, True])
_GRID = torch.arange(12).reshape(_BATCH) % 5 == 0
_INDICES: tuple[object, ...] = (
    0,
    -1,
    slice(1, 3),
    slice(None, None, 2),
    slice(2, 2),
    None,
    Ellipsis,
    _MASK,
    _GRID,
    [2, 0],
    torch.tensor([2, 0, 0]),
    torch.tensor([[0, 1], [2, 2]]),
    (0, 1),
    (slice(None), 2),
    (slice(1, 3), slice(0, 2)),
    (Ellipsis, 1),
    (None, 0, Ellipsis, None),
    (_MASK, 1),
    (slice(None), torch.tensor([3, 0])),
    (torch.tensor([0, 1]), torch.tensor([3, 0])),
)


def _shape(index: object) -> tuple[int, ...]:
    return tuple(torch.empty(_BATCH)[index].shape)  # type: ignore[index]  # any of the above


def _whole(index: object) -> object:
    """Return the index for a leaf, which keeps its trailing dimensions."""
    items = index if isinstance(index, tuple) else (index,)
    if not any(item is Ellipsis for item in items):
        return index
    place = next(i for i, item in enumerate(items) if item is Ellipsis)
    used = sum(item is not None and item is not Ellipsis for item in items)
    return (*items[:place], *(slice(None),) * (len(_BATCH) - used), *items[place + 1 :])


class _Indexing(_Contract):
    def test_an_index_takes_what_it_takes_of_a_tensor(self) -> None:
        for index in _INDICES:
            td = self.make()
            with _unchanged(td):
                taken: TensorDictBase = td[index]  # type: ignore[call-overload]  # any of the above
            at = _whole(index)
            expected = _mapped(self.content(), lambda leaf, at=at: leaf[at])  # type: ignore[misc]  # a default binds the loop variable
            _holds(taken, expected, _shape(index))

    def test_a_bad_index_is_refused(self) -> None:
        td = self.make()
        with _refused(OutOfRange, "3"):
            td[3]
        with _refused(OutOfRange, "too many indices"):
            td[0, 0, 0]
        with _refused(OutOfRange, "mask", "(4,)"):
            td[torch.ones(4, dtype=torch.bool)]
        with _refused(KdError, "index"):
            td[1.5]  # type: ignore[call-overload]  # what is refused

    def test_one_value_is_written_to_rows(self) -> None:
        for index in _INDICES:
            td, content = self.make(), self.content()
            td[index] = 1
            _write(content, _whole(index), lambda rows: 1)
            _holds(td, content)

    def test_rows_of_a_container_are_written(self) -> None:
        for index in _INDICES:
            td, content = self.make(), self.content()
            td[index] = (self.make() * 3)[index]  # type: ignore[call-overload]  # any of the above
            _write(content, _whole(index), lambda rows: rows * 3)
            _holds(td, content)

    def test_a_source_may_have_fewer_keys(self) -> None:
        td, content = self.make(), self.content()
        td[0] = {"a": torch.zeros(4), "n": {"c": torch.ones(5)}}
        _at(content)["a"][0] = 0
        _at(content, "n")["c"][0] = 1
        _holds(td, content)

    def test_a_locked_container_gets_no_keys_by_rows(self) -> None:
        td = self.make().lock_()
        with _unchanged(td), _refused(KdError, "`x`"):
            td[0] = {"a": torch.zeros(4), "x": torch.zeros(4)}

    def test_rows_that_do_not_fit_change_nothing(self) -> None:
        td = self.make()
        with _unchanged(td), _refused(ShapeMismatch, "`b`"):
            td[0] = {"a": torch.zeros(4), "b": torch.zeros(9)}

    def test_rows_of_one_entry_are_read_and_written(self) -> None:
        td, content = self.make(), self.content()
        td.set_at_(("n", "c"), 9.0, (0, 1))
        _at(content, "n")["c"][0, 1] = 9
        _holds(td, content)
        torch.testing.assert_close(td.get_at("b", 1), td["b"][1])


def _write(content: dict[str, object], at: object, value: Callable[[Tensor], object]) -> None:
    def written(leaf: Tensor) -> Tensor:
        leaf[at] = value(leaf[at])  # type: ignore[index, assignment]  # any of the above
        return leaf

    _mapped(content, written)


_ROWS = torch.arange(12).reshape(_BATCH)
_SHAPES: tuple[tuple[str, Callable[[TensorDictBase], TensorDictBase], Tensor], ...] = (
    ("reshape", lambda td: td.reshape(2, 6), _ROWS.reshape(2, 6)),
    ("reshape -1", lambda td: td.reshape(-1), _ROWS.reshape(-1)),
    ("flatten", lambda td: td.flatten(0, 1), _ROWS.flatten()),
    ("unflatten", lambda td: td.unflatten(1, (2, 2)), _ROWS.reshape(3, 2, 2)),
    ("permute", lambda td: td.permute(1, 0), _ROWS.permute(1, 0)),
    ("transpose", lambda td: td.transpose(0, 1), _ROWS.transpose(0, 1)),
    ("unsqueeze", lambda td: td.unsqueeze(-1), _ROWS.unsqueeze(-1)),
    ("squeeze", lambda td: td.unsqueeze(0).squeeze(0), _ROWS),
    ("expand", lambda td: td.expand(2, 3, 4), _ROWS.expand(2, 3, 4)),
    ("repeat", lambda td: td.repeat(2, 1), _ROWS.repeat(2, 1)),
    ("roll", lambda td: td.roll(1, 0), _ROWS.roll(1, 0)),
    ("flip", lambda td: td.flip(0), _ROWS.flip(0)),
    ("split", lambda td: td.split(2, 1)[1], _ROWS[:, 2:]),
    ("chunk", lambda td: td.chunk(2, 0)[0], _ROWS.chunk(2, 0)[0]),
    ("unbind 0", lambda td: td.unbind(0)[2], _ROWS.unbind(0)[2]),
    ("unbind 1", lambda td: td.unbind(1)[2], _ROWS.unbind(1)[2]),
    ("narrow", lambda td: td.narrow(1, 1, 2), _ROWS.narrow(1, 1, 2)),
)


class _Shaping(_Contract):
    def test_rearranging_moves_rows_as_in_a_tensor(self) -> None:
        for name, change, rows in _SHAPES:
            td = self.make()
            with _unchanged(td):
                result = change(td)
            flat = _mapped(self.content(), lambda leaf: leaf.flatten(0, 1))
            expected = _mapped(flat, lambda leaf, rows=rows: leaf[rows])  # type: ignore[misc]  # a default binds the loop variable
            try:
                _holds(result, expected, tuple(rows.shape))
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error

    def test_copies_of_it_are_stacked_and_joined(self) -> None:
        td = self.make()
        content = self.content()
        for join in (stack, _torch_stack):
            rows = _mapped(content, lambda leaf: torch.stack([leaf, leaf], 1))
            _holds(join([td, self.make()], 1), rows, (3, 2, 4))
        joined = _mapped(content, lambda leaf: torch.cat([leaf, leaf[:1]], 0))
        _holds(cat([td, self.make()[:1]], 0), joined, (4, 4))

    def test_rows_are_put_together_by_a_data_loader(self) -> None:
        batches = list(DataLoader(cast("Dataset[TensorDictBase]", self.make()), batch_size=2))
        _holds(batches[0], _mapped(self.content(), lambda leaf: leaf[:2]), (2, 4))
        rows = DataLoader(cast("Dataset[TensorDictBase]", list(self.make())), batch_size=3)
        _holds(next(iter(rows)), self.content())

    def test_where_chooses_rows(self) -> None:
        td = self.make()
        chosen = td.where(_GRID, self.make() * 2)
        doubled = (self.make() * 2).to_dict(retain_none=False)
        assert_close(chosen[_GRID], td[_GRID])
        assert_close(chosen[~_GRID], _mapped(doubled, lambda leaf: leaf[~_GRID]))

    def test_a_shape_that_does_not_fit_is_refused(self) -> None:
        td = self.make()
        with _unchanged(td), _refused(KdError, "5"):
            td.reshape(5, 2)
        with _unchanged(td), _refused(OutOfRange, "2"):
            td.unbind(2)


def _torch_stack(containers: list[TensorDictBase], dim: int) -> TensorDictBase:
    found: object = torch.stack(containers, dim)  # type: ignore[arg-type]  # containers
    assert isinstance(found, TensorDictBase)
    return found


class _BatchContract(_Indexing, _Shaping):
    """The tests of batch dimensions."""


# _Contract: copies, conversion and pickling.

_Way: TypeAlias = Callable[[TensorDictBase], TensorDictBase]
_DEEP: tuple[_Way, ...] = (lambda td: td.clone(), copy.deepcopy)
_SHALLOW: tuple[_Way, ...] = (lambda td: td.clone(recurse=False), copy.copy, lambda td: td.copy())


class _CopyContract(_Contract):
    """The tests of copies and pickling."""

    def test_a_deep_copy_shares_nothing(self) -> None:
        for deep in _DEEP:
            td = self.make()
            other = deep(td)
            _holds(other, self.content())
            with _unchanged(td):
                other.update_(self.make() * 0)
                other.mul_(0)
            _holds(other, _mapped(self.content(), torch.zeros_like))

    def test_a_shallow_copy_shares_values_but_no_level(self) -> None:
        for shallow in _SHALLOW:
            td, content = self.make(), self.content()
            other = shallow(td)
            with _unchanged(td):
                other["a"] = torch.ones(_BATCH)
                other["n", "c"] = torch.ones(_BATCH)
                _inner(other, "n", "d")["e"] = torch.ones(_BATCH)
            other.set_("b", 0)
            content["b"] = torch.zeros(*_BATCH, 2, dtype=torch.int64)
            _holds(td, content)

    def test_it_becomes_nested_dicts(self) -> None:
        plain = self.make().to_dict(retain_none=False)
        assert type(plain) is dict
        assert type(plain["n"]) is dict
        assert_close(plain, self.content())

    def test_it_is_pickled(self) -> None:
        td = self.make().lock_()
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            other = pickle.loads(pickle.dumps(td, protocol))
            assert type(other) is type(td)
            _holds(other, self.content())
            assert other.is_locked
            assert not other.unlock_().is_locked

    def test_it_is_loaded_with_weights_only(self) -> None:
        file = io.BytesIO()
        torch.save(self.make(), file)
        file.seek(0)
        _holds(torch.load(file, weights_only=True), self.content())

    def test_it_is_a_pytree(self) -> None:
        td = self.make()
        with _unchanged(td):
            doubled = torch_tree.tree_map(lambda leaf: leaf * 2, td)
        _holds(doubled, _mapped(self.content(), lambda leaf: leaf * 2))
        assert len(torch_tree.tree_leaves(td)) == 4
        assert torch_tree.tree_structure(td) == torch_tree.tree_structure(td.clone())

    def test_its_batch_shrinks_inside_vmap(self) -> None:
        seen: list[tuple[int, ...]] = []

        def double(row: TensorDictBase) -> TensorDictBase:
            seen.append(tuple(row.batch_size))
            return row * 2

        _holds(torch.vmap(double)(self.make()), _mapped(self.content(), lambda leaf: leaf * 2))
        assert seen == [_BATCH[1:]]

    def test_it_prints_its_keys_shapes_and_batch_size(self) -> None:
        text = repr(self.make())
        assert text.startswith(f"{type(self.make()).__name__}(batch_size=[3, 4], ")
        for part in ("i32[", "'reach'"):
            assert part in text


# _Contract: reading and writing by key, and changing which keys there are.


class _Reading(_Contract):
    def test_it_holds_its_content(self) -> None:
        _holds(self.make(), self.content())

    def test_it_is_a_container_and_a_mapping(self) -> None:
        td = self.make()
        assert is_tensor_collection(td)
        assert isinstance(td, TensorDictBase)
        as_object: object = td
        assert isinstance(as_object, Mapping)

    def test_a_key_reads_its_entry(self) -> None:
        td = self.make()
        torch.testing.assert_close(td["a"], td.get("a"))
        torch.testing.assert_close(td["n", "c"], _inner(td, "n")["c"])
        assert td["word"] == "reach"
        assert td["n"].batch_size == _BATCH  # type: ignore[attr-defined]  # a container

    def test_a_missing_key_gives_the_default(self) -> None:
        td = self.make()
        assert td.get("x") is None
        assert td.get(("n", "x"), 3) == 3
        assert td.get(("x", "y"), "none") == "none"

    def test_a_missing_key_is_named_with_the_nearest(self) -> None:
        td = self.make()
        with _refused(KeyNotFound, "`wrod`", "Did you mean `word`?"):
            td["wrod"]
        with _refused(KeyNotFound, "`('n', 'x')`", "`c`", "`d`"):
            td["n", "x"]
        with _refused(KeyNotFound, "`('a', 'x')`", "goes through `a`", "tensor"):
            td["a", "x"]

    def test_keys_are_seen_by_views(self) -> None:
        td = self.make()
        assert sorted(map(str, td.keys())) == ["a", "b", "n", "word"]
        assert set(td.keys(True, True)) == {"a", "b", ("n", "c"), ("n", "d", "e")}
        assert ("n", "d") in td.keys(True)
        assert ("n", "d") not in td.keys(True, True)
        assert [key for key, _ in td.items()] == list(td.keys())
        assert len(list(td.values(True, True))) == 4

    def test_membership_is_by_key(self) -> None:
        td = self.make()
        assert "a" in td
        assert ("n", "d", "e") in td
        assert "x" not in td
        assert ("a", "x") not in td
        with _refused(InvalidKey, "`in` asks for keys"):
            assert td["a"] in td

    def test_it_spreads_like_a_mapping(self) -> None:
        td: Mapping[str, object] = cast("Mapping[str, object]", self.make())
        assert {**td}.keys() == dict(td).keys() == {"a", "b", "n", "word"}

    def test_length_and_iteration_walk_the_first_dimension(self) -> None:
        td = self.make()
        assert len(td) == _BATCH[0]
        assert [tuple(row.batch_size) for row in td] == [_BATCH[1:]] * _BATCH[0]

    def test_truth_and_hash_are_refused(self) -> None:
        td = self.make()
        with _refused(InvalidValue, "ambiguous"):
            bool(td)
        with _refused(TypeError, "unhashable"):
            hash(td)


class _Writing(_Contract):
    def test_a_written_key_is_read_back(self) -> None:
        td, content = self.make(), self.content()
        td["a"] = content["a"] = torch.ones(*_BATCH, 2)
        td["n", "c"] = torch.zeros(_BATCH)
        _at(content, "n")["c"] = torch.zeros(_BATCH)
        td.set("word", MetaData("grasp"))
        content["word"] = "grasp"
        _holds(td, content)

    def test_a_value_that_does_not_fit_is_refused(self) -> None:
        td = self.make()
        with _unchanged(td), _refused(ShapeMismatch, "`a`", "(3, 4)", "(4, 3)"):
            td["a"] = torch.zeros(4, 3)
        with _unchanged(td), _refused(ShapeMismatch, "'c'", "must start with"):
            td["n"] = {"c": torch.zeros(2)}

    def test_a_key_that_is_no_key_is_refused(self) -> None:
        td = self.make()
        with _unchanged(td), _refused(InvalidKey, "string"):
            td.set(3, torch.zeros(_BATCH))  # type: ignore[call-overload]  # what is refused

    def test_new_keys_are_added_or_refused(self) -> None:
        td, content = self.make(), self.content()
        if self.fixed_keys:
            with _unchanged(td), _refused(KdError, "`new`"):
                td["new"] = torch.ones(_BATCH)
            return
        td["new"] = content["new"] = torch.ones(_BATCH)
        td["m", "deep", "x"] = torch.zeros(_BATCH)
        content["m"] = {"deep": {"x": torch.zeros(_BATCH)}}
        td.setdefault("late", torch.ones(_BATCH))
        content["late"] = torch.ones(_BATCH)
        _holds(td, content)
        torch.testing.assert_close(td.setdefault("a", 1.0), td["a"])

    def test_a_path_through_a_leaf_is_refused(self) -> None:
        td = self.make()
        with _unchanged(td), _refused(KeyNotFound, "goes through `a`"):
            td["a", "x"] = torch.zeros(_BATCH)

    def test_values_are_written_in_place(self) -> None:
        td, content = self.make(), self.content()
        td.set_("a", 2.0)
        td.set_(("n", "c"), torch.ones(5))
        td.set("b", torch.zeros(*_BATCH, 2, dtype=torch.int64), inplace=True)
        content["a"] = torch.full(_BATCH, 2.0)
        content["b"] = torch.zeros(*_BATCH, 2, dtype=torch.int64)
        _at(content, "n")["c"] = torch.ones(*_BATCH, 5)
        _holds(td, content)
        with _unchanged(td), _refused(ShapeMismatch, "broadcast"):
            td.set_("a", torch.zeros(5, 5))
        with _unchanged(td), _refused(KeyNotFound, "`x`"):
            td.set_("x", 1.0)

    def test_entries_are_removed_or_refused(self) -> None:
        td, content = self.make(), self.content()
        popped, expected = td.pop("a"), content.pop("a")
        assert isinstance(expected, Tensor)
        torch.testing.assert_close(popped, expected)
        del td["n", "d"]
        del _at(content, "n")["d"]
        default: object = td.pop("x", "default")
        assert default == "default"
        with _refused(KeyNotFound, "`x`"):
            td.pop("x")
        with _refused(KeyNotFound, "`x`"):
            td.del_("x")
        _holds(td, content)


class _Updating(_Contract):
    def test_update_merges(self) -> None:
        td, content = self.make(), self.content()
        td.update({"a": torch.ones(_BATCH), "n": {"c": torch.zeros(_BATCH)}})
        by_path: dict[NestedKey, object] = {("n", "d", "e"): torch.ones(_BATCH)}
        td.update(by_path)
        content["a"] = torch.ones(_BATCH)
        content["n"] = {"c": torch.zeros(_BATCH), "d": {"e": torch.ones(_BATCH)}}
        _holds(td, content)

    def test_update_takes_a_container(self) -> None:
        td = self.make()
        td.update(self.make() * 2)
        assert_close(td, self.make() * 2)

    def test_a_failing_update_changes_nothing(self) -> None:
        td = self.make()
        with _unchanged(td), _refused(ShapeMismatch, "`b`"):
            td.update({"a": torch.ones(_BATCH), "n": {"c": torch.ones(_BATCH)}, "b": torch.ones(2)})
        with _unchanged(td), _refused(ShapeMismatch, "'c'"):
            td.update({"a": torch.ones(_BATCH), "n": {"c": torch.ones(2)}})
        with _unchanged(td), _refused(ShapeMismatch, "`b`"):
            td.update_({"a": 1.0, "b": torch.ones(7, 7)})
        with _unchanged(td), _refused(KeyNotFound, "`x`"):
            td.update_({"a": 1.0, "x": 1.0})

    def test_update_in_place_writes_values(self) -> None:
        td, content = self.make(), self.content()
        td.update_({"a": torch.ones(_BATCH), "n": {"d": {"e": 3}}})
        content["a"] = torch.ones(_BATCH)
        _at(content, "n", "d")["e"] = torch.full(_BATCH, 3, dtype=torch.int32)
        _holds(td, content)
        td.update_(self.make())
        _holds(td, self.content())

    def test_replace_leaves_the_original(self) -> None:
        td = self.make()
        with _unchanged(td):
            other = td.replace({"a": torch.ones(_BATCH), "n": {"c": torch.ones(_BATCH)}})
        torch.testing.assert_close(other["a"], torch.ones(_BATCH))
        torch.testing.assert_close(other["n", "c"], torch.ones(_BATCH))
        torch.testing.assert_close(other["b"], td["b"])


class _Choosing(_Contract):
    def test_select_keeps_and_exclude_drops(self) -> None:
        td, content = self.make(), self.content()
        nested: object = content["n"]
        assert isinstance(nested, dict)
        with _unchanged(td):
            _holds(td.select("a", ("n", "d")), {"a": content["a"], "n": {"d": nested["d"]}})
            _holds(
                td.exclude("a", "word", ("n", "c")), {"b": content["b"], "n": {"d": nested["d"]}}
            )
        with _refused(KeyNotFound, "`x`"):
            td.select("a", "x")
        assert set(td.select("a", "x", strict=False).keys()) == {"a"}

    def test_keys_are_flattened_and_unflattened(self) -> None:
        td = self.make()
        with _unchanged(td):
            flat = td.flatten_keys(".")
        assert set(flat.keys()) == {"a", "b", "word", "n.c", "n.d.e"}
        _holds(flat.unflatten_keys("."), self.content())

    def test_a_key_is_renamed_or_refused(self) -> None:
        td, content = self.make(), self.content()
        if self.fixed_keys:
            with _unchanged(td), _refused(KdError, "`z`"):
                td.rename_key_("a", "z")
            return
        td.rename_key_("a", "z")
        content["z"] = content.pop("a")
        _holds(td, content)
        with _unchanged(td), _refused(KdError, "`b`"):
            td.rename_key_("z", "b", safe=True)

    def test_keys_are_renamed_and_split_in_new_containers(self) -> None:
        td, content = self.make(), self.content()
        with _unchanged(td):
            renamed = td.rename_keys({"a": "b", "b": "a"})
            part, rest = td.split_keys(["a", ("n", "c")])
            tensors = td.filter_non_tensor_data()
        assert_close(renamed, {**content, "a": content["b"], "b": content["a"]})
        assert set(part.keys(True, True)) == {"a", ("n", "c")}
        assert set(rest.keys(True, True)) == {"b", ("n", "d", "e")}
        assert set(tensors.keys()) == {"a", "b", "n"}

    def test_keys_are_taken_out_or_refused(self) -> None:
        td = self.make()
        with _unchanged(td), _refused(KdError):
            td.separates("a", "z")
        assert_close(td.separates("a"), {"a": self.content()["a"]})
        assert "a" not in td

    def test_empty_keeps_batch_size_and_no_entry(self) -> None:
        td = self.make().empty()
        assert tuple(td.batch_size) == _BATCH
        assert td.is_empty()
        assert list(td.keys()) == []

    def test_the_batch_size_is_set_where_entries_fit(self) -> None:
        td = self.make()
        with _unchanged(td), _refused(KdError, "9)"):
            td.batch_size = [3, 4, 9]
        try:
            td.batch_size = [3]
        except ShapeMismatch:  # a kind may need its dimensions
            _holds(td, self.content())
        else:
            assert tuple(td.batch_size) == (3,)
            assert_close(td, self.content())


class _EntryContract(_Reading, _Writing, _Updating, _Choosing):
    """The tests of reading and writing by key."""


# _Contract: the structure of a locked container cannot change, its values can.


class _LockContract(_Contract):
    """The tests of locks."""

    def test_a_locked_container_keeps_its_structure(self) -> None:
        td = self.make().lock_()
        assert td.is_locked
        with _unchanged(td), _refused(Locked, "set `a`", "`lock_()`", "clone(recurse=False)"):
            td["a"] = torch.ones(_BATCH)
        with _unchanged(td), _refused(Locked, "`('n', 'c')`"):
            td["n", "c"] = torch.ones(_BATCH)
        with _unchanged(td), _refused(Locked, "`a`"):
            del td["a"]
        with _unchanged(td), _refused(Locked, "`a`"):
            td.update({"a": torch.ones(_BATCH)})
        with _unchanged(td), _refused(Locked, "`a`"):
            td.rename_key_("a", "z")
        td.names = ["rows", None]  # the lock covers entries
        assert (td.names, td.is_locked) == (["rows", None], True)

    def test_values_of_a_locked_container_are_written_in_place(self) -> None:
        td, content = self.make().lock_(), self.content()
        td.set_("a", 1.0)
        td.update_({"n": {"c": 2.0}})
        td[0] = 0
        content["a"] = torch.ones(_BATCH)
        _at(content, "n")["c"] = torch.full((*_BATCH, 5), 2.0)
        for leaf in (
            _at(content)["a"],
            _at(content)["b"],
            _at(content, "n")["c"],
            _at(content, "n", "d")["e"],
        ):
            leaf[0] = 0
        _holds(td, content)

    def test_the_lock_covers_nested_containers(self) -> None:
        td = self.make().lock_()
        nested = _inner(td, "n")
        assert nested.is_locked
        with _refused(Locked, "enclosing container"):
            nested["c"] = torch.ones(_BATCH)
        with _refused(Locked, "Unlock the outer one"):
            nested.unlock_()

    def test_unlocking_allows_everything_again(self) -> None:
        td = self.make().lock_().unlock_()
        assert not td.is_locked
        td["a"] = torch.ones(_BATCH)
        _inner(td, "n")["c"] = torch.ones(_BATCH)
        torch.testing.assert_close(td["n", "c"], torch.ones(_BATCH))

    def test_scopes_restore_the_lock(self) -> None:
        td = self.make()
        with td.locked():
            assert td.is_locked
            with td.unlocked():
                td["a"] = torch.ones(_BATCH)
            assert td.is_locked
        assert not td.is_locked

    def test_with_undoes_an_operation(self) -> None:
        td, content = self.make().lock_(), self.content()
        if not hasattr(td, "_kd_scope"):  # the kind has no place for it
            return
        with td.unlock_() as same:
            states = [same is td, td.is_locked]
        assert [*states, td.is_locked] == [True, False, True]
        with td.unlock_(), td.transpose(0, 1) as view:
            view["a"] = view["a"] + 1
        content["a"] = _at(content)["a"] + 1
        _holds(td, content)

    def test_rows_copies_and_selections_are_not_locked(self) -> None:
        td = self.make().lock_()
        assert not td.select("n").is_locked  # what it keeps whole is what it was
        rows = () if isinstance(td, Composite) else (td[0],)  # its rows are members
        for result in (td.clone(), td.clone(recurse=False), *rows, td == td):
            assert not result.is_locked
            assert not _inner(result, "n").is_locked

    def test_arithmetic_casts_and_views_are_locked(self) -> None:
        td = self.make().lock_()
        for result in (td * 2, td + td, td.abs(), td.double(), td.unsqueeze(0)):
            assert result.is_locked
            assert _inner(result, "n").is_locked
            assert not _inner(result.unlock_(), "n").is_locked
        assert all(part.is_locked for part in td.split(1))
        assert td.is_locked


# _Contract: arithmetic, reductions and user functions run on each leaf.

_TENSOR = torch.tensor([[1.0], [2.0], [3.0]])
_MATHS: tuple[
    tuple[Callable[[TensorDictBase], TensorDictBase], Callable[[Tensor], Tensor]], ...
] = (
    (lambda td: td + 1, lambda x: x + 1),
    (lambda td: 2 - td, lambda x: 2 - x),
    (lambda td: td * td, lambda x: x * x),
    (lambda td: td / 2, lambda x: x / 2),
    (lambda td: -td, lambda x: -x),
    (lambda td: td > 3, lambda x: x > 3),
    (lambda td: td >= td.clone(), lambda x: x >= x),
    (lambda td: td.abs().sqrt(), lambda x: x.abs().sqrt()),
    (lambda td: td * _TENSOR, lambda x: x * _TENSOR.reshape(3, *(1,) * (x.ndim - 1))),
)


def _masked(leaf: Tensor, mask: Tensor) -> Tensor:
    leaf[mask] = 0
    return leaf


class _ValueContract(_Contract):
    """The tests of arithmetic, reductions and user functions."""

    def test_maths_run_leaf_by_leaf(self) -> None:
        for ours, theirs in _MATHS:
            td = self.make()
            with _unchanged(td):
                _holds(ours(td), _mapped(self.content(), theirs))

    def test_data_is_compared_with_the_leaves(self) -> None:
        td = self.make()
        with _unchanged(td):
            assert bool((td == td.clone()).all())
            assert not bool((td != td.clone()).any())

    def test_maths_in_place_write_into_the_entries(self) -> None:
        td = self.make()
        assert td.add_(1) is td
        td.mul_(self.make() * 0 + 2)
        _holds(td, _mapped(self.content(), lambda x: (x + 1) * 2))

    def test_a_tensor_in_place_broadcasts_over_the_batch(self) -> None:
        td = self.make()
        td.add_(torch.tensor([[1], [2], [3]], dtype=torch.int32))
        _holds(
            td,
            _mapped(
                self.content(),
                lambda x: x + torch.arange(1, 4, dtype=x.dtype).reshape(3, *(1,) * (x.ndim - 1)),
            ),
        )

    def test_containers_with_other_keys_are_refused(self) -> None:
        td = self.make()
        with _unchanged(td), _refused(KeySetMismatch, "`b`"):
            td + td.exclude("b")
        with _unchanged(td), _refused(KeySetMismatch, "`b`"):
            td.add_(td.exclude("b"))
        with _refused(ShapeMismatch, "(3, 4)"):
            td + torch.zeros(5)

    def test_a_default_stands_for_keys_of_one_side(self) -> None:
        td, content = self.make(), self.content()
        with _unchanged(td):
            got = td.add(td.exclude("a"), default=1)
        expected = _mapped(content, lambda x: x + x)
        expected["a"] = _at(content)["a"] + 1
        _holds(got, expected)

    def test_reductions_take_batch_dimensions(self) -> None:
        td = self.make()
        with _unchanged(td):
            _holds(td.sum(0), _mapped(self.content(), lambda x: x.sum(0)), (4,))
            _holds(td.amax(1), _mapped(self.content(), lambda x: x.amax(1)), (3,))
        total = td.sum()
        assert tuple(total.batch_size) == ()
        assert_close(total, _mapped(self.content(), lambda x: x.sum()))

    def test_apply_calls_a_function_on_each_leaf(self) -> None:
        td = self.make()
        with _unchanged(td):
            result = td.apply(lambda leaf: leaf * 2)
        assert result is not None
        _holds(result, _mapped(self.content(), lambda x: x * 2))

    def test_values_are_filled_and_copied_in_place(self) -> None:
        td = self.make()
        _holds(td.zero_(), _mapped(self.content(), torch.zeros_like))
        _holds(td.fill_(3), _mapped(self.content(), lambda x: torch.full_like(x, 3)))
        _holds(td.copy_(self.make()), self.content())
        mask = torch.tensor([True, False, True])
        _holds(
            td.masked_fill_(mask[:, None], 0), _mapped(self.content(), lambda x: _masked(x, mask))
        )

    def test_it_is_moved_and_cast(self) -> None:
        td = self.make()
        with _unchanged(td):
            _holds(td.to(torch.float64), _mapped(self.content(), lambda x: x.to(torch.float64)))
            moved = td.to("meta")
        assert moved.device == torch.device("meta")
        assert tuple(moved.batch_size) == _BATCH
        assert all(leaf.is_meta for leaf in moved.select("a", "b", "n").values(True, True))
        _holds(td.contiguous(), self.content())

    def test_gradients_reach_its_entries(self) -> None:
        td = self.make().select("a", ("n", "c"))
        td.requires_grad_()
        (td * 3)["n", "c"].sum().backward()
        assert not td.detach().requires_grad
        expected = torch.full((*_BATCH, 5), 3.0)
        assert td.grad is not None
        torch.testing.assert_close(td.grad["n", "c"], expected)

    def test_torch_functions_reach_it(self) -> None:
        td = self.make()
        _holds(torch.abs(td), _mapped(self.content(), torch.abs))  # type: ignore[arg-type]  # a container
        moved: object = torch.permute(td, (1, 0))  # type: ignore[arg-type]  # a container
        assert isinstance(moved, TensorDictBase)
        assert tuple(moved.batch_size) == (_BATCH[1], _BATCH[0])


class ContainerContract(
    _EntryContract, _LockContract, _BatchContract, _ValueContract, _CopyContract
):
    """The test suite of container kinds: subclass it, implement `make`, and run it.

    Any test runner that calls methods named `test_*` of a class can run it; pytest is not required.
    A test that fails raises `AssertionError`.

    Attributes:
        fixed_keys: set it to `True` if no key can be added after construction.

    Example:
        >>> from kd_core import TensorDict
        >>> from kd_core.testing import ContainerContract
        >>> class TestTensorDict(ContainerContract):
        ...     def make(self) -> TensorDict:
        ...         return TensorDict(self.content(), [3, 4])
        >>> TestTensorDict().test_a_key_reads_its_entry()
    """


# `StackContract`: what a kind that is made of members promises beyond every container.


class StackContract(ContainerContract):
    """The test suite of kinds made of members: subclass it, implement `make_stack`, and run it.

    Example:
        >>> from kd_core import TensorDictBase, lazy_stack
        >>> from kd_core.testing import StackContract
        >>> class TestLazyStack(StackContract):
        ...     def make_stack(self, members, dim):
        ...         return lazy_stack(members, dim)
        >>> TestLazyStack().test_a_member_keeps_its_own_shape()
    """

    def make_stack(self, members: Sequence[TensorDictBase], dim: int) -> TensorDictBase:
        """Build a container of these members, stacked along a new batch dimension."""
        raise NotImplementedError("implement `make_stack()`: return a container of the members")

    def make(self) -> TensorDictBase:
        """Build a stack that holds `content()`."""
        return self.make_stack(TensorDict(self.content(), _BATCH).unbind(0), 0)

    def _ragged(self) -> TensorDictBase:
        rows = [TensorDict({"a": torch.full((n,), n), "b": float(n)}) for n in (1, 2, 3)]
        rows[1]["own"] = torch.zeros(())
        return self.make_stack(rows, 0)

    def test_rows_are_the_members_themselves(self) -> None:
        rows = TensorDict(self.content(), _BATCH).unbind(1)
        stack = self.make_stack(rows, 1)
        assert [id(row) for row in stack.unbind(1)] == [id(row) for row in rows]
        _holds(stack, self.content())

    def test_a_member_keeps_its_own_shape(self) -> None:
        stack = self._ragged()
        assert [row["a"].shape[0] for row in stack.unbind(0)] == [1, 2, 3]
        with _refused(ShapeMismatch, "`a`", "(1,)", "(3,)"):
            stack["a"]
        torch.testing.assert_close(stack["b"], torch.tensor([1.0, 2.0, 3.0]))
        torch.testing.assert_close(stack[1:]["b"], torch.tensor([2.0, 3.0]))

    def test_only_keys_of_all_members_are_visible(self) -> None:
        stack = self._ragged()
        assert list(stack.keys()) == ["a", "b"]
        assert stack.get("own") is None
        assert "own" in stack[1]

    def test_arithmetic_runs_on_ragged_members(self) -> None:
        doubled = self._ragged() * 2
        assert [row["a"].tolist() for row in doubled.unbind(0)] == [[2], [4, 4], [6, 6, 6]]

    def test_a_write_reaches_the_members(self) -> None:
        stack = self._ragged()
        stack["b"] = torch.tensor([4.0, 5.0, 6.0])
        stack["n", "c"] = torch.zeros(3, 2)
        assert [row["b"].item() for row in stack.unbind(0)] == [4, 5, 6]
        assert stack[0]["n", "c"].shape == (2,)

    def test_a_lock_covers_the_members(self) -> None:
        stack = self._ragged()
        member = stack[1]
        with _refused(Locked, "`b`"):
            stack.lock_()
            member["b"] = 0.0
        stack.unlock_()
        member["b"] = 0.0
        assert stack["b"][1] == 0

    def test_data_of_rows_stays_with_its_row(self) -> None:
        rows = [TensorDict({"word": word}) for word in ("to", "be", "to")]
        stack = self.make_stack(rows, 0)
        assert stack.get_non_tensor("word") == ["to", "be", "to"]
        assert stack[torch.tensor([True, False, True])].get_non_tensor("word") == ["to", "to"]
        assert stack.flip(0)[1:].get_non_tensor("word") == ["be", "to"]
        assert stack.contiguous().get_non_tensor("word") == ["to", "be", "to"]
