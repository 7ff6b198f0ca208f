"""Keys that users write as attributes: none of them hides a method of containers."""

from kd_core import TensorDictBase
from kd_core._naming import USUAL_KEYS


def test_no_usual_key_is_a_method() -> None:
    assert [key for key in USUAL_KEYS.split() if hasattr(TensorDictBase, key)] == []
