import copy
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from kd_core import (
    InvalidArgument,
    Locked,
    MemoryMappedTensor,
    TensorDict,
    TensorDictBase,
    TensorDictFuture,
    UnbatchedTensor,
    from_module,
)
from kd_nn import TensorDictParams


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1))


def first_of(net: nn.Sequential) -> nn.Linear:
    layer = net[0]
    assert isinstance(layer, nn.Linear)
    return layer


def test_state_dict_has_the_names_of_the_module_and_loads_both_ways() -> None:
    net, other = network(), network()
    params = TensorDictParams.of_module(net)
    assert list(params.state_dict()) == list(net.state_dict())
    first_of(other).reset_parameters()
    other.load_state_dict(params.state_dict())
    assert torch.equal(first_of(other).weight, first_of(net).weight)
    first_of(other).reset_parameters()
    params.load_state_dict(other.state_dict())
    assert torch.equal(first_of(other).weight, first_of(net).weight)


def test_of_module_shares_tensors_and_keeps_buffers_buffers() -> None:
    net = network()
    made = [TensorDictParams.of_module(net), from_module(net, as_module=True)]
    for params in made:
        assert isinstance(params, TensorDictParams)
        assert params["0", "weight"] is net[0].weight
        assert [name for name, _ in params.named_buffers()] == [n for n, _ in net.named_buffers()]


def test_floating_leaves_become_parameters_bfloat16_too() -> None:
    params = TensorDictParams(
        {"w": {"half": torch.zeros(2, dtype=torch.bfloat16)}, "count": torch.arange(2)}
    )
    assert isinstance(params["w", "half"], nn.Parameter)
    assert [name for name, _ in params.named_parameters()] == ["w.half"]
    assert [name for name, _ in params.named_buffers()] == ["count"]


def test_no_convert_registers_plain_tensors_as_buffers() -> None:
    params = TensorDictParams(
        {"w": torch.zeros(2), "p": nn.Parameter(torch.zeros(1))}, no_convert=True
    )
    assert [name for name, _ in params.named_parameters()] == ["p"]


def of_kinds(params: TensorDictParams, *kinds: type | None) -> bool:
    """Return whether the leaves are of these kinds; None: plain tensors."""
    found = [
        next((kind for kind in (nn.Parameter, nn.Buffer) if isinstance(leaf, kind)), None)
        for _, leaf in params.items(True, True)
    ]
    return found == list(kinds)


def test_what_is_not_trained_is_an_nn_buffer() -> None:
    """Losses of TorchRL are asked whether their target parameters are."""
    given = TensorDict(
        {"p": nn.Parameter(torch.ones(1)), "t": torch.ones(1), "n": {"c": torch.arange(2)}}
    )
    assert of_kinds(TensorDictParams(given), nn.Parameter, nn.Parameter, nn.Buffer)
    assert of_kinds(TensorDictParams({"z": torch.ones(1, dtype=torch.complex64)}), nn.Buffer)
    params = TensorDictParams(given, no_convert=True)
    assert params["t"].data_ptr() == given["t"].data_ptr()
    assert not isinstance(given["t"], nn.Buffer)
    params["t"] = params["n", "c"] = torch.zeros(2)
    kinds = nn.Parameter, nn.Buffer, nn.Buffer
    before = list(params.buffers())
    nn.ModuleDict({"params": params}).double()
    assert all(one is other for one, other in zip(before, params.buffers(), strict=True))
    assert params["t"].dtype is torch.float64
    assert of_kinds(params, *kinds)
    for each in (params, params.to(torch.float16), params.clone(), copy.deepcopy(params)):
        assert of_kinds(each, *kinds)
    assert of_kinds(pickle.loads(pickle.dumps(params)), *kinds)
    params.load_state_dict(params.clone().state_dict(), assign=True)
    assert of_kinds(params, *kinds)


def test_skip_leaves_tensors_what_they_are(tmp_path: Path) -> None:
    given = TensorDict({"p": nn.Parameter(torch.ones(1)), "t": torch.ones(1)})
    given["b"] = nn.Buffer(torch.ones(1))
    params = TensorDictParams(given, no_convert="skip")
    assert of_kinds(params, nn.Parameter, None, nn.Buffer)
    assert all(params[key] is leaf for key, leaf in given.items())
    params["new"] = torch.ones(1)
    assert of_kinds(params, nn.Parameter, None, nn.Buffer, nn.Buffer)
    params.save(tmp_path / "a.kd")
    assert TensorDictParams.load(tmp_path / "a.kd").no_convert == "skip"


