import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from kd_core import (
    InvalidArgument,
    InvalidKey,
    NestedKey,
    NonTensorData,
    ShapeMismatch,
    TensorDict,
    lazy_stack,
)
from kd_nn import (
    InputMissing,
    OutKeyUnknown,
    OutputMismatch,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    WrapModule,
    make_functional,
)

X = torch.arange(6.0).reshape(2, 3)


def same(got: object, expected: Tensor | float) -> bool:
    return isinstance(got, Tensor) and bool((got == expected).all())


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, x - 1


def test_container_is_written_and_returned() -> None:
    td = TensorDict(x=X)
    module = TensorDictModule(torch.neg, ["x"], ["y"])
    assert module(td) is td
    assert same(td["y"], -X)


@pytest.mark.parametrize("in_keys", ["x", ["x"], {"input": "x"}])
def test_in_keys_take_str_list_and_mapping(in_keys: str | list[str] | dict[str, str]) -> None:
    module = TensorDictModule(torch.neg, in_keys, "y")
    assert module.in_keys == ["x"]
    assert module.out_keys == ["y"]
    assert same(module(TensorDict(x=X))["y"], -X)


def test_tuple_is_one_nested_key() -> None:
    module = TensorDictModule(torch.neg, ("a", "x"), ("b", "y"))
    assert module.in_keys == [("a", "x")]
    assert same(module(TensorDict(a={"x": X}))["b", "y"], -X)


def test_mapping_feeds_one_key_to_two_arguments() -> None:
    module = TensorDictModule(torch.add, {"input": "x", "other": "x"}, ["y"])
    assert module.in_keys == ["x"]
    assert same(module(x=X), 2 * X)


def test_list_may_repeat_a_key() -> None:
    assert same(TensorDictModule(torch.add, ["x", "x"], ["y"])(X), 2 * X)


def test_a_mapping_names_arguments_unless_it_is_swapped() -> None:
    for out_to_in_map in (True, None):
        module = TensorDictModule(torch.neg, {"input": "x"}, ["y"], out_to_in_map=out_to_in_map)
        assert module.in_keys == ["x"]
    with pytest.raises(InvalidArgument, match="`out_to_in_map` must be True or False, got 0"):
        TensorDictModule(torch.neg, {"input": "x"}, ["y"], out_to_in_map=0)  # type: ignore[arg-type]  # wrong on purpose


def test_mapping_can_be_read_from_key_to_argument() -> None:
    module = TensorDictModule(torch.sub, {"a": "input", "b": "other"}, ["y"], out_to_in_map=False)
    assert same(module(a=X, b=torch.ones(2, 3)), X - 1)


@pytest.mark.parametrize(
    "function",
    [split, lambda x: list(split(x)), lambda x: {"down": x - 1, "up": x + 1, "more": x}],
)
def test_two_outputs_come_as_tuple_list_or_mapping(function: Callable[[Tensor], object]) -> None:
    up, down = TensorDictModule(function, ["x"], ["up", "down"])(x=X)
    assert same(up, X + 1)
    assert same(down, X - 1)


def test_a_dict_may_name_outputs_by_whole_keys() -> None:
    module = TensorDictModule(lambda x: {("a", "b"): x + 1, "c": x}, ["x"], ["c", ("a", "b")])
    assert same(module(TensorDict(x=X))["a", "b"], X + 1)
    assert same(module(X)[1], X + 1)
    alone = TensorDictModule(lambda x: {("a", "b"): x + 1}, ["x"], [("a", "b")])
    assert same(alone(x=X), X + 1)
    with pytest.raises(OutputMismatch, match=r"mapping of `.'a', 'b'.`, without `c`"):
        TensorDictModule(lambda x: {("a", "b"): x}, ["x"], ["c", ("a", "b")])(x=X)


def test_discarded_output_is_not_written() -> None:
    module = TensorDictModule(split, ["x"], ["_", "down"])
    assert set(module(TensorDict(x=X)).keys()) == {"x", "down"}
    assert isinstance(module(x=X), Tensor)


