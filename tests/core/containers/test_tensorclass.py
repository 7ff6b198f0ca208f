"""What is particular to tensor classes: fields, their defaults, and a fixed set of keys."""

import dataclasses
import types
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import ClassVar, assert_type

import pytest
import torch
from tests.core.kinds import inner
from torch import Tensor
from torch.utils import _pytree as pytree

from kd_core import (
    NO_DEFAULT,
    InvalidArgument,
    InvalidValue,
    KeyCollision,
    Locked,
    MetaData,
    NestedKey,
    NonTensorData,
    ShapeMismatch,
    TensorClass,
    TensorDict,
    TypedTensorDict,
    UnknownField,
    is_tensorclass,
    lazy_stack,
    stack,
)


class Sample(TensorClass):
    image: Tensor
    label: Tensor
    source: str = "camera"
    weight: Tensor | None = None
    kinds: ClassVar[int] = 10


def sample() -> Sample:
    return Sample(torch.zeros(4, 3), torch.arange(4), batch_size=[4])


def test_fields_are_entries() -> None:
    data = sample()
    assert data.image is data["image"]
    assert data.source == data["source"] == "camera"
    assert data.weight is None
    assert "weight" not in data  # a field that is None has no entry
    data.label = torch.ones(4)
    torch.testing.assert_close(data["label"], torch.ones(4))
    assert list(data.keys()) == ["image", "label", "source"]
    assert Sample.kinds == 10


def test_methods_give_the_class_again() -> None:
    data = sample()
    assert_type(data.clone(), Sample)
    assert_type(data[0], Sample)
    assert_type(data + 1, Sample)
    for result in (data[1:], data.clone(), data + 1, data.reshape(2, 2), data.unbind(0)[0]):
        assert type(result) is Sample
    torch.testing.assert_close(data[1:].label, torch.tensor([1, 2, 3]))
    assert (data * 2).source == "camera"


def test_batch_size_and_device_are_keywords() -> None:
    data = Sample(image=torch.zeros(4), label=torch.zeros(4), batch_size=4, device="meta")
    assert data.batch_size == (4,)
    assert data.device == torch.device("meta")
    assert data.image.device == torch.device("meta")
    assert Sample(torch.zeros(4), torch.zeros(4)).batch_size == ()


def test_a_value_is_checked_when_it_is_stored() -> None:
    data = sample()
    with pytest.raises(ShapeMismatch, match="`label`"):
        data.label = torch.zeros(5)
    with pytest.raises(ShapeMismatch, match="`image`"):
        Sample(torch.zeros(3), torch.zeros(4), batch_size=[4])


def test_an_unknown_field_is_told_with_the_nearest() -> None:
    data = sample()
    with pytest.raises(
        UnknownField, match=r"`imgae` is not a field of `Sample`.*Did you mean `image`"
    ):
        data.imgae  # type: ignore[attr-defined] # noqa: B018  # reading it raises
    with pytest.raises(AttributeError, match="imgae"):
        data.imgae = 3  # type: ignore[attr-defined]  # wrong on purpose
    with pytest.raises(UnknownField, match="`imgae`"):
        data["imgae"] = torch.zeros(4)
    with pytest.raises(UnknownField, match="`imgae`"):
        data["imgae", "deep"] = torch.zeros(4)
    with pytest.raises(UnknownField, match="`imgae`"):
        data.update({"label": torch.ones(4), "imgae": torch.zeros(4)})
    with pytest.raises(UnknownField, match="`imgae`"):
        Sample(imgae=torch.zeros(4))  # type: ignore[call-arg]  # wrong on purpose
    assert not hasattr(data, "imgae")
    torch.testing.assert_close(data.label, torch.arange(4))


def test_no_way_of_writing_adds_a_field() -> None:
    data = sample()
    ways: list[Callable[[dict[NestedKey, object]], object]] = [data.assign, data.update]
    for write in ways:
        with pytest.raises(UnknownField, match=r"`lable` is not a field.*Did you mean `label`"):
            write({"image": torch.ones(4, 3), "lable": torch.arange(4)})
    assert not data.image.any()
    assert list(data.keys()) == ["image", "label", "source"]


