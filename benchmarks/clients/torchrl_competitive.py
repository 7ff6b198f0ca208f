"""Two teams of agents learn against each other on VMAS's tag, as in TorchRL's tutorial (MADDPG)."""

import torch
from measured import Numbers, content, fingerprint, main
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyMemmapStorage, RandomSampler, ReplayBuffer
from torchrl.envs import (
    ExplorationType,
    RewardSum,
    TransformedEnv,
    check_env_specs,
    set_exploration_type,
)
from torchrl.envs.libs.vmas import VmasEnv
from torchrl.modules import (
    AdditiveGaussianModule,
    MultiAgentMLP,
    ProbabilisticActor,
    TanhDelta,
)
from torchrl.objectives import DDPGLoss, SoftUpdate, ValueEstimators

FRAMES, ITERATIONS, STEPS, BATCH, MEMORY = 200, 5, 5, 64, 2000


def process_batch(batch: TensorDictBase, env: TransformedEnv) -> TensorDictBase:
    """Give each group the endings that are shared by all."""
    for group in env.group_map:
        keys = list(batch.keys(True, True))
        shape = batch.get_item_shape(("next", group, "reward"))
        for name in ("done", "terminated"):
            nested = ("next", group, name)
            if nested not in keys:
                batch.set(nested, batch.get(("next", name)).unsqueeze(-1).expand((*shape,)))
    return batch


def train() -> Numbers:
    """Train each group for a few iterations, one of them for fewer."""
    base = VmasEnv(
        scenario="simple_tag",
        num_envs=10,
        continuous_actions=True,
        max_steps=50,
        device="cpu",
        seed=0,
        num_good_agents=1,
        num_adversaries=2,
        num_landmarks=2,
    )
    print(f"group_map: {base.group_map}")
    print("action_spec:", base.full_action_spec)
    print("reward_spec:", base.full_reward_spec)
    print("observation_spec:", base.observation_spec)
    env = TransformedEnv(
        base,
        RewardSum(in_keys=base.reward_keys, reset_keys=["_reset"] * len(base.group_map)),
    )
    check_env_specs(env)
    rollout = env.rollout(5)
    print("rollout of three steps:", rollout)

    policies, exploring = {}, {}
    for group, agents in env.group_map.items():
        network = MultiAgentMLP(
            n_agent_inputs=env.observation_spec_unbatched[group, "observation"].shape[-1],
            n_agent_outputs=env.full_action_spec_unbatched[group, "action"].shape[-1],
            n_agents=len(agents),
            centralised=False,
            share_params=True,
            device="cpu",
            depth=2,
            num_cells=32,
            activation_class=torch.nn.Tanh,
        )
        module = TensorDictModule(
            network, in_keys=[(group, "observation")], out_keys=[(group, "param")]
        )
        policies[group] = ProbabilisticActor(
            module=module,
            spec=env.full_action_spec_unbatched[group, "action"],
            in_keys=[(group, "param")],
            out_keys=[(group, "action")],
            distribution_class=TanhDelta,
            distribution_kwargs={
                "low": env.full_action_spec_unbatched[group, "action"].space.low,
                "high": env.full_action_spec_unbatched[group, "action"].space.high,
            },
            return_log_prob=False,
        )
        exploring[group] = TensorDictSequential(
            policies[group],
            AdditiveGaussianModule(
                spec=policies[group].spec,
                annealing_num_steps=FRAMES * ITERATIONS // 2,
                action_key=(group, "action"),
                sigma_init=0.9,
                sigma_end=0.1,
            ),
        )

    critics = {}
    for group, agents in env.group_map.items():
        cat = TensorDictModule(
            lambda obs, action: torch.cat([obs, action], dim=-1),
            in_keys=[(group, "observation"), (group, "action")],
            out_keys=[(group, "obs_action")],
        )
        critic = TensorDictModule(
            module=MultiAgentMLP(
                n_agent_inputs=env.observation_spec_unbatched[group, "observation"].shape[-1]
                + env.full_action_spec_unbatched[group, "action"].shape[-1],
                n_agent_outputs=1,
                n_agents=len(agents),
                centralised=True,
                share_params=True,
                depth=2,
                num_cells=32,
                activation_class=torch.nn.Tanh,
            ),
            in_keys=[(group, "obs_action")],
            out_keys=[(group, "state_action_value")],
        )
        critics[group] = TensorDictSequential(cat, critic)

    reset = env.reset()
    for group in env.group_map:
        print("with value:", critics[group](policies[group](reset)))

    agents_policy = TensorDictSequential(*exploring.values())
    collector = Collector(
        env, agents_policy, device="cpu", frames_per_batch=FRAMES, total_frames=FRAMES * ITERATIONS
    )
    buffers, losses, updaters, optimisers = {}, {}, {}, {}
    for group in env.group_map:
        buffers[group] = ReplayBuffer(
            storage=LazyMemmapStorage(MEMORY), sampler=RandomSampler(), batch_size=BATCH
        )
        loss = DDPGLoss(
            actor_network=policies[group],
            value_network=critics[group],
            delay_value=True,
            loss_function="l2",
        )
        loss.set_keys(
            state_action_value=(group, "state_action_value"),
            reward=(group, "reward"),
            done=(group, "done"),
            terminated=(group, "terminated"),
        )
        loss.make_value_estimator(ValueEstimators.TD0, gamma=0.99)
        losses[group] = loss
        updaters[group] = SoftUpdate(loss, tau=0.005)
        optimisers[group] = {
            "loss_actor": torch.optim.Adam(
                loss.actor_network_params.flatten_keys().values(), lr=3e-4
            ),
            "loss_value": torch.optim.Adam(
                loss.value_network_params.flatten_keys().values(), lr=3e-4
            ),
        }

    training = dict(env.group_map)
    found: dict[str, list[object]] = {group: [] for group in env.group_map}
    for iteration, batch in enumerate(collector):
        current = batch.numel()
        batch = process_batch(batch, env)
        for group in training:
            others = [other for other in env.group_map if other != group]
            own = batch.exclude(*others, *[("next", other) for other in others])
            own = own.reshape(-1)
            buffers[group].extend(own)
            for _ in range(STEPS):
                sample = buffers[group].sample()
                terms = losses[group](sample)
                for name in ("loss_actor", "loss_value"):
                    optimiser = optimisers[group][name]
                    terms[name].backward()
                    parameters = optimiser.param_groups[0]["params"]
                    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                    optimiser.step()
                    optimiser.zero_grad()
                    found[group].append(terms[name].item())
                updaters[group].step()
            exploring[group][-1].step(current)
        if iteration == ITERATIONS // 2:
            del training["agent"]
        for group in env.group_map:
            reward = batch.get(("next", group, "episode_reward"))
            ended = batch.get(("next", group, "done"))
            found[group].append(reward[ended].mean().nan_to_num().item())
    collector.shutdown()
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        final = env.rollout(30, policy=agents_policy, auto_cast_to_device=True)
    return {
        "losses": found,
        "final": content(final),
        **{group: fingerprint(losses[group]) for group in losses},
    }


if __name__ == "__main__":
    main(train)
