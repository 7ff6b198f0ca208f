"""Containers whose entries stay in a file of HDF5."""

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.core.content import assert_same

from kd_core import (
    InvalidValue,
    Locked,
    MissingDependency,
    NonTensorData,
    NonTensorStack,
    PersistentTensorDict,
    TensorDict,
    TensorDictBase,
)
from kd_core.testing import ContainerContract

h5py: Any = pytest.importorskip("h5py")


def sample() -> TensorDict:
    inner = {"b": torch.zeros(3), "": torch.ones(3, 0), "x/y": torch.ones(3, dtype=torch.bool)}
    leaves = {
        "a": torch.arange(6.0).view(3, 2),
        "n": inner,
        "half": torch.ones(3, dtype=torch.bfloat16),
        "z": torch.ones(3, 2, dtype=torch.complex64),
        "word": "w",
        "rows": NonTensorStack("x", "y", "z"),
    }
    return TensorDict(leaves, [3])


@pytest.fixture
def stored(tmp_path: Path) -> PersistentTensorDict:
    made = sample().to_h5(tmp_path / "td.h5")
    assert isinstance(made, PersistentTensorDict)
    return made


def opened(td: PersistentTensorDict, mode: str = "r") -> PersistentTensorDict:
    td.close()
    return PersistentTensorDict.from_h5(td.filename, mode=mode)


class TestPersistentTensorDict(ContainerContract):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.paths = (tmp_path / f"{number}.h5" for number in itertools.count())

    def make(self) -> PersistentTensorDict:
        return PersistentTensorDict.from_dict(TensorDict(self.content(), [3, 4]), next(self.paths))

    def test_it_is_loaded_with_weights_only(self) -> None:
        """A pickle names a file, which nothing opens unless the pickle is trusted."""
        file = io.BytesIO()
        torch.save(self.make(), file)
        file.seek(0)
        with pytest.raises(pickle.UnpicklingError, match="restore_persistent"):
            torch.load(file, weights_only=True)

    def test_it_is_a_pytree(self) -> None:
        """What is mapped over it is a `TensorDict`."""
        doubled = torch.utils._pytree.tree_map(lambda leaf: leaf * 2, self.make())
        assert (doubled == self.make() * 2).all()


def test_it_holds_what_was_written(stored: PersistentTensorDict) -> None:
    assert_same(stored.to_tensordict(), sample())
    read = TensorDict.from_h5(opened(stored).filename)
    assert type(read) is PersistentTensorDict
    assert list(read.keys()) == sorted(sample().keys())
    assert_same(read.to_tensordict(), sample())


@pytest.mark.parametrize(
    "write",
    [
        lambda td: td["a"].fill_(7),
        lambda td: td["a"][1:].zero_(),
        lambda td: td.set("a", torch.ones(3, 2)),
        lambda td: td.set("a", torch.ones(3, 5)),
        lambda td: td.set_("a", torch.ones(3, 2)),
        lambda td: td.set_at_("a", torch.ones(2), 1),
        lambda td: td.__setitem__(0, td[2]),
        lambda td: td.__setitem__(("n", "new"), torch.ones(3)),
        lambda td: td.__setitem__(("new", "deep", "k"), torch.ones(3)),
        lambda td: td.get("n").update({"b": torch.ones(3)}),
        lambda td: td.update_({"a": torch.ones(3, 2)}),
        lambda td: td.exclude("word", "rows").zero_(),
        lambda td: td.del_("a"),
        lambda td: td.rename_key_("a", "c"),
        lambda td: td.set("word", "another"),
        lambda td: td[1:]["a"].fill_(3),
    ],
)
def test_a_write_goes_to_the_file(
    write: Callable[[Any], object], stored: PersistentTensorDict
) -> None:
    expected = sample()
    write(expected)
    write(stored)
    assert_same(stored.to_tensordict(), expected)
    assert_same(opened(stored).to_tensordict(), expected)


