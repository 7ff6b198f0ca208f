"""Run a program of a client with a seed; print its numbers and the CPU time of its process."""

import dataclasses
import gc
import json
import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping

import numpy
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase, is_tensorclass

Numbers = Mapping[str, object]


def main(train: Callable[[], Numbers]) -> None:
    """Print what `train` returns and the CPU time that it took, in seconds.

    `cpu` is the time of the process up to the end of the first run, with the imports: what one
    library loads at its import, another one loads when it is used. With `KD_CLIENT_REPEATS=n` the
    program runs n times more, and `again` is the least time of these runs, which holds nothing
    that is done once: `cpu - again` is the start-up.

    Args:
        train: the program; the seed is the first word of the command line.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed_all()
    numbers = train()
    printed = {"numbers": dict(numbers), "cpu": time.process_time()}
    again = []
    for _ in range(int(os.environ.get("KD_CLIENT_REPEATS", "0"))):
        seed_all()
        gc.collect()
        before = time.process_time()
        train()
        again.append(time.process_time() - before)
    print(json.dumps({**printed, "again": min(again, default=None)}))


def seed_all() -> None:
    """Seed every generator with the first word of the command line."""
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def fingerprint(module: torch.nn.Module) -> float:
    """Return one number that depends on every parameter of a module."""
    return sum(
        float(
            (p.detach().double() * torch.arange(1, p.numel() + 1).view_as(p).double().cos()).sum()
        )
        for p in module.parameters()
    )


class Found(dict[str, object]):
    """What is in the values of several cases."""


def results(cases: Mapping[str, Callable[[], object]], seed: int = 0) -> Found:
    """Return what is in the value of each case, or the kinds of the error that it raised."""
    found = Found()
    for name, case in cases.items():
        torch.manual_seed(seed)
        try:
            found[name] = content(case())
        except Exception as error:
            if os.environ.get("KD_CLIENT_ERRORS"):
                traceback.print_exc()
            found[name] = kinds(error)
    return found


def kinds(error: BaseException) -> str:
    """Return the builtin kinds of an error, the closest first: other libraries add their own."""
    names = [each.__name__ for each in type(error).__mro__ if each.__module__ == "builtins"]
    end = names.index("Exception") if "Exception" in names else 1
    return " ".join(["raises", *names[:end]])


def content(value: object, depth: int = 5) -> object:
    """Return what is in a value as plain data: dtypes, sizes and sums of tensors, keys."""
    if isinstance(value, Found | str | int | float | bool | None):
        return value
    if isinstance(value, torch.Tensor):
        shown = value.detach()
        if shown.is_nested or shown.layout is not torch.strided or shown.device.type == "meta":
            return [str(shown.dtype), str(shown.layout)]
        total = shown.to(torch.complex128 if shown.is_complex() else torch.float64)
        return [str(shown.dtype), list(shown.shape), f"{total.nan_to_num().sum().item():.6g}"]
    if isinstance(value, NonTensorStack):
        return ["NonTensorStack", value.tolist()]
    if isinstance(value, NonTensorData):
        return [type(value).__name__, list(value.batch_size), content(value.data, depth - 1)]
    if depth == 0:
        return type(value).__name__
    if is_tensorclass(value):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        # A lazy stack of instances has a class of its own in kd.
        name = type(value).__name__.removeprefix("LazyStacked")
        return [name, list(value.batch_size), content(fields, depth - 1)]
    if isinstance(value, TensorDictBase):
        inside = {str(k): content(v, depth - 1) for k, v in value.items()}
        return [type(value).__name__, list(value.batch_size), str(value.device), inside]
    if isinstance(value, torch.nn.Module):
        return [type(value).__name__, {n: content(p) for n, p in value.named_parameters()}]
    if isinstance(value, Mapping):
        return {str(k): content(v, depth - 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [content(each, depth - 1) for each in value]
    return type(value).__name__
