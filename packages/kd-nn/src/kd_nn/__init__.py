"""Keyed modules: `nn.Module`s that read and write (nested) keys of a container."""

from kd_nn._interaction import SupportsInteraction as SupportsInteraction
from kd_nn._mappings import add_custom_mapping as add_custom_mapping
from kd_nn._mappings import biased_softplus as biased_softplus
from kd_nn._mappings import inv_softplus as inv_softplus
from kd_nn._mappings import mappings as mappings
from kd_nn.distributions import (
    AddStateIndependentNormalScale as AddStateIndependentNormalScale,
)
from kd_nn.distributions import Delta as Delta
from kd_nn.distributions import NormalParamExtractor as NormalParamExtractor
from kd_nn.distributions import NormalParamWrapper as NormalParamWrapper

__version__ = "0.1.0"
