"""How many messages a call sends: one to agree, and one for each dtype and device."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kd_core import InvalidArgument, InvalidValue, TensorDict, distributed
from kd_core._distributed import outlines
from kd_core._distributed.outlines import outlined


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the collectives of a group of one rank."""
    calls: list[str] = []

    def recorded(name: str) -> Any:
        function = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return call

    store = dist.HashStore()  # type: ignore[attr-defined]  # exported without a name
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    for name in ("all_gather", "all_reduce", "broadcast", "reduce"):
        monkeypatch.setattr(dist, name, recorded(name))
    yield calls
    dist.destroy_process_group()


def container(numel: int) -> TensorDict:
    leaves = {f"a{at}": torch.ones(numel) for at in range(50)}
    return TensorDict({**leaves, "n": {"b": torch.ones(numel, dtype=torch.int64)}})


def test_a_small_container_takes_one_message(sent: list[str]) -> None:
    for call in (container(4).all_reduce, lambda: container(4).broadcast(0)):
        call()
        assert sent == ["all_gather"]
        sent.clear()


def test_outlines_tell_where_leaves_are() -> None:
    """Keys in the same order, of leaves of the same shapes, under different parents."""
    one, leaf = torch.ones(1), TensorDict({"z": torch.ones(1)})
    first = TensorDict({"b": {"x": one, "y": one}, "y": leaf})
    second = TensorDict({"b": {"x": one, "y": leaf}, "y": one})
    third = TensorDict({"b": one, "y": {"b": {"x": one}, "z": one}})
    assert len({outlined(td).outline.digest for td in (first, second, third, first.clone())}) == 3


def test_leaves_of_one_dimension_are_packed_as_others() -> None:
    leaves = [torch.arange(6.0)[::2], torch.nn.Parameter(torch.ones(2)), torch.ones(1).expand(2)]
    conjugate = torch.tensor([1j]).conj()
    td = TensorDict({**{f"a{at}": leaf for at, leaf in enumerate(leaves)}, "c": conjugate})
    made = {str(flat.dtype): flat.tolist() for flat in outlined(td).packed().flats}
    assert made == {"torch.float32": [0, 2, 4, 1, 1, 1, 1], "torch.complex64": [-1j]}


def test_conjugated_leaves_are_written(sent: list[str]) -> None:
    for shape in [(2,), (2, 2)]:
        leaves = {key: torch.full(shape, 1 + 2j).conj() for key in "ab"}
        td = TensorDict({**leaves, "c": torch.full(shape, 1j).conj().imag})
        td.all_reduce()
        assert td["a"].tolist() == torch.full(shape, 1 - 2j).tolist()
        assert td["c"].tolist() == torch.full(shape, -1.0).tolist()
        td.broadcast(0)
    assert sent == ["all_gather"] * 4


def test_containers_without_leaves_are_exchanged(sent: list[str]) -> None:
    for td in (TensorDict(), TensorDict({"n": {}, "unit": "m"}), TensorDict({"a": torch.ones(0)})):
        td.all_reduce()
        td.broadcast(0)
        assert [part.keys() == td.keys() for part in td.all_gather()] == [True]


def test_room_is_kept_for_the_next_call_up_to_a_limit(sent: list[str]) -> None:
    outlines._FREE.clear()
    for numel in (20_000, 30_000, 30_000, 5 << 20):
        TensorDict({f"a{at}": torch.ones(numel) for at in range(4)}).all_reduce()
    assert sorted(room.nbytes() for room in outlines._FREE.values()) == [320_000, 480_000]


def test_a_large_one_takes_one_more_for_each_dtype(sent: list[str]) -> None:
    td = container(10_000)
    td.all_reduce()
    assert sent == ["all_gather", "all_reduce", "all_reduce"]
    sent.clear()
    td.broadcast(0)
    assert sent == ["all_gather", "broadcast", "broadcast"]
    sent.clear()
    td.reduce(0, bucket_bytes=1 << 30)
    assert sent == ["all_gather", "reduce", "reduce"]


def test_large_leaves_are_broadcast_from_where_they_are(sent: list[str]) -> None:
    outlines._FREE.clear()
    td = TensorDict({"a": torch.ones(1 << 20), "b": torch.ones(1 << 20), "step": torch.ones(())})
    td.broadcast(0)
    assert sent == ["all_gather", "broadcast"]  # less than 4 MiB on average
    assert outlines._FREE
    outlines._FREE.clear()
    del td["step"]
    sent.clear()
    td.broadcast(0)
    assert sent == ["all_gather"] + ["broadcast"] * 2
    assert not outlines._FREE  # no copy was made


def test_gathered_rows_take_one_message_for_each_dtype(sent: list[str]) -> None:
    rows = {"a": torch.ones(3, 2), "b": torch.ones(3), "c": torch.arange(3), "w": ["x", "y", "z"]}
    TensorDict(rows, [3]).all_gather()
    assert sent == ["all_gather"] * 4  # to agree, floats, integers, words


def test_arguments_are_checked(sent: list[str]) -> None:
    td = container(1)
    with pytest.raises(InvalidValue, match="`op` must be one of `sum`, `mean`, `max`, `min`"):
        td.all_reduce("median")
    with pytest.raises(InvalidArgument, match="`op` must be a name or a `ReduceOp`, got an `int`"):
        td.all_reduce(3)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(InvalidValue, match="`bucket_bytes` must be positive, got 0"):
        td.all_reduce(bucket_bytes=0)
    with pytest.raises(InvalidValue, match="`src` must be a rank of the group, got 1 for a group"):
        td.broadcast(1)
    with pytest.raises(InvalidValue, match="`dst` must be another rank"):
        td.send(0)
    with pytest.raises(InvalidArgument, match="expected one of `dst` and `group_dst`"):
        td.send()
    with pytest.raises(InvalidArgument, match="expected one of `dst` and `use_broadcast=True`"):
        td.init_remote(0, use_broadcast=True)
    assert sent == []


def test_a_leaf_without_data_is_refused(sent: list[str]) -> None:
    td = TensorDict({"n": {"a": torch.ones(2, device="meta")}})
    for call in (td.all_reduce, td.all_gather, lambda: td.broadcast(0)):
        with pytest.raises(InvalidValue, match=r"entry `\('n', 'a'\)` is on the meta device"):
            call()


def test_a_call_without_a_group_says_what_to_do() -> None:
    with pytest.raises(InvalidValue, match=r"Call `torch.distributed.init_process_group` first"):
        distributed.broadcast(TensorDict(), 0)