def test_a_tensor_that_needs_gradients_stays_in_its_graph() -> None:
    weight = torch.ones(1, requires_grad=True)
    params = TensorDictParams({"w": weight, "twice": weight * 2}, no_convert=True)
    (params["w"] + params["twice"]).backward()
    assert weight.grad == 3


def test_a_tensor_with_several_names_becomes_one_buffer() -> None:
    one = torch.arange(2)
    for no_convert in (False, True):
        params = TensorDictParams({"a": one, "n": {"b": one}}, no_convert=no_convert)
        assert params["a"] is params["n", "b"]


@pytest.mark.parametrize(
    "operation", [lambda p: p + 1, lambda p: p.data, lambda p: p.memmap(), lambda p: -p]
)
def test_results_are_plain_containers(operation) -> None:  # type: ignore[no-untyped-def]  # the parameter takes functions of several types
    result = operation(TensorDictParams({"a": torch.ones(2), "b": {"c": torch.ones(2)}}))
    assert type(result) is type(result["b"]) is TensorDict


@pytest.mark.parametrize("method", ["memmap", "memmap_like"])
def test_a_memory_map_holds_plain_tensors_that_are_not_trained(method: str) -> None:
    params = TensorDictParams({"a": torch.ones(2), "b": {"c": torch.ones(2)}})
    mapped = getattr(params, method)()
    assert type(mapped) is TensorDict
    assert mapped.is_locked
    assert isinstance(mapped["b", "c"], MemoryMappedTensor)
    assert not mapped["a"].requires_grad
    assert torch.equal(mapped["a"], torch.ones(2) if method == "memmap" else torch.zeros(2))


def test_a_map_made_early_is_plain_too(tmp_path: Path) -> None:
    params = TensorDictParams({"a": torch.ones(2)})
    future = params.memmap(tmp_path / "early", return_early=True, num_threads=2)
    assert type(cast(TensorDictFuture, future).result()) is TensorDict


@pytest.mark.parametrize("copied", [lambda p: p.copy(), copy.copy])
def test_a_shallow_copy_is_a_module_that_shares_its_parameters(
    copied: Callable[[TensorDictParams], TensorDictParams],
) -> None:
    params = TensorDictParams({"a": torch.ones(2), "b": {"c": torch.ones(2)}})
    again = copied(params)
    assert type(again) is TensorDictParams
    assert again is not params
    assert again["b", "c"] is params["b", "c"]
    del again["a"]
    assert "a" in params


def test_a_function_is_applied_in_place_as_an_optimiser_writes() -> None:
    params = TensorDictParams({"a": torch.ones(2)})
    assert params.apply_(lambda leaf: leaf * 2) is params
    assert params["a"].tolist() == [2.0, 2.0]
    assert params["a"].grad_fn is None


def test_loading_and_clearing_gradients_return_the_parameters() -> None:
    params = TensorDictParams({"a": torch.ones(2)})
    assert params.load_state_dict({"a": torch.zeros(2)}) is params
    assert params.load_state_dict({}, strict=False) is params
    assert params.zero_grad() is params
    assert params["a"].tolist() == [0.0, 0.0]
    with pytest.raises(RuntimeError, match="Missing key"):
        params.load_state_dict({})


def test_a_state_dict_in_levels_is_loaded_too() -> None:
    params = TensorDictParams({"a": torch.ones(2), "b": {"c": {"d": torch.ones(2)}}})
    levels = params.state_dict(flatten=False)  # type: ignore[call-overload]  # as of a container
    assert list(levels) == ["a", "b"]
    assert torch.equal(TensorDict(levels)["b", "c", "d"], torch.ones(2))
    again = TensorDictParams({"a": torch.zeros(2), "b": {"c": {"d": torch.zeros(2)}}})
    again.load_state_dict(levels)
    assert again["b", "c", "d"].tolist() == [1.0, 1.0]


