"""Programs that import tensordict run on kd, in child processes too, and say what they lack."""

import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
from tests import children

from kd_core import TensorDict, drop_in


def run(folder: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(program), encoding="utf-8")
    options = options or ("-m", "kd_core.drop_in")
    return children.run("-W", "ignore", *options, path, "x", cwd=folder)


def printed(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_a_folder_and_an_archive_are_programs(tmp_path: Path) -> None:
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "part.py").write_text("from tensordict import TensorDict")
    (folder / "__main__.py").write_text(
        "import sys, part\nprint(__name__, part.TensorDict.__module__, sys.argv[1:])"
    )
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", folder)
    for program in (str(folder), archive):
        result = children.run("-m", "kd_core.drop_in", program, "word")
        assert printed(result) == ["__main__ kd_core ['word']"]


def test_a_program_gets_kd_and_its_arguments(tmp_path: Path) -> None:
    program = """
        import sys
        import tensordict, tensordict.utils, tensordict.base
        from tensordict import TensorDict
        from tensordict.tensordict import TensorDict as Same
        from tensordict.memmap import MemoryMappedTensor
        from tensordict.tensorclass import NonTensorData
        import kd_core
        print(TensorDict is Same is kd_core.TensorDict, sys.argv[1], __name__)
        print(tensordict.memmap is kd_core.memmap, tensordict.tensorclass is kd_core.tensorclass)
        print(tensordict.__version__, tensordict.utils.NestedKey is kd_core.NestedKey)
        """
    assert printed(run(tmp_path, program)) == ["True x __main__", "True True", "0.15.3 True"]


def test_a_program_runs_as_python_runs_it_in_few_frames(tmp_path: Path) -> None:
    """torch writes down the whole stack whenever it is seeded."""
    program = """
        import sys

        def annotated(x: 1 + 1): ...

        above = sys._getframe().f_back.f_code
        print(above.co_name, above.co_filename.endswith("__main__.py"))
        print(annotated.__annotations__, sys.modules["__main__"].annotated is annotated)
        """
    assert printed(run(tmp_path, program)) == ["<module> True", "{'x': 2} True"]


def test_an_import_in_a_function_calls_nothing_of_kd(tmp_path: Path) -> None:
    program = """
        import sys

        def step():
            from tensordict.base import TensorDictBase
            from tensordict import TensorDict
            from tensordict.utils import unravel_key

        called = []
        step()
        sys.setprofile(lambda frame, event, _: event == "call" and called.append(frame.f_code))
        step()
        sys.setprofile(None)
        print([code.co_qualname for code in called if "kd_core" in code.co_filename])
        """
    assert printed(run(tmp_path, program)) == ["[]"]


