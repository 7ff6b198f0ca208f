"""`TensorDictSequential`: keyed modules one after the other.

A call runs the plan where there is one (`_plan`); otherwise the steps are interpreted, each called
with a working copy of the container. Both leave the caller's container alone if a step raises.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from torch import nn

from kd_core import (
    InvalidArgument,
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    TensorDictBase,
    format_key,
    is_tensor_collection,
)
from kd_core.extending import assume_constant_result
from kd_nn._dispatch.dispatch import describe, dispatch
from kd_nn._dispatch.entries import (
    Inplace,
    container_of,
    destination,
    entry,
    read_optional,
)
from kd_nn._dispatch.skip_existing import anyone_skips, outputs_exist
from kd_nn._errors import EmptySubsequence, KeyGraphWarning, list_keys
from kd_nn._keys.graph import KeyGraph
from kd_nn._keys.specs import DISCARD, InKeySpec, Keys, overlaps, parse_keys
from kd_nn._modules.base import TensorDictModuleBase
from kd_nn._modules.interpreter import Made, run_members, run_steps
from kd_nn._modules.module import TensorDictModule
from kd_nn._modules.nodes import key_node, label_of
from kd_nn._modules.resolved import Resolved, resolve_sequence
from kd_nn._modules.settings import Check, checked_flag, checked_inplace
from kd_nn._modules.steps import Modules, StepList, store_steps
from kd_nn._plan.outcome import BUSY


class TensorDictSequential(StepList, TensorDictModule):  # type: ignore[misc]  # of `module`
    """Run keyed modules in order; each reads and writes entries by key.

    The sequence reads what its steps read and no earlier step writes, and it writes what any step
    writes. Called with tensors it returns all outputs, or the selected ones. All steps run,
    whatever is selected. A step that raises leaves the container as it was.

    Args:
        *modules: Keyed modules; or one list of them; or one dict, which names the steps.
        partial_tolerant: Whether steps whose inputs are missing are skipped. What a step can do
            without does not count, such as the inputs of a `TensorDictModule` with `strict=False`.
        selected_out_keys: The outputs to keep; see `select_out_keys`.
        inplace: As for `TensorDictModule`; None and True write into the input.

    Raises:
        NotKeyed: If something is not a keyed module.
        OutKeyUnknown: If a selected key is not written by any step.

    Warns:
        KeyGraphWarning: If a step writes what a later one replaces before anyone reads it.

    Example:
        >>> import torch
        >>> from kd_nn import TensorDictModule
        >>> model = TensorDictSequential(
        ...     TensorDictModule(nn.Linear(3, 4), in_keys=["x"], out_keys=["hidden"]),
        ...     TensorDictModule(nn.ReLU(), in_keys=["hidden"], out_keys=["y"]),
        ... )
        >>> model.in_keys, model.out_keys
        (['x'], ['hidden', 'y'])
        >>> hidden, y = model(x=torch.ones(2, 3))
        >>> model.select_out_keys("y")(torch.ones(2, 3)).shape
        torch.Size([2, 4])
    """

    _kd_changes_by_assignment = True

    _kd_writes_by_inplace: ClassVar[bool] = True
    _kd_checks: ClassVar[Mapping[str, Check]] = {
        "inplace": checked_inplace,
        "partial_tolerant": checked_flag,
    }

    def __init__(
        self,
        *modules: Modules,
        partial_tolerant: bool = False,
        selected_out_keys: NestedKey | Sequence[NestedKey] | None = None,
        inplace: Inplace = None,
    ) -> None:
        steps = store_steps(modules)
        self._kd_settle(partial_tolerant=partial_tolerant, inplace=inplace)
        start = super().__init__
        if getattr(start, "__func__", None) is TensorDictModule.__init__:
            TensorDictModuleBase.__init__(self)
            self.module = steps
        else:  # a class between the two gets what `TensorDictModule` takes
            held = steps._modules.items()
            nodes = tuple(key_node(name, step, partial_tolerant) for name, step in held)
            graph = KeyGraph(nodes, None)
            further: dict[str, Any] = {} if inplace is None else {"inplace": inplace}
            start(module=steps, in_keys=[*graph.inputs], out_keys=[*graph.writes], **further)
        if selected_out_keys is not None:
            self.select_out_keys(*parse_keys(selected_out_keys, "selected_out_keys"))
        else:
            self._kd_resolve()
        self._kd_warn_of_waste()

    if not TYPE_CHECKING:  # in one step each, as they are read often

        @TensorDictModuleBase.in_keys.getter
        def in_keys(self) -> list[NestedKey]:
            """Return the keys that are read, as a fresh list."""
            try:
                resolved = self._kd_resolved
            except AttributeError:
                resolved = self._kd_resolve()
            if resolved.unsure:
                resolved = self._kd_resolve()
            return [*resolved.in_keys]

        @TensorDictModuleBase.out_keys.getter
        def out_keys(self) -> list[NestedKey]:
            """Return the keys that are written and visible, as a fresh list."""
            try:
                resolved = self._kd_resolved
            except AttributeError:
                resolved = self._kd_resolve()
            if resolved.unsure:
                resolved = self._kd_resolve()
            return [*resolved.visible]

        # What `TensorDictModule` says of the one module that it wraps.
        _kd_node_label = _kd_described_as = _kd_run_on_values = None
        __getattr__ = TensorDictModuleBase.__getattr__

    def _kd_wrap(self, module: object, *others: object) -> None:
        state = self.__dict__
        tolerant, inplace = state.get("partial_tolerant", False), state.get("inplace")
        self._kd_settle(partial_tolerant=tolerant, inplace=inplace)
        self.module = store_steps([cast("nn.Module", module)])
        self._kd_resolve()

    @property
    def _kd_optional_in_keys(self) -> list[NestedKey]:
        """The `in_keys` that a call with tensors may leave out: no step that runs insists."""
        return list(self._kd_resolve().optional)

    @property
    def _kd_partly_read(self) -> list[NestedKey]:
        """The containers of which steps make a part, and may read the rest from outside."""
        return list(self._kd_resolve().graph.partly_fed)

    @dispatch(auto_batch_size=False)
    def forward(
        self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None = None
    ) -> TensorDictBase:
        """Run the steps on a container.

        Args:
            tensordict: The container to read.
            tensordict_out: The container to write, instead of what `inplace` says.

        Returns:
            The container that was written.

        Raises:
            InputMissing: If an entry that a step reads is missing.
        """
        return self._kd_run(tensordict, tensordict_out)

    def _kd_run(
        self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None
    ) -> TensorDictBase:
        if outputs_exist(self, tensordict):
            return tensordict
        if isinstance(tensordict, LazyStackedTensorDict) and self._kd_may_skip:
            return run_members(self, tensordict, tensordict_out, self._kd_run)
        target = None
        if tensordict_out is not None or self.inplace != "empty":
            target = destination(tensordict, self.inplace, tensordict_out)
        return run_steps(self, tensordict, target, self._kd_resolve().visible)

    def _kd_continue_from(
        self,
        container: TensorDictBase | None,
        given: Mapping[NestedKey, object],
        made: Made,
    ) -> object:
        """Finish a call that a plan has begun; plans call this.

        Args:
            container: What the sequence was called with, None for a call with tensors.
            given: The inputs by key.
            made: What steps have computed already; see `run_steps`.

        Returns:
            What the call returns.
        """
        outputs = self._kd_resolve().visible
        if container is not None:
            target = None
            if self.inplace != "empty":
                target = destination(container, self.inplace, None)
            return run_steps(self, container, target, outputs, made)
        result = run_steps(self, container_of(given), TensorDict(), outputs, made)
        found = read_optional(result, [key for key in self.out_keys if key != DISCARD])
        return found[0] if len(found) == 1 else tuple(found)

    def _kd_forward_values(self, *values: object) -> tuple[object, ...]:
        """Run all steps on one value per key of `in_keys`; return all that they write."""
        resolved = self._kd_resolve()
        given = dict(zip(resolved.in_keys, values, strict=True))
        every = resolved.out_keys
        made = run_steps(self, container_of(given), TensorDict(), every)
        return tuple(entry(made, key) for key in every)

    def select_subsequence(
        self,
        in_keys: NestedKey | Sequence[NestedKey] | None = None,
        out_keys: NestedKey | Sequence[NestedKey] | None = None,
    ) -> Self:
        """Return the steps that can run from `in_keys` and are needed for `out_keys`.

        Nested sequences are cut too. The modules are shared with this sequence. Outputs that are
        not selected stay hidden, unless `out_keys` names them or nothing else is left.

        Args:
            in_keys: The entries that are given; None stands for all that are needed.
            out_keys: The entries that are wanted; None stands for all that are written.

        Raises:
            EmptySubsequence: If no step is left.

        Example:
            >>> import torch
            >>> from kd_nn import TensorDictModule
            >>> first = TensorDictModule(torch.neg, ["x"], ["y"])
            >>> model = TensorDictSequential(first, TensorDictModule(torch.exp, ["y"], ["z"]))
            >>> model.select_subsequence(out_keys=["y"])[0] is first
            True
        """
        graph = self._kd_resolve().graph
        given = graph.reads if in_keys is None else parse_keys(in_keys, "in_keys")
        wanted = graph.writes if out_keys is None else parse_keys(out_keys, "out_keys")
        known, live = list(given), graph.live_writes(wanted)
        kept: dict[str, nn.Module] = {}
        for idx, (name, step) in enumerate(self._kd_named_steps()):
            node = graph.nodes[idx]
            if idx not in live:
                continue
            # A sequence of a user's class may have another constructor, and stays as it is.
            if isinstance(step, TensorDictSequential) and step._kd_changes_by_assignment:
                try:
                    step = step.select_subsequence(
                        None if in_keys is None else known,
                        None if out_keys is None else list(live[idx]),
                    )
                except EmptySubsequence:
                    continue
                known += step.out_keys
            elif all(key in node.optional or overlaps(key, known) for key in node.reads):
                known += node.writes
            else:
                continue
            kept[name] = step
        if not kept:
            raise EmptySubsequence(
                f"no step of {describe(self)} is left for in_keys {list_keys(given)} and out_keys "
                f"{list_keys(wanted)}. It reads {list_keys(graph.inputs)} and writes "
                f"{list_keys(graph.writes)}."
            )
        part = self._kd_part(list(kept.items()))
        if graph.out_keys is not None:
            asked = [*graph.out_keys, *(() if out_keys is None else wanted)]
            visible = [key for key in part.out_keys if key in asked]
            part.select_out_keys(*(visible or part.out_keys))
        return part

    def _kd_graph(self) -> KeyGraph:
        return self._kd_resolve().graph

    def _kd_keys_of_call(self) -> tuple[Keys, Keys] | None:
        """Return the keys that a call takes, and the optional ones; `None` if a class says them."""
        if self._kd_computes_keys:
            return None
        resolved: Resolved | None = self.__dict__.get("_kd_resolved")
        if resolved is None or resolved.unsure:
            resolved = self._kd_resolve()
        return resolved.in_keys, resolved.optional

    def _kd_call_traced(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        prepare: Callable[[], bool] | None = getattr(self, "_kd_prepare", None)
        if prepare is None or not prepare() or anyone_skips:
            return BUSY
        traced = cast(Resolved, self._kd_resolved).traced
        assert traced is not None
        if args and args[0].__class__ is TensorDict:
            alone = len(args) == 1 and not kwargs
            return traced.container(self, args[0]) if alone else BUSY
        if len(args) > len(traced.names):
            return BUSY
        # Loops, since a generator costs dynamo a frame for each element.
        for arg in args:
            if is_tensor_collection(arg):
                return BUSY
        for name in kwargs:
            if name not in traced.names[len(args) :]:
                return BUSY
        return traced.tensors(self, *args, **kwargs)

    def extra_repr(self) -> str:
        """Return the keys, for printing."""
        tolerant = ", partial_tolerant=True" if self.partial_tolerant else ""
        return super().extra_repr() + tolerant

    def _kd_own_in_keys(self) -> Keys:
        return self._kd_resolve().in_keys

    def _kd_own_out_keys(self) -> Keys:
        return self._kd_resolve().out_keys

    def _kd_set_in_spec(self, spec: InKeySpec) -> None:
        raise InvalidArgument(
            f"the in_keys of {describe(self)} follow from its steps and cannot be assigned. "
            "Change the steps, or use `select_subsequence`."
        )

    def _kd_set_out_keys_source(self, keys: Keys) -> None:
        raise InvalidArgument(
            f"the out_keys of {describe(self)} follow from its steps and cannot be assigned. "
            "Change the steps, or use `select_out_keys`."
        )

    def _kd_resolve(self) -> Resolved:
        resolved: Resolved | None = self.__dict__.get("_kd_resolved")
        if resolved is not None and resolved.is_current():
            return resolved
        resolved = resolve_sequence(self)
        if not torch.compiler.is_dynamo_compiling():
            self.__dict__["_kd_resolved"] = resolved
            if "_kd_prepare" not in self.__dict__:
                self.__dict__["_kd_prepare"] = _preparation(self)
        return resolved

    def _kd_refresh_keys(self) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self._kd_resolve()

    def _kd_warn_of_waste(self) -> None:
        for idx, key in self._kd_resolve().graph.lost_writes():
            warnings.warn(
                f"step {idx} (`{label_of(self[idx])}`) of {describe(self)} writes "
                f"{format_key(key)}, which a later step replaces before anyone reads it. "
                'Discard it with the out key `"_"`, or write to another key.',
                KeyGraphWarning,
                stacklevel=3,
            )


def _preparation(sequence: TensorDictSequential) -> Callable[[], bool]:
    """Return a function that makes what dynamo inlines, and tells whether there is any.

    dynamo runs it as it is, before it reads what is known of the steps: a function made of text
    cannot be traced, and what is out of date would be replaced while the guards are made.
    """
    owner = weakref.ref(sequence)

    def prepare() -> bool:
        root = owner()
        return root is not None and root._kd_resolve().prepare(root)

    return assume_constant_result(prepare)
