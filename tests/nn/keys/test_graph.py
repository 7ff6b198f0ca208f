import itertools
import random
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kd_core import NestedKey, TensorDict, TensorDictBase, unravel_key_to_tuple
from kd_nn import KeyGraph, KeyNode, TensorDictModule, TensorDictSequential
from kd_nn._keys import requires_all

SVG = "{http://www.w3.org/2000/svg}"


def graph() -> KeyGraph:
    return KeyGraph(
        (
            KeyNode("0", "Encoder", (("in", "x"),), ("hidden",), parameters=1200),
            KeyNode("1", "Head", ("hidden",), ("y", "_")),
            KeyNode("2", "Other<head>", ("hidden", "late"), ("z",)),
            KeyNode("3", "Late", ("z",), ("late",)),
        )
    )


def test_inputs_and_writes() -> None:
    assert graph().inputs == (("in", "x"), "late")
    assert graph().writes == ("hidden", "y", "z", "late")
    assert graph().reads == (("in", "x"), "hidden", "late", "z")


def test_missing_producers_name_the_readers() -> None:
    assert graph().missing_producers == {("in", "x"): ("0",), "late": ("2",)}


def test_unused_keys_are_neither_read_nor_selected() -> None:
    assert graph().unused_keys == ()
    assert KeyGraph(graph().nodes, ("z",)).unused_keys == ("y", "late")


def test_overwritten_keys_were_never_read() -> None:
    first, second = KeyNode("0", "A", ("x",), ("h",)), KeyNode("1", "B", ("x",), ("h",))
    assert KeyGraph((first, second)).overwritten_keys == ("h",)
    reader = KeyNode("1", "B", ("h",), ("h",))
    assert KeyGraph((first, reader)).overwritten_keys == ()


@pytest.mark.parametrize(
    ("wanted", "steps"),
    [(["y"], (0, 1)), (["late"], (0, 2, 3)), (["hidden"], (0,)), (["z", "y"], (0, 1, 2))],
)
def test_needed_steps(wanted: list[str], steps: tuple[int, ...]) -> None:
    assert graph().needed_for(wanted) == steps


def test_keys_match_by_prefix() -> None:
    nodes = (
        KeyNode("0", "A", ("x",), ("n",)),
        KeyNode("1", "B", (("n", "a"),), (("m", "a"),)),
        KeyNode("2", "C", ("m",), ("y",)),
    )
    assert KeyGraph(nodes).inputs == ("x",)
    assert KeyGraph(nodes).needed_for(["y"]) == (0, 1, 2)


def test_input_that_holds_another_covers_it() -> None:
    nodes = (KeyNode("0", "A", (("n", "a"),), ("y",)), KeyNode("1", "B", ("n",), ("z",)))
    assert KeyGraph(nodes).inputs == ("n",)


def test_graph_of_a_sequence_marks_what_a_selection_needs() -> None:
    model = TensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), ["x"], ["h"]),
        TensorDictModule(nn.ReLU(), ["h"], ["y"]),
        TensorDictModule(torch.neg, ["h"], ["z"]),
    )
    assert all(node.needed for node in model.key_graph().nodes)
    model.select_out_keys("z")
    assert [node.needed for node in model.key_graph().nodes] == [True, False, True]
    assert model.key_graph().outputs == ("z",)


def test_graph_of_a_module_has_one_node() -> None:
    (node,) = TensorDictModule(nn.Linear(3, 4), ["x"], ["y"]).key_graph().nodes
    assert (node.label, node.parameters) == ("Linear", 16)


def test_summary_is_aligned() -> None:
    assert graph().restrict([0, 1]).summary().splitlines() == [
        "step  module         in_keys       out_keys  parameters",
        "0     Encoder        in.x          hidden         1,200",
        "1     Head           hidden        y, _               0",
        "2     (Other<head>)  hidden, late  z                  0",
        "3     (Late)         z             late               0",
    ]


def test_mermaid_lists_steps_keys_and_outputs() -> None:
    text = KeyGraph(graph().nodes, ("y",)).restrict([0, 1]).to_mermaid()
    assert text.startswith("flowchart LR\n")
    for line in (
        'in0(["in.x"]):::input',
        's0["Encoder<br/>1,200 parameters"]:::step',
        's2["Other#lt;head#gt;"]:::dead',
        "in0 --> s0",
        's0 -->|"hidden"| s1',
        's2 -.->|"z"| s3',
        's1 --> out0(["y"]):::output',
    ):
        assert f"    {line}\n" in text


def test_svg_is_well_formed_and_names_everything(tmp_path: Path) -> None:
    path = tmp_path / "graph.svg"
    text = graph().to_svg(path)
    assert path.read_text(encoding="utf-8") == text
    root = ElementTree.fromstring(text)
    words = {element.text for element in root.iter(f"{SVG}text")}
    assert {"Encoder", "Other<head>", "in.x", "hidden", "1,200 parameters"} <= words
    assert len([p for p in root.iter(f"{SVG}path") if "edge" in p.get("class", "")]) == 5


def test_svg_greys_what_is_not_computed() -> None:
    text = KeyGraph(graph().nodes, ("y",)).restrict([0, 1]).to_svg()
    root = ElementTree.fromstring(text)
    dead = [g for g in root.iter(f"{SVG}g") if g.get("class") == "dead"]
    assert [title.text for g in dead for title in g.iter(f"{SVG}title")] == ["2", "3"]
    assert "not needed" in text
    assert "not needed" not in graph().to_svg()


