"""Keyed modules: `nn.Module`s that read and write (nested) keys of a container."""

from typing import TYPE_CHECKING

from kd_core.extending import publish as _publish
from kd_nn._dispatch import dispatch as dispatch
from kd_nn._dispatch import set_skip_existing as set_skip_existing
from kd_nn._dispatch import skip_existing as skip_existing
from kd_nn._errors import DispatchError as DispatchError
from kd_nn._errors import EmptySubsequence as EmptySubsequence
from kd_nn._errors import InputMissing as InputMissing
from kd_nn._errors import KeyGraphWarning as KeyGraphWarning
from kd_nn._errors import KeysNotDeclared as KeysNotDeclared
from kd_nn._errors import NotKeyed as NotKeyed
from kd_nn._errors import OutKeyUnknown as OutKeyUnknown
from kd_nn._errors import OutputMismatch as OutputMismatch
from kd_nn._errors import SupportsInteraction as SupportsInteraction
from kd_nn._keys import KeyGraph as KeyGraph
from kd_nn._keys import KeyNode as KeyNode
from kd_nn._modules.base import TensorDictModuleBase as TensorDictModuleBase
from kd_nn._modules.module import TensorDictModule as TensorDictModule
from kd_nn._modules.sequence import TensorDictSequential as TensorDictSequential
from kd_nn._params import TensorDictParams as TensorDictParams

if TYPE_CHECKING:
    from kd_nn._cuda_graphs import CudaGraphModule as CudaGraphModule
    from kd_nn._ensemble import EnsembleModule as EnsembleModule
    from kd_nn._modules.module import TensorClassModuleBase as TensorClassModuleBase
    from kd_nn._modules.module import TensorClassModuleWrapper as TensorClassModuleWrapper
    from kd_nn._modules.module import TensorDictModuleWrapper as TensorDictModuleWrapper
    from kd_nn._modules.module import WrapModule as WrapModule
    from kd_nn._modules.module import as_tensordict_module as as_tensordict_module
    from kd_nn._params import ParametersMissing as ParametersMissing
    from kd_nn._params import get_functional as get_functional
    from kd_nn._params import is_functional as is_functional
    from kd_nn._params import make_functional as make_functional
    from kd_nn._params import repopulate_module as repopulate_module
    from kd_nn.distributions import (
        AddStateIndependentNormalScale as AddStateIndependentNormalScale,
    )
    from kd_nn.distributions import Delta as Delta
    from kd_nn.distributions import NormalParamExtractor as NormalParamExtractor
    from kd_nn.distributions import NormalParamWrapper as NormalParamWrapper
    from kd_nn.distributions import OneHotCategorical as OneHotCategorical
    from kd_nn.distributions import TanhNormal as TanhNormal
    from kd_nn.distributions import TruncatedNormal as TruncatedNormal
    from kd_nn.distributions import add_custom_mapping as add_custom_mapping
    from kd_nn.distributions import mappings as mappings
    from kd_nn.distributions import rand_one_hot as rand_one_hot
    from kd_nn.distributions._mappings import biased_softplus as biased_softplus
    from kd_nn.distributions._mappings import inv_softplus as inv_softplus

__version__ = "0.1.0"

_publish(
    __name__,
    later={
        "kd_nn._cuda_graphs": "CudaGraphModule",
        "kd_nn._ensemble": "EnsembleModule",
        "kd_nn._params": (
            "ParametersMissing get_functional is_functional make_functional repopulate_module"
        ),
        "kd_nn._modules.module": (
            "TensorClassModuleBase TensorClassModuleWrapper TensorDictModuleWrapper WrapModule "
            "as_tensordict_module"
        ),
        "kd_nn.distributions": (
            "AddStateIndependentNormalScale Delta NormalParamExtractor NormalParamWrapper "
            "OneHotCategorical TanhNormal TruncatedNormal add_custom_mapping mappings rand_one_hot"
        ),
        "kd_nn.distributions._mappings": "biased_softplus inv_softplus",
    },
)