def mixed(filename: Path, **options: Any) -> PersistentTensorDict:
    inner = TensorDict({"b": torch.zeros(4, dtype=torch.int64)}, [4])
    td = TensorDict({"a": torch.zeros(4, 2), "n": inner, "rows": NonTensorStack(*"wxyz")}, [4])
    made = td.to_h5(filename, **options)
    assert isinstance(made, PersistentTensorDict)
    return made


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}])
@pytest.mark.parametrize(
    "index",
    [1, slice(1, 3), [0, 1], [3, 0], torch.tensor([0, 3]), torch.arange(4) > 1, slice(0, 0)],
)
def test_what_is_set_in_rows_goes_to_the_file(
    index: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    td = mixed(tmp_path / "td.h5", **options)
    chosen = torch.zeros(4)
    chosen[index] = 1
    rows = td[index]
    rows["a"] = torch.ones(*rows.batch_size, 2, dtype=torch.int64)
    rows["n"]["b"] = torch.full(rows.batch_size, 2)
    rows.update({"new": torch.full(rows.batch_size, 3.0), ("n", "new"): rows["a"] + 3})
    rows.set("rows", "new")
    for each in (rows, td[index]):
        assert each["a"].dtype is torch.float32
        assert each["a"].sum() == 2 * chosen.sum()
        assert each["n", "b"].sum() == 2 * chosen.sum()
    again = opened(td)
    assert again["a"].tolist() == torch.stack([chosen, chosen], 1).tolist()
    assert again["n", "b"].tolist() == (chosen * 2).tolist()
    assert again["new"].tolist() == (chosen * 3).tolist()
    assert again["n", "new"].sum() == 8 * chosen.sum()
    assert [row == "new" for row in again["rows"]] == chosen.bool().tolist()


@pytest.mark.parametrize("index", [slice(0, 3), [0, 2, 3]])
def test_rows_of_rows_go_to_the_file(index: Any, tmp_path: Path) -> None:
    td = mixed(tmp_path / "td.h5")
    rows = td[index]
    rows[1] = {"a": torch.ones(2)}
    rows[:2]["n"]["b"] = torch.tensor([4, 5])
    rows[0]["a"] = torch.full((2,), 3.0)
    rows[2].set_("a", torch.full((2,), 7.0))
    assert rows["a"].sum(1).tolist() == [6, 2, 14]
    assert td["a"].sum() == 22
    assert td[index]["n", "b"].tolist() == [4, 5, 0]
    rows[[2, 0]].add_(torch.tensor([1, 2]))
    assert td[index]["n", "b"].tolist() == [6, 5, 1]
    rows.zero_()
    assert td["a"].sum() == 0
    rows.fill_("a", 2.0).update_({"n": {"b": torch.tensor([1, 2, 3])}})
    rows.set_at_("a", 5.0, 0).update_at_({"n": {"b": 7}}, 2)
    assert td[index].sum(dim="feature")["a"].tolist() == [10, 4, 4]
    assert td["n", "b"].sum() == 10
    assert type(rows.clone()) is type(rows + 1) is type(rows.to_tensordict()) is TensorDict
    assert type(pickle.loads(pickle.dumps(rows))) is type(copy.deepcopy(rows)) is TensorDict
    mapped = torch.utils._pytree.tree_map(lambda leaf: leaf + 1, rows.exclude("rows"))
    assert type(mapped) is type(mapped["n"]) is TensorDict
    mapped = torch.utils._pytree.tree_map(lambda leaf: leaf + 1, rows)
    assert type(mapped) is type(mapped["n"]) is TensorDict


IN_PLACE: dict[str, Callable[[TensorDictBase], object]] = {
    "add_": lambda rows: rows.add_(1),
    "mul_ container": lambda rows: rows.mul_(rows + 2),
    "sub_ rows": lambda rows: rows.sub_(torch.arange(2.0)),
    "clamp_": lambda rows: rows.clamp_(min=2.5),
    "lerp_": lambda rows: rows.lerp_(rows + 1, 0.5),
    "neg_": lambda rows: rows.neg_(),
    "maximum_": lambda rows: rows.maximum_(3.0),
    "zero_": lambda rows: rows.zero_(),
    "fill_": lambda rows: rows.fill_(4.0),
    "fill_ key": lambda rows: rows.fill_("a", 4.0),
    "masked_fill_": lambda rows: rows.masked_fill_(torch.tensor([True, False]), 9.0),
    "apply_": lambda rows: rows.apply_(lambda leaf: leaf * 2),
    "apply": lambda rows: rows.apply(lambda leaf: leaf * 2, inplace=True),
    "copy_": lambda rows: rows.copy_((rows * 2).clone()),
    "copy_at_": lambda rows: rows.copy_at_((rows[0] * 5).clone(), 1),
    "set_": lambda rows: rows.set_("a", torch.ones(2, 2)),
    "set_ nested": lambda rows: rows.set_(("n", "b"), torch.ones(2)),
    "set_at_": lambda rows: rows.set_at_("a", torch.ones(2), 0),
    "update_": lambda rows: rows.update_({"a": torch.ones(2, 2)}),
    "update_at_": lambda rows: rows.update_at_({"n": {"b": 5.0}}, 1),
    "update inplace": lambda rows: rows.update({"a": torch.ones(2, 2)}, inplace=True),
    "set inplace": lambda rows: rows.set("a", torch.ones(2, 2), inplace=True),
    "named_apply": lambda rows: rows.named_apply(lambda name, leaf: leaf + 1, inplace=True),
    "index": lambda rows: rows.__setitem__(1, 7.0),
    "nested": lambda rows: rows["n"].add_(1),
    "operator": lambda rows: rows.__iadd__(1),
}


@pytest.mark.parametrize("index", [[2, 0], torch.tensor([True, False, True]), [1, 2]])
@pytest.mark.parametrize("call", IN_PLACE)
def test_what_is_written_in_place_to_rows_goes_to_the_file(
    call: str, index: Any, tmp_path: Path
) -> None:
    inner = {"b": torch.arange(3.0)}
    plain = TensorDict({"a": torch.arange(6.0).view(3, 2), "n": inner}, [3])
    td = PersistentTensorDict.from_dict(plain, tmp_path / "td.h5")
    rows = plain[index]
    IN_PLACE[call](rows)
    plain[index] = rows
    IN_PLACE[call](td[index])
    assert_same(opened(td).to_tensordict(), plain)


@pytest.mark.parametrize("index", [[2, 0], [1, 2]])
@pytest.mark.parametrize("call", [call for call in IN_PLACE if call[:3] in ("set", "upd", "nes")])
def test_rows_write_what_changed_alone(call: str, index: Any, tmp_path: Path) -> None:
    inner = {"b": torch.arange(3.0)}
    plain = TensorDict({"a": torch.arange(6.0).view(3, 2), "n": inner, "c": torch.zeros(3)}, [3])
    td = PersistentTensorDict.from_dict(plain, tmp_path / "td.h5")
    rows = td[index]
    td["c"] = torch.full((3,), 7.0)
    IN_PLACE[call](rows)
    assert opened(td)["c"].tolist() == [7, 7, 7]


def test_keys_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    plain = TensorDict({"z": torch.zeros(3), "a": {"y": [1, 2, 3], "b": [1, 2, 3]}}, [3])
    td = PersistentTensorDict.from_dict(plain, tmp_path / "td.h5")
    assert list(td.keys(True)) == ["a", ("a", "b"), ("a", "y"), "z"]
    td["c"] = torch.ones(3)
    assert list(td.to_tensordict().keys()) == ["a", "c", "z"]
    assert td.file["z"].shape == (3,)
    assert list(opened(td).keys()) == ["a", "c", "z"]


def test_batches_of_a_loader_write_to_the_file(tmp_path: Path) -> None:
    td = mixed(tmp_path / "td.h5")
    loader: Any = torch.utils.data.DataLoader(td, 3, collate_fn=lambda rows: rows)
    for number, batch in enumerate(loader):
        batch["seen"] = torch.full(batch.batch_size, number + 1)
    assert td["seen"].tolist() == [1, 1, 1, 2]


def test_rows_keep_the_lock_and_do_not_write_to_a_file_for_reading(tmp_path: Path) -> None:
    td = mixed(tmp_path / "td.h5").lock_()
    with pytest.raises(Locked):
        td[:2]["new"] = torch.ones(2)
    rows = opened(td)[:2]
    rows["a"] = torch.ones(2, 2)
    assert opened(td)["a"].sum() == 0


def test_an_entry_that_is_assigned_is_cast(stored: PersistentTensorDict) -> None:
    stored["a"] = torch.ones(3, 2, dtype=torch.int64)
    assert stored["a"].dtype is torch.float32
    stored["n", "b"] = torch.ones(3, dtype=torch.bool)
    assert stored["n", "b"].dtype is torch.float32
    stored["a"] = torch.ones(3, 2, dtype=torch.complex64)
    assert stored["a"].dtype is torch.complex64
    stored.set("a", torch.ones(3, 2, dtype=torch.int64))
    assert stored["a"].dtype is torch.int64


def test_a_tensor_that_was_read_stays_when_the_entry_is_replaced(
    stored: PersistentTensorDict,
) -> None:
    old = stored["a"]
    for size in range(1, 20):
        stored["a"] = torch.full((3, size + 2), 9.0)
        stored[f"k{size}"] = torch.full((3, 2), 8.0)
    old.add_(0)
    assert old.tolist() == sample()["a"].tolist()
    assert "%replaced" not in list(stored.keys())
    assert opened(stored)["k1"].tolist() == [[8, 8]] * 3


def test_a_file_for_reading_refuses_writes(stored: PersistentTensorDict) -> None:
    read = opened(stored)
    for write in (
        lambda: read.set("x", torch.ones(3)),
        lambda: read["a"].fill_(1),
        lambda: read.__setitem__(0, read[1]),
        lambda: read[0]["a"].zero_(),
        lambda: read.del_("a"),
    ):
        with pytest.raises(RuntimeError, match="opened for reading"):
            write()
    assert (read + 1)["n", "b"].tolist() == [1, 1, 1]
    assert_same(opened(read).to_tensordict(), sample())


def test_compressed_entries_are_read_and_set(tmp_path: Path) -> None:
    plain = sample()
    td = plain.to_h5(tmp_path / "td.h5", compression="gzip")
    assert isinstance(td, PersistentTensorDict)
    assert td.kwargs == {"compression": "gzip"}
    assert_same(td.to_tensordict(), plain)
    with pytest.raises(InvalidValue, match="set the entry"):
        td["a"].zero_()
    td["a"] = torch.ones(3, 2)
    assert opened(td)["a"].sum() == 6


def test_locks_pickles_and_results(stored: PersistentTensorDict, tmp_path: Path) -> None:
    stored.lock_()
    with pytest.raises(Locked):
        stored["new"] = torch.ones(3)
    with pytest.raises(Locked):
        stored["n", "new"] = torch.ones(3)
    stored.unlock_()
    again = pickle.loads(pickle.dumps(stored))
    again["a"].fill_(4)
    assert stored["a"].sum() == 24
    again.close()
    for made in (stored[1:] + 0, stored + 0, stored.copy(), torch.stack([stored, stored])):  # type: ignore[list-item]  # torch takes containers
        assert type(made) is TensorDict  # type: ignore[comparison-overlap, unreachable]  # types say less than the run
    stored.save(tmp_path / "saved")
    assert type(TensorDict.load(tmp_path / "saved")) is TensorDict
    stored.close()
    with pytest.raises(InvalidValue, match="is closed"):
        stored["a"]


def test_a_file_of_another_origin(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "td.h5", "w") as root:
        root["x"] = torch.arange(6).view(3, 2).numpy()
        root["g/y"] = torch.ones(3).numpy().astype(">f4")
        root["s"] = "text"
    td = PersistentTensorDict.from_h5(tmp_path / "td.h5", batch_size=[3])
    assert td["x"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert td["g", "y"].tolist() == [1, 1, 1]
    assert td["s"] == "text"
    td.close()
    inferred = TensorDict.from_h5(tmp_path / "td.h5", batch_dims=1)
    assert inferred.batch_size == (3,)


def test_a_file_of_another_origin_has_the_sizes_that_its_leaves_share(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "td.h5", "w") as root:
        root["x"] = torch.zeros(3, 2).numpy()
        root["s"] = "text"
        root["g/y"] = torch.zeros(3, 2, 4).numpy()
        root["g/z"] = torch.zeros(3, 2, 4).numpy()
    td = TensorDict.from_h5(tmp_path / "td.h5")
    assert isinstance(td, PersistentTensorDict)
    assert td.batch_size == (3, 2)
    assert td.nested("g", PersistentTensorDict).batch_size == (3, 2, 4)
    td.close()
    with h5py.File(tmp_path / "td.h5", "r+") as root:
        root["g/short"] = torch.zeros(2).numpy()
    assert TensorDict.from_h5(tmp_path / "td.h5").batch_size == ()
    with pytest.raises(InvalidValue, match=r"entry `g` .* must start with the batch size \(3,\)"):
        TensorDict.from_h5(tmp_path / "td.h5", batch_size=[3])


def test_data_that_json_changes_is_kept(tmp_path: Path) -> None:
    td = TensorDict({"a": torch.zeros(2)}, [2])
    td["size"] = NonTensorData((25,))
    td["pair"] = NonTensorData({"k": (1, float("inf"))})
    td["rows"] = NonTensorStack((1, 2), {3: "x"})
    stored = PersistentTensorDict.from_dict(td, tmp_path / "td.h5")
    stored[0] = {"a": torch.ones(()), "rows": (5, "y")}
    stored.close()
    found = TensorDict.from_h5(tmp_path / "td.h5")
    values: list[object] = [found["size"], found["pair"], found["rows"]]
    assert values == [(25,), {"k": (1, float("inf"))}, [(5, "y"), {3: "x"}]]
    with pytest.raises(InvalidValue, match="`o`"):
        PersistentTensorDict.from_dict({"o": NonTensorData(object())}, tmp_path / "td.h5")


def test_a_new_file_is_filled(tmp_path: Path) -> None:
    td = PersistentTensorDict(filename=tmp_path / "td.h5", batch_size=[4], mode="w")
    td["x"] = torch.zeros(4, 2)
    td[1] = TensorDict({"x": torch.ones(2)})
    read = opened(td)
    assert read.batch_size == (4,)
    assert read["x"].sum() == 2
    read.close()
    made = PersistentTensorDict.from_dict(
        {"a": torch.ones(3, 2)}, tmp_path / "b.h5", auto_batch_size=True
    )
    assert made.batch_size == (3, 2)
    with pytest.raises(InvalidValue, match="must start with the batch size"):
        PersistentTensorDict.from_h5(made.filename, batch_size=[5], mode="r+")


def test_what_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidValue, match="`mode` must be"):
        PersistentTensorDict(filename=tmp_path / "x.h5", mode="q")
    with pytest.raises(FileNotFoundError):
        PersistentTensorDict(filename=tmp_path / "x.h5")
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(MissingDependency, match="pip install h5py"):
        PersistentTensorDict(filename=tmp_path / "x.h5", mode="w")


def test_a_clone_is_in_a_file_of_its_own(stored: PersistentTensorDict, tmp_path: Path) -> None:
    clone = stored.clone()
    assert type(clone) is PersistentTensorDict
    assert clone.filename != stored.filename
    assert_same(clone.to_tensordict(), sample())
    clone["a"].zero_()
    assert stored["a"].sum() == 15
    assert type(copy.deepcopy(stored)) is PersistentTensorDict
    named = stored.clone(newfile=tmp_path / "clone.h5")
    assert named.mode == "r+"
    named.close()
    assert_same(PersistentTensorDict.from_h5(tmp_path / "clone.h5").to_tensordict(), sample())


def test_a_container_that_is_gone_has_closed_its_file(tmp_path: Path) -> None:
    sample().to_h5(tmp_path / "td.h5")
    assert PersistentTensorDict.from_h5(tmp_path / "td.h5")["n", "b"].shape == (3,)
    # h5py refuses to write to a file that is still open for reading.
    assert PersistentTensorDict.from_h5(tmp_path / "td.h5", mode="r+").mode == "r+"


def test_the_batch_size_of_a_mapping_is_inferred(tmp_path: Path) -> None:
    td = PersistentTensorDict.from_dict(
        {"a": torch.ones(3, 2), "n": {"b": torch.ones(3, 2, 4)}, "s": "word"}, tmp_path / "td.h5"
    )
    assert td.batch_size == (3, 2)
    kept = PersistentTensorDict.from_dict(TensorDict({"a": torch.ones(3)}), tmp_path / "other.h5")
    assert kept.batch_size == ()


def test_rows_of_other_lengths_in_a_file_of_another_origin(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["a"] = [0.0, 1.0]
        file.create_dataset("r", (2,), dtype=h5py.vlen_dtype("i4"))
        file["r"][0], file["r"][1] = [1], [2, 3]
    td: Any = PersistentTensorDict.from_h5(tmp_path / "rows.h5")
    assert [row.tolist() for row in td["r"]] == [[1], [2, 3]]
