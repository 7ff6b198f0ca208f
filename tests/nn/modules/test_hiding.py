import pytest
import torch
from torch import Tensor

from kd_core import NestedKey, TensorClass, TensorDict, TensorDictBase, lazy_stack
from kd_nn import (
    OutKeyUnknown,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
    dispatch,
)

X, OLD = torch.ones(2), torch.zeros(2)


class Writer(TensorDictModuleBase):
    """Writes all outputs, whatever is selected."""

    def __init__(self, *out_keys: NestedKey, copies: bool = False) -> None:
        super().__init__()
        self.in_keys = ["x"]
        self.out_keys = list(out_keys)
        self.copies = copies

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        made = tensordict.copy() if self.copies else tensordict
        for key in self.out_keys_source:
            made.set(key, tensordict["x"] + 1)
        return made


def names(tensordict: TensorDictBase) -> list[NestedKey]:
    return list(tensordict.keys(True, True))


def test_an_output_that_is_not_selected_is_not_left() -> None:
    module = Writer("y", "z").select_out_keys("z")
    for _ in range(3):
        assert names(module(TensorDict(x=X))) == ["x", "z"]
    z = module(x=X)
    assert isinstance(z, Tensor)
    assert torch.equal(z, X + 1)


def test_an_entry_that_was_there_before_stays() -> None:
    td = Writer("y", "z").select_out_keys("z")(TensorDict(x=X, y=OLD))
    assert td["y"] is OLD


def test_a_level_goes_with_the_last_entry_that_was_made_in_it() -> None:
    module = Writer(("n", "deep", "y"), ("n", "z"), "w").select_out_keys("w")
    assert names(module(TensorDict(x=X))) == ["x", "w"]
    assert list(module(TensorDict(x=X)).keys()) == ["x", "w"]
    kept = module(TensorDict(x=X, n=TensorDict()))
    assert list(kept.keys(True)) == ["x", "n", "w"]
    module.select_out_keys(("n", "z"))
    assert names(module(TensorDict(x=X))) == ["x", ("n", "z")]


def test_a_new_container_has_no_hidden_entry() -> None:
    module = Writer("y", "z", copies=True).select_out_keys("z")
    td = TensorDict(x=X, y=OLD)
    assert names(module(TensorDict(x=X))) == ["x", "z"]
    assert names(module(td)) == ["x", "y", "z"]
    assert td["y"] is OLD


def test_steps_and_wrapped_modules_hide_their_outputs() -> None:
    for module in (
        TensorDictSequential(Writer("y", "z").select_out_keys("z")),
        TensorDictModuleWrapper(Writer("y", "z")).select_out_keys("z"),
    ):
        assert names(module(TensorDict(x=X))) == ["x", "z"]


def test_members_of_a_stack_keep_what_each_had() -> None:
    stack = lazy_stack([TensorDict(x=X), TensorDict(x=X, y=OLD)])
    first, second = Writer("y", "z").select_out_keys("z")(stack).unbind(0)
    assert (names(first), names(second)) == (["x", "z"], ["x", "y", "z"])
    assert second["y"] is OLD


def test_a_hidden_field_is_not_set() -> None:
    class Batch(TensorClass):
        x: Tensor
        y: Tensor | None = None
        z: Tensor | None = None

    batch = Writer("y", "z").select_out_keys("z")(Batch(x=X, batch_size=[2]))
    assert batch.y is None
    assert batch.z is not None


def test_reset_shows_all_outputs_again() -> None:
    module = Writer("y", "z").select_out_keys("z").reset_out_keys()
    assert names(module(TensorDict(x=X))) == ["x", "y", "z"]


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_hides_as_well(fullgraph: bool) -> None:
    module = Writer("y", "z").select_out_keys("z")
    compiled = torch.compile(module, backend="eager", fullgraph=fullgraph)
    assert names(compiled(TensorDict(x=X))) == ["x", "z"]


class Losses(TensorDictModuleBase):
    """A module whose class says which keys it writes, and keeps them as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys = ["x"]
        self._out_keys = ["first", "second", "third"]

    @property
    def out_keys(self) -> list[NestedKey]:  # type: ignore[override]  # as users write it
        return [*self._out_keys]

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        x = tensordict["x"]
        return TensorDict({"first": x, "second": x + 1, "third": x + 2})


def test_outputs_of_a_class_that_says_its_keys_are_selected() -> None:
    module, x = Losses(), torch.tensor(1.0)
    assert [float(value) for value in module(x)] == [1, 2, 3]
    module.select_out_keys("first", "third")
    assert [float(value) for value in module(x)] == [1, 3]
    assert list(module(TensorDict(x=x)).keys()) == ["first", "third"]
    with pytest.raises(OutKeyUnknown):
        module.select_out_keys("fourth")
