"""A library that is not installed: the error names the method and the command that installs it."""

import sys

import pytest

from kd_core import MissingDependency, TensorDict


@pytest.mark.parametrize(
    ("library", "call"),
    [
        ("pandas", lambda td: td.to_pandas()),
        ("pandas", lambda td: td.from_pandas(None)),
        ("pyarrow", lambda td: td.to_arrow()),
        ("pyarrow", lambda td: td.from_arrow(None)),
        ("pyarrow", lambda td: td.to_parquet("x")),
        ("pyarrow", lambda td: td.from_parquet("x")),
        ("h5py", lambda td: td.to_h5("x")),
        ("h5py", lambda td: td.from_h5("x")),
        ("redis", lambda td: td.to_store(port=1)),
        ("zarr", lambda td: td.to_zarr("x")),
        ("zarr", lambda td: td.from_zarr("x")),
    ],
)
def test_it_says_what_to_install(
    library: str, call: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (library, f"{library}.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    assert callable(call)
    with pytest.raises(
        MissingDependency, match=f"requires {library}. Install it with `pip install"
    ):
        call(TensorDict({"a": [1]}, [1]))
