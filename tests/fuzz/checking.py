"""Running one call on a container and on its plain tree, and saying where they differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from tests.fuzz.comparing import (
    TOLERANCE,
    differ,
    fingerprint,
    fingerprints_differ,
    structure,
    tensors_differ,
    values_equal,
)
from tests.fuzz.data import Batch, Data, Ragged, Unknown
from tests.fuzz.subjects import Node, Path, Plain, Subject, members_of, plain, read, twin
from torch import Tensor

from kd_core import KdError, LazyStackedTensorDict, OutOfRange, TensorDictBase

Outcome: TypeAlias = "tuple[object, Exception | None]"

BUILTINS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, OverflowError)
NEVER = (RecursionError, AssertionError, NameError)


class Refusal(Exception):  # the reference says that the call is wrong
    """The reference refuses."""


class _Itself:
    def __repr__(self) -> str:
        return "ITSELF"


ITSELF = _Itself()
"""What a call returns that gives the container back."""


@dataclass
class Call:
    """One call, and what it should do.

    Attributes:
        name: the method or function.
        text: how to write it.
        ours: what is done to the container.
        theirs: the same to the plain tree, which it changes if the call `writes`.
        writes: whether tensors are written in place.
        restructures: whether keys or the batch size of the container change.
        exact: whether values must be equal bit by bit.
        shares: whether results share memory with the input; `None`: they may.
        memberwise: whether members of a stack need not be stacked for it.
        may_refuse: whether ours may refuse what theirs does not.
        unchecked: whether only errors and what they leave behind are looked at.
        wider: whether we may take operands that torch does not.
        lax: whether an argument is of a type that torch takes in some places only.
    """

    name: str
    text: str
    ours: Callable[[TensorDictBase], object]
    theirs: Callable[[Plain], object]
    writes: bool = False
    restructures: bool = False
    exact: bool = True
    shares: bool | None = None
    memberwise: bool = False
    may_refuse: Callable[[Plain], bool] = lambda plain: False
    unchecked: bool = False
    lax: bool = False
    wider: bool = False


def attempt(run: Callable[[], object]) -> Outcome:
    try:
        return run(), None
    except Exception as error:
        return None, error


def reference(run: Callable[[], object]) -> Outcome:
    """Run the reference, whose own mistakes are no refusals."""
    try:
        return run(), None
    except NEVER:
        raise
    except Exception as error:
        return None, error


def refused_badly(error: Exception, theirs: Exception | None) -> str | None:
    """Say what is wrong with an error."""
    text = f"{type(error).__name__}: {error}"
    if "INTERNAL ASSERT" in text:
        return f"an internal assertion of torch: {text}"
    if isinstance(error, KdError):
        return None
    if isinstance(error, NEVER):
        return f"a bare {text}"
    if isinstance(error, BUILTINS) or type(error) is type(theirs):
        return None
    return f"a bare {text}"


def written(call: Call, node: Node) -> tuple[Node, Outcome]:
    """Do a call in place to a copy of a node."""
    copy = twin(node)

    def run() -> object:
        for member in copy.members if ragged(copy) else ():
            part = plain(member)
            call.theirs(part)
            store(part, member)
            store_data(part, member)
        if ragged(copy):
            return ITSELF
        tree = plain(copy)
        result = call.theirs(tree)
        if copy.members or any(isinstance(value, Node) for value in copy.entries.values()):
            write_back(tree, copy)
        store_data(tree, copy)
        return result

    return copy, reference(run)


def write_back(tree: Plain, node: Node) -> None:
    """Write what became of the dense reading of a stack into its members."""
    for row, member in enumerate(node.members):
        dim = node.dim
        part = tree.map(lambda leaf, row=row, dim=dim: leaf.select(dim, row))  # type: ignore[misc]  # bound in time
        store(part, member)
    for key, value in node.entries.items():
        if isinstance(value, Node):
            write_back(cast("Plain", tree.entries[key]), value)


def store(part: Plain, node: Node) -> None:
    if node.members:
        write_back(part, node)
        return
    for key, value in part.entries.items():
        mine = node.entries[key]
        if isinstance(value, Plain):
            store(value, cast("Node", mine))
        elif isinstance(value, Tensor):
            write_row(cast("Tensor", mine), value)


def store_data(tree: Plain, node: Node) -> None:
    """Store what became of data that is not tensors."""
    for row, member in enumerate(node.members):

        def select(leaf: Tensor, row: int = row) -> Tensor:
            return leaf.select(node.dim, row)

        store_data(tree.map(select, lambda batch: batch[:-1], select), member)
    for key, value in node.entries.items():
        found = tree.entries[key]
        if isinstance(value, Node):
            store_data(cast("Plain", found), value)
        elif isinstance(value, Data):
            node.entries[key] = kept(value, cast("Data", found), node.batch)


def kept(value: Data, found: Data, batch: Batch) -> Data:
    """Return what became of data; one value whose rows were read among others stays one."""
    if value.rows is not None or found.rows is None:
        return found
    return value if torch.equal(value.of_rows(batch), found.rows) else found


def with_data(node: Node, other: Node) -> Node:
    """Return a node of the same tensors, with the data of another."""
    new = Node(node.batch, dim=node.dim, declared=node.declared)
    new.members = [with_data(*pair) for pair in zip(node.members, other.members, strict=True)]
    for key, value in node.entries.items():
        theirs = other.entries[key]
        if isinstance(value, Node):
            new.entries[key] = with_data(value, cast("Node", theirs))
        else:
            new.entries[key] = theirs if isinstance(theirs, Data) else value
    return new


def write_row(member: Tensor, row: Tensor) -> None:
    """Write what became of a row into the member that it came from."""
    if member.requires_grad or torch._debug_has_internal_overlap(member) == 1:
        raise Unknown  # a member may refuse what the stack of all takes
    try:
        member.copy_(row)
    except RuntimeError as error:
        raise Unknown from error


def ragged(node: Node) -> bool:
    """Whether members differ, so that there is no dense reading of all that they hold."""
    try:
        trees = [plain(member) for member in node.members]
        plain(node)
    except Ragged:
        return True
    return any(keys_of(tree) != keys_of(trees[0]) for tree in trees)


def keys_of(tree: Plain, path: Path = ()) -> list[Path]:
    found: list[Path] = []
    for key, value in tree.entries.items():
        found.append((*path, key))
        if isinstance(value, Plain):
            found += keys_of(value, (*path, key))
    return found


def has_stack(node: Node) -> bool:
    inner = (value for value in node.entries.values() if isinstance(value, Node))
    return bool(node.members) or any(map(has_stack, inner))


def has_row_values(node: Node) -> bool:
    """Whether a container without batch dimensions, outside stacks, holds the value of its row."""
    if node.members:
        return False
    inner = [value for value in node.entries.values() if isinstance(value, Node)]
    data = [value.rows for value in node.entries.values() if isinstance(value, Data)]
    alone = any(rows is not None and not rows.ndim for rows in data)
    return alone or any(map(has_row_values, inner))


def shares_memory(node: Node) -> bool:
    """Whether two leaves, or two elements of one, stand in the same memory."""
    seen: set[int] = set()
    for leaf in node.tensors():
        where = leaf.untyped_storage().data_ptr()
        if leaf.numel() and (where in seen or torch._debug_has_internal_overlap(leaf) == 1):
            return True
        seen.add(where)
    return False


def overlaps(node: Node) -> bool:
    return any(torch._debug_has_internal_overlap(leaf) == 1 for leaf in node.tensors())


def check(subject: Subject, call: Call) -> str | None:
    """Run a call both ways; return what differs."""
    node, td = subject.node, subject.td
    before = fingerprint(node)
    locked = td.is_locked
    copy, (want, refused) = expected(subject, call)
    got, error = attempt(lambda: call.ours(td))
    if error is not None:
        bad = refused_badly(error, refused)
        if bad:
            return bad
        if fingerprints_differ(before, fingerprint(node)) and not records_into_shared(node):
            return f"values changed though refused: {type(error).__name__}: {error}"
        broken = structure(td, node)
        if broken or td.is_locked != locked:
            return f"{broken or 'the lock'} changed though refused: {type(error).__name__}: {error}"
        return over_refused(subject, call, error, refused)
    if isinstance(refused, (Ragged, Unknown)) or call.unchecked:
        return None
    if isinstance(refused, NotImplementedError) or call.wider:
        return None  # not offered by torch for one dtype, or for one kind of operand
    if refused is not None:
        if subject.ragged or not any(True for _ in node.tensors()) or call.may_refuse(plain(node)):
            return None
        if isinstance(refused, RuntimeError) and is_looser(node, refused):
            return None
        return (
            f"accepted what is refused with {type(refused).__name__}: {refused}; got {shown(got)}"
        )
    return _results_differ(subject, call, before, got, want, copy)


def records_into_shared(node: Node) -> bool:
    """Return whether a write may record gradients for a leaf that another shares detached.

    Torch tells only at the write into the other one that it refuses it.
    """
    return shares_memory(node) and any(leaf.requires_grad for leaf in node.tensors())


def is_looser(node: Node, refused: Exception) -> bool:
    """Return whether torch may take for members of a stack what it refuses for the stacked tensor.

    Of tensors of one element it refuses less: `fill_(1e300)` of a bfloat16, `lerp_` with a
    weight of another dtype. Whole members are copied to, which works for dtypes that an index into
    a tensor does not.
    """
    if not has_stack(node):
        return False
    return "Index put" in str(refused) or any(leaf.numel() == 1 for leaf in node.tensors())


def readably(compare: Callable[[], str | None]) -> str | None:
    """Compare with a result, which may turn out not to be readable."""
    try:
        return compare()
    except Exception as error:
        return f"the result cannot be read: {error!r}"


def expected(subject: Subject, call: Call) -> tuple[Node, Outcome]:
    """Return a copy of what was written, and what the call gives by the reference."""
    node = subject.node
    if subject.ragged and not call.memberwise:
        return node, (None, Ragged())
    if call.writes:
        return written(call, node)
    if subject.ragged:
        return node, memberwise(call, node)
    return node, reference(lambda: call.theirs(plain(node)))


def shown(got: object) -> str:
    try:
        return repr(got)[:300]
    except Exception as error:
        return f"a {type(got).__name__} whose repr raises {type(error).__name__}: {error}"


def memberwise(call: Call, node: Node) -> Outcome:
    """What a call does to each member of a stack that has no dense reading."""
    return reference(lambda: [call.theirs(plain(member)) for member in node.members])


def over_refused(
    subject: Subject, call: Call, error: Exception, refused: Exception | None
) -> str | None:
    if refused is not None or call.unchecked or call.lax:
        return None
    if not subject.batch and isinstance(error, OutOfRange):
        return None  # dimensions of a batch () are named by nothing, where torch takes 0 and -1
    try:
        if call.may_refuse(plain(subject.node)):
            return None
    except Ragged:
        pass
    if call.writes and (
        overlaps(subject.node) or any(t.requires_grad for t in subject.node.tensors())
    ):
        return None  # torch takes some of these writes, and never into one more leaf than we do
    if call.writes and has_stack(subject.node) and shares_memory(subject.node):
        return None
    if call.writes and has_row_values(subject.node):
        return None  # a value of one row is replaced by `set`, and not written in place
    if isinstance(error, NotImplementedError) and (call.writes or has_stack(subject.node)):
        return None  # torch writes, and moves rows of one dimension, in ways that lack a dtype
    if call.writes and any(not leaf.numel() for leaf in subject.node.tensors()):
        return None  # torch looks at few arguments where there is nothing to do
    return f"refused: {type(error).__name__}: {error}"


def _results_differ(
    subject: Subject, call: Call, before: list[object], got: object, want: object, copy: Node
) -> str | None:
    node, td = subject.node, subject.td
    if call.writes:
        if shares_memory(node) and (
            has_stack(node) or any(t.requires_grad for t in node.tensors())
        ):
            return None  # what shares memory in a twin of these is not the same
        found = after_write(node, copy, call.exact) or structure(td, with_data(node, copy))
        if found:
            return f"after the write: {found}"
    elif fingerprints_differ(before, fingerprint(node)):
        return "the input changed"
    if want is ITSELF:
        return None if got is td else f"{shown(got)} instead of the container itself"
    if call.restructures:
        tree, want = cast("tuple[Plain, object]", want)
        found = readably(lambda: differ(td, tree, call.exact))
        if found:
            return f"afterwards: {found}"
        if want is ITSELF:
            return None if got is td else f"{shown(got)} instead of the container itself"
        return differ(got, want, call.exact)
    if not call.writes:
        broken = structure(td, node)
        if broken:
            return broken
    if isinstance(want, list) and got is None and all(one is None for one in want):
        return None  # nothing is left of any member
    if isinstance(want, list) and call.memberwise and subject.ragged:
        if isinstance(got, LazyStackedTensorDict):
            got = list(members_of(got))
        want = [  # a member of which nothing is left stays one of the stack
            Plain(member.batch) if one is None else one
            for one, member in zip(want, node.members, strict=True)
        ]
    found = readably(lambda: differ(got, want, call.exact))
    if found and has_stack(node) and "requires_grad" in found:
        found = None  # what one member asks for need not hold for another
    return found or _sharing(call, node, got) or _gradients(call, node, got, want)


def after_write(node: Node, copy: Node, exact: bool) -> str | None:
    """Say where tensors differ from what the reference wrote."""
    for mine, theirs in zip(node.tensors(), copy.tensors(), strict=True):
        found = tensors_differ(mine, theirs, exact)
        if found:
            return found
    return None


def _sharing(call: Call, node: Node, got: object) -> str | None:
    if call.shares is None or has_stack(node):
        return None
    homes = {leaf.untyped_storage().data_ptr() for leaf in node.tensors() if leaf.numel()}
    for result in got if isinstance(got, tuple) else (got,):
        for path, leaf in read(cast("TensorDictBase", result)).leaves():
            shared = leaf.untyped_storage().data_ptr() in homes
            if leaf.numel() and shared != call.shares:
                return f"{path} {'shares memory' if shared else 'is a copy'}"
    return None


def _results(result: object) -> list[Tensor]:
    if isinstance(result, TensorDictBase):
        return read(result).tensors()
    if isinstance(result, Plain):
        return result.tensors()
    if isinstance(result, (tuple, list)):
        return [leaf for each in result for leaf in _results(each)]
    return [result] if isinstance(result, Tensor) else []


def _differentiated(result: object, inputs: list[Tensor]) -> tuple[Tensor | None, ...] | None:
    outputs = [leaf for leaf in _results(result) if leaf.requires_grad]
    weights = [
        torch.arange(1, leaf.numel() + 1).reshape(leaf.shape).to(leaf.dtype) for leaf in outputs
    ]
    try:
        return torch.autograd.grad(outputs, inputs, weights, allow_unused=True) if outputs else None
    except RuntimeError:
        return None


def _logit_at_zero(call: Call, leaf: Tensor, mine: Tensor, theirs: Tensor) -> Tensor:
    """Return our gradient of `logit`, with the sign that torch happened to give at -0.0.

    `torch.ops.aten.logit_backward(torch.ones(48), torch.full((48,), -0.0))` holds both: `-inf` in
    the first 32, which the vectorized loop of torch computes, `inf` in the rest. So the sign
    depends on how many elements a leaf has, and on its strides, which no copy of it keeps.
    """
    if call.name.rpartition(".")[2] != "logit":
        return mine
    either = (leaf == 0) & torch.signbit(leaf) & mine.isinf() & theirs.isinf()
    return torch.where(either, theirs, mine)


def _gradients(call: Call, node: Node, got: object, want: object) -> str | None:
    inputs = list({id(leaf): leaf for leaf in node.tensors() if leaf.requires_grad}.values())
    if not inputs or call.writes:
        return None
    mine, theirs = _differentiated(got, inputs), _differentiated(want, inputs)
    if theirs is None:
        return None
    if mine is None:
        return None if has_stack(node) else "no gradients"
    # A gradient goes through the dtype of each result.
    rate = max(TOLERANCE.get(each.dtype, 0.0) for each in _results(want))
    for leaf, a, b in zip(inputs, mine, theirs, strict=True):
        if (a is None) != (b is None) and not has_stack(node):
            return f"gradient {a} instead of {b}"
        if a is None or b is None:
            continue
        if not values_equal(_logit_at_zero(call, leaf.detach(), a, b), b, exact=False, rate=rate):
            return f"gradient {a.tolist()} instead of {b.tolist()}"
    return None
