"""Arrays of other libraries become tensors, or a value for each row."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from kd_core import InvalidArgument, TensorDict


class Series:
    """A column of a table, as pandas and polars have it."""

    def __init__(self, values: object) -> None:
        self.values = numpy.array(values)

    def __array__(self, dtype: object = None, copy: object = None) -> "numpy.ndarray[Any, Any]":
        self.values.flags.writeable = False  # as pandas hands it out
        return self.values

    def __len__(self) -> int:
        return len(self.values)


class Image:
    """What describes its memory and has no length, as images of PIL."""

    def __init__(self) -> None:
        self.values = numpy.arange(6, dtype="uint8").reshape(2, 3)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.values.__array_interface__


class Exchanged:
    """What hands its memory over, as arrays of JAX do."""

    def __init__(self) -> None:
        self.tensor = torch.arange(3.0)

    def __dlpack__(self, **options: object) -> object:
        return self.tensor.__dlpack__()

    def __dlpack_device__(self) -> object:
        return self.tensor.__dlpack_device__()


def test_a_column_becomes_a_leaf() -> None:
    td = TensorDict({"x": Series([1.0, 2.0, 3.0]), "n": {"y": Series([1, 2, 3])}}, [3])
    assert td["x"].tolist() == [1, 2, 3]
    assert td[1]["n", "y"].item() == 2
    td["z"] = Series([True, False, True])
    assert td["z"].dtype is torch.bool


class Described(Image):
    """An array that only describes its memory."""

    def __len__(self) -> int:
        return len(self.values)


@pytest.mark.parametrize("make", [Described, Exchanged])
def test_arrays_of_each_protocol_share_their_memory(make: Callable[[], Any]) -> None:
    array = make()
    leaf = TensorDict({"x": array})["x"]
    leaf[0] = 7
    values = array.values if make is Described else array.tensor
    assert leaf.tolist() == values.tolist()


def test_an_image_stays_what_it_is() -> None:
    image: Any = Image()
    assert TensorDict({"x": image})["x"] is image
    assert TensorDict({"x": [image, image]}, [2])[1]["x"] is image


def test_records_become_a_nested_container() -> None:
    records = numpy.array([(1, 2.5), (3, 4.5)], dtype=[("n", "i8"), ("x", "f4")])
    td = TensorDict({"r": records}, [2])
    assert td["r", "x"].tolist() == [2.5, 4.5]
    nested: Any = TensorDict({"r": records.view(numpy.recarray)})["r"]
    assert nested.batch_size == (2,)


@pytest.mark.parametrize("values", [["a", "b", "c"], [None, 1, 2]])
@pytest.mark.parametrize("batch_size", [[], [3]])
def test_a_column_of_other_things_is_data(values: list[object], batch_size: list[int]) -> None:
    column: Any = Series(values)
    td = TensorDict({"x": column}, batch_size)
    assert (td[1]["x"] == values[1]) if batch_size else (td["x"] is column)


def test_a_record_is_one_value() -> None:
    record: Any = numpy.array([(1, 2.5)], dtype=[("n", "i8"), ("x", "f4")])[0]
    for made in (TensorDict({"r": record}), TensorDict.from_dict({"r": record})):
        assert made["r"] is record
    assert TensorDict.from_any(record) is record
    assert TensorDict.from_struct_array(record)["n"] == 1


def test_numbers_of_tuples_are_those_of_numpy() -> None:
    td = TensorDict({"t": (1.5, 2), "i": (1, 2), "l": [1.5, 2], "z": (1j, 2)})
    dtypes = [leaf.dtype for leaf in td.values()]
    assert dtypes == [torch.float64, torch.int64, torch.float32, torch.complex128]


def test_a_complex_number_is_a_value() -> None:
    assert TensorDict({"z": 1j}, [2])[0]["z"] == 1j
    assert [*TensorDict({"z": [1j, 2]}, [2])["z"]] == [1j, 2]
    assert TensorDict({"z": torch.zeros(2, dtype=torch.complex64)}).set_("z", 1j)["z"][0] == 1j


def test_a_column_is_written_in_place() -> None:
    td = TensorDict({"x": torch.zeros(3)}, [3])
    td.set_("x", Series([1.0, 2.0, 3.0]))
    td[:2] = {"x": Series([5.0, 6.0])}
    assert td["x"].tolist() == [5, 6, 3]
    with pytest.raises(InvalidArgument, match="`x`"):
        td.set_("x", Series(["a", "b", "c"]))


def test_an_array_that_is_read_only_is_copied() -> None:
    array = numpy.arange(3.0)
    array.flags.writeable = False
    leaf = TensorDict({"x": array})["x"]
    leaf += 1
    assert array.tolist() == [0, 1, 2]


def test_numbers_behind_an_empty_list_are_kept() -> None:
    td: Any = TensorDict({"v": [[[], [1]], [[2]]]})
    (empty, one), two = td["v"]
    assert [empty.tolist(), one.tolist(), two.tolist()] == [[], [1], [[2]]]
    target = TensorDict({"v": torch.zeros(2, 0)}, [2])
    with pytest.raises(InvalidArgument, match="expected lists of one length"):
        target.set_("v", [[], [1]])
    assert TensorDict({"v": [[], []]})["v"].shape == (2, 0)
