"""From nothing to a verified artefact: train, select, export, verify, run unaided, draw."""

import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from network import build_network
from picture import draw_report
from scans import load_scans
from shipping import Shipped, score_eager, ship
from training import train

OUT = Path(__file__).parent / "out"
WRITTEN = (
    "digits.pt2",
    "digits.onnx",
    "digits_report.png",
    "keys_all.svg",
    "keys_selected.svg",
)
console = Console()


def main() -> None:
    """Run the whole example."""
    console.print(f"{(__doc__ or '').splitlines()[0]} Takes about 1 min.", highlight=False)
    start = time.perf_counter()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    OUT.mkdir(exist_ok=True)
    network = build_network()
    training_scans, held_out = load_scans()
    console.print(f"[bold]{len(training_scans)}[/] scans to train on, {len(held_out)} held out")
    console.print(network.key_graph().summary(), highlight=False)
    history = train(network, training_scans)

    network.eval()
    network.key_graph().to_svg(OUT / "keys_all.svg")
    network.select_out_keys("logits", ("out", "image"))
    network.key_graph().to_svg(OUT / "keys_selected.svg")
    eager = score_eager(network, held_out)
    rows = [eager]
    for form in ("pt2", "onnx"):
        with console.status(f"exporting and verifying .{form}"):
            row, report = ship(network, held_out, eager, OUT / f"digits.{form}")
        console.print(f"\n[bold]digits.{form}[/] beside the network, in the runtime of the file")
        console.print(report, highlight=False)
        rows.append(row)
    draw_report(OUT / "digits_report.png", held_out, rows[-1], history)
    console.print(table_of(rows))
    for name in WRITTEN:
        console.print(f"wrote {OUT / name}", highlight=False)
    console.print(f"took {time.perf_counter() - start:.0f} s", highlight=False)
    worst = min(row.accuracy for row in rows)
    if worst <= 0.97:
        raise SystemExit(f"accuracy {worst:.1%} is not above 97 %")


def table_of(rows: list[Shipped]) -> Table:
    """Return the table of the network in this process and of each file in a process of its own."""
    table = Table(title="360 held-out scans, each file alone in a process without kd")
    for name in ("format", "size", "largest difference", "time per call", "accuracy"):
        table.add_column(name, justify="left" if name == "format" else "right")
    for row in rows:
        table.add_row(
            row.form,
            f"{row.bytes / 1024:.0f} KB",
            f"{row.difference:.1e}",
            f"{row.seconds * 1e6:.0f} us",
            f"{row.accuracy:.2%}",
        )
    return table


if __name__ == "__main__":
    main()
