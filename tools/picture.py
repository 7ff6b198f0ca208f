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
.page { fill: #ffffff }
.large { font-size: 15px }
.heading { font: 700 17px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #0f172a }
.caption { font: 14px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #64748b }
.number { font-size: 14px; fill: #1e3a8a }
.key { font-size: 15px; font-weight: 600; fill: #065f46 }
.result { font-weight: 600; fill: #1d4ed8 }
.good { font: 600 15px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #047857 }
.input { fill: #ecfdf5; stroke: #059669; stroke-width: 1.6 }
.panel { fill: #f8fafc; stroke: #e2e8f0; stroke-width: 1.2 }
""".strip()
# For readers who chose a dark page; the second part restyles pictures of key graphs.
DARK = """
@media (prefers-color-scheme: dark) {
text { fill: #cbd5e1 }
.title, .heading { fill: #f1f5f9 }
.note, .caption { fill: #94a3b8 }
.box, .pad, .port { fill: #1e293b; stroke: #64748b }
.batch { fill: #1e3a8a; stroke: #60a5fa }
.rest { fill: #334155; stroke: #64748b }
.edge { stroke: #94a3b8 }
.tip { fill: #94a3b8 }
.page { fill: #111827 }
.number { fill: #dbeafe }
.key, .input-key, .good { fill: #6ee7b7 }
.input { fill: #064e3b; stroke: #34d399 }
.panel { fill: #0f172a; stroke: #334155 }
.head { fill: #334155 }
.output { fill: #60a5fa; stroke: #60a5fa }
.output-key, .result { fill: #93c5fd }
.dead .box, .dead .head { fill: #172033; stroke: #475569 }
.dead text { fill: #64748b }
.dead .port, .edge.dead { stroke: #475569 }
}
""".strip()
CELL, ROW = 26, 30


class Picture:
    """An SVG document that grows part by part; lengths are in pixels."""

    def __init__(self, width: int, height: int, page: bool = True) -> None:
        """Start a picture.

        Args:
            width: width of the picture.
            height: height of the picture.
            page: whether a background is drawn.
        """
        self.width, self.height, self.page = width, height, page
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
            f'rx="{12 if kind == "panel" else 3}"/>'
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

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Draw a straight arrow, to the right or down."""
        across = to_y == y
        end = f"{to_x - 6:g} {to_y:g}" if across else f"{to_x:g} {to_y - 6:g}"
        wings = "-8 -5 v10 z" if across else "-5 -8 h10 z"
        self.parts.append(f'<path class="edge" d="M{x:g} {y:g} L{end}"/>')
        self.parts.append(f'<path class="tip" d="M{to_x:g} {to_y:g} l{wings}"/>')

    def pill(self, x: float, y: float, key: str) -> None:
        """Draw an input; `y` is its middle."""
        self.parts.append(
            f'<rect class="input" x="{x:g}" y="{y - 17:g}" width="72" height="34" rx="17"/>'
        )
        self.text(x + 36, y, key, "key", "middle")

    def svg(self) -> str:
        """Return the document."""
        size = f"{self.width} {self.height}"
        background = [f'<rect class="page" width="{self.width}" height="{self.height}" rx="10"/>']
        if not self.page:
            background = []
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
                f'width="{self.width}" height="{self.height}" role="img">',
                f"<style>{STYLE}\n{DARK}</style>",
                *background,
                *self.parts,
                "</svg>\n",
            ]
        )


def with_dark(svg: str) -> str:
    """Return the picture of a key graph with the colours of a dark page beside its own."""
    svg = svg.replace("</style>", f"\n{DARK}</style>", 1)
    return svg.replace('rx="10" fill="#ffffff"', 'rx="10" class="page" fill="#ffffff"', 1)


def write(pictures: Mapping[str, Callable[[], str]]) -> None:
    """Draw pictures and write them where the pages find them."""
    for name, draw in pictures.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
