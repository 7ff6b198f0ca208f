"""What a notebook shows of a container, and which keys it offers."""

from collections.abc import Callable
from html.parser import HTMLParser

import pytest
import torch
from tests.core.kinds import FACTORIES

from kd_core import TensorDict, TensorDictBase, lazy_stack


class Reader(HTMLParser):
    """Collects the tags and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def shown(td: TensorDictBase) -> Reader:
    page = Reader(td._repr_html_())
    assert page.open == []
    return page


@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
def test_every_kind_shows_its_keys_shapes_and_levels(make: Callable[[], TensorDictBase]) -> None:
    td = make()
    page = shown(td)
    assert page.tags == {"details", "summary", "b", "code", "div"}
    assert f"batch_size={tuple(td.batch_size)}" in page.text
    for key, leaf in td.items(True, True):
        name = key if isinstance(key, str) else str(key[-1])
        assert f"{name}: \nTensor {tuple(leaf.shape)} {str(leaf.dtype)[6:]} cpu" in page.text


def test_keys_and_strings_are_escaped() -> None:
    evil = "<script>alert(1)</script>"
    page = shown(TensorDict({evil: {evil: 1.0}, "s": evil, f"{evil}&": evil * 9}))
    assert "script" not in page.tags
    assert evil in page.text


def test_what_cannot_be_read_and_many_keys_are_shown_short() -> None:
    rows = [TensorDict({"s": "a", "x": torch.zeros(n)}) for n in (1, 2)]
    assert "x: \ndiffers among the members" in shown(lazy_stack(rows)).text
    assert "... (20 more)" in shown(TensorDict({f"k{i}": 0.0 for i in range(220)})).text


def test_a_prompt_completes_keys_of_all_levels() -> None:
    td = TensorDict({"a": 1.0, "n": {"b": 2.0}, "s": "text"})
    assert td._ipython_key_completions_() == ["a", "n", ("n", "b"), "s"]
