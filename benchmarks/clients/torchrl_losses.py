"""TorchRL's losses: each with each reduction and value estimator, its gradients and its targets."""

from collections.abc import Callable, Iterator

import torch
from measured import Numbers, main, results
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torchrl import objectives as o
from torchrl.data import Bounded, OneHot
from torchrl.modules import (
    MLP,
    Actor,
    ActorValueOperator,
    DistributionalQValueActor,
    OneHotCategorical,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import LossModule, ValueEstimators
from torchrl.objectives import value as v

ROWS, STEPS, SEEN, ACTIONS = 3, 5, 4, 2


def data(discrete: bool = False, support: bool = False) -> TensorDictBase:
    """Return trajectories."""
    size = (ROWS, STEPS)
    ends = torch.zeros(*size, 1, dtype=torch.bool)
    ends[:, -1] = True
    action = torch.rand(*size, ACTIONS) * 1.8 - 0.9
    if discrete:
        action = torch.nn.functional.one_hot(torch.randint(ACTIONS, size), ACTIONS).float()
    return TensorDict(
        observation=torch.randn(*size, SEEN),
        action=action,
        action_log_prob=torch.randn(size) - 1,
        sample_log_prob=torch.randn(size) - 1,
        loc=torch.randn(*size, ACTIONS),
        scale=torch.rand(*size, ACTIONS) + 0.5,
        next=TensorDict(
            observation=torch.randn(*size, SEEN),
            reward=torch.randn(*size, 1),
            done=ends,
            terminated=ends.clone(),
            batch_size=size,
        ),
        batch_size=size,
    )


def actor(**options: object) -> ProbabilisticActor:
    """Return a policy of continuous actions."""
    return ProbabilisticActor(
        TensorDictModule(
            torch.nn.Sequential(torch.nn.Linear(SEEN, 2 * ACTIONS), NormalParamExtractor()),
            ["observation"],
            ["loc", "scale"],
        ),
        in_keys=["loc", "scale"],
        spec=Bounded(-torch.ones(ACTIONS), torch.ones(ACTIONS), (ACTIONS,)),
        distribution_class=TanhNormal,
        **options,
    )


def chooser() -> ProbabilisticActor:
    """Return a policy of discrete actions."""
    return ProbabilisticActor(
        TensorDictModule(torch.nn.Linear(SEEN, ACTIONS), ["observation"], ["logits"]),
        in_keys=["logits"],
        spec=OneHot(ACTIONS),
        distribution_class=OneHotCategorical,
    )


def plain_actor() -> Actor:
    """Return a policy that does not draw."""
    return Actor(
        MLP(in_features=SEEN, out_features=ACTIONS, num_cells=[8]),
        spec=Bounded(-torch.ones(ACTIONS), torch.ones(ACTIONS), (ACTIONS,)),
    )


class Both(torch.nn.Module):
    """The value of an observation and an action."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(SEEN + ACTIONS, 1)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Return the value."""
        return self.net(torch.cat([observation, action], -1))


def qvalue() -> ValueOperator:
    """Return the value of actions."""
    return ValueOperator(Both(), ["observation", "action"])


def value() -> ValueOperator:
    """Return the value of states."""
    return ValueOperator(MLP(in_features=SEEN, out_features=1, num_cells=[8]), ["observation"])


def values() -> QValueActor:
    """Return the values of all discrete actions."""
    return QValueActor(
        MLP(in_features=SEEN, out_features=ACTIONS, num_cells=[8]),
        in_keys=["observation"],
        spec=OneHot(ACTIONS),
    )


def logits() -> TensorDictModule:
    """Return the values of discrete actions, without a choice."""
    return TensorDictModule(torch.nn.Linear(SEEN, ACTIONS), ["observation"], ["action_value"])


def shared() -> ActorValueOperator:
    """Return a policy and a value of states on one trunk."""
    trunk = TensorDictModule(torch.nn.Linear(SEEN, SEEN), ["observation"], ["hidden"])
    head = ProbabilisticActor(
        TensorDictModule(
            torch.nn.Sequential(torch.nn.Linear(SEEN, 2 * ACTIONS), NormalParamExtractor()),
            ["hidden"],
            ["loc", "scale"],
        ),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
    )
    return ActorValueOperator(
        trunk, head, TensorDictModule(torch.nn.Linear(SEEN, 1), ["hidden"], ["state_value"])
    )


def of_shared(**options: object) -> LossModule:
    """Return a loss of networks with a common trunk."""
    both = shared()
    return o.ClipPPOLoss(both.get_policy_operator(), both.get_value_operator(), **options)


class Continuous:
    """Losses of continuous actions."""

    A2C = staticmethod(lambda **k: o.A2CLoss(actor(), value(), **k))
    PPO = staticmethod(lambda **k: o.PPOLoss(actor(), value(), **k))
    ClipPPO = staticmethod(lambda **k: o.ClipPPOLoss(actor(), value(), **k))
    ClipPPO_shared = staticmethod(of_shared)
    KLPENPPO = staticmethod(lambda **k: o.KLPENPPOLoss(actor(), value(), **k))
    Reinforce = staticmethod(lambda **k: o.ReinforceLoss(actor(), value(), **k))
    DDPG = staticmethod(lambda **k: o.DDPGLoss(plain_actor(), qvalue(), **k))
    TD3 = staticmethod(lambda **k: o.TD3Loss(plain_actor(), qvalue(), bounds=(-1.0, 1.0), **k))
    TD3BC = staticmethod(lambda **k: o.TD3BCLoss(plain_actor(), qvalue(), bounds=(-1.0, 1.0), **k))
    SAC = staticmethod(lambda **k: o.SACLoss(actor(), qvalue(), **k))
    SAC_value = staticmethod(lambda **k: o.SACLoss(actor(), qvalue(), value(), **k))
    REDQ = staticmethod(lambda **k: o.REDQLoss(actor(), qvalue(), num_qvalue_nets=4, **k))
    CrossQ = staticmethod(lambda **k: o.CrossQLoss(actor(), qvalue(), **k))
    CQL = staticmethod(lambda **k: o.CQLLoss(actor(), qvalue(), **k))
    IQL = staticmethod(lambda **k: o.IQLLoss(actor(), qvalue(), value(), **k))
    BC = staticmethod(lambda **k: o.BCLoss(actor(), **k))


class Discrete:
    """Losses of discrete actions."""

    DQN = staticmethod(lambda **k: o.DQNLoss(values(), **k))
    DoubleDQN = staticmethod(
        lambda **k: o.DQNLoss(values(), delay_value=True, double_dqn=True, **k)
    )
    DiscreteSAC = staticmethod(
        lambda **k: o.DiscreteSACLoss(
            chooser(), logits(), action_space="one_hot", num_actions=ACTIONS, **k
        )
    )
    DiscreteCQL = staticmethod(lambda **k: o.DiscreteCQLLoss(values(), **k))
    DiscreteIQL = staticmethod(
        lambda **k: o.DiscreteIQLLoss(chooser(), logits(), value(), action_space="one_hot", **k)
    )
    Distributional = staticmethod(
        lambda **k: o.DistributionalDQNLoss(
            DistributionalQValueActor(
                torch.nn.Sequential(
                    torch.nn.Linear(SEEN, 5 * ACTIONS), torch.nn.Unflatten(-1, (5, ACTIONS))
                ),
                torch.linspace(-2, 2, 5),
                ["observation"],
                spec=OneHot(ACTIONS),
            ),
            gamma=0.9,
            delay_value=True,
            **k,
        )
    )


def computed(make: Callable[..., LossModule], discrete: bool, **options: object) -> object:
    """Return the terms of a loss, its gradients, targets and keys."""
    loss, batch = make(**options), data(discrete)
    if hasattr(loss, "make_value_estimator") and loss.value_type is not None:
        loss.make_value_estimator(gamma=0.9)

    def learn() -> object:
        terms = loss(batch.clone())
        total = sum(each.sum() for name, each in terms.items() if name.startswith("loss_"))
        total.backward()
        return [terms, {n: p.grad for n, p in loss.named_parameters() if p.grad is not None}]

    def update() -> object:
        o.SoftUpdate(loss, eps=0.5).step()
        return dict(loss.named_buffers())

    def reload() -> object:
        other = make(**options)
        other.load_state_dict(loss.state_dict())
        return [sorted(loss.state_dict()), other(batch.clone())]

    def tensors() -> object:
        flat = {"_".join(k if isinstance(k, tuple) else (k,)): k for k in loss.in_keys}
        return loss(**{n: batch[k] for n, k in flat.items() if k in batch.keys(True)})

    return results(
        {
            "learn": learn,
            "keys": lambda: [str(loss.in_keys), str(loss.out_keys)],
            "tensors": tensors,
            "update": update,
            "reload": reload,
            "selected": lambda: loss.select_out_keys(loss.out_keys[0])(batch.clone()),
        }
    )


def estimated(make: Callable[..., LossModule], discrete: bool, kind: ValueEstimators) -> object:
    """Return what a loss computes with another value estimator."""
    loss = make()
    loss.make_value_estimator(kind)
    return loss(data(discrete))


def advantages() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the use of each value estimator alone."""
    network = value()
    for name, options in {
        "TD0Estimator": {},
        "TD1Estimator": {},
        "TDLambdaEstimator": {"lmbda": 0.9},
        "GAE": {"lmbda": 0.9},
    }.items():
        for shifted in (False, True):
            for normalised in (False, True):

                def case(
                    name: str = name,
                    options: dict[str, float] = options,
                    shifted: bool = shifted,
                    normalised: bool = normalised,
                ) -> object:
                    key = "average_gae" if name == "GAE" else "average_rewards"
                    made = getattr(v, name)(
                        gamma=0.9,
                        value_network=network,
                        shifted=shifted,
                        **{key: normalised},
                        **options,
                    )
                    return [made(data()), made.value_estimate(data())]

                yield f"{name} {shifted} {normalised}", case
    yield (
        "VTrace",
        lambda: v.VTrace(gamma=0.9, value_network=network, actor_network=actor())(data()),
    )


def train() -> Numbers:
    """Use each loss and each estimator."""
    cases: dict[str, Callable[[], object]] = dict(advantages())
    for family in (Continuous, Discrete):
        discrete = family is Discrete
        for name, make in vars(family).items():
            if name[0] == "_":
                continue
            make = make.__func__
            for reduction in ("mean", "none"):
                cases[f"{name} {reduction}"] = lambda m=make, r=reduction, d=discrete: computed(
                    m, d, reduction=r
                )
            for kind in ValueEstimators:
                cases[f"{name} {kind.name}"] = lambda m=make, k=kind, d=discrete: estimated(m, d, k)
    return results(cases)


if __name__ == "__main__":
    main(train)
