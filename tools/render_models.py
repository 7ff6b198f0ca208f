"""Write the page "Architectures": plain torch and kd_export on models of other libraries.

    python tools/render_models.py [NAME ...]

Each model of `tests/models` is exported four times, so this takes some minutes;
with names, only these rows are made anew. It needs the packages of the lane `models`.
"""

import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tests.models.architectures import Case
    from tests.models.libraries import Library

ROOT = Path(__file__).parent.parent
PAGE = Path("docs/reference/architectures.md")
START, END = "<!-- models: start -->\n", "<!-- models: end -->\n"
TOP = [
    "| model | torch.export | kd .pt2 | torch.onnx | kd .onnx |",
    "| --- | --- | --- | --- | --- |",
]
ROWS = 7
"""The batch that each result is compared at."""


def known() -> "list[Case | Library]":
    """Return all models; to import them needs their libraries."""
    from tests.models.architectures import CASES
    from tests.models.libraries import LIBRARIES

    return [*CASES, *LIBRARIES]


def tried(attempt: Callable[[], bool]) -> str:
    """Return the verdict of one attempt."""
    try:
        return "yes" if attempt() else "wrong"
    except Exception as error:
        print(type(error).__name__, str(error)[:300], file=sys.stderr)
        return "fails"


class Attempts:
    """One model, exported in four ways; each is compared with the module at another batch."""

    def __init__(self, name: str, folder: Path) -> None:
        self.case = next(case for case in known() if case.name == name)
        self.folder = folder
        self.module = self.case.module().eval()
        net = self.module.module
        assert isinstance(net, torch.nn.Module)
        self.net = net
        self.example = tuple(self.case.example.values())
        self.dims = [value for value in self.case.shapes.values() if isinstance(value, dict)]
        self.large = tuple(tensor[[0, 1] * 3 + [0]] for tensor in self.example)
        with torch.no_grad():
            self.expected = net(*self.large)[0]

    def close(self, found: torch.Tensor) -> bool:
        """Decide whether results are those of the module."""
        return torch.allclose(found, self.expected, rtol=1e-3, atol=1e-4)

    def plain_pt2(self) -> bool:
        """Export by torch.export and run the program."""
        dims = tuple(dict.fromkeys(one, torch.export.Dim.DYNAMIC) for one in self.dims)
        program = torch.export.export(self.net, self.example, dynamic_shapes=(dims,), strict=False)
        return self.close(program.module()(*self.large)[0])

    def plain_onnx(self) -> bool:
        """Export by torch.onnx and run the file."""
        import onnxruntime

        path, dims = self.folder / "plain.onnx", (tuple(self.dims),)
        torch.onnx.export(
            self.net, self.example, path, dynamo=True, dynamic_shapes=dims, verbose=False
        )
        session = onnxruntime.InferenceSession(path)
        names = [value.name for value in session.get_inputs()]
        inputs = dict(zip(names, (tensor.numpy() for tensor in self.large), strict=True))
        return self.close(torch.from_numpy(session.run(None, inputs)[0]))

    def ours(self, suffix: str) -> bool:
        """Export by kd_export and run the file."""
        import kd_export

        case, path = self.case, self.folder / f"ours.{suffix}"
        kd_export.save(self.module, path, case.example, dynamic=case.shapes)
        session = kd_export.open(path, trusted=True)
        inputs = dict(zip(case.example, self.large, strict=True))
        return self.close(session.run(inputs)[case.parts[0]])


def row(name: str, folder: Path) -> list[str]:
    """Return the verdicts on one model."""
    of = Attempts(name, folder)
    attempts: list[Callable[[], bool]] = [
        of.plain_pt2,
        partial(of.ours, "pt2"),
        of.plain_onnx,
        partial(of.ours, "onnx"),
    ]
    with torch.no_grad():
        return [name, *(tried(attempt) for attempt in attempts)]


def rendered(page: str, rows: list[list[str]]) -> str:
    """Return the page with new rows among those that it has."""
    head, _, rest = page.partition(START)
    old, _, tail = rest.partition(END)
    known = {found[1]: found[0] for found in re.finditer(r"^\| (\w+) \|.*$", old, re.MULTILINE)}
    known.pop("model", None)
    known |= {cells[0]: f"| {' | '.join(cells)} |" for cells in rows}
    table = "\n".join([*TOP, *(known[name] for name in sorted(known))])
    return f"{head}{START}\n{table}\n\n{END}{tail}"


def main() -> None:
    """Try the models and write the page, row by row."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(ROOT))
    path = ROOT / PAGE
    for name in sys.argv[1:] or [case.name for case in known()]:
        with tempfile.TemporaryDirectory() as folder:
            cells = row(name, Path(folder))
        print(*cells, flush=True)
        path.write_text(rendered(path.read_text("utf-8"), [cells]), "utf-8")


if __name__ == "__main__":
    main()
