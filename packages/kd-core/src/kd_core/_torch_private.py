"""The names of torch that it does not promise to keep, each with what takes its place.

A torch that lacks one costs speed or one feature, never the import; only the trees of torch, on
which its own transforms stand, have nothing in their place. Elsewhere this package uses public
names, and those that the documentation of torch gives though they begin with an underscore:
`torch._foreach_*`, `Tensor._version`, and `_parameters`, `_buffers` and `_modules` of a module.

Knows torch; must not know containers.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    NoReturn,
    ParamSpec,
    Protocol,
    SupportsIndex,
    TypeVar,
    cast,
)

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.utils import _pytree

from kd_core._errors import MissingDependency

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store


T = TypeVar("T")

torch_tree = _pytree  # the trees of torch: containers are nodes of them


def private_name(where: str, name: str, instead: T) -> T:
    """Return what stands under a private name of torch, or what takes its place.

    Args:
        where: the module.
        name: the name in it, with dots for what is in it.
        instead: what takes its place.
    """
    try:
        found: object = importlib.import_module(where)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return instead
    return cast("T", found)


_EVAL: Final = "torch._C._dynamo.eval_frame"
_set_strategy: Callable[[object, object], None] = private_name(
    _EVAL, "set_code_exec_strategy", lambda code, strategy: None
)
_strategy: Callable[[object, object], object] = private_name(
    _EVAL, "_FrameExecStrategy", lambda frame, below: None
)
_SKIP: object = private_name(_EVAL, "_FrameAction.SKIP", None)


def run_alone_eagerly(*functions: Callable[..., object]) -> None:
    """Let dynamo trace functions where others call them, and never compile them on their own.

    The same holds for what they call. What a function that was compiled alone writes into a
    `threading.local`, or records on its result, would be lost. `torch.compiler.disable` would break
    the graph where it is called, and load the compiler. Fallback: after a graph break, a scope has
    no effect, and the result of an operation cannot be entered by `with`.
    """
    for function in functions:
        _set_strategy(cast("FunctionType", function).__code__, _strategy(_SKIP, _SKIP))


def _lacking(name: str, feature: str) -> Callable[..., NoReturn]:
    """Return a function in place of one without which a feature does not work."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise MissingDependency(
            f"{feature} needs `{name}`, which torch {torch.__version__} does not have. Use a "
            "version of torch that this version of kd-core was tested with."
        )

    return refuse


# Transforms of functorch: `vmap`, `grad` and their like. Without the first name, none is ever seen:
# dimensions of `vmap` are counted as torch counts them, and foreach kernels are tried and given up.

_FUNCTORCH: Final = "torch._C._functorch"


def _no_level() -> int | None:
    return None


def _of_no_transform(tensor: Tensor) -> bool:
    return False


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _minus_one(tensor: Tensor) -> int:
    return -1


maybe_current_level: Final = private_name(_FUNCTORCH, "maybe_current_level", _no_level)
"""Return the level of the innermost transform that runs; `None` outside of all."""
maybe_get_level: Final = private_name(_FUNCTORCH, "maybe_get_level", _minus_one)
"""Return the level to which a tensor belongs; -1: none."""
maybe_get_bdim: Final = private_name(_FUNCTORCH, "maybe_get_bdim", _minus_one)
"""Return the dimension that `vmap` hides of a tensor; -1: none."""
is_batchedtensor: Final = private_name(_FUNCTORCH, "is_batchedtensor", _of_no_transform)
is_gradtrackingtensor: Final = private_name(_FUNCTORCH, "is_gradtrackingtensor", _of_no_transform)
is_functorch_wrapped_tensor: Final = private_name(
    _FUNCTORCH, "is_functorch_wrapped_tensor", _of_no_transform
)
get_unwrapped: Final = private_name(_FUNCTORCH, "get_unwrapped", _itself)
"""Return the tensor inside one of a transform."""
add_batch_dim: Final = private_name(
    _FUNCTORCH, "_add_batch_dim", _lacking("_add_batch_dim", "`vmap` of lazy modules")
)
"""Return a tensor whose dimension `vmap` hides at a level."""


def without_wrappers(numbers: Tensor) -> Tensor:
    """Return numbers without the wrapper of `torch.func.grad`, which is void when that ends."""
    if not is_compiling():
        while is_gradtrackingtensor(numbers):
            numbers = get_unwrapped(numbers)
    return numbers