@pytest.mark.parametrize(
    ("function", "out_keys", "got"),
    [
        (split, ["y"], "1 out_keys .`y`., got 2 outputs"),
        (torch.neg, ["a", "b"], "2 out_keys .`a`, `b`., got 1 output\\."),
        (lambda x: {"a": x}, ["a", "b"], "a mapping of `a`, without `b`"),
        (lambda x: None, ["a"], "got None .is a `return` missing"),
    ],
)
def test_wrong_number_of_outputs_names_both(
    function: Callable[[Tensor], object], out_keys: list[str], got: str
) -> None:
    td = TensorDict(x=X)
    with pytest.raises(OutputMismatch, match=got):
        TensorDictModule(function, ["x"], out_keys)(td)
    assert list(td.keys()) == ["x"]


def test_missing_input_names_key_present_keys_and_nearest() -> None:
    module = TensorDictModule(nn.Linear(3, 4), ["image"], ["y"])
    with pytest.raises(
        InputMissing, match=r"`TensorDictModule\(Linear\)` reads `image`.*`imag`, `z`.*mean `imag`"
    ):
        module(TensorDict(imag=X, z=X))


def test_tuple_that_was_meant_as_a_list_is_told() -> None:
    module = TensorDictModule(torch.add, ("x", "y"), ["z"])
    with pytest.raises(InputMissing, match=r'A tuple is one nested key; .* write \["x", "y"\]'):
        module(TensorDict(x=X, y=X))


def test_missing_input_is_none_when_not_strict() -> None:
    module = TensorDictModule(
        lambda x, h: x if h is None else x + h, ["x", "h"], ["y"], strict=False
    )
    assert same(module(TensorDict(x=X))["y"], X)
    assert same(module(X), X)


def test_inplace_false_and_empty_leave_the_input_alone() -> None:
    td = TensorDict({"x": X}, [2])
    fresh = TensorDictModule(torch.neg, ["x"], ["y"], inplace=False)(td)
    empty = TensorDictModule(torch.neg, ["x"], ["y"], inplace="empty")(td)
    assert list(td.keys()) == ["x"]
    assert list(fresh.keys()) == list(empty.keys()) == ["y"]
    assert empty.batch_size == (2,)


def test_tensordict_out_beats_inplace() -> None:
    out = TensorDict()
    module = TensorDictModule(torch.neg, ["x"], ["y"])
    assert module(TensorDict(x=X), tensordict_out=out) is out
    assert list(out.keys()) == ["y"]


def test_unknown_inplace_is_refused() -> None:
    with pytest.raises(InvalidArgument, match='True, False, None or "empty"'):
        TensorDictModule(torch.neg, ["x"], ["y"], inplace="full")  # type: ignore[arg-type]  # wrong on purpose


def test_method_and_its_keywords_are_called() -> None:
    class Net(nn.Module):
        def scale(self, x: Tensor, by: float) -> Tensor:
            return x * by

    module = TensorDictModule(Net(), ["x"], ["y"], method="scale", method_kwargs={"by": 3.0})
    assert same(module(x=X), 3 * X)
    with pytest.raises(InvalidArgument, match="name of a method of `Net`, got 'shrink'"):
        TensorDictModule(Net(), ["x"], ["y"], method="shrink")


def test_selection_returns_what_was_asked_in_that_order() -> None:
    module = TensorDictModule(split, ["x"], ["up", "down"])
    down, up = module.select_out_keys("down", "up")(x=X)
    assert same(down, X - 1)
    assert same(up, X + 1)
    assert isinstance(module.select_out_keys("up")(x=X), Tensor)
    assert module.out_keys_source == ["up", "down"]
    assert module.reset_out_keys().out_keys == ["up", "down"]


def test_selection_never_touches_an_entry_of_the_caller() -> None:
    module = TensorDictModule(split, ["x"], ["up", "down"]).select_out_keys("up")
    td = module(TensorDict(x=X, down=X))
    assert td["down"] is X


def test_unknown_selection_lists_the_outputs_and_changes_nothing() -> None:
    module = TensorDictModule(split, ["x"], ["up", "down"])
    with pytest.raises(OutKeyUnknown, match=r"`up`, `down`. Did you mean `down`"):
        module.select_out_keys("dow")
    assert module.out_keys == ["up", "down"]


