"""What each of three ranks runs to exchange containers."""

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.core.distributed.ranks import RANKS, Programs

from kd_core import (
    KdError,
    LazyStackedTensorDict,
    Locked,
    TensorDict,
    TensorDictBase,
    UnbatchedTensor,
    cat,
    distributed,
    lazy_stack,
    stack,
)
from kd_core._distributed import groups

PROGRAMS = Programs()
program = PROGRAMS.add


def plain(rank: int) -> TensorDict:
    """Return leaves of several dtypes; even ranks have them in another order."""
    entries: dict[str, Any] = {
        "a": torch.full((2, 2), float(rank)),
        "n": {"b": torch.full((2,), rank), "z": torch.full((2,), rank + 1j)},
        "t": torch.arange(6.0).view(3, 2).t().clone(memory_format=torch.preserve_format) * rank,
        "none": torch.zeros(2, 0),
    }
    order = list(entries) if rank % 2 else list(entries)[::-1]
    return TensorDict({key: entries[key] for key in order}, [2])


def ragged(rank: int) -> TensorDict:
    """Return as many rows as the rank plus one, which hold all kinds of entries."""
    count = rank + 1
    tokens = [torch.full((row + 1,), rank) for row in range(count)]
    stack = lazy_stack([TensorDict({"x": torch.full((row + 1,), rank)}) for row in range(count)])
    entries = {
        "a": torch.full((count, 2), float(rank)),
        "word": [f"{rank}.{row}" for row in range(count)],
        "tokens": torch.nested.nested_tensor(tokens, layout=torch.jagged),
        "stack": stack,
        "unit": "m",
    }
    return TensorDict(entries, [count], names=["row"])


def rows(rank: int) -> TensorDict:
    """Return two rows with ragged members and data."""
    stack = lazy_stack([TensorDict({"x": torch.full((n,), rank)}) for n in (1, 2)])
    words = [f"{rank}", "x"]
    return TensorDict({"a": torch.full((2,), rank), "word": words, "stack": stack}, [2])


def told(td: TensorDictBase) -> object:
    """Return the values of a container of `plain`."""
    return {
        "a": td["a"].tolist(),
        "b": td["n", "b"].tolist(),
        "z": [str(value) for value in td["n", "z"].tolist()],
        "t": td["t"].tolist(),
    }


def told_ragged(td: TensorDictBase) -> object:
    stack: TensorDictBase = td["stack"]  # type: ignore[assignment]  # it is a container
    return {
        "a": td["a"].tolist(),
        "word": td["word"],
        "tokens": [row.tolist() for row in td["tokens"].unbind()],
        "stack": [member["x"].tolist() for member in stack.unbind(0)],
        "unit": td["unit"],
        "names": td.names,
    }


