"""Random programs through both libraries: what each line does, and the state that it leaves.

    python -m tests.interop.programs [--seeds 500] [--first 0] [--list 20] [--mixed]

A program is a list of lines of Python over containers `v0`, `v1`, ... Each line is run in both
libraries; then the outcome is compared (the value, or the kind of error) and the state of all
containers alive: classes, sizes, names, locks, keys in order, values, and which leaves share
storage. A program that shows a difference is shrunk to the shortest one that still shows it.

Knows how programs are made, run and shrunk; `ALLOWED` says which differences are decided.
"""

import argparse
import collections
import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple

import tensordict
import tensordict.nn
import torch
from tests.interop.calls.outcomes import describe, difference, family, leaves
from tests.interop.calls.subjects import Library, leaf

import kd_core
import kd_nn

OURS = Library("kd", kd_core, kd_nn)
PEER = Library("peer", tensordict, tensordict.nn)


WRITTEN = r"'(deep|text|row|plain|wrapped|z|in|lost|[rk]\d)'"


class Decided(NamedTuple):
    """A difference that is decided.

    Attributes:
        line: what the last line is like.
        found: what is found there.
        reason: the number of the rule that allows it.
        why: a sentence.
        before: what the program must have, too.
    """

    line: str
    found: str
    reason: int
    why: str
    before: str = ""

    def excuses(self, found: "Found") -> bool:
        """Return whether it allows a difference."""
        told = f"{found.what} {found.ours}"
        return (
            re.search(self.line, found.lines[-1]) is not None
            and re.search(self.found, told) is not None
            and re.search(self.before, "\n".join(found.lines)) is not None
        )