def test_what_has_positions_or_listed_keys_is_no_module() -> None:
    """Whoever builds parameters names them, in a mapping or an object with fields."""
    assert type(TensorDictParams.from_any({"a": torch.ones(2)})) is TensorDictParams
    assert not isinstance(TensorDictParams.from_any((torch.ones(2), 1)), nn.Module)
    assert type(TensorDictParams.from_tuple((torch.ones(2), {"x": 1}))) is TensorDict
    assert type(TensorDictParams.from_pytree({"a": torch.ones(2)})) is TensorDict
    assert type(TensorDictParams.fromkeys(["a", "b"])) is TensorDict


def test_optimizer_updates_the_leaves_that_a_module_computed_with() -> None:
    net = network()
    params = TensorDictParams.of_module(copy.deepcopy(net))
    optimizer = torch.optim.SGD(params.parameters(), lr=0.1)
    with params.to_module(net):
        loss = net(torch.randn(4, 2)).sum()
    loss.backward()
    optimizer.step()
    assert net[0].weight.grad is None
    assert not torch.equal(params["0", "weight"], first_of(net).weight)


def test_parameters_belong_to_the_module_that_holds_the_container() -> None:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.params = TensorDictParams.of_module(network())

    agent = Agent().double()
    assert "params.0.weight" in agent.state_dict()
    assert agent.params["0", "weight"].dtype is torch.float64
    assert len(list(agent.modules())) == 5


def test_casts_are_in_place_as_in_a_module() -> None:
    params = TensorDictParams.of_module(network())
    weight = params["0", "weight"]
    assert params.double() is params
    assert params["0", "weight"] is weight
    assert weight.dtype is torch.float64


def test_tensors_are_attributes() -> None:
    net = nn.Linear(2, 1)
    assert TensorDictParams.of_module(net).weight is net.weight


class _Annotated:
    size: int = 0


def test_a_name_of_modules_and_containers_is_decided_on() -> None:
    of_a_container = {"__repr__", "apply"}
    concerns = {name for kind in TensorDictBase.__mro__[:-1] for name in vars(kind)}
    made_by_python = set(vars(_Annotated))  # more of them with each version
    names = concerns & set(vars(nn.Module)) - made_by_python - set(vars(TensorDictParams))
    assert names <= of_a_container


def test_moves_and_gradients_are_those_of_a_module() -> None:
    params = TensorDictParams(TensorDict(w=torch.ones(2)))
    assert params.to(torch.float64) is params
    assert params.type(torch.float16) is params
    assert params["w"].dtype is torch.float16
    params.float()
    params["w"].sum().backward()
    params.zero_grad()
    assert params["w"].grad is None
    assert params.requires_grad_(False) is params
    assert not params["w"].requires_grad


def test_no_method_of_a_module_is_hidden_but_apply() -> None:
    """Hooks of FSDP are refused; all others are registered as ever."""
    hidden = [
        name
        for name in vars(nn.Module)
        if not name.startswith("__")
        and inspect.unwrap(getattr(TensorDictParams, name)) is not getattr(nn.Module, name)
    ]
    # They take one parameter more, or return the container.
    wrapped = ["state_dict", "load_state_dict", "zero_grad"]
    assert sorted(hidden) == sorted(["apply", "register_forward_pre_hook", *wrapped])
    params = TensorDictParams({"a": torch.ones(2)})
    handle = params.register_forward_pre_hook(lambda module, args: None)
    assert handle.id in params._forward_pre_hooks


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_copies_are_independent_and_of_the_same_kind(copied) -> None:  # type: ignore[no-untyped-def]  # the parameter takes functions of several types
    params = TensorDictParams.of_module(network())
    again = copied(params)
    assert isinstance(again, TensorDictParams)
    assert torch.equal(again["0", "weight"], params["0", "weight"])
    assert again["0", "weight"] is not params["0", "weight"]
    assert isinstance(again["0", "weight"], nn.Parameter)


def test_a_deep_copy_is_not_locked() -> None:
    params = TensorDictParams.of_module(network()).lock_()
    again = copy.deepcopy(nn.ModuleDict({"params": params}))["params"]
    assert isinstance(again, TensorDictParams)
    assert params.is_locked
    assert not again.is_locked
    assert not any(getattr(each, "is_locked", False) for each in again.values())
    again["0", "more"] = torch.ones(2)
    assert "0.more" in dict(again.named_buffers())


