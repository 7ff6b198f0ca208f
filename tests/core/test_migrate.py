"""Imports of a program are rewritten to the packages of kd, with a diff, and by hand where not."""

import builtins
import textwrap
from pathlib import Path

import pytest

from kd_core import MissingDependency
from kd_core.migrate import main, migrate


def migrated(program: str) -> str:
    return migrate(textwrap.dedent(program))[0]


def test_names_go_to_the_package_that_has_them() -> None:
    program = """
        import torch
        from tensordict import TensorDict, NestedKey as Key  # two
        from tensordict.utils import expand_as_right
        from other.tensordict import TensorDict as Other
        """
    assert migrated(program) == textwrap.dedent(
        """
        import torch
        from kd_core import TensorDict, NestedKey as Key  # two
        from kd_core import expand_as_right
        from other.tensordict import TensorDict as Other
        """
    )


def test_one_import_becomes_one_per_package() -> None:
    program = """
        from tensordict.nn import (
            InteractionType,
            TensorDictModule as Module,
        )
        """
    assert migrated(program) == textwrap.dedent(
        """
        from kd_nn import TensorDictModule as Module
        from kd_probabilistic import InteractionType
        """
    )


def test_uses_of_the_module_are_rewritten() -> None:
    program = """
        import os, tensordict
        td = tensordict.TensorDict(a=1)
        module = tensordict.nn.TensorDictSequential()
        """
    assert migrated(program) == textwrap.dedent(
        """
        import os, kd_core, kd_nn
        td = kd_core.TensorDict(a=1)
        module = kd_nn.TensorDictSequential()
        """
    )


def test_what_kd_lacks_stays_and_is_listed() -> None:
    program = "from tensordict import TensorDict, no_such\nfrom tensordict import *\n"
    text, notes = migrate(program, Path("a.py"))
    assert text.splitlines() == [
        "from kd_core import TensorDict",
        "from tensordict import no_such",
        "from tensordict import *",
    ]
    assert [str(note) for note in notes] == [
        "a.py:1: `no_such`: kd has no such name",
        "a.py:2: `from tensordict import *`: name what is used",
    ]


def test_the_command_shows_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text("from tensordict import TensorDict\n")
    (tmp_path / "other.py").write_text("import torch\n")
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "-from tensordict import TensorDict\n+from kd_core import TensorDict\n" in shown
    assert "1 files to change (give `--write`), 0 lines to look at" in shown
    assert program.read_text() == "from tensordict import TensorDict\n"
    assert main([str(tmp_path), "--write"]) == 0
    assert program.read_text() == "from kd_core import TensorDict\n"
    assert main([str(tmp_path / "absent")]) == 2


def test_without_libcst_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    given = builtins.__import__

    def without(name: str, *others: object, **further: object) -> object:
        if name.split(".")[0] == "libcst":
            raise ImportError(name)
        return given(name, *others, **further)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependency, match="Run `pip install libcst`"):
        migrate("")
