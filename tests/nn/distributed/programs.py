"""What each of three ranks runs to train keyed modules beside the same networks on plain tensors.

Each program returns the cases in which losses or gradients differ by a bit.
"""

import copy
import functools
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from tests.core.distributed.ranks import RANKS, Programs
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from kd_core import (
    InvalidArgument,
    InvalidValue,
    ShapeMismatch,
    TensorDict,
    TensorDictBase,
    cat,
    distributed,
    lazy_stack,
    stack,
)
from kd_nn import (
    InputMissing,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictParams,
    TensorDictSequential,
)

PROGRAMS = Programs()
program = PROGRAMS.add
Call = Callable[[nn.Module, Tensor], Tensor]
Wrap = Callable[[nn.Module], nn.Module]


class Plain(nn.Module):
    """The network without keys; the last part gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(4, 8), (8, 8), (8, 1), (8, 1)]
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second, head, other = self.layers
        h = torch.tanh(first(x))
        return head(second(h)), other(h)


class Doubled(TensorDictModuleBase):
    """A keyed module of a user, which takes containers alone."""

    in_keys = ["h"]  # noqa: RUF012  # the class declares its keys
    out_keys = ["h"]  # noqa: RUF012  # as above

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("h", tensordict["h"] * 1)


def keyed() -> TensorDictSequential:
    """Return the network with keys, which replaces what it reads on the way."""
    first, second, head, other = Plain().layers
    return TensorDictSequential(
        TensorDictModule(first, ["x"], ["h"]),
        TensorDictModule(torch.tanh, ["h"], ["h"]),
        Doubled(),
        TensorDictModule(second, ["h"], [("n", "g")]),
        TensorDictModule(head, [("n", "g")], ["y"]),
        TensorDictModule(other, ["h"], ["unused"]),
    )


def on_tensors(net: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = net(x)[0]
    return y


def by_container(net: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = net(TensorDict({"x": x}, [3]))["y"]
    return y


def from_the_given_container(net: nn.Module, x: Tensor) -> Tensor:
    td = TensorDict({"x": x}, [3])
    net(td)
    return td["y"]


def by_keyword(net: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = net(x=x)[2]
    return y


def by_lazy_stack(net: nn.Module, x: Tensor) -> Tensor:
    td = lazy_stack([TensorDict({"x": row}) for row in x.unsqueeze(1)])
    y: Tensor = net(td)["y"]
    return y.view(3, 1)


WAYS = [by_container, by_keyword]


def values_of(net: nn.Module, call: Call, accumulate: bool = False) -> list[Tensor]:
    """Return losses of two steps and the gradients of the last one, zeros where there is none."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        for part in range(2 if accumulate else 1):
            with silent(net, accumulate and not part):
                loss = call(net, torch.randn(3, 4, generator=generator)).square().mean()
                losses.append(loss.detach())
                loss.backward()
        if not step:
            optimizer.step()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
    return [*losses, *(grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads)]


def silent(net: Any, wanted: bool) -> Any:
    """Return the context in which gradients stay on each rank."""
    if isinstance(net, DistributedDataParallel):
        return net.no_sync() if wanted else nullcontext()
    if hasattr(net, "set_requires_gradient_sync"):
        net.set_requires_gradient_sync(not wanted)
    return nullcontext()


@functools.cache
def values_of_plain(wrap: Wrap, accumulate: bool) -> list[Tensor]:
    """Return what a wrapped plain network gives; it is trained once for all ways to call ours."""
    return values_of(wrap(Plain()), on_tensors, accumulate)


def difference(wrap: Wrap, plain: Wrap, call: Call, accumulate: bool = False) -> str:
    """Return what differs between a wrapped keyed network and a wrapped plain one."""
    mine = values_of(wrap(keyed()), call, accumulate)
    expected = values_of_plain(plain, accumulate)
    unequal = [at for at, pair in enumerate(zip(mine, expected, strict=True)) if not equal(*pair)]
    return f"{call.__name__} {accumulate}: {unequal}" if unequal else ""


def equal(mine: Tensor, expected: Tensor) -> bool:
    return mine.dtype == expected.dtype and torch.equal(mine, expected)


