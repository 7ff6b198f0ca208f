"""Calling a function on parts of a container."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from kd_core import InvalidArgument, InvalidValue, NonTensorData, TensorDict, lazy_stack


def container(rows: int = 5) -> TensorDict:
    entries = {"a": torch.arange(rows), "n": {"b": torch.rand(rows, 2)}, "word": "text"}
    return TensorDict(entries, [rows])


def doubled(part: TensorDict) -> TensorDict:
    return part * 2


def process(part: TensorDict) -> Tensor:
    return torch.full(part.batch_size, os.getpid())


def noise(part: TensorDict) -> Tensor:
    return torch.rand(part.batch_size)


def failing(part: TensorDict) -> TensorDict:
    raise ValueError(f"cannot use {part['a'].tolist()}")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [1, 2, 7, 0])
def test_the_results_are_joined_in_order(workers: int, size: int) -> None:
    td = container()
    got = td.map(doubled, num_workers=workers, chunksize=size)
    assert got.batch_size == (5,)
    assert got["word"] in ("text", ["text"] * 5)  # one for each row where rows were stacked
    assert torch.equal(got["a"], td["a"] * 2)
    assert torch.equal(got["n", "b"], td["n", "b"] * 2)
    assert not td.is_shared()


def test_another_dimension() -> None:
    td = TensorDict({"a": torch.rand(2, 5, 3)}, [2, 5])
    assert torch.equal(td.map(doubled, -1, num_chunks=2)["a"], td["a"] * 2)
    single = td.map(lambda part: part["a"].sum(-1), 1, chunksize=0)
    assert torch.equal(single, td["a"].sum(-1))


def test_processes_are_others() -> None:
    found = set(container().map(process, num_workers=2, chunksize=1).tolist())
    assert os.getpid() not in found
    assert set(container().map(process).tolist()) == {os.getpid()}


def test_forked_processes_take_any_function() -> None:
    offset = 10
    got = container().map(lambda part: part["a"] + offset, num_workers=1, mp_start_method="fork")
    assert got.tolist() == [10, 11, 12, 13, 14]


def test_random_results_do_not_depend_on_the_number_of_processes() -> None:
    found = [
        container().map(
            noise, num_workers=n, chunksize=2, generator=torch.Generator().manual_seed(3)
        )
        for n in (0, 2)
    ]
    assert torch.equal(*found)


def test_a_seeded_call_leaves_the_random_state_alone() -> None:
    td, before = container(), torch.get_rng_state()
    td.map(noise, chunksize=1, generator=torch.Generator().manual_seed(3))
    assert torch.equal(before, torch.get_rng_state())


def test_a_function_may_return_nothing() -> None:
    seen: list[int] = []
    assert container().map(lambda part: seen.extend(part["a"].tolist()), chunksize=2) is None
    assert seen == [0, 1, 2, 3, 4]


def test_out_takes_the_result() -> None:
    td = container()
    out = td.clone()
    leaf = out["a"]
    assert td.map(doubled, chunksize=2, out=out) is out
    assert torch.equal(leaf, td["a"] * 2)


def test_a_pool_of_the_caller_is_used() -> None:
    with ThreadPoolExecutor(2) as pool:
        got = container().map(doubled, pool=pool, chunksize=1)
        assert pool.submit(int).result() == 0
    assert torch.equal(got["a"], container()["a"] * 2)


def test_a_pool_of_multiprocessing_is_used() -> None:
    with torch.multiprocessing.get_context("fork").Pool(2) as pool:
        got = container().map(doubled, pool=pool, chunksize=1)
        assert torch.equal(got["a"], container()["a"] * 2)
        with pytest.raises(ValueError, match=r"cannot use"):
            container().map(failing, pool=pool, chunksize=2)


def test_an_error_of_a_process_is_raised() -> None:
    with pytest.raises(ValueError, match=r"cannot use \[0, 1\]"):
        container().map(failing, num_workers=1, chunksize=2)


def test_progress_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    container().map(doubled, chunksize=3, pbar=True)
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("kd: map, 0 of 2 parts")
    assert last == "kd: map: ended after 0 s"


def test_map_iter_yields_anything() -> None:
    parts = container().map_iter(lambda part: part["a"].tolist(), chunksize=2)
    assert list(parts) == [[0, 1], [2, 3], [4]]


def test_map_iter_is_lazy() -> None:
    seen: list[int] = []
    parts = container().map_iter(lambda part: seen.append(int(part["a"][0])), chunksize=1)
    next(parts)
    next(parts)
    assert seen == [0, 1]


def test_map_iter_shuffles_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = container(50).map_iter(
        lambda part: part["a"].tolist(), chunksize=10, shuffle=True, generator=generator
    )
    rows = [row for part in parts for row in part]
    assert sorted(rows) == list(range(50))
    assert rows != list(range(50))


def test_lazy_stacks_are_cut_by_member() -> None:
    ragged = lazy_stack([TensorDict({"a": torch.ones(n)}) for n in (1, 2, 3)])
    got = list(ragged.map_iter(lambda row: row["a"].shape[0], chunksize=0))
    assert got == [1, 2, 3]


def test_what_map_refuses() -> None:
    with pytest.raises(InvalidArgument, match="`chunksize` or `num_chunks`"):
        container().map(doubled, chunksize=1, num_chunks=2)
    with pytest.raises(InvalidValue, match="`num_chunks` must be positive"):
        container().map(doubled, num_chunks=0)
    with pytest.raises(InvalidValue, match="`num_workers` must be non-negative"):
        container().map(doubled, num_workers=-1)
    with pytest.raises(InvalidValue, match="at least one row"):
        container(0).map(doubled)
    learned = TensorDict({"a": torch.ones(2, requires_grad=True)}, [2])
    with pytest.raises(InvalidValue, match="entry `a` requires gradients"):
        learned.map(doubled, num_workers=1)
    assert learned.map(doubled)["a"].requires_grad


def test_non_tensor_data_reaches_the_processes() -> None:
    td = TensorDict({"a": torch.arange(2), "note": NonTensorData({"x": 1}, [2])}, [2])
    assert td.map(doubled, num_workers=1)["note"] == {"x": 1}
