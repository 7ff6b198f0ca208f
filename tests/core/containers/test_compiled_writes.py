"""What compiled code writes into a container from outside, and how it comes back."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from kd_core import NestedKey, TensorDict, stack
from kd_core.testing import assert_close

X = torch.arange(3.0)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[[TensorDict], TensorDict]) -> Callable[[TensorDict], TensorDict]:
    run: Callable[[TensorDict], TensorDict] = torch.compile(
        function, fullgraph=True, backend="eager"
    )
    return run


def write(td: TensorDict) -> TensorDict:
    td["y"] = td["x"] + 1
    td.set(("n", "z"), td["y"] * 2)
    td.update({"x": td["n", "z"], ("n", "w"): td["y"]})
    return td


def make(**others: object) -> TensorDict:
    return TensorDict({"x": X, **others}, [3])


def test_writes_come_back_in_the_container_that_was_given() -> None:
    td = make()
    assert compiled(write)(td) is td
    assert list(td.keys(True, True)) == ["x", "y", ("n", "z"), ("n", "w")]
    assert_close(td, write(make()))


def test_unrelated_keys_do_not_recompile() -> None:
    counter = CompileCounter()
    run = torch.compile(write, fullgraph=True, backend=counter)
    for others in ({}, {"u": X}, {"more": {"deep": X}, "v": X}, {"s": "text"}):
        td = make(**others)
        run(td)
        assert_close(td, write(make(**others)))
    assert counter.frame_count == 1


LOOKS: dict[str, Callable[[TensorDict], object]] = {
    "get": lambda td: td["y"],
    "in": lambda td: "y" in td,
    "set": lambda td: td.set("y", X),
    "set another": lambda td: td.set("k", X),
    "delete": lambda td: td.del_("y"),
    "keys": lambda td: list(td.keys()),
    "items": lambda td: dict(td.items(True, True)),
    "update": lambda td: td.update({"y": X}),
    "update from container": lambda td: td.update(make(y=X)),
    "index": lambda td: td[0],
    "add": lambda td: td + td,
    "stack": lambda td: stack([td, td]),
    "lock": lambda td: td.lock_(),
    "select": lambda td: td.select("y", "x"),
    "rename": lambda td: td.rename_key_("y", "q"),
    "repr": repr,
    "dict": lambda td: td.to_dict(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "clone": lambda td: td.clone(),
    "rows": lambda td: td.__setitem__(0, 7.0),
    "batch size": lambda td: setattr(td, "batch_size", []),
}


def test_first_look_finds_what_was_written() -> None:
    run = compiled(write)
    for name, look in LOOKS.items():
        td, expected = make(), make()
        run(td)
        write(expected)
        found, wanted = look(td), look(expected)
        if isinstance(found, TensorDict) and isinstance(wanted, TensorDict):
            assert_close(found, wanted)
        assert_close(td, expected)
        assert td.is_locked == expected.is_locked, name


def test_container_that_is_passed_again_settles() -> None:
    counter = CompileCounter()
    run = torch.compile(write, fullgraph=True, backend=counter)
    td, expected = make(), make()
    counts = []
    for _ in range(5):
        run(td)
        write(expected)
        counts.append(counter.frame_count)
    assert counts[-1] == counts[-2] == counts[-3]
    assert_close(td, expected)


def test_container_made_in_the_graph_is_a_whole_one() -> None:
    made = compiled(lambda td: write(TensorDict({"x": td["x"]}, [3])))(make())
    assert_close(made, write(make()))


def test_nothing_is_kept_alive() -> None:
    td = make()
    compiled(write)(td)
    seen = weakref.ref(td)
    del td
    torch._dynamo.reset()
    gc.collect()
    assert seen() is None


def words() -> TensorDict:
    return TensorDict({"n": {"s": ["0", "1", "2"]}}, [3])


def test_a_copy_made_in_compiled_code_keeps_its_words() -> None:
    td = words()
    copied = torch.compile(lambda td: td.clone(), fullgraph=True, backend="eager")(td)
    part = td[1:]
    for number in range(30):
        td.update_(TensorDict({"n": {"s": [f"{number}{each}" for each in "abc"]}}, [3]))
    assert copied["n", "s"] == ["0", "1", "2"]
    assert part["n", "s"] == ["29b", "29c"]


def test_a_compiled_write_of_all_rows_is_seen_by_views_and_not_by_copies() -> None:
    def copy(td: TensorDict) -> TensorDict:
        return td.clone()

    def write(td: TensorDict, new: TensorDict) -> TensorDict:
        copied = copy(td)
        td.update_(new)
        return copied

    td, new = words(), words().flip(0)
    part = td[1:]
    before = torch.compile(copy, fullgraph=True, backend="eager")(td)
    within = torch.compile(write, fullgraph=True, backend="eager")(td, new)
    assert td["n", "s"] == ["2", "1", "0"]
    assert part["n", "s"] == ["1", "0"]
    assert before["n", "s"] == within["n", "s"] == ["0", "1", "2"]


NESTED_DICTS: dict[str, Callable[[dict[NestedKey, object]], object]] = {
    "construct": lambda batch: TensorDict(batch)["n", "x"],
    "sized": lambda batch: TensorDict(batch, [3], device="cpu", lock=True)["n", "x"],
    "set": lambda batch: TensorDict(a=X).set("b", batch)["b", "n", "x"],
    "update": lambda batch: TensorDict(a=X, n={}).update(batch)["n", "x"],
    "assign": lambda batch: TensorDict(n={"x": -X}).assign(batch)["n", "x"],
    "stack": lambda batch: stack([TensorDict(batch), TensorDict(batch)])["n", "x"][0],
}


def test_a_nested_dict_that_compiled_code_is_given_is_stored() -> None:
    def run(batch: dict[NestedKey, object]) -> list[object]:
        return [each(batch) for each in NESTED_DICTS.values()]

    found = torch.compile(run, fullgraph=True, backend="eager")({"n": {"x": X}})
    assert all(isinstance(each, torch.Tensor) and torch.equal(each, X) for each in found)


def test_a_tensor_without_dimensions_is_refused_in_compiled_code_too() -> None:
    def write(td: TensorDict) -> tuple[TensorDict, int]:
        refused = 0
        for key in ("a", ("n", "b")):
            try:
                td[key] = torch.ones(())
            except RuntimeError:
                refused += 1
        try:
            TensorDict({"a": torch.ones(())}, [3])
        except RuntimeError:
            refused += 1
        return td, refused

    run = torch.compile(write, fullgraph=True, backend="eager")
    td, refused = run(make())
    assert refused == 3
    assert list(td.keys()) == list(make().keys())