def test_boxes_of_the_svg_do_not_overlap() -> None:
    root = ElementTree.fromstring(graph().to_svg())
    boxes = [
        tuple(float(rect.get(side, "")) for side in ("x", "y", "width", "height"))
        for rect in root.iter(f"{SVG}rect")
        if rect.get("class") in {"box", "input"} and float(rect.get("x", "")) > 0
    ]
    assert len(boxes) == 6
    for idx, (x, y, width, height) in enumerate(boxes):
        for other_x, other_y, other_width, other_height in boxes[idx + 1 :]:
            apart_x = x + width <= other_x or other_x + other_width <= x
            apart_y = y + height <= other_y or other_y + other_height <= y
            assert apart_x or apart_y


def test_empty_sequence_is_drawn() -> None:
    model = TensorDictSequential()
    assert "<svg" in model.key_graph().to_svg()
    assert model.key_graph().summary().startswith("step")


def test_container_made_in_part_inside_keeps_its_writers_outside() -> None:
    def double(n: TensorDictBase) -> Tensor:
        return n["a"] + n["b"]

    inner = TensorDictSequential(
        TensorDictModule(torch.neg, ["x"], [("n", "a")]),
        TensorDictModule(double, ["n"], ["y"]),
        TensorDictModule(lambda y: TensorDict(c=y), ["y"], ["n"]),
    )
    model = TensorDictSequential(TensorDictModule(torch.exp, ["x"], [("n", "b")]), inner)
    x = torch.ones(3)
    assert inner._kd_partly_read == ["n"]
    assert model.key_graph().overwritten_keys == ()
    assert torch.equal(model(TensorDict(x=x))["y"], x.exp() - x)


def test_a_graph_prints_as_its_table() -> None:
    graph = chain("x", "h", ("n", "y")).key_graph()
    assert repr(graph) == str(graph) == graph.summary()


def test_a_long_graph_prints_short_and_sums_up_whole() -> None:
    graph = chain(*(f"key_{number}" for number in range(101))).key_graph()
    assert len(repr(graph).splitlines()) == 31
    assert "..." in repr(graph)
    assert len(graph.summary().splitlines()) == 101
    wide = KeyGraph((KeyNode("0", "Wide", tuple(f"key_{n}" for n in range(50)), ("y",)),))
    assert max(map(len, repr(wide).splitlines())) < 100
    assert "key_49" in wide.summary()


def test_a_notebook_shows_the_picture() -> None:
    graph = chain("x", "y").key_graph()
    assert graph._repr_svg_() == graph.to_svg()


def chain(*keys: NestedKey) -> TensorDictSequential:
    steps = [TensorDictModule(torch.neg, [a], [b]) for a, b in itertools.pairwise(keys)]
    return TensorDictSequential(*steps)


def test_all_steps_that_write_below_a_key_are_joined_to_its_reader() -> None:
    graph = TensorDictSequential(
        TensorDictModule(torch.neg, ["x"], [("a", "old")]),
        TensorDictModule(torch.neg, [("a", "old")], [("a", "old")]),
        TensorDictModule(torch.neg, ["x"], [("a", "new")]),
        TensorDictModule(lambda a: a["new"], ["a"], ["y"]),
    ).key_graph()
    assert graph.producers(3, "a") == (1, 2)
    assert graph.producers(3, ("a", "old")) == (1,)
    assert graph.producers(0, "x") == ()
    drawn = graph.to_mermaid().splitlines()
    assert [line.strip() for line in drawn if line.endswith("s3")] == [
        's1 -->|"a"| s3',
        's2 -->|"a"| s3',
    ]
    assert graph.to_svg().count('<path class="edge') == 5


def holds(key: NestedKey, other: NestedKey) -> bool:
    path = unravel_key_to_tuple(key)
    return unravel_key_to_tuple(other)[: len(path)] == path


@pytest.mark.parametrize("nested", [False, True])
def test_keys_of_random_graphs_are_as_defined(nested: bool) -> None:
    rng = random.Random(0)
    keys: list[NestedKey] = ["a", "b", "c", "d", "_"]
    keys += [("a", "b"), ("a", "c"), ("a", "b", "d"), ("_", "x")] if nested else []
    all_required = 0
    for _ in range(400):
        nodes = []
        for idx in range(rng.randint(0, 5)):
            reads = tuple(rng.sample(keys, rng.randint(0, 3)))
            optional = tuple(key for key in reads if rng.random() < 0.1)
            writes = tuple(rng.choices(keys, k=rng.randint(0, 3)))
            skips = rng.random() < 0.1
            nodes.append(KeyNode(str(idx), "", reads, writes, may_skip=skips, optional=optional))
        graph = KeyGraph(tuple(nodes))
        outside: list[NestedKey] = []
        kept: list[NestedKey] = []
        for idx, node in enumerate(nodes):
            before = [key for other in nodes[:idx] for key in other.writes]
            after = [key for other in nodes[idx + 1 :] for key in other.writes]
            for key in node.reads:
                if not any(holds(key, each) or holds(each, key) for each in before):
                    outside.append(key)
            kept += [
                key
                for key in node.writes
                if key != "_" and not any(holds(each, key) for each in after)
            ]
        inputs = [key for key in outside if not any(key != o and holds(o, key) for o in outside)]
        assert graph.inputs == tuple(dict.fromkeys(inputs))
        assert graph.writes == tuple(dict.fromkeys(kept))
        if requires_all(graph):
            all_required += 1
            assert set(graph.inputs) <= set(graph.required)
    assert 50 < all_required < 350
