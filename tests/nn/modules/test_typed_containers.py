"""Modules read and write the fields of typed containers, and return that container."""

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor

from kd_core import TensorClass, TensorDict, TensorDictBase, lazy_stack
from kd_nn import TensorDictModule, TensorDictSequential, set_skip_existing


class Data(TensorClass):
    x: Tensor
    y: Tensor | None = None
    h: Tensor | None = None
    name: str = "n"


class Pair(TensorClass):
    part: Data
    z: Tensor | None = None


def data() -> Data:
    return Data(x=torch.ones(2, 3), batch_size=[2])


def same(found: object, number: float) -> bool:
    return isinstance(found, Tensor) and bool((found == number).all())


def neg(reads: object, writes: object) -> TensorDictModule:
    return TensorDictModule(torch.neg, [reads], [writes])  # type: ignore[list-item]  # any key


def chain(**options: object) -> TensorDictSequential:
    return TensorDictSequential(neg("x", "h"), neg("h", "y"), **options)  # type: ignore[arg-type]  # any option


MODELS: dict[str, Callable[[], TensorDictModule | TensorDictSequential]] = {
    "module": lambda: neg("x", "y"),
    "sequence": chain,
    "nested": lambda: TensorDictSequential(TensorDictSequential(neg("x", "h")), neg("h", "y")),
    "tolerant": lambda: chain(partial_tolerant=True),
    "selected": lambda: chain().select_out_keys("y"),
}


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_fields_are_written_as_entries_are(name: str, watched: bool) -> None:
    model, plain = MODELS[name](), TensorDict(x=torch.ones(2, 3), batch_size=[2])
    if watched:
        model.register_forward_hook(lambda *_: None)
    for _ in range(3):
        given = data()
        assert model(given) is given
        expected = model(plain.copy())
        for key in ("h", "y"):
            found = getattr(given, key)
            assert found is None if key not in expected else torch.equal(found, expected[key])
        assert given.name == "n"


def test_fields_of_a_container_inside_are_reached_by_a_nested_key() -> None:
    pair = Pair(part=data(), batch_size=[2])
    model = TensorDictSequential(neg(("part", "x"), ("part", "y")), neg(("part", "y"), "z"))
    assert same(model(pair).z, 1)
    whole = TensorDictModule(lambda inner: inner.x * 2, ["part"], ["z"])
    assert same(whole(pair).z, 2)
    assert same(whole(part=data()), 2)


def test_a_result_may_be_a_typed_container() -> None:
    made = TensorDictModule(lambda x: Data(x=x, y=-x, batch_size=[2]), ["x"], ["part"])
    model = TensorDictSequential(made, TensorDictModule(lambda inner: inner.y, ["part"], ["z"]))
    for _ in range(3):
        result = model(TensorDict(x=torch.ones(2, 3), batch_size=[2]))
        assert isinstance(cast("object", result["part"]), Data)
        assert same(result["z"], -1)
    by_name = TensorDictModule(lambda x: Data(x=x, y=-x, batch_size=[2]), ["x"], {"y": "out"})
    assert same(by_name(x=torch.ones(2, 3)), -1)


def test_field_that_is_not_set_is_missing_for_skipping() -> None:
    with set_skip_existing(True):
        assert neg("x", "y")(data()).y is not None
        kept = data()
        kept.y = torch.zeros(2, 3)
        assert neg("x", "y")(kept).y is kept.y
    tolerant = TensorDictSequential(neg("h", "y"), neg("x", "h"), partial_tolerant=True)
    result = tolerant(data())
    assert result.y is None
    assert result.h is not None


def test_key_that_is_no_field_is_refused_and_nothing_is_written() -> None:
    given = data()
    with pytest.raises(AttributeError, match="`nope` is not a field of `Data`"):
        TensorDictModule(lambda x: (x, x), ["x"], ["y", "nope"])(given)
    assert given.y is None


def test_argument_by_name_may_have_more_fields_than_are_read() -> None:
    model = neg(("part", "x"), "z")
    assert same(model(part=data()), -1)
    with pytest.raises(TypeError, match=r"does not read `\('part', 'y'\)`"):
        model(part={"x": torch.ones(1), "y": torch.ones(1)})


def test_members_of_a_stack_keep_their_class() -> None:
    stack: TensorDictBase = lazy_stack([data(), data()])
    chain(partial_tolerant=True)(stack)
    assert all(type(member) is Data for member in stack.unbind(0))
    assert same(stack["y"], 1)