def test_arguments_are_matched_with_fields() -> None:
    with pytest.raises(InvalidArgument, match="`Sample` expected a value for `label`"):
        Sample(torch.zeros(4))  # type: ignore[call-arg]  # wrong on purpose
    with pytest.raises(InvalidArgument, match="`image` is given twice"):
        Sample(torch.zeros(4), image=torch.zeros(4))  # type: ignore[call-arg, misc]  # wrong on purpose
    with pytest.raises(InvalidArgument, match=r"at most 4 values .*, got 5"):
        Sample(*(torch.zeros(4) for _ in range(5)))  # type: ignore[arg-type]  # wrong on purpose


def test_a_field_without_an_entry_is_none() -> None:
    data = sample()
    data.weight = torch.ones(4)
    data.weight = None
    assert data.weight is None
    del data.source
    assert data.source is None
    assert data.pop("label").shape == (4,)  # type: ignore[unreachable]  # types say less than the run
    assert list(data.keys()) == ["image"]
    data.select(inplace=True)
    assert data.image is None
    assert data.batch_size == (4,)


def test_fewer_fields_keep_the_class_and_other_keys_make_a_tensordict() -> None:
    data = sample()
    for fewer in (data.select("image"), data.exclude("image"), data.empty(), data.select()):
        assert type(fewer) is Sample
        assert fewer.label is None or fewer.image is None  # type: ignore[redundant-expr]  # types say less than the run
    nested = Outer(inner=Inner(x=torch.ones(3), batch_size=[3]), y=torch.ones(3), batch_size=[3])
    assert type(nested.flatten_keys()) is TensorDict  # type: ignore[comparison-overlap]  # types say less than the run


def test_a_key_that_is_not_a_field_is_refused_before_a_key_is_renamed() -> None:
    data = sample()
    with pytest.raises(UnknownField, match="`other` is not a field"):
        data.rename_key_("image", "other")
    assert list(data.keys()) == ["image", "label", "source"]
    assert data.rename_key_("image", "weight").weight is not None
    assert data.image is None


def notes(name: str) -> dict[str, object]:
    return {"__annotations__": {name: Tensor}}


@pytest.mark.parametrize("name", ["_kd_entries", "_kd_desc", "_kd_like", "_kd_put", "batch_size"])
def test_a_field_with_a_name_that_containers_keep_is_refused(name: str) -> None:
    with pytest.raises(InvalidValue, match=f"`{name}`.* must not be"):
        types.new_class("Bad", (TensorClass,), {}, lambda body: body.update(notes(name)))


def test_a_method_with_a_name_that_containers_keep_is_refused() -> None:
    with pytest.raises(InvalidValue, match="`_kd_read` of `Bad` must not be the name of"):

        class Bad(TensorClass):
            x: Tensor

            def _kd_read(self) -> Tensor:  # type: ignore[override]  # the point of the test
                return self.x


def test_a_mutable_default_is_refused_and_a_factory_is_called() -> None:
    with pytest.raises(InvalidValue, match="got a `list`, which all instances would share"):

        class Bad(TensorClass):
            words: list[str] = []  # noqa: RUF012  # a mutable default is what the test is about

    class Good(TensorClass):
        words: dict[str, str] = field(default_factory=dict)

    first, second = Good(), Good()
    first.words["x"] = "y"
    assert second.words == {}


def test_a_subclass_adds_fields() -> None:
    class Scored(Sample):
        score: Tensor | None = None

    data = Scored(torch.zeros(4), torch.zeros(4), score=torch.ones(4), batch_size=[4])
    assert list(data.keys()) == ["score", "image", "label", "source"]
    assert type(data + 1) is Scored


def test_fields_are_in_the_order_of_the_call() -> None:
    """Keywords, then values by position, then defaults; of a mapping its order."""
    image, label = torch.zeros(4), torch.ones(4)
    data = Sample(label=label, image=image, batch_size=[4])
    assert list(data.keys()) == ["label", "image", "source"]
    assert list(data[:2].keys()) == ["label", "image", "source"]
    assert list(Sample(image, source="disk", label=label).keys()) == ["source", "label", "image"]
    for made in (
        Sample.from_dict({"label": label, "image": image}),
        Sample.from_tensordict(TensorDict({"label": label, "image": image}, [4])),
        Sample.from_any({"label": label, "image": image}),
    ):
        assert list(made.keys()) == ["label", "image"]
    with pytest.raises(InvalidArgument, match="field `image` is given twice"):
        Sample(image, label, image=image)  # type: ignore[misc]  # the error is the promise


