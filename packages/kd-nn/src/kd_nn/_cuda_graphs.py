"""Functions of containers and tensors that are recorded once on a GPU and then replayed.

A replay launches all kernels of a call at once, without Python in between, on the memory of the
recording. So arguments are copied into that memory, and results are copied out of it: what a call
returned stays as it is when the next one runs.

Knows containers, pytrees and `torch.cuda`; must not know keys of modules or plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from kd_core import InvalidArgument, InvalidValue, NestedKey, TensorDictBase
from kd_core.extending import clone_leaves, public_in, run_copies, torch_tree
from kd_nn._modules.module import TensorDictModule

P = ParamSpec("P")
R = TypeVar("R")
MOST_GRAPHS: Final = 16
"""So many recordings are kept; each holds memory of the GPU."""


class Recorder(Protocol):
    """What runs a function so that it can be run again without Python."""

    device: torch.device

    def warm_up(self, run: Callable[[], object]) -> object:
        """Run a function before it is recorded, and return its result."""

    def record(self, run: Callable[[], object]) -> tuple[object, Callable[[], object]]:
        """Record a function; return its result, whose tensors a replay fills, and the replay."""


class CudaRecorder:
    """Records CUDA graphs, as the documentation of `torch.cuda.graphs` advises.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def warm_up(self, run: Callable[[], object]) -> object:
        """Run a function on a stream of its own, so that lazy initialisation is over."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            result = run()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return result

    def record(self, run: Callable[[], object]) -> tuple[object, Callable[[], object]]:
        """Record the kernels of a function in a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.graph(graph):
            result = run()
        return result, graph.replay


@dataclass(frozen=True, slots=True)
class _Recording:
    """A function that was recorded for arguments of one form.

    Attributes:
        inputs: The tensors that it reads, in the order of the arguments.
        written: Which of them it writes in place.
        outputs: The leaves of its result.
        structure: The structure of its result.
        returned: The argument that it returns, if it returns one.
        stored: For each container among the arguments, the entries that it stores there.
        replay: Runs it again.
    """

    inputs: list[Tensor]
    written: list[int]
    outputs: list[object]
    structure: torch_tree.TreeSpec
    returned: int | None
    stored: dict[int, dict[NestedKey, Tensor]]
    replay: Callable[[], object]


@dataclass(slots=True)
class _Form:
    """Calls whose arguments have one form.

    Attributes:
        key: What they have in common.
        calls: How many ran as usual.
        recording: What is replayed, once it exists.
    """

    key: tuple[object, ...]
    calls: int = 0
    recording: _Recording | None = None