def test_attributes_of_the_wrapped_module_are_reachable() -> None:
    module = TensorDictModule(nn.Linear(3, 4), ["x"], ["y"])
    assert module.in_features == 3
    with pytest.raises(AttributeError, match=r"attribute `nope` not found in"):
        module.nope  # noqa: B018  # reading it raises


def test_copies_and_pickles_run_alone() -> None:
    module = TensorDictModule(nn.Linear(3, 4), ["x"], ["y"])
    before = module(TensorDict(x=X))["y"]
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert same(twin(x=X), before)
        next(twin.parameters()).data.zero_()
        twin.out_keys = ["z"]
        assert same(module(x=X), before)
        assert module.out_keys == ["y"]


def test_a_module_that_writes_its_keys_itself_may_list_one_again() -> None:
    class Twice(TensorDictModuleBase):
        in_keys = ["x"]  # noqa: RUF012  # as users write it
        out_keys = ["y", "y"]  # noqa: RUF012  # as above

        def forward(self, tensordict: TensorDict) -> TensorDict:
            return tensordict.set("y", tensordict["x"] + 1)

    module = Twice()
    assert module.out_keys == ["y", "y"]
    module.out_keys += ["y"]
    module.out_keys.remove("y")  # as policies of TorchRL do around nested calls
    assert module.out_keys == ["y", "y"]
    assert TensorDictSequential(module).out_keys == ["y"]
    assert same(TensorDictSequential(module)(TensorDict(x=X))["y"], X + 1)


def test_bad_keys_are_refused() -> None:
    with pytest.raises(InvalidKey, match="`out_keys` names `y` twice"):
        TensorDictModule(torch.neg, ["x"], ["y", "y"])
    with pytest.raises(InvalidKey, match="each of `in_keys` must be a str"):
        TensorDictModule(torch.neg, [1], ["y"])  # type: ignore[list-item]  # wrong on purpose
    with pytest.raises(InvalidArgument, match="must be callable"):
        TensorDictModule(3, ["x"], ["y"])  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidArgument, match=r"is the class `Linear`. Pass an instance: `Linear"):
        TensorDictModule(nn.Linear, ["x"], ["y"])
    with pytest.raises(InvalidKey, match=r"got list: .* Unpack the list: `\*keys`"):
        TensorDictModule(torch.neg, ["x"], ["y"]).select_out_keys(["y"])  # type: ignore[arg-type]  # wrong on purpose


def test_parameters_are_reset() -> None:
    torch.manual_seed(0)
    module = TensorDictModule(nn.Sequential(nn.Linear(3, 4)), ["x"], ["y"])
    before = [p.clone() for p in module.parameters()]
    module.reset_parameters_recursive()
    assert all((p != q).any() for p, q in zip(module.parameters(), before, strict=True))


def test_each_part_is_reset_once() -> None:
    class Counted(nn.Module):
        count = 0

        def reset_parameters(self) -> None:
            self.count += 1

    part = Counted()
    TensorDictModule(part, ["x"], ["y"]).reset_parameters_recursive()
    assert part.count == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("inplace", "full", 'must be True, False, None or "empty"'),
        ("method", "shrink", "name of a method of `Identity`, got 'shrink'"),
        ("method", "a b", "name of a method of `Identity`, got 'a b'"),
        ("method_kwargs", [1], "must be a dict of arguments by name, got list"),
        ("method_kwargs", {1: 2}, "must be a dict of arguments by name, got dict"),
        ("strict", "no", "must be True or False, got 'no'"),
        ("module", 3, "must be callable, got int"),
        ("module", nn.Linear, "is the class `Linear`"),
    ],
)
def test_a_setting_is_checked_whenever_it_is_assigned(
    name: str, value: object, message: str
) -> None:
    settings: dict[str, Any] = {"module": nn.Identity(), name: value}
    with pytest.raises(InvalidArgument, match=message):
        TensorDictModule(in_keys=["x"], out_keys=["y"], **settings)
    module = TensorDictModule(nn.Identity(), ["x"], ["y"])
    for _ in range(3):
        with pytest.raises(InvalidArgument, match=message):
            setattr(module, name, value)
        assert same(module(x=X), X)


