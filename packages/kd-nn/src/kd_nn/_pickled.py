"""Private names that pickles of modules carry, under this path: keep them when their code moves."""

from typing import TYPE_CHECKING

from kd_core.extending import publish
from kd_nn._keys import InKeySpec as InKeySpec
from kd_nn.distributions._mappings import expln as expln
from kd_nn.distributions._mappings import identity as identity

if TYPE_CHECKING:
    from kd_nn._params import FunctionalForward as FunctionalForward

publish(__name__, later={"kd_nn._params": "FunctionalForward"})
