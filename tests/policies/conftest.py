"""Lets lerobot be imported beside a torch that has no CUDA."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import torch


def _declared() -> torch.library.Library | None:
    """Declare operators that torchvision, built for CUDA, cannot load beside such a torch.

    They are declared, not defined: torchvision asks whether they are there, no policy calls them.
    """
    if find_spec("lerobot") is None:
        return None
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


DECLARED = _declared()
