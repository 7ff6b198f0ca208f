"""`MemoryMappedTensor`: one tensor in a file of its own."""

import copy
import errno
import io
import pickle
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.core.store.faults import Killed, calls, is_raised, names_in
from tests.core.store.trees import DTYPES
from torch import Tensor

from kd_core import InvalidArgument, InvalidValue, MemoryMappedTensor, TensorDict


def sample() -> Tensor:
    return torch.arange(12.0).view(3, 4)


def test_writes_go_to_the_file_and_to_every_mapping(tmp_path: Path) -> None:
    path = tmp_path / "a"
    mapped = MemoryMappedTensor.from_tensor(sample(), filename=path)
    other = MemoryMappedTensor.from_filename(path, torch.float32, (3, 4))
    row = MemoryMappedTensor.from_filename(path, torch.float32, (3, 4), 1)
    assert type(row) is MemoryMappedTensor
    assert row.tolist() == [4, 5, 6, 7]
    mapped[1].zero_()
    other[0, 0] = 9
    assert row.sum() == 0
    assert mapped[0, 0] == 9
    assert path.read_bytes() == mapped.numpy().tobytes()
    assert mapped.filename == other.filename == row.filename == str(path)
    assert row.parent_shape == (3, 4)
    assert names_in(tmp_path) == ["a"]


def test_parts_are_of_the_class_and_results_are_not(tmp_path: Path) -> None:
    mapped = MemoryMappedTensor(sample(), filename=tmp_path / "a")
    assert isinstance(mapped, Tensor)
    results = [mapped + 1, mapped[[0]], mapped.view(-1), mapped.clone(), mapped.detach()]
    assert {type(result) for result in results} == {Tensor}
    parts = [
        mapped[0],
        mapped[1:, None],
        *mapped,
        *mapped.unbind(1),
        *mapped.split(2),
        mapped[0, 0],
    ]
    assert {type(part) for part in [*parts, *mapped.chunk(2)]} == {MemoryMappedTensor}
    mapped.T[3].fill_(5)
    assert mapped[:, 3].tolist() == [5, 5, 5]


@pytest.mark.parametrize("kind", [int, float, bool, complex])
def test_a_class_of_python_is_a_dtype_as_in_torch(kind: Any, tmp_path: Path) -> None:
    expected = torch.ones(4, dtype=kind)
    ones = MemoryMappedTensor.ones(4, dtype=kind, filename=tmp_path / "ones")
    memory = bytearray(expected.numpy().tobytes())
    storage = expected.untyped_storage()
    for made in (
        ones,
        MemoryMappedTensor.full((4,), 1, dtype=kind),
        MemoryMappedTensor.from_filename(ones.filename, kind, (4,)),
        MemoryMappedTensor.from_handler(memory, kind, (4,)),
        MemoryMappedTensor.from_storage(storage, dtype=kind, shape=(4,)),
        MemoryMappedTensor(torch.ones(4), dtype=kind),
    ):
        assert made.dtype is expected.dtype
        assert torch.equal(made, expected)
    for made in (
        MemoryMappedTensor.empty(4, dtype=kind),
        MemoryMappedTensor.zeros(4, dtype=kind, filename=tmp_path / "zeros"),
    ):
        assert torch.equal(made, torch.zeros(4, dtype=kind))


