"""Write the page "Architectures": plain torch and kd_export on models of other libraries.

    python tools/render_models.py [NAME ...]

Each model of `tests/models/architectures.py` is exported four times, so this takes some minutes;
with names, only these rows are made anew. It needs the packages of the lane `models`.
"""

import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
PAGE = Path("docs/reference/architectures.md")
START, END = "<!-- models: start -->\n", "<!-- models: end -->\n"
TOP = [
    "| model | torch.export | kd .pt2 | torch.onnx | kd .onnx |",
    "| --- | --- | --- | --- | --- |",
]
ROWS = 7
"""The batch that each result is compared at."""


def tried(attempt: Callable[[], bool]) -> str:
    """Return the verdict of one attempt."""
    try:
        return "yes" if attempt() else "wrong"
    except Exception as error:
        print(type(error).__name__, str(error)[:300], file=sys.stderr)
        return "fails"


def row(name: str, folder: Path) -> list[str]:
    """Export one model in four ways, and compare each with the module at another batch."""
    import onnxruntime
    from tests.models.architectures import CASES

    import kd_export

    case = next(case for case in CASES if case.name == name)
    module = case.module().eval()
    net, example = module.module, tuple(case.example.values())
    assert isinstance(net, torch.nn.Module)
    dims = [value for value in case.shapes.values() if isinstance(value, dict)]
    large = tuple(tensor[[0, 1] * 3 + [0]] for tensor in example)
    with torch.no_grad():
        expected = net(*large)[0]

    def close(found: torch.Tensor) -> bool:
        return torch.allclose(found, expected, rtol=1e-3, atol=1e-4)

    def exported() -> torch.export.ExportedProgram:
        named = [dict.fromkeys(one, torch.export.Dim.DYNAMIC) for one in dims]
        return torch.export.export(net, example, dynamic_shapes=(tuple(named),), strict=False)

    def plain_pt2() -> bool:
        return close(exported().module()(*large)[0])

    def plain_onnx() -> bool:
        path = folder / "plain.onnx"
        torch.onnx.export(
            net, example, path, dynamo=True, dynamic_shapes=(tuple(dims),), verbose=False
        )
        session = onnxruntime.InferenceSession(path)
        names = [value.name for value in session.get_inputs()]
        inputs = dict(zip(names, (tensor.numpy() for tensor in large), strict=True))
        return close(torch.from_numpy(session.run(None, inputs)[0]))

    def ours(suffix: str) -> bool:
        path = folder / f"ours.{suffix}"
        kd_export.save(module, path, case.example, dynamic=case.shapes)
        session = kd_export.open(path, trusted=True)
        return close(session.run(dict(zip(case.example, large, strict=True)))[case.parts[0]])

    attempts = [plain_pt2, lambda: ours("pt2"), plain_onnx, lambda: ours("onnx")]
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
    from tests.models.architectures import CASES

    path = ROOT / PAGE
    for name in sys.argv[1:] or [case.name for case in CASES]:
        with tempfile.TemporaryDirectory() as folder:
            cells = row(name, Path(folder))
        print(*cells, flush=True)
        path.write_text(rendered(path.read_text("utf-8"), [cells]), "utf-8")


if __name__ == "__main__":
    main()
