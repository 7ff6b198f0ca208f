"""Tools for tests: comparison of containers, and the contract that every container kind fulfils."""

from kd_core.testing._contract import ContainerContract as ContainerContract
from kd_core.testing._contract import StackContract as StackContract
from kd_core.testing._contract import assert_allclose_td as assert_allclose_td
from kd_core.testing._contract import assert_close as assert_close
