"""Random sequences in every form of calling them, against plain Python on nested dicts."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kd_core import NestedKey, TensorDict, TensorDictBase
from kd_nn import TensorDictModule, TensorDictSequential

Path = tuple[str, ...]
Nested = dict[str, object]
LEAVES: list[Path] = [("a",), ("b",), ("n", "a"), ("n", "b"), ("n", "m", "a"), ("o", "a")]
GIVEN = {path: torch.arange(6.0).reshape(3, 2) / 7 + k / 3 for k, path in enumerate(LEAVES)}


class Affine(nn.Module):
    """One output of any number of inputs."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1 + number / 8))

    def forward(self, *inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        total = sum((k + 1) * x for k, x in enumerate(inputs)) * self.weight + 0.25
        return (total if bias is None else total - bias).tanh()


class Two(Affine):
    """Two outputs."""

    def forward(self, *inputs: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # narrower than the base allows
        out = super().forward(*inputs, bias=bias)
        return out, out * 2 + 1


class Fold(Affine):
    """One output of a container, or of a tensor."""

    def forward(self, *inputs: object, bias: Tensor | None = None) -> Tensor:
        return super().forward(*(leaf for x in inputs for leaf in leaves_of(x)), bias=bias)


class Pack(Affine):
    """A container as output, with all that is ever read from it."""

    def forward(self, *inputs: Tensor, bias: Tensor | None = None) -> TensorDict:  # type: ignore[override]  # narrower than the base allows
        out = super().forward(*inputs, bias=bias)
        return TensorDict({"a": out, "b": out - 1, "m": {"a": out - 2}})


def leaves_of(value: object) -> list[Tensor]:
    """Return the leaves of a tensor, a container or a nested dict, by sorted name."""
    if isinstance(value, Tensor):
        return [value]
    entries = value.to_dict() if isinstance(value, TensorDictBase) else cast(Nested, value)
    return [leaf for name in sorted(entries) for leaf in leaves_of(entries[name])]


@dataclass
class Step:
    """A module between paths; `bias` names a read that is passed by keyword."""

    net: Affine
    reads: list[Path]
    writes: list[Path]
    by_name: bool

    def build(self) -> TensorDictModule:
        reads: list[NestedKey] = [to_key(path) for path in self.reads]
        writes = [to_key(path) for path in self.writes]
        if self.by_name:
            named = {"bias": reads[0]}
            return TensorDictModule(OnlyBias(self.net), named, writes)
        return TensorDictModule(self.net, reads, writes)

    def run(self, state: Nested) -> None:
        inputs = [look_up(state, path) for path in self.reads]
        net = cast(Callable[..., object], self.net)
        zero = torch.zeros(3, 2)
        out = net(zero, bias=inputs[0]) if self.by_name else net(*inputs)
        for path, value in zip(self.writes, out if isinstance(out, tuple) else [out], strict=True):
            if path != ("_",):
                put(state, path, value.to_dict() if isinstance(value, TensorDict) else value)


class OnlyBias(nn.Module):
    """Passes its one input by keyword."""

    def __init__(self, net: Affine) -> None:
        super().__init__()
        self.net = net

    def forward(self, bias: Tensor) -> object:
        return self.net(torch.zeros(3, 2), bias=bias)


@dataclass
class Graph:
    """Steps in order; `selected` indexes the written paths, None keeps all."""

    steps: "list[Step | Graph]"
    selected: list[int] | None

    def written(self) -> list[Path]:
        """Return all that is written, each at its last place."""
        found: list[Path] = []
        for step in self.steps:
            paths = step.visible() if isinstance(step, Graph) else step.writes
            found = [old for old in found if not any(old[: len(new)] == new for new in paths)]
            found += [path for path in paths if path != ("_",)]
        return found

    def visible(self) -> list[Path]:
        """Return the selected paths in the order of the selection."""
        written = self.written()
        if self.selected is None or not written:
            return written
        return list(dict.fromkeys(written[idx % len(written)] for idx in self.selected))

    def build(self) -> TensorDictSequential:
        sequence = TensorDictSequential([step.build() for step in self.steps])
        if self.selected is not None and self.written():
            sequence.select_out_keys(*[to_key(path) for path in self.visible()])
        return sequence

    def run(self, state: Nested) -> None:
        work = copy_of(state)
        for step in self.steps:
            step.run(work)
        for path in self.visible():
            put(state, path, look_up(work, path))


def reads_in_part(graph: Graph, written: list[Path]) -> bool:
    """Return whether a container is read of which an earlier step wrote a part.

    A container that is passed holds the other parts too; tensors that are passed do not.
    """
    for step in graph.steps:
        if isinstance(step, Graph):
            if reads_in_part(step, list(written)):
                return True
        elif any(
            path != old and old[: len(path)] == path for path in step.reads for old in written
        ):
            return True
        written += step.visible() if isinstance(step, Graph) else step.writes
    return False


def to_key(path: Path) -> NestedKey:
    return path[0] if len(path) == 1 else path


def to_path(key: NestedKey) -> Path:
    return (key,) if isinstance(key, str) else tuple(str(part) for part in key)


def look_up(state: Nested, path: Path) -> object:
    value: object = state
    for part in path:
        value = cast(Nested, value)[part]
    return value


def put(state: Nested, path: Path, value: object) -> None:
    for part in path[:-1]:
        state = cast(Nested, state.setdefault(part, {}))
    state[path[-1]] = value


def copy_of(state: Nested) -> Nested:
    return {k: copy_of(v) if isinstance(v, dict) else v for k, v in state.items()}


def flat(state: Nested, head: Path = ()) -> dict[Path, Tensor]:
    """Return the leaves of a nested dict in order."""
    found: dict[Path, Tensor] = {}
    for name, value in state.items():
        here = (*head, name)
        found.update(flat(value, here) if isinstance(value, dict) else {here: cast(Tensor, value)})
    return found


def inputs() -> Nested:
    """Return a fresh nested dict of all leaves, each wanting a gradient."""
    state: Nested = {}
    for path, value in GIVEN.items():
        put(state, path, value.clone().requires_grad_())
    return state


paths = st.sampled_from(LEAVES)
numbers = st.integers(0, 9)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    kind = draw(st.sampled_from([Affine, Affine, Two, Two, Fold, Pack]))
    by_name = draw(st.booleans())
    reads = draw(st.lists(paths, min_size=1, max_size=1 if by_name else 3))
    places: list[Path] = [*LEAVES, ("_",)]
    writes = draw(st.lists(st.sampled_from(places), min_size=2, max_size=2, unique=True))
    if kind is Fold and not by_name:
        reads = [draw(st.sampled_from([("n",), ("n", "m"), ("o",)])), *reads]
    if kind is Pack:
        writes = [("n",)]
    elif kind is not Two:
        writes = writes[:1]
    return Step(kind(draw(numbers)), reads, writes, by_name)


def graphs(depth: int) -> st.SearchStrategy[Graph]:
    step: st.SearchStrategy[Step | Graph] = steps()
    if depth:
        step = st.one_of(steps(), steps(), graphs(depth - 1))
    selected = st.none() | st.lists(numbers, min_size=1, max_size=3)
    return st.builds(Graph, st.lists(step, min_size=1, max_size=5), selected)


def gradients(outputs: list[Tensor], wrt: list[Tensor]) -> list[Tensor | None]:
    total = sum(((k + 1) * out * out).sum() for k, out in enumerate(outputs))
    if not isinstance(total, Tensor) or not total.requires_grad:
        return [None for _ in wrt]
    return list(torch.autograd.grad(total, wrt, allow_unused=True))


def agree(got: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for left, right in zip(got, expected, strict=True):
        assert (left is None) == (right is None)
        if left is not None and right is not None:
            torch.testing.assert_close(left, right)


class Case:
    """A sequence, and what plain Python says about it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.model = graph.build()
        self.takes_tensors = not reads_in_part(graph, [])
        state = self.given = inputs()
        self.result = copy_of(state)
        graph.run(self.result)
        self.visible = [look_up(self.result, path) for path in graph.visible()]
        self.wrt = [*flat(state).values(), *self.model.parameters()]
        self.grads = gradients([x for value in self.visible for x in leaves_of(value)], self.wrt)

    def container(self) -> TensorDict:
        return TensorDict(copy_of(self.given), batch_size=[3])

    def check_container(self, result: TensorDictBase) -> None:
        """Compare leaves, their order and gradients."""
        expected = flat(self.result)
        keys = [to_path(key) for key in result.keys(True, True)]
        assert keys == list(expected)
        self.check_entries(result)

    def check_entries(self, result: TensorDictBase) -> None:
        """Compare what is visible, and gradients."""
        self.check_values([result[cast(str, to_key(path))] for path in self.graph.visible()])

    def check_values(self, values: list[Tensor]) -> None:
        for got, expected in zip(values, self.visible, strict=True):
            pairs = zip(leaves_of(got), leaves_of(expected), strict=True)
            assert all(torch.equal(left, right) for left, right in pairs)
        agree(gradients([x for value in values for x in leaves_of(value)], self.wrt), self.grads)

    def arguments(self) -> dict[NestedKey, object]:
        """Return what the sequence reads, by key."""
        found = self.container()
        return {key: found[cast(str, key)] for key in self.model.in_keys}


def call(case: Case, *args: object, **kwargs: object) -> list[Tensor]:
    """Call with tensors; a single output is a list of one."""
    result = cast(Callable[..., object], case.model)(*args, **kwargs)
    return list(result) if isinstance(result, tuple) else [cast(Tensor, result)]


def by_container(case: Case) -> None:
    td = case.container()
    result = case.model(td)
    assert result is td
    case.check_container(result)


def by_keyword(case: Case) -> None:
    named = {"_".join(to_path(key)): value for key, value in case.arguments().items()}
    case.check_values(call(case, **named))


def by_position(case: Case) -> None:
    given = list(case.arguments().values())
    if given and isinstance(given[0], Tensor):
        case.check_values(call(case, *given))


def by_nested_dicts(case: Case) -> None:
    nested: Nested = {}
    for key, value in case.arguments().items():
        put(nested, to_path(key), value.to_dict() if isinstance(value, TensorDictBase) else value)
    case.check_values(call(case, **nested))


def into_another(case: Case) -> None:
    td, out = case.container(), TensorDict(batch_size=[3])
    assert case.model(td, tensordict_out=out) is out
    case.check_entries(out)
    assert all(td[cast(str, to_key(path))] is leaf for path, leaf in flat(case.given).items())
    assert {to_path(key) for key in out.keys(True, True)} <= set(flat(case.result))


def with_a_hook(case: Case) -> None:
    step = case.model[-1]
    seen: list[int] = []
    hook = step.register_forward_hook(lambda *_: seen.append(1))
    by_container(case)
    hook.remove()
    assert len(seen) == 1


def as_a_copy(case: Case) -> None:
    case.model, before = copy.deepcopy(case.model), case.model
    for mine, theirs in zip(case.model.parameters(), before.parameters(), strict=True):
        mine.data = theirs.data
    wrt, grads = case.wrt, case.grads
    case.wrt = [*flat(case.given).values()]
    case.grads = grads[: len(case.wrt)]
    by_container(case)
    by_container(case)
    case.model, case.wrt, case.grads = before, wrt, grads


def as_one_step(case: Case) -> None:
    inner, case.model = case.model, TensorDictSequential(case.model)
    by_container(case)
    by_container(case)
    case.model = inner


WITH_CONTAINERS = [by_container, into_another, with_a_hook, as_a_copy, as_one_step]
FORMS = [*WITH_CONTAINERS, by_keyword, by_position, by_nested_dicts]


@pytest.mark.filterwarnings("ignore::kd_nn.KeyGraphWarning")
@settings(max_examples=60)
@given(graphs(2), st.lists(st.sampled_from(FORMS), min_size=6, max_size=8))
def test_every_form_does_what_plain_python_does(
    graph: Graph, forms: list[Callable[[Case], None]]
) -> None:
    case = Case(graph)
    for form in forms:
        if case.takes_tensors or form in WITH_CONTAINERS:
            form(case)


@pytest.mark.filterwarnings("ignore::kd_nn.KeyGraphWarning")
@settings(max_examples=4)
@given(graphs(1))
def test_compiled_does_what_plain_python_does(graph: Graph) -> None:
    case = Case(graph)
    torch.compiler.reset()
    compiled = torch.compile(case.model, backend="eager", fullgraph=True)
    case.check_entries(compiled(case.container()))