def error_of(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except KdError as error:
        return [type(error).__name__, str(error)]
    return []


@program
def broadcast_in_place(rank: int) -> object:
    td = plain(rank)
    leaf = td["a"]
    made = td.broadcast(1)
    return [made is td, leaf is td["a"], told(td)]


@program
def broadcast_of_large_leaves(rank: int) -> object:
    """The leaves of rank 1 are sent from where they are, those of rank 0 are copied before."""
    found: list[object] = []
    for src in (1, 0):
        rows = torch.full((1 << 10, 3 << 9), float(rank))
        entries = {"b": rows, "n": {"c": torch.full((3 << 19,), rank + 1j)}, "a": rows.clone()}
        if rank == 0:
            entries["b"] = rows.t().contiguous().t()
        td = TensorDict(entries)
        td.broadcast(src)
        for leaf in (td["a"], td["b"], td["n", "c"]):
            value = leaf.flatten()[0]
            found.append([str(value.item()), bool((leaf == value).all())])
    return found


@program
def broadcast_to_none_and_to_an_empty_container(rank: int) -> object:
    td = ragged(2) if rank == 2 else None
    made = distributed.broadcast(td, 2)
    empty = ragged(2) if rank == 2 else TensorDict()
    empty.broadcast(2)
    return [told_ragged(made), told_ragged(empty), list(empty.batch_size)]


@program
def broadcast_of_data_in_place(rank: int) -> object:
    td = TensorDict({"a": torch.full((2,), rank), "w": [f"{rank}", "x"]}, [2])
    td["b"] = torch.nn.Parameter(torch.full((2,), float(rank)))
    td.broadcast(1)
    return [td["a"].tolist(), td["w"], td["b"].tolist()]


def named(name: str) -> TensorDict:
    """Return a container with a name for the whole batch, and for that of a member."""
    members = [TensorDict({"name": name, "rows": torch.ones(2)}, [2]) for _ in range(2)]
    return TensorDict({"a": torch.ones(2), "name": name, "stack": lazy_stack(members)}, [2])


@program
def broadcast_of_data_for_a_whole_batch(rank: int) -> object:
    td = named(f"{rank}")
    td.broadcast(1)
    found = [
        td["name"],
        *(member["name"] for member in td.nested("stack", LazyStackedTensorDict).unbind(0)),
    ]
    locked = TensorDict({"a": torch.full((2,), rank), "name": f"{rank}"}, [2]).lock_()
    try:
        locked.broadcast(1)
    except Locked as error:
        return [found, str(error), locked["a"].tolist(), locked["name"]]
    return [found, "", locked["a"].tolist(), locked["name"]]


@program
def all_reduce_of_few_and_of_many_bytes(rank: int) -> object:
    found = []
    for numel in (1, 100_000):
        for op in ("sum", "mean", dist.ReduceOp.MAX, "min", "product"):
            td = TensorDict({"a": torch.full((numel,), rank + 1.0), "w": f"{rank}"})
            td.all_reduce(op)
            found.append([td["a"][0].item(), td["a"][-1].item(), td["w"]])
    return found


def shared(rank: int, data: bool = False) -> TensorDict:
    """Return a tensor that all rows share, beside rows and perhaps data."""
    entries: dict[str, object] = {"a": torch.full((2,), float(rank))}
    entries["n"] = {"u": UnbatchedTensor(torch.full((3,), float(rank)))}
    return TensorDict(entries | ({"w": "x"} if data else {}), [2])


@program
def exchanges_of_what_all_rows_share(rank: int) -> object:
    found: list[object] = []
    for data in (False, True):
        summed, sent, reduced = (shared(rank + 1, data) for _ in range(3))
        summed.all_reduce()
        sent.broadcast(2)
        reduced.reduce(1)
        made = distributed.broadcast(shared(rank, data) if rank == 1 else None, 1)
        for td in (summed, sent, reduced, made):
            found.append([td["a"][0].item(), *td["n", "u"].tolist()])
    every = distributed.all_gather(shared(rank))
    try:
        stack(every)
    except KdError as error:
        found.append("`('n', 'u')` is an `UnbatchedTensor`" in str(error))
    equal = distributed.all_gather(shared(7))
    return [*found, [each["n", "u"][0].item() for each in every], stack(equal)["n", "u"].tolist()]


@program
def all_reduce_of_every_dtype(rank: int) -> object:
    floats = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    others = [torch.int64, torch.int32, torch.int8, torch.uint8, torch.complex64, torch.complex128]
    found = []
    for numel in (2, 50_000):
        ones = {str(dtype): torch.ones(numel, dtype=dtype) for dtype in (*floats, *others)}
        td = TensorDict(ones) * (rank + 1)
        td.all_reduce()
        found.append([str(leaf[-1].item()) for leaf in td.values()])
    return found


@program
def all_reduce_later_and_in_pieces(rank: int) -> object:
    td = TensorDict({"a": torch.full((50_000,), float(rank))}).lock_()
    handle = td.all_reduce(async_op=True, bucket_bytes=40_000)
    assert handle is not None
    handle.wait()
    handle.wait()
    small = TensorDict({"a": torch.full((2,), float(rank))})
    after = small.all_reduce(async_op=True)
    assert after is not None
    after.wait()
    return [sorted(set(td["a"].tolist())), small["a"].tolist(), handle.is_completed()]


@program
def reduce_to_one_rank(rank: int) -> object:
    found = []
    for numel in (2, 50_000):
        td = TensorDict({"a": torch.full((numel,), float(rank))})
        td.reduce(1, "sum")
        found.append(td["a"][-1].item())
    return found


@program
def all_reduce_of_members_and_parameters(rank: int) -> object:
    stack = lazy_stack([TensorDict({"x": torch.full((n,), float(rank))}) for n in (1, 2)])
    net = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(net.weight, float(rank))
    params = TensorDict(dict(net.named_parameters()))
    stack.all_reduce()
    params.all_reduce("mean")
    return [[row["x"].tolist() for row in stack.unbind(0)], net.weight.tolist()]


@program
def gathered_rows(rank: int) -> object:
    parts = ragged(rank).all_gather()
    at_one = distributed.gather(ragged(rank), 1)
    empty = TensorDict({"a": torch.zeros(rank, 2)}, [rank]).all_gather()
    return [
        [told_ragged(part) for part in parts],
        None if at_one is None else [told_ragged(part) for part in at_one],
        [len(part) for part in empty],
    ]


@program
def gathered_with_long_headers(rank: int) -> object:
    td = TensorDict({f"key{at}" * 20: torch.full((1,), rank) for at in range(400)}, [1])
    return [part["key7" * 20].tolist() for part in td.all_gather()]


@program
def gathered_and_stacked(rank: int) -> object:
    td = TensorDict({"a": torch.full((2,), float(rank))}, [2])
    if rank == 1:
        td = TensorDict({"a": torch.zeros(2, 2)}, [2, 2])
    made = td.gather_and_stack(1)
    return [made is td, td["a"].tolist()]


@program
def scattered(rank: int) -> object:
    parts = [ragged(each) for each in range(RANKS)] if rank == 0 else None
    return told_ragged(distributed.scatter(parts, 0))


@program
def shared_by_tokens(rank: int) -> object:
    """Rank 0 shares ragged rows; each rank works on its rows; all get them back in order."""
    td = ragged(6)
    parts, order = distributed.balanced_chunks(td, RANKS, "tokens")
    mine = distributed.scatter(parts if rank == 0 else None, 0)
    mine["a"].add_(1)
    back = distributed.restore_order(cat(mine.all_gather()), order)
    td["a"].add_(1)
    return [told_ragged(back) == told_ragged(td), mine["tokens"].values().numel()]


@program
def sent_and_received(rank: int) -> object:
    found = []
    for round_ in range(3):  # the second time without a header, the third one with a new one
        td = plain(rank) if round_ < 2 else TensorDict({"a": torch.full((2,), float(rank))})
        if rank == 0:
            td.send(1)
        elif rank == 1:
            td.recv(0)
            found.append(td["a"].tolist())
    return found


@program
def sent_later_to_each_other(rank: int) -> object:
    """Rank 0 and 1 both send before they receive."""
    if rank == 2:
        return []
    other = 1 - rank
    mine, theirs = rows(rank), rows(other)
    theirs["a"].fill_(-1)
    handle = mine.isend(other, init_tag=7)
    for pending in theirs.irecv(group_src=other, init_tag=7, return_premature=True):
        pending.wait()
    handle.wait()
    return [theirs["a"].tolist(), theirs["word"], [row["x"].tolist() for row in theirs["stack"]]]


@program
def sent_as_programs_of_tensordict_do(rank: int) -> object:
    """Handles are dropped, switches are set that change nothing, a mapped leaf receives."""
    if rank == 2:
        return []
    td = TensorDict({"a": torch.full((2,), float(1 - rank)), "n": {"b": torch.ones(2) - rank}}, [2])
    found: list[object] = []
    for early in (False, True):
        if rank == 0:
            td.isend(1, pseudo_rand=True)
            td.isend(1, return_early=True, consolidated=True)
            td.send(1, pseudo_rand=True, consolidated=True)
            continue
        mapped = (td * 0).memmap_()
        for target in (td.zero_(), mapped, (td * 0)):
            if early:
                for handle in target.irecv(0, return_premature=True, pseudo_rand=True):
                    handle.wait()
            else:
                target.irecv(0, consolidated=True)
            found.append([target["a"].tolist(), target["n", "b"].tolist()])
    return found


@program
def scattered_by_a_method(rank: int) -> object:
    td = TensorDict({"a": torch.zeros(2)}, [2])
    parts = [td + each for each in range(3)] if rank == 1 else None
    first = td.scatter(1, parts)
    again = td.scatter(src=1, tensordicts=parts)
    return [first["a"].tolist(), again["a"].tolist()]


@program
def made_from_another_rank(rank: int) -> object:
    td = ragged(0)
    if rank == 0:
        td.init_remote(1)
        td.init_remote(use_broadcast=True)
        return told_ragged(td)
    if rank == 1:
        td = TensorDict.from_remote_init(0)
    both = TensorDict.from_remote_init(0, use_broadcast=True)
    return [told_ragged(td), told_ragged(both)]


@program
def within_a_part_of_the_ranks(rank: int) -> object:
    group = dist.new_group([1, 2])
    if rank == 0:
        return error_of(lambda: plain(0).broadcast(1, group=group))
    td = plain(rank).broadcast(2, group=group)
    td.all_reduce(group=group)
    outside = error_of(lambda: td.broadcast(0, group=group))
    return [td["a"].tolist(), outside]


@program
def received_in_an_unlike_container(rank: int) -> object:
    td = TensorDict({"a": torch.full((rank + 2,), float(rank))})
    if rank == 0:
        td.send(1)
        TensorDict({"a": torch.ones(3)}).send(1)
    elif rank == 1:
        error = error_of(lambda: td.recv(0))
        before = td["a"].tolist()
        td.recv(0)
        return [error, before, td["a"].tolist()]
    return []


@program
def calls_that_do_not_agree(rank: int) -> object:
    shape = TensorDict({"a": torch.zeros(2 + (rank == 1))})
    key = TensorDict({"a": torch.zeros(2), ("n", "b" if rank else "c"): torch.zeros(2)})
    dtype = TensorDict({"a": torch.zeros(2, dtype=torch.float64 if rank == 2 else torch.float32)})
    whole = TensorDict({"a": torch.arange(2)})
    shared = TensorDict({"a": torch.zeros(1).expand(2) if rank == 1 else torch.zeros(2)})
    rows = TensorDict({"a": torch.zeros(2, 3 + rank)}, [2])
    alike = TensorDict({"a": torch.full((2,), float(rank))})
    sparse = TensorDict({"a": torch.eye(2).to_sparse() if rank == 2 else torch.eye(2)})
    calls: list[Callable[[], object]] = [
        shape.all_reduce,
        lambda: key.broadcast(0),
        lambda: dtype.reduce(0),
        lambda: whole.all_reduce("mean"),
        lambda: shared.broadcast(0),
        rows.all_gather,
        lambda: alike.all_reduce("sum" if rank else "max"),
        lambda: alike.all_reduce() if rank else alike.broadcast(0),
        lambda: alike.gather_and_stack(0),
        lambda: distributed.scatter([alike] if rank == 1 else None, 1),
        lambda: distributed.broadcast(alike if rank else None, 0),
        sparse.all_reduce,
        lambda: ragged(0).broadcast(0),
        lambda: TensorDict({"a": torch.zeros(1).expand(2), "unit": "m"}).broadcast(0),
    ]
    found = [error_of(call) for call in calls]
    alike.all_reduce()  # the group is as it was
    return [found, alike["a"].tolist()]


@program
def agreement_in_a_large_group(rank: int) -> object:
    """Agree as more ranks do than can gather what each of them says."""
    few, groups.FEW_RANKS = groups.FEW_RANKS, 1  # type: ignore[misc]  # in this process alone
    try:
        different = error_of(TensorDict({"a": torch.zeros(2 + (rank == 1))}).all_reduce)
        td = plain(rank)
        td.all_reduce()
        made = distributed.broadcast(ragged(1) if rank == 1 else None, 1)
        parts = ragged(rank).all_gather()
    finally:
        groups.FEW_RANKS = few  # type: ignore[misc]  # as above
    return [
        different[0],
        td["a"].tolist(),
        told_ragged(made),
        [told_ragged(part) for part in parts],
    ]


@program
def a_rank_that_does_not_send(rank: int) -> object:
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    td = TensorDict({"a": torch.zeros(2)})
    found = [] if rank else error_of(lambda: td.recv(2, group=group))
    dist.barrier()
    return found


@program
def a_rank_that_does_not_answer(rank: int) -> object:
    timeout = datetime.timedelta(seconds=1)
    group = dist.new_group(timeout=timeout)
    td = TensorDict({"a": torch.full((2,), float(rank))})
    td.all_reduce("max", group=group)
    if rank == 1:
        return []
    return [*error_of(lambda: td.all_reduce(group=group)), td["a"].tolist()]


@program
def a_rank_that_ends(rank: int) -> object:
    td = TensorDict({"a": torch.full((50_000,), float(rank))})
    if rank == 2:
        return None
    call = td.all_reduce if rank else lambda: td.broadcast(2)
    return [*error_of(call), sorted(set(td["a"].tolist()))]


if __name__ == "__main__":
    told_ragged(ragged(0))  # the first jagged tensor imports a large part of torch
    PROGRAMS.main()
