"""Names that torch does not promise: they are here and do what is needed, or something else does.

A child process takes all of them away from torch and imports kd_core then.
"""

from collections import OrderedDict

import torch
from tests import children
from torch import Tensor, nn

from kd_core import _torch_private as private

WITHOUT = r"""
import importlib
import tempfile
import torch
from torch import Tensor

AWAY = {
    "torch._C._functorch": (
        "maybe_current_level", "maybe_get_level", "maybe_get_bdim", "is_batchedtensor",
        "is_gradtrackingtensor", "is_functorch_wrapped_tensor", "get_unwrapped",
    ),
    "torch._functorch.pyfunctorch": ("temporarily_pop_interpreter_stack",),
    "torch._C": ("_len_torch_dispatch_stack",),
    "torch._ops": ("HigherOrderOperator",),
    "torch._guards": ("TracingContext",),
    "torch.utils._python_dispatch": ("is_traceable_wrapper_subclass",),
    "torch": ("_debug_has_internal_overlap", "_nested_view_from_buffer", "_foreach_clone"),
    "torch._C._nn": ("flatten_dense_tensors", "unflatten_dense_tensors"),
    "torch._C._autograd": ("_get_creation_meta", "CreationMeta"),
    "torch._C._dynamo.guards": ("TensorGuards",),
    "torch.utils.data._utils.collate": ("default_collate_fn_map",),
}
for module, names in AWAY.items():
    for name in names:
        if hasattr(importlib.import_module(module), name):  # an older torch lacks some
            delattr(importlib.import_module(module), name)

# Torch itself calls these two.
names = ("DisableTorchFunctionSubclass", "_disabled_torch_function_impl")
kept = {name: getattr(torch._C, name) for name in names}
for name in names:
    delattr(torch._C, name)
import kd_core
from kd_core import TensorDict, lazy_stack
for name, value in kept.items():
    setattr(torch._C, name, value)

td = TensorDict({"a": torch.arange(6.0).view(3, 2), "n": {"b": torch.ones(3)}}, [3])
many = TensorDict({str(n): torch.full((3,), float(n)) for n in range(6)}, [3])
assert (many + 1)["5"].tolist() == [6.0] * 3
assert (many * many)["2"].tolist() == [4.0] * 3
many.update_(many.clone().zero_())
assert many["3"].tolist() == [0.0] * 3
assert td.consolidate()["a"].tolist() == td["a"].tolist()
assert TensorDict.from_buffers(*td.to_buffers())["n", "b"].tolist() == [1.0] * 3
assert lazy_stack([td, td + 1])["a"].shape == (2, 3, 2)
expanded = TensorDict({"a": torch.zeros(1, 2).expand(3, 2)}, [3])
try:
    expanded.set_("a", td["a"])
except kd_core.InvalidValue as error:
    assert "share memory" in str(error)
else:
    raise AssertionError("an expanded tensor was written")
layer = torch.nn.Linear(2, 3)
params = TensorDict.from_module(layer)
with (params * 0).to_module(layer):
    assert layer(td["a"]).abs().sum() == 0
assert torch.vmap(lambda x: x["a"] * 2)(td).tolist() == (td["a"] * 2).tolist()
ragged = TensorDict({"r": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, [2])
with tempfile.TemporaryDirectory() as folder:
    ragged.save(folder + "/ragged")
    try:
        TensorDict.load(folder + "/ragged")
    except kd_core.MissingDependency as error:
        assert "needs `torch._nested_view_from_buffer`" in str(error)
    else:
        raise AssertionError("a feature works without what it needs")
    td.memmap(folder + "/mapped")
    mapped = TensorDict.load_memmap(folder + "/mapped")
    assert (mapped["a"] + 1).tolist() == (td["a"] + 1).tolist()
    assert type(mapped["a"].view(-1)) is type(mapped["a"])
print("sound")
"""


def test_a_torch_without_these_names_costs_speed_or_one_feature() -> None:
    assert children.check_output("-W", "ignore", "-c", WITHOUT).endswith("sound\n")


def test_levels_and_hidden_dimensions_of_transforms_are_known() -> None:
    assert private.maybe_current_level() is None
    x = torch.arange(6.0).view(2, 3)

    def inside(row: Tensor) -> Tensor:
        level = private.maybe_current_level()
        assert level is not None
        assert private.maybe_get_level(row) == level
        assert private.maybe_get_bdim(row) == 1
        assert private.is_batchedtensor(row)
        assert private.is_functorch_wrapped_tensor(row)
        assert not private.is_gradtrackingtensor(row)
        assert private.get_unwrapped(row).shape == (2, 3)
        with private.outside_of_transform():
            assert private.maybe_current_level() is None
        return row

    torch.vmap(inside, in_dims=1)(x)

    def value(row: Tensor) -> Tensor:
        assert private.is_gradtrackingtensor(row)
        return row.sum()

    torch.func.grad(value)(x)


