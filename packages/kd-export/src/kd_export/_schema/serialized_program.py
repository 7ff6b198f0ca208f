"""Check the JSON of a serialised program field by field, and its size expressions.

`torch.export.load` writes names from this JSON into Python source, evaluates its expressions and
looks up its operators by dotted name. So the JSON is checked against a description of all that
kd_export writes (the same in torch 2.10 to 2.15), and written anew from what was checked. A field
that is not described is refused. Fields that only help people (metadata of nodes, the tree of
modules) and fields of code (guards) are dropped.

The descriptions are words: ``Node`` is an object or a union listed below, ``[x]`` a list of x,
``{x}`` an object whose values are x, ``x?`` an x or null, ``{}!`` and ``[]!`` a field that is
emptied, and any other word a plain value, see `_KINDS` and `_CONVERTED`.

The sizes are sympy expressions as ``srepr`` writes them, such as
``Mul(Integer(2), Symbol('s77', positive=True, integer=True))``. torch evaluates this text as
Python code. So it may hold calls of the listed functions on numbers and symbols and nothing else,
and no power or shift whose value would not fit into memory.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Callable

from kd_export._errors import NotExportable, UntrustedArtifact, brief

SYMBOL = re.compile(r"[a-z]{1,4}[0-9]{1,5}")
"""A symbol of torch. The number is limited: torch counts up to it."""

_FUNCTIONS = """
Add Mul Max Min Mod Eq Ne Lt Le Gt Ge And Or Not Equality Unequality LessThan GreaterThan
StrictLessThan StrictGreaterThan FloorDiv ModularIndexing Where PythonMod CleanDiv CeilToInt
FloorToInt CeilDiv FloatTrueDiv IntTrueDiv IsNonOverlappingAndDenseIndicator TruncToFloat
TruncToInt RoundToInt ToFloat Identity
"""
_POWERS = """
Pow PowByNatural FloatPow LShift RShift
"""
_ASSUMPTIONS = """
positive negative nonnegative nonpositive nonzero zero integer finite real
"""
SOURCE = "<size expression>"
"""What the syntax trees of these texts are called; none of them is compiled."""

_FLOAT = re.compile(r"-?[0-9]{1,20}(\.[0-9]{0,40})?(e[+-]?[0-9]{1,3})?")
_LONGEST_EXPRESSION = 1 << 14
_MOST_NODES = 1000
_LARGEST = 1 << 63
_LARGEST_EXPONENT = 64


def check_expression(text: object) -> str:
    """Check that a text is plain arithmetic on sizes, and cheap to evaluate.

    >>> check_expression("Mul(Integer(2), Symbol('s0', integer=True))")
    "Mul(Integer(2), Symbol('s0', integer=True))"

    Raises:
        UntrustedArtifact: It is not.
    """
    try:
        if isinstance(text, str) and len(text) <= _LONGEST_EXPRESSION:
            tree = ast.parse(text, SOURCE, mode="eval").body
            if sum(1 for _ in ast.walk(tree)) <= _MOST_NODES and _is_size(tree, 1):
                return text
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        pass
    raise UntrustedArtifact(
        f"expected a size expression in the program, got {brief(text)}.",
        expected="arithmetic on sizes",
        got=brief(text),
        hint="The file is forged or damaged: do not use it.",
    )


def _is_size(node: ast.expr, exponent: int) -> bool:
    """Decide whether a node is arithmetic; `exponent` is the product of the powers around it."""
    if isinstance(node, ast.Name):
        return node.id in ("true", "false")
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    name, arguments = node.func.id, node.args
    if name == "Symbol":
        return _is_symbol(node)
    if name == "Float":
        return _is_float_size(node)
    if node.keywords:
        return False
    if name in ("Integer", "Rational"):
        return len(arguments) in (1, 2) and all(_integer(item) is not None for item in arguments)
    if name in _POWERS.split():
        return _is_power(arguments, exponent)
    return name in _FUNCTIONS.split() and all(_is_size(item, exponent) for item in arguments)


def _is_power(arguments: list[ast.expr], exponent: int) -> bool:
    """Decide whether the exponent is a small integer: powers of powers multiply."""
    if len(arguments) != 2:
        return False
    base, power = arguments
    match power:
        case ast.Call(func=ast.Name(id="Integer"), args=[number], keywords=[]):
            value = _integer(number)
        case _:
            return False
    if value is None or abs(value) * exponent > _LARGEST_EXPONENT:
        return False
    return _is_size(base, max(abs(value), 1) * exponent)


def _integer(node: ast.expr) -> int | None:
    """Return the value of an integer literal of at most 64 bits."""
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node, sign = node.operand, -1
    value = node.value if isinstance(node, ast.Constant) else None
    if type(value) is not int or value > _LARGEST:
        return None
    return sign * value


def _is_symbol(node: ast.Call) -> bool:
    match node.args:
        case [ast.Constant(value=str(name))]:
            named = SYMBOL.fullmatch(name) is not None
        case _:
            return False
    return named and all(
        word.arg in _ASSUMPTIONS.split()
        and isinstance(word.value, ast.Constant)
        and type(word.value.value) is bool
        for word in node.keywords
    )


def _is_float_size(node: ast.Call) -> bool:
    match node.args:
        case [ast.Constant(value=str(text))]:
            written = _FLOAT.fullmatch(text) is not None
        case _:
            return False
    return written and all(
        word.arg in ("precision", "dps") and 0 < (_integer(word.value) or 0) <= 64
        for word in node.keywords
    )


_OBJECTS: dict[str, dict[str, str]] = {
    "ExportedProgram": {
        "graph_module": "GraphModule",
        "opset_version": "{int}",
        "range_constraints": "{Range}",
        "schema_version": "Version",
        "verifiers": "[verifier]",
        "torch_version": "text",
        "guards_code": "[]!",
    },
    "GraphModule": {
        "graph": "Graph",
        "signature": "Signature",
        "module_call_graph": "calls",
        "metadata": "{}!",
        "treespec_namedtuple_fields": "{}!",
    },
    "Graph": {
        "inputs": "[Placeholder]",
        "outputs": "[Result]",
        "nodes": "[Node]",
        "tensor_values": "{TensorMeta}",
        "sym_int_values": "{SymInt}",
        "sym_bool_values": "{SymBool}",
        "sym_float_values": "{SymFloat}",
        "custom_obj_values": "{nothing}",
        "is_single_tensor_return": "bool",
    },
    "Node": {
        "target": "text",
        "inputs": "[NamedArgument]",
        "outputs": "[Output]",
        "metadata": "{}!",
        "is_hop_single_tensor_return": "bool?",
        "name": "name?",
    },
    "NamedArgument": {"name": "argument name", "arg": "Argument", "kind": "int?"},
    "TensorMeta": {
        "dtype": "int",
        "sizes": "[SymInt]",
        "requires_grad": "bool",
        "device": "Device",
        "strides": "[SymInt]",
        "storage_offset": "SymInt",
        "layout": "int",
    },
    "Device": {"type": "device", "index": "int?"},
    "Expression": {"expr_str": "expression", "hint": "Hint?"},
    "Named": {"name": "name"},
    "SubGraph": {"name": "attribute", "graph": "Graph"},
    "Complex": {"real": "float", "imag": "float"},
    "Signature": {"input_specs": "[InputSpec]", "output_specs": "[OutputSpec]"},
    "UserSpec": {"arg": "TensorOnly"},
    "ParameterSpec": {"arg": "Named", "parameter_name": "text"},
    "BufferSpec": {"arg": "Named", "buffer_name": "text", "persistent": "bool"},
    "ConstantSpec": {"arg": "Named", "tensor_constant_name": "text"},
    "Range": {"min_val": "int?", "max_val": "int?"},
    "Version": {"major": "int", "minor": "int"},
    "Call": {"fqn": "text", "signature": "CallSignature?"},
    "CallSignature": {
        "inputs": "[nothing]",
        "outputs": "[nothing]",
        "in_spec": "tree",
        "out_spec": "tree",
        "forward_arg_names": "[name]?",
    },
    "Tree": {"type": "tree type", "context": "tree context", "children_spec": "[Tree]"},
    "Weights": {"config": "{Weight}"},
    "Weight": {
        "path_name": "weight file",
        "is_param": "bool",
        "use_pickle": "false",
        "tensor_meta": "TensorMeta",
    },
}
_SYMBOLIC = {"as_tensor": "Named", "as_sym_int": "SymIntArgument"}
_UNIONS: dict[str, dict[str, str]] = {
    "Placeholder": _SYMBOLIC,
    "TensorOnly": {"as_tensor": "Named"},
    "Result": {
        **_SYMBOLIC,
        "as_sym_bool": "SymBoolArgument",
        "as_sym_float": "SymFloatArgument",
        "as_int": "int",
        "as_float": "float",
        "as_bool": "bool",
        "as_none": "bool",
    },
    "Output": {
        **_SYMBOLIC,
        "as_sym_bool": "SymBoolArgument",
        "as_sym_float": "SymFloatArgument",
        "as_tensors": "[Named]",
        "as_none": "bool",
    },
    "Argument": {
        **_SYMBOLIC,
        "as_sym_bool": "SymBoolArgument",
        "as_sym_float": "SymFloatArgument",
        "as_sym_ints": "[SymIntArgument]",
        "as_sym_bools": "[SymBoolArgument]",
        "as_sym_floats": "[SymFloatArgument]",
        "as_tensors": "[Named]",
        "as_nested_tensors": "[[Named]]",
        "as_optional_tensor": "OptionalTensor",
        "as_optional_tensors": "[OptionalTensor]",
        "as_none": "bool",
        "as_int": "int",
        "as_ints": "[int]",
        "as_int_lists": "[[int]]",
        "as_float": "float",
        "as_floats": "[float]",
        "as_float_lists": "[[float]]",
        "as_bool": "bool",
        "as_bools": "[bool]",
        "as_string": "text",
        "as_strings": "[text]",
        "as_complex": "Complex",
        "as_scalar_type": "int",
        "as_memory_format": "int",
        "as_layout": "int",
        "as_device": "Device",
        "as_graph": "SubGraph",
    },
    "OptionalTensor": {"as_tensor": "Named", "as_none": "bool"},
    "SymInt": {"as_expr": "Expression", "as_int": "int"},
    "SymFloat": {"as_expr": "Expression", "as_float": "float"},
    "SymBool": {"as_expr": "Expression", "as_bool": "bool"},
    "SymIntArgument": {"as_name": "name", "as_int": "int"},
    "SymFloatArgument": {"as_name": "name", "as_float": "float"},
    "SymBoolArgument": {"as_name": "name", "as_bool": "bool"},
    "Hint": {"as_int": "int", "as_bool": "bool", "as_float": "float"},
    "InputSpec": {
        "user_input": "UserSpec",
        "parameter": "ParameterSpec",
        "buffer": "BufferSpec",
        "tensor_constant": "ConstantSpec",
    },
    "OutputSpec": {"user_output": "UserSpec"},
}
_NO_TENSOR = dict.fromkeys(
    ["as_none", "as_int", "as_float", "as_bool", "as_string", "as_complex", "as_custom_obj"],
    "takes or gives what is not a tensor",
)
# What torch also writes, for programs that do more than compute tensors from tensors.
_BEYOND: dict[str, dict[str, str]] = {
    "Placeholder": _NO_TENSOR,
    "TensorOnly": _NO_TENSOR,
    "InputSpec": {
        "constant_input": "takes or gives what is not a tensor",
        "custom_obj": "takes or gives what is not a tensor",
        "token": "has side effects",
    },
    "OutputSpec": {
        "buffer_mutation": "changes a buffer",
        "user_input_mutation": "changes an input",
        "parameter_mutation": "changes a parameter",
        "loss_output": "computes gradients",
        "gradient_to_parameter": "computes gradients",
        "gradient_to_user_input": "computes gradients",
        "token": "has side effects",
    },
}
_KEYS = {"tensor_values": "name", "sym_int_values": "name", "range_constraints": "symbol"}

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DEVICE = re.compile(r"cpu|cuda|mps|xpu|meta")
_WEIGHT_FILE = re.compile(r"(weight|tensor)_[0-9]{1,9}")
_FLOATS = ("inf", "-inf", "nan", "Infinity", "-Infinity", "NaN")
_LONGEST = 1 << 16
_TREES = (None, "builtins.dict", "builtins.list", "builtins.tuple")


def check_program(data: object) -> object:
    """Check a serialised program and return it without what need not be loaded.

    Raises:
        NotExportable: It changes state, or takes or gives other things than tensors.
        UntrustedArtifact: It holds what is not part of such a program.
    """
    return _check("ExportedProgram", data, "program")


def check_weights(data: object) -> object:
    """Check the list of weights or constants of a program and return it.

    Raises:
        UntrustedArtifact: It holds what kd_export never writes, such as pickled tensors.
    """
    return _check("Weights", data, "weights")


def is_name(text: object) -> bool:
    """Decide whether a text may stand in Python source as a name.

    >>> is_name("x_1"), is_name("x=evil()"), is_name("class"), is_name("é")
    (True, False, False, False)
    """
    return (
        isinstance(text, str) and _NAME.fullmatch(text) is not None and not keyword.iskeyword(text)
    )


def is_attribute(text: object) -> bool:
    """Decide whether a text may name a part of a module: a name without special meaning.

    >>> is_attribute("true_graph_0"), is_attribute("__class__")
    (True, False)
    """
    return is_name(text) and not str(text).startswith("__")


def _check(word: str, value: object, where: str) -> object:
    """Check one value against the word that describes it; return it, or what replaces it."""
    if word.endswith("!"):
        return json.loads(word[:-1])
    if word.endswith("?"):
        return None if value is None else _check(word[:-1], value, where)
    if word.startswith("["):
        return [_check(word[1:-1], item, where) for item in _list(value, where)]
    if word.startswith("{"):
        return _check_values(word[1:-1], _object(value, where), where)
    if word in _UNIONS:
        entries = _object(value, where)
        if len(entries) != 1:
            raise _unexpected(where, "one field", list(entries))
        (name,) = entries
        if name in _BEYOND.get(word, {}):
            raise _not_run(_BEYOND[word][name], name)
        if name not in _UNIONS[word]:
            raise _unexpected(where, f"one of the fields {', '.join(_UNIONS[word])}", name)
        return _check_fields({name: _UNIONS[word][name]}, entries, where)
    if word in _OBJECTS:
        return _check_fields(_OBJECTS[word], _object(value, where), where)
    if word in _CONVERTED:
        return _CONVERTED[word](value, where)
    if not _KINDS[word](value):
        raise _unexpected(where, word, value)
    return value


def _check_values(word: str, entries: dict[str, object], where: str) -> object:
    kind = _KEYS.get(where, "text")
    for name in entries:
        if not _KINDS[kind](name):
            raise _unexpected(where, kind, name)
    return {name: _check(word, item, where) for name, item in entries.items()}


def _check_fields(known: dict[str, str], entries: dict[str, object], where: str) -> object:
    for field in entries:
        if field not in known:
            raise _unexpected(where, f"one of the fields {', '.join(known)}", field)
    missing = [f for f in known if f not in entries and known[f][-1] not in "?!"]
    if missing:
        raise _unexpected(where, f"the field {missing[0]}", list(entries))
    return {field: _check(known[field], value, field) for field, value in entries.items()}


def _list(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise _unexpected(where, "a list", value)
    return value


def _object(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _unexpected(where, "an object", value)
    return value


def _unexpected(where: str, expected: str, got: object) -> UntrustedArtifact:
    return UntrustedArtifact(
        f"expected {expected} in `{where}` of the program, got {brief(got)}.",
        expected=expected,
        got=brief(got),
        hint="The file is forged, damaged, or written by a torch that is too new: do not use it.",
    )


def _not_run(what: str, got: str) -> NotExportable:
    return NotExportable(
        f"the program {what}, which no runner of kd_export does.",
        expected="a program that computes tensors from tensors",
        got=got,
        hint="Run the file by `torch.export.load`. To run it here, export its module by kd_export, "
        "with what changes as an input key and as an output key.",
    )


def _check_calls(value: object, where: str) -> object:
    """Check the entry of the whole program and drop those of its modules."""
    calls = [_object(entry, where) for entry in _list(value, where)]
    root = [call for call in calls if call.get("fqn") == ""]
    if len(root) != 1:
        raise _unexpected(where, "one entry of the whole program", len(root))
    return [_check("Call", root[0], where)]


def _check_tree(value: object, where: str) -> object:
    """Check how arguments or results are arranged: JSON inside the JSON."""
    tree = _list(_parse(value, where), where)
    if len(tree) != 2 or tree[0] != 1:
        raise _unexpected(where, "a tree of version 1", value)
    return json.dumps([1, _check("Tree", tree[1], where)])


def _check_context(value: object, where: str) -> object:
    """Check the keys of a dict in a tree: JSON a third level down, which may name classes."""
    if value is None:
        return None
    names = _parse(value, where)
    return "null" if names is None else json.dumps(_check("[text]", names, where))


def _parse(value: object, where: str) -> object:
    if not isinstance(value, str):
        raise _unexpected(where, "JSON in a string", value)
    try:
        data: object = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _unexpected(where, "JSON in a string", value) from error
    return data


def _is_int(value: object) -> bool:
    return type(value) is int and -_LARGEST <= value < _LARGEST


def _is_float(value: object) -> bool:
    return isinstance(value, float) or _is_int(value) or value in _FLOATS


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST


def _matches(pattern: re.Pattern[str]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


_KINDS: dict[str, Callable[[object], bool]] = {
    "name": is_name,
    "attribute": is_attribute,
    # Arguments of an operator are found by name, and only then written as keywords.
    "argument name": lambda value: value == "" or _matches(_NAME)(value),
    "symbol": _matches(SYMBOL),
    "device": _matches(_DEVICE),
    "weight file": _matches(_WEIGHT_FILE),
    "text": _is_text,
    "bool": lambda value: isinstance(value, bool),
    "int": _is_int,
    "float": _is_float,
    "false": lambda value: value is False,
    "nothing": lambda value: False,
    "verifier": lambda value: value in ("TRAINING", "ATEN", ""),
    "tree type": lambda value: value in _TREES,
}
_CONVERTED: dict[str, Callable[[object, str], object]] = {
    "expression": lambda value, where: check_expression(value),
    "calls": _check_calls,
    "tree": _check_tree,
    "tree context": _check_context,
}