def parallel(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net, static_graph=True)


def sharded(policy: MixedPrecisionPolicy | None, inside: bool = False) -> Wrap:
    """Return what shards the parts of a network one by one, and the network.

    Args:
        policy: the dtypes of parameters and outputs.
        inside: whether what the keyed modules wrap is sharded instead of them.
    """
    mesh = init_device_mesh("cpu", (RANKS,))
    kwargs: dict[str, Any] = {"mesh": mesh} | ({"mp_policy": policy} if policy else {})

    def wrap(net: nn.Module) -> nn.Module:
        parts: Any = net.layers if isinstance(net, Plain) else net
        for part in parts:
            if any(True for _ in part.parameters()):
                fully_shard(part.module if inside else part, **kwargs)
        fully_shard(net, **kwargs)
        return net

    return wrap


def recomputed(net: Any) -> nn.Module:
    """Wrap each part of a network so that it is run again in the backward pass."""
    parts = net.layers if isinstance(net, Plain) else net
    for position in range(len(parts)):
        parts[position] = checkpoint_wrapper(parts[position])
    return net  # type: ignore[no-any-return]  # a module


def on_recomputed(wrap: Wrap) -> Wrap:
    return lambda net: wrap(recomputed(net))


POLICIES = [
    None,
    MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
]


@program
def data_parallel(rank: int) -> object:
    return [difference(parallel, parallel, call) for call in WAYS]  # a static graph is synchronised


