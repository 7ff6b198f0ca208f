"""Keyed modules: `nn.Module`s that read and write (nested) keys of a container."""

from kd_nn._dispatch import dispatch as dispatch
from kd_nn._ensemble import EnsembleModule as EnsembleModule
from kd_nn._errors import DispatchError as DispatchError
from kd_nn._errors import EmptySubsequence as EmptySubsequence
from kd_nn._errors import InputMissing as InputMissing
from kd_nn._errors import KeyGraphWarning as KeyGraphWarning
from kd_nn._errors import KeysNotDeclared as KeysNotDeclared
from kd_nn._errors import NotKeyed as NotKeyed
from kd_nn._errors import OutKeyUnknown as OutKeyUnknown
from kd_nn._errors import OutputMismatch as OutputMismatch
from kd_nn._functional import ParametersMissing as ParametersMissing
from kd_nn._functional import get_functional as get_functional
from kd_nn._functional import is_functional as is_functional
from kd_nn._functional import make_functional as make_functional
from kd_nn._functional import repopulate_module as repopulate_module
from kd_nn._interaction import SupportsInteraction as SupportsInteraction
from kd_nn._key_graph import KeyGraph as KeyGraph
from kd_nn._key_graph import KeyNode as KeyNode
from kd_nn._mappings import add_custom_mapping as add_custom_mapping
from kd_nn._mappings import biased_softplus as biased_softplus
from kd_nn._mappings import inv_softplus as inv_softplus
from kd_nn._mappings import mappings as mappings
from kd_nn._module import TensorDictModule as TensorDictModule
from kd_nn._module_base import TensorDictModuleBase as TensorDictModuleBase
from kd_nn._params import TensorDictParams as TensorDictParams
from kd_nn._sequential import TensorDictSequential as TensorDictSequential
from kd_nn._skip_existing import set_skip_existing as set_skip_existing
from kd_nn._skip_existing import skip_existing as skip_existing
from kd_nn._wrap import TensorDictModuleWrapper as TensorDictModuleWrapper
from kd_nn._wrap import WrapModule as WrapModule
from kd_nn._wrap import as_tensordict_module as as_tensordict_module
from kd_nn.distributions import (
    AddStateIndependentNormalScale as AddStateIndependentNormalScale,
)
from kd_nn.distributions import Delta as Delta
from kd_nn.distributions import NormalParamExtractor as NormalParamExtractor
from kd_nn.distributions import NormalParamWrapper as NormalParamWrapper

__version__ = "0.1.0"