def test_writing_an_entry_registers_it_and_deleting_removes_it() -> None:
    params = TensorDictParams({"a": torch.ones(2)})
    params["b", "c"] = torch.zeros(3)
    params["a"] = torch.arange(2)
    assert [name for name, _ in params.named_parameters()] == ["b.c"]
    assert [name for name, _ in params.named_buffers()] == ["a"]
    del params["b"]
    assert list(params.keys()) == ["a"]


def test_what_takes_the_place_of_a_parameter_is_one() -> None:
    params = TensorDictParams({"weight": torch.ones(2), "bias": torch.ones(2)})
    params["weight"] = torch.zeros(2)
    assert [name for name, _ in params.named_parameters()] == ["weight", "bias"]
    params["bias"] = nn.Buffer(torch.zeros(2))
    assert [name for name, _ in params.named_parameters()] == ["weight"]


def test_a_tensor_in_the_place_of_a_parameter_of_a_module_is_not_trained() -> None:
    """Losses of TorchRL freeze thus what two networks share."""
    params = TensorDictParams.of_module(nn.BatchNorm1d(2))
    weight = params["weight"]
    params.set("weight", weight.data)
    params["running_mean"] = params["new"] = torch.zeros(2)
    assert [name for name, _ in params.named_parameters()] == ["bias"]
    assert params["weight"].data_ptr() == weight.data_ptr()
    params["weight"] = weight
    assert [name for name, _ in params.named_parameters()] == ["weight", "bias"]


def test_lock_forbids_new_entries() -> None:
    params = TensorDictParams({"a": {"b": torch.ones(2)}}).lock_()
    with pytest.raises(RuntimeError, match="locked"):
        params["a", "c"] = torch.ones(1)
    with pytest.raises(RuntimeError, match="locked"):
        params.get("a").unlock_()  # type: ignore[union-attr]  # nested


def test_target_network_follows_by_lerp() -> None:
    source = TensorDictParams({"a": {"b": torch.ones(2)}})
    target = TensorDictParams({"a": {"b": torch.zeros(2)}})
    with torch.no_grad():
        target.lerp_(source, 0.25)
    assert target["a", "b"].tolist() == [0.25, 0.25]
    assert isinstance(target["a", "b"], nn.Parameter)


def normed(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    for _ in range(seed):
        net(torch.randn(5, 2))
    return net


def test_target_network_with_batch_statistics_follows_its_source() -> None:
    target, source = normed(1), normed(3)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    params = TensorDictParams.of_module(target)
    with torch.no_grad():
        assert params.lerp_(TensorDictParams.of_module(source), 0.25) is params
    for name, value in source.state_dict().items():
        expected = before[name].lerp(value, 0.25) if value.is_floating_point() else value
        torch.testing.assert_close(target.state_dict()[name], expected)


def in_place(params: TensorDictParams, other: TensorDictParams, name: str) -> object:
    key = ("0", "weight")
    match name:
        case "fill_ at a key":
            return params.fill_(key, 2.0)
        case "set_":
            return params.set_(key, other[key])
        case "zero_" | "fill_":
            return params.zero_() if name == "zero_" else params.fill_(1.0)
        case "lerp_":
            return params.lerp_(other, 0.5)
    return getattr(params, name)(other)


WRITES = ["copy_", "update_", "zero_", "fill_", "fill_ at a key", "set_", "lerp_"]


@pytest.mark.parametrize("name", WRITES)
def test_values_are_written_as_an_optimiser_does(name: str) -> None:
    net = network()
    params, other = (TensorDictParams.of_module(each) for each in (net, copy.deepcopy(net)))
    other.data.apply_(lambda leaf: leaf.add_(1))
    before = params["0", "weight"].clone()
    assert in_place(params, other, name) is params
    weight = params["0", "weight"]
    assert weight is first_of(net).weight
    assert weight.is_leaf
    assert weight.requires_grad
    assert not torch.equal(weight, before)


def test_a_clone_is_of_the_same_kind_and_keeps_what_is_shared() -> None:
    net = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "n": nn.BatchNorm1d(2)})
    cast(nn.Linear, net["b"]).weight = cast(nn.Linear, net["a"]).weight
    cast(nn.Linear, net["a"]).bias.requires_grad_(False)
    params = TensorDictParams.of_module(net)
    made = params.clone()
    assert type(made) is TensorDictParams
    assert made["a", "weight"] is made["b", "weight"]
    assert made["a", "weight"] is not params["a", "weight"]
    assert len(list(made.parameters())) == len(list(params.parameters()))
    assert len(list(made.buffers())) == len(list(params.buffers()))
    assert not made["a", "bias"].requires_grad
    params.zero_()
    params.load_state_dict(made.state_dict(flatten=True), from_flatten=True)  # type: ignore[call-overload]  # for programs that say so
    assert torch.equal(params["a", "weight"], made["a", "weight"])
    assert params.clone(False)["a", "weight"] is params["a", "weight"]


