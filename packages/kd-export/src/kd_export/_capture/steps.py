"""From the key graph of a module to the steps that its artefact lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from kd_core import NestedKey, unravel_key_to_tuple
from kd_export._schema.steps import Step
from kd_nn import TensorDictModuleBase, TensorDictSequential

_LONGEST = 200


def steps_of(module: nn.Module) -> Iterator[Step]:
    """List the steps of a keyed module that its outputs need, those of inner sequences too."""
    if isinstance(module, TensorDictModuleBase):
        yield from _needed(module, module.key_graph().outputs, ())


def _needed(
    module: TensorDictModuleBase, wanted: Iterable[NestedKey], path: tuple[str, ...]
) -> Iterator[Step]:
    graph = module.key_graph()
    live = graph.live_writes(wanted)
    inside = (
        module._kd_named_steps() if isinstance(module, TensorDictSequential) else [("", module)]
    )
    for idx, ((name, step), node) in enumerate(zip(inside, graph.nodes, strict=True)):
        if idx not in live:
            continue
        if isinstance(step, TensorDictSequential):
            yield from _needed(step, live[idx], (*path, name))
            continue
        reads, writes = (tuple(map(unravel_key_to_tuple, k)) for k in (node.reads, node.writes))
        yield Step(".".join((*path, name)), _told(node.label, step), reads, writes)


def _told(label: str, step: nn.Module) -> str:
    """Return the class or function that a step runs, with its settings as it prints them."""
    wrapped = step._modules.get("module")
    said = "" if wrapped is None else " ".join(wrapped.extra_repr().split())
    if not said or " at 0x" in said:  # an address, which differs in each process
        return label
    told = f"{label}({said})"
    return told if len(told) <= _LONGEST else f"{told[: _LONGEST - 3]}..."
