"""Parts of random chains, and chains that draw several values, beside the same reference."""

from __future__ import annotations

import copy
from dataclasses import replace
from random import Random
from typing import Any, cast

import torch
from tests.fuzz.chain_worlds import World, a_world
from tests.fuzz.chains import Chain, Draw, Laws, Values
from tests.fuzz.conftest import Seeds
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
from tests.fuzz.test_chains import (
    Case,
    agree,
    attempt,
    both,
    check_call,
    check_dist,
    check_keyword,
    check_log_prob,
    compare_dist,
    nested,
    same,
    untouched,
)
from torch import Tensor

from kd_core import TensorDict, TensorDictBase
from kd_nn import TensorDictSequential
from kd_probabilistic import ProbabilisticTensorDictSequential


def with_params(case: Case) -> Case:
    """Give most of the parameters that the steps read."""
    held = [params for draw in case.draws() for params in draw.params.values()]
    for at in [at for params in held for at in params.values()]:
        if case.rng.random() < 0.8:
            case.given.setdefault(at, torch.rand(*case.batch, 2) + 0.5)
    return case


def part_of(world: World, rng: Random) -> World:
    """Return a slice of a chain, as data and as a module."""
    chain, count = world.chain, len(world.chain.steps)
    first = rng.randrange(count)
    where = slice(first, rng.randint(first + 1, count))
    made = Chain(chain.steps[where], chain.tolerant, composite=chain.composite)
    made.probabilistic = made.last() >= 0
    last = made.steps[made.last()] if made.probabilistic else None
    if isinstance(last, Draw) and not last.scores:  # a copy, since only the part may score
        made.steps[made.last()] = scoring = replace(last)
        made.settle()
        if not scoring.scores:
            made.steps[made.last()] = last
    made.model = world.model[where]
    kind = ProbabilisticTensorDictSequential if made.probabilistic else TensorDictSequential
    assert type(made.model) is kind
    part = copy.copy(world)
    part.chain = made
    return part


def check_part(world: World, rng: Random, batch: tuple[int, ...]) -> bool:
    """Call a slice, or ask for its distribution."""
    part = part_of(world, rng)
    checks = [check_call, check_keyword]
    if part.chain.probabilistic:
        checks += [check_dist, check_log_prob]
    return rng.choice(checks)(with_params(Case(part, rng, batch)))


def check_built(world: World, rng: Random, batch: tuple[int, ...]) -> bool:
    """Build the last distribution from its parameters."""
    case = with_params(Case(world, rng, batch))
    case.skips, td = False, case.container()

    def plain() -> Laws:
        return world.chain.draws()[-1].dists(nested(case.given))

    result = both(case, plain, lambda: world.model.build_dist_from_params(td))
    untouched(td, case.given)
    if result is not None:
        compare_dist(*result, batch)
    return result is not None


def check_subsequence(world: World, rng: Random, batch: tuple[int, ...]) -> bool:
    """Run the steps that some outputs need: they are those of the whole chain."""
    case = Case(world, rng, batch)
    visible = world.model.out_keys
    wanted = rng.sample(visible, rng.randint(1, len(visible)))
    part, cause = attempt(lambda: world.model.select_subsequence(out_keys=wanted))
    if cause is not None:
        raise cause
    case.asked, before = "deterministic", case.container()
    with case.scope():
        whole, cause = attempt(lambda: world.model(case.container()))
        if cause is not None:
            return False
        found = part(before)
    keys = whole.keys(True)
    for name in wanted:
        if name not in keys:
            continue
        if name in found.keys(True):
            compare(found, whole, name)
        else:  # a sequence inside, or a part of it, may lack an input
            assert world.chain.may_skip()
    return True


def compare(found: TensorDictBase, whole: TensorDictBase, name: Any) -> None:
    for mine, theirs in zip(
        flat(as_plain(found[name])).values(), flat(as_plain(whole[name])).values(), strict=True
    ):
        agree(mine, theirs)


def as_plain(value: object) -> object:
    return value.to_dict() if isinstance(value, TensorDictBase) else value


