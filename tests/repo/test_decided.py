"""Names that are left out on purpose: none is offered, and each raises the error of its row."""

import importlib
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests import children
from tests.repo.tree import IMPORT_NAMES, ROOT
from tools.render_decided import MOST, PAGE, SOURCE, is_stale, table

from kd_core import (
    NonTensorData,
    NotOffered,
    NotOfferedImport,
    TensorDict,
    lazy_stack,
)
from kd_core._naming import decided

PACKAGES = [name for name in IMPORT_NAMES if name != "kd_export"]
PUBLIC = [*IMPORT_NAMES, "kd_core.testing", "kd_core.extending", "kd_nn.distributions", "kd_nn.fx"]
DECIDED = decided()
# What an attribute of each class is read from.
INSTANCES: dict[str, Callable[[], object]] = {
    "TensorDict": TensorDict,
    "LazyStackedTensorDict": lambda: lazy_stack([TensorDict({"a": torch.zeros(2)})]),
    "NonTensorData": lambda: NonTensorData("word"),
}


def rows(modules: bool) -> Iterator[tuple[str, str, str]]:
    """Yield area, name and reason of the names of modules, or of the attributes of classes."""
    for area, held in DECIDED.items():
        for name, row in held.items():
            is_protocol = name.startswith("__")  # Python asks for those, and takes any answer
            of_module = area.startswith("tensordict")
            if of_module == modules and "(" not in name and not is_protocol:
                yield area, name, row["reason"]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_left_out_name_of_a_module_says_why(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"reason": "It fails.", "instead": "Write `other`."}
    monkeypatch.setitem(decided(), "tensordict", {"odd_name": row})
    with pytest.raises(NotOfferedImport, match=r"left out on purpose. It fails. Write `other`"):
        exec(f"from {package} import odd_name")
    with pytest.raises(NotOffered, match="left out on purpose"):
        importlib.import_module(package).odd_name  # noqa: B018  # the error is the promise


@pytest.mark.parametrize(("area", "name", "reason"), list(rows(modules=False)))
def test_a_left_out_attribute_says_why(area: str, name: str, reason: str) -> None:
    instance = INSTANCES[area]()
    for owner in (instance, type(instance)):
        with pytest.raises(AttributeError, match="left out on purpose") as found:
            getattr(owner, name)
        assert reason in str(found.value)


@pytest.mark.parametrize("area", [area for area in INSTANCES if not area.startswith("NonTensor")])
def test_no_attribute_pays_for_those_that_are_left_out(area: str) -> None:
    assert not hasattr(type(INSTANCES[area]()), "__getattr__")  # with one, all are read slowly


def test_no_left_out_name_is_offered() -> None:
    offered = {name for package in PUBLIC for name in dir(importlib.import_module(package))}
    assert {name for _, name, _ in rows(modules=True)} & offered == set()


def test_every_name_says_what_to_write() -> None:
    for held in DECIDED.values():
        for row in held.values():
            assert row["reason"].endswith(".")
            assert row["instead"].endswith(".")


@pytest.mark.filterwarnings("ignore:torch.quantize_per")
def test_what_is_to_be_written_for_a_quantised_cast_runs() -> None:
    (code,) = re.findall("`(td.apply.*)`", DECIDED["TensorDict"]["qint8"]["instead"])
    td = TensorDict({"a": torch.ones(2)})
    made = eval(code, {"td": td, "torch": torch, "scale": 0.1, "zero_point": 0})
    assert made["a"].dtype is torch.qint8


def test_the_page_says_what_the_list_says() -> None:
    assert not is_stale(ROOT)


def test_a_change_of_the_list_is_seen(tmp_path: Path) -> None:
    for name in (SOURCE, PAGE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    assert not is_stale(tmp_path)
    path = tmp_path / SOURCE
    path.write_text(path.read_text("utf-8").replace("They raise", "They do not"), "utf-8")
    assert is_stale(tmp_path)


@pytest.mark.parametrize("row", ["rule = 4", "rule = 1\nhere = 'x'", "rule = 1\nthere = 'x'"])
def test_a_row_without_its_texts_is_refused(row: str) -> None:
    with pytest.raises(SystemExit, match=r"expected `rule` \(1, 2 or 3\), `there` and `here`"):
        table(f"[[difference]]\n{row}\n")


def test_a_long_list_is_refused() -> None:
    row = "[[difference]]\nrule = 1\nthere = 'a'\nhere = 'b'\n"
    assert table(row * MOST).count("| a | b |") == MOST
    with pytest.raises(SystemExit, match="at most 40 differences, got 41"):
        table(row * (MOST + 1))


def test_an_import_reads_no_list() -> None:
    program = "import kd_core, sys; print('tomllib' in sys.modules)"
    assert children.check_output("-c", program) == "False\n"


def test_an_error_for_an_unknown_name_is_that_of_python() -> None:
    with pytest.raises(
        AttributeError, match="'TensorDict' object has no attribute 'itemz'"
    ) as found:
        TensorDict().itemz  # type: ignore[attr-defined]  # noqa: B018  # the error is the promise
    assert not isinstance(found.value, NotOffered)
    assert found.value.name == "itemz"
    with pytest.raises(ImportError, match="cannot import name 'Wombat' from 'kd_core'"):
        exec("from kd_core import Wombat")
