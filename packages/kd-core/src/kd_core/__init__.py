"""Keyed containers of tensors."""

from typing import Final

from kd_core import extending as _extending
from kd_core._base import TensorDictBase as TensorDictBase
from kd_core._base import is_tensor_collection as is_tensor_collection
from kd_core._combine.concatenating import cat as cat
from kd_core._combine.membership import isin as isin
from kd_core._combine.membership import remove_duplicates as remove_duplicates
from kd_core._combine.merging import merge_tensordicts as merge_tensordicts
from kd_core._combine.padding import pad as pad
from kd_core._combine.padding import pad_sequence as pad_sequence
from kd_core._combine.stacking import stack as stack
from kd_core._containers.declaring import from_dataclass as from_dataclass
from kd_core._containers.declaring import tensorclass as tensorclass
from kd_core._containers.factories import from_module as from_module
from kd_core._containers.factories import make_tensordict as make_tensordict
from kd_core._containers.lazy_stack import LazyStackedTensorDict as LazyStackedTensorDict
from kd_core._containers.lazy_stack import lazy_stack as lazy_stack
from kd_core._containers.lazy_stack import maybe_dense_stack as maybe_dense_stack
from kd_core._containers.non_tensor import MetaData as MetaData
from kd_core._containers.non_tensor import NonTensorData as NonTensorData
from kd_core._containers.non_tensor import NonTensorDataBase as NonTensorDataBase
from kd_core._containers.non_tensor import is_non_tensor as is_non_tensor
from kd_core._containers.non_tensor_stack import NonTensorStack as NonTensorStack
from kd_core._containers.tensorclass import TensorClass as TensorClass
from kd_core._containers.tensorclass import TypedTensorDict as TypedTensorDict
from kd_core._containers.tensorclass import is_tensorclass as is_tensorclass
from kd_core._containers.tensordict import TensorDict as TensorDict
from kd_core._errors import DeviceMismatch as DeviceMismatch
from kd_core._errors import InvalidArgument as InvalidArgument
from kd_core._errors import InvalidKey as InvalidKey
from kd_core._errors import InvalidValue as InvalidValue
from kd_core._errors import KdError as KdError
from kd_core._errors import KeyCollision as KeyCollision
from kd_core._errors import KeyNotFound as KeyNotFound
from kd_core._errors import KeySetMismatch as KeySetMismatch
from kd_core._errors import Locked as Locked
from kd_core._errors import MissingDependency as MissingDependency
from kd_core._errors import NotOffered as NotOffered
from kd_core._errors import NotOfferedImport as NotOfferedImport
from kd_core._errors import OutOfRange as OutOfRange
from kd_core._errors import ShapeMismatch as ShapeMismatch
from kd_core._errors import UnknownField as UnknownField
from kd_core._errors import UnsupportedFunction as UnsupportedFunction
from kd_core._keys import format_key as format_key
from kd_core._keys import nearest_key as nearest_key
from kd_core._keys import unravel_key as unravel_key
from kd_core._keys import unravel_key_list as unravel_key_list
from kd_core._keys import unravel_key_to_tuple as unravel_key_to_tuple
from kd_core._leaves.questions import expand_as_right as expand_as_right
from kd_core._leaves.questions import expand_right as expand_right
from kd_core._leaves.questions import is_bool as is_bool
from kd_core._leaves.questions import is_floating as is_floating
from kd_core._leaves.questions import is_inexact as is_inexact
from kd_core._leaves.questions import is_integer as is_integer
from kd_core._ops.module_state import ModuleBusy as ModuleBusy
from kd_core._public import publish as _publish
from kd_core._torch import data_loading as _data_loading
from kd_core._torch import pickling as _pickling
from kd_core._torch import pytree as _pytree
from kd_core._torch.functions import torch_functions as torch_functions
from kd_core._types import NO_DEFAULT as NO_DEFAULT
from kd_core._types import NestedKey as NestedKey
from kd_core.convert import LeafSchema as LeafSchema
from kd_core.convert import from_any as from_any
from kd_core.convert import from_arrow as from_arrow
from kd_core.convert import from_csv as from_csv
from kd_core.convert import from_dict as from_dict
from kd_core.convert import from_h5 as from_h5
from kd_core.convert import from_json as from_json
from kd_core.convert import from_list as from_list
from kd_core.convert import from_modules as from_modules
from kd_core.convert import from_namedtuple as from_namedtuple
from kd_core.convert import from_pandas as from_pandas
from kd_core.convert import from_parquet as from_parquet
from kd_core.convert import from_pytree as from_pytree
from kd_core.convert import from_schema as from_schema
from kd_core.convert import from_struct_array as from_struct_array
from kd_core.convert import from_tuple as from_tuple
from kd_core.convert import from_zarr as from_zarr
from kd_core.convert import fromkeys as fromkeys
from kd_core.convert import to_arrow as to_arrow

__version__: Final = "0.1.0"

_publish(__name__)
