"""TorchRL's replay buffers: each storage with each sampler and writer; saved and loaded."""

import itertools
import tempfile
from collections.abc import Callable, Iterator

import torch
from measured import Numbers, main, results
from tensordict import NonTensorData, TensorClass, TensorDict, TensorDictBase
from torchrl.data import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from torchrl.data.replay_buffers import (
    CompressedListStorage,
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    NestedStorageCheckpointer,
    PrioritizedSliceSampler,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerEnsemble,
    StorageEnsemble,
    TensorDictRoundRobinWriter,
    WriterEnsemble,
)
from torchrl.data.replay_buffers.samplers import (
    ConsumingSampler,
    StalenessAwareSampler,
    StreamingSliceSampler,
)

Case = Callable[[], object]


class Step(TensorClass):
    """A step as a tensor class."""

    obs: torch.Tensor
    reward: torch.Tensor


def steps(count: int, *batch: int, words: bool = False) -> TensorDictBase:
    """Return rows of trajectories of five steps, with nested keys."""
    rows = torch.arange(count)
    td = TensorDict(
        obs=torch.randn(count, *batch, 3),
        td_error=torch.rand(count, *batch),
        traj=(rows // 5).reshape(count, *(1 for _ in batch)).expand(count, *batch).clone(),
        policy_version=torch.ones(count, *batch, dtype=torch.long),
        step_count=(rows % 5).reshape(count, *(1 for _ in batch)).expand(count, *batch).clone(),
        next=TensorDict(
            reward=torch.rand(count, *batch, 1),
            done=(rows % 5 == 4).reshape(count, *(1 for _ in batch), 1).expand(count, *batch, 1),
            batch_size=[count, *batch],
        ),
        batch_size=[count, *batch],
    )
    if words:
        td["word"] = NonTensorData("a", batch_size=[count, *batch])
    return td


STORAGES: dict[str, Callable[[], object]] = {
    "tensor": lambda: LazyTensorStorage(20),
    "tensor2": lambda: LazyTensorStorage(20, ndim=2),
    "memmap": lambda: LazyMemmapStorage(20),
    "list": lambda: ListStorage(20),
    "stack": lambda: LazyStackStorage(20),
    "given": lambda: TensorStorage(steps(20)),
    "compressed": lambda: CompressedListStorage(20),
}
SAMPLERS: dict[str, Callable[[], object]] = {
    "random": RandomSampler,
    "without": SamplerWithoutReplacement,
    "consuming": lambda: ConsumingSampler(2),
    "prioritized": lambda: PrioritizedSampler(20, alpha=0.7, beta=0.9),
    "slices": lambda: SliceSampler(num_slices=2, traj_key="traj"),
    "ends": lambda: SliceSampler(slice_len=2, end_key=("next", "done"), strict_length=False),
    "slices_without": lambda: SliceSamplerWithoutReplacement(num_slices=2, traj_key="traj"),
    "slices_prioritized": lambda: PrioritizedSliceSampler(
        20, alpha=0.7, beta=0.9, num_slices=2, traj_key="traj"
    ),
    "stale": lambda: StalenessAwareSampler(max_staleness=3),
    "streaming": lambda: StreamingSliceSampler(slice_len=2, traj_key="traj"),
}
WRITERS: dict[str, Callable[[], object]] = {
    "plain": RoundRobinWriter,
    "robin": TensorDictRoundRobinWriter,
    "largest": lambda: TensorDictMaxValueWriter(rank_key=("next", "reward")),
}


def used(buffer: ReplayBuffer, batch: tuple[int, ...] = (), words: bool = False) -> object:
    """Return what a buffer gives while it is filled, read, written, saved and loaded."""

    def rate() -> object:
        sample = buffer.sample(4)
        sample["td_error"] = sample["next", "reward"].squeeze(-1) + 1
        buffer.update_tensordict_priority(sample)
        return sample

    def save() -> object:
        with tempfile.TemporaryDirectory() as folder:
            buffer.dumps(folder)
            buffer.empty()
            empty = len(buffer)
            buffer.loads(folder)
        return [empty, len(buffer), buffer[:]]

    return results(
        {
            "extend": lambda: buffer.extend(steps(10, *batch, words=words)),
            "add": lambda: buffer.add(steps(1, *batch, words=words)[0]),
            "sample": lambda: buffer.sample(4, return_info=True),
            "again": lambda: buffer.sample(4, return_info=True),
            "over": lambda: buffer.extend(steps(15, *batch, words=words)),
            "len": lambda: len(buffer),
            "all": lambda: buffer[:],
            "one": lambda: buffer[2],
            "some": lambda: buffer[torch.tensor([0, 3])],
            "rate": rate,
            "rated": lambda: buffer.sample(4),
            "iterate": lambda: list(itertools.islice(iter(buffer), 2)),
            "state": buffer.state_dict,
            "save": save,
            "loaded": lambda: buffer.sample(4),
        }
    )


def buffers() -> Iterator[tuple[str, Case]]:
    """Yield each combination of parts."""
    for cls, storage, sampler, writer in itertools.product(
        (ReplayBuffer, TensorDictReplayBuffer), STORAGES, SAMPLERS, WRITERS
    ):
        if writer != "largest" or sampler in ("random", "without", "slices"):

            def case(
                cls: type = cls,
                storage: str = storage,
                sampler: str = sampler,
                writer: str = writer,
            ) -> object:
                parts = {
                    "storage": STORAGES[storage](),
                    "sampler": SAMPLERS[sampler](),
                    "writer": WRITERS[writer](),
                }
                return used(cls(**parts, batch_size=4), (2,) if storage == "tensor2" else ())

            yield f"{cls.__name__} {storage} {sampler} {writer}", case
    for storage, make in STORAGES.items():
        batch = (2,) if storage == "tensor2" else ()
        yield (
            f"words {storage}",
            lambda make=make, batch=batch: used(
                TensorDictReplayBuffer(storage=make(), batch_size=4), batch, words=True
            ),
        )
        yield f"class {storage}", lambda make=make: typed(make)
        yield f"moved {storage}", lambda make=make: moved(make)
    yield (
        "priorities",
        lambda: used(
            TensorDictPrioritizedReplayBuffer(
                alpha=0.7, beta=0.9, storage=LazyTensorStorage(20), batch_size=4
            )
        ),
    )
    yield "ensemble", ensemble
    yield (
        "ensemble of parts",
        lambda: ReplayBufferEnsemble(
            storages=StorageEnsemble(*(filled().storage for _ in range(2))),
            samplers=SamplerEnsemble(RandomSampler(), RandomSampler()),
            writers=WriterEnsemble(RoundRobinWriter(), RoundRobinWriter()),
            batch_size=4,
        ).sample(),
    )
    for checkpointer in (FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer):
        yield checkpointer.__name__, lambda kind=checkpointer: checkpointed(kind)


def filled() -> ReplayBuffer:
    """Return a buffer with ten steps."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
    buffer.extend(steps(10))
    return buffer


def typed(make: Callable[[], object]) -> object:
    """Store a tensor class."""
    buffer = ReplayBuffer(storage=make(), batch_size=4)
    buffer.extend(Step(torch.randn(6, 3), torch.rand(6), batch_size=[6]))
    buffer.add(Step(torch.randn(3), torch.rand(()), batch_size=[]))
    with tempfile.TemporaryDirectory() as folder:
        sample = buffer.sample()
        buffer.dumps(folder)
        buffer.loads(folder)
        return [sample, buffer[:], buffer.sample().obs, len(buffer)]


def moved(make: Callable[[], object]) -> object:
    """Hand the state of a buffer to another one."""
    first, second = (TensorDictReplayBuffer(storage=make(), batch_size=4) for _ in range(2))
    first.extend(steps(10))
    second.extend(steps(10))
    second.load_state_dict(first.state_dict())
    return [second[:], second.sample()]


def ensemble() -> object:
    """Sample from several buffers."""
    whole = ReplayBufferEnsemble(filled(), filled(), p=[0.3, 0.7], batch_size=4)
    return [whole.sample(), whole[0, :], whole[:, 1:3], whole.sample(6)]


def checkpointed(kind: type) -> object:
    """Save and load with another layout of the files."""
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(20), batch_size=4)
    buffer.storage.checkpointer = kind()
    data = steps(10)
    data["done"] = data["next", "done"].roll(1, 0)
    data["next", "obs"] = data["obs"].roll(-1, 0)
    buffer.extend(data)
    with tempfile.TemporaryDirectory() as folder:
        buffer.dumps(folder)
        other = TensorDictReplayBuffer(storage=LazyMemmapStorage(20), batch_size=4)
        other.storage.checkpointer = kind()
        other.loads(folder)
        return [other[:], other.sample()]


def train() -> Numbers:
    """Use each buffer."""
    return results(dict(buffers()))


if __name__ == "__main__":
    main(train)
