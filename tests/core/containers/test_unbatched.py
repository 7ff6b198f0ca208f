"""A tensor without batch dimensions is a leaf for values and a constant for rows."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.containers.unbatched import fixed, make, rows_of, wrapper
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from kd_core import (
    InvalidArgument,
    InvalidValue,
    KdError,
    KeySetMismatch,
    NonTensorData,
    ShapeMismatch,
    TensorClass,
    TensorDict,
    TensorDictBase,
    UnbatchedTensor,
    cat,
    collate,
    group_by,
    is_non_tensor,
    lazy_stack,
    maybe_dense_stack,
    pad,
    stack,
)
from kd_core._types import Index


def test_brackets_give_a_tensor_and_get_the_wrapper() -> None:
    tensor = fixed()
    td = TensorDict({"u": UnbatchedTensor(tensor)}, [10])
    assert isinstance(td["u"], Tensor)
    assert isinstance(cast("object", td["u"]), UnbatchedTensor)
    assert td["u"].data_ptr() == tensor.data_ptr()
    assert wrapper(td).data is tensor
    assert wrapper(td).batch_size == (10,)
    found = wrapper(td)
    assert (found.shape, found.dtype, found.device.type) == ((2, 3), torch.float32, "cpu")
    assert dict(td.items()) == {"u": found}
    assert not is_non_tensor(found)


def test_data_is_converted_or_refused() -> None:
    assert UnbatchedTensor([1, 2]).data.tolist() == [1, 2]
    assert UnbatchedTensor(3.0).shape == ()
    first = UnbatchedTensor(fixed(), [4])
    assert UnbatchedTensor(first).data is first.data
    assert UnbatchedTensor([1.0], device="meta").device.type == "meta"
    for value in ("text", TensorDict({"a": 1.0}), NonTensorData(1), [[1], [2, 3]], None):
        with pytest.raises(InvalidArgument, match="`data` must be a tensor, a number"):
            UnbatchedTensor(value)


def test_it_fits_every_batch_size_and_belongs_to_its_container() -> None:
    td = make()
    for batch in ((), (7,), (2, 3)):
        other = TensorDict({"u": td.get("u")}, batch)
        assert wrapper(other).data is wrapper(td).data
        assert wrapper(other).batch_size == batch
    td.batch_size = torch.Size([])
    assert wrapper(td).batch_size == ()
    td.auto_batch_size_()
    assert td.batch_size == wrapper(td).batch_size == (4,)


def test_a_class_declares_it_as_a_tensor() -> None:
    class Sample(TensorClass):
        a: Tensor
        u: Tensor

    sample = Sample.from_dict({"a": torch.zeros(3), "u": UnbatchedTensor(fixed())}, [3])
    assert sample[0].u.data_ptr() == sample.u.data_ptr()
    assert sample.u.shape == (2, 3)


def test_it_is_moved_to_the_device_of_the_container() -> None:
    assert TensorDict({"u": UnbatchedTensor(fixed())}, device="meta")["u"].is_meta
    assert make().to("meta")["n", "u"].is_meta
    assert wrapper(make().to("meta")).batch_size == (4,)


@pytest.mark.parametrize(
    "compute",
    [
        lambda td: td + 1,
        lambda td: 2 - td,
        lambda td: -td,
        lambda td: td * td,
        lambda td: td.exp(),
        lambda td: td * torch.tensor(2.0),
        lambda td: td.clamp(0.0, 0.5),
        lambda td: td.lerp(td + 1, 0.5),
        lambda td: td.apply(lambda x: x * 3),
        lambda td: td.named_apply(lambda name, x: x * 3),
        lambda td: td.apply(lambda x, y: x - y, td),
        lambda td: td.double(),
        lambda td: td.clone().zero_(),
        lambda td: td.clone().fill_(7.0),
        lambda td: td.clone().apply_(lambda x: x + 1),
        lambda td: td.clone().add_(1),
        lambda td: td.clone().mul_(td),
        lambda td: td.add(td, default=0.0),
        lambda td: td.detach(),
        lambda td: td.to_tensordict(),
        lambda td: td.consolidate(),
        lambda td: td.contiguous(),
        lambda td: torch.zeros_like(td),
        lambda td: torch.nn.functional.relu(td),
        lambda td: torch.abs(td),
        lambda td: pytree.tree_map(lambda x: x + 1, td),
        lambda td: td.sum(),
        lambda td: td.amax(),
        lambda td: td.quantile(0.5),
        lambda td: td.isfinite(),
    ],
)
def test_values_are_computed_as_those_of_a_container_without_rows(
    compute: Callable[[TensorDictBase], TensorDictBase],
) -> None:
    td = make(1.5)
    beside = TensorDict({"u": td["u"], "n": {"u": td["n", "u"]}})
    got, wanted = compute(td), compute(beside)
    for key in ("u", ("n", "u")):
        torch.testing.assert_close(got[key], wanted[key], rtol=0, atol=0)
        assert isinstance(cast("object", got.get(key)), UnbatchedTensor)
    rest = compute(TensorDict({"a": td["a"]}, [4]))
    torch.testing.assert_close(got["a"], rest["a"], rtol=0, atol=0)


def test_features_are_all_its_dimensions() -> None:
    td = make().reshape(2, 2)
    assert float(td.sum(dim="feature")["u"]) == 6.0
    assert td.sum(dim="feature", keepdim=True)["u"].shape == (1, 1)
    assert td.sum(dim="feature")["n", "b"].shape == (2, 2)
    assert float(td.sum(reduce=True)) == 6.0 + 6.0 + 5.0
    assert td.new_ones(7)["u"].tolist() == fixed().tolist()
    assert td.new_zeros(7, dtype=torch.int32)["u"].dtype is torch.int32


@pytest.mark.parametrize(
    "compute",
    [
        lambda td: td.sum(0),
        lambda td: td.mean(dim=0, keepdim=True),
        lambda td: td.max(0),
        lambda td: td.any(0),
        lambda td: td.cumsum(0),
        lambda td: td.quantile(0.5, 0),
        lambda td: td.quantile([0.5, 0.1]),
        lambda td: td.softmax(0),
        lambda td: td.softmax("feature"),
        lambda td: td.sum(dim="feature", reduce=True),
        lambda td: td * torch.ones(4),
        lambda td: td.add_(torch.ones(4)),
        lambda td: td.masked_fill(torch.ones(4, dtype=torch.bool), 0.0),
        lambda td: td.where(torch.ones(4, dtype=torch.bool), 0.0),
        lambda td: td.scatter(0, torch.tensor([0]), 0.0),
        lambda td: td.pack(),
        lambda td: td.to_struct_array(),
        lambda td: td.to_json(),
        lambda td: td.to_csv("never.csv"),
        lambda td: torch.nn.functional.mse_loss(td, td),
    ],
)
def test_what_computes_along_rows_refuses_it_by_name(
    compute: Callable[[TensorDictBase], object],
) -> None:
    td = make()
    with pytest.raises(InvalidValue, match=r"entry `u` is an `UnbatchedTensor`.*expand\("):
        compute(td)
    assert td["a"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_the_remedy_of_the_message_works() -> None:
    td = make()
    for key in ("u", ("n", "u")):
        td[key] = cast("UnbatchedTensor", td.get(key)).data.expand(*td.batch_size, *td[key].shape)
    assert td.sum(0)["u"].tolist() == fixed(4.0).tolist()


def test_equal_tensors_are_joined_to_one() -> None:
    td = make()
    for other in (td, td[:], td.clone(), td.detach()):
        for joined in (stack([td, other]), cat([td, other]), maybe_dense_stack([td, other])):
            assert wrapper(joined).data is wrapper(td).data
            assert wrapper(joined, ("n", "u")).data is wrapper(td, ("n", "u")).data
            assert wrapper(joined).batch_size == joined.batch_size
    assert wrapper(stack([td[0], td[1]])).data is wrapper(td).data
    assert wrapper(collate([td[0], td[1]])).data is wrapper(td).data
    assert wrapper(pad(td, [1, 1])).data is wrapper(td).data


def test_what_is_not_a_number_is_equal_to_itself() -> None:
    td = make(torch.nan)
    assert wrapper(stack([td, td.clone()])).data is wrapper(td).data


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (fixed(2.0), "different values"),
        (torch.ones(3), r"the shapes \(2, 3\) and \(3,\)"),
        (fixed().double(), "torch.float32 on cpu and torch.float64 on cpu"),
        (fixed().requires_grad_(), "one requires gradients"),
    ],
)
def test_different_tensors_are_not_joined(other: Tensor, reason: str) -> None:
    td = make()
    two = make().set("u", UnbatchedTensor(other))
    for join in (stack, cat):
        with pytest.raises(InvalidValue, match=rf"entry `u` is an `UnbatchedTensor`.*{reason}"):
            join([td, two])
    with pytest.raises(InvalidValue, match=reason):
        td.where(torch.ones(4, dtype=torch.bool), two)


def test_values_that_do_not_exist_are_not_equal() -> None:
    with FakeTensorMode():
        td = make()
        assert stack([td, td[:]])["u"] is td["u"]
        with pytest.raises(InvalidValue, match="entry `u` is an `UnbatchedTensor`"):
            stack([td, td.clone()])


def test_it_is_not_joined_with_rows() -> None:
    td = make()
    two = make().set("u", torch.zeros(4, 2, 3))
    with pytest.raises(KeySetMismatch, match="got an `UnbatchedTensor` in container 0"):
        stack([td, two])
    with pytest.raises(KeySetMismatch, match="got a tensor in container 0"):
        cat([two, td])
    with pytest.raises(KeySetMismatch, match="`UnbatchedTensor` in both containers or in none"):
        td + two
    with pytest.raises(KeySetMismatch, match="`UnbatchedTensor`"):
        two + td
    with pytest.raises(KeySetMismatch, match="one kind"):
        two.add(td, default=0.0)
    with pytest.raises(KeySetMismatch, match="one kind in all members"):
        lazy_stack([td, two])["u"]
    with pytest.raises(InvalidArgument, match="entry `u` must be a tensor or non-tensor data"):
        group_by(td, "u")


def test_out_takes_it() -> None:
    out = stack([make(), make()]).clone()
    place = out["u"]
    stack([make(3.0), make(3.0)], out=out)
    assert place.tolist() == fixed(3.0).tolist()


def test_a_lazy_stack_keeps_different_ones() -> None:
    td = lazy_stack([make(1.0), make(2.0)])
    for call in (lambda: td["u"], td.densify, td.contiguous, td.to_dict):
        with pytest.raises(ShapeMismatch, match=r"`u` is an .* that differs .*as_list"):
            call()
    assert set(td.exclude("u", ("n", "u")).densify().keys()) == {"a", "n"}
    assert [row.tolist() for row in td.get("u", as_list=True)] == [
        fixed(1.0).tolist(),
        fixed(2.0).tolist(),
    ]
    for moved in (td.reshape(8)[4:], td.permute(1, 0)[:, 1], td[1], td[:, 2:][1], td.clone()[1]):
        assert moved[0]["u"].tolist() == fixed(2.0).tolist()
    assert (td + 1)[1]["u"].tolist() == fixed(3.0).tolist()
    assert "u: differs among the members" in repr(td)
    assert "ragged" not in repr(td)
    assert list(td.keys(True, True)) == ["a", "u", ("n", "u"), ("n", "b")]
    again = pickle.loads(pickle.dumps(td))
    assert again[1]["n", "u"].tolist() == [2.0] * 5


def test_a_lazy_stack_of_equal_ones_reads_one() -> None:
    first = make()
    td = lazy_stack([first, make()])
    assert wrapper(td).data is wrapper(first).data
    assert wrapper(td).batch_size == (2, 4)
    assert wrapper(td.contiguous()).data is wrapper(first).data
    td.set("u", UnbatchedTensor(torch.zeros(1)))
    assert td[1]["u"].shape == (1,)


def test_writes_in_place_reach_the_source_of_an_index() -> None:
    td = make()
    td[0]["u"].add_(1)
    assert td["u"].tolist() == fixed(2.0).tolist()


def test_it_is_written_as_a_whole() -> None:
    td = make().lock_()
    place = td["u"]
    td.set_("u", torch.zeros(2, 3))
    td.update_({"n": {"u": UnbatchedTensor(torch.zeros(5))}})
    assert td.set("u", 4.0, inplace=True)["u"].data_ptr() == place.data_ptr()
    assert place.tolist() == fixed(4.0).tolist()
    td.update_(make(5.0))
    td.fill_("u", 6.0)
    assert place.tolist() == fixed(6.0).tolist()
    assert td["n", "u"].tolist() == [5.0] * 5
    with pytest.raises(ShapeMismatch, match=r"broadcastable to \(2, 3\)"):
        td.set_("u", torch.zeros(4, 2, 3))


def test_a_tensor_that_does_not_fit_does_not_replace_it() -> None:
    td = make()
    with pytest.raises(ShapeMismatch, match="does not fit entry `u`"):
        td["u"] = torch.zeros(2, 3)
    assert wrapper(td).data.tolist() == fixed().tolist()


@pytest.mark.parametrize("index", [0, slice(2), [0, 1], torch.tensor([True, False, True, False])])
def test_rows_are_written_where_it_is_equal(index: Index) -> None:
    td, two = make(), make()
    two["a"] += 10
    td[index] = two[index]
    assert float(td["a"][0]) == 10.0
    td.update_at_(rows_of(make(9.0))[index], index)
    td[index] = {"a": 1.0, "u": fixed()}
    td.set_at_("u", fixed(), index)
    assert float(td["a"][0]) == 1.0


@pytest.mark.parametrize(
    "write",
    [
        lambda td: td.__setitem__(0, make(2.0)[0]),
        lambda td: td.__setitem__(slice(2), 0.0),
        lambda td: td.update_at_(make(2.0)[0], 0),
        lambda td: td.set_at_("u", fixed(2.0), 0),
        lambda td: lazy_stack([td, make()], 1).__setitem__(
            0, lazy_stack([make(), make(2.0)], 1)[0]
        ),
    ],
)
def test_other_values_are_not_written_at_some_rows(write: Callable[[TensorDict], object]) -> None:
    td = make()
    td["a"] += 1
    before = copy.deepcopy(td)
    with pytest.raises(InvalidArgument, match=r"`u`.* is an `UnbatchedTensor`, one tensor for all"):
        write(td)
    assert bool((td == before).all())


def test_random_programs_carry_it_along() -> None:
    run()


Step = Callable[[TensorDictBase, Tensor, Tensor], tuple[TensorDictBase, Tensor, Tensor]]
STEPS: list[Step] = [
    lambda td, a, u: (td[1:], a[1:], u),
    lambda td, a, u: (td[::2], a[::2], u),
    lambda td, a, u: (td[None], a[None], u),
    lambda td, a, u: (td[..., [0, 0]], a[..., [0, 0]], u),
    lambda td, a, u: (td.reshape(-1), a.reshape(-1), u),
    lambda td, a, u: (td.unsqueeze(-1), a.unsqueeze(-1), u),
    lambda td, a, u: (td.flip(0), a.flip(0), u),
    lambda td, a, u: (td.expand(2, *td.shape), a.expand(2, *a.shape), u),
    lambda td, a, u: (td.transpose(0, -1), a.transpose(0, -1), u),
    lambda td, a, u: (td.split(1)[-1], a[-1:], u),
    lambda td, a, u: (stack([td, td], -1), torch.stack([a, a], -1), u),
    lambda td, a, u: (cat([td, td]), torch.cat([a, a]), u),
    lambda td, a, u: (lazy_stack([td, td.clone()]), torch.stack([a, a]), u),
    lambda td, a, u: (td + 1, a + 1, u + 1),
    lambda td, a, u: (td * td, a * a, u * u),
    lambda td, a, u: (td.clone().sub_(2), a - 2, u - 2),
    lambda td, a, u: (td.apply(torch.abs), a.abs(), u.abs()),
    lambda td, a, u: (td.double(), a.double(), u.double()),
    lambda td, a, u: (pickle.loads(pickle.dumps(td)), a, u),
    lambda td, a, u: (td.set("u", UnbatchedTensor(u[:1])), a, u[:1]),
    lambda td, a, u: (td.clone().set_("u", u + 5), a, u + 5),
    lambda td, a, u: (pytree.tree_map(torch.neg, td), -a, -u),
]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, len(STEPS) - 1), max_size=8))
def run(chosen: list[int]) -> None:
    a, u = torch.arange(6.0).reshape(2, 3), fixed(3.0)
    td: TensorDictBase = TensorDict({"a": a, "u": UnbatchedTensor(u)}, a.shape)
    for number in chosen:
        if a.numel() > 500 or not a.shape[0]:
            break
        td, a, u = STEPS[number](td, a, u)
        assert td.batch_size == a.shape
        torch.testing.assert_close(td["a"], a, rtol=0, atol=0)
        torch.testing.assert_close(td["u"], u, rtol=0, atol=0)
        assert wrapper(td).batch_size == a.shape


@pytest.mark.parametrize(
    "program",
    [
        lambda td: td[:2]["a"] + td["u"].sum(),
        lambda td: (td[:2] + 1)["u"],
        lambda td: (td.reshape(2, 2) * 2)["n", "u"],
        lambda td: stack([td[0], td[1]])["u"],
        lambda td: cat([td, td[:1]])["u"],
        lambda td: td.apply(torch.neg)["u"],
        lambda td: td.clone().set_("u", td["u"] * 3)["u"],
        lambda td: td.clone().set("v", UnbatchedTensor(td["a"][:2]))[0]["v"],
        lambda td: lazy_stack([td, td])["u"],
        lambda td: td.sum(dim="feature")["u"],
    ],
)
def test_compiled_code_carries_it(program: Callable[[TensorDictBase], Tensor]) -> None:
    torch._dynamo.reset()
    td = make(1.5)
    compiled = torch.compile(program, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(td), program(td), rtol=0, atol=0)


def test_compiled_code_returns_it() -> None:
    torch._dynamo.reset()
    td = make()
    result = torch.compile(lambda each: each[:2] + 1, backend="eager", fullgraph=True)(td)
    assert result["u"].tolist() == fixed(2.0).tolist()
    assert wrapper(result).batch_size == (2,)


def test_compiled_code_does_not_compare_values() -> None:
    torch._dynamo.reset()
    join = torch.compile(lambda one, two: stack([one, two]), backend="eager", fullgraph=True)
    td = make()
    assert wrapper(join(td, td.clone(recurse=False))).data is wrapper(td).data
    with pytest.raises((KdError, RuntimeError), match=r"UnbatchedTensor|Observed exception"):
        join(td, make())


def test_compiled_code_does_not_map_it() -> None:
    torch._dynamo.reset()
    mapped = torch.compile(
        lambda td: torch.vmap(lambda row: row["u"].sum())(td), backend="eager", fullgraph=True
    )
    with pytest.raises((KdError, RuntimeError), match=r"UnbatchedTensor|Observed exception"):
        mapped(make(rows=2))


def test_it_is_printed_like_a_tensor() -> None:
    text = "UnbatchedTensor(shape=torch.Size([2, 3]), device=cpu, dtype=torch.float32, "
    assert repr(wrapper(make())) == f"{text}is_shared=False)"
    assert "u: unbatched f32[2,3]" in repr(make())
    assert "UnbatchedTensor" in make()._repr_html_()


def test_a_lazy_stack_is_one_again_where_members_agree() -> None:
    td = lazy_stack([make(1.0), make(2.0)])
    td.set_("u", 4.0)
    td.update_({"n": {"u": torch.zeros(5)}})
    assert td.contiguous()["u"].tolist() == fixed(4.0).tolist()


def test_a_wrapper_computes_as_the_tensor_in_it() -> None:
    td = TensorDict({"u": UnbatchedTensor(torch.ones(3)), "x": torch.zeros(2)}, [2])
    u: Tensor = td.get("u")  # type: ignore[assignment]  # what computes as one
    td["v"] = u * 2 + torch.ones(3) - 1
    assert isinstance(td.get("v"), UnbatchedTensor)
    assert td["v"].tolist() == td[0]["v"].tolist() == [2, 2, 2]
    found: list[object] = [
        *(1 - u, 2 * u, u / 2, -u, u**2, u @ u, u.sum(), torch.exp(u), torch.stack([u, u])),
        *(u > 0, torch.ones(3) * u, u[0], next(iter(u)), u.max(0).values, u.view(3, 1), abs(u)),
        u // 2,
    ]
    ones = torch.ones(3)
    expected = [
        *(1 - ones, 2 * ones, ones / 2, -ones, ones**2, ones @ ones, ones.sum(), torch.exp(ones)),
        *(torch.stack([ones, ones]), ones > 0, ones, ones[0], ones[0], ones[0], ones.view(3, 1)),
        *(ones, ones // 2),
    ]
    for mine, theirs in zip(found, expected, strict=True):
        assert isinstance(mine, UnbatchedTensor)
        assert torch.equal(mine.data, theirs)


def test_a_wrapper_converts_as_the_tensor_in_it() -> None:
    one = UnbatchedTensor(torch.tensor(2))
    several: Tensor = UnbatchedTensor(torch.ones(3), [2])  # type: ignore[assignment]  # as above
    assert (float(one), int(one), bool(one), complex(one), [5, 6, 7][one]) == (2.0, 2, True, 2, 7)
    assert (len(several), several.ndim, several.tolist()) == (3, 1, [1.0, 1.0, 1.0])
    assert numpy.asarray(several).tolist() == [1.0, 1.0, 1.0]
    assert numpy.asarray(several, dtype="int32").dtype == numpy.int32
    several[0] = 5
    several.add_(1)
    assert several.data.tolist() == [6, 2, 2]
    with pytest.raises(AttributeError):
        several.no_such_method()  # type: ignore[attr-defined]  # refused


def test_what_is_computed_with_it_has_no_batch_dimensions_either() -> None:
    td = make()
    for key, value in {
        "number": td["u"] * 2,
        "sum": td["u"].sum(),
        "row": td["u"][0],
        "own": td["u"],
        "data": td["u"].data,
        "function": torch.stack([td["u"].sin()] * 4),
        "layer": torch.nn.functional.linear(torch.ones(3), td["u"]),
        "leaf": dict(td.items(True, True))["n", "u"],
    }.items():
        td[key] = value
        assert wrapper(td[:2], key).batch_size == (2,)
        assert torch.equal(td[0][key], value)
    torch.testing.assert_close(td["number"], fixed(2.0))
    assert float(td["sum"]) == 6.0
    assert numpy.asarray(td["row"]).tolist() == [1.0] * 3
    assert [type(each) for each in td["u"]] == [type(td["u"])] * 2
    lazy = lazy_stack([td, td.copy()])
    lazy["again"] = lazy["u"] + 1
    assert wrapper(lazy, "again").shape == (2, 3)


def test_rows_that_are_computed_with_it_stay_rows() -> None:
    td = make()
    td["scaled"] = td["a"] * td["u"].sum()
    td["product"] = td["n", "b"] @ td["u"]
    assert type(td["scaled"]) is type(td["product"]) is Tensor
    assert float(td[1]["scaled"]) == 6.0
    assert td[1]["product"].shape == (3,)
    one: Any = UnbatchedTensor(torch.tensor(1.0))
    assert torch.equal((rows_of(td) * one)["a"], td["a"])
    assert torch.equal((rows_of(td) == one)["a"], td["a"] == 1)
    other = rows_of(td) + td["u"].sum()
    assert {type(leaf) for leaf in other.values(True, True)} == {Tensor}
    rows = TensorDict({"i": UnbatchedTensor(torch.tensor([2, 0]))}, [4])["i"]
    assert type(rows_of(td)[rows]["a"]) is type(rows_of(td)[rows, ...]["a"]) is Tensor
    assert rows_of(td)[rows]["a"].tolist() == [2.0, 0.0]


def test_rows_stay_rows_where_its_shape_begins_like_that_of_the_batch() -> None:
    points, camera = torch.arange(9.0).reshape(3, 3), torch.ones(3, 3)
    td = TensorDict(points=points, camera=UnbatchedTensor(camera), batch_size=[3])
    td["seen"] = td["points"] @ td["camera"]
    td["summed"] = td["points"] + td["camera"]
    assert torch.equal(td[1]["seen"], points[1] @ camera)
    assert torch.equal(td[1]["summed"], points[1] + 1)
    view = td["camera"]
    assert view.add_(td["points"]) is view
    td["again"], td["powers"] = view * 2, torch.stack([view, view])
    assert td[1]["again"].shape == (3, 3)
    assert td[1]["powers"].shape == (2, 3, 3)
    view.requires_grad_()
    found = torch.autograd.grad((view * td["points"].requires_grad_()).sum(), [view, td["points"]])
    assert type(found[0]) is type(view)


class Doubled(torch.autograd.Function):
    """What torch calls without asking the class of the tensor."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, *grads: Any) -> Any:
        return grads[0] * 2


