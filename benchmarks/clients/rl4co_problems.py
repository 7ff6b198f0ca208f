"""RL4CO steps through each of its problems, decodes in several ways and trains several models."""

import logging
import tempfile
from collections.abc import Callable, Iterator
from functools import partial

import torch
from measured import Numbers, content, fingerprint, main, results
from rl4co import envs, models
from rl4co.data.transforms import StateAugmentation
from rl4co.utils import RL4COTrainer
from rl4co.utils.ops import batchify, gather_by_index, unbatchify
from torch.utils.data import DataLoader

logging.disable(logging.WARNING)
SMALL = {"embed_dim": 16, "num_encoder_layers": 1, "num_heads": 2, "feedforward_hidden": 16}
# Those that have a parameter of another name, or none, for the size.
SIZES: dict[str, dict[str, int]] = {
    "ffsp": {"num_stage": 2, "num_machine": 2, "num_job": 4},
    "jssp": {"num_jobs": 3, "num_machines": 3},
    "fjsp": {"num_jobs": 3, "num_machines": 3},
    "smtwtp": {"num_job": 6},
    "mcp": {"num_items": 20, "num_sets": 8, "n_sets_to_choose": 3, "max_size": 5, "min_size": 2},
    "mtvrp": {"num_loc": 8, "variant_preset": "all"},
    "flp": {"num_loc": 12, "to_choose": 3},
}
ELSEWHERE = ("dpp", "mdpp")  # they download the chip that they place


def problem(name: str) -> object:
    """Return a small problem."""
    return envs.get_env(name, generator_params=SIZES.get(name, {"num_loc": 8}), seed=0)


def rollout(name: str) -> object:
    """Act at random until each row is done."""
    env = problem(name)
    td = env.reset(batch_size=[4])
    shown = [content(td)]
    for _ in range(40):
        if td["done"].all() or "action_mask" not in td:
            break
        mask = td["action_mask"].flatten(1).float()
        td.set("action", torch.multinomial(mask + (mask.sum(-1, keepdim=True) == 0), 1).squeeze(-1))
        shown.append(content(td["action"]))
        td = env.step(td)["next"]
    return [*shown, content(td)]


def improving(name: str) -> object:
    """Improve solutions at random."""
    env = problem(name)
    td = env.reset(batch_size=[4])
    size = 2 if name == "tsp_kopt" else 3
    for _ in range(4):
        td.set("action", torch.stack([torch.randperm(4)[:size] + 1 for _ in range(4)]))
        td = env.step(td)["next"]
    return td


def data(name: str) -> object:
    """Generate, augment, batch, store and load data."""
    env = problem(name)
    td = env.generator(6)
    found = [content(td), content(batchify(td, 3)), content(unbatchify(batchify(td, 3), 3))]
    dataset = env.dataset(6)
    loader = DataLoader(dataset, batch_size=3, collate_fn=dataset.collate_fn)
    found += [content(batch) for batch in loader]
    if "locs" in td:
        found.append(content(StateAugmentation(num_augment=4)(td)))
        found.append(content(gather_by_index(td["locs"], torch.zeros(6, dtype=torch.long))))
    return found


def decoding(name: str, **how: object) -> object:
    """Decode with an attention policy."""
    env = problem(name)
    policy = models.AttentionModelPolicy(env_name=env.name, **SMALL)
    with torch.no_grad():
        out = policy(env.reset(batch_size=[4]), env, phase="test", return_actions=True, **how)
    return dict(out)


def training(make: Callable[..., object], name: str = "tsp", **options: object) -> object:
    """Train a model for one epoch with its own trainer."""
    env = problem(name)
    few = {"train_data_size": 16, "val_data_size": 4, "test_data_size": 4, "batch_size": 8}
    model = make(env, **few, **options)
    with tempfile.TemporaryDirectory() as folder:
        trainer = RL4COTrainer(
            max_epochs=1, accelerator="cpu", devices=1, logger=False, default_root_dir=folder,
            enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model)
        trainer.test(model, verbose=False)
    measured = {k: v for k, v in trainer.callback_metrics.items() if "time" not in k}
    return [fingerprint(model), content(measured)]


def attention(make: Callable[..., object], **options: object) -> Callable[..., object]:
    """Return what builds a model around a small attention policy."""

    def build(env: object, **few: object) -> object:
        policy = models.AttentionModelPolicy(env_name=env.name, **SMALL)
        return make(env, policy, **options, **few)

    return build


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each case by name."""
    for name in envs.ENV_REGISTRY:
        if name in ELSEWHERE:
            continue
        step = improving if name in ("tsp_kopt", "pdp_ruin_repair") else rollout
        yield f"{name} steps", partial(step, name)
        yield f"{name} data", partial(data, name)
    for name in ("tsp", "cvrp", "sdvrp", "pctsp", "op", "pdp", "mtsp", "cvrptw", "mdcpdp", "svrp"):
        yield f"{name} greedy", partial(decoding, name, decode_type="greedy")
    for kind, how in {
        "sampling": {},
        "multistart_greedy": {"num_starts": 3},
        "multistart_sampling": {"num_starts": 3},
        "beam_search": {"beam_width": 3},
    }.items():
        yield f"tsp {kind}", partial(decoding, "tsp", decode_type=kind, **how)
        yield f"cvrp {kind}", partial(decoding, "cvrp", decode_type=kind, **how)
    yield "tsp top", partial(decoding, "tsp", decode_type="sampling", top_k=3, top_p=0.9)
    yield "tsp logits", partial(decoding, "tsp", decode_type="greedy", return_entropy=True)
    for baseline in ("no", "exponential", "rollout", "mean"):
        made = attention(models.REINFORCE, baseline=baseline)
        yield f"REINFORCE {baseline}", partial(training, made)
    critic = {"critic_kwargs": {"embed_dim": 16, "hidden_dim": 16}}
    yield "A2C", partial(training, attention(models.A2C, **critic))
    yield "PPO", partial(training, attention(models.PPO, mini_batch_size=4, **critic))
    yield "POMO", partial(training, models.POMO, policy_kwargs=SMALL, num_augment=8)
    yield "SymNCO", partial(training, models.SymNCO, policy_kwargs=SMALL, num_augment=2)
    yield "AttentionModel", partial(training, models.AttentionModel, "cvrp", policy_kwargs=SMALL)
    yield "MDAM", partial(training, models.MDAM, policy_kwargs={"embed_dim": 16, "num_heads": 2})
    yield "HAM", partial(training, models.HeterogeneousAttentionModel, "pdp", policy_kwargs=SMALL)
    yield "PtrNet", partial(training, models.PointerNetwork)
    yield "L2D", partial(training, models.L2DModel, "jssp")


def train() -> Numbers:
    """Return what each case gives."""
    return results(dict(cases()))


if __name__ == "__main__":
    main(train)
