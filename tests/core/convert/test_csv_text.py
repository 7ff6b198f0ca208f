"""Containers as comma-separated values."""

from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.core.content import assert_same, containers
from torch import Tensor

from kd_core import InvalidValue, KeyCollision, NestedKey, TensorDict

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
    back = TensorDict.from_csv(file, dtype=dtypes_of(td))
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
    assert_same(TensorDict.from_csv(file), td)


def test_one_value_for_the_batch_becomes_one_a_row(file: Path) -> None:
    TensorDict({"s": "word"}, [2]).to_csv(file)
    assert TensorDict.from_csv(file)["s"] == ["word", "word"]


def test_a_file_of_another_origin_is_read(file: Path) -> None:
    file.write_text("x,x[0],n.y,ok\r\n1,2,0.5,True\r\n3,4,nan,False\r\n")
    td = TensorDict.from_csv(file)
    assert td["x"].tolist() == [1, 3]
    assert td["x[0]"].tolist() == [2, 4]
    assert td["n", "y"].dtype is torch.float64
    assert td["ok"].dtype is torch.bool
    assert "n.y" in TensorDict.from_csv(file, separator=None)
    assert TensorDict.from_csv(file, batch_size=[]).batch_size == ()


def test_no_rows_need_a_dtype(file: Path) -> None:
    TensorDict({"a": torch.zeros(0)}, [0]).to_csv(file)
    td = TensorDict.from_csv(file, dtype=torch.float32)
    assert td["a"].shape == (0,)
    assert td.batch_size == (0,)


def test_what_has_no_column_is_refused(file: Path) -> None:
    with pytest.raises(KeyCollision, match=r"`a\.b` holds the separator"):
        TensorDict({"a.b": [1]}, [1]).to_csv()
    with pytest.raises(KeyCollision, match="ends like an element"):
        TensorDict({"a[0]": [1]}, [1]).to_csv()
    with pytest.raises(InvalidValue, match="no element in a row"):
        TensorDict({"a": torch.zeros(2, 0)}, [2]).to_csv()
    with pytest.raises(InvalidValue, match="without a batch"):
        TensorDict({"a": 1}).to_csv()
    assert TensorDict({"a.b": [1]}, [1]).to_csv(separator="/") == "a.b\r\n1\r\n"


@pytest.mark.parametrize(
    ("text", "message"), [("a,b\n1\n", "every line must have 2 values"), ("a,a\n1,2\n", "twice")]
)
def test_a_broken_table_is_refused(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        TensorDict.from_csv(file)
