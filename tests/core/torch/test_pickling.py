"""Containers outlive the process: pickle, deepcopy and `torch.load`."""

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import children
from tests.core.content import assert_same as assert_same_tree
from tests.core.store.trees import trees

from kd_core import (
    FormatError,
    LazyStackedTensorDict,
    Locked,
    NonTensorData,
    TensorClass,
    TensorDict,
    TensorDictBase,
    TypedTensorDict,
    lazy_stack,
)
from kd_core._containers.dense import restore_dense


def nested() -> TensorDict:
    source = {"b": torch.arange(12.0).reshape(3, 4), "a": {"c": torch.ones(3), "word": "reach"}}
    return TensorDict(source, [3], device="cpu")


def assert_same(td: TensorDict, other: TensorDict) -> None:
    assert type(other) is type(td)
    assert other.batch_size == td.batch_size
    assert other.device == td.device
    assert other.is_locked == td.is_locked
    assert list(other.keys(True)) == list(td.keys(True))
    assert other["a", "word"] == td["a", "word"]
    torch.testing.assert_close(other["b"], td["b"])
    torch.testing.assert_close(other["a", "c"], td["a", "c"])


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_keeps_everything(protocol: int) -> None:
    assert_same(nested(), pickle.loads(pickle.dumps(nested(), protocol)))


@given(trees(), st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_a_random_tree_comes_back(td: TensorDictBase, protocol: int) -> None:
    assert_same_tree(pickle.loads(pickle.dumps(td, protocol)), td)


def test_deepcopy_shares_no_tensor() -> None:
    td = nested()
    other = copy.deepcopy(td)
    assert_same(td, other)
    other["b"].zero_()
    other["a", "c"].zero_()
    torch.testing.assert_close(td["b"], nested()["b"])
    torch.testing.assert_close(td["a", "c"], nested()["a", "c"])


def test_deepcopy_keeps_what_is_one_tensor_one() -> None:
    shared = torch.zeros(2)
    other = copy.deepcopy(TensorDict({"a": shared, "b": {"c": shared}}))
    assert other["a"] is other["b", "c"]


def test_copy_shares_tensors_but_not_levels() -> None:
    td = nested()
    other = copy.copy(td)
    other["a", "new"] = torch.zeros(3)
    assert other["b"] is td["b"]
    assert "new" not in td["a"]


def test_a_lock_is_kept_by_a_pickle() -> None:
    other = pickle.loads(pickle.dumps(nested().lock_()))
    assert_same(nested().lock_(), other)
    with pytest.raises(Locked, match="with the one that encloses it"):
        other.get("a").unlock_()
    other.unlock_()
    other["a", "new"] = torch.zeros(3)


def test_a_deep_copy_leaves_the_lock_of_what_enclosed_it_behind() -> None:
    assert not copy.deepcopy(nested().lock_().nested("a", TensorDict)).is_locked


def test_a_view_pickles_its_own_bytes() -> None:
    td = TensorDict({"a": torch.zeros(10_000, 10)}, [10_000])
    assert len(pickle.dumps(td[3])) < 2_000
    torch.testing.assert_close(pickle.loads(pickle.dumps(td[3:5]))["a"], torch.zeros(2, 10))


def test_a_view_that_is_sent_to_a_process_shares_its_storage() -> None:
    base = TensorDict({"a": torch.arange(8).view(4, 2), "n": {"b": torch.zeros(4)}}, [4])
    for td in (base[1:3], base.consolidate()):
        sent = pickle.loads(bytes(ForkingPickler.dumps(td)))
        sent["a"].fill_(7)
        sent["n", "b"].fill_(7)
        assert td["a"].eq(7).all()
        assert td["n", "b"].eq(7).all()
    assert base["n", "b"].tolist() == [0, 7, 7, 0]


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("grad", [False, True])
def test_views_pickle_their_own_bytes_and_keep_their_strides(protocol: int, grad: bool) -> None:
    base = torch.randn(1000, 100, requires_grad=grad)
    views = {"row": base[3], "column": base[:, 1], "expanded": base[:1, :1].expand(500, 500)}
    for view in views.values():
        data = pickle.dumps(TensorDict({"a": view}), protocol)
        assert len(data) < 10_000
        back = pickle.loads(data)["a"]
        assert torch.equal(back, view)
        assert back.requires_grad == grad
    assert back.stride() == (0, 0)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.complex32]
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_dtypes_that_torch_cannot_unpickle(
    dtype: torch.dtype, protocol: int, tmp_path: Path
) -> None:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    base = torch.randint(1, 9, (300, 100)).to(bits).view(dtype)
    leaves = {"all": base, "none": base[:0], "column": base[3:9, 1], "one": base[0, 0]}
    td = TensorDict(leaves | {"again": base, "expanded": base[:1, :1].expand(500, 500)})
    data = pickle.dumps(td.exclude("all", "again"), protocol)
    assert len(data) < 10_000
    torch.save(td, tmp_path / "td.pt")
    loaded = torch.load(tmp_path / "td.pt", weights_only=True)
    for made in (pickle.loads(pickle.dumps(td, protocol)), pickle.loads(data), loaded):
        for key, leaf in made.items():
            assert leaf.dtype is dtype
            assert leaf.shape == td[key].shape
            assert torch.equal(leaf.view(bits), td[key].view(bits))
        assert made["expanded"].stride() == (0, 0)
    assert loaded["again"] is loaded["all"]