def test_target_network_that_cannot_follow_is_left_as_it_was() -> None:
    target, source = normed(1), normed(3)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    params, end = TensorDictParams.of_module(target), TensorDictParams.of_module(source)
    odd = end.data.set(("1", "num_batches_tracked"), torch.zeros(2, dtype=torch.long))
    with torch.no_grad(), pytest.raises(ValueError, match="must have one shape in both"):
        params.lerp_(odd, 0.25)
    for name, value in target.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers_train_what_is_of_a_module(
    kind: type[torch.optim.SGD] | type[torch.optim.AdamW],
) -> None:
    net = normed(1)
    params = copy.deepcopy(TensorDictParams.of_module(net))
    optimizer = kind(params.parameters(), lr=0.1)
    x, losses = torch.randn(8, 2), []
    for _ in range(5):
        optimizer.zero_grad()
        with params.to_module(net):
            loss = (net(x) - 3).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert net[0].weight.grad is None


def test_vmap_over_stacked_parameters() -> None:
    net = nn.Linear(2, 1)
    states = [TensorDict.from_module(nn.Linear(2, 1)) for _ in range(3)]
    stacked = {
        name: torch.stack([state[name].detach() for state in states]) for name in ("weight", "bias")
    }
    params = TensorDictParams(TensorDict(stacked, [3]))

    def call(params: TensorDictParams, x: torch.Tensor) -> torch.Tensor:
        with params.to_module(net):
            out: torch.Tensor = net(x)
        return out

    x = torch.ones(2)
    out = torch.vmap(call, (0, None))(params, x)
    expected = torch.stack([torch.mv(s["weight"], x) + s["bias"] for s in states])
    torch.testing.assert_close(out, expected)


def test_a_locked_container_keeps_its_entries() -> None:
    params = TensorDictParams({"w": torch.ones(2)}, lock=True)
    with pytest.raises(Locked, match="cannot set `b`"):
        params["b"] = torch.ones(1)
    with torch.no_grad():
        params.mul_(2)
    assert list(params.state_dict()) == ["w"]
    assert bool((params["w"] == 2).all())


def test_hooks_see_what_is_read_by_key() -> None:
    params = TensorDictParams({"w": torch.ones(2), "n": {"b": torch.ones(1)}})
    seen: list[object] = []

    def note(container: TensorDictBase, leaf: Tensor) -> None:
        seen.append(container is params and leaf.requires_grad)

    first = params.register_get_post_hook(note)
    second = params.register_get_post_hook(lambda _, leaf: leaf * 3)
    for leaf in (params["w"], params.get("w"), params["n", "b"]):
        assert isinstance(leaf, Tensor)
        assert bool((leaf == 3).all())
    assert params.get("missing") is None
    assert seen == [True] * 3
    assert bool((params.data["w"] == 1).all())
    inner: object = params["n"]
    assert isinstance(inner, TensorDictParams)
    second.remove()
    first.remove()
    assert params["w"] is next(params.parameters())
    with pytest.raises(InvalidArgument, match="must be a function"):
        params.register_get_post_hook(3)  # type: ignore[arg-type]  # wrong on purpose


def test_the_tree_of_nested_parameters_is_that_of_a_plain_container() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 1)))
    plain = TensorDict.from_module(net)
    params = TensorDictParams(plain, no_convert=True)
    ours, theirs = (pytree.tree_flatten_with_path(each) for each in (params, plain))
    assert [path for path, _ in ours[0]] == [path for path, _ in theirs[0]]
    for (_, mine), (_, its) in zip(ours[0], theirs[0], strict=True):
        assert mine.data_ptr() == its.data_ptr()
    assert ours[1].num_children == ours[1].num_leaves == len(list(params.keys(True, True)))
    rebuilt = pytree.tree_map(lambda leaf: leaf * 2, params)
    assert type(rebuilt) is type(rebuilt.get("2")) is TensorDict
    assert bool((rebuilt == plain * 2).all())


