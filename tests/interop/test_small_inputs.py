"""Small programs that users of tensordict write: what each gives in both libraries.

A program is called with a library and a folder of its own, and asserts what it must give. It is
run with the peer, too, so that it says what the peer does, but where `here_alone` says why not.
What processes send each other is in `tests/core/distributed/programs.py`.
"""

import dataclasses
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, Final

import numpy
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("tensordict")

from tests.interop.calls.chains import OURS, PEER
from tests.interop.calls.subjects import Library

Program = Callable[[Library, Path], None]

PROGRAMS: Final[list[Program]] = []
HERE_ALONE: Final[dict[str, str]] = {}


def program(run: Program) -> Program:
    """Register a program that gives the same in both libraries."""
    PROGRAMS.append(run)
    return run


def here_alone(why: str) -> Callable[[Program], Program]:
    """Register a program that the peer does not run, and say what it does instead."""

    def register(run: Program) -> Program:
        HERE_ALONE[run.__name__] = why
        return program(run)

    return register


def raises(kind: type[BaseException], call: Callable[[], object]) -> str:
    """Return what an error says that must be raised."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# Tensor classes


@program
def fields_of_any_name(lib: Library, tmp: Path) -> None:
    for name in ("data", "_cache", "nested", "fields", "schema", "spec", "batch", "plain"):
        cls = type("T", (lib.TensorClass,), {"__annotations__": {name: Tensor}})
        made = cls(**{name: torch.ones(3, 2)}, batch_size=[3])
        assert made.batch_size == (3,)
        assert getattr(made[0], name).shape == (2,)


@program
def an_init_of_its_own(lib: Library, tmp: Path) -> None:
    class Own:
        x: Tensor

        def __init__(self, x: Tensor) -> None:
            self.x = x

    cls = lib.tensorclass(Own)
    assert cls(torch.ones(2)).x.tolist() == [1.0, 1.0]
    assert isinstance(cls(torch.ones(2)), cls)


@program
def a_class_getitem_of_its_own(lib: Library, tmp: Path) -> None:
    class Own:
        x: Tensor

        def __class_getitem__(cls, item: object) -> object:
            return item

    assert lib.tensorclass(Own)[1, 2] == (1, 2)


@program
def classes_in_annotations(lib: Library, tmp: Path) -> None:
    assert lib.TensorDict[str, int] is not None
    assert lib.MetaData[str]("x").data == "x"


@program
def an_optional_field_that_is_none(lib: Library, tmp: Path) -> None:
    class Own:
        x: Tensor
        y: Tensor | None = None

    made = lib.tensorclass(Own, tensor_only=True)(x=torch.ones(2), batch_size=[2])
    assert made.y is None
    assert made[0].y is None
    assert dataclasses.replace(made, x=made.x + 1).y is None


# Memory maps, files, locks


@program
def mapped_tensors(lib: Library, tmp: Path) -> None:
    made = lib.MemoryMappedTensor.zeros(3, device=None)
    assert made.tolist() == [0.0] * 3
    assert isinstance(made, lib.MemoryMappedTensor)
    td = lib.TensorDict({"a": torch.ones(3)}, [3]).memmap_(tmp / "map", num_threads=0)
    assert isinstance(td["a"], lib.MemoryMappedTensor)
    assert td.is_locked


@program
def shared_containers_are_locked(lib: Library, tmp: Path) -> None:
    assert lib.TensorDict({"a": torch.ones(3)}, [3]).share_memory_().is_locked


@program
def a_new_folder_is_made(lib: Library, tmp: Path) -> None:
    td = lib.TensorDict({"a": torch.arange(3.0), "n": {"b": torch.ones(3)}}, [3])
    td.save(tmp / "new" / "folder" / "x")
    again = lib.TensorDict.load_memmap(tmp / "new" / "folder" / "x")
    assert (again == td).all()


@program
def a_class_is_saved_without_registration(lib: Library, tmp: Path) -> None:
    sample = lib.Based(a=torch.ones(3), b=torch.zeros(3), batch_size=[3])
    sample.save(tmp / "sample")
    assert lib.TensorDict.load_memmap(tmp / "sample").get("a").tolist() == [1.0] * 3


# Comparison and writes


@program
def words_are_compared(lib: Library, tmp: Path) -> None:
    assert not (lib.TensorDict(s="a") == lib.TensorDict(s="b")).all()
    assert (lib.TensorDict(s="a") == lib.TensorDict(s="a")).all()


@program
def a_container_is_compared_with_a_dict(lib: Library, tmp: Path) -> None:
    td = lib.TensorDict({"a": torch.arange(3)}, [3])
    assert (td == {"a": torch.tensor([0, 5, 2])})["a"].tolist() == [True, False, True]


@program
def a_nested_container_is_written(lib: Library, tmp: Path) -> None:
    td = lib.TensorDict({"a": {"b": torch.zeros(2)}}, [2])
    place = td["a", "b"]
    td.set_("a", td["a"] + 1)
    assert td["a", "b"].tolist() == place.tolist() == [1.0, 1.0]


@program
def a_row_of_words_is_written(lib: Library, tmp: Path) -> None:
    td = lib.TensorDict(s="a", batch_size=[2])
    td[0] = lib.TensorDict(s="z")
    assert td["s"] == ["z", "a"]


@program
def rows_add_keys_to_an_empty_container(lib: Library, tmp: Path) -> None:
    td = lib.TensorDict(batch_size=[4])
    td[0] = lib.TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(())}})
    assert td["a"].shape == (4, 2)
    assert td["a"][0].tolist() == [1.0, 1.0]
    assert td["n", "b"].shape == (4,)


@program
def views_of_a_lazy_stack_write_through(lib: Library, tmp: Path) -> None:
    members = [lib.TensorDict({"a": torch.zeros(2)}) for _ in range(2)]
    lib.lazy_stack(members).unsqueeze(0)[0, 0]["a"].fill_(1)
    assert members[0]["a"].tolist() == [1.0, 1.0]


# Non-tensor data


@program
def wrapped_words_make_a_stack(lib: Library, tmp: Path) -> None:
    stack = lib.NonTensorStack.from_list([lib.NonTensorData(x) for x in ["a", ["b"], []]])
    assert stack.tolist() == ["a", ["b"], []]


@program
def a_stack_of_words_iterates_over_wrappers(lib: Library, tmp: Path) -> None:
    td = lib.TensorDict({"w": lib.NonTensorStack("a", "b")}, [2])
    assert [e.data for e in td.get("w")] == ["a", "b"]


@program
def numbers_and_none_are_stacked(lib: Library, tmp: Path) -> None:
    stack: Any = torch.stack([lib.NonTensorData(1), lib.NonTensorData(None)])
    assert stack.tolist() == [1, None]
    assert stack.batch_size == (2,)
    assert lib.NonTensorData("x", batch_size=[3]).ndim == 1


# A tensor without batch dimensions


def with_constant(lib: Library) -> Any:
    td = lib.TensorDict({"a": torch.ones(3)}, [3])
    td["u"] = lib.UnbatchedTensor(torch.arange(5.0))
    return td


@program
def a_tensor_for_all_rows_computes(lib: Library, tmp: Path) -> None:
    td = with_constant(lib)
    assert (td.get("u") + 1).tolist() == (td["u"] + 1).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert float(td["u"].sum()) == 10.0
    assert float(td.get("u")[3]) == 3.0
    assert numpy.asarray(td["u"]).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert isinstance(td["u"], Tensor)
    assert isinstance(td["u"], lib.UnbatchedTensor)
    assert isinstance(torch.sin(td["u"]), lib.UnbatchedTensor)
    torch.testing.assert_close(td["u"], torch.arange(5.0))


@program
def a_tensor_for_all_rows_is_stored_again(lib: Library, tmp: Path) -> None:
    td = with_constant(lib)
    td["v"] = td["u"] * 2
    td["w"] = td.get("u") * 2
    td["n", "sum"] = td["u"].sum()
    assert td[0]["v"].tolist() == td[:2]["w"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert float(td[0]["n", "sum"]) == 10.0
    assert td.get("v").batch_size == td["v"].batch_size == (3,)
    td.update({"v": td["v"] + 1})
    td.set_("w", td["w"] + 1)
    assert td["v"].tolist() == td["w"].tolist() == [1.0, 3.0, 5.0, 7.0, 9.0]
    both: Any = torch.stack([td, td])
    both["x"] = both["v"] + 1
    assert both[1, 2]["x"].tolist() == [2.0, 4.0, 6.0, 8.0, 10.0]


@program
def a_tensor_for_all_rows_in_a_class_and_a_lazy_stack(lib: Library, tmp: Path) -> None:
    made = lib.Based(a=torch.ones(3), b=lib.UnbatchedTensor(torch.arange(5.0)), batch_size=[3])
    made.b = made.b * 2
    assert made[0].b.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    typed = lib.Typed(a=torch.ones(3), b=lib.UnbatchedTensor(torch.arange(5.0)), batch_size=[3])
    typed["b"] = typed.b + typed["b"]
    assert typed[:1].b.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    stack = lib.lazy_stack([with_constant(lib), with_constant(lib)])
    stack["v"] = stack["u"] * 2
    assert stack[1, 0]["v"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]


@program
def modules_read_and_write_a_tensor_for_all_rows(lib: Library, tmp: Path) -> None:
    td = with_constant(lib)
    module = lib.TensorDictSequential(
        lib.TensorDictModule(nn.Linear(5, 2), ["u"], ["h"]),
        lib.TensorDictModule(torch.neg, ["h"], ["y"]),
    )
    for _ in range(3):
        module(td)
        assert td[0]["y"].shape == (2,)
        assert torch.equal(td["y"], -td["h"])


# vmap


@program
def vmap_maps_the_leaves_of_an_empty_batch(lib: Library, tmp: Path) -> None:
    td = lib.TensorDict({"w": torch.zeros(8, 3)})
    assert torch.vmap(lambda x: x["w"] + 1)(td).shape == (8, 3)
    assert torch.vmap(lambda x: x + 1)(td)["w"].shape == (8, 3)


@program
def vmap_takes_out_dims_in_a_tuple(lib: Library, tmp: Path) -> None:
    td = lib.TensorDict({"w": torch.zeros(8, 3)}, [8])
    assert torch.vmap(lambda x: x + 1, (0,), (0,))(td)["w"].shape == (8, 3)


# Operands


@here_alone("the peer lines the tensor up from the right, without a word")
def an_operand_that_fits_twice(lib: Library, tmp: Path) -> None:
    td = lib.TensorDict({"a": torch.zeros(3, 3)}, [3, 3])
    said = raises(RuntimeError, lambda: td + torch.arange(3))
    assert "x[..., None]" in said
    assert "x[None]" in said
    assert (td + torch.arange(3)[None])["a"][0].tolist() == [0.0, 1.0, 2.0]
    assert (td + torch.arange(3)[..., None])["a"][0].tolist() == [0.0, 0.0, 0.0]


# Modules


def steps(lib: Library) -> list[Any]:
    return [
        lib.TensorDictModule(torch.neg, ["x"], ["y"]),
        lib.TensorDictModule(torch.abs, ["y"], ["z"]),
    ]


def inputs(lib: Library) -> Any:
    return lib.TensorDict({"x": torch.tensor([1.0, -2.0])}, [2])


@program
def slices_of_a_subclass_are_of_the_subclass(lib: Library, tmp: Path) -> None:
    class S(lib.TensorDictSequential):  # type: ignore[name-defined,misc]  # chosen at run time
        def __init__(self, *modules: Any) -> None:
            super().__init__(*modules)

    made = S(*steps(lib))
    assert type(made[:1]) is S
    assert type(made.select_subsequence(out_keys=["y"])) is S
    assert made.select_subsequence(out_keys=["y"])(inputs(lib))["y"].tolist() == [-1.0, 2.0]


@program
def a_sequence_is_a_module(lib: Library, tmp: Path) -> None:
    made = lib.TensorDictSequential(*steps(lib))
    assert isinstance(made, lib.TensorDictModule)
    made.spec = "mine"
    made.plain_functions = made.split_outputs = 3
    assert (made.spec, made.plain_functions) == ("mine", 3)
    assert made(inputs(lib))["z"].tolist() == [1.0, 2.0]


@program
def a_mixin_behind_a_probabilistic_sequence(lib: Library, tmp: Path) -> None:
    class Mixin:
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self.given = (args, named)

        def tell(self) -> str:
            return "mixin"

    class Policy(lib.ProbabilisticTensorDictSequential, Mixin):  # type: ignore[name-defined,misc]  # as above
        pass

    made = Policy(
        lib.TensorDictModule(lambda x: (x, x.abs() + 1), ["x"], ["loc", "scale"]),
        lib.ProbabilisticTensorDictModule(
            ["loc", "scale"], ["a"], distribution_class=torch.distributions.Normal
        ),
    )
    assert made.tell() == "mixin"
    assert made(inputs(lib))["a"].shape == (2,)


@program
def plain_callables_are_steps(lib: Library, tmp: Path) -> None:
    made = lib.TensorDictSequential(lambda td: td.set("y", td["x"] * 2), steps(lib)[1])
    assert made(inputs(lib))["z"].tolist() == [2.0, 4.0]


@program
def further_arguments_reach_the_module(lib: Library, tmp: Path) -> None:
    def noisy(x: Tensor, noise: float = 0.0) -> Tensor:
        return x + noise

    made = lib.TensorDictModule(noisy, ["x"], ["y"])
    assert made(inputs(lib), noise=2)["y"].tolist() == [3.0, 0.0]


@here_alone("the peer takes the dict for the value of the first input")
def a_dict_takes_the_place_of_a_container(lib: Library, tmp: Path) -> None:
    made = lib.TensorDictModule(torch.neg, ["x"], ["y"])
    assert made({"x": torch.ones(2)})["y"].tolist() == [-1.0, -1.0]


@program
def an_absent_input_has_its_default(lib: Library, tmp: Path) -> None:
    def plus(x: Tensor, h: Tensor | None = None) -> Tensor:
        return x if h is None else x + h

    made = lib.TensorDictModule(plus, ["x", "absent"], ["y"])
    assert made(inputs(lib))["y"].tolist() == [1.0, -2.0]


# Parameters


@program
def parameters_are_installed(lib: Library, tmp: Path) -> None:
    net = nn.Linear(2, 3)
    params = lib.TensorDict.from_module(net).data.clone().zero_() + 2
    params.to_module(net)
    assert net.weight.tolist() == [[2.0, 2.0]] * 3
    assert net(torch.ones(2)).tolist() == [6.0] * 3


@program
def parameters_are_written_as_by_an_optimiser(lib: Library, tmp: Path) -> None:
    source = lib.TensorDictParams(lib.TensorDict.from_module(nn.Linear(2, 3)))
    target = lib.TensorDictParams(lib.TensorDict.from_module(nn.Linear(2, 3)))
    target.data.copy_(source.data)
    assert torch.equal(target["weight"], source["weight"])
    target.data.lerp_(source.data * 3, 0.5)
    assert torch.allclose(target["weight"], source["weight"] * 2)
    target.data.zero_()
    assert not target["weight"].any()


@here_alone("the peer asks for `no_grad`, or for `data`")
def parameters_are_written_without_no_grad(lib: Library, tmp: Path) -> None:
    source = lib.TensorDictParams(lib.TensorDict.from_module(nn.Linear(2, 3)))
    target = lib.TensorDictParams(lib.TensorDict.from_module(nn.Linear(2, 3)))
    target.copy_(source)
    assert torch.equal(target["weight"], source["weight"])
    target.lerp_(source * 3, 0.5)
    assert torch.allclose(target["weight"], source["weight"] * 2)
    target.zero_()
    assert not target["weight"].any()
    assert target["weight"].requires_grad


# Switches


@program
def switches_set_what_is_done_anyway(lib: Library, tmp: Path) -> None:
    for switch in (lib.set_composite_lp_aggregate(False), lib.set_list_to_stack(True)):
        with switch:
            assert lib.TensorDict({"q": ["a", "b"]}, [2])[1]["q"] == "b"


@program
def a_list_is_one_value(lib: Library, tmp: Path) -> None:
    with lib.set_list_to_stack(False):
        td = lib.TensorDict({"q": ["a", "b"]}, [2])
    assert list(td[1]["q"]) == ["a", "b"]


@program
def scores_are_summed(lib: Library, tmp: Path) -> None:
    normal = torch.distributions.Normal
    dist = lib.CompositeDistribution(
        lib.TensorDict(
            {key: {"loc": torch.zeros(2), "scale": torch.ones(2)} for key in ("a", "b")}, [2]
        ),
        distribution_map={"a": normal, "b": normal},
    )
    sample = dist.sample()
    with lib.set_composite_lp_aggregate(True):
        summed = dist.log_prob(sample)
    with lib.set_composite_lp_aggregate(False):
        parts = dist.log_prob(sample)
    assert torch.allclose(summed, parts["a_log_prob"] + parts["b_log_prob"])


@program
def each_score_of_a_sum_is_written(lib: Library, tmp: Path) -> None:
    normal, zeros = torch.distributions.Normal, torch.zeros(3)
    both = {key: {"loc": zeros, "scale": zeros + 1} for key in ("a", "b")}
    held = lib.TensorDict({"params": both, "a": zeros, "b": zeros}, [3])
    with lib.set_composite_lp_aggregate(True):
        module = lib.ProbabilisticTensorDictModule(
            ["params"],
            ["a", "b"],
            distribution_class=lib.CompositeDistribution,
            distribution_kwargs={"distribution_map": {"a": normal, "b": normal}},
        )
        for scored in (module, lib.ProbabilisticTensorDictSequential(module)):
            td = held.clone()
            score = scored.log_prob(td)
            assert torch.equal(score, td["a_log_prob"] + td["b_log_prob"])
        raises(RuntimeError, lambda: module.log_prob(held.clone().lock_()))
        one = lib.ProbabilisticTensorDictModule(
            ["loc", "scale"], ["y"], distribution_class=normal, return_log_prob=True
        )
        assert one.out_keys == ["y", "sample_log_prob"]


# Nested tensors, sizes, dicts


@program
def strided_nested_tensors(lib: Library, tmp: Path) -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    td = lib.TensorDict({"n": ragged}, [2])
    assert [tuple(part.shape) for part in td["n"].unbind()] == [(2,), (3,)]


@here_alone("the peer cannot iterate over, or save, a strided nested tensor")
def strided_nested_tensors_are_iterated_and_saved(lib: Library, tmp: Path) -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    td = lib.TensorDict({"n": ragged}, [2])
    assert [tuple(row["n"].shape) for row in td] == [(2,), (3,)]
    td.save(tmp / "ragged")
    again = lib.TensorDict.load(tmp / "ragged")["n"]
    assert [part.tolist() for part in again.unbind()] == [[1.0] * 2, [1.0] * 3]


@program
def the_length_without_batch_dimensions(lib: Library, tmp: Path) -> None:
    assert len(lib.TensorDict({"a": torch.ones(3), "b": torch.ones(3)})) == 0


@program
def a_state_dict_with_other_keys(lib: Library, tmp: Path) -> None:
    state = lib.TensorDict({"b": torch.ones(2)}, [2]).state_dict()
    raises(RuntimeError, lambda: lib.TensorDict({"a": torch.ones(2)}, [2]).load_state_dict(state))


@program
def words_in_a_dict_give_a_batch(lib: Library, tmp: Path) -> None:
    plain = {"q": ["s1", "s2"], "x": torch.zeros(2, 3)}
    assert lib.TensorDict.from_dict(plain, auto_batch_size=True).batch_size[:1] == (2,)


@program
def where_keeps_the_words_that_one_side_lacks(lib: Library, tmp: Path) -> None:
    rows = torch.tensor([True, False, True])
    plain: Any = lib.TensorDict({"a": torch.ones(3)}, [3])
    for words in ("x", ["x", "y", "z"]):
        td = lib.TensorDict({"a": torch.zeros(3), "n": {"w": words}}, [3])
        made: list[Any] = [td.where(rows, plain), plain.where(rows, td)]
        assert [each["n", "w"] for each in (*made, torch.where(rows, td, plain))] == [words] * 3
        beside = plain.clone().set("b", torch.ones(3))
        raises(KeyError, lambda td=td, beside=beside: td.where(rows, beside))  # type: ignore[misc]  # of the loop


@program
def where_lines_a_tensor_up_as_torch_does(lib: Library, tmp: Path) -> None:
    rows = torch.tensor([True, False, False])
    td = lib.TensorDict({"a": torch.zeros(3, 2)}, [3])
    assert td.where(rows, torch.arange(2.0))["a"].tolist() == [[0, 0], [0, 1], [0, 1]]
    assert td.where(rows, torch.arange(3.0)[:, None])["a"].tolist() == [[0, 0], [1, 1], [2, 2]]
    both = lib.TensorDict({"a": torch.zeros(3, 3)}, [3])
    assert both.where(rows, torch.arange(3.0)[None])["a"].tolist() == [[0, 0, 0]] + [[0, 1, 2]] * 2


@here_alone(
    "the peer lines it up from the right, of all operands of a batch those of `where` alone"
)
def where_refuses_a_tensor_that_fits_from_both_sides(lib: Library, tmp: Path) -> None:
    rows, more = torch.tensor([True, False, False]), torch.arange(3.0)
    stack = lib.lazy_stack([lib.TensorDict({"a": torch.zeros(3)}) for _ in range(3)])
    for td in (lib.TensorDict({"a": torch.zeros(3, 3)}, [3]), stack, stack.densify()):
        said = raises(ValueError, lambda td=td: td.where(rows, more))  # type: ignore[misc]  # of the loop
        assert "`x[..., None]`" in said
        assert "`x[None]`" in said
    assert lib.TensorDict({"a": torch.zeros(3, 2)}, [3]).where(rows, more)["a"][1].tolist() == [
        1,
        1,
    ]


@program
def lists_as_values_of_rows(lib: Library, tmp: Path) -> None:
    td = lib.TensorDict({"a": torch.zeros(3)}, [3])
    td[0] = {"w": ["x", "y"]}
    assert td[0]["w"] == ["x", "y"]
    stack = lib.lazy_stack([lib.TensorDict({"a": torch.zeros(2)}, [2]) for _ in range(3)])
    stack[0] = {"w": "word", ("n", "b"): torch.ones(2)}
    assert stack[0]["w"] == "word"
    assert stack[0]["n", "b"].tolist() == [1, 1]
    stack[:] = {"b": torch.ones(3, 2)}
    assert stack["b"].shape == (3, 2)
    ragged = lib.lazy_stack([lib.TensorDict({"w": ["x", "y"]}), lib.TensorDict({"w": ["z"]})])
    assert ragged["w"] == [["x", "y"], ["z"]]


@program
def lists_of_numbers_of_other_lengths_are_tensors(lib: Library, tmp: Path) -> None:
    for batch in ([], [2]):
        td = lib.TensorDict({"a": [[1, 2], [3]], "b": [[], [1.0]], "c": [(1, 2), (3,)]}, batch)
        assert [each.tolist() for each in td["a"]] == [[1, 2], [3]]
        assert [each.shape for each in td["b"]] == [(0,), (1,)]
        assert td["c"] == [(1, 2), (3,)]
        td.memmap(tmp / f"m{len(batch)}")
        read = lib.TensorDict.load_memmap(tmp / f"m{len(batch)}")["a"]
        assert [each.tolist() for each in read] == [[1, 2], [3]]
    assert lib.TensorDict({"a": []}, [0])["a"].shape == (0,)


@program
def lists_that_are_not_stacks_are_arrays(lib: Library, tmp: Path) -> None:
    with lib.set_list_to_stack(False):
        td = lib.TensorDict({"w": ["x", "y"], "o": [None, {"k": 1}], "f": [0.5, 2]}, [2])
    assert td["w"].dtype.kind == td[0]["w"].dtype.kind == "U"
    assert td["o"].tolist() == [None, {"k": 1}]
    assert td["f"].dtype is torch.float64


@program
def containers_without_tensors_are_shared_and_mapped(lib: Library, tmp: Path) -> None:
    for number, content in enumerate(({}, {"w": "word"})):
        assert lib.TensorDict(content, [3]).share_memory_().is_shared()
        assert lib.TensorDict(content, [3]).memmap_(tmp / f"{number}").is_memmap()
        assert not lib.TensorDict(content, [3]).lock_().is_shared()
        assert not lib.TensorDict(content, [3]).lock_().is_memmap()


@program
def unlocking_ends_that_memory_is_shared_or_mapped(lib: Library, tmp: Path) -> None:
    td = lib.TensorDict({"a": torch.zeros(3), "n": {"b": torch.ones(3)}}, [3])
    assert td.share_memory_().is_shared()
    assert not td.unlock_().is_shared()
    assert td["n", "b"].is_shared()
    assert td.memmap_(tmp / "mapped").is_memmap()
    assert not td.unlock_().is_memmap()


@program
def sequences_are_padded_behind_the_batch(lib: Library, tmp: Path) -> None:
    def padded(*shapes: tuple[int, ...], batch: list[int], **options: Any) -> Any:
        parts = [
            lib.TensorDict({"n": {"a": torch.ones(shape)}, "w": "x"}, batch) for shape in shapes
        ]
        return lib.pad_sequence(parts, **options)

    made = padded((2, 1), (2, 3), batch=[2], pad_dim=1, return_mask=True, padding_side="left")
    assert made.batch_size == (2, 2)
    assert made["n", "a"].tolist() == [[[0, 0, 1]] * 2, [[1, 1, 1]] * 2]
    assert made["masks", "n", "a"].tolist() == (made["n", "a"] == 1).tolist()
    assert made["w"] == [["x"] * 2] * 2
    made = padded((2, 3, 1), (2, 3, 4), batch=[2], pad_dim=2, padding_value=7, return_mask="m")
    assert made["n", "a"].sum() == 2 * 3 * (1 + 3 * 7 + 4)
    assert made["m", "n", "a"].sum(-1).tolist() == [[1, 1], [4, 4]]
    for dim in (-1, 2):
        assert padded((2, 3, 1), (2, 3, 4), batch=[2], pad_dim=dim)["n", "a"].shape == (2, 2, 3, 4)
        assert padded((2, 3, 1), (2, 3, 4), batch=[], pad_dim=dim)["n", "a"].shape == (2, 2, 3, 4)
    stacks = [lib.lazy_stack([lib.TensorDict({"a": torch.ones(n)})] * 2) for n in (1, 3)]
    assert lib.pad_sequence(stacks, pad_dim=1)["a"].shape == (2, 2, 3)


@program
def the_mapping_of_a_scale_is_a_module(lib: Library, tmp: Path) -> None:
    extractors: list[Any] = [
        lib.NormalParamExtractor(name)
        for name in ("biased_softplus_1.0", "biased_softplus_0.5", "softplus")
    ]
    found = [[type(each).__name__ for each in made.children()] for made in extractors]
    assert found == [["biased_softplus"], ["biased_softplus"], []]
    assert [dict(made.named_modules()).get("scale_mapping") for made in extractors[:2]] == [
        made.scale_mapping for made in extractors[:2]
    ]
    assert extractors[0].state_dict() == {}
    seen: list[int] = []
    extractors[0].scale_mapping.register_forward_hook(lambda *args: seen.append(len(args)))
    assert extractors[0](torch.zeros(4))[1].tolist() == [1, 1]
    assert seen == [3]


# Parts of stacks, order of fields, what a container is


def episodes(lib: Library) -> Any:
    parts = [lib.TensorDict({"x": torch.arange(4), "task": task}, [4]) for task in ("lift", "push")]
    return torch.stack(parts)


@program
def a_part_of_one_word_is_read_as_one(lib: Library, tmp: Path) -> None:
    td = episodes(lib)
    one: list[Any] = [td[1], td[1, :2], td.unbind(0)[1], td.clone()[1], td[None][0, 1], list(td)[1]]
    one += [td.permute(1, 0)[:, 1], td[torch.tensor([1, 0])][0], td.repeat(2, 1)[3], td.double()[1]]
    one += [torch.stack([td, td])[1, 1], td.where(torch.tensor([True, False]), td.clone())[1]]
    assert [each["task"] for each in one] == ["push"] * len(one)
    rows: list[Any] = [td.reshape(-1)[:2], torch.cat([td[0], td[1]])[:2], td[[0, 0], [0, 1]]]
    assert [each["task"] for each in rows] == [["lift"] * 2] * len(rows)
    assert td["task"] == [["lift"] * 4, ["push"] * 4]
    assert td[:, 0]["task"] == ["lift", "push"]
    td[1].set_("task", "pull")
    assert (td[1]["task"], td["task"][1]) == ("pull", ["pull"] * 4)


@program
def words_of_members_of_other_sizes(lib: Library, tmp: Path) -> None:
    members = [lib.TensorDict({"w": "a"}, [2]), lib.TensorDict({"w": ["b", "c", "d"]}, [3])]
    td = lib.lazy_stack(members)
    assert td["w"] == td.get("w").tolist() == [["a", "a"], ["b", "c", "d"]]
    assert td.exclude("x").to_dict() == {"w": [["a", "a"], ["b", "c", "d"]]}


@program
def fields_are_in_the_order_of_the_call(lib: Library, tmp: Path) -> None:
    x = torch.ones(3)
    made = lib.Based(b=x, a=x, batch_size=[3])
    assert list(made.keys()) == list(made[0].keys()) == ["b", "a", "s"]
    assert list(lib.Based(x, s="t", b=x, batch_size=[3]).keys()) == ["s", "b", "a"]
    assert list(lib.Based.from_dict({"s": "t", "b": x, "a": x}).keys()) == ["s", "b", "a"]
    assert list(lib.Based.from_tensordict(lib.TensorDict({"b": x, "a": x}, [3])).keys()) == [
        *("b", "a")
    ]


@program
def a_typed_container_is_made_of_a_mapping(lib: Library, tmp: Path) -> None:
    entries = {"b": torch.ones(3), "a": torch.ones(3, 2)}
    for source in (entries, lib.TensorDict(entries, [3])):
        made = lib.Typed(source, batch_size=[3])
        assert (list(made.keys()), made.batch_size) == (["b", "a"], (3,))


@program
def from_any_keeps_containers(lib: Library, tmp: Path) -> None:
    instance = lib.Based(a=torch.ones(3), b=torch.ones(3), batch_size=[3])
    for given in (instance, lib.TensorDict({"a": torch.ones(3)}, [3]).lock_()):
        assert lib.TensorDict.from_any(given) is given
        listed = lib.TensorDict.from_any([given, given])
        assert isinstance(listed, lib.NonTensorStack)
        assert listed.batch_size[0] == 2


@program
def a_container_is_a_mutable_mapping(lib: Library, tmp: Path) -> None:
    td = lib.TensorDict({"a": torch.ones(2)}, [2])
    assert isinstance(td, MutableMapping)
    assert torch.utils.data.default_collate([td[0], td[1]])["a"].tolist() == [1, 1]


@program
def a_dict_beside_a_container_broadcasts(lib: Library, tmp: Path) -> None:
    td = lib.TensorDict({"a": torch.arange(6).reshape(2, 3), "n": {"b": torch.ones(2)}}, [2])
    assert (td == {"a": torch.arange(3), "n": {"b": 1.0}})["a"].tolist() == [
        [True] * 3,
        [False] * 3,
    ]
    assert (td > {"a": 0, "n": {"b": 1}})["n", "b"].tolist() == [False, False]


@program
def a_state_dict_as_parameters_is_detached(lib: Library, tmp: Path) -> None:
    net = nn.Linear(2, 1)
    state = lib.TensorDict.from_module(net, use_state_dict=True)
    assert not state["weight"].requires_grad
    state.mul_(0)
    assert not net.weight.any()


@program
def a_pool_of_processes_maps(lib: Library, tmp: Path) -> None:
    td = lib.TensorDict({"a": torch.arange(4)}, [4])
    with torch.multiprocessing.get_context("fork").Pool(1) as pool:
        assert td.map(negated, pool=pool, chunksize=2)["a"].tolist() == [0, -1, -2, -3]


def negated(td: Any) -> Any:
    return td.neg()


# What examples in docstrings of TorchRL do


@program
def out_keys_of_a_sequence_list_what_is_discarded(lib: Library, tmp: Path) -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    first = lib.TensorDictModule(twice, ["a"], ["_", "h"])
    both = lib.TensorDictSequential(first, lib.TensorDictModule(twice, ["h"], ["b", "_"]))
    assert both.out_keys == ["h", "b", "_"]
    outer = lib.TensorDictSequential(both, lib.TensorDictModule(twice, ["b"], ["_", "c"]))
    assert outer.out_keys == ["h", "b", "_", "c"]
    assert [*outer(lib.TensorDict({"a": torch.ones(2)})).keys()] == ["a", "h", "b", "c"]
    assert len(outer(torch.ones(2))) == 3
    assert outer.select_subsequence(in_keys=["a"]).out_keys == ["h", "b", "_", "c"]
    assert both.select_out_keys("_", "b").out_keys == ["_", "b"]
    assert both(torch.ones(2)).shape == (2,)


@here_alone("the peer leaves out the entry, so that what differs is equal")
def a_tensor_is_compared_with_data(lib: Library, tmp: Path) -> None:
    def beside(value: object) -> Any:
        return lib.TensorDict({"n": {"a": lib.NonTensorData(value)}, "b": torch.ones(2)})

    td = lib.TensorDict({"n": {"a": torch.tensor([1.0, 2.0])}, "b": torch.ones(2)}).lock_()
    assert (td == beside((1.0, 2.0))).all()
    assert (beside((1.0, 2.0)) == td).all()
    assert (td == beside(1.0))["n", "a"].tolist() == [True, False]
    for value in ("word", None, {"x": 1}, [1.0, 2.0, 3.0]):
        assert not (td == beside(value)).all()
        assert (beside(value) != td)["n", "a"].all()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("run", PROGRAMS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("lib", [OURS, PEER], ids=["kd", "peer"])
def test_a_program_gives_what_it_says(lib: Library, run: Program, tmp_path: Path) -> None:
    if lib.is_peer and run.__name__ in HERE_ALONE:
        with pytest.raises((Exception, pytest.fail.Exception)):
            run(lib, tmp_path)
        return
    run(lib, tmp_path)
