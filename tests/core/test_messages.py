"""Messages as users read them: path, shapes, nearest match and remedy, word by word.

`messages.txt` holds them, so that a change of one shows.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kd_core import (
    InvalidArgument,
    LazyStackedTensorDict,
    MetaData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    TensorDictBase,
    UnbatchedTensor,
    cat,
    collate,
    lazy_stack,
    pad,
    save,
    stack,
)


class Sample(TensorClass):
    image: Tensor
    label: Tensor


class Untyped(TensorClass):
    scale = 1.0


class Level(TensorClass, checked=True):
    level: int


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2))


class Frozen(TensorClass, frozen=True):
    image: Tensor


def td() -> TensorDict:
    nested = {"obs": torch.zeros(3, 2), "word": ["a", "b", "c"], "unit": "m"}
    return TensorDict({"reward": torch.zeros(3), "next": nested}, [3])


def one(leaf: Tensor) -> TensorDict:
    return TensorDict({"a": leaf})


def ragged() -> LazyStackedTensorDict:
    return lazy_stack([TensorDict({"ids": torch.zeros(n)}) for n in (2, 3)])


def named() -> TensorDict:
    return TensorDict({"a": torch.zeros(2, 3)}, [2, 3], names=["time", "env"])


def written_by_torch() -> str:
    torch.save(torch.zeros(2), "weights.pt")
    return "weights.pt"


def written(name: str) -> str:
    Path(name).write_bytes(b"\x08" * 40)
    return name


def within(outer: TensorDict) -> TensorDictBase:
    inner: object = outer.lock_().get("next")
    assert isinstance(inner, TensorDictBase)
    return inner


def unlock_within(outer: TensorDict) -> None:
    within(outer).unlock_()


CALLS: dict[str, Callable[[], object]] = {
    "a missing key": lambda: td()["rewrd"],
    "a missing nested key": lambda: td()["next", "obz"],
    "a key below a leaf": lambda: td()["reward", "x"],
    "a key that is not a key": lambda: td()["reward", 1],  # type: ignore[index]  # refused
    "a missing key to delete": lambda: td().del_("reword"),
    "a missing key to select": lambda: td().select("next", "rewards"),
    "a missing key to rename": lambda: td().rename_key_("rward", "r"),
    "a key that is taken": lambda: td().rename_key_("reward", "next", safe=True),
    "keys that collide": lambda: TensorDict({"a.b": 1, "a": {"b": 2}}).flatten_keys(),
    "a shape that does not fit": lambda: td().set("action", torch.zeros(4)),
    "a nested shape that does not fit": lambda: TensorDict({"n": {"a": torch.zeros(2)}}, [3]),
    "rows that do not fit": lambda: td().set("text", ["a", "b"]),
    "a batch size that does not fit": lambda: setattr(td(), "batch_size", torch.Size([3, 1])),
    "a negative batch size": lambda: TensorDict({}, [-2]),
    "a batch size of floats": lambda: TensorDict({}, [2.5]),  # type: ignore[list-item]  # refused
    "a source of no kind": lambda: td().update(3),  # type: ignore[arg-type]  # refused
    "a container in itself": lambda: (lambda each: each.set("self", each))(td()),
    "a reshape that does not fit": lambda: td().reshape(2, 2),
    "a reshape by a float": lambda: td().reshape(1.5),  # type: ignore[arg-type]  # refused
    "a dimension out of range": lambda: td().sum(1),
    "a dimension twice": lambda: named().permute(0, 0),
    "a squeeze of a larger dimension": lambda: named().unflatten(1, (2, 2)),
    "an expand that does not fit": lambda: td().expand(2, 4),
    "a row that is not there": lambda: td()[3],
    "too many indices": lambda: td()[0, 0],
    "a mask of another shape": lambda: td()[torch.tensor([True, False])],
    "an index of floats": lambda: td()[torch.zeros(2)],
    "a backward slice": lambda: td()[::-1],
    "a write that does not fit": lambda: td().__setitem__(0, {"reward": torch.zeros(2)}),
    "a write of an unknown key": lambda: td().update_at_({"rewards": 1.0}, 0),
    "a write in place that does not fit": lambda: td().set_("reward", torch.zeros(4)),
    "a write in place of a container": lambda: td().set_("next", 1.0),
    "a write of one value for all rows": lambda: td().update_({"next": {"unit": ["m", "km"]}}),
    "a tensor written to words": lambda: td().update_({("next", "word"): torch.zeros(3)}),
    "a write to an expanded leaf": lambda: one(torch.zeros(1).expand(3)).add_(1),
    "a write to a leaf of the graph": lambda: one(nn.Parameter(torch.zeros(3))).add_(1),
    "a locked container": lambda: td().lock_().set("a", torch.zeros(3)),
    "a container locked by another": lambda: within(td()).set("a", torch.zeros(3)),
    "a locked container to unlock": lambda: unlock_within(td()),
    "containers of other keys": lambda: td() + td().exclude("reward"),
    "containers of other sizes": lambda: td() + td()[:2],
    "leaves that do not broadcast": lambda: one(torch.zeros(2)) + one(torch.zeros(3)),
    "a tensor that does not line up": lambda: td() * torch.ones(2),
    "an operand of another kind": lambda: td() + "x",  # type: ignore[operator]  # refused
    "stacked containers of other keys": lambda: stack([td(), td().exclude(("next", "obs"))]),
    "stacked containers of other shapes": lambda: stack([td(), td()[:2]]),
    "no containers": lambda: cat([]),
    "cat of no dimension": lambda: cat([TensorDict({}), TensorDict({})]),
    "padding of the wrong length": lambda: pad(td(), [1, 2, 3]),
    "a ragged entry": lambda: ragged()["ids"],
    "a ragged stack made dense": lambda: ragged().contiguous(),
    "a write to a ragged entry": lambda: ragged().set_("ids", torch.zeros(2, 2)),
    "a key that some members have": lambda: lazy_stack([td(), td().select("next")])["reward"],
    "members of other sizes": lambda: lazy_stack([td(), td()[:2]]).view(-1),
    "an entry for members of other sizes": lambda: lazy_stack([td(), td()[:2]]).set("x", 1.0),
    "members of other dimensions": lambda: lazy_stack([td(), td()[0]]),
    "a member of another size that is added": lambda: ragged().extend([TensorDict(), td()]),
    "a mapping that is added": lambda: ragged().append({"ids": 1}),  # type: ignore[arg-type]  # refused
    "a name that is not there": lambda: named().sum("tiem"),
    "a name twice": lambda: setattr(named(), "names", ["a", "a"]),
    "too few names": lambda: setattr(named(), "names", ["a"]),
    "a dimension of another name": lambda: named().refine_names("step", "env"),
    "a field that is missing": lambda: Sample(torch.zeros(3)),  # type: ignore[call-arg]  # refused
    "no truth": lambda: bool(td()),
    "no rows to iterate over": lambda: list(TensorDict({"a": 1})),
    "a method that is left out": lambda: attrgetter("qint8")(td()),
    "a method that is misspelt": lambda: attrgetter("flaten_keys")(td()),
    "nothing to undo": lambda: td().__enter__(),
    "rows of different wrappers": lambda: NonTensorStack(MetaData("a", [2]), MetaData("b", [3])),
    "an entry of another class": lambda: td().nested("reward", TensorDict),
    "a number in a batch": lambda: td().set("step", 1.0),
    "a missing key to write below another": lambda: td().update_({"next": {"obz": 1.0}}),
    "keys in a list": lambda: td()[["reward", "next"]],  # type: ignore[list-item]  # refused
    "keys in a list to select": lambda: td().select(["reward"]),  # type: ignore[arg-type]  # refused
    "a row beside a key": lambda: td()["reward", :2],  # type: ignore[index]  # refused
    "keys in a set to select": lambda: td().select({"reward"}),  # type: ignore[arg-type]  # refused
    "letters as keys to update": lambda: td().update({"reward": 1}, keys_to_update="reward"),
    "letters as a set of keys": lambda: td().split_keys("reward"),
    "letters as keys to pad": lambda: collate([td()], pad_keys="reward"),
    "letters as keys to nest": lambda: collate([td()], nested_keys="reward"),
    "a key beside a row": lambda: td()[0, "reward"],  # type: ignore[index]  # refused
    "a dtype by name": lambda: td().to("float32"),
    "mappings to stack": lambda: stack([{"a": 1}]),  # type: ignore[type-var]  # refused
    "a generator to stack": lambda: cat(each for each in [td()]),  # type: ignore[arg-type]  # refused
    "a mapping as operand": lambda: td() + {"reward": 1},  # type: ignore[operator]  # refused
    "a separator of another type": lambda: td().flatten_keys(1),  # type: ignore[arg-type]  # refused
    "parameters of what is not a module": lambda: TensorDict.from_module(td()),  # type: ignore[call-overload]  # refused
    "a mean of integers": lambda: one(torch.arange(3)).mean(),
    "a field of a frozen class": lambda: setattr(Frozen(torch.zeros(2)), "image", 1),
    "a function of torch that is not offered": lambda: torch.linalg.inv(td()),
    "a misspelt option": lambda: TensorDict({"a": torch.zeros(3)}, bs=[3]),
    "a dtype for the constructor": lambda: TensorDict({"a": torch.zeros(3)}, dtype=torch.half),
    "containers one by one to a lazy stack": lambda: lazy_stack(td(), td()),  # type: ignore[arg-type]  # refused
    "containers one by one to a stack": lambda: stack(td(), td()),  # type: ignore[arg-type]  # refused
    "rows of other lengths to collate": lambda: collate([one(torch.zeros(n)) for n in (1, 2)]),
    "a key as an attribute": lambda: attrgetter("reward")(td()),
    "a usual key that is not there as an attribute": lambda: attrgetter("obs")(td()),
    "a nested key as a list": lambda: td().get(["next", "obs"]),  # type: ignore[call-overload]  # refused
    "a nested key as a list to read": lambda: td()[["next", "obs"]],  # type: ignore[list-item]  # refused
    "integers as keys": lambda: TensorDict({"opt": {"state": {0: torch.zeros(2)}}}),
    "keyed modules below kd_core": lambda: import_module("kd_core.nn"),
    "utils below kd_core": lambda: import_module("kd_core.utils"),
    "a key as an attribute of a lazy stack": lambda: attrgetter("ids")(ragged()),
    "a usual key like another as an attribute": lambda: attrgetter("rewards")(td()),
    "distributions below kd_core": lambda: import_module("kd_core.distributions"),
    "a module of tensordict": lambda: import_module("kd_core.tensorclass"),
    "a misspelt name that is imported": lambda: import_module("kd_core.Tensordict"),
    "a file of torch.save to load": lambda: TensorDict.load(written_by_torch()),
    "a method of numpy": lambda: attrgetter("astype")(td()),
    "a method of pandas": lambda: attrgetter("groupby")(td()),
    "a method of data sets": lambda: attrgetter("load_from_disk")(TensorDict),
    "a method of data sets on a lazy stack": lambda: attrgetter("filter")(ragged()),
    "a key with the name of a method elsewhere": lambda: attrgetter("head")(TensorDict(head=1)),
    "a path before the container to save": lambda: save("td.kd", td()),  # type: ignore[type-var, arg-type]  # refused
    "a device of another name": lambda: td().to("gpu:1"),
    "a field without a type": lambda: Untyped(scale=1),  # type: ignore[call-arg]  # refused
    "parameters that do not fit in place": lambda: one(torch.zeros(3)).to_module(
        Scale(), inplace=True
    ),
    "a path that a shell would expand": lambda: td().save("~/td.kd"),
    "a path to load that a shell would expand": lambda: TensorDict.load("~/td.kd"),
    "a file of another format to load": lambda: TensorDict.load(written("model.onnx")),
    "a decorator on a tensor class": lambda: dataclasses.dataclass(
        type("Decorated", (TensorClass,), {"__annotations__": {"x": Tensor}})
    ),
    "a real number for an integer": lambda: Level(torch.tensor(3.5)),  # type: ignore[arg-type]  # refused
}


def messages() -> dict[str, str]:
    lines = (Path(__file__).parent / "messages.txt").read_text(encoding="utf-8").splitlines()
    names = [line.removeprefix("# ") for line in lines[::2]]
    return dict(zip(names, lines[1::2], strict=True))


MESSAGES = messages()


@pytest.mark.parametrize("name", CALLS)
def test_a_message_says_what_was_expected_and_what_to_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception) as caught:  # each has a class of its own
        CALLS[name]()
    assert f"{type(caught.value).__name__}: {caught.value}" == MESSAGES[name]


def test_every_message_has_a_call() -> None:
    assert list(MESSAGES) == list(CALLS)


def test_names_have_the_article_that_is_spoken() -> None:
    pattern = re.compile(r"\ba `[aeiouAEIOU]\w*`|\ban `[^aeiouAEIOU]\w*`")
    assert [text for text in messages().values() if pattern.search(text)] == []
    with pytest.raises(InvalidArgument, match="got an `UnbatchedTensor`"):
        td().update(UnbatchedTensor(3))
