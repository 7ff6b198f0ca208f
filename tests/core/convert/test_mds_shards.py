"""Rows as samples of MosaicML Streaming, with a writer that keeps them."""

import pytest
import torch

from kd_core import InvalidArgument, InvalidValue, KeyCollision, MissingDependency, TensorDict


class Kept:
    """What a writer is used by."""

    def __init__(self) -> None:
        self.samples: list[dict[str, object]] = []
        self.is_finished = False

    def write(self, sample: dict[str, object]) -> None:
        self.samples.append(sample)

    def finish(self) -> None:
        self.is_finished = True


def make() -> TensorDict:
    inner = TensorDict({"w": torch.arange(4.0).view(2, 2), "i": torch.arange(2)}, [2])
    return TensorDict({"n": inner, "x": torch.ones(2), "s": ["a", "b"], "c": {"k": [1, 2]}}, [2])


def test_each_row_is_a_sample() -> None:
    kept = Kept()
    make().to_mds(writer=kept)
    first, second = kept.samples
    assert sorted(first) == sorted(second) == ["c.k", "n.i", "n.w", "s", "x"]
    assert second["n.w"].tolist() == [2.0, 3.0]  # type: ignore[attr-defined]  # an array
    assert (second["n.i"], second["x"], second["s"]) == (1, 1.0, "b")
    assert not kept.is_finished


def test_a_writer_is_closed_if_asked_for() -> None:
    kept = Kept()
    make().to_mds(writer=kept, finish_writer=True)
    assert kept.is_finished


def test_a_container_without_a_batch_is_one_sample() -> None:
    kept = Kept()
    TensorDict({"a": torch.ones(3), "s": "word"}).to_mds(writer=kept)
    assert [sample["s"] for sample in kept.samples] == ["word"]


def test_what_cannot_be_written_is_told_before_anything_is() -> None:
    kept = Kept()
    with pytest.raises(InvalidValue, match=r"entry `o` holds .* which has no encoding in a shard"):
        TensorDict({"a": torch.ones(2), "o": object()}, [2]).to_mds(writer=kept)
    with pytest.raises(InvalidValue, match=r"entry `m` holds a `bytes`, which has no encoding"):
        TensorDict({"m": ["a", b"b"]}, [2]).to_mds(writer=kept)
    with pytest.raises(KeyCollision, match="holds the separator"):
        TensorDict({"n": {"a.b": torch.ones(2)}}, [2]).to_mds(writer=kept)
    with pytest.raises(InvalidArgument, match="either `out` or `writer`, got neither"):
        make().to_mds()
    with pytest.raises(InvalidArgument, match="got both"):
        make().to_mds(writer=kept, out="shards")
    assert kept.samples == []


def test_the_library_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "streaming", None)
    with pytest.raises(MissingDependency, match="`to_mds` requires"):
        make().to_mds(out="shards")
