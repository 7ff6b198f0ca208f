"""Containers as comma-separated values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.core.content import assert_same, containers
from torch import Tensor

from kd_core import (
    InvalidArgument,
    InvalidValue,
    KeyCollision,
    KeyNotFound,
    NestedKey,
    TensorDict,
)

KEYS = st.text(alphabet="ab ,\"'\n\r\u2028é[", min_size=0, max_size=3)
DTYPES = (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("csv") / "td.csv"


def dtypes_of(td: TensorDict) -> dict[NestedKey, torch.dtype]:
    return {key: leaf.dtype for key, leaf in td.items(True, True)}


@settings(max_examples=80, deadline=None)
@given(td=containers(KEYS, DTYPES, min_dims=1, max_dims=1, data=False))
def test_tensors_come_back(file: Path, td: TensorDict) -> None:
    leaves = list(td.values(True, True))
    assume(leaves and len(td) and all(0 not in leaf.shape for leaf in leaves))
    td.to_csv(file)
    back = TensorDict.from_csv(file, separator=".", dtype=dtypes_of(td))
    leaves_of = dict(back.items(True, True))
    for key, leaf in td.items(True, True):
        assert isinstance(leaf, Tensor)
        assert torch.equal(leaves_of[key].nan_to_num(7), leaf.nan_to_num(7))
    assert back.batch_size == td.batch_size


def test_a_container_without_rows_has_its_columns() -> None:
    assert TensorDict({"a": torch.zeros(0, 2)}, [0]).to_csv() == "a[0],a[1]\r\n"


def test_strings_are_rows(file: Path) -> None:
    td = TensorDict({"s": ["a,b", 'q"\n'], "n": {"w": ["", "x"]}, "x": [1, 2]}, [2])
    td.to_csv(file)
    assert_same(TensorDict.from_csv(file, separator="."), td)


def test_one_value_for_the_batch_becomes_one_a_row(file: Path) -> None:
    TensorDict({"s": "word"}, [2]).to_csv(file)
    assert TensorDict.from_csv(file)["s"] == ["word", "word"]


def test_a_file_of_another_origin_is_read(file: Path) -> None:
    file.write_text("x,x[0],n.y,ok\r\n1,2,0.5,True\r\n3,4,nan,False\r\n")
    td = TensorDict.from_csv(file, separator=".")
    assert td["x"].tolist() == [1, 3]
    assert td["x[0]"].tolist() == [2, 4]
    assert td["n", "y"].dtype is torch.float64
    assert td["ok"].dtype is torch.bool
    assert "n.y" in TensorDict.from_csv(file)
    assert TensorDict.from_csv(file, batch_size=[]).batch_size == ()


def test_no_rows_need_a_dtype(file: Path) -> None:
    TensorDict({"a": torch.zeros(0)}, [0]).to_csv(file)
    td = TensorDict.from_csv(file, dtype=torch.float32)
    assert td["a"].shape == (0,)
    assert td.batch_size == (0,)


def test_what_has_no_column_is_refused(file: Path) -> None:
    with pytest.raises(KeyCollision, match=r"`b\.c` holds the separator"):
        TensorDict({"a": {"b.c": [1]}}, [1]).to_csv()
    with pytest.raises(KeyCollision, match="would be one column"):
        TensorDict({"a.b": [1], "a": {"b": [2]}}, [1]).to_csv()
    with pytest.raises(KeyCollision, match="ends like an element"):
        TensorDict({"a[0]": [1]}, [1]).to_csv()
    with pytest.raises(InvalidValue, match="no element in a row"):
        TensorDict({"a": torch.zeros(2, 0)}, [2]).to_csv()
    with pytest.raises(InvalidValue, match="without a batch"):
        TensorDict({"a": 1}).to_csv()
    assert TensorDict({"a": {"b.c": [1]}}, [1]).to_csv(separator="/") == "a/b.c\r\n1\r\n"


def test_names_of_columns_hold_dots(file: Path) -> None:
    file.write_text("petal.width,w.x\n1.5,a\n2.5,b\n")
    td = TensorDict.from_csv(file)
    td.to_csv(file)
    assert file.read_text() == "petal.width,w.x\n1.5,a\n2.5,b\n"
    assert TensorDict.from_csv(file)["petal.width"].tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    ("text", "message"), [("a,b\n1\n", "every line must have 2 values"), ("a,a\n1,2\n", "twice")]
)
def test_a_broken_table_is_refused(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        TensorDict.from_csv(file)


ROWS = "a,b,v[0],v[1],s\r\n1,2.5,1,,x\r\n2,,2,3,y\r\n3,nan,3,4,\r\n"


@pytest.mark.parametrize("kind", [torch.float32, "float32", "torch.float32"])
def test_empty_values_of_a_floating_point_dtype_are_nan(
    file: Path, kind: torch.dtype | str
) -> None:
    file.write_text(ROWS)
    assert TensorDict.from_csv(file)["b"].nan_to_num(7).tolist() == [2.5, 7, 7]
    by_key: dict[NestedKey, Any] = {"b": kind, "v": kind}
    for asked in (by_key, kind):
        td = TensorDict.from_csv(file, dtype=asked)
        assert td["b"].dtype is torch.float32
        assert td["b"].isnan().tolist() == [False, True, True]
        assert td["v"].nan_to_num(-1).tolist() == [[1, -1], [2, 3], [3, 4]]
        assert td["s"] == ["x", "y", ""]


def test_a_dtype_that_a_column_cannot_have_is_refused(file: Path) -> None:
    file.write_text(ROWS)
    by_key: dict[NestedKey, torch.dtype | str] = {"b": torch.int64}
    for asked in (by_key, torch.int64, "int64"):
        with pytest.raises(InvalidValue, match=r"column `b` .*row 1, counted from 0, is empty"):
            TensorDict.from_csv(file, dtype=asked)
    with pytest.raises(InvalidValue, match=r"column `s` .*row 0, counted from 0, is 'x'"):
        TensorDict.from_csv(file, dtype={"s": torch.float32})
    with pytest.raises(KeyNotFound, match=r"`dtype` names `bb`, but no entry.*Did you mean `b`"):
        TensorDict.from_csv(file, dtype={"bb": torch.float32})
    with pytest.raises(InvalidArgument, match=r"the name of one, .*got 'float23'"):
        TensorDict.from_csv(file, dtype={"b": "float23"})
    file.write_text("a\r\n1.5\r\nnan\r\n")
    with pytest.raises(InvalidValue, match=r"column `a` .*row 1, counted from 0, is NaN"):
        TensorDict.from_csv(file, dtype=torch.int64)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("1\r\n300", torch.uint8, "300"),
        ("1\r\n-1", torch.uint8, "-1"),
        ("1\r\ninf", torch.int64, "inf"),
        ("1.5\r\n1e20", torch.int64, "1e"),
        ("0.5\r\nnan", torch.bool, "NaN"),
    ],
)
def test_numbers_that_a_dtype_does_not_have_are_refused(
    file: Path, text: str, kind: torch.dtype, value: str
) -> None:
    file.write_text(f"a\r\n{text}\r\n")
    by_key: dict[NestedKey, torch.dtype] = {"a": kind}
    for asked in (kind, by_key):
        with pytest.raises(InvalidValue, match=rf"`a` .*row 1, counted from 0, is {value}"):
            TensorDict.from_csv(file, dtype=asked)
    file.write_text("a,v[0],v[1]\r\n1.0,2,-3\r\n2.0,5,300\r\n")
    assert TensorDict.from_csv(file, dtype={"a": torch.uint8})["a"].tolist() == [1, 2]
    with pytest.raises(InvalidValue, match=r"`v` .*row 0, counted from 0, is -3"):
        TensorDict.from_csv(file, dtype=torch.uint8)


def test_tables_without_rows_have_the_dtype_too(file: Path) -> None:
    file.write_text("a\r\n")
    assert TensorDict.from_csv(file, dtype=torch.int8)["a"].dtype is torch.int8
    assert TensorDict.from_json('{"a": [], "b": 1.0}', dtype=torch.int8)["b"].dtype is torch.int8


def test_numbers_have_the_fewest_digits() -> None:
    td = TensorDict({"a": torch.tensor([3.721, 1e-30, float("nan")])}, [3])
    assert td.to_csv() == "a\r\n3.721\r\n1e-30\r\nnan\r\n"
    assert TensorDict({"a": torch.tensor([0.1]).half()}, [1]).to_csv() == "a\r\n0.1\r\n"


def test_the_fewest_digits_read_as_the_same_number(file: Path) -> None:
    odd = torch.tensor([0x15AE43FD], dtype=torch.int32).view(torch.float32)  # 7.038531e-26
    td = TensorDict({"a": torch.cat([odd, torch.randn(200)])}, [201])
    td.to_csv(file)
    assert TensorDict.from_csv(file, dtype=torch.float32)["a"].equal(td["a"])


def test_numbers_are_written_while_another_device_is_the_default_one(file: Path) -> None:
    td = TensorDict({"a": torch.tensor([0.1, 2.0]), "b": torch.tensor([0.1, 2.0]).half()}, [2])
    with torch.device("meta"):
        td.to_csv(file)
    assert file.read_text() == "a,b\n0.1,0.1\n2.0,2.0\n"
