"""Keyed containers of tensors."""

from typing import TYPE_CHECKING, Final

from kd_core import _pytree as _pytree
from kd_core import _torch_functions as _pickling
from kd_core import extending as _extending
from kd_core._base import TensorCollection as TensorCollection
from kd_core._base import TensorDictBase as TensorDictBase
from kd_core._base import default_is_leaf as default_is_leaf
from kd_core._base import is_leaf_nontensor as is_leaf_nontensor
from kd_core._base import is_tensor_collection as is_tensor_collection
from kd_core._base import maybe_dense_stack as maybe_dense_stack
from kd_core._containers.lazy_stack import LazyStackedTensorDict as LazyStackedTensorDict
from kd_core._containers.lazy_stack import dense_stack_tds as dense_stack_tds
from kd_core._containers.lazy_stack import lazy_stack as lazy_stack
from kd_core._containers.non_tensor import MetaData as MetaData
from kd_core._containers.non_tensor import NonTensorData as NonTensorData
from kd_core._containers.non_tensor import NonTensorDataBase as NonTensorDataBase
from kd_core._containers.non_tensor import is_non_tensor as is_non_tensor
from kd_core._containers.non_tensor_stack import NonTensorStack as NonTensorStack
from kd_core._containers.tensorclass import TensorAttrs as TensorAttrs
from kd_core._containers.tensorclass import TensorClass as TensorClass
from kd_core._containers.tensorclass import TypedTensorDict as TypedTensorDict
from kd_core._containers.tensorclass import is_tensorclass as is_tensorclass
from kd_core._containers.tensordict import TensorDict as TensorDict
from kd_core._errors import AlreadyExists as AlreadyExists
from kd_core._errors import DeviceMismatch as DeviceMismatch
from kd_core._errors import FormatError as FormatError
from kd_core._errors import FrozenField as FrozenField
from kd_core._errors import InvalidArgument as InvalidArgument
from kd_core._errors import InvalidKey as InvalidKey
from kd_core._errors import InvalidValue as InvalidValue
from kd_core._errors import KdError as KdError
from kd_core._errors import KeyCollision as KeyCollision
from kd_core._errors import KeyNotFound as KeyNotFound
from kd_core._errors import KeySetMismatch as KeySetMismatch
from kd_core._errors import KeyThroughLeaf as KeyThroughLeaf
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
from kd_core._naming import publish as _publish
from kd_core._ops.access import LinkedList as LinkedList
from kd_core._ops.joining import cat as cat
from kd_core._ops.joining import stack as stack
from kd_core._ops.modules import ModuleBusy as ModuleBusy
from kd_core._ops.placement import TensorDictFuture as TensorDictFuture
from kd_core._torch_functions import torch_functions as torch_functions
from kd_core._types import NO_DEFAULT as NO_DEFAULT
from kd_core._types import NestedKey as NestedKey
from kd_core._unbatched import UnbatchedTensor as UnbatchedTensor

