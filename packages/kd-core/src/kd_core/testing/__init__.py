"""What authors of containers and of tests need: comparisons, and the contract of every kind."""

from kd_core.testing._comparison import assert_close as assert_close
from kd_core.testing._contract import ContainerContract as ContainerContract
