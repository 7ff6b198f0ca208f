"""Every kind of container keeps the contract."""

from tests.core.kinds import FACTORIES

from kd_core import TensorDictBase
from kd_core.testing import ContainerContract


class TestTensorDict(ContainerContract):
    def make(self) -> TensorDictBase:
        return FACTORIES["dense"]()


class TestLazyStack(ContainerContract):
    def make(self) -> TensorDictBase:
        return FACTORIES["stacked_first"]()


class TestLazyStackOfColumns(ContainerContract):
    def make(self) -> TensorDictBase:
        return FACTORIES["stacked_last"]()


class TestTensorClass(ContainerContract):
    fixed_keys = True

    def make(self) -> TensorDictBase:
        return FACTORIES["declared"]()
