"""Parameter extractors and distributions."""

from typing import TYPE_CHECKING

from kd_core.extending import publish as _publish
from kd_nn.distributions._checks import values_unchecked as values_unchecked

if TYPE_CHECKING:
    from kd_nn.distributions._delta import Delta as Delta
    from kd_nn.distributions._deprecation import deprecated_attributes as deprecated_attributes
    from kd_nn.distributions._mappings import add_custom_mapping as add_custom_mapping
    from kd_nn.distributions._mappings import mappings as mappings
    from kd_nn.distributions._normal_params import (
        AddStateIndependentNormalScale as AddStateIndependentNormalScale,
    )
    from kd_nn.distributions._normal_params import NormalParamExtractor as NormalParamExtractor
    from kd_nn.distributions._normal_params import NormalParamWrapper as NormalParamWrapper
    from kd_nn.distributions._one_hot import OneHotCategorical as OneHotCategorical
    from kd_nn.distributions._one_hot import rand_one_hot as rand_one_hot
    from kd_nn.distributions._tanh_normal import TanhNormal as TanhNormal
    from kd_nn.distributions._truncated_normal import TruncatedNormal as TruncatedNormal

_publish(
    __name__,
    later={
        "kd_nn.distributions._delta": "Delta",
        "kd_nn.distributions._deprecation": "deprecated_attributes",
        "kd_nn.distributions._mappings": "add_custom_mapping mappings",
        "kd_nn.distributions._normal_params": (
            "AddStateIndependentNormalScale NormalParamExtractor NormalParamWrapper"
        ),
        "kd_nn.distributions._one_hot": "OneHotCategorical rand_one_hot",
        "kd_nn.distributions._tanh_normal": "TanhNormal",
        "kd_nn.distributions._truncated_normal": "TruncatedNormal",
    },
)
