"""Containers as Arrow tables and Parquet files; needs pyarrow."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.content import assert_same, containers

from kd_core import InvalidArgument, InvalidValue, KeyCollision, TensorDict

pyarrow: Any = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")

PLAIN = st.text(alphabet="ab ", max_size=3)


@settings(max_examples=60, deadline=None)
@given(td=containers(PLAIN, min_dims=1))
def test_an_equal_container_comes_back(td: TensorDict) -> None:
    table = td.to_arrow()
    assert table.num_rows == len(td) or not table.num_columns  # type: ignore[attr-defined]  # untyped
    if table.num_columns:  # type: ignore[attr-defined]  # untyped
        assert_same(TensorDict.from_arrow(table), td)


def test_a_file_of_parquet_comes_back(tmp_path: Path) -> None:
    td = TensorDict({"a": torch.randn(3, 2), "n": {"b": torch.arange(3), "s": list("xyz")}}, [3])
    td.to_parquet(tmp_path / "td.parquet")
    assert_same(TensorDict.from_parquet(tmp_path / "td.parquet"), td)
    some = TensorDict.from_parquet(
        tmp_path / "td.parquet", columns=["n.b"], dtype=torch.int8, separator="."
    )
    assert some["n", "b"].dtype is torch.int8
    assert list(some.keys()) == ["n"]


def test_a_table_of_another_origin_is_read() -> None:
    table = pyarrow.table(
        {
            "x": pyarrow.array([1, 2], pyarrow.int16()),
            "n.y": [True, False],
            "s": ["a", None],
            "l": [[1.0, 2.0], [3.0, 4.0]],
            "r": [[1], [2, 3]],
            "struct": [{"p": 1.5, "q": "u"}, {"p": 2.5, "q": "v"}],
            "f": pyarrow.array([[1, 2], [3, 4]], pyarrow.list_(pyarrow.int8(), 2)),
        }
    )
    with pytest.warns(UserWarning, match="`r` holds lists of numbers of different lengths"):
        td: Any = TensorDict.from_arrow(table, separator=".")
    assert td.batch_size == (2,)
    assert td["x"].dtype is torch.int16
    assert td["n", "y"].tolist() == [True, False]
    assert td["s"] == ["a", None]
    assert td["l"].shape == (2, 2)
    assert [row.tolist() for row in td["r"]] == [[1], [2, 3]]
    assert td["struct", "p"].tolist() == [1.5, 2.5]
    assert td["struct", "q"] == ["u", "v"]
    assert td["f"].dtype is torch.int8
    td["x"][0] = 7  # the values are a copy
    assert table["x"][0].as_py() == 1
    plain = table.drop_columns("r")
    assert TensorDict.from_arrow(plain.to_batches()[0])["x"].tolist() == [1, 2]
    assert "n.y" in TensorDict.from_arrow(plain, separator=None)


def test_nulls_are_refused_or_masked() -> None:
    table = pyarrow.table({"x": [1, None, 3], "y": [0.5, 1.5, None]})
    with pytest.raises(InvalidValue, match="column `x` has 1 nulls"):
        TensorDict.from_arrow(table)
    td = TensorDict.from_arrow(table, nulls="mask", mask_key=("meta", "valid"))
    assert td["x"].tolist() == [1, 0, 3]
    assert td["meta", "valid"].tolist() == [True, False, False]
    td = TensorDict.from_arrow(table, nulls="nan")
    assert td["x"].dtype is torch.float64
    assert td["x"].isnan().tolist() == [False, True, False]
    assert td["y"].isnan().tolist() == [False, False, True]
    with pytest.raises(InvalidValue, match="'raise', 'mask' or 'nan'"):
        TensorDict.from_arrow(table, nulls="drop")
    with pytest.raises(InvalidArgument, match="Arrow table"):
        TensorDict.from_arrow({})


def test_a_table_that_was_changed_is_read_as_it_is() -> None:
    table: Any = TensorDict({"a": torch.zeros(3, 2), "b": torch.ones(3)}, [3]).to_arrow()
    assert TensorDict.from_arrow(table.slice(1)).batch_size == (2,)
    assert list(TensorDict.from_arrow(table.select(["b"])).keys()) == ["b"]


def test_keys_that_become_one_are_refused() -> None:
    with pytest.raises(KeyCollision, match=r"becomes column `a\.b`"):
        TensorDict({"a.b": [1], "a": {"b": [1]}}, [1]).to_arrow()
    with pytest.raises(InvalidValue, match="without a batch"):
        TensorDict({"a": 1}).to_arrow()


def test_ragged_rows_of_numbers_are_lists_in_a_table() -> None:
    with pytest.warns(UserWarning, match="lists of numbers of different lengths"):
        td = TensorDict({"x": torch.ones(2), "r": [[1], [2, 3]]}, [2])
    table: Any = td.to_arrow()
    assert table["r"].to_pylist() == ["[1]", "[2, 3]"]
    back: object = TensorDict.from_arrow(table)["r"]
    assert back == [[1], [2, 3]]


def test_a_file_of_another_origin_is_read_as_pandas_reads_it(tmp_path: Path) -> None:
    times = pyarrow.array([1, 2], pyarrow.timestamp("us"))
    columns = {"i": [1, None], "f": [0.5, None], "b": [True, None], "t": times, "s": ["x", None]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "td.parquet")
    td: Any = TensorDict.from_parquet(tmp_path / "td.parquet")
    assert td["i"].nan_to_num(7).tolist() == [1, 7]
    assert td["f"].nan_to_num(7).tolist() == [0.5, 7]
    assert td["b"] == [True, None]
    assert td["t"].tolist() == [1000, 2000]
    assert td["s"] == ["x", None]


def test_numbers_behind_an_empty_list_are_kept_in_tables() -> None:
    with pytest.warns(UserWarning, match="lists of numbers of different lengths"):
        td: Any = TensorDict.from_arrow(pyarrow.table({"r": [[], [1]]}))
    assert [row.tolist() for row in td["r"]] == [[], [1]]
