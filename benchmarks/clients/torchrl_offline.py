"""TorchRL learns from stored steps of Pendulum: CQL, IQL, TD3 with BC, a decision transformer."""

import tempfile
from collections.abc import Callable

import torch
from measured import Numbers, content, fingerprint, main, results
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from tensordict.nn.distributions import NormalParamExtractor
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    ExcludeTransform,
    GymEnv,
    InitTracker,
    RandomCropTensorDict,
    Reward2GoTransform,
    RewardScaling,
    RewardSum,
    StepCounter,
    TargetReturn,
    TransformedEnv,
    UnsqueezeTransform,
)
from torchrl.envs.transforms import CatFrames
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import (
    MLP,
    DecisionTransformerInferenceWrapper,
    DTActor,
    ProbabilisticActor,
    TanhDelta,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import (
    CQLLoss,
    DTLoss,
    HardUpdate,
    IQLLoss,
    SoftUpdate,
    TD3BCLoss,
    group_optimizers,
)


def environment() -> TransformedEnv:
    """Return Pendulum with the transforms of the examples."""
    return TransformedEnv(
        GymEnv("Pendulum-v1"),
        Compose(
            InitTracker(), StepCounter(50), DoubleToFloat(), RewardScaling(0, 0.1), RewardSum()
        ),
    )


def stored(steps: int = 400) -> TensorDict:
    """Return steps of a policy that draws its actions."""
    env = environment()
    env.set_seed(0)
    return env.rollout(steps, break_when_any_done=False)


def buffer(folder: str, batch: int = 32, **options: object) -> TensorDictReplayBuffer:
    """Return a buffer over stored steps, on disk."""
    data = stored()
    storage = LazyMemmapStorage(len(data), scratch_dir=folder)
    made = TensorDictReplayBuffer(
        storage=storage,
        batch_size=batch,
        sampler=SamplerWithoutReplacement(drop_last=False),
        **options,
    )
    made.extend(data)
    made.append_transform(DoubleToFloat())
    return made


def policy(env: TransformedEnv) -> ProbabilisticActor:
    """Return a policy that draws."""
    space = env.action_spec.space
    network = torch.nn.Sequential(
        MLP(num_cells=[32, 32], out_features=2, activation_class=torch.nn.ReLU),
        NormalParamExtractor(scale_mapping="biased_softplus_1.0", scale_lb=0.1),
    )
    return ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=env.action_spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": space.low, "high": space.high, "tanh_loc": False},
        default_interaction_type=ExplorationType.RANDOM,
    )


def critic(keys: list[str]) -> ValueOperator:
    """Return a value of what is under keys."""
    return ValueOperator(
        MLP(num_cells=[32, 32], out_features=1, activation_class=torch.nn.ReLU), in_keys=keys
    )