def test_a_tensor_without_batch_dimensions_is_refused() -> None:
    td = TensorDict({"w": torch.ones(3), "n": {"u": UnbatchedTensor(torch.ones(2))}}, [3])
    with pytest.raises(InvalidArgument, match=r"entry `u` must be a tensor or data .*`data`"):
        TensorDictParams(td)


def test_parameters_are_given_by_keyword() -> None:
    params = TensorDictParams(a=torch.zeros(2, 3), batch_size=[2])
    assert isinstance(params["a"], nn.Parameter)
    assert params.batch_size == (2,)
    with pytest.raises(InvalidArgument, match="cannot be combined with `parameters`, got `b`"):
        TensorDictParams(TensorDict(a=torch.zeros(2)), b=torch.zeros(2))
    assert params.get("a", as_list=True) is params["a"]


def test_a_filter_makes_a_container_of_what_it_casts() -> None:
    params = TensorDictParams(a=torch.zeros(2), n=TensorDict(b=torch.zeros(2)))
    for each in (
        params.double(cast_filter=lambda path, leaf: "a" in path),
        params.to(torch.float64, cast_filter=lambda path, leaf: "a" in path),
        params.type(torch.float64, cast_filter=lambda path, leaf: "a" in path),
    ):
        made = cast("object", each)
        assert isinstance(made, TensorDict)
        assert (made["a"].dtype, made["n", "b"].dtype) == (torch.float64, torch.float32)
        assert params["a"].dtype is torch.float32
        assert made["n", "b"] is params["n", "b"]
    assert params.to(dtype=torch.float64) is params
    assert params["a"].dtype is torch.float64


def test_plain_tensors_take_the_place_of_parameters_that_a_module_keeps_in_a_container() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.params = TensorDictParams.of_module(network())
            self.net = network()
            empty = TensorDict.from_module(self.net).data.to("meta")
            empty.to_module(self.net, preserve_module_state=False)

        def forward(self, x: Tensor) -> Tensor:
            with self.params.to_module(self.net, preserve_module_state=False):
                out: Tensor = self.net(x)
            return out

    holder, x = Holder(), torch.ones(4, 2)
    order = [name for name, _ in holder.named_parameters()]
    expected = holder(x)
    zeros = TensorDict.from_module(holder).data.apply(torch.zeros_like)
    assert not any(p.is_meta for p in holder.parameters())
    with zeros.to_module(holder, preserve_module_state=False):
        result = holder(x)
        assert not result.any()
        assert not result.requires_grad
    assert torch.equal(holder(x), expected)
    assert [name for name, _ in holder.named_parameters()] == order


def test_an_entry_of_another_kind_stays_in_its_place() -> None:
    params = TensorDictParams(TensorDict({"a": 1.0, "n": {"b": 1.0}, "c": 1.0}))
    params.del_("c")
    params["a"] = TensorDict({"z": 1.0})  # both are modules now
    assert list(params.keys()) == ["a", "n"]
    params["n"] = torch.ones(2)
    params["a"] = torch.ones(2)
    assert list(params.keys()) == ["a", "n"]
    params.create_nested("a")
    assert list(params.keys()) == list(dict(params.items())) == ["a", "n"]


def test_entries_stay_in_the_order_in_which_they_were_stored() -> None:
    params = TensorDictParams({"n": {"c": torch.ones(2)}, "a": torch.ones(2), "i": torch.arange(2)})
    params["new"] = torch.ones(2)
    params["m"] = {"d": torch.ones(2)}
    del params["a"]
    params["n"] = {"e": torch.zeros(2)}
    order = ["n", "i", "new", "m"]
    for each in (params, params.clone(), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert list(each.keys()) == order
    params.register_parameter("torch", nn.Parameter(torch.ones(2)))
    assert list(params.keys()) == [*order, "torch"]


def test_parameters_are_built_as_containers_are() -> None:
    params = TensorDictParams.from_dict({"w": torch.ones(2), "n": {"b": torch.ones(1)}})
    assert [name for name, _ in params.named_parameters()] == ["w", "n.b"]
    assert type(TensorDictParams.from_any({"w": torch.ones(2)})) is TensorDictParams
    assert type(params.from_dict_instance({"w": torch.ones(2)})) is TensorDictParams
