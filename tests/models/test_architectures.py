"""What plain torch exports of these architectures, kd_export exports: lane `models`."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import kd_export
from kd_export import NotExportable

pytest.importorskip("transformers", reason="the lane `models` installs it")

from tests.models.architectures import CASES, Case  # it needs transformers
from tests.models.libraries import LIBRARIES, Library

FORMATS = ["pt2", "onnx"]


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("case", [*CASES, *LIBRARIES], ids=lambda case: case.name)
def test_what_torch_exports_we_export(case: Case | Library, suffix: str, tmp_path: Path) -> None:
    module, example = case.module(), case.example
    path = tmp_path / f"model.{suffix}"
    program = kd_export.export(module, example, dynamic=case.shapes)
    if suffix == "onnx" and case.not_onnx:
        with pytest.raises(NotExportable, match=rf"ONNX cannot express `.*{case.not_onnx}.*` in `"):
            program.save(path)
        return
    assert program.save(path, batch_sizes=(1, 2, 7)).ok
    assert kd_export.verify(path, module, batch_sizes=(1, 2, 7), trusted=True).ok
    results = kd_export.open(path, trusted=True).run(example)
    with torch.no_grad():
        eager = module.eval()(**example)
    first = eager if isinstance(eager, Tensor) else eager[0]
    assert first.abs().max() > 1e-4  # so that a difference can be seen
    torch.testing.assert_close(results[case.parts[0]], first, rtol=1e-3, atol=1e-4)
