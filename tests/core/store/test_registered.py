"""Classes and types are found by registered names, and by nothing else."""

from enum import Enum
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kd_core import (
    FormatError,
    NonTensorData,
    TensorClass,
    TensorDict,
    TensorDictBase,
    TypedTensorDict,
    store,
)
from kd_core import _registry as registry


@pytest.fixture(autouse=True)
def own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TYPES", "CLASSES", "_TYPE_NAMES", "_CLASS_NAMES"):
        monkeypatch.setattr(registry, name, {})
    monkeypatch.setattr("kd_core._store.codec.CLASSES", registry.CLASSES)
    monkeypatch.setattr("kd_core._store.manifest.TYPES", registry.TYPES)


class Point(TensorClass):
    x: Tensor
    name: str = "p"


class Open(TypedTensorDict):
    x: Tensor


class Colour(Enum):
    RED = "red"


def test_a_class_comes_back_as_itself(tmp_path: Path) -> None:
    for cls in (Point, Open):
        store.register_class(cls, cls.__name__)
        store.register_class(cls, cls.__name__)  # again changes nothing
    td = TensorDict(
        {"p": Point(torch.ones(2, 3), batch_size=[2]), "o": Open(x=torch.zeros(2), batch_size=[2])},
        [2],
    )
    td.save(tmp_path / "td")
    loaded = TensorDict.load(tmp_path / "td")
    point: object = loaded.get("p")
    assert isinstance(point, Point)
    assert point.name == "p"
    assert isinstance(loaded.get("o"), Open)
    some: object = TensorDict.load(tmp_path / "td", keys=[("p", "x")]).get("p")
    assert type(some) is TensorDict  # without one of its fields
    Point(torch.ones(1, 3), batch_size=[1]).append_to(tmp_path / "points")
    Point(torch.ones(1, 3), batch_size=[1]).append_to(tmp_path / "points")
    assert type(TensorDictBase.load(tmp_path / "points")) is Point


def test_a_class_needs_no_name(tmp_path: Path) -> None:
    class Inner(TensorClass):
        points: Tensor

    class Kind(TensorDict):
        pass

    td = TensorDict({"p": Point(torch.ones(2)), "i": Inner(torch.ones(1)), "k": Kind(a=1)})
    td.save(tmp_path / "td")
    loaded = TensorDict.load(tmp_path / "td")
    again = TensorDict.from_buffers(*td.to_buffers())
    for each in (loaded, again, td.memmap(tmp_path / "arena")):
        kinds = [type(each.get(key)) for key in ("p", "i", "k")]
        assert kinds == [Point, Inner, Kind]


def test_a_class_that_is_not_known_is_a_plain_container(tmp_path: Path) -> None:
    store.register_class(Point, "point")
    Point(torch.ones(2)).save(tmp_path / "td")
    registry._CLASS_NAMES.clear()
    with pytest.warns(UserWarning, match="the class 'point' of a saved container is not defined"):
        loaded = TensorDict.load(tmp_path / "td")
    assert type(loaded) is TensorDict
    assert loaded["x"].tolist() == [1, 1]
    assert store.check(tmp_path / "td").lines[0] == "point (version 1) []"


def test_a_class_with_other_fields_is_a_plain_container(tmp_path: Path) -> None:
    def made(**fields: object) -> type[TensorClass]:
        return type("Made", (TensorClass,), {"__annotations__": fields, "__module__": __name__})

    old = made(y=Tensor)
    TensorDict({"m": old(torch.ones(2))}).save(tmp_path / "td")  # type: ignore[arg-type, call-arg]  # wrong for the type checker alone
    assert type(TensorDict.load(tmp_path / "td").get("m")) is old  # type: ignore[comparison-overlap]  # types say less than the run
    new = made(z=Tensor)  # type: ignore[unreachable]  # types say less than the run
    assert new is not old
    with pytest.warns(
        UserWarning, match=r"\.Made' of a saved container is not defined here, or has"
    ):
        loaded = TensorDict.load(tmp_path / "td")
    assert loaded["m", "y"].tolist() == [1, 1]


def test_old_versions_of_a_class_are_converted(tmp_path: Path) -> None:
    class Old(TensorClass):
        y: Tensor

    store.register_class(Old, "point")
    Old(torch.ones(2)).save(tmp_path / "td")
    registry._CLASS_NAMES.clear()
    store.register_class(Point, "point")
    with pytest.raises(FormatError, match="the entries `y` are not those of the class `Point`"):
        TensorDict.load(tmp_path / "td")
    registry._CLASS_NAMES.clear()
    store.register_class(Point, "point", version=2, build=lambda td: Point(x=td["y"]))
    assert type(TensorDictBase.load(tmp_path / "td")) is Point
    Point(torch.ones(2)).save(tmp_path / "td")
    registry._CLASS_NAMES.clear()
    store.register_class(Old, "point")
    with pytest.raises(FormatError, match="version 2 of the class 'point' is not known"):
        TensorDict.load(tmp_path / "td")


def test_types_come_back_as_themselves(tmp_path: Path) -> None:
    store.register_type(Colour, "colour")
    store.register_type(complex, "complex", encode=lambda z: [z.real, z.imag], decode=_complex)
    td = TensorDict({"c": Colour.RED, "rows": [[Colour.RED, 2j], []]}, [])
    td.save(tmp_path / "td")
    assert TensorDict.load(tmp_path / "td").get("c") == NonTensorData(Colour.RED)
    assert TensorDict.load(tmp_path / "td")["rows"] == [[Colour.RED, 2j], []]
    registry._TYPE_NAMES.clear()
    with pytest.raises(FormatError, match="the type 'colour' is not registered"):
        TensorDict.load(tmp_path / "td")
    store.register_type(Colour, "colour", encode=str, decode=lambda text: Colour[str(text) + "?"])
    with pytest.raises(FormatError, match="'RED' is not a valid value of the registered type"):
        TensorDict.load(tmp_path / "td", keys=["c"])


def _complex(parts: object) -> complex:
    assert isinstance(parts, list)
    return complex(*parts)


def test_names_are_not_taken_twice() -> None:
    store.register_class(Point, "x")
    with pytest.raises(ValueError, match="the name 'x' is registered for `Point` already"):
        store.register_class(Open, "x")
    with pytest.raises(TypeError, match="`cls` must be a class of containers"):
        store.register_class(Point(torch.ones(2)), "y")  # type: ignore[type-var]  # not a class
    with pytest.raises(TypeError, match="`encode` and `decode` must both be given"):
        store.register_type(complex, "complex")