@dataclass
class Result:
    hidden: Tensor
    attentions: tuple[Tensor, ...] | None = None


class Ordered(OrderedDict[str, object]):
    """A result as Hugging Face's models return it: by name, with what no container holds."""


class Pair(NamedTuple):
    hidden: Tensor
    weights: Tensor


BY_NAME: dict[str, Callable[[Tensor], object]] = {
    "dict": lambda x: {"other": object(), "hidden": x + 1},
    "ordered dict": lambda x: Ordered(hidden=x + 1, past=(x, (x, x))),
    "dataclass": lambda x: Result(x + 1),
    "named tuple": lambda x: Pair(x + 1, x),
    "container": lambda x: TensorDict(hidden=x + 1, other=x),
}


@pytest.mark.parametrize("function", BY_NAME.values(), ids=list(BY_NAME))
@pytest.mark.parametrize("key", ["h", ("n", "h")])
def test_outputs_by_name_are_renamed(
    function: Callable[[Tensor], object], key: str | tuple[str, str]
) -> None:
    step = TensorDictModule(function, ["x"], {"hidden": key})
    model = TensorDictSequential(step, TensorDictModule(torch.neg, [key], ["y"]))
    assert step.out_keys == [key]
    for module in (step, copy.deepcopy(step), model):
        for _ in range(3):
            assert same(module(TensorDict(x=X))[key], X + 1)
    assert same(step(x=X), X + 1)
    assert same(model(x=X)[1], -X - 1)


@pytest.mark.parametrize("kind", ["dict", "ordered dict", "dataclass", "named tuple"])
def test_outputs_by_name_need_no_other_names_where_the_key_is_the_name(kind: str) -> None:
    step = TensorDictModule(BY_NAME[kind], ["x"], ["hidden"])
    for _ in range(3):
        assert same(step(x=X), X + 1)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["weights", "hidden"], (X, X + 1)),
        (["weights", "_"], X),
        (["_", "hidden"], X + 1),
        (["_", "_"], ()),
        (["first", "second"], (X + 1, X)),
        (["hidden", "second"], (X + 1, X)),
    ],
)
def test_named_tuple_is_taken_by_name_or_in_order(keys: list[str], expected: object) -> None:
    step = TensorDictModule(BY_NAME["named tuple"], ["x"], keys)
    model = TensorDictSequential(step)
    for module in (step, model):
        for _ in range(3):
            assert str(module(x=X)) == str(expected)


def test_named_tuple_whose_fields_are_partly_named_elsewhere_is_refused() -> None:
    step = TensorDictModule(BY_NAME["named tuple"], ["x"], ["weights", "second"])
    with pytest.raises(OutputMismatch, match=r"`weights` would be another field. Name all outputs"):
        step(x=X)


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda x: {"hiden": x}, r"`dict` with `hiden`. Did you mean `hiden`\?"),
        (lambda x: Result(x), r"hold `attentions`, got `Result` with `hidden`"),
        (torch.neg, "a mapping, a dataclass or a named tuple.* got `Tensor`. Name what"),
        (split, "got `tuple`. Name what it returns"),
        (lambda x: None, "got `NoneType`"),
    ],
)
def test_name_that_is_not_returned_is_told(function: Callable[[Tensor], object], got: str) -> None:
    step = TensorDictModule(function, ["x"], {"hidden": "h", "attentions": "a"})
    for _ in range(3):
        td = TensorDict(x=X)
        with pytest.raises(OutputMismatch, match=got):
            step(td)
        assert list(td.keys()) == ["x"]


