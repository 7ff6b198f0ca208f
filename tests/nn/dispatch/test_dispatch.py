import gc
import inspect
import pydoc
import sys
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, nn

from kd_core import InvalidArgument, TensorDict, TensorDictBase
from kd_nn import (
    DispatchError,
    KeysNotDeclared,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
    dispatch,
)

X, Y = torch.ones(2, 3), torch.full((2, 3), 2.0)


def same(got: object, expected: Tensor | float) -> bool:
    return isinstance(got, Tensor) and bool((got == expected).all())


class Add(nn.Module):
    in_keys: ClassVar = ["x", ("in", "y")]
    out_keys: ClassVar = ["sum"]

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("sum", tensordict["x"] + tensordict["in", "y"])


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X, Y), {}),
        ((X,), {"in_y": Y}),
        ((), {"in_y": Y, "x": X}),
        ((), {"x": X, "in": {"y": Y}}),
    ],
)
def test_tensors_come_by_position_name_or_nested_dict(
    args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
) -> None:
    assert same(Add()(*args, **kwargs), 3)


def test_container_passes_through() -> None:
    td = TensorDict({"x": X, "in": {"y": Y}})
    assert Add()(td) is td
    assert Add()(tensordict=td) is td


def test_signature_names_the_arguments() -> None:
    module = TensorDictModule(torch.add, ["a", ("b", "c")], ["d"])
    assert list(inspect.signature(module).parameters) == ["a", "b_c"]
    sequence = TensorDictSequential(module, TensorDictModule(torch.neg, ["d"], ["e"]))
    assert list(inspect.signature(sequence).parameters) == ["a", "b_c"]


def test_signature_follows_the_keys_of_the_instance() -> None:
    module = TensorDictModule(torch.neg, ["a"], ["b"])
    module.in_keys = ["other"]
    assert list(inspect.signature(module).parameters) == ["other"]


@pytest.mark.parametrize("owner", [Add, TensorDictModule, TensorDictSequential])
def test_a_decorated_method_is_a_plain_function(owner: type[nn.Module]) -> None:
    assert inspect.isfunction(owner.__dict__["forward"])


def test_signature_of_a_method_takes_tensors_next_to_its_own_parameters() -> None:
    signature = inspect.signature(Add().forward)
    assert list(signature.parameters) == ["tensordict", "args", "kwargs"]
    assert signature.bind(X, in_y=Y).arguments == {"tensordict": X, "in_y": Y}
    assert signature.bind(x=X, in_y=Y).arguments == {"x": X, "in_y": Y}
    assert signature.bind(X, Y).arguments == {"tensordict": X, "args_0": Y}
    td = TensorDict({"x": X, "in": {"y": Y}})
    assert list(signature.bind(td).arguments.values()) == [td]


class Based(TensorDictModuleBase):
    in_keys: ClassVar = ["x", ("in", "y")]  # type: ignore[misc]  # as users declare them
    out_keys: ClassVar = ["sum"]  # type: ignore[misc]  # as users declare them

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("sum", tensordict["x"] + tensordict["in", "y"])


