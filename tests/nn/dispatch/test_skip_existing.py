import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from kd_core import InvalidArgument, TensorDict, TensorDictBase
from kd_nn import (
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    set_skip_existing,
    skip_existing,
)

Step: TypeAlias = Callable[[TensorDictBase], TensorDictBase]

X, OLD = torch.ones(2), torch.zeros(2)


def test_module_whose_outputs_exist_is_skipped() -> None:
    module = TensorDictModule(torch.neg, ["x"], ["y"])
    module(TensorDict(x=X))
    with set_skip_existing(True):
        assert module(TensorDict(x=X, y=OLD))["y"] is OLD
        assert torch.equal(module(TensorDict(x=X))["y"], -X)
    assert torch.equal(module(TensorDict(x=X, y=OLD))["y"], -X)


def test_module_that_discards_an_output_is_not_skipped() -> None:
    module = TensorDictModule(lambda x: (-x, x), ["x"], ["y", "_"])
    for model in (module, TensorDictSequential(module)):
        for _ in range(12):
            with set_skip_existing(True):
                assert torch.equal(model(TensorDict(x=X, y=OLD))["y"], -X)


def test_module_that_reads_its_output_is_not_skipped() -> None:
    module = TensorDictModule(torch.neg, ["x"], ["x"])
    with set_skip_existing(True):
        assert torch.equal(module(TensorDict(x=X))["x"], -X)


def test_steps_of_a_sequence_are_skipped_one_by_one() -> None:
    ran: list[str] = []

    def step(name: str, reads: str) -> TensorDictModule:
        def function(value: Tensor) -> Tensor:
            ran.append(name)
            return value + 1

        return TensorDictModule(function, [reads], [name])

    model = TensorDictSequential(step("a", "x"), step("b", "a"))
    model(TensorDict(x=X))
    ran.clear()
    with set_skip_existing(True):
        td = model(TensorDict(x=X, a=OLD))
    assert ran == ["b"]
    assert torch.equal(td["b"], OLD + 1)


def test_sequence_inside_whose_outputs_exist_is_skipped_as_a_whole() -> None:
    calls: list[Tensor] = []

    def first(x: Tensor) -> Tensor:
        calls.append(x)
        return x

    inner = TensorDictSequential(
        TensorDictModule(first, ["x"], ["hidden"]), TensorDictModule(torch.neg, ["hidden"], ["y"])
    ).select_out_keys("y")
    outer = TensorDictSequential(inner, TensorDictModule(torch.exp, ["y"], ["z"]))
    with set_skip_existing(True):
        td = outer(TensorDict(x=torch.ones(2), y=torch.zeros(2)))
    assert calls == []
    assert td["z"].tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore::kd_nn.KeyGraphWarning")
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_earlier_output_stays_where_the_later_writer_is_skipped(depth: int) -> None:
    model = TensorDictSequential(
        TensorDictModule(torch.neg, ["a"], ["y"]), TensorDictModule(torch.exp, ["b"], ["y"])
    )
    for _ in range(depth):
        model = TensorDictSequential(model)
    with set_skip_existing(True):
        td = model(TensorDict(a=torch.ones(2), b=torch.zeros(2)))
    assert td["y"].tolist() == [-1.0, -1.0]
    assert model(td)["y"].tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore::kd_nn.KeyGraphWarning")
def test_hidden_output_that_decides_what_is_skipped_is_computed() -> None:
    model = TensorDictSequential(
        TensorDictModule(torch.neg, ["a"], ["hidden"]),
        TensorDictModule(lambda b: (b, b), ["b"], ["hidden", "y"]),
        TensorDictModule(torch.exp, ["b"], ["z"]),
    ).select_out_keys("y", "z")
    with set_skip_existing(True):
        td = model(TensorDict(a=torch.ones(2), b=torch.ones(2), y=torch.zeros(2)))
    assert td["y"].tolist() == [0.0, 0.0]


def test_contexts_nest_and_end() -> None:
    with set_skip_existing(True):
        with set_skip_existing(False):
            assert not skip_existing()
        assert skip_existing()
    assert not skip_existing()


def test_another_thread_does_not_see_the_switch() -> None:
    module = TensorDictModule(torch.neg, ["x"], ["y"])
    seen: list[Tensor] = []
    with set_skip_existing(True):
        worker = threading.Thread(target=lambda: seen.append(module(TensorDict(x=X, y=OLD))["y"]))
        worker.start()
        worker.join()
    assert torch.equal(seen[0], -X)