def test_assigned_out_keys_take_other_names() -> None:
    step = TensorDictModule(lambda x: {"a": x + 1, "b": x - 1}, ["x"], {"a": "y"})
    for keys, expected in (({"b": "y"}, X - 1), (["b"], X - 1), ({"a": "b"}, X + 1)):
        step.out_keys = keys  # type: ignore[assignment]  # a mapping is parsed, as in the constructor
        for _ in range(3):
            assert same(step(x=X), expected)
    with pytest.raises(InvalidKey, match="each name is a str"):
        step.out_keys = {1: "y"}  # type: ignore[assignment]  # wrong on purpose
    assert same(step(x=X), X + 1)


def test_device_is_that_of_the_parameters() -> None:
    assert TensorDictModule(nn.Linear(2, 2, device="meta"), ["x"], ["y"]).device.type == "meta"
    assert TensorDictModule(torch.neg, ["x"], ["y"]).device.type == "cpu"

    class Placed(TensorDictModule):
        def __init__(self) -> None:
            super().__init__(torch.neg, ["x"], ["y"])
            self.device = torch.device("meta")

    assert Placed().device.type == "meta"


def test_module_says_whether_it_is_keyed_and_functional() -> None:
    module = TensorDictModule(nn.Linear(2, 2), ["x"], ["y"])
    assert module.is_tdmodule_compatible(module)
    assert not module.is_tdmodule_compatible(nn.Linear(2, 2))
    assert not module.is_functional
    make_functional(module)
    assert module.is_functional


def notes_of(call: Callable[[], object]) -> list[str]:
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        call()
    return list(caught.value.__notes__)


@pytest.mark.parametrize("interpreted", [False, True])
def test_an_error_of_torch_says_what_a_module_alone_had_read(interpreted: bool) -> None:
    module = TensorDictModule(nn.Linear(4, 2), in_keys=["x"], out_keys=["y"])
    if interpreted:
        module.register_forward_hook(lambda *_: None)
    x = torch.zeros(5, 3)
    note = "`TensorDictModule(Linear)`: reads `x` (5, 3) float32; writes `y`."
    assert notes_of(lambda: module(TensorDict({"x": x}, [5]))) == [note]
    assert notes_of(lambda: module(x=x)) == [note]
    assert notes_of(lambda: module(x)) == [note]
    sequence = TensorDictSequential(TensorDictModule(nn.ReLU(), ["x"], ["x"]), module)
    assert notes_of(lambda: sequence(TensorDict({"x": x}, [5]))) == [f"In step 1, {note}"]


def test_errors_that_name_the_module_have_no_further_note() -> None:
    module = TensorDictModule(lambda x: (x, x, x), in_keys=["x"], out_keys=["y", "z"])
    with pytest.raises(OutputMismatch) as caught:
        module(x=torch.zeros(2))
    assert not hasattr(caught.value, "__notes__")


def calls(module: TensorDictModule, td: TensorDict) -> Iterator[Callable[[], object]]:
    """Yield calls by container and by tensor: interpreted, planned, and in a sequence."""
    sequence = TensorDictSequential(module)
    for _ in range(3):
        for each in (module, sequence):
            yield partial(each, td.clone())
            yield partial(each, x=td["x"])


@pytest.mark.parametrize("batch", [[], [2], [3]])
@pytest.mark.parametrize("nest", [tuple, list])
def test_several_tensors_under_one_key_are_refused(batch: list[int], nest: type) -> None:
    module = TensorDictModule(lambda x: (x, nest([x + 1, x + 2])), ["x"], ["y", "state"])
    td = TensorDict({"x": torch.zeros(*batch, 2)}, batch)
    message = rf"one tensor for the out key `state`, got a {nest.__name__} of 2\. Give each tensor"
    for call in calls(module, td):
        with pytest.raises(OutputMismatch, match=message):
            call()


@pytest.mark.parametrize(
    ("function", "out_keys"),
    [
        (lambda x: {"y": (x, x)}, ["y"]),
        (lambda x: {"state": (x, x), "z": x}, {"state": "y"}),
        (lambda x: (x, {"inner": [x, x]}), ["x", "y"]),
        (lambda x: ([(x, x)],), ["y"]),
        (lambda x: [(x, x[:1])], ["y"]),
    ],
)
def test_several_tensors_are_refused_wherever_they_come_from(
    function: Callable[[Tensor], object], out_keys: list[NestedKey] | dict[str, NestedKey]
) -> None:
    module = TensorDictModule(function, ["x"], out_keys)
    for call in calls(module, TensorDict({"x": torch.zeros(2, 3)}, [2])):
        with pytest.raises(OutputMismatch, match=r"for the out key `y`, got a (tuple|list) of 2"):
            call()


