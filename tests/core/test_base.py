"""What the public base class says of itself."""

import pytest

from kd_core import TensorDict


def test_an_error_of_arguments_names_the_public_class() -> None:
    with pytest.raises(TypeError, match=r"^TensorDictBase\.to_dict\(\) takes 1 positional"):
        TensorDict().to_dict(1)  # type: ignore[call-arg, arg-type]  # what is refused
