"""Every distribution class of torch and of kd, with parameters for which all estimates exist."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch import distributions as d
from torch.distributions import Distribution

from kd_nn import Delta, OneHotCategorical, TanhNormal, TruncatedNormal

POSITIVE = torch.tensor([[0.5, 1.5], [2.0, 0.75], [1.25, 3.0]])
REAL = torch.tensor([[0.5, -1.5], [2.0, 0.0], [-1.25, 3.0]])
UNIT = torch.tensor([[0.5, 0.25], [0.125, 0.75], [0.9, 0.6]])
SQUARE = torch.eye(2).expand(3, 2, 2).contiguous()

LOC_SCALE = {"loc": REAL, "scale": POSITIVE}
CASES: dict[type[Distribution], dict[str, Tensor]] = {
    Delta: {"param": REAL},
    d.Bernoulli: {"probs": UNIT},
    d.Beta: {"concentration1": POSITIVE, "concentration0": POSITIVE},
    d.Binomial: {"total_count": torch.full((3, 2), 5.0), "probs": UNIT},
    d.Categorical: {"logits": REAL},
    d.Cauchy: LOC_SCALE,
    d.Chi2: {"df": POSITIVE},
    d.ContinuousBernoulli: {"probs": UNIT},
    d.Dirichlet: {"concentration": POSITIVE},
    d.Exponential: {"rate": POSITIVE},
    d.FisherSnedecor: {"df1": POSITIVE, "df2": POSITIVE + 2},
    d.Gamma: {"concentration": POSITIVE, "rate": POSITIVE},
    d.Geometric: {"probs": UNIT},
    d.Gumbel: LOC_SCALE,
    d.HalfCauchy: {"scale": POSITIVE},
    d.HalfNormal: {"scale": POSITIVE},
    d.InverseGamma: {"concentration": POSITIVE + 1, "rate": POSITIVE},
    d.Kumaraswamy: {"concentration1": POSITIVE + 1, "concentration0": POSITIVE + 1},
    d.Laplace: LOC_SCALE,
    d.LogNormal: LOC_SCALE,
    d.LogisticNormal: LOC_SCALE,
    d.LowRankMultivariateNormal: {
        "loc": REAL,
        "cov_factor": POSITIVE.unsqueeze(-1),
        "cov_diag": POSITIVE,
    },
    d.Multinomial: {"logits": REAL},
    d.MultivariateNormal: {"loc": REAL, "scale_tril": SQUARE},
    d.NegativeBinomial: {"total_count": POSITIVE, "probs": UNIT},
    d.Normal: LOC_SCALE,
    d.OneHotCategorical: {"logits": REAL},
    d.OneHotCategoricalStraightThrough: {"logits": REAL},
    d.Pareto: {"scale": POSITIVE, "alpha": POSITIVE + 1},
    d.Poisson: {"rate": POSITIVE},
    d.RelaxedBernoulli: {"temperature": torch.tensor(0.5), "logits": REAL},
    d.RelaxedOneHotCategorical: {"temperature": torch.tensor(0.5), "logits": REAL},
    d.StudentT: {"df": POSITIVE + 1, **LOC_SCALE},
    d.Uniform: {"low": REAL, "high": REAL + POSITIVE},
    d.VonMises: {"loc": REAL, "concentration": POSITIVE},
    d.GeneralizedPareto: {"loc": REAL, "scale": POSITIVE, "concentration": UNIT / 2},
    d.LKJCholesky: {"concentration": POSITIVE[:, 0]},
    d.Weibull: {"scale": POSITIVE, "concentration": POSITIVE},
    d.Wishart: {"df": POSITIVE[:, 0] + 4, "covariance_matrix": SQUARE},
    OneHotCategorical: {"logits": REAL},
    TanhNormal: LOC_SCALE,
    TruncatedNormal: {**LOC_SCALE, "a": REAL - 1, "b": REAL + 3},
}


def vector(loc: Tensor, scale: Tensor) -> Distribution:
    return d.Independent(d.Normal(loc, scale), 1)


def squashed(loc: Tensor, scale: Tensor) -> Distribution:
    return d.TransformedDistribution(d.Normal(loc, scale), [d.TanhTransform()])


def mixture(logits: Tensor, loc: Tensor, scale: Tensor) -> Distribution:
    return d.MixtureSameFamily(d.Categorical(logits=logits), d.Normal(loc, scale))


SETTINGS: dict[type[Distribution], dict[str, object]] = {d.LKJCholesky: {"dim": 3}}
"""Further arguments of a class."""

FACTORIES: dict[Callable[..., Distribution], dict[str, Tensor]] = {
    vector: LOC_SCALE,
    squashed: LOC_SCALE,
    mixture: {"logits": REAL, **LOC_SCALE},
}


EVERY: dict[Callable[..., Distribution], dict[str, Tensor]] = dict(FACTORIES)
for _kind, _params in CASES.items():
    EVERY[_kind] = _params


def build(kind: Callable[..., Distribution]) -> Distribution:
    """Return the distribution of a case."""
    settings = SETTINGS.get(kind, {}) if isinstance(kind, type) else {}
    return kind(**EVERY[kind], **settings)
