"""The generator of methods: what it writes of long rows is formatted and fits the line."""

import ast
import importlib.util
import sys
from types import ModuleType

import pytest
from tests.repo.tree import ROOT


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_ops", ROOT / "tools/generate_ops.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate_ops"] = module
    spec.loader.exec_module(module)
    return module


def test_long_rows_are_wrapped(generator: ModuleType) -> None:
    table = generator.load_table()
    options = tuple(
        table.Option(f"a_long_name_{i}", "float | None", "None", keyword=i > 1) for i in range(5)
    )
    text = "the values of a function of many long words"
    rows = [table.UnaryRow("a_function_of_one_tensor_with_a_name", text, options=options)]
    pairs = [table.BinaryRow("a_function_of_two_tensors_with_a_name", text, options=options)]
    for methods in (
        generator.unary(rows),
        generator.unary_in_place(rows),
        generator.binary(pairs),
        generator.binary_in_place(pairs),
    ):
        source = "class Rows:" + "".join(methods)
        ast.parse(source)
        assert max(map(len, source.splitlines())) <= generator.WIDTH


def test_a_text_that_fits_no_line_is_refused(generator: ModuleType) -> None:
    row = generator.load_table().UnaryRow("f", "the value of " + "words " * 20)
    with pytest.raises(ValueError, match="the text of a row makes a line of more than 100"):
        list(generator.unary([row]))