@public_in("kd_nn")
class CudaGraphModule(nn.Module, Generic[P, R]):
    """A function or module that runs as a CUDA graph.

    The first calls with arguments of some form (keys, shapes, dtypes, constants, the modes of
    modules and of gradients) run as usual. The next one is recorded, and all later ones are
    replayed: their arguments are copied to the memory of the recording, and results are copied from
    it. The function may take and return tensors and containers in any structure, store entries in
    its containers, write in place, and contain whole training steps with `backward` and an
    optimiser that is `capturable`. What Python does in it besides, such as printing, happens in the
    recording only. A module that moved, or whose parameters were replaced, is recorded again;
    parameters that a plain function closes over must stay where they are.

    Args:
        module: What to run.
        warmup: How many calls of each form run as usual, at least one.
        in_keys: With `out_keys`: run `module` on tensors, as `TensorDictModule` does.
        out_keys: The entries to write.
        device: The GPU; None: the current one.
        passthrough: Whether to call `module` itself where torch finds no GPU, or `device` is not
            one.

    Raises:
        InvalidArgument: there is no such GPU, and `passthrough` is `False`.

    Example:
        >>> import torch
        >>> step = CudaGraphModule(torch.nn.Linear(2, 2))
        >>> step(torch.ones(3, 2)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        module: Callable[P, R],
        warmup: int = 2,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        device: torch.device | str | int | None = None,
        *,
        passthrough: bool = True,
    ) -> None:
        super().__init__()
        if warmup < 1:
            raise InvalidValue(f"`warmup` must be a positive int, got {warmup}.")
        if (in_keys is None) is not (out_keys is None):
            raise InvalidArgument("`in_keys` and `out_keys` must be given together.")
        if in_keys is not None and out_keys is not None:
            keyed = TensorDictModule(module, list(in_keys), list(out_keys))
            module = cast("Callable[P, R]", keyed)
        self.module = module
        self.warmup = warmup
        self._recorder = _recorder(device, passthrough)
        self._forms: list[_Form] = []

    def forward(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run what is wrapped, or replay it.

        Raises:
            InvalidArgument: A tensor is not on the GPU, or needs gradients.
        """
        if self._recorder is None:
            return self.module(*args, **kwargs)
        leaves, structure = torch_tree.tree_flatten((args, kwargs))
        state = _state_of(self.module) if isinstance(self.module, nn.Module) else ()
        grad = torch.is_grad_enabled()
        form = self._form_of((structure, grad, *map(_kind_of, leaves), *state))
        if form.recording is None:
            _check(leaves, self._recorder.device)
            if form.calls < self.warmup:
                form.calls += 1
                return self._warmed_up(self._recorder, args, kwargs)
            form.recording = self._recorded(self._recorder, leaves, structure)
        recording = form.recording
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        with torch.no_grad():
            run_copies(recording.inputs, given, False)
            recording.replay()
            return cast("R", _results(recording, given, [*args, *kwargs.values()]))

    def _form_of(self, key: tuple[object, ...]) -> _Form:
        """Return what is known of calls of one form; the oldest are forgotten."""
        found = next((form for form in self._forms if form.key == key), None)
        if found is None:
            found = _Form(key)
            self._forms = [*self._forms[1 - MOST_GRAPHS :], found]
        return found

    def _warmed_up(
        self, recorder: Recorder, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> R:
        """Run as usual; results have no history, like those of a replay."""
        objects = [*args, *kwargs.values()]
        before = [_entries(each) for each in objects]
        run: Callable[..., object] = self.module
        result = recorder.warm_up(lambda: run(*args, **kwargs))
        for each, entries in zip(objects, before, strict=True):
            stored = _stored(each, entries)
            if stored and isinstance(each, TensorDictBase):
                each.assign({key: leaf.detach() for key, leaf in stored.items()})
        if any(result is each for each in objects):
            return cast("R", result)
        return cast("R", torch_tree.tree_map_only(Tensor, Tensor.detach, result))

    def _recorded(
        self, recorder: Recorder, leaves: list[object], structure: torch_tree.TreeSpec
    ) -> _Recording:
        copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = torch_tree.tree_unflatten(copies, structure)
        inputs = [leaf for leaf in copies if isinstance(leaf, Tensor)]
        versions = [leaf._version for leaf in inputs]
        objects = [*args, *kwargs.values()]
        before = {at: _entries(each) for at, each in enumerate(objects)}
        result, replay = recorder.record(lambda: self.module(*args, **kwargs))
        returned = next((at for at, each in enumerate(objects) if each is result), None)
        outputs, spec = torch_tree.tree_flatten(None if returned is not None else result)
        return _Recording(
            inputs,
            [at for at, leaf in enumerate(inputs) if leaf._version != versions[at]],
            outputs,
            spec,
            returned,
            {at: _stored(each, before[at]) for at, each in enumerate(objects)},
            replay,
        )

    def __getstate__(self) -> dict[str, object]:
        """Return the state to copy or pickle, without recordings."""
        return {**self.__dict__, "_forms": []}


def _recorder(device: torch.device | str | int | None, passthrough: bool) -> Recorder | None:
    """Return what records on a device; None if calls are passed through."""
    available = torch.cuda.is_available()
    found = torch.device("cuda" if device is None else device)
    if not available or found.type != "cuda":
        if passthrough:
            return None
        raise InvalidArgument(
            f"CUDA graphs need a GPU, got `{found}`"
            + ("" if available else ", and torch finds none")
            + ". Leave out `passthrough=False` to run without a graph."
        )
    if device is None or found == torch.device("cuda"):
        found = torch.device("cuda", torch.cuda.current_device())
    return CudaRecorder(found)


def _check(leaves: list[object], device: torch.device) -> None:
    """Refuse tensors that a recording cannot read."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            continue
        if leaf.device != device:
            raise InvalidArgument(
                f"arguments must be on {device}, got a tensor on {leaf.device}. "
                "Move them first, with `.to(device)`."
            )
        if leaf.requires_grad:
            raise InvalidArgument(
                "arguments of a CUDA graph must not require gradients. Pass `.detach()`, or "
                "compute the gradients inside."
            )


def _state_of(module: nn.Module) -> list[object]:
    """Return what a recording of a module depends on besides its arguments.

    `modules()` of torch would take most of the time of a call: "CUDA graph" in the benchmarks.
    """
    state: list[object] = []
    members, seen = [module], {module}
    for member in members:  # grows
        state.append(member.training)
        for tensors in (member._parameters, member._buffers):
            if tensors:
                for tensor in tensors.values():
                    state.append(None if tensor is None else tensor.data_ptr())
        if member._modules:
            for each in member._modules.values():
                if each is not None and each not in seen:
                    seen.add(each)
                    members.append(each)
    return state


def _kind_of(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf


def _entries(value: object) -> dict[NestedKey, object]:
    return dict(value.items(True, True)) if isinstance(value, TensorDictBase) else {}


def _stored(value: object, before: dict[NestedKey, object]) -> dict[NestedKey, Tensor]:
    """Return the entries of a container that were stored since `before`."""
    return {
        key: leaf
        for key, leaf in _entries(value).items()
        if isinstance(leaf, Tensor) and before.get(key) is not leaf
    }


def _results(recording: _Recording, given: list[Tensor], objects: list[object]) -> object:
    """Copy what a replay wrote to where the caller looks for it."""
    for at in recording.written:
        given[at].copy_(recording.inputs[at])
    for place, stored in recording.stored.items():
        container = objects[place]
        if stored and isinstance(container, TensorDictBase):
            container.assign(dict(zip(stored, _copies(list(stored.values())), strict=True)))
    if recording.returned is not None:
        return objects[recording.returned]
    tensors = iter(_copies([leaf for leaf in recording.outputs if isinstance(leaf, Tensor)]))
    leaves = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in recording.outputs]
    return torch_tree.tree_unflatten(leaves, recording.structure)


def _copies(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Return clones; of plain tensors, which are many at times, together."""
    if len(tensors) > 1 and all(type(each) is Tensor for each in tensors):
        return clone_leaves(tensors)
    return [each.clone() for each in tensors]