def decorated(mode: bool | None, seen: list[bool] | None = None) -> TensorDictModuleBase:
    class Custom(TensorDictModuleBase):
        in_keys = ["x"]  # noqa: RUF012  # as users write it
        out_keys = ["y"]  # noqa: RUF012  # as users write it

        @set_skip_existing(mode)
        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            if seen is not None:
                seen.append(skip_existing() is True)
            return tensordict.set("y", tensordict["x"] + 1)

    return Custom()


@pytest.mark.parametrize(("mode", "skipped", "inside"), [(True, 2, True), (False, 0, False)])
def test_decorated_forward_has_its_own_switch(mode: bool, skipped: int, inside: bool) -> None:
    seen: list[bool] = []
    module = decorated(mode, seen)
    results = [module(TensorDict(x=X, y=OLD))["y"]]
    with set_skip_existing(not mode):
        results.append(module(TensorDict(x=X, y=OLD))["y"])
    assert sum(result is OLD for result in results) == skipped
    module(TensorDict(x=X))
    assert set(seen) == {inside}
    assert not skip_existing()


def test_decorated_with_none_follows_the_switch() -> None:
    module = decorated(None)
    assert torch.equal(module(TensorDict(x=X, y=OLD))["y"], X + 1)
    with set_skip_existing(True):
        assert module(TensorDict(x=X, y=OLD))["y"] is OLD
        with set_skip_existing(False):
            assert torch.equal(module(TensorDict(x=X, y=OLD))["y"], X + 1)


def test_decorated_with_none_compiles_in_one_graph() -> None:
    module = torch.compile(decorated(None), backend="eager", fullgraph=True)
    assert torch.equal(module(TensorDict(x=X, y=OLD))["y"], X + 1)


@pytest.fixture
def _compiled_anew() -> Iterator[None]:
    """All modules of a class share the frames that torch compiles at most eight times."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled_and_plain() -> list[tuple[Step, Step]]:
    first = TensorDictModule(torch.neg, ["x"], ["y"])
    outer = TensorDictSequential(
        TensorDictSequential(first), TensorDictModule(torch.exp, ["y"], ["z"])
    )

    def scoped(tensordict: TensorDictBase) -> TensorDictBase:
        with set_skip_existing(True):
            tensordict = outer(tensordict)
        return tensordict.set("later", first(tensordict.copy())["y"])

    steps: list[Step] = [first, outer, decorated(True), decorated(False), decorated(None), scoped]
    return [(torch.compile(step, backend="eager", fullgraph=True), step) for step in steps]


@pytest.mark.parametrize("number", range(6))
@pytest.mark.usefixtures("_compiled_anew")
def test_compiled_code_follows_the_switch(number: int) -> None:
    compiled, step = compiled_and_plain()[number]
    for mode in (False, True, False, None, True):
        with contextlib.nullcontext() if mode is None else set_skip_existing(mode):
            for given in ({"x": X, "y": OLD}, {"x": X}):
                result, expected = (run(TensorDict(given)) for run in (compiled, step))
                assert list(result.keys()) == list(expected.keys())
                assert (result == expected).all()
    assert not skip_existing()


@pytest.mark.usefixtures("_compiled_anew")
def test_compiled_code_of_another_thread_does_not_see_the_switch() -> None:
    compiled, _ = compiled_and_plain()[1]
    seen: list[Tensor] = []
    with set_skip_existing(True):
        assert torch.equal(compiled(TensorDict(x=X, y=OLD))["y"], OLD)
        worker = threading.Thread(target=lambda: seen.append(compiled(TensorDict(x=X, y=OLD))["y"]))
        worker.start()
        worker.join()
        assert torch.equal(compiled(TensorDict(x=X, y=OLD))["y"], OLD)
    assert torch.equal(seen[0], -X)


def test_modes_that_mean_nothing_are_refused() -> None:
    with pytest.raises(
        InvalidArgument, match=r"must be True, False, None or a list of keys, got 3"
    ):
        set_skip_existing(3)  # type: ignore[arg-type]  # wrong on purpose
    with (
        pytest.raises(InvalidArgument, match="`mode` must be True or False"),
        set_skip_existing(None),
    ):
        pass


def test_a_list_of_keys_skips_what_writes_one_of_them() -> None:
    module = TensorDictModule(torch.neg, ["x"], ["y"])
    td = TensorDict(x=torch.ones(2), y=torch.zeros(2))
    with set_skip_existing(["y"], thread_local=True).clone():
        assert skip_existing() == ["y"]
        assert not module(td)["y"].any()
    with set_skip_existing(["q", ("n", "z")]):
        assert module(td)["y"].all()
    assert skip_existing() is False
