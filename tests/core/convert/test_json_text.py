"""Containers as JSON: an equal one comes back, and files of another origin are read."""

import json
from io import StringIO
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.content import assert_same, containers
from tests.core.kinds import declared, stacked

from kd_core import InvalidValue, KeyCollision, KeyNotFound, NestedKey, TensorDict


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("json") / "td.json"


@settings(max_examples=80, deadline=None)
@given(td=containers())
def test_an_equal_container_comes_back(file: Path, td: TensorDict) -> None:
    td.to_json(file)
    assert_same(TensorDict.from_json(file), td)


@settings(max_examples=40, deadline=None)
@given(td=containers(keys=st.text(alphabet="abc", min_size=1, max_size=3)))
def test_flat_names_come_back(file: Path, td: TensorDict) -> None:
    td.to_json(file, separator=".")
    assert_same(TensorDict.from_json(file, separator="."), td)


def test_keys_come_back_in_their_order(file: Path) -> None:
    td = TensorDict({"b": "x", "n": {"d": {}, "c": 1}, "a": torch.zeros(2)})
    td.to_json(file)
    keys = ["b", "n", ("n", "d"), ("n", "c"), "a"]
    assert list(TensorDict.from_json(file).keys(include_nested=True)) == keys


def test_text_is_returned_without_a_path() -> None:
    text = TensorDict({"a": [1, 2], "n": {"b": 0.5}}).to_json()
    assert text is not None
    content = json.loads(text)
    assert content["a"] == [1, 2]
    assert content["n"] == {"b": 0.5}


def test_every_kind_is_written(file: Path) -> None:
    for td in (declared(), stacked(0)):
        td.to_json(file)
        back = TensorDict.from_json(file)
        assert back.batch_size == td.batch_size
        assert torch.equal(back["a"], td["a"])


def test_a_file_of_another_origin_is_read(file: Path) -> None:
    file.write_text('{"a": [[1, 2], [3, 4]], "n": {"x.y": [0.5, 1]}, "s": "word", "m": [1, null]}')
    td = TensorDict.from_json(file, batch_size=[2])
    assert td["a"].shape == (2, 2)
    assert td["n", "x.y"].dtype is torch.float64
    assert td["s"] == "word"
    assert td["m"].nan_to_num(7).tolist() == [1, 7]
    split = TensorDict.from_json(file, separator=".", dtype=torch.float64, auto_batch_size=True)
    assert split["n", "x", "y"].dtype is torch.float64
    assert split.batch_size == (2,)


def test_lines_hold_one_row_each(file: Path) -> None:
    td = TensorDict({"a": [[1, 2], [3, 4]], "n": {"b": [0.5, float("nan")]}, "s": ["x", "y"]}, [2])
    td.to_json(file, lines=True)
    assert len(file.read_text().splitlines()) == 2
    assert_same(TensorDict.from_json(file, lines=True, dtype={("n", "b"): torch.float32}), td)
    td.to_json(file, lines=True, separator="/")
    assert '"a[0]": 1' in file.read_text()
    back = TensorDict.from_json(file, lines=True, separator="/", dtype={("n", "b"): torch.float32})
    assert_same(back, td)


def test_what_json_cannot_keep_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"entry `\('n', 's'\)` is non-tensor data that JSON"):
        TensorDict({"n": {"s": object()}}).to_json()
    with pytest.raises(InvalidValue, match="JSON cannot keep"):
        TensorDict({"s": ("a", "tuple")}).to_json()
    with pytest.raises(KeyCollision, match="reserved in JSON"):
        TensorDict({"__kd__": 1}).to_json()
    with pytest.raises(KeyCollision, match=r"becomes `a.b`, which is another key"):
        TensorDict({"a.b": 1, "a": {"b": 2}}).to_json(separator=".")
    with pytest.raises(InvalidValue, match="without a batch"):
        TensorDict({"a": 1}).to_json(lines=True)
    with pytest.raises(InvalidValue, match="must be a dense tensor"):
        TensorDict({"a": torch.eye(2).to_sparse()}).to_json()