def expanded(state: State, sizes: tuple[int, ...]) -> State:
    """Return all tensors with sizes in front."""
    made: State = {}
    for at, value in flat(state).items():
        put(made, at, value.expand(*sizes, *value.shape) if isinstance(value, Tensor) else value)
    return made


def drawn(case: Case, draw: Draw, batch: tuple[int, ...]) -> tuple[State, bool]:
    """Return what is there after a chain whose last step draws several values."""
    chain, state = case.world.chain, nested(case.given)
    runner = case.runner(batch)
    work = copy_of(state)
    before = Chain(chain.steps[:-1], chain.tolerant, probabilistic=False)
    with runner.scope(chain, 0):
        runner.run(before, work)
    if chain.tolerant and runner.lacks(draw, work):
        return work, False
    runner.batch = (*draw.samples, *batch)
    values: Values = runner.written(draw, work)
    made = expanded(work, draw.samples)
    for at in draw.visible():
        runner.fits(values[at])
        put(made, at, values[at])
    for at in chain.written():
        hidden = at not in chain.visible() and not has(state, at)
        if hidden and has(made, at):
            take_away(made, at, state)
    return made, True


def take_away(state: State, at: Key, source: State) -> None:
    """Remove a value, and what is empty without it."""
    holder = cast(State, look_up(state, at[:-1])) if len(at) > 1 else state
    del holder[at[-1]]
    if len(at) > 1 and not holder and not has(source, at[:-1]):
        take_away(state, at[:-1], source)


def check_several(world: World, rng: Random, batch: tuple[int, ...]) -> bool:
    """Let the last step draw several values, into the same, an empty or another container."""
    draw = world.chain.steps[-1]
    if not isinstance(draw, Draw) or draw.scores or DISCARD in draw.laws:
        return False
    case = Case(world, rng, batch)
    case.skips = False
    if not batch:  # data in a container of one row is one value, and has more of them then
        case.given.pop(("seed",), None)
    draw.samples = rng.choice([(2,), (3, 2), (0,)])
    module, form = cast(Any, draw.model), rng.choice(["same", "out", "empty"])
    module.num_samples = draw.samples if rng.random() < 0.5 or len(draw.samples) > 1 else 2
    draw.samples = (2,) if module.num_samples == 2 else draw.samples
    td, out = case.container(), TensorDict({"kept": torch.ones(())})
    world.model.inplace = "empty" if form == "empty" else None

    def keyed() -> TensorDictBase:
        return world.model(td, tensordict_out=out) if form == "out" else world.model(td)

    try:
        result = both(case, lambda: drawn(case, draw, batch), keyed)
    finally:
        draw.samples, module.num_samples, world.model.inplace = (), None, None
    if result is None or not result[1][1]:
        return False
    found, (wanted, _) = result
    if form == "same":  # what the steps before the last wrote stays there, in the old shape
        assert found is not td
        seeds = [leaf.source for leaf in every_leaf(world.chain) if isinstance(leaf, Draw)]
        changed = [*world.chain.written(), *seeds]
        kept = {at: v for at, v in case.given.items() if at not in changed}
        now = {at: v for at, v in flat(td.to_dict()).items() if at in kept}
        assert now.keys() == kept.keys()
        assert all(now[at] is v or (isinstance(v, int) and now[at] == v) for at, v in kept.items())
    else:
        untouched(td, case.given)
    if form != "same":
        wanted = taken(wanted, [at for at in world.chain.visible() if at != DISCARD])
    if form == "out":
        assert found is out
        wanted["kept"] = out["kept"]
    else:
        assert found.batch_size[found.ndim - len(batch) :] == batch
    same(found, wanted)
    return True


CHECKS = [check_part, check_part, check_built, check_subsequence, check_several]


def test_parts_of_random_chains_and_several_draws(seeds: Seeds) -> None:
    for seed in seeds(12):
        rng = Random(seed)
        torch.manual_seed(seed)
        world = a_world(rng)
        for _ in range(6):
            check, batch = rng.choice(CHECKS), rng.choice([(3,), (3,), (), (0,), (2, 3)])
            done = check(world, rng, batch)
            seeds.count(f"{check.__name__} {'accepted' if done else 'refused'}")
