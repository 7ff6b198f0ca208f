"""Forged and damaged headers give a container or a `FormatError`, and little memory either way."""

import random
import tracemalloc

import torch
from tests.fuzz.conftest import Seeds
from tests.fuzz.forging import damage, forge_json

from kd_core import FormatError, MetaData, TensorDict, lazy_stack

LIMIT = 16 << 20
"""Bytes of Python that a header of some kilobytes may take: most forged texts are of 0.1 MB."""
PARSED = 64
"""Bytes more for each byte of the text: an empty list, two bytes, takes 56 and its place."""


def sample() -> TensorDict:
    tokens = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    stack = lazy_stack([TensorDict({"x": torch.ones(n)}) for n in (1, 2)])
    entries = {"a": torch.arange(4).view(2, 2), "tokens": tokens, "stack": stack, "w": ["p", "q"]}
    inner = {"b": torch.ones(2), "word": MetaData(("z", b"y", None)), "none": torch.zeros(2, 0)}
    return TensorDict({**entries, "n": inner}, [2], names=["row"], device="cpu")


def test_forged_headers(seeds: Seeds) -> None:
    header, buffers = sample().to_buffers()
    tracemalloc.start()
    try:
        for seed in seeds(in_suite=100):
            source = random.Random(seed)
            forge = damage if source.random() < 0.3 else forge_json
            text = forge(header, source)
            sent = [flat.clone() for flat in buffers]
            if source.random() < 0.2:
                sent[source.randrange(len(sent))].view(torch.uint8).random_(0, 256)
            tracemalloc.reset_peak()
            try:
                TensorDict.from_buffers(text, sent)
                seeds.count("accepted")
            except FormatError:
                seeds.count("refused")
            assert tracemalloc.get_traced_memory()[1] < LIMIT + PARSED * len(text)
    finally:
        tracemalloc.stop()
