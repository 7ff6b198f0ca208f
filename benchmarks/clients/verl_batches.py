"""verl's `DataProto`, its helpers of containers and its padding; TransferQueue's messages."""

import pickle
import tempfile
from collections.abc import Callable, Iterator
from functools import partial

import numpy
import torch
from measured import Numbers, content, main, results
from tensordict import NonTensorData, NonTensorStack, TensorDict
from transfer_queue.storage.managers.base import KVStorageManager
from transfer_queue.utils import serial_utils
from verl import DataProto, protocol
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import rearrange_micro_batches, restore_dynamic_batch
from verl.utils.torch_functional import split_dict_tensor_into_batches
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding


def proto(rows: int = 6) -> DataProto:
    """Return data with tensors, objects and words."""
    words = [f"u{i}" for i in range(rows)]
    ragged = [list(range(i)) for i in range(rows)]
    objects = numpy.empty(rows, dtype=object)
    objects[:] = ragged
    return DataProto.from_dict(
        tensors={"ids": torch.arange(rows * 3).view(rows, 3), "reward": torch.randn(rows)},
        non_tensors={"uid": numpy.array(words, dtype=object), "turns": objects},
        meta_info={"temperature": 1.0, "names": ["a", "b"]},
    )


def shown(data: object) -> object:
    """Return what is in data of verl."""
    if isinstance(data, list | tuple):
        return [shown(each) for each in data]
    if hasattr(data, "non_tensor_batch"):
        lists = {k: numpy.asarray(v).tolist() for k, v in data.non_tensor_batch.items()}
        return [content(data.batch), content(lists), content(data.meta_info)]
    return content(data)


def sequences() -> TensorDict:
    """Return padded prompts and responses."""
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
    ids = torch.randint(1, 50, mask.shape) * mask
    data = {
        "input_ids": ids,
        "attention_mask": mask,
        "response_mask": mask[:, 3:],
        "prompts": ids[:, :3],
        "responses": ids[:, 3:],
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
    }
    return tu.get_tensordict(data, {"max_seq_len": 6, "max_response_len": 3})


def helped() -> TensorDict:
    """Return a container with each kind of entry that verl's helpers know."""
    nested = torch.nested.nested_tensor(
        [torch.arange(n + 1.0) for n in range(4)], layout=torch.jagged
    )
    return tu.get_tensordict(
        {
            "x": torch.arange(8.0).view(4, 2),
            "words": ["a", "b", "c", "d"],
            "turns": [[], [0.5, 0.8], [0.9], [{"role": "user"}]],
            "ragged": nested,
        },
        {"name": "run", "sizes": [1, 2], "none": None},
    )


