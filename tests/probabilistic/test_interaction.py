import asyncio
import threading

import pytest
import torch
from torch import Tensor

from kd_probabilistic import InteractionType, interaction_type, set_interaction_type


@pytest.mark.parametrize("name", ["mode", "MEDIAN", "Mean", "random", "DETERMINISTIC"])
def test_members_are_found_by_name_in_any_case(name: str) -> None:
    assert InteractionType(name) is InteractionType[name.upper()]


def test_unknown_type_lists_the_members() -> None:
    with pytest.raises(
        ValueError,
        match=r"`means` is not a valid interaction type.*`mean`, `random`.*Did you mean `mean`\?",
    ):
        set_interaction_type("means")


def test_other_objects_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="member of `InteractionType` or its name, got 3"):
        set_interaction_type(3)  # type: ignore[arg-type]  # wrong on purpose


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