@program
def data_parallel_within_other_modules(rank: int) -> object:
    class Net(nn.Module):
        """Return a container among other things."""

        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> dict[str, object]:
            return {"rows": [lazy_stack([self.net(TensorDict({"x": x}, [3]))])], "name": "net"}

    def call(net: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = net(x)["rows"][0][0]["y"]
        return y

    return [difference(lambda net: parallel(Net(net)), parallel, call)]


@program
def sharded_by_step(rank: int) -> object:
    found = []
    for policy in POLICIES:
        wrap = sharded(policy)
        for call in (*WAYS, from_the_given_container, by_lazy_stack):
            found.append(difference(wrap, wrap, call))
        found.append(difference(sharded(policy, inside=True), wrap, by_container))
        found.append(difference(wrap, wrap, by_container, True))
    return found


@program
def recomputed_in_the_backward_pass(rank: int) -> object:
    wraps = [parallel, *map(sharded, POLICIES[:2])]
    return [difference(on_recomputed(wrap), wrap, call) for call in WAYS for wrap in wraps]


@program
def parameters_in_a_container(rank: int) -> object:
    class Net(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.params = TensorDictParams(TensorDict.from_module(net))
            self.net = [net]  # not a part of the module

        def forward(self, x: Tensor) -> object:
            with self.params.to_module(self.net[0]):
                return self.net[0](x)

    def whole(net: nn.Module) -> nn.Module:
        fully_shard(net, mesh=init_device_mesh("cpu", (RANKS,)))
        return net

    def as_container(net: nn.Module) -> nn.Module:
        return Net(net)

    found = []
    for wrap in (parallel, whole):
        mine = values_of(wrap(as_container(Plain())), on_tensors)
        expected = values_of(wrap(Plain()), on_tensors)
        found += [
            at for at, pair in enumerate(zip(mine, expected, strict=True)) if not equal(*pair)
        ]
    return found


@program
def errors_of_sharded_modules(rank: int) -> object:
    net = sharded(POLICIES[1])(keyed())
    found: list[object] = []
    seen: list[str] = []
    net.register_forward_pre_hook(lambda _, args: seen.append(type(args[0]).__name__))
    for td in (TensorDict({"z": torch.ones(3, 4)}), TensorDict({"x": torch.ones(3, 5)})):
        try:
            net(td)
        except (InputMissing, RuntimeError) as error:
            found.append([type(error).__name__, list(td.keys())])
    locked = TensorDict({"x": torch.ones(3, 4), "label": "a"}, [3])
    made = net(locked)
    try:
        fully_shard(TensorDictParams({"a": torch.ones(2)}), mesh=init_device_mesh("cpu", (RANKS,)))
    except InvalidArgument as error:
        found.append(str(error))
    return [*found, made is locked, str(made["x"].dtype), str(made["y"].dtype), made["label"], seen]


def state_of(ranks: int, trained: bool) -> tuple[nn.Module, dict[str, Any]]:
    """Return a sharded network, and all that a checkpoint holds, for the first ranks."""
    mesh = DeviceMesh("cpu", list(range(ranks)))
    net = keyed()
    for part in (*net, net):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    value = 2.0 if trained else 0.0
    if trained:
        made = net(x=torch.ones(3, 4))
        (made[2] + made[3]).sum().backward()
        optimizer.step()
    parts = distribute_tensor(torch.arange(14.0).view(7, 2) * value, mesh, [Shard(0)])
    rows = [TensorDict({"x": torch.full((at,), value)}) for at in (1, 2)]
    td = TensorDict({"parts": parts, "n": {"rows": lazy_stack(rows), "name": "n"}})
    params = TensorDictParams({"a": torch.full((2,), value), "n": {"b": torch.full((2,), value)}})
    weights, moments = get_state_dict(net, optimizer)
    return net, {"td": td, "params": params, "net": weights, "optimizer": moments}


def told_state(state: dict[str, Any]) -> object:
    """Return the values of a state on all ranks, as text."""
    containers = {key: state[key].state_dict() for key in ("td", "params")}
    leaves = tree_leaves({**state, **containers})
    return [str(leaf.full_tensor() if isinstance(leaf, DTensor) else leaf) for leaf in leaves]


@program
def checkpoint_of_three_ranks_on_two(rank: int) -> object:
    _, state = state_of(RANKS, trained=True)
    save(state, checkpoint_id=PROGRAMS.folder / "first")
    expected = told_state(state)
    group = dist.new_group([0, 1])
    if rank == 2:
        return [True, True]
    _, found = state_of(2, trained=False)
    leaf = found["td"]["parts"]
    differed = told_state(found) != expected
    load(found, checkpoint_id=PROGRAMS.folder / "first", process_group=group)
    return [differed, told_state(found) == expected and found["td"]["parts"] is leaf]


@program
def checkpoint_that_does_not_fit_one_rank(rank: int) -> object:
    """Load a batch size that differs on rank 1 alone; each rank has saved leaves."""
    entries = {"a": torch.ones(3), "parts": sharded_leaves()["a"], "n": TensorDict({}, [6])}
    distributed.save_checkpoint({"td": TensorDict(entries)}, PROGRAMS.folder / "sizes")
    inner = TensorDict({}, [] if rank == 1 else [6])
    td = TensorDict({**entries, "n": inner}).apply(torch.zeros_like)
    found: list[object] = []
    try:
        distributed.load_checkpoint({"td": td}, PROGRAMS.folder / "sizes")
    except (ShapeMismatch, InvalidValue) as error:
        found = [type(error).__name__, str(error)]
    return [*found, td["a"].sum().item(), gathered(td["parts"]).sum().item()]


def leaves() -> dict[str, Any]:
    return {"a": torch.arange(18.0).view(6, 3) + 1, "n": {"b": torch.arange(6.0) + 1}}


def sharded_leaves() -> TensorDict:
    """Return leaves whose rows are on three ranks, and one that each of them has."""
    mesh = init_device_mesh("cpu", (RANKS,))
    found = leaves()
    a = distribute_tensor(found["a"], mesh, [Shard(0)])
    b = distribute_tensor(found["n"]["b"], mesh, [Replicate()])
    return TensorDict({"a": a, "n": {"b": b}}, [6])


MASK = torch.tensor([True, False, True, False, False, True])
OPERATIONS: dict[str, Callable[[TensorDict], object]] = {
    "arithmetic": lambda td: (td * td + 1).exp(),
    "in place": lambda td: td.add_(1).zero_(),
    "comparison": lambda td: td > 2,
    "reduction": lambda td: [td.sum(0), td.mean(), td.norm()],
    "blending": lambda td: td.lerp(td * 2, 0.5).clamp(0, 9),
    "indexing": lambda td: [td[1], td[1:3]],
    "shape": lambda td: [td.unsqueeze(0), td.expand(2, 6), td.view(3, 2), td.reshape(3, 2)],
    "partition": lambda td: [*td.split(2), *td.chunk(4), td.narrow(0, 1, 2)],
    "joining": lambda td: [stack([td, td]), cat([td, td]), lazy_stack([td, td])[1]],
    "rows": lambda td: [td.repeat(2), td.pad([0, 1])],
    "casting": lambda td: td.to(torch.float64).to("cpu"),
    "copying": lambda td: [td.clone(), copy.deepcopy(td), td.detach(), td.contiguous()],
    "writing": lambda td: [
        td.update_(td * 2),
        td.copy_(td + 1),
        td.load_state_dict(td.state_dict()),
    ],
    "structure": lambda td: [td.flatten_keys(), td.select("a"), td.update({"c": td["a"]})],
    "functions": lambda td: [td.apply(torch.exp), td.zero_(), tree_map(torch.exp, td)],
    "many leaves": lambda td: TensorDict({str(at): td["a"] for at in range(40)}, [6]) * 2,
}
MIXED: dict[str, Callable[[TensorDict], object]] = {
    "mask": lambda td: td[MASK],
    "rows": lambda td: td[[0, 5]],
    "index_select": lambda td: td.index_select(0, torch.tensor([0, 5])),
    "where": lambda td: td.where(MASK, td * 0),
    "masked_fill": lambda td: td.masked_fill(MASK, 0.0),
    "plain": lambda td: td + TensorDict(leaves(), [6]),
}
REFUSED: dict[str, Callable[[TensorDict], object]] = {
    "broadcast": lambda td: td.broadcast(0),
    "all_reduce": lambda td: td.all_reduce(),
    "all_gather": lambda td: td.all_gather(),
    "to_buffers": lambda td: td.to_buffers(),
    "share_memory_": lambda td: td.share_memory_(),
}


@program
def operations_on_sharded_leaves(rank: int) -> object:
    """Return the operations that differ from those on plain tensors, and what is refused."""
    found: list[object] = []
    for operations, context in ((OPERATIONS, nullcontext), (MIXED, implicit_replication)):
        for name, operation in operations.items():
            with context():
                made = operation(sharded_leaves())
            expected = tree_leaves(operation(TensorDict(leaves(), [6])))
            pairs = zip(map(gathered, tree_leaves(made)), expected, strict=True)
            found += [name for pair in pairs if not equal(*pair)]
    for name, operation in REFUSED.items():
        try:
            operation(sharded_leaves())
        except InvalidValue as error:
            found.append(f"{name}: {str(error).partition(' is ')[0].partition(' must ')[0]}")
    try:
        sharded_leaves()[MASK] = 0
    except RuntimeError as error:
        found.append("storage" in str(error))  # the words are those of torch's versions
    return found


def gathered(leaf: Tensor) -> Tensor:
    assert isinstance(leaf, DTensor)
    return leaf.full_tensor()


@program
def a_rank_killed_while_it_saves(rank: int) -> object:
    def write_data(self: FileSystemWriter, plan: Any, planner: Any) -> Any:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, plan, planner)

    def values(folder: str) -> object:
        td = TensorDict({"a": torch.zeros(2)})
        load({"td": td}, checkpoint_id=PROGRAMS.folder / folder, no_dist=True)
        return td["a"].tolist()

    td = TensorDict({"a": torch.ones(2)})
    distributed.save_checkpoint({"td": td}, PROGRAMS.folder / "step1")
    found: list[object] = []
    try:
        distributed.save_checkpoint({"td": td + 1}, PROGRAMS.folder / "step1")
    except InvalidValue as error:
        found.append(str(error))
    dist.barrier()
    write = FileSystemWriter.write_data
    patched: Any = FileSystemWriter
    patched.write_data = write_data  # in this process alone
    try:
        distributed.save_checkpoint({"td": td + 1}, PROGRAMS.folder / "step2")
    except distributed.CommunicationError as error:
        found.append(str(error))
    try:
        values("step2")
    except CheckpointException:
        found.append("not whole")
    return [*found, values("step1")]


if __name__ == "__main__":
    PROGRAMS.main()
