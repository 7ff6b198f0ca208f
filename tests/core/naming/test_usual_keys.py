"""Keys that users write as attributes: none of them hides a method of containers."""

import torch

from kd_core import TensorDict, TensorDictBase
from kd_core._naming import ELSEWHERE, USUAL_KEYS


def test_no_usual_key_is_a_method() -> None:
    names = [*USUAL_KEYS.split(), *ELSEWHERE]
    assert [key for key in names if hasattr(TensorDictBase, key)] == []
    assert len(set(names)) == len(names)


def test_what_other_libraries_offer_is_not_there() -> None:
    td = TensorDict(x=torch.zeros(2), batch_size=[2])
    for name, instead in ELSEWHERE.items():
        assert not hasattr(td, name)
        assert name not in dir(td)
        assert instead.startswith("`")


def test_a_class_of_a_program_may_have_a_method_of_such_a_name() -> None:
    class Table(TensorDict):
        def head(self) -> "Table":
            return self[:1]

    assert Table(x=torch.zeros(2), batch_size=[2]).head().batch_size == (1,)
