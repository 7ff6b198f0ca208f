"""Rows of different lengths go to other formats and come back as jagged entries."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from kd_core import InvalidValue, PersistentTensorDict, TensorDict, TensorDictBase, lazy_stack

LENGTHS = (1, 3, 0, 2)


class Format(NamedTuple):
    """How a container is written and read, and the package that this needs."""

    name: str
    there_and_back: Callable[[TensorDictBase, Path], TensorDictBase]
    needs: str = "torch"


def by_json(td: TensorDictBase, path: Path) -> TensorDictBase:
    td.to_json(path)
    return TensorDict.from_json(path)


def by_parquet(td: TensorDictBase, path: Path) -> TensorDictBase:
    td.to_parquet(path)
    return TensorDict.from_parquet(path)


def by_h5(td: TensorDictBase, path: Path) -> TensorDictBase:
    td.to_h5(path)
    return PersistentTensorDict.from_h5(path).to_tensordict()


def by_zarr(td: TensorDictBase, path: Path) -> TensorDictBase:
    td.to_zarr(path)
    return TensorDict.from_zarr(path)


FORMATS = (
    Format("json", by_json),
    Format("pandas", lambda td, _: TensorDict.from_pandas(td.to_pandas()), "pandas"),
    Format("arrow", lambda td, _: TensorDict.from_arrow(td.to_arrow()), "pyarrow"),
    Format("parquet", by_parquet, "pyarrow"),
    Format("h5", by_h5, "h5py"),
    Format("zarr", by_zarr, "zarr"),
)


def rows(dtype: torch.dtype) -> list[TensorDict]:
    return [
        TensorDict(
            {
                "tokens": torch.arange(count).to(dtype),
                "n": {"pixels": torch.ones(count, 2)},
                "score": torch.tensor(float(count)),
                "text": "x" * count,
            }
        )
        for count in LENGTHS
    ]


@pytest.mark.parametrize("format_", FORMATS, ids=[each.name for each in FORMATS])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float16])
def test_ragged_rows_come_back(format_: Format, dtype: torch.dtype, tmp_path: Path) -> None:
    if not find_spec(format_.needs):
        pytest.skip(f"{format_.needs} is not installed")
    made = rows(dtype)
    if format_.name == "pandas":  # whose cells hold no rows of rows of numbers and their dtype
        made = [row.exclude("n") for row in made]
    ragged = lazy_stack(made)
    for source in (ragged, ragged.densify(torch.jagged)):
        found = format_.there_and_back(source, tmp_path / f"td.{format_.name}")
        assert found.batch_size == (4,)
        assert found["tokens"].layout is torch.jagged
        assert found["tokens"].dtype is dtype
        assert [row.tolist() for row in found["tokens"].unbind()] == [
            list(range(count)) for count in LENGTHS
        ]
        assert found["score"].tolist() == list(LENGTHS)
        assert found["text"] == ["x" * count for count in LENGTHS]
        if format_.name != "pandas":
            assert [len(row) for row in found["n", "pixels"].unbind()] == list(LENGTHS)
            assert found["n", "pixels"].unbind()[1].tolist() == [[1, 1]] * 3


def test_lines_hold_lists_and_a_table_of_numbers_refuses_them() -> None:
    ragged = lazy_stack(rows(torch.int64))
    text = ragged.to_json(lines=True)
    assert text is not None
    assert '"tokens": [0, 1, 2]' in text
    with pytest.raises(InvalidValue, match=r"`tokens` is ragged.*to_padded_tensor.*to_parquet"):
        ragged.exclude("n").to_csv()


def test_rows_that_differ_in_more_than_one_dimension_are_refused() -> None:
    images = [TensorDict({"x": torch.ones(2, count)}) for count in (1, 2)]
    with pytest.raises(ValueError, match="`x`"):
        lazy_stack(images).to_json()
