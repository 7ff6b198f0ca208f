"""What the author of a container kind outside of this package needs, beside `TensorDictBase`.

A kind implements the primitives that `kd_core._protocol` lists. Their signatures use the
names below; `assume_constant_result` is for what compiled code need not trace, `plain_str` and
`is_prefix` for keys; `GeneralMethods` for a subclass of a dense container; `add_class` and
`StoredClass` make a kind one that files can hold. A sibling package calls `publish` last in its
`__init__`, with `public_in` on classes that it imports later; its plans store outputs with
`assign_levels`; it asks `is_eager` before it reads values of tensors, `exact_constant` for a tensor
in place of a number, `private_name` for what torch does not promise (of that,
`maybe_current_level`, `is_batchedtensor`, `is_exporting` and `torch_tree` are here), `signature_of`
for what a callable takes, `run_alone_eagerly` for scopes, `clone_leaves` and `run_copies` to copy
many tensors, and `field_keys` for what a tensor class holds; it shows rows of texts as a `Table`
and a long call as a `Task`, and asks `refuse_existing` before it writes a file. `restore_dense`,
`restore_leaf`, `restore_stack` and `restore_descriptor` are what pickles call, so their names and
places stay.
Everything else in this package stays private.
"""

from typing import TYPE_CHECKING

from kd_core._containers.dense import GeneralMethods as GeneralMethods
from kd_core._containers.dense import restore_dense as restore_dense
from kd_core._containers.lazy_stack import restore_stack as restore_stack
from kd_core._containers.tensorclass import field_keys as field_keys
from kd_core._containers.tensordict import make_dense as make_dense
from kd_core._descriptor import Descriptor as Descriptor
from kd_core._descriptor import describe as describe
from kd_core._descriptor import restore_descriptor as restore_descriptor
from kd_core._errors import refuse_existing as refuse_existing
from kd_core._keys import is_prefix as is_prefix
from kd_core._keys import plain_str as plain_str
from kd_core._leaves.foreach import clone_leaves as clone_leaves
from kd_core._leaves.foreach import exact_constant as exact_constant
from kd_core._leaves.foreach import is_eager as is_eager
from kd_core._leaves.foreach import run_copies as run_copies
from kd_core._leaves.packing import restore_leaf as restore_leaf
from kd_core._naming import public_in as public_in
from kd_core._naming import publish as publish
from kd_core._nodes import Entry as Entry
from kd_core._registry import StoredClass as StoredClass
from kd_core._registry import add_class as add_class
from kd_core._registry import register as register
from kd_core._torch_private import assume_constant_result as assume_constant_result
from kd_core._torch_private import is_batchedtensor as is_batchedtensor
from kd_core._torch_private import is_exporting as is_exporting
from kd_core._torch_private import maybe_current_level as maybe_current_level
from kd_core._torch_private import private_name as private_name
from kd_core._torch_private import run_alone_eagerly as run_alone_eagerly
from kd_core._torch_private import signature_of as signature_of
from kd_core._torch_private import torch_tree as torch_tree

if TYPE_CHECKING:
    from kd_core._containers.tensordict import assign_levels as assign_levels
    from kd_core._display import Table as Table
    from kd_core._progress import Task as Task

publish(
    __name__,
    later={
        "kd_core._containers.tensordict": "assign_levels",
        "kd_core._display": "Table",
        "kd_core._progress": "Task",
    },
)
