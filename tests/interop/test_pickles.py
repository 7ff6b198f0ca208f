"""Pickles of the package tensordict are read by programs that run on kd by the drop-in."""

from pathlib import Path

import pytest
from tests import children

pytest.importorskip("tensordict")

PROGRAM = Path(__file__).with_name("pickled.py")


def test_what_torch_saved_is_loaded(tmp_path: Path) -> None:
    children.check_output("-W", "ignore", PROGRAM, "write", tmp_path)
    there = children.check_output("-W", "ignore", PROGRAM, "read", tmp_path)
    options = ("-W", "ignore", "-m", "kd_core.drop_in")
    here = children.check_output(*options, PROGRAM, "read", tmp_path)
    assert here.splitlines() == there.splitlines()


FORGED = """
import torch
from kd_core import drop_in

drop_in.install()
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorClass, TensorDict
from tensordict._reductions import _make_td
from tensordict.nn import TensorDictModule, TensorDictSequential

class Pair(TensorClass):
    x: torch.Tensor

class Mine(TensorDict):
    pass

def filled(cls, state):
    object.__new__(cls).__setstate__(state)

whole = {"_batch_size": torch.Size([2]), "_device": None, "_td_dim_names": None}
module = {"_modules": {}, "_in_keys": ["a"], "_out_keys": ["b"]}
for call in (
    lambda: _make_td(dict, {}),
    lambda: _make_td(NonTensorData, {}),
    lambda: _make_td(TensorDict, {}),
    lambda: _make_td(TensorDict, []),
    lambda: _make_td(TensorDict, {"_tensordict": {"a": torch.ones(3)}, **whole}),
    lambda: _make_td(LazyStackedTensorDict, {"tensordicts": [], "stack_dim": 0}),
    lambda: _make_td(LazyStackedTensorDict, {"tensordicts": [1], "stack_dim": 0}),
    lambda: filled(TensorDict, {"_kd_entries": {"a": 1}}),
    lambda: filled(NonTensorData, (None, {"_boxed": 1})),
    lambda: filled(Pair, {"tensordict": 3}),
    lambda: filled(Pair, {"tensordict": TensorDict(y=1), "non_tensordict": {}}),
    lambda: filled(Mine, {"_tensordict": {}}),
    lambda: filled(NonTensorData, {"tensordict": 1}),
    lambda: filled(NonTensorStack, {"tensordicts": []}),
    lambda: filled(TensorDictModule, module),
    lambda: filled(TensorDictSequential, {**module, "_modules": {"module": [3]}}),
    lambda: filled(TensorDictModule, {**module, "module": b"code", "_kwargs": None}),
):
    try:
        call()
    except Exception as error:
        print(type(error).__module__.partition(".")[0])
    else:
        print("loaded")
"""


def test_what_is_not_valid_is_refused() -> None:
    answers = children.check_output("-W", "ignore", "-c", FORGED)
    assert set(answers.split()) <= {"kd_core", "kd_nn"}
    assert len(answers.split()) == 17