def protos() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what `DataProto` does."""
    other = {"tensors": {"score": torch.arange(6.0)}, "meta_info": {"k": 1}}
    yield (
        "single",
        lambda: DataProto.from_single_dict(
            {"a": torch.ones(3, 2), "s": numpy.array(["x", "y", "z"], dtype=object)}
        ),
    )
    for place in (2, slice(1, 5, 2), [0, 3], numpy.array([1, 2]), torch.tensor([5, 0])):
        yield f"index {place}", lambda place=place: proto()[place]
    yield "mask", lambda: proto()[torch.tensor([True, False, True, False, False, True])]
    yield "numpy mask", lambda: proto().select_idxs(numpy.arange(6) % 2 == 0)
    yield "select", lambda: proto().select(["ids"], ["uid"], ["names"], deepcopy=True)
    yield "pop", lambda: (lambda d: [d.pop(["ids"], ["uid"], ["names"]), d])(proto())
    yield "rename", lambda: proto().rename(["ids"], ["tokens"])
    yield "union", lambda: proto().union(DataProto.from_dict(**other))
    yield "union differs", lambda: proto().union(proto())
    yield "chunk", lambda: proto().chunk(3)
    yield "chunk uneven", lambda: proto(7).chunk(3)
    yield "split", lambda: proto(7).split(3)
    yield "concat", lambda: DataProto.concat([proto(2), proto(3)])
    yield "reorder", lambda: (lambda d: [d.reorder(torch.tensor([5, 4, 3, 2, 1, 0])), d])(proto())
    yield "repeat", lambda: [proto().repeat(2), proto().repeat(2, interleave=False)]
    yield "repeat samples", lambda: proto().sample_level_repeat([1, 0, 2, 1, 1, 3])
    yield "unfold", lambda: proto().unfold_column_chunks(3, split_keys=["ids"])
    yield "info", lambda: proto().get_data_info()
    yield "padded", lambda: protocol.pad_dataproto_to_divisor(proto(), 4)
    yield "unpadded", lambda: protocol.unpad_dataproto(proto(), 2)
    yield "padding", lambda: (lambda d: [d.padding(2), d.padding(2, "last"), d])(proto())
    yield "collate", lambda: protocol.collate_fn([proto()[0], proto()[1]])
    yield "fold", lambda: protocol.unfold_batch_dim(protocol.fold_batch_dim(proto(), 3))
    yield "container", lambda: [proto().to_tensordict(), proto().to_tensordict()[1:3]]
    yield "back", lambda: DataProto.from_tensordict(proto().to_tensordict())
    yield "to", lambda: proto().to("cpu")
    yield (
        "iterator",
        lambda: list(proto().make_iterator(2, 2, seed=3, dataloader_kwargs={"shuffle": True})),
    )
    yield "pickle", lambda: pickle.loads(pickle.dumps(proto()))
    yield (
        "serialized",
        lambda: protocol.deserialize_tensordict(
            protocol.serialize_tensordict(helped().select("x", "ragged"))
        ),
    )
    yield "empty", lambda: [DataProto(), len(DataProto()), DataProto.from_dict(tensors={})]

    def on_disk() -> object:
        with tempfile.NamedTemporaryFile() as file:
            proto().save_to_disk(file.name)
            return DataProto.load_from_disk(file.name)

    yield "disk", on_disk


def helpers() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what the helpers of containers do."""
    yield "helped", helped
    yield "get", lambda: [tu.get(helped(), key) for key in (*helped().keys(), "missing")]
    yield "non tensor", lambda: tu.get_non_tensor_data(helped(), "name", None)
    yield "get keys", lambda: tu.get_keys(helped(), ["x", "words"])
    yield "pop keys", lambda: (lambda d: [tu.pop_keys(d, ["x", "words"]), d])(helped())
    yield "pop one", lambda: (lambda d: [tu.pop(d, "turns"), tu.pop(d, "no", 3), d])(helped())
    yield "assign", lambda: tu.assign_non_tensor(helped(), a="b", c=[1, [2]], d=NonTensorData(3))
    yield "parts", lambda: tu.chunk_tensordict(helped(), 2)
    yield "joined", lambda: tu.concat_tensordict([helped(), helped()])
    yield "joined parts", lambda: tu.concat_tensordict(tu.chunk_tensordict(helped(), 2))
    yield "rows", lambda: tu.index_select_tensor_dict(helped(), [2, 0])
    yield "divisor", lambda: tu.pad_to_divisor(helped(), 3)
    yield "undone", lambda: tu.unpad(helped(), 1)
    yield "contiguous", lambda: tu.contiguous(helped())
    yield "equal", lambda: tu.assert_tensordict_eq(helped(), helped())
    yield (
        "dicts",
        lambda: tu.list_of_dict_to_tensordict(
            [{"x": torch.ones(2), "w": "a"}, {"x": torch.zeros(3), "w": "b"}]
        ),
    )
    yield (
        "union",
        lambda: tu.union_tensor_dict(
            helped(), tu.get_tensordict({"y": torch.ones(4)}, {"name": "run"})
        ),
    )
    yield "union words", lambda: tu.union_tensor_dict(helped(), helped())
    yield "batches", lambda: [content(b) for b in tu.make_iterator(helped(), 2, 1, seed=1)]
    yield "split", lambda: split_dict_tensor_into_batches(helped().select("x"), 2)
    yield "unpadded", lambda: left_right_2_no_padding(sequences())
    yield (
        "padded",
        lambda: (lambda d: no_padding_2_padding(d["input_ids"].float(), d))(
            left_right_2_no_padding(sequences())
        ),
    )

    def balanced() -> object:
        data = left_right_2_no_padding(sequences())
        batches, order = rearrange_micro_batches(data, max_token_len=8)
        values = torch.cat([torch.arange(len(b)).float() for b in batches])
        return [batches, order, restore_dynamic_batch(values, order)]

    yield "balanced", balanced
    yield "pickled", lambda: pickle.loads(pickle.dumps(helped()))
    yield "stacked", lambda: NonTensorStack.from_list([NonTensorData(x) for x in ["a", [1], []]])


def messages() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what TransferQueue does to a container."""

    def sent(value: object) -> object:
        return serial_utils.decode([bytes(f) for f in serial_utils.encode(value)])

    yield "sent", lambda: sent({"data": helped().select("x", "ragged")})
    yield "sent plain", lambda: sent(TensorDict(a=torch.ones(2, 3), batch_size=[2]))
    yield "sent nested", lambda: sent(TensorDict(a={"b": torch.ones(2)}, batch_size=[2]))
    yield "sent rows", lambda: [sent(row) for row in helped().select("x")]
    yield "values", lambda: KVStorageManager._generate_values(helped().select("x", "ragged"))
    yield "keys", lambda: KVStorageManager._generate_keys(["x", "words"], [3, 5])


def train() -> Numbers:
    """Return what each case gives."""
    return results(dict(cases()))


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each case by name."""
    for kind in (protos, helpers, messages):
        for name, case in kind():
            yield f"{kind.__name__} {name}", partial(lambda c: shown(c()), case)


if __name__ == "__main__":
    main(train)
