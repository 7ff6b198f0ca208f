"""Containers of every kind on the device: made, moved, mixed, stored and read again."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.core.kinds import FACTORIES
from tests.gpu.device import CPU, DEVICE, TORCH, assert_alike, devices
from torch import Tensor

from kd_core import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    UnbatchedTensor,
    lazy_stack,
    pad,
    pad_sequence,
)

OTHER = CPU if DEVICE != CPU else torch.device("meta")
"""A device that tensors of the device do not mix with."""


@pytest.fixture(params=list(FACTORIES))
def td(request: pytest.FixtureRequest) -> TensorDictBase:
    """A container of each kind, on the CPU."""
    return FACTORIES[request.param]()


MASK = torch.tensor([True, False, True])
ROWS = torch.tensor([2, 0, 2])

CALLS: dict[str, Callable[[TensorDictBase, torch.device], object]] = {
    "add a number": lambda td, d: td.select("a") + 1.5,
    "divide by a number": lambda td, d: td.select("a") / 3,
    "add itself": lambda td, d: td.select("a") + td.select("a"),
    "add a tensor": lambda td, d: td.select("a") + torch.ones(3, 4, device=d),
    "add in place": lambda td, d: td.clone().select("a").add_(2),
    "lerp": lambda td, d: td.select("a").lerp(td.select("a") * 2, 0.5),
    "clamp": lambda td, d: td.select("a").clamp(-1, 1),
    "compare": lambda td, d: td.select("a") == td.select("a"),
    "sum": lambda td, d: td.select("a").sum(0),
    "mean of all": lambda td, d: td.select("a").mean(),
    "norm": lambda td, d: td.select("a").norm(),
    "row": lambda td, d: td[1],
    "rows": lambda td, d: td[1:],
    "by numbers": lambda td, d: td[ROWS.to(d)],
    "by numbers of the CPU": lambda td, d: td[ROWS],
    "by a mask": lambda td, d: td[MASK.to(d)],
    "by a mask of the CPU": lambda td, d: td[MASK],
    "masked select": lambda td, d: td.masked_select(MASK.to(d)[:, None].expand(3, 4)),
    "where": lambda td, d: td.select("a").where(
        MASK.to(d)[:, None].expand(3, 4), td.select("a") * 0
    ),
    "gather": lambda td, d: td.select("a").gather(0, torch.zeros(2, 4, dtype=torch.int64).to(d)),
    "stack": lambda td, d: TORCH.stack([td, td]),
    "stack lazily": lambda td, d: lazy_stack([td, td])[0],
    "cat": lambda td, d: TORCH.cat([td, td], 1),
    "unbind": lambda td, d: list(td.unbind(0)),
    "split": lambda td, d: list(td.split([1, 2], 0)),
    "reshape": lambda td, d: td.reshape(-1),
    "permute": lambda td, d: td.permute(1, 0),
    "flip": lambda td, d: TORCH.flip(td, [0]),
    "roll": lambda td, d: TORCH.roll(td, 1, 0),
    "repeat": lambda td, d: td.repeat(2, 1),
    "clone": lambda td, d: td.clone(),
    "apply": lambda td, d: td.select("a").apply(torch.exp),
    "to float64": lambda td, d: td.select("a").to(torch.float64),
    "nested dicts": lambda td, d: td.select("a").to_dict(),
    "pack": lambda td, d: td.select("a").pack()[0],
    "zeros like": lambda td, d: TORCH.zeros_like(td),
    "new zeros": lambda td, d: td.new_zeros(2, 2),
    "consolidate": lambda td, d: td.consolidate(),
    "write a row": lambda td, d: _written(td, 1),
    "write rows by a mask": lambda td, d: _written(td, MASK.to(d)),
    "write rows by numbers": lambda td, d: _written(td, torch.tensor([0, 2]).to(d)),
    "update": lambda td, d: td.clone().update(td.select("a") * 2),
    "update in place": lambda td, d: td.clone().update_(td.select("a") * 2),
    "copy": lambda td, d: td.clone().copy_(td),
    "any": lambda td, d: (td.select("a") > 0).any(),
}


def _written(td: TensorDictBase, index: object) -> TensorDictBase:
    made = td.clone()
    made[index] = td[0:1].clone().zero_() if not isinstance(index, int) else td[0].clone().zero_()
    return made


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_what_it_gives_on_the_cpu(td: TensorDictBase, name: str) -> None:
    there = td.to(DEVICE)
    found, expected = CALLS[name](there, DEVICE), CALLS[name](td, CPU)
    assert_alike(found, expected)
    for each in found if isinstance(found, list) else [found]:
        if isinstance(each, TensorDictBase):
            assert devices(each) <= {DEVICE}
            assert each.device == DEVICE
    assert_alike(there, td)


def test_a_move_there_and_back_keeps_all(td: TensorDictBase) -> None:
    there = td.to(DEVICE)
    assert devices(there) == {DEVICE}
    assert there.to(DEVICE) is there
    assert_alike(there.cpu(), td)
    assert_alike(td.to(DEVICE, torch.float64).to("cpu").select("a"), td.select("a").double())
    for blocking in (True, False):
        assert_alike(td.to(DEVICE, non_blocking=not blocking), td)


def test_many_leaves_move_at_once() -> None:
    td = TensorDict({str(n): torch.full((3, n % 7 + 1), float(n)) for n in range(1000)}, [3])
    td["words"] = ["a", "b", "c"]
    there = td.to(DEVICE)
    if DEVICE != CPU:
        td.zero_()  # what was copied is copied when the call returns
    assert devices(there) == {DEVICE}
    back = there.cpu()
    for n in range(1000):
        assert bool((back[str(n)] == n).all())


def test_leaves_that_no_kernel_copies_are_cloned() -> None:
    waves = torch.tensor([1 + 2j, 3 - 1j], device=DEVICE)
    rest = (torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.bfloat16)
    leaves = {str(dtype): torch.tensor([1, 0], device=DEVICE).to(dtype) for dtype in rest}
    td = TensorDict({**leaves, "conj": waves.conj(), "neg": waves.conj().imag}, [2])
    for key, leaf in td.clone().items():
        assert leaf.dtype is td[key].dtype
        assert leaf.tolist() == td[key].tolist()


def test_a_leaf_under_two_keys_is_written_twice() -> None:
    shared = torch.full((1024,), 0.5, device=DEVICE)
    td = TensorDict({f"k{n}": torch.ones(1024, device=DEVICE) for n in range(6)}, [1024])
    td.update({"x": shared, "y": shared})
    once = torch.full((1024,), 0.5, device=DEVICE)
    td.sin_()
    assert torch.equal(td["x"], once.sin().sin())
    td.mul_(2.0)
    td.mul_(td.clone())
    assert td["x"] is td["y"]
    assert torch.equal(td["k0"], (torch.ones_like(once).sin() * 2) ** 2)


def test_leaves_and_sources_that_share_memory_are_written_in_turn() -> None:
    names = [f"k{n}" for n in range(6)]

    def written(device: torch.device) -> list[Tensor]:
        whole = torch.linspace(0.0, 1.0, 4096, device=device)
        td = TensorDict({name: whole[n : n + 2048] for n, name in enumerate(names)}, [2048])
        td.sin_()
        other = TensorDict({n: torch.full((8,), float(i)) for i, n in enumerate(names)}, [8])
        other = other.to(device)
        other.add_(TensorDict({a: other[b] for a, b in zip(names, names[::-1], strict=True)}, [8]))
        return [whole, *[other[name] for name in names]]

    for there, here in zip(written(DEVICE), written(CPU), strict=True):
        torch.testing.assert_close(there.cpu(), here)


def test_gradients_flow_through_a_move() -> None:
    leaves = {str(n): torch.rand(3, requires_grad=True) for n in range(40)}
    there = TensorDict(dict(leaves), [3]).to(DEVICE)
    total = sum((n + 1) * leaf.sum() for n, leaf in enumerate(there.values()))
    assert isinstance(total, Tensor)
    total.backward()
    for n, leaf in enumerate(leaves.values()):
        assert leaf.grad is not None
        assert bool((leaf.grad == n + 1).all())


def test_dtypes_and_layouts_survive_a_move() -> None:
    dtypes = (*(torch.float16, torch.bfloat16, torch.float64), torch.complex64)
    others = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    leaves = {str(d): torch.arange(12).reshape(3, 4).to(d) for d in (*dtypes, *others)}
    leaves["transposed"] = torch.arange(12.0).reshape(4, 3).T
    leaves["expanded"] = torch.arange(3.0)[:, None].expand(3, 4)
    leaves["strided"] = torch.arange(24.0).reshape(3, 8)[:, ::2]
    leaves["empty"] = torch.zeros(3, 0)
    leaves["conjugated"] = torch.arange(6).to(torch.complex64).reshape(3, 2).conj()
    td = TensorDict(leaves, [3])
    for later in (False, True):
        there = td.to(DEVICE, non_blocking=later)
        assert_alike(there.cpu(), td)
        for key, leaf in leaves.items():
            assert there[key].stride() == leaf.to(DEVICE).stride()
    assert_alike(td.consolidate(device=DEVICE).cpu(), td)


def test_sparse_and_nested_leaves_move() -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    td = TensorDict({"sparse": torch.eye(2).to_sparse(), "ragged": ragged}, [2])
    there = td.to(DEVICE)
    assert there["sparse"].device == there["ragged"].device == DEVICE
    torch.testing.assert_close(there["sparse"].to_dense().cpu(), torch.eye(2))
    assert bool((there["ragged"].values() == 1).all())
    back = there.cpu()
    assert back["ragged"].values().device == CPU


def ragged() -> LazyStackedTensorDict:
    members = [TensorDict({"x": torch.arange(float(n)), "s": "w"}) for n in (1, 3, 2)]
    return lazy_stack(members)


def test_ragged_stacks_are_padded_and_nested_on_the_device() -> None:
    there = ragged().to(DEVICE)
    padded = there.get("x", as_padded_tensor=True, padding_value=-1)
    expected = ragged().get("x", as_padded_tensor=True, padding_value=-1)
    assert padded.device == DEVICE
    assert_alike(padded, expected)
    nested = there.get("x", as_nested_tensor=True)
    assert nested.device == DEVICE
    for part, n in zip(nested.unbind(), (1, 3, 2), strict=True):
        assert_alike(part, torch.arange(float(n)))
    assert_alike((there + 1)[1]["x"], torch.arange(3.0) + 1)
    rows = pad_sequence([TensorDict({"x": member["x"]}, [len(member["x"])]) for member in there])
    assert devices(rows) == {DEVICE}
    assert rows.shape == (3, 3)


def test_padding_is_on_the_device() -> None:
    td = TensorDict({"x": torch.ones(2, 3)}, [2])
    assert_alike(pad(td.to(DEVICE), [1, 1], value=2), pad(td, [1, 1], value=2))


def test_what_is_no_tensor_comes_along() -> None:
    entries = {
        "x": torch.ones(3),
        "one": NonTensorData("text", batch_size=[3]),
        "rows": ["a", "b", "c"],
        "u": UnbatchedTensor(torch.arange(5)),
    }
    td = TensorDict(entries, [3])
    there = td.to(DEVICE)
    assert there["u"].device == DEVICE
    assert there["rows"] == td["rows"]
    for index in (ROWS, ROWS.to(DEVICE), MASK, MASK.to(DEVICE), slice(1, None), 1):
        assert there[index]["one"] == "text"
        assert (
            there[index]["rows"] == td[index.cpu() if isinstance(index, Tensor) else index]["rows"]
        )
    there[1] = there[0].clone()
    assert list(there["rows"]) == ["a", "a", "c"]
    assert_alike(TORCH.stack([there, there]).cpu(), TORCH.stack([there.cpu(), there.cpu()]))


def test_stores_and_files_take_and_give_the_device(tmp_path: Path, td: TensorDictBase) -> None:
    there = td.to(DEVICE)
    there.memmap(tmp_path / "maps")
    assert_alike(TensorDict.load_memmap(tmp_path / "maps"), td)
    read = TensorDict.load_memmap(tmp_path / "maps", device=DEVICE)
    assert devices(read) == {DEVICE}
    assert_alike(read, td)
    there.save(tmp_path / "saved")
    assert_alike(type(td).load(tmp_path / "saved", device=DEVICE), td)


def test_torch_saves_and_loads_with_a_location() -> None:
    td = FACTORIES["dense"]()
    stream = io.BytesIO()
    torch.save(td.to(DEVICE), stream)
    for place in (CPU, DEVICE):
        stream.seek(0)
        found = torch.load(stream, map_location=place, weights_only=False)
        assert devices(found) == {place}
        assert_alike(found, td)


def test_states_are_loaded_from_another_device() -> None:
    td = FACTORIES["dense"]()
    target = td.to(DEVICE).clone().zero_()
    target.load_state_dict(td.state_dict())
    assert_alike(target, td)


def test_one_storage_is_on_the_device() -> None:
    td = FACTORIES["dense"]()
    for there in (td.to(DEVICE).consolidate(), td.consolidate(device=DEVICE)):
        assert there.is_consolidated()
        assert devices(there) == {DEVICE}
        assert_alike(there, td)
        assert_alike(there.to("cpu"), td)


def test_a_mapped_leaf_moves(tmp_path: Path) -> None:
    td = TensorDict({"x": torch.arange(12.0).reshape(3, 4)}, [3]).memmap(tmp_path)
    there = td.to(DEVICE)
    assert devices(there) == {DEVICE}
    assert_alike(there["x"] + 1, torch.arange(12.0).reshape(3, 4) + 1)
    assert type(there["x"]) is Tensor or DEVICE == CPU


MIXES: dict[str, Callable[[TensorDictBase, TensorDictBase], object]] = {
    "operands": lambda here, there: there + here,
    "operands in place": lambda here, there: there.add_(here),
    "lerp in place": lambda here, there: there.lerp_(here, 0.5),
    "stack": lambda here, there: TORCH.stack([there, here]),
    "cat": lambda here, there: TORCH.cat([there, here]),
    "where": lambda here, there: there.where(torch.ones(3, dtype=torch.bool, device=DEVICE), here),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("count", [1, 2, 40])
def test_devices_that_do_not_mix_are_refused_and_nothing_is_written(mix: str, count: int) -> None:
    there = TensorDict({str(n): torch.ones(3, device=DEVICE) for n in range(count)}, [3])
    # The last leaf alone is elsewhere: what comes before it must not have been written.
    last = str(count - 1)
    here = TensorDict({str(n): torch.full((3,), 2.0, device=DEVICE) for n in range(count)}, [3])
    here[last] = torch.full((3,), 2.0, device=OTHER)
    with pytest.raises(RuntimeError) as caught:
        MIXES[mix](here, there)
    assert "device" in str(caught.value) or "meta" in str(caught.value)
    assert all(bool((leaf == 1).all()) for leaf in there.values())


def test_written_values_come_from_any_device() -> None:
    td = TensorDict({"x": torch.zeros(3, device=DEVICE), "y": torch.zeros(3, device=DEVICE)}, [3])
    x = td["x"]
    td.update_({"x": torch.ones(3), "y": torch.ones(3)})
    td[0] = TensorDict({"x": torch.tensor(5.0), "y": torch.tensor(5.0)})
    td.set_("y", torch.full((3,), 2.0))
    assert td["x"] is x
    assert x.device == DEVICE
    assert_alike(td, TensorDict({"x": torch.tensor([5.0, 1, 1]), "y": torch.full((3,), 2.0)}, [3]))
    placed = td.to(DEVICE)
    placed["z"] = torch.ones(3)
    assert placed["z"].device == DEVICE


def test_random_numbers_are_drawn_there() -> None:
    td = TensorDict({"x": torch.zeros(3, device=DEVICE)}, [3], device=DEVICE)
    torch.manual_seed(0)
    first = TORCH.randn_like(td)
    torch.manual_seed(0)
    assert first["x"].device == DEVICE
    assert torch.equal(first["x"], TORCH.randn_like(td)["x"])
