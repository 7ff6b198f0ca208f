"""Printed containers are read back, with their keys, shapes and dtypes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.content import DTYPES, containers

from kd_core import InvalidValue, TensorDict, UnbatchedTensor, set_printoptions
from kd_core.convert import parse_tensor_dict_string

KEYS = st.text(alphabet="ab. [", max_size=3).map(str.strip)


@settings(max_examples=80, deadline=None)
@given(td=containers(KEYS, DTYPES, data=False))
def test_what_is_printed_is_read(td: TensorDict) -> None:
    for compact in (True, False):
        with set_printoptions(compact=compact):
            back = parse_tensor_dict_string(repr(td))
            assert back.schema() == td.schema()
            assert repr(back) == repr(td)


def test_data_is_read_too() -> None:
    td = TensorDict({"s": "a (b), c", "x": torch.zeros(2), "n": {"m": None}}, [2])
    back = parse_tensor_dict_string(repr(td))
    assert back["s"] == "a (b), c"
    assert back["n", "m"] is None


def test_what_all_rows_share_and_words_are_read() -> None:
    td = TensorDict({"u": UnbatchedTensor(torch.ones(2)), "w": ["a", "b, }"]}, [2])
    back = parse_tensor_dict_string(repr(td))
    assert "u: unbatched f32[2]" in repr(back)
    assert back["w"] == ["a", "b, }"]


@pytest.mark.parametrize(
    "text",
    ["", "Tensor(...)", repr(TensorDict({"a": 1}))[:-20], repr(TensorDict({"a": 1})) + "x"],
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue, match="expected a printed container"):
        parse_tensor_dict_string(text)
