"""TorchRL's transforms on classic control: a rollout through each, and through pairs of them."""

from collections.abc import Callable

import torch
from measured import Numbers, main, results
from tensordict import TensorDict
from torchrl.data import Composite, Unbounded
from torchrl.envs import GymEnv, SerialEnv, TransformedEnv, check_env_specs
from torchrl.envs import transforms as t

OBSERVATION, REWARD, ACTION = ["observation"], ["reward"], ["action"]
TRANSFORMS: dict[str, Callable[[], t.Transform]] = {
    "ActionDiscretizer": lambda: t.ActionDiscretizer(5),
    "ActionScaling": lambda: t.ActionScaling(),
    "BatchSizeTransform": lambda: t.BatchSizeTransform(reshape_fn=lambda td: td.reshape(1)),
    "BinarizeReward": lambda: t.BinarizeReward(REWARD),
    "BurnInTransform": lambda: t.BurnInTransform([], 2),
    "CatFrames": lambda: t.CatFrames(3, -1, OBSERVATION),
    "CatTensors": lambda: t.CatTensors(OBSERVATION, "vector"),
    "ClipTransform": lambda: t.ClipTransform(OBSERVATION, low=-0.5, high=0.5),
    "DeviceCastTransform": lambda: t.DeviceCastTransform("cpu"),
    "DoubleToFloat": lambda: t.DoubleToFloat(),
    "DTypeCastTransform": lambda: t.DTypeCastTransform(torch.float32, torch.float64, OBSERVATION),
    "ExcludeTransform": lambda: t.ExcludeTransform("truncated"),
    "FiniteTensorDictCheck": lambda: t.FiniteTensorDictCheck(),
    "FlattenObservation": lambda: t.FlattenObservation(-1, -1, OBSERVATION),
    "FrameSkipTransform": lambda: t.FrameSkipTransform(2),
    "gSDENoise": lambda: t.gSDENoise(state_dim=3, action_dim=1),
    "Hash": lambda: t.Hash(OBSERVATION, ["hashed"], hash_fn=hashed),
    "InitTracker": lambda: t.InitTracker(),
    "LineariseRewards": lambda: t.LineariseRewards(REWARD, weights=[2.0]),
    "MultiAction": lambda: t.MultiAction(),
    "NoopResetEnv": lambda: t.NoopResetEnv(3, random=False),
    "ObservationNorm": lambda: t.ObservationNorm(0.1, 2.0, OBSERVATION),
    "PermuteTransform": lambda: t.PermuteTransform([-1], OBSERVATION),
    "RandomTruncationTransform": lambda: t.RandomTruncationTransform(2, 4, 0.5),
    "RemoveEmptySpecs": lambda: t.RemoveEmptySpecs(),
    "RenameTransform": lambda: t.RenameTransform(OBSERVATION, ["seen"]),
    "RenameTransform copy": lambda: t.RenameTransform(
        OBSERVATION, [("nested", "seen")], create_copy=True
    ),
    "RewardClipping": lambda: t.RewardClipping(-1, 1),
    "RewardScaling": lambda: t.RewardScaling(1, 2),
    "RewardSum": lambda: t.RewardSum(),
    "SelectTransform": lambda: t.SelectTransform("observation"),
    "SignTransform": lambda: t.SignTransform(REWARD),
    "SqueezeTransform": lambda: t.UnsqueezeTransform(-1, in_keys=OBSERVATION),
    "Stack": lambda: t.Stack(OBSERVATION, "stacked"),
    "StepCounter": lambda: t.StepCounter(5),
    "TargetReturn": lambda: t.TargetReturn(10.0),
    "TensorDictPrimer": lambda: t.TensorDictPrimer(Composite(h=Unbounded(3)), random=False),
    "TensorDictPrimer nested": lambda: t.TensorDictPrimer({("n", "h"): Unbounded(3)}),
    "TerminateTransform": lambda: t.TerminateTransform(lambda td: td["reward"] < -5),
    "TimeMaxPool": lambda: t.TimeMaxPool(OBSERVATION, T=3),
    "TrajCounter": lambda: t.TrajCounter(),
    "UnaryTransform": lambda: t.UnaryTransform(OBSERVATION, ["sum"], fn=lambda x: x.sum(-1)),
    "UnsqueezeTransform": lambda: t.UnsqueezeTransform(-1, in_keys=OBSERVATION),
    "VecNormV2": lambda: t.VecNormV2(OBSERVATION),
    "ConditionalSkip": lambda: t.ConditionalSkip(lambda td: td["step_count"] % 2 == 1),
}
OF_ROWS: dict[str, Callable[[], t.Transform]] = {
    "Reward2GoTransform": lambda: t.Reward2GoTransform(0.9),
    "RandomCropTensorDict": lambda: t.RandomCropTensorDict(3),
    "MultiStepTransform": lambda: t.MultiStepTransform(2, 0.9),
    "ActionChunkTransform": lambda: t.ActionChunkTransform(3),
    "NextStateReconstructor": lambda: t.NextStateReconstructor(),
    "NextObservationDelta": lambda: t.NextObservationDelta(OBSERVATION),
}
ENVS: dict[str, Callable[[], object]] = {
    "one": lambda: GymEnv("Pendulum-v1"),
    "two": lambda: SerialEnv(2, lambda: GymEnv("Pendulum-v1")),
}


def hashed(value: torch.Tensor, seed: object = None) -> torch.Tensor:
    """Return a number for each row."""
    return (value * 100).sum(-1).long()


def rolled(env: TransformedEnv) -> object:
    """Return what an environment says of itself, gives and keeps."""
    env.set_seed(0)
    return results(
        {
            "specs": lambda: str(env.specs),
            "rollout": lambda: env.rollout(6),
            "broken": lambda: env.rollout(8, break_when_any_done=False),
            "fake": lambda: sorted(map(str, env.fake_tensordict().keys(True, True))),
            "state": lambda: env.state_dict(),
            "check": lambda: check_env_specs(env),
        }
    )


def of_rows(make: Callable[[], t.Transform]) -> object:
    """Return what a transform of a replay buffer makes of rows."""
    env = GymEnv("Pendulum-v1")
    env.set_seed(0)
    rows: TensorDict = env.rollout(8)
    return results({"forward": lambda: make()(rows.clone()), "inv": lambda: make().inv(rows)})


def train() -> Numbers:
    """Use each transform."""
    cases: dict[str, Callable[[], object]] = {}
    for size, env in ENVS.items():
        for name, make in TRANSFORMS.items():
            cases[f"{name} {size}"] = lambda env=env, make=make: rolled(
                TransformedEnv(env(), t.Compose(t.StepCounter(), make()))
            )
    for name, make in OF_ROWS.items():
        cases[name] = lambda make=make: of_rows(make)
    return results(cases)


if __name__ == "__main__":
    main(train)
