"""Every model of `tests.nn.models` in every way to run it: interpreted, planned and compiled.

The interpreter is the reference. Compared are values, gradients, what hooks see, buffers, the state
of the generator, and what has become of the caller's container.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import pytest
import torch
from tests.nn.models import MODELS, Model
from tests.nn.plans import module_calls
from torch import Tensor

from kd_core import NestedKey, NonTensorDataBase, TensorDict, TensorDictBase, is_tensor_collection
from kd_nn import set_skip_existing

Trace: TypeAlias = dict[str, object]
CALLS = 3
"""A plan is made in the second call and used in the third."""
FORMS = ("container", "keyword")
KEYWORD = (
    *("tutorial", "selected", "selected outside", "attention", "batch norm", "discarded output"),
    *("input as output", "outputs by name", "number as output", "text as output", "text as input"),
    *("undeclared output", "container and its part as input", "optional input", "tolerant"),
    *("fresh container", "wrapper", "ensemble"),
)
"""Models whose inputs and results by keyword differ in kind; the steps of all compile anyway."""
pytestmark = pytest.mark.filterwarnings("ignore::kd_nn.KeyGraphWarning")


class Way:
    """A model that is run in one way, and what was seen of it."""

    def __init__(self, model: Model, interpreted: bool = False, compiled: bool = False) -> None:
        self.model = model
        self.module = model.make()
        self.interpreted = interpreted
        self.run: Callable[..., Any] = self.module
        if compiled:
            self.run = torch.compile(self.module, backend="eager")
        self.seen: list[object] = []

    def scope(self) -> AbstractContextManager[object]:
        return set_skip_existing(False) if self.interpreted else nullcontext()

    def hook(self) -> None:
        """Register hooks on every module."""
        for name, member in self.module.named_modules():
            member.register_forward_pre_hook(self._note(name, "before"))
            member.register_forward_hook(self._note(name, "after"))

    def _note(self, name: str, when: str) -> Callable[..., None]:
        def note(*args: object) -> None:
            self.seen.append((name, when, describe(args[1:])))

        return note

    def outcome_without(self, lacking: NestedKey, form: str) -> object:
        """Call the model without one of its entries; return the trace, or the exception."""
        given = self.model.container().exclude(lacking)
        try:
            return self.call(form, given)
        except Exception as error:
            notes = getattr(error, "__notes__", ())
            return type(error), str(error), list(notes), describe(given)

    def call(self, form: str, given: TensorDict | None = None) -> Trace:
        """Call the model, on fresh values unless some are given; tell all that a caller can see."""
        torch.manual_seed(1)
        self.module.zero_grad()
        given = self.model.container() if given is None else given
        leaves = list(tensors_of(given))
        before = dict(given.items(True, True))
        self.seen.clear()
        with self.scope():
            result = self._run(form, given)
        trace: Trace = {"seen": list(self.seen), "generator": torch.get_rng_state()}
        trace["same container"] = result is given
        trace["result"] = describe(result)
        trace["entries"] = [
            (key, value is before.get(key), describe(value)) for key, value in given.items(True)
        ]
        floating = [leaf for leaf in leaves if leaf.requires_grad]
        trace["gradients"] = gradients(result, [*floating, *self.module.parameters()])
        trace["buffers"] = describe(list(self.module.buffers()))
        return trace

    def _run(self, form: str, given: TensorDict) -> object:
        if form == "container":
            return self.run(given)
        keys: list[Any] = [k for k in self.module.in_keys if k in given.keys(True)]  # type: ignore[union-attr]  # keyed
        values = [given[key] for key in keys]
        if form == "position" and not is_tensor_collection(values[:1][0] if values else None):
            return self.run(*values)
        names = [key if isinstance(key, str) else "_".join(key) for key in keys]
        return self.run(**dict(zip(names, values, strict=True)))


def describe(value: object) -> object:
    """Return what can be compared of a value."""
    if isinstance(value, TensorDictBase):
        entries = [(key, describe(each)) for key, each in value.items()]
        return type(value).__name__, tuple(value.batch_size), str(value.device), entries
    if isinstance(value, NonTensorDataBase):  # compared by `==` row by row
        return type(value).__name__, tuple(value.batch_size), value.tolist()
    if isinstance(value, Tensor):
        return value.detach().clone(), value.requires_grad
    if isinstance(value, (tuple, list)):
        return [describe(each) for each in value]
    if isinstance(value, Mapping):
        return [(key, describe(each)) for key, each in value.items()]
    return value


def tensors_of(value: object) -> Iterator[Tensor]:
    if isinstance(value, TensorDictBase):
        for each in value.values():
            yield from tensors_of(each)
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from tensors_of(each)


def gradients(result: object, wrt: list[Tensor]) -> list[Tensor | None]:
    total = sum((k + 1) * (leaf * leaf).sum() for k, leaf in enumerate(tensors_of(result)))
    if not isinstance(total, Tensor) or not total.requires_grad or not wrt:
        return [None for _ in wrt]
    return list(torch.autograd.grad(total, wrt, allow_unused=True))


Compare: TypeAlias = Callable[[Tensor, Tensor], bool]


def close(left: Tensor, right: Tensor) -> bool:
    """Return whether tensors are equal but for rounding: a compiled ensemble is unrolled."""
    return left.shape == right.shape and torch.allclose(left, right)


def same(left: object, right: object, compare: Compare = torch.equal) -> bool:
    """Return whether two traces are equal; tensors to the bit unless told otherwise."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.dtype != right.dtype or left.device != right.device:
            return False
        return left.shape == right.shape if left.is_meta else compare(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return same(list(left.items()), list(right.items()), compare)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        pairs = zip(left, right, strict=False)
        return len(left) == len(right) and all(same(a, b, compare) for a, b in pairs)
    return type(left) is type(right) and left == right


def check(got: Trace, expected: Trace, compare: Compare = torch.equal) -> None:
    for what, value in expected.items():
        assert same(got[what], value, compare), f"{what}: {got[what]} instead of {value}"


CASES = [
    pytest.param(model, form, id=f"{name}, {form}")
    for name, model in MODELS.items()
    for form in FORMS
    if model.by_tensors or form == "container"
]


@pytest.mark.parametrize(("model", "form"), CASES)
def test_plan_does_what_the_interpreter_does(model: Model, form: str) -> None:
    reference, planned = Way(model, interpreted=True), Way(model)
    for _ in range(CALLS):
        check(planned.call(form), reference.call(form))
    if model.planned:
        assert module_calls(lambda: planned.call(form), planned.module) == 0


@pytest.mark.parametrize(("model", "form"), CASES)
def test_plan_lets_every_hook_see_what_the_interpreter_shows(model: Model, form: str) -> None:
    reference, planned = Way(model, interpreted=True), Way(model)
    for _ in range(CALLS):
        check(planned.call(form), reference.call(form))
    reference.hook()
    planned.hook()
    check(planned.call(form), reference.call(form))
    assert reference.seen or not list(reference.module.children())


@pytest.mark.parametrize("name", MODELS)
def test_compiled_does_what_the_interpreter_does(name: str) -> None:
    torch.compiler.reset()
    model = MODELS[name]
    reference, compiled = Way(model, interpreted=True), Way(model, compiled=True)
    for form in FORMS if model.by_tensors and name in KEYWORD else FORMS[:1]:
        check(compiled.call(form), reference.call(form), close)


@pytest.mark.parametrize("name", ["tutorial", "batch norm that is not needed"])
def test_compiled_lets_every_hook_see_what_the_interpreter_shows(name: str) -> None:
    torch.compiler.reset()
    reference, compiled = Way(MODELS[name], interpreted=True), Way(MODELS[name], compiled=True)
    for way in (reference, compiled):
        way.hook()  # first: torch does not guard the hooks of modules
    for form in FORMS:
        check(compiled.call(form), reference.call(form), close)


@pytest.mark.parametrize(("model", "form"), CASES)
def test_call_that_lacks_an_input_gets_the_same_answer(model: Model, form: str) -> None:
    for lacking in model.container().keys(True, True):
        reference, planned = Way(model, interpreted=True), Way(model)
        planned.call(form)
        planned.call(form)
        planned.module.load_state_dict(reference.module.state_dict())
        got, expected = (way.outcome_without(lacking, form) for way in (planned, reference))
        assert same(got, expected), (got, expected)