def test_it_is_made_of_a_mapping_or_container() -> None:
    source = TensorDict({"image": torch.zeros(4), "label": torch.ones(4)}, [4])
    data = Sample.from_dict(source)
    assert data.batch_size == (4,)
    assert data.image is source["image"]
    with pytest.raises(UnknownField, match="`other`"):
        Sample.from_dict({"other": 1.0})


def test_a_nested_tensor_class_keeps_its_kind() -> None:
    td = TensorDict({"data": sample(), "x": torch.zeros(4)}, [4])
    assert type(inner((td + 1)[0], "data")) is Sample
    assert type(inner(pytree.tree_map(torch.clone, td), "data")) is Sample


def test_classes_and_instances_are_told_apart_from_others() -> None:
    assert is_tensorclass(Sample)
    assert is_tensorclass(sample())
    assert not is_tensorclass(TensorDict)
    assert not is_tensorclass(3)


def test_post_init_runs_after_construction() -> None:
    class Doubled(TensorClass):
        x: Tensor

        def __post_init__(self) -> None:
            self.x = self.x * 2

    assert Doubled(torch.ones(2)).x.tolist() == [2, 2]
    assert Doubled(torch.ones(2), batch_size=[2])[:1].x.tolist() == [2]


def test_a_missing_field_is_named() -> None:
    class Pair(TensorClass):
        x: Tensor
        y: Tensor

    with pytest.raises(InvalidArgument, match="`Pair` expected a value for `y`"):
        Pair(torch.ones(2))  # type: ignore[call-arg]  # wrong on purpose


class Batch(TypedTensorDict):
    obs: Tensor
    name: str = "x"


def test_a_lazy_stack_becomes_one_of_instances_and_a_lock_stays() -> None:
    class Text(TensorClass):
        words: str
        ids: Tensor | None = None

    empty = lazy_stack([TensorDict(), TensorDict()])
    text = Text.from_tensordict(empty, {"words": ["a", "bb"]})
    assert isinstance(text, Text)
    holder = lazy_stack([TensorDict(), TensorDict()])
    holder["text"] = text
    text.ids = torch.arange(2)  # the members are shared
    assert holder["text", "ids"].tolist() == [0, 1]
    assert holder[1]["text", "words"] == "bb"
    assert [each.name for each in dataclasses.fields(text)] == ["words", "ids"]
    assert not text.is_locked
    assert Text.from_tensordict(TensorDict(ids=torch.zeros(2)).lock_()).is_locked
    assert Text.from_tensordict(lazy_stack([TensorDict(words="a")]).lock_()).is_locked


def test_a_typed_container_takes_other_keys_too() -> None:
    batch = Batch(torch.zeros(3, 2), batch_size=[3])
    batch["extra"] = torch.ones(3)
    batch["n", "deep"] = torch.ones(3)
    for same in (batch[:2], batch + 1, batch.clone(), batch.select("obs", "extra")):
        assert type(same) is Batch
        assert "extra" in same
    assert type(batch.select("obs")) is Batch
    del batch["extra"], batch["obs"]
    with pytest.raises(UnknownField, match="field `obs` of `Batch` is declared, and has no entry"):
        batch.obs  # noqa: B018  # reading it raises
    with pytest.raises(InvalidArgument, match="`Batch` expected a value for `obs`"):
        Batch()  # type: ignore[call-arg]  # wrong on purpose
    with pytest.raises(ShapeMismatch, match="`extra`"):
        batch["extra"] = torch.ones(4)
    made = Batch.from_tensordict(TensorDict({"obs": torch.zeros(2), "k": torch.ones(2)}, [2]))
    assert type(made) is Batch
    assert made.name == "x"
    assert sorted(made.keys()) == ["k", "obs"]
    more = Batch(obs=torch.zeros(2), more=1.0)  # type: ignore[call-arg]  # another key
    assert more["more"].item() == 1


def test_what_a_typed_container_computes_of_its_entries_is_a_plain_one() -> None:
    """The fields declare neither truth values nor totals."""
    batch = Batch(torch.arange(6.0).reshape(3, 2), batch_size=[3])
    half = Batch(torch.ones(3, 2) / 2, batch_size=[3])
    plain: list[object] = [batch == half, batch < half, batch.sum(0), batch.max(0).values]
    plain.append(batch.pad([0, 1]))
    assert [type(each) for each in plain] == [TensorDict] * 5
    assert (batch == batch.clone())["obs"].all()
    assert torch.equal(batch.sum(0)["obs"], torch.tensor([6.0, 9.0]))
    same: list[object] = [batch.exp(), batch + 1, batch.logsumexp(0)]
    assert [type(each) for each in same] == [Batch] * 3