def test_discarded_tuples_lists_of_text_and_wrapped_tuples_are_no_outputs_to_refuse() -> None:
    def function(x: Tensor) -> tuple[object, ...]:
        return x, (x, x), ["a", "b"], NonTensorData((x, x, x))

    module = TensorDictModule(function, ["x"], ["y", "_", "text", "whole"])
    for _ in range(3):
        td = module(TensorDict({"x": torch.zeros(2)}, [2]))
        assert list(td["text"]) == ["a", "b"]
        assert len(td["whole"]) == 3


def test_nested_outputs_are_flattened_where_each_has_a_key() -> None:
    lstm = nn.LSTM(3, 4)
    y, (h, c) = lstm(torch.ones(5, 2, 3))
    keys: list[NestedKey] = ["y", ("state", "h"), ("state", "c")]
    module = TensorDictModule(lstm, ["x"], keys)
    sequence = TensorDictSequential(module, TensorDictModule(torch.neg, [("state", "c")], ["z"]))
    for _ in range(3):
        td = sequence(TensorDict(x=torch.ones(5, 2, 3)))
        for key, value in zip((*keys, "z"), (y, h, c, -c), strict=True):
            assert torch.equal(td[key], value)
        for got, value in zip(module(x=torch.ones(5, 2, 3)), (y, h, c), strict=True):
            assert torch.equal(got, value)


def test_nested_outputs_that_no_keys_match_are_a_mismatch() -> None:
    module = TensorDictModule(nn.LSTM(3, 4), ["x"], ["y", "h", "c", "d"])
    with pytest.raises(OutputMismatch, match=r"each of its 4 out_keys .*got 2 outputs"):
        module(x=torch.ones(5, 2, 3))


def test_a_missing_input_is_none_where_the_callable_takes_it() -> None:
    def add(x: Tensor, h: Tensor | None) -> Tensor:
        return x if h is None else x + h

    module = TensorDictModule(add, ["x", "h"], ["y"])
    model = TensorDictSequential(module, TensorDictModule(torch.neg, ["y"], ["z"]))
    by_name = TensorDictModule(add, {"x": "x", "h": "h"}, ["y"])
    for _ in range(4):
        assert torch.equal(module(TensorDict(x=X))["y"], X)
        assert torch.equal(by_name(TensorDict(x=X))["y"], X)
        assert torch.equal(model(TensorDict(x=X))["z"], -X)
        assert torch.equal(module(TensorDict(x=X, h=X))["y"], 2 * X)
    for strict in (None, True):
        plain = TensorDictModule(torch.add, ["x", "h"], ["y"], strict=strict)
        with pytest.raises(KeyError, match="reads `h`, which was not found"):
            plain(TensorDict(x=X))
    with pytest.raises(KeyError, match="reads `h`"):
        TensorDictModule(add, ["x", "h"], ["y"], strict=True)(TensorDict(x=X))


def test_further_arguments_say_how_entries_are_read() -> None:
    stack = lazy_stack([TensorDict(x=torch.ones(1)), TensorDict(x=torch.ones(2))])
    module = TensorDictModule(torch.neg, ["x"], ["y"], get_kwargs={"as_padded_tensor": True})
    for _ in range(4):
        assert module(stack.copy())["y"].tolist() == [[-1, 0], [-1, -1]]


def test_outputs_go_to_a_new_container_without_a_place() -> None:
    td = TensorDict(x=X)
    made = TensorDictModule(torch.neg, ["x"], ["y"], inplace=None)(td)
    assert list(td.keys()) == ["x"]
    assert list(made.keys()) == ["y"]


