"""Which operators a program may call.

A program names its operators by dotted path, and torch looks each one up among all that the
process has registered. Some of those read and write files, open connections or start code. So
only namespaces of pure tensor functions are let in, and inside ``aten`` not the operators that
reach beyond their tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from kd_export._errors import UntrustedArtifact

_SYMBOLIC = """
_operator.getitem _operator.eq _operator.ne _operator.lt _operator.le _operator.gt _operator.ge
_operator.add _operator.sub _operator.mul _operator.truediv _operator.floordiv _operator.mod
_operator.pow _operator.neg _operator.pos _operator.and_ _operator.or_ math.trunc math.ceil
math.floor torch.sym_float torch.sym_int torch.sym_max torch.sym_min torch.sym_not torch.sym_ite
torch.sym_sqrt torch._sym_sqrt torch.sym_sum
"""
_HIGHER_ORDER = """
cond map_impl scan associative_scan while_loop wrap_with_set_grad_enabled wrap_with_autocast
"""
_OVERLOAD = re.compile(
    r"torch\.ops\.(?:aten|prims|torchvision)\.(_?[A-Za-z]\w*|__i?(?:and|or|xor|lshift|rshift)__)\.\w+"
)
_HIGHER = re.compile(r"torch\.ops\.higher_order\.(\w+)")
_REFUSED = re.compile(
    r"from_file|save|load\w*|warn|_?print|wait|manual_seed|seed|initial_seed|set_grad_enabled|"
    r"set_?|set_data|_backward|record_stream|_cufft_\w+|_share_memory\w*|_test_\w+|_make_dep_token"
)
"""Operators of ``aten`` that touch files, the process, its random state or foreign memory."""


def operators_of(program: object) -> Iterator[str]:
    """List the operators that a checked program calls, those of its inner graphs included."""
    items = [program]
    while items:
        item = items.pop()
        if isinstance(item, dict):
            if isinstance(item.get("target"), str):
                yield item["target"]
            items.extend(item.values())
        elif isinstance(item, list):
            items.extend(item)


def check_operator(target: str, custom: Collection[str] = ()) -> str:
    """Check that a program may call an operator.

    >>> check_operator("torch.ops.aten.relu.default")
    'torch.ops.aten.relu.default'

    Args:
        target: The dotted path of the operator.
        custom: The paths of operators that the user defined in this process.

    Raises:
        UntrustedArtifact: It may not.
    """
    found, higher = _OVERLOAD.fullmatch(target), _HIGHER.fullmatch(target)
    if (
        target in _SYMBOLIC.split()
        or target in custom
        or (found is not None and _REFUSED.fullmatch(found[1]) is None)
        or (higher is not None and higher[1] in _HIGHER_ORDER.split())
    ):
        return target
    raise UntrustedArtifact(
        f"the program calls `{target[:80]}`, which is not an operator that a file may call.",
        expected="an operator of torch on tensors",
        got=target[:1000],
        hint="If the operator is your own, define it with `torch.library.custom_op` or a "
        "`torch.library.Library` before you save or open the file. Otherwise the file is forged or "
        "damaged: do not use it.",
    )
