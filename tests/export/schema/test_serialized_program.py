"""The JSON of a program is checked field by field, and its size expressions."""

import copy
import json
import typing
import zipfile
from collections.abc import Iterator

import pytest
from tests.export.models import case
from torch._export.serde import schema as torch_schema

import kd_export
from kd_export import UntrustedArtifact
from kd_export._schema.serialized_program import (
    _OBJECTS,
    _UNIONS,
    check_expression,
    check_program,
    is_name,
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    path = tmp_path_factory.mktemp("artefacts") / "model.pt2"
    model = case("graph")
    kd_export.save(model.module, path, model.example, dynamic=model.dynamic)
    with zipfile.ZipFile(path) as archive:
        data: dict[str, object] = json.loads(archive.read("model/models/model.json"))
    return data


def test_a_checked_program_holds_what_torch_needs(program: dict[str, object]) -> None:
    checked = json.loads(json.dumps(check_program(program)))
    graph = program["graph_module"]["graph"]  # type: ignore[index]  # JSON
    assert [node["target"] for node in checked["graph_module"]["graph"]["nodes"]] == [
        node["target"] for node in graph["nodes"]
    ]
    assert checked["guards_code"] == []
    assert [call["fqn"] for call in checked["graph_module"]["module_call_graph"]] == [""]


def objects(item: object) -> Iterator[dict[str, object]]:
    if isinstance(item, dict):
        yield item
        for value in item.values():
            yield from objects(value)
    elif isinstance(item, list):
        for value in item:
            yield from objects(value)


def test_an_unknown_field_is_refused_wherever_it_is(program: dict[str, object]) -> None:
    count = sum(1 for _ in objects(check_program(program)))
    refused = 0
    for number in range(sum(1 for _ in objects(program))):
        forged = copy.deepcopy(program)
        list(objects(forged))[number]["evil"] = {"fn": "os.system"}
        try:
            checked = json.dumps(check_program(forged))
        except UntrustedArtifact:
            refused += 1
        else:
            assert "evil" not in checked  # in a part that is dropped
    assert refused > count // 2


NAMES = ["x=1", "x, y=f()", "", "1x", "x y", "x\n", "é", "class", None, 3, ["x"]]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_identifiers(program: dict[str, object], name: object) -> None:
    assert not is_name(name)
    forged = copy.deepcopy(program)
    for item in objects(forged):
        if "as_tensor" in item:
            item["as_tensor"] = {"name": name}
            break
    with pytest.raises(UntrustedArtifact, match="expected name in `name`"):
        check_program(forged)


SPECS = {
    "an enum": [{"__enum__": True, "fqn": "evil_module:Kind", "name": "A"}],
    "an object": {"__enum__": True, "fqn": "evil_module:Kind", "name": "A"},
    "a number": [1],
}


@pytest.mark.parametrize("context", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("kind", ["builtins.dict", "builtins.list", None])
def test_contexts_of_trees_are_keys(
    program: dict[str, object], context: object, kind: str | None
) -> None:
    forged = copy.deepcopy(program)
    leaf: dict[str, object] = {"type": None, "context": None, "children_spec": []}
    tree = {"type": kind, "context": json.dumps(context), "children_spec": [leaf]}
    for item in objects(forged):
        if "out_spec" in item:
            item["out_spec"] = json.dumps([1, tree])
    with pytest.raises(UntrustedArtifact, match=r"expected (a list|text) in `context`"):
        check_program(forged)


def test_trees_are_of_plain_types(program: dict[str, object]) -> None:
    text = json.dumps(program).replace("builtins.dict", "collections.defaultdict")
    with pytest.raises(UntrustedArtifact, match="expected tree type in `type`"):
        check_program(json.loads(text))


@pytest.mark.parametrize("name", ["Node", "TensorMeta", "Graph", "GraphModule", "ExportedProgram"])
def test_fields_are_those_of_torch(name: str) -> None:
    """A field that a new torch adds is refused until somebody has looked at it."""
    assert set(typing.get_type_hints(getattr(torch_schema, name))) <= set(_OBJECTS[name])


# Kinds that newer versions of torch added: 2.10 has no field for them.
ADDED_LATER = {"as_float_lists", "as_nested_tensors"}


@pytest.mark.parametrize("name", ["Argument", "InputSpec", "OutputSpec", "SymInt"])
def test_kinds_are_among_those_of_torch(name: str) -> None:
    known = set(typing.get_type_hints(getattr(torch_schema, name)))
    assert set(_UNIONS[name]) - known <= ADDED_LATER


SYMBOL = "Symbol('s77', positive=True, integer=True)"
PLAIN = [
    SYMBOL,
    f"Mul(Integer(2), {SYMBOL})",
    f"Add(Integer(-1), FloorDiv({SYMBOL}, Integer(2)))",
    f"Pow({SYMBOL}, Integer(2))",
    f"Max(Integer(1), {SYMBOL})",
    f"LessThan({SYMBOL}, Integer(4))",
    "Float('0.5', precision=53)",
    "Rational(1, 2)",
    "true",
]


@pytest.mark.parametrize("text", PLAIN)
def test_arithmetic_passes(text: str) -> None:
    assert check_expression(text) == text


HARMFUL = [
    "__import__('os').system('true')",
    "Symbol('s77').__class__",
    "Max('__import__(\"os\")', 1)",
    "Symbol('__import__(\"os\")')",
    "Symbol('s77', cls=1)",
    "Integer('__import__(\"os\")')",
    "Float('__import__(\"os\")')",
    "eval('1')",
    "[s77]",
    "s77",
    "lambda: 1",
    "Symbol",
    "Symbol(*[1])",
    "Add(**{})",
    "(x := 1)",
    "f'{1}'",
    "Symbol('u999999999')",
    "",
    "1",
    3,
    None,
    ["Integer(1)"],
    "(" * 10_000,
]
ENDLESS = [
    "9**9**9**9",
    "Pow(Integer(9), Pow(Integer(9), Integer(9)))",
    "Pow(Integer(9), Integer(387420489))",
    "Pow(Pow(Pow(Integer(9), Integer(60)), Integer(60)), Integer(60))",
    "Pow(Add(Integer(9), Pow(Integer(9), Integer(9))), Integer(9))",
    "LShift(Integer(1), Integer(1000000000000))",
    "PowByNatural(Integer(9), Integer(99999999))",
    "FloatPow(Float('9'), Integer(99999999))",
    "Float('1', precision=1000000000)",
    "Float('1e999999999')",
    "Integer(" + "9" * 30 + ")",
    "Add(" + "Integer(1), " * 10_000 + ")",
]


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("text", [*HARMFUL, *ENDLESS], ids=lambda text: str(text)[:40])
def test_anything_else_is_refused_at_once(text: object) -> None:
    with pytest.raises(UntrustedArtifact, match="expected a size expression in the program, got"):
        check_expression(text)
