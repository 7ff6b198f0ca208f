"""Parameter extractors and distributions."""

from typing import TYPE_CHECKING

from kd_core.extending import publish as _publish
from kd_nn.distributions._mappings import values_unchecked as values_unchecked

if TYPE_CHECKING:
    from kd_nn.distributions._discrete import Delta as Delta
    from kd_nn.distributions._discrete import OneHotCategorical as OneHotCategorical
    from kd_nn.distributions._discrete import rand_one_hot as rand_one_hot
    from kd_nn.distributions._mappings import (
        AddStateIndependentNormalScale as AddStateIndependentNormalScale,
    )
    from kd_nn.distributions._mappings import NormalParamExtractor as NormalParamExtractor
    from kd_nn.distributions._mappings import NormalParamWrapper as NormalParamWrapper
    from kd_nn.distributions._mappings import add_custom_mapping as add_custom_mapping
    from kd_nn.distributions._mappings import deprecated_attributes as deprecated_attributes
    from kd_nn.distributions._mappings import mappings as mappings
    from kd_nn.distributions._truncated import TanhNormal as TanhNormal
    from kd_nn.distributions._truncated import TruncatedNormal as TruncatedNormal

_publish(
    __name__,
    later={
        "kd_nn.distributions._discrete": "Delta OneHotCategorical rand_one_hot",
        "kd_nn.distributions._mappings": (
            "add_custom_mapping AddStateIndependentNormalScale deprecated_attributes mappings "
            "NormalParamExtractor NormalParamWrapper"
        ),
        "kd_nn.distributions._truncated": "TanhNormal TruncatedNormal",
    },
)