def double(u: Tensor) -> Tensor:
    return u * 2


def squares(u: Tensor) -> Tensor:
    return (u**2).sum()


def with_vjp(function: Any, u: Tensor) -> object:
    found: Any = torch.func.vjp(function, u)
    return found[0]


by_rows: Any = torch.vmap(torch.mul, in_dims=(0, None))

WAYS: dict[str, Any] = {
    "function": Doubled.apply,
    "reentrant": lambda u: checkpoint(double, u, use_reentrant=True),
    "checkpoint": lambda u: checkpoint(double, u, use_reentrant=False),
    "mapped": torch.vmap(double),
    "passed": lambda u: by_rows(torch.full((1,), 2.0), u),
    "vjp": partial(with_vjp, double),
    "grad": torch.func.grad(squares),
    "operator": lambda u: torch.ops.aten.mul.Tensor(u, 2),
    "compiled": torch.compile(double, backend="aot_eager"),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # it is asked, too
# dynamo of torch 2.15 asks for it, and hides the warning of that, but not where one is an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("before", ["nothing", "read", "late"])
def test_gradients_reach_it_by_ways_that_ask_no_class(way: str, before: str) -> None:
    td = TensorDict({"u": UnbatchedTensor(fixed().requires_grad_(before != "late"))}, [4])
    if before == "read":
        with torch.no_grad():
            td["u"].add_(0)
    if before == "late":
        td["u"].requires_grad_()
    for times in (1, 2):
        WAYS[way](td["u"]).sum().backward()
        assert td["u"].grad is not None
        assert td["u"].grad.tolist() == fixed(2.0 * times).tolist()
    if way == "function":
        td["made"] = WAYS[way](td["u"])
        td["made"].sum().backward()
        found: Any = td["u"].grad
        assert found.tolist() == fixed(6.0).tolist()
        del td["made"]
    td.requires_grad_(False)
    assert not WAYS[way](td["u"]).requires_grad


def test_functions_in_place_return_what_they_wrote() -> None:
    td = make()
    view, other = td["u"], torch.zeros(2, 3)
    assert view.add_(1) is view
    assert other.copy_(view) is other
    view += 1
    view[0] = 9.0
    assert td["u"].tolist() == [[9.0] * 3, [3.0] * 3]
    td["u"].requires_grad_()
    (td["u"] * 2).sum().backward()
    assert td["u"].grad is not None
    assert td["u"].grad.tolist() == fixed(2.0).tolist()
    assert copy.deepcopy(td["u"].detach()).tolist() == td["u"].tolist()
    assert torch.equal(pickle.loads(pickle.dumps(td["u"])), td["u"])
    assert type(td["u"].as_subclass(Tensor)) is Tensor
