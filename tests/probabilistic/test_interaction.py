import asyncio
import inspect
import threading
from collections.abc import AsyncGenerator, Generator

import pytest
import torch
from torch import Tensor

from kd_core import NestedKey
from kd_nn import set_skip_existing, skip_existing
from kd_probabilistic import InteractionType, interaction_type, set_interaction_type


@pytest.mark.parametrize("name", ["mode", "MEDIAN", "Mean", "random", "DETERMINISTIC"])
def test_members_are_found_by_name_in_any_case(name: str) -> None:
    assert InteractionType(name) is InteractionType[name.upper()]
    assert InteractionType.from_str(name) is InteractionType[name.upper()]


def test_unknown_type_lists_the_members() -> None:
    with pytest.raises(
        ValueError,
        match=r"`means` is not a valid interaction type.*`mean`, `random`.*Did you mean `mean`\?",
    ):
        set_interaction_type("means")
    with pytest.raises(ValueError, match=r"`medain` is not .*Did you mean `median`\?"):
        InteractionType.from_str("medain")


def test_other_objects_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="member of `InteractionType` or its name, got 3"):
        set_interaction_type(3)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError, match="member of `InteractionType` or its name, got 3"):
        InteractionType.from_str(3)  # type: ignore[arg-type]  # wrong on purpose


def test_scopes_nest_and_end_with_an_exception() -> None:
    assert interaction_type() is None
    with set_interaction_type("mode"):
        with pytest.raises(KeyError), set_interaction_type("mean"):
            raise KeyError(interaction_type())
        with set_interaction_type(None):
            assert interaction_type() is None
        assert interaction_type() is InteractionType.MODE
    assert interaction_type() is None


def test_one_scope_object_may_be_entered_again() -> None:
    scope = set_interaction_type("mode")
    with scope, set_interaction_type("mean"), scope:
        assert interaction_type() is InteractionType.MODE
    assert interaction_type() is None


def test_decorated_function_runs_in_its_scope() -> None:
    @set_interaction_type("random")
    def inside(depth: int) -> list[InteractionType | None]:
        return [interaction_type(), *(inside(depth - 1) if depth else [])]

    assert inside(2) == [InteractionType.RANDOM] * 3
    assert interaction_type() is None


def test_decorated_coroutine_runs_in_its_scope() -> None:
    @set_interaction_type("random")
    async def inside() -> InteractionType | None:
        await asyncio.sleep(0)
        return interaction_type()

    assert asyncio.run(inside()) is InteractionType.RANDOM
    assert inspect.iscoroutinefunction(inside)


def test_decorated_generator_runs_in_its_scope_and_its_caller_does_not() -> None:
    @set_interaction_type("random")
    def inside() -> Generator[InteractionType | None, str, str]:
        try:
            got = yield interaction_type()
        except KeyError:
            got = "raised"
        yield interaction_type()
        return got

    for expected in ("sent", "raised"):
        generator = inside()
        assert next(generator) is InteractionType.RANDOM
        assert interaction_type() is None
        seen = generator.send("sent") if expected == "sent" else generator.throw(KeyError())
        assert seen is InteractionType.RANDOM
        with pytest.raises(StopIteration, match=expected):
            next(generator)
    closed = inside()
    next(closed)
    closed.close()
    assert interaction_type() is None


def test_class_and_asynchronous_generator_are_refused() -> None:
    async def steps() -> AsyncGenerator[int]:
        yield 1

    for wrong in (InteractionType, steps):
        with pytest.raises(
            TypeError, match=r"decorates a function, got the .*Decorate its methods"
        ):
            set_interaction_type("random")(wrong)


def test_tasks_that_leave_in_turn_leave_nothing_to_compiled_code() -> None:
    async def task(name: str, turns: int) -> None:
        with set_interaction_type(name):
            for _ in range(turns):
                await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(task("random", 1), task("mode", 3))

    def shift(x: Tensor) -> Tensor:
        return x if interaction_type() is None else x + 1

    asyncio.run(both())
    assert torch.compile(shift, backend="eager", fullgraph=True)(torch.zeros(())) == 0


def test_threads_do_not_see_a_scope() -> None:
    seen: list[InteractionType | None] = []
    with set_interaction_type("mean"):
        thread = threading.Thread(target=lambda: seen.append(interaction_type()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_tasks_do_not_see_each_others_scope() -> None:
    async def task(name: str, turn: asyncio.Barrier) -> InteractionType | None:
        with set_interaction_type(name):
            await turn.wait()
            return interaction_type()

    async def both() -> tuple[InteractionType | None, InteractionType | None]:
        turn = asyncio.Barrier(2)
        return await asyncio.gather(task("mean", turn), task("mode", turn))

    assert list(asyncio.run(both())) == [InteractionType.MEAN, InteractionType.MODE]


def test_compiled_code_follows_the_scope_around_and_inside_it() -> None:
    def shift(x: Tensor) -> Tensor:
        kind = interaction_type()
        if kind is InteractionType.DETERMINISTIC:
            return x + 4
        return x + 2 if kind is InteractionType.MEAN else x

    def scoped(x: Tensor) -> Tensor:
        with set_interaction_type(InteractionType.DETERMINISTIC):
            return shift(x)

    torch._dynamo.reset()
    compiled = torch.compile(shift, fullgraph=True, backend="eager")
    zero = torch.zeros(())
    assert compiled(zero) == 0
    with set_interaction_type("mean"):
        assert compiled(zero) == 2
    assert compiled(zero) == 0
    assert torch.compile(scoped, fullgraph=True, backend="eager")(zero) == 4
    assert interaction_type() is None


def test_a_scope_that_compiled_code_enters_holds_after_a_graph_break() -> None:
    def scoped(x: Tensor) -> tuple[Tensor, InteractionType | None, bool | list[NestedKey]]:
        with set_interaction_type("mode"), set_skip_existing(True):
            y = x + 1
            torch._dynamo.graph_break()
            return y + 1, interaction_type(), skip_existing()

    found = torch.compile(scoped, backend="eager")(torch.zeros(2))
    assert found[1:] == (InteractionType.MODE, True)
    assert interaction_type() is None
    assert skip_existing() is False