@pytest.mark.parametrize("named", [True, False])
def test_each_constructor_does_as_that_of_torch(named: bool, tmp_path: Path) -> None:
    like = torch.zeros(2, 3, dtype=torch.int16)
    places = (tmp_path / str(number) if named else None for number in range(20))
    made = [
        (MemoryMappedTensor.empty(2, 3, filename=next(places)), torch.zeros(2, 3)),
        (MemoryMappedTensor.empty((2, 3), filename=next(places)), torch.zeros(2, 3)),
        (MemoryMappedTensor.zeros([], filename=next(places)), torch.zeros([])),
        (MemoryMappedTensor.ones(0, 3, filename=next(places)), torch.ones(0, 3)),
        (
            MemoryMappedTensor.ones((2,), dtype=torch.bool, filename=next(places)),
            torch.ones(2, dtype=torch.bool),
        ),
        (MemoryMappedTensor.full((2,), 7, filename=next(places)), torch.full((2,), 7)),
        (MemoryMappedTensor.full([], 2j, filename=next(places)), torch.full([], 2j)),
        (MemoryMappedTensor.empty_like(like, filename=next(places)), torch.zeros_like(like)),
        (MemoryMappedTensor.zeros_like(like, filename=next(places)), torch.zeros_like(like)),
        (MemoryMappedTensor.ones_like(like, filename=next(places)), torch.ones_like(like)),
        (MemoryMappedTensor.full_like(like, 4, filename=next(places)), torch.full_like(like, 4)),
        (
            MemoryMappedTensor.from_storage(
                sample().untyped_storage(),
                shape=(2, 2),
                dtype=torch.float32,
                filename=next(places),
            ),
            sample().view(-1)[:4].view(2, 2),
        ),
    ]
    for mapped, expected in made:
        assert type(mapped) is MemoryMappedTensor
        assert mapped.dtype is expected.dtype
        assert torch.equal(mapped, expected)
        if not named:
            with pytest.raises(RuntimeError, match="without a file"):
                mapped.filename  # noqa: B018  # the error is the promise
        else:
            again = MemoryMappedTensor.from_filename(mapped.filename, mapped.dtype, mapped.shape)
            assert torch.equal(again, expected)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.booleans())
def test_every_dtype_and_shape_comes_back(
    dtype: torch.dtype, shape: list[int], transposed: bool
) -> None:
    numel = torch.Size(shape).numel() * dtype.itemsize
    octets = torch.arange(numel, dtype=torch.int64).remainder(100).to(torch.uint8)
    if dtype is torch.bool:
        octets = octets.remainder(2)
    plain = octets.view(dtype).view(shape) if numel else torch.empty(shape, dtype=dtype)
    plain = plain.transpose(0, -1) if transposed and shape else plain
    mapped = MemoryMappedTensor.from_tensor(plain)
    assert mapped.shape == plain.shape
    assert bytes_of(mapped) == bytes_of(plain)


def bytes_of(tensor: Tensor) -> bytes:
    plain = tensor.as_subclass(Tensor).contiguous()
    return plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def test_gradients_are_not_kept(tmp_path: Path) -> None:
    source = torch.ones(2, requires_grad=True)
    assert not MemoryMappedTensor.from_tensor(source, filename=tmp_path / "a").requires_grad


def test_a_file_that_exists_is_replaced_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "a"
    old = MemoryMappedTensor(sample(), filename=path)
    with pytest.raises(InvalidValue, match=r"exists already. Open it with .*from_filename"):
        MemoryMappedTensor(sample(), filename=path)
    with pytest.raises(RuntimeError, match="exists already"):
        MemoryMappedTensor.zeros(2, filename=path)
    new = MemoryMappedTensor.from_tensor(torch.ones(1), filename=path, existsok=True)
    assert path.stat().st_size == 4
    assert torch.equal(old, sample())  # of the file that was there
    assert new.tolist() == [1]
    assert names_in(tmp_path) == ["a"]


@pytest.mark.parametrize("existsok", [True, False])
@pytest.mark.parametrize("error", [Killed(), OSError(errno.ENOSPC, "injected")], ids=str)
def test_a_failure_at_any_call_leaves_old_or_new(
    error: BaseException, existsok: bool, tmp_path: Path
) -> None:
    old, new = torch.ones(3), torch.zeros(5)
    for at in range(1, 10):
        path = tmp_path / f"{at}" / "a"
        path.parent.mkdir()
        if existsok:
            MemoryMappedTensor(old, filename=path)
        change = partial(MemoryMappedTensor.from_tensor, new, filename=path, existsok=existsok)
        with calls(at, error) as made:
            raised = is_raised(change)
        done = made.names[: at - 1]
        if "rename" in done or "link" in done:
            assert path.read_bytes() == bytes(20)
        elif existsok:
            assert path.read_bytes() == old.numpy().tobytes()
        else:
            assert not path.exists()
        if at > made.count:
            break
    assert not raised
    assert done == ["create", "allocate", "rename" if existsok else "link", "remove"]