def _here() -> AbstractContextManager[object]:
    return nullcontext()


outside_of_transform: Final[Callable[[], AbstractContextManager[object]]] = private_name(
    "torch._functorch.pyfunctorch", "temporarily_pop_interpreter_stack", _here
)
"""Return the context in which the innermost transform does not run."""


# Modes and tracing.


without_torch_function: Final[Callable[[], AbstractContextManager[object]]] = private_name(
    "torch._C", "DisableTorchFunctionSubclass", torch._C.DisableTorchFunction
)
"""Return the context in which the code of subclasses of tensors does not run."""


def _plain_function(
    func: Callable[..., object],
    types: Sequence[type],
    args: tuple[object, ...] = (),
    kwargs: Mapping[str, object] | None = None,
) -> object:
    with without_torch_function():
        return func(*args, **(kwargs or {}))


no_torch_function: Final[Callable[..., object]] = private_name(
    "torch._C",
    "_disabled_torch_function_impl",
    staticmethod(_plain_function),
)
"""What a subclass of tensors has for `__torch_function__` to be treated as its base."""


def _no_modes() -> int:
    return 0


dispatch_modes: Final = private_name("torch._C", "_len_torch_dispatch_stack", _no_modes)
"""Return how many dispatch modes are active, such as that of fake tensors."""


class _Nothing:
    """A class without instances."""


HigherOrderOperator: Final[type] = private_name("torch._ops", "HigherOrderOperator", _Nothing)
"""The class of `cond`, `while_loop`, `scan`: what calls a function of the user while tracing."""


class _NoTrace:
    @staticmethod
    def try_get() -> object | None:
        return None


_TracingContext: Final = private_name("torch._guards", "TracingContext", _NoTrace)


def current_trace() -> object | None:
    """Return an object that lives as long as the program that a compiler is tracing."""
    return _TracingContext.try_get()


def _is_wrapper(leaf: object) -> bool:
    return hasattr(leaf, "__tensor_flatten__")


is_traceable_wrapper_subclass: Final = private_name(
    "torch.utils._python_dispatch", "is_traceable_wrapper_subclass", _is_wrapper
)
"""Return whether a tensor is made of other tensors, which it can be taken apart into."""


# Memory.


def _with_stride_of_zero(tensor: Tensor) -> int:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return int(any(size > 1 and not stride for size, stride in pairs))


_has_internal_overlap: Final = private_name(
    "torch", "_debug_has_internal_overlap", _with_stride_of_zero
)


def has_internal_overlap(tensor: Tensor) -> bool:
    """Return whether elements of a strided tensor surely share memory, as in an expanded one."""
    return _has_internal_overlap(tensor) == 1


def _joined(leaves: Sequence[Tensor]) -> Tensor:
    if len(leaves) == 1:
        return leaves[0].reshape(-1)
    return torch.cat([leaf.reshape(-1) for leaf in leaves])


def _parted(flat: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    parts = torch.split(flat, [leaf.numel() for leaf in like])
    return [part.view(leaf.shape) for part, leaf in zip(parts, like, strict=True)]


flatten: Final[Callable[[Sequence[Tensor]], Tensor]] = private_name(
    "torch._C._nn", "flatten_dense_tensors", _joined
)
"""Return the elements of tensors of one dtype, one behind the other; of one, perhaps a view."""
unflatten: Final[Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]]] = private_name(
    "torch._C._nn", "unflatten_dense_tensors", _parted
)
"""Return views of a flat tensor in the shapes of others."""

