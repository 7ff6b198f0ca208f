"""Every kind of container keeps the contract."""

from collections.abc import Sequence

from tests.core.hidden_names import HidingTensorClass, HidingTypedTensorDict, contract, hiding
from tests.core.kinds import FACTORIES

from kd_core import TensorDictBase, lazy_stack
from kd_core.testing import ContainerContract, StackContract


class TestTensorDict(ContainerContract):
    def make(self) -> TensorDictBase:
        return FACTORIES["dense"]()


class TestLazyStack(StackContract):
    def make_stack(self, members: Sequence[TensorDictBase], dim: int) -> TensorDictBase:
        return lazy_stack(members, dim)


class TestLazyStackOfColumns(ContainerContract):
    def make(self) -> TensorDictBase:
        return FACTORIES["stacked_last"]()


class TestTensorClass(ContainerContract):
    fixed_keys = True

    def make(self) -> TensorDictBase:
        return FACTORIES["declared"]()


class TestTypedTensorDict(ContainerContract):
    def make(self) -> TensorDictBase:
        return FACTORIES["typed"]()


Hidden = contract("ContainerContract")


class TestFieldsThatHideEveryMethod(Hidden):  # type: ignore[misc, valid-type]  # made at run time
    fixed_keys = True

    def make(self) -> object:
        return hiding(HidingTensorClass)


class TestTypedFieldsThatHideEveryMethod(Hidden):  # type: ignore[misc, valid-type]  # as above
    def make(self) -> object:
        return hiding(HidingTypedTensorDict)


class TestStackOfFieldsThatHideEveryMethod(Hidden):  # type: ignore[misc, valid-type]  # as above
    fixed_keys = True

    def make(self) -> object:
        return lazy_stack(TensorDictBase.unbind(hiding(HidingTensorClass), 0), 0)
