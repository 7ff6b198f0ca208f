"""What each parameter of a call is given.

Knows the names of parameters and a few values for each; must not know which results are expected.
A value is a function of the library and of the container that is called, so that both libraries get
their own.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.interop.calls.subjects import Library, Linear, dense, folder, leaf, nested


class Given(NamedTuple):
    """What a value is made from."""

    lib: Library
    td: Any
    tmp: Path


Value = Callable[[Given], Any]


Positional = Callable[[Given], tuple[Any, ...]]


def constant(value: Any) -> Callable[[Given], Any]:
    return lambda given: value


def with_key(key: Any, value: Value) -> Positional:
    return lambda given: (key, value(given))


def together(*values: Value) -> Positional:
    return lambda given: tuple(value(given) for value in values)


def row_and(index: Value, made: Callable[[Any], Any]) -> Positional:
    """Return an index, and what is made from the rows that it reads."""

    def arguments(given: Given) -> tuple[Any, ...]:
        return index(given), made(given.td[index(given)])

    return arguments


def own_row(row: Any) -> Any:
    return row.clone()


def always(*values: Any) -> list[tuple[str, Value]]:
    return [(repr(value), constant(value)) for value in values]


def made(**values: Value) -> list[tuple[str, Value]]:
    return list(values.items())


def rows(given: Given) -> int:
    return given.td.batch_size[0] if given.td.batch_dims else 1


def like(given: Given, factor: float = 1) -> Any:
    """Return a container of the same structure with other values."""
    other = given.td.clone()
    return (
        other
        if factor == 1
        else other.apply(lambda x: x * int(factor) if x.is_floating_point() else x)
    )


DIMS = always(0, -1, 1, 5)
FLAGS = always(True, False)
KEYS = always("a", ("n", "c"), "zz", "s", ("a", "x"))
NEW_KEYS = always("new", ("n", "new"), "a", ("q", "r"))
SHAPED = made(
    ones=lambda g: torch.ones(*g.td.batch_size, 2),
    wrong=lambda g: torch.ones(7),
    container=lambda g: g.lib.TensorDict({"z": torch.ones(*g.td.batch_size)}, g.td.batch_size),
    plain_dict=lambda g: {"z": torch.ones(*g.td.batch_size)},
    number=lambda g: 3,
    text=lambda g: "text",
    array=lambda g: torch.ones(*g.td.batch_size).numpy(),
    nothing=lambda g: None,
)
OTHERS = made(
    number=lambda g: 2,
    same=like,
    tensor=lambda g: torch.full(tuple(g.td.batch_size), 2.0),
    missing=lambda g: g.lib.TensorDict({"a": torch.ones(*g.td.batch_size, 1)}, g.td.batch_size),
    scalar=lambda g: torch.tensor(2),
    column=lambda g: torch.arange(1, rows(g) + 1),
)
SOURCES = made(
    same=like,
    new_key=lambda g: {"new": torch.ones(*g.td.batch_size, 2)},
    part=lambda g: {"a": g.td.get("a").clone() if "a" in list(g.td.keys()) else torch.ones(3, 2)},
    inside=lambda g: {"n": {"c": torch.ones(*g.td.batch_size, 2)}},
    container=lambda g: g.lib.TensorDict({"a": torch.ones(*g.td.batch_size)}, g.td.batch_size),
    text=lambda g: {"s": "new", "w": None},
    wrong=lambda g: {"a": torch.ones(7, 7), "new": torch.ones(9)},
)
INDICES = made(
    first=lambda g: 0,
    last=lambda g: -1,
    piece=lambda g: slice(0, 2),
    mask=lambda g: torch.arange(rows(g)) % 2 == 0,
    numbers=lambda g: torch.tensor([0, 0]),
    listed=lambda g: [0, 1],
    pair=lambda g: (slice(None), 0),
    dots=lambda g: (..., 0),
    none=lambda g: None,
    outside=lambda g: 99,
    full=lambda g: torch.ones(tuple(g.td.batch_size), dtype=torch.bool),
    array=lambda g: torch.tensor([0, 1]).numpy(),
    empty=lambda g: slice(0, 0),
)
PATHS = made(folder=lambda g: folder(g.tmp, g.lib), new=lambda g: folder(g.tmp, g.lib) / "x" / "y")
FUNCTIONS: dict[str, Value] = {
    "double": constant(lambda x, *others: x * 2),
    "second": constant(lambda x, *others: others[0] if others else x[0]),
    "drops": constant(lambda x, *others: None),
}

PARAMETERS: dict[str, list[tuple[str, Value]]] = {
    **dict.fromkeys(("dim", "axis0", "dim0"), DIMS),
    **dict.fromkeys(("axis1", "dim1"), always(1, 0)),
    **dict.fromkeys(("source", "start_dim"), always(0, 1)),
    **dict.fromkeys(("destination", "end_dim"), always(1, -1)),
    **dict.fromkeys(("key", "old_key"), KEYS),
    **dict.fromkeys(("new_key", "out_key"), always("new", ("n", "new"), "a")),
    **dict.fromkeys(("other", "end", "exponent"), OTHERS),
    **dict.fromkeys(("other1", "other2"), OTHERS[:3]),
    "weight": OTHERS[:3],
    **dict.fromkeys(("input_dict_or_td", "tensordict", "input_dict"), SOURCES),
    **dict.fromkeys(("index", "idx"), INDICES),
    **dict.fromkeys(("prefix", "filename", "path"), PATHS),
    "value": SHAPED,
    "item": SHAPED,
    "tensor": SHAPED[:2],
    "fn": list(FUNCTIONS.items()),
    "device": always(None, "cpu", torch.device("meta")),
    "dtype": always(torch.float64, torch.int32),
    "dst_type": always(torch.float64, torch.int32),
    "default": [
        ("0.0", lambda g: 0.0),
        ("None", lambda g: None),
        ("'intersection'", lambda g: "intersection"),
    ],
    "batch_size": made(
        same=lambda g: tuple(g.td.batch_size),
        less=lambda g: tuple(g.td.batch_size)[:1],
        none=lambda g: [],
        wrong=lambda g: [7],
    ),
    "names": made(letters=lambda g: ["p", "q", "r"][: g.td.batch_dims], none=lambda g: None),
    "batch_dims": always(1, 0, None),
    "stack_dim_name": always("row", None),
    "alpha": always(2, 0.5),
    "keepdim": FLAGS,
    "reduce": FLAGS,
    "separator": always(".", "_"),
    "is_leaf": made(
        none=lambda g: None, tensors=constant(lambda cls: issubclass(cls, torch.Tensor))
    ),
    "keys": made(two=lambda g: ["a", "new"], one=lambda g: "a"),
    "keys_to_update": made(a=lambda g: ["a"], path=lambda g: [("n", "c")], text=lambda g: "a"),
    "mask": made(
        rows=lambda g: torch.arange(rows(g)) % 2 == 0,
        full=lambda g: torch.ones(tuple(g.td.batch_size), dtype=torch.bool),
        wrong=lambda g: torch.ones(7, dtype=torch.bool),
    ),
    "condition": made(
        full=lambda g: (torch.arange(g.td.batch_size.numel()) % 2 == 0).reshape(g.td.batch_size),
        rows=lambda g: torch.arange(rows(g)) % 2 == 0,
    ),
    "size": made(batch=lambda g: tuple(g.td.batch_size), two=lambda g: (2,)),
    "shape": made(
        grown=lambda g: (2, *g.td.batch_size),
        same=lambda g: tuple(g.td.batch_size),
        wrong=lambda g: (7, 7),
    ),
    "dims": made(one=lambda g: 0, two=lambda g: (0, 1), listed=lambda g: [0]),
    "shifts": always(1, (1, 1)),
    "repeats": made(two=lambda g: 2, tensor=lambda g: torch.arange(1, rows(g) + 1)),
    "split_size": always(1, 2, [1, 2], [9]),
    "chunks": always(2, 1, 9),
    "indices_or_sections": always(2, (1,), [1, 2]),
    "unflattened_size": always((3, 1), (-1, 1), (7, 7)),
    "start": always(0, 1, 9),
    "length": always(1, 0, 9),
    "pad_size": always([0, 1], [1, 0, 0, 1], [1]),
    "q": always(0.5, [0.25, 0.75]),
    "fill_value": always(2.0, 0),
    "min": always(0.5, 1),
    "max": always(0.7, 2),
    "mapping": made(a=lambda g: {"a": "new"}, missing=lambda g: {"zz": "new"}),
    "key_sets": made(one=lambda g: (["a"],), two=lambda g: (["a"], ["zz"])),
    "module": made(linear=lambda g: Linear()),
    "obj": made(
        dict=lambda g: {"x": torch.ones(3), "y": {"z": 1}},
        listed=lambda g: [torch.ones(2)] * 2,
        pair=lambda g: (torch.ones(2), 1),
    ),
    **dict.fromkeys(
        ("input", "items"),
        made(two=lambda g: [g.td, g.td.clone()], none=lambda g: [], one=lambda g: (g.td,)),
    ),
    "pytree": made(dict=lambda g: {"x": torch.ones(3)}),
    "storage": made(bytes=lambda g: torch.zeros(24, dtype=torch.uint8).untyped_storage()),
    "state_dict": made(
        own=lambda g: g.td.state_dict(), empty=lambda g: {}, other=lambda g: {"zz": torch.ones(2)}
    ),
    "correction": always(0, 1),
    "k": always(1, 2),
    # with more of them the peer lists keys in the order in which the threads were done
    "num_threads": always(0, 1),
    "mask_key": always("mask"),
    "padding": always(-1.0),
    "layout": made(jagged=lambda g: torch.jagged, strided=lambda g: torch.strided),
    "memo": made(empty=lambda g: {}),
    "mode": always("r", "r+"),
    "pool": always(None),
    "backend": always("redis"),
    "out": made(
        none=lambda g: None, like=lambda g: g.td.clone().zero_() if hasattr(g.td, "zero_") else None
    ),
    "dest_cls": always(None),
    "key_transform": always(None),
    "gradient": made(ones=like),
    "columns": always(None),
    "interpolation": always("nearest", "linear"),
    "metadata": FLAGS,
    "output_size": always(None),
    "requires_grad": FLAGS,
    "canonical": FLAGS,
    "compression": always(None),
    "cast_filter": made(none=lambda g: None, floats=constant(lambda name, x: True)),
    "mp_start_method": always(None),
    "destination_": always(None),
    "from_flatten": FLAGS,
    "data": SHAPED[:2],
    "tensordicts": always(None),
    "retain_none": FLAGS,
    "source_": SOURCES,
    "batch": always(None),
}
"""For each name of a parameter, a few values; a name that is missing here is given a flag."""

METHODS: dict[tuple[str, str], list[tuple[str, Value]]] = {
    ("fill_", "value"): always(2.0, 0),
    ("masked_fill", "value"): always(2.0, 0),
    ("masked_fill_", "value"): always(2.0, 0),
    ("pad", "value"): always(1.0),
    ("addcmul", "value"): always(2.0),
    ("addcmul_", "value"): always(2.0),
    ("addcdiv", "value"): always(2.0),
    ("addcdiv_", "value"): always(2.0),
    ("set_non_tensor", "value"): always("text", 3, None, {"k": [1]}),
    ("fromkeys", "value"): always(1.0, 0),
    ("set", "key"): NEW_KEYS,
    ("set_at_", "value"): made(
        ones=lambda g: torch.ones(2), number=lambda g: 3, wrong=lambda g: torch.ones(7)
    ),
    ("setdefault", "default"): SHAPED,
    ("get", "default"): always(None, 1.0, "text"),
    ("pop", "default"): always(None, 1.0),
    ("get_non_tensor", "default"): always(None, "text"),
    ("create_nested", "key"): NEW_KEYS,
    ("gather", "index"): made(
        ones=lambda g: torch.zeros(tuple(g.td.batch_size), dtype=torch.int64),
        flat=lambda g: torch.tensor([0, 1]),
    ),
    ("where", "other"): OTHERS[:3],
    ("where", "pad"): always(0, None),
    ("state_dict", "destination"): always(None),
    ("state_dict", "prefix"): always("p.", ""),
    ("make_memmap", "shape"): made(batch=lambda g: tuple(g.td.batch_size)),
    ("make_memmap", "key"): NEW_KEYS,
    ("make_memmap_from_tensor", "key"): NEW_KEYS,
    ("make_memmap_from_storage", "key"): NEW_KEYS,
    ("movedim", "source"): always(0, (0, 1)),
    ("movedim", "destination"): always(1, (1, 0)),
    ("softmax", "dtype"): always(torch.float64),
    ("from_dict", "input_dict"): made(
        plain=lambda g: {"x": torch.ones(3, 2), "y": {"z": torch.zeros(3)}},
        words=lambda g: {"q": ["s1", "s2"], "x": torch.zeros(2, 3)},
        numbers=lambda g: {"x": 1, "y": [1.0, 2.0]},
    ),
    ("from_dict_instance", "input_dict"): made(
        plain=lambda g: {"a": torch.ones(3, 2), "y": {"z": torch.zeros(3)}},
        numbers=lambda g: {"x": 1},
    ),
    ("from_list", "input"): made(
        dicts=lambda g: [{"x": 1}, {"x": 2}], lists=lambda g: [[1, 2], [3, 4]], none=lambda g: []
    ),
    ("from_tuple", "obj"): made(pair=lambda g: (torch.ones(2), {"x": 1})),
    ("update_at_", "input_dict_or_td"): made(
        row=lambda g: {
            "a": g.td.get("a")[0].clone() if "a" in list(g.td.keys()) else torch.ones(2)
        },
        whole=like,
        new=lambda g: {"new": torch.ones(())},
    ),
    ("copy_at_", "tensordict"): made(row=lambda g: g.td[0].clone(), whole=like),
    ("size", "dim"): DIMS,
    ("append", "tensordict"): made(member=lambda g: g.td[0].clone()),
    ("insert", "tensordict"): made(member=lambda g: g.td[0].clone()),
    ("extend", "tensordict"): made(members=lambda g: [g.td[0].clone()]),
    ("fields", "names"): [],
    ("named_buffers", "prefix"): always("p."),
    ("named_modules", "prefix"): always("p."),
    ("named_parameters", "prefix"): always("p."),
}
"""Values for a parameter of one method."""


def spread(*tuples: Any) -> list[tuple[str, Positional]]:
    return [(", ".join(map(repr, given)), constant(given)) for given in tuples]


POSITIONAL: dict[str, list[tuple[str, Positional]]] = {
    "apply": [("double", lambda g: (lambda x: x * 2,)),
              ("plus", lambda g: (lambda x, y: x + y, g.td.clone())),
              ("drops", lambda g: (lambda x: None,)),
              ("smaller", lambda g: (lambda x: x[0],))],
    "apply_": [("double", lambda g: (lambda x: x * 2,)), ("in place", lambda g: (lambda x: x.mul_(2),))],
    "named_apply": [("double", lambda g: (lambda name, x: x * 2,)), ("some", lambda g: (lambda name, x: x if "a" in name else None,))],
    "cat_tensors": spread(("a",), ("a", "b")),
    "stack_tensors": spread(("a",), ("a", "b")),
    "exclude": spread((), ("a",), (("n", "c"),), ("zz",), ("a", "n")),
    "select": spread((), ("a",), (("n", "c"),), ("zz",), ("a", "zz")),
    "separates": spread(("a",), (("n", "c"),), ("zz",)),
    "split_keys": spread((["a"],), (["a"], [("n", "c")]), (["zz"],)),
    "expand": [("grown", lambda g: (2, *g.td.batch_size)), ("tuple", lambda g: ((2, *g.td.batch_size),)),
               ("keep", lambda g: (2, *(-1 for _ in g.td.batch_size))), *spread((7, 7))],
    "get": spread(("a",), (("n", "c"),), ("zz",), ("zz", None), ("zz", 1), (("a", "x"), None), ("s",), ("w",)),
    "get_at": spread(("a", 0), ("a", slice(0, 2)), ("zz", 0), ("zz", 0, None), (("n", "c"), 0)),
    "new_empty": spread(), "new_ones": spread((2,), (3, 2), ((2, 2),)), "new_zeros": spread((2,), (3, 2), ()),
    "permute": spread((1, 0), ((1, 0),), (0, 1), (-1, 0), (0,), ()),
    "refine_names": spread(("x", "y"), (..., "y"), ("x",), (None, "y")),
    "rename": spread(("x", "y"), ("x",), (None, None)), "rename_": spread(("x", "y"), ("x",)),
    "repeat": spread((2, 1), ((2, 1),), (2,)),
    "replace": [("part", lambda g: ({"a": g.td.get("a") * 2} if "a" in list(g.td.keys()) else {},)), *spread(({"new": 1},), ({},))],
    "reshape": spread((-1,), (6,), (2, 3), ((3, 2),), (7,), (3, 2, 1), ()), "view": spread((-1,), (6,), (2, 3), ((3, 2),), (7,), (torch.int32,)),
    "squeeze": spread((), (0,), (1,), (-1,)), "unsqueeze": spread((0,), (1,), (-1,), (2,), (9,)),
    "to": spread(("cpu",), (torch.float64,), (torch.device("meta"),), ("cpu", torch.float64), ()),
    "from_modules": [("two", lambda g: (Linear(), Linear()))],
    "__getitem__": [(name, together(value)) for name, value in (*INDICES, *KEYS)],
    "__contains__": spread(("a",), (("n", "c"),), ("zz",)),
    "__delitem__": spread(("a",), (("n", "c"),), ("zz",)),
    "__setitem__": [
        *((f"{name}, own row", row_and(value, own_row)) for name, value in INDICES),
        *((f"{name}, number", row_and(value, lambda row: 1)) for name, value in INDICES),
        *((f"{name}, dict", row_and(value, lambda row: {"a": row.get("a").clone() * 2})) for name, value in INDICES[:6]),
        *((f"{name}, new key", row_and(value, lambda row: {"new": torch.ones(())})) for name, value in INDICES[:1]),
        *((f"{key}={name}", with_key(key, value)) for key in ("a", "new", ("n", "c")) for name, value in SHAPED),
    ],
}  # fmt: skip
"""Positional arguments of methods that take any number."""
POSITIONAL["new_empty"] = spread((0,))
NAMES_OF_POSITIONAL = ("size", "shape", "dims")
"""Other names of the positional arguments, which a program does not pass beside these."""

OPERATORS = (
    *(
        "__abs__",
        "__add__",
        "__and__",
        "__bool__",
        "__contains__",
        "__delitem__",
        "__eq__",
        "__ge__",
    ),
    *(
        "__getitem__",
        "__gt__",
        "__iadd__",
        "__imul__",
        "__invert__",
        "__ipow__",
        "__isub__",
        "__iter__",
    ),
    *(
        "__itruediv__",
        "__le__",
        "__len__",
        "__lt__",
        "__mod__",
        "__mul__",
        "__ne__",
        "__neg__",
        "__or__",
    ),
    *("__pow__", "__radd__", "__rmul__", "__rsub__", "__rtruediv__", "__setitem__", "__sub__"),
    *("__truediv__", "__xor__", "__copy__", "__getitems__", "__rpow__"),
)
ONE_OPERAND = {name: OTHERS for name in OPERATORS if name.strip("_") in {
    "add", "and", "eq", "ge", "gt", "iadd", "imul", "ipow", "isub", "itruediv", "le", "lt", "mod", "mul",
    "ne", "or", "pow", "radd", "rmul", "rsub", "rtruediv", "sub", "truediv", "xor", "rpow"}}  # fmt: skip

LEFT_ALONE = {
    # processes, other machines and devices, and formats that tests of their own compare
    *(
        "map",
        "map_iter",
        "send",
        "recv",
        "isend",
        "irecv",
        "asend",
        "arecv",
        "broadcast",
        "scatter",
        "reduce",
    ),
    *(
        "all_gather",
        "all_reduce",
        "gather_and_stack",
        "init_remote",
        "from_remote_init",
        "cuda",
        "pin_memory",
    ),
    *(
        "pin_memory_",
        "record_stream",
        "to_mds",
        "to_store",
        "from_csv",
        "to_csv",
        "from_json",
        "to_json",
    ),
    *(
        "from_h5",
        "to_h5",
        "from_zarr",
        "to_zarr",
        "from_parquet",
        "to_parquet",
        "from_pandas",
        "to_pandas",
    ),
    *("from_dataclass", "from_namedtuple", "from_struct_array", "from_schema", "from_consolidated"),
    *(
        "data_ptr",
        "hook_in",
        "hook_out",
        "backward",
        "new_empty",
        "to_empty",
        "qint8",
        "qint32",
        "quint4x2",
        "quint8",
    ),
    *(
        "attrs",
        "load",
        "load_",
        "load_memmap",
        "load_memmap_",
        "memmap_refresh_",
        "from_module",
        "from_modules",
    ),
}
"""Methods that the product leaves out; programs and tests of their own compare them."""


class Call(NamedTuple):
    """One way of calling a method."""

    method: str
    text: str
    positional: Positional
    keywords: dict[str, Value]

    def run(self, given: Given) -> Any:
        args = self.positional(given)
        kwargs = {name: value(given) for name, value in self.keywords.items()}
        return getattr(type(given.td), self.method).__get__(given.td)(*args, **kwargs)

    @property
    def name(self) -> str:
        return f"{self.method}({self.text})"


def pool(method: str, parameter: str) -> list[tuple[str, Value]]:
    return METHODS.get((method, parameter)) or PARAMETERS.get(parameter) or FLAGS


def calls(peer: type, method: str, pairs: bool) -> Iterator[Call]:
    """Yield ways of calling a method, from the signature that the peer gives it.

    First what it needs, in a product of few values; then each option alone, with each value; then,
    on request, pairs of options.
    """
    function = getattr(peer, method)
    if method in ONE_OPERAND:
        for text, value in ONE_OPERAND[method]:
            yield Call(method, text, together(value), {})
        return
    if method in OPERATORS and method not in POSITIONAL:
        yield Call(method, "", lambda g: ([0, 1],) if method == "__getitems__" else (), {})
        return
    try:
        given = [
            p
            for p in inspect.signature(function).parameters.values()
            if p.name not in ("self", "cls")
        ]
    except (TypeError, ValueError):
        given = []
    if method in POSITIONAL:
        bases = POSITIONAL[method]
    else:
        needed = [
            p
            for p in given
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        choices = [pool(method, p.name) for p in needed]
        if len(choices) > 2:
            choices = [choice[:3] for choice in choices]
        bases = [
            (
                ", ".join(text for text, _ in chosen),
                together(*(value for _, value in chosen)),
            )
            for chosen in itertools.product(*choices)
        ]
    options = [
        p
        for p in given
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and p.default is not p.empty
        and not p.name.startswith("_")
        and not (method in POSITIONAL and p.name in NAMES_OF_POSITIONAL)
    ]
    asked = {
        p.name: pool(method, p.name)[0][1]
        for p in given
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty
    }
    for text, positional in bases:
        yield Call(method, text, positional, asked)
    for text, positional in bases[:3]:
        for option in options:
            for said, value in pool(method, option.name):
                yield Call(
                    method,
                    f"{text}, {option.name}={said}".lstrip(", "),
                    positional,
                    {**asked, option.name: value},
                )
    if pairs:
        text, positional = bases[0]
        for one, two in itertools.combinations(options, 2):
            for (a, first), (b, second) in itertools.product(
                pool(method, one.name)[:2], pool(method, two.name)[:2]
            ):
                yield Call(
                    method,
                    f"{text}, {one.name}={a}, {two.name}={b}".lstrip(", "),
                    positional,
                    {**asked, one.name: first, two.name: second},
                )


__all__ = ["LEFT_ALONE", "OPERATORS", "Call", "Given", "calls", "dense", "leaf", "nested"]
