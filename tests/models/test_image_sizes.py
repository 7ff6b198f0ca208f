"""Networks on images with dynamic height and width, which plain torch exports: lane `models`."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import kd_export
from kd_export import Specialized

pytest.importorskip("transformers", reason="the lane `models` installs it")

from tests.models.architectures import CASES, Case  # it needs transformers
from tests.models.inputs import Shapes
from tests.models.libraries import LIBRARIES, Library

ALL: list[Case | Library] = [*CASES, *LIBRARIES]
BY_NAME = {case.name: case for case in ALL}
FROM_MULTIPLES = ["UNet2DModel", "UNet2DConditionModel"]
ANY = ["AutoencoderKL", "SegformerModel", "ResNetModel", "RegNetModel"]


def free_sizes(name: str) -> Shapes:
    """Name height and width of the image, within a range that all of them serve."""
    case = BY_NAME[name]
    (image,) = (key for key, tensor in case.example.items() if tensor.ndim == 4)
    shapes = dict(case.shapes)
    shapes[image] = {0: "batch", 2: "height", 3: "width"}
    return {**shapes, "height": (1, 128), "width": (1, 128)}


def larger(example: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the example with an image that is higher and wider, and not square."""
    return {
        key: torch.randn(*x.shape[:2], 2 * x.shape[2], 3 * x.shape[3]) if x.ndim == 4 else x
        for key, x in example.items()
    }


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
@pytest.mark.parametrize("name", [*FROM_MULTIPLES, *ANY])
def test_images_of_all_sizes_that_the_module_serves(name: str, suffix: str, tmp_path: Path) -> None:
    case = BY_NAME[name]
    module, path = case.module(), tmp_path / f"model.{suffix}"
    asked = free_sizes(name)
    report = kd_export.save(module, path, case.example, dynamic=asked, sizes="as allowed")
    assert report.ok
    schema = kd_export.inspect(path)
    assert {"batch", "height", "width"} == set(schema.axes)
    given = larger(case.example)
    results = kd_export.open(path, trusted=True).run(given)
    with torch.no_grad():
        eager = module.eval()(**given)
    first = eager if isinstance(eager, Tensor) else eager[0]
    torch.testing.assert_close(results[case.parts[0]], first, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", FROM_MULTIPLES)
def test_sizes_that_the_module_does_not_serve_are_refused_with_those_it_does(name: str) -> None:
    case = BY_NAME[name]
    with pytest.raises(Specialized, match="2\\*height"):
        kd_export.export(case.module(), case.example, dynamic=free_sizes(name))