@pytest.mark.parametrize("calls_before", [0, 3])
def test_a_refused_output_of_a_module_alone_names_it_and_a_remedy(calls_before: int) -> None:
    lost: list[bool] = []
    module = TensorDictModule(lambda x: x.mean(0) if lost else x, ["x"], ["y"])
    td = TensorDict({"x": torch.arange(6.0).reshape(2, 3)}, [2])
    for _ in range(calls_before):
        module(td.copy())
    lost.append(True)
    with pytest.raises(ShapeMismatch, match="does not fit entry `y`") as caught:
        module(td)
    note, remedy = caught.value.__notes__
    assert note == "`TensorDictModule(<lambda>)`: reads `x` (2, 3) float32; writes `y`."
    assert remedy.startswith("A step that changes the batch returns a container, as `WrapModule(")
    step = eval(remedy.split("`")[1], {"WrapModule": WrapModule, "TensorDict": TensorDict})
    assert step(td)["y"].tolist() == [1.5, 2.5, 3.5]


def test_the_note_names_a_device_that_is_not_the_cpu() -> None:
    module = TensorDictModule(nn.Linear(4, 2), in_keys=["x"], out_keys=["y"])
    with pytest.raises(RuntimeError) as caught:
        module(TensorDict({"x": torch.zeros(5, 4, device="meta")}, [5]))
    note = caught.value.__notes__[0]
    assert "reads `x` (5, 4) float32 on meta" in note
    assert note.endswith("writes `y`. Its parameters are on cpu.")


def test_a_key_of_a_list_is_shown_as_a_tuple() -> None:
    with pytest.raises(InvalidKey, match=r"Write one nested key as `\('next', 'obs'\)`"):
        TensorDictModule(torch.neg, [["next", "obs"]], ["y"])  # type: ignore[list-item]  # refused


class Grown(TensorDictModuleBase):
    """A module that collects its keys one by one, as wrappers of language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys = ["x"]
        self.out_keys = []
        for key in ("y", "z"):
            self.out_keys.append(key)

    def forward(self, tensordict: TensorDict) -> TensorDict:
        for key in self.out_keys:
            tensordict[key] = tensordict["x"]
        return tensordict


def test_a_change_of_the_list_of_keys_is_one_of_the_module() -> None:
    module = Grown()
    assert module.out_keys == ["y", "z"]
    sequence = TensorDictSequential(module)
    assert list(sequence(TensorDict(x=torch.ones(1))).keys()) == ["x", "y", "z"]
    module.out_keys += ["v"]
    module.out_keys.remove("y")
    module.out_keys[0] = "u"
    assert module.out_keys_source == sequence.out_keys == ["u", "v"]
    assert list(sequence(TensorDict(x=torch.ones(1))).keys()) == ["x", "u", "v"]
    with pytest.raises(InvalidKey):
        module.out_keys.append(3)  # type: ignore[arg-type]  # wrong on purpose
    assert module.out_keys == ["u", "v"]
    module.in_keys.insert(0, "w")
    assert module.in_keys == ["w", "x"]
    assert module.out_keys.pop() == "v"
    keys = pickle.loads(pickle.dumps(module.out_keys))
    assert (type(keys), keys, type(copy.deepcopy(module.in_keys))) == (list, ["u"], list)
    plain = TensorDictModule(torch.add, ["x", "y"], ["z"])
    plain.in_keys[1] = "x"
    assert plain(TensorDict(x=torch.ones(1)))["z"].tolist() == [2]


def test_the_list_is_that_of_the_caller_where_more_hangs_on_it() -> None:
    named = TensorDictModule(torch.add, {"x": "input", "y": "other"}, ["z"], out_to_in_map=False)
    named.in_keys.append("w")
    assert named.in_keys == ["x", "y"]
    module = Grown().select_out_keys("y")
    module.out_keys.append("z")
    assert module.out_keys == ["y"]


@pytest.mark.parametrize(
    "made", [TensorDictModule(abs, ["x"], ["y"]), TensorDictSequential(), Grown()]
)
def test_a_module_has_the_name_of_its_class_where_functions_have_theirs(made: nn.Module) -> None:
    assert made.__name__ == type(made).__name__
