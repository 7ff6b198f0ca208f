"""Values of rows: written where they are, by threads too; in compiled code read as stored."""

import sys
import threading
import time
from collections.abc import Callable
from typing import cast

import pytest
import torch

from kd_core import (
    LazyStackedTensorDict,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    lazy_stack,
    stack,
)


def test_compiled_writes_to_members_read_no_value_of_a_row() -> None:
    stack = lazy_stack([TensorDict({"x": torch.zeros(3), "word": word}) for word in ("to", "be")])
    source = TensorDict({"x": torch.ones(2, 3), "word": ["or", "not"]}, [2])

    def write(stack: LazyStackedTensorDict) -> None:
        stack.set_at_("x", torch.ones(3), 0).set_at_("word", "or", 1)

    def copy(stack: LazyStackedTensorDict) -> None:
        stack.update_(source)

    torch.compile(write, fullgraph=True, backend="eager")(stack)
    assert stack["word"] == ["to", "or"]
    assert stack["x"].sum(1).tolist() == [3, 0]
    with pytest.raises(RuntimeError, match="cannot be read in compiled code"):
        torch.compile(copy, fullgraph=True, backend="eager")(stack)
    assert stack["word"] == ["to", "or"]
    torch.compile(copy, backend="eager")(stack)  # a graph break: torch runs it without a graph
    assert stack["word"] == ["or", "not"]
    assert stack["x"].sum() == 6


def words_of(td: TensorDict) -> list[str]:
    return cast("list[str]", td["word"])


def test_compiled_code_reads_values_as_they_were_stored() -> None:
    def read(td: TensorDict) -> tuple[object, torch.Tensor]:
        return td["word"], td["x"] + 1

    def make(*words: str, shape: tuple[int, ...] = (2,)) -> TensorDict:
        td = TensorDict({"x": torch.zeros(len(words)), "word": list(words)}, [len(words)])
        return td if len(shape) == 1 else stack([td] * shape[0])

    compiled = torch.compile(read, fullgraph=True, backend="eager")
    td = make("to", "be")
    for words in (make("to", "be"), make("or", "not"), make("a", "b", shape=(3, 2)), td[[1, 0]]):
        assert compiled(words)[0] == read(words)[0]
    words_of(td)[1] = "do"  # the values are guarded
    assert compiled(td)[0] == ["to", "do"]
    td[0] = make("so", "so")[0]
    assert compiled(td.clone())[0] == compiled(td)[0] == ["so", "do"]
    with pytest.raises(RuntimeError, match="cannot be read in compiled code"):
        compiled(td.flip(0)[:1].unsqueeze(0)[0])


def test_compiled_code_writes_through_what_it_reads() -> None:
    def write(td: TensorDict) -> torch.Tensor:
        words_of(td)[0] = "or"
        return td["x"] + 1

    td = TensorDict({"x": torch.zeros(2), "word": ["to", "be"]}, [2])
    torch.compile(write, fullgraph=True, backend="eager")(td)
    assert td["word"] == ["or", "be"]


def test_compiled_writes_at_an_index_add_values() -> None:
    td = TensorDict({"word": ["to", "be"]}, [2])
    torch.compile(lambda td: td.set_at_("word", "or", 1), fullgraph=True, backend="eager")(td)
    assert td["word"] == ["to", "or"]


def test_compiled_writes_wait_for_the_next_eager_access() -> None:
    td = TensorDict({"word": ["to", "be"]}, [2])
    view = td[:1]

    def write(td: TensorDict, new: TensorDict) -> TensorDict:
        td.set_at_("word", "or", 0)
        between = td.clone()
        td.update_(new)
        return between

    compiled = torch.compile(write, fullgraph=True, backend="eager")
    new = TensorDict({"word": ["not", "so"]}, [2])
    between = [compiled(td, new) for _ in range(5)]  # nothing is read meanwhile
    td[1] = {"word": "last"}
    assert td["word"] == ["not", "last"]
    assert view["word"] == ["not"]
    assert new["word"] == ["not", "so"]
    assert [each["word"] for each in between] == [["or", "be"]] + 4 * [["or", "so"]]


