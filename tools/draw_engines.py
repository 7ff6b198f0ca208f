"""Draw the pictures of the guide on several processes, one for each engine.

    python -m tools.draw_engines

Sizes of messages, values of reductions, and rows of each rank are those that kd_core returns for
the containers in this file.
"""

from collections.abc import Sequence

import torch
from tools.picture import ROW, Picture, write

from kd_core import TensorDict, TensorDictBase, stack

RANKS = 3


def collectives() -> str:
    """Draw what an `all_reduce` sends: an agreement, then one message for each dtype."""
    ranks = [
        TensorDict({"bias": torch.ones(2) * rank, "weight": torch.ones(3, 2), "count": rank})
        for rank in range(RANKS)
    ]
    total = stack(ranks).sum(0)
    _, buffers = ranks[0].to_buffers()
    messages = [f"{str(flat.dtype)[6:]}: {flat.nbytes} bytes" for flat in buffers]
    picture = Picture(760, 176)
    for x, title in ((20, "each rank"), (250, "agree"), (430, "messages"), (620, "after `sum`")):
        picture.text(x, 22, title, "title")
    for rank, td in enumerate(ranks):
        y = 56 + ROW * rank
        picture.text(20, y, f"rank {rank}")
        picture.text(84, y, f"bias: {td['bias'].tolist()}")
        picture.arrow(200, y, 244, 56 + ROW)
        picture.arrow(590, 56 + ROW, 614, y)
        picture.text(620, y, f"bias: {total['bias'].tolist()}")
    picture.box(250, 43, 120, 26 + 2 * ROW, "rest")
    for row, said in enumerate(("call", "keys, shapes", "dtypes")):
        picture.text(310, 56 + ROW * row, said, anchor="middle")
    picture.arrow(370, 56 + ROW, 424, 56 + ROW)
    for row, message in enumerate(messages):
        y = 56 + ROW * row
        picture.box(430, y - 13, 160, 26, "batch")
        picture.text(510, y, message, anchor="middle")
    said = "ranks that differ all raise the same error before any value has moved"
    picture.text(20, 156, said, "note")
    return picture.svg()


def training() -> str:
    """Draw where parameters are, and what the engine sees at the border of a step."""
    picture = Picture(760, 206)
    for x, title in ((20, "DistributedDataParallel"), (400, "fully_shard, step by step")):
        picture.text(x, 22, title, "title")
    for rank in range(RANKS):
        y = 52 + ROW * rank
        for x, sharded in ((20, False), (400, True)):
            picture.text(x, y, f"rank {rank}")
            held = ["pad" if sharded and part != rank else "batch" for part in range(RANKS)]
            _step(picture, x + 64, y, "x", held)
            _step(picture, x + 194, y, "h", held)
            picture.text(x + 324, y, "y")
    for x, lines in (
        (20, ("all parameters on each rank;", "gradients are averaged in `backward`")),
        (
            400,
            (
                "a part of each step's parameters;",
                "the others arrive before its call, and go after",
            ),
        ),
    ):
        for row, line in enumerate(lines):
            picture.text(x, 146 + 20 * row, line, "note")
    picture.text(20, 190, "both see the tensors at the keys of a step, not a container", "note")
    return picture.svg()


def _step(picture: Picture, x: float, y: float, key: str, held: Sequence[str]) -> None:
    """Draw a key, and the step that reads it, with the parts of its parameters."""
    picture.text(x, y, key)
    picture.arrow(x + 12, y, x + 36, y)
    picture.cells(x + 40, y, [""] * len(held), held)


def checkpoints() -> str:
    """Draw how the rows of sharded leaves are saved by three ranks and loaded by two."""
    rows = TensorDict({"x": torch.arange(6)}, [6])
    saved, loaded = rows.chunk(RANKS), rows.chunk(2)
    picture = Picture(760, 166)
    for x, title in ((20, "saved by three ranks"), (300, "files"), (520, "loaded by two")):
        picture.text(x, 22, title, "title")
    for rank, part in enumerate(saved):
        y = 56 + ROW * rank
        picture.text(20, y, f"rank {rank}")
        _rows(picture, 84, y, part)
        picture.arrow(150, y, 294, y)
        picture.box(300, y - 13, 120, 26, "rest")
        picture.text(360, y, f"__{rank}_0.distcp", anchor="middle")
    for rank, part in enumerate(loaded):
        y = 64 + 45 * rank
        picture.text(520, y, f"rank {rank}")
        _rows(picture, 584, y, part)
        for source, before in enumerate(saved):
            if set(part["x"].tolist()) & set(before["x"].tolist()):
                picture.arrow(420, 56 + ROW * source, 514, y)
    picture.text(20, 148, "`.metadata` comes last: a folder without it is not loaded", "note")
    return picture.svg()


def _rows(picture: Picture, x: float, y: float, part: TensorDictBase) -> None:
    values = [str(value) for value in part["x"].tolist()]
    picture.cells(x, y, values, ["batch"] * len(values))


def actors() -> str:
    """Draw the way of batches and weights between the actors of `examples/actors`."""
    weights = TensorDict({"weight": torch.zeros(64, 4), "bias": torch.zeros(64)})
    _, buffers = weights.to(torch.bfloat16).to_buffers()
    picture = Picture(760, 196)
    for x, y, width, said in (
        (20, 50, 120, "collector 0"),
        (20, 110, 120, "collector 1"),
        (330, 80, 120, "replay"),
        (620, 80, 120, "learner"),
    ):
        picture.box(x, y - 16, width, 32)
        picture.text(x + width / 2, y, said, anchor="middle")
    for y in (50, 110):
        picture.arrow(140, y, 184, y)
        picture.box(190, y - 13, 90, 26, "batch")
        picture.text(235, y, "batch", anchor="middle")
        picture.arrow(280, y, 324, 80)
    picture.arrow(450, 80, 484, 80)
    picture.box(490, 67, 90, 26, "batch")
    picture.text(535, 80, "sample", anchor="middle")
    picture.arrow(580, 80, 614, 80)
    picture.text(20, 22, "one object of the store for each dtype, read where it is", "note")
    said = f"weights, version 7: one bfloat16 array, {sum(b.nbytes for b in buffers):,} bytes"
    picture.box(190, 147, 390, 26, "rest")
    picture.text(385, 160, said, anchor="middle")
    picture.parts.append('<path class="edge" d="M680 96 V160 H580 M190 160 H80 V132"/>')
    picture.parts.append('<path class="tip" d="M76 133 L80 126 L84 133 Z"/>')
    return picture.svg()


PICTURES = {
    "collectives.svg": collectives,
    "training.svg": training,
    "checkpoints.svg": checkpoints,
    "actors.svg": actors,
}


if __name__ == "__main__":
    write(PICTURES)
