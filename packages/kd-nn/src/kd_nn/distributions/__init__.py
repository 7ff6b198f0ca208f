"""Parameter extractors and distributions."""

from kd_core.extending import publish as _publish
from kd_nn.distributions._delta import Delta as Delta
from kd_nn.distributions._normal_params import (
    AddStateIndependentNormalScale as AddStateIndependentNormalScale,
)
from kd_nn.distributions._normal_params import (
    NormalParamExtractor as NormalParamExtractor,
)
from kd_nn.distributions._normal_params import NormalParamWrapper as NormalParamWrapper

_publish(__name__)
