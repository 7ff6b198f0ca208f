"""BenchMARL runs its algorithms on scenarios of VMAS, for two iterations each.

QMIX, VDN and IQL, and recurrent policies, fail with these releases under either library.
"""

import tempfile
from collections.abc import Callable
from functools import partial

import torchrl.collectors
from measured import Numbers, content, fingerprint, main, results

# What BenchMARL 1.5.2 imports, TorchRL 0.14.1 calls so.
torchrl.collectors.SyncDataCollector = torchrl.collectors.Collector

from benchmarl import algorithms  # noqa: E402
from benchmarl.environments import VmasTask  # noqa: E402
from benchmarl.experiment import Experiment, ExperimentConfig  # noqa: E402
from benchmarl.models import MlpConfig, SequenceModelConfig  # noqa: E402


def run(algorithm: str, task: str, model: object = None, **options: object) -> object:
    """Run one algorithm on one scenario."""
    config = ExperimentConfig.get_from_yaml()
    config.loggers, config.create_json, config.evaluation = [], False, False
    config.max_n_iters, config.max_n_frames = 2, None
    config.on_policy_collected_frames_per_batch = config.off_policy_collected_frames_per_batch = 120
    config.on_policy_n_envs_per_worker = config.off_policy_n_envs_per_worker = 6
    config.on_policy_n_minibatch_iters, config.on_policy_minibatch_size = 2, 60
    config.off_policy_n_optimizer_steps, config.off_policy_train_batch_size = 3, 32
    config.off_policy_memory_size, config.off_policy_init_random_frames = 500, 0
    for name, value in options.items():
        setattr(config, name, value)
    with tempfile.TemporaryDirectory() as folder:
        config.save_folder = folder
        experiment = Experiment(
            task=VmasTask[task].get_from_yaml(),
            algorithm_config=getattr(algorithms, f"{algorithm}Config").get_from_yaml(),
            model_config=model or MlpConfig.get_from_yaml(),
            critic_model_config=MlpConfig.get_from_yaml(),
            seed=0,
            config=config,
        )
        experiment.run()
    losses = {name: fingerprint(loss) for name, loss in experiment.losses.items()}
    return [fingerprint(experiment.policy), float(experiment.mean_return), content(losses)]


def cases() -> dict[str, Callable[[], object]]:
    """Return each case by name."""
    two = SequenceModelConfig(
        [MlpConfig.get_from_yaml(), MlpConfig.get_from_yaml()], intermediate_sizes=[16]
    )
    return {
        "IPPO": partial(run, "Ippo", "NAVIGATION", share_policy_params=False),
        "MAPPO sampling": partial(run, "Mappo", "SAMPLING", two),
        "IDDPG": partial(run, "Iddpg", "BALANCE"),
        "MADDPG": partial(run, "Maddpg", "TRANSPORT", two),
        "MASAC": partial(run, "Masac", "SIMPLE_TAG"),
        "ISAC": partial(run, "Isac", "BALANCE", prefer_continuous_actions=False),
    }


def train() -> Numbers:
    """Return what each algorithm gives."""
    return results(cases())


if __name__ == "__main__":
    main(train)
