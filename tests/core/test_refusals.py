"""A call that is refused leaves every kind of container bit-equal, whatever it began with."""

from collections.abc import Callable

import pytest
from tests.core.refusals import LOADED, LOCKED, REFUSED, holds_a_stack, ragged, unharmed
from tests.core.test_failures import KINDS, WRITTEN_AT_ONCE, dense

from kd_core import TensorDictBase, lazy_stack

FACTORIES: dict[str, Callable[[], TensorDictBase]] = {
    **KINDS,
    "stacked last": lambda: lazy_stack(dense().unbind(1), 1),
    "ragged": ragged,
    "holds a stack": holds_a_stack,
}


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_refused_call_leaves_the_container(kind: str) -> None:
    assert len(REFUSED) + len(LOADED) + len(LOCKED) > 95
    refused = {name: REFUSED[name] for name in REFUSED if (kind, name) not in WRITTEN_AT_ONCE}
    assert list(unharmed(FACTORIES[kind], refused)) == list(refused)
    assert list(unharmed(FACTORIES[kind], LOADED)) == list(LOADED)


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_call_that_a_lock_refuses_leaves_the_container(kind: str) -> None:
    assert list(unharmed(lambda: FACTORIES[kind]().lock_(), LOCKED)) == list(LOCKED)


def test_an_unexpected_key_beside_members_is_refused() -> None:
    td = ragged()
    with pytest.raises(KeyError, match="holds `z` beside them"):
        td.load_state_dict({**td.state_dict(), "z": 1})
    assert td.load_state_dict({**td.state_dict(), "z": 1}, strict=False) is td