class Forged:
    """Pickled as a call of what restores containers."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __reduce__(self) -> tuple[object, ...]:
        return restore_dense, self.args


@pytest.mark.parametrize(
    ("kind", "entries", "batch"),
    [
        (TensorDict, {"a": torch.zeros(3)}, [4]),
        (TensorDict, {"a": torch.zeros(3)}, [3, 1]),
        (TensorDict, {"a": TensorDict({}, [2])}, [3]),
        (TensorDict, {"a": torch.zeros(3), "b": NonTensorData("x", [2])}, [3]),
        (TensorDict, {"a": 3}, []),
        (TensorDict, {3: torch.zeros(3)}, []),
        (LazyStackedTensorDict, {"a": torch.zeros(3)}, [3]),
        (NonTensorData, {"a": torch.zeros(3)}, [3]),
        (TensorDict, {"a": torch.zeros(3)}, [3.0]),
        (TensorDict, {"a": torch.zeros(1)}, [True]),
        (TensorDict, {}, [1 << 63]),
        (TensorDict, {}, 3),
        (TensorDict, [], []),
    ],
)
def test_a_forged_pickle_is_refused(kind: type, entries: object, batch: list[int]) -> None:
    file = io.BytesIO()
    torch.save(Forged(kind, entries, batch, None, None), file)
    file.seek(0)
    with pytest.raises(FormatError, match="the pickle is not valid"):
        torch.load(file, weights_only=True)
    with pytest.raises(FormatError, match="the pickle is not valid"):
        pickle.loads(pickle.dumps(Forged(kind, entries, batch, None, None)))


def test_what_a_pickle_goes_on_to_change_does_not_reach_a_container() -> None:
    entries = {"a": torch.zeros(3)}
    td = restore_dense(TensorDict, dict(entries), (3,), None, None)
    made = restore_dense(TensorDict, cast("dict[str, Any]", entries), (3,), None, None)
    entries["b"] = torch.zeros(7)
    assert [*made.keys()] == [*td.keys()] == ["a"]


def test_buffers_are_handed_over_without_a_copy() -> None:
    td = TensorDict({"a": torch.randn(1000, 10), "n": {"b": torch.arange(1000)}, "s": "x"}, [1000])
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(td, 5, buffer_callback=buffers.append)
    assert len(buffers) == 2
    assert len(data) < 2_000
    back = pickle.loads(data, buffers=buffers)
    assert back["a"].data_ptr() == td["a"].data_ptr()
    back["n", "b"][0] = -7
    assert td["n", "b"][0] == -7
    readonly = pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])
    readonly["a"].zero_()
    assert td["a"].abs().sum() > 0
    assert torch.equal(pickle.loads(pickle.dumps(td, 5))["a"], td["a"])


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_one_tensor_under_two_keys_stays_one(protocol: int) -> None:
    shared = torch.zeros(2)
    both = [TensorDict({"a": shared, "b": {"c": shared}}), TensorDict(d=shared)]
    td, other = pickle.loads(pickle.dumps(both, protocol))
    assert td["a"] is td["b", "c"] is other["d"]


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_leaf_is_pickled_as_little_more_than_its_bytes(protocol: int) -> None:
    td = TensorDict({str(i): torch.full((4,), float(i)) for i in range(1000)})
    data = pickle.dumps(td, protocol)
    assert len(data) < 1000 * 80  # torch writes 300 bytes
    back = pickle.loads(data)
    assert back["999"].tolist() == [999.0] * 4
    back["999"].zero_()  # it may be written to
    assert td["999"].tolist() == [999.0] * 4


def test_a_buffer_that_an_earlier_release_pickled_loads() -> None:
    head = b"\x80\x05\x8c\x11kd_core.extending\x94\x8c\x0crestore_leaf\x94\x93"
    data = head + b"(\x96\x08\0\0\0\0\0\0\0\0\0\x80?\0\0\0@\x8c\x07float32K\x02K\x01\x86\x88tR."
    leaf = pickle.loads(data)
    assert leaf.tolist() == [[1.0], [2.0]]
    assert leaf.requires_grad


def test_containers_are_pickled_without_numpy() -> None:
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "import pickle, torch, kd_core\n"
        "td = kd_core.TensorDict({'a': torch.ones(2, requires_grad=True)})\n"
        "for protocol in (2, 4, 5): print(pickle.loads(pickle.dumps(td, protocol))['a'].tolist())"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert result.stdout.split("\n") == ["[1.0, 1.0]"] * 3 + [""]


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_every_leaf_survives(protocol: int) -> None:
    leaves = {
        "scalar": torch.tensor(3, dtype=torch.int8),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(3).to(torch.bfloat16),
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        "transposed": torch.randn(3, 4).t(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(3).to_sparse(),
        "bool": torch.tensor([True, False]),
    }
    back = pickle.loads(pickle.dumps(TensorDict(dict(leaves)), protocol))
    for key, leaf in leaves.items():
        assert type(back[key]) is type(leaf)
        assert back[key].dtype is leaf.dtype
        assert torch.equal(back[key].to_dense(), leaf.to_dense()), key
    assert back["transposed"].stride() == leaves["transposed"].stride()


def test_shared_memory_is_shared_between_processes_at_any_protocol() -> None:
    td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3)}}, [3])
    for protocol in (None, 5):
        back = pickle.loads(ForkingPickler.dumps(td, protocol))
        back["a"].fill_(4)
        back["n", "b"].fill_(4)
        assert td["a"].tolist() == td["n", "b"].tolist() == [4, 4, 4]
        td.zero_()


class Shared(TensorClass):
    x: torch.Tensor


def shared_of_kinds() -> dict[str, TensorDictBase]:
    """Return containers in shared memory, one of each kind."""
    ragged = lazy_stack([TensorDict({"x": torch.zeros(n)}) for n in (1, 2)])
    made: dict[str, TensorDictBase] = {
        "dense": TensorDict({"n": {"x": torch.zeros(3)}, "x": torch.zeros(3), "s": "text"}, [3]),
        "ragged": ragged,
        "declared": Shared(x=torch.zeros(2), batch_size=[2]),
    }
    return {kind: td.share_memory_() for kind, td in made.items()}


def fill_where_shared(kinds: dict[str, TensorDictBase]) -> list[str]:
    """Run in another process: write to what says that it is shared."""
    found = [kind for kind, td in kinds.items() if td.is_shared()]
    for kind in found:
        kinds[kind].apply_(lambda leaf: leaf.fill_(4))
    return found


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_received_container_knows_that_it_is_shared(method: str) -> None:
    kinds = shared_of_kinds()
    with torch.multiprocessing.get_context(method).Pool(1) as pool:
        found = pool.apply(fill_where_shared, (kinds,))
    assert found == list(kinds)
    for td in kinds.values():
        assert all((leaf == 4).all() for leaf in _leaves(td))


class _Spawning:
    """What multiprocessing asks about files for a process that it starts."""

    DupFd = staticmethod(int)

    def __init__(self) -> None:
        self.files: set[int] = set()

    def duplicate_for_child(self, number: int) -> int:
        self.files.add(number)
        return number


def test_rows_for_a_new_process_share_the_files_of_their_base() -> None:
    rows = list(TensorDict({"a": torch.zeros(300, 2), "n": {"b": torch.ones(300)}}, [300]))
    starting: Any = _Spawning()
    set_spawning_popen(starting)
    try:
        ForkingPickler.dumps(rows)
    finally:
        set_spawning_popen(None)
    gc.collect()
    assert len(starting.files) == 2
    for number in starting.files:
        os.fstat(number)  # it is still open


def _leaves(td: TensorDictBase) -> list[torch.Tensor]:
    leaves: list[torch.Tensor] = []
    td.apply(leaves.append)
    return leaves


KINDS: dict[str, Callable[[], TensorDictBase]] = {
    "TensorDict": lambda: TensorDict({"a": torch.ones(2)}, [2]),
    "LazyStackedTensorDict": lambda: lazy_stack([TensorDict(a=1.0), TensorDict(a=2.0)]),
    "TensorClass": lambda: TensorClass(batch_size=[2]),
    "TypedTensorDict": lambda: TypedTensorDict(batch_size=[2]),
}


def test_a_program_that_used_no_kind_yet_loads_each_with_weights_only(tmp_path: Path) -> None:
    for name, make in KINDS.items():
        torch.save(make(), tmp_path / name)
    program = (
        "import sys, torch, kd_core\n"
        "for path in sys.argv[1:]: print(type(torch.load(path, weights_only=True)).__name__)"
    )
    told = children.check_output("-c", program, *(tmp_path / name for name in KINDS))
    assert told.split() == list(KINDS)


def test_torch_load_takes_weights_only(tmp_path: Path) -> None:
    torch.save(nested(), tmp_path / "td.pt")
    assert_same(nested(), torch.load(tmp_path / "td.pt", weights_only=True))


def test_load_may_map_to_another_device(tmp_path: Path) -> None:
    torch.save(nested(), tmp_path / "td.pt")
    td = torch.load(tmp_path / "td.pt", weights_only=True, map_location="meta")
    assert td.device == td["b"].device == td["a"].device == torch.device("meta")
    assert td.get(("a", "word")).device == torch.device("meta")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 3")
def test_protocol_3_is_loaded_with_weights_only(tmp_path: Path) -> None:
    torch.save(nested(), tmp_path / "td.pt", pickle_protocol=3)
    assert_same(nested(), torch.load(tmp_path / "td.pt", weights_only=True))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_torch_save_keeps_storages_at_any_protocol(
    protocol: int, zipped: bool, tmp_path: Path
) -> None:
    base = torch.arange(10_000.0)
    leaves = {"one": base[7], "row": base[3:5], "grad": torch.ones(2, 3, requires_grad=True)}
    saved = (TensorDict(leaves | {"all": base, "s": "text"}), base)
    file = tmp_path / "td.pt"
    torch.save(saved, file, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    assert file.stat().st_size < 50_000  # `base` is stored once
    td, beside = torch.load(file, weights_only=False)
    assert_same_tree(td, saved[0])
    assert td["all"].data_ptr() == beside.data_ptr()
    assert td["row"].untyped_storage().nbytes() == 8
    assert td["grad"].requires_grad
    moved, _ = torch.load(file, weights_only=False, map_location="meta")
    for key in (*leaves, "all"):
        assert moved[key].is_meta
        assert moved[key].shape == saved[0][key].shape


def test_a_device_is_kept_without_leaves() -> None:
    td = TensorDict({"n": {}, "word": "reach"}, device="meta")
    assert pickle.loads(pickle.dumps(td)).device == torch.device("meta")
    assert pickle.loads(pickle.dumps(td))["n"].device == torch.device("meta")


class Labelled(TensorDict):
    """A subclass whose instances have an attribute."""

    label: list[str]


def loaded_weights_only(td: TensorDict) -> object:
    buffer = io.BytesIO()
    torch.save(td, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda td: pickle.loads(pickle.dumps(td, 2)),
        lambda td: pickle.loads(pickle.dumps(td, 5)),
        lambda td: pickle.loads(ForkingPickler.dumps(td)),
        loaded_weights_only,
    ],
)
def test_attributes_of_a_subclass_are_kept(copied: Callable[[TensorDict], object]) -> None:
    td = Labelled({"x": torch.zeros(3)}, [3])
    td.label = ["first"]
    other = copied(td)
    assert isinstance(other, Labelled)
    assert other.label == ["first"]
    assert (other.label is td.label) == (copied is copy.copy)
    assert other["x"].sum() == 0


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_leaf_of_one_element_may_have_any_step(protocol: int) -> None:
    leaf = torch.arange(9)[3::3][:1]
    assert leaf.is_contiguous()
    assert leaf.stride() == (3,)
    copy = pickle.loads(pickle.dumps(TensorDict({"x": leaf}, [1]), protocol))
    assert copy["x"].tolist() == [3]
