"""What a wrapper of data has as a class with one field, and names of its dimensions."""

import asyncio

import pytest
import torch

from kd_core import InvalidKey, NonTensorData, NonTensorStack, TensorDict
from kd_core._protocol import AbstractContainer


def test_a_wrapper_has_one_field() -> None:
    assert [field.name for field in NonTensorData.fields()] == ["data"]
    wrapper = NonTensorData("x", batch_size=[2])
    assert wrapper.__replace__(data="y").data == "y"
    assert wrapper.__replace__(data="y").batch_size == (2,)


def test_a_wrapper_is_made_of_a_container() -> None:
    td = TensorDict({"data": "q"}, [2])
    made = NonTensorData.from_tensordict(td)
    assert (made.data, made.batch_size) == ("q", (2,))
    assert NonTensorData.from_tensordict(TensorDict(batch_size=[3]), {"data": 1}).data == 1
    with pytest.raises(InvalidKey, match="key `data` not found"):
        NonTensorData.from_tensordict(TensorDict())


def test_dimensions_have_names() -> None:
    assert NonTensorData("x", batch_size=[2], names=["t"]).names == ["t"]
    assert NonTensorStack("a", "b", names=["t"]).names == ["t"]
    assert NonTensorStack("a", "b", stack_dim_name="t").names == ["t"]


def test_a_container_goes_through_a_pipe_of_another_library() -> None:
    class Pipe:
        held: AbstractContainer

        async def asend(self, td: AbstractContainer) -> None:
            self.held = td

        async def arecv(self) -> AbstractContainer:
            return self.held

    async def exchange() -> AbstractContainer:
        pipe = Pipe()
        await TensorDict({"a": torch.ones(2)}).asend(pipe)
        return await TensorDict().arecv(pipe, device="meta")

    received = asyncio.run(exchange())
    assert isinstance(received, TensorDict)
    assert received["a"].device.type == "meta"