ALLOWED: tuple[Decided, ...] = (
    Decided(
        r"\.(sum|mean|amax|prod|all|any|std|var)\(",
        r"NonTensor",
        1,
        "The peer drops or refuses the values of rows in a reduction; kd collects them.",
    ),
    Decided(
        r"\.(set_|update_|copy_|set_at_|update_at_)\(",
        r"raises here.*(one value|KeyNotFound|must be a tensor to be written)",
        1,
        "The write would reach a copy of a shared value, or nothing; the peer drops it silently.",
    ),
    Decided(
        r"\] = 0$|\.fill_\(|set_at_\(.*\b0\b|zero_\(",
        r"^after: ('\w+' != (0 |\['list', |\['Tensor', 'torch.int64')"
        r"|class 'NonTensorData' != 'NonTensorStack' )",
        1,
        "A number that is written to rows does not replace their words.",
    ),
    Decided(
        r"torch\.stack\(.*, [12]\)|torch\.stack\(.*-1\)",
        r"OutOfRange",
        1,
        "A new batch dimension behind those of the batch would not be one of the leaves.",
    ),
    Decided(
        r"\[(\[|torch\.tensor|range|\(slice\(None\), \[).*\]$|gather|masked_select|__getitems__",
        r"^result: ('[\w.]+' != '[\w.]+'|locked False != True)",
        3,
        "An index of row numbers copies, in a lazy stack too, as of a tensor.",
    ),
    Decided(
        r"\.repeat(_interleave)?\(",
        r"^result: ('[\w.]+' != '[\w.]+'|locked False != True)",
        3,
        "What is repeated is copied, the members of lazy stacks too, as tensors are.",
    ),
    Decided(
        r"\.get_at\(",
        r"^result: ('[\w.]+' != 'new'|.* != '\w'$|.* != '\w' )",
        1,
        "`get_at` of a lazy stack copies; of a word in a tensor class it returns a letter.",
    ),
    Decided(
        r"\.update_at_\(",
        r"^after.*'class': 'Based'",
        1,
        "`update_at_` of a tensor class replaces tensors, or writes rows that are not asked for.",
    ),
    Decided(
        r"at_\(.*\.\.\.",
        r"^after: ",
        1,
        "`...` of the peer reaches into the features of a leaf.",
    ),
    Decided(
        r"set|update|popitem",
        r"raises here: UnknownField",
        1,
        "What is no field is stored in a tensor class, where nothing reads it.",
    ),
    Decided(
        r"at_\(|\.(add|mul|zero|apply|copy)_\(|\] = ",
        r"raises here: InvalidValue.*share memory",
        1,
        "A write to one row of an expanded tensor would reach the others.",
    ),
    Decided(
        r"\[\('n', '\w'\)\] = |set\(\('n'",
        r"raises here: KeyThroughLeaf",
        1,
        "A key inside of a word is lost: one value is all that an entry holds.",
    ),
    Decided(r"permute\(", r"raises here: InvalidValue", 3, "Each dimension is named once."),
    Decided(r"numel\(", r"^result: 0 != 1", 3, "No rows have no elements."),
    Decided(
        r"where\(",
        r"^result: 'torch.int64' != 'torch.bool'",
        3,
        "Dtypes are promoted, in a lazy stack too.",
    ),
    Decided(
        r"\.(flip|roll)\(",
        r"^result: class 'LazyStackedTensorDict' != 'TensorDict'",
        1,
        "The peer drops what only some members hold.",
    ),
    Decided(
        r"torch\.stack|lazy_stack|\.update|\.set|\] = ",
        r"InvalidValue: cannot (set|write rows) .*each member once",
        1,
        "A stack that holds a member twice would get one value of two rows.",
    ),
    Decided(
        r"torch\.cat\(",
        r"^result: ('[\w.]+' != '[\w.]+'|locked False != True)",
        3,
        "`cat` copies, the members of lazy stacks too, as of tensors.",
    ),
    Decided(
        r"\[.*\] = |:= .*\]$|set_at_\(|gather\(|masked_select\(|where\(",
        r"raises here: (OutOfRange|ShapeMismatch|UnknownField)",
        3,
        "An index, mask or field that does not fit is an error without leaves, too; an index has "
        "as many items as there are batch dimensions.",
    ),
    Decided(
        r"masked_select\(|==|>",
        r"^result: names",
        1,
        "The peer drops the names of dimensions.",
    ),
    Decided(
        r"^_ := list\(.*keys\(True\)",
        r"^result: '[\w.]+' != \['tuple'",
        1,
        "`keys(True)` of the peer lists what is nested first, and `values(True)` last.",
    ),
    Decided(
        r"split_keys",
        r"^result: '[\w.]+' != '[\w.]+'",
        1,
        "A write to a part reaches the container; of a lazy stack the peer makes a copy.",
    ),
    Decided(
        r"select\(",
        r"^result: (length|'\w+' != '\w+')",
        1,
        "Asked for a container and for a part of it, the peer loses the rest of the container; "
        "asked for a key inside of a word, it returns the word.",
    ),
    Decided(
        r"is_empty",
        r"^result: False != True",
        1,
        "A container that holds only words is not empty, as a lazy stack too.",
    ),
    Decided(
        rf"(update_|set_|set_at_|set_non_tensor)\(|\] = .*{WRITTEN}",
        rf"^after: ('\w+' != {WRITTEN} |class 'NonTensor(Data|Stack)' != 'NonTensor)",
        3,
        "What is stacked, repeated or written out has words of its own, as it has tensors.",
        r"torch\.(stack|cat)|to_tensordict|repeat|contiguous",
    ),
    Decided(
        r"(update_|set_|set_non_tensor)\(|\[.*None.*\] = ",
        rf"^after: {WRITTEN} != '\w+' ",
        1,
        "A write to words of a view reaches the container; the peer loses it.",
        r"expand\(|None|split_keys|\.(to|cpu)\(",
    ),
    Decided(
        r"\] = (TensorDict\(|\{)",
        r"^after: class 'NonTensorStack' != 'NonTensorData' ",
        1,
        "A word that is new in rows is in those rows alone; the peer gives it to all rows.",
    ),
    Decided(
        r"v\d+\[(\[|torch\.tensor|range|\(slice\(None\), \[).*\]"
        r"(\[.*\] = |\.(set|update|zero)_?\()",
        r"^after: .*LazyStacked",
        3,
        "An index of row numbers copies, in a lazy stack too: a write to the copy stays there.",
    ),
    Decided(
        r"\] = v\d+\[.*\]\.to_dict\(\)$",
        r"^after: \['\w+'\] != '\w+' ",
        1,
        "A list that is written to one row is its value.",
    ),
    Decided(
        r"[-+*]|exp|clamp|apply",
        r"^result: (length \d+ != \d+|'[nq]' != '\w+') ",
        1,
        "The peer drops nested levels without keys.",
    ),
    Decided(
        r"\[(:|\.\.\.)\]$",
        r"^result: 'v\d+' != 'v\d+' .*Based",
        3,
        "What changes nothing returns the container itself, of a tensor class too.",
    ),
)
"""Differences that are decided. A line is the last one of a program."""

KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        r"\.(\w*squeeze|reshape|\w*flatten|expand|flip|roll|split|chunk|view|transpose|permute)\(",
        r"^result: locked False != True",
        "A part that is locked by itself, of a container that is not, is not locked in a view.",
    ),
    (r"set|update|\] = |:= ", r"names None != ", "A container takes the names of one in it."),
    (r"\[None\] = ", r"^after: '\w+' != '\w+'$", "Views of words see what is written to `[None]`."),
    (
        r"(update_|set_|set_non_tensor)\(",
        rf"^after: '\w+' != {WRITTEN}$",
        "A word is written in place behind `unsqueeze`, `view` or `flatten`, or in a lazy stack.",
    ),
    (r"", r"^\w+: class 'NonTensor\w+' != 'NonTensor", "Which rows of a word are one value."),
    (r"set_at_\(|set_\(|\] = ", r"kind of error", "Errors of calls that are wrong in two ways."),
)
"""Differences that are neither decided nor mended: lines, what is found, and a sentence."""


class Found(NamedTuple):
    """A difference: the program, its last line shows it, and what both libraries gave."""

    lines: tuple[str, ...]
    what: str
    ours: str
    theirs: str

    @property
    def group(self) -> tuple[str, str]:
        """The operation of the last line, and what differs."""
        return operation(self.lines[-1]), self.what


def operation(line: str) -> str:
    """Return the name of what a line calls."""
    called = re.findall(r"v\d+\.(\w+)\(|= (\w+)\(", line)
    if called:
        return str(next(name for name in called[-1] if name))
    return "setitem" if re.match(r"v\d+\[.*\] = ", line) else "getitem"


class Sharing:
    """Names of storages: the first leaf of all containers that has it."""

    subject = object()  # no result of a line is "the subject"
    mapped = frozenset[str]()

    def __init__(self, world: dict[str, Any], lib: Library) -> None:
        self.names: dict[int, str] = {}
        self.kept: list[torch.Tensor] = []  # what a stack makes to be read: no other gets its place
        for name, value in world.items():
            with contextlib.suppress(Exception):  # what cannot be read is told as that
                for path, tensor in leaves(value, lib):
                    self.kept.append(tensor)
                    self.names.setdefault(self._pointer(tensor), f"{name}{path}")

    @staticmethod
    def _pointer(tensor: torch.Tensor) -> int:
        try:
            return tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):
            return 0

    def of(self, tensor: torch.Tensor) -> str:
        """Return the name of the storage of a leaf."""
        pointer = self._pointer(tensor)
        return self.names.get(pointer, "new") if pointer else "new"


class World:
    """The containers of a program in one library."""

    def __init__(self, lib: Library) -> None:
        self.lib = lib
        self.names: dict[str, Any] = {}
        self.globals = {
            **{name: getattr(lib, name) for name in ("TensorDict", "NonTensorData", "MetaData")},
            **{name: getattr(lib, name) for name in ("NonTensorStack", "UnbatchedTensor")},
            "lazy_stack": lib.lazy_stack,
            "torch": torch,
            "leaf": leaf,
            "Based": lib.Based,
        }

    def run(self, line: str) -> dict[str, Any]:
        """Run a line; return its outcome and the state after it."""
        found: dict[str, Any] = {}
        target, assigned, source = line.partition(" := ")
        try:
            if assigned:
                result = eval(source, self.globals, self.names)  # our own text
                if self.lib.is_tensor_collection(result) and not self.lib.is_non_tensor(result):
                    self.names[target] = result
            else:
                exec(line, self.globals, self.names)  # as above
                result = None
        except Exception as error:
            found["error"] = family(error)
            found["text"] = f"{type(error).__name__}: {str(error)[:200]}"
            result = None
        sharing: Any = Sharing(self.names, self.lib)
        if "error" not in found:
            found["result"] = self._told(result, sharing)
        found["after"] = [(name, self._told(each, sharing)) for name, each in self.names.items()]
        return found

    def _told(self, value: Any, sharing: Any) -> Any:
        same = [name for name, each in self.names.items() if each is value]
        try:
            told = describe(value, self.lib, sharing)
        except Exception as error:
            return f"unreadable: {type(error).__name__}"
        return (same, without_marks(told))