if TYPE_CHECKING:
    from kd_core._containers.declaring import from_dataclass as from_dataclass
    from kd_core._containers.declaring import tensorclass as tensorclass
    from kd_core._containers.persistent import PersistentTensorDict as PersistentTensorDict
    from kd_core._containers.redis_store import (
        LazyStackedTensorDictStore as LazyStackedTensorDictStore,
    )
    from kd_core._containers.redis_store import TensorDictStore as TensorDictStore
    from kd_core._containers.tensordict import from_module as from_module
    from kd_core._containers.tensordict import make_tensordict as make_tensordict
    from kd_core._display import Buffer as Buffer
    from kd_core._display import get_printoptions as get_printoptions
    from kd_core._display import print_directory_tree as print_directory_tree
    from kd_core._display import set_printoptions as set_printoptions
    from kd_core._display import timeit as timeit
    from kd_core._leaves.loops import expand_as_right as expand_as_right
    from kd_core._leaves.loops import expand_right as expand_right
    from kd_core._leaves.loops import is_bool as is_bool
    from kd_core._leaves.loops import is_floating as is_floating
    from kd_core._leaves.loops import is_inexact as is_inexact
    from kd_core._leaves.loops import is_integer as is_integer
    from kd_core._ops.storage import PackLayout as PackLayout
    from kd_core._rows import collate as collate
    from kd_core._rows import group_by as group_by
    from kd_core._rows import isin as isin
    from kd_core._rows import merge_tensordicts as merge_tensordicts
    from kd_core._rows import pad as pad
    from kd_core._rows import pad_sequence as pad_sequence
    from kd_core._rows import remove_duplicates as remove_duplicates
    from kd_core._rows import unpad_sequence as unpad_sequence
    from kd_core._store.mapped_tensor import MemoryMappedTensor as MemoryMappedTensor
    from kd_core._switches import capture_non_tensor_stack as capture_non_tensor_stack
    from kd_core._switches import get_defaults_to_none as get_defaults_to_none
    from kd_core._switches import lazy_legacy as lazy_legacy
    from kd_core._switches import list_to_stack as list_to_stack
    from kd_core._switches import set_capture_non_tensor_stack as set_capture_non_tensor_stack
    from kd_core._switches import set_get_defaults_to_none as set_get_defaults_to_none
    from kd_core._switches import set_lazy_legacy as set_lazy_legacy
    from kd_core._switches import set_list_to_stack as set_list_to_stack
    from kd_core.convert import LeafSchema as LeafSchema
    from kd_core.convert import append_memmap as append_memmap
    from kd_core.convert import from_any as from_any
    from kd_core.convert import from_arrow as from_arrow
    from kd_core.convert import from_consolidated as from_consolidated
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
    from kd_core.convert import from_safetensors as from_safetensors
    from kd_core.convert import from_schema as from_schema
    from kd_core.convert import from_struct_array as from_struct_array
    from kd_core.convert import from_tuple as from_tuple
    from kd_core.convert import from_zarr as from_zarr
    from kd_core.convert import fromkeys as fromkeys
    from kd_core.convert import is_memmap_archive as is_memmap_archive
    from kd_core.convert import load as load
    from kd_core.convert import load_memmap as load_memmap
    from kd_core.convert import memmap as memmap
    from kd_core.convert import pack_memmap as pack_memmap
    from kd_core.convert import refresh_archive_checksums as refresh_archive_checksums
    from kd_core.convert import save as save
    from kd_core.convert import to_arrow as to_arrow
    from kd_core.convert import to_safetensors as to_safetensors
    from kd_core.convert import unpack_memmap as unpack_memmap

__version__: Final = "0.1.0"

_publish(
    __name__,
    later={
        "kd_core._rows": (
            "collate group_by isin merge_tensordicts pad pad_sequence remove_duplicates "
            "unpad_sequence"
        ),
        "kd_core._containers.declaring": "from_dataclass tensorclass",
        "kd_core._containers.persistent": "PersistentTensorDict",
        "kd_core._containers.redis_store": "LazyStackedTensorDictStore TensorDictStore",
        "kd_core._containers.tensordict": "from_module make_tensordict",
        "kd_core._display": "Buffer get_printoptions print_directory_tree set_printoptions timeit",
        "kd_core._leaves.loops": (
            "expand_as_right expand_right is_bool is_floating is_inexact is_integer"
        ),
        "kd_core._ops.storage": "PackLayout",
        "kd_core._store.mapped_tensor": "MemoryMappedTensor",
        "kd_core._switches": (
            "capture_non_tensor_stack get_defaults_to_none lazy_legacy list_to_stack "
            "set_capture_non_tensor_stack set_get_defaults_to_none set_lazy_legacy "
            "set_list_to_stack"
        ),
        "kd_core.convert": (
            "append_memmap from_any from_arrow from_consolidated from_csv from_dict from_h5 "
            "from_json from_list from_modules from_namedtuple from_pandas from_parquet "
            "from_pytree from_safetensors from_schema from_struct_array from_tuple from_zarr "
            "fromkeys is_memmap_archive LeafSchema load load_memmap memmap pack_memmap "
            "refresh_archive_checksums save to_arrow to_safetensors unpack_memmap"
        ),
    },
)