def split_critic_params(params: TensorDict) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters of both critics apart."""
    first, second = [], []
    for param in params.values():
        data1, data2 = param.data.chunk(2, dim=0)
        first.append(torch.nn.Parameter(data1))
        second.append(torch.nn.Parameter(data2))
    return first, second


def evaluate(env: TransformedEnv, actor: Callable[[TensorDict], TensorDict]) -> float:
    """Return the reward of one rollout."""
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        found = env.rollout(40, actor, auto_cast_to_device=True, break_when_any_done=False)
    return found["next", "reward"].sum().item()


def cql() -> object:
    """Conservative Q learning with a Lagrange multiplier."""
    env = environment()
    env.set_seed(1)
    actor, qvalue = policy(env), critic(["observation", "action"])
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        td = env.fake_tensordict()
        for net in (actor, qvalue):
            net(td)
    loss = CQLLoss(
        actor,
        qvalue,
        loss_function="l2",
        temperature=1.0,
        min_q_weight=1.0,
        max_q_backup=False,
        deterministic_backup=True,
        num_random=4,
        with_lagrange=True,
        lagrange_thresh=5.0,
    )
    loss.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss, tau=0.005)
    optimisers = [
        torch.optim.Adam(list(loss.actor_network_params.flatten_keys().values()), lr=3e-4),
        torch.optim.Adam(list(loss.qvalue_network_params.flatten_keys().values()), lr=3e-4),
        torch.optim.Adam([loss.log_alpha], lr=3e-4),
        torch.optim.Adam([loss.log_alpha_prime], lr=3e-4),
    ]
    optimiser = group_optimizers(*optimisers)
    metrics = []
    with tempfile.TemporaryDirectory() as folder:
        rows = buffer(folder)
        for _ in range(20):
            data = rows.sample()
            terms = loss(data)
            q_loss = terms["loss_qvalue"] + terms["loss_cql"]
            total = (
                q_loss
                + terms["loss_actor_bc"]
                + terms["loss_actor"]
                + terms["loss_alpha"]
                + terms["loss_alpha_prime"]
            )
            optimiser.zero_grad()
            total.backward()
            optimiser.step()
            target.step()
            metrics.append(terms.detach().select(*loss.out_keys, strict=False))
    mean = torch.stack(metrics).mean()
    firsts = split_critic_params(loss.qvalue_network_params.flatten_keys())
    return [content(mean), evaluate(env, actor), fingerprint(loss), content(firsts)]


def iql() -> object:
    """Implicit Q learning."""
    env = environment()
    env.set_seed(1)
    actor, qvalue = policy(env), critic(["observation", "action"])
    value = critic(["observation"])
    model = torch.nn.ModuleList([actor, qvalue, value])
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        td = env.reset()
        td = env.rand_action(td)
        for net in model:
            net(td)
    loss = IQLLoss(
        model[0],
        model[1],
        value_network=model[2],
        loss_function="l2",
        temperature=3.0,
        expectile=0.7,
    )
    loss.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss, eps=0.995)
    optimisers = {
        name: torch.optim.Adam(list(getattr(loss, f"{net}_params").flatten_keys().values()), 3e-4)
        for name, net in (
            ("loss_actor", "actor_network"),
            ("loss_qvalue", "qvalue_network"),
            ("loss_value", "value_network"),
        )
    }
    metrics = []
    with tempfile.TemporaryDirectory() as folder:
        rows = buffer(folder, prefetch=2)
        for number, data in enumerate(rows):
            if number == 10:
                break
            terms = loss(data.clone())
            for name, optimiser in optimisers.items():
                terms[name].backward()
                optimiser.step()
                optimiser.zero_grad()
            target.step()
            metrics.append({k: v.item() for k, v in terms.items() if k.startswith("loss_")})
    return [len(metrics), sorted(metrics[0]), evaluate(env, actor)]


def td3bc() -> object:
    """TD3 beside behaviour cloning, with targets that jump."""
    env = environment()
    env.set_seed(1)
    actor = ProbabilisticActor(
        TensorDictModule(MLP(3, 1, num_cells=[32]), ["observation"], ["param"]),
        in_keys=["param"],
        spec=env.action_spec,
        distribution_class=TanhDelta,
        distribution_kwargs={"low": -2.0, "high": 2.0},
    )
    qvalue = critic(["observation", "action"])
    with torch.no_grad():
        td = env.rand_step(env.reset())
        qvalue(td)
    loss = TD3BCLoss(actor, qvalue, action_spec=env.action_spec, num_qvalue_nets=2)
    loss.make_value_estimator(gamma=0.99)
    target = HardUpdate(loss, value_network_update_interval=3)
    data = stored(64)
    rows = TensorDictReplayBuffer(
        storage=TensorStorage(data), batch_size=16, sampler=SamplerWithoutReplacement()
    )
    with torch.no_grad():
        loss(data[:2])
    optimiser = torch.optim.Adam(loss.parameters(), 3e-4)
    seen = []
    for _ in range(8):
        terms = loss(rows.sample())
        (terms["loss_actor"] + terms["loss_qvalue"]).backward()
        optimiser.step()
        optimiser.zero_grad()
        target.step()
        seen.append(terms["loss_qvalue"].item())
    return [seen, fingerprint(loss), evaluate(env, actor), content(td)]


def decision() -> object:
    """A decision transformer on crops of trajectories."""
    data = stored(400).reshape(8, 50)
    rows = TensorDictReplayBuffer(
        storage=LazyTensorStorage(8),
        batch_size=4,
        transform=Compose(
            Reward2GoTransform(
                gamma=1.0,
                in_keys=[("next", "reward")],
                out_keys=["return_to_go"],
                done_key="truncated",
            ),
            RandomCropTensorDict(sub_seq_len=10, sample_dim=-1),
            ExcludeTransform(("next", "observation")),
        ),
    )
    rows.extend(data)
    actor = ProbabilisticActor(
        TensorDictModule(
            DTActor(
                state_dim=3,
                action_dim=1,
                transformer_config={
                    "n_embd": 16,
                    "n_layer": 1,
                    "n_head": 1,
                    "n_inner": 16,
                    "activation": "relu",
                    "n_positions": 64,
                    "resid_pdrop": 0.0,
                    "attn_pdrop": 0.0,
                },
            ),
            in_keys=["observation", "action", "return_to_go"],
            out_keys=["param"],
        ),
        in_keys=["param"],
        out_keys=["action"],
        distribution_class=TanhDelta,
        distribution_kwargs={"low": -2.0, "high": 2.0},
    )
    loss = DTLoss(actor, loss_function="l2")
    loss.set_keys(action_target="action")
    optimiser = torch.optim.Adam(loss.parameters(), 1e-3)
    seen = []
    for _ in range(5):
        terms = loss(rows.sample())
        terms["loss"].backward()
        optimiser.step()
        optimiser.zero_grad()
        seen.append(terms["loss"].item())
    env = TransformedEnv(
        GymEnv("Pendulum-v1"),
        Compose(
            DoubleToFloat(),
            TargetReturn(-10.0, out_keys=["return_to_go"]),
            UnsqueezeTransform(-2, in_keys=["observation", "return_to_go"]),
            CatFrames(4, -2, ["observation", "return_to_go"], padding="constant"),
            InitTracker(),
        ),
    )
    wrapper = DecisionTransformerInferenceWrapper(actor, inference_context=5)
    env.set_seed(2)
    first = env.reset()
    return [seen, fingerprint(loss), content(first), str(wrapper.in_keys), str(wrapper.out_keys)]


def train() -> Numbers:
    """Learn with each."""
    return results({"cql": cql, "iql": iql, "td3bc": td3bc, "decision": decision})


if __name__ == "__main__":
    main(train)