def test_what_cannot_be_mapped_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    MemoryMappedTensor(sample(), filename=path)
    with pytest.raises(InvalidValue, match=r"must have at least 64 bytes for shape .*got 48"):
        MemoryMappedTensor.from_filename(path, torch.float32, (4, 4))
    with pytest.raises(FileNotFoundError):
        MemoryMappedTensor.from_filename(tmp_path / "b", torch.float32, (4, 4))
    with pytest.raises(OSError, match=r"regular file|directory"):
        MemoryMappedTensor.from_filename(tmp_path, torch.float32, (4, 4))
    with pytest.raises(InvalidValue, match="`index` must give a view"):
        MemoryMappedTensor.from_filename(path, torch.float32, (3, 4), torch.tensor([0]))
    with pytest.raises(TypeError, match="`input` must be a tensor, got a `list`"):
        MemoryMappedTensor.from_tensor(cast("Tensor", [1, 2]))
    with pytest.raises(InvalidValue, match="must be a dense tensor with data"):
        MemoryMappedTensor(torch.empty(2, device="meta"), filename=tmp_path / "b")
    with pytest.raises(FileNotFoundError):
        MemoryMappedTensor(sample(), filename=tmp_path / "none" / "b")
    with pytest.raises(RuntimeError):
        MemoryMappedTensor.zeros(-1, filename=tmp_path / "b")
    assert names_in(tmp_path) == ["a"]


@pytest.mark.parametrize(
    "part",
    [lambda a: a, lambda a: MemoryMappedTensor._of(a[1:, ::2], a.filename)],
    ids=["whole", "part"],
)
def test_another_process_maps_the_same_memory(
    part: Callable[[MemoryMappedTensor], MemoryMappedTensor], tmp_path: Path
) -> None:
    mapped = part(MemoryMappedTensor(sample(), filename=tmp_path / "a"))
    other = pickle.loads(bytes(ForkingPickler.dumps(mapped)))
    assert type(other) is MemoryMappedTensor
    assert torch.equal(other, mapped)
    other[0].fill_(3)
    assert torch.equal(other, mapped)
    inside = pickle.loads(bytes(ForkingPickler.dumps(TensorDict({"a": mapped}))))
    inside["a"][0].fill_(2)
    assert set(mapped[0].tolist()) == {2}
    file = MemoryMappedTensor.from_filename(tmp_path / "a", torch.float32, (3, 4))
    assert set(part(file)[0].tolist()) == {2}


def test_without_a_file_memory_is_shared() -> None:
    mapped = MemoryMappedTensor.ones(3)
    assert mapped.untyped_storage().is_shared()
    pickle.loads(bytes(ForkingPickler.dumps(mapped)))[0] = 5
    assert mapped.tolist() == [5, 1, 1]
    for empty in (MemoryMappedTensor.ones(0), MemoryMappedTensor.ones(2, 0)):
        other = pickle.loads(bytes(ForkingPickler.dumps(empty)))
        assert other.shape == empty.shape


def test_pickles_and_copies_hold_the_content(tmp_path: Path) -> None:
    mapped = MemoryMappedTensor(sample(), filename=tmp_path / "a")
    buffer = io.BytesIO()
    torch.save(mapped, buffer)
    buffer.seek(0)
    for made in (
        pickle.loads(pickle.dumps(mapped)),
        torch.load(buffer, weights_only=True),
        copy.deepcopy(mapped),
        copy.copy(mapped),
    ):
        assert type(made) is Tensor
        assert torch.equal(made, sample())


