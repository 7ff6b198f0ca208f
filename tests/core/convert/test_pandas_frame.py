"""Containers as data frames; needs pandas."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.core.content import assert_same, containers

from kd_core import InvalidArgument, InvalidValue, KeyCollision, TensorDict

pandas: Any = pytest.importorskip("pandas")

KEYS = st.text(alphabet="ab \n", max_size=3)
DTYPES = (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)


@settings(max_examples=60, deadline=None)
@given(
    td=containers(st.text(alphabet="ab \n", max_size=3), DTYPES, min_dims=1, max_dims=1, data=False)
)
def test_tensors_come_back(td: TensorDict) -> None:
    leaves = list(td.values(True, True))
    assume(leaves and all(0 not in leaf.shape for leaf in leaves))
    back = TensorDict.from_pandas(td.to_pandas(), separator=".")
    leaves_of = dict(back.items(True, True))
    for key, leaf in td.items(True, True):
        assert leaves_of[key].dtype is leaf.dtype
        assert torch.equal(leaves_of[key].nan_to_num(7), leaf.nan_to_num(7))


def test_values_of_rows_come_back() -> None:
    td = TensorDict({"s": ["x", None], "n": {"a": [[1, 2], [3, 4]]}}, [2])
    frame: Any = td.to_pandas()
    assert list(frame.columns) == ["n.a[0]", "n.a[1]", "s"]
    assert_same(TensorDict.from_pandas(frame, separator="."), td)


def test_a_frame_of_another_origin_is_read() -> None:
    frame = pandas.DataFrame({"a": [1, 2], "b.c": [0.5, 1.5], "s": ["x", "y"]}, index=[5, 7])
    td = TensorDict.from_pandas(frame, separator=".", dtype={("b", "c"): torch.float32})
    assert td.batch_size == (2,)
    assert td["b", "c"].dtype is torch.float32
    assert td["s"] == ["x", "y"]
    td["a"][0] = 9
    assert frame["a"].tolist() == [1, 2]
    assert list(TensorDict.from_pandas(frame).keys()) == ["a", "b.c", "s"]


def test_names_that_are_not_strings_are_converted() -> None:
    frame = pandas.DataFrame([[1, 2, 3]], columns=[0, ("a", "b"), 1.5])
    assert list(TensorDict.from_pandas(frame).keys()) == ["0", "('a', 'b')", "1.5"]
    with pytest.raises(KeyCollision, match="column `a` is given twice"):
        TensorDict.from_pandas(pandas.DataFrame([[1, 2]], columns=["a", "a"]))


def test_columns_that_are_not_of_numbers_or_strings() -> None:
    frame = pandas.DataFrame({"m": pandas.array([1, None], dtype="Int64"), "o": [{"k": 1}, None]})
    td = TensorDict.from_pandas(frame)
    assert td["o"][0] == {"k": 1}
    assert td["m"][0] == 1
    times = pandas.DataFrame({"t": pandas.to_datetime(["2020-01-01"]).astype("datetime64[s]")})
    assert TensorDict.from_pandas(times)["t"].tolist() == [1577836800000000000]
    kinds = pandas.DataFrame({"k": pandas.Categorical(["y", "x", None])})
    assert TensorDict.from_pandas(kinds)["k"].tolist() == [1, 0, -1]
    with pytest.raises(InvalidArgument, match="pandas data frame"):
        TensorDict.from_pandas({"a": [1]})
    with pytest.raises(InvalidValue, match=r"`a` is of dtype `torch\.bfloat16`"):
        TensorDict({"a": torch.zeros(2, dtype=torch.bfloat16)}, [2]).to_pandas()


def test_pandas_reads_and_writes_with_its_options(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    td = TensorDict({"a": [1, 3], "b": [2.5, 4.5]}, [2])
    td.to_csv(file, sep=";")
    assert file.read_text() == "a;b\n1;2.5\n3;4.5\n"
    assert (TensorDict.from_csv(file, sep=";") == td).all()
    assert TensorDict.from_csv(file, sep=";", usecols=["b"], nrows=1)["b"].tolist() == [2.5]
    assert TensorDict.from_csv(StringIO("a\n1\n"))["a"].tolist() == [1]
    file.write_text('{"columns": ["a"], "index": [0, 1], "data": [[1], [2]]}')
    assert TensorDict.from_json(file, orient="split")["a"].tolist() == [1, 2]
