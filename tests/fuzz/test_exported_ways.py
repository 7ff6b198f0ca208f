"""Random sequences exported by keyword, by container and by kd_export, beside the eager calls.

Each is exported at one batch size and run at others.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any, cast

import pytest
import torch
from tests.fuzz.conftest import Seeds
from tests.fuzz.exporting import Given, a_model, container, inputs
from tests.fuzz.plain_models import DISCARD, Key, flat
from torch import Tensor
from torch.export import Dim, export
from torch.utils import _pytree as pytree

import kd_export
from kd_core import TensorDict, TensorDictBase, unravel_key_to_tuple
from kd_nn import TensorDictSequential

SIZES = (3, 2, 7)
ROWS = {0: Dim("batch")}


def leaves(value: object, head: Key = ()) -> dict[Key, object]:
    return flat(value.to_dict() if isinstance(value, TensorDictBase) else value, head)


def same(found: object, wanted: object) -> None:
    """Compare values, and the keys of containers, which torch sorts."""
    mine, theirs = leaves(found), leaves(wanted)
    assert set(mine) == set(theirs)
    for at, value in theirs.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(mine[at], value, rtol=1e-5, atol=1e-5)
        else:
            assert mine[at] == value


class Case:
    """A sequence with its inputs and its eager results, by batch size."""

    def __init__(self, model: TensorDictSequential, rng: Random) -> None:
        self.model, self.rng, self.strict = model, rng, rng.random() < 0.15
        seed = rng.randrange(1000)
        made = {batch: inputs(model, batch, Random(seed)) for batch in SIZES}
        self.given: dict[int, Given] = {b: given for b, given in made.items() if given}
        self.outputs = [unravel_key_to_tuple(k) for k in model.out_keys if k != DISCARD[0]]

    def target(self, batch: int) -> TensorDict:
        return TensorDict({"kept": torch.ones(batch)}, [batch])

    def eager(self, batch: int) -> tuple[TensorDictBase, list[object], TensorDictBase]:
        """Return what the three ways of calling give."""
        td = container(self.given[batch], batch)
        with torch.no_grad():
            values = self.model(**self.arguments(batch))
            out = self.model(td, tensordict_out=self.target(batch))
            return self.model(td), [*values] if isinstance(values, tuple) else [values], out

    def arguments(self, batch: int) -> dict[str, Any]:
        return {"_".join(path): value for path, value in self.given[batch].items()}


def check_keyword(case: Case) -> None:
    """Export by keyword, in some order."""
    names = [*case.arguments(SIZES[0])]
    case.rng.shuffle(names)
    given = case.arguments(SIZES[0])
    given = {name: given[name] for name in names}
    shapes = pytree.tree_map(lambda value: ROWS if isinstance(value, Tensor) else None, given)
    program = export(case.model, (), given, dynamic_shapes=shapes, strict=case.strict)
    for batch in SIZES:
        given = case.arguments(batch)
        found = program.module()(**{name: given[name] for name in names})
        outputs = [*found] if isinstance(found, tuple) else [found]
        for mine, theirs in zip(outputs, case.eager(batch)[1], strict=True):
            same(mine, theirs)


def check_container(case: Case) -> None:
    """Export by container, by position or by name, into the same or another one."""
    by_name, into = case.rng.random() < 0.3, case.rng.random() < 0.4

    def call(batch: int) -> tuple[tuple[TensorDict, ...], dict[str, TensorDict]]:
        given = case.given[batch]
        shuffled = case.rng.sample([*given], len(given))  # the order of keys does not matter
        td = container({path: given[path] for path in shuffled}, batch)
        further = {"tensordict_out": case.target(batch)} if into else {}
        return ((), {"tensordict": td, **further}) if by_name else ((td,), further)

    args, kwargs = call(SIZES[0])
    containers = [*args, *kwargs.values()]
    shapes = tuple([ROWS for _ in pytree.tree_leaves(each)] for each in containers)
    # dynamo asks for all arguments that no default follows, whatever is given by position.
    strict = case.strict and (by_name or not case.model._kd_optional_in_keys)
    program = export(case.model, args, kwargs, dynamic_shapes=shapes, strict=strict)
    for batch in SIZES:
        args, kwargs = call(batch)
        found, (same_one, _, other) = program.module()(*args, **kwargs), case.eager(batch)
        same(found, other if into else same_one)
        assert found.batch_size == (batch,)


def check_program(case: Case) -> bool:
    """Export by kd_export, and run with each kind of inputs; report whether all were there."""
    model, first = case.model, container(case.given[SIZES[0]], SIZES[0])
    if any(k not in first.keys(True) for k in model.in_keys):
        return False
    if any(not isinstance(value, Tensor) for value in leaves(first).values()):
        return False
    program = kd_export.export(model, first)
    for batch in SIZES:
        td, eager = container(case.given[batch], batch), case.eager(batch)[0]
        wanted: dict[Key, object] = {}
        for path in case.outputs:
            wanted.update(leaves(eager.get(path), path))
        assert [entry.key for entry in program.schema.outputs] == [*wanted]
        by_key = program(leaves(td))
        assert [*by_key] == [*wanted]
        by_wire = program({".".join(at): value for at, value in leaves(td).items()})
        assert [*by_wire] == [".".join(at) for at in wanted]
        kept = {at: value for at, value in leaves(program(td)).items() if at in wanted}
        for found in (by_key.values(), by_wire.values(), [kept[at] for at in wanted]):
            for mine, theirs in zip(found, wanted.values(), strict=True):
                same(mine, theirs)
    refused(case.rng, program, leaves(container(case.given[3], 3)))
    return True


def refused(rng: Random, program: kd_export.KeyedProgram, given: dict[Key, object]) -> None:
    """Check that inputs that do not fit are refused by their names."""
    path = rng.choice([*given])
    value, wire = cast(Tensor, given[path]), ".".join(path)
    wrong: dict[type[kd_export.ExportError], object] = {
        kd_export.ShapeMismatch: rng.choice([value[:, :1], value[None], value.T]),
        kd_export.DtypeMismatch: rng.choice([value.double(), "word", None]),
    }
    for kind, other in wrong.items():
        with pytest.raises(kind, match=f"`{re.escape(wire)}`"):
            program({**given, path: other})
    with pytest.raises(kd_export.KeyMismatch, match=f"`{re.escape(wire)}` not found"):
        program({at: each for at, each in given.items() if at != path})
    with pytest.raises(kd_export.KeyMismatch, match="`more` is not an input"):
        program({**given, ("more",): value})
    if len(given) > 1:
        with pytest.raises(kd_export.ShapeMismatch, match=r"`batch`|batch"):
            program({**given, path: value[:2]})


def test_all_ways_to_export_give_what_eager_calls_give(seeds: Seeds) -> None:
    for seed in seeds(2):
        rng = Random(seed)
        torch.manual_seed(seed)
        case = Case(a_model(rng), rng)
        if len(case.given) < len(SIZES):
            continue
        try:
            case.eager(SIZES[0])
        except Exception:  # what fails eagerly is the matter of another harness
            seeds.count("fail eagerly")
            continue
        check_keyword(case)
        check_container(case)
        seeds.count("all" if check_program(case) else "two ways")
