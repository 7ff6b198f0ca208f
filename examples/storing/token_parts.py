"""Ragged token sequences with a text each: written in parts by four processes, read by workers.

    python examples/storing/token_parts.py

Every process appends its parts to one store, as other processes do at the same time. Then the parts
are joined, and a data loader with workers reads shuffled batches of rows of different lengths.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import multiprocessing
import tempfile
import time

import torch
from examples.learning.curves import told
from torch.utils.data import DataLoader, Dataset

from kd_core import NonTensorStack, TensorDict, store

WRITERS, PARTS, ROWS = 4, 10, 500
BATCH, WORKERS = 64, 2


def tokens_of(text: str) -> torch.Tensor:
    """Return the bytes of a text as tokens."""
    return torch.tensor(list(text.encode()))


def text_of(row: int) -> str:
    """Return the text of a row, of 1 to 40 words."""
    return " ".join(f"word{row * step % 97}" for step in range(1, 2 + row * 7 % 40))


def write_parts(path: Path, writer: int, parts: int, rows: int) -> None:
    """Append the parts of one writer; its rows are those whose number it is modulo `WRITERS`."""
    torch.set_num_threads(1)
    for part in range(parts):
        numbers = [(part * rows + row) * WRITERS + writer for row in range(rows)]
        texts = [text_of(number) for number in numbers]
        tokens = torch.nested.nested_tensor(list(map(tokens_of, texts)), layout=torch.jagged)
        TensorDict(
            {"tokens": tokens, "text": NonTensorStack(*texts), "row": torch.tensor(numbers)}, [rows]
        ).append_to(path)


class Rows(Dataset[TensorDict]):
    """The rows of a store, which each worker maps for itself.

    Args:
        path: the store.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: TensorDict | None = None
        self._length = TensorDict.load(path, keys=["row"]).batch_size[0]

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, numbers: list[int]) -> TensorDict:
        """Return a batch; its rows have different lengths."""
        if self._rows is None:
            self._rows = TensorDict.load(self._path)
        return self._rows[numbers]

    def __getstate__(self) -> dict[str, object]:
        """Return what a worker gets: the path, not the rows."""
        return {**self.__dict__, "_rows": None}


def as_it_is(batch: object) -> object:
    """Return a batch, which is collated already."""
    return batch


# Starting Python takes longer than writing and reading.
PROCESSES = multiprocessing.get_context("fork")


def write(path: Path, parts: int, rows: int) -> None:
    """Run all writers at once."""
    writers = [
        PROCESSES.Process(target=write_parts, args=(path, writer, parts, rows))
        for writer in range(WRITERS)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    if any(writer.exitcode for writer in writers):
        raise SystemExit("a writer failed")


def check(batch: TensorDict) -> list[int]:
    """Compare the rows of a batch with what was written; return their numbers."""
    numbers: list[int] = batch["row"].tolist()
    for number, row, text in zip(numbers, batch["tokens"].unbind(), batch["text"], strict=True):
        if text != text_of(number) or bytes(row.tolist()) != text.encode():
            raise SystemExit(f"row {number} is damaged")
    return numbers


def read(path: Path) -> set[int]:
    """Read all rows in shuffled batches; return their numbers."""
    loader = DataLoader(
        Rows(path),
        batch_size=BATCH,
        shuffle=True,
        num_workers=WORKERS,
        collate_fn=as_it_is,
        multiprocessing_context=PROCESSES,
    )
    return {number for batch in loader for number in check(batch)}


def main(parts: int = PARTS, rows: int = ROWS) -> None:
    """Write, join, read, and compare every row."""
    count = WRITERS * parts * rows
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens.kd")
        start = time.perf_counter()
        write(path, parts, rows)
        print(f"written: {count / (time.perf_counter() - start):,.0f} rows per second")
        start = time.perf_counter()
        store.compact(path)
        print(f"joined: {count / (time.perf_counter() - start):,.0f} rows per second")
        start = time.perf_counter()
        seen = read(path)
        print(f"read: {count / (time.perf_counter() - start):,.0f} rows per second")
        if seen != set(range(count)):
            raise SystemExit(f"expected {count} rows, got {len(seen)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with told(__doc__, "10 s"):
        main()