def test_it_is_a_leaf_like_any_other(tmp_path: Path) -> None:
    td = TensorDict({"a": MemoryMappedTensor(sample(), filename=tmp_path / "a")}, [3])
    td["a"][0] = 5
    td[1] = TensorDict({"a": torch.ones(4)})
    assert (td + 1)["a"][1].tolist() == [2, 2, 2, 2]
    td.save(tmp_path / "td")
    assert torch.equal(TensorDict.load(tmp_path / "td")["a"], td["a"])
    assert not hasattr(td, "saved_path")
    assert td.memmap(tmp_path / "arena").is_memmap()
    again = MemoryMappedTensor.from_filename(tmp_path / "a", torch.float32, (3, 4))
    assert again[:2].tolist() == [[5] * 4, [1] * 4]


def test_a_new_file_takes_its_shape_by_keyword_and_replaces_another(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    MemoryMappedTensor.ones(shape=(2,), filename=path)
    with pytest.raises(InvalidValue):
        MemoryMappedTensor.zeros(shape=(3,), filename=path)
    assert MemoryMappedTensor.zeros(shape=(3,), filename=path, existsok=True).tolist() == [0] * 3
    assert MemoryMappedTensor.full((2,), 7, filename=path, existsok=True).tolist() == [7, 7]
    assert MemoryMappedTensor.full(shape=(1,), fill_value=1).tolist() == [1]
    with pytest.raises(InvalidArgument, match="expected `shape` once"):
        MemoryMappedTensor.empty(2, shape=(2,))


def test_memory_of_somebody_else_is_mapped() -> None:
    from multiprocessing.shared_memory import SharedMemory

    memory = SharedMemory(create=True, size=64)
    try:
        tensor = MemoryMappedTensor.from_handler(memory, torch.int64, (2, 3))
        assert type(tensor) is MemoryMappedTensor
        tensor.fill_(7)
        assert memory.buf is not None
        assert bytes(memory.buf[:8]) == (7).to_bytes(8, "little")
        row = MemoryMappedTensor.from_handler(memory, torch.int64, (2, 3), index=1)
        assert row.tolist() == [7, 7, 7]
        with pytest.raises(InvalidValue, match="expected memory of at least 800 bytes, got 64"):
            MemoryMappedTensor.from_handler(memory, torch.int64, (100,))
        del tensor, row
    finally:
        memory.close()
        memory.unlink()
    with pytest.raises(InvalidValue, match="that can be written to"):
        MemoryMappedTensor.from_handler(b"12345678", torch.int64, (1,))
    with pytest.raises(InvalidArgument, match="`handler` must be memory"):
        MemoryMappedTensor.from_handler(3, torch.int64, (1,))
    assert MemoryMappedTensor.from_handler(bytearray(), torch.int64, (0, 2)).shape == (0, 2)
    tensor = MemoryMappedTensor(torch.ones(2), handler=None)
    assert tensor.tolist() == [1, 1]


def test_what_is_in_the_file_is_returned_itself(tmp_path: Path) -> None:
    path = tmp_path / "a"
    made, alone = MemoryMappedTensor.from_tensor(sample(), filename=path), MemoryMappedTensor(1)
    assert MemoryMappedTensor.from_tensor(made, filename=path) is made
    assert MemoryMappedTensor.from_tensor(alone) is alone
    assert MemoryMappedTensor.from_tensor(made) is not made
    assert made.is_shared()
    assert made[0].is_shared()


def test_shapes_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "a"
    MemoryMappedTensor(sample(), filename=path)
    shapes: list[Any] = [12, torch.tensor([12])]
    for shape in shapes:
        read = MemoryMappedTensor.from_filename(path, torch.float32, shape)
        assert read.shape == (12,)
    nested: Any = torch.tensor([[1], [3]])
    with pytest.raises(TypeError, match="tuple of ints"):
        MemoryMappedTensor.from_filename(path, torch.float32, nested)