nested_view_from_buffer: Final[Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = private_name(
    "torch",
    "_nested_view_from_buffer",
    _lacking("torch._nested_view_from_buffer", "a nested tensor of the layout `torch.strided`"),
)
"""Return a nested tensor of the strided layout over values; after sizes, strides and starts."""


if TYPE_CHECKING:
    S = TypeVar("S", bound=Tensor)

    class _MakeSubclass(Protocol):
        def __call__(self, kind: type[S], tensor: Tensor, requires_grad: bool = False) -> S: ...


def _alias(kind: Any, tensor: Tensor, requires_grad: bool = False) -> Any:
    if kind is nn.Parameter:
        return nn.Parameter(tensor, requires_grad)
    return tensor.detach().as_subclass(kind)


make_subclass: Final[_MakeSubclass] = getattr(Tensor, "_make_subclass", _alias)
"""Return a tensor of another class that shares the memory; after the class, whether it has grad."""


def _is_written_by_grad(tensor: Tensor) -> object:
    return None


_creation_meta: Final = private_name(
    "torch._C._autograd", "_get_creation_meta", _is_written_by_grad
)
_USUAL: Final[object] = getattr(
    private_name("torch._C._autograd", "CreationMeta", None), "DEFAULT", None
)


def is_usual_view(tensor: Tensor) -> bool:
    """Return whether autograd records writes into a view; where torch does not say, yes."""
    return _creation_meta(tensor) == _USUAL


def _has_base(tensor: Tensor) -> bool:
    return tensor._base is not None


def is_exporting() -> bool:
    """Return whether `torch.export` captures; to dynamo of torch 2.10 the public one is true."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


is_view: Final[Callable[[Tensor], bool]] = getattr(Tensor, "_is_view", _has_base)
"""Return whether a tensor is a view of another one, as autograd knows it."""


def ragged_dim(leaf: Tensor) -> int:
    """Return the dimension of a jagged tensor whose sizes differ: the first after the rows."""
    return getattr(leaf, "_ragged_idx", 1)


def _sizes_of_rows(leaf: Tensor) -> Tensor:
    return torch.tensor([row.shape for row in leaf.unbind()], dtype=torch.int64, device="cpu")


sizes_of_rows: Final[Callable[[Tensor], Tensor]] = getattr(
    Tensor, "_nested_tensor_size", _sizes_of_rows
)
"""Return the sizes of the rows of a nested tensor of the strided layout, one row each."""


def storage_of(tensor: Tensor) -> int:
    """Return a number for the storage of a tensor, the same for all tensors in it while one lives.

    On the meta device all addresses are 0, so the storage itself counts. Fallback: its address.
    """
    storage = tensor.untyped_storage()
    found: int = getattr(storage, "_cdata", 0)
    return found or storage.data_ptr()


def untyped(storage: torch.TypedStorage) -> torch.UntypedStorage:
    """Return the bytes of a typed storage. Fallback: its own method, which warns."""
    found: torch.UntypedStorage | None = getattr(storage, "_untyped_storage", None)
    return storage.untyped() if found is None else found


def base_of(view: Tensor) -> Tensor | None:
    """Return the tensor that a view is of. Fallback: none, and torch refuses what it refuses."""
    return getattr(view, "_base", None)


# Modules, and the state dicts of modules.


def rebuild_weights(module: nn.RNNBase) -> None:
    """Rebuild the list of weights that a recurrent layer computes with.

    A torch that keeps no such list, looks its weights up.
    """
    names: Sequence[str] | None = getattr(module, "_flat_weights_names", None)
    if names is not None:
        found = [module._parameters.get(name) for name in names]
        object.__setattr__(module, "_flat_weights", found)


def metadata_of(state: object) -> Mapping[str, object] | None:
    """Return what a state dict says about its modules. Fallback: nothing."""
    found: object = getattr(state, "_metadata", None)
    return found if isinstance(found, Mapping) else None


def add_metadata(state: OrderedDict[str, object], about: Mapping[str, object]) -> None:
    """Add to what a state dict says about its modules."""
    known: dict[str, object] = getattr(state, "_metadata", OrderedDict())
    known.update(about)
    state._metadata = known  # type: ignore[attr-defined]  # as those of modules


# Compilers, data loaders and processes.

P = ParamSpec("P")
R = TypeVar("R")


def assume_constant_result(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function whose result a compiler takes as a constant, by calling it while tracing.

    Sets the mark that `torch.compiler.assume_constant_result` sets, which imports the compiler:
    0.9 s. A torch that does not know the mark traces the function instead.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # read by dynamo
    return function


def traced_as(simple: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that dynamo traces another one, of equal results, in its place.

    Sets the mark by which `torch.compile` finds the function inside what it returned. A torch that
    does not know the mark traces the decorated function.
    """

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        function._torchdynamo_inline = simple  # type: ignore[attr-defined]  # read by dynamo
        return function

    return mark


def _never(*leaves: Tensor) -> bool:
    return False


def check_of(leaves: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function that says whether other tensors have the same properties, size for size.

    Without it every container is looked at anew before it is exchanged between processes.
    """
    guards: Callable[..., object] | None = private_name(
        "torch._C._dynamo.guards", "TensorGuards", None
    )
    if guards is None:
        return _never
    sizes, strides = [list(leaf.shape) for leaf in leaves], [list(leaf.stride()) for leaf in leaves]
    made = guards(*leaves, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = getattr(made, "check")  # noqa: B009  # the stub lacks a level
    return check


def collate_as(kind: type, function: Callable[..., object]) -> None:
    """Have the default collate function of `DataLoader` call a function on a batch of a class.

    Without it a `DataLoader` of containers needs a `collate_fn`.
    """
    known: dict[type, Callable[..., object]] = private_name(
        "torch.utils.data._utils.collate", "default_collate_fn_map", {}
    )
    known[kind] = function


def store_of(group: ProcessGroup) -> Store | None:
    """Return the store through which the ranks of a process group found each other, if known."""
    find: Callable[[ProcessGroup], Store] | None = private_name(
        "torch.distributed.distributed_c10d", "_get_process_group_store", None
    )
    return None if find is None else find(group)


# Differences between the supported versions of torch, by feature test, and of Python.
#
# Also what torch offers only together with its compiler, whose import takes long.


def _clone_each(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    return [leaf.clone() for leaf in leaves]


clone_all: Final[Callable[[list[Tensor]], Sequence[Tensor]]] = getattr(
    torch, "_foreach_clone", _clone_each
)
"""Clone all leaves at once, by a kernel that newer versions have."""


_VERSION: Final = tuple(map(int, torch.__version__.split(".")[:2]))
_SINCE_2_13: Final = _VERSION >= (2, 13)

CONSTANT_OBJECTS: Final = _SINCE_2_13
"""Whether dynamo can compare tuples that belong to an object which it treats as a constant.

Older versions raise an internal error. No feature test shows it, so the version decides.
"""

SYMBOLS_ARE_INT: Final = _VERSION >= (2, 14)
"""Whether the class of a symbolic size is `int` to dynamo, as that of a number. As above."""

TRACES_SUBCLASSED_INT: Final = _SINCE_2_13
"""Whether dynamo traces arithmetic of a subclass of `int`. No feature test shows it either."""


def to_index(value: object) -> int:
    """Return `operator.index(value)`; the dynamo of older versions does not trace it on a tensor.

    Raises:
        TypeError: if the value is not an integer.
    """
    if (
        is_dynamo_compiling()
        and isinstance(value, Tensor)
        and value.numel() == 1
        and not (value.is_floating_point() or value.is_complex())
    ):
        return int(value)
    return operator.index(cast("SupportsIndex", value))


def is_constant_size(size: int) -> bool:
    """Return whether a size is a number, not a symbol of a program that is being traced."""
    if not is_compiling():
        return size.__class__ is int
    from torch.fx.experimental.symbolic_shapes import has_static_value  # the compiler has loaded it

    return has_static_value(size)


def is_possible(condition: bool) -> bool:
    """Return whether a condition may hold: a traced program may learn that only when it runs."""
    if not is_dynamo_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # as above

    return guard_or_true(condition)


def is_known_size(size: int) -> bool:
    """Return whether a size is a number, or a symbol whose number dynamo may make a constant.

    Of a size that depends on data, dynamo knows neither that it is not 0 nor that it is not 1.
    """
    if not is_dynamo_compiling():
        return is_constant_size(size)
    return not (is_possible(size == 0) and is_possible(size == 1))


def larger(one: int, other: int) -> int:
    """Return the larger of two numbers, as a symbol if a traced program does not know which."""
    if not is_possible(one < other):
        return one
    if not is_possible(one > other):
        return other
    larger: int = torch.sym_max(one, other)
    return larger


def smaller(one: int, other: int) -> int:
    """Return the smaller of two numbers, as a symbol if a traced program does not know which."""
    if not is_possible(one > other):
        return one
    if not is_possible(one < other):
        return other
    smaller: int = torch.sym_min(one, other)
    return smaller


def signature_of(function: Callable[..., object]) -> inspect.Signature:
    """Return the signature of a callable, whose annotations may name what is not defined.

    From Python 3.14 they are computed when they are asked for.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)


def annotations_of(cls: type) -> Mapping[str, object]:
    """Return the annotations of a class itself, which may name what is not defined; as above."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format, get_annotations

        return get_annotations(cls, format=Format.FORWARDREF)
    return inspect.get_annotations(cls)