def without_marks(told: Any) -> Any:
    """Leave out what a program cannot ask a wrapper of data for: its own lock, names and device."""
    if isinstance(told, dict):
        if str(told.get("class", "")).startswith(("NonTensor", "MetaData")):
            return {"class": told["class"], "batch": told["batch"]}
        if str(told.get("class", "")) == "LazyStackedBased":  # an instance of the class, too
            told = {**told, "class": "Based"}
        return {key: without_marks(each) for key, each in told.items()}
    if isinstance(told, (list, tuple)):
        return [without_marks(each) for each in told]
    return told


def first_difference(lines: list[str]) -> tuple[Found | None, int]:
    """Run a program until the libraries differ; return what differs, and how many lines ran."""
    worlds = World(OURS), World(PEER)
    for count, line in enumerate(lines, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(count)
            ours, theirs = (world.run(line) for world in worlds)
        if any("has no attribute" in each.get("text", "") for each in (ours, theirs)):
            return None, count  # the peer meant another error, or the line goes on here
        if "error" in theirs and ("error" not in ours or ours["after"] != theirs["after"]):
            return None, count  # no program relies on it, or the peer left half of it done
        if "unreadable" in str(theirs["after"]):
            return None, count  # the peer cannot read what it wrote
        what = difference(ours, theirs)
        if what is not None:
            told = [str(each.get("text", each.get("result")))[:400] for each in (ours, theirs)]
            if what.startswith("after"):
                told = [str(each["after"])[:600] for each in (ours, theirs)]
            if "text" in ours and "result" in theirs:
                what += f": {ours['text'].partition(':')[0]}"
            return Found(tuple(lines[:count]), what, *told), count
    return None, len(lines)


def is_allowed(found: Found) -> bool:
    """Return whether a difference is decided."""
    return any(each.excuses(found) for each in ALLOWED)


def is_known(found: Found) -> bool:
    """Return whether a difference is decided, or known and still to be mended."""
    known = [each[:2] for each in KNOWN]
    return is_allowed(found) or any(
        re.search(at, found.lines[-1]) and re.search(what, found.what) for at, what in known
    )


def shrunk(found: Found) -> Found:
    """Return the shortest program that still shows a difference in the same last operation."""
    lines = list(found.lines)
    at = len(lines) - 2
    while at >= 0:
        fewer = lines[:at] + lines[at + 1 :]
        again, _ = first_difference(fewer)
        if again is not None and len(again.lines) == len(fewer) and again.group == found.group:
            lines, found = fewer, again
        at -= 1
    return found


KEYS = ("'a'", "'b'", "'s'", "'w'", "('n', 'c')", "('n', 's')", "'n'", "'new'", "('q', 'r')")
CONSTRUCTORS = (
    "TensorDict({'a': leaf(3, 2), 'b': leaf(3)}, [3])",
    "TensorDict({'a': leaf(3, 2), 'n': {'c': leaf(3, 2, 2)}}, [3, 2])",
    "TensorDict({'a': leaf(2, 3, 2), 's': 'word'}, [2, 3])",
    "TensorDict({'a': leaf(3), 'w': ['x', 'y', 'z']}, [3])",
    "TensorDict({'a': leaf(3), 's': 'word', 'n': {'c': leaf(3), 's': ['p', 'q', 'r']}}, [3])",
    "TensorDict({'a': leaf(2), 's': 'word', 'w': NonTensorData('v')})",
    "TensorDict({'a': leaf(3), 'n': {'c': leaf(2)}})",
    "TensorDict({'a': leaf(3, 2)}, [3, 2], names=['t', 'e'])",
    "TensorDict({'a': leaf(3), 'm': MetaData('unit')}, [3])",
    "TensorDict({}, [3])",
    "lazy_stack([TensorDict({'a': leaf(2, start=i), 'b': leaf(2)}, [2]) for i in range(3)])",
    "lazy_stack([TensorDict({'a': leaf(2, start=i), 's': f'x{i}'}) for i in range(3)])",
    "lazy_stack([TensorDict({'a': leaf(3), 'n': {'c': leaf(3)}}, [3]) for i in range(2)], 1)",
    "lazy_stack([TensorDict({'a': leaf(i + 1), 's': 'one'}) for i in range(2)])",
    "Based(a=leaf(3), b=leaf(3), batch_size=[3])",
    "Based(a=leaf(3, 2), b=leaf(3), s='other', batch_size=[3])",
)


class Maker:
    """Makes the lines of one program, each fitting the containers that there are by then."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.made = 0
        self.world = World(PEER)

    def program(self, length: int) -> list[str]:
        """Return the lines of a program."""
        lines: list[str] = []
        while len(lines) < length:
            try:
                line = self._line()
            except Exception:  # the peer cannot read what it has made
                break
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.world.run(line)
            lines.append(line)
            if len(self.world.names) > 4:
                gone = self.rng.choice(list(self.world.names)[:-1])
                lines.append(f"del {gone}")
                self.world.run(lines[-1])
        return lines

    def _line(self) -> str:
        if not self.world.names or self.rng.random() < 0.04:
            return f"{self._new()} := {self.rng.choice(CONSTRUCTORS)}"
        name = self.rng.choice(list(self.world.names))
        kinds = (
            *(self._reads, self._writes, self._index, self._index_write, self._shape),
            *(self._joins, self._values, self._copies, self._structure, self._index_write),
            self._writes,
        )
        return self.rng.choice(kinds)(name, tuple(self.world.names[name].batch_size))

    def _new(self) -> str:
        self.made += 1
        return f"v{self.made - 1}"

    def _key(self, name: str) -> str:
        held = [repr(key) for key in self.world.names[name].keys(True)]
        return self.rng.choice(held if held and self.rng.random() < 0.75 else KEYS)

    def _value(self, name: str, batch: tuple[int, ...]) -> str:
        sizes = ", ".join(map(str, batch))
        options = [
            *(f"leaf({sizes})", f"leaf({sizes}, 2)" if batch else "leaf(2)") * 2,
            *("'text'", "'text'", "NonTensorData('wrapped')", "None", "3.5"),
            f"TensorDict({{'c': leaf({sizes}), 's': 'in'}}, {list(batch)})",
            f"{{'c': leaf({sizes})}}",
            f"{self.rng.choice(list(self.world.names))}.clone()",
        ]
        if len(batch) == 1 and batch[0]:
            options += [repr([f"r{i}" for i in range(batch[0])])] * 2
        if batch and not batch[1:]:
            options.append(f"NonTensorStack(*{[f'k{i}' for i in range(batch[0])]})")
        return self.rng.choice(options)

    def _reads(self, name: str, batch: tuple[int, ...]) -> str:
        key = self._key(name)
        return "_ := " + self.rng.choice(
            [
                *(f"{name}[{key}]", f"{name}.get({key})", f"{name}.get({key}, 'none')"),
                *(f"list({name}.keys())", f"list({name}.keys(True))", f"len({name})"),
                *(f"list({name}.keys(True, True))", f"list({name}.items(True, True))"),
                *(f"{name}.to_dict()", f"{key} in {name}.keys(True)", f"{name}.is_empty()"),
                *(f"{name}.is_locked", f"{name}.names", f"{name}.numel()"),
                *(f"{name}.get_non_tensor({key})", f"{name}.is_non_tensor({key})"),
                *(f"list({name}.values())", f"{name}.pop({key})", f"{name}.pop({key}, None)"),
                *(f"({name} == {name}.clone()).all()", f"{name}.tolist()"),
                *(f"{name}.get_at({key}, 0)", f"[each for each in {name}]"),
            ]
        )

    def _writes(self, name: str, batch: tuple[int, ...]) -> str:
        key, value = self._key(name), self._value(name, batch)
        other = self.rng.choice(list(self.world.names))
        return self.rng.choice(
            [
                *(f"{name}[{key}] = {value}", f"{name}.set({key}, {value})"),
                *(f"{name}[{key}] = {value}", f"{name}.set_({key}, {value})"),
                *(f"{name}.update({{{key}: {value}}})", f"{name}.update_({{{key}: {value}}})"),
                *(f"{name}.update({other})", f"{name}.update_({name}.clone())"),
                f"{name}.update({other}.clone(), inplace=True)",
                *(f"{name}.setdefault({key}, {value})", f"del {name}[{key}]"),
                *(f"{name}.rename_key_({key}, {self.rng.choice(KEYS)})", f"{name}.zero_()"),
                *(f"{name}.set_non_tensor({key}, 'plain')", f"{name}.fill_({key}, 2.0)"),
                *(f"{name}[{key}].fill_(7)", f"{name}.get({key}).add_(1)", f"{name}.lock_()"),
                *(f"{name}.unlock_()", f"{name}.copy_({name}.clone())", f"{name}.popitem()"),
                *(f"{name}.add_(1)", f"{name}.mul_(2)", f"{name}.apply_(lambda x: x + 1)"),
                *(f"{name}.clear()", f"{name}.replace({{{key}: {value}}})"),
            ]
        )

    def _at(self, batch: tuple[int, ...]) -> str:
        size = batch[0] if batch else 1
        mask = [self.rng.random() < 0.5 for _ in range(size)]
        return self.rng.choice(
            [
                *("0", "-1", "1:", ":2", "::2", "[0]", "[1, 0]", "torch.tensor([0, 1])", "..."),
                *("None", "torch.tensor(1)", f"torch.tensor({mask})", f"{mask}", "()", "range(2)"),
                *(":", "(0, 0)", "(slice(None), 0)", "(..., 0)", "(slice(None), [0, 1])"),
                *("(0, None)", "(slice(None), None)", "torch.tensor([[0, 1], [1, 0]])"),
            ]
        )

    def _index(self, name: str, batch: tuple[int, ...]) -> str:
        return f"{self._new()} := {name}[{self._at(batch)}]"

    def _index_write(self, name: str, batch: tuple[int, ...]) -> str:
        at, other = self._at(batch), self._at(batch)
        key = self._key(name)
        return self.rng.choice(
            [
                *(
                    f"{name}[{at}] = {name}[{at}].clone()",
                    f"{name}[{at}] = {name}[{other}].clone()",
                ),
                *(f"{name}[{at}] = {name}[{at}] * 2", f"{name}[{at}] = 0"),
                *(f"{name}[{at}] = {{{key}: {name}[{at}][{key}]}}", f"{name}[{at}].zero_()"),
                f"{name}[{at}] = {name}[{other}].to_dict()",
                f"{name}.set_at_({key}, {name}[{at}].get({key}), {at})",
                f"{name}.set_at_({key}, 'row', {at})",
                f"{name}.update_at_({name}[{at}].clone(), {at})",
                *(f"{name}[{at}].set_({key}, 'deep')", f"{name}[{at}][{key}] = 'lost'"),
                f"{name}[{at}].update_({{{key}: 'deep'}})",
                f"{name}[{at}] = TensorDict({{'a': 1.0, 's': 'z', 'w': 'z'}})",
                f"{name}[{at}] = {name}[{at}].apply(lambda x: x + 1)",
            ]
        )

    def _shape(self, name: str, batch: tuple[int, ...]) -> str:
        calls = [
            *("unsqueeze(0)", "unsqueeze(-1)", "squeeze()", "squeeze(0)", "reshape(-1)"),
            *("flatten()", f"expand(2, *{name}.shape)", "flip(0)", "roll(1, 0)"),
            *("unbind(0)[0]", "unbind(0)[-1]", "split(1)[0]", "split(2)[-1]", "chunk(2)[0]"),
            *("repeat_interleave(2, dim=0)", "contiguous()", "view(-1)", "unbind(-1)[0]"),
            *(
                "gather(0, torch.tensor([0, 0]))",
                "masked_select(torch.tensor([True, False, True]))",
            ),
        ]
        if len(batch) > 1:
            calls += ["transpose(0, 1)", "permute(1, 0)", "flatten(0, 1)", f"view({batch[1]}, -1)"]
        if batch:
            calls += [f"view({', '.join(map(str, batch))})", f"view({batch[0]}, 1, -1)"]
            calls += [f"repeat(2{', 1' * (len(batch) - 1)})", f"unflatten(0, (1, {batch[0]}))"]
        return f"{self._new()} := {name}.{self.rng.choice(calls)}"

    def _joins(self, name: str, batch: tuple[int, ...]) -> str:
        alike = [
            other for other, each in self.world.names.items() if tuple(each.batch_size) == batch
        ]
        parts = f"[{name}, {self.rng.choice([f'{name}.clone()', *alike])}]"
        dim = self.rng.choice([0, 0, 1, -1])
        call = self.rng.choice(["torch.stack", "torch.cat", "lazy_stack", "torch.stack"])
        return f"{self._new()} := {call}({parts}, {dim})"

    def _values(self, name: str, batch: tuple[int, ...]) -> str:
        return f"{self._new()} := " + self.rng.choice(
            [
                *(f"{name} + 1", f"{name} * 2", f"-{name}", f"{name} + {name}", f"{name}.exp()"),
                *(f"{name}.apply(lambda x: x + 1)", f"{name}.named_apply(lambda n, x: x * 2)"),
                *(f"{name}.sum(0)", f"{name}.mean(0)", f"{name} == {name}", f"{name}.clamp(0, 1)"),
                f"{name}.where(torch.tensor({[True] * (batch[0] if batch else 1)}), {name} * 0)",
                f"torch.where(torch.tensor([True, False, True]), {name}, {name}.clone() * 0)",
                *(f"torch.zeros_like({name})", f"torch.ones_like({name})", f"{name} > 1"),
            ]
        )

    def _copies(self, name: str, batch: tuple[int, ...]) -> str:
        return f"{self._new()} := " + self.rng.choice(
            [
                *(f"{name}.clone()", f"{name}.clone(False)", f"{name}.copy()", f"{name}.detach()"),
                *(f"{name}.to(torch.float64)", f"{name}.to('cpu')", f"{name}.to_tensordict()"),
                *(f"{name}.double()", f"{name}.cpu()", f"torch.clone({name})", f"{name}.data"),
            ]
        )

    def _structure(self, name: str, batch: tuple[int, ...]) -> str:
        key, other = self._key(name), self._key(name)
        return f"{self._new()} := " + self.rng.choice(
            [
                *(f"{name}.select({key})", f"{name}.select({key}, {other}, strict=False)"),
                *(f"{name}.exclude({key})", f"{name}.flatten_keys('.')", f"{name}.flatten_keys()"),
                *(f"{name}.unflatten_keys('.')", f"{name}.empty()", f"{name}.empty(recurse=True)"),
                *(f"{name}.filter_non_tensor_data()", f"{name}.lock_()", f"{name}.get({key})"),
                *(f"{name}.split_keys([{key}])[0]", f"{name}.exclude({key}, {other})"),
            ]
        )


def programs(seeds: Iterator[int]) -> Iterator[tuple[list[str], int, Found | None]]:
    """Yield random programs, how many lines of each ran, and the first difference, shrunk."""
    for seed in seeds:
        rng = Random(seed)
        lines = Maker(rng).program(rng.randint(10, 30))
        found, ran = first_difference(lines)
        yield lines, ran, None if found is None else found


def check(seeds: Iterator[int], count: Callable[..., None]) -> list[Found]:
    """Run programs; return the differences that are not decided, one of each group, shrunk."""
    groups: dict[tuple[str, str], Found] = {}
    for _, ran, found in programs(seeds):
        count("lines", ran)
        if found is not None and not is_known(found) and found.group not in groups:
            groups[found.group] = shrunk(found)
    return list(groups.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--list", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    groups: dict[tuple[str, str], list[Found]] = collections.defaultdict(list)
    total = ran_lines = 0
    for _, ran, found in programs(iter(range(options.first, options.first + options.seeds))):
        total, ran_lines = total + 1, ran_lines + ran
        if found is not None:
            known = ("(decided)", "") if is_allowed(found) else ("(known)", "")
            groups[known if is_known(found) else found.group].append(found)
    differ = sum(map(len, groups.values()))
    print(f"{total} programs, {ran_lines} lines, {differ} differ, {len(groups)} groups")
    for group, each in sorted(groups.items(), key=lambda item: -len(item[1]))[: options.list]:
        found = shrunk(min(each, key=lambda one: len(one.lines)))
        print(f"{len(each):4d} {group[0]}: {group[1]}")
        for line in found.lines:
            print(f"        {line}")
        print(f"     ours   {found.ours}\n     theirs {found.theirs}")


if __name__ == "__main__":
    main()
