import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn

from kd_core import InvalidArgument, KeyNotFound, TensorDict, UnbatchedTensor


class Shared(nn.Module):
    """One sub-module under two names, and one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tied(self.again(self.first(x)))
        return out


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2))


def copied(net: nn.Module, shift: float = 0.0) -> TensorDict:
    """Copy the state, moved by `shift`, without gradients."""
    state = flat(TensorDict.from_module(net))
    moved = {k: v.detach() + shift if v.is_floating_point() else v + 0 for k, v in state.items()}
    return TensorDict(moved).unflatten_keys(".")


def flat(params: TensorDict) -> dict[str, Tensor]:
    return dict(params.flatten_keys(".").items())


def test_from_module_mirrors_the_state() -> None:
    net = mlp()
    params = TensorDict.from_module(net)
    state = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    assert flat(params).keys() == state.keys()
    assert all(value is state[key] for key, value in flat(params).items())
    assert params.batch_size == ()


def test_from_module_of_a_shared_submodule_is_one_container() -> None:
    params = TensorDict.from_module(Shared())
    assert params["first"] is params["again"]
    assert params["tied", "weight"] is params["first", "weight"]


def test_from_module_locks_on_request() -> None:
    assert TensorDict.from_module(mlp(), lock=True).is_locked


@pytest.mark.parametrize("make", [mlp, Shared, lambda: nn.GRUCell(3, 4)])
def test_call_agrees_with_functional_call(make) -> None:  # type: ignore[no-untyped-def]  # the parameter takes functions of several types
    net, x = make(), torch.randn(5, 3)
    params = copied(net, 0.1)
    expected = torch.func.functional_call(
        copy.deepcopy(net), flat(params.clone()), (x,), tie_weights=False
    )
    with params.to_module(net):
        assert torch.equal(net(x), expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_compute_with_the_given_weights(
    kind: type[nn.LSTM] | type[nn.GRU] | type[nn.RNN],
) -> None:
    net, other, x = kind(3, 4), kind(3, 4), torch.randn(2, 3)
    before = net(x)[0]
    with TensorDict.from_module(other).to_module(net):
        assert torch.equal(net(x)[0], other(x)[0])
    assert torch.equal(net(x)[0], before)


def test_module_is_as_before_after_an_error() -> None:
    net = mlp()
    before = dict(net.named_parameters())
    params = copied(net)
    with pytest.raises(ZeroDivisionError), params.to_module(net):
        raise ZeroDivisionError
    assert all(net.get_parameter(name) is tensor for name, tensor in before.items())


def test_blocks_nest_and_one_scope_may_be_entered_twice() -> None:
    net = nn.Linear(1, 1, bias=False)
    one, two = (TensorDict({"weight": torch.full((1, 1), v)}) for v in (1.0, 2.0))
    x, original = torch.ones(1), net.weight
    scope = one.to_module(net)
    with scope:
        with two.to_module(net), scope:
            assert net(x) == 1
        with two.to_module(net):
            assert net(x) == 2
        assert net(x).item() == 1
    assert net.weight is original


def test_without_a_block_the_module_keeps_the_entries() -> None:
    net = mlp()
    params = copied(net)
    before = dict(net.named_parameters())
    replaced = params.to_module(net)
    assert isinstance(replaced, TensorDict)
    assert list(replaced.keys(True, True)) == list(params.keys(True, True))
    assert all(replaced[tuple(name.split("."))] is leaf for name, leaf in before.items())
    for name, leaf in net.named_parameters():
        given = params[tuple(name.split("."))]
        assert isinstance(leaf, nn.Parameter)
        assert leaf.data_ptr() == given.data_ptr()
    replaced.to_module(net)
    assert all(net.get_parameter(name) is leaf for name, leaf in before.items())


def test_a_block_gives_what_was_replaced_and_restores_it() -> None:
    net = nn.Linear(2, 1)
    weight = net.weight
    with TensorDict({"weight": torch.ones(1, 2)}).to_module(net) as replaced:
        assert replaced["weight"] is weight
        assert net.weight.requires_grad
    assert net.weight is weight
    assert replaced.clone()["weight"].shape == (1, 2)
    assert list(pickle.loads(pickle.dumps(replaced)).keys()) == ["weight"]


def test_frozen_parameters_stay_frozen_and_parts_of_a_graph_what_they_are() -> None:
    net = nn.Linear(2, 1).requires_grad_(False)
    TensorDict({"weight": torch.ones(1, 2)}).to_module(net)
    assert not net.weight.requires_grad
    product = torch.ones(1, 2, requires_grad=True) * 2
    with TensorDict({"weight": product}).to_module(net):
        assert net.weight is product


@pytest.mark.parametrize("how", [{"inplace": True}, {"use_state_dict": True}])
def test_values_are_copied_or_loaded_on_request(how: dict[str, bool]) -> None:
    net = nn.Linear(2, 1)
    weight, before = net.weight, net.weight.detach().clone()
    ones = TensorDict({"weight": torch.ones(1, 2)})
    with ones.to_module(net, **how) as replaced:  # type: ignore[arg-type]  # one of two flags
        assert (net.weight is weight) is ("inplace" in how)
        assert net.weight.tolist() == [[1, 1]]
        assert torch.equal(replaced["weight"], before)
    assert net.weight is weight
    assert torch.equal(weight, before)
    ones.to_module(net, **how)  # type: ignore[arg-type]  # one of two flags
    assert net.weight.tolist() == [[1, 1]]
    with pytest.raises(KeyNotFound):
        TensorDict({"wight": torch.ones(1, 2)}).to_module(net, **how)  # type: ignore[arg-type]  # one of two flags


def test_what_was_replaced_goes_where_it_is_asked_for() -> None:
    net = nn.Linear(2, 1)
    weight, bias = net.weight, net.bias
    ones = TensorDict({"weight": torch.ones(1, 2)})
    room = TensorDict()
    assert ones.to_module(net, swap_dest=room) is room
    assert room["weight"] is weight
    assert ones.to_module(net, return_swap=False, non_blocking=True) is None
    assert ones.to_module(net, preserve_module_state=True, memo=None)["weight"] is not weight
    assert net.bias is bias
    with pytest.raises(KeyNotFound):
        TensorDict({"wight": torch.ones(1, 2)}).to_module(net)
    assert net.weight.data_ptr() == ones["weight"].data_ptr()


def kinds(net: nn.Module) -> dict[str, str]:
    """Return how a module holds its tensors: as parameters, buffers or plain attributes."""
    stores = {"parameter": [*net._parameters], "buffer": [*net._buffers], "plain": [*vars(net)]}
    names = ("weight", "bias", "running_mean")
    return {n: kind for n in names for kind, store in stores.items() if n in store}


PLAIN = {"weight": "plain", "bias": "plain", "running_mean": "buffer"}
USUAL = {"weight": "parameter", "bias": "parameter", "running_mean": "buffer"}


def test_tensors_become_plain_attributes_if_the_state_need_not_be_preserved() -> None:
    net = nn.BatchNorm1d(2)
    before, order = dict(net.named_parameters()), list(net._parameters)
    data = TensorDict.from_module(net).data
    with data.to_module(net, preserve_module_state=False):
        assert kinds(net) == PLAIN
        assert not net(torch.ones(3, 2)).requires_grad
    assert kinds(net) == USUAL
    assert list(net._parameters) == order
    assert all(value is before[name] for name, value in net.named_parameters())

    replaced = data.to("meta").to_module(net, preserve_module_state=False)
    assert kinds(net) == PLAIN
    assert list(net.parameters()) == []
    assert replaced["weight"] is before["weight"]
    assert list(replaced.keys()) == list(data.keys())
    params = TensorDict(before)
    for preserves in (True, False):
        with params.to_module(net, preserve_module_state=preserves):
            assert kinds(net) == USUAL
        assert kinds(net) == PLAIN
    replaced.to_module(net, preserve_module_state=False)
    assert kinds(net) == USUAL
    assert net.weight is before["weight"]


def test_parameters_become_parameters_if_the_state_need_not_be_preserved() -> None:
    net = nn.BatchNorm1d(2)
    given = TensorDict(running_mean=nn.Parameter(torch.ones(2)))
    given.to_module(net, preserve_module_state=False)
    assert kinds(net) == {**USUAL, "running_mean": "parameter"}
    with pytest.raises(KeyNotFound):
        TensorDict(wight=torch.ones(2), bias=torch.ones(2)).to_module(
            net, preserve_module_state=False
        )
    assert kinds(net) == {**USUAL, "running_mean": "parameter"}


def test_shared_weights_stay_shared_as_plain_attributes() -> None:
    net = Shared()
    copied(net, 1.0).to_module(net, preserve_module_state=False)
    assert list(net.parameters()) == []
    assert net.first.weight is net.again.weight is net.tied.weight


def test_a_plain_attribute_is_exchanged() -> None:
    net = nn.Linear(2, 2)
    net.scale = torch.ones(2)
    scale = net.scale
    for preserves in (True, False):
        zeros = TensorDict(scale=torch.zeros(2), bias=torch.zeros(2))
        with zeros.to_module(net, preserve_module_state=preserves) as replaced:
            assert net.scale is zeros["scale"]
            assert isinstance(net.bias, nn.Parameter) is preserves
            assert replaced["scale"] is scale
        assert net.scale is scale


def test_a_recurrent_layer_computes_with_plain_attributes() -> None:
    net = nn.GRU(2, 2)
    zeros = TensorDict.from_module(net).data.apply(torch.zeros_like)
    with zeros.to_module(net, preserve_module_state=False):
        assert not net(torch.ones(1, 2))[0].any()
    assert net(torch.ones(1, 2))[0].requires_grad


def test_a_part_of_the_parameters_may_be_given() -> None:
    net = mlp()
    before = net[3].bias
    with TensorDict({"3": {"bias": torch.full((2,), 9.0)}}).to_module(net):
        assert net[3].bias is not before
        assert isinstance(net[3].weight, nn.Parameter)


def test_shared_weights_take_the_value_of_their_first_name() -> None:
    net = Shared()
    params = copied(net)
    params["first", "weight"] = torch.eye(3)
    with params.to_module(net):
        assert torch.equal(net.tied.weight, torch.eye(3))
        assert torch.equal(net.again.weight, torch.eye(3))


def runs_with(params: TensorDict, net: nn.Sequential) -> tuple[Tensor, Tensor]:
    with params.to_module(net):
        first, second = net[0].weight, net[1].weight
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    return first, second


def test_weights_are_shared_if_they_are_when_the_block_begins() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    params = copied(net).requires_grad_()
    one, other = params["0", "weight"], params["1", "weight"]
    assert runs_with(params, net) == (one, other)
    net[1].weight = net[0].weight
    assert runs_with(params, net) == (one, one)
    net[1].weight = nn.Parameter(torch.eye(3))
    assert runs_with(params, net) == (one, other)


def test_first_name_of_shared_weights_is_that_of_the_module() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    params = copied(net).requires_grad_()
    backwards = TensorDict({key: params[key] for key in ["1", "0"]})
    assert runs_with(backwards, net) == (params["0", "weight"], params["0", "weight"])
    first = net._modules.pop("0")
    net._modules["0"] = first
    with backwards.to_module(net):
        assert net._modules["0"].weight is params["1", "weight"]


def test_unknown_name_is_an_error_where_weights_are_shared() -> None:
    net = Shared()
    params = copied(net)
    with params.to_module(net):
        pass
    wrong = params.exclude(("again", "bias"), ("tied", "weight"))
    wrong["again", "bais"] = wrong["tied", "wieght"] = torch.zeros(3)
    with pytest.raises(KeyNotFound, match="bais"), wrong.to_module(net):
        pass


def test_changes_of_the_module_between_calls_are_seen() -> None:
    net = mlp()
    params = copied(net)
    params["3"].requires_grad_()
    with params.to_module(net):
        pass
    net[3] = nn.Linear(4, 2)
    with params.to_module(net):
        assert net[3].weight is params["3", "weight"]
    smaller = params.exclude(("3", "bias"))
    with smaller.to_module(net):
        assert net[3].bias is not params["3", "bias"]


def test_buffers_are_updated_in_the_container() -> None:
    net = mlp().train()
    params = copied(net)
    with params.to_module(net):
        net(torch.randn(6, 3))
    assert params["2", "num_batches_tracked"] == 1
    assert net[2].num_batches_tracked == 0


def test_gradients_reach_the_given_parameters() -> None:
    net = nn.Linear(3, 2)
    weight = torch.zeros(2, 3, requires_grad=True)
    with TensorDict({"weight": weight}).to_module(net):
        (slope,) = torch.autograd.grad(net(torch.ones(3)).sum(), weight)
    assert torch.equal(slope, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"0": {"wieght": 1.0}},
            r"entry `\('0', 'wieght'\)` not found: `Linear` has no such parameter or buffer",
        ),
        ({"0": {"wieght": 1.0}}, r"available: `weight`, `bias`. Did you mean `weight`\?"),
        ({"7": {"weight": 1.0}}, r"entry `7` not found: `Sequential` has no such sub-module"),
    ],
)
def test_unknown_entry_is_an_error_and_changes_nothing(
    source: dict[str, object], message: str
) -> None:
    net = mlp()
    before = dict(net.named_parameters())
    with pytest.raises(KeyError, match=message):
        TensorDict({"3": {"bias": torch.zeros(2)}, **source}).to_module(net).__enter__()
    assert all(net.get_parameter(name) is tensor for name, tensor in before.items())


def test_data_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a tensor"):
        TensorDict({"weight": "text"}).to_module(nn.Linear(1, 1)).__enter__()


def test_another_thread_gets_a_clear_error() -> None:
    net = nn.Linear(1, 1)
    params = copied(net)
    seen: list[BaseException] = []

    def borrow() -> None:
        try:
            with params.to_module(net):
                pass
        except RuntimeError as error:
            seen.append(error)

    with params.to_module(net):
        thread = threading.Thread(target=borrow)
        thread.start()
        thread.join()
    assert "another thread runs this `Linear`" in str(seen[0])
    with params.to_module(net):
        pass


def test_blocks_that_end_out_of_order_are_an_error() -> None:
    net = nn.Linear(1, 1)
    params = copied(net)
    first, second = params.to_module(net), params.to_module(net)
    first.__enter__()
    second.__enter__()
    with pytest.raises(RuntimeError, match="must end in reverse order"):
        first.__exit__(None, None, None)


def test_compiled_call_follows_the_given_parameters() -> None:
    net, x = mlp().eval(), torch.randn(5, 3)
    params = copied(net)

    @torch.compile(fullgraph=True, backend="eager")
    def call(params: TensorDict, x: Tensor) -> Tensor:
        with params.to_module(net):
            out: Tensor = net(x)
        return out

    torch.testing.assert_close(call(params, x), net(x))
    params["3", "bias"] = torch.full((2,), 5.0)
    expected = torch.func.functional_call(net, flat(params), (x,))
    torch.testing.assert_close(call(params, x), expected)
    assert isinstance(net[3].bias, nn.Parameter)


def test_compiled_call_fills_a_module_whose_parameters_were_removed() -> None:
    net = nn.Linear(3, 1)
    params = TensorDict.from_module(net).detach()
    net.weight = net.bias = None  # type: ignore[assignment]  # as torch notes a removed parameter

    def call(params: TensorDict, x: Tensor) -> Tensor:
        with params.to_module(net):
            result: Tensor = net(x)
            return result

    x = torch.randn(2, 3)
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert torch.equal(compiled(params, x), call(params, x))
    assert net.weight is None


def test_compiled_call_shares_weights_as_an_eager_one_does() -> None:
    net, x = Shared(), torch.randn(5, 3)
    params = copied(net)
    params.apply_(lambda leaf: leaf.copy_(torch.rand(leaf.shape)))

    def call(params: TensorDict, x: Tensor) -> Tensor:
        with params.to_module(net):
            out: Tensor = net(x)
        return out

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert torch.equal(compiled(params, x), call(params, x))
    assert net.tied.weight is net.first.weight


def test_compiled_recurrent_layer_computes_with_the_given_weights() -> None:
    net, x = nn.GRU(3, 4), torch.randn(5, 3)
    params = copied(net, 0.5)

    def call(params: TensorDict, x: Tensor) -> Tensor:
        with params.to_module(net):
            out: Tensor = net(x)[0]
        return out

    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(params, x), call(params, x))
        torch.testing.assert_close(compiled(copied(net), x), net(x)[0])


def test_container_that_is_a_module_needs_kd_nn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("kd_core._registry.params_of", raising=False)
    with pytest.raises(ImportError, match="`pip install kd-nn`, and `import kd_nn` first"):
        TensorDict.from_module(nn.Linear(1, 1), as_module=True)


class Cyclic(nn.Module):
    """Its sub-module leads back to it, by a hook that is a bound method."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.inner.register_forward_hook(self.look)

    def look(self, module: nn.Module, args: object, output: Tensor) -> None:
        """See what the sub-module computes."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def test_module_dies_with_its_last_reference_after_an_exchange() -> None:
    net = mlp()
    params = copied(net)
    gone = [weakref.ref(each) for each in (net, *net.parameters())]
    gc.disable()
    try:
        with params.to_module(net):
            net(torch.ones(2, 3))
        del net
        assert {ref() for ref in gone} == {None}
    finally:
        gc.enable()


def test_module_that_holds_itself_is_collected_after_an_exchange() -> None:
    net = Cyclic()
    gone = [weakref.ref(each) for each in (net, *net.parameters())]
    with copied(net).to_module(net):
        net(torch.ones(2, 3))
    del net
    gc.collect()
    assert {ref() for ref in gone} == {None}


def test_replaced_sub_module_is_not_kept() -> None:
    net = mlp()
    with copied(net).to_module(net):
        pass
    gone = weakref.ref(net[0])
    net[0] = nn.Linear(3, 4)
    assert gone() is None
    own = flat(TensorDict.from_module(net))["0.weight"]
    with copied(net, 1.0).to_module(net):
        assert torch.equal(flat(TensorDict.from_module(net))["0.weight"], own + 1)


def test_slots_that_were_tied_once_and_are_empty_now_take_their_own_entries() -> None:
    module = nn.Module()
    module.a = module.b = nn.Parameter(torch.zeros(2))
    with TensorDict({"a": torch.ones(2), "b": torch.ones(2)}).to_module(module):
        pass  # finds the route of a module whose slots share a parameter
    module._parameters.update(a=None, b=None)
    params = TensorDict({"a": torch.zeros(2), "b": torch.ones(2)})
    with params.to_module(module):
        assert module.a is params["a"]
        assert module.b is params["b"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # its kind differs
def test_a_scripted_module_is_refused() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    for module, td in (
        (scripted, TensorDict.from_module(scripted)),
        (nn.Sequential(scripted), TensorDict({"0": TensorDict.from_module(scripted)})),
    ):
        before = [id(tensor) for tensor in module.parameters()]
        with pytest.raises(InvalidArgument, match="scripted"), td.to_module(module):
            pass
        assert [id(tensor) for tensor in module.parameters()] == before


def test_a_lazy_module_that_has_not_run_is_collected_and_printed() -> None:
    td = TensorDict.from_module(nn.Sequential(nn.LazyLinear(3)))
    assert "weight: UninitializedParameter()" in repr(td)


@pytest.mark.parametrize("inplace", [None, True])
@pytest.mark.parametrize("by_state", [False, True])
def test_data_that_a_module_lacks_is_a_missing_key(inplace: bool | None, by_state: bool) -> None:
    net = nn.Linear(2, 1)
    before = net.weight
    td = TensorDict.from_module(net).apply(torch.zeros_like)
    for entry in ("word", UnbatchedTensor(torch.ones(2))):
        td["other"] = entry
        with pytest.raises(KeyError, match="`other` not found"):
            td.to_module(net, inplace=inplace, use_state_dict=by_state)
        assert net.weight is before
        assert net.weight.any()


@pytest.mark.parametrize("inplace", [None, True])
def test_data_in_place_of_a_parameter_is_refused(inplace: bool | None) -> None:
    net = nn.Linear(2, 1)
    td = TensorDict.from_module(net).apply(torch.zeros_like).set("bias", "word")
    with pytest.raises(InvalidArgument, match="`bias` must be a tensor"):
        td.to_module(net, inplace=inplace)
    assert net.weight.any()


def test_a_module_that_loads_a_state_dict_gives_its_own_parameters_back() -> None:
    net, td = nn.Linear(2, 1), TensorDict({"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
    weight = net.weight
    swap = td.to_module(net, use_state_dict=True)
    assert swap["weight"] is weight
    assert net.weight is not weight
    assert net.weight.tolist() == [[1, 1]]
    net = nn.Linear(2, 1)
    weight, before = net.weight, net.weight.detach().clone()
    swap = td.to_module(net, inplace=True)
    assert net.weight is weight
    assert swap["weight"].requires_grad
    assert torch.equal(swap["weight"], before)


@pytest.mark.parametrize("preserves", [True, False])
def test_a_parameter_in_the_place_of_a_buffer(preserves: bool) -> None:
    net = torch.nn.BatchNorm1d(2)
    mean = torch.nn.Parameter(torch.ones(2))
    with TensorDict({"running_mean": mean}).to_module(net, preserve_module_state=preserves):
        placed = net.running_mean
        assert isinstance(placed, torch.nn.Parameter) is not preserves
        assert placed is not None
        placed.sum().backward()
    assert mean.grad is not None
    assert not isinstance(net.running_mean, torch.nn.Parameter)