def test_modes_are_counted() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert private.dispatch_modes() == 0
    with FakeTensorMode():
        assert private.dispatch_modes() == 1


def test_memory_is_described_as_without_torch() -> None:
    tensors = [
        torch.zeros(3, 2),
        torch.zeros(1, 2).expand(3, 2),
        torch.zeros(1, 2).expand(1, 2),
        torch.zeros(3, 4)[:, ::2],
    ]
    for tensor in tensors:
        assert private.has_internal_overlap(tensor) == private._with_stride_of_zero(tensor)
    leaves = [torch.arange(6.0).view(2, 3), torch.tensor(7.0), torch.ones(0, 2)]
    flat = private.flatten(leaves)
    assert flat.tolist() == private._joined(leaves).tolist()
    for part, other, leaf in zip(
        private.unflatten(flat, leaves), private._parted(flat, leaves), leaves, strict=True
    ):
        assert part.tolist() == other.tolist() == leaf.tolist()
        assert part.data_ptr() == other.data_ptr()


def test_views_are_told_by_how_they_were_made() -> None:
    base = torch.zeros(3, 2, requires_grad=True) + 0
    with torch.no_grad():
        quiet = base[0]
    for asks in (private.is_view, private._has_base):
        assert asks(base[0])
        assert not asks(base)
    assert private.is_usual_view(base[0])
    assert not private.is_usual_view(quiet)
    assert not private.is_usual_view(base.unbind(0)[0])


def test_a_parameter_over_the_same_memory() -> None:
    plain = torch.zeros(3)
    for make in (private.make_subclass, private._alias):
        made = make(nn.Parameter, plain, True)
        assert isinstance(made, nn.Parameter)
        assert made.requires_grad
        assert made.data_ptr() == plain.data_ptr()


def test_storages_are_told_where_there_are_no_addresses() -> None:
    base = torch.empty(4, device="meta")
    assert private.storage_of(base) == private.storage_of(base[1:])
    other = torch.empty(4, device="meta")
    assert private.storage_of(base) != private.storage_of(other)
    assert private.base_of(base[1:]) is base
    assert private.base_of(base) is None


def test_the_sizes_of_rows_are_those_of_each() -> None:
    rows = [torch.ones(2, 3), torch.ones(1, 5)]
    nested = torch.nested.nested_tensor(rows)
    for sizes in (private.sizes_of_rows, private._sizes_of_rows):
        assert sizes(nested).tolist() == [[2, 3], [1, 5]]


def test_the_bytes_of_a_typed_storage_are_shared() -> None:
    tensor = torch.arange(3.0)
    stored = torch.TypedStorage(wrap_storage=tensor.untyped_storage(), dtype=torch.float32)
    assert private.untyped(stored).data_ptr() == tensor.data_ptr()


def test_a_recurrent_layer_computes_with_the_weights_that_it_has() -> None:
    layer, weight = nn.GRU(2, 2), nn.Parameter(torch.zeros(6, 2))
    layer._parameters["weight_ih_l0"] = weight
    assert layer._flat_weights[0] is not weight
    private.rebuild_weights(layer)
    assert layer._flat_weights[0] is weight
    assert layer(torch.ones(3, 2))[0].tolist() == layer(torch.zeros(3, 2))[0].tolist()


def test_what_a_state_dict_says_of_modules_is_read_and_added() -> None:
    assert private.metadata_of(nn.BatchNorm1d(2).state_dict()) == {"": {"version": 2}}
    state = OrderedDict[str, object]()
    assert private.metadata_of(state) is None
    private.add_metadata(state, {"": {"version": 2}})
    private.add_metadata(state, {"inner": {"version": 3}})
    assert private.metadata_of(state) == {"": {"version": 2}, "inner": {"version": 3}}


def test_code_of_subclasses_is_left_out() -> None:
    class Loud(Tensor):
        @classmethod
        def __torch_function__(cls, *args: object, **kwargs: object) -> object:
            raise AssertionError("its code runs")

    class Quiet(Tensor):
        __torch_function__ = private.no_torch_function

    class Written(Tensor):
        __torch_function__ = staticmethod(private._plain_function)  # what takes its place

    with private.without_torch_function():
        assert torch.ones(2).as_subclass(Loud).sum() == 2
    for kind in (Quiet, Written):
        assert (torch.ones(2).as_subclass(kind) + 1).sum() == 4


def test_the_ragged_dimension_is_told() -> None:
    leaf = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    assert private.ragged_dim(leaf) == 1
    assert private.ragged_dim(leaf.transpose(1, 2)) == 2


def test_the_properties_of_tensors_are_compared_size_for_size() -> None:
    check = private.check_of([torch.zeros(3, 2), torch.zeros(4)])
    assert check(torch.ones(3, 2), torch.ones(4))
    for other in (torch.ones(2, 3), torch.ones(3, 2).double(), torch.ones(2, 3).t()):
        assert not check(other, torch.ones(4))
    assert not private._never(torch.ones(3, 2), torch.ones(4))
