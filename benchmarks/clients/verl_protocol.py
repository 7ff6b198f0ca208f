"""verl's `DataProto` is split, joined, padded, repeated, pickled and reordered."""

import pickle

import numpy
import torch
from measured import Numbers, main
from verl import DataProto
from verl.protocol import pad_dataproto_to_divisor, unpad_dataproto


def train() -> Numbers:
    """Pass data through the operations of a trainer."""
    total = 0.0
    for _ in range(40):
        data = DataProto.from_dict(
            tensors={"ids": torch.randint(100, (30, 8)), "reward": torch.randn(30)},
            non_tensors={"uid": numpy.array([f"u{i}" for i in range(30)], dtype=object)},
            meta_info={"temperature": 1.0},
        )
        padded, extra = pad_dataproto_to_divisor(data, 8)
        parts = [pickle.loads(pickle.dumps(part)) for part in padded.chunk(4)]
        whole = unpad_dataproto(DataProto.concat(parts), extra)
        whole = whole.repeat(2, interleave=True)
        whole.reorder(torch.randperm(len(whole)))
        scores = DataProto.from_dict(tensors={"score": whole.batch["reward"] * 2})
        whole = whole.union(scores)
        chosen = whole.select(batch_keys=["ids", "score"], non_tensor_batch_keys=["uid"])[3:20]
        weights = torch.arange(1, len(chosen) + 1)
        total += float((chosen.batch["score"] * weights).sum() + chosen.batch["ids"].sum())
        total += sum(int(uid[1:]) for uid in chosen.non_tensor_batch["uid"])
    return {"total": total}


if __name__ == "__main__":
    main(train)
