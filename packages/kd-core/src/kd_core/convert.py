"""Conversions as functions: what `TensorDict` has as class methods, and the containers of the peer.

Each `from_` function returns a `TensorDict`; call the method of another class for one of that
class, as in `Sample.from_pandas(frame)`.
"""

from kd_core._base import TensorDictBase
from kd_core._containers.tensordict import TensorDict
from kd_core._convert.schema import LeafSchema as LeafSchema
from kd_core._public import publish

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


publish(__name__)
