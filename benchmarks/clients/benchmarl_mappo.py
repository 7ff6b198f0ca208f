"""BenchMARL runs MAPPO on VMAS balance, for a few iterations."""

import tempfile

import torchrl.collectors
from measured import Numbers, fingerprint, main

# What BenchMARL 1.5.2 imports, TorchRL 0.14.1 calls so.
torchrl.collectors.SyncDataCollector = torchrl.collectors.Collector

from benchmarl.algorithms import MappoConfig  # noqa: E402
from benchmarl.environments import VmasTask  # noqa: E402
from benchmarl.experiment import Experiment, ExperimentConfig  # noqa: E402
from benchmarl.models.mlp import MlpConfig  # noqa: E402


def train() -> Numbers:
    """Train for three iterations."""
    config = ExperimentConfig.get_from_yaml()
    config.loggers, config.create_json, config.evaluation = [], False, False
    config.max_n_iters, config.max_n_frames = 3, None
    config.on_policy_collected_frames_per_batch = 600
    config.on_policy_n_envs_per_worker = 6
    config.on_policy_n_minibatch_iters, config.on_policy_minibatch_size = 3, 200
    with tempfile.TemporaryDirectory() as folder:
        config.save_folder = folder
        experiment = Experiment(
            task=VmasTask.BALANCE.get_from_yaml(),
            algorithm_config=MappoConfig.get_from_yaml(),
            model_config=MlpConfig.get_from_yaml(),
            critic_model_config=MlpConfig.get_from_yaml(),
            seed=0,
            config=config,
        )
        experiment.run()
    return {"policy": fingerprint(experiment.policy), "mean": float(experiment.mean_return)}


if __name__ == "__main__":
    main(train)