def test_a_typed_container_is_built_of_mappings_that_lack_fields() -> None:
    made = Batch.from_dict({"more": torch.ones(2)})
    assert type(made) is Batch
    assert list(made.keys()) == ["more"]
    with pytest.raises(UnknownField, match="declared, and has no entry"):
        made.obs  # noqa: B018  # reading it raises
    assert type(Batch.from_any({"more": torch.ones(2)})) is Batch
    lacking = TensorDict({"k": torch.ones(2)}, [2])
    with pytest.raises(InvalidArgument, match="`Batch` expected a value for `obs`"):
        Batch.from_tensordict(lacking)
    assert list(Batch.from_tensordict(lacking, check=False).keys()) == ["k"]


def test_a_batch_size_that_does_not_fit_is_told_before_a_key_that_is_no_field() -> None:
    with pytest.raises(ShapeMismatch, match="`more`"):
        Inner.from_dict({"more": torch.ones(2)}, [3])
    with pytest.raises(UnknownField, match="`more` is not a field of `Inner`"):
        Inner.from_dict({"more": torch.ones(3)}, [3])


def test_positions_and_listed_keys_are_no_fields() -> None:
    for plain in (
        Batch.from_tuple((torch.ones(2), {"k": 1})),
        Batch.from_pytree({"obs": torch.ones(2)}),
        Batch.fromkeys(["obs", "k"]),
    ):
        assert type(plain) is TensorDict
    assert not isinstance(Batch.from_any((torch.ones(2), 1)), TypedTensorDict)


def test_a_typed_container_is_not_a_tensor_class() -> None:
    assert not is_tensorclass(Batch)
    assert not is_tensorclass(Batch(torch.ones(2)))
    assert not is_tensorclass(lazy_stack([Batch(torch.ones(2))]))


def test_fields_are_listed() -> None:
    names = [(each.name, each.default) for each in Sample.fields()]
    assert names[2:] == [("source", "camera"), ("weight", None)]
    assert Sample.fields()[0].type is Tensor


class Inner(TensorClass):
    x: Tensor


class Outer(TensorClass):
    inner: Inner
    y: Tensor
    maybe: Inner | None = None


def test_nested_classes_are_rebuilt_from_containers_and_mappings() -> None:
    x, y = torch.arange(3.0), torch.ones(3)
    whole = Outer(inner=Inner(x=x, batch_size=[3]), y=y, batch_size=[3])
    plain = TensorDict({"inner": {"x": x}, "y": y}, [3])
    for made in (
        Outer.from_tensordict(whole.to_tensordict()),
        Outer.from_tensordict(plain),
        Outer.from_tensordict(TensorDict({"y": y}, [3]), {"inner": {"x": x}}),
        Outer.from_dict(plain),
        Outer.from_dict({"inner": {"x": x}, "y": y}, [3]),
        Outer.from_dict({"inner": {"x": x}, "y": y}, auto_batch_size=True),
        Outer.from_dict(whole.to_dict(), [3]),
    ):
        assert type(made.inner) is Inner
        assert made.inner.batch_size == (3,)
        assert made.inner.x.tolist() == x.tolist()
        assert made.maybe is None
    more = Outer.from_dict({"inner": {"x": x}, "y": y, "maybe": {"x": -x}}, [3])
    assert type(more.maybe) is Inner


def test_classes_are_built_of_what_has_paths(tmp_path: Path) -> None:
    whole = Outer(inner=Inner(x=torch.arange(3), batch_size=[3]), y=torch.ones(3), batch_size=[3])
    keys: list[NestedKey] = [("inner", "x"), ("y",)]
    whole.to_csv(tmp_path / "table.csv")
    whole.to_json(tmp_path / "text.json")
    for made in (
        Outer.from_dict({key: whole.get(key) for key in keys}, [3]),
        Outer.from_schema(whole.schema(), [3]),
        Outer.from_csv(tmp_path / "table.csv", separator="."),
        Outer.from_json(tmp_path / "text.json"),
        Outer.fromkeys(keys, 1),
    ):
        assert type(made.inner) is Inner
        assert type(made.inner.x) is Tensor
    assert Outer.from_schema(whole.schema(), [3], storage="shared").is_shared()
    with pytest.raises(UnknownField, match="`z` is not a field of `Inner`"):
        Outer.from_dict({("inner", "z"): 1, "y": 2})
    with pytest.raises(KeyCollision, match="is given twice"):
        Outer.from_dict({("y",): 1, "y": 2})