@pytest.mark.parametrize(
    ("text", "lines", "message"),
    [
        ("[1, 2]", False, "expected one JSON object for each row"),
        ("{", False, "expected JSON"),
        ('{"a": 1}\n[1]', True, "one on each line"),
        ('{"a": 1}\n{"b": 1}', True, "the same keys, got .'a'. in line 1 and .'b'. in line 2"),
    ],
)
def test_a_file_of_another_form_is_refused(
    file: Path, text: str, lines: bool, message: str
) -> None:
    file.write_text(text)
    with pytest.raises(InvalidValue, match=message):
        TensorDict.from_json(file, lines=lines)


def test_a_failing_write_leaves_the_file(file: Path) -> None:
    file.write_text("before")
    with pytest.raises(InvalidValue):
        TensorDict({"s": object()}).to_json(file)
    assert file.read_text() == "before"


def test_dtypes_by_nested_keys_of_any_file(file: Path) -> None:
    file.write_text('{"n": {"a": [1, null], "b": [1, 2]}, "c": 0, "s": ""}')
    td = TensorDict.from_json(
        file, dtype={("n", "a"): torch.float32, ("n", "b"): torch.int8, "c": torch.float16}
    )
    assert td["n", "a"].nan_to_num(-1).tolist() == [1, -1]
    assert td["n", "b"].dtype is torch.int8
    assert td["c"].item() == 0
    assert td["s"] == ""
    own = TensorDict({"n": {"x": torch.ones(2)}, "word": "s"}, [2])
    own.to_json(file)
    assert TensorDict.from_json(file, dtype={("n", "x"): torch.float64})["n", "x"].dtype is (
        torch.float64
    )
    absent: list[NestedKey] = [("n", "y"), "word", "n"]
    for key in absent:
        with pytest.raises(KeyNotFound, match="but no entry of numbers has that key"):
            TensorDict.from_json(file, dtype={key: torch.float64})


def test_the_text_itself_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    td = TensorDict({"a": torch.ones(2), "s": ["x", "y"]}, [2])
    for lines in (False, True):
        text = td.to_json(lines=lines)
        assert text is not None
        assert_same(TensorDict.from_json(text, lines=lines, dtype=torch.float32), td)
    with pytest.raises(InvalidValue, match="expected one JSON object for each row"):
        TensorDict.from_json("[1]")
    monkeypatch.chdir(tmp_path)
    td.to_json("{a}.json")
    assert_same(TensorDict.from_json("{a}.json"), td)
    with pytest.raises(FileNotFoundError):
        TensorDict.from_json("absent.json")


def test_a_list_of_objects_has_one_for_each_row() -> None:
    td = TensorDict.from_json('[{"a": 1, "b.c": 2.5}, {"a": 3, "b.c": 4}]')
    assert td["a"].tolist() == [1, 3]
    assert td["b.c"].tolist() == [2.5, 4]


def test_columns_are_read_as_rows_of_a_table(file: Path) -> None:
    file.write_text('{"a": [1, 2], "b": [0.1, null]}')
    td = TensorDict.from_json(file)
    assert td.batch_size == (2,)
    assert td["b"].dtype is torch.float64
    assert td["b"].isnan().tolist() == [False, True]
    of_pandas = TensorDict.from_json('{"a": {"0": 1, "1": 2}, "s": {"0": "x", "1": "y"}}')
    assert of_pandas.batch_size == (2,)
    assert of_pandas["a"].tolist() == [1, 2]
    assert of_pandas["s"] == ["x", "y"]
    assert TensorDict.from_json('{"a": [1, 2], "n": {"b": 3}}').batch_size == ()


def test_an_open_file_is_read(file: Path) -> None:
    file.write_text('[{"a": 1}, {"a": 2}]')
    with file.open() as opened:
        assert TensorDict.from_json(opened)["a"].tolist() == [1, 2]
    assert TensorDict.from_json(StringIO('{"a": 1}\n{"a": 2}'), lines=True).batch_size == (2,)


def test_numbers_behind_an_empty_list_are_kept() -> None:
    td = TensorDict.from_json('{"a": [[], [1]]}')
    assert [*td["a"]] == [[], [1]]
