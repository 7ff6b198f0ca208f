"""Random chains of probabilistic steps, beside dicts of tensors and distributions of torch."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from random import Random
from typing import Any, cast

import torch
from tests.fuzz.chain_worlds import World, a_world, able, inputs
from tests.fuzz.chains import ChainRunner, Draw, Laws, Walked, added
from tests.fuzz.conftest import Seeds
from tests.fuzz.data import of_rows
from tests.fuzz.laws import log_prob
from tests.fuzz.plain_models import (
    DISCARD,
    Key,
    State,
    copy_of,
    every_leaf,
    flat,
    has,
    look_up,
    put,
    taken,
)
from tests.fuzz.plan_events import INTERNAL, key
from torch import Tensor
from torch.distributions import Distribution

from kd_core import TensorDict, TensorDictBase
from kd_nn import set_skip_existing
from kd_probabilistic import CompositeDistribution, set_interaction_type


def nested(given: dict[Key, Any]) -> State:
    state: State = {}
    for at, value in given.items():
        put(state, at, value)
    return state


class Case:
    """One call on values that are given to both."""

    def __init__(self, world: World, rng: Random, batch: tuple[int, ...]) -> None:
        self.world, self.rng, self.batch = world, rng, batch
        given: dict[Key, Any] = dict(inputs(batch, rng.random() < 0.3))
        if rng.random() < 0.15:
            del given[rng.choice([*given])]
        if rng.random() < 0.8:
            given["seed",] = rng.randrange(50)
        self.given = given
        every = [
            kind
            for kind in ("mean", "mode", "median", "deterministic")
            if all(able(law, kind) for draw in self.draws() for law in draw.laws.values())
        ]
        self.asked = rng.choice([None, None, "random", *every])
        self.seed = rng.randrange(1000)
        self.skips = rng.random() < 0.2

    def draws(self) -> list[Draw]:
        return [leaf for leaf in every_leaf(self.world.chain) if isinstance(leaf, Draw)]

    def runner(self, batch: tuple[int, ...] | None = None) -> ChainRunner:
        world = self.world
        nets = world.twins
        return ChainRunner(
            nets,
            self.batch if batch is None else batch,
            asked=self.asked,
            skips=self.skips,
        )

    def container(self, given: dict[Key, Any] | None = None) -> TensorDict:
        td = TensorDict({}, self.batch)
        for at, value in (self.given if given is None else given).items():
            if isinstance(value, int):
                td.set_non_tensor(key(at), value)
            else:
                td.set(key(at), value)
        return td

    def target(self) -> TensorDict | None:
        """Return a container to write, or None."""
        return self.rng.choice([None, TensorDict({"kept": torch.ones(self.batch)}, self.batch)])

    def scope(self) -> Any:
        return nullcontext() if self.asked is None else set_interaction_type(self.asked)


def generators(world: World) -> list[Tensor | None]:
    """Return the states of the generators of the reference."""
    return [
        None if leaf.generator is None else leaf.generator.get_state()
        for leaf in every_leaf(world.chain)
        if isinstance(leaf, Draw)
    ]


def agree(found: object, wanted: object) -> None:
    """Compare two values: to the bit."""
    if wanted is None or isinstance(wanted, int):
        assert all(each == wanted for each in of_rows(found))  # one for each row after a stack
        return
    assert isinstance(found, Tensor), found
    assert isinstance(wanted, Tensor)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert found.requires_grad == wanted.requires_grad


def same(found: TensorDictBase, wanted: State) -> None:
    mine, theirs = flat(found.to_dict()), flat(wanted)
    assert set(mine) == set(theirs), (list(mine), list(theirs))
    for at, value in theirs.items():
        agree(mine[at], value)


def untouched(td: TensorDictBase, before: dict[Key, Any]) -> None:
    """Check that a container holds exactly the values that it held."""
    now = flat(td.to_dict())
    assert list(now) == list(flat(nested(before)))
    for at, value in before.items():
        assert now[at] is value or (isinstance(value, int) and now[at] == value)


def attempt(what: Any) -> tuple[Any, Exception | None]:
    try:
        return what(), None
    except Exception as error:
        return None, error


def both(case: Case, plain: Any, keyed: Any) -> tuple[Any, Any] | None:
    """Run both with the same seed; both give a result, or both refuse."""
    torch.manual_seed(case.seed)
    wanted, refused = attempt(plain)
    follows = torch.rand(1)
    torch.manual_seed(case.seed)
    switch = set_skip_existing(True) if case.skips else nullcontext()
    with case.scope(), switch:
        found, error = attempt(keyed)
    if refused is not None:
        assert error is not None, f"refused: {refused!r}"
        assert not isinstance(error, INTERNAL), error
        restart(case.world)
        return None
    if error is not None:
        raise error
    assert torch.equal(torch.rand(1), follows), "the global generator stands elsewhere"
    return found, wanted


def restart(world: World) -> None:
    """Seed the generators anew: which steps drew before an error is left open."""
    for leaf in every_leaf(world.chain):
        if isinstance(leaf, Draw) and leaf.seed is not None and leaf.source is None:
            leaf.generator = None
            module = cast(Any, leaf.model)
            getattr(module, "module", module).generator = leaf.seed


def check_call(case: Case) -> bool:
    """Call with a container, or with another one to be written."""
    state = nested(case.given)
    td = case.container()
    form = case.rng.choice(["same", "same", "out"])
    out = TensorDict({"kept": torch.ones(case.batch)}, case.batch)

    def plain() -> State:
        work = copy_of(state)
        case.runner().run(case.world.chain, work)
        return work

    def keyed() -> TensorDictBase:
        if form == "same":
            return case.world.model(td)
        return case.world.model(td, tensordict_out=out)

    result = both(case, plain, keyed)
    if result is None:
        untouched(td, case.given)
        assert list(out.keys()) == ["kept"]
        return False
    found, wanted = result
    if form == "same":
        assert found is td
        same(td, wanted)
        return True
    untouched(td, case.given)
    if case.skips and found is td:
        return True
    assert found is out
    same(out, {"kept": out["kept"], **taken(wanted, case.world.chain.visible())})
    return True


def optional(state: State, at: Key) -> object:
    """Return a value, None if there is none."""
    return look_up(state, at) if has(state, at) else None


def check_keyword(case: Case) -> bool:
    """Call with tensors."""
    chain = case.world.chain
    case.skips = False
    reads = chain.in_keys()
    case.given = {at: v for at, v in case.given.items() if at in reads}
    for at, value in case.given.items():
        if isinstance(value, int):
            case.given[at] = torch.tensor(value)
    if not chain.may_skip() and any(at not in case.given for at in reads):
        return False
    state = nested(case.given)

    def plain() -> list[object]:
        work = copy_of(state)
        case.runner(()).run(chain, work)
        return [optional(work, at) for at in chain.visible() if at != DISCARD]

    def keyed() -> list[object]:
        args = {"_".join(at): v for at, v in case.given.items()}
        if case.rng.random() < 0.3 and len(args) == len(reads):
            out = case.world.model(*[case.given[at] for at in reads])
        else:
            out = case.world.model(**args)
        return list(out) if isinstance(out, tuple) else [out]

    result = both(case, plain, keyed)
    if result is None:
        return False
    for found, wanted in zip(*result, strict=True):
        agree(found, wanted)
    return True


def compare_dist(found: Distribution, wanted: Laws, batch: tuple[int, ...]) -> None:
    """Compare distributions by what they are and what they draw."""
    if isinstance(found, CompositeDistribution):
        assert [*found.keys()] == [key(at) for at in wanted]
        parts = [found[key(at)] for at in wanted]
        assert tuple(found.batch_shape) == batch
    else:
        assert len(wanted) == 1
        parts = [found]
    for mine, theirs in zip(parts, wanted.values(), strict=True):
        assert type(mine) is type(theirs)
        assert mine.batch_shape == theirs.batch_shape
        torch.manual_seed(0)
        value = theirs.sample()
        torch.manual_seed(0)
        assert torch.equal(mine.sample(), value)
        agree(log_prob(mine, value), log_prob(theirs, value))


def check_dist(case: Case) -> bool:
    """Ask for the distribution, or its parameters."""
    chain = case.world.chain
    case.skips = False
    if case.rng.random() < 0.5:  # values that are there are drawn again
        for draw in case.draws():
            case.given.update(
                {
                    at: torch.zeros(*case.batch, 2)
                    for at in draw.laws
                    if at not in case.given and at != DISCARD
                }
            )
    td = case.container()
    what = case.rng.choice(["get_dist", "get_dist_params"])
    out = case.target()

    def plain() -> tuple[Walked, Laws]:
        walk = Walked(case.runner(), copy_of(nested(case.given)))
        if what == "get_dist_params":
            walk.parameters(chain)
            return walk, {}
        walk.visit(chain, False)
        return walk, walk.all_laws() if walk.all else walk.found[-1][1]

    result = both(case, plain, lambda: getattr(case.world.model, what)(td, out))
    writes = what == "get_dist_params" or result is None or not result[1][0].all
    check_written(case, td, out, None if result is None else result[1][0], writes)
    if result is None:
        return False
    found, (_, laws) = result
    if what == "get_dist":
        compare_dist(found, laws, case.batch)
    else:
        assert found is (td if out is None else out)
    return True


def check_written(
    case: Case, td: TensorDict, out: TensorDict | None, walk: Walked | None, writes: bool
) -> None:
    """Check that what the steps wrote is in the container to write, and all else is as it was.

    Args:
        case: What was given.
        td: The container that was read.
        out: The container to write in its place, if there is one.
        walk: What the steps wrote; None if the call was refused.
        writes: Whether the container that was read is written without another one.
    """
    if out is not None:
        same(out, with_steps({"kept": torch.ones(out.batch_size)}, walk))
    if out is not None or walk is None or not writes:
        untouched(td, case.given)
        return
    same(td, with_steps(nested(case.given), walk))
    now = flat(td.to_dict())
    kept = [at for at in case.given if at not in walk.written]
    assert all(now[at] is case.given[at] or isinstance(now[at], int) for at in kept)


def with_steps(state: State, walk: Walked | None) -> State:
    """Return entries with those that the steps wrote."""
    for at in [] if walk is None else walk.written:
        if walk is not None and has(walk.state, at):
            put(state, at, look_up(walk.state, at))
    return state


def check_log_prob(case: Case) -> bool:
    """Score values that are there, of all steps or of some."""
    chain = case.world.chain
    case.skips = False
    aggregate = case.rng.choice([None, True, False])
    torch.manual_seed(case.seed)
    state = nested(case.given)
    try:
        case.runner().run(chain, state)
    except Exception:
        restart(case.world)
        return False
    restart(case.world)
    for draw in case.draws():
        for at in draw.laws:
            there = at != DISCARD and has(state, at) and case.rng.random() < 0.9
            if there and isinstance(value := look_up(state, at), Tensor):
                case.given[at] = value
    td, out = case.container(), case.target()

    def plain() -> tuple[Walked, State | Tensor]:
        walk = Walked(case.runner(), copy_of(nested(case.given)), keeps=True)
        walk.visit(chain, True)
        return walk, scored(case, walk, aggregate)

    def keyed() -> object:
        return case.world.model.log_prob(td, out, aggregate=aggregate)

    result = both(case, plain, keyed)
    writes = result is None or not result[1][0].all
    check_written(case, td, out, None if result is None else result[1][0], writes)
    if result is None:
        return False
    found, (_, wanted) = result
    if isinstance(wanted, Tensor):
        agree(found, wanted)
    else:
        same(found, wanted)
    return True


def scored(case: Case, walk: Walked, aggregate: bool | None) -> State | Tensor:
    """Return what `log_prob` gives."""
    batch = len(case.batch)

    def values(draw: Draw) -> dict[Key, Tensor]:
        return {at: cast(Tensor, look_up(walk.state, at)) for at in draw.laws}

    if not walk.all or len(walk.found) == 1:
        draw, laws = walk.found[-1]
        if walk.all:
            walk.all_laws()
        if walk.all and not draw.several:
            ((at, law),) = laws.items()
            part = log_prob(law, values(draw)[at])
            if aggregate:
                return added({at: part}, laws, batch)
            return nested({draw.log_probs[0]: part})
        found = draw.scored(laws, values(draw), batch, aggregate)
        if isinstance(found, Tensor) or draw.several:
            return found if isinstance(found, Tensor) else nested(found)
        return next(iter(found.values()))
    every = walk.all_laws()
    if aggregate:
        parts = {}
        for draw, laws in walk.found:
            parts.update({at: log_prob(law, values(draw)[at]) for at, law in laws.items()})
        return added(parts, every, batch)
    made: State = {}
    for draw, laws in walk.found:
        found = draw.scored(laws, values(draw), batch, aggregate)
        if isinstance(found, Tensor):
            found = {draw.log_probs[0]: found}
        for at, value in found.items():
            put(made, at, value)
    return made


def change(world: World, rng: Random) -> None:
    """Change a setting of a step, what is selected, or the module for a copy."""
    draws = [leaf for leaf in every_leaf(world.chain) if isinstance(leaf, Draw)]
    draw = rng.choice(draws)
    module = cast(Any, draw.model)
    module = getattr(module, "module", module)
    what = rng.choice(["kind", "seed", "weights", "select", "reset", "copy", "cache"])
    world.history.append(what)
    if what == "kind":
        draw.kind = rng.choice(["random", "deterministic"])
        module.default_interaction_type = draw.kind
    elif what == "seed":
        draw.seed, draw.generator = rng.choice([None, rng.randrange(99)]), None
        draw.source = None
        module.generator = draw.seed
        draw.settle()
    elif what == "weights":
        for net, twin in zip(world.nets, world.twins, strict=True):
            for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
                mine.data += 0.1
                theirs.data += 0.1
    elif what == "select":
        visible = world.chain.written()
        world.chain.selected = rng.sample(visible, rng.randint(1, len(visible)))
        world.model.select_out_keys(*[key(at) for at in world.chain.selected])
    elif what == "reset":
        world.chain.selected = None
        world.model.reset_out_keys()
    elif what == "cache":
        draw.caches = module.cache_dist = not draw.caches


CHECKS = [check_call, check_call, check_keyword, check_dist, check_log_prob]


def test_random_chains_do_what_dicts_and_torch_do(seeds: Seeds) -> None:
    for seed in seeds(10):
        rng = Random(seed)
        torch.manual_seed(seed)
        world = a_world(rng)
        for _ in range(rng.randint(2, 5)):
            for _ in range(3):
                check = rng.choice(CHECKS)
                batch = rng.choice([(3,), (3,), (), (0,), (2, 3)])
                done = check(Case(world, rng, batch))
                seeds.count(f"{check.__name__} {'accepted' if done else 'refused'}")
            change(world, rng)
            if rng.random() < 0.1:
                world = copy.deepcopy(world)
