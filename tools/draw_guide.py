"""Draw the pictures of the guide: containers, keys, shapes, indices, stacks, data, key graphs.

    python -m tools.draw_guide

Sizes, groups and masks are those that kd_core returns for the containers in this file, so a picture
shows what the library does.
"""

import functools
import math
from collections.abc import Callable

import torch
from tools.picture import ROW, Picture, with_dark, write

import kd_export
from kd_core import (
    TensorDict,
    TensorDictBase,
    cat,
    collate,
    group_by,
    lazy_stack,
    pad_sequence,
    stack,
    unravel_key_to_tuple,
)
from kd_nn import NormalParamExtractor, TensorDictModule, TensorDictSequential


def kinds() -> str:
    """Draw which kinds of container there are, and what each holds."""
    picture = Picture(760, 304)
    panels = [
        ("TensorDict", "entries by key", ["obs", "next"], ["Tensor", "TensorDict"]),
        ("TensorClass", "declared fields", ["image", "weight"], ["Tensor", "float"]),
        ("lazy stack", "members, stacked when read", ["[0]", "[1]"], ["TensorDict"] * 2),
        ("NonTensorData", "one value for the batch", ["value"], ['"simulator"']),
        ("NonTensorStack", "one value for each row", ["row 0", "row 1"], ['"ann"', '"bob"']),
        ("MetaData", "one value for the container", ["value"], ['"m"']),
    ]
    for place, (title, note, names, values) in enumerate(panels):
        x, y = 20 + 245 * (place % 3), 20 + 140 * (place // 3)
        picture.box(x, y, 230, 124)
        picture.text(x + 12, y + 20, title, "title")
        picture.text(x + 12, y + 40, note, "note")
        for row, (name, value) in enumerate(zip(names, values, strict=True)):
            middle = y + 68 + ROW * row
            picture.text(x + 12, middle, name)
            picture.box(x + 80, middle - 12, 138, 24, "batch" if value == "Tensor" else "rest")
            picture.text(x + 92, middle, value)
    return picture.svg()


def shapes() -> str:
    """Draw the sizes of two leaves after operations on the batch."""
    td = TensorDict({"image": torch.zeros(6, 8, 8), "label": torch.arange(6)}, [6])
    results: list[tuple[str, TensorDictBase]] = [
        ("td", td),
        ("td.reshape(2, 3)", td.reshape(2, 3)),
        ("td[1:5]", td[1:5]),
        ("td[0]", td[0]),
        ("stack([td, td])", stack([td, td])),
        ("stack([td, td], 1)", stack([td, td], 1)),
    ]
    picture = Picture(560, 82 + ROW * len(results))
    for x, title in ((20, "container"), (190, "batch_size"), (300, "image"), (440, "label")):
        picture.text(x, 22, title, "title")
    for row, (call, result) in enumerate(results):
        y, ndim = 52 + ROW * row, result.batch_dims
        picture.text(20, y, call)
        picture.leaf(190, y, result.batch_size, ndim)
        picture.leaf(300, y, result["image"].shape, ndim)
        picture.leaf(440, y, result["label"].shape, ndim)
        if not ndim:
            picture.text(190, y, "()")
            picture.text(440, y, "()")
    below = picture.height - 18
    picture.box(20, below - 7, 14, 14, "batch")
    picture.text(40, below, "dimensions of the batch: the same in every entry", "note")
    picture.box(366, below - 7, 14, 14, "rest")
    picture.text(386, below, "own dimensions of an entry", "note")
    return picture.svg()


def data() -> str:
    """Draw how rows become a batch, groups of rows, and a padded batch."""
    picture = Picture(760, 330)
    rows = [TensorDict({"who": who, "x": who * 10 + idx}) for idx, who in enumerate((1, 0, 1))]
    batch = collate(rows)
    who, groups = group_by(batch, "who")
    picture.text(20, 22, "rows", "title")
    picture.text(290, 22, "collate(rows)", "title")
    picture.text(560, 22, 'group_by(batch, "who")', "title")
    for idx, row in enumerate(rows):
        _row(picture, 20, 52 + ROW * idx, row)
        picture.arrow(180, 52 + ROW * idx, 282, 82)
        _row(picture, 290, 52 + ROW * idx, batch[idx])
    picture.text(20, 148, "each of batch size ()", "note")
    picture.text(290, 148, f"batch size {tuple(batch.batch_size)}", "note")
    y = 52
    for value, group in zip(who.tolist(), groups, strict=True):
        picture.arrow(450, 82, 552, y + ROW * (len(group) - 1) / 2)
        for idx in range(len(group)):
            _row(picture, 560, y + ROW * idx, group[idx])
        picture.text(720, y, f"{value}", "note")
        y += ROW * len(group) + 12
    ragged = [TensorDict({"tokens": torch.arange(1, n + 1)}, [n]) for n in (2, 4, 3)]
    padded = pad_sequence(ragged, return_mask="mask")
    picture.text(20, 196, "rows of different lengths", "title")
    picture.text(290, 196, "pad_sequence(rows)", "title")
    picture.text(560, 196, "its mask", "title")
    for idx, one in enumerate(ragged):
        y = 226 + ROW * idx
        tokens, mask = padded[idx]["tokens"].tolist(), padded[idx]["mask", "tokens"].tolist()
        styles = ["batch" if real else "pad" for real in mask]
        picture.cells(20, y, [str(token) for token in one["tokens"].tolist()], ["batch"] * len(one))
        picture.arrow(180, y, 282, y)
        picture.cells(290, y, [str(token) for token in tokens], styles)
        picture.cells(560, y, ["T" if real else "F" for real in mask], styles)
    picture.text(290, 316, f"batch size {tuple(padded.batch_size)}", "note")
    return picture.svg()


def _row(picture: Picture, x: float, y: float, row: TensorDictBase) -> None:
    picture.box(x, y - 13, 150, 26)
    picture.text(x + 10, y, f"who: {row['who'].item()}   x: {row['x'].item()}")


def keys() -> str:
    """Draw the tree of nested keys, and the same leaves under flat keys."""
    picture = Picture(560, 176)
    leaves = {"obs": torch.zeros(3, 4), "reward": torch.ones(3)}
    td = TensorDict({"obs": leaves["obs"], "next": leaves}, [3])
    picture.text(20, 22, "td", "title")
    picture.text(330, 22, 'td.flatten_keys(".")', "title")
    for row, key in enumerate(td.keys(include_nested=True)):
        y, path = 52 + ROW * row, unravel_key_to_tuple(key)
        entry: object = td.get(key)
        picture.text(20 + 24 * (len(path) - 1), y, path[-1])
        if isinstance(entry, torch.Tensor):
            picture.leaf(110, y, entry.shape, td.batch_dims)
            picture.text(190, y, f"td[{repr(list(path))[1:-1]}]", "note")
    for row, (key, leaf) in enumerate(td.flatten_keys(".").items()):
        picture.text(420, 52 + ROW * row, key)
        picture.leaf(330, 52 + ROW * row, leaf.shape, td.batch_dims)
    return picture.svg()


def indexing() -> str:
    """Draw which rows of every entry an index takes."""
    td = TensorDict({"x": torch.arange(10, 14), "y": torch.arange(20, 24)}, [4])
    results = [
        ("td", td),
        ("td[1]", td[1:2]),
        ("td[1:3]", td[1:3]),
        ("td[td['x'] != 11]", td[td["x"] != 11]),
        ("td[[3, 0, 0]]", td[[3, 0, 0]]),
    ]
    picture = Picture(560, 52 + ROW * len(results))
    for x, title in ((20, "container"), (200, "batch_size"), (300, "x"), (430, "y")):
        picture.text(x, 22, title, "title")
    for row, (call, result) in enumerate(results):
        y = 52 + ROW * row
        picture.text(20, y, call)
        picture.text(200, y, "()" if call == "td[1]" else str(tuple(result.batch_size)))
        for x, key in ((300, "x"), (430, "y")):
            values = [str(value) for value in result[key].tolist()]
            picture.cells(x, y, values, ["batch"] * len(values))
    return picture.svg()


def stacks() -> str:
    """Draw the members of a lazy stack, and what the stack shows of their entries."""
    rows = [TensorDict({"x": n, "ids": torch.arange(n)}) for n in (2, 4, 3)]
    stacked = lazy_stack(rows)
    padded = stacked.get("ids", as_padded_tensor=True, padding_value=-1).tolist()
    picture = Picture(760, 176)
    for x, title in (
        (20, "members"),
        (290, 'stacked["x"]'),
        (480, 'get("ids", as_padded_tensor=True)'),
    ):
        picture.text(x, 22, title, "title")
    for idx, row in enumerate(rows):
        y, ids = 52 + ROW * idx, [str(value) for value in row["ids"].tolist()]
        picture.box(20, y - 13, 210, 26)
        picture.text(30, y, f"x: {row['x'].item()}   ids:")
        picture.cells(120, y, ids, ["batch"] * len(ids))
        picture.arrow(230, y, 282, y)
        picture.cells(290, y, [str(stacked["x"][idx].item())], ["batch"])
        styles = ["pad" if value < 0 else "batch" for value in padded[idx]]
        picture.cells(480, y, ["" if value < 0 else str(value) for value in padded[idx]], styles)
    picture.text(20, 154, "each stays a container of its own: writes to the stack reach it", "note")
    return picture.svg()


def key_graph(*selected: str) -> str:
    """Draw which step reads and writes which keys; steps that are not needed are grey."""
    model = TensorDictSequential(
        TensorDictModule(torch.nn.Linear(4, 8), ["obs"], ["hidden"]),
        TensorDictModule(torch.nn.Linear(8, 2), ["hidden"], ["action"]),
        TensorDictModule(torch.nn.Linear(10, 1), ["hidden", "action"], [("critic", "value")]),
    )
    if selected:
        model.select_out_keys(*selected)
    return with_dark(model.key_graph().to_svg())


def front(tall: bool = False) -> str:
    """Draw the picture of the front page: a batch, layers, a file; below each other if `tall`."""
    batch = TensorDict(image=torch.zeros(32, 8, 8), label=torch.arange(32), batch_size=[32])
    model = TensorDictSequential(
        TensorDictModule(torch.nn.Flatten(-2), ["image"], ["pixels"]),
        TensorDictModule(torch.nn.Linear(64, 10), ["pixels"], [("out", "logits")]),
    )
    picture = Picture(*((356, 812) if tall else (1092, 272)), page=False)
    places = [(2, 2 + 274 * n) if tall else (2 + 368 * n, 2) for n in range(3)]
    headings = ("One batch, named", "Layers, named", "One file, proven")
    for (x, y), heading in zip(places, headings, strict=True):
        picture.box(x, y, 352, 260 if tall else 268, "panel")
        picture.text(x + 20, y + 30, heading, "heading")
    _front_batch(picture, *places[0], batch)
    _front_layers(picture, *places[1], model)
    _front_file(picture, *places[2], model)
    return picture.svg()


def _front_batch(picture: Picture, x: float, y: float, batch: TensorDict) -> None:
    taken = batch[:4]
    for row, (key, leaf) in enumerate(batch.items()):
        middle = y + 78 + 42 * row
        picture.text(x + 20, middle, key, "key")
        _sizes(picture, x + 96, middle, leaf.shape, batch.batch_dims)
    picture.text(x + 20, y + 168, "batch[:4]", "large")
    for row, (key, leaf) in enumerate(taken.items()):
        left = x + 20 + 176 * row
        picture.text(left, y + 206, key, "key")
        _sizes(picture, left + 62, y + 206, leaf.shape, taken.batch_dims, 32)
    picture.text(x + 20, y + 242, "used like one tensor, called like a dict", "caption")


def _sizes(
    picture: Picture, x: float, y: float, sizes: torch.Size, batch_dims: int, wide: int = 44
) -> None:
    for dim, size in enumerate(sizes):
        picture.box(x + wide * dim, y - 15, wide - 4, 30, "batch" if dim < batch_dims else "rest")
        picture.text(x + wide * (dim + 0.5) - 2, y, str(size), "number", "middle")


def _front_layers(picture: Picture, x: float, y: float, model: TensorDictSequential) -> None:
    (first, second), (key,) = model.key_graph().nodes, model.in_keys
    picture.pill(x + 20, y + 78, str(key))
    picture.line(x + 92, y + 78, x + 112, y + 78)
    _step(picture, x + 112, y + 56, first.label, "no parameters")
    picture.line(x + 182, y + 112, x + 182, y + 152)
    picture.text(x + 192, y + 132, str(first.writes[0]), "key")
    _step(picture, x + 112, y + 152, second.label, f"{second.parameters} parameters")
    picture.line(x + 252, y + 180, x + 268, y + 180)
    picture.text(x + 270, y + 180, ".".join(unravel_key_to_tuple(second.writes[0])), "result")
    picture.text(x + 20, y + 242, "each says what it reads and writes", "caption")


def _step(picture: Picture, x: float, y: float, title: str, note: str) -> None:
    picture.box(x, y, 140, 56)
    picture.text(x + 70, y + 20, title, "heading", "middle")
    picture.text(x + 70, y + 39, note, "caption", "middle")


def _front_file(picture: Picture, x: float, y: float, model: TensorDictSequential) -> None:
    picture.box(x + 20, y + 56, 176, 152)
    picture.text(x + 36, y + 82, "model.onnx", "heading")
    picture.text(x + 36, y + 116, f"in \N{NO-BREAK SPACE}{model.in_keys[0]}", "key")
    picture.text(
        x + 36, y + 142, f"out {'.'.join(unravel_key_to_tuple(model.out_keys[-1]))}", "result large"
    )
    picture.text(x + 36, y + 184, "keys are inside", "caption")
    for row, said in enumerate(("exported", "run", "compared", "then written")):
        picture.text(x + 216, y + 74 + 36 * row, f"\N{CHECK MARK} {said}", "good")
    picture.text(x + 20, y + 242, "runs in C++ or a browser, without torch", "caption")


def episodes() -> str:
    """Draw episodes in one file, and steps and windows that are taken from it."""
    lengths = (3, 5, 4)
    data = cat([TensorDict({"e": torch.full((n,), e)}, [n]) for e, n in enumerate(lengths)])
    numbers = data["e"].tolist()
    picture = Picture(760, 190)
    picture.text(20, 22, "episodes", "title")
    picture.text(290, 22, "episodes.kd", "title")
    for row, steps in enumerate(data.split(list(lengths))):
        y = 52 + ROW * row
        picture.cells(20, y, [str(e) for e in steps["e"].tolist()], ["batch"] * len(steps))
        picture.arrow(180, y, 282, 52)
    picture.cells(290, 52, [str(e) for e in numbers], ["batch"] * len(numbers))
    picture.text(290, 94, "steps of any episode", "note")
    rows = torch.tensor([1, 9, 4, 7])
    picture.cells(480, 94, [str(e) for e in data[rows]["e"].tolist()], ["rest"] * len(rows))
    picture.text(290, 130, "windows inside episodes", "note")
    starts = torch.arange(len(data) - 1)
    inside = starts[data["e"][starts] == data["e"][starts + 1]]
    windows = data[inside[:, None] + torch.arange(2)]["e"].tolist()
    for place, window in enumerate(windows[:4]):
        picture.cells(480 + 64 * place, 130, [str(e) for e in window], ["rest"] * 2)
    picture.text(20, 166, "a number is the episode that a step belongs to", "note")
    return picture.svg()


def sweep() -> str:
    """Draw the parameters of several networks, and the container that they are stacked to."""
    net = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    one = TensorDict.from_module(net).detach()
    stacked = stack([one] * 8)
    picture = Picture(760, 196)
    picture.text(20, 22, "8 networks", "title")
    picture.text(330, 22, "stack(...)", "title")
    picture.text(590, 22, "vmap(loss)", "title")
    for row, (key, leaf) in enumerate(one.flatten_keys(".").items()):
        y = 52 + ROW * row
        picture.text(20, y, key)
        picture.leaf(120, y, leaf.shape, 0)
        picture.arrow(200, y, 322, y)
        picture.leaf(330, y, stacked.flatten_keys(".")[key].shape, stacked.batch_dims)
        picture.arrow(430, y, 582, 52 + ROW * 1.5)
    picture.leaf(590, 52 + ROW * 1.5, stacked.batch_size, 1)
    picture.text(624, 52 + ROW * 1.5, "losses", "note")
    picture.text(20, 176, "times a tensor of 8 rates: one for each network", "note")
    return picture.svg()


def runtimes() -> str:
    """Draw the programs that read one file of ONNX."""
    return readers("model.onnx", "Python", "a browser", "C++")


def board() -> str:
    """Draw the programs that read one file of ExecuTorch."""
    return readers("policy.pte", "kd in Python", "ExecuTorch in Python", "C++ on the board")


def readers(file: str, *programs: str, entries: str = "obs.state to action") -> str:
    """Draw programs that read one file."""
    texts = [f"{program}: {entries}" for program in programs]
    width = max(254, 24 + math.ceil(7.3 * max(map(len, texts))))
    picture = Picture(326 + width, 30 + 40 * len(programs))
    middle = 15 + 20 * len(programs)
    picture.box(20, middle - 24, 150, 48, "batch")
    picture.text(95, middle, file, "title", "middle")
    for row, text in enumerate(texts):
        y = 35 + 40 * row
        picture.arrow(170, middle, 300, y)
        picture.box(306, y - 15, width, 30)
        picture.text(318, y, text)
    return picture.svg()


def handover() -> str:
    """Draw who reads what is in the folder that is handed over."""
    readers_of = ("C, C++ and Rust", "a page, on any phone", "Python without torch", "Triton")
    return readers("pendulum.onnx", *readers_of, entries="observation to action")


def captured() -> str:
    """Draw what `torch.export` keeps of a keyed module, and what `kd_export` adds."""
    model = TensorDictModule(torch.add, in_keys=["x", "y"], out_keys=["out"])
    inputs = {"x": torch.zeros(8, 100), "y": torch.zeros(8, 100)}
    plain = torch.export.export(model, args=(), kwargs=inputs)
    schema = kd_export.export(model, inputs).schema
    arguments = ", ".join(plain.graph_signature.user_inputs)
    shapes = [tuple(x.shape) for x in plain.example_inputs[1].values()]
    picture = Picture(760, 186)
    panels = (
        (
            "a keyed module",
            [f"reads {', '.join(map(str, model.in_keys))}", f"writes {model.out_keys[0]}"],
        ),
        ("torch.export", [f"arguments {arguments}", f"of {shapes[0]}", "one tensor"]),
        (
            "kd_export",
            [f"{entry.wire}  {entry.describe()}" for entry in (*schema.inputs, *schema.outputs)],
        ),
    )
    places = ((20, 160), (244, 180), (488, 252))
    for (title, lines), (x, width) in zip(panels, places, strict=True):
        picture.text(x, 22, title, "title")
        picture.box(x, 40, width, 100, "batch" if title == "kd_export" else "box")
        for row, line in enumerate(lines):
            picture.text(x + 12, 64 + 26 * row, line)
    picture.arrow(180, 90, 236, 90)
    picture.arrow(424, 90, 480, 90)
    notes = (
        "names are in the module",
        "a graph, of these sizes",
        "of every batch, run and compared",
    )
    for note, (x, _) in zip(notes, places, strict=True):
        picture.text(x, 164, note, "note")
    return picture.svg()


def memory() -> str:
    """Draw the key graph of a policy that carries a memory."""
    memory = ("memory", "h")
    model = TensorDictSequential(
        TensorDictModule(torch.nn.GRUCell(2, 16), ["obs", memory], [memory]),
        TensorDictModule(torch.nn.Linear(16, 2), [memory], ["logits"]),
    )
    return with_dark(model.key_graph().to_svg())


def robot() -> str:
    """Draw the key graph of a policy with what stands before and behind its network."""
    following = ("next", "memory", "h")
    model = TensorDictSequential(
        TensorDictModule(torch.nn.BatchNorm1d(1), [("obs", "position")], ["normal"]),
        TensorDictModule(torch.nn.GRUCell(1, 16), ["normal", ("memory", "h")], [following]),
        TensorDictModule(torch.nn.Linear(16, 1), [following], ["raw"]),
        TensorDictModule(torch.nn.Hardtanh(-2.0, 2.0), ["raw"], [("action", "force")]),
    )
    return with_dark(model.key_graph().to_svg())


def target() -> str:
    """Draw how the weights of a slow copy follow those of a network."""
    source, slow = TensorDict({"w": torch.zeros(3)}), TensorDict({"w": torch.zeros(3)})
    picture = Picture(560, 52 + ROW * 4)
    for x, title in ((20, ""), (170, "network"), (370, "target.lerp_(source, 0.5)")):
        picture.text(x, 22, title, "title")
    for step in range(4):
        source["w"][:] = torch.tensor([8.0, 16.0, -8.0]) if step else 0.0
        slow.lerp_(source, 0.5)
        picture.text(20, 52 + ROW * step, f"after step {step}")
        for x, held in ((170, source), (370, slow)):
            values = [f"{value:g}" for value in held["w"].tolist()]
            picture.cells(x, 52 + ROW * step, values, ["batch"] * len(values))
    return picture.svg()


def molecule() -> str:
    """Draw the key graph of the network on graphs."""

    def distances(pos: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        apart = pos[ends[:, 0]] - pos[ends[:, 1]]
        return apart.square().sum(-1, keepdim=True).sqrt()

    def gathered(messages: torch.Tensor, ends: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(kind), 16).index_add(0, ends[:, 0], messages)

    def summed(atomic: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        return torch.zeros(3).index_add(0, graph, atomic.squeeze(-1))

    ends = ("edges", "ends")
    model = TensorDictSequential(
        TensorDictModule(distances, [("nodes", "pos"), ends], ["distance"]),
        TensorDictModule(torch.nn.Linear(1, 16), ["distance"], ["message"]),
        TensorDictModule(gathered, ["message", ends, ("nodes", "kind")], ["hidden"]),
        TensorDictModule(torch.nn.Linear(16, 1), ["hidden"], ["atomic"]),
        TensorDictModule(summed, ["atomic", ("nodes", "graph")], [("out", "energy")]),
    )
    return with_dark(model.key_graph().to_svg())


def policy() -> str:
    """Draw the key graph of the model that the page on exporting builds."""
    model = TensorDictSequential(
        TensorDictModule(torch.nn.Linear(3, 4), ["x"], ["hidden"]),
        TensorDictModule(torch.nn.ReLU(), ["hidden"], ["hidden"]),
        TensorDictModule(torch.nn.Linear(4, 4), ["hidden"], ["latent"]),
        TensorDictModule(NormalParamExtractor(), ["latent"], ["loc", "scale"]),
    )
    return with_dark(model.key_graph().to_svg())


def convolutions() -> str:
    """Draw the key graph of the net that the page on exported programs looks into."""
    net = TensorDictSequential(
        TensorDictModule(torch.nn.Conv2d(3, 6, 5), ["image"], ["first"]),
        TensorDictModule(torch.nn.ReLU(), ["first"], ["first"]),
        TensorDictModule(torch.nn.Conv2d(6, 9, 5), ["first"], ["second"]),
        TensorDictModule(torch.nn.ReLU(), ["second"], ["second"]),
        TensorDictModule(torch.nn.Flatten(), ["second"], ["flat"]),
        TensorDictModule(torch.nn.Linear(9 * 24 * 24, 10), ["flat"], ["logits"]),
    )
    return with_dark(net.select_out_keys("logits").key_graph().to_svg())


PICTURES: dict[str, Callable[[], str]] = {
    "front.svg": front,
    "front-tall.svg": functools.partial(front, tall=True),
    "container-kinds.svg": kinds,
    "keys.svg": keys,
    "episodes.svg": episodes,
    "sweep.svg": sweep,
    "runtimes.svg": runtimes,
    "board.svg": board,
    "captured.svg": captured,
    "handover.svg": handover,
    "memory.svg": memory,
    "molecule.svg": molecule,
    "policy.svg": policy,
    "convolutions.svg": convolutions,
    "robot.svg": robot,
    "target.svg": target,
    "shapes.svg": shapes,
    "indexing.svg": indexing,
    "lazy-stack.svg": stacks,
    "data.svg": data,
    "key-graph.svg": key_graph,
    "key-graph-selected.svg": functools.partial(key_graph, "action"),
}


if __name__ == "__main__":
    write(PICTURES)
