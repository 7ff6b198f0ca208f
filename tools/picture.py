"""What pictures of the pages are drawn with: SVG documents that grow part by part."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

FOLDER = Path("docs/images")
STYLE = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #334155 }
.title { font-weight: 600; fill: #0f172a }
.note { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #64748b }
.box { fill: #ffffff; stroke: #94a3b8; stroke-width: 1.2 }
.batch { fill: #dbeafe; stroke: #2563eb }
.rest { fill: #f1f5f9; stroke: #94a3b8 }
.pad { fill: #ffffff; stroke: #94a3b8; stroke-dasharray: 4 3 }
.edge { fill: none; stroke: #64748b; stroke-width: 1.6 }
.tip { fill: #64748b }
""".strip()
CELL, ROW = 26, 30


class Picture:
    """An SVG document that grows part by part; lengths are in pixels."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """Write a line of text; `y` is its middle."""
        self.parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y + 4:g}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box") -> None:
        """Draw a rectangle by its upper left corner."""
        self.parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            'rx="3"/>'
        )

    def cells(self, x: float, y: float, texts: Sequence[str], kinds: Sequence[str]) -> None:
        """Draw a row of cells, each with a text; `y` is their middle."""
        for place, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
            left = x + CELL * place
            self.box(left, y - 11, CELL - 2, 22, kind)
            self.text(left + CELL / 2 - 1, y, text, anchor="middle")

    def leaf(self, x: float, y: float, sizes: Sequence[int], batch_dims: int) -> None:
        """Draw the sizes of a tensor, those of the batch in another color."""
        kinds = ["batch" if dim < batch_dims else "rest" for dim in range(len(sizes))]
        self.cells(x, y, [str(size) for size in sizes], kinds)

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Draw an arrow that ends to the right."""
        middle = (x + to_x) / 2
        self.parts.append(
            f'<path class="edge" d="M{x:g} {y:g} C{middle:g} {y:g} {middle:g} {to_y:g} '
            f'{to_x - 6:g} {to_y:g}"/>'
            f'<path class="tip" d="M{to_x - 7:g} {to_y - 4:g} L{to_x:g} {to_y:g} '
            f'L{to_x - 7:g} {to_y + 4:g} Z"/>'
        )

    def svg(self) -> str:
        """Return the document."""
        size = f"{self.width} {self.height}"
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
                f'width="{self.width}" height="{self.height}" role="img">',
                f"<style>{STYLE}</style>",
                f'<rect width="{self.width}" height="{self.height}" rx="10" fill="#ffffff"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def write(pictures: Mapping[str, Callable[[], str]]) -> None:
    """Draw pictures and write them where the pages find them."""
    for name, draw in pictures.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
