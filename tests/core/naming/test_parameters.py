"""Parameters that users of tensordict know: renamed, or left out on purpose."""

import inspect
from pathlib import Path

import pytest
import torch
from tests import children

from kd_core import (
    InvalidArgument,
    TensorDict,
    cat,
    is_non_tensor,
    lazy_stack,
    load,
    pad_sequence,
    stack,
)


@pytest.fixture
def td() -> TensorDict:
    return TensorDict({"a": torch.tensor([1.0, 4.0]), "n": {"b": torch.ones(2, 3)}}, [2])


def test_a_renamed_parameter_is_passed_on(td: TensorDict, tmp_path: Path) -> None:
    assert td.pow(other=2)["a"].tolist() == [1, 16]
    assert td.clamp_min(other=2)["a"].tolist() == [2, 4]
    assert td.addcmul(other1=td, other2=td, value=2)["a"].tolist() == [3, 36]
    assert stack(input=[td, td]).batch_size == (2, 2)
    assert cat(input=[td, td]).batch_size == (4,)
    assert pad_sequence(list_of_tensordicts=[td, td[:1]]).batch_size == (2, 2)
    assert not is_non_tensor(data=td)
    td.save(prefix=tmp_path / "x.kd")
    assert load(prefix=tmp_path / "x.kd")["a"].tolist() == [1, 4]


def test_the_names_of_torch_are_taken_too(td: TensorDict) -> None:
    assert td.pow(exponent=2)["a"].tolist() == [1, 16]  # type: ignore[call-arg]  # a name of torch
    assert td.clamp_max(max=2)["a"].tolist() == [1, 2]  # type: ignore[call-arg]  # as above
    assert td.addcdiv(tensor1=td, tensor2=td)["a"].tolist() == [2, 5]  # type: ignore[call-arg]  # as above
    assert td.type(dtype=torch.int32)["a"].dtype is torch.int32  # type: ignore[call-arg]  # as above
    assert cat(tensors=[td, td]).batch_size == (4,)  # type: ignore[call-arg]  # as above
    assert pad_sequence(sequences=[td, td[:1]]).batch_size == (2, 2)  # type: ignore[call-arg]  # as above


def test_values_are_written_under_the_names_of_tensordict(td: TensorDict) -> None:
    td.copy_(tensordict=td + 1)
    assert td["a"].tolist() == [2, 5]
    td.update_at_(input_dict_or_td={"a": 7.0}, idx=0)
    assert td["a"].tolist() == [7, 5]
    td.copy_at_(tensordict=td[1], idx=0)
    assert td["a"].tolist() == [5, 5]
    td.update(input_dict_or_td={"a": torch.ones(2)}, source=torch.zeros(2))
    assert (td["a"].tolist(), td["source"].tolist()) == ([1, 1], [0, 0])
    members = lazy_stack([td.clone()])
    members.append(tensordict=td)
    assert members.batch_size == (2, 2)


def test_a_parameter_under_both_names_is_refused(td: TensorDict) -> None:
    with pytest.raises(InvalidArgument, match="expected `other` once, got it as `exponent`, too"):
        td.pow(other=2, exponent=3)  # type: ignore[call-arg]  # the error is the promise
    with pytest.raises(TypeError, match="multiple values for argument 'other'"):
        td.pow(2, exponent=3)  # type: ignore[call-arg]  # as above


def test_what_only_tunes_speed_is_taken(td: TensorDict) -> None:
    td.update_at_({"a": 0.5}, 0, True, non_blocking=True)
    assert td["a"][0] == 0.5
    td.copy_at_(td[1], 0, True, fast=False)
    td.set_at_("a", 2.0, 1, non_blocking=True)
    assert td["a"][1] == 2
    td.update({"a": torch.zeros(2)}, ignore_lock=True)
    assert td["a"].sum() == 0
    assert td.to("cpu", num_threads=2).device == torch.device("cpu")
    assert td.new_zeros(3, empty_lazy=True).batch_size == (3,)
    assert td.pad([0, 1], 0.0, False, True).batch_size == (3,)
    assert TensorDict({"a": torch.zeros(3, 2)}).auto_batch_size_(1, True).batch_size == (3,)


def test_an_unknown_parameter_is_refused_by_python(td: TensorDict) -> None:
    with pytest.raises(TypeError, match=r"pow\(\) got an unexpected keyword argument 'exponnt'"):
        td.pow(exponnt=2)  # type: ignore[call-arg]  # the error is the promise
    with pytest.raises(TypeError, match=r"clamp_min\(\) missing 1 required"):
        td.clamp_min()  # type: ignore[call-arg]  # as above


def test_the_signature_and_the_documentation_stay() -> None:
    assert list(inspect.signature(TensorDict.pow).parameters) == ["self", "other", "default"]
    assert str(TensorDict.pow.__doc__).startswith("Return the power")
    assert TensorDict.pow.__qualname__ == "TensorDictBase.pow"


def test_compiled_code_calls_the_function_itself(td: TensorDict) -> None:
    compiled = torch.compile(lambda x: x.pow(2).clamp_min(3), fullgraph=True, backend="eager")
    assert (compiled(td) == td.pow(2).clamp_min(3)).all()


def test_a_call_reads_no_list() -> None:
    program = (
        "import sys, torch\n"
        "from kd_core import TensorDict\n"
        "td = TensorDict(a=torch.ones(2))\n"
        "td.update(b=td['a'], c=1).pow(exponent=2)\n"
        "print('tomllib' in sys.modules)"
    )
    assert children.check_output("-c", program) == "False\n"