def test_copies_of_compiled_code_keep_their_values() -> None:
    def run(td: TensorDict) -> tuple[TensorDict, ...]:
        copied = td.clone()
        return copied, copied[:2], td[:2], td.flip(0)

    td = TensorDict({"word": ["a", "b", "c"], "x": torch.zeros(3)}, [3])
    copied, part, view, flipped = torch.compile(run, fullgraph=True, backend="aot_eager")(td)
    td[0] = {"word": "td"}
    part[1] = {"word": "part"}
    view[1] = {"word": "view"}
    assert td["word"] == ["td", "view", "c"]
    assert copied["word"] == ["a", "part", "c"]
    assert part["word"] == ["a", "part"]
    assert view["word"] == ["td", "view"]
    assert flipped["word"] == ["c", "b", "a"]


MAKE: tuple[Callable[[TensorDict], TensorDictBase], ...] = (
    lambda td: td,
    lambda td: lazy_stack(list(td.unbind(0))),
    lambda td: lazy_stack(list(td.unbind(1)), 1),
    lambda td: lazy_stack([td[:2], td[2:]])[:, :, :],
)


@pytest.mark.parametrize("make", MAKE)
def test_writes_again_and_again_keep_all_values(
    make: Callable[[TensorDict], TensorDictBase],
) -> None:
    td = TensorDict({"w": [["a"] * 3] * 4, "x": torch.zeros(4, 3)}, [4, 3])
    each = make(td)
    shape = tuple(each.batch_size)
    for number in range(200):
        new = TensorDict({"w": "", "x": torch.full(shape, float(number))}, shape)
        words = NonTensorStack(*map(str, range(number, number + 12)))
        new["w"] = TensorDict({"w": words}, [12]).reshape(shape)["w"]
        ways: tuple[Callable[[], object], ...] = (
            lambda: each.set_("w", new["w"]).set_("x", new["x"]),  # noqa: B023 - called at once
            lambda: each.update_(new),  # noqa: B023 - called at once
            lambda: each.copy_(new),  # noqa: B023 - called at once
            lambda: each.__setitem__(slice(None), new),  # noqa: B023 - called at once
            lambda: each.set_at_("w", new["w"], slice(None)).set_("x", new["x"]),  # noqa: B023 - as above
        )
        ways[number % len(ways)]()
        assert each["w"] == new["w"]
        assert sorted(map(int, td.reshape(-1)["w"])) == list(range(number, number + 12))
        assert td["x"].eq(number).all()


def test_two_halves_of_a_batch_under_two_keys_are_written_at_once() -> None:
    td = TensorDict({"w": list("abcdef")}, [6])
    halves = TensorDict({"one": td[:3], "two": td[3:]}, [3])
    for number in range(300):
        one, two = [f"{number} {row}" for row in range(3)], [f"-{number} {row}" for row in range(3)]
        halves.update_({"one": {"w": one}, "two": {"w": two}})
        assert td["w"] == one + two


def test_many_writes_need_no_memory() -> None:
    td = TensorDict({"word": ["to", "be"]}, [2])
    view, few = td[1:], TensorDict({"word": list("abcdefghij")}, [10])[[1, 5]]
    for number in range(1000):
        td[0] = TensorDict({"word": str(number)})
    nodes: list[object] = [each.get("word") for each in (td, view, few)]
    stored = [len(node._cells.values) for node in nodes if isinstance(node, NonTensorStack)]
    assert stored == [2, 2, 2]
    assert (td.get_non_tensor("word"), view.get_non_tensor("word")) == (["999", "be"], ["be"])


def test_threads_write_rows_of_their_own_and_read_others() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can
    try:
        _write_rows_in_threads()
    finally:
        sys.setswitchinterval(before)


def _write_rows_in_threads() -> None:
    td = TensorDict({"w": [f"{row} 0" for row in range(6)], "x": torch.zeros(6)}, [6])
    until, wrong = time.monotonic() + 1.0, []

    def work(row: int) -> None:
        count = 0
        mine = td[row : row + 1]
        while time.monotonic() < until:
            count += 1
            new = f"{row} {count}"
            if count % 2:
                td[row : row + 1] = {"w": [new]}
            else:
                mine.set_("w", [new])
            found: list[str] = td["w"]  # type: ignore[assignment]  # words
            if found[row] != new or [each[0] for each in found] != list("012345"):
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(row,)) for row in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert [each[0] for each in td.get_non_tensor("w")] == list("012345")  # type: ignore[attr-defined]  # words
