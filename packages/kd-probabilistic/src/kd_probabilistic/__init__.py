"""Keyed modules that build distributions and draw from them."""

from kd_core.extending import publish as _publish
from kd_probabilistic._composite import CompositeDistribution as CompositeDistribution
from kd_probabilistic._composite import EntropyEstimateWarning as EntropyEstimateWarning
from kd_probabilistic._distribution import EstimateNotOffered as EstimateNotOffered
from kd_probabilistic._distribution import estimate as estimate
from kd_probabilistic._distribution import register_estimator as register_estimator
from kd_probabilistic._interaction import InteractionType as InteractionType
from kd_probabilistic._interaction import NotTraceable as NotTraceable
from kd_probabilistic._interaction import composite_lp_aggregate as composite_lp_aggregate
from kd_probabilistic._interaction import interaction_type as interaction_type
from kd_probabilistic._interaction import set_composite_lp_aggregate as set_composite_lp_aggregate
from kd_probabilistic._interaction import set_interaction_type as set_interaction_type
from kd_probabilistic._module import (
    ProbabilisticTensorDictModule as ProbabilisticTensorDictModule,
)
from kd_probabilistic._sequential import (
    ProbabilisticTensorDictSequential as ProbabilisticTensorDictSequential,
)
from kd_probabilistic._sequential import ScoringModule as ScoringModule

__version__ = "0.1.0"

_publish(__name__)
