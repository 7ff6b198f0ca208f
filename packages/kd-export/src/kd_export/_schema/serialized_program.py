"""Check the JSON of a serialised program field by field.

`torch.export.load` writes names from this JSON into Python source, evaluates its expressions and
looks up its operators by dotted name. So the JSON is checked against a description of all that
kd_export writes (the same in torch 2.10 to 2.15), and written anew from what was checked. A field
that is not described is refused. Fields that only help people (metadata of nodes, the tree of
modules) and fields of code (guards) are dropped.

The descriptions are words: ``Node`` is an object or a union listed below, ``[x]`` a list of x,
``{x}`` an object whose values are x, ``x?`` an x or null, ``{}!`` and ``[]!`` a field that is
emptied, and any other word a plain value, see `_KINDS` and `_CONVERTED`.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable

from kd_export._errors import NotExportable, UntrustedArtifact, brief
from kd_export._schema.size_expression import SYMBOL, check_expression

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
_LARGEST = 1 << 63
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