def test_a_module_runs_by_name(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text("import sys, tensordict; print(sys.argv[1:], __name__)")
    result = children.run("-m", "kd_core.drop_in", "-m", "named", "--flag", cwd=tmp_path)
    assert printed(result) == ["['--flag'] __main__"]


def test_processes_that_a_program_starts_get_kd_too(tmp_path: Path) -> None:
    program = """
        import multiprocessing, subprocess, sys
        from tensordict import TensorDict

        def work(queue, td):
            import kd_core
            queue.put((td["a"].tolist(), type(td) is kd_core.TensorDict is TensorDict))

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=work, args=(queue, TensorDict(a=[1, 2])))
            process.start()
            print(*queue.get())
            process.join()
            code = "import tensordict.base as b, kd_core as k; print(b.TensorDict is k.TensorDict)"
            print(subprocess.run([sys.executable, "-c", code], capture_output=True).stdout.decode())
        """
    assert printed(run(tmp_path, program))[:2] == ["[1, 2] True", "True"]


def test_directories_are_those_of_tensordict(tmp_path: Path) -> None:
    program = """
        import os, torch
        from tensordict import TensorDict

        TensorDict(a=torch.ones(2)).memmap("td.pt")
        print(sorted(os.listdir("td.pt")), TensorDict.load_memmap("td.pt")["a"].tolist())
        """
    assert printed(run(tmp_path, program)) == ["['a.memmap', 'meta.json'] [1.0, 1.0]"]


def test_install_serves_the_rest_of_a_program(tmp_path: Path) -> None:
    program = """
        from kd_core import drop_in
        assert not drop_in.is_installed()
        drop_in.install()
        drop_in.install()
        import tensordict, kd_core
        print(tensordict.TensorDict is kd_core.TensorDict, drop_in.is_installed())
        """
    assert printed(run(tmp_path, program, "-W", "ignore")) == ["True True"]


@pytest.mark.parametrize("before", [None, "", "here"])
def test_install_adds_its_folder_to_the_path_of_children(
    before: str | None, tmp_path: Path
) -> None:
    """An empty part of `PYTHONPATH` would be the folder that a child starts in."""
    program = f"""
        import os
        from kd_core import drop_in
        os.environ.pop("PYTHONPATH", None)
        if {before!r} is not None:
            os.environ["PYTHONPATH"] = {before!r}
        drop_in.install()
        first, *rest = os.environ["PYTHONPATH"].split(os.pathsep)
        print(os.path.isdir(os.path.join(first, "tensordict")), rest)
        """
    rest = [before] if before else []
    assert printed(run(tmp_path, program, "-W", "ignore")) == [f"True {rest}"]


def test_install_after_the_library_is_refused(tmp_path: Path) -> None:
    program = """
        import sys, types
        sys.modules["tensordict"] = types.ModuleType("tensordict")
        from kd_core import drop_in
        drop_in.install()
        """
    result = run(tmp_path, program, "-W", "ignore")
    assert "`tensordict` is imported already. Call `kd_core.drop_in.install()`" in result.stderr


def test_the_report_counts_what_is_missing(tmp_path: Path) -> None:
    program = """
        import subprocess, sys, tensordict
        for name in ("no_such", "no_such", "other"):
            print(hasattr(tensordict, name))
        try:
            import tensordict.nowhere
        except ModuleNotFoundError:
            print("no module")
        subprocess.run([sys.executable, "-c", "import tensordict as t; hasattr(t, 'no_such')"])
        """
    result = run(tmp_path, program, "-m", "kd_core.drop_in", "--report")
    assert printed(result) == ["False", "False", "False", "no module"]
    assert result.stderr.splitlines() == [
        "kd: 3 names that the program asked for are missing:",
        "  tensordict.no_such  3",
        "  tensordict.other    1",
        "  tensordict.nowhere  1",
    ]


def test_the_report_lists_attributes_that_are_missing(tmp_path: Path) -> None:
    program = """
        import torch
        from tensordict import LazyStackedTensorDict, NonTensorData, TensorClass, TensorDict

        class Sample(TensorClass):
            a: torch.Tensor

        class Mine(TensorDict):
            @property
            def broken(self):
                raise AttributeError("of the program")

        td = TensorDict(a=[0.0])
        for value in (
            td, td, Mine(), Sample(a=[1]), LazyStackedTensorDict(td, td), NonTensorData("x"),
            torch.nn.Linear(1, 1), td["a"],
        ):
            print(hasattr(value, "no_such"), hasattr(value, "__no_such__"))
        hasattr(Mine(), "broken"), hasattr(td, "_also"), td["a"].shape
        """
    result = run(tmp_path, program, "-m", "kd_core.drop_in", "--report")
    assert printed(result) == ["False False"] * 8
    assert sorted(result.stderr.splitlines()) == [
        "  LazyStackedTensorDict.no_such  1",
        "  NonTensorData.no_such          1",
        "  TensorClass.no_such            1",
        "  TensorDict._also               1",
        "  TensorDict.no_such             3",
        "kd: 5 names that the program asked for are missing:",
    ]


def test_a_name_of_a_package_that_is_not_installed_says_what_to_install(tmp_path: Path) -> None:
    program = """
        import sys
        from importlib.machinery import PathFinder

        class WithoutTheOthers(PathFinder):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                known = name.partition(".")[0] in ("kd_nn", "kd_probabilistic")
                return None if known else super().find_spec(name, path, target)

        sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTheOthers
        import tensordict, tensordict.nn

        for line in (
            "from tensordict.nn import TensorDictModule",
            "from tensordict import TensorDictParams",
            "from tensordict.nn.utils import expln",
            "from tensordict.prototype import symbolic_trace",
            "tensordict.nn.InteractionType",
        ):
            try:
                exec(line)
            except ImportError as error:
                print(type(error).__name__, error)
        print(hasattr(tensordict, "no_such"), hasattr(tensordict.nn, "no_such"))
        """
    text = (
        "MissingDependency `{}` of `tensordict{}` is in `{}`, which is not installed. "
        "Run `pip install {}`."
    )
    result = run(tmp_path, program, "-m", "kd_core.drop_in", "--report")
    assert printed(result) == [
        text.format("TensorDictModule", ".nn", "kd_nn", "kd-nn"),
        text.format("TensorDictParams", "", "kd_nn", "kd-nn"),
        text.format("expln", ".nn.utils", "kd_nn", "kd-nn"),
        text.format("symbolic_trace", ".prototype", "kd_nn", "kd-nn"),
        text.format("InteractionType", ".nn", "kd_probabilistic", "kd-probabilistic"),
        "False False",
    ]
    assert result.stderr.splitlines() == [
        "kd: 2 names that the program asked for are missing:",
        "  tensordict.no_such     1",
        "  tensordict.nn.no_such  1",
    ]


def test_nothing_is_missing(tmp_path: Path) -> None:
    result = run(tmp_path, "import tensordict", "-m", "kd_core.drop_in", "--report")
    assert result.stderr == "kd: nothing that the program asked for is missing.\n"


def test_a_suite_runs_on_kd(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import tensordict\n")
    (tmp_path / "test_it.py").write_text(
        "import kd_core, tensordict\n"
        "def test_it():\n"
        "    assert tensordict.TensorDict is kd_core.TensorDict\n"
        "    assert not hasattr(tensordict, 'no_such')\n"
    )
    words = ["-q", "-p", "kd_core.drop_in", "--kd-report", "."]
    result = children.run("-m", "pytest", *words, cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    assert "  tensordict.no_such " in result.stdout


def test_this_process_is_left_alone() -> None:
    assert not drop_in.is_installed()
    assert drop_in.missing() == {}


HELPERS = """
    from importlib import import_module

    import torch
    from tensordict import TensorDict, LazyStackedTensorDict, lazy_stack, TensorClass, NonTensorData
    from tensordict.utils import (
        _zip_strict, _getitem_batch_size, _maybe_correct_neg_dim, _unravel_key_to_tuple,
        _is_non_tensor, is_seq_of_nested_key,
    )
    from tensordict.base import _is_leaf_nontensor, _default_is_leaf

    def rows_of_a_mask():
        td = TensorDict(a=[0, 1, 0], batch_size=[3])
        rows = td._get_sub_tensordict(torch.tensor([True, False, True]))
        rows.fill_("a", 9)
        rows["b"] = torch.tensor([5, 5])
        return td["a"].tolist(), td["b"].tolist()
"""


# Run in one process: what libraries call, and what comes.
CALLS = [
    ("list(_zip_strict([1], [2]))", "[(1, 2)]"),
    ("tuple(_getitem_batch_size(torch.Size([4, 3]), (slice(1), None)))", "(1, 1, 3)"),
    ("tuple(_getitem_batch_size((4, 3), torch.tensor([0, 1])))", "(2, 3)"),
    ("_maybe_correct_neg_dim(-1, torch.Size([4, 3]))", "1"),
    ("_unravel_key_to_tuple(('a', ('b',)))", "('a', 'b')"),
    ("import_module('tensordict._C').unravel_keys(('a', ('b',)))", "('a', 'b')"),
    ("_is_non_tensor(NonTensorData), _is_non_tensor(TensorDict)", "(True, False)"),
    ("[is_seq_of_nested_key(k) for k in (['a', ('b', 'c')], [1], 'a', None)]",
     "[True, False, True, False]"),
    ("_is_leaf_nontensor(torch.Tensor), _default_is_leaf(TensorDict)", "(True, False)"),
    ("_default_is_leaf(int), _is_leaf_nontensor(type(None)), _is_leaf_nontensor(TensorDict)",
     "(True, True, False)"),
    ("[import_module(f'tensordict.{n}').T.__bound__.__name__ for n in ('base', 'utils')]",
     "['TensorDictBase', 'TensorDictBase']"),
    ("[import_module(f'tensordict.{n}').TensorDict is TensorDict for n in ('testing', 'tabular')]",
     "[True, True]"),
    ("[hasattr(import_module(f'tensordict.{n}'), k) for n in ('_td', 'base', 'utils')"
     " for k in ('CompatibleType', 'DeviceType', 'IndexType')]", str([True] * 9)),
    ("isinstance('cpu', import_module('tensordict.utils').DeviceType)", "True"),
    ("[import_module('tensordict.base')._is_tensor_collection(k)"
     " for k in (TensorDict, NonTensorData, torch.Tensor)]", "[True, True, False]"),
    ("import_module('tensordict.utils').prod(torch.Size([2, 3]))", "6"),
    ("import_module('tensordict.tensorclass')._getitem(TensorDict(a=1), 'a')", "tensor(1)"),
    ("import_module('tensordict.tensorclass')._eq(TensorDict(a=1), TensorDict(a=1))['a']",
     "tensor(True)"),
    ("[k in TensorDict(a=1, n={'b': 1}).keys()"
     " for k in ('a', ('a',), (('n',),), ('n', 'b'), 'b', 1)]",
     "[True, True, True, False, False, False]"),
    ("[k in lazy_stack([TensorDict(n={'b': {'c': 1}})]).keys()"
     " for k in ('n', ('n',), ('n', 'b'), ('n', 'b', 'c'))]", "[True, True, True, False]"),
    ("list(k := TensorDict(b=1, a=2).keys()), [*reversed(k)], len(k), k & {'a'}, k == {'a', 'b'}",
     "(['b', 'a'], ['a', 'b'], 2, {'a'}, True)"),
    ("TensorDict(a=1)._get_str('a', None)", "tensor(1)"),
    ("TensorDict(a=1, n={'b': 1}).update_({'a': 2, 'z': 2, 'n': {'b': 2, 'z': 'w'}}).to_dict()",
     "{'a': tensor(2), 'n': {'b': tensor(2)}}"),
    ("TensorDict(n={'b': 1}).update_(TensorDict(n={'b': 2, 'z': 'w'}, z=TensorDict()))['n', 'b']",
     "tensor(2)"),
    ("TensorDict(a=1)._get_str('b', None)", "None"),
    ("TensorDict()._set_str('a', torch.ones(()), inplace=False, validated=True)['a']",
     "tensor(1.)"),
    ("TensorDict(a=1)._fast_apply(lambda x: x + 1, num_threads=0)['a']", "tensor(2)"),
    ("list(TensorDict(a=1)._fast_apply(lambda n, x: x if n == 'b' else None, named=True).keys())",
     "[]"),
    ("TensorDict._new_unsafe({'a': torch.ones(2)}, torch.Size([2])).shape",
     "torch.Size([2])"),
    ("(c := type('C', (TensorClass,), {'__annotations__': {'a': int}})(a=3))._tensordict.get('a')",
     "tensor(3)"),
    ("lazy_stack([c, c])._tensordict.get('a')", "tensor([3, 3])"),
    ("type(lazy_stack([c, c])._from_tensordict(c)) is type(c._from_tensordict(c))", "True"),
    ("TensorDict(a=[1], batch_size=[1])._has_names()", "False"),
    ("TensorDict(a=[1], batch_size=[1])._maybe_names()", "None"),
    ("TensorDict(a=[1], batch_size=[1], names=['n'])._maybe_names()", "['n']"),
    ("lazy_stack([TensorDict(a=1, s='x', b={'c': 2})] * 2)._items_list(True, True)[0]",
     "[('0', 'a'), ('0', 'b', 'c'), ('1', 'a'), ('1', 'b', 'c')]"),
    ("lazy_stack([TensorDict(a=1, s='x')] * 2)._values_list(True, True, collapse=True)",
     "[tensor([1, 1])]"),
    ("TensorDict(a=1, b=2)._values_list(sorting_keys=['b', 'a'])", "[tensor(2), tensor(1)]"),
    ("import_module('tensordict.utils').convert_ellipsis_to_idx((..., 0), [2, 3])",
     "(slice(None, None, None), 0)"),
    ("[import_module('tensordict.utils').KEY_SEPARATOR]", "['.']"),
    ("rows_of_a_mask()", "([9, 1, 9], [5, 0, 5])"),
    ("list(TensorDict(a=1, b=2)._select('b', set_shared=False)._clone().keys())", "['b']"),
    ("list(TensorDict(a=1, b=2)._exclude('b').keys())", "['a']"),
    ("TensorDict(a=[1], batch_size=[1], names=['t'])._has_names()", "True"),
    ("lazy_stack([TensorDict(a=1), TensorDict(b=1)])._has_exclusive_keys", "True"),
    ("lazy_stack([TensorDict(a=1), TensorDict(a=1)])._has_exclusive_keys", "False"),
    ("TensorDict(a=[0, 0], batch_size=[2])._stack_onto_([TensorDict(a=1)] * 2, 0)['a']",
     "tensor([1, 1])"),
]  # fmt: skip


def test_private_names_that_libraries_use(tmp_path: Path) -> None:
    lines = [f"print(({call}))" for call, _ in CALLS]
    program = "\n".join([textwrap.dedent(HELPERS), *lines])
    got = printed(run(tmp_path, program))
    assert [*zip((call for call, _ in CALLS), got, strict=True)] == CALLS


def test_an_instance_takes_another_container_and_is_copied_as_before(tmp_path: Path) -> None:
    program = """
        import copy, io, pickle, torch
        from tensordict import TensorClass, TensorDict, TypedTensorDict, lazy_stack

        class Row(TensorClass):
            a: torch.Tensor
            s: str = "w"

        class Typed(TypedTensorDict):
            a: torch.Tensor

        row = Row(a=torch.ones(1), batch_size=[1])
        same = row
        both = torch.cat([row, Row(a=torch.zeros(2), batch_size=[2])])
        row.__dict__["_tensordict"] = both._tensordict
        print(same.a.tolist(), tuple(same.batch_size), same.s, list(vars(row)))
        typed = Typed(a=torch.ones(1), batch_size=[1])
        typed.note = 3
        stack = lazy_stack([row, row])
        for one in (row, typed, TensorDict(r=row, batch_size=[3]), stack):
            stream = io.BytesIO()
            torch.save(one, stream)
            stream.seek(0)
            copies = [
                pickle.loads(pickle.dumps(one)), pickle.loads(pickle.dumps(one, 2)),
                copy.copy(one), copy.deepcopy(one), torch.load(stream, weights_only=False),
            ]
            print(type(one).__name__, all(bool((each == one).all()) for each in copies))
        print(copies[0][0].s, pickle.loads(pickle.dumps(typed)).note, vars(typed))
        rows = lazy_stack([Row(a=torch.ones(2)), Row(a=torch.ones(3))])
        column = rows.unsqueeze(0)
        column.__dict__["_tensordict"] = lazy_stack([*rows.unbind(0), Row(a=torch.ones(1))])
        print(tuple(column.batch_size), [len(one.a) for one in column], tuple(rows.batch_size))
        pair = Row(a=torch.zeros(1, 2), batch_size=[1])
        pair.__dict__["_tensordict"] = lazy_stack([Row(a=torch.ones(2), s=s) for s in "ab"])
        print(type(pair).__name__, tuple(pair.batch_size), pair.s, pair.a.tolist())
        try:
            row.__dict__["_tensordict"] = TensorDict(b=torch.ones(2), batch_size=[2])
        except (AttributeError, KeyError):
            print(tuple(row.batch_size), row.a.tolist())
        other = TensorDict(a=torch.ones(2), batch_size=[2], device="cpu", names=["t"]).lock_()
        row.__dict__.update(_tensordict=other)
        row.s = "v"
        print(row.a.tolist(), row.s, row.device, row.names, list(other.keys()))
        row.__dict__["_tensordict"] = stack[:1]
        print(row.a.tolist(), row.s, tuple(row.batch_size))
    """
    assert printed(run(tmp_path, textwrap.dedent(program))) == [
        "[1.0, 0.0, 0.0] (3,) w ['_tensordict']",
        "Row True",
        "Typed True",
        "TensorDict True",
        "LazyStackedRow True",
        "w 3 {'note': 3}",
        "(3,) [2, 3, 1] (2,)",
        "Row (2,) ['a', 'b'] [[1.0, 1.0], [1.0, 1.0]]",
        "(3,) [1.0, 0.0, 0.0]",
        "[1.0, 1.0] v cpu ['t'] ['a']",
        "[[1.0, 1.0]] [['v', 'v']] (1, 2)",
    ]


def test_programs_without_the_drop_in_have_no_private_names() -> None:
    for name in ("_get_str", "_set_str", "_fast_apply", "_apply_nest", "_has_names"):
        assert not hasattr(TensorDict, name)
