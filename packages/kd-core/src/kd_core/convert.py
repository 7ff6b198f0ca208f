"""Conversions as functions: what `TensorDict` has as class methods, and the containers of the peer.

Each `from_` function returns a `TensorDict`; call the method of another class for one of that
class, as in `Sample.from_pandas(frame)`.
"""

from typing import cast

from kd_core._base import TensorDictBase
from kd_core._containers.tensordict import TensorDict
from kd_core._convert.peer import container_of, node_of
from kd_core._convert.printed import container_of_text
from kd_core._convert.schema import LeafSchema as LeafSchema

from_any = TensorDict.from_any
from_arrow = TensorDict.from_arrow
from_csv = TensorDict.from_csv
from_dataclass = TensorDict.from_dataclass
from_dict = TensorDict.from_dict
from_h5 = TensorDict.from_h5
from_json = TensorDict.from_json
from_list = TensorDict.from_list
from_modules = TensorDict.from_modules
from_namedtuple = TensorDict.from_namedtuple
from_pandas = TensorDict.from_pandas
from_parquet = TensorDict.from_parquet
from_pytree = TensorDict.from_pytree
from_schema = TensorDict.from_schema
from_struct_array = TensorDict.from_struct_array
from_tuple = TensorDict.from_tuple
from_zarr = TensorDict.from_zarr
fromkeys = TensorDict.fromkeys


def to_arrow(td: TensorDictBase) -> object:
    """Return an Arrow table of a container: `TensorDictBase.to_arrow` as a function.

    Example:
        >>> from kd_core import TensorDict, to_arrow
        >>> from importlib.util import find_spec
        >>> if find_spec("pyarrow"):
        ...     assert to_arrow(TensorDict({"a": [1, 2]}, [2])).num_rows == 2
    """
    return td.to_arrow()


def parse_tensor_dict_string(s: str) -> TensorDictBase:
    """Return a container of zeros from what `repr` printed of one, nested ones too.

    Args:
        s: the text, printed with the default options.

    Raises:
        InvalidValue: if the text is not of this form.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> from kd_core.convert import parse_tensor_dict_string
        >>> td = TensorDict({"a": torch.ones(3, 2), "n": {"b": torch.arange(3)}}, [3])
        >>> parse_tensor_dict_string(repr(td)).schema() == td.schema()
        True
    """
    return cast("TensorDictBase", container_of_text(s))


def from_tensordict_library(value: object) -> TensorDictBase:
    """Return a container of the package tensordict as one of ours; tensors are shared.

    Nested containers, lazy stacks, batch sizes and non-tensor data are kept; a tensor class becomes
    a `TensorDict`. `TensorDict(value)` takes such a container too, as it takes any mapping: its
    entries without its batch size.

    Args:
        value: the container.

    Raises:
        InvalidArgument: if it is not a container of that package.

    Example:
        >>> from importlib.util import find_spec
        >>> from kd_core import TensorDict
        >>> from kd_core.convert import from_tensordict_library, to_tensordict_library
        >>> td = TensorDict({"a": [1, 2]}, [2])
        >>> if find_spec("tensordict"):
        ...     assert from_tensordict_library(to_tensordict_library(td))["a"] is td["a"]
    """
    return cast("TensorDictBase", node_of(value))


def to_tensordict_library(td: TensorDictBase) -> object:
    """Return a container of the package tensordict that shares the tensors of `td`.

    Raises:
        MissingDependency: if that package is not installed.
    """
    return container_of(td)