class Plain(TensorDictModuleBase):
    in_keys: ClassVar = ["x"]  # type: ignore[misc]  # as users declare them
    out_keys: ClassVar = ["y"]  # type: ignore[misc]  # as users declare them

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("y", -tensordict["x"])


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (Based(), ["x", "in_y"]),
        (Plain(), ["tensordict"]),
        (TensorDictModule(torch.add, ["a", ("b", "c")], ["d"]), ["a", "b_c"]),
        (TensorDictSequential(TensorDictModule(torch.neg, ["a"], ["b"])), ["a"]),
        (TensorDictModuleWrapper(TensorDictModule(torch.neg, ["a"], ["b"])), ["a"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_signature_of_a_module_names_its_keys(module: nn.Module, names: list[str]) -> None:
    assert list(inspect.signature(module).parameters) == names
    assert names[0] not in inspect.signature(type(module)).parameters


def test_help_shows_the_method_and_the_class() -> None:
    module = TensorDictModule(torch.add, ["a", ("b", "c")], ["d"])
    assert "Read, run and write" in pydoc.plain(pydoc.render_doc(module.forward))
    assert "Run a callable on entries" in pydoc.plain(pydoc.render_doc(module))


def test_names_that_are_no_parameters_stay_callable() -> None:
    module = TensorDictModule(torch.neg, ["lambda"], ["b"])
    assert str(inspect.signature(module)) == "(*args, **kwargs)"
    assert same(module(**{"lambda": X}), -1)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((X, Y, X), {}, "expected at most 2 tensors .*, got 3"),
        ((X,), {"x": X, "in_y": Y}, "got `x` twice"),
        ((X,), {"in_z": Y}, "no argument `in_z`. Accepted: `x`, `in_y`. Did you mean `in_y`"),
        ((X,), {"in": {"z": Y}}, "does not read .*z.*, given inside `in`"),
        ((TensorDict(x=X),), {"in_y": Y}, "got `in_y` next to a container. .* takes nothing"),
        ((TensorDict(x=X), Y), {}, "got 1 more by position next to a container"),
    ],
)
def test_wrong_arguments_raise_one_type(
    args: tuple[Any, ...], kwargs: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(DispatchError, match=message):
        Add()(*args, **kwargs)


def test_a_written_method_gets_what_is_given() -> None:
    class Weighted(nn.Module):
        in_keys: ClassVar = ["x", "weight"]
        out_keys: ClassVar = ["y"]

        @dispatch
        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            return tensordict.set("y", tensordict["x"] * tensordict.get("weight", 2))

    assert same(Weighted()(X), 2)
    assert same(Weighted()(x=X, weight=torch.tensor(3.0)), 3)
    with pytest.raises(KeyError, match="`x` not found"):
        Weighted()(weight=X)


def test_colliding_names_are_given_by_position_or_as_nested_dicts() -> None:
    module = TensorDictModule(torch.sub, [("a", "b_c"), ("a_b", "c")], ["d"])
    assert same(module(Y, X), 1)
    assert same(module(a={"b_c": Y}, a_b={"c": X}), 1)
    with pytest.raises(DispatchError, match=r"cannot tell which key `a_b_c` means.*nested dicts"):
        module(a_b_c=X)
    with pytest.raises(
        DispatchError, match=r"is missing `\('a_b', 'c'\)`. Accepted: `\('a', 'b_c'\)`"
    ):
        module(a={"b_c": X})


def test_key_called_self_is_given_by_position_or_in_a_container() -> None:
    module = TensorDictModule(torch.neg, ["self"], ["y"])
    assert str(inspect.signature(module)) == "(*args, **kwargs)"
    for _ in range(3):
        assert same(module(X), -1)
        assert same(module(TensorDict({"self": X}))["y"], -1)
        with pytest.raises(DispatchError, match=r"cannot take `self` by keyword.*by position"):
            module(self=X)


Decorates = Callable[[Callable[..., TensorDictBase]], Any]


@pytest.mark.parametrize(
    "chosen",
    [
        dispatch(separator="__", source=["x", ("in", "y")], dest=["sum", "_"]),
        dispatch("__", ["x", ("in", "y")], ["sum", "_"], True),
    ],
    ids=["by keyword", "by position"],
)
def test_separator_source_and_dest_can_be_chosen(chosen: Decorates) -> None:
    class Custom(nn.Module):
        @chosen
        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            return tensordict.set("sum", tensordict["x"] + tensordict["in", "y"])

    assert same(Custom()(x=X, in__y=Y), 3)


def test_batch_size_is_what_the_tensors_share() -> None:
    seen: list[torch.Size] = []

    class Spy(nn.Module):
        in_keys: ClassVar = ["x", "y"]
        out_keys: ClassVar = ["x"]

        @dispatch
        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            seen.append(tensordict.batch_size)
            return tensordict

    Spy()(torch.ones(4, 3), torch.ones(4, 5, 2))
    Spy()(torch.ones(4), torch.ones(4, 1))
    Spy()(torch.ones(4, 5), torch.ones(4, 5, 2))
    Spy()(torch.ones(4, 3))
    assert seen == [(4,), (4,), (4, 5), (4, 3)]


def test_more_arguments_of_forward_are_passed_on() -> None:
    class Scale(nn.Module):
        in_keys: ClassVar = ["x"]
        out_keys: ClassVar = ["y"]

        @dispatch
        def forward(self, tensordict: TensorDictBase, by: float = 1.0) -> TensorDictBase:
            return tensordict.set("y", tensordict["x"] * by)

    assert same(Scale()(x=X, by=3.0), 3)


def test_class_keys_are_readable_on_class_and_instance() -> None:
    class Both(TensorDictModuleBase):
        in_keys = ["x", ("a", "b")]  # noqa: RUF012  # as users write it
        out_keys = ["y"]  # noqa: RUF012  # as users write it

    assert Both.in_keys == Both().in_keys == ["x", ("a", "b")]
    assert Both().out_keys == Both().out_keys_source == ["y"]


def test_missing_declaration_says_what_to_do() -> None:
    class Bare(TensorDictModuleBase):
        @dispatch
        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            return tensordict

    with pytest.raises(KeysNotDeclared, match=r"`Bare` has no `in_keys`. Declare it"):
        Bare()(x=X)


def test_a_method_without_keys_for_its_outputs_does_not_run_with_tensors() -> None:
    class Meter:
        errors = 0

        @dispatch(source=["got", "wanted"])
        def accumulate(self, tensordict):  # type: ignore[no-untyped-def]  # as users write it
            self.errors += int((tensordict["got"] != tensordict["wanted"]).sum())

    meter: Any = Meter()
    with pytest.raises(AttributeError, match="has no `out_keys`"):
        meter.accumulate(torch.ones(2), torch.zeros(2))
    assert meter.errors == 0
    meter.accumulate(TensorDict(got=torch.ones(2), wanted=torch.zeros(2)))
    assert meter.errors == 2


def test_module_dies_with_its_last_reference_after_calls() -> None:
    module = Add()
    module(X, Y)
    module(TensorDict({"x": X, "in": {"y": Y}}))
    gone = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert gone() is None
    finally:
        gc.enable()


def test_what_is_kept_for_ever_new_keys_is_bounded() -> None:
    def call(number: int) -> None:
        module = TensorDictModule(torch.add, [f"x{number}", ("in", f"y{number}")], ["sum"])
        assert same(module(X, Y), 3)

    held = []
    for start in range(0, 2500, 500):  # three rounds fill what is bounded
        for number in range(start, start + 500):
            call(number)
        gc.collect()
        held.append(len(gc.get_objects()))
    # What is kept for each key grows in each round; what else the process keeps does not.
    assert min(after - before for before, after in pairwise(held[2:])) < 500


@pytest.mark.parametrize("strict", [False, True])
def test_a_module_of_several_keys_exports_by_container(strict: bool) -> None:
    module = TensorDictModule(torch.add, ["a", ("n", "b")], ["y"])
    td = TensorDict({"a": torch.ones(3), "n": {"b": torch.full((3,), 2.0)}})
    program = torch.export.export(module, (td,), strict=strict)
    assert torch.equal(program.module()(td)["y"], torch.full((3,), 3.0))
    with pytest.raises(TypeError, match="missing a required argument"):
        inspect.signature(module).bind(torch.ones(3))


@pytest.mark.parametrize("strict", [False, True])
def test_a_module_exports_by_container_with_the_one_to_write(strict: bool) -> None:
    def given(rows: int) -> dict[str, TensorDict]:
        td = TensorDict({"a": torch.ones(rows), "n": {"b": torch.full((rows,), 2.0)}})
        return {"tensordict": td, "tensordict_out": TensorDict(kept=torch.zeros(rows))}

    module = TensorDictModule(torch.add, ["a", ("n", "b")], ["y"])
    rows = {0: torch.export.Dim("batch")}
    shapes = {"tensordict": [rows, rows], "tensordict_out": [rows]}
    program = torch.export.export(module, (), given(3), dynamic_shapes=shapes, strict=strict)
    found = program.module()(**given(5))
    assert list(found.keys()) == ["kept", "y"]
    assert torch.equal(found["y"], torch.full((5,), 3.0))
    first = given(3).pop("tensordict")
    out = TensorDict(kept=torch.zeros(3))
    program = torch.export.export(module, (first,), {"tensordict_out": out}, strict=strict)
    assert list(program.module()(first, tensordict_out=out).keys()) == ["kept", "y"]
    assert list(first.keys()) == ["a", "n"]


def test_functions_and_other_things_are_refused_when_they_are_decorated() -> None:
    with pytest.raises(InvalidArgument, match=r"got `double\(td\)`. For a function .*`Tens"):

        @dispatch(source=["x"], dest=["y"])
        def double(td):  # type: ignore[no-untyped-def]  # as users write it
            return td

    with pytest.raises(InvalidArgument, match=r"`f` is a function, and has no attributes"):

        @dispatch
        def f(tensordict: TensorDictBase) -> TensorDictBase:
            return tensordict

    with pytest.raises(InvalidArgument, match="decorates a method, got 3"):
        dispatch(3)  # type: ignore[call-overload]  # wrong on purpose


def test_a_method_that_returns_no_container_is_told() -> None:
    class Silent(nn.Module):
        in_keys = ["x"]  # noqa: RUF012  # as users write it
        out_keys = ["y"]  # noqa: RUF012  # as users write it

        @dispatch
        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:  # type: ignore[return]  # wrong on purpose
            tensordict["y"] = tensordict["x"]

    with pytest.raises(InvalidArgument, match="`Silent` must return a container, got NoneType"):
        Silent()(torch.ones(2))


@pytest.mark.skipif(
    sys.version_info < (3, 14), reason="older Pythons compute annotations with the function"
)
def test_annotations_may_name_what_only_type_checkers_import() -> None:
    class Twice(TensorDictModuleBase):
        in_keys: ClassVar = ["x"]  # type: ignore[misc]  # as users declare them
        out_keys: ClassVar = ["y"]  # type: ignore[misc]  # as above

        @dispatch
        def forward(self, td: Missing) -> Missing:  # type: ignore[name-defined]  # noqa: F821  # late
            return td.set("y", td["x"] * 2)

    assert same(Twice()(x=X), 2.0)


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_a_call_with_tensors_lacks_is_none_as_in_a_container(wrapped: bool) -> None:
    def plus(x: Tensor, h: Tensor | None) -> Tensor:
        return x if h is None else x + h

    module: TensorDictModuleBase = TensorDictModule(plus, ["x", "h"], ["y"])
    lacking: TensorDictModuleBase = TensorDictModule(torch.add, ["x", "h"], ["y"])
    if wrapped:
        more = TensorDictModule(torch.neg, ["y"], ["z"])
        module, lacking = TensorDictSequential(module, more), TensorDictSequential(lacking, more)
        module.select_out_keys("y")
    one = torch.ones(2)
    for _ in range(3):
        assert torch.equal(cast(Tensor, module(x=one)), one)
        assert torch.equal(cast(Tensor, module(one)), one)
        with pytest.raises(DispatchError, match=r"is missing `h`. Accepted: `x`, `h`") as caught:
            lacking(x=one)
        assert isinstance(caught.value, KeyError)


def test_a_function_of_a_container_is_called_with_tensors() -> None:
    @dispatch(source=["x"], dest=["y"])
    def scale(tensordict: TensorDictBase, k: float = 1.0) -> TensorDictBase:
        return tensordict.set("y", tensordict["x"] * k)

    call: Any = scale
    x = torch.ones(2)
    td = TensorDict(x=x)
    assert call(td, k=3.0) is td
    for got in (call(x, k=3.0), call(x=x, k=3.0), td["y"]):
        assert torch.equal(got, x * 3)
    with pytest.raises(DispatchError, match="`scale` has no argument `z`"):
        call(x=x, z=x)