def test_keys_that_a_nested_class_lacks_are_refused_or_left_out() -> None:
    y = torch.ones(3)
    source = TensorDict({"inner": {"x": y, "z": y}, "y": y}, [3])
    with pytest.raises(UnknownField, match="`z` is not a field of `Inner`"):
        Outer.from_tensordict(source)
    assert list(Outer.from_tensordict(source, safe=False).inner.keys()) == ["x"]
    assert Outer.from_dict({"inner": {}, "y": y}).inner.x is None


def test_what_is_stacked_of_a_lazy_stack_keeps_the_class_of_all_members() -> None:
    members = [Inner(x=torch.full((3,), float(n)), batch_size=[3]) for n in range(2)]
    stack = lazy_stack(members)
    twice = lazy_stack([stack, stack])
    for kept in (stack.contiguous(), stack.densify(), twice.contiguous()):
        assert type(kept) is Inner
        assert kept.x.reshape(-1)[:6].tolist() == [0, 0, 0, 1, 1, 1]
    mixed = lazy_stack([members[0], members[1].to_tensordict()])
    kinds: list[type] = [type(each.contiguous()) for each in (mixed, stack.select())]
    assert kinds == [TensorDict, Inner]


def test_data_of_a_field_is_read_as_its_value() -> None:
    data = sample()
    assert data.get("source") == data.source
    assert data.get(("source",)) == data.source
    assert data.get("missing", 3) == 3
    assert isinstance(data.to_tensordict().get("source"), NonTensorData)


def test_a_field_that_is_not_set_is_none_whatever_the_default() -> None:
    class Part(TensorClass):
        x: torch.Tensor
        note: str | None = None

    class Whole(TensorClass):
        part: Part

    part = Part(torch.zeros(2), batch_size=[2])
    whole = Whole(part, batch_size=[2])
    for one in (part, lazy_stack([part, part]), stack([part, part])):
        assert one.get("note", 3) is one.get("note", NO_DEFAULT) is None
        assert one.get_at("note", 0, 3) is None
        assert one.get("other", 3) == 3
    key = ("part", "note")
    assert whole.get(key, 3) is lazy_stack([whole, whole]).get(key, NO_DEFAULT) is None
    assert TensorDict({"part": part}, [2]).get(key, 3) == 3


def test_a_container_is_wanted_where_an_instance_is_built_of_one() -> None:
    with pytest.raises(RuntimeError, match="`tensordict` must be a container"):
        Sample.from_tensordict({"image": torch.zeros(2)})  # type: ignore[arg-type]  # on purpose


def test_data_below_a_field_is_read_as_its_container_reads_it() -> None:
    class Note(TensorClass):
        text: str

    class Outer(TensorClass):
        plain: TensorDict
        note: Note

    plain = TensorDict({"text": MetaData("a", [2])}, [2])
    outer = Outer(plain=plain, note=Note(text="b", batch_size=[2]), batch_size=[2])
    assert isinstance(outer.get(("plain", "text")), MetaData)
    assert outer.get(("note", "text")) == "b"
    assert outer["plain", "text"] == "a"
    default = NonTensorData("none")
    assert outer.get(("missing", "text"), default) == "none"


def test_what_is_written_through_all_rows_is_written() -> None:
    data = sample()
    data[:].set_("source", "lidar")
    data[...].weight = torch.ones(4)
    assert data.source == "lidar"
    assert data.weight is not None


def test_fields_without_entries_are_in_the_dict_of_a_stack() -> None:
    stack = lazy_stack([sample(), sample()]).select("label")
    assert sorted(stack.to_dict()) == ["image", "label", "source", "weight"]


def test_an_update_with_none_removes_the_entry_of_a_field() -> None:
    data = sample()
    data.update({"source": None, "label": data.label})
    assert "source" not in data.keys()  # noqa: SIM118  # a batch has no `in`
    data.update({"source": "lidar"}).update({"source": None}, inplace=True)
    assert "source" not in data.keys()  # noqa: SIM118  # as above
    with pytest.raises(Locked):
        data.lock_().update({"label": None})
